"""The laws of units: in which units a primitive takes its operands, and the unit of its results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from ..._core.value import Value
from ..._jax.known_values import known_entries
from .units import Unit, factor, is_convertible, product, radians, show


@dataclass(frozen=True)
class Measured:
    """An operand's array and its unit, which is None for a number."""

    array: Any
    unit: Unit | None
    shape: tuple[int, ...]

    @property
    def entries(self) -> np.ndarray | None:
        """The values of a number or an array of numbers, if they are known."""
        hidden = self.unit is not None or isinstance(self.array, Value)
        return None if hidden else known_entries(self.array)

    @property
    def is_free(self) -> bool:
        """Whether it is the same in every unit, as a number that is 0, infinite or NaN is."""
        entries = self.entries
        return entries is not None and bool(np.all((entries == 0) | ~np.isfinite(entries)))


# The unit in which each operand is taken, and that of the result; a list, if of several.
Outcome = tuple[Sequence[Unit | None], Any]
Law = Callable[..., Outcome]


def _meeting(operands: Sequence[Measured]) -> Unit | None:
    """The unit in which operands meet: that of the first, unless it is the same in every unit."""
    units = [x.unit for x in operands if x.unit is not None or not x.is_free]
    return units[0] if units else None


def _same(*operands: Measured, **params: Any) -> Outcome:
    unit = _meeting(operands)
    return [unit] * len(operands), unit


def _sum_of_cotangents(*operands: Measured, **params: Any) -> Outcome:
    # JAX starts one over a loop at a dense zero, which cannot be seen to be zero there.
    unit = next(x.unit for x in operands if x.unit is not None)
    return [None if x.unit is None else unit for x in operands], unit


def _comparison(*operands: Measured, **params: Any) -> Outcome:
    return [_meeting(operands)] * len(operands), None


def _first(x: Measured, *others: Measured, **params: Any) -> Outcome:
    return [x.unit, *(None for _ in others)], x.unit


def _each(*operands: Measured, **params: Any) -> Outcome:
    units = [x.unit for x in operands]
    return units, units


def _forgotten(x: Measured, **params: Any) -> Outcome:
    return [x.unit], None


def _number(*operands: Measured, **params: Any) -> Outcome:
    return [None] * len(operands), None


def _angle(x: Measured, **params: Any) -> Outcome:
    return [radians(x.unit)], None


def _choice(which: Measured, *cases: Measured, **params: Any) -> Outcome:
    unit = _meeting(cases[::-1])  # jnp.where gives its first case as the last
    return [None, *(unit for _ in cases)], unit


def _update(x: Measured, update: Measured, *starts: Measured, **params: Any) -> Outcome:
    unit = _meeting([x, update])
    return [unit, unit, *(None for _ in starts)], unit


def _scatter(x: Measured, indices: Measured, update: Measured, **params: Any) -> Outcome:
    unit = _meeting([x, update])
    return [unit, None, unit], unit


def _product(x: Measured, y: Measured, *others: Measured, **params: Any) -> Outcome:
    unit = product((x.unit, 1), (y.unit, 1))
    return [x.unit, y.unit, *(None for _ in others)], unit


def _quotient(x: Measured, y: Measured, **params: Any) -> Outcome:
    if x.unit is not None and y.unit is not None and is_convertible(x.unit, y.unit):
        smaller = y.unit if factor(x.unit, y.unit) >= 1 else x.unit  # where integers stay such
        return [smaller, smaller], None
    return [x.unit, y.unit], product((x.unit, 1), (y.unit, -1))


def _power(exponent: SupportsFloat) -> Law:
    return lambda x, **params: ([x.unit], product((x.unit, exponent)))


def _integer_pow(x: Measured, *, y: Any, **params: Any) -> Outcome:
    return [x.unit], product((x.unit, y))


def _pow(x: Measured, y: Measured, **params: Any) -> Outcome:
    if x.unit is None or is_convertible(x.unit, None):
        return [None, None], None
    exponents = y.entries
    if exponents is None or exponents.size == 0 or np.any(exponents != exponents.flat[0]):
        raise ValueError(
            f"the exponent of {show(x.unit)} must be one number, known when the program is traced"
        )
    return [x.unit, None], product((x.unit, float(exponents.flat[0])))


def _reduce_prod(x: Measured, *, axes: Any, **params: Any) -> Outcome:
    return [x.unit], product((x.unit, math.prod(x.shape[i] for i in axes)))


def _triangular_solve(a: Measured, b: Measured, *, unit_diagonal: Any, **params: Any) -> Outcome:
    matrix = None if unit_diagonal else a.unit  # there are ones on the diagonal
    return [matrix, b.unit], product((b.unit, 1), (matrix, -1))


def _of_first(*units: bool) -> Law:
    """Of several results, whether each is in the unit of the operand, or a number."""
    return lambda x, **params: ([x.unit], [x.unit if own else None for own in units])


LAWS: dict[str, Law] = {
    **dict.fromkeys(
        "add clamp complex concatenate max min nextafter pad rem stack sub".split(), _same
    ),
    **dict.fromkeys("atan2 eq eq_to ge gt le le_to lt lt_to ne".split(), _comparison),
    **dict.fromkeys(
        "abs all_gather all_gather_invariant all_to_all broadcast_in_dim ceil conj "
        "convert_element_type cummax cummin cumsum dynamic_slice fft floor gather imag neg "
        "pbroadcast pmax pmin ppermute psum psum_invariant pvary real reduce_max reduce_min "
        "reduce_precision reduce_scatter reduce_sum reduce_window_max reduce_window_min "
        "reduce_window_sum reshape rev round scatter-mul slice split squeeze tile transpose "
        "unstack".split(),
        _first,
    ),
    **dict.fromkeys("argmax argmin is_finite sign".split(), _forgotten),
    **dict.fromkeys(
        "acos acosh and asin asinh atan atanh bessel_i0e bessel_i1e cosh cumlogsumexp cumprod "
        "digamma erf erf_inv erfc exp exp2 expm1 igamma igammac lgamma log log1p log2 logistic "
        "lu not one_minus_square or reduce_and reduce_or sinh tanh xor".split(),
        _number,
    ),
    **dict.fromkeys("cos sin tan".split(), _angle),
    **dict.fromkeys("conv_general_dilated dot_general mul ragged_dot_general".split(), _product),
    **dict.fromkeys("scatter scatter-add scatter-max scatter-min scatter-sub".split(), _scatter),
    "add_any": _sum_of_cotangents,
    "cbrt": _power(1 / 3),
    "cholesky": _power(0.5),
    "div": _quotient,
    "dynamic_update_slice": _update,
    "eigh": _of_first(False, True),  # vectors, values
    "integer_pow": _integer_pow,
    "pow": _pow,
    "qr": _of_first(False, True),
    "reduce_prod": _reduce_prod,
    "rsqrt": _power(-0.5),
    "select_n": _choice,
    "sort": _each,
    "sqrt": _power(0.5),
    "square": _power(2),
    "svd": _of_first(True, False, False),  # values, vectors, vectors
    "top_k": _of_first(True, False),
    "triangular_solve": _triangular_solve,
}
