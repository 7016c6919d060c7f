"""A kernel: loops over buffers, as the source of a function of numbers and pointers.

Rules write it through a `LoopNest`, statement by statement. What a statement needs is computed as
far out in the loops as what it depends on allows, and once; loops over an array in its own order
are merged into one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import storage
from .arrays import ArrayExpr, Buffer, Memory
from .index import Index, LoopVariable, all_names, flat

_ACCESS = re.compile("\0(\\d+)\0")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass
class _Scope:
    """Lines under a loop, or under a condition that guards them, or of the function itself."""

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
    """An entry of memory: its place, from an offset on."""

    memory: Memory
    offset: str
    place: Index


class LoopNest:
    """The source of a kernel in the making."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.parameters: dict[tuple[Memory, str], str] = {}
        self.written: set[Memory] = set()
        self._body = _Scope("")
        self._open = [self._body]
        self._depths: dict[str, int] = {}
        self._accesses: list[tuple[str, Index]] = []
        self._known: list[dict[Any, str]] = [{}]
        self._loop_names = iter(all_names())
        self._n_locals = 0

    @property
    def buffers(self) -> list[Buffer]:
        """What it is called with, in the order of its parameters."""
        return [Buffer((), memory.dtype, memory, place) for memory, place in self.parameters]

    # Loops and conditions.

    @contextmanager
    def loops(self, shape: Sequence[int]) -> Iterator[tuple[Index, ...]]:
        """Loops over all indices of a shape, the last axis innermost; gives the index."""
        depth = len(self._open)
        index = []
        for extent in shape:
            if extent == 1:
                index.append(Index())
                continue
            variable = LoopVariable(next(self._loop_names), extent)
            self._enter(variable)
            self._depths[variable.name] = len(self._open) - 1
            index.append(Index.of(variable))
        yield tuple(index)
        self._leave(depth)

    @contextmanager
    def under(self, header: str) -> Iterator[None]:
        """Lines under `if ...:`, `while ...:` and the like; nothing is moved out of them."""
        depth = len(self._open)
        self._enter(header)
        yield
        self._leave(depth)

    def _enter(self, header: str | LoopVariable) -> None:
        scope = _Scope(header)
        self._open[-1].lines.append(scope)
        self._open.append(scope)
        self._known.append({})

    def _leave(self, depth: int) -> None:
        for scope in self._open[depth:]:
            if not scope.lines:
                scope.lines.append("pass")
        del self._open[depth:]
        del self._known[depth:]

    # Statements and expressions.

    def line(self, text: str) -> None:
        """Writes a statement here."""
        self._open[-1].lines.append(text)

    def read(self, value: ArrayExpr, index: Sequence[Index]) -> str:
        """An expression for an entry of a value, with an `Index` an axis."""
        key = (value, tuple(index))
        for known in self._known:
            if key in known:
                return known[key]
        text = value.at(self, tuple(index))
        if not (isinstance(value, Buffer) and value.memory in self.written):
            self._known[self._depth_of(text)][key] = text
        return text

    def load(self, buffer: Buffer, index: Sequence[Index]) -> str:
        """A local variable with an entry of a buffer, as its dtype is computed in."""
        stored = self._access(buffer, index)
        text = storage.loaded(self, stored, buffer.dtype)
        if buffer.memory in self.written:
            return self.here(text)
        return self.let(text)

    def store(self, buffer: Buffer, index: Sequence[Index], text: str) -> None:
        """Writes an entry of a buffer."""
        self.written.add(buffer.memory)
        value = storage.stored(self, text, buffer.dtype)
        self.line(f"{self._access(buffer, index)} = {value}")

    def let(self, text: str, name: str = "v") -> str:
        """A local variable with the value of an expression that has no effects.

        It is computed as far out as the variables that it uses allow, but under the conditions
        that it is under.
        """
        if text.isidentifier() and text in self._depths:
            return text
        depth = self._depth_of(text)
        known = self._known[depth].get(text)
        if known is not None:
            return known
        local = self._local(name, depth)
        lines = self._open[depth].lines
        place = len(lines) - (depth + 1 < len(self._open))  # before the scope that is open
        lines.insert(place, f"{local} = {text}")
        self._known[depth][text] = local
        return local

    def here(self, text: str, name: str = "v") -> str:
        """A new local variable with the value of an expression, computed in this place.

        It may be assigned to, and read in scopes within this.
        """
        local = self._local(name, len(self._open) - 1)
        self.line(f"{local} = {text}")
        return local

    def variable(self, text: str, extent: int) -> Index:
        """An index computed by an expression, which must be from 0 to `extent - 1`."""
        return Index.of(LoopVariable(self.let(text, "at"), extent))

    def function(self, function: Callable[..., Any]) -> str:
        """Makes a function known to the kernel, by its name: see `scalar`."""
        self.functions[function.__name__] = function
        return function.__name__

    def call(self, function: Callable[..., Any], *args: str) -> str:
        """An expression that calls a function."""
        return f"{self.function(function)}({', '.join(args)})"

    def pointer(self, buffer: Buffer) -> str:
        """The parameter for a buffer, to be passed on; it is taken to be written to."""
        self.written.add(buffer.memory)
        return self._parameter(buffer)

    def _local(self, name: str, depth: int) -> str:
        local = f"{name}{self._n_locals}"
        self._n_locals += 1
        self._depths[local] = depth
        return local

    def _parameter(self, buffer: Buffer) -> str:
        place = buffer.memory, buffer.offset
        if place not in self.parameters:
            self.parameters[place] = f"x{len(self.parameters)}"
        return self.parameters[place]

    def _access(self, buffer: Buffer, index: Sequence[Index]) -> str:
        self._accesses.append((self._parameter(buffer), flat(index, buffer.shape)))
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
        """All places of memory that it has read and written so far."""
        names = {name: key for key, name in self.parameters.items()}
        return (Access(*names[parameter], place) for parameter, place in self._accesses)

    def access_of(self, text: str) -> Access | None:
        """Where a local variable was loaded from, if it is what is there and nothing else."""
        sources = (source for known in self._known for source, v in known.items() if v == text)
        for source in sources:
            match = _ACCESS.fullmatch(source) if isinstance(source, str) else None
            if match:
                parameter, place = self._accesses[int(match[1])]
                names = {name: key for key, name in self.parameters.items()}
                return Access(*names[parameter], place)
        return None

    def source(self) -> str:
        """The lines of the function, without its first."""
        for scope in [*self._body.scopes()]:
            while self._merge(scope):
                pass
        return "\n".join(self._rendered(self._body, 1))

    def _merge(self, scope: _Scope) -> bool:
        """Makes one loop of two, where that is all that the outer has and no entry is the wiser."""
        inner = scope.lines[0] if len(scope.lines) == 1 else None
        if not isinstance(inner, _Scope):
            return False
        a, b = scope.header, inner.header
        if isinstance(a, str) or isinstance(b, str) or not self._may_merge(inner, a, b):
            return False
        one = LoopVariable(a.name, a.extent * b.extent)
        self._accesses = [(x, index.merged(a, b, one)) for x, index in self._accesses]
        scope.header, scope.lines = one, inner.lines
        return True

    def _may_merge(self, scope: _Scope, a: LoopVariable, b: LoopVariable) -> bool:
        texts = [inner.own_text() for inner in scope.scopes()]
        if any({a.name, b.name} & set(_NAME.findall(text)) for text in texts):
            return False
        return all(index.factor(a) == index.factor(b) * b.extent for _, index in self._accesses)

    def _rendered(self, scope: _Scope, indent: int) -> Iterable[str]:
        for line in scope.lines:
            if isinstance(line, _Scope):
                yield "    " * indent + self._header(line.header)
                yield from self._rendered(line, indent + 1)
            else:
                yield "    " * indent + _ACCESS.sub(self._place, line)

    def _header(self, header: str | LoopVariable) -> str:
        if isinstance(header, str):
            return _ACCESS.sub(self._place, header)
        return f"for {header.name} in range({header.extent}):"

    def _place(self, match: re.Match[str]) -> str:
        parameter, index = self._accesses[int(match[1])]
        return f"{parameter}[{index}]"
