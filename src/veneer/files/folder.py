"""Read the named tensors of a safetensors file or folder one at a time, and write such a folder."""

import abc
import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..quant import Packing, QArray, get_format
from . import manifest
from .tensor_file import SHARD_BYTES, WRITTEN_WITH, ShardWriter, TensorFile

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_T = TypeVar("_T", bound="Checkpoint")


class Checkpoint(abc.ABC):
    """An open checkpoint, whose tensors are read one at a time.

    Use it as a context manager. Iterating over it yields the names of the tensors. Its subclasses
    read safetensors folders, folders that other libraries quantized, and GGUF files.
    """

    path: Path
    family: str | None = None  # the format of another library
    _names: Collection[str] = ()

    @abc.abstractmethod
    def read(self, name: str) -> Any:
        """Read one tensor: a NumPy array if it is stored dense, else an implicit array."""

    @abc.abstractmethod
    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a dict from the names of dense tensors to their shapes and dtypes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self: _T) -> _T:  # not `Self`, which beartype cannot check
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class TensorFolder(Checkpoint):
    """The named tensors of a safetensors file, a Hugging Face folder, or a folder of `vn.save`.

    Opening reads only the headers. `read` reads one tensor.

    **Arguments:**

    - `path`: a safetensors file, or a folder with one file or with shards and their index.
    - `verify`: whether to compare `veneer.json`, when it is opened, and each tensor, when it is
      read, with the checksums in `veneer.json`.

    **Raises:** `FileNotFoundError` if there are no tensors at `path`. `ValueError`, in one line
    that names the file, if a file is truncated, pickled or of another kind, and with `verify` if
    there are no checksums.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = False):
        self.path = Path(path)
        self._verify = verify
        self._handles = contextlib.ExitStack()
        self._file_of: dict[str, TensorFile] = {}  # by the name in the safetensors file
        self.manifest: manifest.Manifest
        try:
            self._open()
            self._names = self.manifest.entries
        except BaseException:
            self._handles.close()
            raise

    def _open(self) -> None:
        weight_map = _find_files(self.path)
        for file, expected in weight_map.items():
            handle = self._handles.enter_context(TensorFile(file))
            names = set(handle)
            if twice := names & self._file_of.keys():
                raise ValueError(f"tensor {min(twice)!r} is in {file} and in another shard")
            if expected is not None and names != expected:
                name = min(names ^ expected)
                raise ValueError(f"{file} and the index next to it disagree about tensor {name!r}")
            self._file_of |= dict.fromkeys(names, handle)
        if self.is_ours:
            self.manifest = manifest.read(self.path / manifest.FILE_NAME, verify=self._verify)
            stored = {name for entry in self.manifest.entries.values() for name in entry.stored()}
            if missing := stored - set(self._file_of):
                raise ValueError(
                    f"{self.path}: tensor {min(missing)!r} of {manifest.FILE_NAME} is missing"
                )
        elif self._verify:
            raise no_checksums(self.path)
        else:
            entries = {name: self._dense_entry(name) for name in sorted(self._file_of)}
            self.manifest = manifest.Manifest(entries)

    def _is_packed(self, entry: manifest.DenseEntry) -> bool:
        return self._file_of[entry.tensor].headers[entry.tensor].is_packed

    @property
    def is_ours(self) -> bool:
        """True if the folder has a `veneer.json`, so that Veneer wrote it."""
        return self.path.is_dir() and (self.path / manifest.FILE_NAME).exists()

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` entries of the headers of all files, merged."""
        return {
            k: text for file in set(self._file_of.values()) for k, text in file.metadata.items()
        }

    def close(self) -> None:
        """Close the files."""
        self._handles.close()

    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a dict from the names of dense tensors to their shapes and dtypes."""
        return {
            name: jax.ShapeDtypeStruct(tuple(entry.shape), np.dtype(entry.dtype))
            for name, entry in self.manifest.entries.items()
            if isinstance(entry, manifest.DenseEntry) and not self._is_packed(entry)
        }

    def read(self, name: str) -> np.ndarray | QArray:
        """Read one tensor: a NumPy array if it is stored dense, else a `QArray` of NumPy arrays.

        **Raises:** `ValueError` if the stored tensor does not match `veneer.json` or, with
        `verify`, if its checksum differs.
        """
        entry = self.manifest.entries[name]
        try:
            value = self._read_entry(entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: tensor {name!r} is damaged: {error}") from error
        if value.shape != tuple(entry.shape) or value.dtype != np.dtype(entry.dtype):
            raise ValueError(
                f"{self.path}: tensor {name!r} is stored as {value.dtype}{list(value.shape)}, but "
                f"{manifest.FILE_NAME} says {entry.dtype}{list(entry.shape)}. The files do not "
                "belong together: save the model again"
            )
        return value

    def _read_entry(self, entry: manifest.Entry) -> np.ndarray | QArray:
        if isinstance(entry, manifest.DenseEntry):
            if self._is_packed(entry):
                packed = self._read_stored(entry.tensor)
                one = np.ones([1] * packed.ndim, np.float32)
                packing = Packing(-1, 2 * packed.shape[-1])
                return QArray.from_packed(packed, one, qtype="float4_e2m1fn", packing=packing)
            narrow = entry.dtype if entry.dtype in manifest.BYTE_FLOATS else None
            return _from_bytes(self._read_stored(entry.tensor), narrow)
        code_dtype = get_format(entry.format).code_dtype.name
        packed = self._read_stored(entry.packed)
        minimum = None if entry.minimum is None else self._read_numbers(entry.minimum)
        return QArray.from_packed(
            _from_bytes(packed, code_dtype if code_dtype in manifest.BYTE_FLOATS else None),
            self._read_numbers(entry.scale, entry.scale_dtype),
            None if entry.zero_point is None else self._read_numbers(entry.zero_point),
            minimum=minimum,
            qtype=entry.format,
            packing=None if entry.packing is None else Packing(**entry.packing),
            dense_dtype=entry.dtype,
        )

    def _read_numbers(self, entry: str | manifest.QuantizedEntry, dtype: str | None = None) -> Any:
        if isinstance(entry, str):
            return _from_bytes(self._read_stored(entry), dtype)
        return self._read_entry(entry)

    def _read_stored(self, stored: str) -> np.ndarray:
        array = self._file_of[stored].read(stored)
        if self._verify:
            stated = (self.manifest.checksums or {}).get(stored)
            actual = manifest.checksum(array)
            if stated != actual:
                where = manifest.FILE_NAME
                raise ValueError(
                    f"the checksum of {stored!r} is {actual}, but {where} says {stated}"
                )
        return array

    def _dense_entry(self, name: str) -> manifest.DenseEntry:
        header = self._file_of[name].headers[name]
        dtype = "float32" if header.is_packed else header.dtype.name
        return manifest.DenseEntry(name, list(header.shape), dtype)


def no_checksums(path: Path) -> ValueError:
    """Return the error for `verify=True` and a checkpoint at `path` that has no checksums."""
    return ValueError(
        f"{path} has no checksums to verify: only folders that veneer saved have them, in "
        f"{manifest.FILE_NAME}"
    )


def as_jax(leaf: Any) -> Any:
    """Convert a NumPy array to a JAX array. If JAX would drop bits, return it unchanged.

    JAX drops bits of 64-bit dtypes unless `jax_enable_x64` is set.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    exact = jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
    return jnp.asarray(leaf) if exact else leaf


def _from_bytes(array: np.ndarray, dtype: str | None) -> np.ndarray:
    return array if dtype is None else array.view(jnp.dtype(dtype))


class FolderWriter:
    """A writer of named tensors into safetensors files, described by a `veneer.json`.

    It holds one shard in memory.

    **Arguments:**

    - `folder`: an existing, empty folder. See `write_aside`.
    - `names`: the names of all tensors that will be added. A `QArray` is stored as several
      tensors, such as "w.packed" and "w.scale". They get other names if these are taken.
    - `beside`: the names of other files in the folder. They are recorded, so that a later save with
      `overwrite` may replace the folder.
    - `shard_bytes`: the size limit of a file. A larger tensor has its own file.
    """

    def __init__(
        self,
        folder: Path,
        names: Collection[str],
        *,
        beside: Collection[str] = (),
        shard_bytes: int = SHARD_BYTES,
    ):
        self._folder = folder
        # `__metadata__` is a reserved name in safetensors files.
        self._taken = {*names, "__metadata__"}
        metadata = {WRITTEN_WITH: json.dumps(sorted(beside))} if beside else None
        self._shards = ShardWriter(folder, metadata=metadata, shard_bytes=shard_bytes)
        self._entries: dict[str, manifest.Entry] = {}
        self._checksums: dict[str, str] = {}

    def add(self, name: str, value: np.ndarray | jax.Array | QArray) -> None:
        """Add the tensor `name`: a `QArray`, or a dense array of a dtype that safetensors has."""
        entry: manifest.Entry
        arrays: dict[str, Any] = {}
        if isinstance(value, QArray):
            entry = self._quantized_entry(name, value, arrays)
        else:
            stored_name = self._unused(name) if name == "__metadata__" else name
            arrays = {stored_name: value}
            entry = manifest.DenseEntry(stored_name, list(value.shape), value.dtype.name)
        self._entries[name] = entry
        contiguous = {k: np.asarray(x, order="C") for k, x in arrays.items()}
        for k, x in contiguous.items():
            if x.dtype.name in manifest.BYTE_FLOATS:
                contiguous[k] = x.view(np.uint8)
        self._checksums |= {k: manifest.checksum(x) for k, x in contiguous.items()}
        self._shards.add(contiguous)

    def _quantized_entry(
        self, name: str, value: QArray, arrays: dict[str, Any]
    ) -> manifest.QuantizedEntry:
        """Return the `veneer.json` entry of a `QArray` called `name`.

        Add its leaves to `arrays`, a dict from names in the safetensors file.
        """

        def store(part: str, leaf: Any) -> str:
            stored = self._unused(f"{name}.{part}")
            arrays[stored] = leaf
            return stored

        def store_numbers(part: str, leaf: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, QArray):
                return self._quantized_entry(f"{name}.{part}", leaf, arrays)
            return store(part, leaf)

        return manifest.quantized_entry(
            value,
            packed=store("packed", value.packed),
            scale=store_numbers("scale", value.scale),
            zero_point=store_numbers("zero_point", value.zero_point),
            minimum=store_numbers("minimum", value.minimum),
        )

    def finish(self, tree: Any = None) -> None:
        """Write the last shard, the index if there are several shards, and `veneer.json`.

        **Arguments:**

        - `tree`: JSON that says how the tensors nest in a tree (from `tree_encoding.encode`), or
          None for a flat dict.
        """
        self._shards.finish()
        manifest.write(self._folder, manifest.Manifest(self._entries, tree, self._checksums))

    def _unused(self, wanted: str) -> str:
        while wanted in self._taken:
            wanted += "_"
        self._taken.add(wanted)
        return wanted


def _find_files(path: Path) -> dict[Path, set[str] | None]:
    """Return a dict from the safetensors files of a file or folder to the names of their tensors.

    The names are from the index of the folder. They are None without an index.

    **Raises:** `FileNotFoundError` if a folder has no safetensors file. `ValueError` if it has
    several models, or if there is only a pickled checkpoint.
    """
    if not path.is_dir():
        if path.suffix in PICKLED:
            raise ValueError(f"{path} is a pickled checkpoint: convert it to safetensors first")
        return {path: None}
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return _read_index(indices[0])
    if len(files) == 1 or (not indices and _are_all_shards(files)):
        return dict.fromkeys(files)
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{path} holds several models, or an index is missing: give one of {names}"
        )
    if pickled := sorted(file.name for file in path.iterdir() if file.suffix in PICKLED):
        raise ValueError(
            f"{path} holds a pickled checkpoint ({', '.join(pickled)}) and no safetensors: convert "
            "it to safetensors first"
        )
    inside = sorted({file.parent.name for file in path.glob("*/*.safetensors")})
    where = f": give one of its folders {', '.join(inside)}" if inside else ""
    raise FileNotFoundError(f"{path} holds no safetensors file{where}")


_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")


def _are_all_shards(files: list[Path]) -> bool:
    """Return whether `files`, sorted by their names, are all the shards of one model."""
    match = _SHARD.fullmatch(files[-1].name) if files else None
    if match is None:
        return False
    numbers = range(1, int(match[2]) + 1)
    expected = [f"{match[1]}-{i:05}-of-{match[2]}.safetensors" for i in numbers]
    return [file.name for file in files] == expected


def _read_index(index: Path) -> dict[Path, set[str] | None]:
    content = manifest.read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is damaged: it has no 'weight_map'")
    shards: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        # An index is untrusted input. It must not name files outside its folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} is damaged: {file!r} is not the name of a file")
        names = shards.setdefault(index.with_name(file), set())
        assert names is not None
        names.add(name)
    return shards
