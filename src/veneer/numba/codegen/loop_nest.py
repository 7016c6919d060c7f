"""The loops of a kernel: a builder of the source of a function of numbers and pointers.

Rules write statements through a `LoopNest`. An expression is computed once, in the outermost loop
where its variables are known. Nested loops that run through memory in order become one loop.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import storage
from .arrays import (
    ArrayExpr,
    Buffer,
    Index,
    LoopVariable,
    Memory,
    flatten_index,
    loop_variable_names,
)

_ACCESS = re.compile("\0(\\d+)\0")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass
class _Scope:
    """The lines of generated code under a loop or a condition, or of the whole kernel."""

    header: str | LoopVariable
    lines: "list[str | _Scope]" = field(default_factory=list)

    def scopes(self) -> "Iterator[_Scope]":
        yield self
        for line in self.lines:
            if isinstance(line, _Scope):
                yield from line.scopes()

    def own_text(self) -> str:
        parts = [line for line in self.lines if isinstance(line, str)]
        return "\n".join([*parts, *([self.header] if isinstance(self.header, str) else [])])


@dataclass(frozen=True)
class Access:
    """A read or write of an entry in a block of memory.

    `offset` is an expression for the start of the array in the block, and `position` is the
    position of the entry in the array.
    """

    memory: Memory
    offset: str
    position: Index


class LoopNest:
    """The source of a kernel, which rules write statement by statement.

    `parameters` maps each pair of a block of memory and an offset in it to the name of its pointer.
    `written` are the blocks that the kernel writes, and `functions` are the functions that it
    calls.
    """

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.parameters: dict[tuple[Memory, str], str] = {}
        self.written: set[Memory] = set()
        self._body = _Scope("")
        self._open = [self._body]
        self._depths: dict[str, int] = {}
        self._accesses: list[tuple[str, Index]] = []
        self._cached: list[dict[Any, str]] = [{}]
        self._loop_names = iter(loop_variable_names())
        self._n_locals = 0

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that the kernel reads or writes, in the order of its parameters."""
        return [Buffer((), memory.dtype, memory, offset) for memory, offset in self.parameters]

    # Loops and conditions.

    @contextmanager
    def loops(self, shape: Sequence[int]) -> Iterator[tuple[Index, ...]]:
        """Open loops over all indices of a shape, the last axis innermost.

        Yield the index, which has an `Index` per axis.
        """
        depth = len(self._open)
        index = []
        for extent in shape:
            if extent == 1:
                index.append(Index())
                continue
            variable = LoopVariable(next(self._loop_names), extent)
            self._enter(variable)
            self._depths[variable.name] = len(self._open) - 1
            index.append(Index.from_variable(variable))
        yield tuple(index)
        self._leave(depth)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Open a block with a header such as `if ...:`.

        Its statements are never moved out of the block.
        """
        depth = len(self._open)
        self._enter(header)
        yield
        self._leave(depth)

    def _enter(self, header: str | LoopVariable) -> None:
        scope = _Scope(header)
        self._open[-1].lines.append(scope)
        self._open.append(scope)
        self._cached.append({})

    def _leave(self, depth: int) -> None:
        for scope in self._open[depth:]:
            if not scope.lines:
                scope.lines.append("pass")
        del self._open[depth:]
        del self._cached[depth:]

    # Statements and expressions.

    def line(self, text: str) -> None:
        """Write a statement in the current block."""
        self._open[-1].lines.append(text)

    def read(self, value: ArrayExpr, index: Sequence[Index]) -> str:
        """Return an expression for an entry of an array. `index` has an `Index` per axis."""
        key = (value, tuple(index))
        for cached in self._cached:
            if key in cached:
                return cached[key]
        text = value.at(self, tuple(index))
        if not (isinstance(value, Buffer) and value.memory in self.written):
            self._cached[self._depth_of(text)][key] = text
        return text

    def load(self, buffer: Buffer, index: Sequence[Index]) -> str:
        """Load an entry of a buffer into a local variable. Return the name of the variable."""
        stored = self._access(buffer, index)
        text = storage.decode(self, stored, buffer.dtype)
        if buffer.memory in self.written:
            return self.assign(text)
        return self.let(text)

    def store(self, buffer: Buffer, index: Sequence[Index], text: str) -> None:
        """Write a statement that stores the expression `text` in an entry of a buffer."""
        self.written.add(buffer.memory)
        value = storage.encode(self, text, buffer.dtype)
        self.line(f"{self._access(buffer, index)} = {value}")

    def let(self, text: str, name: str = "v") -> str:
        """Return the name of a local variable that holds the value of the expression `text`.

        The expression must have no side effects. The variable is assigned in the outermost loop in
        which all variables of `text` are known, but not outside a condition.
        """
        if text.isidentifier() and text in self._depths:
            return text
        depth = self._depth_of(text)
        known = self._cached[depth].get(text)
        if known is not None:
            return known
        local = self._local(name, depth)
        lines = self._open[depth].lines
        position = len(lines) - (depth + 1 < len(self._open))  # before the open scope
        lines.insert(position, f"{local} = {text}")
        self._cached[depth][text] = local
        return local

    def assign(self, text: str, name: str = "v") -> str:
        """Assign the expression `text` to a new local variable. Return the name of the variable.

        The statement is written to the current block. Later lines may assign to the variable again.
        """
        local = self._local(name, len(self._open) - 1)
        self.line(f"{local} = {text}")
        return local

    def variable(self, text: str, extent: int) -> Index:
        """Return the value of the expression `text` as an index.

        The value must be from 0 to `extent - 1`.
        """
        return Index.from_variable(LoopVariable(self.let(text, "at"), extent))

    def function(self, function: Callable[..., Any]) -> str:
        """Let the kernel call a function by its `__name__`. Return the name."""
        self.functions[function.__name__] = function
        return function.__name__

    def call(self, function: Callable[..., Any], *args: str) -> str:
        """Return an expression that calls a function with the expressions `args`."""
        return f"{self.function(function)}({', '.join(args)})"

    def pointer(self, buffer: Buffer) -> str:
        """Return the name of the pointer to a buffer, for a function that may write to it."""
        self.written.add(buffer.memory)
        return self._parameter(buffer)

    def _local(self, name: str, depth: int) -> str:
        local = f"{name}{self._n_locals}"
        self._n_locals += 1
        self._depths[local] = depth
        return local

    def _parameter(self, buffer: Buffer) -> str:
        key = buffer.memory, buffer.offset
        return self.parameters.setdefault(key, f"x{len(self.parameters)}")

    def _access(self, buffer: Buffer, index: Sequence[Index]) -> str:
        self._accesses.append((self._parameter(buffer), flatten_index(index, buffer.shape)))
        return f"\0{len(self._accesses) - 1}\0"

    def _names(self, text: str) -> Iterator[str]:
        yield from _NAME.findall(text)
        for number in _ACCESS.findall(text):
            for variable, _ in self._accesses[int(number)][1].terms:
                yield variable.name

    def _depth_of(self, text: str) -> int:
        guards = (d for d, scope in enumerate(self._open) if isinstance(scope.header, str))
        return max([*guards, *(self._depths.get(name, 0) for name in self._names(text))])

    # The finished source.

    @property
    def accesses(self) -> Iterator[Access]:
        """All reads and writes of memory so far."""
        names = {name: key for key, name in self.parameters.items()}
        return (Access(*names[parameter], at) for parameter, at in self._accesses)

    def access_of(self, text: str) -> Access | None:
        """Return the memory access that loaded a local variable, or None if it was computed.

        `text` is the name of the variable.
        """
        sources = (source for known in self._cached for source, v in known.items() if v == text)
        for source in sources:
            match = _ACCESS.fullmatch(source) if isinstance(source, str) else None
            if match:
                parameter, position = self._accesses[int(match[1])]
                names = {name: key for key, name in self.parameters.items()}
                return Access(*names[parameter], position)
        return None

    def source(self) -> str:
        """Return the source of the body of the kernel, without its `def` line."""
        for scope in [*self._body.scopes()]:
            while self._merge(scope):
                pass
        return "\n".join(self._render(self._body, 1))

    def _merge(self, scope: _Scope) -> bool:
        """Merge a loop with the only loop inside it, if both together run through memory in order.

        This must hold for all reads and writes. Return whether the loops were merged.
        """
        inner = scope.lines[0] if len(scope.lines) == 1 else None
        if not isinstance(inner, _Scope):
            return False
        a, b = scope.header, inner.header
        if isinstance(a, str) or isinstance(b, str) or not self._may_merge(inner, a, b):
            return False
        merged = LoopVariable(a.name, a.extent * b.extent)
        self._accesses = [(x, index.merge_variables(a, b, merged)) for x, index in self._accesses]
        scope.header, scope.lines = merged, inner.lines
        return True

    def _may_merge(self, scope: _Scope, a: LoopVariable, b: LoopVariable) -> bool:
        texts = [inner.own_text() for inner in scope.scopes()]
        if any({a.name, b.name} & set(_NAME.findall(text)) for text in texts):
            return False
        return all(index.factor(a) == index.factor(b) * b.extent for _, index in self._accesses)

    def _render(self, scope: _Scope, indent: int) -> Iterable[str]:
        for line in scope.lines:
            if isinstance(line, _Scope):
                yield "    " * indent + self._header(line.header)
                yield from self._render(line, indent + 1)
            else:
                yield "    " * indent + _ACCESS.sub(self._access_text, line)

    def _header(self, header: str | LoopVariable) -> str:
        if isinstance(header, str):
            return _ACCESS.sub(self._access_text, header)
        return f"for {header.name} in range({header.extent}):"

    def _access_text(self, match: re.Match[str]) -> str:
        parameter, index = self._accesses[int(match[1])]
        return f"{parameter}[{index}]"
