"""`Box`: a place that programs read and write, under all of JAX's transformations."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._core.value import Kept
from .contents import Contents, flat
from .frames import resolved, state
from .view import View


@jax.tree_util.register_pytree_node_class
class Box(Kept):
    """A mutable container for a pytree of arrays and implicit arrays.

    A function can read and write a Box that is an argument or a captured variable. This works under
    `jax.jit`, `grad`, `vmap`, `scan`, `cond`, `while_loop`, `checkpoint` and in the passes of a
    `custom_vjp`. High types need not be on.

    In loops and branches, the contents must keep their structure, shapes and dtypes. They may
    change under `vn.jit`, under `jax.jit` with high types on, and outside traced functions.

    If the Box was made outside the differentiated function, it stores primal values without
    derivatives. Derivatives flow through a Box that is made inside the function.

    **Arguments:**

    - `value`: the contents. Without it the Box is empty, and `get` returns None.

    **Raises:**

    - `TypeError` if the contents are not arrays, or change their structure or types where they may
      not.
    - `ValueError` if a mapped value is written to a Box from outside `jax.vmap`, or if a Box is
      passed to a function twice, or passed and captured.
    - `NotImplementedError` in the condition of a `while_loop`, and in a `jax.checkpoint` for a Box
      that the traced function around it made. JAX's references do not support these.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> largest = vn.hijax.Box(jnp.zeros(()))
    >>> def loss(x):
    ...     largest.update(lambda m: jnp.maximum(m, x.max()))
    ...     return jnp.sum(x**2)
    >>> gradient = jax.jit(jax.grad(loss))(jnp.array([1.0, 3.0]))
    >>> largest.get().item()
    3.0

    With `vn.jit` the structure of the contents may change:

    >>> cache = vn.hijax.Box()
    >>> fill = vn.jit(lambda x: cache.set({"w": vn.quant.quantize(x, "int8")}))
    >>> fill(jnp.eye(2))
    >>> cache.get()["w"].shape
    (2, 2)
    """

    _contents: Contents

    def __init__(self, value: Any = None):
        _refuse_boxes(value)
        self._contents = Contents(*flat(value))

    def get(self) -> Any:
        """Return the contents."""
        return resolved(self._contents).tree()

    def set(self, value: Any) -> None:
        """Replace the contents by `value`, a pytree of arrays, implicit arrays and numbers."""
        _refuse_boxes(value)
        resolved(self._contents).set(value)

    def update(self, function: Callable[[Any], Any]) -> None:
        """Replace the contents by `function(contents)`."""
        self.set(function(self.get()))

    def __repr__(self) -> str:
        return repr(resolved(self._contents))

    def __reduce__(self) -> Any:
        return Box, (self.get(),)

    # As a pytree: the references; or the contents, where vn.jit threads those through.

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Return the leaves of the contents, or references to them, and the structure."""
        contents = resolved(self._contents)
        if state.flattened is not None:
            state.flattened.append(self)
            contents.open()
            return contents.read(), Threaded(contents.treedef, contents.keeps_primals)
        contents.note_use()
        refs = contents.references()
        return refs, Shared(contents.treedef, contents.keeps_primals, weakref.ref(self))

    @classmethod
    def tree_unflatten(cls, of: "Threaded | Shared", children: Iterable[Any]) -> "Box":
        """Return the Box of these leaves or references. Its own references give the same Box."""
        return of.box_of(list(children))


def _box(contents: Contents) -> Box:
    box = object.__new__(Box)
    box._contents = contents
    return box


@dataclass(frozen=True)
class Threaded:
    """A Box whose contents go through a function of `vn.jit` as arguments and results."""

    treedef: Any
    keeps_primals: bool

    def box_of(self, leaves: Sequence[Any]) -> Box:
        """A Box that is at home here."""
        contents = Contents(leaves, self.treedef)
        contents.keeps_primals |= self.keeps_primals
        return _box(contents)


@dataclass(frozen=True)
class Shared:
    """A Box by the references to its contents. Which Box it was is no part of a type."""

    treedef: Any
    keeps_primals: bool
    box: Callable[[], Box | None] = field(compare=False)

    def box_of(self, refs: Sequence[Any]) -> Box:
        """The Box whose references these are, or one of the same contents."""
        box = self.box()
        if box is not None:
            known = resolved(box._contents).refs or ()
            if len(known) == len(refs) and all(a is b for a, b in zip(known, refs, strict=True)):
                return box
        return _box(View(refs, self.treedef, self.keeps_primals))


def is_box(x: Any) -> bool:
    """Whether something is a Box: for `is_leaf`."""
    return isinstance(x, Box)


def _refuse_boxes(value: Any) -> None:
    if any(map(is_box, jax.tree.leaves(value, is_leaf=is_box))):
        raise TypeError("A Box cannot hold another Box. Put both contents into one pytree.")
