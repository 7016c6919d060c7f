"""Shardings of implicit values: a spec for each leaf, and the rules of primitives that use specs.

A spec is a `PartitionSpec`. The method `Value.partition` of a type returns the specs of its leaves.
Without it, leaves are sharded in two cases: if the only leaf is the dense array, and along leading
axes that all leaves share with the dense array.

In a `shard_map`, the function that the user maps gets the block of each implicit operand on its
device, which is an implicit value, too. JAX's `shard_map` is bound with the leaves. Its body
rebuilds implicit values from the blocks of the leaves, and runs the function with their rules.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._jax.primitives import find_primitive, flat_tree
from ..._jax.tracing import varying_axes
from ..leaf_axes import LeafAxis
from ..policy import current_policy, policy_in_force
from ..rules import register, structural
from ..sources import keep_sources
from ..value import Value, declared_layout, is_part, make_dense
from .leaves import dense_shape_of, has_batch_axes, is_label
from .staging import capture_context

_device_put_p, _reshard_p = map(find_primitive, ("device_put", "reshard"))
_shard_map_p, _pvary_p = map(find_primitive, ("shard_map", "pvary"))
_constraint_p = find_primitive("sharding_constraint")

Sizes = Mapping[str, int]  # the sizes of mesh axes, by name
Resize = Callable[[int, int], int]  # from the size of an axis and its number of shards to a size


def leaf_specs(
    value: Value, spec: P, sizes: Sizes, resize: Resize = lambda size, blocks: size
) -> Any:
    """Return an implicit array with the `PartitionSpec` of each leaf in place of the leaf.

    Return None if no sharding of the leaves represents the sharding `spec` of the dense array.

    **Arguments:**

    - `spec`: the `PartitionSpec` of the dense array.
    - `sizes`: a mapping from the name of each mesh axis to its size.
    - `resize`: a function from the size of a dense axis and its number of shards to the size of
      that axis in the metadata of the result. By default, the size stays.
    """
    old_shape = value.aval().shape
    entries = entries_of(spec, len(old_shape))
    if spec.unreduced or spec.reduced:  # partial sums of leaves do not represent partial sums
        return None
    if all(entry is None for entry in entries):
        return jax.tree.map(lambda _: P(), value)
    if is_label(value):
        return jax.tree.map(lambda _: P(*entries), value)
    new_shape = tuple(
        resize(n, _count_blocks(e, sizes)) for n, e in zip(old_shape, entries, strict=True)
    )
    declared = value.partition(P(*entries), new_shape)
    if declared is not None:
        return _complete_specs(value, declared, sizes, resize)
    leading_ndim = 1 + max(i for i, entry in enumerate(entries) if entry is not None)
    if has_batch_axes(value, leading_ndim):
        return jax.tree.map(lambda _: P(*entries[:leading_ndim]), value)
    return None


def _complete_specs(value: Value, declared: Any, sizes: Sizes, resize: Resize) -> Any:
    """Return `declared`, a result of `Value.partition`, with a spec for every leaf of `value`.

    If a field holds an implicit array, `declared` may have one spec for its dense array there.
    Replace this spec by an implicit array with a spec for each leaf. Return None if the implicit
    array in the field cannot be sharded. `sizes` and `resize` are the same as in `leaf_specs`.
    """
    parts = jax.tree.leaves(value, is_leaf=is_part(value))
    specs, structure = jax.tree.flatten(declared, is_leaf=is_part(declared))
    if type(declared) is not type(value) or len(specs) != len(parts):
        raise TypeError(
            f"{type(value).__name__}.partition must return None, or a {type(value).__name__} with "
            f"a jax.sharding.PartitionSpec instead of each array, not {declared!r}."
        )
    for i, part in enumerate(parts):
        if isinstance(part, Value):
            complete = leaf_specs if isinstance(specs[i], P) else _complete_specs
            specs[i] = complete(part, specs[i], sizes, resize)
            if specs[i] is None:
                return None
    return jax.tree.unflatten(structure, specs)


def block_specs(value: Value, spec: P, sizes: Sizes) -> Any:
    """Return the specs that split an implicit array into one block per device.

    The result is an implicit array with the metadata of one block and with specs in place of
    leaves, or None if the array cannot be split. `spec` is the `PartitionSpec` of the dense array,
    and `sizes` has the size of each mesh axis.
    """
    return _resized_specs(value, spec, sizes, operator.floordiv)


def joined_specs(block: Value, spec: P, sizes: Sizes) -> Any:
    """Return the specs that join the blocks of all devices, of equal size, to one implicit array.

    `block` is the implicit array on one device, and `spec` the `PartitionSpec` of the joined dense
    array. The result has the metadata of the joined array, and specs in place of leaves. Return
    None if the blocks cannot be joined. `sizes` has the size of each mesh axis.
    """
    return _resized_specs(block, spec, sizes, operator.mul)


def _resized_specs(value: Value, spec: P, sizes: Sizes, resize: Resize) -> Any:
    """Return the result of `block_specs` or `joined_specs`.

    `resize` computes the new size of an axis, by dividing or multiplying the old size by the number
    of shards. Return None if the resized leaves would not represent the resized dense array.
    """
    specs = leaf_specs(value, spec, sizes, resize)
    if specs is None:
        return None
    avals = []
    for leaf, leaf_spec in zip(jax.tree.leaves(value), jax.tree.leaves(specs), strict=True):
        aval = jax.typeof(leaf)
        blocks = [_count_blocks(e, sizes) for e in entries_of(leaf_spec, aval.ndim)]
        if resize is operator.floordiv and any(map(operator.mod, aval.shape, blocks)):
            return None  # a tile or a byte would be cut
        avals.append(jax.ShapeDtypeStruct(tuple(map(resize, aval.shape, blocks)), aval.dtype))
    shape = value.aval().shape
    blocks = [_count_blocks(e, sizes) for e in entries_of(spec, len(shape))]
    actual = dense_shape_of(jax.tree.structure(specs), tuple(avals))
    return specs if actual == tuple(map(resize, shape, blocks)) else None


def why_not_split(value: Value, spec: P, sizes: Sizes) -> str:
    """Return a text that says which axis `spec` cannot split and why, or an empty text."""
    parts, _, axes = declared_layout(value)
    entries, shape = entries_of(spec, value.aval().ndim), value.aval().shape
    for part, part_axes in zip(parts, axes or [()] * len(parts), strict=True):
        for axis in filter(None, part_axes):
            devices = _count_blocks(entries[axis.axis], sizes)
            size, number = shape[axis.axis] // devices, axis.axis + len(shape)
            if devices > 1 and axis.block == "whole":
                return f"axis {number} is stored as a whole"
            if devices > 1 and isinstance(axis.block, int) and size % axis.block:
                return (
                    f"axis {number}: each of {devices} devices would have {size} values, but "
                    f"{axis.block} are stored together"
                ) + _suggest_sizes(axis, axis.block, shape[axis.axis], devices)
        if isinstance(part, Value) and part_axes:
            part_spec = P(*(axis and entries[axis.axis] for axis in part_axes))
            if why := why_not_split(part, part_spec, sizes):
                return why
    return ""


def _suggest_sizes(axis: LeafAxis, block: int, size: int, devices: int) -> str:
    """Return a text that suggests a tile size and a number of devices, or an empty text.

    `size` is the size of a dense axis that cannot be split over `devices` devices, because groups
    of `block` elements are stored together. `axis` is the leaf axis that stores them. The suggested
    numbers cut no group.
    """
    fewer = [n for n in range(2, devices) if size % (n * block) == 0]
    remedies = [f"{max(fewer)} devices"] if fewer else []
    if axis.packed_in is None:  # a block with one scale, which could be smaller
        remedies.insert(0, f"tiles of {math.gcd(size // devices, block)}")
    return f" ({' or '.join(remedies)} would fit)" if remedies else ""


def entries_of(spec: P, ndim: int) -> tuple[Any, ...]:
    """Return the entries of a `PartitionSpec` for `ndim` axes. An entry that it omits is None."""
    return (*spec.partitions, *(None,) * (ndim - len(spec.partitions)))


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the names of the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _count_blocks(entry: Any, sizes: Sizes) -> int:
    return math.prod(sizes[name] for name in axes_of(entry))


def map_leaves(f: Callable, value: Value, specs: Any) -> Any:
    """Return `value` with each leaf replaced by `f(leaf, spec)`.

    `specs` is an implicit array with the spec of each leaf in place of the leaf.
    """
    leaves, treedef = jax.tree.flatten(value)
    return jax.tree.unflatten(treedef, map(f, leaves, jax.tree.leaves(specs)))


def _drop_uneven_entries(leaf: Any, spec: P, sizes: Sizes) -> P:
    """Return `spec`, with None for each axis of the leaf whose mesh axes do not divide its size."""
    shape = jax.typeof(leaf).shape
    entries = zip(shape, entries_of(spec, len(shape)), strict=True)
    return P(*(None if n % _count_blocks(e, sizes) else e for n, e in entries))


@register(_constraint_p, precedence=-1)
def _constrain(value: Value, *, sharding: Any, context_mesh: Any, **params: Any) -> Any:
    del params  # the layout and `unconstrained_dims` are about the dense array
    if not isinstance(sharding, NamedSharding):
        return value
    sizes = sharding.mesh.shape
    specs = leaf_specs(value, sharding.spec, sizes)
    if specs is None:  # a constraint changes no value, so it can be dropped
        return value

    def constrain(leaf: Any, spec: P) -> Any:
        spec = _drop_uneven_entries(leaf, spec, sizes)
        unconstrained = frozenset(i for i, entry in enumerate(spec) if entry is P.UNCONSTRAINED)
        return _constraint_p.bind(
            leaf,
            sharding=sharding.update(spec=spec),
            layout=None,
            context_mesh=context_mesh,
            unconstrained_dims=unconstrained,
        )

    return map_leaves(constrain, value, specs)


@register(_reshard_p, precedence=-1)
def _reshard(value: Value, *, dst_sharding: Any, **params: Any) -> Any:
    sizes = dst_sharding.mesh.shape
    specs = leaf_specs(value, dst_sharding.spec, sizes)
    if specs is not None:

        def reshard(leaf: Any, spec: P) -> Any:
            sharding = dst_sharding.update(spec=_drop_uneven_entries(leaf, spec, sizes))
            return _reshard_p.bind(leaf, dst_sharding=sharding, **params)

        out = map_leaves(reshard, value, specs)
        # On explicit mesh axes, the sharding is part of the type, which must be as requested.
        aval = out.aval()
        if entries_of(aval.sharding.spec, aval.ndim) == entries_of(dst_sharding.spec, aval.ndim):
            return out
    (dense,) = make_dense(_reshard_p, [value])
    return _reshard_p.bind(dense, dst_sharding=dst_sharding, **params)


@register(_device_put_p, precedence=-1)
def _device_put(*values: Any, devices: Sequence[Any], srcs: Any, copy_semantics: Any) -> list[Any]:
    leaves, treedef = jax.tree.flatten(list(values))
    counts = [len(jax.tree.leaves(value)) for value in values]
    repeat = lambda items: tuple(x for x, n in zip(items, counts, strict=True) for _ in range(n))
    out = _device_put_p.bind(
        *leaves,
        devices=tuple(itertools.chain(*map(leaf_destinations, values, devices))),
        srcs=repeat(srcs),
        copy_semantics=repeat(copy_semantics),
    )
    return jax.tree.unflatten(treedef, out)


def leaf_destinations(value: Any, device: Any) -> list[Any]:
    """Return where `jax.device_put` puts each leaf of a value, given where it puts the dense array.

    `device` and the items of the result are devices, shardings, or None. `device` may also be a
    layout with a sharding.
    """
    leaves = jax.tree.leaves(value)
    if not isinstance(value, Value):
        return [device]
    device = getattr(device, "sharding", device)  # the layout is about the dense array
    if not isinstance(device, NamedSharding):
        return [device] * len(leaves)
    sizes = device.mesh.shape
    specs = leaf_specs(value, device.spec, sizes)
    # All leaves must be on the devices. Leaves that cannot be split are replicated.
    specs = [P()] * len(leaves) if specs is None else jax.tree.leaves(specs)
    even_specs = (_drop_uneven_entries(x, s, sizes) for x, s in zip(leaves, specs, strict=True))
    return [device.update(spec=spec) for spec in even_specs]


# `shard_map`.


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
    run_later, policy = capture_context(trace), current_policy()
    manual = params["newly_manual_axes"]
    reshard = lambda leaf, spec: reshard_leaf(leaf, spec, mesh, manual)
    # Find the spec of each leaf. Materialize values that cannot be split. `specs` becomes a list
    # of dense specs and of values, shaped as blocks, with a spec in place of each leaf.
    operands, specs = list(values), list(in_specs)
    for i, (value, spec) in enumerate(zip(values, in_specs, strict=True)):
        if isinstance(value, Value):
            value_specs = block_specs(value, spec, mesh.shape)
            if value_specs is None:
                why = why_not_split(value, spec, mesh.shape)
                (operands[i],) = make_dense(_shard_map_p, [value], why)
            else:
                operands[i], specs[i] = map_leaves(reshard, value, value_specs), value_specs
                keep_sources([value], [operands[i]])
    leaves = jax.tree.leaves(operands)
    leaf_specs, treedef = jax.tree.flatten(specs)
    if len(leaves) != len(values):
        debug_info = debug_info.with_unknown_names()
    user_results: Any = None  # the FlatTree that the body of the user returns
    out_treedef: Any = None  # the tree structure of the results, joined from blocks

    def on_leaves(*leaves: Any) -> Any:
        out_specs: Sequence[Any] = ()

        def body(*args: Any) -> list[Any]:
            nonlocal user_results, out_specs
            user_results, out_specs = f(*args).unpack_aux()
            return list(user_results)

        blocks = keep_sources(operands, jax.tree.unflatten(treedef, leaves))
        results = run_later(body)(*blocks)
        specs = list(out_specs)
        with policy_in_force(policy):
            for i, (result, spec) in enumerate(zip(results, out_specs, strict=True)):
                if isinstance(result, Value):
                    specs[i] = checked_joined_specs(result, spec, mesh.shape, check_vma)
                    if specs[i] is None:
                        specs[i], (results[i],) = spec, make_dense(_shard_map_p, [result])
        nonlocal out_treedef
        leaf_out_specs, out_treedef = jax.tree.flatten(specs)
        # JAX's messages show the tree of the user's results. In a derivative, this tree also
        # contains other data.
        if user_results.tree.num_leaves == len(results):
            results = jax.tree.unflatten(user_results.tree, results)
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
    return user_results.update(jax.tree.unflatten(out_treedef, list(leaves_out)))


def checked_joined_specs(block: Value, spec: P, sizes: Sizes, check_vma: bool) -> Any:
    """Return the specs that join the blocks of all devices, or None if they cannot be joined.

    If the spec of a leaf omits a mesh axis, JAX takes the leaf from an arbitrary device along this
    axis. Unlike `joined_specs`, return None if these devices may have different leaves. `check_vma`
    is the option of `jax.shard_map`. The other arguments are the same as in `joined_specs`.
    """
    joined = joined_specs(block, spec, sizes)
    if joined is None:
        return None
    names_in = lambda spec: {name for entry in spec.partitions for name in axes_of(entry)}
    for leaf, leaf_spec in zip(jax.tree.leaves(block), jax.tree.leaves(joined), strict=True):
        # Without `check_vma`, JAX does not know along which axes a leaf varies.
        may_vary = varying_axes(leaf) & names_in(spec) if check_vma else names_in(spec)
        if not may_vary <= names_in(leaf_spec):
            return None
    return joined


def reshard_leaf(leaf: Any, spec: P, mesh: Any, manual: frozenset[str]) -> Any:
    """Reshard a leaf along explicit mesh axes by `spec`, before it becomes a `shard_map` operand.

    On explicit axes, JAX rejects an operand of `shard_map` with another sharding. The dense array
    has the required sharding, but a leaf may be sharded along other or fewer axes. `manual` has the
    mesh axes that become manual in the `shard_map`.
    """
    axis_types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, axis_type in axis_types if axis_type == AxisType.Explicit}
    if not explicit & manual:
        return leaf
    aval = jax.typeof(leaf)
    old_entries = entries_of(aval.sharding.spec, aval.ndim)
    # Take the manual axes from the required spec, and keep the sharding along other axes.
    names_by_axis = [
        tuple(name for name in axes_of(required) if name in explicit)
        + tuple(name for name in axes_of(old) if name not in manual)
        for required, old in zip(entries_of(spec, aval.ndim), old_entries, strict=True)
    ]
    new_spec = P(*(names[0] if len(names) == 1 else names or None for names in names_by_axis))
    if old_entries == new_spec.partitions:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(mesh.abstract_mesh, new_spec))


@register(_pvary_p, precedence=-1)
def _pvary(value: Value, *, axes: tuple[str, ...]) -> Any:
    # The leaves of one value may vary along different axes.
    def vary(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return _pvary_p.bind(leaf, axes=missing) if missing else leaf

    return jax.tree.map(vary, value)


# Dense arrays on meshes with explicit axes, where the sharding is part of the type.


def _spec_entries(x: Any) -> tuple[Any, ...]:
    return entries_of(jax.typeof(x).sharding.spec, len(x.shape))


def replicated_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding that replicates an array on all devices of its mesh.

    Return None if the mesh has no explicit axes.
    """
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, P())


def replicate(x: Any) -> Any:
    """Return a copy of an array on every device, if the mesh of the array has explicit axes.

    Otherwise return the array unchanged, because XLA then chooses the shardings.
    """
    sharding = replicated_sharding(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def split_axes(x: Any, new_sizes: Sequence[Sequence[int]]) -> Any:
    """Return an array with each axis split into axes of the given sizes.

    For example, `[[4], [2, 3]]` reshapes (4, 6) to (4, 2, 3). The first new axis keeps the sharding
    of the old axis if the number of shards divides its size. If not, the old axis is gathered
    first, because JAX cannot reshape an axis across the borders of its shards.
    """
    shape = [size for sizes in new_sizes for size in sizes]
    if replicated_sharding(x) is None or shape == [*x.shape]:
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh
    old_spec: list[Any] = []
    new_spec: list[Any] = []
    for entry, sizes in zip(_spec_entries(x), new_sizes, strict=True):
        is_divisible = sizes[0] % _count_blocks(entry, mesh.shape) == 0
        old_spec.append(entry if is_divisible else None)
        new_spec += [old_spec[-1], *[None] * (len(sizes) - 1)]
    x = jax.sharding.reshard(x, NamedSharding(mesh, P(*old_spec)))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, P(*new_spec)))


def join_axes(x: Any, like: Any) -> Any:
    """Return an array with adjacent axes joined, in the shape and with the sharding of `like`."""
    if replicated_sharding(like) is None or x.shape == like.shape:
        return x.reshape(like.shape)
    # First join the axes: a new axis gets the sharding of the first axis that is joined.
    axis, entries, spec = 0, _spec_entries(x), []
    for size in like.shape:
        spec.append(entries[axis])
        joined_size = x.shape[axis]
        axis += 1
        while joined_size < size:
            joined_size *= x.shape[axis]
            axis += 1
    mesh = jax.typeof(like).sharding.mesh
    x = jax.lax.reshape(x, like.shape, out_sharding=NamedSharding(mesh, P(*spec)))
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*_spec_entries(like))))
