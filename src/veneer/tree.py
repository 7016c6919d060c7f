"""Functions of pytrees in which an implicit array is one leaf.

`map`, `flatten`, `leaves`, `structure`, `unflatten` and the functions with suffix `_with_path` have
the signatures of `jax.tree`. Their argument `is_leaf` can mark more nodes as leaves. `partition`
and `combine` also split and merge the arrays inside implicit arrays.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.tree_util import treedef_is_leaf

from ._core.policy import ALLOW, policy_in_force
from ._core.value import Value, is_value
from ._core.value import materialise as _materialise

__all__ = [
    "combine",
    "depth",
    "flatten",
    "flatten_one_layer",
    "flatten_with_path",
    "leaves",
    "leaves_with_path",
    "map",
    "map_with_path",
    "materialise_nested",
    "partition",
    "path_string",
    "structure",
    "unflatten",
]

IsLeaf = Callable[..., bool] | None


def _or_value(is_leaf: IsLeaf, takes_path: bool = False) -> Callable[..., bool]:
    if is_leaf is None:
        return (lambda _, x: is_value(x)) if takes_path else is_value
    return lambda *args: is_value(args[-1]) or is_leaf(*args)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """Apply a function to each leaf of a tree. An implicit array is one leaf.

    **Arguments:**

    - `f`: a function. Its arguments are a leaf of `tree` and, from each tree in `rest`, the subtree
      at the same place.
    - `tree`: a pytree.
    - `rest`: more pytrees. `tree` must be a prefix of each.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.

    **Returns:** `tree` with the result of `f` in place of each leaf.

    **Raises:** `ValueError` if `tree` is not a prefix of a tree in `rest`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> tree = {"w": vn.quant.quantize(jnp.ones((2, 3)), "int8"), "b": jnp.ones(3)}
    >>> vn.tree.map(lambda x: x.shape, tree)
    {'b': (3,), 'w': (2, 3)}
    """
    return jax.tree.map(f, tree, *rest, is_leaf=_or_value(is_leaf))


def map_with_path(
    f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> Any:
    """Apply a function to the path and the value of each leaf. An implicit array is one leaf.

    **Arguments:**

    - `f`: a function. Its arguments are the path of a leaf of `tree`, the leaf and, from each tree
      in `rest`, the subtree at the same place. `vn.tree.path_string` converts a path to a string.
    - `tree`: a pytree.
    - `rest`: more pytrees. `tree` must be a prefix of each.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.
    - `is_leaf_takes_path`: whether to call `is_leaf(path, node)` instead of `is_leaf(node)`.

    **Returns:** `tree` with the result of `f` in place of each leaf.

    **Raises:** `ValueError` if `tree` is not a prefix of a tree in `rest`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> tree = {"w": vn.quant.quantize(jnp.ones((2, 3)), "int8"), "b": jnp.ones(3)}
    >>> vn.tree.map_with_path(lambda path, x: vn.tree.path_string(path), tree)
    {'b': 'b', 'w': 'w'}
    """
    either = _or_value(is_leaf, is_leaf_takes_path)
    return jax.tree.map_with_path(
        f, tree, *rest, is_leaf=either, is_leaf_takes_path=is_leaf_takes_path
    )


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """Return the leaves of a tree. An implicit array is one leaf.

    **Arguments:**

    - `tree`: a pytree.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.

    **Returns:** a list of leaves.

    >>> import jax.numpy as jnp, veneer as vn
    >>> tree = {"w": vn.quant.quantize(jnp.ones((2, 3)), "int8"), "b": jnp.ones(3)}
    >>> [x.shape for x in vn.tree.leaves(tree)]
    [(3,), (2, 3)]
    """
    return jax.tree.leaves(tree, is_leaf=_or_value(is_leaf))


def leaves_with_path(
    tree: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> list[tuple[Any, Any]]:
    """Return the leaves of a tree with their paths. An implicit array is one leaf.

    **Arguments:**

    - `tree`: a pytree.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.
    - `is_leaf_takes_path`: whether to call `is_leaf(path, node)` instead of `is_leaf(node)`.

    **Returns:** a list of pairs of a path and a leaf.

    >>> import jax.numpy as jnp, veneer as vn
    >>> tree = {"w": vn.quant.quantize(jnp.ones((2, 3)), "int8"), "b": jnp.ones(3)}
    >>> [(vn.tree.path_string(path), x.shape) for path, x in vn.tree.leaves_with_path(tree)]
    [('b', (3,)), ('w', (2, 3))]
    """
    return flatten_with_path(tree, is_leaf, is_leaf_takes_path)[0]


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Any]:
    """Split a tree into its leaves and its structure. An implicit array is one leaf.

    **Arguments:**

    - `tree`: a pytree.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.

    **Returns:** a list of leaves, and a structure for `vn.tree.unflatten`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> leaves, treedef = vn.tree.flatten([vn.quant.quantize(jnp.ones(2), "int8"), 1])
    >>> len(leaves), treedef
    (2, PyTreeDef([*, *]))
    """
    return jax.tree.flatten(tree, is_leaf=_or_value(is_leaf))


def flatten_with_path(
    tree: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> tuple[list[tuple[Any, Any]], Any]:
    """Split a tree into its leaves, with their paths, and its structure.

    An implicit array is one leaf.

    **Arguments:**

    - `tree`: a pytree.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.
    - `is_leaf_takes_path`: whether to call `is_leaf(path, node)` instead of `is_leaf(node)`.

    **Returns:** a list of pairs of a path and a leaf, and a structure for `vn.tree.unflatten`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> tree = {"w": vn.quant.quantize(jnp.ones(2), "int8")}
    >>> pairs, treedef = vn.tree.flatten_with_path(tree)
    >>> vn.tree.path_string(pairs[0][0]), treedef
    ('w', PyTreeDef({'w': *}))
    """
    either = _or_value(is_leaf, is_leaf_takes_path)
    return jax.tree.flatten_with_path(tree, is_leaf=either, is_leaf_takes_path=is_leaf_takes_path)


def unflatten(treedef: Any, leaves: Iterable[Any]) -> Any:
    """Build a tree from its structure and its leaves.

    **Arguments:**

    - `treedef`: a structure that `vn.tree.flatten` or `vn.tree.structure` returned.
    - `leaves`: the leaves of the new tree, in the order of `vn.tree.leaves`.

    **Returns:** the tree.

    **Raises:** `ValueError` if there are fewer or more leaves than in the structure.

    >>> import veneer as vn
    >>> vn.tree.unflatten(vn.tree.structure({"a": 1, "b": 2}), [3, 4])
    {'a': 3, 'b': 4}
    """
    return jax.tree.unflatten(treedef, leaves)


def structure(tree: Any, is_leaf: IsLeaf = None) -> Any:
    """Return the structure of a tree. An implicit array is one leaf.

    **Arguments:**

    - `tree`: a pytree.
    - `is_leaf`: a function that returns True for nodes to treat as leaves, as in `jax.tree.map`.

    **Returns:** a `jax.tree_util.PyTreeDef`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.tree.structure([vn.quant.quantize(jnp.ones(2), "int8"), jnp.ones(2)])
    PyTreeDef([*, *])
    """
    return jax.tree.structure(tree, is_leaf=_or_value(is_leaf))


def path_string(path: Iterable[Any]) -> str:
    """Convert a path to a string of keys joined by dots, such as `"layers.0.kernel"`.

    `vn.quant.Rule` and `vn.lora.Rule` match their regexes against such strings.

    **Arguments:**

    - `path`: a path, as returned by `jax.tree.leaves_with_path` and `vn.tree.leaves_with_path`.

    **Returns:** a string.

    >>> import jax, veneer as vn
    >>> [vn.tree.path_string(path) for path, _ in jax.tree.leaves_with_path({"a": [1, 2]})]
    ['a.0', 'a.1']
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def flatten_one_layer(tree: Any) -> tuple[list[Any], Any]:
    """Split implicit arrays into their fields, and keep implicit arrays inside them as leaves.

    **Arguments:**

    - `tree`: a pytree, such as one implicit array.

    **Returns:** a list of leaves, dense or implicit, and a structure for `vn.tree.unflatten`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> leaves, treedef = vn.tree.flatten_one_layer(vn.quant.quantize(jnp.ones((2, 3)), "int8"))
    >>> [(x.dtype.name, x.shape) for x in leaves]
    [('int8', (2, 3)), ('float32', (1, 1))]
    >>> vn.tree.unflatten(treedef, leaves).shape
    (2, 3)
    """

    def flatten_fields(x: Any) -> tuple[list[Any], Any]:
        return jax.tree.flatten(x, is_leaf=lambda y: y is not x and is_value(y))

    outermost, outer = flatten(tree)
    flat = [flatten_fields(x) for x in outermost]
    # JAX cannot compose different structures, so compose trees with placeholders.
    parts = [jax.tree.unflatten(inner, [0] * len(fields)) for fields, inner in flat]
    return [x for fields, _ in flat for x in fields], jax.tree.structure(outer.unflatten(parts))


def depth(tree: Any) -> int:
    """Return the number of levels of nested implicit arrays in a tree.

    **Arguments:**

    - `tree`: a pytree.

    **Returns:** 0 if the tree has no implicit arrays, 1 if they contain only dense arrays, 2 if one
    contains another, and so on.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.tree.depth({"w": vn.quant.quantize(jnp.ones(2), "int8"), "b": jnp.ones(2)})
    1
    """
    values = (x for x in leaves(tree) if is_value(x))
    return max((1 + depth(flatten_one_layer(x)[0]) for x in values), default=0)


def materialise_nested(tree: Any, full: bool = False) -> Any:
    """Materialize the outermost layer of each implicit array.

    For example, a `Frozen` that contains a `QArray` becomes a `QArray`.

    **Arguments:**

    - `tree`: a pytree, such as one implicit array. Dense arrays are returned unchanged. With
      `full=False`, traced arrays inside a function that runs under `vn.implicit` are also returned
      unchanged.
    - `full`: whether to materialize all layers, like `vn.materialise`.

    **Returns:** the tree. With `full=False`, it can still contain implicit arrays.

    **Raises:** `TypeError` or `ValueError` if an array has no dense form, such as a
    `vn.types.Quantity` in meters.

    >>> import jax.numpy as jnp, veneer as vn
    >>> frozen = vn.freeze(vn.quant.quantize(jnp.ones(2), "nf4"))
    >>> type(vn.tree.materialise_nested(frozen)).__name__
    'QArray'
    >>> vn.tree.materialise_nested(frozen, full=True).tolist()
    [1.0, 1.0]
    """
    if full:
        return _materialise(tree)
    with policy_in_force(ALLOW):  # the user asked for it, so do not report it
        return map(lambda x: x.materialise() if isinstance(x, Value) else x, tree)


def partition(tree: Any, mask: Any) -> tuple[Any, Any]:
    """Split a tree into the selected arrays and the rest.

    Both trees have the structure of `tree`. Where one of them has an array, the other has None. The
    arrays inside an implicit array are split too: with the mask `vn.trainable(tree)`, `a` and `b`
    of a `LoraArray` are in the first tree, and `w` is in the second. In training, differentiate
    with respect to the first tree and update it.

    **Arguments:**

    - `tree`: a pytree.
    - `mask`: a pytree of bools, such as `vn.trainable(tree)`, that is a prefix of `tree`. Or a
      function that returns a bool for each array, also inside implicit arrays.

    **Returns:** a pair of trees: the arrays for which the mask is True, and the rest.
    `vn.tree.combine` merges them again.

    **Raises:**

    - `ValueError` if `mask` is not a prefix of `tree`.
    - `TypeError` if `mask` has leaves that are not bools.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> params = {"w": vn.quant.quantize(jnp.eye(2), "int8"), "b": jnp.zeros(2)}
    >>> trained, rest = vn.tree.partition(params, vn.trainable(params))
    >>> trained
    {'b': Array([0., 0.], dtype=float32), 'w': QArray(packed=None, scale=None, zero_point=None,
    minimum=None, qtype='int8', packing=None, dense_dtype='float32')}
    >>> def loss(trained, x):
    ...     params = vn.tree.combine(trained, rest)
    ...     return (x @ params["w"] + params["b"]).sum()
    >>> jax.grad(loss)(trained, jnp.ones((3, 2)))["b"].tolist()
    [3.0, 3.0]
    """
    # A callable with leaves is a module of bools, such as an Equinox module.
    if callable(mask) and treedef_is_leaf(jax.tree.structure(mask)):
        mask = jax.tree.map(lambda x: bool(mask(x)), tree)

    def broadcast(choice: Any, subtree: Any) -> Any:
        if not isinstance(choice, bool):
            raise TypeError(f"A mask must have bools as leaves, not {choice!r}.")
        return jax.tree.map(lambda _: choice, subtree)

    try:
        chosen = jax.tree.map(broadcast, mask, tree)
    except ValueError as error:
        raise ValueError(f"The mask is not a prefix of the tree: {error}") from None
    keep = lambda wanted: jax.tree.map(lambda c, x: x if c is wanted else None, chosen, tree)
    return keep(True), keep(False)


def combine(*trees: Any) -> Any:
    """Merge trees of the same structure: for each leaf, take the first value that is not None.

    **Arguments:**

    - `trees`: pytrees, such as those that `vn.tree.partition` returns.

    **Returns:** one tree. It has None where all trees have None.

    **Raises:**

    - `ValueError` if the structures differ.
    - `TypeError` if one tree has a complete implicit array where another tree has only some of its
      leaves.

    >>> import veneer as vn
    >>> vn.tree.combine({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    return jax.tree.map(_first, *trees, is_leaf=_is_empty)


def _first(*xs: Any) -> Any:
    present = [x for x in xs if not _is_empty(x)]
    if len(present) > 1 and any(isinstance(x, Value) for x in present):
        raise TypeError(
            f"One tree has {present[0]!r} where another has {present[1]!r}. Under vn.implicit, a "
            "part without an optional array counts as a whole array. Combine the trees outside "
            "vn.implicit."
        )
    return present[0] if present else xs[0]


def _is_empty(x: Any) -> bool:
    """Return whether `x` is None or an implicit array without leaves."""
    return x is None or (isinstance(x, Value) and not jax.tree.leaves(x))


def __dir__() -> list[str]:
    return __all__
