"""Look up primitives, evaluate jaxprs, bind scans, read shardings, and set lowering rules."""

import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core, dispatch, source_info_util
from jax._src import xla_metadata as xla_metadata  # defines a primitive that we look up
from jax._src.core import Primitive as Primitive
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.interpreters import mlir
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
from jax._src.lax import special
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.util import split_list as split_list
from jax.sharding import PartitionSpec

# The function that JAX's shard_map runs returns a FlatTree of results, with their specs.
try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten

# A dict from names to the primitives of all imported modules. jax.lax lists only some of them.
_primitives: dict[str, Primitive] = {}


def _find_primitives() -> dict[str, Primitive]:
    """Return a dict from names to the primitives of all imported modules of JAX.

    A primitive has a printed name (in jaxprs) and an attribute name (`neg` for `jax.lax.neg_p`). A
    printed name takes precedence over an attribute name. If two primitives still share a name, the
    first that was imported wins: in JAX 0.12, Pallas for Mosaic GPU has its own `reduce_min_p`.
    """
    printed: dict[str, Primitive] = {}
    attributes: dict[str, Primitive] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src."):
            for attribute, value in vars(module).items():
                if attribute.endswith("_p") and isinstance(value, Primitive):
                    printed.setdefault(value.name, value)
                    attributes.setdefault(attribute.removesuffix("_p"), value)
    return attributes | printed


def find_primitive(name: str) -> Primitive:
    """Return the JAX primitive that jaxprs print as `name`, or that is `jax.lax.<name>_p`.

    **Raises:** `ValueError` with similar names if no imported module has such a primitive.
    """
    if name not in _primitives:
        _primitives.update(_find_primitives())
    try:
        return _primitives[name]
    except KeyError:
        public = [known for known in _primitives if not known.startswith("_")]
        similar = " or ".join(map(repr, difflib.get_close_matches(name, public, cutoff=0.75)))
        raise ValueError(
            f"no primitive named {name!r} is known"
            + (f"; did you mean {similar}? " if similar else ". ")
            + "jax.make_jaxpr(f)(x) shows the primitives of a function. One of another library can "
            "be passed as an object, and so can a function that jax.jit has made."
        ) from None


def get_special_implementation(name: str) -> Callable[..., Any]:
    """Return the function by which JAX lowers the primitive `name`, a special function.

    It computes, for example, `igamma` by other primitives.
    """
    return getattr(special, f"{name}_impl")


def get_sparse_implementation(name: str) -> Callable[..., Any]:
    """Return the function by which JAX lowers the primitive `name` of `jax.experimental.sparse`.

    It computes, for example, `bcoo_dot_general` by other primitives.
    """
    from jax.experimental.sparse import bcoo

    return getattr(bcoo, f"_{name}_impl")


# Jaxprs. Up to JAX 0.11 a jaxpr with its constants is a ClosedJaxpr; from 0.12 it is a Jaxpr.


def close_jaxpr(jaxpr: Any) -> Any:
    """Return an open or closed jaxpr as a closed jaxpr. An open jaxpr must have no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """Return a pair: an open jaxpr, and the list of the constants of the closed jaxpr `closed`.

    The open jaxpr takes the constants as its first inputs.
    """
    return convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def contained_jaxpr(params: dict[str, Any]) -> Any:
    """Return the jaxpr in `params`, the parameters of a primitive such as `closed_call`."""
    return params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]  # JAX >= 0.12


def constants_in(jaxpr: Any) -> Iterator[Any]:
    """Yield the constants of a jaxpr and of the jaxprs in its equations."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            if hasattr(value, "eqns"):
                yield from constants_in(value)


# For each jaxpr, whether it contains a primitive with a name.
_contained_names: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


def is_or_contains(primitive: Primitive, params: dict[str, Any], name: str) -> bool:
    """Return whether a primitive, or a primitive of a jaxpr in its `params`, has this name."""

    def contains(jaxpr: Any) -> bool:
        cache = _contained_names.setdefault(jaxpr, {})
        if name not in cache:
            cache[name] = any(is_or_contains(e.primitive, e.params, name) for e in jaxpr.eqns)
        return cache[name]

    return primitive.name == name or any(map(contains, core.jaxprs_in_params(params)))


def evaluate_jaxpr(
    jaxpr: Any, operands: Sequence[Any], run: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Evaluate a closed jaxpr by calling `run(equation, operands)` for each equation.

    `run` returns the results of the equation. It is called with the source line and the named
    scopes with which the equation was traced.
    """
    opened, constants = open_jaxpr(jaxpr)
    env = dict(zip(opened.invars, [*constants, *operands], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]
    for equation in opened.eqns:
        source = equation.source_info
        names = source_info_util.current_name_stack() + source.name_stack
        with (
            source_info_util.user_context(source.traceback, name_stack=names),
            equation.ctx.manager,
        ):
            results = run(equation, [read(atom) for atom in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def is_inlined(params: dict[str, Any]) -> bool:
    """Return whether JAX inlines a `jit` with these parameters, while tracing or lowering it."""
    inline = params["inline"]  # a bool up to JAX 0.11, then a jax.Inline
    return inline is True or getattr(inline, "name", "").startswith("JAX_")


def inlines_early(inline: Any) -> bool:
    """Return whether JAX inlines a `jit` with this `inline` parameter while it traces."""
    return inline is jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else inline


# Slices and scans.


def start_in_bounds(start: Any, size: int, length: int = 1) -> jax.Array:
    """Clamp the start of a dynamic slice to the range from 0 to `size - length`.

    The primitive clamps in the same way: a negative start becomes 0.

    **Arguments:**

    - `start`: an integer of any dtype.
    - `size`: the size of the axis.
    - `length`: the size of the slice.

    **Returns:** an int32, or an integer in the dtype of `start` if `size - length` does not fit.
    """
    last_start, start = size - length, jnp.asarray(start)
    if not isinstance(last_start, int):  # a symbolic size, of an export
        return jnp.clip(start_in_bounds(start, jnp.iinfo(jnp.int32).max), 0, last_start)
    if last_start == 0:
        return jnp.zeros((), jnp.int32)
    # `jnp.clip` would first convert the bound to the dtype of `start`: in uint8, 299 becomes 43.
    bound = np.array(min(last_start, jnp.iinfo(start.dtype).max), start.dtype)
    start = lax.clamp(np.zeros_like(bound), start, bound)
    return start.astype(jnp.int32) if last_start <= jnp.iinfo(jnp.int32).max else start


def bind_scan(
    consts: list[Any],
    carry: list[Any],
    xs: list[Any],
    *,
    jaxpr: Any,
    length: int,
    params: dict[str, Any],
) -> list[Any]:
    """Bind `scan` with new operands and a new jaxpr, and the other parameters of `params`.

    Unlike `jax.lax.scan`, this does not compile an eager loop again for each new Python function.
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
    """Return the numbers of constants and of carried values among the operands of a `scan`."""
    if "num_consts" in params:  # JAX < 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# Execution and lowering.


def compile_when_eager(primitive: Primitive) -> None:
    """Set the implementation of a new primitive outside of `jax.jit`: compile it and run it."""

    @lru_cache(maxsize=1024)
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable:
        return jax.jit(partial(primitive.bind, **dict(params)))

    @primitive.def_impl
    def run(*arrays: Any, **params: Any) -> Any:
        # Compile also under `jax.disable_jit`, as JAX does for its own primitives.
        with jax.disable_jit(False):
            return compiled(tuple(params.items()))(*arrays)


def require_devices_for_lowering(primitive: Primitive) -> None:
    """Let JAX pass the devices of the program to the lowering rule of a primitive."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def wrap_lowering(primitive: Primitive, platform: str, rule: Callable[..., Any]) -> None:
    """Replace the lowering rule of a primitive on a platform, such as "cpu".

    JAX then calls `rule(former_rule, ctx, *operands, **params)`.
    """
    former = mlir._platform_specific_lowerings[platform].get(primitive)
    former = former or mlir._lowerings[primitive]
    mlir.register_lowering(primitive, partial(rule, former.rule), platform=platform)


def find_partition_spec(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """Convert a sharding that XLA's partitioner chose to a `PartitionSpec` for a mesh.

    `ndim` is the rank of the sharded array. The result is an empty spec if no spec can express the
    sharding. For example, the partitioner can split an array over a part of a mesh axis.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # JAX raises errors of several types, such as KeyError for a part of an axis
        return PartitionSpec()
