"""What stands for an implicit array where JAX handles it, and values taken apart.

A `HighArray` is a value, and a `Tangent` a tangent or a cotangent of one; each knows its type. What
JAX gives of derivatives by leaf is marked as such.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import is_marked_as_derivatives
from .._core.surface.array import ImplicitArray
from .._core.value import Value, is_part, is_value

if TYPE_CHECKING:
    from .types import HighType, TangentType


class HighArray(jax.Array):
    """A value as `jax.numpy` takes it, which accepts nothing that is no `jax.Array`.

    It lives from where a function asks for an array until a primitive meets it, which is given the
    value itself. All that it has besides its type it has from the value.
    """

    __slots__ = ("aval", "value")

    def __init__(self, value: Value, aval: "HighType"):
        self.value, self.aval = value, aval  # type: ignore[misc]

    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: self.aval.ndim)
    size = property(lambda self: math.prod(self.aval.shape))
    weak_type = False
    sharding = property(lambda self: self.aval.sharding)
    committed = _committed = False

    def __repr__(self) -> str:
        return repr(self.value)

    def __deepcopy__(self, memo: Any) -> "HighArray":
        return HighArray(deepcopy(self.value, memo), self.aval)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


def _forward(name: str) -> Any:
    if isinstance(getattr(ImplicitArray, name), property):
        return property(lambda self: getattr(self.value, name))
    return lambda self, *args, **kwargs: getattr(self.value, name)(*args, **kwargs)


# What jax.Array declares, and special methods, are not looked up by __getattr__.
_DEFINED = {*vars(HighArray), *vars(object), "__new__", "__hash__", "__class__", "__weakref__"}
_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__iter__"}
for _name in (set(dir(jax.Array)) & set(dir(ImplicitArray)) - _DEFINED) | _COMPARED:
    if callable(_attribute := getattr(ImplicitArray, _name)) or isinstance(_attribute, property):
        setattr(HighArray, _name, _forward(_name))


class Tangent:
    """A tangent or a cotangent of an implicit array: one for each floating leaf."""

    def __init__(self, aval: "TangentType", leaves: list[Any]):
        self.aval, self.leaves = aval, leaves

    shape = property(lambda self: self.aval.shape)
    ndim = property(lambda self: self.aval.ndim)

    @property
    def value(self) -> Any:
        """The same as a tree: an implicit array with tangents in the place of its leaves."""
        tangents = iter(self.leaves)
        no_tangent = lambda a: np.zeros(a.shape, jax.dtypes.float0)
        full = [next(tangents) if is_inexact(a) else no_tangent(a) for a in self.aval.of.leaves]
        return mark_derivatives(jax.tree.unflatten(self.aval.treedef, full))

    def __repr__(self) -> str:
        return f"Tangent({self.value!r})"


def mark_derivatives(x: Any) -> Any:
    """What has a derivative by each leaf in the places of the leaves, known as such from now on."""
    if isinstance(x, Value) and not x.dense_tangent:
        object.__setattr__(x, "_holds_derivatives", True)
        for part in jax.tree.leaves(x, is_leaf=is_part(x)):
            mark_derivatives(part)
    return x


def is_derivative(x: Any) -> bool:
    """Whether it is known to hold derivatives by the leaves of a value."""
    return isinstance(x, Value) and is_marked_as_derivatives(x)


def values_of(tree: Any) -> list[Any]:
    """The implicit arrays in a tree."""
    return list(filter(is_value, jax.tree.leaves(tree, is_leaf=is_value)))


def has_derivatives(tree: Any) -> bool:
    """Whether some in a tree are known."""
    return any(map(is_derivative, values_of(tree)))


#: Whether a rule of a user's runs that is given derivatives by leaves.
within_rule = jax.make_user_context(False)


@jax.tree_util.register_pytree_node_class
class _KeepsMark:
    """A node in the place of derivatives, which comes out of a tree as those, with their mark.

    JAX takes arguments apart, and its caches do not tell trees with a mark from those without.
    """

    def __init__(self, value: Value):
        self._value = value

    def tree_flatten(self) -> tuple[tuple[Value], None]:
        """The value."""
        return (self._value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Any:
        """The value itself, marked."""
        return mark_derivatives(children[0])


def carried(tree: Any) -> Any:
    """Arguments, in which derivatives keep their mark where JAX takes them apart."""
    if not within_rule.value or not has_derivatives(tree):
        return tree
    return jax.tree.map(lambda x: _KeepsMark(x) if is_derivative(x) else x, tree, is_leaf=is_value)


def value_of(x: Any) -> Any:
    """A `HighArray` as its value; anything else as it is."""
    return x.value if type(x) is HighArray else x


def exposed(x: Any) -> Any:
    """What a user is given for a value or a tangent: an implicit array, which is a pytree."""
    return x.value if type(x) is HighArray or type(x) is Tangent else x


def is_inexact(aval: Any) -> bool:
    """Whether arrays of a type have tangents of that dtype."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


# Values taken apart.


def flatten_value(value: Value) -> tuple[list[Any], Any]:
    """The leaves of a value, and their structure.

    A part with a dense tangent is a leaf, unless the value has one itself.
    """
    is_leaf = None if value.dense_tangent else _has_dense_tangent
    return jax.tree.flatten(value, is_leaf=is_leaf)


def _has_dense_tangent(x: Any) -> bool:
    return isinstance(x, Value) and x.dense_tangent


def leaves_of(x: Any) -> list[Any]:
    """The leaves of a value or a tangent; a dense array alone."""
    x = value_of(x)
    if isinstance(x, Value):
        return flatten_value(x)[0]
    return list(x.leaves) if isinstance(x, Tangent) else [x]


def with_leaves(x: Any, leaves: Sequence[Any]) -> Any:
    """A value like `x` with other leaves."""
    x = value_of(x)
    if isinstance(x, Value):
        return jax.tree.unflatten(flatten_value(x)[1], leaves)
    return Tangent(x.aval, list(leaves)) if isinstance(x, Tangent) else leaves[0]


def strong_leaf(leaf: Any) -> Any:
    """A leaf as an array whose dtype is not weak."""
    leaf = value_of(leaf)
    if isinstance(leaf, Value):
        return jax.tree.map(strong_leaf, leaf)
    aval = jax.typeof(leaf)
    if not hasattr(leaf, "aval"):
        leaf = jnp.asarray(leaf)
    return jax.lax.convert_element_type(leaf, aval.dtype) if aval.weak_type else leaf
