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
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..quant import FORMATS, QArray, get_format
from ..quant.formats import Format
from ..quant.formats.packing import UNITS
from .tensor_file import DTYPES, distinct

FILE_NAME = "veneer.json"
LAYOUT_VERSION = 4

# Version 1 had integers of 4 and 8 bits and nf4, in the same bytes, and neither 'scale_dtype' nor
# scales that are quantized. Version 2 had trees of dicts, lists, tuples, tensors, and weights with
# quantized activations, each an 'activation_quantized'. Version 3 had no 'minimum', and
# 'zero_point' was no object.
HOW_TO_READ = (
    "The safetensors tensors named below are in model.safetensors or, where there is a "
    "model.safetensors.index.json, in the file that its 'weight_map' names.",
    "storage 'dense': the value is the safetensors tensor named by 'tensor'; where 'dtype' is an "
    "8-bit float, the bytes of that tensor are those of the value.",
    "storage 'quantised': the value has the given 'shape' and 'dtype', and is computed from the "
    "safetensors tensors named by 'packed', 'scale', 'zero_point' and 'minimum' (null: none), and "
    "the row of 'formats' that 'format' names.",
    "1. 'packed' holds fields: small integers that are not negative, of 'bits' bits. Where 'bits' "
    "is 8 or 16, each element, read as an unsigned integer, is a field. Where 'packing' is null, "
    "each byte holds one field in its lowest bits (byte % 3 where 'bits' is 1.6). Elsewhere the "
    "'axis' of 'packing' (counted from the end) is a row of units of 'unit_bytes' bytes that hold "
    "'unit_fields' fields, neighbours along that axis; the first 'size' fields count, the rest is "
    "padding. In a unit, by its "
    "'unit_layout': 'bits': field i is (byte >> (bits * i)) & (2**bits - 1). 'base 3': field i is "
    "byte // 3**i % 3. 'bit planes': bit p of field i is bit i of byte p, the lowest bit being "
    "bit 0.",
    "2. A field becomes a code as 'code' says. 'field': it is one. 'two's complement': so read, of "
    "'bits' bits. 'field - 1' and '2 * field - 1': as it says. Another word names the 8-bit float "
    "whose bit pattern it is: float8_e4m3fn and float8_e5m2 of the OCP 8-bit Floating Point "
    "Specification, and others as the Python package ml_dtypes defines them.",
    "3. Where the format has a 'codebook', each code is replaced by codebook[code].",
    "4. Where 'scale', 'zero_point' or 'minimum' is an object, it describes numbers that are a "
    "quantized value themselves, to be computed first, and not rounded. Where 'scale_dtype' is not "
    "null, the bytes of the scale are 8-bit floats: those above, or float8_e8m0fnu, of which byte "
    "b is 2.0**(b - 127), and 255 is NaN.",
    "5. scale, zero_point and minimum have the rank of the value; one element covers shape[i] / "
    "scale.shape[i] neighbours along axis i (for the scale, this is 'tile_shape'). Repeat them to "
    "the full shape.",
    "6. value = (code - zero_point) * scale + minimum, computed in float32 or wider, rounded to "
    "'dtype'.",
    "'tree', if there, is how the tensors nest: {'none': true}; {'tensor': name}; {'dict': [[key, "
    "node], ...]}; {'list': [node, ...]}; {'tuple': [node, ...]}; {'value': a bool, number or "
    "string}; {'keys': generator, 'data': name}: keys of random numbers, by the integers of the "
    "tensor; {'children': [[key, node], ...], 'of': class}: an object of a program's class, by the "
    "names of its parts; {'opaque': name}: a function of the program's, which is not stored; "
    "{'array': type, 'fields': [[name, node], ...], 'static': {...}}: an array of a type; what it "
    "stands for is on that type's page of veneer's documentation: 'LoraArray' is w + scale * a @ b."
    " With 'valid', the type accepted these fields when they were saved. Without 'tree', the "
    "tensors are a flat dict by name.",
    "'checksums', if there, has the CRC-32 of the bytes of each safetensors tensor, in "
    "hexadecimal, and 'checksum', which ends this file, that of all lines before its own.",
)

# 8-bit floats, which NumPy does not have, are stored as the bytes that they are.
BYTE_FLOATS = (
    *(name for name in FORMATS if name.startswith("float8")),
    "float8_e8m0fnu",  # of scales
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
class QuantizedEntry:
    """A tensor stored as codes and scales; strings name the safetensors tensors of its leaves.

    `packing` has the `axis` that is packed (negative) and its `size` before, or is None where
    `packed` holds one code an element. `tile_shape` says how many neighbours share a scale along
    each axis. `scale` is an entry itself where scales are quantized, and so are `minimum` and, of
    those that are packed, `zero_point`; `scale_dtype` is that of scales which are stored as bytes
    (`BYTE_FLOATS`).
    """

    format: str
    shape: Sequence[int]
    dtype: str
    packed: str
    packing: Mapping[str, int] | None
    scale: "str | QuantizedEntry"
    tile_shape: Sequence[int]
    zero_point: "str | QuantizedEntry | None"
    scale_dtype: str | None = None
    minimum: "str | QuantizedEntry | None" = None

    def stored(self) -> set[str]:
        """Returns the safetensors names of its parts."""
        parts = (self.packed, self.zero_point, self.scale, self.minimum)
        nested = (part.stored() for part in parts if isinstance(part, QuantizedEntry))
        return {part for part in parts if isinstance(part, str)}.union(*nested)


Entry = DenseEntry | QuantizedEntry
_STORAGE: dict[str, type[Entry]] = {"dense": DenseEntry, "quantised": QuantizedEntry}
_STORAGE_OF = {entry: storage for storage, entry in _STORAGE.items()}


# Dicts, lists and tuples in each other in a saved tree, and objects and lists in the JSON of it,
# three for a level at most: parsers may stop at a few hundred, as recursive functions do.
MAX_LEVELS = 100
_MAX_JSON_LEVELS = 3 * MAX_LEVELS + 10


class Manifest(NamedTuple):
    """What `veneer.json` says.

    `entries` has one for each tensor, and `tree` how they nest (None: a flat dict). `checksums` has
    one for each safetensors tensor, or is None where the folder was written without.
    """

    entries: Mapping[str, Entry]
    tree: Any = None
    checksums: Mapping[str, str] | None = None


def quantized_entry(
    value: QArray,
    *,
    packed: str,
    scale: str | QuantizedEntry,
    zero_point: str | QuantizedEntry | None,
    minimum: str | QuantizedEntry | None,
) -> QuantizedEntry:
    """Returns the entry of a QArray whose leaves are stored under the names given."""
    packing = value.packing
    scale_dtype = None if isinstance(value.scale, QArray) else value.scale.dtype.name
    return QuantizedEntry(
        format=value.qtype,
        shape=list(value.shape),
        dtype=str(value.dtype),
        packed=packed,
        packing=None if packing is None else packing._asdict(),
        scale=scale,
        tile_shape=list(value.tile_shape),
        zero_point=zero_point,
        scale_dtype=scale_dtype if scale_dtype in BYTE_FLOATS else None,
        minimum=minimum,
    )


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `veneer.json` into `folder`."""
    formats = {name for entry in manifest.entries.values() for name in _formats_of(entry)}
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
    if manifest.checksums is not None:
        content["checksums"] = json.dumps(manifest.checksums, indent=1)
    text = "".join(f'"{key}": {value},\n' for key, value in content.items())
    lines = f"{{\n{text}".encode()
    (folder / FILE_NAME).write_bytes(lines + f'"checksum": "{checksum(lines)}"\n}}\n'.encode())


def _formats_of(entry: str | Entry | None) -> set[str]:
    if not isinstance(entry, QuantizedEntry):
        return set()
    parts = (entry.scale, entry.zero_point, entry.minimum)
    return {entry.format}.union(*map(_formats_of, parts))


def read(file: Path, *, verify: bool = False) -> Manifest:
    """Reads a `veneer.json`; with `verify`, only if it has the bytes that were written.

    **Raises:** `ValueError` where it is not one, or is of a newer layout version, and, with
    `verify`, where its checksum is another or it has none.
    """
    content = read_json(file)
    version = content.get("layout_version") if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise ValueError(f"{file} was not written by veneer: it has no layout version")
    if version > LAYOUT_VERSION:
        raise ValueError(
            f"{file} has layout version {version}, but this version of veneer reads versions up to "
            f"{LAYOUT_VERSION}: update veneer"
        )
    if verify:
        _verify(file, content)
    tensors = content.get("tensors")
    if not isinstance(tensors, dict):
        raise ValueError(f"{file} is damaged: 'tensors' is not an object")
    entries: dict[str, Entry] = {}
    for name, fields in tensors.items():
        try:
            entries[name] = _entry(**fields)
        except (AttributeError, KeyError, TypeError) as error:
            what = f"tensor {name!r}: {type(error).__name__}: {error}"
            raise ValueError(f"{file} is damaged: {what}") from error
    return Manifest(entries, content.get("tree"), content.get("checksums"))


def _verify(file: Path, content: dict[str, Any]) -> None:
    if "checksum" not in content:
        raise ValueError(
            f"{file} has no checksums to verify, because an older version of veneer wrote it. Load "
            "and save it again to add them"
        )
    lines = file.read_bytes().splitlines(keepends=True)
    stated, actual = content["checksum"], checksum(b"".join(lines[:-2]))
    if stated != actual:
        raise ValueError(f"{file} is damaged: its checksum is {actual}, but it says {stated}")


def checksum(data: bytes | memoryview | np.ndarray) -> str:
    """Returns the CRC-32, in hexadecimal, of bytes, or of an array as safetensors stores it."""
    if isinstance(data, np.ndarray):
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        return checksum(little.reshape(-1).view(np.uint8).data)
    # Of disks that fail, not of people who forge: SHA-256 takes three times as long.
    return f"{zlib.crc32(data):08x}"


def _entry(storage: str, **fields: Any) -> Entry:
    for key, value in fields.items():
        if key in _IS_VALID and not _IS_VALID[key](value):
            raise TypeError(f"{key} is {value!r}")
    for part in ("scale", "zero_point", "minimum"):
        if isinstance(fields.get(part), dict):
            fields[part] = _entry("quantised", **fields[part])
    return _STORAGE[storage](**fields)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int for size in value)


def _is_packing(value: Any) -> bool:
    return value.keys() == {"axis", "size"} and _is_sizes([*value.values()])


def _is_dtype(value: Any) -> bool:
    return value in (*DTYPES.values(), *BYTE_FLOATS)


# What comes from a file is checked when it is read, not where it first makes trouble.
_IS_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tensor", "format", "packed"), _is_name),
    "scale": lambda value: isinstance(value, str | dict),
    **dict.fromkeys(
        ("zero_point", "minimum"), lambda value: value is None or isinstance(value, str | dict)
    ),
    "scale_dtype": lambda value: value is None or value in BYTE_FLOATS,
    **dict.fromkeys(("shape", "tile_shape"), _is_sizes),
    "dtype": _is_dtype,
    "packing": lambda value: value is None or _is_packing(value),
}


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file.

    **Raises:** `ValueError` naming the file where it is not JSON, or has more objects and lists in
    each other than anything that is written as it should be.
    """
    too_deep = f"{file} is damaged: its objects and lists nest too deeply"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=distinct)
    except ValueError as error:  # a JSONDecodeError or a UnicodeDecodeError
        raise ValueError(f"{file} is not JSON, or is truncated: {error}") from error
    except RecursionError as error:
        raise ValueError(too_deep) from error
    nodes = [content]
    for _ in range(_MAX_JSON_LEVELS):
        nodes = [child for node in nodes for child in _children(node)]
    if nodes:
        raise ValueError(too_deep)
    return content


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _one_a_line(content: dict[str, Any]) -> str:
    # json's own indentation gives each number of a shape a line.
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
    return f"{{\n{lines}\n}}"


def _describe_format(name: str) -> dict[str, Any]:
    format = get_format(name)
    fields, bytes_ = UNITS.get(format.bits, (1, int(format.bits) // 8))
    return {
        "bits": format.bits,
        "unit_fields": fields,
        "unit_bytes": bytes_,
        "unit_layout": _unit_layout(format),
        "code": _code(format),
        "codebook": format.codebook,
    }


def _unit_layout(format: Format) -> str:
    if format.bits == 1.6:
        return "base 3"
    return "bits" if UNITS.get(format.bits, (1, 1))[1] == 1 else "bit planes"


def _code(format: Format) -> str:
    if format.code_dtype.name in BYTE_FLOATS:
        return format.code_dtype.name
    if not format.signed:
        return "field"
    return {1: "2 * field - 1", 1.6: "field - 1"}.get(format.bits, "two's complement")
