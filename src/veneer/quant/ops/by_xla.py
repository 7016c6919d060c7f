"""The strategies that use XLA operations, on codes or on dense arrays.

A scale that does not vary along the contracted axes can be applied after the sum:
`sum_k x[k] * (codes[k, n] * scale[n]) = (sum_k x[k] * codes[k, n]) * scale[n]`. If the scale varies
and XLA can multiply the codes of both operands, each tile is summed and scaled separately.
Otherwise the operand is dequantized.

XLA multiplies arrays in memory. If codes are converted to floats, all values of the operand are in
memory as floats, and `Plan.dense` is their number of bytes.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.primitives.axes import DotDimensionNumbers
from ..arrays import QUANTIZABLE, QArray
from ..arrays.pairs import runs_on_gpu
from ..formats.tiles import Leaf, Shape
from .operands import (
    accumulator,
    code_factor,
    dequantized,
    fits_int32,
    fixes_dtypes,
    has_minimum,
    have_byte_codes,
    int8_codes,
    is_exact_in,
    outer_scale,
    unscaled,
)
from .product import (
    SIDES,
    Plan,
    QuantizedProduct,
    broadcast_tiles,
    dense_nbytes,
    describe_dequantized,
    first_plan,
    runs_on_cpu,
    split_minimum,
)

# The number of terms in the smallest tiles that are summed separately. Each product of tiles is
# added to the full output. For smaller tiles, this takes longer than dequantizing the operands.
_LEAST_TILE = 128
# The same for outputs with at most `_FEW_ROWS` rows or columns, which are added faster.
_LEAST_TILE_FOR_FEW_ROWS = 16
_FEW_ROWS = 16


def plan_without_minimum(product: QuantizedProduct) -> Plan | None:
    """Return a plan that multiplies without minima, and adds the minima with a second product.

    Minima are offsets, one per tile. Return None if no operand has minima, or if codes cannot be
    multiplied before scales are applied.
    """
    split = split_minimum(product)
    if split is None:
        return None
    main_product, add_minimum_term = split
    return add_minimum_term(first_plan(main_product, XLA_STRATEGIES))


def plan_scaled_matmul(product: QuantizedProduct) -> Plan | None:
    """Return a plan that multiplies mxfp8 codes and scales by `jax.nn.scaled_matmul`.

    Return None if an operand is not mxfp8, or if the default device must dequantize mxfp8 operands.
    """
    lhs, rhs = product.operands
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray) and has_block_scaled_matmul()):
        return None
    # cuDNN supports mxfp8 with tiles along the only contracted axis: float8_e8m0fnu scales per 32
    # codes in float8.
    for q, axes in zip((lhs, rhs), product.dimension_numbers.contracting, strict=True):
        is_mxfp8 = q.qtype in ("mxfp8", "mxfp8_e5m2") and q.scale.dtype == jnp.float8_e8m0fnu
        if not is_mxfp8 or len(axes) != 1 or q.tile_shape[axes[0]] != 32:
            return None
    fallback = plan_values(product)
    if fallback is None or product.out_sharding is not None:
        return None
    if 0 in (*lhs.shape, *rhs.shape) or product.out_dtype == jnp.float64:
        return None

    # JAX has no derivative of scaled_matmul.
    @jax.custom_jvp
    def compute(product: QuantizedProduct) -> jax.Array:
        return lax.platform_dependent(product, cuda=multiply_block_scaled, default=fallback.compute)

    @compute.defjvp
    def jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        return compute(*primals), jax.jvp(fallback.compute, primals, tangents)[1]

    return Plan("jax.nn.scaled_matmul of codes and scales", compute, (product,))


def plan_codes(product: QuantizedProduct) -> Plan | None:
    """Return a plan that multiplies the codes of both operands, and applies scales to the sums.

    If scales vary along the contracted axes, each tile is summed and scaled separately. Return None
    if XLA cannot multiply the codes: see `find_code_product`.
    """
    code_product = find_code_product(product)
    if code_product is None:
        return None
    kind, tile_count, tile_sizes = code_product
    if tile_count > 1:
        how = f"multiply {kind} codes in {tile_count} tiles, scale and add the results"
        return Plan(how, functools.partial(_multiply_tiles, tile_sizes=tile_sizes), (product,))
    # XLA for CPUs multiplies no float8. It converts both operands to f32.
    is_widened = kind == "float8" and runs_on_cpu()
    dense = dense_nbytes(*product.operands, dtype="float32") if is_widened else ()
    return Plan(f"multiply {kind} codes, scale the output", _multiply_codes, (product,), dense)


def plan_values(product: QuantizedProduct) -> Plan | None:
    """Return a plan that converts codes to floats and multiplies the floats.

    The scales of an operand are applied to the output if they do not vary along the contracted
    axes. Otherwise the operand is dequantized first. Return None if `product.can_scale_output` is
    False, or if a contracted axis has size 0.
    """
    if not product.can_scale_output or product.terms == 0:
        return None
    descriptions, are_scaled_after = [], []
    for side, x in enumerate(product.operands):
        if not isinstance(x, QArray):
            are_scaled_after.append(False)
            continue
        reason = _reason_to_dequantize(x, product, side)
        are_scaled_after.append(reason == "")
        if reason:
            descriptions.append(f"dequantize {SIDES[side]}, {reason}")
        else:
            descriptions.append(f"convert codes of {SIDES[side]} to float, scale the output")
    compute = functools.partial(_multiply_values, are_scaled_after=tuple(are_scaled_after))
    return Plan("; ".join(descriptions), compute, (product,), dense_nbytes(*product.operands))


def plan_dense(product: QuantizedProduct) -> Plan:
    """Return a plan that dequantizes the operands and multiplies the dense arrays."""
    lhs, rhs = product.operands
    how = describe_dequantized(lhs, rhs)
    if fixes_dtypes(product.precision):
        how += ", precision fixes the dtypes"
    elif product.out_dtype in QUANTIZABLE and product.terms != 0:
        how += f", lhs is {lhs.dtype.name} and rhs {rhs.dtype.name}"

    def multiply(product: QuantizedProduct) -> jax.Array:
        lhs, rhs = map(dequantized, product.operands)
        return product.dot(lhs, rhs, product.preferred_element_type)

    return Plan(how, multiply, (product,), dense_nbytes(lhs, rhs))


#: The strategies in order of preference. The last strategy supports all products.
XLA_STRATEGIES = (plan_without_minimum, plan_scaled_matmul, plan_codes, plan_values, plan_dense)


# Conditions.


def has_block_scaled_matmul() -> bool:
    """Return whether the default device multiplies mx formats: NVIDIA's GPUs from Blackwell on.

    On older GPUs XLA dequantizes the operands of scaled_matmul.
    """
    if not runs_on_gpu():
        return False
    # NVIDIA's GPUs have a text such as "10.0". Other GPUs may have another text, or no attribute.
    major, _, _ = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return major.isdecimal() and int(major) >= 10


def find_code_product(product: QuantizedProduct) -> tuple[str, int, Shape] | None:
    """Return how XLA multiplies the codes of both operands, or None if XLA must dequantize them.

    **Returns:** a triple `(kind, tile_count, tile_sizes)`. The kind of codes is "integer" or
    "float8". The contracted axes are cut into `tile_count` tiles, which are summed separately.
    `tile_sizes` has the size of a tile along each contracted axis.
    """
    # Both operands must be QArrays without minima, and the result must be a float.
    lhs, rhs = product.operands
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return None
    if has_minimum(lhs) or has_minimum(rhs) or fixes_dtypes(product.precision):
        return None
    if product.out_dtype not in QUANTIZABLE or product.terms == 0:
        return None
    # The codes must be integers, or floats that XLA multiplies.
    if have_byte_codes(lhs, rhs):
        kind = "integer"
    elif all(x.format.codebook is None and not x.format.is_integer for x in (lhs, rhs)):
        kind = "float8"
        dtypes = {x.format.code_dtype.name for x in (lhs, rhs)}
        # JAX multiplies one float8 dtype, or these two.
        if len(dtypes) > 1 and dtypes != {"float8_e4m3fn", "float8_e5m2"}:
            return None
        if accumulator(product.out_dtype) != jnp.float32:
            return None
    else:
        return None
    # The sum over a tile must fit int32.
    tile_sizes = common_tiles(lhs, rhs, product.dimension_numbers)
    terms = math.prod(tile_sizes)
    if not isinstance(terms, int):  # symbolic, in programs for export
        return None
    if kind == "integer" and not fits_int32(lhs, rhs, terms):
        return None
    # Several tiles must be large enough.
    tile_count = product.terms // terms
    if tile_count > 1:
        rows, columns = (
            math.prod(product.shapes[side][axis] for axis in product.free_axes(side))
            for side in (0, 1)
        )
        is_small = any(isinstance(size, int) and size <= _FEW_ROWS for size in (rows, columns))
        if terms < (_LEAST_TILE_FOR_FEW_ROWS if is_small else _LEAST_TILE):
            return None
    return kind, tile_count, tile_sizes


def common_tiles(lhs: QArray, rhs: QArray, numbers: DotDimensionNumbers) -> Shape:
    """Return the size, along each contracted axis, of the largest tiles with constant scales.

    Within such a tile, no scale or zero point of either operand varies along the contracted axes.
    If the operands have tiles of different sizes along an axis, the size is the greatest common
    divisor.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer._core.primitives.axes import DotDimensionNumbers
    >>> from veneer.quant.ops.by_xla import common_tiles
    >>> w = jnp.ones((1, 12))
    >>> q, r = (vn.quant.quantize(w, "int8", tiled_axes={1: tile}) for tile in (6, 4))
    >>> common_tiles(q, r, DotDimensionNumbers.from_lax((([1], [1]), ([], []))))
    (2,)
    """
    common_sizes = []
    for axes in zip(*numbers.contracting, strict=True):
        tile_sizes = {
            q.shape[axis] // leaf.shape[axis]
            for q, axis in zip((lhs, rhs), axes, strict=True)
            for leaf in (q.scale, q.zero_point)
            if leaf is not None
        }
        if all(isinstance(size, int) for size in tile_sizes):
            common_sizes.append(math.gcd(*tile_sizes))
        else:  # in programs for export, sizes can be symbolic, which have no gcd
            common_sizes.append(tile_sizes.pop() if len(tile_sizes) == 1 else 1)
    return tuple(common_sizes)


def _reason_to_dequantize(q: QArray, product: QuantizedProduct, side: int) -> str:
    """Return why the scales of an operand cannot be applied to the output, or "" if they can.

    `side` is 0 if the operand `q` is lhs, and 1 if it is rhs.
    """
    if not is_exact_in(q.format, q.dtype):
        return f"{q.dtype.name} cannot represent the values of {q.qtype} exactly"
    for axis in product.dimension_numbers.contracting[side]:
        if q.scale.shape[axis] != 1:
            return f"tiled by {q.tile_shape[axis]} along the contracted axis"
    return ""


# Computations.


def multiply_block_scaled(product: QuantizedProduct) -> jax.Array:
    """Return the product of mxfp8 operands, computed by `jax.nn.scaled_matmul`."""
    codes_and_scales, out_shape = [], []
    for side, q in enumerate(product.operands):
        assert isinstance(q, QArray)
        assert not isinstance(q.scale, QArray)  # because `plan_scaled_matmul` checks it
        (contracted,), batch = (pair[side] for pair in product.dimension_numbers)
        free = product.free_axes(side)
        # The scales need one entry per index of the batch axes and the free axes.
        scale_shape = [q.scale.shape[i] if i == contracted else n for i, n in enumerate(q.shape)]
        scale = broadcast_tiles(jnp.asarray(q.scale), scale_shape)
        # Reshape codes to [batch, rows, terms], and scales to [batch, rows, tiles].
        sizes = [math.prod(q.shape[i] for i in axes) for axes in (batch, free)]
        for leaf in (q.codes(), scale):
            leaf = lax.transpose(leaf, [*batch, *free, contracted])
            codes_and_scales.append(leaf.reshape(*sizes, leaf.shape[-1]))
        out_axes = (*batch, *free) if side == 0 else free
        out_shape += [q.shape[i] for i in out_axes]
    lhs_codes, lhs_scale, rhs_codes, rhs_scale = codes_and_scales
    out = _scaled_matmul(lhs_codes, rhs_codes, lhs_scale, rhs_scale)
    return out.reshape(out_shape).astype(product.out_dtype)


@jax.custom_batching.custom_vmap
def _scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scales: jax.Array, rhs_scales: jax.Array
) -> jax.Array:
    return jax.nn.scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, jnp.float32)


# JAX 0.10.2 batches scaled_matmul only if all operands are batched. This rule broadcasts the other
# operands along the mapped axis, and merges the mapped axis with the batch axis.
@_scaled_matmul.def_vmap
def _vmap_scaled_matmul(
    size: int, are_batched: list[bool], *operands: jax.Array
) -> tuple[jax.Array, bool]:
    stacked = [
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(operands, are_batched, strict=True)
    ]
    out = _scaled_matmul(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
    return out.reshape(size, -1, *out.shape[1:]), True


def _multiply_values(product: QuantizedProduct, are_scaled_after: tuple[bool, ...]) -> jax.Array:
    """Return the product, computed in floats.

    `are_scaled_after` has a bool for lhs and one for rhs. True multiplies the codes of the operand
    and scales the output. False dequantizes the operand first.
    """
    values, scales = [], []
    for x, is_scaled_after in zip(product.operands, are_scaled_after, strict=True):
        scale = None
        if is_scaled_after:
            assert isinstance(x, QArray)
            x, scale = unscaled(x, x.dtype)
        values.append(dequantized(x))
        scales.append(scale)
    lhs, rhs = values
    out = product.dot(lhs, rhs, accumulator(product.out_dtype))
    return _scale_output(out, scales, product)


def _multiply_codes(product: QuantizedProduct) -> jax.Array:
    """Return the product of two QArrays whose scales do not vary along the contracted axes."""
    lhs, rhs = product.operands
    assert isinstance(lhs, QArray)
    assert isinstance(rhs, QArray)
    if lhs.format.is_integer:
        out = _multiply_integers(product).astype(accumulator(product.out_dtype))
    else:
        out = product.dot(lhs.codes(), rhs.codes(), jnp.float32)
    out *= code_factor(lhs) * code_factor(rhs)
    return _scale_output(out, [outer_scale(lhs), outer_scale(rhs)], product)


def _multiply_tiles(product: QuantizedProduct, tile_sizes: Shape) -> jax.Array:
    """Return the product of two QArrays, where each tile is summed and scaled separately.

    `tile_sizes` has the size of a tile along each contracted axis. Only one product of tiles is in
    memory at a time.
    """
    dtype, contracting = accumulator(product.out_dtype), product.dimension_numbers.contracting
    sizes = zip(contracting[0], tile_sizes, strict=True)
    counts = [product.shapes[0][axis] // size for axis, size in sizes]

    # Codes that are packed along a contracted axis cannot be sliced.
    operands, scales = [], []
    for q, axes in zip(product.operands, contracting, strict=True):
        assert isinstance(q, QArray)
        operands.append(q.unpacked() if q.packing and q.packing.axis + q.ndim in axes else q)
        scale, zero_point = _move_tiles_first(q.scales(), axes, counts), q.zero_points()
        if zero_point is not None:
            zero_point = _move_tiles_first(zero_point, axes, counts)
        scales.append((scale, zero_point))

    # A derivative by the scales computes each tile again. Otherwise the products of all tiles would
    # be kept for it.
    @jax.checkpoint
    def multiply_tile(step: tuple) -> jax.Array:
        number, tile_scales = step  # for lhs and for rhs, a scale and a zero point of the tile
        # Convert the number to an index of the tile along each contracted axis, last axis first.
        index: list[jax.Array] = []
        for count in reversed(counts):
            index.insert(0, number % count)
            number = number // count
        sides = zip(operands, contracting, tile_scales, strict=True)
        lhs, rhs = (_slice_tile(q, axes, index, tile_sizes, *pair) for q, axes, pair in sides)
        return _multiply_codes(product.replace(lhs, rhs, dtype))

    def add(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        return total + multiply_tile(step), None

    steps = jnp.arange(math.prod(counts), dtype=jnp.int32), scales
    # The loop starts with the product of the first tile, because its type includes the sharding.
    first = multiply_tile(jax.tree.map(lambda x: x[0], steps))
    sums = lax.scan(add, first, jax.tree.map(lambda x: x[1:], steps))[0]
    return sums.astype(product.out_dtype)


def _move_tiles_first(scale: Leaf, axes: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Return a scale or zero point with a new first axis, which has one entry per tile.

    The tiles are the parts in which a product sums the contracted axes `axes`. `counts` has the
    number of tiles along each of these axes. In the result, these axes have size 1. The size of
    `scale` along them must divide the number of tiles.
    """
    leaf = jnp.asarray(scale)
    for axis, count in zip(axes, counts, strict=True):
        leaf = jnp.repeat(leaf, count // leaf.shape[axis], axis, total_repeat_length=count)
    tile_shape = [1 if axis in axes else size for axis, size in enumerate(leaf.shape)]
    leaf = jnp.moveaxis(leaf, axes, range(len(axes)))
    return leaf.reshape(math.prod(counts), *tile_shape)


def _slice_tile(
    q: QArray,
    axes: Sequence[int],
    index: Sequence[jax.Array],
    tiles: Shape,
    scale: jax.Array,
    zero_point: jax.Array | None,
) -> QArray:
    """Return one tile of an operand as a QArray with the given `scale` and `zero_point`.

    `axes` are the contracted axes of `q`, which are cut into tiles. `index` has the index of the
    tile along each of these axes, and `tiles` has the size of a tile.
    """
    packed = jnp.asarray(q.packed)
    if not jnp.issubdtype(packed.dtype, jnp.integer):
        # Slice bytes, because XLA for CPUs converts a float8 array to f16 before it slices.
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    for axis, tile_index, size in zip(axes, index, tiles, strict=True):
        packed = lax.dynamic_slice_in_dim(packed, tile_index * size, size, axis)
    packed = lax.bitcast_convert_type(packed, q.packed.dtype)
    return q.replace(packed=packed, scale=scale, zero_point=zero_point)


def _scale_output(
    out: jax.Array, scales: Sequence[jax.Array | None], product: QuantizedProduct
) -> jax.Array:
    """Multiply the output by the scales that are not None, and cast it to `product.out_dtype`."""
    output_scales = [
        product.broadcast_to_output(scale, side, out.ndim).astype(out.dtype)
        for side, scale in enumerate(scales)
        if scale is not None
    ]
    if output_scales:
        # Multiply the scales with each other first. The product of the output and only one of them
        # might overflow.
        out = out * functools.reduce(jnp.multiply, output_scales)
    return out.astype(product.out_dtype)


def _multiply_integers(product: QuantizedProduct) -> jax.Array:
    """Return the exact sums, in int32, of products of codes minus their zero points.

    With codes a and b, zero points y and z, and K terms, the sum is
    `sum (a - y) (b - z) = sum a b - y sum b - z (sum a - K y)`. Intermediate results may wrap
    around. The final result is still exact if it fits int32.
    """
    lhs, rhs = product.operands
    assert isinstance(lhs, QArray)
    assert isinstance(rhs, QArray)
    (lhs_codes, lhs_zero), (rhs_codes, rhs_zero) = int8_codes(lhs), int8_codes(rhs)
    out = product.dot(lhs_codes, rhs_codes, jnp.int32)
    broadcast = functools.partial(product.broadcast_to_output, ndim=out.ndim)

    def sum_codes(codes: jax.Array, side: int) -> jax.Array:
        axes = product.dimension_numbers.contracting[side]
        return broadcast(codes.sum(axes, keepdims=True, dtype=jnp.int32), side)

    if lhs_zero is not None:
        lhs_zero = broadcast(lhs_zero, 0)
        out -= lhs_zero * sum_codes(rhs_codes, 1)
    if rhs_zero is not None:
        lhs_sum = sum_codes(lhs_codes, 0)
        if lhs_zero is not None:
            lhs_sum -= product.terms * lhs_zero
        out -= broadcast(rhs_zero, 1) * lhs_sum
    return out
