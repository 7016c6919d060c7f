"""Generated programs run by Python, with every access of memory checked: for tests."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.program import Source
from ..maths.scalar import plain


class Checked:
    """Memory as generated code has it, a pointer, that refuses what is not within an array."""

    def __init__(self, entries: np.ndarray, start: int = 0):
        self.entries, self.start = entries, start

    def _place(self, index: Any) -> int:
        place = int(index) + self.start
        if not 0 <= place < len(self.entries):
            raise IndexError(f"{place} is not within an array of {len(self.entries)} entries")
        return place

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Checked(self.entries, self.start + index.start)
        return self.entries[self._place(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        if value.dtype != self.entries.dtype:
            raise TypeError(f"{value.dtype} is written to memory of {self.entries.dtype}")
        self.entries[self._place(index)] = value


def interpreted(source: Source) -> Callable[..., list[np.ndarray]]:
    """A function of NumPy arrays that runs a program in Python, and returns a list of results."""
    names: dict[str, Any] = {name: plain(f) for name, f in source.names.items()}
    names["np"] = np
    exec(source.text, names)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        sizes = iter(source.work_sizes)
        names["memory"] = lambda work, offset, like: Checked(_garbage(next(sizes), like))
        inputs = [_flat(x) for x in arrays]
        results = [
            np.empty(shape, memory.dtype)
            for memory, shape in zip(source.outputs, source.output_shapes, strict=True)
        ]
        constants = [_flat(x) for x in source.constants]
        with np.errstate(all="ignore"):
            names["program"](*inputs, *map(_flat, results), *constants, None)
        return results

    return run


def _flat(array: np.ndarray) -> Checked:
    return Checked(array.reshape(-1).view(storage.stored_dtype(array.dtype)))


def _garbage(size: int, like: Any) -> np.ndarray:
    """Memory that nobody has written to."""
    return np.full(size * like.itemsize, 0xA5, np.uint8).view(like.dtype)
