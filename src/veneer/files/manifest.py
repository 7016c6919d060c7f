"""Read and write `veneer.json`, which describes how each tensor of a saved folder is stored.

Weights may outlive this library. So a reader needs only a JSON parser, a safetensors reader and
NumPy: the file contains instructions (`HOW_TO_READ`) and the codebooks of its formats. The layout
has a version. A file of a newer version is rejected, because decoding it could give wrong values.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..quant import FORMATS, QArray, get_format
from ..quant.formats import Format
from ..quant.formats.packing import UNITS
from .tensor_file import DTYPES, distinct

FILE_NAME = "veneer.json"
LAYOUT_VERSION = 4

# Changes by version. Version 2 added 'scale_dtype', quantized scales, and more formats than int4,
# int8 and nf4. Version 3 added nodes of 'tree' other than dicts, lists, tuples, tensors and
# 'activation_quantized'. Version 4 added 'minimum', and lets 'zero_point' be an object.
HOW_TO_READ = (
    "The safetensors tensors named below are in model.safetensors. If there is a "
    "model.safetensors.index.json, they are in the files that its 'weight_map' names.",
    "storage 'dense': the value is the safetensors tensor named by 'tensor'. If 'dtype' is an "
    "8-bit float, that tensor holds the bytes of the value.",
    "storage 'quantised': the value has the given 'shape' and 'dtype'. It is computed from the "
    "safetensors tensors named by 'packed', 'scale', 'zero_point' and 'minimum' (null: none), "
    "and from the row of 'formats' that 'format' names, in these steps:",
    "1. 'packed' holds fields: nonnegative integers of 'bits' bits. If 'bits' is 8 or 16, each "
    "element, read as an unsigned integer, is a field. Otherwise, if 'packing' is null, each "
    "byte holds one field in its lowest bits (byte % 3 if 'bits' is 1.6). Otherwise, the 'axis' "
    "of 'packing' (counted from the end) is a row of units. A unit has 'unit_bytes' bytes and "
    "holds 'unit_fields' fields, which are neighbors along that axis. The first 'size' fields of "
    "a row are used, and the rest is padding. 'unit_layout' describes a unit. 'bits': field i is "
    "(byte >> (bits * i)) & (2**bits - 1). 'base 3': field i is byte // 3**i % 3. 'bit planes': "
    "bit p of field i is bit i of byte p, where bit 0 is the lowest.",
    "2. 'code' says how a field becomes a code. 'field': the code is the field. 'two's "
    "complement': the code is the field read as a signed integer of 'bits' bits. 'field - 1' and "
    "'2 * field - 1' are formulas. Any other word names the 8-bit float with this bit pattern: "
    "float8_e4m3fn and float8_e5m2 of the OCP 8-bit Floating Point Specification, and others as "
    "in the Python package ml_dtypes.",
    "3. If the format has a 'codebook', each code is replaced by codebook[code].",
    "4. If 'scale', 'zero_point' or 'minimum' is an object, it describes a quantized value. "
    "Compute it first, without rounding it to its dtype. If 'scale_dtype' is not null, the bytes "
    "of the scale are 8-bit floats: those above, or float8_e8m0fnu, in which byte b is 2.0**(b - "
    "127) and 255 is NaN.",
    "5. scale, zero_point and minimum have the rank of the value. One element applies to "
    "shape[i] / scale.shape[i] neighbors along axis i (for the scale, this is 'tile_shape'). "
    "Repeat them to the full shape.",
    "6. value = (code - zero_point) * scale + minimum, computed in float32 or wider, and rounded "
    "to 'dtype'.",
    "'tree', if present, describes how the tensors nest. Its nodes are: {'none': true}; "
    "{'tensor': name}; {'dict': [[key, node], ...]}; {'list': [node, ...]}; {'tuple': [node, "
    "...]}; {'value': a bool, number or string}; {'keys': generator, 'data': name}: random keys, "
    "made from the integers of the tensor; {'children': [[key, node], ...], 'of': class}: an "
    "object of a class of the program, with its children by name; {'opaque': name}: an object "
    "that is not stored, such as a function; {'array': type, 'fields': [[name, node], ...], "
    "'static': {...}}: an implicit array. The documentation of veneer has a page on each type. "
    "For example, 'LoraArray' represents w + scale * a @ b. 'valid': the type accepted these "
    "fields when they were saved. Without 'tree', the tensors are a flat dict by name.",
    "'checksums', if present, has the CRC-32 of the bytes of each safetensors tensor, in "
    "hexadecimal. 'checksum', on the last line of this file, is that of all lines before it.",
)

# safetensors files hold these 8-bit floats as uint8.
BYTE_FLOATS = (
    *(name for name in FORMATS if name.startswith("float8")),
    "float8_e8m0fnu",  # only for scales
)


@dataclasses.dataclass(frozen=True)
class DenseEntry:
    """The `veneer.json` entry of a dense tensor.

    - `tensor`: its name in the safetensors file.
    - `shape`, `dtype`: its shape and dtype.
    """

    tensor: str
    shape: Sequence[int]
    dtype: str

    def stored(self) -> set[str]:
        """Return the names of the safetensors tensors that hold the value."""
        return {self.tensor}


@dataclasses.dataclass(frozen=True)
class QuantizedEntry:
    """The `veneer.json` entry of a quantized tensor.

    - `format`: the number format.
    - `shape`, `dtype`: the shape and dtype of the dense array.
    - `packed`, `scale`, `zero_point`, `minimum`: the name of the safetensors tensor with the codes,
      the scales, the zero points and the minima. If these are quantized themselves, it is another
      entry. None if there are no zero points or no minima.
    - `packing`: the packed `axis` (negative) and its unpacked `size`. None if `packed` holds one
      code per element.
    - `tile_shape`: the number of values along each axis that share a scale.
    - `scale_dtype`: the dtype of scales stored as bytes, one of `BYTE_FLOATS`. None for other
      scales.
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
        """Return the names of the safetensors tensors that hold the value."""
        parts = (self.packed, self.zero_point, self.scale, self.minimum)
        nested = (part.stored() for part in parts if isinstance(part, QuantizedEntry))
        return {part for part in parts if isinstance(part, str)}.union(*nested)


Entry = DenseEntry | QuantizedEntry
_STORAGE: dict[str, type[Entry]] = {"dense": DenseEntry, "quantised": QuantizedEntry}
_STORAGE_OF = {entry: storage for storage, entry in _STORAGE.items()}


# The largest depth of a saved tree, and of its JSON, which has at most three levels per level of
# the tree. JSON parsers may fail at a few hundred levels.
MAX_LEVELS = 100
_MAX_JSON_LEVELS = 3 * MAX_LEVELS + 10


class Manifest(NamedTuple):
    """The content of `veneer.json`.

    - `entries`: a dict from tensor names to descriptions of their storage.
    - `tree`: the JSON of how the tensors nest, from `tree_encoding.encode`. None for a flat dict.
    - `checksums`: a dict from safetensors names to CRC-32s, or None if the file has none.
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
    """Return the `veneer.json` entry of the `QArray` `value`.

    The other arguments are the names in the safetensors file of its codes, scales, zero points and
    minima. For leaves that are `QArray`s, they are entries, and for missing leaves None.
    """
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
    """Write `veneer.json` into `folder`."""
    formats = {name for entry in manifest.entries.values() for name in _formats_of(entry)}
    tensors = {
        name: {"storage": _STORAGE_OF[type(entry)], **dataclasses.asdict(entry)}
        for name, entry in manifest.entries.items()
    }
    content = {
        "layout_version": json.dumps(LAYOUT_VERSION),
        "how_to_read": json.dumps(HOW_TO_READ, indent=1),
        "formats": _format_lines({name: _describe_format(name) for name in sorted(formats)}),
        "tensors": _format_lines(tensors),
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
    """Read a `veneer.json`.

    **Arguments:**

    - `file`: the path of the file.
    - `verify`: whether to compare the file with the checksum on its last line.

    **Raises:** `ValueError` if the file is not a valid `veneer.json` or has a newer layout version.
    With `verify`, also if the checksum differs or is missing.
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
        _verify_checksum(file, content)
    tensors = content.get("tensors")
    if not isinstance(tensors, dict):
        raise ValueError(f"{file} is damaged: 'tensors' is not an object")
    entries: dict[str, Entry] = {}
    for name, fields in tensors.items():
        try:
            entries[name] = _parse_entry(**fields)
        except (AttributeError, KeyError, TypeError) as error:
            what = f"tensor {name!r}: {type(error).__name__}: {error}"
            raise ValueError(f"{file} is damaged: {what}") from error
    return Manifest(entries, content.get("tree"), content.get("checksums"))


def _verify_checksum(file: Path, content: dict[str, Any]) -> None:
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
    """Return the CRC-32 of bytes, or of an array in little-endian order, in hexadecimal."""
    if isinstance(data, np.ndarray):
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        return checksum(little.reshape(-1).view(np.uint8).data)
    # CRC-32 detects damage, not forgery. SHA-256 takes three times as long.
    return f"{zlib.crc32(data):08x}"


def _parse_entry(storage: str, **fields: Any) -> Entry:
    for key, value in fields.items():
        if key in _IS_VALID and not _IS_VALID[key](value):
            raise TypeError(f"{key} is {value!r}")
    for part in ("scale", "zero_point", "minimum"):
        if isinstance(fields.get(part), dict):
            fields[part] = _parse_entry("quantised", **fields[part])
    return _STORAGE[storage](**fields)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int for size in value)


# Checks of the fields of an entry. They run when the file is read, so that errors name the file.
_IS_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tensor", "format", "packed"), lambda value: isinstance(value, str)),
    "scale": lambda value: isinstance(value, str | dict),
    **dict.fromkeys(
        ("zero_point", "minimum"), lambda value: value is None or isinstance(value, str | dict)
    ),
    "scale_dtype": lambda value: value is None or value in BYTE_FLOATS,
    **dict.fromkeys(("shape", "tile_shape"), _is_sizes),
    "dtype": lambda value: value in (*DTYPES.values(), *BYTE_FLOATS),
    "packing": lambda value: (
        value is None or (value.keys() == {"axis", "size"} and _is_sizes([*value.values()]))
    ),
}


def read_json(file: Path) -> Any:
    """Return the content of a JSON file.

    **Raises:** `ValueError`, naming the file, if it is not JSON or is nested too deeply.
    """
    too_deep = f"{file} is damaged: its objects and lists nest too deeply"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=distinct)
    except ValueError as error:  # a JSONDecodeError or a UnicodeDecodeError
        raise ValueError(f"{file} is not JSON, or is truncated: {error}") from error
    except RecursionError as error:
        raise ValueError(too_deep) from error
    nodes = [content] if isinstance(content, dict | list) else []
    for _ in range(_MAX_JSON_LEVELS):
        children = (node.values() if isinstance(node, dict) else node for node in nodes)
        nodes = [x for inside in children for x in inside if isinstance(x, dict | list)]
        if not nodes:
            return content
    raise ValueError(too_deep)


def _format_lines(content: dict[str, Any]) -> str:
    # With `indent`, json writes each number of a shape on its own line.
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
    return f"{{\n{lines}\n}}"


def _describe_format(name: str) -> dict[str, Any]:
    format = get_format(name)
    fields, bytes_ = UNITS.get(format.bits, (1, int(format.bits) // 8))
    layout = "bits" if UNITS.get(format.bits, (1, 1))[1] == 1 else "bit planes"
    return {
        "bits": format.bits,
        "unit_fields": fields,
        "unit_bytes": bytes_,
        "unit_layout": "base 3" if format.bits == 1.6 else layout,
        "code": _describe_code(format),
        "codebook": format.codebook,
    }


def _describe_code(format: Format) -> str:
    if format.code_dtype.name in BYTE_FLOATS:
        return format.code_dtype.name
    if not format.signed:
        return "field"
    return {1: "2 * field - 1", 1.6: "field - 1"}.get(format.bits, "two's complement")
