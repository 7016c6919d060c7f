"""Conversions of operands: codes, values and scales in the forms that products need.

A QArray represents `(code - zero_point) * scale`. A product can sum codes first and scale the sum.
But codes can be much larger than values: a sum of activations near the largest float, times codes
of up to 128, overflows although the dense sum does not. Therefore all codes that become floats here
are divided by a power of two, which is exact, and their scale is multiplied by the same number. All
codes are then below 4, so that sums of codes rarely overflow.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..._core.value import Value, materialise_one
from ..arrays import QUANTIZABLE, QArray
from ..arrays.pairs import compute_elementwise, runs_on_gpu
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

    In a product of floats, a dense int8 or uint8 array becomes a QArray with scale 1 if the other
    operand has an integer format. Strategies then multiply its values as codes.
    """
    is_float_product = not fixes_dtypes(precision) and (
        preferred_element_type is None or jnp.dtype(preferred_element_type) in QUANTIZABLE
    )
    pair: list[Any] = []
    for x, other in ((lhs, rhs), (rhs, lhs)):
        if not isinstance(x, QArray):
            x = jnp.asarray(materialise_one(x) if isinstance(x, Value) else x)
            is_byte = x.dtype in (jnp.int8, jnp.uint8) and is_float_product
            if is_byte and isinstance(other, QArray) and other.format.is_integer:
                one = jnp.ones([1] * x.ndim, jnp.float32)
                x = QArray.from_packed(x, one, qtype=x.dtype, dense_dtype=other.dtype)
        pair.append(x)
    return pair[0], pair[1]


def has_minimum(x: jax.Array | QArray) -> bool:
    return isinstance(x, QArray) and x.minimum is not None


def dequantized(x: jax.Array | QArray) -> jax.Array:
    """Return the dense array of an operand."""
    return x.dequantize() if isinstance(x, QArray) else x


def fixes_dtypes(precision: Any) -> bool:
    """Return whether `precision` is a `DotAlgorithm` or its name.

    Such a precision fixes the dtypes that JAX multiplies, so codes cannot be multiplied instead.
    """
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def can_scale_output(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, out_dtype: DTypeLike, precision: Any
) -> bool:
    """Return whether codes can be multiplied as floats, and scales applied to the output.

    Both dense operands must have the same float dtype. The result must be a float, too, and
    `precision` must not be an algorithm.
    """
    dtypes = {lhs.dtype, rhs.dtype, jnp.dtype(out_dtype)}
    return lhs.dtype == rhs.dtype and dtypes <= set(QUANTIZABLE) and not fixes_dtypes(precision)


def accumulator(out_dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which to sum a product whose result has `out_dtype`.

    It is at least f32, so that a 16-bit result is rounded only once, at the end.
    """
    return jnp.promote_types(out_dtype, jnp.float32)


def _code_exponent(format: Format) -> int:
    """Return an exponent e, so that the codes of a format divided by `2**e` are below 4.

    Sums of such codes rarely overflow.
    """
    largest = max(map(abs, format.value_range))
    return math.floor(math.log2(largest)) - 1 if largest > 2 else 0


# Integers.


def have_byte_codes(lhs: QArray, rhs: QArray) -> bool:
    """Return whether both QArrays have integer formats of at most 8 bits."""
    return all(q.format.is_integer and q.format.bits <= 8 for q in (lhs, rhs))


def fits_int32(lhs: QArray, rhs: QArray, terms: int) -> bool:
    """Return whether int32 holds any sum of `terms` products of integer codes minus zero points.

    Only the final sum must fit. Intermediate results can wrap around, because int32 arithmetic is
    exact modulo 2**32.
    """
    return terms * largest_difference(lhs) * largest_difference(rhs) <= INT32_MAX


def largest_difference(q: QArray) -> int:
    """Return an upper bound of `abs(code - zero_point)` for the integer codes of an array."""
    if q.zero_point is None:
        return int(max(map(abs, q.format.value_range)))
    # Stored codes and zero points of 8 bits can have any value, even if the format has fewer bits.
    return 2 ** max(8, int(q.format.bits)) - 1


def int8_codes(q: QArray) -> tuple[jax.Array, jax.Array | None]:
    """Return the codes of an integer format as int8, and their zero point.

    Products of integers need two signed operands. Therefore 128 is subtracted from unsigned codes
    of 8 bits and from their zero point.

    **Returns:** a pair: codes in int8, and the zero point in int32, or None. The zero point has one
    entry per tile of codes, like `q.zero_point`.
    """
    codes = compute_elementwise(QArray.codes, q, q.format.byte_dtype)
    zero_point = q.zero_points()
    zero_point = None if zero_point is None else zero_point.astype(jnp.int32)
    if codes.dtype == jnp.int8:
        return codes, zero_point
    if q.format.bits < 8:  # unsigned codes below 128
        return codes.astype(jnp.int8), zero_point
    # Flipping the highest bit of a byte subtracts 128, read as int8.
    shifted = lax.bitcast_convert_type(codes ^ np.uint8(128), jnp.int8)
    if zero_point is None:
        zero_point = jnp.zeros([1] * codes.ndim, jnp.int32)
    return shifted, zero_point - 128


def has_int8_zero_point(q: QArray) -> bool:
    """Return whether `int8_codes` returns a zero point, not None."""
    return q.zero_point is not None or (q.format.byte_dtype == np.uint8 and q.format.bits == 8)


def code_factor(q: QArray) -> float:
    """Return a power of two to multiply the codes of `q` by, so that products do not overflow.

    The result must then be scaled by `outer_scale(q)` instead of `q.scales()`:
    `(codes * code_factor(q)) * outer_scale(q)` equals `codes * q.scales()`.
    """
    return 2.0 ** -_code_exponent(q.format)


def outer_scale(q: QArray) -> jax.Array:
    """Return `q.scales() / code_factor(q)`, which is the scale of `codes * code_factor(q)`."""
    return q.scales() * 2.0 ** _code_exponent(q.format)


def multiply_by_scale(x: jax.Array, scale: jax.Array, axes: Mapping[int, int]) -> jax.Array:
    """Multiply `x`, an operand of a product, by the scale of the other operand.

    The result has the dtype of `x`. `axes` maps the axes of the scale along which it varies, such
    as contracted axes, to the matching axes of `x`. The scale must have size 1 along its other
    axes.
    """
    scale_axes = sorted(axes, key=axes.__getitem__)  # in the order of the axes of x
    other_axes = [axis for axis in range(scale.ndim) if axis not in axes]
    shape = [1] * x.ndim
    for axis in scale_axes:
        shape[axes[axis]] = scale.shape[axis]
    scale = lax.transpose(scale, (*scale_axes, *other_axes)).reshape(shape)
    return over_tiles(jnp.multiply, x, scale.astype(x.dtype))


# Floats.


def is_exact_in(format: Format, dtype: DTypeLike) -> bool:
    """Return whether a float dtype represents each decoded code minus zero point exactly.

    bf16 represents all integers up to 256. The values of nf4 and int16 need f32.
    """
    if format.codebook is None:
        # The difference of two 16-bit integers has 17 bits. A mantissa stores all but the first.
        return format.bits <= 8 or jnp.finfo(dtype).nmant >= 16
    values = np.asarray(format.codebook, np.float32)
    return bool((values.astype(dtype).astype(np.float32) == values).all())


def unscaled(q: QArray, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Split an array without minima into values and scales, whose product is the dense array.

    **Arguments:**

    - `q`: the array.
    - `dtype`: the float dtype of the values.

    **Returns:** a pair: the values, which are decoded codes minus zero points, and the scales, in
    f32 or f64, with one entry per tile. If the dtype is not f16, values are divided by a power of
    two, and scales are multiplied by it, so that products do not overflow.
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
    exponent = 0 if dtype == jnp.float16 else _code_exponent(q.format)
    return values * jnp.asarray(2.0**-exponent, dtype) if exponent else values
