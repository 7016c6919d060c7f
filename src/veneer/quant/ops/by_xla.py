"""The strategies by XLA: scaled_matmul, integer and float8 codes, tiles, values, dense arrays.

A scale that does not vary along the contracted axes can be applied after the sum:
`sum_k x[k] * (codes[k, n] * scale[n]) = (sum_k x[k] * codes[k, n]) * scale[n]`. If it does vary and
the codes of both operands can be multiplied, this is done for each tile. Otherwise the operand is
dequantized.

XLA multiplies arrays in memory. If codes are converted to floats, all values of the operand are in
memory as floats, and the plan states the number of bytes.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.pairs import runs_on_gpu
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.tiles import Shape
from .minima import split_minimum
from .operands import (
    accumulator,
    code_unit,
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
)
from .tile_sums import common_tiles, sum_over_tiles

# The smallest tiles that are summed separately. Each product of tiles is added to the full output.
# For smaller tiles, this takes longer than dequantizing the operands, unless the output has few
# rows or columns.
_LEAST_TILE = 128
_LEAST_TILE_OF_FEW = 16
_FEW = 16


def plan_without_minimum(product: QuantizedProduct) -> Plan | None:
    """Plan to add the minima of an operand in a second product."""
    split = split_minimum(product)
    if split is None:
        return None
    rest, add_minimum_term = split
    return add_minimum_term(first_plan(rest, XLA_STRATEGIES))


def plan_scaled_matmul(product: QuantizedProduct) -> Plan | None:
    """Plan to call `jax.nn.scaled_matmul` for mxfp8 operands, on GPUs that support it."""
    lhs, rhs = product.operands
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray) and has_block_scaled_matmul()):
        return None
    fallback = plan_values(product)
    has_blocks = all(_has_mx_blocks(x, product, side) for side, x in enumerate((lhs, rhs)))
    if fallback is None or not has_blocks or product.out_sharding is not None:
        return None
    if 0 in (*lhs.shape, *rhs.shape) or product.out_dtype == jnp.float64:
        return None

    # JAX has no derivative of scaled_matmul.
    @jax.custom_jvp
    def compute(product: QuantizedProduct) -> jax.Array:
        return lax.platform_dependent(product, cuda=multiply_block_scaled, default=fallback.compute)

    @compute.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        return compute(*primals), jax.jvp(fallback.compute, primals, tangents)[1]

    return Plan("jax.nn.scaled_matmul of codes and scales", compute, (product,))


def plan_codes(product: QuantizedProduct) -> Plan | None:
    """Plan to multiply the codes of both operands, and scale the output."""
    codes = multiplied_codes(product)
    if codes is None or codes[1] > 1:
        return None
    kind, _, _ = codes
    # XLA for CPUs multiplies no float8. It converts both operands to f32.
    is_widened = kind == "float8" and runs_on_cpu()
    dense = dense_nbytes(*product.operands, dtype="float32") if is_widened else ()
    return Plan(f"multiply {kind} codes, scale the output", _multiply_codes, (product,), dense)


def plan_tiles(product: QuantizedProduct) -> Plan | None:
    """Plan to multiply codes tile by tile, scale the sum of each tile, and add these sums."""
    codes = multiplied_codes(product)
    if codes is None or codes[1] == 1:
        return None
    kind, count, tiles = codes
    how = f"multiply {kind} codes in {count} tiles, scale and add the results"
    return Plan(how, functools.partial(_multiply_tiles, tiles=tiles), (product,))


def plan_values(product: QuantizedProduct) -> Plan | None:
    """Plan to multiply codes as floats, and scale the output if no scale varies along the sum."""
    if not product.can_scale_output or product.terms == 0:
        return None
    hows, are_scaled_after = [], []
    for side, x in enumerate(product.operands):
        reason = None if not isinstance(x, QArray) else _reason_to_dequantize(x, product, side)
        are_scaled_after.append(reason == "")
        if reason:
            hows.append(f"dequantize {SIDES[side]}, {reason}")
        elif reason is not None:
            hows.append(f"convert codes of {SIDES[side]} to float, scale the output")
    compute = functools.partial(_multiply_values, are_scaled_after=tuple(are_scaled_after))
    return Plan("; ".join(hows), compute, (product,), dense_nbytes(*product.operands))


def plan_dense(product: QuantizedProduct) -> Plan:
    """Plan to dequantize both operands and multiply the dense arrays."""
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


#: In order of preference. The last one supports all products.
XLA_STRATEGIES = (
    plan_without_minimum,
    plan_scaled_matmul,
    plan_codes,
    plan_tiles,
    plan_values,
    plan_dense,
)


# Conditions.


def has_block_scaled_matmul() -> bool:
    """Return whether the default device multiplies mx formats: NVIDIA's GPUs from Blackwell on.

    On older GPUs XLA dequantizes the operands of scaled_matmul.
    """
    if not runs_on_gpu():
        return False
    major, _, _ = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return major.isdecimal() and int(major) >= 10


def _has_mx_blocks(q: QArray, product: QuantizedProduct, side: int) -> bool:
    """Return whether an operand is mxfp8 with tiles along the only contracted axis.

    These are the mx formats that cuDNN supports: float8 with one float8_e8m0fnu per 32 codes.
    """
    contracting = product.dimension_numbers.contracting[side]
    is_mxfp8 = q.qtype in ("mxfp8", "mxfp8_e5m2") and q.scale.dtype == jnp.float8_e8m0fnu
    return is_mxfp8 and len(contracting) == 1 and q.tile_shape[contracting[0]] == 32


def multiplied_codes(product: QuantizedProduct) -> tuple[str, int, Shape] | None:
    """Return how XLA multiplies the codes of both operands, or None if it dequantizes one.

    **Returns:** "integer" or "float8", the number of tiles that are summed separately, and the
    sizes of a tile along the contracted axes.
    """
    lhs, rhs = product.operands
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return None
    if has_minimum(lhs) or has_minimum(rhs) or fixes_dtypes(product.precision):
        return None
    if product.out_dtype not in QUANTIZABLE or product.terms == 0:
        return None
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
    tiles = common_tiles(lhs, rhs, product.dimension_numbers)
    terms = math.prod(tiles)
    if not isinstance(terms, int):  # symbolic, in programs for export
        return None
    if kind == "integer" and not fits_int32(lhs, rhs, terms):
        return None
    count = product.terms // terms
    if count > 1:
        sizes = [math.prod(product.shapes[side][i] for i in product.free(side)) for side in (0, 1)]
        is_small = any(isinstance(size, int) and size <= _FEW for size in sizes)
        if terms < (_LEAST_TILE_OF_FEW if is_small else _LEAST_TILE):
            return None
    return kind, count, tiles


def _reason_to_dequantize(q: QArray, product: QuantizedProduct, side: int) -> str:
    """Return the reason why scales cannot be applied to the output, or "" if they can."""
    if not is_exact_in(q.format, q.dtype):
        return f"{q.dtype.name} cannot represent the values of {q.qtype} exactly"
    for axis in product.dimension_numbers.contracting[side]:
        if q.scale.shape[axis] != 1:
            return f"tiled by {q.tile_shape[axis]} along the contracted axis"
    return ""


# Computations.


def multiply_block_scaled(product: QuantizedProduct) -> jax.Array:
    """Reshape codes and scales to `[batch, rows, terms]` and call `jax.nn.scaled_matmul`."""
    operands, shape = [], []
    for side, q in enumerate(product.operands):
        (contracted,), batch = (pair[side] for pair in product.dimension_numbers)
        free = product.free(side)
        assert isinstance(q, QArray)
        assert not isinstance(q.scale, QArray)  # as `_has_mx_blocks` says
        counts = [q.scale.shape[i] if i == contracted else n for i, n in enumerate(q.shape)]
        scale = broadcast_tiles(jnp.asarray(q.scale), tuple(counts))
        sizes = [math.prod(q.shape[i] for i in axes) for axes in (batch, free)]
        for leaf in (q.codes(), scale):
            leaf = lax.transpose(leaf, [*batch, *free, contracted])
            operands.append(leaf.reshape(*sizes, leaf.shape[-1]))
        shape += [q.shape[i] for i in (*batch, *free)] if side == 0 else [q.shape[i] for i in free]
    lhs_codes, lhs_scale, rhs_codes, rhs_scale = operands
    out = _scaled_matmul(lhs_codes, rhs_codes, lhs_scale, rhs_scale)
    return out.reshape(shape).astype(product.out_dtype)


@jax.custom_batching.custom_vmap
def _scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scales: jax.Array, rhs_scales: jax.Array
) -> jax.Array:
    return jax.nn.scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, jnp.float32)


# JAX 0.10.2 batches scaled_matmul only if all operands are batched.
@_scaled_matmul.def_vmap
def _(size: int, are_batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
    stacked = [
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(operands, are_batched, strict=True)
    ]
    out = _scaled_matmul(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
    return out.reshape(size, -1, *out.shape[1:]), True


def _multiply_values(product: QuantizedProduct, are_scaled_after: tuple[bool, ...]) -> jax.Array:
    """Multiply values, and apply the scales of some operands to the output."""
    values, scales = [], []
    for x, is_scaled_after in zip(product.operands, are_scaled_after, strict=True):
        scale = None
        if is_scaled_after:
            assert isinstance(x, QArray)
            x, scale = unscaled(x, x.dtype)
        values.append(dequantized(x))
        scales.append(scale)
    out = product.dot(values[0], values[1], accumulator(product.out_dtype))
    return _scale_output(out, scales, product)


def _multiply_codes(product: QuantizedProduct) -> jax.Array:
    """Multiply codes. Scales and zero points must not vary along the contracted axes."""
    lhs, rhs = product.operands
    assert isinstance(lhs, QArray)
    assert isinstance(rhs, QArray)
    if lhs.format.is_integer:
        out = _multiply_integers(product).astype(accumulator(product.out_dtype))
    else:
        out = product.dot(lhs.codes(), rhs.codes(), jnp.float32)
    out *= code_unit(lhs) * code_unit(rhs)
    return _scale_output(out, [outer_scale(lhs), outer_scale(rhs)], product)


def _multiply_tiles(product: QuantizedProduct, tiles: Shape) -> jax.Array:
    lhs, rhs = product.operands
    assert isinstance(lhs, QArray)
    assert isinstance(rhs, QArray)
    dtype = accumulator(product.out_dtype)
    multiply = lambda lhs, rhs: _multiply_codes(product.replace(lhs, rhs, dtype))
    sums = sum_over_tiles(multiply, lhs, rhs, product.dimension_numbers, tiles)
    return sums.astype(product.out_dtype)


def _scale_output(
    out: jax.Array, scales: Sequence[jax.Array | None], product: QuantizedProduct
) -> jax.Array:
    """Multiply an output by the scales of the operands, if any, and round it to its dtype.

    The scales are multiplied with each other first. Their product is in range if the largest
    products of values are, and then so is the result.
    """
    arranged = [
        product.broadcast_to_output(scale, side, out.ndim).astype(out.dtype)
        for side, scale in enumerate(scales)
        if scale is not None
    ]
    if arranged:
        out = out * functools.reduce(jnp.multiply, arranged)
    return out.astype(product.out_dtype)


def _multiply_integers(product: QuantizedProduct) -> jax.Array:
    """Return the exact sum, in int32, of products of codes minus their zero points.

    `sum (a - y) (b - z) = sum a b - y sum b - z (sum a - K y)`. Parts of it may wrap around, and
    wrap back when they are added.
    """
    codes, zero_points = [], []
    for q in product.operands:
        assert isinstance(q, QArray)
        codes_of_q, zero_point = int8_codes(q)
        codes.append(codes_of_q)
        zero_points.append(zero_point)
    out = product.dot(codes[0], codes[1], jnp.int32)
    ndim = out.ndim

    def sum_codes(side: int) -> jax.Array:
        axes = product.dimension_numbers.contracting[side]
        sums = codes[side].sum(axes, keepdims=True, dtype=jnp.int32)
        return product.broadcast_to_output(sums, side, ndim)

    lhs_zero, rhs_zero = (
        None if zero_point is None else product.broadcast_to_output(zero_point, side, ndim)
        for side, zero_point in enumerate(zero_points)
    )
    if lhs_zero is not None:
        out -= lhs_zero * sum_codes(1)
    if rhs_zero is not None:
        lhs_sum = sum_codes(0)
        if lhs_zero is not None:
            lhs_sum -= product.terms * lhs_zero
        out -= rhs_zero * lhs_sum
    return out
