"""The builder that rules are given: it makes kernels, and the program that calls them."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ..._jax.frames import user_place
from ..front.graph import Equation, Graph, Variable, graph_of, readers
from ..registry import FUSED, SHOWN, Unsupported, funcify, is_numba_function
from . import storage
from .arrays import ArrayExpr, Buffer, LazyArray, Memory, UpdatedArray, number, parts, reshaped
from .calls import Calls
from .fallback import Fallbacks
from .index import Index
from .loop_nest import LoopNest
from .njit_rules import call_function
from .program import ProgramDraft, Statement

#: Values that cost no more are computed again by each loop that reads them.
_CHEAP = 2
#: A loop computes no more values than these of one another, or compilers take long over it.
_MOST_PARTS = 160


class Builder:
    """Compiles the equations of a program one by one, by their rules.

    `out` is the aval of the result of the equation at hand, `outs` all of them; `primitive` is its
    name. `calls` are the calls out of the program: `Fallbacks` if JAX may run what has no rule.
    """

    def __init__(self, calls: Calls | None = None) -> None:
        self.program = ProgramDraft()
        self.calls = Calls() if calls is None else calls
        self.native_functions: dict[Any, Any] = {}  # of rules that return Numba functions
        self.equation: Equation | None = None
        self._bodies: list[list[Statement]] = [self.program.statements]
        self._computed: list[dict[ArrayExpr, Buffer]] = [{}]
        self._n_names = 0
        self._kernel: LoopNest | None = None  # that equations are written into, if into one

    @property
    def primitive(self) -> str:
        """The name of the primitive at hand."""
        return self.equation.primitive if self.equation else "copy"

    @property
    def outs(self) -> list[Any]:
        """The avals of the results of the equation at hand."""
        return [v.aval for v in self.equation.outputs] if self.equation else []

    @property
    def out(self) -> Any:
        """The aval of its only result."""
        return self.outs[0]

    # Values.

    def constant(self, value: Any, dtype: Any = None) -> ArrayExpr:
        """An array that is known. One without axes is written into the source."""
        array = np.asarray(value, dtype)
        if array.ndim:
            return self.program.constant(array)
        text = storage.literal(array, array.dtype)
        return LazyArray((), array.dtype, lambda k, index: text)

    def buffer(self, shape: Sequence[int] | None = None, dtype: Any = None) -> Buffer:
        """Memory to be written to, by default of the shape and dtype of the result."""
        shape = self.out.shape if shape is None else shape
        dtype = np.dtype(self.out.dtype if dtype is None else dtype)
        return Buffer(tuple(shape), dtype, Memory(dtype, math.prod(shape)))

    def lazy(
        self,
        entry: Callable[[LoopNest, tuple[Index, ...]], str],
        *operands: ArrayExpr,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        cost: int = 0,
    ) -> LazyArray:
        """A value whose entries are computed where they are read, of those of `operands`.

        **Arguments:**

        - `entry`: given a kernel and an index, writes what it takes and returns an expression.
        - `shape`, `dtype`: of the value; by default those of the result.
        - `cost`: about how many instructions `entry` adds to what it reads.
        """
        shape = self.out.shape if shape is None else shape
        dtype = np.dtype(self.out.dtype if dtype is None else dtype)
        total = cost + sum(x.cost for x in operands if isinstance(x, LazyArray))
        return LazyArray(tuple(shape), dtype, entry, total, parts(*operands), self.primitive)

    def updated(
        self, base: ArrayExpr, update: Callable[..., None], *operands: ArrayExpr
    ) -> ArrayExpr:
        """The value `base` with other entries here and there.

        **Arguments:**

        - `update`: a function of a buffer, in which the entries of `base` are, and of `operands`,
            that writes to it.
        """

        def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
            return k.read(self.force(value), index)

        reads, cost = parts(base, *operands), _CHEAP + 1
        rest = (reads, self.primitive, base, operands, update)
        value = UpdatedArray(base.shape, base.dtype, entry, cost, *rest)
        return value

    def force(self, value: ArrayExpr) -> Buffer:
        """The value in memory: computed now, unless it is there."""
        if isinstance(value, Buffer):
            return value
        if self._kernel is not None:
            raise Unsupported("jaxpr", "it may not compute arrays.")
        for computed in self._computed:
            if value in computed:
                return computed[value]
        buffer = self._computed[-1][value] = self.copy(value)
        return buffer

    def copy(self, value: ArrayExpr, into: Buffer | None = None) -> Buffer:
        """The value in memory of its own, or in that of `into`."""
        buffer = into or self.buffer(value.shape, value.dtype)
        if isinstance(value, UpdatedArray):
            self.copy(value.base, buffer)
            value.update(buffer, *value.operands)
            return buffer
        with self.kernel(_name_of(value)) as k, k.loops(value.shape) as index:
            k.store(buffer, index, k.read(value, index))
        return buffer

    def cheap(self, value: ArrayExpr) -> ArrayExpr:
        """The value, in memory if it takes more than a few instructions to read."""
        if self._kernel is not None:
            return self._let(value)
        return self.force(value) if isinstance(value, LazyArray) and value.cost > _CHEAP else value

    def _let(self, value: ArrayExpr) -> ArrayExpr:
        """The value in the kernel that equations are written into: a number in a variable."""
        if value.ndim or self._kernel is None:
            return value
        return number(self._kernel.let(self._kernel.read(value, ())), value.dtype)

    def repeated(self, value: ArrayExpr, axes: Sequence[int]) -> ArrayExpr:
        """The value as a result may read it that has it on `axes`, again along others.

        What inner loops repeat, they leave to outer ones; what outer ones do is computed before.
        """
        shape = self.out.shape
        others = [axis for axis in range(len(shape)) if axis not in axes and shape[axis] > 1]
        again = others and axes and min(others) < max(axes)
        return self.cheap(value) if again else value

    def reshaped(self, value: ArrayExpr, shape: Sequence[int]) -> ArrayExpr:
        """The value with another shape of as many entries."""
        result = reshaped(value, tuple(shape))
        return self.force(value).reshaped(tuple(shape)) if result is None else result

    def converted(self, value: ArrayExpr, dtype: Any) -> ArrayExpr:
        """The value with another dtype, as JAX converts it."""
        source, target = value.dtype, np.dtype(dtype)
        if source == target:
            return value
        entry = lambda k, index: k.let(storage.cast(k, k.read(value, index), source, target))
        return self.lazy(entry, value, shape=value.shape, dtype=target, cost=1)

    # Kernels and the program.

    @contextmanager
    def kernel(self, name: str | None = None) -> Iterator[LoopNest]:
        """Writes a kernel, which is called here."""
        k = LoopNest()
        yield k
        if k.written:
            function = self.program.add_kernel(name or self.primitive, k)
            self.call(function, *k.buffers)

    def call(self, function: str, *pointers: Buffer) -> None:
        """Calls a function of the program with pointers."""
        pieces: list[str | Buffer] = [f"{function}("]
        for pointer in pointers:
            pieces += [pointer, ", "]
        self.line(*pieces[: max(1, 2 * len(pointers))], ")")

    def line(self, *pieces: str | Buffer) -> None:
        """A statement of the program, of text and of buffers, which are pointers there."""
        note = self.equation.line if self.equation else ""
        self._bodies[-1].append(Statement(pieces, note))

    @contextmanager
    def block(self, *pieces: str | Buffer) -> Iterator[None]:
        """Statements under `while ...:`, `if ...:` and the like.

        What is computed in them is not known after them, but for what is in buffers made before.
        """
        self.line(*pieces)
        body = self._bodies[-1][-1].body = []
        self._bodies.append(body)
        self._computed.append({})
        yield
        self._bodies.pop()
        self._computed.pop()

    @property
    def block_statements(self) -> list[Statement]:
        """The statements of the block at hand, so far."""
        return self._bodies[-1]

    @property
    def earlier_statements(self) -> Iterator[Statement]:
        """The statements before those of the block at hand."""
        for body in self._bodies[:-1]:
            yield from body[:-1]

    @contextmanager
    def repeat(self, length: int, reverse: bool = False) -> Iterator[str]:
        """A loop of the program; gives the name of its variable."""
        name = self.name("step")
        steps = f"range({length - 1}, -1, -1)" if reverse else f"range({length})"
        with self.block(f"for {name} in {steps}:"):
            yield name

    def name(self, prefix: str) -> str:
        """A name of the program that is not taken."""
        self._n_names += 1
        return f"{prefix}{self._n_names - 1}"

    def function(self, function: Callable[..., Any]) -> str:
        """Makes a function known to the program, as `LoopNest.function` does to a kernel."""
        return self.program.function(function)

    # Equations.

    def inline(self, jaxpr: Any, *operands: ArrayExpr) -> list[ArrayExpr]:
        """Compiles a jaxpr here, for operands that are as cheap to read as they should be."""
        return self.run(graph_of(jaxpr), operands)

    def traced(self, f: Callable[..., Any], *operands: ArrayExpr) -> list[ArrayExpr]:
        """Compiles a function of JAX here, that returns a list."""
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return self.inline(jax.make_jaxpr(f)(*avals), *operands)

    def inline_in(self, k: LoopNest, jaxpr: Any, *operands: ArrayExpr) -> list[str]:
        """Writes a function of numbers into a kernel, and returns expressions of its results.

        Its primitives must be fused: `require_fused`.
        """
        outer, self._kernel = self._kernel, k
        results = self.inline(jaxpr, *operands)
        self._kernel = outer
        return [k.read(result, ()) for result in results]

    def run(self, graph: Graph, operands: Sequence[ArrayExpr]) -> list[ArrayExpr]:
        """Compiles a graph here."""
        values: dict[Variable, ArrayExpr] = dict(zip(graph.inputs, operands, strict=True))
        counts = readers(graph, FUSED)

        def value_of(variable: Variable) -> ArrayExpr:
            if variable not in values:
                values[variable] = self.constant(variable.value, variable.aval.dtype)
            return values[variable]

        outer = self.equation
        for equation in graph.equations:
            self.equation = equation
            results = self._results([value_of(v) for v in equation.inputs])
            for variable, value in zip(equation.outputs, results, strict=True):
                values[variable] = self._kept(value, counts.get(variable, 0))
        self.equation = outer
        return [value_of(v) for v in graph.outputs]

    def _kept(self, value: ArrayExpr, n_readers: int) -> ArrayExpr:
        if self._kernel is not None or not isinstance(value, LazyArray):
            return value
        costly = value.cost > _CHEAP and n_readers > 1
        return self.force(value) if costly or len(value.reads) > _MOST_PARTS else value

    def _results(self, operands: list[ArrayExpr]) -> list[ArrayExpr]:
        equation = self.equation
        assert equation is not None
        name = equation.primitive
        for v in [*equation.inputs, *equation.outputs]:
            self._check(v.aval)
        if equation.gives_no_entries:
            return [self.buffer(aval.shape, aval.dtype) for aval in self.outs]
        if name not in funcify:
            if isinstance(self.calls, Fallbacks):
                return [*self.calls.compile(self, operands)]
            if name in SHOWN:
                _leave_out(equation)
                return []
            raise funcify.missing(name, equation.line)
        try:
            results = self._by_rule(funcify[name], operands)
        except Unsupported as reason:
            raise NotImplementedError(
                f"vn.numba cannot compile {name!r} from {equation.line} with this {reason} "
                f"Register your own rule with @vn.numba.funcify.register({name!r})."
            ) from reason
        results = [*results] if isinstance(results, Sequence) else [results]
        n_outputs = len(equation.outputs)
        if len(results) != n_outputs or not all(isinstance(x, ArrayExpr) for x in results):
            raise TypeError(
                f"The rule of {name!r} gave {results}, but JAX has {n_outputs} arrays. A rule "
                "returns values of its builder, or an @numba.njit function."
            )
        for value, variable in zip(results, equation.outputs, strict=True):
            actual, wanted = (value.shape, value.dtype), (variable.aval.shape, variable.aval.dtype)
            if actual != wanted:
                raise TypeError(f"The rule of {name!r} gave {actual}, but JAX has {wanted}.")
        return results

    @property
    def in_kernel(self) -> bool:
        """Return whether equations are written into a kernel, where every value is a number."""
        return self._kernel is not None

    def _by_rule(self, rule: Callable[..., Any], operands: list[ArrayExpr]) -> Any:
        """Return the results of a rule: it returns them, or a function that computes them."""
        assert self.equation is not None
        if is_numba_function(rule):
            return call_function(self, rule, rule, operands)
        results = rule(self, *operands, **self.equation.params)
        return call_function(self, rule, results, operands) if callable(results) else results

    def _check(self, aval: Any) -> None:
        assert self.equation is not None
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        where = f"in {self.equation.primitive!r}, from {self.equation.line}"
        if shape is None or not all(isinstance(n, int) for n in shape):
            raise NotImplementedError(
                f"vn.numba needs static shapes, but {aval} {where} does not have one. Compile once "
                "for each shape."
            )
        if not storage.supported(dtype):
            raise NotImplementedError(f"vn.numba has no arrays of dtype {dtype}, as {where}.")


def require_fused(jaxpr: Any) -> None:
    """Refuses a function of numbers of which not all primitives are fused."""
    for equation in graph_of(jaxpr).equations:
        name = equation.primitive
        if name not in FUSED or name == "dynamic_update_slice" or name.startswith("scatter"):
            raise Unsupported("jaxpr", f"it may not have {name!r}.")


def _leave_out(equation: Equation) -> None:
    """Says to who compiles that a program will not show something."""
    message = (
        f"vn.numba leaves out {equation.primitive!r}, from {equation.line}: compiled code calls no "
        "Python. To have JAX run it, in tens of microseconds each time, compile with "
        "fallback='jax'."
    )
    warnings.warn_explicit(message, UserWarning, *user_place())


def _name_of(value: ArrayExpr) -> str:
    """What a kernel that computes a value is called: the primitives that it is of."""
    if not isinstance(value, LazyArray):
        return "copy"
    costly = [x.name for x in value.reads if isinstance(x, LazyArray) and x.cost > 0]
    names = [value.name, *sorted({*costly} - {value.name})]
    return "_".join(names[:3])


def broadcast_read(k: LoopNest, value: ArrayExpr, index: Sequence[Index]) -> str:
    """Reads a value whose axes of size 1 stand for any size, as JAX's elementwise operands may."""
    place = [Index() if n == 1 else i for n, i in zip(value.shape, index, strict=False)]
    return k.read(value, place)
