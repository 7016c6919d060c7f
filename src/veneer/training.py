"""Which arrays of a model are trained: `trainable`, `freeze` and `unfreeze`.

Each takes `where`, which chooses among arrays as the model sees them: an implicit array is one, and
its path is that of the parameter that it stands for.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from . import tree as vtree
from ._core.surface.weights import path_matches
from ._core.value import Value, is_value

Where = str | type | Callable[[str, Any], Any] | None


def trainable(tree: Any, where: Where = None) -> Any:
    """Which arrays are to be trained: a tree of bools, of the structure of the tree.

    They are all floating (or complex) arrays, except those that a type excludes by its class
    attribute `trainable`, which names the fields that are trained: a `QArray` says `()`, so its
    scales are not, and a LoRA says that its `w` is not. Biases and norms beside them are.

    **Arguments:**

    - `tree`: any pytree. Its leaves may be abstract (`jax.ShapeDtypeStruct`).
    - `where`: chooses among those further: a regex, matched in full against the keys of an array's
      path joined with dots, of which a final `.value`, as in flax.nnx, may be left out; a class; or
      a predicate of such a path and the array. An implicit array is one array here.

    **Returns:** a tree with True or False for each leaf, within implicit arrays too: a mask for
    `vn.tree.partition` and `optax.masked`.

    **Raises:** `ValueError` for a regex that does not compile. Warns with `UserWarning` of one that
    matches no path.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Lora(vn.ImplicitArray):
    ...     w: jax.Array | vn.ImplicitArray
    ...     a: jax.Array
    ...     b: jax.Array
    ...     trainable = ("a", "b")
    ...     def materialise(self):
    ...         return vn.materialise(self.w) + self.a @ self.b
    >>> w = vn.quant.quantize(jnp.ones((4, 4)), "int8")
    >>> params = {"kernel": Lora(w, jnp.ones((4, 1)), jnp.zeros((1, 4))), "bias": jnp.zeros(4)}
    >>> mask = vn.trainable(params)
    >>> mask["kernel"].a, mask["kernel"].w.scale, mask["bias"]
    (True, False, True)

    To train the LoRAs and nothing beside them:

    >>> mask = vn.trainable(params, where=Lora)
    >>> mask["kernel"].a, mask["bias"]
    (True, False)
    >>> trained, rest = vn.tree.partition(params, mask)
    >>> def loss(trained, x):
    ...     params = vn.tree.combine(trained, rest)
    ...     return (x @ params["kernel"] + params["bias"]).sum()
    >>> grads = jax.grad(loss)(trained, jnp.ones((2, 4)))
    >>> grads["kernel"].b.tolist(), grads["kernel"].w.scale, grads["bias"]
    ([[8.0, 8.0, 8.0, 8.0]], None, None)
    """
    return _map_arrays(lambda x, chosen: _marks(x, chosen), tree, where)


def freeze(tree: Any, where: Where = None) -> Any:
    """The tree with arrays wrapped as `vn.types.Frozen`, by which no gradient goes.

    **Arguments:**

    - `tree`: any pytree.
    - `where`: which arrays: a regex, matched in full against the keys of an array's path joined
      with dots, a class, or a predicate of such a path and the array; None is all. An implicit
      array is one here. Those that are not floating (or complex) have no gradient and stay as they
      are.

    **Returns:** a tree that stands for the same arrays, with which the model runs under
    `vn.implicit`. `vn.unfreeze` undoes it.

    **Raises:** `ValueError` for a regex that does not compile. Warns with `UserWarning` of one that
    matches no path.

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
    """The tree with what `vn.freeze` has wrapped as it was, and what is frozen within other types.

    **Arguments:**

    - `tree`: any pytree.
    - `where`: which arrays, as for `vn.freeze`.

    **Raises:** what `vn.freeze` raises.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.unfreeze(vn.freeze({"w": jnp.ones(2)}))
    {'w': Array([1., 1.], dtype=float32)}
    """
    from .types.frozen import Frozen

    is_frozen = lambda x: isinstance(x, Frozen)
    thaw = lambda x: jax.tree.map(lambda y: thaw(y.x) if is_frozen(y) else y, x, is_leaf=is_frozen)
    return _map_arrays(lambda x, chosen: thaw(x) if chosen else x, tree, where)


def _marks(x: Any, chosen: bool) -> Any:
    """A bool for each leaf of an array: whether it is trained, if the array is chosen."""
    if not is_value(x):
        return chosen and _is_inexact(x)
    trained = _trained_fields(type(x))

    def of_part(path: tuple[Any, ...], part: Any) -> Any:
        return _marks(part, chosen and (trained is None or _field_of(path) in trained))

    below = lambda y: y is not x and is_value(y)
    return jax.tree.map_with_path(of_part, x, is_leaf=below)


def _field_of(path: tuple[Any, ...]) -> str:
    """The name of the field at which a path within an implicit array begins."""
    return vtree.path_string(path[:1])


def _trained_fields(cls: type[Value]) -> Sequence[str] | None:
    trained = getattr(cls, "trainable", None)
    if trained is None:
        return None
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if isinstance(trained, str) or not set(trained) <= set(names):
        raise TypeError(
            f"{cls.__name__}.trainable is {trained!r}, and must be a tuple of names of its fields, "
            f"which are {', '.join(names)}; or None for all of them"
        )
    return trained


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _map_arrays(f: Callable[[Any, bool], Any], tree: Any, where: Where) -> Any:
    """The tree with `f(array, whether it is chosen)` for each array, implicit ones being whole."""
    leaves, treedef = vtree.flatten_with_path(tree)
    paths = [vtree.path_string(path) for path, _ in leaves]
    chosen = _chosen(paths, [x for _, x in leaves], where)
    return treedef.unflatten([f(x, c) for (_, x), c in zip(leaves, chosen, strict=True)])


def _chosen(paths: Sequence[str], arrays: Sequence[Any], where: Where) -> list[bool]:
    if where is None:
        return [True] * len(paths)
    if isinstance(where, type):
        return [isinstance(x, where) for x in arrays]
    if callable(where):
        return [bool(where(path, x)) for path, x in zip(paths, arrays, strict=True)]
    try:
        regex = re.compile(where)
    except re.error as error:
        raise ValueError(f"where={where!r} is not a regex: {error}") from None
    chosen = [path_matches(regex, path) for path in paths]
    if not any(chosen):
        some = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
        warnings.warn(
            f"where={where!r} matches nothing; it is matched in full against paths such as "
            f"{some or '(the tree is empty)'}",
            UserWarning,
            stacklevel=4,
        )
    return chosen
