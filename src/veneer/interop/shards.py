"""Safetensors files of a folder, each of as many tensors as memory holds well, and their index."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

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
