"""A compiled program as source: its kernels, and the function that calls them one by one."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..maths import instructions
from ..maths.scalar import key_of
from . import storage
from .arrays import Buffer, Memory
from .loop_nest import LoopNest

_ALIGNMENT = 64

#: A call that works on so many bytes, or whose loops take so many steps, lets other threads of
#: Python's run. It is for no others: to get the lock again takes milliseconds, if one computes.
_LONG_NBYTES, _LONG_STEPS = 2**20, 100_000
#: A step of a loop of the program calls kernels, and counts for so many of theirs.
_STEPS_OF_KERNELS = 100


# Statements.


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
class Allocation:
    """Where pieces of work memory are, in bytes from the start, and how many it takes in all."""

    offsets: dict[Memory, int] = field(default_factory=dict)
    nbytes: int = 0


def allocated(statements: list[Statement]) -> Allocation:
    """Finds a place for all work memory; pieces share one that are not needed at the same time."""
    lives: dict[Memory, _Life] = {}
    blocks: list[_Life] = []
    _number(statements, 0, lives, blocks)
    for block in blocks:
        for life in lives.values():
            # What is needed after a loop, all of its rounds may have written to.
            if block.first <= life.first <= block.last < life.last:
                life.first = block.first
    result = Allocation()
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


# Programs.


@dataclass(frozen=True)
class Function:
    """A function of the source: its text, and the dtypes of what its arguments point to."""

    name: str
    source: str
    dtypes: tuple[np.dtype, ...]


class ProgramDraft:
    """What a builder has made so far."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.inputs: list[Memory] = []
        self.outputs: list[Memory] = []
        self.input_shapes: list[tuple[int, ...]] = []
        self.output_shapes: list[tuple[int, ...]] = []
        self.constants: list[tuple[Memory, np.ndarray]] = []
        self.kernels: dict[Any, Function] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.calls: tuple[str, ...] = ()
        self.callbacks: list[int] = []
        self.kept: list[Any] = []

    def input(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """A new argument."""
        memory = Memory(np.dtype(dtype), int(np.prod(shape)), "input", f"in{len(self.inputs)}")
        self.inputs.append(memory)
        self.input_shapes.append(tuple(shape))
        return Buffer(tuple(shape), memory.dtype, memory)

    def constant(self, array: np.ndarray) -> Buffer:
        """An array that is known. It is no part of the source, which takes its address."""
        name = f"const{len(self.constants)}"
        memory = Memory(array.dtype, array.size, "constant", name)
        self.constants.append((memory, np.array(array, order="C")))
        return Buffer(array.shape, array.dtype, memory)

    def output(self, buffer: Buffer) -> None:
        """Makes a piece of work memory the next result."""
        memory = buffer.memory
        memory.kind, memory.name = "output", f"out{len(self.outputs)}"
        self.outputs.append(memory)
        self.output_shapes.append(buffer.shape)

    def add_kernel(self, name: str, k: LoopNest) -> str:
        """Adds the function of a kernel, unless there is one like it; returns its name."""
        for function in k.functions.values():
            self.function(function)
        body = k.source()
        dtypes = tuple(storage.stored_dtype(memory.dtype) for memory, _ in k.parameters)
        key = body, dtypes
        if key not in self.kernels:
            taken = {function.name for function in self.kernels.values()}
            plain = name.replace("-", "_")
            names = (f"{plain}_{n}" for n in range(len(taken) + 1))
            unique = next(x for x in names if x not in taken)
            source = f"def {unique}({', '.join(k.parameters.values())}):\n    no_aliases()\n{body}"
            self.kernels[key] = Function(unique, source, dtypes)
        return self.kernels[key].name

    def function(self, function: Callable[..., Any]) -> str:
        """Makes a function known to the source by its name."""
        known = self.functions.setdefault(function.__name__, function)
        if known is not function:
            raise ValueError(
                f"a compiled program uses two different functions named {function.__name__}. "
                "Rename one of them"
            )
        return function.__name__


@dataclass(frozen=True)
class Source:
    """The text of a program, and what it takes to run it.

    `functions` are the kernels and, last, the one that calls them. `narrows` says that arguments of
    64 bits are taken for those of 32, as JAX did where it was traced. `key` is equal for programs
    of the same text, shapes and dtypes.

    `calls` names the functions that it calls by their addresses. If there are any, the last output
    says whether all succeeded. `callbacks` has the numbers of the constants that are addresses of
    Python callbacks, and `kept` all objects that the constants refer to.
    """

    text: str
    functions: tuple[Function, ...]
    names: dict[str, Callable[..., Any]]
    inputs: tuple[Memory, ...]
    outputs: tuple[Memory, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    constants: tuple[np.ndarray, ...]
    work_nbytes: int
    work_sizes: tuple[int, ...]
    narrows: bool
    key: str
    calls: tuple[str, ...] = ()
    callbacks: tuple[int, ...] = ()
    kept: tuple[Any, ...] = ()

    def wide(self, dtype: np.dtype) -> np.dtype | None:
        """What else than arrays of a dtype is taken for them, and converted."""
        return storage.WIDE.get(dtype) if self.narrows else None

    @property
    def is_long(self) -> bool:
        """Whether a call surely takes some tens of microseconds."""
        memories = (*self.inputs, *self.outputs)
        nbytes = sum(memory.nbytes for memory in memories) + self.work_nbytes
        nbytes += sum(array.nbytes for array in self.constants)
        *kernels, program = (_n_steps(function.source) for function in self.functions)
        return nbytes >= _LONG_NBYTES or max([*kernels, program * _STEPS_OF_KERNELS]) >= _LONG_STEPS


def _n_steps(text: str) -> int:
    """How many steps the loops of a function take, one in another, whose lengths it says."""
    most, outer = 1, [(0, 1)]  # by their indents, loops with the steps of all around them
    for line in text.splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        while len(outer) > 1 and outer[-1][0] >= indent:
            outer.pop()
        if loop := re.match(r" +for \w+ in range\((\d+)", line):
            outer.append((indent, outer[-1][1] * int(loop[1])))
            most = max(most, outer[-1][1])
    return most


def finished(program: ProgramDraft) -> Source:
    """The source of a program, with a place for all that it works on."""
    places = allocated(program.statements)
    work = {memory: f"t{n}" for n, memory in enumerate(places.offsets)}
    memories = [*program.inputs, *program.outputs, *(m for m, _ in program.constants)]
    names = {memory: memory.name for memory in memories} | work
    views = [
        f"    {work[memory]} = memory(work, {offset}, {_example(memory.dtype)})"
        for memory, offset in places.offsets.items()
    ]
    header = f"def program({', '.join([*(memory.name for memory in memories), 'work'])}):"
    body = [header, *views, *lines(program.statements, names)]
    if len(body) == 1:
        body.append("    pass")
    dtypes = [storage.stored_dtype(memory.dtype) for memory in memories]
    kernels = [*program.kernels.values()]
    main = Function("program", "\n".join(body), (*dtypes, np.dtype(np.uint8)))
    always = (instructions.memory, instructions.at, instructions.no_aliases)
    functions = {**program.functions, **{function.__name__: function for function in always}}
    narrows = jax.dtypes.canonicalize_dtype(np.float64) == np.float32
    return Source(
        text="\n\n\n".join([*(kernel.source for kernel in kernels), main.source]) + "\n",
        functions=(*kernels, main),
        names=functions,
        inputs=tuple(program.inputs),
        outputs=tuple(program.outputs),
        input_shapes=tuple(program.input_shapes),
        output_shapes=tuple(program.output_shapes),
        constants=tuple(array for _, array in program.constants),
        work_nbytes=places.nbytes,
        work_sizes=tuple(memory.size for memory in places.offsets),
        narrows=narrows,
        key=_key(program, places.nbytes, narrows, [*kernels, main], functions.values()),
        calls=program.calls,
        callbacks=tuple(program.callbacks),
        kept=tuple(program.kept),
    )


def _example(dtype: np.dtype) -> str:
    return f"np.{storage.stored_dtype(dtype).name}(0)"


def _key(
    program: ProgramDraft,
    work_nbytes: int,
    narrows: bool,
    functions: Iterable[Function],
    called: Iterable[Callable[..., Any]],
) -> str:
    """Of all that makes a program what it is; not of the lines of the user's that it notes."""
    digest = hashlib.sha256()
    # The function for Python checks these of arguments, and gives them to results.
    shapes = f"{program.input_shapes}{program.output_shapes}"
    digest.update(f"{shapes}{work_nbytes}{narrows}".encode())
    for memory in (*program.inputs, *program.outputs):
        digest.update(str(memory.dtype).encode())
    for function in functions:
        source = "\n".join(line.partition("  # ")[0] for line in function.source.splitlines())
        digest.update(f"{source}{function.dtypes}".encode())
    for text in sorted(map(key_of, called)):
        digest.update(text.encode())
    return digest.hexdigest()
