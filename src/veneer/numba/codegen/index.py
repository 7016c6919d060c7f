"""Indices as sums of loop variables: what lets loops over reshaped arrays stay plain loops."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class LoopVariable:
    """A name in the generated code for an integer from 0 to `extent - 1`."""

    name: str
    extent: int


@dataclass(frozen=True, slots=True)
class Index:
    """A whole number: a constant, and variables times constants.

    In a string it is an expression of the generated code.

    >>> from veneer.numba.codegen.index import Index, LoopVariable
    >>> i = Index.of(LoopVariable("i", 8))
    >>> str(i * 64 + 3)
    'i * 64 + 3'
    """

    terms: tuple[tuple[LoopVariable, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(variable: LoopVariable) -> "Index":
        """The index that is a variable."""
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
        factor = int(factor)  # of NumPy, perhaps
        terms = tuple(
            (variable, coefficient * factor) for variable, coefficient in self.terms if factor
        )
        return Index(terms, self.constant * factor)

    __rmul__ = __mul__

    def factor(self, variable: LoopVariable) -> int:
        """What a variable is multiplied by."""
        return dict(self.terms).get(variable, 0)

    def merged(self, outer: LoopVariable, inner: LoopVariable, one: LoopVariable) -> "Index":
        """With one variable in the place of two, `outer * inner.extent + inner`."""
        factors = dict(self.terms)
        factors.pop(outer, 0)
        factor = factors.pop(inner, 0)
        return _index(factors | ({one: factor} if factor else {}), self.constant)

    @property
    def smallest(self) -> int:
        """The least that it can be."""
        return self.constant + sum(min(0, f * (v.extent - 1)) for v, f in self.terms)

    @property
    def largest(self) -> int:
        """The most that it can be."""
        return self.constant + sum(max(0, f * (v.extent - 1)) for v, f in self.terms)

    def __str__(self) -> str:
        parts = [v.name if f == 1 else f"{v.name} * {f}" for v, f in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


def _index(factors: dict[LoopVariable, int], constant: int) -> Index:
    terms = sorted(((v, f) for v, f in factors.items() if f), key=lambda term: -abs(term[1]))
    return Index(tuple(terms), constant)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in entries, of an array whose last axis is dense and which has no gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def flat(index: Iterable[Index], shape: Sequence[int]) -> Index:
    """The place of an entry among all entries of an array, row by row."""
    return sum((i * stride for i, stride in zip(index, strides_of(shape), strict=True)), Index())


def unflat(place: Index, shape: Sequence[int]) -> tuple[Index, ...] | None:
    """The index of the entry at a place, or None where that takes division."""
    index = []
    rest = place
    for stride, extent in zip(strides_of(shape), shape, strict=True):
        if extent == 1:
            index.append(Index())
            continue
        whole = _index({v: f // stride for v, f in rest.terms if f % stride == 0}, 0)
        whole += rest.constant // stride if rest.constant >= 0 else 0
        rest = rest - whole * stride
        if not (rest.smallest >= 0 and rest.largest < stride and whole.largest < extent):
            return None
        index.append(whole)
    return tuple(index)


def loop_index(shape: Sequence[int]) -> tuple[Index, ...]:
    """The index of an entry in loops over all axes of a shape."""
    return tuple(Index.of(LoopVariable(*axis)) for axis in zip(all_names(), shape, strict=False))


def all_names() -> Iterable[str]:
    """Names of loop variables: i, j, k, ..., then i1, j1, ..."""
    yield from "ijklmn"
    for number in itertools.count(1):
        yield from (f"{letter}{number}" for letter in "ijklmn")
