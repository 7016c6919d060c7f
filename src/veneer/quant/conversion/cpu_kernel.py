"""Quantising by a kernel for CPUs, where one finds what XLA finds."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from ...kernels.quantize import Quantizer, quantize, serves
from ..arrays.qarray import QArray
from ..formats import FORMATS
from ..formats.packing import Packing, axis_to_pack
from ..formats.tiles import Shape
from .calibration import Calibration

if TYPE_CHECKING:
    from .quantize import QuantizeParams

CodesByXla = Callable[[jax.Array, Shape], tuple[jax.Array, jax.Array]]


def has_kernel(array: jax.Array, params: "QuantizeParams") -> bool:
    """Whether a kernel finds the same codes and scales, bit by bit, on a CPU."""
    spec = getattr(jax.typeof(array).sharding, "spec", ())
    format = FORMATS[params.format]
    return (
        array.dtype == np.float32
        and params.scale_dtype == "float32"
        and params.calibration == Calibration("absmax", ())
        and all(entry is None for entry in spec)
        and (format.bits >= 8 or axis_to_pack(array.shape, format.bits) == -1)
        and serves(params.format, array.shape, params.counts)
    )


def quantize_by_kernel(array: jax.Array, params: "QuantizeParams", by_xla: CodesByXla) -> QArray:
    """Quantises by a kernel on a CPU, and elsewhere by XLA, which gives codes and scales."""
    format = FORMATS[params.format]
    is_stable = params.stable_in is not None
    largest = format.ends[1] if is_stable else format.bound
    table = [np.float32(1) / np.float32(largest), np.float32(is_stable)]
    if format.codebook is not None:
        table += [
            np.float32(at) if is_beyond else np.nextafter(np.float32(at), np.float32(np.inf))
            for at, is_beyond, _ in format.thresholds(np.float32)
        ]
    quantizer = Quantizer(params.format, tuple(map(float, table)), params.counts, by_xla)
    packed, scale = quantize(array, quantizer)
    packing = Packing(-1, array.shape[-1]) if format.bits < 8 else None
    return QArray.from_packed(
        packed, scale, qtype=format.name, packing=packing, dense_dtype=array.dtype
    )
