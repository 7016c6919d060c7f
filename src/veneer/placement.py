"""Place the arrays of a tree on devices, with shardings that refer to the dense arrays."""

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
from ._core.surface import path_matches, some_of
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
    leaves, treedef = vtree.flatten_with_path(tree)
    paths = [vtree.path_string(path) for path, _ in leaves]
    arrays = put(paths, [x for _, x in leaves], match_shardings(tree, shardings))
    return vtree.unflatten(treedef, arrays)


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
    leaves = jax.tree.flatten_with_path(tree, is_leaf=lambda x: _axis_names(x) is not None)[0]
    shardings = []
    for key, x in leaves:
        if (names := _axis_names(x)) is not None:
            path = vtree.path_string(key)
            sharding = NamedSharding(mesh, _mesh_spec(path, names, pairs))
            shardings.append((re.escape(path), sharding))
    if not shardings:
        raise ValueError(
            "no array of the tree has axis names. Pass a flax model with sharding metadata, or a "
            "tree with a PartitionSpec in place of each array"
        )
    return shardings


def _axis_names(x: Any) -> tuple[Any, ...] | None:
    """Return the axis names of a flax variable or of a `PartitionSpec`. None if `x` has none."""
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
    """Return the `PartitionSpec` of an array by the names of its axes. Use each mesh axis once.

    **Arguments:**

    - `path`: the path of the array, for error messages.
    - `names`: the name of each of its axes, or None for an axis that is not sharded.
    - `rules`: pairs of an axis name and mesh axes, as in `logical_shardings`.
    """
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
    base = PartitionSpec() if spec is None else spec

    def choose_sharding(x: Any) -> NamedSharding:
        shape = tuple(x.shape)
        if len(base) > len(shape):
            return NamedSharding(mesh, base)  # `put` raises an error with the path
        entries = entries_of(base, len(shape))
        for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
            if entries[axis] is None and shape[axis] % count == 0:
                sharded = PartitionSpec(*entries[:axis], axis_name, *entries[axis + 1 :])
                if not is_value(x) or block_specs(x, sharded, mesh.shape) is not None:
                    return NamedSharding(mesh, sharded)
        return NamedSharding(mesh, base)

    return choose_sharding


def match_shardings(tree: Any, shardings: Any) -> list[Any]:
    """Return the sharding of each array of a tree, in order, or None for arrays that stay.

    `shardings` has one of the forms that `device_put` takes.
    """
    if not (isinstance(shardings, list | tuple) and any(map(_is_rule, shardings))):
        return _match_prefix(shardings, tree)
    paths = [vtree.path_string(path) for path, _ in vtree.flatten_with_path(tree)[0]]
    return _match_rules(shardings, paths)


def put(paths: Sequence[str], arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Place each array with its sharding. Arrays whose sharding is None stay where they are.

    `paths` are the paths of the arrays, for error messages. A sharding can also be a device, or a
    function that maps an array to its sharding.
    """
    results = list(arrays)
    targets = {}
    for i, (x, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        is_array = is_value(x) or (hasattr(x, "shape") and hasattr(x, "dtype"))
        if sharding is not None and is_array:
            targets[i] = sharding(x) if callable(sharding) else sharding
            _check_fits(paths[i], x, targets[i])
    leaves = [leaf for i in targets for leaf in jax.tree.leaves(arrays[i])]
    devices = [d for i, target in targets.items() for d in leaf_destinations(arrays[i], target)]
    if all(getattr(device, "is_fully_addressable", True) for device in devices):
        placed = iter(jax.device_put(leaves, devices))  # in one transfer
    else:
        placed = map(_put_leaf, leaves, devices)
    for i in targets:
        parts, structure = jax.tree.flatten(arrays[i])
        results[i] = jax.tree.unflatten(structure, [next(placed) for _ in parts])
    return results


def _put_leaf(leaf: Any, device: Any) -> Any:
    """Place a leaf on `device`, a sharding or a device.

    If the sharding has devices of several processes, each process reads only its own part of a
    local leaf. `jax.device_put` would send the leaf to all processes, to compare it.
    """
    is_local = not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "is_fully_addressable", True)
    is_numeric = not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    if getattr(device, "is_fully_addressable", True) or not (is_local and is_numeric):
        return jax.device_put(leaf, device)
    part = lambda index: np.asarray(leaf[index], jax.dtypes.canonicalize_dtype(leaf.dtype))
    leaf = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, device, part)


def _is_rule(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) == 2 and isinstance(x[0], str)


def _match_rules(rules: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """Return, for each path, the sharding of the first rule that matches it, or None.

    A rule is a pair of a regex and a sharding. Warn if a regex matches no path.
    """
    compiled = []
    for rule in rules:
        if not _is_rule(rule):
            raise TypeError(f"a rule must be a pair of a regex and a sharding, not {rule!r}")
        regex, device = rule
        try:
            compiled.append((re.compile(regex), device))
        except re.error as error:
            raise ValueError(f"{regex!r} is not a regex: {error}") from None
        _check_sharding(device, regex)
        if not any(path_matches(compiled[-1][0], path) for path in paths):
            warnings.warn(
                f"the rule {regex!r} matches no array. Change the regex, which must match a whole "
                f"path, such as {some_of(paths)}",
                UserWarning,
                stacklevel=4,
            )
    return [
        next((to for regex, to in compiled if path_matches(regex, path)), None) for path in paths
    ]


def _match_prefix(shardings: Any, tree: Any) -> list[Any]:
    """Return the sharding of each array of `tree`, in order, or None for arrays that stay.

    `shardings` is a tree of shardings that is a prefix of `tree`. An entry applies to all arrays
    below it.
    """
    matched: list[Any] = []

    def add_subtree(path: Any, device: Any, subtree: Any) -> None:
        if device is not None:
            _check_sharding(device, vtree.path_string(path))
        matched.extend([device] * len(vtree.leaves(subtree)))

    # A prefix has one sharding per implicit array, so replace each of them by one leaf.
    arrays = vtree.map(lambda x: object() if is_value(x) else x, tree)
    try:
        jax.tree.map_with_path(add_subtree, shardings, arrays, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(f"shardings must be a prefix of the tree: {error}") from None
    return matched


def _check_sharding(device: Any, of: str) -> None:
    """Raise a `TypeError` if an entry of `shardings` is not a sharding, a device or a function.

    `of` is the path or the regex of the entry, for the message.
    """
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


def _check_fits(path: str, x: Any, device: Any) -> None:
    """Raise a `ValueError` if `device`, a sharding, does not fit the shape of the array `x`.

    Warn if the largest leaf of an implicit array stays replicated. `path` is the path of `x`, for
    these messages. If `device` is a device, do nothing.
    """
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
    if is_value(x) and block != shape and _stays_replicated(x, sharding):
        why = why_not_split(x, sharding.spec, sharding.mesh.shape)
        warnings.warn(
            f"{name} is replicated on each device, because blocks of shape {list(block)} for "
            f"{sharding.spec} would split a tile or a byte of {x!r}"
            + (f": {why}" if why else "")
            + ". Shard another axis, or quantize with smaller tiles",
            UserWarning,
            stacklevel=4,
        )


def _stays_replicated(x: Any, sharding: NamedSharding) -> bool:
    """Return whether the largest leaf of an implicit array is replicated despite `sharding`.

    `sharding` is for the dense array. It may split a tile or a byte of codes, and then the leaf is
    replicated instead. An axis of the leaf that is not sharded anyway does not count.
    """
    leaves = jax.tree.leaves(x)
    specs = leaf_specs(x, sharding.spec, sharding.mesh.shape, lambda size, _: size)
    wanted = [None] * len(leaves) if specs is None else jax.tree.leaves(specs)
    nbytes = lambda row: math.prod(row[0].shape) * row[0].dtype.itemsize
    rows = zip(leaves, wanted, leaf_destinations(x, sharding), strict=True)
    leaf, spec, actual = max(rows, key=nbytes)
    is_wanted = spec is None or any(entry is not None for entry in spec)
    return is_wanted and nbytes((leaf,)) > 0 and actual.shard_shape(leaf.shape) == leaf.shape
