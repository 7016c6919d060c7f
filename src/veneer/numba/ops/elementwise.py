"""Elementwise primitives: an entry of the result is computed of one entry of each operand."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, LazyArray
from ..codegen.builder import Builder, broadcast_read
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..codegen.storage import wrapped
from ..maths import (
    complex as complex_maths,
)
from ..maths import (
    conversions,
    elementary,
    instructions,
    libm,
)
from ..registry import Unsupported, fused, perform

Entry = Callable[..., str]


def entrywise(b: Builder, entry: Entry, *operands: ArrayExpr, cost: int = 1) -> ArrayExpr:
    """The value whose entries are `entry(k, *texts)`, of those of operands that broadcast."""

    operands = tuple(
        b.repeated(x, [axis for axis, n in enumerate(x.shape) if n > 1]) for x in operands
    )

    def at(k: LoopNest, index: tuple[Index, ...]) -> str:
        return k.let(entry(k, *(broadcast_read(k, x, index) for x in operands)))

    return b.lazy(at, *operands, cost=cost)


def register(name: str, entry: Callable[..., str], cost: int = 1) -> None:
    """Registers `entry(k, dtype, *texts, **params)`, where all operands have one dtype."""

    @fused(name)
    def _(b: Builder, *operands: ArrayExpr, **params: Any) -> ArrayExpr:
        if operands[0].dtype.kind == "c":
            if name in complex_maths.FUNCTIONS:
                of_complex = _widened(complex_maths.FUNCTIONS[name], b.out.dtype)
                return entrywise(b, of_complex, *operands, cost=40)
            if name not in _COMPLEX:
                raise Unsupported("dtype", f"{operands[0].dtype} is not supported.")
        if params.get("out_dtype") is not None:  # of products, which are computed in it
            operands = tuple(b.converted(x, params["out_dtype"]) for x in operands)
        dtype = operands[0].dtype
        bound = lambda k, *texts: entry(k, dtype, *texts, **params)
        return entrywise(b, bound, *operands, cost=cost)


_COMPLEX = set(
    "add sub mul div neg eq ne copy copy_p stop_gradient integer_pow square one_minus_square "
    "polynomial add_any".split()
)


def _widened(function: Callable[..., Any], dtype: Any) -> Entry:
    """A function of complex128, for numbers of any complex dtype."""

    def entry(k: LoopNest, *texts: str) -> str:
        result = k.call(function, *(f"np.complex128({text})" for text in texts))
        return f"{storage.type_name(np.dtype(dtype))}({result})"

    return entry


# Arithmetic, and operators of Python's.


def _operator(symbol: str) -> Entry:
    def entry(k: LoopNest, dtype: np.dtype, x: str, y: str, **_: Any) -> str:
        return wrapped(f"{x} {symbol} {y}", dtype)

    return entry


def _comparison(symbol: str) -> Entry:
    return lambda k, dtype, x, y, **_: f"{x} {symbol} {y}"


for _name, _symbol in {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}.items():
    register(_name, _operator(_symbol))
for _name, _symbol in {"and": "&", "or": "|", "xor": "^"}.items():
    register(_name, _operator(_symbol))
_SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _symbol in _SYMBOLS.items():
    register(_name, _comparison(_symbol))


def _neg(k: LoopNest, dtype: np.dtype, x: str) -> str:
    return wrapped(f"{storage.literal(0, dtype)} - {x}", dtype) if dtype.kind in "iu" else f"-{x}"


def _not(k: LoopNest, dtype: np.dtype, x: str) -> str:
    return f"not {x}" if dtype.kind == "b" else wrapped(f"~{x}", dtype)


def _by_kind(
    floats: Callable[..., Any] | None, ints: Callable[..., Any] | None = None, bools: str = ""
) -> Entry:
    """A function by the kind of the dtype; of bools, an operator."""

    def entry(k: LoopNest, dtype: np.dtype, *texts: str, **_: Any) -> str:
        if dtype.kind == "b" and bools:
            return f" {bools} ".join(texts)
        function = ints if dtype.kind in "iu" else None if dtype.kind == "b" else floats
        if function is None:
            raise Unsupported("dtype", f"{dtype} is not supported.")
        return wrapped(k.call(function, *texts), dtype)

    return entry


def _div(k: LoopNest, dtype: np.dtype, x: str, y: str) -> str:
    if dtype.kind == "c":
        return _widened(complex_maths.quotient_c128, dtype)(k, x, y)
    return k.call(instructions.quotient, x, y) if dtype.kind in "iu" else f"{x} / {y}"


def _integer_pow(k: LoopNest, dtype: np.dtype, x: str, *, y: int) -> str:
    one = storage.literal(1, dtype)
    power, square, left = "", x, abs(y)
    while left:
        if left & 1:
            power = k.let(wrapped(f"{power} * {square}", dtype)) if power else square
        left >>= 1
        if left:
            square = k.let(wrapped(f"{square} * {square}", dtype))
    return _div(k, dtype, one, power or one) if y < 0 else power or one


def _sign(k: LoopNest, dtype: np.dtype, x: str) -> str:
    if dtype.kind in "iu":
        return wrapped(k.call(elementary.sign_int, x), dtype)
    return _of_floats("sign")(k, dtype, x)


def _round(k: LoopNest, dtype: np.dtype, x: str, *, rounding_method: Any) -> str:
    return k.call(instructions.rint if int(rounding_method) == 1 else elementary.round_away, x)


def _square(k: LoopNest, dtype: np.dtype, x: str) -> str:
    return wrapped(f"{x} * {x}", dtype)


def _one_minus_square(k: LoopNest, dtype: np.dtype, x: str) -> str:
    one = storage.literal(1, dtype)
    if dtype.kind in "iu":
        return wrapped(f"{one} - {x} * {x}", dtype)
    return f"({one} - {x}) * ({one} + {x})"  # exact where x is near 1


def _polynomial(k: LoopNest, dtype: np.dtype, x: str, *coefficients: str, **_: Any) -> str:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = k.let(f"{total} * {x} + {coefficient}")
    return total


def _clamp(k: LoopNest, dtype: np.dtype, low: str, x: str, high: str) -> str:
    if dtype.kind == "b":
        return f"({low} | {x}) & {high}"
    return k.call(instructions.minimum, k.let(k.call(instructions.maximum, low, x)), high)


register("neg", _neg)
register("not", _not)
register("div", _div, cost=4)
register("integer_pow", _integer_pow, cost=3)
register("square", _square)
register("one_minus_square", _one_minus_square)
register("polynomial", _polynomial, cost=8)
register("round", _round)
register("clamp", _clamp, cost=2)
register("abs", _by_kind(instructions.fabs, elementary.abs_int))
register("sign", _sign, cost=2)
register("max", _by_kind(instructions.maximum, instructions.maximum, "|"))
register("min", _by_kind(instructions.minimum, instructions.minimum, "&"))
register("rem", _by_kind(libm.fmod, instructions.remainder), cost=20)
register("population_count", _by_kind(None, instructions.bit_count))
register("clz", _by_kind(None, instructions.leading_zeros))
for _name in ("shift_left", "shift_right_logical", "shift_right_arithmetic"):
    register(_name, _by_kind(None, getattr(instructions, _name)))
for _name in ("floor", "ceil", "sqrt"):
    register(_name, _by_kind(getattr(instructions, _name)))
for _name in ("copy", "copy_p", "stop_gradient"):
    register(_name, lambda k, dtype, x, **_: x, cost=0)


@fused("optimization_barrier")
def _(b: Builder, *operands: ArrayExpr) -> list[ArrayExpr]:
    return [*operands]


@perform.register("optimization_barrier")
def _(*operands: Any) -> list[Any]:
    return [*operands]


@fused("is_finite")
def _(b: Builder, x: ArrayExpr) -> ArrayExpr:
    infinity = storage.literal(np.inf, x.dtype)
    return entrywise(b, lambda k, x: f"{k.call(instructions.fabs, x)} < {infinity}", x)


@fused("convert_element_type")
def _(b: Builder, x: ArrayExpr, **_: Any) -> ArrayExpr:
    source, target = x.dtype, np.dtype(b.out.dtype)
    computed = isinstance(x, LazyArray) and x.cost > 0  # perhaps with more bits than its dtype has

    def entry(k: LoopNest, text: str) -> str:
        text = k.let(storage.rounded(k, text, source)) if computed else text
        return storage.cast(k, text, source, target)

    return entrywise(b, entry, x)


@fused("pow")
def _(b: Builder, x: ArrayExpr, y: ArrayExpr) -> ArrayExpr:
    dtype = x.dtype
    if dtype.kind == "c":
        power = _widened(complex_maths.pow_c128, dtype)
        return entrywise(b, power, x, b.converted(y, dtype), cost=60)

    def entry(k: LoopNest, base: str, exponent: str) -> str:
        return k.call(libm.pow, base, storage.cast(k, exponent, y.dtype, dtype))

    return entrywise(b, entry, x, y, cost=30)


# Functions of mathematics.


def _of_floats(name: str) -> Entry:
    """The function for the dtype."""
    functions = elementary.functions_of(name)

    def entry(k: LoopNest, dtype: np.dtype, *texts: str, **_: Any) -> str:
        if dtype.kind not in "fV":
            raise Unsupported("dtype", f"{dtype} is not supported.")
        return k.call(functions[storage.computed_dtype(dtype)], *texts)

    return entry


def _nextafter(k: LoopNest, dtype: np.dtype, x: str, y: str) -> str:
    if dtype.itemsize > 2:
        return _of_floats("nextafter")(k, dtype, x, y)
    of_x, of_y = (k.let(storage.stored(k, text, dtype)) for text in (x, y))
    neighbour = storage.loaded(k, k.let(k.call(conversions.next_bits, of_x, of_y, x, y)), dtype)
    return k.call(instructions.select, f"{x} == {x} and {y} == {y}", k.let(neighbour), f"{x} + {y}")


register("nextafter", _nextafter, cost=20)
for _name in {*libm.NAMES, *elementary.FUNCTIONS} - {"pow", "nextafter", "sign"}:
    register(_name, _of_floats(_name), cost=20)


# Complex numbers and their parts.


@fused("complex")
def _(b: Builder, real: ArrayExpr, imag: ArrayExpr) -> ArrayExpr:
    name = storage.type_name(np.dtype(b.out.dtype))
    return entrywise(b, lambda k, x, y: f"{name}(complex({x}, {y}))", real, imag)


@fused("real")
def _(b: Builder, x: ArrayExpr) -> ArrayExpr:
    return entrywise(b, lambda k, x: f"{x}.real", x, cost=0)


@fused("imag")
def _(b: Builder, x: ArrayExpr) -> ArrayExpr:
    return entrywise(b, lambda k, x: f"{x}.imag", x, cost=0)


@fused("conj")
def _(b: Builder, x: ArrayExpr, *, input_dtype: Any) -> ArrayExpr:
    name = storage.type_name(np.dtype(b.out.dtype))
    if x.dtype.kind != "c":
        return entrywise(b, lambda k, x: f"{name}(complex({x}, 0.0))", x)
    return entrywise(b, lambda k, x: f"{name}(complex({x}.real, -{x}.imag))", x)
