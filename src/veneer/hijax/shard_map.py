"""`jax.shard_map` and collectives of implicit arrays.

A single spec for an implicit array is the spec of its dense array, and `Value.partition` returns
the specs of the leaves. A tree of specs has one for each leaf. The arguments and results of the
mapped function are passed to JAX leaf by leaf. Captured values are unpacked outside the function,
because JAX has no specs for high types.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .._core.primitives.labels import is_label
from .._core.primitives.shard_map import checked_joined_specs, reshard_leaf
from .._core.primitives.sharding import block_specs, map_leaves, why_not_split
from .._core.value import Value, is_part, is_value
from .._jax.primitives import Primitive, find_primitive
from .._jax.sharding import flat_tree
from .._jax.tracing import Trace, set_current_trace
from .mapping import materialise_traced
from .mode import is_enabled
from .types import (
    HighType,
    as_typed_operand,
    is_complete,
    is_traced_high,
    is_typed,
    type_of,
    unpack,
    unpack_tangent,
)
from .values import (
    Unpack,
    apply,
    expose,
    flatten_value,
    is_derivative,
    is_inexact,
    mark_derivatives,
    value_of,
)


def accept_dense_specs(shard_map: Callable) -> Callable:
    """Wrap `jax.shard_map`, so that a spec of a dense array splits an implicit array."""

    def make(f: Any, *, in_specs: Any, out_specs: Any, **kwargs: Any) -> Any:
        if not callable(f):
            return shard_map(f, in_specs=in_specs, out_specs=out_specs, **kwargs)

        @wraps(f)
        def of_block(*args: Any) -> Any:
            out = f(*args)
            return _apply_specs("out_specs", out_specs, out) if is_enabled() else out

        of_blocks = shard_map(of_block, in_specs=in_specs, out_specs=out_specs, **kwargs)

        @wraps(of_blocks)
        def mapped(*args: Any) -> Any:
            if not is_enabled():
                return of_blocks(*args)
            return jax.tree.map(expose, of_blocks(*_apply_specs("in_specs", in_specs, args)))

        return mapped

    return make


def reject_leafwise_specs(broadcast_prefix: Callable) -> Callable:
    """Wrap JAX's function that gives each leaf the spec of its subtree, to raise for values.

    `accept_dense_specs` has replaced the values, unless the function was made without high types.
    """

    def broadcast(specs: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
        if is_enabled() and any(is_value(x) for x in jax.tree.leaves(tree, is_leaf=is_value)):
            jax.tree.map(_reject_split, specs, tree, is_leaf=_is_spec)
        return broadcast_prefix(specs, tree, *args, **kwargs)

    return broadcast


def _reject_split(spec: Any, tree: Any) -> None:
    for x in jax.tree.leaves(tree, is_leaf=is_value):
        if _splits(spec) and is_value(x):
            raise TypeError(
                f"shard_map would split each leaf of {x!r} by {spec}, which is a spec of the dense "
                "array. The function was made before high types were turned on. Make it inside "
                "vn.hijax.enabled()."
            )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _splits(spec: Any) -> bool:
    """Return whether a spec splits an array or sets how devices reduce it."""
    if not isinstance(spec, P):
        return False
    return spec.partitions != (None,) * len(spec.partitions) or bool(spec.unreduced | spec.reduced)


def _apply_specs(name: str, specs: Any, tree: Any) -> Any:
    """Return arguments or results, in which a value with a single spec that splits it is one leaf.

    A value with a spec for each leaf stays a pytree.
    """

    def typed(spec: Any, x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        if not is_complete(x):
            raise TypeError(
                f"{name} of shard_map has {spec} for {x!r}, which does not represent an array. "
                "Pass a spec for each leaf."
            )
        return as_typed_operand(x)

    def convert(spec: Any, x: Any) -> Any:
        if not is_value(spec):
            each = partial(typed, spec)
            return jax.tree.map(each, x, is_leaf=is_value) if _splits(spec) else x
        value = unpack_fully(x)
        if type(value) is not type(spec):
            what = f"a {type(value).__name__}" if is_value(value) else f"{jax.typeof(value)}"
            raise TypeError(
                f"{name} of shard_map has a {type(spec).__name__} with a spec for each leaf, but "
                f"the value is {what}. Pass one spec."
            )
        is_leaf = lambda s: _is_spec(s) or is_part(spec)(s)
        return jax.tree.map(convert, spec, value, is_leaf=is_leaf)

    try:
        return jax.tree.map(convert, specs, tree, is_leaf=lambda s: _is_spec(s) or is_value(s))
    except ValueError:  # JAX raises an error
        return tree


def bind_shard_map(bind: Callable) -> Callable:
    """Wrap the method `bind_with_trace` of the primitive `shard_map`, to pass leaves to JAX."""

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
    """The mapped function of a `shard_map`, as a function of leaves."""

    def __init__(self, function: Callable, params: dict[str, Any]):
        self._function, self._mesh = function, params["mesh"]
        self._check_vma, self._manual = params["check_vma"], params["newly_manual_axes"]
        # For each operand, its block: an implicit array with specs in place of leaves. None for a
        # dense operand. The list is empty if no operand is an implicit array.
        self.blocks: list[Any] = []
        self._out: Any = None  # JAX's `FlatTree` of the results
        self._joined: list[Any] = []  # like `blocks`, for each result

    def open(self, args: Sequence[Any], specs: Sequence[Any]) -> tuple[Any, Any]:
        """Return the operands, with implicit arrays replaced by their leaves, and their specs."""
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
            value = unpack_fully(x)
            block = block_specs(value, spec, self._mesh.shape)
            if block is None:
                remedy = "Use the spec P(), or pass vn.materialise(x)"
                raise _spec_error(
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
                results[i] = unpack_fully(x)
                joint = checked_joined_specs(results[i], spec, self._mesh.shape, self._check_vma)
                if joint is None:
                    raise _spec_error("join", t, spec, "Return vn.materialise(x)")
                leaf_specs[i] = self._joined[i] = joint
        flat_specs = tuple(jax.tree.leaves(leaf_specs))
        return flat_tree(jax.tree.leaves(results)).with_aux(flat_specs)

    def _operands(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if not self.blocks:
            return leaves
        parts = jax.tree.unflatten(_tree_of(self.blocks), leaves)
        return [as_typed_operand(x) if isinstance(x, Value) else x for x in parts]

    def close(self, out: Any) -> Any:
        """Return the results, and pack the leaves of values that the body returned."""
        if not any(joint is not None for joint in self._joined):
            return out
        parts = jax.tree.unflatten(_tree_of(self._joined), list(out))
        return self._out.update([as_typed_operand(x) if isinstance(x, Value) else x for x in parts])


def unpack_fully(x: Any) -> Any:
    """Return a typed value as an implicit array whose leaves are dense arrays."""
    x = value_of(x)
    if not is_traced_high(x):
        return x
    return x.aval.of_leaves(list(map(unpack_fully, apply(Unpack(x.aval), x))))


def move_captured_inside(trace: Trace, args: Sequence[Any]) -> list[Any]:
    """Unpack the typed operands that a `shard_map` captures outside of it.

    The values that a loop inside the `shard_map` captures are unpacked, too.
    """
    return [_brought_in(x, trace) for x in args]


def _brought_in(x: Any, trace: Trace) -> Any:
    if not is_traced_high(x) or x._trace is trace:
        return x
    with set_current_trace(x._trace):
        value = unpack_fully(x)
    with set_current_trace(trace):
        return (
            as_typed_operand(value) if isinstance(value, Value) else x.aval.raise_val(*value.leaves)
        )


def _tree_of(values: Sequence[Any]) -> Any:
    return jax.tree.structure([0 if value is None else value for value in values])


def _high_type_of(x: Any) -> Any:
    x = value_of(x)
    t = type_of(x) if isinstance(x, Value) else getattr(x, "aval", None)
    return t if isinstance(t, HighType) else None


def _spec_error(verb: str, t: HighType, spec: Any, remedy: str, why: str = "") -> TypeError:
    why = why or (
        "the spec does not fit the leaves, or the class does not declare how to split them "
        "(ImplicitArray.leaf_axes or partition)"
    )
    return TypeError(
        f"shard_map cannot {verb} a {t.cls.__name__} of the type {t} by {spec}: {why}. {remedy}."
    )


# Collectives.


class Trees:
    """A patch of JAX's module of tree functions, as collectives use it.

    Collectives combine the derivatives of a value leaf by leaf, and any other value as one array.
    """

    def __init__(self, trees: Any):
        self._trees = trees

    def tree_map(self, function: Any, tree: Any, *rest: Any, **kwargs: Any) -> Any:
        # Collectives map a function that they define.
        name = function.__qualname__.split(".")[0].strip("_").removesuffix("_is_async")
        if rest or not is_enabled() or name == "pcast":
            return self._trees.tree_map(function, tree, *rest, **kwargs)
        one = partial(_combine, name, function)
        return self._trees.tree_map(
            one, tree, is_leaf=lambda x: isinstance(x, Value) and is_complete(x), **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trees, name)


#: The collectives for which a label is a pytree with one leaf.
_REDUCE = re.compile("psum|pmean|pmax|pmin")


def _combine(name: str, function: Callable, x: Any) -> Any:
    x = unpack_tangent(x)
    if not isinstance(x, Value):
        return function(_as_operand(name, x) if is_typed(x) else x)
    if is_derivative(x):
        return mark_derivatives(jax.tree.map(function, x))
    if is_label(x):
        return jax.tree.map(function, x) if _REDUCE.search(name) else function(as_typed_operand(x))
    is_floating = lambda leaf: not isinstance(leaf, Value) and is_inexact(jax.typeof(leaf))
    floating = map(is_floating, flatten_value(x)[0])
    if not x.dense_tangent and all(floating):  # it may hold derivatives
        raise TypeError(
            f"{name}({type_of(x)}): is this an array, or the derivatives of its leaves? "
            f"For an array, call vn.implicit(lambda x: lax.{name}(x, ...)) or pass "
            "vn.materialise(x). For derivatives, "
            f"call jax.tree.map(lambda leaf: lax.{name}(leaf, ...), x)."
        )
    return function(_as_operand(name, x))


def _as_operand(name: str, x: Any) -> Any:
    """Return a value as one operand. Materialize it if the result is dense on all devices."""
    if name in ("psum", "pmax", "pmin") and not is_label(unpack(x)):
        return materialise_traced(find_primitive(name), x)
    return x if is_typed(x) else as_typed_operand(x)
