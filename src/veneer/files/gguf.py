"""Read and write GGUF files, the format of llama.cpp. Quantized tensors stay packed.

The names to use are `GgufFile`, `write_gguf`, `huggingface_config`, `tokenizer` and
`tokenizer_files`.
"""

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from ..quant import QArray
from .folder import Checkpoint
from .gguf_blocks import BLOCK_TYPES, DENSE_TYPES
from .gguf_header import (
    MAGIC,
    MAX_AXES,
    MAX_NAME_BYTES,
    VERSIONS,
    Entry,
    align,
    alignment_of,
    map_file,
    nbytes_of,
    read_header,
    type_layout,
    write_string,
    write_value,
)
from .gguf_huggingface import Origin, huggingface_config, names_of, order_of_rows, stored_names
from .gguf_tensors import Encoded, decode, encode, with_factors, without_factors
from .gguf_tokenizer import tokenizer as tokenizer
from .gguf_tokenizer import tokenizer_files as tokenizer_files
from .new_folder import replacing

# The tensor with the factors of the wavelengths of the rotary embedding.
_ROPE_FACTORS = "rope_freqs.weight"

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile(Checkpoint):
    """The tensors of a GGUF file, which may be split into parts `-00001-of-0000N.gguf`.

    Opening maps the files into memory and reads their metadata. `read` reads one tensor.

    **Arguments:**

    - `path`: the file, or any of its parts.
    - `names`: None for the names and the row order of GGUF, or "huggingface" for the names and the
      row order of the original checkpoint, which also has one tensor per expert. Tensors that are
      not in that checkpoint, such as `rope_freqs.weight`, keep their GGUF names.

    A tensor `*.scale` of a `*.weight` in NVFP4 is a part of the weight, and is not listed.

    **Attributes:**

    - `metadata`: a dict of the file's metadata, including the tokenizer. Numbers are Python or
      NumPy numbers, arrays of numbers are NumPy arrays, and other arrays are lists.
    - `config`: the content of `config.json`, from the metadata. See `huggingface_config`.

    **Raises:** `FileNotFoundError` if the file or a part is missing. `ValueError`, in one line that
    names the file, if it is truncated or not a GGUF file of version 2 or 3, and for
    `names="huggingface"` if the architecture is unknown.

    >>> import tempfile, numpy as np, veneer as vn
    >>> from veneer.files.gguf import GgufFile, write_gguf
    >>> w = vn.quant.quantize(np.ones((4, 32), np.float16), "int8", channelwise_axes=[0])
    >>> path = tempfile.mkdtemp() + "/model.gguf"
    >>> write_gguf(path, {"w": w}, {"general.architecture": "mine"})
    >>> with GgufFile(path) as file:
    ...     file.metadata["general.architecture"], file.types(), file.read("w").tile_shape
    ('mine', {'w': 'Q8_0'}, (1, 32))
    """

    family = "gguf"

    def __init__(self, path: str | os.PathLike[str], *, names: str | None = None):
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, tuple[np.ndarray, Entry]] = {}  # with the bytes of the file
        self._open()
        self._factors = self._factors_of_nvfp4()
        names_of_weights = self._entries.keys() - self._factors.values()
        shapes = {
            name: x.shape for name, (_, x) in self._entries.items() if name in names_of_weights
        }
        self._origins = {name: Origin(name) for name in shapes}
        if names == "huggingface":
            self._origins = _name_file(self.path, names_of, self.metadata, shapes)
        elif names is not None:
            raise ValueError(f"names must be 'huggingface' or None, not {names!r}")
        self._names = self._origins

    def _open(self) -> None:
        self.metadata = self._add(self.path)
        parts = self.metadata.get("split.count", 1)
        if not isinstance(parts, int | np.integer) or parts <= 1:
            return
        match = _PART.fullmatch(self.path.name)
        if match is None or int(match[3]) != parts:
            raise ValueError(
                f"{self.path} is one of {parts} parts, but its name does not end in "
                f"-00001-of-{parts:05}.gguf: rename it"
            )
        self._entries.clear()
        for number in range(parts):
            path = self.path.with_name(f"{match[1]}-{number + 1:05}-of-{parts:05}.gguf")
            metadata = self._add(path)
            if (metadata.get("split.no"), metadata.get("split.count")) != (number, parts):
                raise ValueError(f"{path} is not part {number + 1} of {parts}, as its name says")
            if number == 0:
                self.metadata = metadata
        stated = self.metadata.get("split.tensors.count", len(self._entries))
        if stated != len(self._entries):
            raise ValueError(
                f"{self.path}: its parts have {len(self._entries)} of {stated} tensors"
            )

    def _add(self, path: Path) -> dict[str, Any]:
        """Map one of the files into memory and add its tensors. Return its metadata.

        **Raises:** `ValueError` if another file already has a tensor with the same name.
        """
        content = map_file(path)
        metadata, entries = _name_file(path, read_header, content)
        if twice := self._entries.keys() & entries.keys():
            raise ValueError(f"tensor {min(twice)!r} is in {path} and in another part")
        self._entries |= {name: (content, entry) for name, entry in entries.items()}
        return metadata

    def _factors_of_nvfp4(self) -> dict[str, str]:
        """Return a dict from the names of NVFP4 tensors to the names of tensors with their factors.

        GGUF stores a factor of the scales of `x.weight` as a separate tensor `x.scale`.
        """
        factors = {}
        for name, (_, entry) in self._entries.items():
            factors_name = f"{name.removesuffix('weight')}scale"
            if type_layout(entry.type)[0] == "NVFP4" and factors_name in self._entries:
                factors[name] = factors_name
        return factors

    def close(self) -> None:
        """Release the mapped files."""
        # `read` copies, so nothing else refers to them.
        self._entries = {}

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`, from the metadata. See `huggingface_config`."""
        factors = None
        if _ROPE_FACTORS in self._entries:
            factors = _read_entry(*self._entries[_ROPE_FACTORS])
        config = _name_file(self.path, huggingface_config, self.metadata, rope_factors=factors)
        return config | {"tie_word_embeddings": "output.weight" not in self._entries}

    def types(self) -> dict[str, str]:
        """Return a dict from the names of tensors to the names of their types, such as Q4_K."""
        return {name: type_layout(self._find(name)[1].type)[0] for name in self}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return a dict from the names of tensors to the shapes of their values."""
        return {name: self._find(name)[1].shape for name in self}

    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a dict from the names of dense tensors to their shapes and dtypes."""
        entries = {name: self._find(name)[1] for name in self}
        return {
            name: jax.ShapeDtypeStruct(entry.shape, DENSE_TYPES[entry.type][1])
            for name, entry in entries.items()
            if entry.type in DENSE_TYPES
        }

    def _find(self, name: str) -> tuple[np.ndarray, Entry]:
        """Return the bytes of the file that has the tensor `name`, and its `Entry` in this file.

        For one of several stacked experts, the entry describes only this expert.
        """
        stored, expert = self._origins[name]
        content, entry = self._entries[stored]
        if expert is None:
            return content, entry
        size = entry.nbytes // entry.shape[0]
        return content, Entry(entry.type, entry.shape[1:], entry.start + expert * size, size)

    def read(self, name: str) -> np.ndarray | QArray:
        """Read one tensor: a NumPy array if it is stored dense, else a `QArray` of dtype float32.

        **Raises:** `KeyError` for an unknown name. `ValueError` for an unsupported block type, and
        for scales that are negative or NaN.
        """
        content, entry = self._find(name)
        stored, expert = self._origins[name]
        try:
            order = None
            if name != stored:
                order = order_of_rows(stored, entry.shape, self.metadata)
            value = _read_entry(content, entry, order)
            if isinstance(value, QArray) and stored in self._factors:
                factors = _read_entry(*self._entries[self._factors[stored]])
                value = with_factors(value, factors, expert)
            return value
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name!r}: {error}") from None


def _read_entry(
    content: np.ndarray, entry: Entry, order: np.ndarray | None = None
) -> np.ndarray | QArray:
    content = content[entry.start : entry.start + entry.nbytes]
    if entry.type in DENSE_TYPES:
        array = content.view(DENSE_TYPES[entry.type][1]).reshape(entry.shape)
        return np.array(array if order is None else array[order])
    if entry.type not in BLOCK_TYPES:
        known = ", ".join(row.name for row in BLOCK_TYPES.values())
        raise ValueError(f"its type is {type_layout(entry.type)[0]}; supported are {known}")
    count = math.prod(entry.shape[:-1])
    rows = content.reshape(count, entry.nbytes // max(count, 1))
    return decode(rows, BLOCK_TYPES[entry.type], entry.shape, order)


def _name_file(path: Path, function: Any, *args: Any, **options: Any) -> Any:
    """Return `function(*args, **options)`. Add `path` to the message of a `ValueError`."""
    try:
        return function(*args, **options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


_NUMBER_OF = {dtype: number for number, (_, dtype) in DENSE_TYPES.items()}

# The version of the block layouts. llama.cpp requires it.
_QUANTIZATION_VERSION = ("general.quantization_version", 2)


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    names: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a GGUF file of version 3. It holds every code, scale and minimum exactly.

    A `QArray` is written in the smallest block type that can hold it: int4 with a scale per 32
    values along the last axis as Q4_0, int8 as Q8_0, and tensors of `GgufFile` in their original
    type. Scales of larger tiles are repeated. Scales in float32 must be exact in float16. Zero
    points are subtracted from the codes.

    **Arguments:**

    - `path`: the file to create. It appears only when it is complete.
    - `tensors`: a dict from names of at most 63 bytes to arrays `[out, in]` of at most 4 axes:
      `QArray`s, and NumPy or JAX arrays of float16, bfloat16, float32, float64 and int8 to int64.
      Each is looked up twice, and only one is held in memory.
    - `metadata`: a dict, as in `GgufFile`. Python integers are written in 4 bytes if they fit,
      Python floats as float32, and NumPy numbers and arrays in their dtypes. Entries about the
      parts of a split file are omitted.
    - `names`: None if `tensors` has the names of GGUF, or "huggingface" if it has the names and the
      row order of Hugging Face for the architecture in `metadata`. Then 16-bit vectors, such as
      norms and biases, are written as float32, as llama.cpp does.
    - `overwrite`: whether to replace an existing GGUF file.

    **Raises:** `ValueError`, naming the tensor, if GGUF cannot hold it. `TypeError` for a value
    that is not an array, or metadata that GGUF cannot hold. `FileExistsError` if `path` exists.
    `BlockingIOError` if another process or thread is saving to `path`. Then no file is written.

    >>> import tempfile, jax.numpy as jnp, veneer as vn
    >>> from veneer.files.gguf import GgufFile, write_gguf
    >>> w = vn.quant.quantize(
    ...     jnp.ones((2, 64)), "int4", channelwise_axes=[0], tiled_axes={1: 32},
    ...     scale_dtype="float16",
    ... )
    >>> path = tempfile.mkdtemp() + "/model.gguf"
    >>> write_gguf(path, {"w": w, "b": jnp.zeros(2)})
    >>> with GgufFile(path) as file:
    ...     file.types()
    {'w': 'Q4_0', 'b': 'F32'}
    """
    metadata = {k: v for k, v in (metadata or {}).items() if not str(k).startswith("split.")}
    # `tensors` may read a tensor on lookup. So look each up twice, and keep none in memory.
    layout: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, tensor, _ in _prepare_tensors(tensors, metadata, names):
        if name in layout:
            raise ValueError(f"there are two tensors for {name!r}")
        layout[name] = _find_layout(tensor)
    if any(type in BLOCK_TYPES for type, _ in layout.values()):
        metadata.setdefault(*_QUANTIZATION_VERSION)
    alignment = alignment_of(metadata)
    header = _make_header(metadata, layout, alignment)
    refusal = lambda path: None if _is_gguf(path) else "it is not a GGUF file"
    with (
        replacing(Path(path), overwrite=overwrite, refusal=refusal) as new,
        new.open("xb") as file,
    ):
        file.write(header)
        for name, tensor, order in _prepare_tensors(tensors, metadata, names):
            _pad(file, alignment)
            if _find_layout(tensor) != layout[name]:
                raise ValueError(
                    f"tensor {name!r} changed from {layout[name]} to {_find_layout(tensor)}"
                )
            if isinstance(tensor, Encoded):
                file.writelines(part.data for part in tensor.parts(order))
            else:
                file.write((tensor if order is None else tensor[order]).tobytes())
        _pad(file, alignment)


def _prepare_tensors(
    tensors: Mapping[str, Any], metadata: Mapping[str, Any], names: str | None
) -> Iterator[tuple[str, "Encoded | np.ndarray", np.ndarray | None]]:
    """Yield the tensors to write, in triples: a GGUF name, the tensor and the order of its rows.

    The order lists the row of the tensor for each row of the file. None means the same order. The
    arguments are as in `write_gguf`.
    """
    stored: dict[str, str | list[str]] = {name: name for name in tensors}
    if names == "huggingface":
        stored = stored_names(metadata, tensors)
    elif names is not None:
        raise ValueError(f"names must be 'huggingface' or None, not {names!r}")
    for name, of in stored.items():
        if isinstance(of, str):
            value = _check_array(of, tensors[of])
        else:
            experts = [_check_array(expert, tensors[expert]) for expert in of]
            if len({(jax.tree.structure(x), x.shape, x.dtype) for x in experts}) > 1:
                raise ValueError(f"the experts of {name!r} differ in shape or format")
            value = jax.tree.map(lambda *leaves: np.stack(leaves), *experts)
        order = None
        if names is not None:
            order = order_of_rows(name, value.shape, metadata)
            if value.ndim == 1 and value.dtype.name in ("float16", "bfloat16"):
                value = value.astype(np.float32)
        factors = None
        if isinstance(value, QArray) and name.endswith(".weight"):
            value, factors = without_factors(value)
        encoded = _encode_tensor(name, value)
        yield name, encoded, None if order is None else np.argsort(order)
        if factors is not None:
            # GGUF stores the factors of NVFP4 scales as a second tensor.
            yield f"{name.removesuffix('weight')}scale", factors, None


def _find_layout(tensor: "Encoded | np.ndarray") -> tuple[int, tuple[int, ...]]:
    """Return the number of the GGUF type of a tensor, and its shape."""
    if isinstance(tensor, Encoded):
        return tensor.type.number, tensor.q.shape
    return _NUMBER_OF[tensor.dtype], tensor.shape


def _check_array(name: str, value: Any) -> "QArray | np.ndarray":
    if isinstance(value, QArray):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        with contextlib.suppress(TypeError):  # of a key, and of what is traced
            array = np.asarray(value)
            return array.astype(array.dtype.newbyteorder("="), copy=False)
    raise TypeError(
        f"tensor {name!r} is a {type(value).__name__}, but GGUF can hold only QArrays and dense "
        "arrays: convert it, for example with vn.materialise"
    )


def _encode_tensor(name: str, value: "QArray | np.ndarray") -> "Encoded | np.ndarray":
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"names in GGUF have at most {MAX_NAME_BYTES} bytes: shorten {name!r}")
    if value.ndim > MAX_AXES:
        raise ValueError(
            f"tensor {name!r} has shape {value.shape}, but GGUF has at most {MAX_AXES} axes"
        )
    if isinstance(value, QArray):
        try:
            return encode(value)
        except ValueError as error:
            raise ValueError(
                f"GGUF cannot hold tensor {name!r}, a QArray of {value.qtype} {list(value.shape)} "
                f"in tiles of {list(value.tile_shape)}: {error}. Quantize it accordingly "
                "(vn.quant.Rule has tile_size, tile_axis and scale_dtype='float16'), or save "
                "vn.materialise of it"
            ) from None
    if value.dtype not in _NUMBER_OF:
        raise ValueError(
            f"tensor {name!r} is {value.dtype.name}, but GGUF has only "
            f"{', '.join(dtype.name for dtype in _NUMBER_OF)}: convert it with astype"
        )
    return value


def _make_header(
    metadata: Mapping[str, Any], layout: Mapping[str, tuple[int, tuple[int, ...]]], alignment: int
) -> bytes:
    header = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(layout), len(metadata))]
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"keys of metadata must be strings, not {key!r}")
        try:
            header += [write_string(key), write_value(value)]
        except TypeError as error:
            raise TypeError(f"metadata {key!r}: {error}") from None
    offset = 0
    for name, (type, shape) in layout.items():
        header += [write_string(name), struct.pack("<I", len(shape))]
        header.append(struct.pack(f"<{len(shape)}Q", *reversed(shape)))
        header.append(struct.pack("<IQ", type, offset))
        offset = align(offset + nbytes_of(shape, type), alignment)
    return b"".join(header)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _is_gguf(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
