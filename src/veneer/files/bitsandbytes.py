"""bitsandbytes: 4-bit codes of a codebook in flat blocks, and int8 with scales per row.

4 bits: a weight has these tensors, and `weight.quant_state.bitsandbytes__nf4` or `__fp4` with JSON
as u8.

- `weight` u8 `[out * in / 2, 1]`: the first of two codes in the high half of a byte. With
  `quant_storage`, as in FSDP-QLoRA, the same bytes have another dtype, such as bf16.
- `weight.absmax`: one scale per block of 64 or more consecutive values. If it is nested, it is u8
  itself, and the scale is `nested_quant_map[absmax] * nested_absmax + nested_offset`.
- `weight.quant_map`: the codebook.

int8: `weight` i8 and `SCB` `[out]`. The value is `q * (SCB / 127)`. Kernels of bitsandbytes
multiply by SCB first, which can differ by two units in the last place.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..quant import FORMATS, QArray
from . import codes
from .stored_tensors import FLOATS, StoredTensors, Weight, even_tiles_of_blocks, make_qarray

# The formats of Veneer with the codebooks of bitsandbytes.
_FORMATS = {"nf4": "nf4", "fp4": "fp4_bnb"}
_NESTED_FORMAT = "dynamic8"
_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 2**16


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the quantized weights of a folder in the formats of bitsandbytes."""
    for kind in _FORMATS:
        for name in source.modules(_STATE + kind):
            yield _make_4_bit_weight(source, name, kind)
    for suffix in (".SCB", ".weight.SCB"):
        for module in source.modules(suffix):
            name = f"{module}.weight"
            if name in source.headers:
                yield _make_8_bit_weight(source, name, module + suffix)


def is_present(source: StoredTensors) -> bool:
    """Return whether a folder has weights in the formats of bitsandbytes."""
    suffixes = (".SCB", *(_STATE + kind for kind in _FORMATS))
    return any(name.endswith(suffixes) for name in source.headers)


def _make_8_bit_weight(source: StoredTensors, name: str, scb: str) -> Weight:
    shape = source.shape(name, rank=2, dtypes=("int8",))
    source.check(scb, shape[:1], ("float32",), name)
    layout = f"{name.removesuffix('weight')}weight_format"
    parts = (name, scb, *([layout] if layout in source.headers else []))
    dtype = source.dense_dtype("float32")
    return Weight(name, shape, dtype, parts, partial(_read_8_bits, source, parts, dtype))


def _read_8_bits(source: StoredTensors, parts: tuple[str, ...], dtype: str) -> Any:
    packed, scb = source.read(parts[0]), source.read(parts[1])
    if len(parts) > 2 and source.read(parts[2]).any():
        raise source.error(
            parts[2], "says that rows are reordered: only the order 'row' is supported"
        )
    scale = (scb / np.float32(127))[:, None]
    return make_qarray(packed, scale, qtype="int8", packing=None, dtype=dtype)


def _make_4_bit_weight(source: StoredTensors, name: str, kind: str) -> Weight:
    state_name = f"{name}{_STATE}{kind}"
    state = _read_state(source, state_name)
    shape = tuple(state["shape"])
    tile = source.number(state, "blocksize", 64)
    size = math.prod(shape)
    storage = source.header(name).dtype  # any: the bytes of its numbers are codes
    count = -(-size // (2 * storage.itemsize))
    source.check(name, (count, 1), (storage.name,), state_name)
    absmax, quant_map = f"{name}.absmax", f"{name}.quant_map"
    nested = "nested_offset" in state or f"{name}.nested_absmax" in source.headers
    blocks = -(-size // tile)
    source.check(absmax, (blocks,), ("uint8",) if nested else FLOATS, state_name)
    source.check(quant_map, (16,), ("float32",), state_name)
    parts = [name, absmax, quant_map, state_name]
    if nested:
        outer = source.number(state, "nested_blocksize", 256)
        above = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        source.check(above[0], (-(-blocks // outer),), ("float32",), state_name)
        source.check(above[1], (256,), ("float32",), state_name)
        if type(state.get("nested_offset")) is not float:
            raise source.error(state_name, "has no number 'nested_offset'")
        parts += above
    stated = state.get("dtype")
    dtype = stated if stated in FLOATS else source.dense_dtype("float32")
    return Weight(
        name, shape, dtype, tuple(parts), partial(_read_4_bits, source, name, kind, state, dtype)
    )


def _read_state(source: StoredTensors, name: str) -> Mapping[str, Any]:
    (length,) = source.shape(name, rank=1, dtypes=("uint8",))
    if length > _MAX_STATE_BYTES:
        raise source.error(
            name, f"has {length} bytes, too many for the JSON of a quantization state"
        )
    try:
        state = json.loads(source.read(name).tobytes())
    except (ValueError, RecursionError) as error:
        raise source.error(name, "is not JSON") from error
    shape = state.get("shape") if isinstance(state, dict) else None
    if not (
        isinstance(shape, list)
        and len(shape) == 2
        and all(type(n) is int and 0 < n < 2**62 for n in shape)
    ):
        raise source.error(name, "has no 'shape' with two sizes")
    return state


def _read_4_bits(
    source: StoredTensors, name: str, kind: str, state: Mapping[str, Any], dtype: str
) -> Any:
    rows, columns = shape = tuple(state["shape"])
    qtype = _FORMATS[kind]
    _check_codebook(source, f"{name}.quant_map", qtype)
    data = codes.as_bytes(source.read(name)).reshape(-1)[: -(-rows * columns // 2)]
    if columns % 2:
        flat = codes.unpack_stream(codes.swap_nibbles(data), 4, rows * columns)
        packed = codes.pack_rows(flat.reshape(shape), 4)
    else:
        packed = codes.swap_nibbles(data).reshape(rows, columns // 2)
    tile = source.number(state, "blocksize", 64)
    absmax = source.read(f"{name}.absmax")
    scale: Any = even_tiles_of_blocks(absmax, shape, tile)
    if f"{name}.nested_absmax" in source.headers:
        scale = _read_nested_scales(source, name, state, scale, shape, tile)
    packing = codes.last_axis_packing(columns, 4)
    return make_qarray(packed, scale, qtype=qtype, packing=packing, dtype=dtype)


def _read_nested_scales(
    source: StoredTensors,
    name: str,
    state: Mapping[str, Any],
    scale: np.ndarray,
    shape: tuple[int, ...],
    tile: int,
) -> QArray:
    """Return the scales of a weight, which are quantized themselves, as a `QArray`.

    Its minimum is the `nested_offset` of bitsandbytes.

    **Arguments:**

    - `name`: the name of the weight.
    - `state`: the JSON of its `quant_state`.
    - `scale`: the u8 codes of the scales, a matrix whose sizes divide `shape`.
    - `shape`, `tile`: the shape of the weight, and the number of values per scale.
    """
    _check_codebook(source, f"{name}.nested_quant_map", _NESTED_FORMAT)
    outer = source.number(state, "nested_blocksize", 256)
    # The first value of each scale is in a block of values, whose scale is in a block of scales.
    starts = (np.arange(0, n, n // m) for n, m in zip(shape, scale.shape, strict=True))
    first = np.add.outer(next(starts) * shape[1], next(starts))
    above = source.read(f"{name}.nested_absmax")[first // tile // outer]
    minimum = np.full([1] * 2, state["nested_offset"], np.float32)
    return make_qarray(
        scale,
        _merge_equal(above),
        qtype=_NESTED_FORMAT,
        packing=None,
        dtype="float32",
        minimum=minimum,
    )


def _merge_equal(entries: np.ndarray) -> np.ndarray:
    """Remove repeated rows and columns of a matrix of scales, so that each covers a larger tile."""
    for axis in (0, 1):
        size = entries.shape[axis]
        changes = np.diff(entries, axis=axis).any(axis=1 - axis)
        tile = math.gcd(size, *map(int, np.flatnonzero(changes) + 1))
        entries = np.take(entries, np.arange(0, size, tile), axis)
    return entries


def _check_codebook(source: StoredTensors, name: str, qtype: str) -> None:
    """Raise a `ValueError` if the stored tensor `name` differs from the codebook of `qtype`.

    Two units in the last place are allowed: torch computes 8-bit codebooks, and its results depend
    on the processor.
    """
    codebook = np.asarray(FORMATS[qtype].codebook, np.float32)
    theirs = source.read(name)
    near = theirs.shape == codebook.shape and (
        np.abs(theirs - codebook) <= 2 * np.spacing(np.abs(codebook))
    )
    if not np.all(near):
        raise source.error(name, f"is not the codebook of {qtype}")
