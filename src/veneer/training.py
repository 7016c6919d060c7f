"""Select the arrays of a model to train: `trainable`, `freeze` and `unfreeze`.

The argument `where` of these functions selects arrays. An implicit array counts as one array.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from . import tree as vtree
from ._core.surface import check_regex, path_matches, some_of
from ._core.value import Value, is_value

Where = str | type | Callable[[str, Any], Any] | None


def trainable(tree: Any, where: Where = None) -> Any:
    """Return a tree of bools that marks the arrays to train.

    Floating and complex arrays are marked True, all others False. A class of implicit arrays can
    list its trained fields in the attribute `trainable`. All arrays in its other fields are marked
    False. The list of `QArray` is empty, so its scales are marked False. The list of `LoraArray`
    has `a`, `b` and `magnitude`, but not `w`.

    **Arguments:**

    - `tree`: any pytree. Its leaves can be abstract (`jax.ShapeDtypeStruct`).
    - `where`: selects arrays, as in this table. All others are marked False. An implicit array
      counts as one array.

    | `where` | selects |
    |---|---|
    | None | all arrays |
    | a regex | arrays whose whole path (`layers.0.kernel`) matches; a final `.value` is optional |
    | a class | arrays of this class |
    | a function | arrays for which `where(path, array)` is true |

    **Returns:** `tree` with a bool in place of each leaf, also inside implicit arrays. Use it as
    the mask of `vn.tree.partition` or `optax.masked`.

    **Raises:**

    - `ValueError` if `where` is an invalid regex.
    - `TypeError` if `where` is not in the table.
    - `TypeError` if the attribute `trainable` of a class is not a tuple of its field names or None.

    **Warns** (`UserWarning`) if `where` is a regex that matches no path.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.ones((4, 4)), "int8")
    >>> lora = vn.types.LoraArray(w, jnp.ones((4, 1)), jnp.zeros((1, 4)))
    >>> mask = vn.trainable({"kernel": lora, "bias": jnp.zeros(4)}, where="kernel")
    >>> mask["kernel"].a, mask["kernel"].w.scale, mask["bias"]
    (True, False, False)
    """
    return _map_arrays(_mark_leaves, tree, where)


def freeze(tree: Any, where: Where = None) -> Any:
    """Wrap arrays of a tree in `vn.types.Frozen`, so that they get no gradient.

    **Arguments:**

    - `tree`: any pytree.
    - `where`: selects the arrays to wrap, as in `vn.trainable`. The default is all arrays. Arrays
      that are not floating or complex are not wrapped, because they have no gradient.

    **Returns:** the tree, with a `Frozen` in place of each selected array. Run the model under
    `vn.implicit`. `vn.unfreeze` restores the original tree.

    **Raises:** `ValueError` if `where` is an invalid regex. `TypeError` if `where` is not in the
    table of `vn.trainable`.

    **Warns** (`UserWarning`) if `where` is a regex that matches no path.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> params = vn.freeze({"w": jnp.eye(2), "b": jnp.zeros(2)}, where="w")
    >>> params
    {'b': Array([0., 0.], dtype=float32), 'w': Frozen(x=f32[2,2])}
    >>> grads = jax.grad(lambda p: (jnp.ones(2) @ p["w"] + p["b"]).sum())(params)
    >>> grads["w"].x.tolist(), grads["b"].tolist()
    ([[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0])
    """
    from .types.frozen import Frozen

    skip = lambda x: isinstance(x, Frozen) or not _is_inexact(x)
    return _map_arrays(lambda x, chosen: Frozen(x) if chosen and not skip(x) else x, tree, where)


def unfreeze(tree: Any, where: Where = None) -> Any:
    """Replace each `vn.types.Frozen` in a tree by the array in it, the inverse of `vn.freeze`.

    A `Frozen` inside another implicit array, such as a `LoraArray`, is replaced too.

    **Arguments:**

    - `tree`: any pytree.
    - `where`: selects the arrays to unwrap, as in `vn.trainable`. The default is all arrays.

    **Returns:** the tree, with the original array in place of each selected `Frozen`.

    **Raises:** `ValueError` if `where` is an invalid regex. `TypeError` if `where` is not in the
    table of `vn.trainable`.

    **Warns** (`UserWarning`) if `where` is a regex that matches no path.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.unfreeze(vn.freeze({"w": jnp.ones(2)}))
    {'w': Array([1., 1.], dtype=float32)}
    """
    from .types.frozen import Frozen

    is_frozen = lambda x: isinstance(x, Frozen)
    thaw = lambda x: jax.tree.map(lambda y: thaw(y.x) if is_frozen(y) else y, x, is_leaf=is_frozen)
    return _map_arrays(lambda x, chosen: thaw(x) if chosen else x, tree, where)


def _mark_leaves(x: Any, is_selected: bool) -> Any:
    """Return `x` with a bool in place of each leaf: True if the leaf is trained.

    `is_selected` says whether the argument `where` selects the array `x`. If it is False, all bools
    are False.
    """
    if not is_value(x):
        return is_selected and _is_inexact(x)
    trained = _trained_fields(type(x))

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        field = vtree.path_string(path[:1])
        return _mark_leaves(leaf, is_selected and (trained is None or field in trained))

    return jax.tree.map_with_path(mark, x, is_leaf=lambda y: y is not x and is_value(y))


def _trained_fields(cls: type[Value]) -> Sequence[str] | None:
    trained = getattr(cls, "trainable", None)
    if trained is None:
        return None
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if isinstance(trained, str) or not set(trained) <= set(names):
        raise TypeError(
            f"{cls.__name__}.trainable must be None or a tuple of names of fields, out of "
            f"{', '.join(names)}, not {trained!r}"
        )
    return trained


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _map_arrays(f: Callable[[Any, bool], Any], tree: Any, where: Where) -> Any:
    """Return the tree with `f(x, is_selected)` in place of each array `x`.

    `is_selected` says whether `where` selects the array. An implicit array counts as one array.
    """
    leaves, treedef = vtree.flatten_with_path(tree)
    paths = [vtree.path_string(path) for path, _ in leaves]
    selected = _select(paths, [x for _, x in leaves], where)
    return treedef.unflatten([f(x, s) for (_, x), s in zip(leaves, selected, strict=True)])


def _select(paths: Sequence[str], arrays: Sequence[Any], where: Where) -> list[bool]:
    if where is None:
        return [True] * len(paths)
    if isinstance(where, type):
        return [isinstance(x, where) for x in arrays]
    if callable(where):
        return [bool(where(path, x)) for path, x in zip(paths, arrays, strict=True)]
    check_regex(where, "where", "a regex, a class or a function")
    selected = [path_matches(where, path) for path in paths]
    if not any(selected):
        warnings.warn(
            f"where={where!r} matches no array. Change the regex, which must match a whole path, "
            f"such as {some_of(paths)}",
            UserWarning,
            stacklevel=4,
        )
    return selected
