"""Trees in which an implicit array is one leaf, and trees of those parts of it that are trained.

The first eight functions are those of `jax.tree` with the same signatures. An `is_leaf` of the
caller's names further leaves.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.tree_util import treedef_is_leaf

from ._core.policy import ALLOW, policy_in_force
from ._core.value import Value, is_value
from ._core.value import materialise as _materialise

IsLeaf = Callable[..., bool] | None


def _or_value(is_leaf: IsLeaf, takes_path: bool = False) -> Callable[..., bool]:
    if is_leaf is None:
        return (lambda _, x: is_value(x)) if takes_path else is_value
    return lambda *args: is_value(args[-1]) or is_leaf(*args)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """The tree with `f(leaf, *leaves_of_rest)` for each leaf.

    >>> import jax.numpy as jnp, veneer as vn
    >>> tree = {"w": vn.quant.quantize(jnp.ones((2, 3)), "int8"), "b": jnp.ones(3)}
    >>> vn.tree.map(lambda x: x.shape, tree)
    {'b': (3,), 'w': (2, 3)}
    """
    return jax.tree.map(f, tree, *rest, is_leaf=_or_value(is_leaf))


def map_with_path(
    f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> Any:
    """The tree with `f(path, leaf, *leaves_of_rest)` for each leaf.

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
    """The leaves, in order."""
    return jax.tree.leaves(tree, is_leaf=_or_value(is_leaf))


def leaves_with_path(
    tree: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> list[tuple[Any, Any]]:
    """Pairs of a path and a leaf, in order."""
    return flatten_with_path(tree, is_leaf, is_leaf_takes_path)[0]


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Any]:
    """The leaves, and the structure of which `unflatten` makes the tree again."""
    return jax.tree.flatten(tree, is_leaf=_or_value(is_leaf))


def flatten_with_path(
    tree: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> tuple[list[tuple[Any, Any]], Any]:
    """Pairs of a path and a leaf, and the structure."""
    either = _or_value(is_leaf, is_leaf_takes_path)
    return jax.tree.flatten_with_path(tree, is_leaf=either, is_leaf_takes_path=is_leaf_takes_path)


def unflatten(treedef: Any, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return jax.tree.unflatten(treedef, leaves)


def structure(tree: Any, is_leaf: IsLeaf = None) -> Any:
    """The structure, in which an implicit array is a leaf as any other.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.tree.structure([vn.quant.quantize(jnp.ones(2), "int8"), jnp.ones(2)])
    PyTreeDef([*, *])
    """
    return jax.tree.structure(tree, is_leaf=_or_value(is_leaf))


def path_string(path: Iterable[Any]) -> str:
    """The keys of a path joined with dots, `layers.0.kernel`: what a regex on paths is matched to.

    >>> import jax, veneer as vn
    >>> [vn.tree.path_string(path) for path, _ in jax.tree.leaves_with_path({"a": [1, 2]})]
    ['a.0', 'a.1']
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def _is_below(x: Any) -> Callable[[Any], bool]:
    """The `is_leaf` that opens `x`, and no implicit array within it."""
    return lambda y: y is not x and is_value(y)


def flatten_one_layer(tree: Any) -> tuple[list[Any], Any]:
    """The leaves where each outermost implicit array is opened, those within it being leaves.

    **Returns:** the leaves, and the structure of which `unflatten` makes the tree again.

    >>> import jax.numpy as jnp, veneer as vn
    >>> leaves, treedef = vn.tree.flatten_one_layer(vn.quant.quantize(jnp.ones((2, 3)), "int8"))
    >>> [(x.dtype.name, x.shape) for x in leaves]
    [('int8', (2, 3)), ('float32', (1, 1))]
    >>> vn.tree.unflatten(treedef, leaves).shape
    (2, 3)
    """
    values, outer = flatten(tree)
    opened = [jax.tree.flatten(x, is_leaf=_is_below(x)) for x in values]
    # A structure is a function of that of its parts for uniform ones alone, hence the placeholders.
    parts = [jax.tree.unflatten(inner, [0] * len(found)) for found, inner in opened]
    return [x for found, _ in opened for x in found], jax.tree.structure(outer.unflatten(parts))


def depth(tree: Any) -> int:
    """How deep implicit arrays are nested: 0 for none, 1 for some that hold no other.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.tree.depth({"w": vn.quant.quantize(jnp.ones(2), "int8"), "b": jnp.ones(2)})
    1
    """
    values = (x for x in leaves(tree) if is_value(x))
    return max((1 + depth(flatten_one_layer(x)[0]) for x in values), default=0)


def materialise_nested(tree: Any, full: bool = False) -> Any:
    """The tree with each outermost implicit array materialised once, or wholly.

    **Arguments:**

    - `tree`: an implicit array, or a tree of them. What is dense stays as it is, and so does an
      operand of a program under `implicit`, unless `full`: there it is an array, without layers.
    - `full`: whether to go on where `materialise` gives another implicit array; `vn.materialise`
      then does the same.

    >>> import jax.numpy as jnp, veneer as vn
    >>> frozen = vn.freeze(vn.quant.quantize(jnp.ones(2), "nf4"))
    >>> type(vn.tree.materialise_nested(frozen)).__name__
    'QArray'
    >>> vn.tree.materialise_nested(frozen, full=True).tolist()
    [1.0, 1.0]
    """
    if full:
        return _materialise(tree)
    with policy_in_force(ALLOW):  # as asked for, so no news
        return map(lambda x: x.materialise() if isinstance(x, Value) else x, tree)


def partition(tree: Any, mask: Any) -> tuple[Any, Any]:
    """The tree in two: the arrays that are chosen, and the rest, with None for each other's.

    Arrays are those within implicit arrays: with `vn.trainable`, a LoRA's `a` and `b` are in the
    first tree and its `w` in the second, and both hold a LoRA.

    **Arguments:**

    - `mask`: a tree of bools, a bool standing for the whole of a subtree; or a predicate of leaves.

    **Returns:** the two trees, of which `combine` makes the tree again. The first is what to
    differentiate by, and what to give to an optimiser.

    **Raises:** `ValueError` where the mask does not fit the tree; `TypeError` where it holds
    something else than bools.

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
    if callable(mask) and treedef_is_leaf(jax.tree.structure(mask)):  # and no module of bools
        mask = jax.tree.map(lambda x: bool(mask(x)), tree)
    try:
        chosen = jax.tree.map(_spread, mask, tree)
    except ValueError as error:
        raise ValueError(f"the mask is no prefix of the tree: {error}") from None
    keep = lambda wanted: jax.tree.map(lambda c, x: x if c is wanted else None, chosen, tree)
    return keep(True), keep(False)


def _spread(choice: Any, subtree: Any) -> Any:
    if not isinstance(choice, bool):
        raise TypeError(f"a mask holds bools, True for what is chosen, and not {choice!r}")
    return jax.tree.map(lambda _: choice, subtree)


def combine(*trees: Any) -> Any:
    """One tree of several of the same structure: at each place the first leaf that is not None.

    >>> import veneer as vn
    >>> vn.tree.combine({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    return jax.tree.map(_first, *trees, is_leaf=_is_empty)


def _first(*xs: Any) -> Any:
    held = [x for x in xs if not _is_empty(x)]
    if len(held) > 1 and any(isinstance(x, Value) for x in held):
        raise TypeError(
            f"{held[0]!r} is one array here, and {held[1]!r} has leaves of its place: a part that "
            "lacks an optional leaf is taken for a whole array under vn.implicit. Put such parts "
            "together before it"
        )
    return held[0] if held else xs[0]


def _is_empty(x: Any) -> bool:
    """Whether it is None, or an implicit array all of whose leaves are elsewhere.

    Under `implicit` it may be one operand there, which has no leaves to be put beside these.
    """
    return x is None or (isinstance(x, Value) and not jax.tree.leaves(x))
