"""Where the arrays of a tree are: `device_put`, by shardings that speak of dense arrays."""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from . import tree as vtree
from ._core.primitives.sharding import (
    axes_of,
    block_specs,
    entries_of,
    leaf_destinations,
    leaf_specs,
    why_not_split,
)
from ._core.surface import path_matches
from ._core.value import is_value


def device_put(tree: Any, shardings: Any) -> Any:
    """Place the arrays of a tree on devices, with shardings that refer to the dense arrays.

    The leaves of an implicit array are sharded to match its dense array. For example, if a
    quantized weight is sharded along its columns, each device gets the codes and the scales of its
    own columns. `jax.device_put` would apply the same sharding to every leaf, which fails for
    scales.

    **Arguments:**

    - `tree`: any pytree. An implicit array counts as one array. Objects that are not arrays are
      returned unchanged.
    - `shardings`: one of the forms in this table. In a list of pairs, the first regex that matches
      applies, and arrays that match no regex stay where they are. `vn.logical_shardings` returns
      such a list. Each form also accepts, in place of a sharding, a function that maps an array to
      its sharding, such as the result of `vn.fully_sharded`.

    | `shardings` | applies to |
    |---|---|
    | a sharding or a device | all arrays |
    | a prefix of `tree` with shardings or None | arrays below each entry; those below None stay |
    | a list of pairs `(regex, sharding)` | arrays whose whole path (`layers.0.kernel`) matches |

    **Returns:** a tree of the same structure. A leaf is replicated on all devices if the sharding
    would split a tile (values that share a scale) or a byte with several codes.

    **Raises:**

    - `ValueError` if a sharding has more axes than its array, or does not divide an axis evenly.
      The message names the path.
    - `ValueError` if a regex is invalid, or a tree of shardings is not a prefix of `tree`.
    - `TypeError` if an entry of `shardings` is not a sharding, a device or a function.

    **Warns** (`UserWarning`):

    - if the largest leaf of an implicit array is replicated to keep a tile or byte whole, because
      sharding then saves little memory;
    - if a regex matches no path in `tree`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> w = vn.quant.quantize(jnp.ones((64, 8)), "int8", channelwise_axes=[1])
    >>> w = vn.device_put(w, NamedSharding(mesh, P(None, "model")))
    >>> w.packed.sharding.spec, w.scale.sharding.spec
    (P(None, 'model'), P(None, 'model'))
    """
    found, treedef = vtree.flatten_with_path(tree)
    paths, arrays = [vtree.path_string(path) for path, _ in found], [x for _, x in found]
    asked = shardings_of(tree, shardings)
    return vtree.unflatten(treedef, put(paths, arrays, asked))


def logical_shardings(tree: Any, mesh: Mesh, rules: Any = ()) -> list[tuple[str, NamedSharding]]:
    """Return a sharding for each array of a model, derived from the names of its axes.

    Pass the result to `vn.device_put(params, shardings)` or `vn.load(path, shardings=...)`. The
    result refers to arrays by path. So `tree` can be the model before quantization, or an abstract
    model without values.

    **Arguments:**

    - `tree`: a `flax.nnx` module or state whose variables have `out_sharding`; the variables of a
      `flax.linen` module, wrapped in `nn.Partitioned` or `nn.LogicallyPartitioned`; or a pytree
      with a `PartitionSpec` of axis names in place of each array.
    - `mesh`: a `jax.sharding.Mesh`.
    - `rules`: a dict or a list of pairs. It maps each axis name to a mesh axis, to a tuple of mesh
      axes, or to None (not sharded). A list can have several pairs for one name. They are tried in
      order, as in flax. A pair is skipped if another axis of the array already uses one of its mesh
      axes. For an axis name that is also the name of a mesh axis, a pair that maps it to that mesh
      axis is added last. If all pairs of a name are skipped, the axis is not sharded.

    **Returns:** a list of pairs `(regex, NamedSharding)`, one per array that has axis names. The
    regex is the escaped path of the array. To place the other arrays too, append
    `(".*", sharding)`.

    **Raises:** `ValueError` if an axis name has no rule, a rule refers to an unknown mesh axis, or
    no array has axis names.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> rules = {"embed": None, "mlp": "model"}
    >>> shardings = vn.logical_shardings({"up": P("embed", "mlp")}, mesh, rules)
    >>> vn.device_put({"up": jnp.ones((8, 4))}, shardings)["up"].sharding.spec
    P(None, 'model')
    """
    pairs = [*(rules.items() if isinstance(rules, dict) else rules)]
    pairs += [(name, name) for name in mesh.axis_names]
    for name, to in pairs:
        if unknown := set(axes_of(to)) - set(mesh.axis_names):
            raise ValueError(
                f"the rule for {name!r} names {unknown.pop()!r}, not an axis of {mesh}"
            )
    found = jax.tree.flatten_with_path(tree, is_leaf=lambda x: _names_of(x) is not None)[0]
    named = [(vtree.path_string(path), _names_of(x)) for path, x in found]
    out = [
        (re.escape(path), NamedSharding(mesh, _mesh_spec(path, names, pairs)))
        for path, names in named
        if names is not None
    ]
    if not out:
        raise ValueError(
            "no array of the tree has axis names. Pass a flax model with sharding metadata, or a "
            "tree with a PartitionSpec in place of each array"
        )
    return out


def _names_of(x: Any) -> tuple[Any, ...] | None:
    """The names of the axes of an array, where a tree has them for it."""
    if isinstance(x, PartitionSpec):
        return tuple(x)
    if hasattr(x, "get_metadata"):  # flax.nnx.Variable
        names = x.get_metadata().get("out_sharding")
        names = getattr(getattr(names, "sharding", names), "spec", names)
        return None if names is None else tuple(names)
    return tuple(x.names) if hasattr(x, "get_partition_spec") else None  # flax.linen.Partitioned


def _mesh_spec(
    path: str, names: tuple[Any, ...], rules: Sequence[tuple[Any, Any]]
) -> PartitionSpec:
    """The axes of a mesh along which those with names are cut, each once."""
    entries: dict[int, Any] = {i: None for i, name in enumerate(names) if name is None}
    used: set[str] = set()
    for rule, to in rules:
        for i, name in enumerate(names):
            if name == rule and i not in entries and not used & {*axes_of(to)}:
                entries[i] = to
                used |= {*axes_of(to)}
    known = [rule for rule, _ in rules]
    if unknown := [name for name in names if name is not None and name not in known]:
        raise ValueError(
            f"axis {unknown[0]!r} of {path} {names} has no rule; there are rules for "
            f"{', '.join(map(str, dict.fromkeys(known)))}. Add a rule, such as "
            f"({unknown[0]!r}, None) to leave the axis whole"
        )
    return PartitionSpec(*(entries.get(i) for i in range(len(names))))


def fully_sharded(
    mesh: Mesh | AbstractMesh, axis_name: str | tuple[str, ...], spec: PartitionSpec | None = None
) -> Callable[[Any], NamedSharding]:
    """Return a function that shards each array along its longest divisible axis (FSDP).

    Use the function in place of a sharding in `vn.device_put` and `vn.load`. An axis is divisible
    if all devices get the same number of values, and no tile (values that share a scale) or byte of
    packed codes is split.

    **Arguments:**

    - `mesh`: a `jax.sharding.Mesh`.
    - `axis_name`: the mesh axis to shard over, or a tuple of mesh axes.
    - `spec`: a `PartitionSpec` for other mesh axes, such as a tensor-parallel one. The function
      then shards one of the axes that `spec` does not shard. `spec` cannot use `axis_name`.

    **Returns:** a function that maps an array, dense or implicit, to its `NamedSharding`. If no
    axis is divisible, the array is sharded by `spec` only, or replicated if `spec` is None.

    **Raises:** `ValueError` if `axis_name` is not an axis of `mesh`. The returned function raises
    `ValueError` if `spec` names an axis that `mesh` does not have.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> params = {"up": jnp.ones((64, 32)), "bias": jnp.ones(32)}
    >>> placed = vn.device_put(params, [(".*", vn.fully_sharded(mesh, "data"))])
    >>> placed["up"].sharding.spec, placed["bias"].sharding.spec
    (P('data', None), P('data',))
    """
    for name in axes_of(axis_name):
        if name not in mesh.shape:
            raise ValueError(f"axis_name {name!r} is not an axis of {mesh}")
    count = math.prod(mesh.shape[name] for name in axes_of(axis_name))
    stated = PartitionSpec() if spec is None else spec

    def of(x: Any) -> NamedSharding:
        shape = tuple(x.shape)
        given = NamedSharding(mesh, stated)
        if len(stated) > len(shape):
            return given  # which is refused, with the path
        entries = entries_of(stated, len(shape))
        for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
            cut = PartitionSpec(*entries[:axis], axis_name, *entries[axis + 1 :])
            is_whole = shape[axis] % count == 0 and (
                not is_value(x) or block_specs(x, cut, mesh.shape) is not None
            )
            if entries[axis] is None and is_whole:
                return NamedSharding(mesh, cut)
        return given

    return of


def shardings_of(tree: Any, shardings: Any) -> list[Any]:
    """The sharding of each array of a tree, or None, as `device_put` takes them; in order."""
    paths = [vtree.path_string(path) for path, _ in vtree.flatten_with_path(tree)[0]]
    return _by_rules(shardings, paths) if _are_rules(shardings) else _by_prefix(shardings, tree)


def put(paths: Sequence[str], arrays: Sequence[Any], asked: Sequence[Any]) -> list[Any]:
    """The arrays, each of a path, where a sharding says or, for None, where they are."""
    arrays = list(arrays)
    asked = [
        device(x) if callable(device) and _is_array(x) else device
        for x, device in zip(arrays, asked, strict=True)
    ]
    leaves: list[Any] = []
    devices: list[Any] = []
    for path, x, device in zip(paths, arrays, asked, strict=True):
        if device is not None and _is_array(x):
            _check(path, x, device)
            leaves += jax.tree.leaves(x)
            devices += leaf_destinations(x, device)
    placed = iter(_put(leaves, devices))
    for i, (x, device) in enumerate(zip(arrays, asked, strict=True)):
        if device is not None and _is_array(x):
            parts, structure = jax.tree.flatten(x)
            arrays[i] = jax.tree.unflatten(structure, [next(placed) for _ in parts])
    return arrays


def _put(leaves: list[Any], devices: list[Any]) -> list[Any]:
    """`jax.device_put` of leaves; of those that are cut over processes, each reads its own parts.

    JAX's would send each leaf to all processes, to compare it.
    """
    if all(getattr(device, "is_fully_addressable", True) for device in devices):
        return jax.device_put(leaves, devices)  # in one transfer
    return list(map(_put_own_parts, leaves, devices))


def _put_own_parts(leaf: Any, device: Any) -> Any:
    is_here = not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "is_fully_addressable", True)
    is_of_numbers = not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    if getattr(device, "is_fully_addressable", True) or not (is_here and is_of_numbers):
        return jax.device_put(leaf, device)
    part = lambda index: np.asarray(leaf[index], jax.dtypes.canonicalize_dtype(leaf.dtype))
    leaf = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, device, part)


def _is_array(x: Any) -> bool:
    return is_value(x) or (hasattr(x, "shape") and hasattr(x, "dtype"))


def _are_rules(shardings: Any) -> bool:
    return isinstance(shardings, list | tuple) and any(map(_is_rule, shardings))


def _is_rule(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) == 2 and isinstance(x[0], str)


def _by_rules(rules: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """The sharding of each path, or None."""
    compiled = []
    for rule in rules:
        if not _is_rule(rule):
            raise TypeError(f"a rule must be a pair of a regex and a sharding, not {rule!r}")
        regex, device = rule
        try:
            compiled.append((re.compile(regex), _checked(device, regex)))
        except re.error as error:
            raise ValueError(f"{regex!r} is not a regex: {error}") from None
        if not any(path_matches(compiled[-1][0], path) for path in paths):
            some = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
            warnings.warn(
                f"the rule {regex!r} matches no array. Change the regex, which must match a whole "
                f"path, such as {some or '(the tree is empty)'}",
                UserWarning,
                stacklevel=4,
            )
    return [
        next((to for regex, to in compiled if path_matches(regex, path)), None) for path in paths
    ]


def _by_prefix(shardings: Any, tree: Any) -> list[Any]:
    """The sharding of each array, by a tree of them that is a prefix; None where it has None."""
    asked: list[Any] = []

    def of_part(path: Any, device: Any, part: Any) -> None:
        device = None if device is None else _checked(device, vtree.path_string(path))
        asked.extend([device] * len(vtree.leaves(part)))

    # Leaves within implicit arrays are no arrays here: a prefix has one sharding for all of them.
    whole = vtree.map(lambda x: _Whole() if is_value(x) else x, tree)
    try:
        jax.tree.map_with_path(of_part, shardings, whole, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(f"shardings must be a prefix of the tree: {error}") from None
    return asked


class _Whole:
    """In the place of an implicit array: one leaf."""


def _checked(device: Any, of: str) -> Any:
    if isinstance(device, PartitionSpec) or not (
        isinstance(device, jax.sharding.Sharding | jax.Device)
        or hasattr(device, "sharding")
        or callable(device)
    ):
        where = f" for {of!r}" if of else ""
        raise TypeError(
            f"the sharding{where} must be a jax.sharding.Sharding, such as NamedSharding(mesh, "
            f"PartitionSpec(...)), or a device, not {device!r}"
        )
    return device


def _check(path: str, x: Any, device: Any) -> None:
    """Refuses a sharding that does not fit the dense array, and warns if its leaves stay whole."""
    sharding, shape = getattr(device, "sharding", device), tuple(x.shape)
    if not isinstance(sharding, NamedSharding):
        return
    name = path or "the array"
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{name} has shape {shape}, and {sharding.spec} has more axes")
    try:
        block = sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(f"{name} has shape {shape}: {error}") from None
    if is_value(x) and block != shape and _stays_whole(x, sharding):
        why = why_not_split(x, sharding.spec, sharding.mesh.shape)
        warnings.warn(
            f"{name} is replicated on each device, because blocks of shape {list(block)} for "
            f"{sharding.spec} would split a tile or a byte of {x!r}"
            + (f": {why}" if why else "")
            + ". Shard another axis, or quantize with smaller tiles",
            UserWarning,
            stacklevel=4,
        )


def _stays_whole(x: Any, sharding: NamedSharding) -> bool:
    """Whether the largest leaf is not cut, though it should be, to follow the dense array."""
    leaves = jax.tree.leaves(x)
    specs = leaf_specs(x, sharding.spec, sharding.mesh.shape, lambda size, _: size)
    asked = [None] * len(leaves) if specs is None else jax.tree.leaves(specs)
    size = lambda part: math.prod(part[0].shape) * part[0].dtype.itemsize
    of_leaves = zip(leaves, asked, leaf_destinations(x, sharding), strict=True)
    leaf, spec, place = max(of_leaves, key=size)
    follows = spec is None or any(entry is not None for entry in spec)
    return follows and size((leaf,)) > 0 and place.shard_shape(leaf.shape) == leaf.shape
