"""Programs: statements that call kernels, the memory that they use, and the finished source."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..maths import instructions
from ..maths.instructions import key_of
from . import storage
from .arrays import Buffer, Memory
from .loop_nest import LoopNest

_ALIGNMENT = 64

#: From this many bytes or loop iterations on, a call releases the GIL. Shorter calls keep it:
#: taking it back costs milliseconds while another thread computes.
_LONG_NBYTES, _LONG_STEPS = 2**20, 100_000
#: The number of iterations of a kernel that an iteration of a loop of kernels counts for.
_STEPS_OF_KERNELS = 100


# Statements.


@dataclass
class Statement:
    """A line of the generated program, and the statements of the block under it.

    `pieces` are text and buffers, which become pointers. `note` is the line of the user's code that
    the statement comes from.
    """

    pieces: tuple["str | Buffer", ...]
    note: str = ""
    body: "list[Statement] | None" = None

    @property
    def memories(self) -> Iterator[Memory]:
        """The blocks of memory that the line itself reads or writes."""
        return (resolve_alias(x)[0] for x in self.pieces if isinstance(x, Buffer))

    @property
    def all_memories(self) -> set[Memory]:
        """The blocks of memory that the line or its block reads or writes."""
        return set(self.memories).union(*(inner.all_memories for inner in self.body or ()))


def resolve_alias(buffer: Buffer) -> tuple[Memory, str]:
    """Return the block of memory that a buffer is in, and the offset of its first entry.

    A block that is part of another buffer (`alias`) is replaced by the block of that buffer.
    """
    memory, offset = buffer.memory, buffer.offset
    while memory.alias is not None:
        whole = memory.alias
        offset = whole.offset if offset == "0" else f"{whole.offset} + {offset}"
        memory = whole.memory
    return memory, offset


@dataclass
class _Life:
    """The first and the last statement that use a block of memory, numbered in program order."""

    first: int
    last: int


def allocate(statements: list[Statement]) -> tuple[dict[Memory, int], int]:
    """Choose a place for each block of work memory that statements use.

    Blocks that are needed at different times can have the same place.

    **Returns:** the offset of each block in bytes, and the size of all work memory in bytes.
    """
    lives: dict[Memory, _Life] = {}
    blocks: list[_Life] = []
    _number_statements(statements, 0, lives, blocks)
    for block in blocks:
        for life in lives.values():
            # Every iteration of a loop may write memory that is read after the loop.
            if block.first <= life.first <= block.last < life.last:
                life.first = block.first
    offsets: dict[Memory, int] = {}
    nbytes = 0
    for memory in sorted(lives, key=lambda memory: lives[memory].first):
        life = lives[memory]
        others = [x for x in offsets if lives[x].last >= life.first and lives[x].first <= life.last]
        offset = 0
        for start, size in sorted((offsets[x], _aligned_nbytes(x)) for x in others):
            if start - offset >= _aligned_nbytes(memory):
                break
            offset = max(offset, start + size)
        offsets[memory] = offset
        nbytes = max(nbytes, offset + _aligned_nbytes(memory))
    return offsets, nbytes


def _aligned_nbytes(memory: Memory) -> int:
    return -(-max(memory.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def _number_statements(
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
            number = _number_statements(statement.body, number, inner, blocks)
            for memory, life in inner.items():
                lives[memory] = life
                # Memory from before a loop is needed until its last iteration.
                if memory in before and life.last >= start:
                    life.last = number - 1
            blocks.append(_Life(start, number - 1))
    return number


def _lines(statements: list[Statement], names: dict[Memory, str], indent: int = 1) -> Iterator[str]:
    """Yield the source lines of statements.

    `names` maps each block of memory to the name of its pointer.
    """
    for statement in statements:
        text = ""
        for piece in statement.pieces:
            if isinstance(piece, Buffer):
                memory, offset = resolve_alias(piece)
                name = names[memory]
                piece = name if offset == "0" else f"at({name}, {offset})"
            text += piece
        note = f"  # {statement.note}" if statement.note else ""
        yield "    " * indent + text + note
        if statement.body is not None:
            yield from _lines(statement.body, names, indent + 1) or ()
            if not statement.body:
                yield "    " * (indent + 1) + "pass"


# Programs.


@dataclass(frozen=True)
class Function:
    """A function of the source, with the dtypes of the memory that its arguments point to."""

    name: str
    source: str
    dtypes: tuple[np.dtype, ...]


class ProgramDraft:
    """The generated program while a builder writes it.

    `calls`, `callbacks` and `objects` are as in `Source`.
    """

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
        self.objects: list[Any] = []

    def input(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """Add an argument with a shape and a dtype to the program. Return its buffer."""
        memory = Memory(np.dtype(dtype), int(np.prod(shape)), "input", f"in{len(self.inputs)}")
        self.inputs.append(memory)
        self.input_shapes.append(tuple(shape))
        return Buffer(tuple(shape), memory.dtype, memory)

    def constant(self, array: np.ndarray) -> Buffer:
        """Add a constant array to the program. Return its buffer.

        The program gets the address of the array as an argument, so the source does not contain its
        values.
        """
        name = f"const{len(self.constants)}"
        memory = Memory(array.dtype, array.size, "constant", name)
        self.constants.append((memory, np.array(array, order="C")))
        return Buffer(array.shape, array.dtype, memory)

    def output(self, buffer: Buffer) -> None:
        """Make a buffer the next result of the program. Its memory becomes output memory."""
        memory = buffer.memory
        memory.kind, memory.name = "output", f"out{len(self.outputs)}"
        self.outputs.append(memory)
        self.output_shapes.append(buffer.shape)

    def add_kernel(self, name: str, k: LoopNest) -> str:
        """Add a kernel as a function of the program, unless an equal one exists.

        Return the name of the function, which begins with `name`.
        """
        for function in k.functions.values():
            self.function(function)
        body = k.source()
        dtypes = tuple(storage.stored_dtype(memory.dtype) for memory, _ in k.parameters)
        key = body, dtypes
        if key not in self.kernels:
            taken = {function.name for function in self.kernels.values()}
            prefix = name.replace("-", "_")
            names = (f"{prefix}_{n}" for n in range(len(taken) + 1))
            unique = next(x for x in names if x not in taken)
            source = f"def {unique}({', '.join(k.parameters.values())}):\n    no_aliases()\n{body}"
            self.kernels[key] = Function(unique, source, dtypes)
        return self.kernels[key].name

    def function(self, function: Callable[..., Any]) -> str:
        """Let the generated source call a function by its `__name__`. Return the name."""
        known = self.functions.setdefault(function.__name__, function)
        if known is not function:
            raise ValueError(
                f"a compiled program uses two different functions named {function.__name__}. "
                "Rename one of them"
            )
        return function.__name__


@dataclass(frozen=True)
class Source:
    """A finished program: its text, and everything that is needed to compile and call it.

    `functions` are the kernels and, last, the function that calls them. `names` are the functions
    that they call. `narrows` says that 64-bit arguments are converted to 32 bits, as JAX did when
    it traced the function. `key` is equal for programs of the same text, shapes and dtypes.

    `calls` names the functions that are called by address. If there are any, the last output says
    whether all succeeded. `callbacks` are the indices of constants with addresses of Python
    callbacks, and `objects` the objects that must live as long as the program.
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
    objects: tuple[Any, ...] = ()

    def wide_dtype(self, dtype: np.dtype) -> np.dtype | None:
        """Return the 64-bit dtype that arguments of the 32-bit `dtype` may also have, or None."""
        return storage.WIDE.get(dtype) if self.narrows else None

    @property
    def is_long(self) -> bool:
        """True if a call certainly takes tens of microseconds. Such a call releases the GIL."""
        memories = (*self.inputs, *self.outputs)
        nbytes = sum(memory.nbytes for memory in memories) + self.work_nbytes
        nbytes += sum(array.nbytes for array in self.constants)
        *kernels, program = (_n_steps(function.source) for function in self.functions)
        return nbytes >= _LONG_NBYTES or max([*kernels, program * _STEPS_OF_KERNELS]) >= _LONG_STEPS


def _n_steps(text: str) -> int:
    """Return the number of iterations of the longest loop nest in the source of a function.

    Only loops whose length is a number in the source count.
    """
    most, outer = 1, [(0, 1)]  # indent and total iterations of the loops around a line
    for line in text.splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        while len(outer) > 1 and outer[-1][0] >= indent:
            outer.pop()
        if loop := re.match(r" +for \w+ in range\((\d+)", line):
            outer.append((indent, outer[-1][1] * int(loop[1])))
            most = max(most, outer[-1][1])
    return most


def finish(program: ProgramDraft) -> Source:
    """Allocate the work memory of a program, and return the finished source."""
    offsets, work_nbytes = allocate(program.statements)
    work = {memory: f"t{n}" for n, memory in enumerate(offsets)}
    memories = [*program.inputs, *program.outputs, *(m for m, _ in program.constants)]
    names = {memory: memory.name for memory in memories} | work
    views = []
    for memory, offset in offsets.items():
        example = f"np.{storage.stored_dtype(memory.dtype).name}(0)"
        views.append(f"    {work[memory]} = memory(work, {offset}, {example})")
    header = f"def program({', '.join([*(memory.name for memory in memories), 'work'])}):"
    body = [header, *views, *_lines(program.statements, names)]
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
        work_nbytes=work_nbytes,
        work_sizes=tuple(memory.size for memory in offsets),
        narrows=narrows,
        key=_key(program, work_nbytes, narrows, [*kernels, main], functions.values()),
        calls=program.calls,
        callbacks=tuple(program.callbacks),
        objects=tuple(program.objects),
    )


def _key(
    program: ProgramDraft,
    work_nbytes: int,
    narrows: bool,
    functions: Iterable[Function],
    called: Iterable[Callable[..., Any]],
) -> str:
    """Return a hash of everything that the compiled code depends on.

    Comments with lines of the user's code are excluded. `functions` are the kernels and the
    function that calls them, and `called` are the functions that these call.
    """
    digest = hashlib.sha256()
    # The entry for Python checks the shapes of arguments and sets the shapes of results.
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
