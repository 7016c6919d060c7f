"""The statements of a program: calls of kernels on memory, in loops and under conditions.

And where in one piece of memory each array of a program has its place while it is needed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .values import Buffer, Memory

_ALIGNMENT = 64


@dataclass
class Statement:
    """A line, of text and of buffers, which are pointers; under it, what is in a block of its own.

    `note` says where in the user's program it comes from.
    """

    pieces: tuple["str | Buffer", ...]
    note: str = ""
    body: "list[Statement] | None" = None

    @property
    def memories(self) -> Iterator[Memory]:
        """What it works on itself."""
        return (pointed_at(x)[0] for x in self.pieces if isinstance(x, Buffer))

    @property
    def all_memories(self) -> set[Memory]:
        """What it works on, and what is in its block does."""
        return set(self.memories).union(*(inner.all_memories for inner in self.body or ()))


def pointed_at(buffer: Buffer) -> tuple[Memory, str]:
    """The memory of a buffer, and the place there of its first entry."""
    memory, offset = buffer.memory, buffer.offset
    while memory.alias is not None:
        whole = memory.alias
        offset = whole.offset if offset == "0" else f"{whole.offset} + {offset}"
        memory = whole.memory
    return memory, offset


@dataclass
class _Life:
    """The statements between which a piece of memory is needed."""

    first: int
    last: int


@dataclass
class Layout:
    """Where pieces of work memory are, in bytes from the start, and how many it takes in all."""

    offsets: dict[Memory, int] = field(default_factory=dict)
    nbytes: int = 0


def layout(statements: list[Statement]) -> Layout:
    """Finds a place for all work memory; pieces share one that are not needed at the same time."""
    lives: dict[Memory, _Life] = {}
    blocks: list[_Life] = []
    _number(statements, 0, lives, blocks)
    for block in blocks:
        for life in lives.values():
            # What is needed after a loop, all of its rounds may have written to.
            if block.first <= life.first <= block.last < life.last:
                life.first = block.first
    result = Layout()
    placed: list[Memory] = []
    for memory in sorted(lives, key=lambda memory: lives[memory].first):
        life = lives[memory]
        others = [x for x in placed if lives[x].last >= life.first and lives[x].first <= life.last]
        result.offsets[memory] = _first_gap(
            sorted((result.offsets[x], _room(x)) for x in others), _room(memory)
        )
        placed.append(memory)
        result.nbytes = max(result.nbytes, result.offsets[memory] + _room(memory))
    return result


def _room(memory: Memory) -> int:
    return -(-max(memory.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def _first_gap(taken: Iterable[tuple[int, int]], room: int) -> int:
    place = 0
    for start, size in taken:
        if start - place >= room:
            break
        place = max(place, start + size)
    return place


def _number(
    statements: list[Statement], number: int, lives: dict[Memory, _Life], blocks: list[_Life]
) -> int:
    for statement in statements:
        start = number
        for memory in statement.memories:
            if memory.kind == "work":
                lives.setdefault(memory, _Life(number, number)).last = number
        number += 1
        if statement.body is not None:
            before = set(lives)
            inner: dict[Memory, _Life] = dict(lives)
            number = _number(statement.body, number, inner, blocks)
            for memory, life in inner.items():
                lives[memory] = life
                # What there was before a loop is needed until its last round.
                if memory in before and life.last >= start:
                    life.last = number - 1
            blocks.append(_Life(start, number - 1))
    return number


def lines(statements: list[Statement], names: dict[Memory, str], indent: int = 1) -> Iterator[str]:
    """The source of statements."""
    for statement in statements:
        text = "".join(
            piece if isinstance(piece, str) else _pointer(piece, names)
            for piece in statement.pieces
        )
        note = f"  # {statement.note}" if statement.note else ""
        yield "    " * indent + text + note
        if statement.body is not None:
            yield from lines(statement.body, names, indent + 1) or ()
            if not statement.body:
                yield "    " * (indent + 1) + "pass"


def _pointer(buffer: Buffer, names: dict[Memory, str]) -> str:
    memory, offset = pointed_at(buffer)
    return names[memory] if offset == "0" else f"at({names[memory]}, {offset})"
