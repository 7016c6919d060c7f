"""Whether high types are on: `install`, `uninstall`, `enabled`."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock

import jax

from .patching import Patches

#: What the mode changes in JAX, which `patches` says.
jax_patches = Patches()

_lock = RLock()


def _unlock_child() -> None:
    """In the child of a fork, nobody is left to unlock what another thread had locked."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_child)

_uses = 0  # one for `install`, and one for each block of `enabled` that is open

# Whether the mode is on, in this thread. A jitted function is traced anew where that changes, so
# that one traced with high types is not found in JAX's caches without.
_mode = jax.make_user_context(False)


def install() -> None:
    """Turn high types on in all threads, until `vn.hijax.uninstall` is called.

    With high types on, plain JAX functions take implicit arrays without `vn.implicit`. For this,
    `install` patches functions of JAX. A second call has no effect.

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
    """Undo `vn.hijax.install`: turn high types off and restore all patched attributes of JAX.

    Plain JAX functions then need `vn.implicit` again to take implicit arrays. Without `install`,
    this has no effect. Inside a block of `vn.hijax.enabled`, high types stay on until the block
    ends.

    >>> import veneer as vn
    >>> vn.hijax.install()
    >>> vn.hijax.uninstall()
    >>> vn.hijax.is_enabled()
    False
    """
    with _lock:
        if _mode.get_global():
            _mode.set_global(False)
            _count(-1)


@contextmanager
def enabled() -> Iterator[None]:
    """Turn high types on within a block, in this thread.

    Inside the block, plain JAX functions take implicit arrays without `vn.implicit`. Blocks may be
    nested. While a block is open, JAX is patched in all threads, but `jax.numpy` still rejects
    implicit arrays in other threads.

    **Returns:** a context manager, which is also a decorator.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> with vn.hijax.enabled():
    ...     y = jax.jit(jnp.matmul)(jnp.ones((1, 2)), w)
    >>> y.tolist()
    [[1.0, 1.0]]
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
    """Return whether high types are on in this thread.

    If they are on, plain JAX functions take implicit arrays without `vn.implicit`.

    **Returns:** a bool.

    >>> import veneer as vn
    >>> with vn.hijax.enabled():
    ...     vn.hijax.is_enabled()
    True
    """
    return _mode.value


def in_force() -> AbstractContextManager:
    """Has the mode on for what is run, where a primitive of a user's is met without it."""
    return nullcontext() if is_enabled() else enabled()


def _count(change: int) -> None:
    global _uses
    if _uses == 0:
        jax_patches.apply()
    _uses += change
    if _uses == 0:
        jax_patches.undo()
