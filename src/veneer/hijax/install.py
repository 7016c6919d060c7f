"""Turning the mode on and off: `install`, `uninstall`, `enabled`."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import jax

from .._core.array import ImplicitArray
from .._core.value import Value, is_value
from .high_array import HighArray
from .lifted import bind, brought_in, canonical
from .meeting import branch, loop_body
from .patches import Patches, patches
from .results import is_ours, placed, tree
from .shard_map import shard_map, with_dense_specs
from .typed_results import Results
from .types import HighType, Tangent, exposed, parted, type_of

_lock = RLock()
_uses = 0  # one for `install`, and one for each block of `enabled` that is open
_patches: Patches | None = None

# Whether the mode is on, in this thread. A jitted function is traced anew where that changes, so
# that one traced with high types is not found in JAX's caches without.
_mode = jax.make_user_context(False)


def install() -> None:
    """Makes implicit arrays operands of plain JAX functions, in every thread, until `uninstall`.

    Installed twice is as once.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> vn.hijax.install()
    >>> jax.jit(jnp.matmul)(jnp.ones((1, 2)), w).tolist()
    [[1.0, 1.0]]
    >>> vn.hijax.uninstall()
    """
    with _lock:
        if not _mode.get_global():
            _mode.set_global(True)
            _count(1)


def uninstall() -> None:
    """Takes back what `install` did: all attributes of JAX are as they were before.

    Does nothing if it was not installed. Inside of `enabled` the mode goes on until that ends.
    """
    with _lock:
        if _mode.get_global():
            _mode.set_global(False)
            _count(-1)


@contextmanager
def enabled() -> Iterator[None]:
    """Has implicit arrays be operands of plain JAX functions in this block, and in this thread.

    Blocks may be nested. JAX itself is changed for all threads while a block is open in any; in the
    others an implicit array is refused by `jax.numpy` as ever.
    """
    with _lock:
        _count(1)
    try:
        with _mode(True):
            yield
    finally:
        with _lock:
            _count(-1)


def is_enabled() -> bool:
    """Whether the mode is on, here."""
    return _mode.value


def _count(change: int) -> None:
    global _uses, _patches
    if _patches is None:
        _patches = patches(
            high_type=HighType,
            bind=bind,
            brought_in=brought_in,
            types={ImplicitArray: type_of, HighArray: type_of, Tangent: lambda x: x.type},
            canonical={ImplicitArray: canonical, HighArray: canonical, Tangent: lambda x: x},
            as_array=(ImplicitArray, _jax_array),
            dense=lambda aval: aval.dense() if type(aval) is HighType else aval,
            whole=_whole,
            loop_body=loop_body,
            branch=branch,
            shard_map=(with_dense_specs, shard_map),
            shell=HighArray,
            results=Results(is_ours, tree, placed, exposed),
        )
        _patches.apply()
    _uses += change
    if _uses == 0:
        _patches.undo()
        _patches = None


def _jax_array(value: Any) -> Any:
    """The method `__jax_array__` of implicit arrays, by which `jax.numpy` asks for an array."""
    if not is_enabled():
        raise AttributeError("__jax_array__")
    return lambda: canonical(value)


def _whole(tree: Any) -> Any:
    """The arguments of a derivative, of which a value with a dense tangent is one leaf."""
    return jax.tree.map(_as_one, tree, is_leaf=is_value) if is_enabled() else tree


def _as_one(x: Any) -> Any:
    if not isinstance(x, Value) or not _is_complete(x):
        return x
    if x.dense_tangent:
        return canonical(x)
    leaves, treedef = parted(x)
    return jax.tree.unflatten(treedef, list(map(_as_one, leaves)))


def _is_complete(value: Value) -> bool:
    """Whether it is a value and not a part of one, as `equinox.partition` makes them."""
    try:
        type_of(value)
    except Exception:  # whatever a type's own code raises where leaves are missing
        return False
    return True
