"""Fake quantisation: what an array is worth once quantised, with a derivative.

The derivative is 1 where a value was rounded, and 0 where it was clipped: beyond the range, a small
change of it changes nothing.

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
from .quantize import (
    Axes,
    QuantizeParams,
    TiledAxes,
    floating,
    quantize_params,
    quantize_tiles,
    quantize_with_scale,
)

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

    The derivative is the straight-through estimator (Bengio et al., arXiv 1308.3432): 1 if
    a value is in the range of its tile, and 0 if it is clipped. These calibration methods clip
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
    dense = floating(array)
    params = quantize_params(
        dense, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    value, ends = _rounded(dense, key, params)
    return _straight_through(value, dense, ends if params.calibration.clips else None)


@functools.partial(jax.jit, static_argnames="params")
def _rounded(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams
) -> tuple[jax.Array, Ends]:
    q, (low, high) = quantize_tiles(array, key, params)
    format = FORMATS[params.format]
    if low is None and format.scale_dtype is not None:
        # A scale that was rounded up reaches beyond the range that was asked for.
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
    """Quantize with given scales and dequantize, with a derivative for training.

    The derivative is 1 if a value is in the range of the codes, and 0 if it is clipped. The scale
    and the zero point have no derivative.

    **Arguments:**

    - `array`, `qtype`, `scale`, `zero_point`, `key`: as for `vn.quant.quantize_with_scale`.

    **Returns:** a dense array with the shape and dtype of `array`.

    **Raises:** the errors of `vn.quant.quantize_with_scale`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> fake = lambda x: vn.quant.fake_quantize_with_scale(x, "int4", 0.2).sum()
    >>> jax.grad(fake)(jnp.array([0.5, 1.4, -2.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    dense = floating(array)
    q = quantize_with_scale(dense, qtype, scale, zero_point, key=key)
    return _straight_through(q.dequantize(), dense, _range_of_codes(q))


def _range_of_codes(q: QArray) -> Ends:
    format, scale = q.format, q.scales()
    if q.zero_point is None:
        low = -format.bound if format.signed or not format.is_integer else 0
        return low * scale, format.bound * scale
    least, largest = format.code_range
    end = lambda code: (code - q.zero_point.astype(scale.dtype)) * scale
    return end(least), end(largest)


def _straight_through(value: jax.Array, array: jax.Array, ends: Ends | None) -> jax.Array:
    value = jax.lax.stop_gradient(value)
    if ends is not None:
        low, high = (end.astype(jnp.promote_types(end.dtype, array.dtype)) for end in ends)
        held = jax.lax.stop_gradient(array)
        outside = over_tiles(jnp.less, held, low) | over_tiles(jnp.greater, held, high)
        array = jnp.where(outside, held, array)
    return ste(lambda _: value)(array)
