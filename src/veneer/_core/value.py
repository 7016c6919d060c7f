"""Implicit values: pytrees that stand for a dense array they do not store."""

import dataclasses
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp

from .explain import ALLOW, note_materialised, policy_in_force
from .jax_internals import Primitive
from .tree import make_dataclass, make_pytree, static


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
class Value:
    """What `implicit` wraps: a pytree with an abstract value and a dense form.

    Subclassing makes a frozen dataclass and registers a pytree with keys, unless the class is
    made by a framework that does so itself (`equinox.Module`, `flax.struct`), or `abstract=True`
    says that it has no fields. Users subclass `ImplicitArray`.
    """

    #: Whether static fields say what a value means (a unit) and not only how it is stored. If so,
    #: a loop or a branch in which they change is refused; if not, it goes on with the dense form.
    metadata_is_meaning: ClassVar[bool] = True

    _made_here: ClassVar[bool] = False
    _pytree: ClassVar[bool] = False

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._pytree = False
        made = "__dataclass_params__" in vars(cls)  # by flax.struct.PyTreeNode
        to_be_made = type(cls) not in (type, ABCMeta)  # by Equinox's metaclass
        cls._made_here = not (made or to_be_made or abstract)
        if cls._made_here:
            make_dataclass(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # At the first instance and not before, so that a decorator (flax.struct.dataclass) may
        # register the class first.
        if not cls._pytree:
            make_pytree(cls)
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

    def materialise(self) -> Any:
        """The dense form. May be another implicit array, which is materialised in turn."""
        raise NotImplementedError(f"{type(self).__name__} must define materialise()")

    def aval(self) -> jax.core.ShapedArray:
        """The shape and dtype stood for, found from `materialise` unless a type states it."""
        cached = self.__dict__.get("_aval")
        if cached is None:
            cached = _aval_of_materialise(self)
            object.__setattr__(self, "_aval", cached)
        return cached

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """What a primitive does where no rule fits: operands are made dense, visibly."""
        dense = make_dense(primitive, values)
        return primitive.bind(*dense, **primitive.get_bind_params(params))

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        fields = ", ".join(f"{n}={_summary(getattr(self, n, '?'))}" for n in names)
        return f"{type(self).__name__}({fields})"


def is_value(x: Any) -> bool:
    """Whether `x` is an implicit value: the `is_leaf` of tree functions that keep them whole."""
    return isinstance(x, Value)


def materialise_one(x: Any) -> Any:
    """`x`, or the dense array it stands for."""
    if isinstance(x, Value):
        with policy_in_force(ALLOW):  # what its own parts do is no news
            while isinstance(x, Value):
                dense = x.materialise()
                if dense is x:
                    raise TypeError(f"{type(x).__name__}.materialise() returns itself")
                x = dense
    return x


def materialise(tree: Any) -> Any:
    """The tree with every implicit array replaced by the dense array it stands for.

    >>> import jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.array([1.0, -1.0]), "nf4")
    >>> vn.materialise({"w": q})["w"].tolist()
    [1.0, -1.0]
    """
    return jax.tree.map(materialise_one, tree, is_leaf=is_value)


def make_dense(primitive: Primitive, values: Sequence[Any]) -> list[Any]:
    """The values with implicit ones materialised, telling whoever wants to know."""
    implicit = [v for v in values if isinstance(v, Value)]
    if implicit:
        nbytes = sum(v.aval().size * v.aval().dtype.itemsize for v in implicit)
        note_materialised(primitive.name, lambda: describe(values), nbytes)
    return [materialise_one(v) for v in values]


def describe(values: Sequence[Any]) -> tuple[str, ...]:
    """The operands of a primitive, as messages show them: `QArray:f32[8,4]`, `f32[2,8]`."""
    name = lambda v: f"{type(v).__name__}:{_short(v.aval())}"
    return tuple(name(v) if isinstance(v, Value) else _summary(v) for v in values)


def _short(aval: Any) -> str:
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)


def _summary(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, Value):
        return _short(jax.core.ShapedArray(x.shape, x.dtype))
    return repr(x)


_avals: dict[Any, jax.core.ShapedArray] = {}
_MAX_AVALS = 4096


def _aval_of_materialise(value: Value) -> jax.core.ShapedArray:
    leaves, treedef = jax.tree.flatten(value)
    # The default float, too: a materialise may make arrays of it, and jax_enable_x64 changes it.
    key = treedef, tuple(jax.typeof(leaf) for leaf in leaves), jnp.result_type(float)
    aval = _avals.get(key)
    if aval is None:
        dense: Callable = lambda *leaves: materialise_one(jax.tree.unflatten(treedef, leaves))
        try:
            aval = jax.typeof(jax.eval_shape(dense, *leaves))
        except Exception as error:
            error.add_note(
                f"While finding the shape and dtype of {value!r} from its materialise(); "
                "define aval() to state them."
            )
            raise
        if len(_avals) >= _MAX_AVALS:
            _avals.clear()
        _avals[key] = aval
    return aval
