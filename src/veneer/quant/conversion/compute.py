"""Compute the scales and the codes of an array: at once, in chunks of tiles, or by a CPU kernel.

A scale is stored as a float, as a power of two, or quantized (double quantization). Values are
divided by the stored scale, so rounding the scale adds no error.
"""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._jax.tracing import varying_axes
from ...kernels import quantize as kernel
from ..arrays import QArray, pack_codes
from ..formats import FORMATS, Format, get_format
from ..formats.format import encode_stochastically, round_to_dtype
from ..formats.packing import UNITS, Packing, axis_to_pack
from ..formats.tiles import Shape, over_tiles, split_tiles, tile_shape
from .calibration import (
    Calibration,
    Range,
    Tiles,
    as_divisor,
    find_range,
    range_to_scale,
    split_into_tiles,
)

# The size of a chunk in f32. Several chunks fit in a cache that CPU cores share.
CHUNK_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class QuantizeParams:
    """The checked arguments of `quantize`, hashable for `jax.jit`.

    **Arguments:**

    - `qtype`: the name of the format.
    - `scale_shape`: the shape of the scale, which is the number of tiles along each axis.
    - `calibration`: the parsed calibration method.
    - `scale_dtype`: the name of the dtype of stored scales.
    - `stable_in`: the dtype of the dequantized values if scales are stable, else None. Stable means
      that quantizing dequantized values again does not change them, as caches and collectives need.
      The usual scale, `absmax / (qmax + 1/2)`, is not stable: it shrinks the largest value.
    """

    qtype: str
    scale_shape: Shape
    calibration: Calibration
    scale_dtype: str
    stable_in: str | None = None


class Chunks(NamedTuple):
    """How to cut an array into chunks that are quantized one after another.

    The array is cut along `axis`. A chunk has `tiles` tiles along this axis.
    """

    axis: int
    tiles: int


def quantize_with_params(
    array: jax.Array, params: QuantizeParams, key: jax.Array | None = None
) -> QArray:
    """Quantize an array. `params` has the checked arguments of `quantize`."""
    chunks = choose_chunks(array, params.scale_shape, FORMATS[params.qtype])
    return _quantize(array, key, params, chunks)


def choose_chunks(array: jax.Array, scale_shape: Shape, format: Format) -> Chunks | None:
    """Return how to cut an array into chunks of whole tiles, or None to quantize it at once.

    XLA on CPU does not fuse a maximum over tiles with the computation that uses the maximum, and
    allocates temporary arrays of the size of the input. A loop over chunks keeps these arrays
    small. Return None if the array is small, has one tile, has a symbolic size, or is split over
    devices, or if the scales of the format are themselves quantized.
    """
    nbytes = array.size * 4  # in f32
    if not isinstance(nbytes, int):  # symbolic, in programs for export
        return None
    if nbytes < 2 * CHUNK_BYTES or format.scale_tile is not None or _is_sharded(array):
        return None
    if max(array.shape) >= 2**31:  # the loop counts in int32
        return None
    # For each axis, find the least number of tiles that fills whole bytes of packed codes.
    least_tiles = {}
    for axis, tile in enumerate(tile_shape(array.shape, scale_shape)):
        is_packed = axis == array.ndim - 1 and format.bits < 8
        codes_per_unit = UNITS[format.bits][0] if is_packed else 1
        if array.shape[axis] % codes_per_unit == 0:
            least_tiles[axis] = math.lcm(codes_per_unit, tile) // tile
    if not least_tiles:
        return None
    # Cut the first axis whose least chunk fits in CHUNK_BYTES, or else the axis with the smallest.
    least_bytes = {axis: nbytes // scale_shape[axis] * n for axis, n in least_tiles.items()}
    axis = min(least_bytes, key=lambda axis: max(least_bytes[axis], CHUNK_BYTES))
    tiles = max(CHUNK_BYTES // least_bytes[axis], 1) * least_tiles[axis]
    return Chunks(axis, tiles) if 2 * tiles <= scale_shape[axis] else None


def _is_sharded(array: jax.Array) -> bool:
    """Return whether an array is split over devices. For a tracer, check only its type."""
    if not isinstance(array, jax.core.Tracer) and len(array.sharding.device_set) > 1:
        return True
    # Within `shard_map`, `varying_axes` are the mesh axes over which the array is split.
    return _has_sharded_axis(array) or bool(varying_axes(array))


def _has_sharded_axis(array: jax.Array) -> bool:
    """Return whether the type of an array has a sharded axis, as on a mesh with explicit axes."""
    return any(entry is not None for entry in getattr(jax.typeof(array).sharding, "spec", ()))


# Compiled as one program, so that no temporary array has the size of the input in f32.
@functools.partial(jax.jit, static_argnames=("params", "chunks"))
def _quantize(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks | None
) -> QArray:
    if key is None and _has_cpu_kernel(array, params):
        return _quantize_by_kernel(array, params, chunks)
    return _quantize_by_xla(array, key, params, chunks)


def _has_cpu_kernel(array: jax.Array, params: QuantizeParams) -> bool:
    """Return whether a CPU kernel can quantize the array. Its result equals the result of XLA."""
    format = FORMATS[params.qtype]
    return (
        array.dtype == np.float32
        and params.scale_dtype == "float32"
        and params.calibration == Calibration("absmax", ())
        and not _has_sharded_axis(array)
        and (format.bits >= 8 or axis_to_pack(array.shape, format.bits) == -1)
        and kernel.can_quantize(params.qtype, array.shape, params.scale_shape)
    )


def _quantize_by_kernel(array: jax.Array, params: QuantizeParams, chunks: Chunks | None) -> QArray:
    """Quantize an array by a kernel on CPU, and by XLA operations on other platforms.

    `chunks` says how XLA cuts the array, or is None.
    """
    format = FORMATS[params.qtype]
    is_stable = params.stable_in is not None
    # The constants of the kernel: `scale / absmax`, and whether to round scales.
    largest = format.ends[1] if is_stable else format.bound
    table = [np.float32(1) / np.float32(largest), np.float32(is_stable)]
    if format.codebook is not None:
        # The smallest value of each code but the first: the threshold, or the next float if the
        # threshold itself gets the code below.
        table += [
            np.float32(value) if is_above else np.nextafter(np.float32(value), np.float32(np.inf))
            for value, is_above, _ in format.thresholds(np.float32)
        ]
    quantizer = kernel.Quantizer(
        params.qtype, tuple(map(float, table)), params.scale_shape, _XlaReference(params, chunks)
    )
    packed, scale = kernel.quantize(jax.lax.stop_gradient(array), quantizer)
    packing = Packing(-1, array.shape[-1]) if format.bits < 8 else None
    return QArray.from_packed(
        packed, scale, qtype=format.name, packing=packing, dense_dtype=array.dtype
    )


@dataclasses.dataclass(frozen=True)
class _XlaReference:
    """A hashable function that computes packed codes and scales by XLA operations.

    The primitive of the CPU kernel for quantization calls this function on other platforms.
    """

    params: QuantizeParams
    chunks: Chunks | None

    def __call__(self, array: jax.Array, scale_shape: Shape) -> tuple[jax.Array, jax.Array]:
        params = dataclasses.replace(self.params, scale_shape=scale_shape)
        # vmap adds an axis to the array. The chunks are for the array without this axis.
        chunks = self.chunks if scale_shape == self.params.scale_shape else None
        packed, scale = jax.tree.leaves(_quantize_by_xla(array, None, params, chunks))
        return packed, scale


def _quantize_by_xla(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks | None
) -> QArray:
    """Quantize an array by XLA operations: at once, or on CPU in `chunks` if they are not None."""
    at_once = lambda array, key: quantize_tiles(array, key, params)[0]
    if chunks is None:
        return at_once(array, key)
    in_chunks = lambda array, key: _quantize_in_chunks(array, key, params, chunks)
    array = jax.lax.stop_gradient(array)
    return jax.lax.platform_dependent(array, key, cpu=in_chunks, default=at_once)


def _quantize_in_chunks(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks
) -> QArray:
    """Quantize an array in a loop over chunks, so that only one chunk needs temporary memory."""
    axis, chunk_tiles = chunks
    num_tiles = params.scale_shape[axis]
    tile = array.shape[axis] // num_tiles  # the number of values per tile
    chunk_shape = (*params.scale_shape[:axis], chunk_tiles, *params.scale_shape[axis + 1 :])
    chunk_params = dataclasses.replace(params, scale_shape=chunk_shape)
    result = jax.eval_shape(lambda array, key: quantize_tiles(array, key, params)[0], array, key)
    shapes, structure = jax.tree.flatten(result)

    def write_chunk(index: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        # The last chunk can overlap the chunk before.
        first_tile = jnp.minimum(index * chunk_tiles, num_tiles - chunk_tiles)
        chunk = jax.lax.dynamic_slice_in_dim(array, first_tile * tile, chunk_tiles * tile, axis)
        chunk_key = None if key is None else jax.random.fold_in(key, index)
        updates = jax.tree.leaves(quantize_tiles(chunk, chunk_key, chunk_params)[0])
        # Codes and scales have different sizes, so convert the tile to an index into each leaf.
        # Divide first: the product of a tile and a size can be too large for int32.
        ratios = [Fraction(update.shape[axis], chunk_tiles) for update in updates]
        starts = [first_tile // ratio.denominator * ratio.numerator for ratio in ratios]
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
        return list(map(write, leaves, updates, starts))

    empty = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes]
    leaves = jax.lax.fori_loop(0, -(-num_tiles // chunk_tiles), write_chunk, empty)
    return jax.tree.unflatten(structure, leaves)


def quantize_tiles(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams
) -> tuple[QArray, Range | None]:
    """Return the quantized array, and the range that the codes of each tile cover.

    The ranges are None if scales are stable (`params.stable_in`).
    """
    format, scale_dtype = FORMATS[params.qtype], params.scale_dtype
    array = jax.lax.stop_gradient(array)
    round_scale = lambda scale: store_scale(scale, scale_dtype, format)[1]
    tiles = split_into_tiles(array, params.scale_shape, format, round_scale)
    ranges = None
    if params.stable_in is None:
        ranges = find_range(params.calibration, tiles)
        scale, zero_point = range_to_scale(ranges, format)
    else:
        scale, zero_point = stable_scale(params.calibration, tiles, scale_dtype, params.stable_in)
    scale = limit_scale(scale, zero_point, format, array.dtype, scale_dtype)
    stored, divisor = store_scale(scale, scale_dtype, format)
    return encode_with_scale(array, format, stored, divisor, zero_point, key), ranges


def encode_with_scale(
    array: jax.Array,
    format: Format,
    stored: jax.Array | QArray,
    divisor: jax.Array,
    zero_point: jax.Array | None,
    key: jax.Array | None,
) -> QArray:
    """Quantize an array with known scales, by stochastic rounding if `key` is not None.

    `stored` is the scale of the result. `divisor` has the same scales in f32 or f64, but 1 for
    scales that are too small to divide by.
    """
    scaled = over_tiles(jnp.divide, array.astype(divisor.dtype), divisor)
    if zero_point is not None:
        scaled = over_tiles(jnp.add, scaled, zero_point.astype(divisor.dtype))
        zero_point = zero_point.astype(format.byte_dtype)
    codes = format.encode(scaled) if key is None else encode_stochastically(scaled, format, key)
    packed, packing = pack_codes(codes, format)
    return QArray.from_packed(
        packed, stored, zero_point, qtype=format.name, packing=packing, dense_dtype=array.dtype
    )


def stable_scale(
    calibration: Calibration, tiles: Tiles, scale_dtype: str, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """Return stable scales and zero points: quantizing dequantized values again changes nothing.

    `calibration` is "absmax", "minmax" or "absmean". `scale_dtype` is the dtype of stored scales,
    and `dtype` the dtype of the dequantized values.

    Scales are stable because of two properties:

    - The value at an end of the range gets the last code.
    - The mantissa of a scale has 8 bits fewer than f32, so `code * scale` is exact in f32.

    If `dtype` has 16 bits, dequantized values are rounded to it. So with a zero point, a scale has
    one mantissa bit fewer than `dtype`. This can fail if codes have more bits than the mantissa, if
    the ends of a codebook have different magnitudes, or if the scale is subnormal in f16.
    """
    values, format = tiles.values, tiles.format
    is_finite = jnp.isfinite(tiles.largest_magnitude())
    info = jnp.finfo(values.dtype)
    mantissa_bits = info.nmant - 8
    if not calibration.symmetric and format.bits <= jnp.finfo(dtype).nmant:
        mantissa_bits = min(mantissa_bits, jnp.finfo(dtype).nmant - 1)

    def round_mantissa(scale: jax.Array) -> jax.Array:
        rounded = jax.lax.reduce_precision(scale, info.nexp, mantissa_bits)
        can_divide = (scale >= info.tiny) & (scale <= 1 / info.tiny)
        return jnp.where(is_finite, jnp.where(can_divide, rounded, scale), jnp.nan)

    if calibration.name == "absmean":
        return round_mantissa(_mean_of_nonzero(tiles)), None
    if calibration.symmetric:
        # In a codebook whose ends have different magnitudes, map both ends to the positive end.
        least, largest = format.ends
        as_positive = jnp.where(values < 0, values * (largest / least), values)
        scale = dataclasses.replace(tiles, values=as_positive).largest_magnitude() / largest
        return round_mantissa(scale), None
    low, high = tiles.limits()
    least, largest = format.code_range
    steps = largest - least

    def place_zero(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose the code that represents 0, for a scale. Return `(codes_below, distance)`.

        `codes_below` is the number of codes below the code for 0. `distance` is the largest
        distance between an end of the range and the outermost code on this side, in steps of codes.
        """
        below, above = -low / scale, high / scale
        # Center the range in the codes, unless the range covers less than a quarter of the codes.
        unused_per_side = jnp.where(below + above < steps / 4, 0, steps - below - above) / 2
        centered = below + unused_per_side
        codes_below = jnp.clip(jnp.round(centered), 0, steps)
        return codes_below, jnp.abs(codes_below - centered) + unused_per_side

    scale = tiles.round_scale(round_mantissa((high - low) / steps))
    # An end of the range may be halfway between two codes, and then be rounded up or down. With a
    # slightly smaller scale, the end is beyond the last code, and always gets the last code.
    factor = 1.0
    if scale_dtype != "float8_e8m0fnu":
        factor -= 0.7 * max(float(jnp.finfo(scale_dtype).eps), 2.0**-mantissa_bits)
    _, distance = place_zero(scale)
    smaller = tiles.round_scale(round_mantissa(scale * factor))
    scale = jnp.where(distance > 0.5 - 2.0**-6, smaller, scale)
    codes_below, _ = place_zero(scale)
    return scale, codes_below + least


def _mean_of_nonzero(tiles: Tiles) -> jax.Array:
    """Return the mean magnitude of the values whose code is not 0, per tile, for "absmean".

    The mean is computed from differences to the largest magnitude. So it is exact if all these
    values have the same magnitude.
    """
    magnitudes, largest = jnp.abs(tiles.values), tiles.largest_magnitude()
    axes = tiles.inner_axes
    mean = jnp.mean(magnitudes, axis=axes, keepdims=True)
    # Values up to half the scale, which is the mean magnitude, get code 0.
    is_nonzero = magnitudes > mean / 2 if tiles.format.has_zero else jnp.full_like(magnitudes, True)
    differences = jnp.where(is_nonzero, tiles.expand(largest) - magnitudes, 0)
    return largest - differences.sum(axes) / jnp.maximum(is_nonzero.sum(axes), 1)


def limit_scale(
    scale: jax.Array, zero_point: jax.Array | None, format: Format, dtype: DTypeLike, stored_in: str
) -> jax.Array:
    """Reduce scales that are so large that the largest code would be dequantized to infinity.

    Without this limit, values near the maximum of `dtype`, the dtype of the dense array, could be
    rounded up to infinity. Scales that are not finite become NaN. `stored_in` is the dtype in which
    scales are stored.
    """
    largest_code: jax.Array | float
    if zero_point is not None:
        least, largest = format.code_range
        largest_code = jnp.maximum(zero_point - least, largest - zero_point)
    else:
        largest_code = max(map(abs, format.value_range))
    limit = jnp.asarray(float(jnp.finfo(dtype).max), scale.dtype) / largest_code
    if stored_in == "float8_e8m0fnu":  # The scale is rounded up to a power of two.
        limit = jnp.ldexp(jnp.ones((), scale.dtype), jnp.frexp(limit)[1] - 1)
    elif format.scale_tile is None:  # The scale is rounded to the nearest number of its dtype.
        limit *= 1 - float(jnp.finfo(stored_in).eps)
    return jnp.where(jnp.isfinite(scale), jnp.minimum(scale, limit), jnp.nan)


def store_scale(
    scale: jax.Array, dtype: str, format: Format
) -> tuple[jax.Array | QArray, jax.Array]:
    """Convert scales to the dtype in which they are stored, or quantize them.

    A scale that is too small to divide by is stored as 1, because all codes of its tile are 0. In a
    format without a code for 0, it is stored as 0, or in float8_e8m0fnu as 2**-126.

    **Arguments:**

    - `scale`: f32 or f64, not negative. NaN stays NaN.
    - `dtype`: the dtype of stored scales, or the format of quantized scales.
    - `format`: the format of the values. Scales are quantized if it has a `scale_tile`.

    **Returns:** `(stored, divisor)`: the stored scales, and the numbers to divide values by. The
    numbers are the stored scales in the dtype of `scale`, but 1 for scales that are too small.
    """
    has_zero = format.has_zero
    if format.scale_tile is not None:
        # This limit is half of what `as_divisor` allows, because scales can be rounded up.
        largest = 0.5 / jnp.finfo(scale.dtype).tiny
        scale = jnp.where(scale > largest, jnp.nan, scale)
        quantized = _quantize_scales(scale, dtype, format.scale_tile)
        return quantized, quantized.dequantize().astype(scale.dtype)
    if dtype == "float8_e8m0fnu":
        # Round up to a power of two that is a normal number in f32. `fraction` is in [0.5, 1).
        fraction, exponent = jnp.frexp(as_divisor(scale))
        exponent = jnp.clip(exponent - (fraction == 0.5), -126, 127)
        power = jnp.ldexp(jnp.ones((), scale.dtype), exponent)
        power = jnp.where(jnp.isnan(scale), jnp.nan, power)
        least = jnp.asarray(2.0**-126, scale.dtype)
        stored = power if has_zero else jnp.where(scale < least, least, power)
        return stored.astype(dtype), power
    # Values are divided in f32 or f64, where the subnormal numbers of f16 are normal numbers.
    rounded = round_to_dtype(scale, dtype)
    divisor = as_divisor(rounded)
    stored = divisor if has_zero else jnp.where(rounded < jnp.finfo(scale.dtype).tiny, 0, divisor)
    return stored.astype(dtype), divisor


def _quantize_scales(scale: jax.Array, qtype: str, tile: int) -> QArray:
    """Quantize scales in a float8 format, with one f32 scale per group of at most `tile` scales.

    A group is a block of the last two axes. It is as long as possible along the last axis, and then
    along the axis before. If `tile` is 0, a group has all scales of both axes.
    """
    format = get_format(qtype)
    outer_shape, limit = list(scale.shape), tile  # `limit` is the largest size of a group
    for axis in reversed(range(scale.ndim)[-2:]):
        size = scale.shape[axis]
        group = size if tile == 0 else max(d for d in range(1, limit + 1) if size % d == 0)
        group = max(group, 1)  # An axis can have size 0.
        outer_shape[axis] = size // group
        limit //= group
    split = split_tiles(jnp.where(jnp.isnan(scale), 0, scale), tuple(outer_shape))
    largest = jnp.max(split, axis=range(1, split.ndim, 2), initial=0)
    outer_scale = as_divisor((largest / format.bound).astype(jnp.float32))
    # A code of 0 would make a scale that cannot be divided by, so use at least the next code.
    least = float(jnp.finfo(format.code_dtype).smallest_subnormal)
    scaled = jnp.maximum(over_tiles(jnp.divide, scale, outer_scale.astype(scale.dtype)), least)
    codes = jnp.where(jnp.isnan(scale), jnp.nan, format.encode(scaled)).astype(format.code_dtype)
    return QArray.from_packed(codes, outer_scale, qtype=qtype)
