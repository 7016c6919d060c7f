"""A safetensors file: its header checked as it is opened, and its tensors read one at a time.

A header comes from anywhere. So each tensor's bytes must be as many as its shape and dtype say, and
all of them the file's, before any memory is taken for one.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# The format's names of dtypes that NumPy has, or ml_dtypes adds.
DTYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}

# Two in a byte, the first in the lower half, as torch's float4_e2m1fn_x2 has them.
FLOAT4 = "F4"
# Of these the format says how many bytes they take, and not how they lie in them.
_FLOAT6 = ("F6_E2M3", "F6_E3M2")

METADATA = "__metadata__"
# As the text begins that is in the place of a file that Git LFS did not fetch.
_POINTER = b"version "
# What the format's reference takes at most: an index of millions of tensors.
_MOST_HEADER_BYTES = 100_000_000
_MOST_AXES = 32  # NumPy takes 64


class TensorHeader(NamedTuple):
    """What the header says of a tensor; `start` counts bytes from the beginning of the file.

    Of `float4_e2m1fn` two of the last axis of `shape` are a byte.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    nbytes: int

    @property
    def is_packed(self) -> bool:
        """Whether values share bytes."""
        return self.dtype == jnp.float4_e2m1fn


class TensorFile:
    """The tensors of one file, by name; a context manager.

    **Arguments:**

    - `path`: the file.

    **Raises:** `FileNotFoundError` where there is none, and `ValueError`, in one line, where it is
    no safetensors file, is truncated, or holds what its header does not say.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} does not exist")
        self._file = open(self.path, "rb")  # noqa: SIM115  # closed by __exit__
        try:
            self.headers, self.metadata = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor into memory of its own; what is packed as `uint8[..., bytes]`.

        **Raises:** `ValueError` where the file has become shorter meanwhile.
        """
        header = self.headers[name]
        data = np.empty(header.nbytes, np.uint8)
        self._file.seek(header.start)
        if self._file.readinto(data.data) != header.nbytes:
            raise ValueError(f"{self.path} ends within tensor {name!r}")
        if header.is_packed:
            return data.reshape(*header.shape[:-1], header.shape[-1] // 2)
        return data.view(header.dtype).reshape(header.shape)

    def _read_header(self) -> tuple[dict[str, TensorHeader], dict[str, str]]:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        length = int.from_bytes(self._file.read(8), "little")
        if length.to_bytes(8, "little") == _POINTER:
            raise ValueError(
                f"{self.path} is a Git LFS pointer: run 'git lfs pull' to download the file"
            )
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise self._alien("its header does not end within it")
        try:
            content = json.loads(self._file.read(length), object_pairs_hook=distinct)
        except (ValueError, RecursionError) as error:
            raise self._alien(f"its header is not JSON: {_first_line(error)}") from error
        if not isinstance(content, dict):
            raise self._alien("its header is not an object")
        metadata = content.pop(METADATA, None) or {}
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise self._alien(f"its {METADATA} is not an object of strings")
        headers = {name: self._header(name, fields) for name, fields in content.items()}
        end = 0
        for name, header in sorted(headers.items(), key=lambda item: item[1].start):
            if header.start != end:
                raise self._alien(
                    f"tensor {name!r} does not begin at the end of the previous tensor"
                )
            end += header.nbytes
        if end != size - 8 - length:
            raise self._alien(f"its tensors take {end} bytes, but it has {size - 8 - length}")
        begin = 8 + length
        return {k: x._replace(start=begin + x.start) for k, x in headers.items()}, metadata

    def _header(self, name: str, fields: Any) -> TensorHeader:
        keys = {"dtype", "shape", "data_offsets"}
        if not isinstance(fields, dict) or fields.keys() != keys:
            raise self._alien(f"the header of tensor {name!r} must have the keys {sorted(keys)}")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if dtype in _FLOAT6:
            raise ValueError(
                f"{self.path}: tensor {name!r} is {dtype}, but safetensors does not define how "
                "6-bit floats share bytes: store it as F8_E4M3, which has all their values, or as "
                "mxfp6-pack-quantized of compressed-tensors, which loads packed"
            )
        if not isinstance(dtype, str) or dtype not in (*DTYPES, FLOAT4):
            stated = " ".join(str(dtype).split())  # in one line, whatever it is
            raise ValueError(
                f"{self.path}: tensor {name!r} has dtype {stated:.20}; supported are "
                f"{', '.join(DTYPES)}, {FLOAT4}"
            )
        if not (_are_sizes(shape) and len(shape) <= _MOST_AXES and _are_sizes(offsets)):
            raise self._alien(f"tensor {name!r} has an invalid shape or offsets")
        if dtype == FLOAT4:
            if not shape or shape[-1] % 2:
                raise self._alien(f"tensor {name!r} of {dtype}{shape} needs an even last axis")
            of, nbytes = jnp.dtype(jnp.float4_e2m1fn), math.prod(shape) // 2
        else:
            of = jnp.dtype(DTYPES[dtype])
            nbytes = math.prod(shape) * of.itemsize
        if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            raise self._alien(
                f"tensor {name!r} of {dtype}{shape} takes {nbytes} bytes, which its offsets do not"
            )
        return TensorHeader(tuple(shape), of, offsets[0], nbytes)

    def _alien(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is not a safetensors file, or is truncated: {what}")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of pairs that a JSON parser has read.

    **Raises:** `ValueError` for a key that is there twice, of which parsers keep one without a
    word, and for one that is not text.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    for key in content:
        if not is_text(key):
            raise ValueError(f"the key {key!r} is not valid Unicode text")
    return content


def is_text(name: str) -> bool:
    """Return whether a string can be written as UTF-8, which half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_sizes(value: Any) -> bool:
    # NumPy's sizes end below 2**63.
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**62 for x in value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# Large enough for few files, small enough that a shard in memory is not what limits anyone.
SHARD_BYTES = 256 * 2**20

INDEX_NAME = "model.safetensors.index.json"

# In the header of each file of a folder as other libraries have it: the files beside the tensors
# that were written with them. It is how such a folder is known to be ours.
WRITTEN_WITH = "veneer.written_with"


class ShardWriter:
    """Writes tensors into `folder`, holding one shard of at most `shard_bytes` in memory.

    **Arguments:**

    - `folder`: an existing, empty folder.
    - `metadata`: what the header of each file says besides its tensors.
    - `shard_bytes`: tensors that come together and are larger than this have a file of their own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metadata: dict[str, str] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ):
        self._folder = folder
        self._metadata = metadata
        self._shard_bytes = shard_bytes
        self._shard: dict[str, np.ndarray] = {}
        self._shards: list[dict[str, int]] = []  # bytes of the tensors of each written file

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes tensors, which go into one file."""
        # `save_file` reads memory from its first byte on, whatever the strides.
        contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
        if self._shard and _nbytes(self._shard) + _nbytes(contiguous) > self._shard_bytes:
            self._write_shard()
        self._shard |= contiguous

    def finish(self) -> None:
        """Writes the last shard, and the index of the shards if they are several."""
        if self._shard or not self._shards:
            self._write_shard()
        count = len(self._shards)
        final = "model.safetensors" if count == 1 else "model-{:05}-of-{:05}.safetensors"
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(self._shards, start=1):
            name = final.format(i, count)
            os.rename(self._folder / _unfinished(i), self._folder / name)
            weight_map |= dict.fromkeys(shard, name)
        if count > 1:
            total = sum(sum(shard.values()) for shard in self._shards)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _write_shard(self) -> None:
        import safetensors.numpy  # here, since it takes time

        file = self._folder / _unfinished(len(self._shards) + 1)
        try:
            safetensors.numpy.save_file(self._shard, file, metadata=self._metadata)
        except safetensors.SafetensorError as error:  # a full disk, most likely
            raise OSError(f"{file}: {error}") from error
        # safetensors 0.8 makes files that only their owner may read, whatever the umask.
        file.chmod(self._folder.stat().st_mode & 0o666)
        self._shards.append({name: array.nbytes for name, array in self._shard.items()})
        self._shard = {}


def _nbytes(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _unfinished(number: int) -> str:
    # How many there will be is known at the end.
    return f"model-{number:05}.safetensors"
