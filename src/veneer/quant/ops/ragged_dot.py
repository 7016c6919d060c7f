"""`ragged_dot` and `ragged_dot_general` with quantized operands, as in a mixture of experts.

On CPU, JAX's `ragged_dot` needs dense matrices. It copies all rows for each group, with zeros in
the rows of other groups, and sums over groups. With 64 experts, this is 64 times the work.
Here the rows of each group are cut into tiles of one size. A loop multiplies each tile with the
matrix of its group, and dequantizes only that matrix. The number of tiles depends on the sizes of
the groups, which are not known when JAX traces the loop. So the loop has as many steps as there can
be tiles, and the last steps may do nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.primitives.axes import DotDimensionNumbers, without
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.value import materialise_one
from ..arrays import QUANTIZABLE, QArray
from .dot_general import STRATEGIES, complete_report, dot_general
from .operands import accumulator, dequantized, fixes_dtypes, operand_pair
from .product import (
    Operand,
    Plan,
    QuantizedProduct,
    dense_nbytes,
    describe_dequantized,
    execute,
    first_plan,
    runs_on_cpu,
)

_MATRICES = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])


def ragged_dot(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    group_sizes: ArrayLike | ImplicitArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
) -> jax.Array:
    """Multiply groups of rows like `jax.lax.ragged_dot`; one or both operands can be a `QArray`.

    This is the product of a mixture of experts: tokens sorted by expert, times one matrix per
    expert. Quantize experts `[G, K, N]` with `channelwise_axes=[0, 2]`, or with tiles along axis 1.

    **Arguments:**

    - `lhs`: the rows, `[M, K]`.
    - `rhs`: the matrices, `[G, K, N]`.
    - `group_sizes`: the number of rows of each group, `[G]`.
    - `precision`, `preferred_element_type`, `group_offset`: as for `jax.lax.ragged_dot`. JAX does
      not implement `group_offset` on all platforms.

    **Returns:** an array `[M, N]`: each row times the matrix of its group. It has the dtype of the
    product of the dense arrays. Rows that belong to no group are 0.

    **Raises:** the errors of `jax.lax.ragged_dot`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> experts = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> q = vn.quant.quantize(experts, "nf4", channelwise_axes=[0, 2])
    >>> vn.quant.ragged_dot(jnp.ones((4, 2)), q, jnp.array([1, 2]))[:, 0].tolist()
    [1.0, 10.0, 10.0, 0.0]
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, _MATRICES, precision, preferred_element_type, group_offset
    )


def ragged_dot_general(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    group_sizes: ArrayLike | ImplicitArray,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
) -> jax.Array:
    """Multiply groups like `jax.lax.ragged_dot_general`; one or both operands can be a `QArray`.

    The ragged axis determines how the product is computed:

    | ragged axis | product |
    |---|---|
    | a batch axis | by `vn.quant.dot_general`, because the group sizes have no effect |
    | a free axis of `lhs`, and `rhs` is quantized | on CPU, one group at a time; else dequantized |
    | any other case, such as a contracted axis | the operands are dequantized |

    If groups are multiplied one at a time, `rhs` is never dequantized as a whole. A NaN in a row of
    `lhs` then affects only that row of the result. A NaN in the matrix of a group affects only the
    rows of that group.

    **Arguments:**

    - `lhs`, `rhs`, `group_sizes`: arrays; `lhs` and `rhs` can be QArrays. Implicit arrays of other
      types are materialized.
    - `dimension_numbers`: a `jax.lax.RaggedDotDimensionNumbers`. In JAX, this argument is called
      `ragged_dot_dimension_numbers`.
    - `precision`, `preferred_element_type`, `group_offset`: as for `jax.lax.ragged_dot_general`.

    **Returns:** an array with the shape and dtype of the product of the dense arrays. The values
    are the same up to rounding.

    **Raises:** the errors of `jax.lax.ragged_dot_general`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.ones((2, 3)), "int8")
    >>> summed = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    >>> y = vn.quant.ragged_dot_general(jnp.ones((2, 1)), w, jnp.array([2, 0]), summed)
    >>> y.shape, [round(float(v), 1) for v in y[:, 0, 0]]
    ((2, 1, 3), [2.0, 0.0])
    """
    group_sizes = jnp.asarray(materialise_one(group_sizes))
    params = dimension_numbers, precision, preferred_element_type, group_offset
    return _plan_ragged(lhs, rhs, group_sizes, *params)()


def _plan_ragged(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    group_sizes: jax.Array,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
    preferred_element_type: DTypeLike | None,
    group_offset: ArrayLike | None,
) -> Plan:
    """Return a plan for `ragged_dot_general`, as described in the table of that function.

    **Raises:** the errors of `jax.lax.ragged_dot_general`, for shapes that do not match.
    """
    lhs, rhs = operand_pair(lhs, rhs, precision, preferred_element_type)
    multiply: Callable[..., jax.Array] = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs, group_sizes)]
    out = jax.eval_shape(multiply, *avals)
    operands = lhs, rhs, group_sizes
    how_dense = describe_dequantized(lhs, rhs)

    def multiply_dense(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        lhs, rhs = dequantized(lhs), dequantized(rhs)
        return multiply(lhs, rhs, group_sizes, group_offset=group_offset)

    dense = Plan(how_dense, multiply_dense, operands, dense_nbytes(lhs, rhs))
    if group_offset is not None:
        return dense
    dot_numbers = DotDimensionNumbers.from_lax(dimension_numbers.dot_dimension_numbers)
    (ragged_axis,) = dimension_numbers.lhs_ragged_dimensions
    if ragged_axis in dot_numbers.batch[0]:  # groups do not change the result
        product = QuantizedProduct.create(lhs, rhs, dot_numbers, precision, preferred_element_type)
        plan = complete_report(first_plan(product, STRATEGIES), product)
        return dataclasses.replace(plan, how=f"as dot_general: {plan.how}")
    # Symbolic sizes, in programs for export, cannot be cut into tiles.
    are_known = all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape))
    has_group_axis = bool(dimension_numbers.rhs_group_dimensions)
    if not (isinstance(rhs, QArray) and has_group_axis and are_known):
        return dense
    how = f"one group at a time on CPU (fallback: {how_dense})"
    if 0 in (lhs.shape[ragged_axis], group_sizes.size):
        return Plan(how, lambda: jnp.zeros(out.shape, out.dtype), ())
    compute = functools.partial(
        _multiply_groups,
        dimension_numbers=dimension_numbers,
        precision=precision,
        out_dtype=out.dtype,
    )
    return Plan(how, compute, operands, () if runs_on_cpu() else dense.dense)


# Jitted, because outside of `jit` the loop would be compiled in each call.
@functools.partial(jax.jit, static_argnames=("dimension_numbers", "precision", "out_dtype"))
def _multiply_groups(
    lhs: Operand,
    rhs: QArray,
    group_sizes: jax.Array,
    *,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """Compute `ragged_dot_general`, one group at a time on CPU, with dense operands elsewhere.

    The ragged axis of `lhs` must be a free axis, and `rhs` must have a group axis.
    """

    def multiply_wide(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        dtype = out_dtype
        if {lhs.dtype, rhs.dtype, out_dtype} <= set(QUANTIZABLE) and not fixes_dtypes(precision):
            # CPUs multiply f32 several times faster than floats of 16 bits.
            dtypes = lhs.dtype, rhs.dtype, accumulator(out_dtype)
            dtype = functools.reduce(jnp.promote_types, dtypes)
            lhs, rhs = (
                x.replace(dense_dtype=dtype) if isinstance(x, QArray) else x.astype(dtype)
                for x in (lhs, rhs)
            )
        params = _GroupedDotParams(
            DotDimensionNumbers.from_lax(dimension_numbers.dot_dimension_numbers),
            int(dimension_numbers.lhs_ragged_dimensions[0]),
            int(dimension_numbers.rhs_group_dimensions[0]),
            precision,
            dtype,
        )
        return _multiply_on_cpu(lhs, rhs, group_sizes, params).astype(out_dtype)

    def multiply_dense(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        # JAX 0.10 to 0.12 batch `ragged_dot_general` only if all operands are batched. Make each
        # operand depend on all operands, through the scalar `false`. Then `vmap` batches all of
        # them if it batches one.
        arrays = dequantized(lhs), dequantized(rhs), group_sizes
        false = functools.reduce(jnp.logical_or, [x.ravel()[:1].any() for x in arrays]) & False
        lhs, rhs, group_sizes = [jnp.where(false, jnp.zeros_like(x), x) for x in arrays]
        return lax.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            dimension_numbers,
            precision=precision,
            preferred_element_type=out_dtype,
        )

    # A derivative dequantizes again. Otherwise dense weights would be kept for the backward pass.
    @jax.checkpoint
    def multiply(*args: Any) -> jax.Array:
        return lax.platform_dependent(*args, cpu=multiply_wide, default=multiply_dense)

    return multiply(lhs, rhs, group_sizes)


@register("ragged_dot_general")
def _ragged_dot_general(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    group_sizes: ArrayLike,
    *,
    ragged_dot_dimension_numbers,
    precision,
    preferred_element_type,
    group_offset,
    out_sharding,
) -> Any:
    if out_sharding is not None:
        return NotImplemented
    params = ragged_dot_dimension_numbers, precision, preferred_element_type, group_offset
    return execute(_plan_ragged(lhs, rhs, jnp.asarray(group_sizes), *params))


# With fewer rows, XLA takes as long. With more rows, the time to dequantize the matrix for each
# tile is a small part of the total.
_LEAST_ROWS = 8
_MOST_ROWS = 256


class _GroupedDotParams(NamedTuple):
    """The parameters of a `jax.lax.ragged_dot_general` whose ragged axis is not contracted.

    **Arguments:**

    - `dimension_numbers`: the contracted axes and the batch axes.
    - `lhs_ragged`: the ragged axis of lhs. Its entries, the rows, are divided into groups.
    - `rhs_group`: the group axis of rhs, with one matrix per group.
    - `precision`, `preferred_element_type`: as for `vn.quant.dot_general`, which multiplies each
      tile.
    """

    dimension_numbers: DotDimensionNumbers
    lhs_ragged: int
    rhs_group: int
    precision: Any
    preferred_element_type: DTypeLike


def _multiply_on_cpu(
    lhs: Operand, rhs: QArray, group_sizes: jax.Array, params: _GroupedDotParams
) -> jax.Array:
    """Return `jax.lax.ragged_dot_general`, one group at a time, for a free ragged axis.

    **Arguments:**

    - `lhs`, `rhs`: the rows and the matrices. The ragged axis and the group axis are not empty.
    - `group_sizes`: the number of rows of each group, `[G]` for G groups. With shape `[..., G]`,
      sizes differ along the batch axes, or along the free axes of lhs before the ragged axis.
    - `params`: the axes and dtypes.
    """
    if group_sizes.ndim == 1:
        return _multiply_tiles(lhs, rhs, group_sizes, params)
    # The groups differ along the first axis of `group_sizes`, which is the first axis of the
    # output. Compute the product for one entry after the other.
    lhs_batch, rhs_batch = params.dimension_numbers.batch
    if lhs_batch:
        lhs_axis, rhs_axis = lhs_batch[0], rhs_batch[0]
        rhs = _unpack_up_to(rhs, rhs_axis)
        rhs_leaves = _take(rhs, rhs_axis, jnp.arange(rhs.shape[rhs_axis]))
    else:
        lhs_axis, rhs_axis = params.dimension_numbers.free(0, lhs.ndim)[0], None
        rhs_leaves = None
    lhs = _unpack_up_to(lhs, lhs_axis)
    lhs_leaves = _take(lhs, lhs_axis, jnp.arange(lhs.shape[lhs_axis]))
    # Remove `lhs_axis` and `rhs_axis`, which an entry does not have. Later axes get lower numbers.
    (lhs_ragged,) = without((params.lhs_ragged,), lhs_axis)
    (rhs_group,) = without((params.rhs_group,), rhs_axis)
    numbers = params.dimension_numbers.without(lhs_axis, rhs_axis)
    entry_params = params._replace(
        dimension_numbers=numbers, lhs_ragged=lhs_ragged, rhs_group=rhs_group
    )

    def multiply_entry(entry: Any) -> jax.Array:
        lhs_entry, rhs_entry, entry_sizes = entry
        return _multiply_on_cpu(
            _rebuild(lhs, lhs_entry),
            rhs if rhs_entry is None else _rebuild(rhs, rhs_entry),
            entry_sizes,
            entry_params,
        )

    return lax.map(multiply_entry, (lhs_leaves, rhs_leaves, group_sizes))


def _multiply_tiles(
    lhs: Operand, rhs: QArray, group_sizes: jax.Array, params: _GroupedDotParams
) -> jax.Array:
    """Return the product by a loop over tiles of rows. `group_sizes` has one size per group."""
    numbers, ragged_axis, group_axis, precision, out_dtype = params
    lhs = _unpack_up_to(lhs, ragged_axis)
    rhs = _unpack_up_to(rhs, group_axis)
    rows, groups = lhs.shape[ragged_axis], rhs.shape[group_axis]
    is_packed = None if _has_kernel(lhs, rhs, params) else rhs.format.bits < 8
    tiles = _cut_rows(group_sizes, rows, _choose_tile_rows(rows, groups, packed=is_packed))

    lhs_leaves = _take(lhs, ragged_axis, tiles.rows)
    # Each step selects the codes of its group, because selecting them before the loop would copy
    # the codes of a group for each of its tiles. The other leaves are selected before the loop,
    # because they have gradients. If they were selected in the loop, each step of the backward pass
    # would add to the gradients of all groups.
    rhs_leaves = _take(rhs, group_axis, tiles.group, skip=1)
    tile_numbers = numbers.without(None, group_axis)

    def multiply(lhs_leaves: list, rhs_leaves: list, group: jax.Array) -> jax.Array:
        packed = lax.dynamic_index_in_dim(rhs.packed, group, group_axis, keepdims=False)
        operands = _rebuild(lhs, lhs_leaves), _rebuild(rhs, [packed, *rhs_leaves])
        return dot_general(*operands, tile_numbers, precision, out_dtype)

    def fill_zeros(lhs_leaves: list, rhs_leaves: list, group: jax.Array) -> jax.Array:
        out = jax.eval_shape(multiply, lhs_leaves, rhs_leaves, group)
        # In a shard_map, the zeros must vary over the same devices as the operands.
        operands = (lhs_leaves, rhs_leaves, rhs.packed, group)
        zeros = [lax.full_like(x, 0, out.dtype, shape=()) for x in jax.tree.leaves(operands)]
        return jnp.broadcast_to(sum(zeros), out.shape)

    # A derivative dequantizes again, instead of keeping a dense matrix for each step. The whole
    # `lax.cond` is checkpointed, because it would otherwise keep all codes for each step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def multiply_if_used(is_used: jax.Array, *args: Any) -> jax.Array:
        return lax.cond(is_used, multiply, fill_zeros, *args)

    steps = (tiles.is_used, lhs_leaves, rhs_leaves, tiles.group)
    _, out = lax.scan(lambda _, args: (None, multiply_if_used(*args)), None, steps)
    # Merge the axis of steps with the axis of rows in a tile, and put the rows in order.
    row_axis = len(numbers.batch[0]) + numbers.free(0, lhs.ndim).index(ragged_axis)
    out = jnp.moveaxis(out, 0, row_axis)
    out = lax.collapse(out, row_axis, row_axis + 2)
    return jnp.take(out, tiles.position, row_axis, mode="fill", fill_value=0)


def _has_kernel(lhs: Operand, rhs: QArray, params: _GroupedDotParams) -> bool:
    """Return whether a CPU kernel multiplies one row with the matrix of its group."""
    numbers, ragged_axis, group_axis, precision, out_dtype = params
    platforms: list[str] = []

    def plan_row(lhs: Any, rhs: Any) -> None:
        row = [lax.slice_in_dim(leaf, 0, 1, axis=ragged_axis) for leaf in jax.tree.leaves(lhs)]
        matrix = [lax.index_in_dim(x, 0, group_axis, keepdims=False) for x in jax.tree.leaves(rhs)]
        operands = _rebuild(lhs, row), _rebuild(rhs, matrix)
        tile_numbers = numbers.without(None, group_axis)
        product = QuantizedProduct.create(*operands, tile_numbers, precision, out_dtype)
        platforms.extend(first_plan(product, STRATEGIES).kernels_for)

    # Planning needs shapes only, so no row and no matrix is computed.
    jax.eval_shape(plan_row, lhs, rhs)
    return "cpu" in platforms


def _choose_tile_rows(rows: int, groups: int, *, packed: bool | None) -> int:
    """Choose the number of rows of a tile: a power of two near the average size of a group.

    **Arguments:**

    - `rows`, `groups`: the total number of rows, and the number of groups.
    - `packed`: True if codes are unpacked for each tile, which takes as long as multiplying about
      ten rows. Then tiles are twice as large. None if a kernel multiplies the tiles. Then the time
      is proportional to the number of rows, and tiles can be small.

    >>> [_choose_tile_rows(rows, 8, packed=False) for rows in (3, 8, 64, 500, 4000)]
    [3, 8, 8, 64, 256]
    >>> [_choose_tile_rows(rows, 8, packed=True) for rows in (3, 8, 64, 500, 4000)]
    [3, 8, 16, 128, 256]
    >>> [_choose_tile_rows(rows, 8, packed=None) for rows in (3, 8, 30, 64, 500, 4000)]
    [1, 1, 4, 8, 64, 256]
    """
    average = -(-rows // groups)  # rounded up
    target = 2 * average if packed else average
    power_of_two = 1 << (target - 1).bit_length()  # rounded up
    least_rows = 1 if packed is None else _LEAST_ROWS
    return min(max(power_of_two, least_rows), _MOST_ROWS, rows)


class _RowTiles(NamedTuple):
    """The rows of each tile, for a loop with one tile per step. A tile has rows of one group.

    **Arguments:**

    - `is_used`: `[steps]`, whether the tile of a step has rows.
    - `group`: `[steps]`, the index of the group of each tile.
    - `rows`: `[steps, size]`, the indices of the rows of each tile. Tiles with fewer than `size`
      rows are padded with an index that is out of bounds.
    - `position`: `[total rows]`, the index of each row in `rows.ravel()`. It is out of bounds for a
      row without a group.
    """

    is_used: jax.Array
    group: jax.Array
    rows: jax.Array
    position: jax.Array


def _cut_rows(group_sizes: jax.Array, total_rows: int, size: int) -> _RowTiles:
    """Cut the rows of each group into tiles of `size` rows. The last tile may have fewer rows.

    `group_sizes` has the number of rows of each group. `total_rows` is the number of all rows,
    including rows without a group.
    """
    # For each group: its first and last row, and its first and last tile. Ends are exclusive.
    groups = group_sizes.shape[0]
    row_ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), total_rows)
    row_starts = jnp.concatenate([jnp.zeros_like(row_ends[:1]), row_ends[:-1]])
    tile_counts = (row_ends - row_starts + size - 1) // size
    tile_ends = jnp.cumsum(tile_counts)
    tile_starts = tile_ends - tile_counts

    # For each step: its group and its rows. The number of steps is enough for the worst case: each
    # group has one row, except for one group, which has all other rows.
    max_groups = min(groups, total_rows)
    steps = jnp.arange(max_groups + (total_rows - max_groups) // size, dtype=jnp.int32)
    step_group = jnp.searchsorted(tile_ends, steps, side="right", method="compare_all")
    step_group = step_group.astype(jnp.int32)
    is_used = step_group < groups
    step_group = jnp.minimum(step_group, groups - 1)
    start = row_starts[step_group] + (steps - tile_starts[step_group]) * size
    step_rows = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    is_in_group = (step_rows < row_ends[step_group][:, None]) & is_used[:, None]
    step_rows = jnp.where(is_in_group, step_rows, total_rows)

    # For each row: its group, and its position among the rows of all steps.
    row = jnp.arange(total_rows, dtype=jnp.int32)
    row_group = jnp.searchsorted(row_ends, row, side="right", method="compare_all")
    row_group = row_group.astype(jnp.int32)
    has_group = row_group < groups
    row_group = jnp.minimum(row_group, groups - 1)
    position = tile_starts[row_group] * size + row - row_starts[row_group]
    position = jnp.where(has_group, position, steps.size * size)
    return _RowTiles(is_used, step_group, step_rows, position)


# Leaves of operands. For a dense array, the only leaf is the array.


def _unpack_up_to(x: Any, axis: int) -> Any:
    """Return an operand that can be indexed along `axis`: unpack its codes if necessary.

    If `x` is a QArray whose codes are packed along `axis` or an earlier axis, the result has one
    code per byte. All other operands are returned unchanged.
    """
    is_packed = isinstance(x, QArray) and x.packing and x.packing.axis + x.ndim <= axis
    return x.unpacked() if is_packed else x


def _take(x: Operand, axis: int, index: jax.Array, skip: int = 0) -> list[jax.Array]:
    """Take entries along an axis from the leaves of an operand, such as its codes and scales.

    **Arguments:**

    - `x`: a dense array or a QArray.
    - `axis`: the axis of the dense array. Leaves with one entry per tile are indexed by tile.
    - `index`: the indices, of rank 1 or 2. Indices out of bounds give finite values.
    - `skip`: the number of leaves to skip. With 1, the codes of a QArray are skipped.

    **Returns:** the leaves. The first axis of `index` becomes the first axis of each leaf. The
    second axis of `index`, if any, takes the place of `axis`.
    """
    size = x.shape[axis]
    taken = []
    for i, leaf in enumerate(jax.tree.leaves(x)):
        if i < skip:
            continue
        # One entry of a scale is for all indices of a tile. Codes have one entry per index.
        tile_index = index // (size // leaf.shape[axis])
        # Fill codes, leaf 0, with 0. Fill scales with 1, because some of their dtypes have no 0.
        entries = jnp.take(leaf, tile_index, axis, mode="fill", fill_value=0 if i == 0 else 1)
        taken.append(jnp.moveaxis(entries, axis, 0))
    return taken


def _rebuild(x: Operand, leaves: list) -> Any:
    """Return an operand with the structure of `x` and the leaves `leaves`."""
    return jax.tree.unflatten(jax.tree.structure(x), leaves)
