"""Computing codes and scales: at once, in chunks of tiles, or by a CPU kernel."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.tracing import varying_axes
from ...kernels import quantize as kernel
from ..arrays.qarray import QArray, pack_codes
from ..formats import FORMATS, Format
from ..formats.format import encode_stochastically
from ..formats.packing import UNITS, Packing, axis_to_pack
from ..formats.tiles import Shape, over_tiles, tile_shape
from .calibration import Calibration, Range, find_range, range_to_scale, split_into_tiles
from .scales import limit_scale, stable_scale, store_scale

# The size of a chunk in f32. Several chunks fit in a cache that CPU cores share.
CHUNK_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class QuantizeParams:
    """The checked arguments of `quantize`, hashable for `jax.jit`.

    **Arguments:**

    - `qtype`: the name of the format.
    - `scale_shape`: the shape of the scale, which is the number of tiles along each axis.
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
    """How to cut an array into chunks: along `axis`, with `tiles` tiles per chunk."""

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

    XLA on CPU does not fuse a maximum over tiles with the computation that uses it, and allocates
    temporary arrays of the size of its input. A loop over chunks keeps these arrays small. Return
    None if the array is small, has one tile, has a symbolic size, or is split over devices, or if
    its scales are themselves quantized.
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
    """Return whether a CPU kernel can quantize the array, with the same bits as XLA."""
    format = FORMATS[params.qtype]
    return (
        array.dtype == np.float32
        and params.scale_dtype == "float32"
        and params.calibration == Calibration("absmax", ())
        and not _has_sharded_axis(array)
        and (format.bits >= 8 or axis_to_pack(array.shape, format.bits) == -1)
        and kernel.serves(params.qtype, array.shape, params.scale_shape)
    )


def _quantize_by_kernel(array: jax.Array, params: QuantizeParams, chunks: Chunks | None) -> QArray:
    """Quantize by a kernel on CPU, and by XLA on other platforms."""
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
    """A hashable function that computes packed codes and scales by XLA instead of a kernel."""

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
    """Quantize at once, or in chunks on CPU if `chunks` is not None."""
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
    """Return the quantized array and the ranges of its tiles. With stable scales, they are None."""
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

    `stored` is the scale of the result. `divisor` has the same scales in f32 or f64, except that
    scales which are too small to divide by are replaced.
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
