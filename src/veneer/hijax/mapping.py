"""Mapped functions of implicit arrays: `jax.vmap`, `pmap`, `lax.scan`, `map`, `associative_scan`.

JAX maps over the leaves of a pytree. This is correct if every leaf has the batch axis. Otherwise
the axis is an axis of the dense array: the rules move it to the front, and a value whose leaves
still have no batch axis is materialized and reported.
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import derivatives_error
from .._core.event import Operands
from .._core.policy import report_materialised
from .._core.value import Value, describe, has_all_leaves, is_value, make_dense, source_of
from .._jax.primitives import Primitive, find_primitive
from .mode import is_enabled
from .operations import VMAP, Materialise, MoveAxis, Select, stacked
from .types import (
    HighType,
    StructuredType,
    TangentType,
    as_typed_operand,
    can_be_stacked,
    has_leading_batch_axes,
    is_complete,
    is_typed,
)
from .types import type_of as type_of_value
from .values import apply, expose, has_derivatives, value_of, within_rule

# Derivatives.


def reject_marked_arguments(function: Callable) -> Callable:
    """Wrap a loop or a conditional of JAX, to reject marked derivatives in a user's rule."""

    @wraps(function)
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        reject_marked(function.__name__, (args, kwargs))
        return function(*args, **kwargs)

    return of_arrays


def reject_marked(name: str, x: Any) -> None:
    """Raise an error if a user's rule is running and `x` has marked derivatives."""
    if within_rule.value and has_derivatives(x):
        raise derivatives_error(name)


# Axes of values.

#: Whether `jax.vmap` maps over the leaves of implicit arrays. `map_derivatives` sets this for
#: Jacobians, whose derivatives have one more axis on each leaf.
maps_leaves = jax.make_user_context(False)


def map_whole_values(is_vmappable: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap JAX's predicate for objects that `jax.vmap` does not flatten. Add implicit arrays.

    If `maps_leaves` is set, do not add them. Otherwise, raise an error for marked derivatives.
    """

    def is_whole(x: Any) -> bool:
        if not maps_leaves.value:
            reject_marked("vmap", x)
        return is_vmappable(x) or (_is_array(x) and is_enabled() and not maps_leaves.value)

    return is_whole


def _is_array(x: Any) -> bool:
    return isinstance(x, Value) and is_complete(x)


def _is_implicit(x: Any) -> bool:
    return isinstance(value_of(x), Value) or is_typed(x)


def _type_of(x: Any) -> HighType:
    return x.aval if is_typed(x) else type_of_value(x)


def materialise_traced(primitive: Primitive, x: Any) -> Any:
    """Materialize an implicit array or a typed tracer, and report it under the current policy."""
    value = value_of(x)
    if isinstance(value, Value) and not any(map(is_typed, jax.tree.leaves(value))):
        return make_dense(primitive, [value])[0]
    t = _type_of(value)
    shown = describe([value]) if isinstance(value, Value) else (str(t),)
    nbytes = t.size * t.dtype.itemsize
    is_cache = isinstance(value, Value) and value.is_cache
    operands = Operands(shown, (source_of(value),), (nbytes,), (is_cache,))
    report_materialised(primitive.name, lambda: operands)
    return apply(Materialise(t), as_typed_operand(value) if isinstance(value, Value) else value)[0]


# `jax.vmap`.


def slice_argument(to_elt: Callable) -> Callable:
    """Wrap JAX's function that passes an argument of `vmap` to the mapped function."""

    def to_elt_of_any(trace: Any, get_idx: Any, x: Any, axis: Any) -> Any:
        if not isinstance(axis, int) or not _is_implicit(x) or not is_enabled():
            return to_elt(trace, get_idx, x, axis)
        axis %= x.ndim
        to = partial(to_elt_of_any, trace, get_idx)
        if has_leading_batch_axes(_type_of(x), axis + 1):
            if is_value(x):
                return jax.tree.map(lambda leaf: to(leaf, axis), x)
            return to_elt(trace, get_idx, x, axis)
        front = jnp.moveaxis(x, axis, 0) if axis else x
        if _is_implicit(front) and not has_leading_batch_axes(_type_of(front), 1):
            front = materialise_traced(VMAP, front)
        return to(front, 0)

    return to_elt_of_any


def stack_result(from_elt: Callable) -> Callable:
    """Wrap JAX's function that stacks a result of `vmap`, along an axis of the dense array."""

    def from_elt_of_any(
        trace: Any, size: Any, mesh_axis: Any, sum_match: bool, i: int, x: Any, axis: Any
    ) -> Any:
        one = lambda x, axis: _expose_first(from_elt(trace, size, mesh_axis, sum_match, i, x, axis))
        if not isinstance(x, Value) or not is_enabled():
            return one(x, axis)
        is_mapped = any(trace.to_batch_info(leaf)[1] is not None for leaf in jax.tree.leaves(x))
        if not isinstance(axis, int):
            return one(as_typed_operand(x), axis) if is_mapped else (x, None)
        if not can_be_stacked(_type_of(x)):
            raise TypeError(_not_stacked("vmap", _type_of(x)))
        stack = jax.tree.map(lambda leaf: one(leaf, 0)[0], x)
        return jnp.moveaxis(stack, 0, axis) if axis else stack, axis

    return from_elt_of_any


def _expose_first(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    return expose(pair[0]), pair[1]


def add_batch_axis(broadcast: Callable) -> Callable:
    """Wrap JAX's function that adds a batch axis to an unmapped value."""

    def broadcast_any(x: Any, size: int, axis: int, mesh_axis: Any) -> Any:
        t = jax.typeof(x)
        of = t.of if isinstance(t, TangentType) else t
        if not isinstance(of, HighType) or axis or not can_be_stacked(of):
            return broadcast(x, size, axis, mesh_axis)
        return stacked(x, size)

    return broadcast_any


def move_batch_axis(moveaxis: Callable) -> Callable:
    """Wrap JAX's function that moves the batch axis. Move the axis of each leaf of a tangent."""

    def move_any(x: Any, source: Any, destination: Any) -> Any:
        if source == destination or not isinstance(jax.typeof(x), TangentType):
            return moveaxis(x, source, destination)
        return apply(MoveAxis(source, destination), x)[0]

    return move_any


def select_values(select: Callable) -> Callable:
    """Wrap JAX's function that selects from the results of branches with a batched predicate.

    Values of one type are selected leaf by leaf, so that the result has the same type.
    """

    def select_any(which: Any, *cases: Any) -> Any:
        types = set(map(jax.typeof, cases))
        if len(types) == 1 and isinstance(types.pop(), StructuredType):
            return apply(Select(select), which, *cases)[0]
        return select(which, *cases)

    return select_any


def _not_stacked(what: str, t: Any) -> str:
    return (
        f"{what} cannot stack a {t.cls.__name__} of the type {t}: a stack of its leaves does not "
        "represent a stack of such arrays. Return vn.materialise(x) from the mapped function. If "
        "it holds derivatives, return jax.tree.leaves(x)."
    )


def accept_axes_of_leaves(flatten_axes: Callable) -> Callable:
    """Wrap JAX's function that flattens `in_axes` and `out_axes`. They can name axes of leaves."""

    def flatten(name: str, treedef: Any, axes: Any, **kwargs: Any) -> Any:
        if name.startswith("vmap") and is_enabled():
            axes = _axes_of_arrays(name, treedef, axes)
        return flatten_axes(name, treedef, axes, **kwargs)

    return flatten


def _axes_of_arrays(name: str, treedef: Any, axes: Any) -> Any:
    if not any(map(is_value, jax.tree.leaves(axes, is_leaf=is_value))):
        return axes
    places = jax.tree.unflatten(treedef, [0] * treedef.num_leaves)
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(places)}
    of_array = lambda path, of: isinstance(of, Value) and path in paths
    one = lambda path, of: _axis_of_array(name, of) if of_array(path, of) else of
    is_leaf = lambda path, of: of is None or of_array(path, of)
    return jax.tree_util.tree_map_with_path(one, axes, is_leaf=is_leaf, is_leaf_takes_path=True)


def _axis_of_array(name: str, axes: Value) -> Any:
    """Return the axis of a value, given the equal axes of its leaves."""
    distinct = set(jax.tree.leaves(axes, is_leaf=lambda x: x is None))
    if len(distinct) > 1:
        raise TypeError(
            f"{name} has different axes for the leaves of one array: {axes!r}. Pass one axis for "
            f"the array. Or pass its fields as separate arguments, and build the "
            f"{type(axes).__name__} inside the function."
        )
    return distinct.pop() if distinct else None


def check_pmap(cached_shard_map: Callable) -> Callable:
    """Wrap the function in which JAX makes a `pmap` of slices and stacks of leaves."""

    def checked(function: Any, *args: Any) -> Any:
        if is_enabled():
            function = function.wrap(_check_slices_and_stacks, args[:4], None)
        return cached_shard_map(function, *args)

    return checked


def _check_slices_and_stacks(
    function: Callable,
    in_tree: Any,
    in_axes: Any,
    out_axes: Any,
    out_tree: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    axes_of_slices = jax.tree.unflatten(in_tree, in_axes)
    jax.tree.map(_check_slice, (args, kwargs), axes_of_slices, is_leaf=is_value)
    out = function(*args, **kwargs)
    axes_of_stacks = jax.tree.unflatten(out_tree, out_axes)
    axes_of_stacks = jax.tree.broadcast(axes_of_stacks, out, is_leaf=lambda x: x is None)
    jax.tree.map(_check_stack, out, axes_of_stacks, is_leaf=_is_array)
    return out


def _check_slice(x: Any, axes: Any) -> None:
    if not is_value(x) or not has_all_leaves(x):
        return
    for axis in set(jax.tree.leaves(axes, is_leaf=lambda x: x is None)) - {None}:
        try:
            type_of_value(x).inc_rank(1, axis % (x.ndim + 1))
        except Exception as error:  # an error of the class, if the slice is no value
            raise TypeError(
                f"pmap cannot map a {type(x).__name__} along axis {axis}, which is not a batch "
                "axis of all its leaves. Pass vn.materialise(x), or use jax.shard_map."
            ) from error


def _check_stack(x: Any, axes: Any) -> None:
    distinct = set(jax.tree.leaves(axes, is_leaf=lambda x: x is None))
    if not isinstance(x, Value) or distinct <= {None}:
        return
    t = _type_of(x)
    if distinct != {0} or not can_be_stacked(t):
        shown = " and ".join(map(str, distinct))
        raise TypeError(
            f"pmap cannot stack a {t.cls.__name__} of the type {t} along axis {shown}. "
            "Set out_axes=0, or return vn.materialise(x) from the mapped function."
        )


# Loops.


def slice_dense_arrays(function: Callable) -> Callable:
    """Wrap `lax.scan` or `lax.map`, which slice the argument `xs`."""

    def over_slices(f: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled():
            return function(f, *args, **kwargs)
        try:
            bound = signature(function).bind(f, *args, **kwargs)
        except TypeError:
            return function(f, *args, **kwargs)  # JAX raises the error
        xs = bound.arguments["xs"] = _sliceable(bound.arguments.get("xs"))
        sizes = {x.shape[0] for x in jax.tree.leaves(xs) if is_typed(x)}
        if function.__name__ == "scan" and bound.arguments.get("length") is None and sizes:
            bound.arguments["length"] = sizes.pop()  # JAX infers it from arrays only
        return function(*bound.args, **bound.kwargs)

    return over_slices


def _sliceable(xs: Any) -> Any:
    is_sliced = lambda x: not _is_implicit(x) or has_leading_batch_axes(_type_of(x), 1)
    one = lambda x: x if is_sliced(x) else materialise_traced(find_primitive("scan"), x)
    return jax.tree.map(one, xs, is_leaf=_is_array)


def scan_whole_values(function: Callable) -> Callable:
    """Wrap `lax.associative_scan`, so that each value is one array."""

    def over_arrays(f: Any, elems: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled():
            return function(f, elems, *args, **kwargs)
        combine = lambda a, b: _as_arrays(f(a, b))
        return function(combine, _as_arrays(elems), *args, **kwargs)

    return over_arrays


def _as_arrays(tree: Any) -> Any:
    one = lambda x: as_typed_operand(x) if isinstance(x, Value) else x
    return jax.tree.map(one, tree, is_leaf=_is_array)


def make_stackable(x: Any) -> Any:
    """Materialize a typed result of a scan's body if its leaves cannot be stacked.

    A pytree of leaves that cannot be stacked raises an error, because it may hold derivatives.
    """
    if not _is_implicit(x) or (is_value(x) and not is_complete(x)) or can_be_stacked(_type_of(x)):
        return x
    if isinstance(x, Value):
        raise TypeError(_not_stacked("scan", _type_of(x)))
    return materialise_traced(find_primitive("scan"), x)
