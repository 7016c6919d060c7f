"""What users are told of materialisation: events, the error, and the warning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: The weights that an operand is, or is made of: their paths. While a program is staged, numbers
#: stand for its operands, of which it is known when it is met what they are.
Source = tuple[str | int, ...]

#: In the place of the path of a weight that is neither in an argument nor captured.
FOUND = "an array that the program found"

#: The `how` of what an eager operation materialized before the program was called.
BEFORE_CALL = "before the call"


class MaterialiseError(TypeError):
    """An operand is to be made dense, which the policy in force forbids."""


class MaterialiseWarning(UserWarning):
    """An implicit array was made dense."""


class Operands(NamedTuple):
    """The operands of an event: their display text, sources, dense bytes, and which are caches."""

    shown: tuple[str, ...]
    sources: tuple[Source, ...]
    dense: tuple[int, ...]
    caches: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One primitive that met an implicit operand.

    `rule` is the file and line of the rule that ran, or None where none fitted; `how` is the way it
    went, or why none fitted, where that is known; `nbytes` the size of what that, or the lack of a
    rule, made dense; `line` the user's own.
    `weights` are the paths of the weights among the operands, in the arguments of the program, and
    `weight_nbytes` is what was made dense of those alone. Both include caches, and `cache_nbytes`
    is what was made dense of these. `no_kernel` is the reason why no kernel ran, if the size of an
    operand is.
    """

    primitive: str
    operands: tuple[str, ...]
    rule: str | None
    nbytes: int
    line: str
    how: str = ""
    sources: tuple[Source, ...] = ()  # of each operand
    dense: tuple[int, ...] = ()  # of each operand, the bytes that are made dense
    caches: tuple[bool, ...] = ()  # of each operand, whether programs write into it
    no_kernel: str = ""

    @property
    def made_dense(self) -> bool:
        """Whether an operand was made dense, all of it in memory."""
        return self.rule is None or self.nbytes > 0

    @property
    def weights(self) -> tuple[str, ...]:
        """The paths of the weights that were met, each once."""
        return paths_of(joined(self.sources))

    @property
    def weight_nbytes(self) -> int:
        """The bytes that were made dense of weights."""
        return sum(n for n, source in zip(self.dense, self.sources, strict=True) if source)

    @property
    def cache_nbytes(self) -> int:
        """The materialized bytes that belong to caches."""
        of_each = zip(self.dense, self.sources, self.caches, strict=True) if self.caches else ()
        return sum(n for n, source, is_cache in of_each if source and is_cache)

    @property
    def how_and_why(self) -> str:
        """The strategy of the rule, and the reason why it ran no kernel."""
        return ", ".join(filter(None, (self.how, self.no_kernel)))

    def met_by(self, sources: Sequence[Source], line: str) -> "Event":
        """This event of a staged program, as it is met with operands of these sources, there."""
        return replace(self, line=line, sources=tuple(resolved(s, sources) for s in self.sources))

    def __str__(self) -> str:
        of = f", of {', '.join(self.weights)}" if self.weights else ""
        met = f"{self.primitive}({', '.join(self.operands)}) at {self.line}{of}"
        if self.rule is not None:
            dense = f"{self.nbytes:,} bytes are made dense" if self.nbytes else ""
            return f"{met}: " + ", ".join(
                filter(None, (f"rule {self.rule}", self.how_and_why, dense))
            )
        why = f": {self.how}" if self.how else ""
        return f"{met}: no rule fits{why}, so {self.nbytes:,} bytes are made dense"


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths in a source, without numbers of operands."""
    return tuple(x for x in source if isinstance(x, str))


def resolved(source: Source, operands: Sequence[Source]) -> Source:
    """The source of what comes of the operands of a staged program, by those of the operands."""
    met = [operands[i] for i in source if isinstance(i, int)]
    return joined([*met, (FOUND,)] if FOUND in source else met)


def joined(sources: Sequence[Any]) -> Source:
    """The sources of several values, as that of what is made of them."""
    return tuple(dict.fromkeys(x for source in sources for x in source))
