"""Implicit arrays as JAX handles them in programs with high types, and the primitive `high`.

A `HighArray` is an implicit array as one leaf, and a `Tangent` is a tangent or cotangent of one.
Each has its type as the attribute `aval`. In a jaxpr, both are one typed value: the operations
`Pack` and `Unpack` of `high` convert leaves into it and back.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import is_marked_as_derivatives
from .._core.surface.array import ImplicitArray
from .._core.value import Value, is_part, is_value
from .._jax.hijax import holds_tracers, make_high_primitive
from .._jax.tracing import current_trace

if TYPE_CHECKING:
    from .types import HighType, TangentType


class HighArray(jax.Array):
    """An implicit array as a `jax.Array`, which functions of `jax.numpy` require.

    `aval` is its high type. All other attributes and methods come from the implicit array `value`.
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
    """Return a property or method of `HighArray` that forwards to its implicit array `value`."""
    if isinstance(getattr(ImplicitArray, name), property):
        return property(lambda self: getattr(self.value, name))
    return lambda self, *args, **kwargs: getattr(self.value, name)(*args, **kwargs)


# `__getattr__` is not called for attributes that jax.Array declares, and for special methods.
_DEFINED = {*vars(HighArray), *vars(object), "__new__", "__hash__", "__class__", "__weakref__"}
_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__iter__"}
for _name in (set(dir(jax.Array)) & set(dir(ImplicitArray)) - _DEFINED) | _COMPARED:
    if callable(_attribute := getattr(ImplicitArray, _name)) or isinstance(_attribute, property):
        setattr(HighArray, _name, _forward(_name))


class Tangent:
    """A tangent or a cotangent of an implicit array.

    `leaves` has the tangent of each floating leaf of the implicit array, in order. `aval` is the
    type of the tangent.
    """

    def __init__(self, aval: "TangentType", leaves: list[Any]):
        self.aval, self.leaves = aval, leaves

    shape = property(lambda self: self.aval.shape)
    ndim = property(lambda self: self.aval.ndim)

    @property
    def value(self) -> Any:
        """The tangent as an instance of the class of the implicit array, marked as derivatives.

        Its leaves are the tangents. A leaf that is not floating becomes an array of dtype `float0`.
        """
        tangents = iter(self.leaves)
        no_tangent = lambda a: np.zeros(a.shape, jax.dtypes.float0)
        full = [next(tangents) if is_inexact(a) else no_tangent(a) for a in self.aval.of.leaves]
        return mark_derivatives(jax.tree.unflatten(self.aval.treedef, full))

    def __repr__(self) -> str:
        return f"Tangent({self.value!r})"


def mark_derivatives(x: Any) -> Any:
    """Mark an implicit array, and its implicit parts, as derivatives of leaves. Return `x`.

    A marked array raises an error where an array is required. An array whose tangent is one dense
    array (`dense_tangent`) and other objects are not marked.
    """
    if isinstance(x, Value) and not x.dense_tangent:
        object.__setattr__(x, "_holds_derivatives", True)
        for part in jax.tree.leaves(x, is_leaf=is_part(x)):
            mark_derivatives(part)
    return x


def is_derivative(x: Any) -> bool:
    """Return whether `x` is an implicit array that is marked as derivatives of leaves."""
    return isinstance(x, Value) and is_marked_as_derivatives(x)


def values_of(tree: Any) -> list[Any]:
    """Return the implicit arrays in a tree."""
    return list(filter(is_value, jax.tree.leaves(tree, is_leaf=is_value)))


def has_derivatives(tree: Any) -> bool:
    """Return whether a tree has an implicit array that is marked as derivatives."""
    return any(map(is_derivative, values_of(tree)))


#: Whether the rule of a `custom_jvp` or `custom_vjp` is running, with marked derivatives among its
#: arguments.
within_rule = jax.make_user_context(False)


@jax.tree_util.register_pytree_node_class
class _MarkedNode:
    """A pytree node around a marked implicit array of derivatives, which keeps the mark.

    JAX flattens the arguments of a call, and its caches do not distinguish marked derivatives from
    an implicit array. With the node, the tree structures differ. Unflattening the node returns the
    array, marked again.
    """

    def __init__(self, value: Value):
        self._value = value

    def tree_flatten(self) -> tuple[tuple[Value], None]:
        return (self._value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Any:
        return mark_derivatives(children[0])


def keep_marks(tree: Any) -> Any:
    """Return a tree whose marked derivatives (`mark_derivatives`) stay marked when JAX rebuilds it.

    Outside of a user's derivative rule, nothing is marked, and `tree` is returned unchanged.
    """
    if not within_rule.value or not has_derivatives(tree):
        return tree
    return jax.tree.map(lambda x: _MarkedNode(x) if is_derivative(x) else x, tree, is_leaf=is_value)


def value_of(x: Any) -> Any:
    """Return the implicit array of a `HighArray`. Return any other object unchanged."""
    return x.value if type(x) is HighArray else x


def expose(x: Any) -> Any:
    """Return the implicit array of a `HighArray` or a `Tangent`. Return other objects unchanged."""
    return x.value if type(x) is HighArray or type(x) is Tangent else x


def is_inexact(aval: Any) -> bool:
    """Return whether arrays of a type are floating or complex, so that they have tangents."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


# Leaves.


def flatten_value(value: Value) -> tuple[list[Any], Any]:
    """Return the leaves of an implicit array and their tree structure.

    An implicit array in a field is one leaf if its tangent is one dense array (`dense_tangent`).
    But if this holds for `value` itself, all leaves are dense arrays.
    """
    is_leaf = lambda x: isinstance(x, Value) and x.dense_tangent
    return jax.tree.flatten(value, is_leaf=None if value.dense_tangent else is_leaf)


def leaves_of(x: Any) -> list[Any]:
    """Return the leaves of an implicit array or a tangent. For another array, return `[x]`."""
    x = value_of(x)
    if isinstance(x, Value):
        return flatten_value(x)[0]
    return list(x.leaves) if isinstance(x, Tangent) else [x]


def with_leaves(x: Any, leaves: Sequence[Any]) -> Any:
    """Return a copy of an implicit array or a tangent with other leaves, ordered as by `leaves_of`.

    For another array `x`, return `leaves[0]`.
    """
    x = value_of(x)
    if isinstance(x, Value):
        return jax.tree.unflatten(flatten_value(x)[1], leaves)
    return Tangent(x.aval, list(leaves)) if isinstance(x, Tangent) else leaves[0]


def strong_leaf(leaf: Any) -> Any:
    """Return a leaf as an array without a weak type. An implicit array stays implicit."""
    leaf = value_of(leaf)
    if isinstance(leaf, Value):
        return jax.tree.map(strong_leaf, leaf)
    aval = jax.typeof(leaf)
    if not hasattr(leaf, "aval"):
        leaf = jnp.asarray(leaf)
    return jax.lax.convert_element_type(leaf, aval.dtype) if aval.weak_type else leaf


# The primitive `high`.

high = make_high_primitive("high")


class Operation:
    """The parameter of an equation of `high`: a hashable description of a computation.

    Unless a subclass overrides `jvp`, `transpose` or `batch`, JAX differentiates and batches `run`.
    """

    name: Any  # in printed jaxprs
    printed: Any = None  # the parameters in printed jaxprs
    result_types: Any = None  # None: found by tracing `run`

    def run(self, *values: Any) -> list[Any]:
        """Return the results for implicit arrays, dense arrays and tangents."""
        raise NotImplementedError

    def rerun(self, *values: Any) -> list[Any]:
        """Return the results if a jaxpr with the operation is evaluated under `vn.implicit`.

        Unless a subclass overrides it, this is `run`. `values` can be implicit arrays that were
        dense when JAX traced the jaxpr.
        """
        return self.run(*values)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """Return the results and their tangents, or None to let JAX differentiate `run`."""

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        """Add cotangents to the accumulators in `operands`, which JAX passes for linear operands.

        Return True. Return False to let JAX transpose `run` instead.
        """
        del cotangents, operands
        return False

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        """Return the results and their batch axes, or None to let JAX batch `run`.

        `size` and `name` are the size and the name of the mapped axis. `dims` has the batch axis of
        each operand, or None.
        """


def apply(operation: Operation, *operands: Any) -> list[Any]:
    """Bind `high` in the current trace, and return the results of an operation."""
    return high.bind(*operands, operation=operation)


@dataclass(frozen=True)
class Pack(Operation):
    """Build an implicit array or a tangent of type `type`, as one operand, from its leaves."""

    type: "HighType | TangentType"
    name = "pack"

    def run(self, *leaves: Any) -> list[Any]:
        return [self.type.of_leaves(leaves)]


@dataclass(frozen=True)
class Unpack(Operation):
    """Return the leaves of an implicit array or a tangent of type `type`."""

    type: "HighType | TangentType"
    name = "unpack"

    def run(self, value: Any) -> list[Any]:
        return list(map(strong_leaf, leaves_of(value)))


@dataclass(frozen=True)
class Zeros(Operation):
    """Return the tangent of type `type` that is zero."""

    type: "TangentType"
    name = "zeros"

    def run(self) -> list[Any]:
        return [self.type.of_arrays([jnp.zeros(a.shape, a.dtype) for a in self.type.lo_ty()])]


@dataclass(frozen=True)
class Add(Operation):
    """Return the sum of two tangents, leaf by leaf."""

    type: "TangentType"
    name = "add_any"

    def run(self, x: Any, y: Any) -> list[Any]:
        return [Tangent(self.type, [a + b for a, b in zip(x.leaves, y.leaves, strict=True)])]


def packed(type: "HighType | TangentType", arrays: Sequence[Any]) -> Any:
    """Return a tracer of an implicit array or a tangent of type `type`, given its arrays.

    `arrays` are the arrays that JAX lowers such a value to.
    """
    return apply(Pack(type), *type.parts(arrays, packed))[0]


def is_staged(leaves: Sequence[Any]) -> bool:
    """Return whether a leaf is a tracer, and the current trace keeps high types in its jaxpr."""
    return not current_trace().requires_low and holds_tracers(leaves)
