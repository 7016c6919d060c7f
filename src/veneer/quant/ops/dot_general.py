"""`dot_general` with quantised operands.

Where a scale does not vary along the contracting axes it can be taken out of the sum:
`sum_k x[k] * (codes[k, n] * scale[n]) = (sum_k x[k] * codes[k, n]) * scale[n]`. Then the codes are
contracted as they are, and it is the output that is scaled. Otherwise the operand is dequantised.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.array import ImplicitArray
from ..._core.rules import register
from ..._core.value import materialise_one
from ..qarray import QUANTISABLE, QArray
from ..tiles import over_tiles

DotDimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]

# Products of two codes, at most 2**14 each, whose sum int32 is sure to hold.
_MAX_INT32_TERMS = 2**17 - 1


def dot_general(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Does what `jax.lax.dot_general` does; either operand, or both, may be a `QArray`.

    16-bit operands are accumulated in f32, and the codes of two integer formats in int32.

    **Arguments:** those of `jax.lax.dot_general`. Implicit arrays of other types are materialised.

    **Returns:** an array of the shape and dtype that the dense operands give. Values agree with
    theirs within rounding.

    **Raises:** what `jax.lax.dot_general` raises.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int8", channelwise_axes=[1])
    >>> y = vn.quant.dot_general(jnp.ones((2, 3)), w, (([1], [0]), ([], [])))
    >>> y.shape, bool(jnp.allclose(y, jnp.ones((2, 3)) @ w.dequantize()))
    ((2, 3), True)
    """
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=precision,
        out_sharding=out_sharding,
    )
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, rhs = (x if isinstance(x, QArray) else jnp.asarray(materialise_one(x)) for x in (lhs, rhs))
    dtype = lhs.dtype
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)

    lhs_scale = rhs_scale = None
    # Each of QUANTISABLE holds a code of 8 bits exactly: even bf16 has a mantissa of 8.
    hold_codes = dtype == rhs.dtype and {dtype, out_dtype} <= set(QUANTISABLE)
    if hold_codes and not _is_algorithm(precision):
        lhs, lhs_scale = _take_out_scale(lhs, lhs_contracting)
        rhs, rhs_scale = _take_out_scale(rhs, rhs_contracting)
    lhs, rhs = (x.dequantize() if isinstance(x, QArray) else x for x in (lhs, rhs))
    if lhs_scale is None and rhs_scale is None:
        return dot(lhs, rhs, preferred_element_type=preferred_element_type)

    wide = jnp.promote_types(out_dtype, jnp.float32)
    if lhs_scale is not None and rhs_scale is not None and _fits_int32(lhs, lhs_contracting):
        out = dot(lhs, rhs, preferred_element_type=jnp.int32).astype(wide)
    else:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        out = dot(lhs, rhs, preferred_element_type=wide)

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
    """Splits `x` in codes and scale; in `x` and None where the scale belongs inside the sum."""
    if not isinstance(x, QArray) or x.zero_point is not None or x.format.codebook is not None:
        return x, None
    if any(count != 1 for axis, count in enumerate(x.scale.shape) if axis in contracting):
        return x, None
    return x.codes(), jnp.asarray(x.scale)


def _fits_int32(codes: jax.Array, contracting: Sequence[int]) -> bool:
    return math.prod(codes.shape[axis] for axis in contracting) <= _MAX_INT32_TERMS


def _arrange(scale: jax.Array, batch: Sequence[int], contracting: Sequence[int]) -> jax.Array:
    """Puts the batch axes of a scale first, and drops the contracting ones, which have size 1."""
    kept = [axis for axis in range(scale.ndim) if axis not in contracting]
    order = [*batch, *(axis for axis in kept if axis not in batch)]
    return lax.transpose(lax.squeeze(scale, contracting), [kept.index(axis) for axis in order])


@register("dot_general")
def _dot_general(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray, **params: Any) -> jax.Array:
    product: Callable[..., jax.Array] = functools.partial(dot_general, **params)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((lhs, rhs))):
        # A derivative dequantises once more, instead of keeping the dense weights of a whole model
        # from the forward pass to the backward one.
        product = jax.checkpoint(product)
    return product(lhs, rhs)
