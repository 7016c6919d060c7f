"""A Quax type that computes with an array type of ours."""

import abc
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from jax.typing import ArrayLike

from ...._core.surface.array import ImplicitArray
from ...._core.surface.implicit import implicit
from ...._core.transform import redispatch
from ...._core.value import Value, materialise_one
from ...._jax.primitives import Primitive, find_primitive
from ..core import ArrayValue, register, with_operands

_T = TypeVar("_T", bound="type[Delegating]")


class RefusesToMaterialise(ImplicitArray, abstract=True):
    """A base class of Veneer types whose rules run but whose `materialise` raises."""

    name_in_quax: ClassVar[str]

    def materialise(self) -> Any:
        """Raise a `RuntimeError`."""
        raise RuntimeError(
            f"Refusing to materialise `{self.name_in_quax}` with `allow_materialise=False`."
        )


class Delegating(ArrayValue):
    """A Quax type that computes with an array type of ours."""

    @abc.abstractmethod
    def to_veneer(self) -> ImplicitArray:
        """Return the array of our type. It refuses to be materialized where this one does."""

    @abc.abstractmethod
    def from_veneer(self, ours: Any) -> Any:
        """Return a result of our rules as this type, with the settings of this array."""

    def materialise(self) -> Any:
        """Return the dense array, or raise where our type does."""
        return materialise_one(self.to_veneer())


def delegate(cls: _T, names: Iterable[str], operands: int = 2) -> None:
    """Register rules that run Veneer's rule of each primitive and convert the result to `cls`.

    With two operands, the other one may be of any type. Its own rules see what our rule computes
    with it, as in a nested `quaxify`.
    """
    other = ArrayLike | Value
    for name in names:
        for kinds in itertools.product((cls, other), repeat=operands):
            if cls in kinds:
                _register(find_primitive(name), cls, kinds)


def _register(primitive: Primitive, cls: type[Delegating], kinds: tuple[Any, ...]) -> None:
    def rule(*operands: Any, **params: Any) -> Any:
        bind = lambda *xs: primitive.bind(*xs, **primitive.get_bind_params(params))
        own = [isinstance(x, cls) for x in operands]
        values = [x.to_veneer() if o else x for o, x in zip(own, operands, strict=True)]
        others = [isinstance(x, Value) and not o for o, x in zip(own, operands, strict=True)]
        ours = {type(x) for x in itertools.compress(values, own)}

        def on_ours(*traced: Any) -> Any:
            rest = iter(traced)
            xs = [next(rest) if o else x for o, x in zip(others, values, strict=True)]
            return implicit(bind, lambda value: type(value) in ours)(*xs)

        out = redispatch(on_ours, *itertools.compress(values, others))
        return next(itertools.compress(operands, own)).from_veneer(out)

    register(primitive)(with_operands(rule, kinds))
