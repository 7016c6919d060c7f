"""The arrays of a program, and the indices of their entries.

A rule reads an operand with `LoopNest.read`, which calls `ArrayExpr.at` and gets an expression for
one entry. The operand is a `Buffer` in memory, or a `LazyArray`, whose entries are computed in the
loop that reads them. A chain of lazy arrays becomes one expression in that loop.

An `Index` is linear in loop variables, so that loops over reshaped arrays need no division.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import storage

if TYPE_CHECKING:
    from .loop_nest import LoopNest


# Indices.


@dataclass(frozen=True, order=True, slots=True)
class LoopVariable:
    """An integer variable of the generated code, with a value from 0 to `extent - 1`."""

    name: str
    extent: int


@dataclass(frozen=True, slots=True)
class Index:
    """An index or a position in the generated code: a linear function of loop variables.

    Its coefficients are integers. `str` gives its expression in the generated code.

    >>> from veneer.numba.codegen.arrays import Index, LoopVariable
    >>> i = Index.from_variable(LoopVariable("i", 8))
    >>> str(i * 64 + 3)
    'i * 64 + 3'
    """

    terms: tuple[tuple[LoopVariable, int], ...] = ()
    constant: int = 0

    @staticmethod
    def from_variable(variable: LoopVariable) -> "Index":
        """Return the index that equals a variable.

        If its extent is 1, the variable is always 0, and so is the index.
        """
        return Index(((variable, 1),)) if variable.extent != 1 else Index()

    def __add__(self, other: "Index | int") -> "Index":
        if not isinstance(other, Index):
            return Index(self.terms, self.constant + int(other))
        factors = dict(self.terms)
        for variable, factor in other.terms:
            factors[variable] = factors.get(variable, 0) + factor
        return _index(factors, self.constant + other.constant)

    __radd__ = __add__

    def __sub__(self, other: "Index | int") -> "Index":
        return self + other * -1

    def __rsub__(self, other: int) -> "Index":
        return self * -1 + other

    def __mul__(self, factor: int) -> "Index":
        factor = int(factor)  # also of NumPy integers
        terms = tuple(
            (variable, coefficient * factor) for variable, coefficient in self.terms if factor
        )
        return Index(terms, self.constant * factor)

    __rmul__ = __mul__

    def factor(self, variable: LoopVariable) -> int:
        """Return the coefficient of a variable."""
        return dict(self.terms).get(variable, 0)

    def merge_variables(
        self, outer: LoopVariable, inner: LoopVariable, merged: LoopVariable
    ) -> "Index":
        """Replace two variables by one variable equal to `outer * inner.extent + inner`."""
        factors = dict(self.terms)
        factors.pop(outer, 0)
        factor = factors.pop(inner, 0)
        return _index(factors | ({merged: factor} if factor else {}), self.constant)

    @property
    def smallest(self) -> int:
        """The smallest value of the index over all values of its loop variables."""
        return self.constant + sum(min(0, f * (v.extent - 1)) for v, f in self.terms)

    @property
    def largest(self) -> int:
        """The largest value of the index over all values of its loop variables."""
        return self.constant + sum(max(0, f * (v.extent - 1)) for v, f in self.terms)

    def __str__(self) -> str:
        terms = [v.name if f == 1 else f"{v.name} * {f}" for v, f in self.terms]
        if self.constant or not terms:
            terms.append(str(self.constant))
        return " + ".join(terms)


def _index(factors: dict[LoopVariable, int], constant: int) -> Index:
    terms = sorted(((v, f) for v, f in factors.items() if f), key=lambda term: -abs(term[1]))
    return Index(tuple(terms), constant)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in entries."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def flatten_index(index: Iterable[Index], shape: Sequence[int]) -> Index:
    """Return the position in memory of the entry at `index` of a C-contiguous array."""
    return sum((i * stride for i, stride in zip(index, strides_of(shape), strict=True)), Index())


def unflatten_index(position: Index, shape: Sequence[int]) -> tuple[Index, ...] | None:
    """Return the index of the entry at `position` of a C-contiguous array with the given shape.

    Return None if this index is not linear in the loop variables, so that it needs a division.
    """
    index = []
    rest = position
    for stride, extent in zip(strides_of(shape), shape, strict=True):
        if extent == 1:
            index.append(Index())
            continue
        quotient = _index({v: f // stride for v, f in rest.terms if f % stride == 0}, 0)
        quotient += rest.constant // stride if rest.constant >= 0 else 0
        rest = rest - quotient * stride
        if not (rest.smallest >= 0 and rest.largest < stride and quotient.largest < extent):
            return None
        index.append(quotient)
    return tuple(index)


def loop_variable_names() -> Iterable[str]:
    """Yield names of loop variables: i, j, k, ..., then i1, j1, ..."""
    yield from "ijklmn"
    for number in itertools.count(1):
        yield from (f"{letter}{number}" for letter in "ijklmn")


# Arrays.


@dataclass(eq=False)
class Memory:
    """A block of memory of a program, with `size` entries.

    `kind` is "input" or "constant" (read-only), "output" (returned to the caller), or "work"
    (scratch memory of one call). If `alias` is set, the block is part of the memory of that buffer.
    """

    dtype: np.dtype
    size: int
    kind: str = "work"
    name: str = ""
    alias: "Buffer | None" = None

    @property
    def nbytes(self) -> int:
        """The size of the block in bytes."""
        return self.size * storage.stored_dtype(self.dtype).itemsize


class ArrayExpr:
    """The base class of the arrays in a program, which have a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def at(self, k: "LoopNest", index: tuple[Index, ...]) -> str:
        """Return an expression of the generated code for the entry at `index`.

        `k` is the kernel that reads the entry. Statements that the expression needs are written to
        it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Buffer(ArrayExpr):
    """A C-contiguous array in memory.

    `offset` is an expression of the generated code: the position of its first entry in `memory`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    memory: Memory
    offset: str = "0"

    def at(self, k: "LoopNest", index: tuple[Index, ...]) -> str:
        """Write a statement to `k` that loads an entry into a variable. Return its name."""
        return k.load(self, index)

    def reshape(self, shape: tuple[int, ...]) -> "Buffer":
        """Return the same memory with another shape."""
        return Buffer(tuple(shape), self.dtype, self.memory, self.offset)

    def part(self, index: str) -> "Buffer":
        """Return the array `self[index]`, where `index` is an expression of the generated code."""
        size = math.prod(self.shape[1:])
        start = f"{index} * {size}" if size != 1 else index
        offset = start if self.offset == "0" else f"{self.offset} + {start}"
        return Buffer(self.shape[1:], self.dtype, self.memory, offset)


@dataclass(eq=False)
class LazyArray(ArrayExpr):
    """An array whose entries are computed by the loops that read them.

    `entry` returns an expression for the entry at an index, and writes statements to the loop nest
    if necessary. `cost` is about the number of instructions per entry, including lazy operands, and
    0 for a view. `reads` are all lazy arrays that an entry depends on. `name` is the primitive that
    made the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    entry: Callable[["LoopNest", tuple[Index, ...]], str]
    cost: int = 0
    reads: frozenset[ArrayExpr] = field(default_factory=frozenset)
    name: str = "copy"

    def at(self, k: "LoopNest", index: tuple[Index, ...]) -> str:
        """Return an expression that computes the entry at `index` in the kernel `k`."""
        return self.entry(k, index)


@dataclass(eq=False)
class UpdatedArray(LazyArray):
    """A copy of `base` in which `update(buffer, *operands)` has overwritten some entries.

    `update` writes to a buffer that contains `base`. A loop that carries the array updates it in
    place if nothing else needs `base`.
    """

    base: ArrayExpr = field(default=None)  # type: ignore[assignment]  # always set
    operands: tuple[ArrayExpr, ...] = ()
    update: Callable[..., None] = field(default=lambda *_: None)


def reshape(value: ArrayExpr, shape: tuple[int, ...]) -> ArrayExpr | None:
    """Return an array with another shape.

    Return None if `value` is lazy, and an index of the result needs a division to become an index
    of `value`. Then `value` must be computed into memory first.
    """
    if isinstance(value, Buffer):
        return value.reshape(shape)
    names = zip(loop_variable_names(), shape, strict=False)
    index = tuple(Index.from_variable(LoopVariable(*axis)) for axis in names)
    if unflatten_index(flatten_index(index, shape), value.shape) is None:
        return None

    def entry(k: "LoopNest", index: tuple[Index, ...]) -> str:
        position = flatten_index(index, shape)
        inner = unflatten_index(position, value.shape)
        if inner is None:
            inner = tuple(
                k.variable(f"({position}) // {stride} % {extent}", extent)
                for stride, extent in zip(strides_of(value.shape), value.shape, strict=True)
            )
        return k.read(value, inner)

    cost = value.cost if isinstance(value, LazyArray) else 0
    return LazyArray(shape, value.dtype, entry, cost, lazy_arrays_in(value), "reshape")


def lazy_arrays_in(*values: ArrayExpr) -> frozenset[ArrayExpr]:
    """Return all lazy arrays among `values` and their operands."""
    lazy: set[ArrayExpr] = set()
    for value in values:
        if isinstance(value, LazyArray):
            lazy |= {value, *value.reads}
    return frozenset(lazy)


def scalar_expr(text: str, dtype: np.dtype) -> LazyArray:
    """Return a lazy array of rank 0 whose entry is the expression `text` of the generated code."""
    return LazyArray((), dtype, lambda k, index: text)
