"""What the mode of high types changes in JAX, and how it is restored."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax

from .._jax.hijax import (
    FlatTree,
    ad_checkpoint,
    api,
    conditionals,
    core,
    custom_derivatives,
    dtypes,
    jax_shard_map,
    loops,
    pe,
)
from .._jax.primitives import Primitive, find_primitive
from .._jax.tracing import Trace, set_current_trace
from .typed_results import Results, open_results

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
    bind: Callable[[Primitive, Sequence[Any], dict[str, Any]], Any],
    brought_in: Callable[[Trace, Sequence[Any]], Sequence[Any]],
    types: dict[type, Callable[[Any], Any]],
    canonical: dict[type, Callable[[Any], Any]],
    as_array: tuple[type, Callable[[Any], Any]],
    dense: Callable[[Any], Any],
    whole: Callable[[Any], Any],
    loop_body: Callable[[Callable, Any], Callable],
    branch: Callable[[Callable, Any], Callable],
    shard_map: tuple[Callable[[Callable], Callable], Callable[[Callable], Callable]],
    shell: type,
    results: Results,
) -> Patches:
    """What the mode changes in JAX.

    **Arguments:**

    - `high_type`: the class of our types.
    - `bind`: what a primitive does that meets one, in the place of `bind_with_trace`; and
      `brought_in` its operands as a trace can take them.
    - `types`: what gives the type of a value, by its class, and `canonical` what gives a primitive
      something else for it.
    - `as_array`: a class, and the property by which `jax.numpy` takes its values for arrays.
    - `dense`: a type as that of the dense array.
    - `whole`: the arguments of a derivative, with a value that has one tangent as one leaf.
    - `loop_body`, `branch`: the function of a loop or of a branch, given the types that it takes,
      as it is to be traced.
    - `shard_map`: how a function of blocks is made, and how its primitive is bound, given how JAX
      does it.
    - `shell`: the class of values as leaves.
    - `results`: what users get for those, and for results of high types.
    """
    found = Patches()
    for cls, type_of in types.items():
        found.item(core.pytype_aval_mappings, cls, type_of)
    for cls, handler in canonical.items():
        found.canonical(cls, handler)
    cls, method = as_array
    found.attribute(cls, "__jax_array__", lambda _: property(method))
    met = partial(_bind, high_type=high_type, bind=bind, brought_in=brought_in)
    found.attribute(core.Primitive, "bind_with_trace", met)
    found.attribute(api, "argnums_partial2", lambda own: _whole_arguments(own, whole))
    trees = "FlatTree" if hasattr(api, "FlatTree") else "ft"  # JAX < 0.12, or not
    found.attribute(api, trees, lambda own: _Flattening(own, whole))
    _expose(found, shell, results.exposed)
    open_results(found, results)
    # JAX infers no length of a scan over high types.
    found.attribute(loops, "_infer_scan_length", lambda own: _scan_length(own, dense))
    found.attribute(loops, "pe", lambda own: _Tracing(own, loop_body))
    found.attribute(conditionals, "pe", lambda own: _Tracing(own, branch))
    make, bind_blocks = shard_map
    found.attribute(jax_shard_map, "_shard_map", make)
    found.attribute(type(find_primitive("shard_map")), "bind_with_trace", bind_blocks)
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


def _calls(own: Callable, exposed: Callable[[Any], Any]) -> Callable:
    return lambda *args, **kwargs: jax.tree.map(exposed, own(*args, **kwargs))


def _unflatten(own: Callable, exposed: Callable[[Any], Any]) -> Callable:
    return lambda treedef, leaves: own(treedef, map(exposed, leaves))


def _scan_length(own: Callable, dense: Callable[[Any], Any]) -> Callable:
    return lambda xs, avals, length: own(xs, list(map(dense, avals)), length)


def _bind(own: Any, high_type: type, bind: Callable, brought_in: Callable) -> Callable:
    """As little as can be: every primitive is bound so, of programs without high types too."""

    def met(self: Any, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        args = brought_in(trace, args)
        if self.name in _TAKE_HIGH_TYPES:
            return own(self, trace, args, avals, params)
        with set_current_trace(trace):
            return bind(self, args, params)

    def around(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:
            if type(aval) is high_type:
                return met(self, trace, args, avals, params)
        return own(self, trace, args, avals, params)

    def in_place(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:
            if type(aval) is high_type:
                return met(self, trace, args, avals, params)
        if self.is_high(*avals, **params) and trace.requires_low:
            with set_current_trace(trace):
                return self.to_lojax(*args, **params)
        return trace.process_primitive(self, args, params)

    # JAX's own is these last lines (0.10.2 to 0.12.0), and calling it costs what the check does.
    return in_place if own.__code__.co_names == _CALLED_BY_BIND else around


_CALLED_BY_BIND = ("is_high", "requires_low", "set_current_trace", "to_lojax", "process_primitive")


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
