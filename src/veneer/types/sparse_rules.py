"""Rules of JAX's primitives for `SparseArray`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._core.primitives.leaves import dense_unless
from .._core.rules import register
from .._core.trace import redispatch
from .._core.value import make_dense
from .._jax.primitives import find_primitive, start_in_bounds
from .elementwise import register_zero_preserving
from .sparse import Axes, SparseArray


def rearrange(x: SparseArray, batch: Axes, sparse: Axes) -> Any:
    """Transpose `x` to the axes `batch`, followed by the axes `sparse`, and sum all other axes.

    `batch` are batch axes of `x`, and stay batch axes. `sparse` are any axes of `x`, and become
    sparse. Along a batch axis that is summed or becomes sparse, the entries are concatenated. The
    result is dense if `sparse` is empty.
    """
    entries = x.entries()
    concatenated = [axis for axis in range(x.n_batch) if axis not in batch]
    shape = [entries.sizes[axis] for axis in batch]
    shape.append(math.prod(entries.sizes[axis] for axis in concatenated) * x.nse)
    move = lambda leaf: lax.transpose(leaf, (*batch, *concatenated, x.n_batch)).reshape(shape)
    data = move(entries.data)
    if not sparse:
        return data.sum(-1, dtype=data.dtype)
    indices = jnp.stack([move(entries.columns[axis]) for axis in sparse], -1)
    has_sum = any(n != 1 for i, n in enumerate(entries.sizes) if i not in (*batch, *sparse))
    sizes = tuple(entries.sizes[axis] for axis in sparse)
    return SparseArray(data, indices, sizes, x.unique_indices and not has_sum)


def _select_axes(x: SparseArray, axes: Axes) -> Any:
    """Transpose `x` to `axes`, and sum over the axes that are not in this list.

    A batch axis that comes after a sparse axis becomes sparse.
    """
    n_batch = next((i for i, axis in enumerate(axes) if axis >= x.n_batch), len(axes))
    return rearrange(x, axes[:n_batch], axes[n_batch:])


@register("transpose")
def _(x: SparseArray, *, permutation: Any) -> Any:
    return _select_axes(x, permutation)


@register("reduce_sum")
def _(x: SparseArray, *, axes: Any, out_sharding: Any) -> Any:
    if out_sharding is not None:
        return NotImplemented
    return _select_axes(x, [axis for axis in range(x.ndim) if axis not in axes])


@register("squeeze")
def _(x: SparseArray, *, dimensions: Any) -> Any:
    return _select_axes(x, [axis for axis in range(x.ndim) if axis not in dimensions])


def broadcast(x: SparseArray, shape: tuple[int, ...]) -> SparseArray | jax.Array:
    """Broadcast `x` by NumPy's rules. The result is dense if no sparse axis keeps its size."""
    if x.shape == shape:
        return x
    axes = range(len(shape) - x.ndim, len(shape))
    return _broadcast_in_dim(x, shape=shape, broadcast_dimensions=axes, sharding=None)


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: SparseArray, *, shape: Any, broadcast_dimensions: Any, sharding: Any
) -> Any:
    if sharding is not None:
        return NotImplemented
    source = {out: axis for axis, out in enumerate(broadcast_dimensions)}
    new = [out for out, n in enumerate(shape) if out not in source or x.shape[source[out]] != n]
    # Append the new axes to the batch axes of x. Then move each axis to its position.
    n_batch, new_sizes = x.n_batch, [shape[out] for out in new]
    repeat = lambda leaf: jnp.broadcast_to(
        lax.expand_dims(leaf, range(n_batch, n_batch + len(new))),
        (*x.data.shape[:-1], *new_sizes, *leaf.shape[n_batch:]),
    )
    data, indices = repeat(jnp.asarray(x.data)), repeat(jnp.asarray(x.indices))
    order = {out: axis if axis < n_batch else axis + len(new) for out, axis in source.items()}
    order |= {out: n_batch + i for i, out in enumerate(new)}
    repeated = SparseArray(data, indices, *x.pattern[1:])
    return _select_axes(repeated, [order[out] for out in range(len(shape))])


@register("reshape")
def _(x: SparseArray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    if dimensions is not None or sharding is not None:
        return NotImplemented
    new, n_sparse, batch = tuple(new_sizes), len(x.sparse_shape), x.data.shape[:-1]
    if new[-n_sparse:] == x.sparse_shape and math.prod(new[:-n_sparse]) == math.prod(batch):
        data = jnp.reshape(x.data, (*new[:-n_sparse], x.nse))
        return SparseArray(data, jnp.reshape(x.indices, (*data.shape, n_sparse)), *x.pattern[1:])
    same = 0  # the number of leading batch axes that do not change
    while same < min(len(batch), len(new)) and batch[same] == new[same]:
        same += 1
    x = rearrange(x, range(same), range(same, x.ndim))
    if math.prod(x.sparse_shape) > jnp.iinfo(jnp.int32).max:
        return NotImplemented  # the flat index would overflow
    entries = x.entries()
    if same == len(new):
        return entries.data.sum(-1, dtype=x.dtype)
    flat: Any = 0
    for column, size in zip(entries.columns[same:], x.sparse_shape, strict=True):
        flat = flat * size + column.astype(jnp.int32)
    columns = []
    for size in reversed(new[same:]):
        columns.append(jnp.where(entries.is_entry, flat % max(size, 1), size))
        flat = flat // max(size, 1)
    return SparseArray(entries.data, jnp.stack(columns[::-1], -1), new[same:], x.unique_indices)


@register("slice")
def _(x: SparseArray, **params: Any) -> Any:
    from jax.experimental import sparse

    return _from_slice(x, sparse.bcoo_slice(x.to_bcoo(), **params))


@register("dynamic_slice")
def _(x: SparseArray, *start_indices: ArrayLike, slice_sizes: Any) -> Any:
    from jax.experimental import sparse

    # The primitive clamps negative starts. bcoo_dynamic_slice counts them from the end.
    starts = [*map(start_in_bounds, start_indices, x.shape, slice_sizes)]
    return _from_slice(x, sparse.bcoo_dynamic_slice(x.to_bcoo(), starts, slice_sizes))


def _from_slice(x: SparseArray, bcoo: Any) -> SparseArray:
    """Convert `bcoo`, a slice of `x` that JAX has computed, to a `SparseArray`."""
    sliced = SparseArray.from_bcoo(bcoo)
    # JAX sums duplicates if the slice has fewer elements than `x` has entries.
    has_unique_indices = x.unique_indices or sliced.nse < x.nse
    return SparseArray(sliced.data, sliced.indices, sliced.sparse_shape, has_unique_indices)


@register("dot_general")
def _(x: SparseArray, y: ArrayLike, *, dimension_numbers: Any, **params: Any) -> Any:
    return _multiply(x, jnp.asarray(y), *dimension_numbers, **params)


@register("dot_general")
def _(x: ArrayLike, y: SparseArray, *, dimension_numbers: Any, **params: Any) -> Any:
    contracted, batch = (pair[::-1] for pair in dimension_numbers)
    out = _multiply(y, jnp.asarray(x), contracted, batch, **params)
    if out is NotImplemented:
        return NotImplemented
    n_batch, y_end = len(batch[0]), y.ndim - len(contracted[0])  # axes of y end at y_end
    return lax.transpose(out, (*range(n_batch), *range(y_end, out.ndim), *range(n_batch, y_end)))


@register("dot_general")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    smaller = min(x, y, key=lambda z: z.size)
    primitive = find_primitive("dot_general")
    x, y = dense_unless(lambda z: z is not smaller, primitive, [x, y])
    return redispatch(primitive.bind, x, y, **params)


def _multiply(
    x: SparseArray,
    y: jax.Array,
    contracted: Any,
    batch: Any,
    *,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Any:
    """Compute a `dot_general` by a gather of `y`, a multiplication and a scatter.

    `contracted` and `batch` are pairs: the axes of `x`, and the corresponding axes of `y`.
    `bcoo_dot_general` is no alternative (JAX 0.12): with batch axes, its gradient for `data` is a
    dense array, and it accumulates bf16 in bf16.
    """
    del precision  # the multiplications are exact, and are accumulated in f32 or wider
    dtype = jnp.result_type(x.dtype, y.dtype)
    out_dtype = dtype if preferred_element_type is None else preferred_element_type
    if out_sharding is not None or jnp.dtype(out_dtype) == jnp.bool_:
        return NotImplemented
    wide = jnp.promote_types(dtype, out_dtype)
    if jnp.issubdtype(wide, jnp.inexact):
        wide = jnp.promote_types(wide, jnp.float32)
    x_axes, y_axes = (*batch[0], *contracted[0]), (*batch[1], *contracted[1])
    y_free = [axis for axis in range(y.ndim) if axis not in y_axes]
    x_free = [axis for axis in range(x.ndim) if axis not in x_axes]

    entries = x.entries()
    vectors = entries.gather(lax.transpose(y, (*y_axes, *y_free)).astype(wide), x_axes)
    vector_axes = range(entries.data.ndim, entries.data.ndim + len(y_free))
    products = lax.expand_dims(entries.data.astype(wide), vector_axes) * vectors
    return entries.scatter(products, (*batch[0], *x_free)).astype(out_dtype)


def _map_entries(
    x: SparseArray, function: Callable[..., jax.Array], *others: jax.Array
) -> SparseArray:
    """Return a copy of `x` with `function(entries, *others)` in place of its stored entries.

    `others` are numbers, or arrays with one value per stored entry.
    """
    # In place of padding, compute at 0.5 and 1, where derivatives are finite. Otherwise 0 * NaN
    # could make derivatives of other entries NaN.
    entries = x.entries()
    replace_padding = lambda values, fill: jnp.where(entries.is_entry, values, fill)
    data = replace_padding(entries.data, jnp.asarray(0.5).astype(x.dtype))
    values = function(data, *(replace_padding(y, jnp.ones_like(y)) for y in others))
    return SparseArray(replace_padding(values, jnp.zeros_like(values)), *x.pattern)


register_zero_preserving(
    SparseArray,
    lambda x, function: _map_entries(x.sum_duplicates(), function),
    apply_linear=_map_entries,
)


@register("convert_element_type")
def _(x: SparseArray, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Any:
    if weak_type or sharding is not None or jnp.issubdtype(new_dtype, jnp.bool_):
        return NotImplemented
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (x.dtype, new_dtype))
    if not are_floats or jnp.promote_types(x.dtype, new_dtype) != new_dtype:
        x = x.sum_duplicates()  # the conversion rounds, so it is not linear
    return _map_entries(x, lambda values: lax.convert_element_type(values, new_dtype))


def _register_by_dense(name: str) -> None:
    """Register rules for products with a dense array ("mul"), or quotients by it ("div")."""
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: SparseArray, y: ArrayLike, **params: Any) -> Any:
        y = jnp.asarray(y)
        if name == "div" and not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.sum_duplicates()  # a quotient of integers is truncated, so it is not linear
        operation = lambda *factors: primitive.bind(*factors, **params)
        if not y.ndim:
            return _map_entries(x, operation, y)
        broadcasted = broadcast(x, jnp.broadcast_shapes(x.shape, y.shape))
        if not isinstance(broadcasted, SparseArray):
            return NotImplemented
        # y can have axes of size 1, for example in a vmap over scalars.
        shape = broadcasted.shape
        kept = [axis for axis in range(len(shape)) if y.shape[axis] == shape[axis]]
        squeezed = lax.squeeze(y, [axis for axis in range(y.ndim) if axis not in kept])
        return _map_entries(broadcasted, operation, broadcasted.entries().gather(squeezed, kept))


for _name in ("mul", "div"):
    _register_by_dense(_name)


@register("div")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    div = find_primitive("div")
    return redispatch(div.bind, x, *make_dense(div, [y]), **params)


@register("mul")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    pair = _align(x.sum_duplicates(), y.sum_duplicates())
    if pair is None:
        return NotImplemented
    multiply = lambda *factors: find_primitive("mul").bind(*factors, **params)
    return _map_entries(pair[0], multiply, _values_at(*pair))


def _align(x: SparseArray, y: SparseArray) -> list[Any] | None:
    """Broadcast `x` and `y` to one shape, with the same axes as batch axes.

    Return None if `broadcast` makes one of them dense.
    """
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    pair = [z for z in (broadcast(z, shape) for z in (x, y)) if isinstance(z, SparseArray)]
    if len(pair) < 2:
        return None
    n_batch = min(z.n_batch for z in pair)
    return [rearrange(z, range(n_batch), range(n_batch, z.ndim)) for z in pair]


def _values_at(x: SparseArray, y: SparseArray) -> jax.Array:
    """Return the values of `y` at the indices of `x`, and 0 where `y` stores no entry.

    `x` and `y` have no duplicates. A stable sort of the entries of both by their index places the
    entry of `y` directly after the entry of `x` with the same index.
    """
    axis = x.n_batch
    x_entries, y_entries = x.entries(), y.entries()
    columns = [
        jnp.concatenate(pair, axis)
        for pair in zip(x_entries.columns[axis:], y_entries.columns[axis:], strict=True)
    ]
    data = jnp.concatenate([jnp.zeros_like(x_entries.data), y_entries.data], axis)
    order = lax.broadcasted_iota(jnp.int32, data.shape, axis)
    *columns, order, data = lax.sort(
        (*columns, order, data), dimension=axis, num_keys=len(columns), is_stable=True
    )
    # The roll appends the first entry, which is of x or differs from the last.
    next_entry = lambda z: jnp.roll(z, -1, axis)
    is_equal = jnp.stack([z == next_entry(z) for z in columns]).all(0)
    values = jnp.where(is_equal, next_entry(data), 0)
    _, values = lax.sort((order, values), dimension=axis, num_keys=1)
    return lax.slice_in_dim(values, 0, x.nse, axis=axis)


@register(["add", "add_any"])
def _add(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    pair = _align(x, y)
    if pair is None or any(value is not None for value in params.values()):
        return NotImplemented
    x, y = pair
    data = jnp.concatenate([x.data, y.data], -1)
    return SparseArray(data, jnp.concatenate([x.indices, y.indices], -2), x.sparse_shape)


@register("sub")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    return _add(x, _map_entries(y, lax.neg), **params)
