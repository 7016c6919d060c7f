"""The private JAX names of high types: what `veneer.hijax` is built on.

Beside `jax_internals` the only file that imports `jax._src`, and apart from it so that a program
without high types does not import what those need.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
from jax._src import (
    ad_checkpoint,
    ad_util,
    api,
    core,
    custom_derivatives,
    dtypes,
    pjit,
    source_info_util,
)
from jax._src.hijax import HiType
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import conditionals, loops

from .jax_internals import Primitive, Trace, Tracer, find_primitive, set_current_trace

try:
    from jax._src.flattree import FlatTree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

__all__ = [
    "GradAccum",
    "HiType",
    "Patches",
    "Zero",
    "call_jvp_rule",
    "call_transpose_rule",
    "copy_shaped_array",
    "high_primitive",
    "holds_tracers",
    "patches",
    "print_as",
    "to_staged",
]

GradAccum = ad.GradAccum
Zero = ad_util.Zero


def copy_shaped_array(aval: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Gives an abstract value that is a ShapedArray by inheritance the attributes of one."""
    model = jax.core.ShapedArray(shape, dtype)
    for name in jax.core.ShapedArray.__slots__:
        if name != "__weakref__":
            object.__setattr__(aval, name, getattr(model, name))


def high_primitive(
    name: str,
    *,
    run: Callable[..., list[Any]],
    abstract_eval: Callable[..., tuple[list[Any], Any]],
    jvp: Callable[..., tuple[list[Any], list[Any]]],
    transpose: Callable[..., None],
    batch: Callable[..., tuple[list[Any], list[Any]]],
) -> Primitive:
    """A primitive of several results that lives above lowering, where `run` is in its place."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    vars(primitive)["is_high"] = lambda *avals, **params: True
    vars(primitive)["to_lojax"] = run
    primitive.def_effectful_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.fancy_transposes[primitive] = transpose

    def batcher(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
        named = axis.name is not None and axis.name is not core.no_axis_name
        return batch(axis.size, axis.name if named else None, values, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batcher
    return primitive


def print_as(
    primitive: Primitive, named: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    """Has jaxprs show a primitive under the name and with the parameters that `named` gives."""

    def rule(eqn: Any, context: Any, settings: Any) -> Any:
        name, params = named(eqn.params)
        eqn = eqn.replace(primitive=Primitive(name), params=params)
        return core._pp_eqn(eqn, context, settings)

    core.pp_eqn_rules[primitive] = rule


def call_jvp_rule(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """What JAX's own derivative rule of a primitive gives: results and their tangents."""
    rule = ad.primitive_jvps.get(primitive)
    if rule is None:
        raise NotImplementedError(f"JAX has no derivative rule for {primitive.name}")
    out, out_tangents = rule(primals, tangents, **params)
    if primitive.multiple_results:
        return list(out), list(out_tangents)
    return [out], [out_tangents]


def call_transpose_rule(
    primitive: Primitive, cotangents: Sequence[Any], operands: Sequence[Any], params: dict[str, Any]
) -> None:
    """Runs JAX's own transpose rule of a primitive: linear operands are accumulators."""
    cts: Any = list(cotangents) if primitive.multiple_results else cotangents[0]
    if primitive in ad.fancy_transposes:
        ad.fancy_transposes[primitive](cts, *operands, **params)
        return
    rule = ad.get_primitive_transpose(primitive)
    undefined = [ad.UndefinedPrimal(x.aval) if isinstance(x, GradAccum) else x for x in operands]
    for x, ct in zip(operands, rule(cts, *undefined, **params), strict=True):
        if isinstance(x, GradAccum):
            x.accum(ct)


# Patches: an owner, a name or a key, and what takes its place.

_ABSENT = object()


_handlers: dict[type, Callable[[Any], Any] | None] = {}


def _canonical(cls: type, x: Any) -> Any:
    handler = _handlers[cls]
    if handler is None:
        raise dtypes.InvalidInputException(
            f"Argument '{x}' of type {type(x)} is not a valid JAX type."
        )
    return handler(x)


class Patches:
    """Attributes and items of JAX's, to be set and restored exactly."""

    def __init__(self) -> None:
        self._changes: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def attribute(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """An attribute in the place of another, from which it is made; None if there is none."""
        before = vars(owner).get(name, _ABSENT)
        after = make(None if before is _ABSENT else before)
        undo = partial(delattr, owner, name)
        if before is not _ABSENT:
            undo = partial(setattr, owner, name, before)
        self._changes.append((partial(setattr, owner, name, after), undo))

    def item(self, owner: dict, key: Any, value: Any) -> None:
        """An item that a dict does not have."""
        self._changes.append((partial(owner.__setitem__, key, value), partial(owner.pop, key)))

    def canonical(self, cls: type, handler: Callable[[Any], Any]) -> None:
        """What primitives are given for the values of a class.

        JAX keeps that in C++ and forgets none, so one handler stays, which asks here for another
        and without one refuses a value as JAX does.
        """
        if cls not in _handlers:
            dtypes.register_canonicalize_value_handler(cls, partial(_canonical, cls))
        change = partial(_handlers.__setitem__, cls)
        self._changes.append((partial(change, handler), partial(change, None)))

    def apply(self) -> None:
        """Sets all of them."""
        for do, _ in self._changes:
            do()

    def undo(self) -> None:
        """Restores all of them."""
        for _, undo in reversed(self._changes):
            undo()


def patches(
    *,
    high_type: type,
    bind: Callable[[Primitive, Trace, Sequence[Any], dict[str, Any]], Any],
    types: dict[type, Callable[[Any], Any]],
    canonical: dict[type, Callable[[Any], Any]],
    as_array: tuple[type, Callable[[Any], Any]],
    dense: Callable[[Any], Any],
    whole: Callable[[Any], Any],
    loop_body: Callable[[Callable, Any], Callable],
    branch: Callable[[Callable, Any], Callable],
    shell: type,
    exposed: Callable[[Any], Any],
) -> Patches:
    """What the mode changes in JAX.

    **Arguments:**

    - `high_type`: the class of our types.
    - `bind`: what a primitive does that meets one, in the place of `bind_with_trace`.
    - `types`: what gives the type of a value, by its class, and `canonical` what gives a primitive
      something else for it.
    - `as_array`: a class, and the property by which `jax.numpy` takes its values for arrays.
    - `dense`: a type as that of the dense array.
    - `whole`: the arguments of a derivative, with a value that has one tangent as one leaf.
    - `loop_body`, `branch`: the function of a loop or of a branch, given the types that it takes,
      as it is to be traced.
    - `shell`: the class of values as leaves, for which `exposed` gives what a user sees.
    """
    found = Patches()
    for cls, type_of in types.items():
        found.item(core.pytype_aval_mappings, cls, type_of)
    for cls, handler in canonical.items():
        found.canonical(cls, handler)
    cls, method = as_array
    found.attribute(cls, "__jax_array__", lambda _: property(method))
    found.attribute(core.Primitive, "bind_with_trace", lambda own: _bind(own, high_type, bind))
    found.attribute(api, "argnums_partial2", lambda own: _whole_arguments(own, whole))
    trees = "FlatTree" if hasattr(api, "FlatTree") else "ft"  # JAX < 0.12, or not
    found.attribute(api, trees, lambda own: _Flattening(own, whole))
    _expose(found, shell, exposed)
    # JAX infers no length of a scan over high types.
    found.attribute(loops, "_infer_scan_length", lambda own: _scan_length(own, dense))
    found.attribute(loops, "pe", lambda own: _Tracing(own, loop_body))
    found.attribute(conditionals, "pe", lambda own: _Tracing(own, branch))
    found.attribute(find_primitive("remat"), "to_lojax", lambda _: _run_checkpoint)
    return found


def _expose(found: Patches, shell: type, exposed: Callable[[Any], Any]) -> None:
    """Has the results that JAX hands to users hold values, and not what stands for them inside."""
    one = lambda x: exposed(x) if type(x) is shell else x

    def unflatten_values(own: Callable) -> Callable:
        return lambda self: own(self.map(one) if shell in map(type, self.vals) else self)

    found.attribute(FlatTree, "unflatten", unflatten_values)
    for module in (custom_derivatives, ad_checkpoint):
        found.attribute(module, "tree_unflatten", lambda own: _unflatten(own, one))
    found.attribute(api, "tree_unflatten", lambda own: _unflatten(own, exposed))
    for name in ("_jvp", "_lift_linearized"):
        found.attribute(api, name, lambda own: _calls(own, exposed))
    found.attribute(pjit, "_run_python_pjit", lambda own: _run_jit(own, exposed))


def _calls(own: Callable, exposed: Callable[[Any], Any]) -> Callable:
    return lambda *args, **kwargs: jax.tree.map(exposed, own(*args, **kwargs))


def _unflatten(own: Callable, exposed: Callable[[Any], Any]) -> Callable:
    return lambda treedef, leaves: own(treedef, map(exposed, leaves))


def _run_jit(own: Callable, exposed: Callable[[Any], Any]) -> Callable:
    def run(call: Any, *args: Any) -> Any:
        outs, *more = own(_lowered(call), *args)
        if any(aval.is_high for aval in call.params["jaxpr"].out_avals):
            outs = jax.tree.map(exposed, outs)
        return outs, *more

    return run


def _lowered(call: Any) -> Any:
    """A call of a jitted function of which only intermediate values are high, without those.

    So that C++ may call what is compiled. JAX 0.12 does so itself.
    """
    closed = call.params["jaxpr"]
    inner = getattr(closed, "jaxpr", closed)
    high = any(aval.is_high for aval in (*closed.in_avals, *closed.out_avals))
    if high or not inner.is_high or inner is closed or not core.trace_state_clean():
        return call
    return call._replace(params={**call.params, "jaxpr": pe.lower_jaxpr2(closed)})


def _scan_length(own: Callable, dense: Callable[[Any], Any]) -> Callable:
    return lambda xs, avals, length: own(xs, list(map(dense, avals)), length)


def _bind(own: Callable, high_type: type, bind: Callable) -> Callable:
    def bind_with_trace(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:  # of every primitive that is bound: as little as can be
            if type(aval) is high_type:
                if self.name in _TAKE_HIGH_TYPES:
                    break
                with set_current_trace(trace):
                    return bind(self, trace, args, params)
        return own(self, trace, args, avals, params)

    return bind_with_trace


#: Our own primitive, and those of JAX's that take operands of high types themselves.
_TAKE_HIGH_TYPES = frozenset(
    "high jit scan while cond checkpoint remat2 custom_jvp_call custom_vjp_call custom_lin "
    "remat_opt core_call "
    "closed_call call_hi_primitive call_hi_primitive_linearized program_order run_state ref "
    "empty_ref get swap freeze accum_grad_in_ref addupdate".split()
)


def _whole_arguments(own: Callable, whole: Callable[[Any], Any]) -> Callable:
    def argnums_partial2(*args: Any) -> Any:
        function, dynamic = own(*args)
        return function, whole(dynamic)

    return argnums_partial2


class _Tracing:
    """JAX's functions that trace, as its loops and branches use them."""

    def __init__(self, own: Any, prepared: Callable[[Callable, Any], Callable]):
        self._own, self._prepared = own, prepared

    def trace_to_jaxpr(self, function: Any, in_avals: Any, *args: Any, **kwargs: Any) -> Any:
        return self._own.trace_to_jaxpr(
            self._prepared(function, in_avals), in_avals, *args, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _Flattening:
    """JAX's functions of flat trees, as `jax.vjp`, `jvp` and `linearize` use them."""

    def __init__(self, own: Any, whole: Callable[[Any], Any]):
        self._own, self._whole = own, whole

    def flatten(self, tree: Any, *args: Any, **kwargs: Any) -> Any:
        return self._own.flatten(self._whole(tree), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _run_checkpoint(*args: Any, jaxpr: Any, **params: Any) -> list[Any]:
    """A checkpoint lowered. JAX's own (0.10.2 to 0.12.0) returns the leaves of high results."""
    closed: Any = pe.close_jaxpr(jaxpr) if hasattr(pe, "close_jaxpr") else jaxpr  # JAX < 0.12
    lowered: Any = pe.lower_jaxpr2(closed)
    pairs = zip(jaxpr.invars, args, strict=True)
    leaves = [leaf for v, x in pairs for leaf in v.aval.lower_val(x)]
    opened = getattr(lowered, "jaxpr", lowered)
    out = iter(
        find_primitive("remat").bind(
            *lowered.consts, *leaves, jaxpr=pe.convert_constvars_jaxpr(opened), **params
        )
    )
    avals = [v.aval for v in jaxpr.outvars]
    return [aval.raise_val(*islice(out, len(aval.lo_ty()))) for aval in avals]


def holds_tracers(leaves: Sequence[Any]) -> bool:
    """Whether any of the leaves is traced."""
    return any(isinstance(x, Tracer) for x in leaves)


def to_staged(x: Any) -> Any:
    """A result as a tracer where it is lowered, which JAX < 0.12 wants of a constant too."""
    trace = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and hasattr(x, "dtype") and isinstance(x, jax.Array):
        return trace.to_jaxpr_tracer(x, source_info_util.current())
    return x
