"""Elementwise arithmetic, comparisons, logic and conversions, with their NumPy references.

An entry of the result is computed from one entry of each operand. `special` has the functions of
mathematics.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Index, LazyArray
from ..codegen.builder import Builder, broadcast_read
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, evaluate_jaxpr, fused, perform
from ..codegen.storage import wrap
from ..maths import complex as complex_maths
from ..maths import elementary, instructions
from ..maths.instructions import C_LIBRARY, scalar, select

Entry = Callable[..., str]


def entrywise(b: Builder, entry: Entry, *operands: ArrayExpr, cost: int = 1) -> ArrayExpr:
    """Return a lazy array whose entries are computed from one entry of each operand.

    **Arguments:**

    - `entry`: takes a loop nest and an expression for an entry of each operand. It returns an
        expression for an entry of the result.
    - `operands`: arrays that broadcast.
    - `cost`: about the number of instructions of an entry.
    """
    operands = tuple(
        b.hoist(x, [axis for axis, n in enumerate(x.shape) if n > 1]) for x in operands
    )

    def at(k: LoopNest, index: tuple[Index, ...]) -> str:
        return k.let(entry(k, *(broadcast_read(k, x, index) for x in operands)))

    return b.lazy(at, *operands, cost=cost)


def register(
    name: str, reference: Callable[..., Any] | None, cost: int = 1
) -> Callable[[Entry], Entry]:
    """Return a decorator that registers an elementwise primitive for native code and for NumPy.

    `reference` is a ufunc or a rule of `perform`, or None. The decorated function is called as
    `entry(k, dtype, *texts, **params)`. `texts` are expressions for an entry of each operand, which
    all have `dtype`. It returns an expression for the entry of the result.
    """
    if reference is not None:
        is_ufunc = isinstance(reference, np.ufunc)
        perform.register(name)(ufunc_rule(reference) if is_ufunc else reference)

    def decorate(entry: Entry) -> Entry:
        @fused(name)
        def _(b: Builder, *operands: ArrayExpr, **params: Any) -> ArrayExpr:
            if operands[0].dtype.kind == "c":
                if name in complex_maths.FUNCTIONS:
                    complex_entry = call_complex(complex_maths.FUNCTIONS[name], b.out.dtype)
                    return entrywise(b, complex_entry, *operands, cost=40)
                if name not in _COMPLEX:
                    raise Unsupported("dtype", f"{operands[0].dtype} is not supported.")
            if params.get("out_dtype") is not None:  # of "mul"
                operands = tuple(b.convert(x, params["out_dtype"]) for x in operands)
            dtype = operands[0].dtype
            bound = lambda k, *texts: entry(k, dtype, *texts, **params)
            return entrywise(b, bound, *operands, cost=cost)

        return entry

    return decorate


#: Primitives whose entries are correct for complex numbers, too.
_COMPLEX = set(
    "add sub mul div neg eq ne copy copy_p stop_gradient integer_pow square one_minus_square "
    "polynomial add_any".split()
)


def call_complex(function: Callable[..., Any], dtype: Any) -> Entry:
    """Return an entry function, which writes a call of `function` for an entry of a complex array.

    `function` computes in complex128. Entries of another complex dtype are converted to complex128,
    and the result to `dtype`.
    """

    def entry(k: LoopNest, *texts: str) -> str:
        result = k.call(function, *(f"np.complex128({text})" for text in texts))
        return f"{storage.type_name(np.dtype(dtype))}({result})"

    return entry


def ufunc_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of `perform` that calls `function` and ignores the rule's parameters."""
    return lambda *operands, **_: function(*operands)


def _apply_to_each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of `perform` that calls a function of scalars for each entry."""

    def rule(*operands: Any, **_: Any) -> Any:
        arrays = np.broadcast_arrays(*operands)
        out = np.empty(arrays[0].shape, arrays[0].dtype)
        for index in np.ndindex(out.shape):
            out[index] = function(*(array[index] for array in arrays))
        return out

    return rule


def _by_kind_in_numpy(
    float_function: Callable[..., Any], int_function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a rule of `perform` that uses one function for floats and another for integers.

    `float_function` is a ufunc, and `int_function` is a function of scalars.
    """
    apply_to_ints = _apply_to_each(int_function)

    def rule(x: Any, y: Any) -> Any:
        return (apply_to_ints if np.asarray(x).dtype.kind in "iu" else float_function)(x, y)

    return rule


def _by_kind(
    float_function: Callable[..., Any] | None,
    int_function: Callable[..., Any] | None = None,
    bool_symbol: str = "",
) -> Entry:
    """Return a function that writes the call of a scalar function for an entry, by kind of dtype.

    `float_function` is called for floats, and `int_function` for integers. For bools, the operator
    `bool_symbol` is used. A kind without a function is not supported.
    """

    def entry(k: LoopNest, dtype: np.dtype, *texts: str, **_: Any) -> str:
        if dtype.kind == "b" and bool_symbol:
            return f" {bool_symbol} ".join(texts)
        function = int_function if dtype.kind in "iu" else float_function
        if function is None or dtype.kind == "b":
            raise Unsupported("dtype", f"{dtype} is not supported.")
        return wrap(k.call(function, *texts), dtype)

    return entry


# Operators.


def _register_operators() -> None:
    operators: dict[str, tuple[str, Callable[..., Any] | None]] = {
        "add": ("+", np.add), "add_any": ("+", np.add), "sub": ("-", np.subtract),
        "mul": ("*", None), "and": ("&", np.bitwise_and), "or": ("|", np.bitwise_or),
        "xor": ("^", np.bitwise_xor), "eq": ("==", np.equal), "ne": ("!=", np.not_equal),
        "lt": ("<", np.less), "le": ("<=", np.less_equal), "gt": (">", np.greater),
        "ge": (">=", np.greater_equal),
    }  # fmt: skip
    for name, (symbol, function) in operators.items():

        def entry(k: Any, dtype: np.dtype, x: str, y: str, symbol: str = symbol, **_: Any) -> str:
            text = f"{x} {symbol} {y}"
            return text if symbol[0] in "=!<>" else wrap(text, dtype)

        register(name, function)(entry)


_register_operators()


@perform.register("mul")
def _(x: Any, y: Any, *, out_dtype: Any = None) -> Any:
    return np.multiply(x, y, dtype=out_dtype, casting="unsafe")


@register("neg", np.negative)
def _(k: LoopNest, dtype: np.dtype, x: str) -> str:
    return wrap(f"{storage.literal(0, dtype)} - {x}", dtype) if dtype.kind in "iu" else f"-{x}"


@register("not", np.invert)
def _(k: LoopNest, dtype: np.dtype, x: str) -> str:
    return f"not {x}" if dtype.kind == "b" else wrap(f"~{x}", dtype)


@register("square", np.square)
def _(k: LoopNest, dtype: np.dtype, x: str) -> str:
    return wrap(f"{x} * {x}", dtype)


@register("one_minus_square", lambda x: (1 - x) * (1 + x))
def _(k: LoopNest, dtype: np.dtype, x: str) -> str:
    one = storage.literal(1, dtype)
    if dtype.kind in "iu":
        return wrap(f"{one} - {x} * {x}", dtype)
    return f"({one} - {x}) * ({one} + {x})"  # exact where x is near 1


@register("div", _by_kind_in_numpy(np.divide, instructions.quotient), cost=4)
def _quotient_entry(k: LoopNest, dtype: np.dtype, x: str, y: str) -> str:
    if dtype.kind == "c":
        return call_complex(complex_maths.quotient_c128, dtype)(k, x, y)
    return k.call(instructions.quotient, x, y) if dtype.kind in "iu" else f"{x} / {y}"


@perform.register("integer_pow")
def _(x: Any, *, y: int) -> Any:
    power = np.power(x, np.asarray(abs(y), np.asarray(x).dtype))
    return (1 / power).astype(power.dtype) if y < 0 else power


@register("integer_pow", None, cost=3)
def _(k: LoopNest, dtype: np.dtype, x: str, *, y: int) -> str:
    one = storage.literal(1, dtype)
    power, square, left = "", x, abs(y)
    while left:
        if left & 1:
            power = k.let(wrap(f"{power} * {square}", dtype)) if power else square
        left >>= 1
        if left:
            square = k.let(wrap(f"{square} * {square}", dtype))
    return _quotient_entry(k, dtype, one, power or one) if y < 0 else power or one


def _evaluate_polynomial(x: Any, *coefficients: Any, **_: Any) -> Any:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


@register("polynomial", _evaluate_polynomial, cost=8)
def _(k: LoopNest, dtype: np.dtype, x: str, *coefficients: str, **_: Any) -> str:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = k.let(f"{total} * {x} + {coefficient}")
    return total


@register("clamp", lambda low, x, high: np.minimum(np.maximum(low, x), high), cost=2)
def _(k: LoopNest, dtype: np.dtype, low: str, x: str, high: str) -> str:
    if dtype.kind == "b":
        return f"({low} | {x}) & {high}"
    return k.call(instructions.minimum, k.let(k.call(instructions.maximum, low, x)), high)


def _round_in_numpy(x: Any, *, rounding_method: Any) -> Any:
    if int(rounding_method) == 1:
        return np.rint(x)
    whole = np.trunc(x)
    rounded = np.where(abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole)
    return np.copysign(rounded, x).astype(x.dtype)


@register("round", _round_in_numpy)
def _(k: LoopNest, dtype: np.dtype, x: str, *, rounding_method: Any) -> str:
    return k.call(instructions.rint if int(rounding_method) == 1 else elementary.round_away, x)


register("rem", _by_kind_in_numpy(np.fmod, instructions.remainder), cost=20)(
    _by_kind(C_LIBRARY["fmod"], instructions.remainder)
)
register("abs", np.absolute)(_by_kind(instructions.fabs, elementary.abs_int))
register("max", np.maximum)(_by_kind(instructions.maximum, instructions.maximum, "|"))
register("min", np.minimum)(_by_kind(instructions.minimum, instructions.minimum, "&"))
register("floor", np.floor)(_by_kind(instructions.floor))
register("ceil", np.ceil)(_by_kind(instructions.ceil))
for _name in ("copy", "copy_p", "stop_gradient"):
    register(_name, ufunc_rule(np.copy), cost=0)(lambda k, dtype, x, **_: x)


@fused("is_finite")
def _(b: Builder, x: ArrayExpr) -> ArrayExpr:
    infinity = storage.literal(np.inf, x.dtype)
    return entrywise(b, lambda k, x: f"{k.call(instructions.fabs, x)} < {infinity}", x)


perform.register("is_finite")(ufunc_rule(np.isfinite))


@fused("pow")
def _(b: Builder, x: ArrayExpr, y: ArrayExpr) -> ArrayExpr:
    dtype = x.dtype
    if dtype.kind == "c":
        power = call_complex(complex_maths.pow_c128, dtype)
        return entrywise(b, power, x, b.convert(y, dtype), cost=60)

    def entry(k: LoopNest, base: str, exponent: str) -> str:
        return k.call(C_LIBRARY["pow"], base, storage.cast(k, exponent, y.dtype, dtype))

    return entrywise(b, entry, x, y, cost=30)


perform.register("pow")(lambda x, y: np.power(x, np.asarray(y).astype(np.asarray(x).dtype)))


# Conversions.


@fused("convert_element_type")
def _(b: Builder, x: ArrayExpr, **_: Any) -> ArrayExpr:
    source, target = x.dtype, np.dtype(b.out.dtype)
    may_be_wider = isinstance(x, LazyArray) and x.cost > 0  # not rounded to its dtype yet

    def entry(k: LoopNest, text: str) -> str:
        text = k.let(storage.round_to(k, text, source)) if may_be_wider else text
        return storage.cast(k, text, source, target)

    return entrywise(b, entry, x)


@perform.register("convert_element_type")
def _(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    source, target = np.asarray(x).dtype, np.dtype(new_dtype)
    if source.kind == "c" and target.kind != "c" and target.kind != "b":
        x = np.real(x)
    if source.kind not in "fV" or target.kind not in "iu":
        return np.asarray(x).astype(target)
    limits, wide = np.iinfo(target), np.asarray(x, np.float64)
    is_inside = (wide > limits.min) & (wide < limits.max)
    inside = np.where(is_inside, wide, 0).astype(target)
    ends = np.where(wide >= limits.max, limits.max, np.where(wide <= limits.min, limits.min, 0))
    return np.where(is_inside, inside, ends.astype(target))


# Bits.

register("population_count", _apply_to_each(instructions.bit_count))(
    _by_kind(None, instructions.bit_count)
)
register("clz", _apply_to_each(instructions.leading_zeros))(
    _by_kind(None, instructions.leading_zeros)
)
for _shift in (
    instructions.shift_left,
    instructions.shift_right_logical,
    instructions.shift_right_arithmetic,
):
    register(_shift.__name__, _apply_to_each(_shift))(_by_kind(None, _shift))


@scalar
def next_bits(bits, other, x, y):
    """Return the bits of the next 16-bit float from `x` towards `y`.

    `bits` are the bits of `x`, and `other` are the bits of `y`.
    """
    from_zero = np.uint16(select(y < x, np.uint16(0x8001), np.uint16(1)))
    step = select((x < y) == (x > np.float32(0)), np.int64(1), np.int64(-1))
    moved = select(x == np.float32(0), from_zero, np.uint16(np.int64(bits) + step))
    return select(x == y, other, moved)


@register("nextafter", np.nextafter, cost=20)
def _(k: LoopNest, dtype: np.dtype, x: str, y: str) -> str:
    if dtype.kind not in "fV":
        raise Unsupported("dtype", f"{dtype} is not supported.")
    if dtype.itemsize > 2:
        return k.call(C_LIBRARY["nextafter"], x, y)
    x_bits, y_bits = (k.let(storage.encode(k, text, dtype)) for text in (x, y))
    neighbor = storage.decode(k, k.let(k.call(next_bits, x_bits, y_bits, x, y)), dtype)
    return k.call(select, f"{x} == {x} and {y} == {y}", k.let(neighbor), f"{x} + {y}")


def _to_bits(k: LoopNest, text: str, dtype: np.dtype) -> str:
    """Convert an expression for a number of `dtype` to an unsigned integer with the same bits."""
    text = storage.encode(k, text, dtype)
    like = np.dtype(f"u{dtype.itemsize}")
    if storage.stored_dtype(dtype) == like:
        return k.let(text)
    return k.let(k.call(instructions.reinterpreted, text, storage.literal(0, like)))


def _from_bits(k: LoopNest, text: str, dtype: np.dtype) -> str:
    """Convert an expression for an unsigned integer to the number of `dtype` with the same bits."""
    stored = storage.stored_dtype(dtype)
    if stored != np.dtype(f"u{dtype.itemsize}"):
        text = k.call(instructions.reinterpreted, text, storage.literal(0, stored))
    return k.let(storage.decode(k, text, dtype))


@fused("bitcast_convert_type")
def _(b: Builder, x: ArrayExpr, *, new_dtype: Any) -> ArrayExpr:
    source, target = x.dtype, np.dtype(new_dtype)
    if "c" in (source.kind, target.kind):
        raise Unsupported("new_dtype", "bits of complex numbers are not supported.")
    narrow, wide = sorted((source.itemsize, target.itemsize))
    width, count = 8 * narrow, wide // narrow
    unsigned = storage.type_name(np.dtype(f"u{target.itemsize}"))

    def same_size(k: LoopNest, index: tuple[Index, ...]) -> str:
        return _from_bits(k, _to_bits(k, k.read(x, index), source), target)

    def split(k: LoopNest, index: tuple[Index, ...]) -> str:
        bits = _to_bits(k, k.read(x, index[:-1]), source)
        part = f"np.uint64({bits}) >> np.uint64({index[-1] * width})"
        return _from_bits(k, k.let(f"{unsigned}({part})"), target)

    def joined(k: LoopNest, index: tuple[Index, ...]) -> str:
        parts = [_to_bits(k, k.read(x, (*index, Index((), n))), source) for n in range(count)]
        shifted = [f"(np.uint64({part}) << np.uint64({n * width}))" for n, part in enumerate(parts)]
        return _from_bits(k, k.let(f"{unsigned}({' | '.join(shifted)})"), target)

    if count == 1:
        return b.lazy(same_size, x, cost=1)
    if target.itemsize < source.itemsize:
        x = b.force_costly(x)
        return b.lazy(split, x, cost=count)
    return b.lazy(joined, x, cost=count)


@perform.register("bitcast_convert_type")
def _(x: Any, *, new_dtype: Any) -> Any:
    target = np.dtype(new_dtype)
    if target.itemsize == x.dtype.itemsize:
        return x.view(target)
    if target.itemsize < x.dtype.itemsize:
        return np.ascontiguousarray(x)[..., None].view(target)
    return np.ascontiguousarray(x).view(target)[..., 0]


def _round_to_bits(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    """Round floats to fewer exponent and mantissa bits, as XLA does.

    Ties are rounded to even, and results that would be denormal become zero.
    """
    limits = jnp.finfo(x.dtype)
    like = np.dtype(f"u{x.dtype.itemsize}").type
    bits = lax.bitcast_convert_type(x, like)
    dropped = limits.nmant - mantissa_bits
    if dropped > 0:
        odd = (bits >> like(dropped)) & like(1)
        bits = bits + odd + like((1 << (dropped - 1)) - 1)
        bits = bits & like((1 << limits.bits) - (1 << dropped))
    rounded = lax.bitcast_convert_type(bits, x.dtype)
    if exponent_bits < limits.nexp:
        max_exponent = (1 << (exponent_bits - 1)) - 1
        size = jnp.abs(rounded)
        rounded = jnp.where(size >= 2.0 ** (max_exponent + 1), jnp.copysign(jnp.inf, x), rounded)
        rounded = jnp.where(size < 2.0 ** (1 - max_exponent), jnp.copysign(0, x), rounded)
    return jnp.where(jnp.isnan(x), x, rounded)


def _reduce_precision_jaxpr(x: Any, params: Any) -> Any:
    function = functools.partial(_round_to_bits, **params)
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))


@fused("reduce_precision")
def _(b: Builder, x: ArrayExpr, **params: Any) -> list[ArrayExpr]:
    return b.inline(_reduce_precision_jaxpr(x, params), b.force_costly(x))


@perform.register("reduce_precision")
def _(x: Any, **params: Any) -> Any:
    return evaluate_jaxpr(_reduce_precision_jaxpr(x, params), x)
