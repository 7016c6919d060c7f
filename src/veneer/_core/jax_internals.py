"""Every private JAX name that veneer uses, and every difference between JAX versions.

No other module imports `jax._src`, but for `jax_hijax`, which has the names that high types need.
What is public is taken from its public place, but for jax.extend.core: importing that imports
Pallas, which takes as long as all of our modules. A shim names the version it is for, so that it
can be deleted.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax._src import array, core, custom_batching, dispatch, source_info_util, traceback_util
from jax._src import linear_util as lu
from jax._src import xla_metadata as xla_metadata  # for its primitive, which we name
from jax._src.ad_util import SymbolicZero, Zero
from jax._src.config import trace_context
from jax._src.core import Primitive, jaxpr_as_fun
from jax._src.export._export import deserialization_registry
from jax._src.interpreters.batching import BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTracer, convert_constvars_jaxpr
from jax._src.lax import special
from jax._src.lax.control_flow import solves
from jax._src.sharding_impls import UNSPECIFIED, parse_flatten_op_sharding
from jax.export import register_pytree_node_serialization
from jax.sharding import PartitionSpec

__all__ = [
    "UNKNOWN_LINE",
    "UNSPECIFIED",
    "ConcreteArray",
    "CustomRoot",
    "Primitive",
    "RootLinearMap",
    "Trace",
    "Tracer",
    "bind_scan",
    "call_bwd",
    "close_jaxpr",
    "contained_jaxpr",
    "current_trace",
    "equation_line",
    "find_primitive",
    "flat_tree",
    "hide_frames_of",
    "inlines_early",
    "is_eager",
    "is_zero",
    "jaxpr_as_fun",
    "known_entries",
    "lowered_with_devices",
    "mapped_axis",
    "open_jaxpr",
    "register_serialization",
    "reset_stores",
    "scan_counts",
    "set_current_trace",
    "spec_over",
    "special_function",
    "structure_of_operands",
    "swap_trace",
    "trace_context",
    "transform_flat_function",
    "user_line",
    "user_place",
    "vary_together",
    "varying_axes",
]

ConcreteArray = array.ArrayImpl
Trace = core.Trace
Tracer = core.Tracer
set_current_trace = core.set_current_trace


def current_trace() -> Trace:
    """The trace that a primitive bound here would be processed by."""
    return core.trace_ctx.trace


def swap_trace(trace: Any) -> Any:
    """Makes a trace current and returns the one that was: a faster `set_current_trace`."""
    context = core.trace_ctx
    previous = context.trace
    context.set_trace(trace)
    return previous


def is_zero(x: Any) -> bool:
    """Whether an array is known to be zero: a concrete one, or a traced one made of zeros."""
    entries = known_entries(x)
    return entries is not None and not entries.any()


def known_entries(x: Any) -> np.ndarray | None:
    """The values among the entries of an array, or None if they are not known.

    Those of a concrete array, or of the one of which a traced array is made by copies alone.
    """
    if isinstance(x, DynamicJaxprTracer):
        if isinstance(x.val, core.Literal):
            return known_entries(x.val.val)
        made: Any = x.parent
        if made is None:
            return None
        if made.primitive.name in _NEVER_READ:
            return np.zeros(())
        entries = known_entries(made.in_tracers[0]) if made.primitive.name in _COPIES else None
        return None if entries is None else entries.astype(x.dtype)
    if isinstance(x, Tracer) or jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.extended):
        return None
    return np.asarray(x)


_COPIES = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}  # two copies
_NEVER_READ = {"empty", "empty2"}  # what a branch gives for a residual of another


def mapped_axis(x: Any) -> Any:
    """The axis that `jax.vmap` has just taken off an array, or None if it has taken none."""
    return x.batch_dim if isinstance(x, BatchTracer) else None


def is_eager() -> bool:
    """Whether a primitive bound here would be computed at once."""
    return type(core.trace_ctx.trace) is core.EvalTrace


def inlines_early(inline: Any) -> bool:
    """Whether JAX traces a jit with this `inline` parameter as its body, and not as a call."""
    if hasattr(jax, "Inline"):  # JAX >= 0.11
        return inline is jax.Inline.JAX_EARLY
    return inline


# Primitives by name. All those of the modules that JAX has imported, for it lists a part of them
# in jax.lax and jax.extend.core.primitives, and importing the latter takes as long as all of ours.

_primitives: dict[str, Primitive] = {}


def _find_primitives() -> dict[str, Primitive]:
    found: dict[str, Primitive] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src."):
            for attribute, value in vars(module).items():
                if attribute.endswith("_p") and isinstance(value, Primitive):
                    found[attribute.removesuffix("_p")] = value
    return found | {p.name: p for p in found.values()}


def find_primitive(name: str) -> Primitive:
    """The JAX primitive of this name: as jaxprs print it, or as `jax.lax.<name>_p`."""
    if name not in _primitives:
        _primitives.update(_find_primitives())
    try:
        return _primitives[name]
    except KeyError:
        close = " or ".join(map(repr, difflib.get_close_matches(name, _primitives)))
        raise ValueError(
            f"no primitive named {name!r} is known"
            + (f"; did you mean {close}? " if close else ". ")
            + "One of another library can be passed as an object."
        ) from None


# Jaxprs. Up to JAX 0.11 a jaxpr with its constants is a ClosedJaxpr; from 0.12 it is a Jaxpr.


def close_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without constants, as `jaxpr_as_fun` takes it."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr as one that takes its constants first, and those constants."""
    return convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def contained_jaxpr(params: dict[str, Any]) -> Any:
    """The jaxpr that a call of it holds in its parameters, whose name JAX 0.12 changed in some."""
    return params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]


def bind_scan(
    consts: list[Any],
    carry: list[Any],
    xs: list[Any],
    *,
    jaxpr: Any,
    length: int,
    params: dict[str, Any],
) -> list[Any]:
    """Binds `scan` with another jaxpr and other operands, and else as it was bound with `params`.

    Not by `jax.lax.scan`, which compiles a loop run eagerly anew for each function it is given.
    """
    params = {**params, "jaxpr": jaxpr, "length": length}
    if "num_consts" in params:  # JAX < 0.12
        params |= {"num_consts": len(consts), "num_carry": len(carry)}
    else:
        from jax._src import flattree as ft

        parts = [ft.nones(len(part)) for part in (consts, carry, xs)]
        ys = ft.nones(len(jaxpr.out_avals) - len(carry))
        params |= {"ft_in": ft.pack(tuple(parts)), "ft_out": ft.pack((ft.nones(len(carry)), ys))}
    return find_primitive("scan").bind(*consts, *carry, *xs, **params)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a `scan`."""
    if "num_consts" in params:  # JAX < 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def special_function(name: str) -> Callable[..., Any]:
    """The function of `jax.lax` that JAX lowers a primitive such as igamma to."""
    return getattr(special, f"{name}_impl")


# Functions with custom derivatives reach a trace as `WrappedFun`s: flat functions, with stores
# that their caller reads once they have run.


def transform_flat_function(
    function: lu.WrappedFun, transform: Callable[[Callable], Callable]
) -> lu.WrappedFun:
    """`transform` applied to a flat function that has yet to be called."""

    def transformed(inner: Callable, *args: Any) -> Any:
        return transform(inner)(*args)

    return lu.transformation2(transformed)(function)


def reset_stores(function: lu.WrappedFun) -> None:
    """Lets a flat function run once more: a store may be filled only once."""
    for store in function.stores:
        if store is not None:
            store.reset()


def call_bwd(bwd: lu.WrappedFun, residuals: Sequence, cotangents: Sequence) -> list[Any]:
    """Runs the backward function of a `custom_vjp`: a cotangent, or None for zero, an operand."""
    out = bwd.call_wrapped(*residuals, *cotangents)
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], list):  # JAX >= 0.12
        out, logs = out
        if logs:
            raise NotImplementedError(
                "custom_vjp functions that log (defvjp_with_logs) cannot take implicit arrays yet; "
                "call vn.materialise on the operands first."
            )
    return [None if isinstance(ct, Zero | SymbolicZero) else ct for ct in out]


# The function of a shard_map returns a tree of JAX's own, with the specs of its leaves beside it.

try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes along which an array inside a shard_map may differ, by its type."""
    return jax.typeof(x).mat.varying


def vary_together(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that vary along the same manual axes: those along which any of them does.

    As JAX has the operands of its own primitives, where a shard_map keeps account of that.
    """
    axes = [varying_axes(x) for x in arrays]
    union = frozenset[str]().union(*axes)
    pvary = find_primitive("pvary")
    return [
        pvary.bind(x, axes=tuple(sorted(union - own))) if own != union else x
        for x, own in zip(arrays, axes, strict=True)
    ]


def spec_over(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """The spec of a sharding that the partitioner has found; an empty one where there is none.

    It may cut along a part of an axis of the mesh, which no spec says.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # of several types, and some by mistake: a KeyError for a part of an axis
        return PartitionSpec()


def lowered_with_devices(primitive: Primitive) -> None:
    """Has a primitive of ours told of the devices as it is lowered."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


class _Absent:
    """A class of a later JAX."""


# The high primitives of custom_root, which before JAX 0.12 is a function with a custom_jvp.
CustomRoot: Any = getattr(solves, "CustomRoot", _Absent)
RootLinearMap: Any = getattr(solves, "_RootLinearMap", _Absent)


def structure_of_operands(tree: Any) -> Any:
    """The structure of a tree as a `custom_vmap` holds it, in a registry apart from JAX 0.12 on."""
    registry = getattr(custom_batching, "tracing_registry", None)
    return registry.flatten(tree)[1] if registry else jax.tree.structure(tree)


# Exported programs.


def register_serialization(
    cls: type,
    name: str,
    serialize: Callable[[Any], bytes],
    deserialize: Callable[[bytes], Any],
    from_children: Any,
) -> None:
    """Registers a pytree class for `jax.export`, in the place of one of the same name, if any.

    JAX refuses a name that it knows: that of a class defined anew in a notebook, say.
    """
    deserialization_registry.pop(name, None)
    register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=serialize,
        deserialize_auxdata=deserialize,
        from_children=from_children,
    )


# The user's place in the program.


def hide_frames_of(package: Path) -> None:
    """Leaves a package's frames out of the source lines that JAX records for the user's code."""
    source_info_util.register_exclusion(str(package))
    traceback_util.register_exclusion(str(package))


def user_line() -> str:
    """`file:line (function)` of the user's code that is being traced.

    The line that JAX recorded, if it did; within a function that JAX has traced before it did
    not, and the line is that of the call.
    """
    recorded = source_info_util.user_frame(source_info_util.current().traceback)
    if recorded is not None:
        return f"{recorded.file_name}:{recorded.start_line} ({recorded.function_name})"
    frame = _user_frame()
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


#: What `equation_line` gives where there is no line of the user's.
UNKNOWN_LINE = "unknown"


def equation_line(source_info: Any) -> str:
    """`file:line (function)` of the user's code that an equation of a jaxpr was traced from."""
    frame = source_info_util.user_frame(source_info.traceback)
    if frame is None:
        return UNKNOWN_LINE
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def user_place() -> tuple[str, int]:
    """File and line of the user's call that is running."""
    frame = _user_frame()
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("<unknown>", 0)


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
