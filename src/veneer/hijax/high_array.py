"""`HighArray`: a value of a high type where JAX asks for a `jax.Array`."""

import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import jax

from .._core.array import ImplicitArray
from .._core.value import Value

if TYPE_CHECKING:
    from .types import HighType


class HighArray(jax.Array):
    """A value as `jax.numpy` takes it, which accepts nothing that is no `jax.Array`.

    It lives from where a function asks for an array until a primitive meets it, which is given the
    value itself. All that it has besides its type it has from the value.
    """

    __slots__ = ("value",)

    def __init__(self, value: Value):
        self.value = value

    @property
    def aval(self) -> "HighType":
        """Its type."""
        from .types import type_of

        return type_of(self.value)

    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: self.aval.ndim)
    size = property(lambda self: math.prod(self.aval.shape))
    weak_type = False
    sharding = property(lambda self: self.aval.sharding)
    committed = _committed = False

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> Any:
        return HighArray, (self.value,)

    def __deepcopy__(self, memo: Any) -> "HighArray":
        return HighArray(deepcopy(self.value, memo))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


def _forward(name: str) -> Any:
    own = getattr(ImplicitArray, name)
    if isinstance(own, property):
        return property(lambda self: getattr(self.value, name))
    return lambda self, *args, **kwargs: getattr(self.value, name)(*args, **kwargs)


# What jax.Array declares, and special methods, are not looked up by __getattr__.
_OWN = {*vars(HighArray), *vars(object), "__new__", "__hash__", "__class__", "__weakref__"}
_MORE = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__iter__"}
for _name in (set(dir(jax.Array)) & set(dir(ImplicitArray)) - _OWN) | _MORE:
    if callable(own := getattr(ImplicitArray, _name)) or isinstance(own, property):
        setattr(HighArray, _name, _forward(_name))


def value_of(x: Any) -> Any:
    """A `HighArray` as its value; anything else as it is."""
    return x.value if type(x) is HighArray else x
