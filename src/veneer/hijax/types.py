"""The types that JAX sees: one for each structure of an implicit array, made from a value alone.

An implicit array is a pytree, and stays one: `jax.jit`, `optax` and `equinox` flatten it into its
leaves, before JAX asks for a type. So a value has no high type while it is an argument or a
result; it gets one where a primitive meets it, and keeps that for as long as the value is an
intermediate one. See `veneer.hijax` for what follows from this.
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
from .._core.primitives.leaf_movement import can_stack_leaves, has_batch_axes
from .._core.surface.shown import short_name
from .._core.value import Value, get_cached, has_all_leaves, is_value
from .._jax.caller_errors import warn_of_scales_without_codes
from .._jax.hijax import HiType, aval_property, copy_shaped_array, holds_tracers
from .._jax.tracing import (
    abstract_array,
    current_trace,
    has_numeric_dtype,
    is_in_derivative,
    set_operand_conversion,
    set_type_function,
)
from .high import Add, Pack, Unpack, Zeros, apply, is_staged, packed
from .mode import is_enabled
from .values import HighArray, Tangent, flatten_value, is_inexact, leaves_of, strong_leaf, value_of


class StructuredType(HiType):
    """A type whose values are lowered to the leaves of a tree structure."""

    treedef: Any
    leaves: tuple[Any, ...]

    def _key(self) -> Any:
        return type(self), self.treedef, self.leaves

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuredType) and self._key() == other._key()

    def lo_ty(self) -> list[Any]:
        """The types of the arrays that a value consists of."""
        return [low for leaf in self.leaves for low in leaf.lo_ty()]

    def of_arrays(self, arrays: Sequence[Any]) -> Any:
        """The value that consists of these arrays."""
        raise NotImplementedError

    def raise_val(self, *lo_vals: Any) -> Any:
        """What stands for the value that consists of these arrays, where JAX handles it.

        Where JAX lowers a scan, it asks the type of one value for the stack of them (0.10.2 to
        0.12.0): the type of what is made is that of its arrays.
        """
        pairs = zip(self.lo_ty(), lo_vals, strict=True)
        sizes = {x.shape[0] for t, x in pairs if x.ndim > t.ndim}
        type: Any = self.inc_rank(sizes.pop(), 0) if sizes else self  # type: ignore[arg-type]
        return packed(type, lo_vals) if is_staged(lo_vals) else type.standing_for(lo_vals)

    def standing_for(self, arrays: Sequence[Any]) -> Any:
        """The value that consists of these arrays, as JAX handles it where it computes."""
        return self.of_arrays(arrays)

    def nospec(self, *_: Any) -> Any:
        """How devices share what the derivative of a `shard_map` keeps: of this JAX has no way."""
        raise NotImplementedError(
            f"The backward pass of a shard_map needs a {self}, for which JAX has no spec. "
            "Differentiate inside the shard_map, or call vn.materialise on the value first."
        )

    def parts(self, arrays: Sequence[Any], make: Callable[[Any, list[Any]], Any]) -> Sequence[Any]:
        """The leaves that consist of these arrays; `make` gives those of a high type."""
        del make
        return arrays

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        """As jaxprs print it: `lora[512,512]`."""
        del short_dtypes, mesh_axis_types
        return str(self)

    def __repr__(self) -> str:
        return str(self)

    # None of the leaves is weakly typed: `strong_leaf` sees to that.
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


class HighType(StructuredType, jax.core.ShapedArray):
    """The type of an implicit array: that of the dense array, for whoever asks for no more.

    Two values are of one type if their classes, their metadata and the types of their leaves
    agree. `lora[512,512]` is what jaxprs print. A part with a dense tangent is one leaf of a value
    without, by its own high type: so the weight of a LoRA update of a quantised array.
    """

    dense_tangent: bool

    def __new__(cls, treedef: Any, leaves: Any, example: Any) -> "HighType":
        self = object.__new__(cls)
        dense = example.aval().strip_weak_type()
        copy_shaped_array(self, dense)
        vars(self).update(
            treedef=treedef,
            leaves=leaves,
            _dense=dense,
            dense_tangent=example.dense_tangent,
        )
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
        """The class of the values."""
        return self.treedef.node_data()[0]

    def __getattr__(self, name: str) -> Any:
        # What a tracer is asked for and has not itself, it asks its type.
        if name.startswith("_") or not _has(self.cls, name):
            raise AttributeError(f"a {self.cls.__name__} has no attribute {name!r}")
        return aval_property(lambda tracer: getattr(opened(tracer), name))

    def dense(self) -> jax.core.ShapedArray:
        """The type of the dense array."""
        return self._dense

    def update(
        self, shape: Any = None, dtype: Any = None, weak_type: Any = None, **kwargs: Any
    ) -> Any:
        """A type of dense arrays that differs from this one in what is given."""
        return self.dense().update(shape, dtype, weak_type, **kwargs)

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        """The leaves of a value."""
        return list(map(strong_leaf, jax.tree.leaves(value_of(hi_val))))

    def standing_for(self, arrays: Sequence[Any]) -> Any:
        """A `HighArray` of the value that consists of these arrays."""
        return HighArray(self.of_arrays(arrays), self)

    def of_arrays(self, arrays: Sequence[Any]) -> Any:
        """The value that consists of these arrays: an implicit array."""
        return self.of_leaves(self.parts(arrays, lambda t, part: t.of_arrays(part)))

    def parts(self, arrays: Sequence[Any], make: Callable[[Any, list[Any]], Any]) -> list[Any]:
        rest = iter(arrays)
        one = lambda t: make(t, list(islice(rest, len(t.lo_ty()))))
        return [one(t) if type(t) is HighType else next(rest) for t in self.leaves]

    def of_leaves(self, leaves: Sequence[Any]) -> Any:
        """The value that has these leaves."""
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
        if (spec > 0 and not has_axes(self, spec)) or not takes_axis(self):
            raise TypeError(
                f"{self} cannot be stacked along axis {spec}: a stack of its leaves does not "
                "represent a stack of such arrays. Use vn.materialise(x)."
            )
        more = lambda a: a.update(shape=_insert(a.shape, spec, size))
        return self._moved([_along(a, "inc_rank", size, spec, more) for a in self.leaves], 1)

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        """The type of one value out of a stack."""
        if spec is None:
            return self
        if self.shape[spec : spec + 1] != (size,) or not has_axes(self, spec + 1):
            raise TypeError(
                f"{self} cannot be mapped along axis {spec}, which is not a batch axis of size "
                f"{size} of its leaves ({', '.join(map(str, self.leaves))}). Use vn.materialise(x)."
            )
        fewer = lambda a: a.update(shape=_remove(a.shape, spec))
        return self._moved([_along(a, "dec_rank", size, spec, fewer) for a in self.leaves], -1)

    def _moved(self, leaves: Sequence[Any], change: int) -> "HighType":
        try:
            moved = _high_type(self.treedef, tuple(leaves))
        except Exception as error:
            what = "added to" if change > 0 else "removed from"
            error.add_note(f"This is {self} with one axis {what} each leaf.")
            raise
        if moved.ndim != self.ndim + change:
            what = "added to" if change > 0 else "removed from"
            raise TypeError(
                f"{self} cannot be batched: with one axis {what} each leaf, it represents {moved}, "
                f"which has {moved.ndim} axes instead of {self.ndim + change}. Use "
                "vn.materialise(x)."
            )
        return moved


def _has(cls: type, name: str) -> bool:
    return hasattr(cls, name) or any(f.name == name for f in dataclasses.fields(cls))


class TangentType(StructuredType):
    """The type of tangents and cotangents of a value whose leaves have one each.

    A leaf that is not floating has none.
    """

    of: HighType

    def __init__(self, of: HighType):
        self.of = of
        self.treedef = of.treedef
        self.leaves = tuple(a.to_tangent_aval() for a in of.leaves if is_inexact(a))
        self.shape, self.dtype, self.ndim, self.mat = of.shape, of.dtype, of.ndim, of.mat

    def __getattr__(self, name: str) -> Any:
        # What a tracer is asked for and has not itself, it asks its type.
        if name in _OPERATORS:
            raise no_array(name.strip("_"), self)
        raise AttributeError(f"{self} has no attribute {name!r}")

    def _key(self) -> Any:
        return type(self), self.of

    def __str__(self) -> str:
        return f"{self.of}ᵀ"

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        """The tangents of the floating leaves."""
        return list(map(strong_leaf, hi_val.leaves))

    def of_arrays(self, leaves: Sequence[Any]) -> Any:
        """The tangent that has these parts."""
        return Tangent(self, list(leaves))

    of_leaves = of_arrays

    def to_tangent_aval(self) -> Any:
        return self

    def to_ct_aval(self) -> Any:
        return self

    def vspace_zero(self) -> Any:
        """The tangent that is zero."""
        return apply(Zeros(self))[0]

    def vspace_add(self, x: Any, y: Any) -> Any:
        """The sum of two tangents."""
        return apply(Add(self), x, y)[0]

    def inc_rank(self, size: int | None, spec: Any) -> Any:
        return TangentType(self.of.inc_rank(size, spec))

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        return TangentType(self.of.dec_rank(size, spec))


#: The names by which a tracer asks its type for operators, and functions for an array.
_OPERATORS = {name for name in vars(jax.core.ShapedArray) if name[:1] == "_" != name[1:2]}
_OPERATORS = _OPERATORS - {"_copy", "_create", "_deepcopy"} | {"__jax_array__"}  # of jax.numpy's


def no_array(what: str, *types: Any) -> TypeError:
    """The error where tangents are operands."""
    return derivatives_error(f"{what}({', '.join(map(str, types))})")


def type_of(value: Any) -> HighType:
    """The high type of an implicit array. Its leaves may be abstract."""
    leaves, treedef = flatten_value(value_of(value))
    return _high_type(treedef, tuple(map(type_of_leaf, leaves)))


def type_of_leaf(leaf: Any) -> Any:
    """The type of a leaf, which is not weak."""
    if isinstance(leaf, Value):
        return type_of(leaf)
    return jax.typeof(leaf).strip_weak_type()


def is_complete(value: Value) -> bool:
    """Whether it is a value and not a part of one, as `equinox.partition` makes them."""
    if not has_all_leaves(value):
        return False
    try:
        type_of(value)
    except Exception:  # whatever a type's own code raises where leaves are missing
        return False
    return True


def _high_type(treedef: Any, leaves: tuple[Any, ...]) -> HighType:
    return high_type(treedef, leaves, jax.config.jax_enable_x64)  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def high_type(treedef: Any, leaves: tuple[Any, ...], x64: bool) -> HighType:
    """The high type of the values with this structure and these types of leaves."""
    del x64  # of the key
    if not all(map(has_numeric_dtype, leaves)):
        reject_refs_and_float0([jax.tree.unflatten(treedef, leaves)])
    return HighType(treedef, leaves, abstract(treedef, leaves))


def abstract(treedef: Any, leaves: Sequence[Any]) -> Any:
    """A value without data, of a structure and types of leaves."""
    return jax.tree.unflatten(treedef, list(map(abstract_of, leaves)))


def abstract_of(a: Any) -> Any:
    """What has no data, of a type: a value of a high one."""
    if type(a) is HighType:
        return abstract(a.treedef, a.leaves)
    return abstract_array(a)


@lru_cache(maxsize=4096)
def takes_axis(type: HighType) -> bool:
    """Whether a new first axis on each leaf makes a stack of values."""
    return can_stack_leaves(abstract(type.treedef, type.leaves))


@lru_cache(maxsize=4096)
def has_axes(type: HighType, count: int) -> bool:
    """Whether the first axes are those of a batch, so that slices of leaves are slices."""
    return has_batch_axes(abstract(type.treedef, type.leaves), count)


def _along(a: Any, method: str, size: Any, spec: Any, of_array: Callable[[Any], Any]) -> Any:
    return getattr(a, method)(size, spec) if type(a) is HighType else of_array(a)


def _insert(shape: tuple[int, ...], axis: int, size: Any) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis:])


def _remove(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


# Values with their types, and back.


def as_high_array(x: Any) -> Any:
    """An implicit array as one leaf, which is a `jax.Array`; anything else as it is."""
    return HighArray(x, type_of(x)) if isinstance(x, Value) else x


copyreg.pickle(HighArray, lambda x: (as_high_array, (x.value,)))
for _cls in (HighArray, Tangent):
    set_type_function(_cls, lambda x: x.aval)


def canonical(x: Any) -> Any:
    """What a primitive is given for an implicit array: that, as one leaf; or, where it is not
    computed at once, a tracer of its type, whose leaves are operands and so are seen by the trace.
    """
    value = value_of(x)
    if is_marked_as_derivatives(value):
        raise derivatives_error(str(type_of(value)))
    if is_in_derivative(current_trace()):
        warn_of_scales_without_codes(value)
    if current_trace().requires_low:
        return x if x is not value else as_high_array(value)
    leaves = [canonical(x) if isinstance(x, Value) else x for x in leaves_of(value)]
    if not holds_tracers(leaves):
        return apply(Pack(type_of(value)), *leaves)[0]
    of, tracer_of = get_cached(value, "_high", (_nothing, _nothing))
    tracer = tracer_of() if of() is value else None  # a copy has what was known of another
    if tracer is None or tracer._trace is not current_trace():
        tracer = apply(Pack(type_of(value)), *leaves)[0]
        if isinstance(tracer, jax.core.Tracer):  # and not computed at once
            object.__setattr__(value, "_high", (ref(value), ref(tracer)))
    return tracer


set_operand_conversion(HighArray, canonical)
set_operand_conversion(Tangent, lambda x: x)


def _nothing() -> None:
    """A reference to what is gone."""


def with_dense_tangents(tree: Any) -> Any:
    """Return the arguments or results of a derivative, with one leaf where a tangent is dense."""
    return jax.tree.map(_as_one_leaf, tree, is_leaf=is_value) if is_enabled() else tree


def _as_one_leaf(x: Any) -> Any:
    if not isinstance(x, Value) or not is_complete(x):
        return x
    if x.dense_tangent:
        return canonical(x)
    leaves, treedef = flatten_value(x)
    return jax.tree.unflatten(treedef, list(map(_as_one_leaf, leaves)))


def of_arrays(type: Any, arrays: Sequence[Any]) -> Any:
    """What consists of some arrays: a value, if it is of such a type, or the one array."""
    return type.of_arrays(arrays) if isinstance(type, StructuredType) else arrays[0]


def is_typed(x: Any) -> bool:
    """Whether `x` is traced with the high type of a value."""
    return isinstance(getattr(x, "aval", None), HighType)


def is_traced_high(x: Any) -> bool:
    """Whether `x` is a tracer of a value's type, or of its tangent's."""
    return isinstance(x, jax.core.Tracer) and isinstance(x.aval, StructuredType)


def opened(x: Any) -> Any:
    """What is of a high type as a value whose leaves are traced; anything else as it is."""
    return x.aval.of_leaves(apply(Unpack(x.aval), x)) if is_typed(x) else x


def opened_derivatives(x: Any) -> Any:
    """A tangent as a value whose leaves are those of the tangent; anything else as it is."""
    if not isinstance(getattr(x, "aval", None), TangentType):
        return x
    return x.aval.of_leaves(apply(Unpack(x.aval), x)).value


def operand_of(value: Value) -> Any:
    """What a primitive is given; of derivatives a tangent, of which it is refused by name."""
    if not is_marked_as_derivatives(value):
        return canonical(value)
    t = TangentType(type_of(value))
    return Tangent(t, list(compress(leaves_of(value), map(is_inexact, t.of.leaves))))
