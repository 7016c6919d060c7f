"""`Quantity`: an array with a unit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.primitives.calls import has_default_options
from ..._core.primitives.labels import has_no_dense_form
from ..._core.rules import add_rule
from ..._core.transform import redispatch
from ..._core.tree import static
from ..._core.value import Value, aval_of
from ..._jax.primitives import find_primitive, jaxpr_as_fun
from ..axes import Leaf, check_axes
from .label import Label
from .unit_laws import LAWS, Measured, convert
from .units import Unit, as_unit, is_convertible


class Quantity(Label):
    """An array `[...]` with a unit, such as `"m / s"`.

    A program that was written without units runs unchanged. Units are checked when it is traced:

    - Products, quotients and powers combine the units of their operands. If all units cancel, the
      result is a dense array.
    - Sums, comparisons, `concatenate` and `where` convert all operands to the unit of the first.
      Operands without a unit count as dimensionless, so adding 1.0 to a length raises an error.
      Constants that are 0, infinite or NaN take the unit of the other operands.
    - `exp`, `log` and similar functions accept only dimensionless operands. `sin`, `cos` and `tan`
      also accept angles.
    - Reductions, slices, transposes, sorts, indexing and cumulative sums keep the unit. Singular
      values, eigenvalues (`eigh`) and the `R` of QR have the unit of the matrix. A Cholesky factor
      has the square root of this unit.

    The unit is an object of astropy, which unxt uses too, or of pint. Strings are parsed by
    astropy, or by pint if astropy is not installed.

    `vn.implicit(jax.grad(f))` returns a gradient in the unit of `f` divided by the unit of the
    argument. `jax.grad(vn.implicit(f))` differentiates with respect to the stored numbers. Its
    result is labeled with the unit of the argument, which is not the unit of the gradient.

    **Materializes:** only dimensionless quantities. For all others, a primitive that has no rule
    for units raises `ValueError`. To drop the unit, use `.value`, or `.to(unit).value`.

    **Arguments:**

    - `value`: an array `[...]`, dense or implicit, or a number.
    - `unit`: a unit of astropy, unxt or pint, or a string such as `"m / s"`; static.

    **Raises:**

    - `TypeError` if `value` is not an array or a number, or `unit` is not a unit.
    - `ValueError` if a string is not a unit, or a unit of pint has an offset or is logarithmic,
      such as degrees Celsius or decibels.
    - `ImportError` if `unit` is a string, and neither astropy nor pint is installed.
    - `ValueError` in an operation whose operands have incompatible units, such as a sum of m and s.

    >>> import jax.numpy as jnp, veneer as vn
    >>> length, time = vn.types.Quantity(jnp.array([3.0, 4.0]), "km"), vn.types.Quantity(2.0, "s")
    >>> length / time, length.to("m").value
    (Quantity(f32[2], 'km / s'), Array([3000., 4000.], dtype=float32))
    >>> length + time
    Traceback (most recent call last):
        ...
    ValueError: add(Quantity(f32[2], 'km'), Quantity(f32[], 's')): s cannot be ...
    """

    value: Leaf | int | float | complex  # [...]
    unit: Unit = static()

    laws: ClassVar[Mapping[str, Callable]] = LAWS
    default_precedence: ClassVar[int] = -1  # `Named` comes first
    compiles_operators: ClassVar[bool] = False  # the entries of a constant would be unknown

    def __post_init__(self) -> None:
        if isinstance(self.value, int | float | complex):
            object.__setattr__(self, "value", jnp.asarray(self.value))
        check_axes(self, value="")
        if isinstance(self.value, Label):
            raise TypeError(
                f"Quantity takes an array without labels, not {self.value!r}. For names, write "
                "Named(Quantity(value, unit), names)."
            )
        object.__setattr__(self, "unit", as_unit(self.unit))

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the value."""
        return aval_of(self.value)

    def materialise(self) -> Any:
        """Return the dense array of a dimensionless quantity.

        **Raises:** `ValueError` if the unit has a dimension.
        """
        if not is_convertible(self.unit, None):
            raise ValueError(
                f"{self!r} has a unit, so it has no dense form. Use .value, or .to(unit).value."
            )
        return convert(self.value, self.unit, None)

    def to(self, unit: Any) -> "Quantity":
        """Convert the quantity to another unit.

        **Arguments:**

        - `unit`: the new unit, as in `Quantity`.

        **Raises:** `ValueError` if the units have different dimensions, or if the dtype of the
        value cannot represent the conversion factor, such as 0.001 in int32.
        """
        target = as_unit(unit, self.unit)
        return self.attach(convert(self.value, self.unit, target), target)

    def __repr__(self) -> str:
        try:
            shape = self.aval().str_short(short_dtypes=True)
        except TypeError:  # JAX replaced the value by another object
            shape = repr(self.value)
        return f"Quantity({shape}, {str(self.unit)!r})"

    @classmethod
    def apply_law(cls, law: Callable, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Return the values in the units that the law selects, and the units of the results.

        **Arguments:**

        - `law`: a function, called as `law(*operands, **params)`. It returns a pair. The first item
          is a list with the unit to which each operand is converted before the primitive runs. The
          second item is the unit of the results, or a list with a unit per result.
        - `values`, `params`: the operands and the parameters of the primitive.
        """
        operands = [
            Measured(x.value, x.unit, x.shape)
            if isinstance(x, Quantity)
            else Measured(x, None, aval_of(x).shape)
            for x in values
        ]
        units, result_units = law(*operands, **params)
        return [x.in_unit(unit) for x, unit in zip(operands, units, strict=True)], result_units

    @classmethod
    def attach(cls, array: Any, metadata: Unit | None) -> Any:
        """Return an array with a unit, or the array itself if the unit is None."""
        if metadata is None:
            return array
        quantity = Quantity.__new__(Quantity)
        quantity.__dict__.update(value=array, unit=metadata)
        return quantity


# Inline jitted functions of a few primitives, such as jnp.where and jnp.power. Inside a call, a
# constant 0 and a constant exponent would be unknown.

_FEW_EQUATIONS = 6


def _inline_call(*operands: Label | ArrayLike, jaxpr: Any, **params: Any) -> Any:
    has_dense_operand = any(not isinstance(x, Value) for x in operands)
    is_small = len(jaxpr.eqns) <= _FEW_EQUATIONS
    if not has_dense_operand or not is_small or not has_default_options(params):
        return NotImplemented
    if not any(map(has_no_dense_form, operands)):
        return NotImplemented
    return redispatch(jaxpr_as_fun(jaxpr), *operands)


add_rule(_inline_call, [find_primitive("jit")], structural=True, conditional=True)
