"""`conv_general_dilated` with quantized operands.

If both operands are quantized and no scale varies along the contracted axes (the input features and
the window), the codes are convolved and the output is scaled. Integer codes are convolved in int8
or f32, whichever is faster on the platform. Sums are exact in both dtypes. In all other cases the
operands are dequantized. If only the kernel is quantized, scaling the output would save little,
because a kernel is small compared with the images.
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
from ..arrays import QUANTIZABLE, QArray
from ..formats.tiles import over_tiles
from .operands import (
    accumulator,
    as_operand,
    can_scale_output,
    code_factor,
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
    narrow_dtype = None
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.replace(dense_dtype=dtype), rhs.replace(dense_dtype=dtype)
        # JAX rejects a result dtype that is narrower than the operands, so convert the result.
        if preferred_element_type is not None:
            preferred = jnp.dtype(preferred_element_type)
            if preferred in QUANTIZABLE and preferred.itemsize < dtype.itemsize:
                narrow_dtype, preferred_element_type = preferred, None
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
    out = _plan_convolution(lhs, rhs, params, preferred_element_type)()
    return out if narrow_dtype is None else out.astype(narrow_dtype)


def _promote_integers(x: Operand, other: Operand) -> Operand:
    """Convert `x` to the dtype of `other` if `x` is an integer array and `other` is a QArray."""
    is_promoted = isinstance(other, QArray) and jnp.issubdtype(x.dtype, jnp.integer)
    return x.astype(other.dtype) if is_promoted else x


def _plan_convolution(
    lhs: Operand, rhs: Operand, params: dict[str, Any], preferred_element_type: DTypeLike | None
) -> Plan:
    """Return a plan that convolves codes if possible, and otherwise dense arrays.

    `params` are the other keyword arguments of `lax.conv_general_dilated`.

    **Raises:** the errors of `lax.conv_general_dilated`, for shapes that do not match.
    """
    convolve: Callable[..., jax.Array] = functools.partial(
        lax.conv_general_dilated, preferred_element_type=preferred_element_type, **params
    )
    out = jax.eval_shape(convolve, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)))
    reason = ""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
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
    """Return a plan that convolves the codes of both operands and scales the output.

    `params` are the keyword arguments of `lax.conv_general_dilated`.
    """
    compute = functools.partial(
        _scale_sums_of_codes, params=tuple(params.items()), out_dtype=out_dtype
    )
    if not have_byte_codes(lhs, rhs):
        dense = dense_nbytes(lhs, rhs, dtype=accumulator(out_dtype))
        return Plan("convolve codes as floats, scale the output", compute, (lhs, rhs), dense)
    uses_int8 = _can_convolve_int8(lhs, rhs, params, jax.default_backend())
    dense = () if uses_int8 else dense_nbytes(lhs, rhs, dtype="float32")
    return Plan("convolve integer codes, scale the output", compute, (lhs, rhs), dense)


def _sums_share_scales(lhs: QArray, rhs: QArray, params: dict[str, Any]) -> bool:
    """Return whether all terms of each sum of a convolution have the same scale.

    The scale can then be applied to the output. Each group of input features is summed separately,
    so groups can have different scales. `params` are the keyword arguments of the convolution.
    """
    numbers = params["dimension_numbers"]
    _, feature_axis, *space_axes = numbers.lhs_spec
    counts = [lhs.scale.shape[axis] for axis in space_axes]
    counts += [rhs.scale.shape[axis] for axis in numbers.rhs_spec[1:]]
    groups = params["feature_group_count"]
    return set(counts) <= {1} and groups % lhs.scale.shape[feature_axis] == 0


# Jitted, so that outside of `jit`, too, only the computation for the platform runs.
@functools.partial(jax.jit, static_argnames=("params", "out_dtype"), inline=True)
def _scale_sums_of_codes(
    lhs: QArray, rhs: QArray, params: tuple[tuple[str, Any], ...], out_dtype: Any
) -> jax.Array:
    """Convolve the codes of both operands, and scale the sums.

    `params` are the keyword arguments of `lax.conv_general_dilated`, as hashable pairs.
    """
    dtype, kwargs = accumulator(out_dtype), dict(params)
    if have_byte_codes(lhs, rhs):
        sums = _sum_integers(lhs, rhs, kwargs, dtype)
    else:
        (images, _), (kernel, _) = unscaled(lhs, dtype), unscaled(rhs, dtype)
        sums = _convolve(images, kernel, kwargs, dtype)
    return over_tiles(jnp.multiply, sums, _output_scale(lhs, rhs, kwargs)).astype(out_dtype)


def _output_scale(lhs: QArray, rhs: QArray, params: dict[str, Any]) -> jax.Array:
    """Return the scales of both operands, multiplied and rearranged to the axes of the output.

    The scales are multiplied with each other, because a sum times only one scale might overflow.
    """
    numbers, batch_groups = params["dimension_numbers"], params["batch_group_count"]
    batch_axis, feature_axis, *_ = numbers.lhs_spec
    batch_count, feature_count = lhs.scale.shape[batch_axis], lhs.scale.shape[feature_axis]
    # Rearrange both to [batch, output features]. A group of input features is computed into one
    # group of output features, so scales per input group become scales per output feature.
    lhs_scale = lax.transpose(outer_scale(lhs), numbers.lhs_spec)
    lhs_scale = lhs_scale.reshape(batch_count, feature_count)
    rhs_scale = lax.transpose(outer_scale(rhs), numbers.rhs_spec).reshape(1, -1)
    if batch_groups > 1 and batch_count > 1:  # groups of the batch are groups of output features
        entry_scale = jnp.repeat(lhs_scale, lhs.shape[batch_axis] // batch_count, axis=0)
        lhs_scale = entry_scale.reshape(batch_groups, -1).T
    # Scales for different tiles of output features are both repeated for each output feature.
    lhs_count, rhs_count = lhs_scale.shape[1], rhs_scale.shape[1]
    if lhs_count > 1 and rhs_count > 1 and lhs_count != rhs_count:
        features = rhs.shape[numbers.rhs_spec[0]]
        lhs_scale = jnp.repeat(lhs_scale, features // lhs_count, axis=1)
        rhs_scale = jnp.repeat(rhs_scale, features // rhs_count, axis=1)
    scale = lax.expand_dims(lhs_scale * rhs_scale, range(2, lhs.ndim))
    return lax.transpose(scale, sorted(range(lhs.ndim), key=numbers.out_spec.__getitem__))


# Codes in int8, and the zero point to subtract from them.
_Codes = tuple[jax.Array, jax.Array | None]


def _sum_integers(lhs: QArray, rhs: QArray, params: dict[str, Any], dtype: Any) -> jax.Array:
    """Convolve integer codes minus zero points, and return the sums in `dtype`.

    The sums are multiplied by the `code_factor` of each operand, a power of two that keeps the
    result small. Scale it with the `outer_scale` of each operand.

    The convolution runs in int8 if the platform supports that and computes it fast. Otherwise it
    runs in f32, with so few input features at a time that the sums are exact.
    """
    features, *window = (rhs.shape[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    terms = math.prod(window)
    largest_product = largest_difference(lhs) * largest_difference(rhs)
    # The number of features whose sum is exact in f32. If it is 0, sum all features, and round.
    exact_features = _FLOAT32_EXACT // (terms * largest_product) or features
    # Several exact sums are added in int32, if their total fits.
    has_several_sums = exact_features < features
    fits = fits_int32(lhs, rhs, features * terms)
    total_dtype = jnp.int32 if has_several_sums and fits else dtype
    factor = code_factor(lhs) * code_factor(rhs)

    def sum_in_int8(lhs: _Codes, rhs: _Codes) -> jax.Array:
        (lhs_codes, _), (rhs_codes, _) = lhs, rhs  # there are no zero points
        return _convolve(lhs_codes, rhs_codes, params, jnp.int32).astype(dtype) * factor

    def sum_in_floats(lhs: _Codes, rhs: _Codes) -> jax.Array:
        # Zero points are subtracted first, so that padding has the value 0.
        values = _subtract_zero_point(*lhs), _subtract_zero_point(*rhs)
        step = min(exact_features, features)
        return _convolve_by_features(*values, params, step, total_dtype).astype(dtype) * factor

    codes = int8_codes(lhs), int8_codes(rhs)
    if not _can_convolve_int8(lhs, rhs, params):
        return sum_in_floats(*codes)
    on_cpu = sum_in_int8 if _can_convolve_int8(lhs, rhs, params, "cpu") else sum_in_floats
    on_gpu = sum_in_floats
    return lax.platform_dependent(*codes, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu, default=sum_in_int8)


def _can_convolve_int8(
    lhs: QArray, rhs: QArray, params: dict[str, Any], platform: str | None = None
) -> bool:
    """Return whether to convolve integer codes in int8 on a platform.

    With `platform=None`, return whether to do so on any platform.
    """
    features, *window = (rhs.shape[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    fits = fits_int32(lhs, rhs, features * math.prod(window))
    if not fits or has_int8_zero_point(lhs) or has_int8_zero_point(rhs):
        return False
    if platform == "cpu":
        # Measured with JAX 0.10.2 and 0.12.0: int8 takes 0.7 to 1.0 of the time of f32 with NHWC
        # images and HWIO kernels of at least 8 features. With other layouts and ranks, XLA uses a
        # plain loop, and int8 takes 20 times as long.
        layout = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))
        dilation = params["lhs_dilation"] or (1,)
        return params["dimension_numbers"] == layout and set(dilation) == {1} and features >= 8
    # A GPU has no convolution from int8 to int32: github.com/jax-ml/jax/issues/7637.
    return platform not in ("gpu", "cuda", "rocm")


def _subtract_zero_point(codes: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    values = codes.astype(jnp.float32)
    if zero_point is None:
        return values
    return over_tiles(jnp.subtract, values, zero_point.astype(jnp.float32))


def _convolve_by_features(
    lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], step: int, dtype: Any
) -> jax.Array:
    """Convolve in f32, `step` input features of each group at a time, and add the sums in `dtype`.

    With few features at a time, each f32 sum of integers is exact. A group is one of the
    `feature_group_count` groups of the convolution.
    """
    _, lhs_axis, *_ = params["dimension_numbers"].lhs_spec
    _, rhs_axis, *_ = params["dimension_numbers"].rhs_spec
    features = rhs.shape[rhs_axis]
    # Split the feature axis of the images into groups and features, to slice within each group.
    before, (_, *after) = lhs.shape[:lhs_axis], lhs.shape[lhs_axis:]
    grouped = lhs.reshape(*before, params["feature_group_count"], features, *after)
    sums = []
    for start in range(0, features, step):
        end = min(start + step, features)
        images = lax.slice_in_dim(grouped, start, end, axis=lhs_axis + 1)
        images = images.reshape(*before, -1, *after)
        kernel = lax.slice_in_dim(rhs, start, end, axis=rhs_axis)
        sums.append(_convolve(images, kernel, params, jnp.float32).astype(dtype))
    return functools.reduce(jnp.add, sums)


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
    operands = as_operand(lhs), as_operand(rhs)
    return execute(_plan_convolution(*operands, params, preferred_element_type))
