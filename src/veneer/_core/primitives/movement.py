"""Rules for what moves batch axes alone: leaf by leaf, for every type.

A stack of values is one value whose leaves have a leading axis more. To take one of them out, to
turn the stack round or to join two is to do so with the leaves. A rule that names a type wins over
these, and they decline what touches an axis that the leaves do not all carry.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.primitives import find_primitive
from ..batch_axes import has_batch_axes, takes_batch_axis
from ..labels import is_label
from ..rules import add_rule
from ..transform import redispatch
from ..tree import has_metadata
from ..value import Value


def _batch_axes(x: Value) -> int:
    """How many leading axes every leaf carries; none of a type with a `default`, which knows."""
    if type(x).default is not Value.default:
        return 0
    ndim = x.aval().ndim
    return next((n for n in range(ndim, 0, -1) if has_batch_axes(x, n)), 0)


def _moved(
    x: Value,
    count: int,
    function: Callable[[Any], Any],
    *,
    reorders: bool = False,
    shape: Sequence[int] | None = None,
) -> Any:
    """`function` of each leaf, if it touches the first `count` axes alone and these are a batch's.

    Of a label every axis looks like one of a batch, and its metadata may speak of any. Of another
    type, metadata speaks of axes counted from the end: they come and go, and keep their order.
    """
    if has_metadata(x) and (reorders or is_label(x)):
        return NotImplemented
    if count > _batch_axes(x):
        return NotImplemented
    if shape is not None and not (count or takes_batch_axis(x)):
        return NotImplemented
    return jax.tree.map(function, x)


def _squeeze(x: Value, *, dimensions: Sequence[int]) -> Any:
    return _moved(x, max(dimensions, default=-1) + 1, lambda leaf: lax.squeeze(leaf, dimensions))


def _transpose(x: Value, *, permutation: Sequence[int]) -> Any:
    count = 1 + max((i for i, axis in enumerate(permutation) if i != axis), default=-1)
    lead = tuple(permutation[:count])

    def of(leaf: Any) -> Any:
        return lax.transpose(leaf, (*lead, *range(count, jnp.ndim(leaf))))

    return _moved(x, count, of, reorders=True)


def _trailing(old: Sequence[int], new: Sequence[int]) -> int:
    """How many trailing axes two shapes have in common."""
    count = 0
    while count < min(len(old), len(new)) and old[-1 - count] == new[-1 - count]:
        count += 1
    return count


def _reshape(x: Value, *, new_sizes: Sequence[int], dimensions: Any, sharding: Any) -> Any:
    shape = x.aval().shape
    # Of axes of size 1 it cannot be told which are kept: as few as can be are taken for moved.
    kept = _trailing(shape, new_sizes)
    moved, made = len(shape) - kept, tuple(new_sizes[: len(new_sizes) - kept])
    if dimensions is not None or sharding is not None:
        return NotImplemented

    def of(leaf: Any) -> Any:
        return lax.reshape(leaf, (*made, *jnp.shape(leaf)[moved:]))

    return _moved(x, moved, of, reorders=True, shape=new_sizes)


def _broadcast_in_dim(
    x: Value, *, shape: Sequence[int], broadcast_dimensions: Any, sharding: Any
) -> Any:
    old = x.aval().shape
    # The trailing axes that stay where they are, counted from the end, and of their size.
    kept = 0
    while (
        kept < len(old)
        and broadcast_dimensions[-1 - kept] == len(shape) - 1 - kept
        and old[-1 - kept] == shape[len(shape) - 1 - kept]
    ):
        kept += 1
    moved, made = len(old) - kept, tuple(shape[: len(shape) - kept])
    if sharding is not None:
        return NotImplemented

    def of(leaf: Any) -> Any:
        inner = jnp.shape(leaf)[moved:]
        inside = range(len(made), len(made) + len(inner))
        return lax.broadcast_in_dim(leaf, (*made, *inner), (*broadcast_dimensions[:moved], *inside))

    return _moved(x, moved, of, shape=shape)


def _slice(x: Value, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    shape = x.aval().shape
    strides = strides or (1,) * len(shape)
    whole = [(0, size, 1) for size in shape]
    cut = list(zip(start_indices, limit_indices, strides, strict=True))
    count = 1 + max((i for i in range(len(shape)) if cut[i] != whole[i]), default=-1)

    def of(leaf: Any) -> Any:
        inner = jnp.shape(leaf)[count:]
        return lax.slice(
            leaf,
            (*start_indices[:count], *(0 for _ in inner)),
            (*limit_indices[:count], *inner),
            (*strides[:count], *(1 for _ in inner)),
        )

    return _moved(x, count, of)


def _dynamic_slice(x: Value, *indices: Any, slice_sizes: Sequence[int]) -> Any:
    shape = x.aval().shape
    sizes = tuple(slice_sizes)
    count = 1 + max((i for i, size in enumerate(shape) if sizes[i] != size), default=-1)
    if any(isinstance(i, Value) for i in indices):
        return NotImplemented

    def of(leaf: Any) -> Any:
        inner = jnp.shape(leaf)[count:]
        zeros = (jnp.zeros_like(indices[0]),) * len(inner)
        return lax.dynamic_slice(leaf, (*indices[:count], *zeros), (*sizes[:count], *inner))

    return _moved(x, count, of)


def _rev(x: Value, *, dimensions: Sequence[int]) -> Any:
    return _moved(x, max(dimensions, default=-1) + 1, lambda leaf: lax.rev(leaf, dimensions))


def _gather(
    x: Value, indices: Any, *, dimension_numbers: Any, slice_sizes: Any, mode: Any, **params: Any
) -> Any:
    """`x[indices]`, of which the trailing axes are taken whole and come last."""
    numbers, shape = dimension_numbers, x.aval().shape
    # An axis that is taken whole starts at 0, whatever the indices say.
    cut = [i for i, size in enumerate(shape) if slice_sizes[i] != size]
    count = int(max([*cut, *numbers.collapsed_slice_dims, *numbers.operand_batching_dims, -1])) + 1
    starts = [i for i, axis in enumerate(numbers.start_index_map) if axis < count]
    rest = len(shape) - count
    first = len(numbers.offset_dims) + jnp.ndim(indices) - 1 - rest
    offsets = tuple(numbers.offset_dims)
    split = len(offsets) - rest
    comes_last = offsets[split:] == tuple(range(first, first + rest))
    # Where something outside is filled, a leaf that is filled may mean anything.
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    if isinstance(indices, Value) or fills or not comes_last:
        return NotImplemented

    def of(leaf: Any) -> Any:
        inner = jnp.shape(leaf)[count:]
        own = numbers._replace(
            offset_dims=(*offsets[:split], *range(first, first + len(inner))),
            start_index_map=tuple(numbers.start_index_map[i] for i in starts),
        )
        return find_primitive("gather").bind(
            leaf,
            indices[..., jnp.array(starts, int)],
            dimension_numbers=own,
            slice_sizes=(*slice_sizes[:count], *inner),
            mode=mode,
            **params,
        )

    return _moved(x, count, of)


def _same_type(values: Sequence[Any]) -> bool:
    dtypes = lambda v: tuple(jax.typeof(leaf).dtype for leaf in jax.tree.leaves(v))
    return len({(jax.tree.structure(v), dtypes(v)) for v in values}) == 1


def _inner_shapes(x: Value, count: int) -> list[tuple[int, ...]]:
    return [jnp.shape(leaf)[count:] for leaf in jax.tree.leaves(x)]


def _concatenate(*operands: Value, dimension: int) -> Any:
    alike = _same_type(operands) and all(dimension < _batch_axes(x) for x in operands)
    alike = alike and not (has_metadata(operands[0]) and is_label(operands[0]))
    inner = [_inner_shapes(x, dimension + 1) for x in operands]
    if not alike or any(shapes != inner[0] for shapes in inner):
        return NotImplemented
    return jax.tree.map(lambda *leaves: lax.concatenate(leaves, dimension), *operands)


def _stack(*operands: Value, axis: int) -> Any:
    with_axis = [redispatch(jnp.expand_dims, x, axis) for x in operands]
    return redispatch(jnp.concatenate, with_axis, axis)


def _split(x: Value, *, sizes: Any, axis: int) -> Any:
    if axis >= _batch_axes(x) or (has_metadata(x) and is_label(x)):
        return NotImplemented
    leaves, treedef = jax.tree.flatten(x)
    pieces = zip(*(lax.split(leaf, sizes, axis) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(treedef, piece) for piece in pieces]


def _unstack(x: Value, *, axis: int) -> Any:
    pieces = _split(x, sizes=(1,) * x.aval().shape[axis], axis=axis)
    return pieces if pieces is NotImplemented else [_squeeze(y, dimensions=(axis,)) for y in pieces]


def _select(which: Any, *cases: Value) -> Any:
    """By one predicate for all of the entries."""
    alike = _same_type(cases) and len({tuple(_inner_shapes(x, 0)) for x in cases}) == 1
    if isinstance(which, Value) or jnp.ndim(which) or not alike:
        return NotImplemented
    return jax.tree.map(lambda *leaves: lax.select_n(which, *leaves), *cases)


_RULES: dict[str, Callable] = {
    "squeeze": _squeeze,
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "rev": _rev,
    "gather": _gather,
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "unstack": _unstack,
    "select_n": _select,
}
for _name, _rule in _RULES.items():
    add_rule(_rule, [find_primitive(_name)], conditional=True)
