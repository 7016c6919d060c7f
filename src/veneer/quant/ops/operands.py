"""Conversions of operands: codes, values and scales in the forms that products need.

A QArray represents `(code - zero_point) * scale`. A product can sum codes first and scale the sum.
But codes are much larger than the values: a sum of numbers near the largest float, times codes of
up to 128, overflows although the dense sum does not. Therefore all codes that become floats here
are divided by a power of two near the largest code, which is exact, and the scale is multiplied by
it. A code is then at most 2, the scale is half the largest value of a tile, and results are in
range if the results for dense operands are.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..._core.value import Value, materialise_one
from ..arrays.pairs import compute_elementwise, runs_on_gpu
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats import Format
from ..formats.tiles import over_tiles

INT32_MAX = 2**31 - 1


def as_operand(x: ArrayLike | ImplicitArray) -> jax.Array | QArray:
    """Return a QArray unchanged, and any other value as a dense array."""
    if isinstance(x, QArray):
        return x
    return jnp.asarray(materialise_one(x) if isinstance(x, Value) else x)


def operand_pair(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> tuple[jax.Array | QArray, jax.Array | QArray]:
    """Return the operands of a product as arrays and QArrays.

    In a product of floats, a dense int8 or uint8 array is also returned as a QArray if the other
    operand has an integer format: as codes with scale 1. Then the codes are multiplied directly.
    """
    wanted = preferred_element_type
    is_fixed = fixes_dtypes(precision) or (
        wanted is not None and jnp.dtype(wanted) not in QUANTIZABLE
    )
    pair: list[Any] = []
    for x, other in ((lhs, rhs), (rhs, lhs)):
        if not isinstance(x, QArray):
            x = jnp.asarray(materialise_one(x) if isinstance(x, Value) else x)
            is_byte = x.dtype in (jnp.int8, jnp.uint8) and not is_fixed
            if is_byte and isinstance(other, QArray) and other.format.is_integer:
                one = jnp.ones([1] * x.ndim, jnp.float32)
                x = QArray.from_packed(x, one, qtype=x.dtype, dense_dtype=other.dtype)
        pair.append(x)
    return pair[0], pair[1]


def has_minimum(x: jax.Array | QArray) -> bool:
    """Return whether an operand is a QArray with minima."""
    return isinstance(x, QArray) and x.minimum is not None


def unpack_codes(q: QArray) -> QArray:
    """Return the same array with one code per byte."""
    return q.replace(packed=q.format.to_fields(q.codes()), packing=None)


def dequantized(x: jax.Array | QArray) -> jax.Array:
    """Return the dense array of an operand."""
    return x.dequantize() if isinstance(x, QArray) else x


def fixes_dtypes(precision: Any) -> bool:
    """Return whether `precision` names an algorithm, which fixes the dtypes that are multiplied."""
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def can_scale_output(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, out_dtype: DTypeLike, precision: Any
) -> bool:
    """Return whether codes can be multiplied before scales are applied.

    Both dense operands must have one float dtype. The result must be a float, too, and `precision`
    must not fix the dtypes.
    """
    dtypes = {lhs.dtype, rhs.dtype, jnp.dtype(out_dtype)}
    return lhs.dtype == rhs.dtype and dtypes <= set(QUANTIZABLE) and not fixes_dtypes(precision)


def accumulator(out_dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of sums: f32 for results of 16 bits, which are then rounded once."""
    return jnp.promote_types(out_dtype, jnp.float32)


def largest_code(format: Format) -> float:
    """Return the largest magnitude of a decoded code, before the zero point is subtracted.

    >>> import veneer as vn
    >>> from veneer.quant.ops.operands import largest_code
    >>> [largest_code(vn.quant.get_format(name)) for name in ("int8", "uint8", "nf4", "fp8")]
    [128.0, 255.0, 1.0, 448.0]
    """
    if format.codebook is not None:
        return max(map(abs, format.codebook))
    if not format.is_integer:
        return float(jnp.finfo(format.code_dtype).max)
    return float(max(map(abs, format.code_range)))


def _exponent(format: Format) -> int:
    """Return the power of two by which codes are divided. The largest quotient is 1 to 4."""
    largest = largest_code(format)
    return math.floor(math.log2(largest)) - 1 if largest > 2 else 0


# Integers.


def have_byte_codes(lhs: QArray, rhs: QArray) -> bool:
    """Return whether both formats are integers of at most 8 bits, whose codes fit int8."""
    return all(q.format.is_integer and q.format.bits <= 8 for q in (lhs, rhs))


def fits_int32(lhs: QArray, rhs: QArray, terms: int) -> bool:
    """Return whether int32 holds any sum of `terms` products of codes minus zero points.

    Only the final sum must fit. Partial sums and their corrections can wrap around, because they
    wrap back.
    """
    return terms * largest_difference(lhs) * largest_difference(rhs) <= INT32_MAX


def largest_difference(q: QArray) -> int:
    """Return the largest magnitude of an integer code minus its zero point."""
    if q.zero_point is None:
        return int(largest_code(q.format))
    # Stored codes and zero points of 8 bits can have any value, even if the format has fewer bits.
    return 2 ** max(8, int(q.format.bits)) - 1


def int8_codes(q: QArray) -> tuple[jax.Array, jax.Array | None]:
    """Return the codes of an integer format as int8, and the zero point that belongs to them.

    Unsigned codes of 8 bits and their zero point are shifted by 128, because products of integers
    need two signed operands.

    **Returns:** codes in int8, and a zero point in int32 with a shape that tiles them, or None.
    """
    codes = compute_elementwise(QArray.codes, q, q.format.byte_dtype)
    zero_point = q.zero_points()
    zero_point = None if zero_point is None else zero_point.astype(jnp.int32)
    if codes.dtype == jnp.int8:
        return codes, zero_point
    if q.format.bits < 8:
        return codes.astype(jnp.int8), zero_point
    shifted = lax.bitcast_convert_type(codes ^ np.uint8(128), jnp.int8)
    if zero_point is None:
        zero_point = jnp.zeros([1] * codes.ndim, jnp.int32)
    return shifted, zero_point - 128


def has_int8_zero_point(q: QArray) -> bool:
    """Return whether `int8_codes` returns a zero point."""
    return q.zero_point is not None or (q.format.byte_dtype == np.uint8 and q.format.bits == 8)


def code_unit(q: QArray) -> float:
    """Return the factor for products of integer codes, one factor per quantized operand.

    `codes * code_unit(q) * outer_scale(q)` equals `codes * q.scales()` and does not overflow.
    """
    return 2.0 ** -_exponent(q.format)


def outer_scale(q: QArray) -> jax.Array:
    """Return the scale, in f32 or f64, of codes that were divided as in `code_unit`."""
    return q.scales() * 2.0 ** _exponent(q.format)


# Floats.


def is_exact_in(format: Format, dtype: DTypeLike) -> bool:
    """Return whether `dtype` represents each decoded code, minus any zero point, exactly.

    bf16 holds all integers up to 256. The values of nf4 and int16 need f32.
    """
    if format.codebook is None:
        return format.bits <= 8 or jnp.finfo(dtype).nmant >= 16
    values = np.asarray(format.codebook, np.float32)
    return bool((values.astype(dtype).astype(np.float32) == values).all())


def unscaled(q: QArray, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return decoded codes minus zero points, and the scale by which to multiply them.

    **Arguments:**

    - `dtype`: of the values. They are exact if `is_exact_in` says so.

    **Returns:** values of the shape of `q`, and scales in f32 or f64 of the shape of its scale.
    Their product over tiles is the dense array.
    """
    dtype = jnp.dtype(dtype)
    values = compute_elementwise(functools.partial(_unscaled_values, dtype=dtype), q, dtype)
    # In f16, codes are not divided: the smallest float8 codes, divided by the largest, would be
    # below the range of f16. Products do not overflow, because they are summed in f32.
    return values, q.scales() if dtype == jnp.float16 else outer_scale(q)


def _unscaled_values(q: QArray, dtype: jnp.dtype) -> jax.Array:
    zero_point = q.zero_points()
    if zero_point is None:
        values = q._decode(dtype)
    else:
        # The difference of two bytes is exact. CPUs are faster with 16 bits, GPUs with 32 bits.
        integer = jnp.int32 if runs_on_gpu() or q.format.bits > 8 else jnp.int16
        codes, zero_point = q.codes().astype(integer), zero_point.astype(integer)
        values = over_tiles(jnp.subtract, codes, zero_point).astype(dtype)
    exponent = 0 if dtype == jnp.float16 else _exponent(q.format)
    return values * jnp.asarray(2.0**-exponent, dtype) if exponent else values
