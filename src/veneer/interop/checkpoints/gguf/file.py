"""`GgufFile`: the tensors of a GGUF file, read one at a time, each as one packed array."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ....quant import QArray
from .blocks import BLOCK_TYPES, DENSE_TYPES
from .config import huggingface_config
from .container import Entry, mapped, read_header, type_layout
from .names import Origin, names_of, order_of_rows
from .tensors import decode, with_factors

# By what the wavelengths of the rotary embedding are longer.
_ROPE_FACTORS = "rope_freqs.weight"

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile:
    """The tensors of a GGUF file, or of one in parts `-00001-of-0000N.gguf`.

    Opening maps the files into memory and reads what stands before the tensors; `read` reads one
    tensor. Use it as a context manager.

    **Arguments:**

    - `path`: the file; of one in parts, any of them.
    - `names`: None for GGUF's names, or "huggingface" for those of the model's own checkpoint, in
      which the rows of queries and keys are in another order, too, and experts are a tensor each.
      Tensors that are not in such a checkpoint (`rope_freqs.weight`) keep GGUF's.

    A tensor `*.scale` beside a `*.weight` in NVFP4 is a part of that, and none for itself.

    **Attributes:**

    - `metadata`: a dict of what the file says beside its tensors, tokenizer included. Numbers are
      Python's or NumPy's, arrays of numbers are NumPy's, and others lists.
    - `config`: of that, what `config.json` has; see `huggingface_config`.

    **Raises:** `FileNotFoundError` where there is no file, or a part is missing. `ValueError`, in
    one line that names the file, where it is truncated or no GGUF file of version 2 or 3; where the
    names of its architecture are not known.

    >>> import tempfile, numpy as np, veneer as vn
    >>> from veneer.interop.checkpoints.gguf import GgufFile, write_gguf
    >>> w = vn.quant.quantize(np.ones((4, 32), np.float16), "int8", channelwise_axes=[0])
    >>> path = tempfile.mkdtemp() + "/model.gguf"
    >>> write_gguf(path, {"w": w}, {"general.architecture": "mine"})
    >>> with GgufFile(path) as file:
    ...     file.metadata["general.architecture"], file.types(), file.read("w").tile_shape
    ('mine', {'w': 'Q8_0'}, (1, 32))
    """

    def __init__(self, path: str | os.PathLike[str], *, names: str | None = None):
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, tuple[np.ndarray, Entry]] = {}  # with the file's bytes
        self._open()
        self._factors = self._factors_of_nvfp4()
        apart = self._entries.keys() - self._factors.values()
        shapes = {name: x.shape for name, (_, x) in self._entries.items() if name in apart}
        self._origins = {name: Origin(name) for name in shapes}
        if names == "huggingface":
            self._origins = _said_of(self.path, names_of, self.metadata, shapes)
        elif names is not None:
            raise ValueError(f"names must be 'huggingface' or None, not {names!r}")

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
        """Adds the tensors of one file, and returns its metadata."""
        content = mapped(path)
        metadata, entries = _said_of(path, read_header, content)
        if twice := self._entries.keys() & entries.keys():
            raise ValueError(f"tensor {min(twice)!r} is in {path} and in another part")
        self._entries |= {name: (content, entry) for name, entry in entries.items()}
        return metadata

    def _factors_of_nvfp4(self) -> dict[str, str]:
        """The tensors that the scales of others are times, by the names of these."""
        factors = {}
        for name, (_, entry) in self._entries.items():
            beside = f"{name.removesuffix('weight')}scale"
            if type_layout(entry.type)[0] == "NVFP4" and beside in self._entries:
                factors[name] = beside
        return factors

    family = "gguf"

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *exception: object) -> None:
        # What is mapped is let go with the last array that is read from it: none is handed out.
        self._entries = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)

    def __contains__(self, name: object) -> bool:
        return name in self._origins

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` of the model would say; see `huggingface_config`."""
        factors = None
        if _ROPE_FACTORS in self._entries:
            factors = _read(*self._entries[_ROPE_FACTORS])
        config = _said_of(self.path, huggingface_config, self.metadata, rope_factors=factors)
        return config | {"tie_word_embeddings": "output.weight" not in self._entries}

    def types(self) -> dict[str, str]:
        """Returns GGUF's name of the type of each tensor, as Q4_K, by name."""
        return {name: type_layout(self._find(name)[1].type)[0] for name in self}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of the values of each tensor, by name."""
        return {name: self._find(name)[1].shape for name in self}

    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each tensor that is stored dense, by name."""
        entries = {name: self._find(name)[1] for name in self}
        return {
            name: jax.ShapeDtypeStruct(entry.shape, DENSE_TYPES[entry.type][1])
            for name, entry in entries.items()
            if entry.type in DENSE_TYPES
        }

    def _find(self, name: str) -> tuple[np.ndarray, Entry]:
        """The bytes of the file that has a tensor, and where it is there."""
        stored, expert = self._origins[name]
        content, entry = self._entries[stored]
        if expert is None:
            return content, entry
        size = entry.nbytes // entry.shape[0]
        return content, Entry(entry.type, entry.shape[1:], entry.start + expert * size, size)

    def read(self, name: str) -> np.ndarray | QArray:
        """Reads one tensor, to the bit: a NumPy array where it is stored dense, else a QArray.

        A QArray stands for float32, as the file's values are worth: `[out, in]` for a matrix.

        **Raises:** `KeyError` for a name that is not there. `ValueError` for a type of blocks that
        is not read here, and for blocks with scales that are no number.
        """
        content, entry = self._find(name)
        stored, expert = self._origins[name]
        try:
            order = None
            if name != stored:
                order = order_of_rows(stored, entry.shape, self.metadata)
            value = _read(content, entry, order)
            if isinstance(value, QArray) and stored in self._factors:
                factors = _read(*self._entries[self._factors[stored]])
                value = with_factors(value, factors, expert)
            return value
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name!r}: {error}") from None


def _read(
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


def _said_of(path: Path, function: Any, *args: Any, **options: Any) -> Any:
    """What a function gives, whose errors are said of a file."""
    try:
        return function(*args, **options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
