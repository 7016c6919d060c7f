"""Values of a program: arrays that are in memory, and arrays that are computed where they are read.

Both give an expression for an entry at an index, so a rule reads its operands without asking which
they are. A chain of lazy values is one expression in the loop that reads it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import storage
from .index import Index, flat, loop_index, strides_of, unflat

if TYPE_CHECKING:
    from .loop_nest import LoopNest


@dataclass(eq=False)
class Memory:
    """A piece of memory that a program works on, as a pointer to its first entry.

    `kind` says whose it is: "input" and "constant" are only read; "output" is returned, "work" is
    gone after the call.
    """

    dtype: np.dtype
    size: int
    kind: str = "work"
    name: str = ""
    alias: "Buffer | None" = None  # what a piece of work memory has become a part of

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.size * storage.stored_dtype(self.dtype).itemsize


class ArrayExpr:
    """What all values have: a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def at(self, k: "LoopNest", index: tuple[Index, ...]) -> str:
        """An expression for an entry."""
        raise NotImplementedError


@dataclass(frozen=True)
class Buffer(ArrayExpr):
    """An array in memory, row by row without gaps.

    `offset` is an expression of the program for the place of its first entry in the memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    memory: Memory
    offset: str = "0"

    def at(self, k: "LoopNest", index: tuple[Index, ...]) -> str:
        """Loads an entry."""
        return k.load(self, index)

    def reshaped(self, shape: tuple[int, ...]) -> "Buffer":
        """The same memory as an array of another shape."""
        return Buffer(tuple(shape), self.dtype, self.memory, self.offset)

    def part(self, index: str) -> "Buffer":
        """One of the arrays along the first axis, at an expression of the program."""
        size = math.prod(self.shape[1:])
        place = f"{index} * {size}" if size != 1 else index
        offset = place if self.offset == "0" else f"{self.offset} + {place}"
        return Buffer(self.shape[1:], self.dtype, self.memory, offset)


@dataclass(eq=False)
class LazyArray(ArrayExpr):
    """An array whose entries are computed where they are read.

    `entry` writes that, given a kernel and an index, and returns an expression. `cost` is about how
    many instructions an entry takes, what it reads included; nothing but a change of place costs 0.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    entry: Callable[["LoopNest", tuple[Index, ...]], str]
    cost: int = 0
    reads: frozenset[ArrayExpr] = field(default_factory=frozenset)  # all that it is computed of
    name: str = "copy"  # of the primitive whose result it is

    def at(self, k: "LoopNest", index: tuple[Index, ...]) -> str:
        """Computes an entry."""
        return self.entry(k, index)


@dataclass(eq=False)
class UpdatedArray(LazyArray):
    """A value of which some entries are others: `base`, in which `update` has put `operands`.

    `update` is given the array to write to, and the operands. It is done in place where nothing
    else needs `base`, which a loop of a program knows of what it carries.
    """

    base: ArrayExpr = field(default=None)  # type: ignore[assignment]  # it has one always
    operands: tuple[ArrayExpr, ...] = ()
    update: Callable[..., None] = field(default=lambda *_: None)


def reshaped(value: ArrayExpr, shape: tuple[int, ...]) -> ArrayExpr | None:
    """A value with another shape, or None where a lazy one needs to be computed first."""
    if isinstance(value, Buffer):
        return value.reshaped(shape)
    if unflat(flat(loop_index(shape), shape), value.shape) is None:
        return None

    def entry(k: "LoopNest", index: tuple[Index, ...]) -> str:
        place = flat(index, shape)
        return k.read(value, unflat(place, value.shape) or _divided(k, place, value.shape))

    cost = value.cost if isinstance(value, LazyArray) else 0
    return LazyArray(shape, value.dtype, entry, cost, parts(value), "reshape")


def _divided(k: "LoopNest", place: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
    return tuple(
        k.variable(f"({place}) // {stride} % {extent}", extent)
        for stride, extent in zip(strides_of(shape), shape, strict=True)
    )


def parts(*values: ArrayExpr) -> frozenset[ArrayExpr]:
    """All lazy values that values are computed of, with themselves."""
    lazy: set[ArrayExpr] = set()
    for value in values:
        if isinstance(value, LazyArray):
            lazy |= {value, *value.reads}
    return frozenset(lazy)


def number(text: str, dtype: np.dtype) -> LazyArray:
    """A number that is written so in a kernel."""
    return LazyArray((), dtype, lambda k, index: text)
