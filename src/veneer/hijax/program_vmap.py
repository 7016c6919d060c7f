"""Maps of high primitives: by the rule, or of what they and their derivatives run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._jax.hijax import GradAccum, ValAccum, Zero
from .high_array import HighArray, value_of
from .lifted import abstract_eval, apply, jvp_of_vmap, transpose
from .operations import Pack, Ruled, Unpack, Vmap
from .program_rules import full_zero, up_to
from .programs import Expand, listed, type_of_one
from .types import TangentType, exposed


def ruled_batch(
    operation: Any, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of an operation mapped, and their axes."""
    if type(operation) is Expand and "vmap" in operation.primitive.rules:
        by_rule = MappedByRule.of(operation, size, tuple(dims))
        has_axis, _ = by_rule.known(tuple(map(type_of_one, values)))
        return apply(by_rule, *values), [0 if h else None for h in has_axis]
    out = apply(Mapped(operation, size, name, tuple(dims)), *values)
    return out, [0] * len(out)


class Mapped(Vmap, Ruled):
    """An operation mapped, of which derivatives and transposes are those of it, mapped."""

    @property
    def result_types(self) -> list[Any] | None:
        """Those of the operation, with an axis."""
        found = self.of.result_types
        return found and [
            t.inc_rank(self.size, 0)
            if isinstance(t, TangentType)
            else t.update(shape=(self.size, *t.shape))
            for t in found
        ]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jvp_of_vmap(self, primals, tangents)

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        return ruled_batch(self, size, name, values, dims)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        linear = [isinstance(x, GradAccum) for x in operands]
        if all(type(ct) is Zero for ct in cotangents):
            return True
        accumulators = [x for x in operands if isinstance(x, GradAccum)]
        axes = [d for d, is_linear in zip(self.dims, linear, strict=True) if is_linear]
        pairs = zip(accumulators, axes, strict=True)
        types = [x.aval if d is None else x.aval.dec_rank(self.size, d) for x, d in pairs]

        def one(given: list[Any], cts: list[Any]) -> list[Any]:
            rest, own = iter(given), [ValAccum(t) for t in types]
            of_own = iter(own)
            each = [next(of_own) if is_linear else next(rest) for is_linear in linear]
            transpose(cts, *each, operation=self.of)
            return [full_zero(x.freeze()) for x in own]

        given = [_as_leaf(x) for x in operands if not isinstance(x, GradAccum)]
        dims = [d for d, is_linear in zip(self.dims, linear, strict=True) if not is_linear]
        out_axes = [d or 0 for d in axes]
        name = {} if self.axis_name is None else {"axis_name": self.axis_name}
        mapped = jax.vmap(one, (dims, 0), out_axes, axis_size=self.size, **name)
        found = mapped(given, list(map(full_zero, cotangents)))
        for x, d, ct in zip(accumulators, axes, found, strict=True):
            x.accum(_sum(x.aval, ct) if d is None else ct)
        return True


def _as_leaf(x: Any) -> Any:
    x = value_of(x)
    return HighArray(x) if hasattr(x, "materialise") else x


def _sum(aval: Any, ct: Any) -> Any:
    """Over the first axis."""
    if not isinstance(aval, TangentType):
        return jnp.sum(ct, axis=0)
    leaves = apply(Unpack(jax.typeof(ct)), ct)
    return apply(Pack(aval), *(jnp.sum(leaf, axis=0) for leaf in leaves))[0]


@dataclass(frozen=True)
class MappedByRule(Expand):
    """The primitive mapped, by the rule; known of the results is which have the axis."""

    size: int
    dims: tuple[int | None, ...]

    suffix = ".vmap"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        pairs = zip(self.structure.group(values), self.structure.group(self.dims), strict=True)
        groups = [_moved(g, dims, self.size) for g, dims in pairs]
        args = self.structure.unflatten(exposed(x) for group, _ in groups for x in group)
        has_axis = jax.tree.unflatten(self.structure.tree, [any_has for _, any_has in groups])
        found = self.call("vmap", self.size, has_axis, *args)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise self.refuse("defvmap's rule must give a pair: results, and which have the axis")
        flat, out = self.flattened(found[0])
        whole = _broadcast(self, found[1], out.tree)
        pairs = zip(whole, out.group(flat), strict=True)
        has = [bool(h) for h, group in pairs for _ in group]
        self._check(values, flat, has)
        return flat, has

    def _check(self, values: Sequence[Any], flat: Sequence[Any], has_axis: Sequence[bool]) -> None:
        expand, types = Expand.of(self), [type_of_one(x) for x in values]
        stacks, _ = abstract_eval(*types, operation=Vmap(expand, self.size, None, self.dims))
        given = [type_of_one(x) for x in flat]
        pairs = zip(stacks, has_axis, strict=True)
        wanted = [(t.shape if h else t.shape[1:], t.dtype) for t, h in pairs]
        if [(t.shape, t.dtype) for t in given] != wanted:
            raise self.refuse(
                f"defvmap's rule gives {listed(given)}, of which {list(has_axis)} have the axis; "
                f"mapped over {self.size}, the expansion gives {listed(stacks)}"
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


def _broadcast(operation: Expand, prefix: Any, tree: Any) -> list[Any]:
    if isinstance(prefix, bool):
        return [prefix] * tree.num_leaves
    return up_to(operation, tree, prefix)
