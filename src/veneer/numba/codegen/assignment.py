"""Assignment at once: what a round of a loop computes, put in the place of what it was computed of.

New values may be lazy, and read old ones: each is written when nothing is left that reads what it
overwrites. Where that cannot be, it is computed beside, and copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .arrays import ArrayExpr, Buffer, Memory, UpdatedArray
from .builder import Builder
from .index import flat
from .loop_nest import LoopNest
from .program import pointed_at


@dataclass(eq=False)
class _Pending:
    """A value for a piece of memory.

    `reads` says for memory that it is computed of from which offsets on an entry is read that has
    the index of the entry that is computed, or None where one of another index is.
    """

    target: Buffer
    value: ArrayExpr
    reads: dict[Memory, set[str | None]]

    @property
    def in_place(self) -> bool:
        """Whether it is what is there already, with some entries changed."""
        return isinstance(self.value, UpdatedArray) and _root(self.value) == self.target


@dataclass(eq=False)
class _Group:
    """What one kernel writes."""

    members: list[_Pending] = field(default_factory=list)

    def reads(self, others: "_Group") -> bool:
        written = {other.target.memory for other in others.members}
        return any(not written.isdisjoint(member.reads) for member in self.members)

    @property
    def size(self) -> int:
        return sum(member.target.size for member in self.members)


def assign(
    b: Builder, targets: Sequence[Buffer], values: Sequence[ArrayExpr], final: bool = False
) -> None:
    """Writes values, which may read the targets, to targets.

    **Arguments:**

    - `final`: whether nothing that was computed in the block at hand is used after this. Memory of
        a value may then become that of its target.
    """
    beside: list[tuple[Buffer, Buffer]] = []
    pending = []
    for target, value in zip(targets, values, strict=True):
        if isinstance(value, Buffer) and _is_own(b, value.memory):
            beside.append((target, value))
        elif not isinstance(value, Buffer) or pointed_at(value) != pointed_at(target):
            pending.append(_Pending(target, value, _reads(value)))
    groups = _grouped(b, pending, beside)
    while groups:
        ready = (g for g in groups if not any(other.reads(g) for other in groups if other is not g))
        group = next(ready, None)
        if group is None:  # each is read by another: the smallest is computed beside
            group = min(groups, key=lambda group: group.size)
            beside += [(member.target, _computed(b, member.value)) for member in group.members]
        else:
            _write(b, group)
        groups.remove(group)
    for target, value in beside:
        if not (final and _became(b, value, target)):
            b.copy(value, target)


def _root(value: ArrayExpr) -> ArrayExpr:
    while isinstance(value, UpdatedArray):
        value = value.base
    return value


def _reads(value: ArrayExpr) -> dict[Memory, set[str | None]]:
    """The memory that a value is computed of; see `_Pending`."""
    reads: dict[Memory, set[str | None]] = {}
    while isinstance(value, UpdatedArray):
        for memory in (memory for operand in value.operands for memory in _reads(operand)):
            reads.setdefault(memory, set()).add(None)
        value = value.base
    k = LoopNest()
    with k.loops(value.shape) as index:
        k.read(value, index)
        target_place = flat(index, value.shape)
    for access in k.accesses:
        place = access.offset if access.place == target_place else None
        reads.setdefault(access.memory, set()).add(place)
    return reads


def _grouped(
    b: Builder, pending: list[_Pending], beside: list[tuple[Buffer, Buffer]]
) -> list[_Group]:
    """Groups that write arrays of one shape; whose members read at most their place of them."""
    by_shape: dict[object, _Group] = {}
    for member in pending:
        key = member if isinstance(member.value, UpdatedArray) else member.target.shape
        by_shape.setdefault(key, _Group()).members.append(member)
    for group in by_shape.values():
        written = {member.target.memory: member.target.offset for member in group.members}
        for member in [*group.members]:
            reads = {memory: member.reads[memory] for memory in written.keys() & member.reads}
            aligned = all(places == {written[memory]} for memory, places in reads.items())
            if not (aligned or member.in_place):
                beside.append((member.target, _computed(b, member.value)))
                group.members.remove(member)
    return [group for group in by_shape.values() if group.members]


def _computed(b: Builder, value: ArrayExpr) -> Buffer:
    """A value in memory that nothing assigned is in."""
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
    """Changes entries in place, of operands that are computed before any are."""
    value, target = member.value, member.target
    assert isinstance(value, UpdatedArray)
    if not member.in_place:
        b.copy(value, target)
        return
    updates = []
    while isinstance(value, UpdatedArray):
        operands = [_apart(b, operand, target) for operand in value.operands]
        updates.append((value.update, operands))
        base = value.base
        value = base
    for update, operands in reversed(updates):
        update(target, *operands)


def _apart(b: Builder, operand: ArrayExpr, target: Buffer) -> ArrayExpr:
    """An operand that does not read the memory of a target."""
    return b.copy(operand) if target.memory in _reads(operand) else operand


# Memory that becomes a part of other memory.


def _is_own(b: Builder, memory: Memory) -> bool:
    """Whether memory was first used in the block at hand."""
    if memory.kind != "work" or memory.alias is not None:
        return False
    if any(memory in statement.all_memories for statement in b.earlier_statements):
        return False
    return any(memory in statement.all_memories for statement in b.block_statements)


def _became(b: Builder, value: Buffer, target: Buffer) -> bool:
    """Makes the memory of a value that of its target, if the old one is not read after that."""
    memory, whole = value.memory, pointed_at(target)[0]
    if memory.alias is not None or value.size != memory.size or value.dtype != target.dtype:
        return False
    used = [statement.all_memories for statement in b.block_statements]
    first = next(n for n, memories in enumerate(used) if memory in memories)
    if any(whole in memories for memories in used[first:]) and target.offset == "0":
        return False
    memory.alias = target
    return True
