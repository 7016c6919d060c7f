"""Folders and files of named tensors: read one at a time, written in shards."""

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..quant import Packing, QArray, get_format
from . import manifest
from .tensor_file import SHARD_BYTES, WRITTEN_WITH, ShardWriter, TensorFile

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class TensorFolder:
    """The tensors of a safetensors file, a Hugging Face folder, or a folder that veneer wrote.

    Opening reads the headers alone; `read` reads one tensor. Use it as a context manager.

    **Arguments:**

    - `path`: a `.safetensors` file, or a folder with one, or with shards and their index.
    - `verify`: whether `veneer.json`, now, and each tensor, when it is read, must have the checksum
      that `veneer.json` gives.

    **Raises:** `FileNotFoundError` where there is nothing; `ValueError`, in one line that names the
    file, where it is truncated, pickled, or something else altogether, and with `verify` where
    there are no checksums.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = False):
        self.path = Path(path)
        self._verify = verify
        self._handles = contextlib.ExitStack()
        self._file_of: dict[str, TensorFile] = {}  # by safetensors name
        self.manifest: manifest.Manifest
        try:
            self._open()
        except BaseException:
            self._handles.close()
            raise

    def _open(self) -> None:
        weight_map = _weight_map(self.path)
        for file, expected in weight_map.items():
            handle = self._handles.enter_context(TensorFile(file))
            names = set(handle)
            if twice := names & self._file_of.keys():
                raise ValueError(f"tensor {min(twice)!r} is in {file} and in another shard")
            if expected is not None and names != expected:
                name = min(names ^ expected)
                raise ValueError(f"{file} and the index next to it disagree about tensor {name!r}")
            self._file_of |= dict.fromkeys(names, handle)
        described = self.path / manifest.FILE_NAME
        if self.is_ours:
            self.manifest = manifest.read(described, verify=self._verify)
            self._check_stored()
        elif self._verify:
            raise no_checksums(self.path)
        else:
            entries = {name: self._dense_entry(name) for name in sorted(self._file_of)}
            self.manifest = manifest.Manifest(entries)

    def _is_packed(self, entry: manifest.DenseEntry) -> bool:
        return self._file_of[entry.tensor].headers[entry.tensor].is_packed

    @property
    def is_ours(self) -> bool:
        """Whether veneer wrote it, so that `veneer.json` says how each tensor is stored."""
        return self.path.is_dir() and (self.path / manifest.FILE_NAME).exists()

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers of the files say besides their tensors."""
        return {
            k: text for file in set(self._file_of.values()) for k, text in file.metadata.items()
        }

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.entries)

    def __len__(self) -> int:
        return len(self.manifest.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.entries

    def dense_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each tensor that is stored dense, by name."""
        return {
            name: jax.ShapeDtypeStruct(tuple(entry.shape), np.dtype(entry.dtype))
            for name, entry in self.manifest.entries.items()
            if isinstance(entry, manifest.DenseEntry) and not self._is_packed(entry)
        }

    def read(self, name: str) -> np.ndarray | QArray:
        """Reads one tensor, to the bit: a NumPy array where it is stored dense, else a QArray of
        them.

        **Raises:** `ValueError` where what is stored is not what `veneer.json` says, and, if this
        was opened with `verify`, where its bytes are not those that were written.
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
                return _float4(self._read_stored(entry.tensor))
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

    def _check_stored(self) -> None:
        stored = {name for entry in self.manifest.entries.values() for name in entry.stored()}
        if missing := stored - set(self._file_of):
            raise ValueError(
                f"{self.path}: tensor {min(missing)!r} of {manifest.FILE_NAME} is missing"
            )


def _float4(packed: np.ndarray) -> QArray:
    """Floats of 4 bits as they are packed in a file, worth what they are."""
    one = np.ones([1] * packed.ndim, np.float32)
    packing = Packing(-1, 2 * packed.shape[-1])
    return QArray.from_packed(packed, one, qtype="float4_e2m1fn", packing=packing)


def no_checksums(path: Path) -> ValueError:
    """The error that nothing can be verified there."""
    return ValueError(
        f"{path} has no checksums to verify: only folders that veneer saved have them, in "
        f"{manifest.FILE_NAME}"
    )


def as_jax(leaf: Any) -> Any:
    """Makes a JAX array of NumPy's where it holds the same bits, which of 64 without x64 it does
    not."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    exact = jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
    return jnp.asarray(leaf) if exact else leaf


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8) if array.dtype.name in manifest.BYTE_FLOATS else array


def _from_bytes(array: np.ndarray, dtype: str | None) -> np.ndarray:
    return array if dtype is None else array.view(jnp.dtype(dtype))


class FolderWriter:
    """Writes named tensors into `folder`, holding one shard of at most `shard_bytes` in memory.

    **Arguments:**

    - `folder`: an existing, empty folder; see `write_aside`.
    - `names`: the names of all tensors that will come, so that the names of the codes and scales of
      one cannot be those of another.
    - `beside`: what else was written into the folder, so that all of it may be overwritten.
    - `shard_bytes`: a tensor larger than this has a file of its own.
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
        # The one name that the file format itself has taken.
        self._taken = {*names, "__metadata__"}
        metadata = {WRITTEN_WITH: json.dumps(sorted(beside))} if beside else None
        self._shards = ShardWriter(folder, metadata=metadata, shard_bytes=shard_bytes)
        self._entries: dict[str, manifest.Entry] = {}
        self._checksums: dict[str, str] = {}

    def add(self, name: str, value: np.ndarray | jax.Array | QArray) -> None:
        """Writes one tensor: dense arrays `[...]` of a dtype that the file format has, or a
        QArray."""
        entry: manifest.Entry
        arrays: dict[str, Any] = {}
        if isinstance(value, QArray):
            entry = self._quantized_entry(name, value, arrays)
        else:
            stored_name = self._unused(name) if name == "__metadata__" else name
            arrays = {stored_name: value}
            entry = manifest.DenseEntry(stored_name, list(value.shape), value.dtype.name)
        self._entries[name] = entry
        contiguous = {k: _as_bytes(np.asarray(x, order="C")) for k, x in arrays.items()}
        self._checksums |= {k: manifest.checksum(x) for k, x in contiguous.items()}
        self._shards.add(contiguous)

    def _quantized_entry(
        self, name: str, value: QArray, arrays: dict[str, Any]
    ) -> manifest.QuantizedEntry:
        """Describes a QArray, and puts its leaves into `arrays`, under names of their own."""

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
        """Writes the last shard, the index of the shards if they are several, and `veneer.json`."""
        self._shards.finish()
        manifest.write(self._folder, manifest.Manifest(self._entries, tree, self._checksums))

    def _unused(self, wanted: str) -> str:
        while wanted in self._taken:
            wanted += "_"
        self._taken.add(wanted)
        return wanted


def _weight_map(path: Path) -> dict[Path, set[str] | None]:
    """Finds the safetensors files of `path`, each with the names that an index gives, or None."""
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
    """Whether files, in order of their names, are the shards of one model, which say how many."""
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
        # An index from elsewhere must not lead out of its folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} is damaged: {file!r} is not the name of a file")
        names = shards.setdefault(index.with_name(file), set())
        assert names is not None
        names.add(name)
    return shards
