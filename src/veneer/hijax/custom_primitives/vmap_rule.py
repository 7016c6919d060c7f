"""Maps of custom primitives by the rule that a user sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..high import apply
from ..high_rules import abstract_eval
from ..operations import Vmap
from ..values import exposed, value_of
from .derivatives import up_to
from .expansion import Expansion, listed, type_of_one


def batch_by_rule(
    expansion: Expansion, size: int, values: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of a primitive mapped, and their axes."""
    mapped = MappedByRule.of(expansion, size, tuple(dims))
    has_axis, _ = mapped.known(tuple(map(type_of_one, values)))
    return apply(mapped, *values), [0 if h else None for h in has_axis]


@dataclass(frozen=True)
class MappedByRule(Expansion):
    """The primitive mapped, by the rule; known of the results is which have the axis."""

    size: int
    dims: tuple[int | None, ...]

    suffix = ".vmap"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        pairs = zip(self.structure.group(values), self.structure.group(self.dims), strict=True)
        groups = [_moved(g, dims, self.size) for g, dims in pairs]
        args = self.structure.unflatten(exposed(x) for group, _ in groups for x in group)
        has_axis = jax.tree.unflatten(self.structure.tree, [any_has for _, any_has in groups])
        pair = self.call("vmap", self.size, has_axis, *args)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise self.refuse(
                "the rule of defvmap must return a pair: results, and which of them are mapped"
            )
        flat, out = self.flattened(pair[0])
        each_has = _broadcast(self, pair[1], out.tree)
        pairs = zip(each_has, out.group(flat), strict=True)
        has = [bool(h) for h, group in pairs for _ in group]
        self._check(values, flat, has)
        return flat, has

    def _check(self, values: Sequence[Any], flat: Sequence[Any], has_axis: Sequence[bool]) -> None:
        expansion, types = Expansion.of(self), [type_of_one(x) for x in values]
        stacks, _ = abstract_eval(*types, operation=Vmap(expansion, self.size, None, self.dims))
        by_rule = [type_of_one(x) for x in flat]
        pairs = zip(stacks, has_axis, strict=True)
        wanted = [(t.shape if h else t.shape[1:], t.dtype) for t, h in pairs]
        if [(t.shape, t.dtype) for t in by_rule] != wanted:
            raise self.refuse(
                f"the rule of defvmap returns {listed(by_rule)} (mapped: {list(has_axis)}), but "
                f"the function itself, mapped over {self.size}, returns {listed(stacks)}"
            )


def _moved(group: list[Any], dims: Sequence[Any], size: int) -> tuple[list[Any], bool]:
    """What is flat of one operand, with the axis first, and whether it has it."""
    has_axis = any(d is not None for d in dims)
    if not has_axis:
        return group, False

    def first(leaf: Any, d: int | None) -> Any:
        if d is None:
            return jnp.broadcast_to(leaf, (size, *jnp.shape(leaf)))
        return jnp.moveaxis(leaf, d, 0)

    pairs = zip(map(value_of, group), dims, strict=True)
    return [jax.tree.map(lambda leaf, d=d: first(leaf, d), x) for x, d in pairs], True


def _broadcast(operation: Expansion, prefix: Any, tree: Any) -> list[Any]:
    if isinstance(prefix, bool):
        return [prefix] * tree.num_leaves
    return up_to(operation, tree, prefix)
