"""Products of groups of rows with one matrix per group, computed one tile of rows at a time.

On CPU, JAX's `ragged_dot` copies all rows for each group, with zeros in the rows of other groups,
and sums over groups. With 64 experts, this is 64 times the work, after all experts are dequantized.
Here the rows of each group are cut into tiles of one size. A loop multiplies each tile with the
matrix of its group, and dequantizes only that matrix. The number of tiles depends on the sizes of
the groups. The loop has the largest possible length, and its unused steps do nothing.

Rows of one group are never multiplied with the matrix of another. A NaN therefore affects only
its own group.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers, without
from ..arrays.qarray import QArray
from .dot_general import STRATEGIES, dot_general
from .operands import unpack_codes
from .product import Operand, QuantizedProduct, first_plan

# With fewer rows, XLA takes as long. With more rows, the time to dequantize the matrix for each
# tile is a small part of the total.
_LEAST_ROWS = 8
_MOST_ROWS = 256


class GroupedDotParams(NamedTuple):
    """The parameters of a `jax.lax.ragged_dot_general` whose ragged axis is not contracted.

    **Arguments:**

    - `dimension_numbers`: of the product without groups.
    - `lhs_ragged`, `rhs_group`: the ragged axis of lhs, and the group axis of rhs.
    - `precision`, `preferred_element_type`: for `vn.quant.dot_general`, which multiplies each tile.
    """

    dimension_numbers: DotDimensionNumbers
    lhs_ragged: int
    rhs_group: int
    precision: Any
    preferred_element_type: DTypeLike

    def without(self, lhs_axis: int, rhs_axis: int | None) -> "GroupedDotParams":
        """Return the parameters after one axis of lhs, and one of rhs if it is set, is removed."""
        (lhs_ragged,) = without((self.lhs_ragged,), lhs_axis)
        (rhs_group,) = without((self.rhs_group,), rhs_axis)
        numbers = self.dimension_numbers.without(lhs_axis, rhs_axis)
        return self._replace(dimension_numbers=numbers, lhs_ragged=lhs_ragged, rhs_group=rhs_group)


def multiply_groups(
    lhs: Operand, rhs: QArray, group_sizes: jax.Array, params: GroupedDotParams
) -> jax.Array:
    """Return `jax.lax.ragged_dot_general` for a ragged axis that is not contracted.

    **Arguments:**

    - `lhs`, `rhs`: of any shapes with non-empty ragged and group axes.
    - `group_sizes`: `[G]`, or with leading axes if the groups depend on other axes of lhs.
    - `params`: the axes and dtypes.
    """
    if group_sizes.ndim == 1:
        return _multiply_tiles(lhs, rhs, group_sizes, params)
    # Groups differ along the first axis of the output: compute one product after the other.
    lhs_batch, rhs_batch = params.dimension_numbers.batch
    if lhs_batch:
        lhs_axis, rhs_axis = lhs_batch[0], rhs_batch[0]
        rhs = _unpack_before(rhs, rhs_axis)
        rhs_leaves = _take(rhs, rhs_axis, jnp.arange(rhs.shape[rhs_axis]))
    else:
        lhs_axis, rhs_axis = params.dimension_numbers.free(0, lhs.ndim)[0], None
        rhs_leaves = None
    lhs = _unpack_before(lhs, lhs_axis)
    lhs_leaves = _take(lhs, lhs_axis, jnp.arange(lhs.shape[lhs_axis]))

    def multiply_entry(entry: Any) -> jax.Array:
        left, right, sizes = entry
        return multiply_groups(
            _rebuild(lhs, left),
            rhs if right is None else _rebuild(rhs, right),
            sizes,
            params.without(lhs_axis, rhs_axis),
        )

    return lax.map(multiply_entry, (lhs_leaves, rhs_leaves, group_sizes))


def _multiply_tiles(
    lhs: Operand, rhs: QArray, group_sizes: jax.Array, params: GroupedDotParams
) -> jax.Array:
    """Return the product for group sizes `[G]`."""
    numbers, axis, group_axis = params[:3]
    lhs = _unpack_before(lhs, axis)
    rhs = _unpack_before(rhs, group_axis)
    is_packed = None if _has_kernel(lhs, rhs, params) else rhs.format.bits < 8
    count = _rows_of_tile(lhs.shape[axis], rhs.shape[group_axis], packed=is_packed)
    tiles = _cut_rows(group_sizes, lhs.shape[axis], count)

    lhs_leaves = _take(lhs, axis, tiles.rows)
    # The loop selects codes, because selecting them before would copy a matrix for each of its
    # tiles. Arrays with derivatives are selected before: in a loop, their derivatives would be
    # added up over all groups in each step.
    rhs_leaves = _take(rhs, group_axis, tiles.group, first=1)
    tile_numbers = numbers.without(None, group_axis)

    def multiply(left: list, right: list, group: jax.Array) -> jax.Array:
        packed = lax.dynamic_index_in_dim(rhs.packed, group, group_axis, keepdims=False)
        return dot_general(
            _rebuild(lhs, left),
            _rebuild(rhs, [packed, *right]),
            tile_numbers,
            params.precision,
            params.preferred_element_type,
        )

    def fill_zeros(left: list, right: list, group: jax.Array) -> jax.Array:
        out = jax.eval_shape(multiply, left, right, group)
        # In a shard_map, the zeros must vary over the same devices as the operands.
        operands = (left, right, rhs.packed, group)
        zeros = [lax.full_like(x, 0, out.dtype, shape=()) for x in jax.tree.leaves(operands)]
        return jnp.broadcast_to(sum(zeros), out.shape)

    # A derivative dequantizes again, instead of keeping a dense matrix for each step. The condition
    # is also checkpointed, because its branches would keep all codes for each step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def multiply_if_used(is_used: jax.Array, *args: Any) -> jax.Array:
        return lax.cond(is_used, multiply, fill_zeros, *args)

    steps = (tiles.is_used, lhs_leaves, rhs_leaves, tiles.group)
    _, out = lax.scan(lambda _, args: (None, multiply_if_used(*args)), None, steps)
    row_axis = len(numbers.batch[0]) + numbers.free(0, lhs.ndim).index(axis)
    out = jnp.moveaxis(out, 0, row_axis)
    out = lax.collapse(out, row_axis, row_axis + 2)
    return jnp.take(out, tiles.place, row_axis, mode="fill", fill_value=0)


def _has_kernel(lhs: Operand, rhs: QArray, params: GroupedDotParams) -> bool:
    """Return whether a CPU kernel multiplies one row with the matrix of its group."""
    numbers, axis, group_axis, precision, out_dtype = params
    platforms: list[str] = []

    def plan_row(lhs: Any, rhs: Any) -> None:
        row = [lax.slice_in_dim(leaf, 0, 1, axis=axis) for leaf in jax.tree.leaves(lhs)]
        matrix = [lax.index_in_dim(x, 0, group_axis, keepdims=False) for x in jax.tree.leaves(rhs)]
        operands = _rebuild(lhs, row), _rebuild(rhs, matrix)
        product = QuantizedProduct.create(
            *operands, numbers.without(None, group_axis), precision, out_dtype
        )
        platforms.extend(first_plan(product, STRATEGIES).kernels_for)

    jax.eval_shape(plan_row, lhs, rhs)
    return "cpu" in platforms


def _rows_of_tile(rows: int, groups: int, *, packed: bool | None) -> int:
    """Choose the number of rows of a tile: a power of two that holds an average group.

    If codes are unpacked for each tile, which takes as long as multiplying about ten rows, the tile
    holds most groups. If a kernel multiplies the tiles (`packed` is None), the time is proportional
    to the number of rows, and there is no minimum.

    >>> [_rows_of_tile(rows, 8, packed=False) for rows in (3, 8, 64, 500, 4000)]
    [3, 8, 8, 64, 256]
    >>> [_rows_of_tile(rows, 8, packed=True) for rows in (3, 8, 64, 500, 4000)]
    [3, 8, 16, 128, 256]
    >>> [_rows_of_tile(rows, 8, packed=None) for rows in (3, 8, 30, 64, 500, 4000)]
    [1, 1, 4, 8, 64, 256]
    """
    wanted = -(-rows // groups) * (2 if packed else 1)
    least = 1 if packed is None else _LEAST_ROWS
    return min(max(1 << (wanted - 1).bit_length(), least), _MOST_ROWS, rows)


class _RowTiles(NamedTuple):
    """Tiles of at most `count` rows, each within one group, in the order of rows.

    - `is_used`: `[steps]`, whether the tile has rows.
    - `group`: `[steps]`, the group of its rows.
    - `rows`: `[steps, count]`, the indices of its rows, padded with the total number of rows.
    - `place`: `[rows]`, the index of each row among the rows of all tiles. For a row without a
      group, it is the number of these rows.
    """

    is_used: jax.Array
    group: jax.Array
    rows: jax.Array
    place: jax.Array


def _cut_rows(group_sizes: jax.Array, rows: int, count: int) -> _RowTiles:
    groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tiles = (ends - starts + count - 1) // count
    last = jnp.cumsum(tiles)
    # The worst case: each group has one row, except for one group, which has all other rows.
    not_empty = min(groups, rows)
    steps = jnp.arange(not_empty + (rows - not_empty) // count, dtype=jnp.int32)

    group = jnp.searchsorted(last, steps, side="right", method="compare_all").astype(jnp.int32)
    is_used = group < groups
    group = jnp.minimum(group, groups - 1)
    start = starts[group] + (steps - (last - tiles)[group]) * count
    tile_rows = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    in_group = (tile_rows < ends[group][:, None]) & is_used[:, None]

    row = jnp.arange(rows, dtype=jnp.int32)
    row_group = jnp.searchsorted(ends, row, side="right", method="compare_all").astype(jnp.int32)
    has_group = row_group < groups
    row_group = jnp.minimum(row_group, groups - 1)
    place = (last - tiles)[row_group] * count + row - starts[row_group]
    place = jnp.where(has_group, place, steps.size * count)
    return _RowTiles(is_used, group, jnp.where(in_group, tile_rows, rows), place)


# Leaves of operands. For a dense array, the only leaf is the array.


def _unpack_before(x: Any, axis: int) -> Any:
    """Return `x` with one code per byte, unless it is packed along an axis after `axis`."""
    is_packed = isinstance(x, QArray) and x.packing and x.packing.axis + x.ndim <= axis
    return unpack_codes(x) if is_packed else x


def _take(x: Operand, axis: int, index: jax.Array, first: int = 0) -> list[jax.Array]:
    """Take entries along an axis from all leaves but the first `first` ones.

    The first axis of `index` becomes the first axis of the result. Its second axis, if any, takes
    the place of `axis`. Indices out of bounds give finite values.
    """
    size = x.shape[axis]
    taken = []
    for i, leaf in enumerate(jax.tree.leaves(x)[first:], first):
        entries = index // (size // leaf.shape[axis])
        # Fill scales with 1, because some dtypes of scales have no 0.
        new = jnp.take(leaf, entries, axis, mode="fill", fill_value=0 if i == 0 else 1)
        taken.append(jnp.moveaxis(new, axis, 0))
    return taken


def _rebuild(x: Operand, leaves: list) -> Any:
    return jax.tree.unflatten(jax.tree.structure(x), leaves)
