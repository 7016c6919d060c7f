"""`Unitful` and its dimensions, as in `quax.examples.unitful`."""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ..core import ArrayValue, register

__all__ = ["Dimension", "Unitful", "kilograms", "meters", "seconds"]


class Dimension:
    """A base unit, such as `meters`. Each instance is a different unit, even with an equal name.

    **Arguments:**

    - `name`: the name that is shown.
    """

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __lt__(self, other: "Dimension") -> bool:
        # Equinox flattens the arguments of a module, and JAX sorts the keys of a dict.
        return (self.name, id(self)) < (other.name, id(other))


kilograms = Dimension("kg")
meters = Dimension("m")
seconds = Dimension("s")


class _Units(dict):
    """The exponents of a unit. It is hashable, as the metadata of a pytree must be."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _as_units(units: Dimension | dict[Dimension, int]) -> _Units:
    exponents = {units: 1} if isinstance(units, Dimension) else units
    return _Units({dimension: n for dimension, n in exponents.items() if n != 0})


class Unitful(ArrayValue):
    """An array with a unit, such as meters per second. Operations without a rule raise an error.

    As in Quax, it has rules for sums, products, integer powers, `<` and broadcasts. Others raise a
    `ValueError`. `veneer.types.Quantity` has units of astropy or pint, and rules for almost all of
    JAX.

    **Arguments:**

    - `array`: the array.
    - `units`: a `Dimension`, or a dict of exponents, such as `{meters: 1, seconds: -2}`.
      Exponents of 0 are dropped.

    >>> import jax.numpy as jnp, veneer.interop.quax as quax
    >>> from veneer.interop.quax.examples.unitful import Unitful, meters, seconds
    >>> speed = Unitful(jnp.array(3.0), {meters: 1, seconds: -1})
    >>> quax.quaxify(lambda x: x**2)(speed).units
    {m: 2, s: -2}
    """

    array: ArrayLike
    units: dict[Dimension, int] = eqx.field(static=True, converter=_as_units)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        return jax.core.ShapedArray(jnp.shape(self.array), jnp.result_type(self.array))

    def materialise(self) -> Any:
        """Raise a `ValueError`, because the dense array would lose the unit."""
        raise ValueError("Refusing to materialise Unitful array.")


def _check_same_units(what: str, x: Unitful, y: Unitful) -> None:
    if x.units != y.units:
        raise ValueError(f"Cannot {what} two arrays with units {x.units} and {y.units}.")


@register(lax.add_p)
def _(x: Unitful, y: Unitful, **params: Any) -> Unitful:
    _check_same_units("add", x, y)
    return Unitful(lax.add_p.bind(x.array, y.array, **params), x.units)


@register(lax.lt_p)
def _(x: Unitful, y: Unitful, **params: Any) -> Any:
    _check_same_units("compare", x, y)
    return lax.lt_p.bind(x.array, y.array, **params)


@register(lax.mul_p)
def _(x: Unitful, y: Unitful, **params: Any) -> Unitful:
    units = Counter(x.units)
    units.update(y.units)  # which adds exponents
    return Unitful(lax.mul_p.bind(x.array, y.array, **params), units)


@register(lax.mul_p)
def _(x: ArrayLike, y: Unitful, **params: Any) -> Unitful:
    return Unitful(lax.mul_p.bind(x, y.array, **params), y.units)


@register(lax.mul_p)
def _(x: Unitful, y: ArrayLike, **params: Any) -> Unitful:
    return Unitful(lax.mul_p.bind(x.array, y, **params), x.units)


@register(lax.integer_pow_p)
def _(x: Unitful, *, y: int) -> Unitful:
    units = {dimension: y * exponent for dimension, exponent in x.units.items()}
    return Unitful(lax.integer_pow_p.bind(x.array, y=y), units)


@register(lax.broadcast_in_dim_p)
def _(x: Unitful, **params: Any) -> Unitful:
    return Unitful(lax.broadcast_in_dim_p.bind(x.array, **params), x.units)
