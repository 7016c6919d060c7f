"""Control flow: scan, while, cond, and primitives that return their operands.

A loop keeps the values that change in separate memory. Each iteration writes the new values in
place of the old ones, with as few copies as possible: see `_assign`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..._jax.primitives import scan_counts
from ..codegen.arrays import (
    ArrayExpr,
    Buffer,
    Index,
    LazyArray,
    Memory,
    UpdatedArray,
    flatten_index,
)
from ..codegen.builder import Builder
from ..codegen.graph import Graph, graph_of
from ..codegen.loop_nest import LoopNest
from ..codegen.program import resolve_alias
from ..codegen.registry import evaluate, evaluate_jaxpr, funcify, fused, perform
from ..maths import instructions


def _force_before_loop(b: Builder, value: ArrayExpr) -> ArrayExpr:
    """Compute a lazy array into memory before a loop that reads it.

    Views are returned unchanged.
    """
    return b.force(value) if isinstance(value, LazyArray) and value.cost > 0 else value


class _Carry:
    """The carried values of a loop. Values that change have separate memory.

    `changing` says for each value whether an iteration returns another value than it got.
    """

    def __init__(self, b: Builder, values: Sequence[ArrayExpr], changing: Sequence[bool]):
        self.b, self.changing = b, changing
        self.values = [
            b.buffer(v.shape, v.dtype) if changes else _force_before_loop(b, v)
            for v, changes in zip(values, changing, strict=True)
        ]
        _assign(b, self._buffers, self._select_changing(values))

    @property
    def _buffers(self) -> list[Buffer]:
        return [v for v in self._select_changing(self.values) if isinstance(v, Buffer)]

    def _select_changing(self, values: Sequence[ArrayExpr]) -> list[ArrayExpr]:
        return [v for v, changes in zip(values, self.changing, strict=True) if changes]

    def assign(
        self,
        values: Sequence[ArrayExpr],
        ys: Sequence[Buffer] = (),
        new_ys: Sequence[ArrayExpr] = (),
    ) -> None:
        """Replace the carried values by `values`, the results of an iteration.

        At the same time, write the arrays `new_ys` to the buffers `ys`, which are the parts of the
        stacked results for this iteration.
        """
        targets = [*self._buffers, *ys]
        _assign(self.b, targets, [*self._select_changing(values), *new_ys], final=True)


def _changed_by_body(graph: Graph, first: int, n: int) -> list[bool]:
    """Return for each of `n` carried values whether an iteration changes it.

    `graph` is the body of the loop, and `first` the position of the first carried value.
    """
    return [graph.outputs[i] is not graph.inputs[first + i] for i in range(n)]


@funcify.register("scan")
def _(
    b: Builder, *operands: ArrayExpr, jaxpr: Any, length: int, reverse: bool, **params: Any
) -> list[ArrayExpr]:
    n_consts, n_carry = scan_counts(params)
    graph = graph_of(jaxpr)
    outs = b.outs
    consts = [_force_before_loop(b, x) for x in operands[:n_consts]]
    xs = [b.force(x) for x in operands[n_consts + n_carry :]]
    changing = _changed_by_body(graph, n_consts, n_carry)
    carried = _Carry(b, operands[n_consts : n_consts + n_carry], changing)
    ys = [b.buffer(aval.shape, aval.dtype) for aval in outs[n_carry:]]
    with b.repeat(length, reverse) as step:
        entries = [x.part(step) for x in xs]
        results = b.run(graph, [*consts, *carried.values, *entries])
        parts = [y.part(step) for y in ys]
        carried.assign(results[:n_carry], parts, results[n_carry:])
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
    consts = [_force_before_loop(b, x) for x in operands[:n_consts]]
    changing = _changed_by_body(body, body_nconsts, len(operands) - n_consts)
    carried = _Carry(b, operands[n_consts:], changing)
    with b.block("while True:"):
        (is_active,) = b.inline(cond_jaxpr, *consts[:cond_nconsts], *carried.values)
        b.line("if not ", b.force(_any(b, is_active)), "[0]: break")
        results = b.run(body, [*consts[cond_nconsts:], *carried.values])
        if is_active.ndim:
            pairs = zip(results, carried.values, strict=True)
            results = [_where(b, b.force(is_active), new, old) for new, old in pairs]
        carried.assign(results)
    return carried.values


def _any(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """Return whether any entry of `x` is true.

    Under `jax.vmap`, the condition of a loop has an entry for each loop of the batch. The generated
    loop ends when all entries are false.
    """
    if x.ndim == 0:
        return x
    out = b.buffer((), bool)
    with b.kernel("any") as k:
        total = k.assign("False", "total")
        with k.loops(x.shape) as index:
            k.line(f"{total} = {total} | {k.read(x, index)}")
        k.store(out, (), total)
    return out


def _where(b: Builder, is_active: ArrayExpr, new: ArrayExpr, old: ArrayExpr) -> ArrayExpr:
    """Return `new` where `is_active` is true, and `old` elsewhere.

    `is_active` says for each loop of a batch whether it still runs. `new` and `old` are a carried
    value after and before an iteration.
    """

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        condition = k.read(is_active, index[: is_active.ndim])
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
    cond_consts, rest = operands[:cond_nconsts], operands[cond_nconsts:]
    body_consts, carry = rest[:body_nconsts], list(rest[body_nconsts:])
    while np.any(is_active := evaluate_jaxpr(cond_jaxpr, *cond_consts, *carry)[0]):
        results = evaluate_jaxpr(body_jaxpr, *body_consts, *carry)
        carry = [
            np.where(
                is_active.reshape(is_active.shape + (1,) * (new.ndim - is_active.ndim)), new, old
            )
            for new, old in zip(results, carry, strict=True)
        ]
    return carry


@funcify.register("cond")
def _(
    b: Builder, which: ArrayExpr, *operands: ArrayExpr, branches: Any, **params: Any
) -> list[ArrayExpr]:
    known = _known_branch(b, branches, params)
    values = [b.force_costly(x) for x in operands]
    if known is not None:
        return b.inline(branches[known], *values)
    outs = [b.buffer(aval.shape, aval.dtype) for aval in b.outs]
    index, last = b.force(which), len(branches) - 1
    for number, branch in enumerate(branches):
        word = "if" if number == 0 else "elif"
        header = ["else:"] if number == last else [f"{word} ", index, f"[0] <= {number}:"]
        with b.block(*header):
            _assign(b, outs, b.inline(branch, *values), final=True)
    return [*outs]


def _known_branch(b: Builder, branches: Any, params: Any) -> int | None:
    """Return the index of the branch that a `cond` equation always takes.

    Return None if this depends on an operand.
    """
    if len(branches) == 1:
        return 0
    platforms = params.get("branches_platforms")
    if platforms is not None:
        return _cpu_branch(platforms)
    assert b.equation is not None
    index = b.equation.inputs[0].value
    return None if index is None else min(max(int(index), 0), len(branches) - 1)


def _cpu_branch(platforms: Any) -> int:
    """Return the index of the first branch that may run on the CPU.

    `platforms` has the names of the platforms for each branch, or None if it runs on all platforms.
    """
    return next(n for n, names in enumerate(platforms) if names is None or "cpu" in names)


@perform.register("cond")
def _(which: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
    number = min(max(int(which), 0), len(branches) - 1)
    return evaluate_jaxpr(branches[number], *operands)


@funcify.register("platform_index")
def _(b: Builder, *, platforms: Any) -> ArrayExpr:
    return b.constant(_cpu_branch(platforms), b.out.dtype)


@perform.register("platform_index")
def _(*, platforms: Any) -> Any:
    return np.asarray(_cpu_branch(platforms), np.int32)


@funcify.register("custom_linear_solve")
def _(b: Builder, *operands: ArrayExpr, const_lengths: Any, jaxprs: Any) -> list[ArrayExpr]:
    values = [b.force_costly(x) for x in _solve_operands(operands, const_lengths)]
    return b.inline(jaxprs.solve, *values)


@perform.register("custom_linear_solve")
def _(*operands: Any, const_lengths: Any, jaxprs: Any) -> list[Any]:
    return evaluate_jaxpr(jaxprs.solve, *_solve_operands(operands, const_lengths))


def _solve_operands(operands: Sequence[Any], lengths: Any) -> list[Any]:
    """Return the operands for the jaxpr `solve` of a `custom_linear_solve` equation.

    `lengths` has the number of constant operands of each jaxpr of the equation.
    """
    start = lengths.matvec + lengths.vecmat
    end = start + lengths.solve
    return [*operands[start:end], *operands[end + lengths.transpose_solve :]]


#: Primitives that return their operands, and matter only to compilers or to derivatives.
_IDENTITIES = (
    "device_put sharding_constraint layout_constraint mesh_cast reshard pvary pcast name "
    "optimization_barrier"
).split()


@fused(*_IDENTITIES)
def _(b: Builder, *operands: ArrayExpr, **_: Any) -> list[ArrayExpr]:
    return [*operands]


perform.register(*_IDENTITIES)(lambda *operands, **_: [*operands])


# Assignment of all carried values at once.


@dataclass(eq=False)
class _Pending:
    """An assignment of the array `value` to the buffer `target`, which is not written yet.

    `reads` maps each block of memory that `value` reads to a set. The set has the offset of each
    array in the block that is read only at the index of the entry to write, and None if other
    entries are read.
    """

    target: Buffer
    value: ArrayExpr
    reads: dict[Memory, set[str | None]]

    @property
    def in_place(self) -> bool:
        """True if the value is the target itself with some entries overwritten.

        Then only these entries need to be written.
        """
        value = self.value
        while isinstance(value, UpdatedArray):
            value = value.base
        return value is not self.value and value == self.target


@dataclass(eq=False)
class _Group:
    """Assignments to buffers of one shape that one kernel computes."""

    members: list[_Pending] = field(default_factory=list)

    def reads(self, other: "_Group") -> bool:
        """Return whether an assignment of this group reads memory that `other` writes."""
        written = {member.target.memory for member in other.members}
        return any(not written.isdisjoint(member.reads) for member in self.members)

    @property
    def size(self) -> int:
        return sum(member.target.size for member in self.members)


def _assign(
    b: Builder, targets: Sequence[Buffer], values: Sequence[ArrayExpr], final: bool = False
) -> None:
    """Write code that assigns arrays to buffers as if all at once.

    The arrays may be lazy and read the old entries of the buffers. So an array is written when no
    remaining array reads the entries that are overwritten. In a cycle, an array is first computed
    into other memory and then copied.

    **Arguments:**

    - `targets`, `values`: the buffers, and the array for each.
    - `final`: whether nothing that the current block computed is used later. The memory of an array
        may then become part of the memory of its target.
    """
    copies: list[tuple[Buffer, Buffer]] = []
    pending = []
    for target, value in zip(targets, values, strict=True):
        if isinstance(value, Buffer) and _is_own(b, value.memory):
            copies.append((target, value))
        elif not isinstance(value, Buffer) or resolve_alias(value) != resolve_alias(target):
            pending.append(_Pending(target, value, _find_reads(value)))
    groups = _group_assignments(b, pending, copies)
    while groups:
        ready = (g for g in groups if not any(other.reads(g) for other in groups if other is not g))
        group = next(ready, None)
        if group is None:  # a cycle, which a copy of the smallest group breaks
            group = min(groups, key=lambda group: group.size)
            copies += [(member.target, _compute_copy(b, member.value)) for member in group.members]
        else:
            _write(b, group)
        groups.remove(group)
    for target, value in copies:
        if not (final and _move_memory(b, value, target)):
            b.copy(value, target)


def _find_reads(value: ArrayExpr) -> dict[Memory, set[str | None]]:
    """Return the blocks of memory that an array reads, as a dict like `_Pending.reads`."""
    reads: dict[Memory, set[str | None]] = {}
    while isinstance(value, UpdatedArray):
        for memory in (memory for operand in value.operands for memory in _find_reads(operand)):
            reads.setdefault(memory, set()).add(None)
        value = value.base
    k = LoopNest()
    with k.loops(value.shape) as index:
        k.read(value, index)
        written = flatten_index(index, value.shape)
    for access in k.accesses:
        offset = access.offset if access.position == written else None
        reads.setdefault(access.memory, set()).add(offset)
    return reads


def _group_assignments(
    b: Builder, pending: list[_Pending], copies: list[tuple[Buffer, Buffer]]
) -> list[_Group]:
    """Group assignments to buffers of one shape, which one loop over all entries can compute.

    If a value reads other entries of a target of its group than the entry to write, compute it now.
    Add a pair of its target and this copy to `copies`.
    """
    groups: dict[object, _Group] = {}
    for member in pending:
        key = member if isinstance(member.value, UpdatedArray) else member.target.shape
        groups.setdefault(key, _Group()).members.append(member)
    for group in groups.values():
        written = {member.target.memory: member.target.offset for member in group.members}
        for member in [*group.members]:
            reads = {memory: member.reads[memory] for memory in written.keys() & member.reads}
            aligned = all(offsets == {written[memory]} for memory, offsets in reads.items())
            if not (aligned or member.in_place):
                copies.append((member.target, _compute_copy(b, member.value)))
                group.members.remove(member)
    return [group for group in groups.values() if group.members]


def _compute_copy(b: Builder, value: ArrayExpr) -> Buffer:
    """Compute an array into memory that is not the target of an assignment."""
    return b.copy(value) if isinstance(value, Buffer) else b.force(value)


def _write(b: Builder, group: _Group) -> None:
    first = group.members[0]
    if isinstance(first.value, UpdatedArray):
        _update(b, first)
        return
    with b.kernel("assign") as k, k.loops(first.target.shape) as index:
        texts = [k.let(k.read(member.value, index)) for member in group.members]
        for member, text in zip(group.members, texts, strict=True):
            k.store(member.target, index, text)


def _update(b: Builder, member: _Pending) -> None:
    """Write an assignment of an `UpdatedArray`.

    If the array is the target with some entries overwritten, write only these entries.
    """
    value, target = member.value, member.target
    assert isinstance(value, UpdatedArray)
    if not member.in_place:
        b.copy(value, target)
        return
    updates = []
    while isinstance(value, UpdatedArray):
        operands = [
            b.copy(operand) if target.memory in _find_reads(operand) else operand
            for operand in value.operands
        ]
        updates.append((value.update, operands))
        base = value.base
        value = base
    for update, operands in reversed(updates):
        update(target, *operands)


def _is_own(b: Builder, memory: Memory) -> bool:
    """Return whether `memory` is work memory that the current block of statements uses first."""
    if memory.kind != "work" or memory.alias is not None:
        return False
    if any(memory in statement.all_memories for statement in b.earlier_statements):
        return False
    return any(memory in statement.all_memories for statement in b.block_statements)


def _move_memory(b: Builder, value: Buffer, target: Buffer) -> bool:
    """Let `value` be computed directly into the memory of `target`, so that no copy is needed.

    Return whether this is possible. It is not if the old entries of `target` are still used after
    `value` is first written, or if the sizes or dtypes do not fit.
    """
    memory, target_memory = value.memory, resolve_alias(target)[0]
    if memory.alias is not None or value.size != memory.size or value.dtype != target.dtype:
        return False
    used = [statement.all_memories for statement in b.block_statements]
    first = next(n for n, memories in enumerate(used) if memory in memories)
    if any(target_memory in memories for memories in used[first:]) and target.offset == "0":
        return False
    memory.alias = target
    return True
