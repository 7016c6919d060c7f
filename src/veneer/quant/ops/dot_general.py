"""`dot_general` with quantised operands.

Where a scale does not vary along the contracting axes it can be taken out of the sum:
`sum_k x[k] * (codes[k, n] * scale[n]) = (sum_k x[k] * codes[k, n]) * scale[n]`. Then the codes are
contracted as they are, and it is the output that is scaled. Otherwise the operand is dequantised.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.rules import register
from ..qarray import QArray
from ..tiles import over_tiles

DotDimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]

# A code of 8 bits is exact in a float with a mantissa of 8 bits, the implicit one included.
_HOLD_CODES = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))

# Products of two codes, at most 2**14 each, whose sum int32 is sure to hold.
_MAX_INT32_TERMS = 2**17 - 1


def dot_general(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    **kwargs: Any,
) -> jax.Array:
    """`jax.lax.dot_general` of which either operand, or both, may be a `QArray`.

    The arguments are those of `jax.lax.dot_general`; so are the shape and dtype of the result and
    what is raised. Values agree within rounding with those of the dense arrays. 16-bit operands are
    accumulated in f32, and the codes of two integer formats in int32.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int8", channelwise_axes=[1])
    >>> y = vn.quant.dot_general(jnp.ones((2, 3)), w, (([1], [0]), ([], [])))
    >>> y.shape, bool(jnp.allclose(y, jnp.ones((2, 3)) @ w.dequantize()))
    ((2, 3), True)
    """
    kwargs = dict(kwargs, dimension_numbers=dimension_numbers, precision=precision)
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, rhs = (x if isinstance(x, QArray) else jnp.asarray(x) for x in (lhs, rhs))
    dtype = lhs.dtype
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)

    lhs_scale = rhs_scale = None
    if (
        dtype == rhs.dtype
        and {dtype, out_dtype} <= set(_HOLD_CODES)
        and not _is_algorithm(precision)
    ):
        lhs, lhs_scale = _take_out_scale(lhs, lhs_contracting)
        rhs, rhs_scale = _take_out_scale(rhs, rhs_contracting)
    lhs, rhs = (x.dequantize() if isinstance(x, QArray) else x for x in (lhs, rhs))
    if lhs_scale is None and rhs_scale is None:
        return lax.dot_general(lhs, rhs, preferred_element_type=preferred_element_type, **kwargs)

    wide = jnp.promote_types(out_dtype, jnp.float32)
    if lhs_scale is not None and rhs_scale is not None and _fits_int32(lhs, lhs_contracting):
        out = lax.dot_general(lhs, rhs, preferred_element_type=jnp.int32, **kwargs).astype(wide)
    else:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        out = lax.dot_general(lhs, rhs, preferred_element_type=wide, **kwargs)

    # The output's axes are the batch axes, those left of lhs, and those left of rhs.
    if lhs_scale is not None:
        scale = _arrange(lhs_scale, lhs_batch, lhs_contracting)
        scale = lax.expand_dims(scale, range(scale.ndim, out.ndim))
        out = over_tiles(jnp.multiply, out, scale)
    if rhs_scale is not None:
        scale = _arrange(rhs_scale, rhs_batch, rhs_contracting)
        new = range(len(rhs_batch), len(rhs_batch) + out.ndim - scale.ndim)
        out = over_tiles(jnp.multiply, out, lax.expand_dims(scale, new))
    return out.astype(out_dtype)


def _is_algorithm(precision: Any) -> bool:
    """Whether `precision` fixes the types of the multiplication, so that ours are not free."""
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def _take_out_scale(
    x: jax.Array | QArray, contracting: Sequence[int]
) -> tuple[jax.Array | QArray, jax.Array | None]:
    """The codes and the scale of `x`, or `x` and None where the scale belongs inside the sum."""
    if not isinstance(x, QArray) or x.zero_point is not None or x.format.codebook is not None:
        return x, None
    if any(count != 1 for axis, count in enumerate(x.scale.shape) if axis in contracting):
        return x, None
    return x.codes(), jnp.asarray(x.scale)


def _fits_int32(codes: jax.Array, contracting: Sequence[int]) -> bool:
    return math.prod(codes.shape[axis] for axis in contracting) <= _MAX_INT32_TERMS


def _arrange(scale: jax.Array, batch: Sequence[int], contracting: Sequence[int]) -> jax.Array:
    """The scale with the batch axes first and without the contracting ones, which have size 1."""
    kept = [axis for axis in range(scale.ndim) if axis not in contracting]
    order = [*batch, *(axis for axis in kept if axis not in batch)]
    return lax.transpose(lax.squeeze(scale, contracting), [kept.index(axis) for axis in order])


@register("dot_general")
def _dot_general(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray, **params: Any) -> jax.Array:
    return dot_general(lhs, rhs, **params)
