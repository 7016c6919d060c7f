"""`Quantity`: an array with a unit of astropy (also used by unxt) or pint, and its rules.

A unit is an object of one of these libraries. Neither library is imported here, except to parse a
string. The unit of a dense array is None. The first part of this module computes with units. The
second part has a law for each primitive: a function from the operands to the units of the results.
"""

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core.primitives.leaves import has_no_dense_form
from .._core.primitives.programs import has_default_options
from .._core.rules import add_rule
from .._core.surface import Leaf, check_axes
from .._core.trace import redispatch
from .._core.tree import static
from .._core.value import Value, aval_of
from .._jax.primitives import find_primitive, jaxpr_as_fun
from .._jax.tracing import known_entries
from .label import Label

Unit = Any

_CLASSES = {"astropy.units": "UnitBase", "pint": "Unit"}


def as_unit(unit: Any, like: Unit | None = None) -> Unit:
    """Return a unit after checks, or parse a string that names a unit.

    A string is parsed by the library of the unit `like`. Without `like`, it is parsed by astropy,
    or by pint if astropy is not installed.

    **Raises:**

    - `TypeError` if `unit` is neither a unit nor a string.
    - `ValueError` if the string is not a unit, or the unit has an offset or is logarithmic, such as
      degrees Celsius and decibels. Such values cannot be added or multiplied.
    - `ImportError` if no library is installed that can parse the string.
    """
    if isinstance(unit, str):
        unit = _parse(unit, like)
    library = _library(unit)
    if library is None:
        raise TypeError(
            f"a unit must be a unit of astropy, unxt or pint, or a string, not {unit!r}"
        )
    if library == "pint" and not _is_multiple_of_base_units(unit):
        raise ValueError(
            f"{unit} is not a multiple of base units, so its values cannot be added or multiplied. "
            "Use its base unit (kelvin), or a unit of differences (delta_degC)."
        )
    return _simplest(unit)


def product(*factors: tuple[Unit | None, SupportsFloat]) -> Unit | None:
    """Return the product of powers of units, or None if all units cancel.

    Each factor is a pair `(unit, exponent)`. The unit None is dimensionless.
    """
    total = None
    for unit, exponent in factors:
        if unit is None:
            continue
        exponent = float(exponent)
        power = unit ** (int(exponent) if exponent.is_integer() else exponent)
        if total is not None:
            _check_same_library(total, power)
        total = power if total is None else total * power
    if total is None or total == total / total:
        return None
    return _simplest(total)


def factor(unit: Unit | None, to: Unit | None) -> float:
    """Return the factor that converts values from one unit to another.

    **Raises:** `ValueError` if the units have different dimensions.
    """
    if unit is None and to is None:
        return 1.0
    known: Any = to if unit is None else unit
    dimensionless = known / known
    old, new = (dimensionless if x is None else x for x in (unit, to))
    _check_same_library(old, new)
    if old == new:
        return 1.0
    # Ignore the equivalencies that both libraries can enable globally. They may be nonlinear.
    if _library(old) == "pint":
        if old.dimensionality == new.dimensionality:
            return float((1.0 * old).m_as(new))
    elif old.is_equivalent(new, equivalencies=None):
        return float(old.to(new, equivalencies=None))
    raise ValueError(f"{show(unit)} cannot be converted to {show(to)}")


def is_convertible(unit: Unit | None, to: Unit | None) -> bool:
    """Return whether two units have the same dimension."""
    try:
        factor(unit, to)
    except ValueError:
        return False
    return True


def radians(unit: Unit | None) -> Unit | None:
    """Return the radian of astropy if `unit` is an angle of astropy, or None.

    For pint, radians are dimensionless.
    """
    if unit is None or _library(unit) != "astropy.units":
        return None
    radian = sys.modules["astropy.units"].rad
    return radian if is_convertible(unit, radian) else None


def show(unit: Unit | None) -> str:
    """Return the text of a unit for error messages: "a number" if the unit is None."""
    return "a number" if unit is None else str(unit) or "dimensionless"


def _library(unit: Any) -> str | None:
    """Return the name of the module that defines a unit, such as "pint", or None for a non-unit."""
    for name, cls in _CLASSES.items():
        module = sys.modules.get(name)
        if module is not None and isinstance(unit, getattr(module, cls)):
            return name
    return None


def _check_same_library(first: Unit, second: Unit) -> None:
    libraries = {_library(first), _library(second)}
    if len(libraries) > 1:
        raise ValueError(
            f"{first} and {second} are units of two libraries, "
            f"{' and '.join(map(str, libraries))}. Use units of one library."
        )


def _parse(text: str, like: Unit | None) -> Unit:
    # Each registry of pint has its own class of units.
    parse: Any = type(like) if _library(like) == "pint" else _parser(text)
    try:
        return parse(text)
    except AttributeError as error:  # pint.UndefinedUnitError
        raise ValueError(f"{text!r} is not a unit: {error}") from None


def _parser(text: str) -> Any:
    """Return the function of astropy that parses units, or of pint if astropy is not installed.

    `text` is the unit to parse, for the error message if neither is installed.
    """
    for module in _CLASSES:
        try:
            library: Any = importlib.import_module(module)
        except ImportError:
            continue
        return library.get_application_registry().Unit if module == "pint" else library.Unit
    raise ImportError(f"to parse the unit {text!r}, install astropy or pint: pip install astropy")


def _is_multiple_of_base_units(unit: Unit) -> bool:
    import pint

    try:
        return (0.0 * unit).to_base_units().magnitude == 0.0
    except pint.PintError:
        return False


def _simplest(unit: Unit) -> Unit:
    # astropy has two equal objects for `m` and the product of `m` alone. As static fields of a
    # pytree they would differ.
    if getattr(unit, "scale", None) == 1 and unit.powers == [1]:
        return unit.bases[0]
    return unit


# Arrays with a unit.


@dataclass(frozen=True)
class Measured:
    """An operand of a primitive, as a law gets it: its numbers, its unit and its shape.

    The unit of a dense array is None.
    """

    array: Any
    unit: Unit | None
    shape: tuple[int, ...]

    @property
    def entries(self) -> np.ndarray | None:
        """The entries of a dense array without a unit, or None if they are not known."""
        is_unknown = self.unit is not None or isinstance(self.array, Value)
        return None if is_unknown else known_entries(self.array)

    @property
    def fits_any_unit(self) -> bool:
        """True for a constant whose entries are all 0, infinite or NaN."""
        entries = self.entries
        return entries is not None and bool(np.all((entries == 0) | ~np.isfinite(entries)))

    def in_unit(self, unit: Unit | None) -> Any:
        """Return the numbers of the operand, converted to `unit`."""
        is_same = self.unit is unit or (self.unit is None and self.fits_any_unit)
        return self.array if is_same else convert(self.array, self.unit, unit)


def convert(value: Any, unit: Unit | None, new_unit: Unit | None) -> Any:
    """Convert an array to another unit, in the same dtype.

    **Raises:** `ValueError` if the units have different dimensions, or the dtype cannot represent
    the conversion factor.
    """
    scale = factor(unit, new_unit)
    if scale == 1:
        return value
    dtype: Any = value.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        fits = float(jnp.finfo(dtype).tiny) <= scale <= float(jnp.finfo(dtype).max)
    else:
        is_integer = scale.is_integer() and jnp.issubdtype(dtype, jnp.integer)
        fits = is_integer and scale <= jnp.iinfo(dtype).max
    if not fits:
        raise ValueError(
            f"converting {show(unit)} to {show(new_unit)} multiplies by {scale}, which {dtype} "
            "cannot represent. Use astype first."
        )
    return redispatch(lambda x: x * np.asarray(scale, dtype), value)


#: A pair: a list with the unit to which each operand is converted, and the unit of all results or a
#: list with the unit of each result.
Outcome = tuple[Sequence[Unit | None], Any]
Law = Callable[..., Outcome]


def _share_unit(operands: Sequence[Measured], positions: Sequence[int]) -> Outcome:
    """Return the units for a primitive whose operands at `positions` must have the same unit.

    This unit is the unit of the first of these operands, apart from constants that fit any unit
    (0, infinity and NaN). The other operands, such as indices, must be dimensionless.

    **Returns:** a pair: a list with the unit to which each operand is converted, and the unit of
    the result, which is the shared unit.
    """
    candidates = [operands[i] for i in positions]
    units = [x.unit for x in candidates if x.unit is not None or not x.fits_any_unit]
    unit = units[0] if units else None
    return [unit if i in positions else None for i in range(len(operands))], unit


def _share_all(*operands: Measured, **params: Any) -> Outcome:
    return _share_unit(operands, range(len(operands)))


def _quotient(x: Measured, y: Measured, **params: Any) -> Outcome:
    if x.unit is not None and y.unit is not None and is_convertible(x.unit, y.unit):
        # The conversion to the smaller unit multiplies, so integers stay exact.
        smaller = y.unit if factor(x.unit, y.unit) >= 1 else x.unit
        return [smaller, smaller], None
    return [x.unit, y.unit], product((x.unit, 1), (y.unit, -1))


def _power(exponent: SupportsFloat) -> Law:
    return lambda x, **params: ([x.unit], product((x.unit, exponent)))


def _pow(x: Measured, y: Measured, **params: Any) -> Outcome:
    if x.unit is None or is_convertible(x.unit, None):
        return [None, None], None
    exponents = y.entries
    if exponents is None or exponents.size == 0 or np.any(exponents != exponents.flat[0]):
        raise ValueError(
            f"the exponent of {show(x.unit)} must be one number, known when the program is traced"
        )
    return [x.unit, None], product((x.unit, float(exponents.flat[0])))


def _triangular_solve(a: Measured, b: Measured, *, unit_diagonal: bool, **params: Any) -> Outcome:
    a_unit = None if unit_diagonal else a.unit  # a diagonal of ones has no unit
    return [a_unit, b.unit], product((b.unit, 1), (a_unit, -1))


def _results(*has_unit: bool) -> Law:
    """Return the law of a primitive with one operand and several results.

    `has_unit` has a bool per result: True if the result has the unit of the operand, False if it
    has no unit.
    """
    return lambda x, **params: ([x.unit], [x.unit if keeps else None for keeps in has_unit])


#: Laws by the names of their primitives.
_TABLE: dict[str, Law] = {
    "add clamp complex concatenate max min nextafter pad rem stack sub": _share_all,
    "atan2 eq eq_to ge gt le le_to lt lt_to ne": lambda *xs, **params: (_share_all(*xs)[0], None),
    "dynamic_update_slice": lambda *xs, **params: _share_unit(xs, [0, 1]),
    "scatter scatter-add scatter-max scatter-min scatter-sub": (
        lambda *xs, **params: _share_unit(xs, [0, 2])
    ),
    # jnp.where passes its first case last.
    "select_n": lambda *xs, **params: _share_unit(xs, range(len(xs) - 1, 0, -1)),
    # In a loop, JAX begins a sum of cotangents with an array of zeros that is not known to be zero.
    "add_any": lambda *xs, **params: _share_unit(
        xs, [i for i, x in enumerate(xs) if x.unit is not None]
    ),
    # The unit of the first operand. The others, such as indices, have none.
    "abs all_gather all_gather_invariant all_to_all broadcast_in_dim ceil conj "
    "convert_element_type cummax cummin cumsum dynamic_slice fft floor gather imag neg pbroadcast "
    "pmax pmin ppermute psum psum_invariant pvary real reduce_max reduce_min reduce_precision "
    "reduce_scatter reduce_sum reduce_window_max reduce_window_min reduce_window_sum reshape rev "
    "round scatter-mul slice split squeeze tile transpose unstack": (
        lambda x, *others, **params: ([x.unit, *(None for _ in others)], x.unit)
    ),
    "argmax argmin is_finite sign": lambda x, **params: ([x.unit], None),
    "sort": lambda *xs, **params: ([x.unit for x in xs], [x.unit for x in xs]),
    # Dimensionless operands and results.
    "acos acosh and asin asinh atan atanh bessel_i0e bessel_i1e cosh cumlogsumexp cumprod digamma "
    "erf erf_inv erfc exp exp2 expm1 igamma igammac lgamma log log1p log2 logistic lu not "
    "one_minus_square or reduce_and reduce_or sinh tanh xor": (
        lambda *xs, **params: ([None for _ in xs], None)
    ),
    "cos sin tan": lambda x, **params: ([radians(x.unit)], None),
    "conv_general_dilated dot_general mul ragged_dot_general": lambda x, y, *others, **params: (
        [x.unit, y.unit, *(None for _ in others)],
        product((x.unit, 1), (y.unit, 1)),
    ),
    "div": _quotient,
    "triangular_solve": _triangular_solve,
    "cbrt": _power(1 / 3),
    "cholesky sqrt": _power(0.5),
    "rsqrt": _power(-0.5),
    "square": _power(2),
    "integer_pow": lambda x, *, y, **params: _power(y)(x),
    "reduce_prod": lambda x, *, axes, **params: _power(math.prod(x.shape[i] for i in axes))(x),
    "pow": _pow,
    "eigh qr": _results(False, True),  # eigenvectors and eigenvalues, Q and R
    "svd": _results(True, False, False),  # singular values, and two matrices of vectors
    "top_k": _results(True, False),
}

LAWS = {name: law for names, law in _TABLE.items() for name in names.split()}


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
