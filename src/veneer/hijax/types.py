"""The types that JAX sees: one for each structure of an implicit array, made from a value alone.

An implicit array is a pytree, and stays one: `jax.jit`, `optax` and `equinox` flatten it into its
leaves, before JAX asks for a type. So a value has no high type while it is an argument or a
result; it gets one where a primitive meets it, and keeps that for as long as the value is an
intermediate one. See `veneer.hijax` for what follows from this.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.array import ImplicitArray
from .._core.batch_axes import takes_batch_axis
from .._core.jax_hijax import HiType, copy_shaped_array, holds_tracers
from .._core.jax_internals import current_trace
from .._core.value import Value


class _Structured(HiType):
    """A type whose values are lowered to the leaves of a tree structure."""

    treedef: Any
    leaves: tuple[Any, ...]

    def _key(self) -> Any:
        return type(self), self.treedef, self.leaves

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structured) and self._key() == other._key()

    def lo_ty(self) -> list[Any]:
        """The types of the leaves."""
        return list(self.leaves)

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        """As jaxprs print it: `lora[512,512]`."""
        del short_dtypes, mesh_axis_types
        return str(self)

    def __repr__(self) -> str:
        return str(self)

    # None of the leaves is weakly typed: `normal` sees to that.
    def update_weak_type(self, weak_type: bool) -> Any:
        del weak_type
        return self

    def strip_weak_type(self) -> Any:
        return self

    def normalize(self) -> Any:
        return self

    def leading_axis_spec(self) -> Any:
        """The axis that a loop takes slices along."""
        return 0


class HighType(_Structured, jax.core.ShapedArray):  # type: ignore[misc]
    """The type of an implicit array: that of the dense array, for whoever asks for no more.

    Two values are of one type if their classes, their metadata and the types of their leaves
    agree. `lora[512,512]` is what jaxprs print.
    """

    dense_tangent: bool
    name: str

    def __new__(cls, treedef: Any, leaves: Any, shape: Any, dtype: Any, example: Any) -> "HighType":
        self = object.__new__(cls)
        copy_shaped_array(self, shape, dtype)
        vars(self).update(
            treedef=treedef,
            leaves=leaves,
            dense_tangent=example.dense_tangent,
            name=short_name(example),
        )
        return self

    __hash__ = _Structured.__hash__
    __eq__ = _Structured.__eq__

    def __reduce__(self) -> Any:
        return high_type, (self.treedef, self.leaves, jax.config.jax_enable_x64)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.shape))}]"

    @property
    def cls(self) -> type:
        """The class of the values."""
        return self.treedef.node_data()[0]

    def dense(self) -> jax.core.ShapedArray:
        """The type of the dense array."""
        return jax.core.ShapedArray(self.shape, self.dtype)

    def update(
        self, shape: Any = None, dtype: Any = None, weak_type: Any = None, **kwargs: Any
    ) -> Any:
        """A type of dense arrays that differs from this one in what is given."""
        return self.dense().update(shape, dtype, weak_type, **kwargs)

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        """The leaves of a value."""
        return list(map(normal, jax.tree.leaves(value_of(hi_val))))

    def raise_val(self, *lo_vals: Any) -> Any:
        """What stands for the value that has these leaves, where JAX handles it."""
        if is_staged(lo_vals):
            return packed(self, lo_vals)
        return HighArray(self.value(lo_vals))

    def value(self, leaves: Sequence[Any]) -> Any:
        """The value that has these leaves: an implicit array."""
        return jax.tree.unflatten(self.treedef, leaves)

    def to_tangent_aval(self) -> Any:
        """That of the leaves' tangents; or of the dense array, for a class that declares it."""
        return self.dense().to_tangent_aval() if self.dense_tangent else TangentType(self)

    def to_ct_aval(self) -> Any:
        return self.to_tangent_aval()

    def inc_rank(self, size: int | None, spec: Any) -> Any:
        """The type of a stack of values, along an axis of each leaf."""
        if spec is None:
            return self
        return self._moved([a.update(shape=_insert(a.shape, spec, size)) for a in self.leaves], 1)

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        """The type of one value out of a stack."""
        if spec is None:
            return self
        if any(a.ndim <= spec or a.shape[spec] != size for a in self.leaves):
            raise TypeError(
                f"{self} cannot be mapped along axis {spec}: not all of its leaves have one of "
                f"size {size} there ({', '.join(map(str, self.leaves))})"
            )
        return self._moved([a.update(shape=_remove(a.shape, spec)) for a in self.leaves], -1)

    def _moved(self, leaves: Sequence[Any], change: int) -> "HighType":
        try:
            found = _high_type(self.treedef, tuple(leaves))
        except Exception as error:
            error.add_note(f"While finding the type of {self} with an axis more or less")
            raise
        if found.ndim != self.ndim + change:
            raise TypeError(f"{self} with an axis more or less on each leaf is {found}")
        return found


class TangentType(_Structured):
    """The type of tangents and cotangents of a value whose leaves have one each.

    A leaf that is not floating has none.
    """

    of: HighType

    def __init__(self, of: HighType):
        self.of = of
        self.treedef = of.treedef
        self.leaves = tuple(a.to_tangent_aval() for a in of.leaves if is_inexact(a))
        self.shape, self.ndim, self.mat = of.shape, of.ndim, of.mat

    def _key(self) -> Any:
        return type(self), self.of

    def __str__(self) -> str:
        return f"{self.of}ᵀ"

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        """The tangents of the floating leaves."""
        return list(map(normal, hi_val.leaves))

    def raise_val(self, *lo_vals: Any) -> Any:
        """What stands for the tangent that has these parts, where JAX handles it."""
        return packed(self, lo_vals) if is_staged(lo_vals) else self.value(lo_vals)

    def value(self, leaves: Sequence[Any]) -> Any:
        """The tangent that has these parts."""
        return Tangent(self, list(leaves))

    def to_tangent_aval(self) -> Any:
        return self

    def to_ct_aval(self) -> Any:
        return self

    def vspace_zero(self) -> Any:
        """The tangent that is zero."""
        from .lifted import apply
        from .operations import Zeros

        return apply(Zeros(self))[0]

    def vspace_add(self, x: Any, y: Any) -> Any:
        """The sum of two tangents."""
        from .lifted import apply
        from .operations import Add

        return apply(Add(self), x, y)[0]

    def inc_rank(self, size: int | None, spec: Any) -> Any:
        return TangentType(self.of.inc_rank(size, spec))

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        return TangentType(self.of.dec_rank(size, spec))


def is_staged(leaves: Sequence[Any]) -> bool:
    """Whether leaves are traced where nothing is lowered.

    JAX raises values there, too: what a branch gives for a residual of another.
    """
    return not current_trace().requires_low and holds_tracers(leaves)


def packed(type: "HighType | TangentType", leaves: Sequence[Any]) -> Any:
    """A tracer for the value that has these leaves."""
    from .lifted import apply
    from .operations import Pack

    return apply(Pack(type), *leaves)[0]


class Tangent:
    """A tangent or a cotangent of an implicit array: one for each floating leaf."""

    def __init__(self, type: TangentType, leaves: list[Any]):
        self.type, self.leaves = type, leaves

    shape = property(lambda self: self.type.shape)
    ndim = property(lambda self: self.type.ndim)

    @property
    def value(self) -> Any:
        """The same as a tree: an implicit array with tangents in the place of its leaves."""
        tangents = iter(self.leaves)
        no_tangent = lambda a: np.zeros(a.shape, jax.dtypes.float0)
        full = [next(tangents) if is_inexact(a) else no_tangent(a) for a in self.type.of.leaves]
        return jax.tree.unflatten(self.type.treedef, full)

    def __repr__(self) -> str:
        return f"Tangent({self.value!r})"


class HighArray(jax.Array):
    """A value as `jax.numpy` takes it, which accepts nothing that is no `jax.Array`.

    It lives from where a function asks for an array until a primitive meets it, which is given the
    value itself. All that it has besides its type it has from the value.
    """

    __slots__ = ("value",)

    def __init__(self, value: Value):
        self.value = value

    @property
    def aval(self) -> HighType:
        """Its type."""
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


def _forward(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.value, name)(*args, **kwargs)


# What jax.Array declares, and special methods, are not looked up by __getattr__.
_OWN = {*vars(HighArray), *vars(object), "__new__", "__hash__", "__class__", "__weakref__"}
_COMPARE = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in (set(dir(jax.Array)) & set(dir(ImplicitArray)) - _OWN) | _COMPARE:
    if callable(getattr(ImplicitArray, _name)):
        setattr(HighArray, _name, _forward(_name))


def value_of(x: Any) -> Any:
    """A `HighArray` as its value; anything else as it is."""
    return x.value if type(x) is HighArray else x


def exposed(x: Any) -> Any:
    """What a user is given for a value or a tangent: an implicit array, which is a pytree."""
    return x.value if type(x) is HighArray or type(x) is Tangent else x


def is_inexact(aval: Any) -> bool:
    """Whether arrays of a type have tangents of that dtype."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def normal(leaf: Any) -> Any:
    """A leaf as an array whose dtype is not weak."""
    aval = jax.typeof(leaf)
    if not hasattr(leaf, "aval"):
        leaf = jnp.asarray(leaf)
    return jax.lax.convert_element_type(leaf, aval.dtype) if aval.weak_type else leaf


def type_of(value: Any) -> HighType:
    """The high type of an implicit array. Its leaves may be abstract."""
    leaves, treedef = jax.tree.flatten(value_of(value))
    return _high_type(treedef, tuple(jax.typeof(leaf).strip_weak_type() for leaf in leaves))


def _high_type(treedef: Any, leaves: tuple[Any, ...]) -> HighType:
    return high_type(treedef, leaves, jax.config.jax_enable_x64)  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def high_type(treedef: Any, leaves: tuple[Any, ...], x64: bool) -> HighType:
    """The high type of the values with this structure and these types of leaves."""
    del x64  # of the key
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    example = jax.tree.unflatten(treedef, abstract)
    aval = example.aval()
    return HighType(treedef, leaves, aval.shape, aval.dtype, example)


@lru_cache(maxsize=4096)
def takes_axis(type: HighType) -> bool:
    """Whether a new first axis on each leaf makes a stack of values."""
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in type.leaves]
    return takes_batch_axis(jax.tree.unflatten(type.treedef, abstract))


def short_name(value: Any) -> str:
    """The name that jaxprs show for a value's type: `lora` of a `LoraArray`.

    A class may say another, by an attribute or a property `type_name`.
    """
    if value.type_name is not None:
        return value.type_name
    name = type(value).__name__
    return (name.removesuffix("Array") or name).lower()


def _insert(shape: tuple[int, ...], axis: int, size: Any) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis:])


def _remove(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
