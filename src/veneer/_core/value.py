"""Implicit values: pytrees that represent a dense array without storing it."""

import dataclasses
from abc import ABCMeta
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, dataclass_transform, overload

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from .._jax.frames import reject_dense_update, user_line
from .._jax.primitives import Primitive
from .._jax.tracing import find_mesh, vary_like
from .errors import check_fields, check_leaves_fit, reject_derivatives
from .leaf_axes import Axes, Movement, are_valid_axes, partition_leaves
from .policy import ALLOW, Operands, Source, policy_in_force, report_materialised, set_variable
from .tree import (
    ArrayFields,
    array_fields_of,
    has_metadata,
    make_dataclass,
    make_pytree,
    static,
)

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
class Value:
    """A pytree that represents an array: the base class of `vn.ImplicitArray`.

    To define a type, subclass `vn.ImplicitArray`, which adds operators and array attributes. Use
    `Value` in annotations and with `isinstance`. Veneer makes each subclass a frozen dataclass and
    a pytree, unless Equinox or `flax.struct` does so. If a base class has no fields, declare it
    with `abstract=True`, as in `class Base(vn.Value, abstract=True)`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> isinstance(vn.quant.quantize(jnp.ones(2), "int8"), vn.Value)
    True
    """

    # Attributes that are lost when a value is flattened or copied. They are slots because Equinox
    # compares the `__dict__` of two modules.
    __slots__ = ("_aval", "_high", "_holds_derivatives", "_source")

    #: True if static fields, such as a unit, change the represented array. Loops and branches that
    #: change static fields then raise an error. Otherwise they materialize the value.
    metadata_is_meaning: ClassVar[bool] = True
    #: True if slicing all leaves along a leading axis slices the dense array. False, if elements
    #: depend on each other, as in `x / norm(x)`. Loops then materialize the value.
    batch_transparent: ClassVar[bool] = True
    #: True if the only leaf is the dense array, as for an array with a unit. None traces
    #: `materialise` to find out, and so needs False if `materialise` always raises.
    is_label: ClassVar[bool | None] = None
    #: True if rules must return the dtypes of the primitive for dense arrays.
    keeps_dtypes: ClassVar[bool] = True
    #: True if a rule for operands `(x, y)` of a commutative primitive also serves `(y, x)`.
    commute_ops: ClassVar[bool] = True
    #: True if operators outside `implicit` may be compiled. False, if a value stores its results.
    compiles_operators: ClassVar[bool] = True
    #: If several operand types define `default`, the one with the highest precedence runs.
    default_precedence: ClassVar[int] = 0
    #: True if a tangent is one dense array with `vn.hijax`. Codes of quantized arrays have none.
    dense_tangent: ClassVar[bool] = False
    #: True for arrays that programs write into, such as key-value caches.
    is_cache: ClassVar[bool] = False
    #: The name of the type in jaxprs. None means the class name, shortened.
    type_name: Any = None
    #: The description of the storage, such as `"tile 64"`. None derives a text from the fields.
    storage_name: Any = None

    _is_own_dataclass: ClassVar[bool] = False  # made by `make_dataclass`, not by another library
    _pytree: ClassVar[bool] = False  # whether `make_pytree` has registered the class
    _fields: ClassVar[ArrayFields] = ArrayFields(frozenset(), is_complete=True)

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._pytree = False
        is_flax_dataclass = "__dataclass_params__" in vars(cls)  # flax.struct.PyTreeNode
        is_equinox_class = type(cls) not in (type, ABCMeta)  # the metaclass makes the dataclass
        cls._is_own_dataclass = not (is_flax_dataclass or is_equinox_class or abstract)
        if cls._is_own_dataclass:
            make_dataclass(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not in `__init_subclass__`: the decorator flax.struct.dataclass registers classes later.
        if not cls._pytree:
            make_pytree(cls)
            cls._fields = array_fields_of(cls)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own_dataclass:
            raise dataclasses.FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own_dataclass:
            raise dataclasses.FrozenInstanceError(f"cannot delete {type(self).__name__}.{name}")
        super().__delattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the attributes in `__slots__`, such as the cached `aval`.

        `pickle` and `copy` call this method.
        """
        return dict(self.__dict__)

    def materialise(self) -> Any:
        """Return the dense array, or another implicit array that represents the same array."""
        raise NotImplementedError(f"{type(self).__name__} must define materialise().")

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the dense array. The default traces `materialise`."""
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # it changes dtypes
        cached = get_cached(self, "_aval")
        if cached is None or cached[0] != x64:
            cached = x64, _aval_of_materialise(self, x64)
            object.__setattr__(self, "_aval", cached)
        return cached[1]

    def partition(self, spec: PartitionSpec, shape: tuple[int, ...]) -> Any:
        """Return the `PartitionSpec` of each leaf for a `PartitionSpec` of the dense array.

        **Arguments:**

        - `spec`: a `PartitionSpec` with an entry for each axis of the dense array.
        - `shape`: for an argument of `jax.shard_map`, the dense shape of one block. For a result,
          the shape of the joined blocks. For a placement on devices, the shape of the dense array.

        **Returns:** a value of this type with a `PartitionSpec` in place of each array. Or None if
        the leaves cannot be sharded like the dense array. The value is then materialized, unless
        `spec` shards only leading axes that all leaves have.
        """
        _, structure, axes = declared_layout(self)
        specs = None if axes is None else partition_leaves(axes, spec, self.aval().shape, shape)
        if specs is None:
            return None
        no_movement = Movement(shape, tuple(range(len(shape))))
        return jax.tree.unflatten(structure, specs)._moved(no_movement)

    def leaf_axes(self) -> Sequence[Axes] | None:
        """Declare which axis of the dense array each axis of each leaf corresponds to.

        Veneer then slices, transposes and shards the leaves instead of the dense array.

        **Returns:** a list with one sequence per leaf. The sequence has, for each axis of the leaf,
        a `vn.LeafAxis`, or None if no dense axis corresponds to the axis. An implicit array in a
        field counts as one leaf. The default is None instead of a list. Then Veneer slices and
        shards only leading axes that all leaves have.
        """
        return None

    def _movable(self) -> "Value":
        """Return an equal value whose leaves can be sliced, transposed and reshaped.

        The default returns this value. `QArray` overrides this method, to unpack codes.
        """
        return self

    def _moved(self, movement: Movement) -> Any:
        """Return this value with its metadata (static fields) adapted to a `Movement` of its axes.

        The leaves were sliced, transposed or reshaped already. Return NotImplemented if no metadata
        can fit the new leaves. The caller then discards them, and tries the next rule.
        """
        return NotImplemented if movement.reorders and has_metadata(self) else self

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive on materialized operands, because no rule fits, and return its results.

        `vn.explain` and `on_materialise` report the materialized operands.
        """
        reject_dense_update(values[0] if values else None, primitive.name)
        dense = make_dense(primitive, values)
        return primitive.bind(*dense, **primitive.get_bind_params(params))

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.repr]  # type: ignore[arg-type]
        fields = ", ".join(f"{n}={_summary(getattr(self, n, '?'))}" for n in names)
        return f"{type(self).__name__}({fields})"


_SLOTS = {name: vars(Value)[name] for name in Value.__slots__}


def get_cached(value: Value, name: str, default: Any = None) -> Any:
    """Return the attribute `name`, one of `Value.__slots__`, or `default` if it is not set.

    Use this instead of `getattr`, which calls the `__getattr__` of a class for a missing attribute.
    That method may return the attribute of a field.
    """
    try:
        return _SLOTS[name].__get__(value)
    except AttributeError:
        return default


def is_value(x: Any) -> bool:
    return isinstance(x, Value)


def has_all_leaves(value: Value) -> bool:
    """Return whether every array field of an implicit array is set.

    If not, it is a part of a partitioned tree, and `implicit` treats it as a plain pytree.
    """
    fields = type(value)._fields
    for name, content in value.__dict__.items():
        if content is None and name in fields.required:
            return False
        if isinstance(content, Value) and not has_all_leaves(content):
            return False
    is_none = lambda x: x is None
    if fields.is_complete or not any(map(is_none, jax.tree.leaves(value, is_leaf=is_none))):
        return True
    # The annotations do not tell whether a field that is None may be None.
    with suppress(Exception):  # code of the class may raise anything if leaves are missing
        return value.aval() is not None
    return False


def is_part(value: Any) -> Callable[[Any], bool]:
    """Return an `is_leaf` function that stops at the implicit arrays in the fields of `value`."""
    return lambda x: isinstance(x, Value) and x is not value


def source_of(x: Any) -> Source:
    """Return the recorded paths of the weights from which `x` comes, or an empty tuple."""
    return get_cached(x, "_source", ()) if isinstance(x, Value) else ()


def aval_of(x: Any) -> Any:
    """Return `jax.typeof(x)`, or the type of the dense array if `x` is implicit."""
    return x.aval() if isinstance(x, Value) else jax.typeof(x)


def declared_layout(value: Value) -> tuple[list[Any], Any, Sequence[Axes] | None]:
    """Return the parts of an implicit array, their tree structure, and the result of `leaf_axes`.

    A part is a leaf, or an implicit array in a field. Raise `TypeError` if the result is invalid.
    """
    parts, structure = jax.tree.flatten(value, is_part(value))
    axes = value.leaf_axes()
    if axes is not None and not are_valid_axes(axes, [aval_of(part).ndim for part in parts]):
        raise TypeError(
            f"{type(value).__name__}.leaf_axes returns {axes!r}. It must return, per leaf, a "
            f"vn.LeafAxis or None for each axis: {value!r}"
        )
    return parts, structure, axes


class OpaqueNode:
    """The base class of pytrees whose leaves `implicit` does not wrap, such as `vn.hijax.Box`."""


def is_opaque_leaf(x: Any) -> bool:
    """Return whether `x` is a leaf for `implicit`: an implicit array or an `OpaqueNode`."""
    return isinstance(x, (Value, OpaqueNode))  # a tuple is faster than a union


#: The name of a `checkpoint_name` whose rule materializes its operand.
MATERIALISE = "veneer.materialise"
# True while the method `materialise` of a type runs. It may call `vn.materialise` on its leaves.
_materialising: ContextVar[bool] = ContextVar("materialising", default=False)


def materialise_one(x: Any) -> Any:
    """Return the dense array of `x`, or `x` itself if it is not implicit. Report nothing."""
    if not isinstance(x, Value):
        return x
    with set_variable(_materialising, True), policy_in_force(ALLOW):
        while isinstance(x, Value):
            reject_derivatives(x)
            dense = x.materialise()  # or another implicit array, to materialize next
            if type(dense) is type(x) and _tree_type(dense) == _tree_type(x):  # an endless loop
                raise TypeError(f"{type(x).__name__}.materialise() returns itself")
            x = dense
    return x


def _tree_type(value: Value) -> Any:
    """Return a pair: the tree structure of an implicit array, and the types of its leaves."""
    leaves, structure = jax.tree.flatten(value)
    return structure, list(map(jax.typeof, leaves))


@overload
def materialise(tree: "Value") -> jax.Array: ...


@overload
def materialise(tree: T) -> T: ...


def materialise(tree: Any) -> Any:
    """Replace every implicit array of a tree by its dense array.

    This also works for an operand inside a function under `vn.implicit`. `vn.explain` and
    `on_materialise` do not report arrays that this function materializes.

    **Arguments:**

    - `tree`: an implicit array, or a pytree of them. Other leaves are returned unchanged.

    **Returns:** the same tree with dense arrays.

    **Raises:**

    - `TypeError` if an implicit array holds gradients of its leaves, as `jax.grad` returns them.
    - `TypeError` if the method `materialise` of an implicit array returns the array itself.
    - Any error that this method raises, such as `ValueError` for a `vn.types.Quantity` in meters.

    >>> import jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.array([1.0, -1.0]), "nf4")
    >>> vn.materialise({"w": q})["w"].tolist()
    [1.0, -1.0]
    """

    def dense(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer) and not _materialising.get():
            return checkpoint_name(x, MATERIALISE)  # an enclosing trace may know it as implicit
        return materialise_one(x)

    return jax.tree.map(dense, tree, is_leaf=is_value)


def make_dense(primitive: Primitive, values: Sequence[Any], why: str = "") -> list[Any]:
    """Materialize the operands of a primitive, and report them with the reason `why`."""
    if not any(map(is_value, values)):
        return list(values)
    report_materialised(primitive.name, lambda: describe_operands(values), why)
    try:
        return [_materialise_checked(v) if isinstance(v, Value) else v for v in values]
    except Exception as error:
        error.add_note(
            f"{primitive.name}({', '.join(describe(values))}) at {user_line()}: no rule fits, so "
            "the implicit operands must be materialized. Register a rule for these types. If "
            "calls of vn.implicit are nested, you can also swap them."
        )
        raise


def _materialise_checked(value: Value) -> Any:
    """Return the dense array of a value. Raise `TypeError` if its type differs from `aval()`."""
    dense = materialise_one(value)
    declared, actual = value.aval(), _aval_of_dense(value, dense)
    if (declared.shape, declared.dtype) != (actual.shape, actual.dtype):
        raise TypeError(
            f"{type(value).__name__}.materialise() returns {_short(actual)}, but its aval() is "
            f"{_short(declared)}: {value!r}"
        )
    return vary_like(jax.tree.leaves(value), dense)  # in a shard_map: over the axes of the leaves


def _aval_of_dense(value: Value, dense: Any) -> Any:
    """Return the type of `dense`, the result of `materialise`. Raise an error for a non-array."""
    try:
        return jax.typeof(dense)
    except TypeError:
        raise TypeError(
            f"{type(value).__name__}.materialise() must return an array, not {dense!r}: {value!r}"
        ) from None


def describe_operands(values: Sequence[Any]) -> Operands:
    """Return the description of the operands of a primitive for an `Event`."""
    avals = [v.aval() if isinstance(v, Value) else None for v in values]
    dense = [0 if a is None else a.size * a.dtype.itemsize for a in avals]
    caches = tuple(isinstance(v, Value) and v.is_cache for v in values)
    return Operands(describe(values), tuple(map(source_of, values)), tuple(dense), caches)


def describe(values: Sequence[Any]) -> tuple[str, ...]:
    """Return a text for each operand, such as `QArray:f32[8,4]` or `f32[2,8]`."""

    def describe_one(x: Any) -> str:
        with suppress(Exception):  # a partitioned value lacks leaves
            if isinstance(x, Value):
                return f"{type(x).__name__}:{_short(x.aval())}"
        return _summary(x)

    return tuple(map(describe_one, values))


def _short(aval: Any) -> str:
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)


def _summary(x: Any) -> str:
    if not isinstance(x, Value) and hasattr(x, "shape") and hasattr(x, "dtype"):
        return _short(jax.core.ShapedArray(x.shape, x.dtype))
    return repr(x)


def _aval_of_materialise(value: Value, x64: bool) -> jax.core.ShapedArray:
    """Return the shape and dtype of the dense array by tracing `materialise`.

    If `materialise` raises an error, add a note to it. `x64` is the state of `jax.enable_x64`.
    """
    leaves, treedef = jax.tree.flatten(value)
    try:
        return _find_aval(treedef, tuple(map(jax.typeof, leaves)), x64)
    except Exception as error:
        reject_derivatives(value, error)
        check_fields(value, error)
        check_leaves_fit(value, error)
        error.add_note(
            f"While finding the shape and dtype of {value!r} from its materialise(); "
            "define aval() to state them."
        )
        raise


@lru_cache(maxsize=4096)
def _find_aval(treedef: Any, leaf_types: Any, _x64: bool) -> jax.core.ShapedArray:
    """Return the shape and dtype of the dense array of an implicit array with these leaf types.

    `treedef` is the tree structure of the implicit array. `_x64` is only a part of the cache key.
    """

    def dense(*leaves: Any) -> Any:
        value = jax.tree.unflatten(treedef, leaves)
        result = materialise_one(value)
        _aval_of_dense(value, result)
        return vary_like(leaves, result)

    # Use make_jaxpr, because eval_shape would drop the mesh from the type. Use the mesh of the
    # leaves, because the cache is keyed by the leaves and not by the mesh of the context.
    with jax.sharding.use_abstract_mesh(find_mesh(leaf_types)):
        (aval,) = jax.make_jaxpr(dense)(*leaf_types).out_avals
    return aval
