"""The algebra of units: that of astropy, which unxt shares, or of pint.

A unit is an object of one of these libraries, and the library is known by it; so neither is
imported before there is a unit, but for parsing a string. None stands for a number without a unit.
"""

import importlib
import sys
from typing import Any, SupportsFloat

Unit = Any

_CLASSES = {"astropy.units": "UnitBase", "pint": "Unit"}


def as_unit(unit: Any, like: Unit | None = None) -> Unit:
    """A unit, or a string as one: of the library of `like`, or else of astropy or of pint.

    **Raises:** TypeError for what is no unit. ValueError for a string that is none, and for a unit
    whose zero is not that of others (degrees Celsius, decibels): sums and multiples of such mean
    nothing. ImportError if there is no library to parse a string.
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
    """The product of powers of units, each given with its exponent; None if no unit is left."""
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
    """By what a value in one unit is multiplied to be in another.

    **Raises:** ValueError if they do not measure the same.
    """
    if unit is None and to is None:
        return 1.0
    known: Any = to if unit is None else unit
    old, new = (known / known if x is None else x for x in (unit, to))
    _check_same_library(old, new)
    if old == new:
        return 1.0
    # Both libraries can be told globally of units that are equivalent in some field, by functions
    # that need not be linear: not here.
    if _library(old) == "pint":
        if old.dimensionality == new.dimensionality:
            return float((1.0 * old).m_as(new))
    elif old.is_equivalent(new, equivalencies=None):
        return float(old.to(new, equivalencies=None))
    raise ValueError(f"{show(unit)} cannot be converted to {show(to)}")


def is_convertible(unit: Unit | None, to: Unit | None) -> bool:
    """Whether two units measure the same."""
    try:
        factor(unit, to)
    except ValueError:
        return False
    return True


def radians(unit: Unit | None) -> Unit | None:
    """The unit in which an angle is a number: none, or astropy's radian."""
    if unit is not None and _library(unit) == "astropy.units":
        radian = sys.modules["astropy.units"].rad
        return radian if is_convertible(unit, radian) else None
    return None


def show(unit: Unit | None) -> str:
    """A unit as messages show it."""
    return "a number" if unit is None else str(unit) or "dimensionless"


def _library(unit: Any) -> str | None:
    for name, cls in _CLASSES.items():
        module = sys.modules.get(name)
        if module is not None and isinstance(unit, getattr(module, cls)):
            return name
    return None


def _check_same_library(one: Unit, other: Unit) -> None:
    libraries = {_library(one), _library(other)}
    if len(libraries) > 1:
        raise ValueError(
            f"{one} and {other} are units of two libraries, {' and '.join(map(str, libraries))}. "
            "Use units of one library."
        )


def _parse(text: str, like: Unit | None) -> Unit:
    # A pint unit's class is that of its registry.
    parse: Any = type(like) if _library(like) == "pint" else _parser(text)
    try:
        return parse(text)
    except AttributeError as error:  # pint.UndefinedUnitError
        raise ValueError(f"{text!r} is not a unit: {error}") from None


def _parser(text: str) -> Any:
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
    """A unit as itself, which astropy has for a product of that unit alone.

    Units of two classes differ as metadata does, though they are equal.
    """
    if getattr(unit, "scale", None) == 1 and unit.powers == [1]:
        return unit.bases[0]
    return unit
