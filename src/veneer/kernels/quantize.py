"""`quantize`: codes and scales of the tiles of an array, as a JAX primitive.

On one CPU, a kernel computes it. Elsewhere, and in exported programs, which other machines run, XLA
computes the same bits.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from .._jax.primitives import Primitive, compile_when_eager, require_devices_for_lowering
from . import select
from .common.table import MOST_COLUMNS, QUANTIZE_TABLE, QUANTIZED_BITS, WITHIN_ROWS
from .cpu import build
from .cpu.build import quantize_target
from .lowering import is_on_one_device

Shape = tuple[int, ...]

#: The fewest values in an array. XLA quantizes a smaller one before a kernel is loaded.
_LEAST_VALUES = 1 << 7
#: The most values in a tile, which one thread reads.
_MOST_VALUES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A format to quantize to, and the tiles of an array.

    The largest magnitude of a tile determines its scale.

    **Arguments:**

    - `kind`: the format, a key of `QUANTIZED_BITS`.
    - `table`: the numbers that a kernel quantizes with. The first is the reciprocal of the value
      that the largest magnitude is scaled to. The second is 1 if scales are rounded to 16 bits,
      else 0. For a format that is no integer, the smallest value of each code except the first
      follows.
    - `counts`: the number of tiles along each axis.
    - `reference`: quantizes by XLA, from the array and `counts`. It is hashable, so that programs
      are cached.
    """

    kind: str
    table: tuple[float, ...]
    counts: Shape
    reference: Callable[[jax.Array, Shape], tuple[jax.Array, jax.Array]]

    def packed_shape(self, shape: Shape) -> Shape:
        """Return the shape of the codes of an array of this shape, packed along the last axis."""
        return (*shape[:-1], -(-shape[-1] * QUANTIZED_BITS[self.kind] // 8))


def can_quantize(kind: str, shape: Shape, counts: Shape) -> bool:
    """Return whether a kernel quantizes an array of this shape, and is faster than XLA.

    **Arguments:**

    - `kind`: the format to quantize to.
    - `counts`: the number of tiles along each axis.

    >>> from veneer.kernels.quantize import can_quantize
    >>> can_quantize("int4", (4096, 4096), (32, 4096)), can_quantize("int4", (4096, 4096), (1, 1))
    (True, False)
    """
    return (
        kind in QUANTIZED_BITS
        and all(isinstance(size, int) for size in shape)  # some are symbolic for export
        and math.prod(shape) >= _LEAST_VALUES
        and select.current_choice() != "xla"
        and build.unavailable_reason() is None
        and _as_matrices(kind, shape, counts) is not None
    )


def quantize(array: jax.Array, quantizer: Quantizer) -> tuple[jax.Array, jax.Array]:
    """Return the packed codes of an f32 array, and its f32 scales of shape `quantizer.counts`."""
    packed, scale = quantize_p.bind(array, quantizer=quantizer)
    return packed, scale


quantize_p = Primitive("quantize_tiles")
quantize_p.multiple_results = True
require_devices_for_lowering(quantize_p)

compile_when_eager(quantize_p)


@quantize_p.def_abstract_eval
def _typed(array: Any, *, quantizer: Quantizer) -> Any:
    dtype = np.dtype(np.int8 if quantizer.kind == "int8" else np.uint8)
    packed = array.update(shape=quantizer.packed_shape(array.shape), dtype=dtype, weak_type=False)
    return packed, array.update(shape=quantizer.counts, dtype=np.dtype(np.float32), weak_type=False)


def _batch(args: Any, dims: Any, *, quantizer: Quantizer) -> Any:
    array = jnp.moveaxis(args[0], dims[0], 0)
    batched = dataclasses.replace(quantizer, counts=(array.shape[0], *quantizer.counts))
    return quantize(array, batched), (0, 0)


batching.primitive_batchers[quantize_p] = _batch


def _by_reference(array: jax.Array, *, quantizer: Quantizer) -> tuple[jax.Array, jax.Array]:
    return quantizer.reference(array, quantizer.counts)


def _by_kernel(array: jax.Array, *, quantizer: Quantizer) -> tuple[jax.Array, jax.Array]:
    matrices = _as_matrices(quantizer.kind, array.shape, quantizer.counts)
    target = quantize_target(quantizer.kind)
    if matrices is None or not select.is_built(target):
        return _by_reference(array, quantizer=quantizer)
    (batch, rows, columns), (tile_rows, tile_columns) = matrices
    packed_shape = quantizer.packed_shape(array.shape)
    dtype = np.int8 if quantizer.kind == "int8" else np.uint8
    row_bytes = math.prod(packed_shape) // max(1, batch * rows)
    tiles = (batch, rows // tile_rows, columns // tile_columns)
    call = jax.ffi.ffi_call(
        target,
        (
            jax.ShapeDtypeStruct((batch, rows, row_bytes), dtype),
            jax.ShapeDtypeStruct(tiles, np.float32),
        ),
    )
    table = np.zeros(QUANTIZE_TABLE, np.float32)
    table[: len(quantizer.table)] = quantizer.table
    packed, scale = call(array.reshape(batch, rows, columns), table)
    return packed.reshape(packed_shape), scale.reshape(quantizer.counts)


def _as_matrices(
    kind: str, shape: Shape, counts: Shape
) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    """Return the shape `[B, R, C]` as which a kernel reads an array, and the shape of its tiles.

    R is the only axis, except the last, along which a tile has more than one value. C merges all
    axes after R, and B all axes before. Without such an axis, R merges all axes except the last.
    Return None if several such axes exist, or if the kernel does not support the sizes.
    """
    if 0 in shape or not shape:
        return None
    tile = [size // count for size, count in zip(shape, counts, strict=True)]
    tiled = [axis for axis, size in enumerate(tile[:-1]) if size > 1]
    axis = tiled[0] if tiled else len(shape) - 2
    after = math.prod(shape[axis + 1 :])
    fills_bytes = shape[-1] * QUANTIZED_BITS[kind] % 8 == 0
    if len(tiled) > 1 or (after != shape[-1] and (tile[-1] > 1 or not fills_bytes)):
        return None
    if axis < 0:
        return _supported((1, 1, shape[0]), (1, tile[0]))
    if not tiled:  # one matrix of all rows, which threads divide
        return _supported((1, math.prod(shape[:-1]), shape[-1]), (1, tile[-1]))
    return _supported((math.prod(shape[:axis]), shape[axis], after), (tile[axis], tile[-1]))


def _supported(
    sizes: tuple[int, int, int], tile: tuple[int, int]
) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    rows, columns = tile
    if rows == 1 and columns % WITHIN_ROWS == 0:
        return sizes, tile
    # For a tile of one value, XLA divides by the scale, so that other bits result.
    is_narrow = columns * (1 + columns % 2) <= MOST_COLUMNS and rows * columns > 1
    return (sizes, tile) if is_narrow and (columns == 1 or rows * columns <= _MOST_VALUES) else None


mlir.register_lowering(quantize_p, mlir.lower_fun(_by_reference, multiple_results=True))


def _lowered_for_cpu(ctx: Any, array: Any, **params: Any) -> Any:
    exported = ctx.module_context.lowering_parameters.for_export
    compute = _by_kernel if not exported and is_on_one_device(ctx) else _by_reference
    return mlir.lower_fun(compute, multiple_results=True)(ctx, array, **params)


mlir.register_lowering(quantize_p, _lowered_for_cpu, platform="cpu")
