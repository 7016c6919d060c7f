"""`conv_general_dilated` with quantized operands.

If both operands are quantized and no scale varies along the contracted axes (the input features and
the window), the codes are convolved and the output is scaled. Sums of integer codes are exact in
integers and in floats; the faster way depends on the platform. In all other cases the operands are
dequantized. If only the kernel is quantized, scaling the output would save little, because a kernel
is small compared with the images.
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
    can_scale_output,
    code_unit,
    dequantized,
    fits_int32,
    has_int8_zero_point,
    has_minimum,
    have_byte_codes,
    int8_codes,
    largest_difference,
    operand_pair,
    outer_scale,
    unscaled,
)
from .product import Operand, Plan, dense_nbytes, describe_dequantized, execute

# All sums of integers up to this magnitude are exact in f32, in any order.
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
    lhs, rhs = _promote_integers(lhs, rhs), _promote_integers(rhs, lhs)
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


def _promote_integers(x: Operand, other: Operand) -> Operand:
    """Return a dense integer array in the dtype of the other operand, if that is a QArray."""
    is_promoted = isinstance(other, QArray) and jnp.issubdtype(x.dtype, jnp.integer)
    return x.astype(other.dtype) if is_promoted else x


def _plan(
    lhs: Operand, rhs: Operand, params: dict[str, Any], preferred_element_type: DTypeLike | None
) -> Plan:
    """Return the plan of a convolution: of codes, or of dense arrays."""
    convolve: Callable[..., jax.Array] = functools.partial(
        lax.conv_general_dilated, preferred_element_type=preferred_element_type, **params
    )
    # This also raises the errors of operands that do not fit.
    out = jax.eval_shape(convolve, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)))
    reason = ""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        # An empty sum is 0 for any scales.
        is_empty = 0 in (*lhs.shape, *rhs.shape)
        if not is_empty and can_scale_output(lhs, rhs, out.dtype, params["precision"]):
            if has_minimum(lhs) or has_minimum(rhs):
                reason = ", codes have minima"
            elif not _sums_share_scales(lhs, rhs, params):
                reason = ", scales vary along the contracted axes"
            else:
                return _plan_codes(lhs, rhs, params, out.dtype)
    how = describe_dequantized(lhs, rhs) + reason
    compute = lambda *xs: convolve(*map(dequantized, xs))
    return Plan(how, compute, (lhs, rhs), dense_nbytes(lhs, rhs))


def _plan_codes(lhs: QArray, rhs: QArray, params: dict[str, Any], out_dtype: jnp.dtype) -> Plan:
    compute = functools.partial(
        _scale_sums_of_codes, params=tuple(params.items()), out_dtype=out_dtype
    )
    if not have_byte_codes(lhs, rhs):
        dense = dense_nbytes(lhs, rhs, dtype=accumulator(out_dtype))
        return Plan("convolve codes as floats, scale the output", compute, (lhs, rhs), dense)
    is_in_integers = _is_in_integers(lhs, rhs, params, jax.default_backend())
    dense = () if is_in_integers else dense_nbytes(lhs, rhs, dtype="float32")
    return Plan("convolve integer codes, scale the output", compute, (lhs, rhs), dense)


def _sums_share_scales(lhs: QArray, rhs: QArray, params: dict[str, Any]) -> bool:
    """Return whether no scale varies along the contracted axes."""
    numbers = params["dimension_numbers"]
    _, feature, *space = numbers.lhs_spec
    counts = [lhs.scale.shape[axis] for axis in space]
    counts += [rhs.scale.shape[axis] for axis in numbers.rhs_spec[1:]]
    # Groups of features are summed separately, and can have different scales.
    return set(counts) <= {1} and params["feature_group_count"] % lhs.scale.shape[feature] == 0


# Jitted, so that outside of `jit`, too, only the computation for the platform runs.
@functools.partial(jax.jit, static_argnames=("params", "out_dtype"), inline=True)
def _scale_sums_of_codes(
    lhs: QArray, rhs: QArray, params: tuple[tuple[str, Any], ...], out_dtype: Any
) -> jax.Array:
    dtype = accumulator(out_dtype)
    if have_byte_codes(lhs, rhs):
        sums = _integer_sums(lhs, rhs, dict(params), dtype)
    else:
        sums = _convolve(unscaled(lhs, dtype)[0], unscaled(rhs, dtype)[0], dict(params), dtype)
    return over_tiles(jnp.multiply, sums, _output_scale(lhs, rhs, dict(params))).astype(out_dtype)


def _output_scale(lhs: QArray, rhs: QArray, params: dict[str, Any]) -> jax.Array:
    """Return the product of the scales, with a shape that tiles the output.

    It is in range if the largest products of dense values are. The product of a sum and one scale
    might overflow.
    """
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    batch, feature, *_ = numbers.lhs_spec
    features = rhs.shape[numbers.rhs_spec[0]]
    counts = lhs.scale.shape
    # [batch, features]: groups of input features are groups of output features.
    lhs_scale = lax.transpose(outer_scale(lhs), numbers.lhs_spec)
    lhs_scale = lhs_scale.reshape(counts[batch], counts[feature])
    rhs_scale = lax.transpose(outer_scale(rhs), numbers.rhs_spec).reshape(1, -1)
    if groups > 1 and counts[batch] > 1:  # groups of the batch are groups of output features
        each = jnp.repeat(lhs_scale, lhs.shape[batch] // counts[batch], axis=0)
        lhs_scale = each.reshape(groups, -1).T
    if 1 < lhs_scale.shape[1] != rhs_scale.shape[1] > 1:
        lhs_scale = jnp.repeat(lhs_scale, features // lhs_scale.shape[1], axis=1)
        rhs_scale = jnp.repeat(rhs_scale, features // rhs_scale.shape[1], axis=1)
    scale = lax.expand_dims(lhs_scale * rhs_scale, range(2, lhs.ndim))
    return lax.transpose(scale, sorted(range(lhs.ndim), key=numbers.out_spec.__getitem__))


# Codes of an integer format, and the zero point to subtract.
_Codes = tuple[jax.Array, jax.Array | None]


def _integer_sums(lhs: QArray, rhs: QArray, params: dict[str, Any], dtype: Any) -> jax.Array:
    """Convolve codes minus zero points, and multiply the sums by `code_unit` of each operand.

    This is done in int8 if the platform computes that fast. Otherwise, it is done in f32, with so
    few features at a time that their sums are exact. Zero points are subtracted first, in f32, so
    that padding has the value 0.
    """
    features, *window = (rhs.shape[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    terms = math.prod(window)
    # If the sum for one feature is too large, f32 rounds, as for dense operands.
    size = _FLOAT32_EXACT // (terms * largest_difference(lhs) * largest_difference(rhs)) or features
    unit = code_unit(lhs) * code_unit(rhs)

    def integers(lhs: _Codes, rhs: _Codes) -> jax.Array:
        return _convolve(lhs[0], rhs[0], params, jnp.int32).astype(dtype) * unit

    def floats(lhs: _Codes, rhs: _Codes) -> jax.Array:
        values = _subtract_zero_point(*lhs), _subtract_zero_point(*rhs)
        sums = _convolve_by_features(*values, params, min(size, features), sum_dtype)
        return sums.astype(dtype) * unit

    fits = fits_int32(lhs, rhs, features * terms)
    sum_dtype = jnp.int32 if fits and size < features else dtype
    codes = int8_codes(lhs), int8_codes(rhs)
    if not _is_in_integers(lhs, rhs, params):
        return floats(*codes)
    on_cpu = integers if _is_in_integers(lhs, rhs, params, "cpu") else floats
    return lax.platform_dependent(*codes, cpu=on_cpu, cuda=floats, rocm=floats, default=integers)


def _is_in_integers(
    lhs: QArray, rhs: QArray, params: dict[str, Any], platform: str | None = None
) -> bool:
    """Return whether integer codes are convolved in int8, on a platform or on some platform."""
    features, *window = (rhs.shape[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    fits = fits_int32(lhs, rhs, features * math.prod(window))
    if not fits or has_int8_zero_point(lhs) or has_int8_zero_point(rhs):
        return False
    if platform == "cpu":
        return _fast_on_cpu(features, params)
    # A GPU has no convolution from int8 to int32: github.com/jax-ml/jax/issues/7637.
    return platform not in ("gpu", "cuda", "rocm")


def _subtract_zero_point(codes: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    values = codes.astype(jnp.float32)
    if zero_point is None:
        return values
    return over_tiles(jnp.subtract, values, zero_point.astype(jnp.float32))


def _fast_on_cpu(features: int, params: dict[str, Any]) -> bool:
    """Return whether XLA has more than a plain loop for an int8 convolution on CPU.

    Measured with JAX 0.10.2 and 0.12.0: int8 takes 0.7 to 1.0 of the time of f32 with NHWC images
    and HWIO kernels of at least 8 features, and 20 times as long with other layouts and ranks.
    """
    layout = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))
    dilation = params["lhs_dilation"] or (1,)
    return params["dimension_numbers"] == layout and set(dilation) == {1} and features >= 8


def _convolve_by_features(
    lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], size: int, dtype: Any
) -> jax.Array:
    """Convolve `size` input features of each group at a time, and add the sums in `dtype`."""
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
        parts.append(_convolve(part, kernel, params, jnp.float32).astype(dtype))
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
    return execute(_plan(as_operand(lhs), as_operand(rhs), params, preferred_element_type))
