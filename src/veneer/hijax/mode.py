"""Turn high types on and off: `install`, `uninstall`, `enabled`, and the patches that they set."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, update_wrapper
from inspect import Signature, signature
from threading import RLock
from typing import Any

import jax

from .._jax.hijax import weakref_lru_cache

_ABSENT = object()

#: A function from the value of an attribute, or None if it is not set, to the new value.
Wrapper = Callable[[Any], Any]


class Patches:
    """A list of patches, each a new value for an attribute of another package.

    `apply` sets the new values, and `undo` restores the old ones.
    """

    def __init__(self) -> None:
        #: From the name of an attribute to a function that replaces it. This returns the function
        #: that restores the attribute.
        self.setters: dict[str, Callable[[], Callable[[], None]]] = {}
        self._undos: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, *wrappers: Wrapper) -> None:
        """Add a patch of the attribute `name` of `owner` to the list.

        Each of the wrappers, in order, takes the value of the attribute and returns a new value.
        """
        owner_name: str = getattr(owner, "__name__", str(owner))
        self._add(
            f"{owner_name.split('.')[-1]}.{name}", partial(_set_attribute, owner, name, wrappers)
        )

    def attribute_if_imported(
        self, module: str, owner: str | None, name: str, wrapper: Wrapper
    ) -> None:
        """Add a patch of an attribute of a module, or of the class `owner` in it, to the list.

        `apply` skips the patch if the module is not imported.
        """

        def replace() -> Callable[[], None]:
            if module not in sys.modules:
                return lambda: None
            target = sys.modules[module] if owner is None else getattr(sys.modules[module], owner)
            return _set_attribute(target, name, (wrapper,))

        self._add(f"{owner or module.split('.')[0]}.{name}", replace)

    def boundary(self, function: Any, *wrappers: Wrapper) -> None:
        """Add a patch of a public JAX function that calls an inner function `fun` in its closure.

        The wrappers replace the inner function. So the patch also applies to modules that have
        imported the public function, as in `from jax.lax import scan`.
        """
        cell = function.__closure__[function.__code__.co_freevars.index("fun")]
        name = f"{function.__module__.split('.')[-1]}.{function.__qualname__}"
        self._add(name, partial(_set_attribute, cell, "cell_contents", wrappers))

    def _add(self, name: str, setter: Callable[[], Callable[[], None]]) -> None:
        if name in self.setters:
            raise ValueError(f"two patches have the name {name}")
        self.setters[name] = setter

    def apply(self) -> None:
        """Set the new values. If one cannot be set, restore the old values, and raise the error."""
        try:
            for replace in self.setters.values():
                self._undos.append(replace())
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the old values, in reverse order."""
        while self._undos:
            self._undos.pop()()


def _set_attribute(owner: Any, name: str, wrappers: tuple[Wrapper, ...]) -> Callable[[], None]:
    """Wrap the value of an attribute with each of the wrappers in order, and set the result.

    Return a function that restores the old value.
    """
    has_dict = hasattr(owner, "__dict__")  # a closure cell has none
    before = vars(owner).get(name, _ABSENT) if has_dict else getattr(owner, name)
    value = None if before is _ABSENT else before
    for wrapper in wrappers:
        value = wrapper(value)
    setattr(owner, name, value)
    if before is _ABSENT:
        return partial(delattr, owner, name)
    return partial(setattr, owner, name, before)


#: The patches of JAX, which the module `patches` lists.
jax_patches = Patches()

_lock = RLock()

if hasattr(os, "register_at_fork"):
    # A forked process has no thread that could release the lock.
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]

_uses = 0  # one for `install`, and one for each open block of `enabled`

# Whether high types are on in this thread. JAX's caches of traced functions depend on it.
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


def turned_on() -> AbstractContextManager:
    """Return a context in which high types are on.

    Unlike `enabled`, it does nothing if they are on already.
    """
    return nullcontext() if is_enabled() else enabled()


def _count(change: int) -> None:
    """Add `change` to `_uses`, which counts the call of `install` and the open blocks of `enabled`.

    Patch JAX before the first use, and restore its attributes after the last. The caller must hold
    `_lock`.
    """
    global _uses
    if _uses == 0:
        jax_patches.apply()
    _uses += change
    if _uses == 0:
        jax_patches.undo()


# Wrappers of functions that JAX inspects.


@weakref_lru_cache
def signature_of(function: Callable) -> Signature:
    """Return the signature of a function. It is computed once for each function."""
    return signature(function)


def wraps_with_signature(function: Callable) -> Callable[[Callable], Callable]:
    """Return a decorator that gives a wrapper the name and the signature of `function`.

    JAX asks for the signature several times per call. With `functools.wraps` alone, Python computes
    it each time.
    """

    def decorate(wrapper: Callable) -> Callable:
        update_wrapper(wrapper, function)
        with suppress(TypeError, ValueError):  # no signature, or no weak references
            wrapper.__signature__ = signature_of(function)  # type: ignore[attr-defined]
        return wrapper

    return decorate
