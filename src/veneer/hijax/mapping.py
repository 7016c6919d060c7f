"""Mapped functions of implicit arrays: `jax.vmap`, `pmap`, `lax.scan`, `map`, `associative_scan`.

JAX slices the leaves of a pytree. This is correct if the mapped axis is a batch axis of every leaf.
For any other axis of the dense array, the functions here move the axis to the front. If it is still
no batch axis of every leaf, the value is materialized and reported.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import derivatives_error
from .._core.policy import Operands, report_materialised
from .._core.value import Value, describe, has_all_leaves, is_value, make_dense, source_of
from .._jax.primitives import Primitive, find_primitive
from .mode import is_enabled, signature_of
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
    """Wrap a loop or a conditional of JAX, to reject derivatives of leaves as arguments.

    Such derivatives are implicit arrays marked by `mark_derivatives`, which exist inside a user's
    derivative rule. JAX would take them for arrays.
    """

    @wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        reject_marked(function.__name__, (args, kwargs))
        return function(*args, **kwargs)

    return check_and_call


def reject_marked(name: str, x: Any) -> None:
    """Raise an error if a user's derivative rule is running, and `x` holds derivatives of leaves.

    `name` is the JAX function that would take the derivatives for arrays.
    """
    if within_rule.value and has_derivatives(x):
        raise derivatives_error(name)


# Axes of values.

#: Whether `jax.vmap` maps over the leaves of implicit arrays. `map_derivatives` sets this for
#: Jacobians, whose derivatives have one more axis on each leaf.
maps_leaves = jax.make_user_context(False)


def map_whole_values(is_vmappable: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap JAX's predicate for objects that `jax.vmap` maps as one array: add implicit arrays.

    While `maps_leaves` is set, they are not included, and `jax.vmap` maps over their leaves.
    Otherwise, the wrapper raises an error for implicit arrays that are marked as derivatives.
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
    """Materialize an implicit array, or a tracer of one, and report this for `primitive`."""
    value = value_of(x)
    if isinstance(value, Value) and not any(map(is_typed, jax.tree.leaves(value))):
        return make_dense(primitive, [value])[0]
    t = _type_of(value)
    shown = describe([value]) if isinstance(value, Value) else (str(t),)
    nbytes = t.size * t.dtype.itemsize
    is_cache = isinstance(value, Value) and value.is_cache
    operands = Operands(shown, (source_of(value),), (nbytes,), (is_cache,))
    report_materialised(primitive.name, lambda: operands)
    return apply(Materialise(t), as_typed_operand(value))[0]


# `jax.vmap`.


def slice_argument(to_elt: Callable) -> Callable:
    """Wrap JAX's function that makes a batch tracer of an argument of `vmap`.

    For an implicit array, the mapped axis is an axis of the dense array. If it is no batch axis of
    all leaves, it is moved to the front. If the leaves still cannot be sliced along it, the array
    is materialized.
    """

    def slice_any(trace: Any, get_idx: Any, x: Any, axis: Any) -> Any:
        if not isinstance(axis, int) or not _is_implicit(x) or not is_enabled():
            return to_elt(trace, get_idx, x, axis)
        axis %= x.ndim
        if has_leading_batch_axes(_type_of(x), axis + 1):
            if is_value(x):
                return jax.tree.map(lambda leaf: slice_any(trace, get_idx, leaf, axis), x)
            return to_elt(trace, get_idx, x, axis)
        x = jnp.moveaxis(x, axis, 0) if axis else x
        if _is_implicit(x) and not has_leading_batch_axes(_type_of(x), 1):
            x = materialise_traced(VMAP, x)
        return slice_any(trace, get_idx, x, 0)

    return slice_any


def stack_result(from_elt: Callable) -> Callable:
    """Wrap JAX's function that stacks a result of `vmap`, to stack along a dense axis.

    The wrapped function returns the stack and its axis. The axis is None if the result is not
    mapped and `out_axes` does not set an axis. If the leaves of an implicit array cannot be
    stacked, it raises `TypeError`.
    """

    def stack_any(
        trace: Any, size: Any, mesh_axis: Any, sum_match: bool, i: int, x: Any, axis: Any
    ) -> Any:
        def stack_array(x: Any, axis: Any) -> tuple[Any, Any]:
            stack, stack_axis = from_elt(trace, size, mesh_axis, sum_match, i, x, axis)
            return expose(stack), stack_axis

        if not isinstance(x, Value) or not is_enabled():
            return stack_array(x, axis)
        if not isinstance(axis, int):
            is_mapped = any(trace.to_batch_info(leaf)[1] is not None for leaf in jax.tree.leaves(x))
            return stack_array(as_typed_operand(x), axis) if is_mapped else (x, None)
        if not can_be_stacked(_type_of(x)):
            raise _stack_error("vmap", _type_of(x))
        stack = jax.tree.map(lambda leaf: stack_array(leaf, 0)[0], x)
        return jnp.moveaxis(stack, 0, axis) if axis else stack, axis

    return stack_any


def add_batch_axis(broadcast: Callable) -> Callable:
    """Wrap JAX's function that adds a batch axis to an array that is not mapped.

    An implicit array, or a tangent of one, is repeated along a new first axis of each leaf.
    """

    def broadcast_any(x: Any, size: int, axis: int, mesh_axis: Any) -> Any:
        t = jax.typeof(x)
        of = t.of if isinstance(t, TangentType) else t
        if not isinstance(of, HighType) or axis or not can_be_stacked(of):
            return broadcast(x, size, axis, mesh_axis)
        return stacked(x, size)

    return broadcast_any


def move_batch_axis(moveaxis: Callable) -> Callable:
    """Wrap JAX's function that moves the batch axis, to move the axis in each leaf of a tangent."""

    def move_any(x: Any, source: Any, destination: Any) -> Any:
        if source == destination or not isinstance(jax.typeof(x), TangentType):
            return moveaxis(x, source, destination)
        return apply(MoveAxis(source, destination), x)[0]

    return move_any


def select_values(select: Callable) -> Callable:
    """Wrap JAX's function that selects from the results of branches with a batched predicate.

    If the results are implicit arrays of one type, select their leaves, so that the type is kept.
    """

    def select_any(which: Any, *cases: Any) -> Any:
        types = set(map(jax.typeof, cases))
        if len(types) == 1 and isinstance(types.pop(), StructuredType):
            return apply(Select(select), which, *cases)[0]
        return select(which, *cases)

    return select_any


def _stack_error(function: str, t: Any) -> TypeError:
    return TypeError(
        f"{function} cannot stack a {t.cls.__name__} of the type {t}: a stack of its leaves does "
        "not represent a stack of such arrays. Return vn.materialise(x) from the mapped function. "
        "If it holds derivatives, return jax.tree.leaves(x)."
    )


def accept_axes_of_leaves(flatten_axes: Callable) -> Callable:
    """Wrap JAX's function that flattens `in_axes` and `out_axes` of `vmap`.

    An implicit array is one leaf of the arguments or results, and usually has one axis in `in_axes`
    or `out_axes`. The wrapper also accepts an instance of its class there, with an axis for each
    leaf.
    """

    def flatten(name: str, treedef: Any, axes: Any, **kwargs: Any) -> Any:
        if name.startswith("vmap") and is_enabled():
            axes = _merge_axes_of_leaves(name, treedef, axes)
        return flatten_axes(name, treedef, axes, **kwargs)

    return flatten


def _merge_axes_of_leaves(name: str, treedef: Any, axes: Any) -> Any:
    """Replace each implicit array of axes in `axes` by one axis, if it belongs to one leaf.

    `treedef` is the structure of the arguments, in which an implicit array can be one leaf. `name`
    is the argument of `vmap` that has the axes, for error messages.
    """
    if not any(map(is_value, jax.tree.leaves(axes, is_leaf=is_value))):
        return axes
    arguments = jax.tree.unflatten(treedef, [0] * treedef.num_leaves)
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(arguments)}
    is_array = lambda path, x: isinstance(x, Value) and path in paths
    merge = lambda path, x: _common_axis(name, x) if is_array(path, x) else x
    is_leaf = lambda path, x: x is None or is_array(path, x)
    return jax.tree_util.tree_map_with_path(merge, axes, is_leaf=is_leaf, is_leaf_takes_path=True)


def _common_axis(name: str, axes: Value) -> Any:
    """Return the axis in `axes`, an implicit array with the mapped axis in place of each leaf.

    Raise TypeError if the axes of the leaves differ. The message starts with `name`, such as "vmap
    in_axes".
    """
    distinct = set(jax.tree.leaves(axes, is_leaf=lambda x: x is None))
    if len(distinct) > 1:
        raise TypeError(
            f"{name} has different axes for the leaves of one array: {axes!r}. Pass one axis for "
            f"the array. Or pass its fields as separate arguments, and build the "
            f"{type(axes).__name__} inside the function."
        )
    return distinct.pop() if distinct else None


def check_pmap(cached_shard_map: Callable) -> Callable:
    """Wrap the function that builds a `pmap`, to reject implicit arrays that it would map wrongly.

    JAX slices and stacks the leaves of an implicit array. Raise TypeError if the result does not
    represent a slice or a stack of the dense array.
    """

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
    """Call the function of a `pmap` with the slices `args` and `kwargs`. Check slices and results.

    Raise TypeError if slices or stacks of leaves do not represent slices or stacks of the dense
    array.
    """
    slice_axes = jax.tree.unflatten(in_tree, in_axes)
    jax.tree.map(_check_slice, (args, kwargs), slice_axes, is_leaf=is_value)
    out = function(*args, **kwargs)
    stack_axes = jax.tree.unflatten(out_tree, out_axes)
    stack_axes = jax.tree.broadcast(stack_axes, out, is_leaf=lambda x: x is None)
    jax.tree.map(_check_stack, out, stack_axes, is_leaf=_is_array)
    return out


def _check_slice(x: Any, axes: Any) -> None:
    """Raise TypeError if `x` does not represent a slice of the dense array that is mapped.

    The leaves of `x` are slices along `axes`, the mapped axis of each leaf.
    """
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
    """Raise TypeError if `x` is an implicit array that cannot be stacked along `axes` leaf by leaf.

    A stack of the leaves must represent a stack of the dense arrays.
    """
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
    """Wrap `lax.scan` or `lax.map`, to slice implicit arrays in `xs` along the first dense axis.

    An implicit array is materialized if slices of its leaves do not represent slices of the array.
    """

    def loop_over_slices(f: Any, *args: Any, **kwargs: Any) -> Any:
        values = jax.tree.leaves((args, kwargs), is_leaf=_is_array) if is_enabled() else ()
        if not any(map(_is_implicit, values)):
            return function(f, *args, **kwargs)
        try:
            bound = signature_of(function).bind(f, *args, **kwargs)
        except TypeError:
            return function(f, *args, **kwargs)  # JAX raises the error
        is_sliceable = lambda x: not _is_implicit(x) or has_leading_batch_axes(_type_of(x), 1)
        prepare = lambda x: x if is_sliceable(x) else materialise_traced(find_primitive("scan"), x)
        xs = jax.tree.map(prepare, bound.arguments.get("xs"), is_leaf=_is_array)
        bound.arguments["xs"] = xs
        sizes = {x.shape[0] for x in jax.tree.leaves(xs) if is_typed(x)}
        if function.__name__ == "scan" and bound.arguments.get("length") is None and sizes:
            bound.arguments["length"] = sizes.pop()  # JAX infers it from arrays only
        return function(*bound.args, **bound.kwargs)

    return loop_over_slices


def scan_whole_values(function: Callable) -> Callable:
    """Wrap `lax.associative_scan`, to scan an implicit array as one array, not leaf by leaf."""
    to_arrays = lambda tree: jax.tree.map(as_typed_operand, tree, is_leaf=_is_array)

    def scan_arrays(f: Any, elems: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled():
            return function(f, elems, *args, **kwargs)
        return function(lambda a, b: to_arrays(f(a, b)), to_arrays(elems), *args, **kwargs)

    return scan_arrays


def make_stackable(x: Any) -> Any:
    """Return `x`, a result of the body of a scan, in a form that a scan can stack.

    A tracer of an implicit array is materialized if its leaves cannot be stacked. For a pytree of
    leaves, raise TypeError then, because it may hold derivatives. Return any other result
    unchanged.
    """
    if not _is_implicit(x) or (is_value(x) and not is_complete(x)) or can_be_stacked(_type_of(x)):
        return x
    if isinstance(x, Value):
        raise _stack_error("scan", _type_of(x))
    return materialise_traced(find_primitive("scan"), x)
