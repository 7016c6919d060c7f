"""`jax.shard_map` of operands of high types: they go in and come out leaf by leaf.

A spec is that of the dense array where it stands for an implicit array as a whole, and each leaf
is cut as `Value.partition` says; a tree of specs has one for each leaf. What the body closes over
is opened outside of it, as JAX has no specs for types of ours.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .._core.primitives.shard_map import checked_joined_specs, reshard_leaf
from .._core.primitives.sharding import block_specs, map_leaves, why_not_split
from .._core.value import Value, is_part, is_value
from .._jax.primitives import Primitive
from .._jax.sharding import flat_tree
from .._jax.tracing import Trace, set_current_trace
from .high import Unpack, apply
from .mode import is_enabled
from .types import HighType, canonical, is_complete, is_traced_high, type_of
from .values import exposed, value_of


def take_dense_specs(shard_map: Callable) -> Callable:
    """JAX's function that makes one of blocks, whose values are whole where their spec is."""

    def make(f: Any, *, in_specs: Any, out_specs: Any, **kwargs: Any) -> Any:
        if not callable(f):
            return shard_map(f, in_specs=in_specs, out_specs=out_specs, **kwargs)

        @wraps(f)
        def of_block(*args: Any) -> Any:
            out = f(*args)
            return _as_specified("out_specs", out_specs, out) if is_enabled() else out

        of_blocks = shard_map(of_block, in_specs=in_specs, out_specs=out_specs, **kwargs)

        @wraps(of_blocks)
        def mapped(*args: Any) -> Any:
            if not is_enabled():
                return of_blocks(*args)
            return jax.tree.map(exposed, of_blocks(*_as_specified("in_specs", in_specs, args)))

        return mapped

    return make


def refuse_by_leaf(broadcast_prefix: Callable) -> Callable:
    """JAX's function that gives each leaf of a tree the spec that stands for all of it.

    What `take_dense_specs` has made has taken the arrays out of the tree before.
    """

    def broadcast(specs: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
        if is_enabled() and any(is_value(x) for x in jax.tree.leaves(tree, is_leaf=is_value)):
            jax.tree.map(_refuse_cut, specs, tree, is_leaf=_is_spec)
        return broadcast_prefix(specs, tree, *args, **kwargs)

    return broadcast


def _refuse_cut(spec: Any, tree: Any) -> None:
    for x in jax.tree.leaves(tree, is_leaf=is_value):
        if _cuts(spec) and is_value(x):
            raise TypeError(
                f"shard_map would split each leaf of {x!r} by {spec}, which is a spec of the dense "
                "array. The function was made before high types were turned on. Make it inside "
                "vn.hijax.enabled()."
            )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _cuts(spec: Any) -> bool:
    """Whether a spec says more of an array than that each device has all of it."""
    if not isinstance(spec, P):
        return False
    return spec.partitions != (None,) * len(spec.partitions) or bool(spec.unreduced | spec.reduced)


def _as_specified(name: str, specs: Any, tree: Any) -> Any:
    """Arguments or results, of which a value is one leaf if one spec that cuts it stands for it.

    If there is a spec for each of its leaves, it is a tree.
    """

    def typed(spec: Any, x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        if not is_complete(x):
            raise TypeError(
                f"{name} of shard_map has {spec} for {x!r}, which does not represent an array. "
                "Pass a spec for each leaf."
            )
        return canonical(x)

    def one(spec: Any, x: Any) -> Any:
        if not is_value(spec):
            each = partial(typed, spec)
            return jax.tree.map(each, x, is_leaf=is_value) if _cuts(spec) else x
        opened = fully_opened(x)
        if type(opened) is not type(spec):
            what = f"a {type(opened).__name__}" if is_value(opened) else f"{jax.typeof(opened)}"
            raise TypeError(
                f"{name} of shard_map has a {type(spec).__name__} with a spec for each leaf, but "
                f"the value is {what}. Pass one spec."
            )
        is_leaf = lambda s: _is_spec(s) or is_part(spec)(s)
        return jax.tree.map(one, spec, opened, is_leaf=is_leaf)

    try:
        return jax.tree.map(one, specs, tree, is_leaf=lambda s: _is_spec(s) or is_value(s))
    except ValueError:  # as JAX will say
        return tree


def bind_leaves(bind: Callable) -> Callable:
    """The method `bind_with_trace` of JAX's primitive, for operands and results of any type."""

    def bind_with_trace(
        self: Primitive, trace: Trace, args: Sequence[Any], avals: Any, params: dict[str, Any], /
    ) -> Any:
        (function,) = params["subfuns"]
        body = _Body(function, params)
        with set_current_trace(trace):
            leaves, specs = body.open(args, params["in_specs"])
            avals = list(map(jax.typeof, leaves)) if body.blocks else avals
        params = {**params, "subfuns": (body,), "in_specs": specs}
        if len(leaves) != len(args):
            params["debug_info"] = params["debug_info"].with_unknown_names()
        out = bind(self, trace, leaves, avals, params)
        with set_current_trace(trace):
            return body.close(out)

    return bind_with_trace


class _Body:
    """The function of a `shard_map` as one of leaves."""

    def __init__(self, function: Callable, params: dict[str, Any]):
        self._function, self._mesh = function, params["mesh"]
        self._check_vma, self._manual = params["check_vma"], params["newly_manual_axes"]
        self.blocks: list[Any] = []  # of typed operands: a value of specs; of others None
        self._out: Any = None  # JAX's tree of the results, and for typed ones a value of specs
        self._joined: list[Any] = []

    def open(self, args: Sequence[Any], specs: Sequence[Any]) -> tuple[Any, Any]:
        """The operands of which the typed ones are opened, and their specs."""
        types = [_high_type_of(x) for x in args]
        if not any(types):
            return args, specs
        leaves: list[Any] = []
        leaf_specs: list[Any] = []
        for x, t, spec in zip(args, types, specs, strict=True):
            if t is None:
                leaves, leaf_specs = [*leaves, x], [*leaf_specs, spec]
                self.blocks.append(None)
                continue
            value = fully_opened(x)
            block = block_specs(value, spec, self._mesh.shape)
            if block is None:
                remedy = "Use the spec P(), or pass vn.materialise(x)"
                raise _refused(
                    "split", t, spec, remedy, why_not_split(value, spec, self._mesh.shape)
                )
            place = lambda leaf, spec: reshard_leaf(leaf, spec, self._mesh, self._manual)
            leaves += jax.tree.leaves(map_leaves(place, value, block))
            leaf_specs += jax.tree.leaves(block)
            self.blocks.append(block)
        return leaves, tuple(leaf_specs)

    def __call__(self, *leaves: Any) -> Any:
        out, specs = self._function(*self._operands(leaves)).unpack_aux()
        results = list(out)
        self._out, self._joined = out, [None] * len(results)
        if not any(_high_type_of(x) for x in results):
            return out.with_aux(specs)
        leaf_specs = list(specs)
        for i, (x, spec) in enumerate(zip(results, specs, strict=True)):
            t = _high_type_of(x)
            if t is not None:
                results[i] = fully_opened(x)
                joint = checked_joined_specs(results[i], spec, self._mesh.shape, self._check_vma)
                if joint is None:
                    raise _refused("join", t, spec, "Return vn.materialise(x)")
                leaf_specs[i] = self._joined[i] = joint
        flat_specs = tuple(jax.tree.leaves(leaf_specs))
        return flat_tree(jax.tree.leaves(results)).with_aux(flat_specs)

    def _operands(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if not self.blocks:
            return leaves
        parts = jax.tree.unflatten(_tree_of(self.blocks), leaves)
        return [canonical(x) if isinstance(x, Value) else x for x in parts]

    def close(self, out: Any) -> Any:
        """The results, of which those that were typed within the body are so outside."""
        if not any(joint is not None for joint in self._joined):
            return out
        parts = jax.tree.unflatten(_tree_of(self._joined), list(out))
        return self._out.update([canonical(x) if isinstance(x, Value) else x for x in parts])


def fully_opened(x: Any) -> Any:
    """What is of a high type as a value whose leaves are arrays."""
    x = value_of(x)
    if not is_traced_high(x):
        return x
    return x.aval.of_leaves(list(map(fully_opened, apply(Unpack(x.aval), x))))


def brought_in(trace: Trace, args: Sequence[Any]) -> Sequence[Any]:
    """Operands within a `shard_map`, of which those that it closes over are opened outside of it.

    JAX has no specs for our types. So is, to no harm, what a loop within the `shard_map` closes
    over.
    """
    return [_brought_in(x, trace) for x in args]


def _brought_in(x: Any, trace: Trace) -> Any:
    if not is_traced_high(x) or x._trace is trace:
        return x
    with set_current_trace(x._trace):
        value = fully_opened(x)
    with set_current_trace(trace):
        return canonical(value) if isinstance(value, Value) else x.aval.raise_val(*value.leaves)


def _tree_of(values: Sequence[Any]) -> Any:
    return jax.tree.structure([0 if value is None else value for value in values])


def _high_type_of(x: Any) -> Any:
    x = value_of(x)
    t = type_of(x) if isinstance(x, Value) else getattr(x, "aval", None)
    return t if isinstance(t, HighType) else None


def _refused(verb: str, t: HighType, spec: Any, remedy: str, why: str = "") -> TypeError:
    why = why or (
        "the spec does not fit the leaves, or the class does not declare how to split them "
        "(ImplicitArray.leaf_axes or partition)"
    )
    return TypeError(
        f"shard_map cannot {verb} a {t.cls.__name__} of the type {t} by {spec}: {why}. {remedy}."
    )
