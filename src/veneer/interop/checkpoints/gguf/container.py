"""What stands before the tensors of a GGUF file: metadata, and their names, types and places."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from .blocks import BLOCK_TYPES, DENSE_TYPES, OTHER_TYPES
from .metadata import MetadataReader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

# llama.cpp's limits: axes, and bytes of a name.
MOST_AXES = 4
LONGEST_NAME = 63

# The largest alignment that is believed; usual are 32 and, for other memory, up to 4096.
_MOST_ALIGNMENT = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor: its type's number, the shape of its values `[out, in]`, and where its bytes are."""

    type: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


def type_layout(number: int) -> tuple[str, int, int]:
    """Returns the name of a type, and the values and bytes of a block of it.

    **Raises:** `ValueError` where there is no such type.
    """
    if number in BLOCK_TYPES:
        row = BLOCK_TYPES[number]
        return row.name, row.values, row.nbytes
    if number in DENSE_TYPES:
        name, dtype = DENSE_TYPES[number]
        return name, 1, dtype.itemsize
    if number in OTHER_TYPES:
        return OTHER_TYPES[number]
    raise ValueError(f"tensor type {number} is unknown")


def read_header(content: np.ndarray) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Returns the metadata and the tensors of a file, by name and in its order.

    **Arguments:**

    - `content`: the bytes of the file, mapped.

    **Raises:** `ValueError` where a part is missing, or is not what can be at its place.
    """
    reader = MetadataReader(content.data)
    _check_version(reader)
    tensors = reader.count(24)
    metadata: dict[str, Any] = {}
    for _ in range(reader.count(13)):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"{key!r} occurs twice")
        metadata[key] = reader.value()
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, info = _read_info(reader)
        if name in infos:
            raise ValueError(f"tensor {name!r} occurs twice")
        infos[name] = info
    alignment = alignment_of(metadata)
    data = aligned(reader.offset, alignment)
    entries = {}
    offset = 0
    for name, (shape, type, stated) in infos.items():
        try:
            if stated != offset:
                raise ValueError(f"it starts at {stated}, but the previous one ends at {offset}")
            nbytes = nbytes_of(shape, type)
            if data + offset + nbytes > len(content):
                raise ValueError(f"it takes {nbytes} bytes, but the file ends before")
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
        entries[name] = Entry(type, shape, data + offset, nbytes)
        offset = aligned(offset + nbytes, alignment)
    return metadata, entries


def _check_version(reader: MetadataReader) -> None:
    if reader.integer("I") != int.from_bytes(MAGIC, "little"):
        raise ValueError("it is not a GGUF file: it does not start with 'GGUF'")
    version = reader.integer("I")
    if version and not version & 0xFFFF:
        raise ValueError(
            "it is big-endian: convert it with gguf-convert-endian of the package gguf"
        )
    if version not in VERSIONS:
        raise ValueError(f"its GGUF version {version} is not supported; versions 2 and 3 are")


def _read_info(reader: MetadataReader) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    """Name, and shape, type and offset, of a tensor."""
    name = reader.string()
    axes = reader.integer("I")
    if axes > MOST_AXES:
        raise ValueError(f"tensor {name!r} has {axes} axes, but GGUF has at most {MOST_AXES}")
    # The fastest first.
    shape = tuple(reader.integer("Q") for _ in range(axes))[::-1]
    # No type has less than a bit a value.
    if math.prod(max(size, 1) for size in shape) > 8 * reader.size:
        raise ValueError(
            f"tensor {name!r} has shape {shape}, which has more values than the file has bits"
        )
    return name, (shape, reader.integer("I"), reader.integer("Q"))


def nbytes_of(shape: tuple[int, ...], type: int) -> int:
    """Returns the bytes of a tensor.

    **Raises:** `ValueError` where the last axis is not of whole blocks.
    """
    name, values, nbytes = type_layout(type)
    if (shape[-1] if shape else 1) % values:
        raise ValueError(
            f"the last axis of {shape} is not a multiple of {values}, the block of {name}"
        )
    return math.prod(shape) // values * nbytes


def alignment_of(metadata: dict[str, Any]) -> int:
    """Returns what the offsets of tensors are multiples of.

    **Raises:** `ValueError` where that is no power of two, of up to 2**20.
    """
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment.bit_count() != 1 or alignment > _MOST_ALIGNMENT:
        raise ValueError(f"general.alignment must be a power of two up to 2**20, not {alignment!r}")
    return alignment


def aligned(offset: int, alignment: int) -> int:
    """Returns the first multiple of `alignment` from `offset` on."""
    return -(-offset // alignment) * alignment


def mapped(path: Path) -> np.ndarray:
    """Returns the bytes of a file, mapped into memory: uint8 `[bytes]`.

    **Raises:** `FileNotFoundError`; `ValueError` for an empty file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    return np.asarray(np.memmap(path, np.uint8, "r"))
