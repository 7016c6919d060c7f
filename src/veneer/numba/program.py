"""A compiled program as source: its kernels, and the function that calls them one by one."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import bits, storage
from .kernel import Kernel
from .scalar import source_of
from .statements import Statement, layout, lines
from .values import Buffer, Memory


@dataclass(frozen=True)
class Function:
    """A function of the source: its text, and the dtypes of what its arguments point to."""

    name: str
    source: str
    dtypes: tuple[np.dtype, ...]


class Program:
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

    def add_kernel(self, name: str, k: Kernel) -> str:
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
            raise ValueError(f"two functions of a program are called {function.__name__}")
        return function.__name__


@dataclass(frozen=True)
class Source:
    """The text of a program, and what it takes to run it.

    `functions` are the kernels and, last, the one that calls them. `key` is equal for programs of
    the same text, shapes and dtypes.
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
    key: str


def finished(program: Program) -> Source:
    """The source of a program, with a place for all that it works on."""
    places = layout(program.statements)
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
    own = (bits.memory, bits.at, bits.no_aliases)
    functions = {**program.functions, **{function.__name__: function for function in own}}
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
        key=_key(program, places.nbytes, [*kernels, main], functions.values()),
    )


def _example(dtype: np.dtype) -> str:
    return f"np.{storage.stored_dtype(dtype).name}(0)"


def _key(
    program: Program,
    work_nbytes: int,
    functions: Iterable[Function],
    called: Iterable[Callable[..., Any]],
) -> str:
    """Of all that makes a program what it is; not of the lines of the user's that it notes."""
    digest = hashlib.sha256()
    # The function for Python checks these of arguments, and gives them to results.
    digest.update(f"{program.input_shapes}{program.output_shapes}{work_nbytes}".encode())
    for memory in (*program.inputs, *program.outputs):
        digest.update(str(memory.dtype).encode())
    for function in functions:
        source = "\n".join(line.partition("  # ")[0] for line in function.source.splitlines())
        digest.update(f"{source}{function.dtypes}".encode())
    for text in sorted(map(source_of, called)):
        digest.update(text.encode())
    return digest.hexdigest()
