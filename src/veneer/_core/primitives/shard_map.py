"""`shard_map` of implicit values: they go in and come out leaf by leaf, and are whole inside.

JAX's own `shard_map` runs the body, on blocks of the leaves. The body finds there the values that
these blocks stand for, and the rules in force.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._jax.primitives import find_primitive
from ..._jax.sharding import flat_tree
from ..._jax.tracing import varying_axes
from ..policy import current_policy, policy_in_force
from ..rules import add_rule, structural
from ..sources import keep_sources
from ..value import Value, make_dense
from .reentering import reentering
from .sharding import Sizes, axes_of, entries_of, join, map_leaves, split, why_not_cut

_shard_map_p, _pvary_p = map(find_primitive, ("shard_map", "pvary"))


@structural("shard_map")
def _shard_map(
    *values: Any,
    trace: Any,
    f: Any,
    mesh: Any,
    in_specs: Sequence[Any],
    check_vma: bool,
    debug_info: Any,
    **params: Any,
) -> Any:
    """A function of blocks at `values`, in the trace below `trace`."""
    run_later, policy = reentering(trace), current_policy()
    manual = params["newly_manual_axes"]
    operands, specs = list(values), list(in_specs)
    for i, (value, spec) in enumerate(zip(values, in_specs, strict=True)):
        if isinstance(value, Value):
            block = split(value, spec, mesh.shape)
            if block is None:
                why = why_not_cut(value, spec, mesh.shape)
                (operands[i],) = make_dense(_shard_map_p, [value], why)
            else:
                place = lambda leaf, leaf_spec: placed(leaf, leaf_spec, mesh, manual)
                operands[i], specs[i] = map_leaves(place, value, block), block
                keep_sources([value], [operands[i]])
    leaves = jax.tree.leaves(operands)
    leaf_specs, treedef = jax.tree.flatten(specs)
    if len(leaves) != len(values):
        debug_info = debug_info.with_unknown_names()
    out: Any = None  # what the body returns: a tree of JAX's, and then our own
    out_treedef: Any = None

    def on_leaves(*leaves: Any) -> Any:
        out_specs: Sequence[Any] = ()

        def body(*args: Any) -> list[Any]:
            nonlocal out, out_specs
            out, out_specs = f(*args).unpack_aux()
            return list(out)

        blocks = keep_sources(operands, jax.tree.unflatten(treedef, leaves))
        results = run_later(body)(*blocks)
        with policy_in_force(policy):
            wholes = list(out_specs)
            for i, (result, spec) in enumerate(zip(results, out_specs, strict=True)):
                if isinstance(result, Value):
                    wholes[i] = joined(result, spec, mesh.shape, check_vma)
                    if wholes[i] is None:
                        wholes[i], (results[i],) = spec, make_dense(_shard_map_p, [result])
        nonlocal out_treedef
        leaf_out_specs, out_treedef = jax.tree.flatten(wholes)
        # In the tree of the user's own outputs, for JAX's messages; a derivative's has data in it.
        if out.tree.num_leaves == len(results):
            results = jax.tree.unflatten(out.tree, results)
        return flat_tree(results).with_aux(tuple(leaf_out_specs))

    leaves_out = trace.parent.process_shard_map(
        _shard_map_p,
        on_leaves,
        leaves,
        mesh=mesh,
        in_specs=tuple(leaf_specs),
        check_vma=check_vma,
        debug_info=debug_info,
        **params,
    )
    return out.update(jax.tree.unflatten(out_treedef, list(leaves_out)))


def joined(block: Value, spec: P, sizes: Sizes, check_vma: bool) -> Any:
    """The whole of a block, with a spec in the place of each leaf; None if it must be made dense.

    A leaf that does not mention an axis is taken from any block along it, so all must have the
    same: by their type, or, unchecked, because the dense array promises it.
    """
    whole = join(block, spec, sizes)
    if whole is None:
        return None
    promised = _mentioned(spec)
    for leaf, leaf_spec in zip(jax.tree.leaves(block), jax.tree.leaves(whole), strict=True):
        differs = varying_axes(leaf) & promised if check_vma else promised
        if not differs <= _mentioned(leaf_spec):
            return None
    return whole


def _mentioned(spec: P) -> frozenset[str]:
    return frozenset(name for entry in spec.partitions for name in axes_of(entry))


def placed(leaf: Any, spec: P, mesh: Any, manual: frozenset[str]) -> Any:
    """A leaf of a value with the sharding that a spec over explicit axes demands of its type.

    The dense array has that by its type, but a leaf may be cut along other axes, or along fewer.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name in types if types[name] == AxisType.Explicit}
    if not explicit & manual:
        return leaf
    aval = jax.typeof(leaf)
    kept = entries_of(aval.sharding.spec, aval.ndim)
    entries = [
        tuple(name for name in axes_of(asked) if name in explicit)
        + tuple(name for name in axes_of(own) if name not in manual)
        for asked, own in zip(entries_of(spec, aval.ndim), kept, strict=True)
    ]
    wanted = P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
    if kept == wanted.partitions:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(mesh.abstract_mesh, wanted))


def _pvary(value: Value, *, axes: tuple[str, ...]) -> Any:
    # The leaves of one value may vary over different axes.
    def vary(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return _pvary_p.bind(leaf, axes=missing) if missing else leaf

    return jax.tree.map(vary, value)


add_rule(_pvary, [_pvary_p])
