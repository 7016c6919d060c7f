"""Computing codes and scales: at once, in chunks of tiles, or by a CPU kernel."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.tracing import varying_axes
from ...kernels import quantize as kernel
from ..arrays.qarray import QArray, pack_codes
from ..formats import FORMATS, Format
from ..formats.packing import UNITS, Packing, axis_to_pack
from ..formats.rounding import encode_stochastically
from ..formats.tiles import Shape, over_tiles, tile_shape
from .calibration import Calibration, Range, Tiles, find_range, range_to_scale
from .scales import limit_scale, stable_scale, store_scale

# The size of a chunk in f32. Several chunks fit in a cache that CPU cores share.
CHUNK_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class QuantizeParams:
    """The checked arguments of `quantize`, hashable for `jax.jit`, and the dtype for stable scales.

    With stable scales, dequantizing and quantizing again does not change values. Caches and
    collectives need this. Weights use `absmax / (qmax + 1/2)`, which makes the largest value
    smaller each time. `stable_in` is the dtype in which the values are read and written, or None
    for the scales of weights. It can be narrower than the array: collectives compute in f32.
    """

    format: str
    counts: Shape
    calibration: Calibration
    scale_dtype: str
    stable_in: str | None = None


class Chunks(NamedTuple):
    """The number of tiles per chunk along an axis. The last chunk can overlap the one before it."""

    axis: int
    tiles: int


def quantize_with_params(
    array: jax.Array, params: QuantizeParams, key: jax.Array | None = None
) -> QArray:
    """Quantize an array with arguments that are already checked."""
    chunks = choose_chunks(array, params.counts, FORMATS[params.format])
    return _quantize(array, key, params, chunks)


def choose_chunks(array: jax.Array, counts: Shape, format: Format) -> Chunks | None:
    """Return how to cut an array of `counts` tiles into chunks, or None to quantize it at once.

    XLA on CPU does not fuse a maximum over tiles with the computation that uses it, and allocates
    temporary arrays of the size of its input. A loop over chunks of whole tiles keeps them small.
    These are quantized at once: small arrays, arrays of symbolic size, arrays whose scales are
    quantized together, arrays that are split over devices, and arrays of one tile.
    """
    size = array.size * 4
    if not isinstance(size, int):  # symbolic, in programs for export
        return None
    if size < 2 * CHUNK_BYTES or format.scale_tile is not None or _is_sharded(array):
        return None
    # For each axis, the least number of tiles that fills whole bytes of packed codes.
    steps = {}
    for axis, tile in enumerate(tile_shape(array.shape, counts)):
        is_packed = axis == array.ndim - 1 and format.bits < 8
        unit = UNITS[format.bits][0] if is_packed else 1
        if array.shape[axis] % unit == 0:
            steps[axis] = math.lcm(unit, tile) // tile
    if not steps:
        return None
    least_bytes = {axis: size // counts[axis] * step for axis, step in steps.items()}
    small = [axis for axis in least_bytes if least_bytes[axis] <= CHUNK_BYTES]
    axis = small[0] if small else min(least_bytes, key=least_bytes.__getitem__)
    tiles = max(CHUNK_BYTES // least_bytes[axis], 1) * steps[axis]
    return Chunks(axis, tiles) if 2 * tiles <= counts[axis] else None


def _is_sharded(array: jax.Array) -> bool:
    if not isinstance(array, jax.core.Tracer) and len(array.sharding.device_set) > 1:
        return True
    spec = getattr(jax.typeof(array).sharding, "spec", ())
    return bool(varying_axes(array)) or any(entry is not None for entry in spec)


# Compiled as one program, so that no temporary array has the size of the input in f32.
@functools.partial(jax.jit, static_argnames=("params", "chunks"))
def _quantize(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks | None
) -> QArray:
    if key is None and _has_cpu_kernel(array, params):
        return _quantize_by_kernel(array, params, chunks)
    return _quantize_by_xla(array, key, params, chunks)


def _has_cpu_kernel(array: jax.Array, params: QuantizeParams) -> bool:
    """Return whether a CPU kernel computes the same bits as XLA."""
    format = FORMATS[params.format]
    spec = getattr(jax.typeof(array).sharding, "spec", ())
    return (
        array.dtype == np.float32
        and params.scale_dtype == "float32"
        and params.calibration == Calibration("absmax", ())
        and all(entry is None for entry in spec)
        and (format.bits >= 8 or axis_to_pack(array.shape, format.bits) == -1)
        and kernel.serves(params.format, array.shape, params.counts)
    )


def _quantize_by_kernel(array: jax.Array, params: QuantizeParams, chunks: Chunks | None) -> QArray:
    """Quantize by a kernel on CPU, and by XLA on other platforms."""
    format = FORMATS[params.format]
    is_stable = params.stable_in is not None
    largest = format.ends[1] if is_stable else format.bound
    table = [np.float32(1) / np.float32(largest), np.float32(is_stable)]
    if format.codebook is not None:
        # The least value of each code. `nextafter` excludes ties that get the code below.
        table += [
            np.float32(at) if is_beyond else np.nextafter(np.float32(at), np.float32(np.inf))
            for at, is_beyond, _ in format.thresholds(np.float32)
        ]
    reference = _XlaReference(params, chunks)
    quantizer = kernel.Quantizer(params.format, tuple(map(float, table)), params.counts, reference)
    packed, scale = kernel.quantize(jax.lax.stop_gradient(array), quantizer)
    packing = Packing(-1, array.shape[-1]) if format.bits < 8 else None
    return QArray.from_packed(
        packed, scale, qtype=format.name, packing=packing, dense_dtype=array.dtype
    )


@dataclasses.dataclass(frozen=True)
class _XlaReference:
    """A hashable function that computes the results of a kernel by XLA."""

    params: QuantizeParams
    chunks: Chunks | None

    def __call__(self, array: jax.Array, counts: Shape) -> tuple[jax.Array, jax.Array]:
        """Return codes and scales."""
        params = dataclasses.replace(self.params, counts=counts)
        # vmap adds an axis, to which the chunks do not apply.
        chunks = self.chunks if counts == self.params.counts else None
        packed, scale = jax.tree.leaves(_quantize_by_xla(array, None, params, chunks))
        return packed, scale


def _quantize_by_xla(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks | None
) -> QArray:
    def at_once(array: jax.Array, key: jax.Array | None, counts: Shape = params.counts) -> QArray:
        return quantize_tiles(array, key, dataclasses.replace(params, counts=counts))[0]

    if chunks is None:
        return at_once(array, key)

    def in_chunks(array: jax.Array, key: jax.Array | None) -> QArray:
        leaves = _compute_in_chunks(at_once, array, key, params.counts, chunks)
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(at_once, array, key)), leaves)

    array = jax.lax.stop_gradient(array)
    return jax.lax.platform_dependent(array, key, cpu=in_chunks, default=at_once)


def _compute_in_chunks(
    fn: Callable[[jax.Array, jax.Array | None, Shape], Any],
    array: jax.Array,
    key: jax.Array | None,
    counts: Shape,
    chunks: Chunks,
) -> list[jax.Array]:
    """Return the leaves of `fn(array, key, counts)`, computed for one chunk after the other.

    **Arguments:**

    - `fn`: a function that treats each tile independently. The sizes of its results are in
      proportion to the size of its input. Each call gets a chunk, its own key, and its `counts`.
    """
    axis, tiles = chunks
    total = counts[axis]
    tile = array.shape[axis] // total
    resized = lambda shape, size: (*shape[:axis], size, *shape[axis + 1 :])

    def compute(index: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        start = jnp.minimum(index * tiles, total - tiles)
        chunk = jax.lax.dynamic_slice_in_dim(array, start * tile, tiles * tile, axis)
        chunk_key = None if key is None else jax.random.fold_in(key, index)
        return start, jax.tree.leaves(fn(chunk, chunk_key, resized(counts, tiles)))

    def step(index: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        start, parts = compute(index)
        # Starts are in proportion: a byte stores several codes, and many codes share a scale.
        return [
            jax.lax.dynamic_update_slice_in_dim(x, part, start * part.shape[axis] // tiles, axis)
            for x, part in zip(results, parts, strict=True)
        ]

    _, shapes = jax.eval_shape(compute, jax.ShapeDtypeStruct((), jnp.int32))
    empty = [jnp.zeros(resized(s.shape, s.shape[axis] * total // tiles), s.dtype) for s in shapes]
    return jax.lax.fori_loop(0, -(-total // tiles), step, empty)


def quantize_tiles(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams
) -> tuple[QArray, Range | None]:
    """Return the quantized array, and the range of each tile, or None for stable scales."""
    format = FORMATS[params.format]
    array = jax.lax.stop_gradient(array)

    def store(scale: jax.Array) -> tuple[jax.Array | QArray, jax.Array]:
        return store_scale(scale, params.scale_dtype, format.scale_tile, has_zero=format.has_zero)

    tiles = Tiles.split(array, params.counts, format, lambda scale: store(scale)[1])
    ends = None
    if params.stable_in is None:
        ends = find_range(params.calibration, tiles)
        scale, zero_point = range_to_scale(ends, format)
    else:
        scale, zero_point = stable_scale(
            params.calibration, tiles, params.scale_dtype, params.stable_in
        )
    scale = limit_scale(scale, zero_point, format, array.dtype, params.scale_dtype)
    return encode(array, format, *store(scale), zero_point, key), ends


def encode(
    array: jax.Array,
    format: Format,
    stored: jax.Array | QArray,
    divisor: jax.Array,
    zero_point: jax.Array | None,
    key: jax.Array | None,
) -> QArray:
    """Quantize an array with known scales.

    **Arguments:**

    - `stored`, `divisor`: the results of `store_scale`.
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
