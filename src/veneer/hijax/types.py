"""The types of implicit arrays and of their tangents in jaxprs.

As an argument or a result, an implicit array is a pytree of leaves, which have the types. It gets a
high type when a primitive takes it as an operand, and results of primitives keep their high types.
"""

import copyreg
import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import compress, islice
from typing import Any
from weakref import ref

import jax

from .._core.errors import (
    derivatives_error,
    is_marked_as_derivatives,
    reject_refs_and_float0,
)
from .._core.primitives.leaves import can_stack_leaves, has_batch_axes
from .._core.surface.array import short_name
from .._core.value import Value, get_cached, has_all_leaves, is_value
from .._jax.frames import warn_of_scales_without_codes
from .._jax.hijax import HiType, aval_property, copy_shaped_array, holds_tracers
from .._jax.tracing import (
    abstract_array,
    current_trace,
    has_numeric_dtype,
    is_in_derivative,
    set_operand_conversion,
    set_type_function,
)
from .mode import is_enabled
from .values import (
    Add,
    HighArray,
    Pack,
    Tangent,
    Unpack,
    Zeros,
    apply,
    flatten_value,
    is_inexact,
    is_staged,
    leaves_of,
    packed,
    strong_leaf,
    value_of,
)


class StructuredType(HiType):
    """A type whose values JAX lowers to several arrays, the leaves of a pytree."""

    treedef: Any
    leaves: tuple[Any, ...]

    def _key(self) -> Any:
        return type(self), self.treedef, self.leaves

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuredType) and self._key() == other._key()

    def lo_ty(self) -> list[Any]:
        """Return the types of the arrays that JAX lowers a value of this type to."""
        return [low for leaf in self.leaves for low in leaf.lo_ty()]

    def of_arrays(self, arrays: Sequence[Any]) -> Any:
        """Return the value of this type that JAX lowers to `arrays`."""
        raise NotImplementedError

    def raise_val(self, *lo_vals: Any) -> Any:
        """Return the value that JAX lowers to the arrays `lo_vals`, as an operand of a primitive.

        While a jaxpr with high types is traced, this is a tracer. Otherwise it is a `HighArray` or
        a `Tangent`.
        """
        # When JAX 0.10.2 to 0.12.0 lowers a scan, it calls the type of one value with the arrays
        # of a stack of values.
        pairs = zip(self.lo_ty(), lo_vals, strict=True)
        sizes = {x.shape[0] for t, x in pairs if x.ndim > t.ndim}
        type: Any = self.inc_rank(sizes.pop(), 0) if sizes else self  # type: ignore[arg-type]
        if is_staged(lo_vals):
            return packed(type, lo_vals)
        value = type.of_arrays(lo_vals)
        return HighArray(value, type) if isinstance(type, HighType) else value

    def nospec(self, *_: Any) -> Any:
        """Raise NotImplementedError. JAX calls this if a residual of a `shard_map` has this type.

        JAX needs a spec for each residual, and high types have none.
        """
        raise NotImplementedError(
            f"The backward pass of a shard_map needs a {self}, for which JAX has no spec. "
            "Differentiate inside the shard_map, or call vn.materialise on the value first."
        )

    def parts(self, arrays: Sequence[Any], make: Callable[[Any, list[Any]], Any]) -> Sequence[Any]:
        """Return the leaves of a value of this type, given the arrays that JAX lowers the value to.

        A leaf that is an implicit array, and has a high type, is `make(type, its_arrays)`. Any
        other leaf is one of the arrays.
        """
        del make
        return arrays

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        """Return the text in jaxprs, such as `lora[512,512]`."""
        del short_dtypes, mesh_axis_types
        return str(self)

    def __repr__(self) -> str:
        return str(self)

    # `strong_leaf` removes weak types from all leaves.
    def update_weak_type(self, weak_type: bool) -> Any:
        del weak_type
        return self

    def strip_weak_type(self) -> Any:
        return self

    def normalize(self) -> Any:
        return self

    def leading_axis_spec(self) -> Any:
        return 0  # the axis that a loop slices


class HighType(StructuredType, jax.core.ShapedArray):
    """The type of an implicit array, with the shape and dtype of the dense array.

    Two implicit arrays have the same type if their classes, their metadata and the types of their
    leaves are equal. An implicit array in a field of another one is usually flattened to its own
    leaves. But if its class sets `dense_tangent` and the outer class does not, it is one leaf with
    its own high type. An example is the quantized weight in a `LoraArray`.
    """

    dense_tangent: bool

    def __new__(cls, treedef: Any, leaves: Any, example: Any) -> "HighType":
        """Return the type of implicit arrays, given their tree structure and the types of leaves.

        `example` is such an implicit array with abstract leaves.
        """
        self = object.__new__(cls)
        dense = example.aval().strip_weak_type()
        copy_shaped_array(self, dense)
        attributes = {"treedef": treedef, "leaves": leaves, "_dense": dense}
        vars(self).update(attributes, dense_tangent=example.dense_tangent)
        return self

    __hash__ = StructuredType.__hash__
    __eq__ = StructuredType.__eq__

    def __reduce__(self) -> Any:
        return high_type, (self.treedef, self.leaves, jax.config.jax_enable_x64)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        name = short_name(abstract(self.treedef, self.leaves))
        return f"{name}[{','.join(map(str, self.shape))}]"

    @property
    def cls(self) -> type:
        """Return the class of the implicit arrays of this type."""
        return self.treedef.node_data()[0]

    def __getattr__(self, name: str) -> Any:
        # JAX calls this for an attribute that a tracer of this type does not have.
        is_field = any(f.name == name for f in dataclasses.fields(self.cls))
        if name.startswith("_") or not (is_field or hasattr(self.cls, name)):
            raise AttributeError(f"a {self.cls.__name__} has no attribute {name!r}")
        return aval_property(lambda tracer: getattr(unpack(tracer), name))

    def dense(self) -> jax.core.ShapedArray:
        """Return the type of the dense array."""
        return self._dense

    def update(
        self, shape: Any = None, dtype: Any = None, weak_type: Any = None, **kwargs: Any
    ) -> Any:
        """Return the type of the dense array with another shape, dtype or weak type."""
        return self.dense().update(shape, dtype, weak_type, **kwargs)

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        """Return the arrays that an implicit array is lowered to: the leaves without weak types."""
        return list(map(strong_leaf, jax.tree.leaves(value_of(hi_val))))

    def of_arrays(self, arrays: Sequence[Any]) -> Any:
        """Return the implicit array that JAX lowers to `arrays`."""
        return self.of_leaves(self.parts(arrays, lambda t, part: t.of_arrays(part)))

    def parts(self, arrays: Sequence[Any], make: Callable[[Any, list[Any]], Any]) -> list[Any]:
        rest = iter(arrays)
        build = lambda t: make(t, list(islice(rest, len(t.lo_ty()))))
        return [build(t) if type(t) is HighType else next(rest) for t in self.leaves]

    def of_leaves(self, leaves: Sequence[Any]) -> Any:
        """Return the implicit array of this type with the given leaves."""
        return jax.tree.unflatten(self.treedef, leaves)

    def to_tangent_aval(self) -> Any:
        """Return the type of tangents of such an implicit array.

        This is a `TangentType`, or the tangent type of the dense array if the class sets
        `dense_tangent`.
        """
        return self.dense().to_tangent_aval() if self.dense_tangent else TangentType(self)

    def to_ct_aval(self) -> Any:
        return self.to_tangent_aval()

    def inc_rank(self, size: int | None, spec: Any) -> Any:
        """Return the type of a stack of `size` implicit arrays, along the axis `spec` of each leaf.

        Return the type itself if `spec` is None.
        """
        if spec is None:
            return self
        if (spec > 0 and not has_leading_batch_axes(self, spec)) or not can_be_stacked(self):
            raise TypeError(
                f"{self} cannot be stacked along axis {spec}: a stack of its leaves does not "
                "represent a stack of such arrays. Use vn.materialise(x)."
            )
        more = lambda a: a.update(shape=(*a.shape[:spec], size, *a.shape[spec:]))
        is_high = lambda a: type(a) is HighType
        leaves = [a.inc_rank(size, spec) if is_high(a) else more(a) for a in self.leaves]
        return self._with_leaf_types(leaves, 1)

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        """Return the type of one of the `size` implicit arrays in a stack along the axis `spec`.

        Return the type itself if `spec` is None.
        """
        if spec is None:
            return self
        if self.shape[spec : spec + 1] != (size,) or not has_leading_batch_axes(self, spec + 1):
            raise TypeError(
                f"{self} cannot be mapped along axis {spec}, which is not a batch axis of size "
                f"{size} of its leaves ({', '.join(map(str, self.leaves))}). Use vn.materialise(x)."
            )
        fewer = lambda a: a.update(shape=(*a.shape[:spec], *a.shape[spec + 1 :]))
        is_high = lambda a: type(a) is HighType
        leaves = [a.dec_rank(size, spec) if is_high(a) else fewer(a) for a in self.leaves]
        return self._with_leaf_types(leaves, -1)

    def _with_leaf_types(self, leaves: Sequence[Any], change: int) -> "HighType":
        """Return the type of an implicit array with the types `leaves` in place of its leaf types.

        Each new type has one axis more than the old one if `change` is 1, or one less if it is -1.
        Raise TypeError if this is not so for the dense array.
        """
        what = "added to" if change > 0 else "removed from"
        try:
            new = _high_type(self.treedef, tuple(leaves))
        except Exception as error:
            error.add_note(f"This is {self} with one axis {what} each leaf.")
            raise
        if new.ndim != self.ndim + change:
            raise TypeError(
                f"{self} cannot be batched: with one axis {what} each leaf, it represents {new}, "
                f"which has {new.ndim} axes instead of {self.ndim + change}. Use vn.materialise(x)."
            )
        return new


class TangentType(StructuredType):
    """The type of tangents and cotangents of an implicit array of type `of`.

    A tangent is lowered to one array for each floating leaf of the implicit array. If the class
    sets `dense_tangent`, the tangent is a dense array instead, without a `TangentType`.
    """

    of: HighType

    def __init__(self, of: HighType):
        self.of = of
        self.treedef = of.treedef
        self.leaves = tuple(a.to_tangent_aval() for a in of.leaves if is_inexact(a))
        self.shape, self.dtype, self.ndim, self.mat = of.shape, of.dtype, of.ndim, of.mat

    def __getattr__(self, name: str) -> Any:
        # JAX calls this for an attribute that a tracer of this type does not have.
        if name in _OPERATORS:
            raise tangent_operand_error(name.strip("_"), self)
        raise AttributeError(f"{self} has no attribute {name!r}")

    def _key(self) -> Any:
        return type(self), self.of

    def __str__(self) -> str:
        return f"{self.of}ᵀ"

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        return list(map(strong_leaf, hi_val.leaves))

    def of_arrays(self, leaves: Sequence[Any]) -> Any:
        """Return the tangent of this type with the given leaves."""
        return Tangent(self, list(leaves))

    of_leaves = of_arrays

    def to_tangent_aval(self) -> Any:
        return self

    def to_ct_aval(self) -> Any:
        return self

    def vspace_zero(self) -> Any:
        return apply(Zeros(self))[0]

    def vspace_add(self, x: Any, y: Any) -> Any:
        return apply(Add(self), x, y)[0]

    def inc_rank(self, size: int | None, spec: Any) -> Any:
        return TangentType(self.of.inc_rank(size, spec))

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        return TangentType(self.of.dec_rank(size, spec))


#: The names of operators such as `_add`, which JAX looks up on the type of a tracer.
_OPERATORS = {name for name in vars(jax.core.ShapedArray) if name[:1] == "_" != name[1:2]}
_OPERATORS = _OPERATORS - {"_copy", "_create", "_deepcopy"} | {"__jax_array__"}  # of jax.numpy's


def tangent_operand_error(what: str, *types: Any) -> TypeError:
    """Return the error for an operation that takes tangents of leaves as if they were arrays.

    `what` is the name of the operation, and `types` are the types of its operands.
    """
    return derivatives_error(f"{what}({', '.join(map(str, types))})")


def type_of(value: Any) -> HighType:
    """Return the high type of an implicit array. Its leaves can be abstract."""
    leaves, treedef = flatten_value(value_of(value))
    return _high_type(treedef, tuple(map(strong_type_of, leaves)))


def strong_type_of(x: Any) -> Any:
    """Return the type of an implicit array, a tangent or another array, without a weak type."""
    return type_of(x) if isinstance(x, Value) else jax.typeof(x).strip_weak_type()


def has_tangent(t: Any) -> bool:
    """Return whether values of a type have tangents. A tangent with no leaves does not count."""
    tangent = t.to_tangent_aval()
    return bool(tangent.leaves) if isinstance(tangent, TangentType) else is_inexact(tangent)


def is_complete(value: Value) -> bool:
    """Return whether an implicit array has all of its leaves, and they represent an array.

    For example, the parts of an implicit array that `equinox.partition` returns are not complete.
    """
    if not has_all_leaves(value):
        return False
    try:
        type_of(value)
    except Exception:  # the class can raise any error if leaves do not fit together
        return False
    return True


def _high_type(treedef: Any, leaves: tuple[Any, ...]) -> HighType:
    return high_type(treedef, leaves, jax.config.jax_enable_x64)  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def high_type(treedef: Any, leaves: tuple[Any, ...], x64: bool) -> HighType:
    """Return the high type of implicit arrays, given their tree structure and the types of leaves.

    `x64` is the configuration `jax_enable_x64`, on which the dtype of the dense array may depend.
    """
    del x64  # part of the key of the cache
    if not all(map(has_numeric_dtype, leaves)):
        reject_refs_and_float0([jax.tree.unflatten(treedef, leaves)])
    return HighType(treedef, leaves, abstract(treedef, leaves))


def abstract(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Return an implicit array with abstract leaves, given the types of its leaves."""
    return jax.tree.unflatten(treedef, list(map(abstract_of, leaves)))


def abstract_of(a: Any) -> Any:
    """Return an abstract array of the type `a`.

    For a high type, return an implicit array with abstract leaves.
    """
    if type(a) is HighType:
        return abstract(a.treedef, a.leaves)
    return abstract_array(a)


@lru_cache(maxsize=4096)
def can_be_stacked(type: HighType) -> bool:
    """Return whether stacking the leaves of values of this type stacks the dense arrays."""
    return can_stack_leaves(abstract(type.treedef, type.leaves))


@lru_cache(maxsize=4096)
def has_leading_batch_axes(type: HighType, count: int) -> bool:
    """Return whether the first `count` axes of the dense array are batch axes of all leaves."""
    return has_batch_axes(abstract(type.treedef, type.leaves), count)


# Conversions.


def as_high_array(x: Any) -> Any:
    """Return an implicit array as a `HighArray`. Return any other object unchanged."""
    return HighArray(x, type_of(x)) if isinstance(x, Value) else x


copyreg.pickle(HighArray, lambda x: (as_high_array, (x.value,)))
for _cls in (HighArray, Tangent):
    set_type_function(_cls, lambda x: x.aval)


def as_typed_operand(x: Any) -> Any:
    """Return an implicit array as an operand of a primitive: a `HighArray`, or a tracer.

    Return any other object unchanged. In a trace that keeps high types, the leaves are packed into
    a tracer. If leaves are tracers, the packed tracer is cached on the implicit array, so that a
    second use adds no equation.
    """
    value = value_of(x)
    if not isinstance(value, Value):
        return x
    if is_marked_as_derivatives(value):
        raise derivatives_error(str(type_of(value)))
    if is_in_derivative(current_trace()):
        warn_of_scales_without_codes(value)
    if current_trace().requires_low:
        return x if x is not value else as_high_array(value)
    leaves = list(map(as_typed_operand, leaves_of(value)))
    if not holds_tracers(leaves):
        return apply(Pack(type_of(value)), *leaves)[0]
    dead_refs = (lambda: None, lambda: None)
    of, tracer_of = get_cached(value, "_high", dead_refs)
    tracer = tracer_of() if of() is value else None  # a copy has the cache of the original
    if tracer is None or tracer._trace is not current_trace():
        tracer = apply(Pack(type_of(value)), *leaves)[0]
        if isinstance(tracer, jax.core.Tracer):
            object.__setattr__(value, "_high", (ref(value), ref(tracer)))
    return tracer


set_operand_conversion(HighArray, as_typed_operand)
set_operand_conversion(Tangent, lambda x: x)


def with_dense_tangents(tree: Any) -> Any:
    """Return a tree in which each implicit array whose tangent is one dense array is one leaf.

    The class of such an array sets `dense_tangent`, as `QArray` does. With high types off, return
    `tree` unchanged.
    """
    return jax.tree.map(_as_one_leaf, tree, is_leaf=is_value) if is_enabled() else tree


def _as_one_leaf(x: Any) -> Any:
    if not isinstance(x, Value) or not is_complete(x):
        return x
    if x.dense_tangent:
        return as_typed_operand(x)
    leaves, treedef = flatten_value(x)
    return jax.tree.unflatten(treedef, list(map(_as_one_leaf, leaves)))


def of_arrays(type: Any, arrays: Sequence[Any]) -> Any:
    """Return the implicit array, tangent or dense array of a type that JAX lowers to `arrays`."""
    return type.of_arrays(arrays) if isinstance(type, StructuredType) else arrays[0]


def is_typed(x: Any) -> bool:
    """Return whether `x` is a `HighArray`, or a tracer of an implicit array."""
    return isinstance(getattr(x, "aval", None), HighType)


def is_traced_high(x: Any) -> bool:
    """Return whether `x` is a tracer of an implicit array or of its tangent."""
    return isinstance(x, jax.core.Tracer) and isinstance(x.aval, StructuredType)


def unpack(x: Any) -> Any:
    """Return an implicit array, given a `HighArray` or a tracer of one.

    The leaves of a tracer are traced. Return any other object unchanged.
    """
    return x.aval.of_leaves(apply(Unpack(x.aval), x)) if is_typed(x) else x


def unpack_tangent(x: Any) -> Any:
    """Return a tangent, or a tracer of one, as an implicit array that is marked as derivatives.

    Return any other object unchanged.
    """
    if not isinstance(getattr(x, "aval", None), TangentType):
        return x
    return x.aval.of_leaves(apply(Unpack(x.aval), x)).value


def to_operand(value: Value) -> Any:
    """Return an implicit array as one operand of a primitive.

    If it is marked as derivatives of leaves, return a `Tangent`. Unlike this function,
    `as_typed_operand` raises an error then.
    """
    if not is_marked_as_derivatives(value):
        return as_typed_operand(value)
    t = TangentType(type_of(value))
    return Tangent(t, list(compress(leaves_of(value), map(is_inexact, t.of.leaves))))
