"""Shardings of implicit values: the spec of a dense array, as one for each leaf of its value.

A value is cut leaf by leaf where its type says how, by `Value.partition`; where it is a label,
whose leaf is cut as the dense array is; and along batch axes, which every leaf carries. Nothing
else is guessed from shapes: a leaf of the right size need not move with the dense array.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..._jax.primitives import find_primitive
from ..leaf_axes import LeafAxis
from ..rules import add_rule
from ..value import Value, declared_layout, dense_shape_of, is_part, make_dense
from .batch_axes import has_batch_axes
from .labels import is_label

_NAMES = ("device_put", "reshard", "sharding_constraint")
device_put_p, reshard_p, sharding_constraint_p = map(find_primitive, _NAMES)

Sizes = Mapping[str, int]  # of the axes of a mesh, by name
Shape = tuple[int, ...]
Resize = Callable[[int, int], int]  # the size of an axis, and how many blocks it has


def leaf_specs(value: Value, spec: P, sizes: Sizes, resize: Resize) -> Any:
    """A value with the spec of a leaf in the place of each leaf; None if there is none.

    `spec` is that of the dense array, and `resize` what becomes of its axes: the metadata of the
    result are those of a value of that size.
    """
    old = value.aval().shape
    entries = entries_of(spec, len(old))
    if spec.unreduced or spec.reduced:  # partial sums of the leaves are not those of the value
        return None
    if all(entry is None for entry in entries):
        return jax.tree.map(lambda _: P(), value)
    if is_label(value):
        return jax.tree.map(lambda _: P(*entries), value)
    shape = tuple(resize(n, _blocks(e, sizes)) for n, e in zip(old, entries, strict=True))
    stated = value.partition(P(*entries), shape)
    if stated is not None:
        return _complete(value, stated, sizes, resize)
    leading = 1 + max(i for i, entry in enumerate(entries) if entry is not None)
    if has_batch_axes(value, leading):
        return jax.tree.map(lambda _: P(*entries[:leading]), value)
    return None


def _complete(value: Value, stated: Any, sizes: Sizes, resize: Resize) -> Any:
    """What a type states, with the implicit arrays among its fields leaf by leaf."""
    parts = jax.tree.leaves(value, is_leaf=is_part(value))
    specs, structure = jax.tree.flatten(stated, is_leaf=is_part(stated))
    if type(stated) is not type(value) or len(specs) != len(parts):
        raise TypeError(
            f"{type(value).__name__}.partition must return None, or a {type(value).__name__} with "
            f"a jax.sharding.PartitionSpec instead of each array, not {stated!r}."
        )
    for i, part in enumerate(parts):
        if isinstance(part, Value):
            complete = leaf_specs if isinstance(specs[i], P) else _complete
            specs[i] = complete(part, specs[i], sizes, resize)
            if specs[i] is None:
                return None
    return jax.tree.unflatten(structure, specs)


def split(value: Value, spec: P, sizes: Sizes) -> Any:
    """A block of a value, with the spec that cuts it off in the place of each leaf, or None."""
    blocks = leaf_specs(value, spec, sizes, operator.floordiv)
    return blocks if _fits(value, blocks, spec, sizes, operator.floordiv) else None


def join(value: Value, spec: P, sizes: Sizes) -> Any:
    """The whole of which a value is a block, with specs in the place of its leaves, or None."""
    whole = leaf_specs(value, spec, sizes, operator.mul)
    return whole if _fits(value, whole, spec, sizes, operator.mul) else None


def _fits(value: Value, specs: Any, spec: P, sizes: Sizes, resize: Resize) -> bool:
    """Whether leaves cut or joined so stand for the dense array that is cut or joined."""
    if specs is None:
        return False
    avals = []
    for leaf, leaf_spec in zip(jax.tree.leaves(value), jax.tree.leaves(specs), strict=True):
        aval = jax.typeof(leaf)
        blocks = [_blocks(e, sizes) for e in entries_of(leaf_spec, aval.ndim)]
        if resize is operator.floordiv and any(map(operator.mod, aval.shape, blocks)):
            return False  # a tile, or a byte, would be cut in two
        shape = tuple(map(resize, aval.shape, blocks))
        avals.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    wanted = value.aval().shape
    blocks = [_blocks(e, sizes) for e in entries_of(spec, len(wanted))]
    return dense_shape_of(jax.tree.structure(specs), tuple(avals)) == tuple(
        map(resize, wanted, blocks)
    )


def why_not_cut(value: Value, spec: P, sizes: Sizes) -> str:
    """What of a value is stored together and would be cut in two; nothing where it is not that."""
    parts, _, axes = declared_layout(value)
    entries, shape = entries_of(spec, value.aval().ndim), value.aval().shape
    for part, of_part in zip(parts, axes or [()] * len(parts), strict=True):
        for axis in filter(None, of_part):
            devices = _blocks(entries[axis.axis], sizes)
            size, at = shape[axis.axis] // devices, axis.axis + len(shape)
            if devices > 1 and axis.block == "whole":
                return f"axis {at} is stored as a whole"
            if devices > 1 and isinstance(axis.block, int) and size % axis.block:
                return (
                    f"axis {at}: each of {devices} devices would have {size} values, but "
                    f"{axis.block} are stored together"
                ) + _what_would(axis, shape[axis.axis], devices)
        if isinstance(part, Value) and of_part:
            own = P(*(axis and entries[axis.axis] for axis in of_part))
            if why := why_not_cut(part, own, sizes):
                return why
    return ""


def _what_would(axis: LeafAxis, size: int, devices: int) -> str:
    """What to change, so that devices have whole blocks of an axis."""
    assert isinstance(axis.block, int)
    fewer = [n for n in range(2, devices) if size % (n * axis.block) == 0]
    ways = [f"{max(fewer)} devices"] if fewer else []
    if axis.packed_in is None:  # as a scale goes with a tile, and not as bytes hold codes
        ways.insert(0, f"tiles of {math.gcd(size // devices, axis.block)}")
    return f" ({' or '.join(ways)} would fit)" if ways else ""


def entries_of(spec: P, ndim: int) -> tuple[Any, ...]:
    """The entries of a spec, one for each axis."""
    return (*spec.partitions, *(None,) * (ndim - len(spec.partitions)))


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _blocks(entry: Any, sizes: Sizes) -> int:
    return math.prod(sizes[name] for name in axes_of(entry))


# Constraints: they change no value, so a leaf that cannot follow stays where it is.


def _constrain(value: Value, *, sharding: Any, context_mesh: Any, **params: Any) -> Any:
    del params  # layout and unconstrained_dims are those of the dense array
    specs = None
    if isinstance(sharding, NamedSharding):
        specs = leaf_specs(value, sharding.spec, sharding.mesh.shape, lambda size, _: size)
    if specs is None:
        return value

    def constrain(leaf: Any, spec: P) -> Any:
        spec = _possible(leaf, spec, sharding.mesh.shape)
        free = frozenset(i for i, entry in enumerate(spec) if entry is P.UNCONSTRAINED)
        return sharding_constraint_p.bind(
            leaf,
            sharding=sharding.update(spec=spec),
            layout=None,
            context_mesh=context_mesh,
            unconstrained_dims=free,
        )

    return map_leaves(constrain, value, specs)


def _possible(leaf: Any, spec: P, sizes: Sizes) -> P:
    """The spec of a leaf, without the entries that would cut an axis unevenly."""
    shape = jax.typeof(leaf).shape
    entries = entries_of(spec, len(shape))
    return P(*(None if n % _blocks(e, sizes) else e for n, e in zip(shape, entries, strict=True)))


def map_leaves(f: Callable, value: Value, specs: Any) -> Any:
    """The value with `f(leaf, spec)` for each leaf and its spec."""
    leaves, treedef = jax.tree.flatten(value)
    return jax.tree.unflatten(treedef, map(f, leaves, jax.tree.leaves(specs)))


def _reshard(value: Value, *, dst_sharding: Any, **params: Any) -> Any:
    specs = leaf_specs(value, dst_sharding.spec, dst_sharding.mesh.shape, lambda size, _: size)
    if specs is not None:

        def reshard(leaf: Any, spec: P) -> Any:
            spec = _possible(leaf, spec, dst_sharding.mesh.shape)
            return reshard_p.bind(leaf, dst_sharding=dst_sharding.update(spec=spec), **params)

        out = map_leaves(reshard, value, specs)
        # Here the sharding is part of the type, which must come out as the program asks.
        ndim = out.aval().ndim
        got, asked = (entries_of(s.spec, ndim) for s in (out.aval().sharding, dst_sharding))
        if got == asked:
            return out
    (dense,) = make_dense(reshard_p, [value])
    return reshard_p.bind(dense, dst_sharding=dst_sharding, **params)


def _device_put(*values: Any, devices: Sequence[Any], srcs: Any, copy_semantics: Any) -> list[Any]:
    leaves, treedef = jax.tree.flatten(list(values))
    counts = [len(jax.tree.leaves(value)) for value in values]
    repeat = lambda of: tuple(c for c, n in zip(of, counts, strict=True) for _ in range(n))
    out = device_put_p.bind(
        *leaves,
        devices=tuple(d for v, to in zip(values, devices, strict=True) for d in places(v, to)),
        srcs=repeat(srcs),
        copy_semantics=repeat(copy_semantics),
    )
    return jax.tree.unflatten(treedef, out)


def places(value: Any, device: Any) -> list[Any]:
    """Where the leaves go that stand for an array on `device`: a device, a sharding or None."""
    leaves = jax.tree.leaves(value)
    if not isinstance(value, Value):
        return [device]
    device = getattr(device, "sharding", device)  # a layout says nothing of the leaves
    if not isinstance(device, NamedSharding):
        return [device] * len(leaves)
    sizes = device.mesh.shape
    specs = leaf_specs(value, device.spec, sizes, lambda size, _: size)
    # Unlike a constraint, this must put the leaves on the devices: whole ones if it cannot cut.
    specs = [P()] * len(leaves) if specs is None else jax.tree.leaves(specs)
    return [device.update(spec=_possible(x, s, sizes)) for x, s in zip(leaves, specs, strict=True)]


for _rule, _primitive in (
    (_constrain, sharding_constraint_p),
    (_reshard, reshard_p),
    (_device_put, device_put_p),
):
    add_rule(_rule, [_primitive])
