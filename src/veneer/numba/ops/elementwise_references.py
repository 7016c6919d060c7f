"""What elementwise primitives are in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..maths import instructions
from ..registry import perform

_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract,
    "neg": np.negative, "abs": np.absolute, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "square": np.square, "floor": np.floor, "ceil": np.ceil,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "expm1": np.expm1, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "sqrt": np.sqrt, "cbrt": np.cbrt, "is_finite": np.isfinite, "sign": np.sign,
    "copy": np.copy, "copy_p": np.copy, "stop_gradient": np.copy,
}  # fmt: skip


#: Functions whose branch cut has -0 on the side of 0.
_CUTS = {np.sqrt, np.arcsin, np.arccos, np.arcsinh, np.arccosh}


def _perform_ufunc(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*operands: Any, **_: Any) -> Any:
        if function in _CUTS and np.iscomplexobj(operands[0]):
            return function(operands[0] + 0)
        return function(*operands)

    return rule


@perform.register("mul")
def _(x: Any, y: Any, *, out_dtype: Any = None) -> Any:
    return np.multiply(x, y, dtype=out_dtype, casting="unsafe")


@perform.register("convert_element_type")
def _(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    source, target = np.asarray(x).dtype, np.dtype(new_dtype)
    if source.kind == "c" and target.kind != "c" and target.kind != "b":
        x = np.real(x)
    if source.kind not in "fV" or target.kind not in "iu":
        return np.asarray(x).astype(target)
    limits, wide = np.iinfo(target), np.asarray(x, np.float64)
    inside = np.where((wide > limits.min) & (wide < limits.max), wide, 0).astype(target)
    ends = np.where(wide >= limits.max, limits.max, np.where(wide <= limits.min, limits.min, 0))
    return np.where((wide > limits.min) & (wide < limits.max), inside, ends.astype(target))


@perform.register("div")
def _(x: Any, y: Any) -> Any:
    if np.asarray(x).dtype.kind not in "iu":
        return np.divide(x, y)
    return _each(instructions.quotient)(x, y)


@perform.register("rem")
def _(x: Any, y: Any) -> Any:
    if np.asarray(x).dtype.kind not in "iu":
        return np.fmod(x, y)
    return _each(instructions.remainder)(x, y)


@perform.register("integer_pow")
def _(x: Any, *, y: int) -> Any:
    power = np.power(x, np.asarray(abs(y), np.asarray(x).dtype))
    return (1 / power).astype(power.dtype) if y < 0 else power


@perform.register("pow")
def _(x: Any, y: Any) -> Any:
    return np.power(x, np.asarray(y).astype(np.asarray(x).dtype))


@perform.register("round")
def _(x: Any, *, rounding_method: Any) -> Any:
    if int(rounding_method) == 1:
        return np.rint(x)
    whole = np.trunc(x)
    return np.copysign(np.where(abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole), x).astype(
        x.dtype
    )


@perform.register("clamp")
def _(low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(low, x), high)


@perform.register("one_minus_square")
def _(x: Any) -> Any:
    return (1 - x) * (1 + x)


@perform.register("polynomial")
def _(x: Any, *coefficients: Any, **_: Any) -> Any:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


@perform.register("rsqrt")
def _(x: Any, **_: Any) -> Any:
    return (1 / np.sqrt(x)).astype(x.dtype)


@perform.register("logistic")
def _(x: Any, **_: Any) -> Any:
    return (1 / (1 + np.exp(-x))).astype(x.dtype)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """An instruction of numbers as a function of arrays."""

    def of_arrays(*operands: Any) -> Any:
        arrays = np.broadcast_arrays(*operands)
        out = np.empty(arrays[0].shape, arrays[0].dtype)
        for place in np.ndindex(out.shape):
            out[place] = function(*(array[place] for array in arrays))
        return out

    return of_arrays


for _shift in (
    instructions.shift_left,
    instructions.shift_right_logical,
    instructions.shift_right_arithmetic,
):
    perform.register(_shift.__name__)(_each(_shift))
perform.register("clz")(_each(instructions.leading_zeros))
perform.register("population_count")(_each(instructions.bit_count))
for _name, _ufunc in _UFUNCS.items():
    perform.register(_name)(_perform_ufunc(_ufunc))


def _of_scipy(name: str) -> Callable[..., Any]:
    def rule(x: Any, **_: Any) -> Any:
        import scipy.special  # SciPy comes with JAX

        return getattr(scipy.special, name)(x).astype(x.dtype)

    return rule


_SPECIAL = {"erf": "erf", "erfc": "erfc", "erf_inv": "erfinv", "lgamma": "gammaln"}
for _name, _scipy_name in _SPECIAL.items():
    perform.register(_name)(_of_scipy(_scipy_name))
perform.register("nextafter")(_perform_ufunc(np.nextafter))


@perform.register("complex")
def _(real: Any, imag: Any) -> Any:
    out = np.empty(np.broadcast_shapes(np.shape(real), np.shape(imag)), np.result_type(real, 1j))
    out.real, out.imag = real, imag
    return out


@perform.register("real")
def _(x: Any) -> Any:
    return np.real(x)


@perform.register("imag")
def _(x: Any) -> Any:
    return np.imag(x)


@perform.register("conj")
def _(x: Any, *, input_dtype: Any) -> Any:
    return np.conj(x).astype(np.result_type(x, np.complex64))
