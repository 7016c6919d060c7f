"""Implicit values: pytrees that stand for a dense array they do not store."""

import dataclasses
from abc import ABCMeta
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeVar, dataclass_transform, overload

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from .._jax.primitives import Primitive
from .._jax.source_lines import user_line
from .._jax.tracing import find_mesh, vary_like
from .leaf_axes import Axes, Movement, are_axes, partition
from .policy import ALLOW, note_materialised, policy_in_force
from .surface import mistakes
from .surface.event import Operands, Source
from .surface.fields import Fields, fields_of
from .surface.shown import Shown
from .tree import checks_of, has_metadata, make_dataclass, make_pytree, static

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
class Value(Shown):
    """A pytree that represents an array: the base class of `vn.ImplicitArray`.

    To define a type, subclass `vn.ImplicitArray`, which adds operators and array attributes. Use
    `Value` in annotations and with `isinstance`. Veneer makes each subclass a frozen dataclass and
    a pytree, unless Equinox or `flax.struct` does so. If a base class has no fields, declare it
    with `abstract=True`, as in `class Base(vn.Value, abstract=True)`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> isinstance(vn.quant.quantize(jnp.ones(2), "int8"), vn.Value)
    True
    """

    # Computed attributes, which trees and copies omit. They are slots because Equinox compares the
    # `__dict__` of two modules.
    __slots__ = ("_aval", "_high", "_holds_derivatives", "_source")

    #: Whether static fields change the meaning of a value (a unit), not only its storage. If True,
    #: a loop or a branch that changes them raises; if False, it materializes the value.
    metadata_is_meaning: ClassVar[bool] = True

    #: Whether a slice of all leaves along a leading axis represents that slice of the array. Set
    #: False if elements depend on each other (`x / norm(x)`). Loops then materialize the value.
    batch_transparent: ClassVar[bool] = True

    #: Whether the only leaf is the dense array, as for a unit or a tag. None calls `materialise` to
    #: find out. A type that cannot materialize must set False if its leaf is another array.
    is_label: ClassVar[bool | None] = None

    #: Whether results of rules must have the dtypes of the primitives. Shapes are always checked.
    keeps_dtypes: ClassVar[bool] = True

    #: Whether a rule for operands `(x, y)` of a commutative primitive also serves `(y, x)`.
    commute_ops: ClassVar[bool] = True

    #: Whether operators outside `implicit` may be compiled. False if a value caches its results.
    compiles_operators: ClassVar[bool] = True

    #: If several operand types define `default`, the one with the highest precedence runs.
    default_precedence: ClassVar[int] = 0

    #: Whether its tangent is a dense array, not one per leaf, with `vn.hijax`. True for quantized
    #: arrays, because codes have no tangent.
    dense_tangent: ClassVar[bool] = False

    #: Whether programs write into values, as into a key-value cache. Reports count it separately.
    is_cache: ClassVar[bool] = False

    _made_here: ClassVar[bool] = False
    _pytree: ClassVar[bool] = False
    _fields: ClassVar[Fields] = Fields(frozenset(), tell=True)

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._pytree = False
        made = "__dataclass_params__" in vars(cls)  # by flax.struct.PyTreeNode
        to_be_made = type(cls) not in (type, ABCMeta)  # by Equinox's metaclass
        cls._made_here = not (made or to_be_made or abstract)
        if cls._made_here:
            make_dataclass(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # At the first instance, so that flax.struct.dataclass may register the class first.
        if not cls._pytree:
            make_pytree(cls)
            cls._fields = fields_of(cls)
        return super().__new__(cls)

    # Of the classes made dataclasses here; other frameworks see to theirs.
    def __setattr__(self, name: str, value: Any) -> None:
        if self._made_here:
            raise dataclasses.FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._made_here:
            raise dataclasses.FrozenInstanceError(f"cannot delete {type(self).__name__}.{name}")
        super().__delattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, for pickles and copies."""
        return dict(self.__dict__)

    def materialise(self) -> Any:
        """Return the dense array, or another implicit array that represents the same array."""
        raise NotImplementedError(f"{type(self).__name__} must define materialise().")

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the dense array, found by tracing `materialise`."""
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
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

        **Returns:** a value of this type with a `PartitionSpec` in place of each array. None if its
        leaves cannot be sharded like the dense array. The value is then materialized, unless `spec`
        shards only leading axes that all leaves have.
        """
        _, structure, axes = stated_layout(self)
        specs = None if axes is None else partition(axes, spec, self.aval().shape, shape)
        if specs is None:
            return None
        stays = Movement(shape, tuple(range(len(shape))))
        return jax.tree.unflatten(structure, specs)._moved(stays)

    def leaf_axes(self) -> Sequence[Axes] | None:
        """Declare which axis of the dense array each axis of each leaf corresponds to.

        With it, Veneer slices, transposes and shards the leaves instead of the dense array.

        **Returns:** a list with a sequence per leaf: a `vn.LeafAxis` for each axis of the leaf, or
        None if no dense axis corresponds to it. An implicit array in a field counts as one leaf.
        The default returns None. Then only leading axes that all leaves have are sliced or sharded.
        """
        return None

    def _movable(self) -> "Value":
        """Return this value, stored so that its leaves can be moved."""
        return self

    def _moved(self, movement: Movement) -> Any:
        """Return this value, whose leaves were moved, with new metadata. Or NotImplemented."""
        return NotImplemented if movement.reorders and has_metadata(self) else self

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive that no rule fits, on materialized operands.

        `vn.explain` and `on_materialise` report the materialized operands.
        """
        mistakes.refuse_dense_update(values[0] if values else None, primitive.name)
        dense = make_dense(primitive, values)
        return primitive.bind(*dense, **primitive.get_bind_params(params))

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.repr]  # type: ignore[arg-type]
        fields = ", ".join(f"{n}={_summary(getattr(self, n, '?'))}" for n in names)
        return f"{type(self).__name__}({fields})"


_SLOTS = {name: vars(Value)[name] for name in Value.__slots__}


def get_cached(value: Value, name: str, default: Any = None) -> Any:
    """Return what is known of a value besides its fields.

    Not by `getattr`: a class may define `__getattr__`, and answer with the attribute of a part.
    """
    try:
        return _SLOTS[name].__get__(value)
    except AttributeError:
        return default


def is_value(x: Any) -> bool:
    """Whether `x` is an implicit value: the `is_leaf` of tree functions that keep them whole."""
    return isinstance(x, Value)


def is_whole(value: Value) -> bool:
    """Return whether every array field is set. A partitioned value counts as a plain pytree."""
    fields = type(value)._fields
    for name, held in value.__dict__.items():
        if held is None and name in fields.arrays:
            return False
        if isinstance(held, Value) and not is_whole(held):
            return False
    is_none = lambda x: x is None
    if fields.tell or not any(map(is_none, jax.tree.leaves(value, is_leaf=is_none))):
        return True
    with suppress(Exception):  # whatever a type's own code raises where leaves are missing
        return value.aval() is not None
    return False


def is_part(value: Any) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, Value) and x is not value


def source_of(x: Any) -> Source:
    """The weights that a value is, or is made of, where somebody asks; nothing of other values."""
    return get_cached(x, "_source", ()) if isinstance(x, Value) else ()


def aval_of(part: Any) -> Any:
    return part.aval() if isinstance(part, Value) else jax.typeof(part)


def stated_layout(value: Value) -> tuple[list[Any], Any, Sequence[Axes] | None]:
    """The parts of a value, their structure, and the axes that its type states, or None."""
    parts, structure = jax.tree.flatten(value, is_part(value))
    stated = value.leaf_axes()
    if stated is not None and not are_axes(stated, [aval_of(part).ndim for part in parts]):
        raise TypeError(
            f"{type(value).__name__}.leaf_axes returns {stated!r}. It must return, per leaf, a "
            f"vn.LeafAxis or None for each axis: {value!r}"
        )
    return parts, structure, stated


# Raised by a type with a defect, or by one that needs concrete leaves: these are no refusals.
DEFECTS = (jax.errors.JAXTypeError, AttributeError, NameError)


@lru_cache(maxsize=4096)
def stands_for(tree: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[int, ...] | None:
    """Return the dense shape of this structure with abstract leaves; None if its class raises."""
    try:
        with suppress(*DEFECTS):
            jax.eval_shape(partial(check_structure, tree), *leaves)
        return jax.tree.unflatten(tree, leaves).aval().shape
    except Exception:  # whatever a type's own code raises on leaves that make no sense to it
        return None


def check_structure(tree: Any, *leaves: Any) -> None:
    values = [jax.tree.unflatten(tree, leaves)]
    for value in values:
        values += filter(is_value, jax.tree.leaves(value, is_leaf=is_part(value)))
        for check in checks_of(value):
            check()


class Kept:
    """A base of pytrees that `implicit` does not take apart: they are more than their leaves."""


def is_kept(x: Any) -> bool:
    return isinstance(x, (Value, Kept))  # faster than of a union


# A type's own materialise() may call vn.materialise on its leaves, which must not be marked.
_materialising: ContextVar[bool] = ContextVar("materialising", default=False)


def materialise_one(x: Any) -> Any:
    if isinstance(x, Value):
        token = _materialising.set(True)
        try:
            with policy_in_force(ALLOW):  # what its own parts do is no news
                while isinstance(x, Value):
                    mistakes.refuse_derivatives(x)
                    dense = x.materialise()
                    if type(dense) is type(x) and _same_type(dense, x):
                        raise TypeError(f"{type(x).__name__}.materialise() returns itself")
                    x = dense
        finally:
            _materialising.reset(token)
    return x


def _same_type(one: Value, other: Value) -> bool:
    kind: Any = [
        (jax.tree.structure(v), list(map(jax.typeof, jax.tree.leaves(v)))) for v in (one, other)
    ]
    return kind[0] == kind[1]


#: The name by which `materialise` marks a traced value, for `implicit` to make it dense.
MATERIALISE = "veneer.materialise"


@overload
def materialise(tree: "Value") -> jax.Array: ...


@overload
def materialise(tree: T) -> T: ...


def materialise(tree: Any) -> Any:
    """Replace every implicit array of a tree by its dense array.

    It also works on an operand inside a function under `vn.implicit`. `vn.explain` and
    `on_materialise` do not report it.

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
            return checkpoint_name(x, MATERIALISE)  # it may be implicit in a trace further out
        return materialise_one(x)

    return jax.tree.map(dense, tree, is_leaf=is_value)


def make_dense(primitive: Primitive, values: Sequence[Any], why: str = "") -> list[Any]:
    """Materialize the implicit values, and report it with the reason `why`."""
    implicit = [v for v in values if isinstance(v, Value)]
    if not implicit:
        return list(values)
    note_materialised(primitive.name, lambda: operands_met(values), why)
    try:
        return [_checked(v) if isinstance(v, Value) else v for v in values]
    except Exception as error:
        error.add_note(
            f"{primitive.name}({', '.join(describe(values))}) at {user_line()}: no rule fits, so "
            "the implicit operands must be materialized. Register a rule for these types. If "
            "calls of vn.implicit are nested, you can also swap them."
        )
        raise


def _checked(value: Value) -> Any:
    dense = materialise_one(value)
    stated, found = value.aval(), _aval_of_dense(value, dense)
    if (stated.shape, stated.dtype) != (found.shape, found.dtype):
        raise TypeError(
            f"{type(value).__name__}.materialise() returns {_short(found)}, but its aval() is "
            f"{_short(stated)}: {value!r}"
        )
    return vary_like(jax.tree.leaves(value), dense)


def _aval_of_dense(value: Value, dense: Any) -> Any:
    try:
        return jax.typeof(dense)
    except TypeError:
        raise TypeError(
            f"{type(value).__name__}.materialise() must return an array, not {dense!r}: {value!r}"
        ) from None


def operands_met(values: Sequence[Any]) -> Operands:
    """What an event says of operands; dense bytes are those of implicit ones."""
    avals = [v.aval() if isinstance(v, Value) else None for v in values]
    dense = [0 if a is None else a.size * a.dtype.itemsize for a in avals]
    caches = tuple(isinstance(v, Value) and v.is_cache for v in values)
    return Operands(describe(values), tuple(map(source_of, values)), tuple(dense), caches)


def describe(values: Sequence[Any]) -> tuple[str, ...]:
    """Return the operands as messages show them: `QArray:f32[8,4]`, `f32[2,8]`."""
    return tuple(map(_describe, values))


def _describe(x: Any) -> str:
    if not isinstance(x, Value):
        return _summary(x)
    try:
        return f"{type(x).__name__}:{_short(x.aval())}"
    except Exception:  # it lacks leaves, as a part of an array does
        return repr(x)


def _short(aval: Any) -> str:
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)


def _summary(x: Any) -> str:
    if not isinstance(x, Value) and hasattr(x, "shape") and hasattr(x, "dtype"):
        return _short(jax.core.ShapedArray(x.shape, x.dtype))
    return repr(x)


def _aval_of_materialise(value: Value, x64: bool) -> jax.core.ShapedArray:
    leaves, treedef = jax.tree.flatten(value)
    try:
        return _find_aval(treedef, tuple(map(jax.typeof, leaves)), x64)
    except Exception as error:
        mistakes.refuse_derivatives(value, error)
        mistakes.check_fields(value, error)
        mistakes.check_leaves_fit(value, checks_of(value), error)
        error.add_note(
            f"While finding the shape and dtype of {value!r} from its materialise(); "
            "define aval() to state them."
        )
        raise


@lru_cache(maxsize=4096)
def _find_aval(treedef: Any, leaves: Any, _x64: bool) -> jax.core.ShapedArray:
    def dense(*leaves: Any) -> Any:
        value = jax.tree.unflatten(treedef, leaves)
        found = materialise_one(value)
        _aval_of_dense(value, found)
        return vary_like(leaves, found)

    # Not by eval_shape, whose result has lost the mesh that it is sharded over.
    # The key of the cache has the mesh of the leaves, and not the mesh of the context.
    with jax.sharding.use_abstract_mesh(find_mesh(leaves)):
        (aval,) = jax.make_jaxpr(dense)(*leaves).out_avals
    return aval
