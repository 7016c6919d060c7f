"""`Box`: a place that programs read and write, under all of JAX's transformations."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._core.value import OpaqueNode
from .contents import Contents, flat
from .frames import resolved, state
from .view import View


@jax.tree_util.register_pytree_node_class
class Box(OpaqueNode):
    """A mutable container for a pytree of arrays and implicit arrays.

    A function can read and write a Box that is an argument or a captured variable. This works under
    `jax.jit`, `grad`, `vmap`, `scan`, `cond`, `while_loop`, `checkpoint` and in the forward and
    backward functions of a `custom_vjp`, with or without high types (`vn.hijax.enabled`).

    The contents must keep their structure, shapes and dtypes in loops, branches, `jax.checkpoint`
    and custom derivatives, and under `jax.jit` without high types. Elsewhere, such as under
    `vn.jit`, these may change.

    A Box that was made outside the differentiated function stores values without derivatives.
    Derivatives flow through a Box that is made inside the function.

    **Arguments:**

    - `value`: the contents, a pytree of arrays, implicit arrays and numbers. The default None makes
      an empty Box.

    **Raises:**

    - `TypeError` if a leaf of the contents is not an array, an implicit array or a number.
    - `TypeError` if the structure, shapes or dtypes of the contents change where they must be kept.
    - `ValueError` if a function under `jax.vmap` writes a mapped value to a Box that it captures,
      or to an argument with `in_axes=None`.
    - `ValueError` if a Box is passed to a function twice, or is both an argument and a captured
      variable.
    - `RuntimeError` in `get` if the contents are lost, because a compiled function that wrote them
      raised an error or donated them.
    - `NotImplementedError` if the condition of a `while_loop` uses a Box, or a function under
      `jax.checkpoint` uses a Box that was made in the traced function around it.

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
        """Replace the contents with `value`, a pytree of arrays, implicit arrays and numbers."""
        _refuse_boxes(value)
        resolved(self._contents).set(value)

    def update(self, function: Callable[[Any], Any]) -> None:
        """Replace the contents with `function(contents)`."""
        self.set(function(self.get()))

    def __repr__(self) -> str:
        return repr(resolved(self._contents))

    def __reduce__(self) -> Any:
        return Box, (self.get(),)

    # As a pytree: the references; or the contents, where vn.jit threads those through.

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Return the leaves and the structure. Outside `vn.jit`, the leaves are JAX references."""
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
        """Return a Box with the leaves `children`.

        If they are the references that `tree_flatten` of a Box returned, return that Box itself.
        """
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
