"""Fake quantization: quantizing and dequantizing an array, with a derivative for training.

Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (2013); Jacob et al.,
Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference (2018).
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..._core.surface.straight_through import ste
from ..arrays.qarray import QArray
from ..formats import FORMATS
from ..formats.tiles import Leaf, over_tiles
from .compute import QuantizeParams, quantize_tiles
from .quantize import Axes, TiledAxes, as_dense_floats, quantize_params, quantize_with_scale

# The smallest and the largest value that is not clipped, with one entry per tile.
Ends = tuple[jax.Array, jax.Array]


def fake_quantize(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Quantize and dequantize an array, with a derivative for training (QAT).

    The derivative is the straight-through estimator (Bengio et al., arXiv 1308.3432): 1 if a value
    is in the range of its tile, and 0 if the value is clipped. These calibration methods clip
    values: "fixed", "rms", "percentile", "mse", "hqq", and with a factor below 1 also "absmax" and
    "minmax". The scale has no derivative, and second derivatives are 0.

    **Arguments:**

    - `array`, `qtype`, `channelwise_axes`, `tiled_axes`, `calibration_method`, `scale_dtype`,
      `key`: as for `vn.quant.quantize`.

    **Returns:** a dense array with the shape and dtype of `array`.

    **Raises:** the errors of `vn.quant.quantize`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> fake = lambda x: vn.quant.fake_quantize(x, "int4", calibration_method="fixed,1.5").sum()
    >>> jax.grad(fake)(jnp.array([0.5, 1.0, 9.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    dense = as_dense_floats(array)
    params = quantize_params(
        dense, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    value, ends = _quantize_and_dequantize(dense, key, params)
    return _straight_through(value, dense, ends if params.calibration.clips else None)


@functools.partial(jax.jit, static_argnames="params")
def _quantize_and_dequantize(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams
) -> tuple[jax.Array, Ends]:
    """Return the dequantized values, and the ends of the range in which no value is clipped."""
    q, ranges = quantize_tiles(array, key, params)
    assert ranges is not None  # Only stable scales have no ranges.
    low, high = ranges
    format = FORMATS[params.qtype]
    if low is None and format.scale_dtype is not None:
        # A scale that is rounded up, such as a power of two, extends the range.
        high = jnp.maximum(high, q.scales().astype(high.dtype) * format.bound)
    return q.dequantize(), (-high if low is None else low, high)


def fake_quantize_with_scale(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    scale: Leaf | QArray | float,
    zero_point: Leaf | int | None = None,
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """Quantize an array with scales that are already known, and dequantize the result.

    The derivative is 1 if a value is in the range of the codes, and 0 if the value is clipped. The
    scale and the zero point have no derivative.

    **Arguments:**

    - `array`, `qtype`, `scale`, `zero_point`, `key`: as for `vn.quant.quantize_with_scale`.

    **Returns:** a dense array with the shape and dtype of `array`.

    **Raises:** the errors of `vn.quant.quantize_with_scale`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> fake = lambda x: vn.quant.fake_quantize_with_scale(x, "int4", 0.2).sum()
    >>> jax.grad(fake)(jnp.array([0.5, 1.4, -2.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    dense = as_dense_floats(array)
    q = quantize_with_scale(dense, qtype, scale, zero_point, key=key)
    format, scales = q.format, q.scales()
    if q.zero_point is None:
        low = -format.bound if format.signed or not format.is_integer else 0
        ends = low * scales, format.bound * scales
    else:
        zero = jnp.asarray(q.zero_point).astype(scales.dtype)
        least, largest = format.code_range
        ends = (least - zero) * scales, (largest - zero) * scales
    return _straight_through(q.dequantize(), dense, ends)


def _straight_through(value: jax.Array, array: jax.Array, ends: Ends | None) -> jax.Array:
    """Return `value`, with derivative 1 with respect to `array`, or 0 where `array` is clipped.

    Entries of `array` beyond `ends` are clipped. If `ends` is None, no entry is clipped.
    """
    value = jax.lax.stop_gradient(value)
    if ends is not None:
        low, high = (end.astype(jnp.promote_types(end.dtype, array.dtype)) for end in ends)
        detached = jax.lax.stop_gradient(array)
        is_clipped = over_tiles(jnp.less, detached, low) | over_tiles(jnp.greater, detached, high)
        array = jnp.where(is_clipped, detached, array)
    # `ste(f)(x)` has the value of `f(x)` and the derivative of `x`.
    return ste(lambda _: value)(array)
