"""The builder of a program: it runs the rule of each primitive and collects kernels."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ..._jax.frames import user_place
from . import storage
from .arrays import (
    ArrayExpr,
    Buffer,
    Index,
    LazyArray,
    Memory,
    UpdatedArray,
    lazy_arrays_in,
    reshape,
    scalar_expr,
)
from .calls import Calls, Fallbacks
from .graph import Equation, Graph, Variable, count_readers, graph_of
from .loop_nest import LoopNest
from .program import ProgramDraft, Statement
from .registry import DEBUG_PRIMITIVES, FUSED, Unsupported, funcify, is_numba_function

#: The largest cost of a lazy array that each loop which reads it computes again.
_MAX_CHEAP_COST = 2
#: The most lazy arrays that one loop computes. Compilation takes long for more of them.
_MAX_FUSED = 160


class Builder:
    """A compiler of the equations of a graph, one by one.

    A rule gets the builder, the operands as `ArrayExpr`, and the parameters of its equation. It
    returns the results as `ArrayExpr`: buffers that a kernel fills, or lazy arrays. `calls`
    collects the calls of functions outside of the program. If it is a `Fallbacks`, JAX runs
    primitives without a rule.
    """

    def __init__(self, calls: Calls | None = None) -> None:
        self.program = ProgramDraft()
        self.calls = Calls() if calls is None else calls
        self.native_functions: dict[Any, Any] = {}
        self.equation: Equation | None = None
        self._bodies: list[list[Statement]] = [self.program.statements]
        self._computed: list[dict[ArrayExpr, Buffer]] = [{}]
        self._n_names = 0
        self._kernel: LoopNest | None = None

    @property
    def primitive(self) -> str:
        """The primitive whose equation is compiled now, or "copy" outside of equations."""
        return self.equation.primitive if self.equation else "copy"

    @property
    def outs(self) -> list[Any]:
        """The avals of the results of the current equation."""
        return [v.aval for v in self.equation.outputs] if self.equation else []

    @property
    def out(self) -> Any:
        """The aval of the first result of the current equation."""
        return self.outs[0]

    # Values.

    def constant(self, value: Any, dtype: Any = None) -> ArrayExpr:
        """Return `value` as a constant array. Without axes, it is a literal in the source."""
        array = np.asarray(value, dtype)
        if array.ndim:
            return self.program.constant(array)
        text = storage.literal(array, array.dtype)
        return LazyArray((), array.dtype, lambda k, index: text)

    def buffer(self, shape: Sequence[int] | None = None, dtype: Any = None) -> Buffer:
        """Return a new array in the work memory of the program, for a rule to write to.

        Its shape and dtype default to the shape and dtype of the first result of the current
        equation.
        """
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
        """Return a lazy array, whose entries are computed by the loops that read them.

        **Arguments:**

        - `entry`: given a loop nest and an index, returns the expression of an entry, and may write
            statements to the loop nest.
        - `operands`: the arrays that `entry` reads.
        - `shape`, `dtype`: of the lazy array. The default is the shape and dtype of the first
            result of the current equation.
        - `cost`: about the number of instructions that `entry` adds per entry.
        """
        shape = self.out.shape if shape is None else shape
        dtype = np.dtype(self.out.dtype if dtype is None else dtype)
        cost += sum(x.cost for x in operands if isinstance(x, LazyArray))
        reads = lazy_arrays_in(*operands)
        return LazyArray(tuple(shape), dtype, entry, cost, reads, self.primitive)

    def update(
        self, base: ArrayExpr, update: Callable[..., None], *operands: ArrayExpr
    ) -> ArrayExpr:
        """Return `base` with some entries overwritten. Loops update it in place if possible.

        **Arguments:**

        - `base`: the array to update.
        - `update`: called as `update(buffer, *operands)`, writes to a buffer that contains `base`.
        - `operands`: the other arrays that `update` reads.
        """

        def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
            return k.read(self.force(value), index)

        reads, cost = lazy_arrays_in(base, *operands), _MAX_CHEAP_COST + 1
        rest = (reads, self.primitive, base, operands, update)
        value = UpdatedArray(base.shape, base.dtype, entry, cost, *rest)
        return value

    def force(self, value: ArrayExpr) -> Buffer:
        """Return an array in memory. A lazy array is computed into memory, but only once."""
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
        """Write code that computes an array into `into`, or into new memory. Return the buffer."""
        buffer = into or self.buffer(value.shape, value.dtype)
        if isinstance(value, UpdatedArray):
            self.copy(value.base, buffer)
            value.update(buffer, *value.operands)
            return buffer
        with self.kernel(_name_of(value)) as k, k.loops(value.shape) as index:
            k.store(buffer, index, k.read(value, index))
        return buffer

    def force_costly(self, value: ArrayExpr) -> ArrayExpr:
        """Return an array that is cheap to read more than once.

        A lazy array whose entries are costly is computed into memory now. Other arrays are returned
        unchanged.
        """
        if self._kernel is not None:
            return self._let(value)
        return (
            self.force(value)
            if isinstance(value, LazyArray) and value.cost > _MAX_CHEAP_COST
            else value
        )

    def _let(self, value: ArrayExpr) -> ArrayExpr:
        """Assign a scalar to a local variable of the kernel that is being written.

        Return the variable as an array. Outside of a kernel, or if `value` has axes, return `value`
        unchanged.
        """
        if value.ndim or self._kernel is None:
            return value
        return scalar_expr(self._kernel.let(self._kernel.read(value, ())), value.dtype)

    def hoist(self, value: ArrayExpr, axes: Sequence[int]) -> ArrayExpr:
        """Compute a lazy operand now if loops over the result would compute its entries repeatedly.

        **Arguments:**

        - `value`: the operand, which broadcasts to the result.
        - `axes`: the axes of the result along which the operand is not repeated.
        """
        shape = self.out.shape
        others = [axis for axis in range(len(shape)) if axis not in axes and shape[axis] > 1]
        again = others and axes and min(others) < max(axes)
        return self.force_costly(value) if again else value

    def reshape(self, value: ArrayExpr, shape: Sequence[int]) -> ArrayExpr:
        """Return an array with another shape of the same size."""
        result = reshape(value, tuple(shape))
        return self.force(value).reshape(tuple(shape)) if result is None else result

    def convert(self, value: ArrayExpr, dtype: Any) -> ArrayExpr:
        """Return an array with another dtype, converted as in JAX."""
        source, target = value.dtype, np.dtype(dtype)
        if source == target:
            return value
        entry = lambda k, index: k.let(storage.cast(k, k.read(value, index), source, target))
        return self.lazy(entry, value, shape=value.shape, dtype=target, cost=1)

    # Kernels and the program.

    @contextmanager
    def kernel(self, name: str | None = None) -> Iterator[LoopNest]:
        """Open a kernel, and call it at this point of the program. Yield its loop nest.

        `name` is the name of its function, by default the name of the current primitive.
        """
        k = LoopNest()
        yield k
        if k.written:
            function = self.program.add_kernel(name or self.primitive, k)
            self.call(function, *k.buffers)

    def call(self, function: str, *pointers: Buffer) -> None:
        """Write a statement that calls a function of the program with pointers to buffers.

        `function` is the name of the function.
        """
        pieces: list[str | Buffer] = [f"{function}("]
        for pointer in pointers:
            pieces += [pointer, ", "]
        self.line(*pieces[: max(1, 2 * len(pointers))], ")")

    def line(self, *pieces: str | Buffer) -> None:
        """Write a statement of the program, which consists of text and pointers to buffers."""
        note = self.equation.line if self.equation else ""
        self._bodies[-1].append(Statement(pieces, note))

    @contextmanager
    def block(self, *pieces: str | Buffer) -> Iterator[None]:
        """Write the header of a block, such as `while ...:`, and open the block.

        Code after the block does not reuse lazy arrays that were computed in the block.
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
        """The statements of the current block so far."""
        return self._bodies[-1]

    @property
    def earlier_statements(self) -> Iterator[Statement]:
        """The statements before the current block."""
        for body in self._bodies[:-1]:
            yield from body[:-1]

    @contextmanager
    def repeat(self, length: int, reverse: bool = False) -> Iterator[str]:
        """Open a loop of `length` iterations in the program. Yield the name of its variable."""
        name = self.name("step")
        steps = f"range({length - 1}, -1, -1)" if reverse else f"range({length})"
        with self.block(f"for {name} in {steps}:"):
            yield name

    def name(self, prefix: str) -> str:
        """Return a variable name of the generated program that is not used yet.

        It is `prefix` and a number.
        """
        self._n_names += 1
        return f"{prefix}{self._n_names - 1}"

    def function(self, function: Callable[..., Any]) -> str:
        """Let the generated program call a function by its `__name__`. Return the name."""
        return self.program.function(function)

    # Equations.

    def inline(self, jaxpr: Any, *operands: ArrayExpr) -> list[ArrayExpr]:
        """Compile a jaxpr at this point of the program. Return its results.

        Operands that the jaxpr may read more than once should be cheap.
        """
        return self.run(graph_of(jaxpr), operands)

    def inline_function(self, f: Callable[..., Any], *operands: ArrayExpr) -> list[ArrayExpr]:
        """Trace and compile a JAX function that returns a list. Return its results."""
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return self.inline(jax.make_jaxpr(f)(*avals), *operands)

    def inline_into_kernel(self, k: LoopNest, jaxpr: Any, *operands: ArrayExpr) -> list[str]:
        """Write a jaxpr of scalars into the kernel `k`. Return expressions for its results.

        All its primitives must be computable within a kernel, which `require_fused` checks.
        """
        outer, self._kernel = self._kernel, k
        results = self.inline(jaxpr, *operands)
        self._kernel = outer
        return [k.read(result, ()) for result in results]

    def run(self, graph: Graph, operands: Sequence[ArrayExpr]) -> list[ArrayExpr]:
        """Compile a graph at this point of the program. Return its results."""
        values: dict[Variable, ArrayExpr] = dict(zip(graph.inputs, operands, strict=True))
        counts = count_readers(graph, FUSED)

        def value_of(variable: Variable) -> ArrayExpr:
            if variable not in values:
                values[variable] = self.constant(variable.value, variable.aval.dtype)
            return values[variable]

        outer = self.equation
        for equation in graph.equations:
            self.equation = equation
            results = self._run_equation([value_of(v) for v in equation.inputs])
            for variable, value in zip(equation.outputs, results, strict=True):
                values[variable] = self._force_if_shared(value, counts.get(variable, 0))
        self.equation = outer
        return [value_of(v) for v in graph.outputs]

    def _force_if_shared(self, value: ArrayExpr, n_readers: int) -> ArrayExpr:
        """Compute `value` into memory if it is a costly lazy array that several loops read.

        Do so also if it depends on too many lazy arrays for one loop. `n_readers` is the number of
        loops that read it.
        """
        if self._kernel is not None or not isinstance(value, LazyArray):
            return value
        costly = value.cost > _MAX_CHEAP_COST and n_readers > 1
        return self.force(value) if costly or len(value.reads) > _MAX_FUSED else value

    def _run_equation(self, operands: list[ArrayExpr]) -> list[ArrayExpr]:
        equation = self.equation
        assert equation is not None
        name = equation.primitive
        for v in [*equation.inputs, *equation.outputs]:
            self._check(v.aval)
        if equation.has_empty_results:
            return [self.buffer(aval.shape, aval.dtype) for aval in self.outs]
        if name not in funcify:
            if isinstance(self.calls, Fallbacks):
                return [*self.calls.compile(self, operands)]
            if name in DEBUG_PRIMITIVES:
                _leave_out(equation)
                return []
            raise funcify.missing_rule_error(name, equation.line)
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
        """True while equations are written into a kernel, where every value is a scalar."""
        return self._kernel is not None

    def _by_rule(self, rule: Callable[..., Any], operands: list[ArrayExpr]) -> Any:
        """Run the rule of the current equation on operands, and return the results.

        If the rule is a Numba function, or returns one, write a call of this function.
        """
        assert self.equation is not None
        function = rule
        if not is_numba_function(rule):
            function = rule(self, *operands, **self.equation.params)
            if not callable(function):
                return function
        from .njit_functions import call_function  # imports Numba

        return call_function(self, rule, function, operands)

    def _check(self, aval: Any) -> None:
        assert self.equation is not None
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        where = f"in {self.equation.primitive!r}, from {self.equation.line}"
        if shape is None or not all(isinstance(n, int) for n in shape):
            raise NotImplementedError(
                f"vn.numba needs static shapes, but {aval} {where} does not have one. Compile once "
                "for each shape."
            )
        if not storage.is_supported(dtype):
            raise NotImplementedError(f"vn.numba has no arrays of dtype {dtype}, as {where}.")


def require_fused(jaxpr: Any) -> None:
    """Raise `Unsupported` unless all primitives of a jaxpr of scalars can be part of a kernel."""
    for equation in graph_of(jaxpr).equations:
        name = equation.primitive
        if name not in FUSED or name == "dynamic_update_slice" or name.startswith("scatter"):
            raise Unsupported("jaxpr", f"it may not have {name!r}.")


def _leave_out(equation: Equation) -> None:
    """Warn that the compiled program omits a debug primitive, such as `debug_callback`."""
    message = (
        f"vn.numba leaves out {equation.primitive!r}, from {equation.line}: compiled code calls no "
        "Python. To have JAX run it, in tens of microseconds each time, compile with "
        "fallback='jax'."
    )
    warnings.warn_explicit(message, UserWarning, *user_place())


def _name_of(value: ArrayExpr) -> str:
    """Return a name for the kernel that computes an array, made of the primitives that it fuses."""
    if not isinstance(value, LazyArray):
        return "copy"
    costly = [x.name for x in value.reads if isinstance(x, LazyArray) and x.cost > 0]
    names = [value.name, *sorted({*costly} - {value.name})]
    return "_".join(names[:3])


def broadcast_read(k: LoopNest, value: ArrayExpr, index: Sequence[Index]) -> str:
    """Return an expression for an entry of an operand whose axes of size 1 broadcast.

    `k` is the kernel that reads the entry, and `index` is the index of the entry in the result.
    """
    return k.read(
        value,
        [Index() if n == 1 else i for n, i in zip(value.shape, index, strict=False)],
    )
