"""Functions of mathematics: elementary and special functions, and complex numbers.

The package `maths` implements elementary functions. A special function is a JAX function, defined
here or in JAX, which is traced into each program, so that its steps fuse with the operations around
it. Half precision is computed in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax.primitives import get_special_implementation
from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Index, scalar_expr
from ..codegen.builder import Builder, broadcast_read
from ..codegen.graph import graph_of
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, evaluate_jaxpr, funcify, fused, perform
from ..maths import elementary
from .elementwise import entrywise, register, ufunc_rule

# Elementary functions.

#: Functions in which JAX ignores the sign of a zero on a branch cut.
_CUTS = {np.sqrt, np.arcsin, np.arccos, np.arcsinh, np.arccosh}

_UFUNCS: dict[str, Any] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "expm1": np.expm1, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "sqrt": np.sqrt, "cbrt": np.cbrt, "sign": np.sign,
}  # fmt: skip
_SCIPY = {"erf": "erf", "erfc": "erfc", "erf_inv": "erfinv", "lgamma": "gammaln"}


def _ufunc_reference(function: Any) -> Callable[..., Any]:
    def rule(*operands: Any, **_: Any) -> Any:
        if function in _CUTS and np.iscomplexobj(operands[0]):
            return function(operands[0] + 0)  # -0 becomes 0
        return function(*operands)

    return rule


def _scipy_reference(name: str) -> Callable[..., Any]:
    def rule(x: Any, **_: Any) -> Any:
        import scipy.special  # SciPy comes with JAX

        return getattr(scipy.special, name)(x).astype(x.dtype)

    return rule


def _register_elementary(name: str, reference: Callable[..., Any], cost: int = 20) -> None:
    functions = elementary.functions_of(name)

    @register(name, reference, cost)
    def _(k: LoopNest, dtype: np.dtype, *texts: str, **_: Any) -> str:
        if name == "sign" and dtype.kind in "iu":
            return storage.wrap(k.call(elementary.sign_int, *texts), dtype)
        if dtype.kind not in "fV":
            raise Unsupported("dtype", f"{dtype} is not supported.")
        return k.call(functions[storage.computed_dtype(dtype)], *texts)


for _name, _ufunc in _UFUNCS.items():
    _register_elementary(_name, _ufunc_reference(_ufunc), {"sqrt": 1, "sign": 2}.get(_name, 20))
for _name, _scipy_name in _SCIPY.items():
    _register_elementary(_name, _scipy_reference(_scipy_name))
_register_elementary("rsqrt", lambda x, **_: (1 / np.sqrt(x)).astype(x.dtype))
_register_elementary("logistic", lambda x, **_: (1 / (1 + np.exp(-x))).astype(x.dtype))


# Complex numbers and their parts.


@fused("complex")
def _(b: Builder, real: ArrayExpr, imag: ArrayExpr) -> ArrayExpr:
    name = storage.type_name(np.dtype(b.out.dtype))
    return entrywise(b, lambda k, x, y: f"{name}(complex({x}, {y}))", real, imag)


@perform.register("complex")
def _(real: Any, imag: Any) -> Any:
    out = np.empty(np.broadcast_shapes(np.shape(real), np.shape(imag)), np.result_type(real, 1j))
    out.real, out.imag = real, imag
    return out


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


perform.register("real")(ufunc_rule(np.real))
perform.register("imag")(ufunc_rule(np.imag))


@perform.register("conj")
def _(x: Any, *, input_dtype: Any) -> Any:
    return np.conj(x).astype(np.result_type(x, np.complex64))


# Special functions.

#: About the number of instructions of an entry.
_COST = 100

Function = Callable[..., Any]


class _LoopBuilder(Builder):
    """A builder that writes all results into the loop nest `k`, as local variables.

    Without it, a long function would become deeply nested lazy arrays, and exceed Python's
    recursion limit.
    """

    def __init__(self, k: LoopNest):
        super().__init__()
        self._k = k

    def _force_if_shared(self, value: ArrayExpr, n_readers: int) -> ArrayExpr:
        return scalar_expr(self._k.let(self._k.read(value, ())), value.dtype)


def _trace_function(function: Function, *operands: Any) -> Any:
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return jax.make_jaxpr(function)(*avals)


def _wide_dtype(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def _broadcast_and_widen(function: Function) -> Function:
    """Wrap a function of float32 or float64 arrays of one shape.

    The wrapper also takes half precision, and arrays that broadcast.
    """

    def wrapped(*operands: Any) -> Any:
        dtype = operands[0].dtype
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        wide = [jnp.broadcast_to(x, shape).astype(_wide_dtype(dtype)) for x in operands]
        return function(*wide).astype(dtype)

    return wrapped


def _register_special_reference(name: str, function: Function) -> None:
    """Register the NumPy reference of the primitive `name`: a JAX function, run by NumPy rules."""
    function = _broadcast_and_widen(function)

    @perform.register(name)
    def _(*operands: Any) -> Any:
        return evaluate_jaxpr(_trace_function(function, *operands), *operands)


def _define(name: str, function: Function) -> None:
    """Define the elementwise primitive `name` by a JAX function without loops."""
    _register_special_reference(name, function)

    @fused(name)
    def _(b: Builder, *operands: ArrayExpr) -> ArrayExpr:
        dtype = operands[0].dtype
        wide = _wide_dtype(dtype)
        operands = tuple(b.convert(b.force_costly(x), wide) for x in operands)
        graph = graph_of(
            _trace_function(function, *(jax.ShapeDtypeStruct((), wide) for _ in operands))
        )

        def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
            texts = [broadcast_read(k, x, index) for x in operands]
            (result,) = _LoopBuilder(k).run(graph, [scalar_expr(text, wide) for text in texts])
            return k.read(result, ())

        return b.convert(b.lazy(entry, *operands, dtype=wide, cost=_COST), dtype)


def _define_with_loops(name: str, function: Function) -> None:
    """Define the primitive `name` by a JAX function whose loops run until all entries converge."""
    _register_special_reference(name, function)
    function = _broadcast_and_widen(function)

    @funcify.register(name)
    def _(b: Builder, *operands: ArrayExpr) -> list[ArrayExpr]:
        return b.inline(_trace_function(function, *operands), *map(b.force_costly, operands))


def _implementation_in_jax(name: str, *, with_dtype: bool = True) -> Function:
    """Return the JAX function to which JAX lowers the primitive `name`.

    With `with_dtype`, the function takes the dtype of the operands as a keyword.
    """
    function = get_special_implementation(name)

    def run(*operands: Any) -> Any:
        options = {"dtype": operands[0].dtype} if with_dtype else {}
        return function(*operands, **options)

    return run


# The digamma function by the Lanczos approximation, with g = 7 and 9 terms, as in XLA.

_G = 7.0
_LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283,
    771.3234287776530788486528258894, -176.61502916214059906584551354,
    12.507343278686904814458936853, -0.13857109526572011689554707,
    9.984369578019570859563e-6, 1.50563273514931155834e-7,
)  # fmt: skip


def _digamma(x: Any) -> Any:
    reflected = x < 0.5
    z = jnp.where(reflected, -x, x - 1)
    total, slope = jnp.full_like(z, 0.99999999999980993227684700473478), jnp.zeros_like(z)
    for n, coefficient in enumerate(_LANCZOS, 1):
        total, slope = total + coefficient / (z + n), slope - coefficient / ((z + n) * (z + n))
    log_t = np.log(_G + 0.5) + lax.log1p(z / (_G + 0.5))
    y = log_t + slope / total - _G / (z + _G + 0.5)
    turn = np.pi * (x + jnp.abs(jnp.floor(x + 0.5)))  # the cotangent is periodic
    y = jnp.where(reflected, y - np.pi * jnp.cos(turn) / jnp.sin(turn), y)
    y = jnp.where(x == 0, -jnp.inf, y)  # NaN before JAX 0.12
    return jnp.where((x < 0) & (x == jnp.floor(x)), jnp.nan, y)


# The Hurwitz zeta function by the Euler-Maclaurin formula: a sum of 9 terms, the integral of the
# others, and 12 corrections with the coefficients (2 k)! / B(2 k), as in Cephes and XLA.

_EULER_MACLAURIN = (
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1307674368000.0 / 691, 74724249600.0,
    -10670622842880000.0 / 3617, 5109094217170944000.0 / 43867, -802857662698291200000.0 / 174611,
    14101100039391805440000.0 / 77683, -1693824136731743669452800000.0 / 236364091,
)  # fmt: skip


def _zeta(x: Any, q: Any) -> Any:
    total, a = q**-x, q
    for _ in range(9):
        a = a + 1
        power = a**-x
        total = total + power
    # For large x the remaining terms are negligible, and their formula gives infinity times 0.
    small = jnp.abs(power) <= jnp.abs(total) * jnp.finfo(total.dtype).eps
    done, last = small & (q < jnp.inf), total
    total = total + power * a / (x - 1) - power / 2
    factor, power = x, power / a
    for n, coefficient in enumerate(_EULER_MACLAURIN):
        total = total + factor * power / coefficient
        factor = factor * (x + (2 * n + 1)) * (x + (2 * n + 2))
        power = power / (a * a)
    total = jnp.where(x < 1, jnp.nan, jnp.where(done, last, total))
    is_integer = q == jnp.floor(q)
    at_poles = jnp.where(x % 2 == 0, jnp.inf, jnp.nan)
    total = jnp.where((q <= 0) & is_integer, at_poles, total)
    total = jnp.where((q <= 0) & ~is_integer & (x != jnp.floor(x)), jnp.nan, total)
    return jnp.where(x == 1, jnp.inf, total)


def _polygamma(n: Any, x: Any) -> Any:
    sign = jnp.where(n % 2 == 0, -1, 1).astype(n.dtype)
    from_zeta = sign * jnp.exp(lax.lgamma(n + 1)) * lax.zeta(n + 1, x)
    value = jnp.where(n == 0, lax.digamma(x), from_zeta)
    return jnp.where((n != jnp.floor(n)) | (n < 0), jnp.nan, value)


# The scaled Bessel function of order 1: two Chebyshev series, for |x| <= 8 and for larger |x|, from
# Cephes.

_I1E_NEAR = (
    2.77791411276104639959e-18, -2.11142121435816608115e-17, 1.55363195773620046921e-16,
    -1.10559694773538630805e-15, 7.60068429473540693410e-15, -5.04218550472791168711e-14,
    3.22379336594557470981e-13, -1.98397439776494371520e-12, 1.17361862988909016308e-11,
    -6.66348972350202774223e-11, 3.62559028155211703701e-10, -1.88724975172282928790e-9,
    9.38153738649577178388e-9, -4.44505912879632808065e-8, 2.00329475355213526229e-7,
    -8.56872026469545474066e-7, 3.47025130813767847674e-6, -1.32731636560394358279e-5,
    4.78156510755005422638e-5, -1.61760815825896745588e-4, 5.12285956168575772895e-4,
    -1.51357245063125314899e-3, 4.15642294431288815669e-3, -1.05640848946261981558e-2,
    2.47264490306265168283e-2, -5.29459812080949914269e-2, 1.02643658689847095384e-1,
    -1.76416518357834055153e-1, 2.52587186443633654823e-1,
)  # fmt: skip
_I1E_FAR = (
    7.51729631084210481353e-18, 4.41434832307170791151e-18, -4.65030536848935832153e-17,
    -3.20952592199342395980e-17, 2.96262899764595013876e-16, 3.30820231092092828324e-16,
    -1.88035477551078244854e-15, -3.81440307243700780478e-15, 1.04202769841288027642e-14,
    4.27244001671195135429e-14, -2.10154184277266431302e-14, -4.08355111109219731823e-13,
    -7.19855177624590851209e-13, 2.03562854414708950722e-12, 1.41258074366137813316e-11,
    3.25260358301548823856e-11, -1.89749581235054123450e-11, -5.58974346219658380687e-10,
    -3.83538038596423702205e-9, -2.63146884688951950684e-8, -2.51223623787020892529e-7,
    -3.88256480887769039346e-6, -1.10588938762623716291e-4, -9.76109749136146840777e-3,
    7.78576235018280120474e-1,
)  # fmt: skip


def _chebyshev(x: Any, coefficients: tuple[float, ...]) -> Any:
    now = before = last = jnp.zeros_like(x)
    for coefficient in coefficients:
        now, before, last = x * now - before + coefficient, now, before
    return 0.5 * (now - last)


def _bessel_i1e(x: Any) -> Any:
    z = jnp.abs(x)
    near = _chebyshev(z * 0.5 - 2, _I1E_NEAR) * z
    far = _chebyshev(32 / z - 2, _I1E_FAR) / jnp.sqrt(z)
    return jnp.sign(x) * jnp.where(z <= 8, near, far)


_define("digamma", _digamma)
_define("zeta", _zeta)
_define("polygamma", _polygamma)
_define("bessel_i0e", _implementation_in_jax("bessel_i0e", with_dtype=False))
_define("bessel_i1e", _bessel_i1e)
_define_with_loops("igamma", _implementation_in_jax("igamma"))
_define_with_loops("igammac", _implementation_in_jax("igammac"))
_define_with_loops(
    "regularized_incomplete_beta", _implementation_in_jax("regularized_incomplete_beta")
)
_define_with_loops("igamma_grad_a", _implementation_in_jax("igamma_grad_a"))
_define_with_loops("random_gamma_grad", _implementation_in_jax("random_gamma_grad"))
