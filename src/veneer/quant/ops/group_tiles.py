"""Products of the rows of groups with a matrix for each group, a tile of rows at a time.

JAX's `ragged_dot` for a CPU makes a copy of all rows for each group, in which those of others are
0, and sums over groups: with 64 experts, 64 times the work, after all experts are dequantised. Here
the rows of a group are cut in tiles of one size, and a loop over tiles multiplies each with the
matrix of its group, which alone is dequantised then. How many tiles there are depends on the sizes
of groups. The loop is as long as there may be, and does nothing in the steps that are left over.

Rows of one group never meet the matrix of another: a NaN in one is seen in its own group alone.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers, without
from ..arrays.qarray import QArray
from .dot_general import dot_general, plan_of
from .product import DotParams

# By XLA fewer rows take as long; with more, dequantising a matrix again takes little of the time.
_LEAST_ROWS = 8
_MOST_ROWS = 256


_Operand = TypeVar("_Operand", bound=jax.Array | QArray)


class GroupedDotParams(NamedTuple):
    """What `jax.lax.ragged_dot_general` is told beside operands, of a ragged axis that is kept.

    **Arguments:**

    - `dimension_numbers`: of the product of a row.
    - `lhs_ragged`, `rhs_group`: the axis of lhs that is cut in groups, and that of groups of rhs.
    - `precision`, `preferred_element_type`: for `vn.quant.dot_general`, of each tile.
    """

    dimension_numbers: DotDimensionNumbers
    lhs_ragged: int
    rhs_group: int
    precision: Any
    preferred_element_type: DTypeLike

    def without(self, lhs_axis: int, rhs_axis: int | None) -> "GroupedDotParams":
        """Returns those of a product of which one axis of lhs, or of both, is gone."""
        (lhs_ragged,) = without((self.lhs_ragged,), lhs_axis)
        (rhs_group,) = without((self.rhs_group,), rhs_axis)
        numbers = self.dimension_numbers.without(lhs_axis, rhs_axis)
        return self._replace(dimension_numbers=numbers, lhs_ragged=lhs_ragged, rhs_group=rhs_group)


def multiply_groups(
    lhs: jax.Array | QArray, rhs: QArray, group_sizes: jax.Array, params: GroupedDotParams
) -> jax.Array:
    """Returns `ragged_dot_general` where the ragged axis is one that is not summed.

    **Arguments:**

    - `lhs`, `rhs`: of any shapes but with an empty ragged or group axis.
    - `group_sizes`: `[G]`, or with the axes before it that the groups of lhs depend on.
    - `params`: the axes, and the types.
    """
    if group_sizes.ndim == 1:
        return _by_tiles(lhs, rhs, group_sizes, params)
    # Groups differ along the first axis of the output: one product after the other.
    lhs_batch, rhs_batch = params.dimension_numbers.batch
    if lhs_batch:
        lhs_axis, rhs_axis = lhs_batch[0], rhs_batch[0]
        rhs = _with_leading_codes(rhs, rhs_axis)
        rhs_leaves = _take(rhs, rhs_axis, jnp.arange(rhs.shape[rhs_axis]))
    else:
        lhs_axis, rhs_axis = params.dimension_numbers.free(0, lhs.ndim)[0], None
        rhs_leaves = None
    lhs = _with_leading_codes(lhs, lhs_axis)
    lhs_leaves = _take(lhs, lhs_axis, jnp.arange(lhs.shape[lhs_axis]))

    def one(step: Any) -> jax.Array:
        left, right, sizes = step
        return multiply_groups(
            _rebuild(lhs, left),
            rhs if right is None else _rebuild(rhs, right),
            sizes,
            params.without(lhs_axis, rhs_axis),
        )

    return lax.map(one, (lhs_leaves, rhs_leaves, group_sizes))


def _by_tiles(
    lhs: jax.Array | QArray, rhs: QArray, group_sizes: jax.Array, params: GroupedDotParams
) -> jax.Array:
    numbers, axis, group_axis = params[:3]
    lhs = _with_leading_codes(lhs, axis)
    rhs = _with_leading_codes(rhs, group_axis)
    packed = None if _has_kernel(lhs, rhs, params) else rhs.format.bits < 8
    count = _rows_of_tile(lhs.shape[axis], rhs.shape[group_axis], packed=packed)
    tiles = _tiles(group_sizes, lhs.shape[axis], count)

    lhs_leaves = _take(lhs, axis, tiles.rows)
    # Codes are taken within the loop, for a matrix would be copied for each of its tiles, but not
    # what has a derivative: in a loop it would be added up over all groups at each step.
    rhs_leaves = _take(rhs, group_axis, tiles.group, first=1)
    of_tile = numbers.without(None, group_axis)

    def product(left: list, right: list, group: jax.Array) -> jax.Array:
        packed = lax.dynamic_index_in_dim(rhs.packed, group, group_axis, keepdims=False)
        return dot_general(
            _rebuild(lhs, left),
            _rebuild(rhs, [packed, *right]),
            of_tile,
            params.precision,
            params.preferred_element_type,
        )

    def nothing(left: list, right: list, group: jax.Array) -> jax.Array:
        out = jax.eval_shape(product, left, right, group)
        # In a shard_map, zeros that may differ from device to device as the operands do.
        operands = (left, right, rhs.packed, group)
        zeros = [lax.full_like(x, 0, out.dtype, shape=()) for x in jax.tree.leaves(operands)]
        return jnp.broadcast_to(sum(zeros), out.shape)

    # A derivative dequantises once more, instead of keeping a dense matrix for each step. What is
    # computed again includes the choice: the branches of one would keep all codes for each step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product_if_used(used: jax.Array, *args: Any) -> jax.Array:
        return lax.cond(used, product, nothing, *args)

    steps = (tiles.used, lhs_leaves, rhs_leaves, tiles.group)
    _, out = lax.scan(lambda _, args: (None, product_if_used(*args)), None, steps)
    row_axis = len(numbers.batch[0]) + numbers.free(0, lhs.ndim).index(axis)
    out = jnp.moveaxis(out, 0, row_axis)
    out = lax.collapse(out, row_axis, row_axis + 2)
    return jnp.take(out, tiles.place, row_axis, mode="fill", fill_value=0)


def _has_kernel(lhs: jax.Array | QArray, rhs: QArray, params: GroupedDotParams) -> bool:
    """Whether a row meets the matrix of its group in a kernel on a CPU."""
    numbers, axis, group_axis, precision, out_dtype = params
    of_row = DotParams(numbers.without(None, group_axis), precision, out_dtype)
    found = []

    def row(lhs: Any, rhs: Any) -> None:
        one = [lax.slice_in_dim(leaf, 0, 1, axis=axis) for leaf in jax.tree.leaves(lhs)]
        matrix = [lax.index_in_dim(x, 0, group_axis, keepdims=False) for x in jax.tree.leaves(rhs)]
        plan = plan_of(_rebuild(lhs, one), _rebuild(rhs, matrix), of_row)
        found.append("cpu" in plan.kernels_for)

    jax.eval_shape(row, lhs, rhs)
    return found[0]


def _rows_of_tile(rows: int, groups: int, *, packed: bool | None) -> int:
    """Chooses the rows of a tile: the least power of two that holds an average group.

    Where codes are unpacked for each tile, which takes as long as to multiply some ten rows, it is
    one that holds most groups. By a kernel, None, a tile takes as long as it has rows, and there
    is no least.

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
    """Tiles of at most `count` rows each, all of one group, in the order of rows.

    - `used`: `[steps]`, whether there is such a tile.
    - `group`: `[steps]`, the group of its rows.
    - `rows`: `[steps, count]`, its rows, followed by the number of rows.
    - `place`: `[rows]`, where each row is among those of all tiles, or the number of these if it is
      of no group.
    """

    used: jax.Array
    group: jax.Array
    rows: jax.Array
    place: jax.Array


def _tiles(group_sizes: jax.Array, rows: int, count: int) -> _RowTiles:
    groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tiles = (ends - starts + count - 1) // count
    last = jnp.cumsum(tiles)
    # Most tiles are needed where each group has one row, and one of them all the others.
    not_empty = min(groups, rows)
    steps = jnp.arange(not_empty + (rows - not_empty) // count, dtype=jnp.int32)

    group = jnp.searchsorted(last, steps, side="right", method="compare_all").astype(jnp.int32)
    used = group < groups
    group = jnp.minimum(group, groups - 1)
    start = starts[group] + (steps - (last - tiles)[group]) * count
    tile_rows = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    in_group = (tile_rows < ends[group][:, None]) & used[:, None]

    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = jnp.searchsorted(ends, row, side="right", method="compare_all").astype(jnp.int32)
    in_any = of_row < groups
    of_row = jnp.minimum(of_row, groups - 1)
    place = (last - tiles)[of_row] * count + row - starts[of_row]
    place = jnp.where(in_any, place, steps.size * count)
    return _RowTiles(used, group, jnp.where(in_group, tile_rows, rows), place)


# Parts of QArrays. Of an array, they do the same.


def _with_leading_codes(x: _Operand, axis: int) -> _Operand:
    """Returns `x` with a packing, if any, along an axis behind the given one, which can go then."""
    if not isinstance(x, QArray) or x.packing is None or x.packing.axis + x.ndim > axis:
        return x
    return x.replace(packed=x.format.to_fields(x.codes()), packing=None)  # type: ignore[return-value]


def _take(x: jax.Array | QArray, axis: int, index: jax.Array, first: int = 0) -> list[jax.Array]:
    """Takes entries along an axis from each leaf but the first ones; the axes of `index` lead.

    If there are several, only the first of them leads, and the others are where the axis was.
    Indices out of bounds give what is finite.
    """
    size = x.shape[axis]
    taken = []
    for i, leaf in enumerate(jax.tree.leaves(x)[first:], first):
        entries = index // (size // leaf.shape[axis])
        # Not a scale of 0, which some formats of scales have not.
        new = jnp.take(leaf, entries, axis, mode="fill", fill_value=0 if i == 0 else 1)
        taken.append(jnp.moveaxis(new, axis, 0))
    return taken


def _rebuild(x: jax.Array | QArray, leaves: list) -> Any:
    return jax.tree.unflatten(jax.tree.structure(x), leaves)
