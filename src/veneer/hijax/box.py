"""`Box`, a mutable container that programs read and write under all transformations of JAX."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax

from .._core.value import OpaqueNode
from .box_contents import Contents, ReferenceContents, flatten_contents
from .box_traces import get_latest, state


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
        _reject_boxes(value)
        self._contents = Contents(*flatten_contents(value))

    def get(self) -> Any:
        """Return the contents, a pytree of arrays and implicit arrays."""
        return get_latest(self._contents).tree()

    def set(self, value: Any) -> None:
        """Replace the contents with `value`, a pytree of arrays, implicit arrays and numbers."""
        _reject_boxes(value)
        get_latest(self._contents).set(value)

    def update(self, function: Callable[[Any], Any]) -> None:
        """Replace the contents with `function(contents)`."""
        self.set(function(self.get()))

    def __repr__(self) -> str:
        return repr(get_latest(self._contents))

    def __reduce__(self) -> Any:
        return Box, (self.get(),)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Return the children and the static structure of the Box as a node of a pytree.

        The children are references, a `jax.Ref` for each leaf of the contents. While `vn.jit` calls
        a function, they are the values of the leaves, which the compiled program takes and returns.
        """
        contents = get_latest(self._contents)
        if state.flattened is not None:
            state.flattened.append(self)
            contents.unpack()
            leaves = contents.read()
            return leaves, _BoxStructure(contents.treedef, contents.stops_gradients, None)
        contents.record_use()
        refs = contents.references()
        return refs, _BoxStructure(contents.treedef, contents.stops_gradients, weakref.ref(self))

    @classmethod
    def tree_unflatten(cls, structure: "_BoxStructure", children: Iterable[Any]) -> "Box":
        """Return the Box with the children and the structure that `tree_flatten` returns.

        If `children` are the references of a Box that still exists, return the same Box. Otherwise
        make a Box that holds the values or the references.
        """
        leaves = list(children)
        if structure.box is None:
            contents = Contents(leaves, structure.treedef)
            contents.stops_gradients |= structure.stops_gradients
        else:
            box = structure.box()
            refs = [] if box is None else get_latest(box._contents).refs or []
            if box is not None and list(map(id, refs)) == list(map(id, leaves)):
                return box
            contents = ReferenceContents(leaves, structure.treedef, structure.stops_gradients)
        box = object.__new__(cls)
        box._contents = contents
        return box


@dataclass(frozen=True)
class _BoxStructure:
    """The static data of a Box as a node of a pytree.

    `treedef` is the tree structure of the contents. `stops_gradients` tells whether the Box stores
    values without derivatives. `box` is a weak reference to the Box if its children in the pytree
    are references, and None if these are values. Two structures that differ only in `box` are
    equal, so that JAX uses one compiled function for both.
    """

    treedef: Any
    stops_gradients: bool
    box: Callable[[], Box | None] | None = field(compare=False)


def boxes_in(tree: Any) -> list[Box]:
    """Return the Boxes in a pytree."""
    is_box = lambda x: isinstance(x, Box)
    return list(filter(is_box, jax.tree.leaves(tree, is_leaf=is_box)))


def _reject_boxes(value: Any) -> None:
    if boxes_in(value):
        raise TypeError("A Box cannot hold another Box. Put both contents into one pytree.")
