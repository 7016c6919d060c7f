"""What products of quantised operands share: from a QArray to what arithmetic takes.

A QArray is `(code - zero_point) * scale`, and a product would rather sum codes and scale the sum.
Codes are far from what they stand for: a sum of numbers near the largest float, times codes up to
128, overflows where the dense sum does not. So wherever codes become floats here they are divided
by a power of two of their range, which is exact, and their scale is multiplied by it. Then a code
is worth at most 2, its scale is half the largest value of a tile, and products and sums stay in
range where those of the dense arrays do.
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
from ..._core.value import materialise_one
from ..arrays.pairs import compute_elementwise, runs_on_gpu
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats import Format
from ..formats.tiles import over_tiles

INT32_MAX = 2**31 - 1


def as_operand(x: ArrayLike | ImplicitArray) -> jax.Array | QArray:
    """Returns a QArray as it is, and anything else as a dense array."""
    return x if isinstance(x, QArray) else jnp.asarray(materialise_one(x))


def operand_pair(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> tuple[jax.Array | QArray, jax.Array | QArray]:
    """Returns the operands of a product; dense bytes that meet integer codes as codes themselves.

    They are worth what they are: their scale is 1, and their dtype that of what they meet. So it is
    in a product of floats, whose types `precision` does not fix.
    """
    x, y = as_operand(lhs), as_operand(rhs)
    wanted = preferred_element_type
    if is_algorithm(precision) or (wanted is not None and jnp.dtype(wanted) not in QUANTIZABLE):
        return x, y
    return _as_codes_beside(y, x), _as_codes_beside(x, y)


def _as_codes_beside(other: jax.Array | QArray, x: jax.Array | QArray) -> jax.Array | QArray:
    is_met = isinstance(other, QArray) and other.format.is_integer
    if isinstance(x, QArray) or not is_met or x.dtype not in (jnp.int8, jnp.uint8):
        return x
    one = jnp.ones([1] * x.ndim, jnp.float32)
    return QArray.from_packed(x, one, qtype=x.dtype, dense_dtype=other.dtype)


def has_minimum(x: jax.Array | QArray) -> bool:
    """Whether an operand is more than codes times a scale."""
    return isinstance(x, QArray) and x.minimum is not None


def dequantized(x: jax.Array | QArray) -> jax.Array:
    """Returns what an operand stands for."""
    return x.dequantize() if isinstance(x, QArray) else x


def is_algorithm(precision: Any) -> bool:
    """Whether `precision` fixes the types of the multiplication, so that ours are not free."""
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def may_scale_outside(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, out_dtype: DTypeLike, precision: Any
) -> bool:
    """Whether codes may be multiplied at all, and the sum be scaled.

    So it is where the dense operands are of one floating dtype, and so is the result, and the
    caller does not say what to multiply.
    """
    dtypes = {lhs.dtype, rhs.dtype, jnp.dtype(out_dtype)}
    return lhs.dtype == rhs.dtype and dtypes <= set(QUANTIZABLE) and not is_algorithm(precision)


def accumulator(out_dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of sums: f32 for 16 bits, so that they are rounded once."""
    return jnp.promote_types(out_dtype, jnp.float32)


def largest(format: Format) -> float:
    """Returns the largest magnitude of what a code is worth, less any zero point in range.

    >>> import veneer as vn
    >>> from veneer.quant.ops.operands import largest
    >>> [largest(vn.quant.get_format(name)) for name in ("int8", "uint8", "nf4", "fp8")]
    [128.0, 255.0, 1.0, 448.0]
    """
    if format.codebook is not None:
        return max(map(abs, format.codebook))
    if not format.is_integer:
        return float(jnp.finfo(format.code_dtype).max)
    return float(max(map(abs, format.code_range)))


def _exponent(format: Format) -> int:
    """Returns the power of two that codes are divided by. What remains is from 1 to 4."""
    return math.floor(math.log2(largest(format))) - 1 if largest(format) > 2 else 0


# Integers.


def have_byte_codes(lhs: QArray, rhs: QArray) -> bool:
    """Return whether both formats are integers of at most 8 bits, whose codes fit int8."""
    return all(q.format.is_integer and q.format.bits <= 8 for q in (lhs, rhs))


def fits_int32(lhs: QArray, rhs: QArray, terms: int) -> bool:
    """Whether int32 is sure to hold a sum of so many products of codes less their zero points.

    It is enough that the result fits: on the way there, sums of codes and their corrections may
    wrap around, and wrap back.
    """
    return terms * largest_difference(lhs) * largest_difference(rhs) <= INT32_MAX


def largest_difference(q: QArray) -> int:
    """Returns the largest magnitude of an integer code less its zero point."""
    if q.zero_point is None:
        return int(largest(q.format))
    # Codes and zero points of 8 bits may have any sign, also where the format has fewer.
    return 2 ** max(8, int(q.format.bits)) - 1


def int8_codes(q: QArray) -> tuple[jax.Array, jax.Array | None]:
    """Returns the codes of an integer format as int8, and the zero point that goes with them.

    Unsigned codes of 8 bits are moved by 128, with their zero point: what multiplies integers
    takes both operands signed.

    **Returns:** codes in int8, and a zero point in int32 with a shape that tiles them, or None.
    """
    codes = compute_elementwise(QArray.codes, q, q.format.byte_dtype)
    zero_point = q.zero_points()
    zero_point = None if zero_point is None else zero_point.astype(jnp.int32)
    if codes.dtype == jnp.int8:
        return codes, zero_point
    if q.format.bits < 8:
        return codes.astype(jnp.int8), zero_point
    moved = lax.bitcast_convert_type(codes ^ np.uint8(128), jnp.int8)
    if zero_point is None:
        zero_point = jnp.zeros([1] * codes.ndim, jnp.int32)
    return moved, zero_point - 128


def has_int8_zero_point(q: QArray) -> bool:
    """Whether a zero point goes with what `int8_codes` returns."""
    return q.zero_point is not None or (q.format.byte_dtype == np.uint8 and q.format.bits == 8)


def outer_scale(q: QArray) -> jax.Array:
    """Returns the scale that goes with codes divided by `code_unit`; f32 or f64."""
    return q.scales() * 2.0 ** _exponent(q.format)


def code_unit(q: QArray) -> float:
    """Returns what products of codes are to be multiplied by, for each operand that is one.

    `codes * code_unit(q) * outer_scale(q)` is `codes * q.scales()`, in range.
    """
    return 2.0 ** -_exponent(q.format)


# Floats.


def exact_in(format: Format, dtype: DTypeLike) -> bool:
    """Whether what each code is worth, less any zero point, is a number of `dtype`.

    Even bf16 holds all integers up to 256. The values of nf4 and int16 need f32.
    """
    if format.codebook is None:
        return format.bits <= 8 or jnp.finfo(dtype).nmant >= 16
    values = np.asarray(format.codebook, np.float32)
    return bool((values.astype(dtype).astype(np.float32) == values).all())


def unscaled(q: QArray, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns what codes are worth, less their zero points, and the scale that is left to apply.

    **Arguments:**

    - `dtype`: of the values; exact where `exact_in` says so.

    **Returns:** values, of the shape of `q`, and scales in f32 or f64, of that of its scale:
    `dequantize` gives their product, over tiles.
    """
    dtype = jnp.dtype(dtype)
    values = compute_elementwise(functools.partial(_unscaled_values, dtype=dtype), q, dtype)
    # The largest f16 times any code is far below the largest f32, in which products are summed. The
    # least codes of a float8, divided by the largest, are no numbers of f16.
    return values, q.scales() if dtype == jnp.float16 else outer_scale(q)


def _unscaled_values(q: QArray, dtype: jnp.dtype) -> jax.Array:
    zero_point = q.zero_points()
    if zero_point is None:
        values = q._decode(dtype)
    else:
        # The difference of two bytes is exact. CPUs are faster with 16 bits, and GPUs with 32.
        integer = jnp.int32 if runs_on_gpu() or q.format.bits > 8 else jnp.int16
        codes, zero_point = q.codes().astype(integer), zero_point.astype(integer)
        values = over_tiles(jnp.subtract, codes, zero_point).astype(dtype)
    exponent = 0 if dtype == jnp.float16 else _exponent(q.format)
    return values * jnp.asarray(2.0**-exponent, dtype) if exponent else values
