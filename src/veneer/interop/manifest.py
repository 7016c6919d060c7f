"""`veneer.json`: how each tensor of a saved folder is stored.

Requirements, and why:

- A reader needs a JSON parser, a safetensors reader and NumPy, and nothing of this library: weights
  outlive the program that wrote them. So the file explains itself in words (`HOW_TO_READ`) and
  carries the codebooks.
- The layout has a version, because kernels may come to prefer another packing: a reader refuses
  what it does not know instead of decoding it wrongly.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..quant import QArray, get_format

FILE_NAME = "veneer.json"
LAYOUT_VERSION = 1

HOW_TO_READ = (
    "The safetensors tensors named below are in model.safetensors or, where there is a "
    "model.safetensors.index.json, in the file that its 'weight_map' names.",
    "storage 'dense': the value is the safetensors tensor named by 'tensor'.",
    "storage 'quantised': the value has the given 'shape' and 'dtype', and is computed from the "
    "safetensors tensors named by 'packed', 'scale' and 'zero_point' (null: none).",
    "1. Codes are integers of 'bits' bits (see 'formats'), in two's complement where 'signed'. "
    "Where 'packing' is null, each element of 'packed' holds one code in its lowest bits. "
    "Elsewhere each byte holds 8 / bits codes, neighbours along the 'axis' of 'packing' (counted "
    "from the end), the first in the lowest bits; the first 'size' of them count, the rest is "
    "padding.",
    "2. Where the format has a 'codebook', each code is replaced by codebook[code].",
    "3. scale and zero_point have the rank of the value; one element covers shape[i] / "
    "scale.shape[i] neighbours along axis i (for the scale, this is 'tile_shape'). Repeat them to "
    "the full shape.",
    "4. value = (code - zero_point) * scale, computed in float32 or wider, rounded to 'dtype'.",
    "'tree', if there, is how the tensors nest: {'none': true}; {'tensor': name}; {'dict': [[key, "
    "node], ...]}; {'list': [node, ...]}; {'tuple': [node, ...]}. Without it, they are a flat dict "
    "by name.",
)


@dataclasses.dataclass(frozen=True)
class DenseEntry:
    """A tensor stored as it is, under the name `tensor`."""

    tensor: str
    shape: Sequence[int]
    dtype: str

    def stored(self) -> set[str]:
        """Returns the safetensors names of its parts."""
        return {self.tensor}


@dataclasses.dataclass(frozen=True)
class QuantisedEntry:
    """A tensor stored as codes and scales; the strings `packed`, `scale`, `zero_point` name them.

    `packing` has the `axis` that is packed (negative) and its `size` before, or is None where
    `packed` holds one code an element. `tile_shape` says how many neighbours share a scale along
    each axis.
    """

    format: str
    shape: Sequence[int]
    dtype: str
    packed: str
    packing: Mapping[str, int] | None
    scale: str
    tile_shape: Sequence[int]
    zero_point: str | None

    def stored(self) -> set[str]:
        """Returns the safetensors names of its parts."""
        return {name for name in (self.packed, self.scale, self.zero_point) if name is not None}


Entry = DenseEntry | QuantisedEntry
_STORAGE: dict[str, type[Entry]] = {"dense": DenseEntry, "quantised": QuantisedEntry}
_STORAGE_OF = {entry: storage for storage, entry in _STORAGE.items()}


class Manifest(NamedTuple):
    """What `veneer.json` says: an entry for each tensor, and how they nest (None: a flat dict)."""

    entries: Mapping[str, Entry]
    tree: Any = None


def quantised_entry(value: QArray, *, packed: str, scale: str, zero_point: str) -> QuantisedEntry:
    """Returns the entry of a QArray whose leaves are stored under the names given."""
    packing = value.packing
    return QuantisedEntry(
        format=value.qtype,
        shape=list(value.shape),
        dtype=str(value.dtype),
        packed=packed,
        packing=None if packing is None else packing._asdict(),
        scale=scale,
        tile_shape=list(value.tile_shape),
        zero_point=None if value.zero_point is None else zero_point,
    )


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `veneer.json` into `folder`."""
    formats = {
        entry.format for entry in manifest.entries.values() if isinstance(entry, QuantisedEntry)
    }
    tensors = {
        name: {"storage": _STORAGE_OF[type(entry)], **dataclasses.asdict(entry)}
        for name, entry in manifest.entries.items()
    }
    content = {
        "layout_version": json.dumps(LAYOUT_VERSION),
        "how_to_read": json.dumps(HOW_TO_READ, indent=1),
        "formats": _one_a_line({name: _describe_format(name) for name in sorted(formats)}),
        "tensors": _one_a_line(tensors),
    }
    if manifest.tree is not None:
        content["tree"] = json.dumps(manifest.tree)
    text = ",\n".join(f'"{key}": {value}' for key, value in content.items())
    (folder / FILE_NAME).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def read(file: Path) -> Manifest:
    """Reads a `veneer.json`.

    **Raises:** `ValueError` where it is not one, or is of a newer layout version.
    """
    content = read_json(file)
    version = content.get("layout_version") if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise ValueError(f"{file} was not written by veneer: it has no layout version")
    if version > LAYOUT_VERSION:
        raise ValueError(
            f"{file} has layout version {version}, and this veneer reads versions up to "
            f"{LAYOUT_VERSION}: read it with a newer veneer"
        )
    try:
        entries = {name: _entry(**fields) for name, fields in content["tensors"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    return Manifest(entries, content.get("tree"))


def _entry(storage: str, **fields: Any) -> Entry:
    for key, value in fields.items():
        if key in _IS_VALID and not _IS_VALID[key](value):
            raise TypeError(f"{key} is {value!r}")
    return _STORAGE[storage](**fields)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int for size in value)


def _is_packing(value: Any) -> bool:
    return value.keys() == {"axis", "size"} and _is_sizes([*value.values()])


def _is_dtype(value: Any) -> bool:
    return _is_name(value) and np.dtype(value).name == value


# What comes from a file is checked when it is read, not where it first makes trouble.
_IS_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tensor", "format", "packed", "scale"), _is_name),
    **dict.fromkeys(("shape", "tile_shape"), _is_sizes),
    "dtype": _is_dtype,
    "packing": lambda value: value is None or _is_packing(value),
    "zero_point": lambda value: value is None or _is_name(value),
}


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file.

    **Raises:** `ValueError` naming the file where it is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # a JSONDecodeError or a UnicodeDecodeError
        raise ValueError(f"{file} is not JSON, or is truncated: {error}") from error


def _one_a_line(content: dict[str, Any]) -> str:
    # json's own indentation gives each number of a shape a line.
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
    return f"{{\n{lines}\n}}"


def _describe_format(name: str) -> dict[str, Any]:
    format = get_format(name)
    return {
        "bits": format.bits,
        "signed": bool(format.signed),
        "codebook": format.codebook,
    }
