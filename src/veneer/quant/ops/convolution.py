"""`conv_general_dilated` with quantised operands.

Where both are quantised, and neither scale varies along what is summed (the features that come in,
and the places in the window), the codes are convolved and the scales multiply the output. Of
integer formats the sums are exact, whether they are computed in integers or in floats: platforms
are fast at different ones. Otherwise an operand is dequantised: a kernel is small beside what it is
convolved with, so there is nothing to gain from scaling the output in its place.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.tiles import over_tiles
from .operands import (
    accumulator,
    as_operand,
    code_unit,
    dequantized,
    fits_int32,
    has_int8_zero_point,
    has_minimum,
    have_byte_codes,
    int8_codes,
    largest_difference,
    may_scale_outside,
    operand_pair,
    outer_scale,
    unscaled,
)
from .product import Plan, carry_out, dense_nbytes, how_dense

# The largest sum of integers that is exact in f32, whatever the order.
_FLOAT32_EXACT = 2**24


def conv_general_dilated(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Convolve two arrays like `jax.lax.conv_general_dilated`; one or both can be a `QArray`.

    If both are quantized and no scale varies along the contracted axes, the codes are convolved and
    the output is scaled. Sums of integer codes are then exact. In all other cases the operands are
    dequantized. To avoid this, quantize a kernel `[h, w, in, out]` with `channelwise_axes=[-1]`,
    and images with only their batch axis in `channelwise_axes`.

    Padding and dilation insert the value 0, not the code 0. A dense int8 or uint8 array is used as
    codes if the other operand has an integer format. Other integer arrays are converted to the
    dtype of the QArray.

    **Arguments:**

    - `lhs`, `rhs`: arrays or QArrays. Implicit arrays of other types are materialized. Two QArrays
      can have different dtypes, which are promoted.
    - `window_strides`, `padding`, `lhs_dilation`, `rhs_dilation`, `dimension_numbers`,
      `feature_group_count`, `batch_group_count`, `precision`, `out_sharding`: as for
      `jax.lax.conv_general_dilated`.
    - `preferred_element_type`: the dtype of the result, as for `jax.lax.conv_general_dilated`. For
      two QArrays, it can also be a float dtype narrower than their dtype.

    **Returns:** an array with the shape and dtype of the convolution of the dense arrays. The
    values are the same up to rounding.

    **Raises:** the errors of `jax.lax.conv_general_dilated`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> kernel = vn.quant.quantize(jnp.ones((3, 3, 2, 4)), "int8", channelwise_axes=[-1])
    >>> images = jnp.ones((1, 8, 8, 2))  # [batch, height, width, features]
    >>> nhwc = ("NHWC", "HWIO", "NHWC")
    >>> y = vn.quant.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=nhwc)
    >>> y.shape, [round(float(value)) for value in y[0, 0, :2, 0]]
    ((1, 8, 8, 4), [8, 12])
    """
    lhs, rhs = operand_pair(lhs, rhs, precision, preferred_element_type)
    lhs, rhs = _in_dtype_of(rhs, lhs), _in_dtype_of(lhs, rhs)
    narrower = None
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.replace(dense_dtype=dtype), rhs.replace(dense_dtype=dtype)
        # JAX rejects a result narrower than the operands. Sums of codes are rounded to it here.
        if preferred_element_type is not None:
            preferred = jnp.dtype(preferred_element_type)
            if preferred in QUANTIZABLE and preferred.itemsize < dtype.itemsize:
                narrower, preferred_element_type = preferred, None
    params = {
        "window_strides": tuple(window_strides),
        "padding": padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        "lhs_dilation": lhs_dilation and tuple(lhs_dilation),
        "rhs_dilation": rhs_dilation and tuple(rhs_dilation),
        "dimension_numbers": lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers),
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
        "out_sharding": out_sharding,
    }
    out = _plan(lhs, rhs, params, preferred_element_type)()
    return out if narrower is None else out.astype(narrower)


def _in_dtype_of(other: jax.Array | QArray, x: jax.Array | QArray) -> jax.Array | QArray:
    """Dense integers that meet a QArray in its dtype, as a product has them."""
    is_met = isinstance(other, QArray) and jnp.issubdtype(x.dtype, jnp.integer)
    return x.astype(other.dtype) if is_met else x


def _plan(
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    params: dict[str, Any],
    preferred_element_type: DTypeLike | None,
) -> Plan:
    """Returns what is done: codes are convolved, or what the operands stand for."""
    conv: Callable[..., jax.Array] = functools.partial(
        lax.conv_general_dilated, preferred_element_type=preferred_element_type, **params
    )
    # It raises, too, where the operands do not fit.
    out = jax.eval_shape(conv, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)))

    def dense(reason: str = "") -> Plan:
        compute = lambda *xs: conv(*map(dequantized, xs))
        return Plan(how_dense(lhs, rhs) + reason, compute, (lhs, rhs), dense_nbytes(lhs, rhs))

    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return dense()
    if not may_scale_outside(lhs, rhs, out.dtype, params["precision"]):
        return dense()
    if 0 in (*lhs.shape, *rhs.shape):
        return dense()  # a sum of nothing is 0, whatever the scales are
    if has_minimum(lhs) or has_minimum(rhs):
        return dense(", codes have minima")
    if not _sums_share_scales(lhs, rhs, params):
        return dense(", scales vary along the contracted axes")
    are_integers = have_byte_codes(lhs, rhs)
    codes = "integer codes" if are_integers else "codes as floats"
    on_codes = functools.partial(_scaled_sums, params=tuple(params.items()), out_dtype=out.dtype)
    made = dense_nbytes(lhs, rhs, dtype=accumulator(out.dtype))
    if are_integers:
        stays = _is_in_integers(lhs, rhs, params, jax.default_backend())
        made = () if stays else dense_nbytes(lhs, rhs, dtype="float32")
    return Plan(f"convolve {codes}, scale the output", on_codes, (lhs, rhs), made)


def _sums_share_scales(lhs: QArray, rhs: QArray, params: dict[str, Any]) -> bool:
    """Whether all that is summed has one scale on either side."""
    numbers = params["dimension_numbers"]
    _, feature, *space = numbers.lhs_spec
    summed = [lhs.scale.shape[axis] for axis in space]
    summed += [rhs.scale.shape[axis] for axis in numbers.rhs_spec[1:]]
    # A group of features is summed by itself, and may have a scale of its own.
    return set(summed) <= {1} and params["feature_group_count"] % lhs.scale.shape[feature] == 0


# Compiled as one, so that outside of jit, too, what is not needed on a platform is not computed.
@functools.partial(jax.jit, static_argnames=("params", "out_dtype"), inline=True)
def _scaled_sums(
    lhs: QArray, rhs: QArray, params: tuple[tuple[str, Any], ...], out_dtype: Any
) -> jax.Array:
    dtype = accumulator(out_dtype)
    if have_byte_codes(lhs, rhs):
        sums = _integer_sums(lhs, rhs, dict(params), dtype)
    else:
        sums = _convolve(unscaled(lhs, dtype)[0], unscaled(rhs, dtype)[0], dict(params), dtype)
    return over_tiles(jnp.multiply, sums, _output_scale(lhs, rhs, dict(params))).astype(out_dtype)


def _output_scale(lhs: QArray, rhs: QArray, params: dict[str, Any]) -> jax.Array:
    """Returns the product of the scales, of a shape that tiles the output.

    It is that of the dense arrays where they are largest, so it is in range where their products
    are; a sum times one scale alone might not be.
    """
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    batch, feature, *_ = numbers.lhs_spec
    features = rhs.shape[numbers.rhs_spec[0]]
    counts = lhs.scale.shape
    # [batch, features]: groups of the features that come in are groups of those that go out.
    of_lhs = lax.transpose(outer_scale(lhs), numbers.lhs_spec)
    of_lhs = of_lhs.reshape(counts[batch], counts[feature])
    of_rhs = lax.transpose(outer_scale(rhs), numbers.rhs_spec).reshape(1, -1)
    if groups > 1 and counts[batch] > 1:  # a group of the batch gives a group of features, too
        each = jnp.repeat(of_lhs, lhs.shape[batch] // counts[batch], axis=0)
        of_lhs = each.reshape(groups, -1).T
    if 1 < of_lhs.shape[1] != of_rhs.shape[1] > 1:
        of_lhs, of_rhs = (
            jnp.repeat(scale, features // scale.shape[1], axis=1) for scale in (of_lhs, of_rhs)
        )
    scale = lax.expand_dims(of_lhs * of_rhs, range(2, lhs.ndim))
    return lax.transpose(scale, sorted(range(lhs.ndim), key=numbers.out_spec.__getitem__))


# Codes of an integer format, and the zero point that is to be taken off.
_Codes = tuple[jax.Array, jax.Array | None]


def _integer_sums(lhs: QArray, rhs: QArray, params: dict[str, Any], dtype: Any) -> jax.Array:
    """Convolves codes less their zero points, each in units of its `code_unit`.

    It is done in int8 where the platform is fast at that, and else in f32, of so few features at a
    time that it holds their sums. Where there is a zero point it is taken off first, in f32: what
    is padded is then 0, as it should be.
    """
    features, *window = (rhs.shape[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    terms = math.prod(window)
    # If one feature is too much already, f32 rounds as it does for dense operands.
    size = _FLOAT32_EXACT // (terms * largest_difference(lhs) * largest_difference(rhs)) or features
    unit = code_unit(lhs) * code_unit(rhs)

    def integers(lhs: _Codes, rhs: _Codes) -> jax.Array:
        return _convolve(lhs[0], rhs[0], params, jnp.int32).astype(dtype) * unit

    def floats(lhs: _Codes, rhs: _Codes) -> jax.Array:
        values = _less_zero_point(*lhs), _less_zero_point(*rhs)
        sums = _sums_by_features(*values, params, min(size, features), total)
        return sums.astype(dtype) * unit

    fits = fits_int32(lhs, rhs, features * terms)
    total = jnp.int32 if fits and size < features else dtype
    codes = int8_codes(lhs), int8_codes(rhs)
    if not _is_in_integers(lhs, rhs, params):
        return floats(*codes)
    on_cpu = integers if _is_in_integers(lhs, rhs, params, "cpu") else floats
    return lax.platform_dependent(*codes, cpu=on_cpu, cuda=floats, rocm=floats, default=integers)


def _is_in_integers(
    lhs: QArray, rhs: QArray, params: dict[str, Any], platform: str | None = None
) -> bool:
    """Whether codes of integer formats are convolved as integers: on a platform, or on any."""
    features, *window = (rhs.shape[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    fits = fits_int32(lhs, rhs, features * math.prod(window))
    if not fits or has_int8_zero_point(lhs) or has_int8_zero_point(rhs):
        return False
    if platform == "cpu":
        return _fast_on_cpu(features, params)
    # A GPU has no convolution from int8 to int32: github.com/jax-ml/jax/issues/7637.
    return platform not in ("gpu", "cuda", "rocm")


def _less_zero_point(codes: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    values = codes.astype(jnp.float32)
    if zero_point is None:
        return values
    return over_tiles(jnp.subtract, values, zero_point.astype(jnp.float32))


def _fast_on_cpu(features: int, params: dict[str, Any]) -> bool:
    """Whether XLA has more than a plain loop for an int8 convolution on CPU.

    Measured with JAX 0.10.2 and 0.12.0: 0.7 to 1.0 of the time in f32 with NHWC images and HWIO
    kernels of 8 features and up; 20 times that of other layouts and ranks.
    """
    layout = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))
    dilation = params["lhs_dilation"] or (1,)
    return params["dimension_numbers"] == layout and set(dilation) == {1} and features >= 8


def _sums_by_features(
    lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], size: int, total: Any
) -> jax.Array:
    """Convolves `size` of the input features (of each group) at a time, and adds up in `total`."""
    _, axis, *_ = params["dimension_numbers"].lhs_spec
    _, rhs_axis, *_ = params["dimension_numbers"].rhs_spec
    before, (_, *after) = lhs.shape[:axis], lhs.shape[axis:]
    features = rhs.shape[rhs_axis]
    grouped = lhs.reshape(*before, params["feature_group_count"], features, *after)
    parts = []
    for start in range(0, features, size):
        end = min(start + size, features)
        part = lax.slice_in_dim(grouped, start, end, axis=axis + 1).reshape(*before, -1, *after)
        kernel = lax.slice_in_dim(rhs, start, end, axis=rhs_axis)
        parts.append(_convolve(part, kernel, params, jnp.float32).astype(total))
    return functools.reduce(jnp.add, parts)


def _convolve(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], dtype: Any) -> jax.Array:
    return lax.conv_general_dilated(lhs, rhs, preferred_element_type=dtype, **params)


@register("conv_general_dilated")
def _conv_general_dilated(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    *,
    preferred_element_type: DTypeLike | None,
    **params: Any,
) -> jax.Array:
    params["padding"] = tuple(map(tuple, params["padding"]))
    return carry_out(_plan(as_operand(lhs), as_operand(rhs), params, preferred_element_type))
