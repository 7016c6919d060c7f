"""`jax.shard_map` and collectives of implicit arrays.

A spec for an implicit array can be one `PartitionSpec` of its dense array, from which
`Value.partition` derives the specs of the leaves. It can also be an instance of the same class with
a spec for each leaf. Arguments and results are passed to JAX leaf by leaf. Values that the mapped
function captures are unpacked outside of it, because JAX has no specs for high types.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .._core.primitives.leaves import is_label
from .._core.primitives.sharding import (
    block_specs,
    checked_joined_specs,
    map_leaves,
    reshard_leaf,
    why_not_split,
)
from .._core.value import Value, is_part, is_value
from .._jax.primitives import Primitive, find_primitive, flat_tree
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
    """Wrap `jax.shard_map`, so that one spec can split the dense array of an implicit array."""

    def make(f: Any, *, in_specs: Any, out_specs: Any, **kwargs: Any) -> Any:
        if not callable(f):
            return shard_map(f, in_specs=in_specs, out_specs=out_specs, **kwargs)

        @wraps(f)
        def compute_block(*args: Any) -> Any:
            out = f(*args)
            return _merge_leaves("out_specs", out_specs, out) if is_enabled() else out

        mapped = shard_map(compute_block, in_specs=in_specs, out_specs=out_specs, **kwargs)

        @wraps(mapped)
        def call(*args: Any) -> Any:
            if not is_enabled():
                return mapped(*args)
            return jax.tree.map(expose, mapped(*_merge_leaves("in_specs", in_specs, args)))

        return call

    return make


def reject_leafwise_specs(broadcast_prefix: Callable) -> Callable:
    """Wrap JAX's function that gives each leaf the spec of its subtree, to reject implicit arrays.

    JAX would split the leaves by the spec of the dense array, which is wrong. No implicit array
    gets here unless `jax.shard_map` was called with high types off, because `accept_dense_specs`
    makes it one leaf.
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


def _merge_leaves(name: str, specs: Any, tree: Any) -> Any:
    """Return arguments or results of a `shard_map`, with implicit arrays as one leaf each.

    An implicit array stays a pytree if it has a spec for each leaf, or if its spec splits nothing.
    `name` is the argument of `shard_map` that has the specs.
    """

    def merge(spec: Any, x: Any) -> Any:
        if isinstance(x, Value) and not is_complete(x):
            raise TypeError(
                f"{name} of shard_map has {spec} for {x!r}, which does not represent an array. "
                "Pass a spec for each leaf."
            )
        return as_typed_operand(x)

    def convert(spec: Any, x: Any) -> Any:
        if not is_value(spec):
            merge_by_spec = partial(merge, spec)
            return jax.tree.map(merge_by_spec, x, is_leaf=is_value) if _splits(spec) else x
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
    """Wrap `bind_with_trace` of the primitive `shard_map`, to pass implicit arrays leaf by leaf."""

    def bind_with_trace(
        self: Primitive, trace: Trace, args: Sequence[Any], avals: Any, params: dict[str, Any], /
    ) -> Any:
        (function,) = params["subfuns"]
        body = _Body(function, params)
        with set_current_trace(trace):
            leaves, specs = body.unpack_operands(args, params["in_specs"])
            avals = list(map(jax.typeof, leaves)) if body.operand_specs else avals
        params = {**params, "subfuns": (body,), "in_specs": specs}
        if len(leaves) != len(args):
            params["debug_info"] = params["debug_info"].with_unknown_names()
        out = bind(self, trace, leaves, avals, params)
        with set_current_trace(trace):
            return body.pack_results(out)

    return bind_with_trace


class _Body:
    """The mapped function of a `shard_map`, as a function of leaves.

    JAX binds `shard_map` to the leaves that `unpack_operands` returns, calls the body, and passes
    the results to `pack_results`.
    """

    def __init__(self, function: Callable, params: dict[str, Any]):
        self._function, self._mesh = function, params["mesh"]
        self._check_vma, self._manual = params["check_vma"], params["newly_manual_axes"]
        #: For each operand, an implicit array of the specs of its leaves, or None for an array.
        #: Empty if no operand is typed.
        self.operand_specs: list[Any] = []
        self._result_specs: list[Any] = []  # the same for each result
        self._results: Any = None  # the results as JAX's `FlatTree`

    def unpack_operands(self, args: Sequence[Any], specs: Sequence[Any]) -> tuple[Any, Any]:
        """Return the operands, with each implicit array replaced by its leaves, and their specs."""
        types = [_high_type_of(x) for x in args]
        if not any(types):
            return args, specs
        leaves: list[Any] = []
        leaf_specs: list[Any] = []
        for x, t, spec in zip(args, types, specs, strict=True):
            if t is None:
                leaves, leaf_specs = [*leaves, x], [*leaf_specs, spec]
                self.operand_specs.append(None)
                continue
            value = unpack_fully(x)
            value_specs = block_specs(value, spec, self._mesh.shape)
            if value_specs is None:
                remedy = "Use the spec P(), or pass vn.materialise(x)"
                reason = why_not_split(value, spec, self._mesh.shape)
                raise _spec_error("split", t, spec, remedy, reason)
            reshard = lambda leaf, spec: reshard_leaf(leaf, spec, self._mesh, self._manual)
            leaves += jax.tree.leaves(map_leaves(reshard, value, value_specs))
            leaf_specs += jax.tree.leaves(value_specs)
            self.operand_specs.append(value_specs)
        return leaves, tuple(leaf_specs)

    def __call__(self, *leaves: Any) -> Any:
        operands = _pack_values(self.operand_specs, leaves) if self.operand_specs else leaves
        out, specs = self._function(*operands).unpack_aux()
        results = list(out)
        self._results, self._result_specs = out, [None] * len(results)
        if not any(map(_high_type_of, results)):
            return out.with_aux(specs)
        leaf_specs = list(specs)
        for i, (x, spec) in enumerate(zip(results, specs, strict=True)):
            t = _high_type_of(x)
            if t is not None:
                results[i] = unpack_fully(x)
                joined = checked_joined_specs(results[i], spec, self._mesh.shape, self._check_vma)
                if joined is None:
                    raise _spec_error("join", t, spec, "Return vn.materialise(x)")
                leaf_specs[i] = self._result_specs[i] = joined
        flat_specs = tuple(jax.tree.leaves(leaf_specs))
        return flat_tree(jax.tree.leaves(results)).with_aux(flat_specs)

    def pack_results(self, out: Any) -> Any:
        """Return the results of the body, given their leaves as JAX returns them."""
        if all(specs is None for specs in self._result_specs):
            return out
        return self._results.update(_pack_values(self._result_specs, list(out)))


def _pack_values(specs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return a list of dense arrays and of implicit arrays, each as one operand, given all leaves.

    `specs` has an item for each array: an implicit array of specs if it is implicit, or None.
    """
    tree = jax.tree.structure([0 if value is None else value for value in specs])
    return list(map(as_typed_operand, jax.tree.unflatten(tree, leaves)))


def unpack_fully(x: Any) -> Any:
    """Return the implicit array of a tracer, with its leaves unpacked too, down to dense arrays.

    A tracer of a tangent becomes a `Tangent`, and a `HighArray` its implicit array. Return any
    other object unchanged.
    """
    x = value_of(x)
    if not is_traced_high(x):
        return x
    return x.aval.of_leaves(list(map(unpack_fully, apply(Unpack(x.aval), x))))


def move_captured_inside(trace: Trace, args: Sequence[Any]) -> list[Any]:
    """Return operands of a primitive in a `shard_map`, with captured implicit arrays moved inside.

    A tracer that belongs to another trace than `trace` is unpacked to its leaves in that trace, and
    the leaves are packed in `trace`. This includes arrays that a loop inside the `shard_map`
    captures.
    """

    def move(x: Any) -> Any:
        if not is_traced_high(x) or x._trace is trace:
            return x
        with set_current_trace(x._trace):
            value = unpack_fully(x)
        with set_current_trace(trace):
            is_array = isinstance(value, Value)
            return as_typed_operand(value) if is_array else x.aval.raise_val(*value.leaves)

    return list(map(move, args))


def _high_type_of(x: Any) -> HighType | None:
    """Return the high type of `x`, an implicit array, a `HighArray` or a tracer.

    Return None if `x` is not an implicit array in one of these forms.
    """
    x = value_of(x)
    t = type_of(x) if isinstance(x, Value) else getattr(x, "aval", None)
    return t if isinstance(t, HighType) else None


def _spec_error(verb: str, t: HighType, spec: Any, remedy: str, reason: str = "") -> TypeError:
    reason = reason or (
        "the spec does not fit the leaves, or the class does not declare how to split them "
        "(ImplicitArray.leaf_axes or partition)"
    )
    return TypeError(
        f"shard_map cannot {verb} a {t.cls.__name__} of the type {t} by {spec}: {reason}. {remedy}."
    )


# Collectives.


class Trees:
    """A replacement for the module `jax.tree_util` in JAX's module of collectives.

    Its `tree_map` applies a collective to an implicit array as one array, not to each leaf. Only
    derivatives of leaves are combined leaf by leaf.
    """

    def __init__(self, trees: Any):
        self._trees = trees

    def tree_map(self, function: Any, tree: Any, *rest: Any, **kwargs: Any) -> Any:
        # The function that a collective maps is nested in it, so that its name contains the name.
        name = function.__qualname__.split(".")[0].strip("_").removesuffix("_is_async")
        if rest or not is_enabled() or name == "pcast":
            return self._trees.tree_map(function, tree, *rest, **kwargs)
        combine = partial(_combine, name, function)
        is_leaf = lambda x: isinstance(x, Value) and is_complete(x)
        return self._trees.tree_map(combine, tree, is_leaf=is_leaf, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trees, name)


#: The collectives for which a label is a pytree with one leaf.
_REDUCE = re.compile("psum|pmean|pmax|pmin")


def _combine(name: str, function: Callable, x: Any) -> Any:
    """Apply the collective `name` to an array, dense or implicit, or to derivatives of leaves.

    `function` applies it to one array. For derivatives of leaves, it is called for each leaf.
    """
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
    """Return an implicit array as one operand of the collective `name`.

    It is materialized for `psum`, `pmax` and `pmin`, whose results are dense arrays.
    """
    if name in ("psum", "pmax", "pmin") and not is_label(unpack(x)):
        return materialise_traced(find_primitive(name), x)
    return x if is_typed(x) else as_typed_operand(x)
