"""bitsandbytes: codebooks of 16 values in flat blocks, and int8 by rows.

4 bits: `weight` u8 `[out * in / 2, 1]`, the first of two values in the high half of a byte. With
`quant_storage`, as in FSDP-QLoRA, the same bytes are fewer numbers of another dtype, such as bf16.
`weight.absmax`, for each 64 or more values in the order of memory; `weight.quant_map`, the
codebook; and `weight.quant_state.bitsandbytes__nf4` or `__fp4`, JSON as u8. Nested, `absmax` is u8
itself: `nested_quant_map[absmax] * nested_absmax + nested_offset`.

int8: `weight` i8 and `SCB` `[out]`; the value is `q * (SCB / 127)`. Their kernels multiply by SCB
first, which may differ by two units in the last place.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..quant import FORMATS, QArray
from . import codes
from .stored_tensors import FLOATS, StoredTensors, Weight, quantized, tiled_rows

# The formats of ours that have the codebooks of theirs.
FORMAT_OF = {"nf4": "nf4", "fp4": "fp4_bnb"}
_NESTED_FORMAT = "dynamic8"
STATE = ".quant_state.bitsandbytes__"
_MOST_STATE_BYTES = 2**16


def weights(source: StoredTensors) -> Iterator[Weight]:
    """The weights of a folder of bitsandbytes'."""
    for kind in FORMAT_OF:
        for name in source.modules(STATE + kind):
            yield _of_4_bits(source, name, kind)
    for suffix in (".SCB", ".weight.SCB"):
        for module in source.modules(suffix):
            name = f"{module}.weight"
            if name in source.headers:
                yield _of_8_bits(source, name, module + suffix)


def is_stored(source: StoredTensors) -> bool:
    """Whether a folder has weights of bitsandbytes'."""
    suffixes = (".SCB", *(STATE + kind for kind in FORMAT_OF))
    return any(name.endswith(suffixes) for name in source.headers)


def _of_8_bits(source: StoredTensors, name: str, scb: str) -> Weight:
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
    return quantized(packed, scale, qtype="int8", packing=None, dtype=dtype)


def _of_4_bits(source: StoredTensors, name: str, kind: str) -> Weight:
    state_name = f"{name}{STATE}{kind}"
    state = _state(source, state_name)
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


def _state(source: StoredTensors, name: str) -> Mapping[str, Any]:
    (length,) = source.shape(name, rank=1, dtypes=("uint8",))
    if length > _MOST_STATE_BYTES:
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
    qtype = FORMAT_OF[kind]
    _check_codebook(source, f"{name}.quant_map", qtype)
    data = codes.bytes_of(source.read(name)).reshape(-1)[: -(-rows * columns // 2)]
    if columns % 2:
        flat = codes.fields_of_stream(codes.with_nibbles_swapped(data), 4, rows * columns)
        packed = codes.from_fields(flat.reshape(shape), 4)
    else:
        packed = codes.with_nibbles_swapped(data).reshape(rows, columns // 2)
    tile = source.number(state, "blocksize", 64)
    absmax = source.read(f"{name}.absmax")
    scale: Any = tiled_rows(absmax, shape, tile)
    if f"{name}.nested_absmax" in source.headers:
        scale = _nested(source, name, state, scale, shape, tile)
    packing = codes.packing_of(columns, 4)
    return quantized(packed, scale, qtype=qtype, packing=packing, dtype=dtype)


def _nested(
    source: StoredTensors,
    name: str,
    state: Mapping[str, Any],
    scale: np.ndarray,
    shape: tuple[int, ...],
    tile: int,
) -> QArray:
    """The scales as an array that is quantized in turn, with an offset."""
    _check_codebook(source, f"{name}.nested_quant_map", _NESTED_FORMAT)
    outer = source.number(state, "nested_blocksize", 256)
    # Of each entry of the scale the first value, and so its block, and the one above that.
    starts = (np.arange(0, n, n // m) for n, m in zip(shape, scale.shape, strict=True))
    first = np.add.outer(next(starts) * shape[1], next(starts))
    above = source.read(f"{name}.nested_absmax")[first // tile // outer]
    minimum = np.full([1] * 2, state["nested_offset"], np.float32)
    return quantized(
        scale,
        _shared(above),
        qtype=_NESTED_FORMAT,
        packing=None,
        dtype="float32",
        minimum=minimum,
    )


def _shared(entries: np.ndarray) -> np.ndarray:
    """The fewest entries of a matrix of which each stands for a tile."""
    for axis in (0, 1):
        size = entries.shape[axis]
        changes = np.diff(entries, axis=axis).any(axis=1 - axis)
        tile = math.gcd(size, *map(int, np.flatnonzero(changes) + 1))
        entries = np.take(entries, np.arange(0, size, tile), axis)
    return entries


def _check_codebook(source: StoredTensors, name: str, qtype: str) -> None:
    """Refuses another codebook than ours; torch computes some, which may differ in the last place.

    A few units of that: those of 8 bits depend on the processor that made them.
    """
    codebook = np.asarray(FORMATS[qtype].codebook, np.float32)
    theirs = source.read(name)
    near = theirs.shape == codebook.shape and (
        np.abs(theirs - codebook) <= 2 * np.spacing(np.abs(codebook))
    )
    if not np.all(near):
        raise source.error(name, f"is not the codebook of {qtype}")
