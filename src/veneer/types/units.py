"""Products, powers and conversions of units of astropy (also used by unxt) or pint.

A unit is an object of one of these libraries. Neither library is imported here, except to parse a
string. The unit of a dense array is None.
"""

import importlib
import sys
from typing import Any, SupportsFloat

Unit = Any

_CLASSES = {"astropy.units": "UnitBase", "pint": "Unit"}


def as_unit(unit: Any, like: Unit | None = None) -> Unit:
    """Check a unit, or parse a string by the library of `like`, or else by astropy or pint.

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
    """Multiply powers of units, pairs `(unit, exponent)`. Return None if all units cancel."""
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
    """Return the text of a unit in error messages."""
    return "a number" if unit is None else str(unit) or "dimensionless"


def _library(unit: Any) -> str | None:
    """Return the module that defines a unit, or None for another object."""
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
    """Return the function of astropy, or else of pint, that parses units."""
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
