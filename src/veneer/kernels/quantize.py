"""`quantize`: codes and scales of the tiles of an array, as a JAX primitive.

Lowered for one CPU it is a call of a kernel. Elsewhere, on several devices, and in a program that
is exported, which other processes run, it is the reference: XLA's way to the same bits.
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
from .common.kinds import MOST_COLUMNS, QUANTIZE_TABLE, QUANTIZED_BITS, WITHIN_ROWS
from .cpu import build
from .lowering import is_on_one_device

Shape = tuple[int, ...]

#: A smaller array is quantised sooner than a kernel for it is compiled.
_LEAST_VALUES = 1 << 7
#: One thread should read no larger tile.
_MOST_VALUES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How an array is quantised, by the largest magnitude of each tile.

    **Arguments:**

    - `kind`: a format of `QUANTIZED_BITS`.
    - `table`: f32: the reciprocal of what the largest magnitude is scaled to; whether scales are
      rounded to 16 bits; and the values from which on a code is the next, for a format that is no
      integer.
    - `counts`: how many tiles there are along each axis.
    - `reference`: XLA's way, from the array and `counts`; hashable, so that programs are cached.
    """

    kind: str
    table: tuple[float, ...]
    counts: Shape
    reference: Callable[[jax.Array, Shape], tuple[jax.Array, jax.Array]]

    def packed_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the codes of an array as stored: packed along the last axis."""
        return (*shape[:-1], -(-shape[-1] * QUANTIZED_BITS[self.kind] // 8))


def serves(kind: str, shape: Shape, counts: Shape) -> bool:
    """Returns whether there is a kernel that quantises an array so, and it is worth it.

    >>> from veneer.kernels.quantize import serves
    >>> serves("int4", (4096, 4096), (32, 4096)), serves("int4", (4096, 4096), (1, 1))
    (True, False)
    """
    return (
        kind in QUANTIZED_BITS
        and all(isinstance(size, int) for size in shape)  # some are symbolic for export
        and math.prod(shape) >= _LEAST_VALUES
        and select.chosen() != "xla"
        and build.available() is None
        and _as_matrices(kind, shape, counts) is not None
    )


def quantize(array: jax.Array, quantizer: Quantizer) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of an array of f32 as they are stored, and its scales, f32 of `counts`."""
    packed, scale = quantize_p.bind(array, quantizer=quantizer)
    return packed, scale


quantize_p = Primitive("quantise_tiles")
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
    target = f"veneer_quantise_{quantizer.kind}"
    if matrices is None or not select.built(target):
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
    """Returns an array as `[B, R, C]`, and what part of `[R, C]` a tile is; None if it cannot be.

    At most one axis but the last has tiles of more than one: it is R. What follows it is C.
    """
    if 0 in shape or not shape:
        return None
    tile = [size // count for size, count in zip(shape, counts, strict=True)]
    over = [axis for axis, size in enumerate(tile[:-1]) if size > 1]
    axis = over[0] if over else len(shape) - 2
    after = math.prod(shape[axis + 1 :])
    fills_bytes = shape[-1] * QUANTIZED_BITS[kind] % 8 == 0
    if len(over) > 1 or (after != shape[-1] and (tile[-1] > 1 or not fills_bytes)):
        return None
    if axis < 0:
        return _fits((1, 1, shape[0]), (1, tile[0]))
    if not over:  # one batch has more rows to cut
        return _fits((1, math.prod(shape[:-1]), shape[-1]), (1, tile[-1]))
    return _fits((math.prod(shape[:axis]), shape[axis], after), (tile[axis], tile[-1]))


def _fits(
    sizes: tuple[int, int, int], tile: tuple[int, int]
) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    rows, columns = tile
    if rows == 1 and columns % WITHIN_ROWS == 0:
        return sizes, tile
    # XLA divides by a scale of one value, and else multiplies with its reciprocal.
    narrow = columns * (1 + columns % 2) <= MOST_COLUMNS and rows * columns > 1
    return (sizes, tile) if narrow and (columns == 1 or rows * columns <= _MOST_VALUES) else None


mlir.register_lowering(quantize_p, mlir.lower_fun(_by_reference, multiple_results=True))


def _lowered_for_cpu(ctx: Any, array: Any, **params: Any) -> Any:
    exported = ctx.module_context.lowering_parameters.for_export
    compute = _by_kernel if not exported and is_on_one_device(ctx) else _by_reference
    return mlir.lower_fun(compute, multiple_results=True)(ctx, array, **params)


mlir.register_lowering(quantize_p, _lowered_for_cpu, platform="cpu")
