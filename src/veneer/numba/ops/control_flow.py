"""Control flow: scan, while, cond, and calls whose derivatives are given."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._jax.primitives import scan_counts
from ..codegen.arrays import ArrayExpr, Buffer, LazyArray
from ..codegen.assignment import assign
from ..codegen.builder import Builder
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..front.graph import Graph, graph_of
from ..maths import instructions
from ..reference import evaluate, evaluate_jaxpr
from ..registry import funcify, fused, perform


def _read_in_loop(b: Builder, value: ArrayExpr) -> ArrayExpr:
    """A value that each round of a loop may read: computed now, unless it is a view of memory."""
    return b.force(value) if isinstance(value, LazyArray) and value.cost > 0 else value


class _Carried:
    """The values that a loop carries: those that change are in memory of their own."""

    def __init__(self, b: Builder, values: Sequence[ArrayExpr], changing: Sequence[bool]):
        self.b, self.changing = b, changing
        self.values = [
            b.buffer(v.shape, v.dtype) if changes else _read_in_loop(b, v)
            for v, changes in zip(values, changing, strict=True)
        ]
        assign(b, self._buffers, self._those_that_change(values))

    @property
    def _buffers(self) -> list[Buffer]:
        return [v for v in self._those_that_change(self.values) if isinstance(v, Buffer)]

    def _those_that_change(self, values: Sequence[ArrayExpr]) -> list[ArrayExpr]:
        return [v for v, changes in zip(values, self.changing, strict=True) if changes]

    def become(
        self,
        values: Sequence[ArrayExpr],
        ys: Sequence[Buffer] = (),
        of_ys: Sequence[ArrayExpr] = (),
    ) -> None:
        """Puts what a round has computed in the place of the values, and in `ys`."""
        targets = [*self._buffers, *ys]
        assign(self.b, targets, [*self._those_that_change(values), *of_ys], final=True)


def _changing(graph: Graph, first: int, n: int) -> list[bool]:
    """Which carried values a body returns other than as they are."""
    return [graph.outputs[i] is not graph.inputs[first + i] for i in range(n)]


@funcify.register("scan")
def _(
    b: Builder, *operands: ArrayExpr, jaxpr: Any, length: int, reverse: bool, **params: Any
) -> list[ArrayExpr]:
    n_consts, n_carry = scan_counts(params)
    graph = graph_of(jaxpr)
    outs = b.outs
    consts = [_read_in_loop(b, x) for x in operands[:n_consts]]
    xs = [b.force(x) for x in operands[n_consts + n_carry :]]
    changing = _changing(graph, n_consts, n_carry)
    carried = _Carried(b, operands[n_consts : n_consts + n_carry], changing)
    ys = [b.buffer(aval.shape, aval.dtype) for aval in outs[n_carry:]]
    with b.repeat(length, reverse) as step:
        entries = [x.part(step) for x in xs]
        results = b.run(graph, [*consts, *carried.values, *entries])
        parts = [y.part(step) for y in ys]
        carried.become(results[:n_carry], parts, results[n_carry:])
    return [*carried.values, *ys]


@perform.register("scan")
def _(*operands: Any, jaxpr: Any, length: int, reverse: bool, **params: Any) -> list[Any]:
    n_consts, n_carry = scan_counts(params)
    graph = graph_of(jaxpr)
    consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
    xs = operands[n_consts + n_carry :]
    avals = [v.aval for v in graph.outputs[n_carry:]]
    ys = [np.zeros((length, *aval.shape), aval.dtype) for aval in avals]
    for step in range(length)[:: -1 if reverse else 1]:
        results = evaluate(graph, [*consts, *carry, *(x[step] for x in xs)])
        carry = tuple(results[:n_carry])
        for y, entry in zip(ys, results[n_carry:], strict=True):
            y[step] = entry
    return [*carry, *ys]


@funcify.register("while")
def _(
    b: Builder,
    *operands: ArrayExpr,
    cond_jaxpr: Any,
    cond_nconsts: int,
    body_jaxpr: Any,
    body_nconsts: int,
    **_: Any,
) -> list[ArrayExpr]:
    body, n_consts = graph_of(body_jaxpr), cond_nconsts + body_nconsts
    consts = [_read_in_loop(b, x) for x in operands[:n_consts]]
    changing = _changing(body, body_nconsts, len(operands) - n_consts)
    carried = _Carried(b, operands[n_consts:], changing)
    with b.block("while True:"):
        (goes_on,) = b.inline(cond_jaxpr, *consts[:cond_nconsts], *carried.values)
        b.line("if not ", b.force(_any(b, goes_on)), "[0]: break")
        results = b.run(body, [*consts[cond_nconsts:], *carried.values])
        if goes_on.ndim:
            pairs = zip(results, carried.values, strict=True)
            results = [_where(b, b.force(goes_on), new, old) for new, old in pairs]
        carried.become(results)
    return carried.values


def _any(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """Whether one of the loops of a batch goes on."""
    if x.ndim == 0:
        return x
    out = b.buffer((), bool)
    with b.kernel("any") as k:
        total = k.here("False", "total")
        with k.loops(x.shape) as index:
            k.line(f"{total} = {total} | {k.read(x, index)}")
        k.store(out, (), total)
    return out


def _where(b: Builder, goes_on: ArrayExpr, new: ArrayExpr, old: ArrayExpr) -> ArrayExpr:
    """What loops of a batch have computed, or what they had where they have ended."""

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        condition = k.read(goes_on, index[: goes_on.ndim])
        return k.let(k.call(instructions.select, condition, k.read(new, index), k.read(old, index)))

    return b.lazy(entry, new, old, shape=new.shape, dtype=new.dtype, cost=1)


@perform.register("while")
def _(
    *operands: Any,
    cond_jaxpr: Any,
    cond_nconsts: int,
    body_jaxpr: Any,
    body_nconsts: int,
    **_: Any,
) -> list[Any]:
    of_cond, rest = operands[:cond_nconsts], operands[cond_nconsts:]
    of_body, carry = rest[:body_nconsts], list(rest[body_nconsts:])
    while np.any(goes_on := evaluate_jaxpr(cond_jaxpr, *of_cond, *carry)[0]):
        results = evaluate_jaxpr(body_jaxpr, *of_body, *carry)
        carry = [
            np.where(goes_on.reshape(goes_on.shape + (1,) * (new.ndim - goes_on.ndim)), new, old)
            for new, old in zip(results, carry, strict=True)
        ]
    return carry


@funcify.register("cond")
def _(
    b: Builder, which: ArrayExpr, *operands: ArrayExpr, branches: Any, **params: Any
) -> list[ArrayExpr]:
    known = _known_branch(b, branches, params)
    values = [b.cheap(x) for x in operands]
    if known is not None:
        return b.inline(branches[known], *values)
    outs = [b.buffer(aval.shape, aval.dtype) for aval in b.outs]
    index, last = b.force(which), len(branches) - 1
    for number, branch in enumerate(branches):
        word = "if" if number == 0 else "elif"
        header = ["else:"] if number == last else [f"{word} ", index, f"[0] <= {number}:"]
        with b.block(*header):
            assign(b, outs, b.inline(branch, *values), final=True)
    return [*outs]


def _known_branch(b: Builder, branches: Any, params: Any) -> int | None:
    """The branch that is always taken: of one, of those for platforms, or of a known index."""
    if len(branches) == 1:
        return 0
    platforms = params.get("branches_platforms")
    if platforms is not None:
        return _of_cpu(platforms)
    assert b.equation is not None
    index = b.equation.inputs[0].value
    return None if index is None else min(max(int(index), 0), len(branches) - 1)


def _of_cpu(platforms: Any) -> int:
    """The first of branches that is for the CPU, or for all that no other is for."""
    fitting = (n for n, names in enumerate(platforms) if names is None or "cpu" in names)
    return next(fitting)


@perform.register("cond")
def _(which: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
    number = min(max(int(which), 0), len(branches) - 1)
    return evaluate_jaxpr(branches[number], *operands)


@funcify.register("platform_index")
def _(b: Builder, *, platforms: Any) -> ArrayExpr:
    return b.constant(_of_cpu(platforms), b.out.dtype)


@perform.register("platform_index")
def _(*, platforms: Any) -> Any:
    return np.asarray(_of_cpu(platforms), np.int32)


@funcify.register("custom_linear_solve")
def _(b: Builder, *operands: ArrayExpr, const_lengths: Any, jaxprs: Any) -> list[ArrayExpr]:
    values = [b.cheap(x) for x in _of_solve(operands, const_lengths)]
    return b.inline(jaxprs.solve, *values)


@perform.register("custom_linear_solve")
def _(*operands: Any, const_lengths: Any, jaxprs: Any) -> list[Any]:
    return evaluate_jaxpr(jaxprs.solve, *_of_solve(operands, const_lengths))


def _of_solve(operands: Sequence[Any], lengths: Any) -> list[Any]:
    """What the function that solves takes: its constants and the right-hand sides."""
    start = lengths.matvec + lengths.vecmat
    end = start + lengths.solve
    return [*operands[start:end], *operands[end + lengths.transpose_solve :]]


#: Primitives that return what they are given, and are there for compilers or for derivatives.
_AS_THEY_ARE = (
    "device_put sharding_constraint layout_constraint mesh_cast reshard pvary pcast name"
).split()


@fused(*_AS_THEY_ARE)
def _(b: Builder, *operands: ArrayExpr, **_: Any) -> list[ArrayExpr]:
    return [*operands]


@perform.register(*_AS_THEY_ARE)
def _(*operands: Any, **_: Any) -> list[Any]:
    return [*operands]
