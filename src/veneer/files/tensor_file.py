"""Read a safetensors file one tensor at a time, and write the safetensors files of a folder.

A header is untrusted input. When a file is opened, the size of each tensor is compared with its
shape, its dtype and the size of the file. Memory for a tensor is allocated only after that.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# The names of dtypes in safetensors, and in NumPy and ml_dtypes.
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

# Two values share a byte. The first is in the lower half, as in torch's float4_e2m1fn_x2.
FLOAT4 = "F4"
# safetensors defines the sizes of these dtypes, but not how values share bytes.
_FLOAT6 = ("F6_E2M3", "F6_E3M2")

METADATA = "__metadata__"
# The first bytes of a Git LFS pointer, a text file in place of one that was not fetched.
_POINTER = b"version "
# The limit of the reference implementation. Millions of tensors fit.
_MOST_HEADER_BYTES = 100_000_000
_MOST_AXES = 32  # NumPy takes 64


class TensorHeader(NamedTuple):
    """The header of one tensor: its shape, its dtype, and the place of its bytes in the file.

    `start` is an offset in bytes from the beginning of the file. In a tensor of `float4_e2m1fn`,
    two neighbors along the last axis of `shape` share a byte.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    nbytes: int

    @property
    def is_packed(self) -> bool:
        """True for float4, where two values share a byte."""
        return self.dtype == jnp.float4_e2m1fn


class TensorFile:
    """An open safetensors file. Use it as a context manager. Iterating yields the tensor names.

    **Arguments:**

    - `path`: the file.

    **Raises:** `FileNotFoundError` if there is no file at `path`. `ValueError`, in one line, if the
    file is not a safetensors file, is truncated, or does not match its header.
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
        """Read one tensor into a new NumPy array. Packed float4 values become `uint8[..., bytes]`.

        **Raises:** `ValueError` if the file has been truncated since it was opened.
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
            raise self._invalid("its header does not end within it")
        try:
            content = json.loads(self._file.read(length), object_pairs_hook=distinct)
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise self._invalid(f"its header is not JSON: {reason}") from error
        if not isinstance(content, dict):
            raise self._invalid("its header is not an object")
        metadata = content.pop(METADATA, None) or {}
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise self._invalid(f"its {METADATA} is not an object of strings")
        headers = {name: self._header(name, fields) for name, fields in content.items()}
        end = 0
        for name, header in sorted(headers.items(), key=lambda item: item[1].start):
            if header.start != end:
                raise self._invalid(
                    f"tensor {name!r} does not begin at the end of the previous tensor"
                )
            end += header.nbytes
        if end != size - 8 - length:
            raise self._invalid(f"its tensors take {end} bytes, but it has {size - 8 - length}")
        begin = 8 + length
        return {k: x._replace(start=begin + x.start) for k, x in headers.items()}, metadata

    def _header(self, name: str, fields: Any) -> TensorHeader:
        keys = {"dtype", "shape", "data_offsets"}
        if not isinstance(fields, dict) or fields.keys() != keys:
            raise self._invalid(f"the header of tensor {name!r} must have the keys {sorted(keys)}")
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
            raise self._invalid(f"tensor {name!r} has an invalid shape or offsets")
        if dtype == FLOAT4:
            if not shape or shape[-1] % 2:
                raise self._invalid(f"tensor {name!r} of {dtype}{shape} needs an even last axis")
            item, nbytes = jnp.dtype(jnp.float4_e2m1fn), math.prod(shape) // 2
        else:
            item = jnp.dtype(DTYPES[dtype])
            nbytes = math.prod(shape) * item.itemsize
        if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            raise self._invalid(
                f"tensor {name!r} of {dtype}{shape} takes {nbytes} bytes, which its offsets do not"
            )
        return TensorHeader(tuple(shape), item, offsets[0], nbytes)

    def _invalid(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is not a safetensors file, or is truncated: {what}")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the key-value pairs of a JSON object. It serves as `object_pairs_hook`.

    **Raises:** `ValueError` if a key occurs twice (the `json` module would keep the last)
    or if a key is not valid Unicode text.
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
    """Return whether a string can be encoded as UTF-8. A lone surrogate cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_sizes(value: Any) -> bool:
    # NumPy's sizes must be less than 2**63.
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**62 for x in value)


# Large enough for few files, and small enough to hold a shard in memory.
SHARD_BYTES = 256 * 2**20

INDEX_NAME = "model.safetensors.index.json"

# A key of the header metadata in folders written in the format of another library. Its value lists
# the other files written with the tensors. `overwrite` replaces only folders whose files it lists.
WRITTEN_WITH = "veneer.written_with"


class ShardWriter:
    """A writer that splits named tensors into safetensors files of at most `shard_bytes` each.

    It holds one shard in memory.

    **Arguments:**

    - `folder`: an existing, empty folder.
    - `metadata`: entries for the `__metadata__` of each file's header.
    - `shard_bytes`: the size limit of a file. Tensors passed to one call of `add` always share a
      file, even if they are larger together.
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
        """Add a dict of tensors that belong together. They are written to the same file."""
        # `save_file` reads memory from its first byte on, whatever the strides.
        contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
        if self._shard and _nbytes(self._shard) + _nbytes(contiguous) > self._shard_bytes:
            self._write_shard()
        self._shard |= contiguous

    def finish(self) -> None:
        """Write the last shard, and an index if there are several shards."""
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
    # The final name contains the number of shards, which is known only at the end.
    return f"model-{number:05}.safetensors"
