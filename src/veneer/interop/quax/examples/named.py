"""`NamedArray`, `Axis` and `trace`, as in `quax.examples.named`."""

import dataclasses
import itertools
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...._core.trace import redispatch
from ...._core.value import Value
from ...._jax.primitives import Primitive
from ..core import ArrayValue, register

__all__ = ["Axis", "NamedArray", "trace"]

_Array = TypeVar("_Array", bound=ArrayLike)


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """The name of an axis. Each instance is a different name.

    **Arguments:**

    - `size`: the size that the axis must have, or None for any size.
    """

    size: int | None


class NamedArray(ArrayValue, Generic[_Array]):
    """An array whose axes have names, which operations check and pass to their results.

    As in Quax, it has rules for sums, differences, products and `dot_general`, and a function
    `trace`. `veneer.types.Named` has strings as names, and rules for all operations.

    **Arguments:**

    - `array`: the array.
    - `axes`: a different `Axis` for each axis.
    - `allow_materialise`: whether other operations drop the names. If False, they raise a
      `RuntimeError`, and so does `shape`.

    **Raises:** `ValueError` if the number of axes or the size of an axis is wrong, or if an `Axis`
    occurs twice.

    >>> import jax.numpy as jnp, veneer.interop.quax as quax
    >>> from veneer.interop.quax.examples.named import Axis, NamedArray
    >>> rows, columns = Axis(2), Axis(None)
    >>> x = NamedArray(jnp.ones((2, 3)), (rows, columns))
    >>> y = quax.quaxify(jnp.matmul)(x, NamedArray(jnp.ones(3), (columns,)))
    >>> y.axes == (rows,), y.array.tolist()
    (True, [3.0, 3.0])
    """

    array: _Array
    axes: tuple[Axis, ...] = eqx.field(static=True)
    allow_materialise: bool = eqx.field(default=False, static=True)

    def __check_init__(self) -> None:
        shape = jnp.shape(self.array)
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"NamedArray takes each Axis once, got {self.axes}")
        if len(shape) != len(self.axes):
            raise ValueError(
                f"NamedArray takes an Axis for each axis of the array: got {len(self.axes)} for "
                f"an array of shape {shape}"
            )
        for size, axis in zip(shape, self.axes, strict=True):
            if axis.size not in (None, size):
                raise ValueError(f"{axis} cannot name an axis of size {size}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array. With `allow_materialise=False`, it raises a `RuntimeError`."""
        if not self.allow_materialise:
            raise RuntimeError(
                "Refusing to access the shape of a `NamedArray` with `allow_materialise=False`."
            )
        return jnp.shape(self.array)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        return self.array.aval() if isinstance(self.array, Value) else jax.typeof(self.array)

    def materialise(self) -> Any:
        """Return the array without names. Raise a `RuntimeError` if that is not allowed."""
        if not self.allow_materialise:
            raise RuntimeError(
                "Refusing to materialise `NamedArray` with `allow_materialise=False`."
            )
        return self.array

    def enable_materialise(self, allow_materialise: bool = True) -> "NamedArray":
        """Return the same array with the given `allow_materialise`."""
        return NamedArray(self.array, self.axes, allow_materialise)


def _bind(primitive: Primitive, x: Any, y: Any, params: dict[str, Any]) -> Any:
    return redispatch(lambda x, y: primitive.bind(x, y, **params), x, y)


def _register_elementwise(primitive: Primitive) -> None:
    @register(primitive)
    def _(x: NamedArray, y: NamedArray, **params: Any) -> NamedArray:
        if x.axes and y.axes and x.axes != y.axes:
            raise ValueError(f"Cannot broadcast named axes {x.axes} against {y.axes}.")
        return NamedArray(_bind(primitive, x.array, y.array, params), x.axes or y.axes)

    @register(primitive)
    def _(x: ArrayLike | ArrayValue, y: NamedArray, **params: Any) -> NamedArray:
        _check_is_number(x)
        return NamedArray(_bind(primitive, x, y.array, params), y.axes)

    @register(primitive)
    def _(x: NamedArray, y: ArrayLike | ArrayValue, **params: Any) -> NamedArray:
        _check_is_number(y)
        return NamedArray(_bind(primitive, x.array, y, params), x.axes)

    def _check_is_number(x: Any) -> None:
        shape = x.aval().shape if isinstance(x, Value) else jnp.shape(x)
        if shape:
            raise ValueError(
                f"Cannot apply {primitive.name} to a NamedArray and an array of shape {shape}, "
                "whose axes have no names: make it a NamedArray too."
            )


for _primitive in (lax.add_p, lax.mul_p, lax.sub_p):
    _register_elementwise(_primitive)


@register(lax.dot_general_p)
def _(x: NamedArray, y: NamedArray, *, dimension_numbers: Any, **params: Any) -> NamedArray:
    params["dimension_numbers"] = dimension_numbers
    pairs = [list(zip(*axes, strict=True)) for axes in dimension_numbers]
    out = _bind(lax.dot_general_p, x.array, y.array, params)  # JAX checks the numbers
    for verb, meeting in zip(("contract", "batch"), pairs, strict=True):
        for i, j in meeting:
            if x.axes[i] is not y.axes[j]:
                raise TypeError(
                    f"Cannot {verb} mismatched dimensions: axis {i} of {x.axes} meets axis {j} "
                    f"of {y.axes}."
                )
    axes = [x.axes[i] for i, _ in pairs[1]]
    for side, operand in enumerate((x, y)):
        used = {pair[side] for pair in itertools.chain(*pairs)}
        axes += [axis for i, axis in enumerate(operand.axes) if i not in used]
    return NamedArray(out, tuple(axes))


def trace(
    array: NamedArray, *, offset: int = 0, axis1: Axis, axis2: Axis, dtype: Any = None
) -> NamedArray:
    """Return the sum along a diagonal of the axes `axis1` and `axis2`, like `jax.numpy.trace`.

    `offset` and `dtype` are the arguments of `jax.numpy.trace`.

    **Raises:** `ValueError` if the array does not have one of the axes, or both are the same.
    """
    if axis1 is axis2:
        raise ValueError(f"trace takes two axes, got {axis1} twice")
    i, j = array.axes.index(axis1), array.axes.index(axis2)
    diagonal = lambda x: jnp.trace(x, offset=offset, axis1=i, axis2=j, dtype=dtype)
    left = tuple(axis for axis in array.axes if axis not in (axis1, axis2))
    return NamedArray(redispatch(diagonal, array.array), left)
