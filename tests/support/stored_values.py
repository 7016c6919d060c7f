"""Compute the dense array of a QArray by NumPy alone, and quantize as a cache does."""

import dataclasses
from typing import Any

import jax
import numpy as np

from veneer.quant import QArray
from veneer.quant.conversion.compute import quantize_with_params
from veneer.quant.conversion.quantize import quantize_params


def stored_in_cache(
    x: jax.Array,
    qtype: str,
    channelwise_axes: Any = (),
    tiled_axes: Any = None,
    calibration_method: str | None = None,
    scale_dtype: str | None = None,
) -> QArray:
    """Quantize an array as a cache and a collective do, with the arguments of `quantize`."""
    params = quantize_params(
        x, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    return quantize_with_params(x, dataclasses.replace(params, stable_in=x.dtype.name))


def unpacked(packed: np.ndarray, bits: float, axis: int, size: int) -> np.ndarray:
    """Return the fields that bytes hold along an axis, as uint8."""
    packed = np.moveaxis(np.asarray(packed), axis, -1)
    if bits in (1, 2, 4):
        places = range(0, 8, int(bits))
        fields = np.stack([packed >> place & 2**bits - 1 for place in places], -1)
    elif bits == 1.6:
        fields = np.stack([packed // 3**place % 3 for place in range(5)], -1)
    else:
        planes = packed.reshape(*packed.shape[:-1], packed.shape[-1] // bits, bits, 1)
        each = planes >> np.arange(8, dtype=np.uint8) & 1
        fields = (each << np.arange(bits, dtype=np.uint8)[:, None]).sum(-2)
    count = fields.shape[-1] * fields.shape[-2]
    fields = fields.reshape(*packed.shape[:-1], count)[..., :size].astype(np.uint8)
    return np.moveaxis(fields, -1, axis)


def codes_of(q: QArray) -> np.ndarray:
    """Return the codes of a QArray as numbers."""
    format, stored = q.format, np.asarray(q.packed)
    if format.bits >= 8:
        return stored
    if q.packing is not None:
        fields = unpacked(stored, format.bits, *q.packing)
    elif format.bits == 1.6:
        fields = stored % 3
    else:
        fields = stored & 2**format.bits - 1
    if not format.signed:
        return fields
    fields = fields.astype(np.int16)
    if format.bits == 1:
        return 2 * fields - 1
    if format.bits == 1.6:
        return fields - 1
    return np.where(fields >= 2 ** (format.bits - 1), fields - 2**format.bits, fields)


def stored_values(x: object) -> np.ndarray:
    """Return the dense values of a QArray. Return any other array unchanged."""
    if not isinstance(x, QArray):
        return np.asarray(x)
    values = codes_of(x)
    if x.format.codebook is not None:
        values = np.array(x.format.codebook, np.float32)[values]
    scale = stored_values(x.scale)
    wide = np.float64 if np.float64 in (scale.dtype, x.dtype) else np.float32
    values = values.astype(wide)
    leaves = ((x.zero_point, np.subtract), (scale, np.multiply), (x.minimum, np.add))
    for leaf, op in leaves:
        if leaf is not None:
            entries = stored_values(leaf).astype(wide)
            values = op(values, entry_of_each_value(entries, x.shape))
    return values.astype(x.dtype)


def entry_of_each_value(entries: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat entries over their tiles."""
    for axis, (count, size) in enumerate(zip(entries.shape, shape, strict=True)):
        entries = np.repeat(entries, size // count if count else 0, axis)
    return entries
