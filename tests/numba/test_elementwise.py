"""Elementwise primitives, at values where errors are likely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.5, 3.0, 1e-3, -7.25, 80.0, np.inf, -np.inf, np.nan]
INTS = [0, 1, 2, 3, 5, 7, 31, 100, 127]

UNARY = (
    "neg abs sign floor ceil is_finite exp exp2 log log1p expm1 tanh sqrt rsqrt logistic erf "
    "sin cos tan asin acos atan sinh cosh asinh acosh atanh cbrt erfc"
).split()
BINARY = "add sub mul div rem max min pow atan2 eq ne lt le gt ge nextafter".split()
OF_INTS = "neg abs sign not population_count clz".split()
BINARY_OF_INTS = (
    "add sub mul div rem max min and or xor eq lt ge shift_left shift_right_logical "
    "shift_right_arithmetic"
).split()


def _function(name):
    return getattr(lax, {"not": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
                         "xor": "bitwise_xor"}.get(name, name))  # fmt: skip


def of_floats(x, y):
    results = {name: _function(name)(x) for name in UNARY}
    results |= {name: _function(name)(x, y) for name in BINARY if name != "nextafter"}
    for method in lax.RoundingMethod:
        results[f"round {method}"] = lax.round(x, method)
    results |= {f"power {n}": lax.integer_pow(x, n) for n in (0, 1, 3, -2)}
    results["clamp"] = lax.clamp(jnp.asarray(-1, x.dtype), x, y)
    results["select"] = jnp.where(x > y, x, 1)
    for dtype in (jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, jnp.bfloat16, jnp.float16, bool):
        results[f"to {jnp.dtype(dtype)}"] = lax.convert_element_type(x * 3, dtype)
    return results


def of_ints(x, y):
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    results = {name: _function(name)(x) for name in OF_INTS if signed or name != "abs"}
    results |= {name: _function(name)(x, y) for name in BINARY_OF_INTS}
    results["power"] = lax.integer_pow(x, 5)
    results["floor_divide"] = x // y
    results["to float"] = lax.convert_element_type(x, jnp.float32)
    results["to int16"] = lax.convert_element_type(x, jnp.int16)
    results["select"] = lax.select_n(jnp.clip(y, 0, 2).astype(jnp.int32), x, y, x + y)
    return results


def _all_pairs(values, dtype):
    values = np.array(values, dtype)
    return [x.reshape(-1).copy() for x in np.meshgrid(values, values)]


def _differences(result, expected, ulps):
    """Return the names of results that differ from JAX by more than a few ulps."""
    wrong = []
    for name, want in expected.items():
        found, want = np.asarray(result[name]), np.asarray(want)
        assert (found.dtype, found.shape) == (want.dtype, want.shape), name
        if want.dtype.kind in "biu":
            wrong += [] if np.array_equal(found, want) else [name]
            continue
        limits = jnp.finfo(want.dtype)
        wide, exact = found.astype(np.float64), want.astype(np.float64)
        same = (wide == exact) | (np.isnan(wide) & np.isnan(exact))
        with np.errstate(all="ignore"):
            near = np.abs(wide - exact) <= ulps * float(limits.eps) * np.abs(exact)
        # XLA flushes denormals to zero.
        near |= (np.abs(wide) < limits.tiny) & (np.abs(exact) < limits.tiny)
        zeros = (exact == 0) & (wide == 0) & (np.signbit(exact) != np.signbit(wide))
        if not (same | near).all() or zeros.any():
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("dtype", "ulps"), [("float32", 20), ("bfloat16", 2), ("float16", 2), ("float64", 20)]
)
def test_float_results_agree_with_jax(dtype, ulps):
    with jax.enable_x64(dtype == "float64"):
        args = _all_pairs(FLOATS, jnp.dtype(dtype))
        result = vn.numba.compile(of_floats, *args)(*args)
        if args[0].dtype.itemsize == 2:
            result.pop("exp2")  # JAX's result is 20% off
        expected = jax.jit(of_floats)(*args)
        expected = {name: expected[name] for name in result}
        assert _differences(result, expected, ulps) == []


#: Where functions are at their limits in either precision; not where XLA has 0 for a denormal.
LIMITS = [1e-30, 1e-20, 8, 9, 20, 40, 200, 800, 1e4, 1e30, np.inf]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_reach_their_limits_where_jax_does(dtype):
    def f(x):
        functions = {name: getattr(lax, name) for name in [*UNARY, "erf_inv", "lgamma"]}
        functions |= {name: getattr(jax.nn, name) for name in ("gelu", "silu", "softplus", "elu")}
        return {name: function(x) for name, function in functions.items()}

    with jax.enable_x64(dtype == "float64"):
        limits = jnp.finfo(dtype)
        x = np.array([*LIMITS, 8 * float(limits.tiny), float(limits.max)], dtype)
        x = np.concatenate([x, -x, [np.nan]], dtype=dtype)
        result, expected = vn.numba.compile(f, x)(x), jax.jit(f)(x)
    for name, want in expected.items():
        want = np.asarray(want, np.float64)
        reached = np.isin(want, [0, 1, -1, np.inf, -np.inf]) | np.isnan(want)
        found = result[name][reached].astype(np.float64)
        np.testing.assert_array_equal(found, want[reached], name)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_integer_results_equal_jax(dtype):
    limits = np.iinfo(dtype)
    values = [*INTS, limits.max, limits.max - 1, limits.min, limits.min + 1]
    values += [-1, -2, -5] if limits.min else [limits.max // 2 + 1]
    with jax.enable_x64(True):
        args = _all_pairs(values, dtype)
        result = vn.numba.compile(of_ints, *args)(*args)
        assert _differences(result, jax.jit(of_ints)(*args), 0) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_python_runs_float_programs_with_equal_results(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = (np.asarray(FLOATS[k::2]).astype(dtype) for k in (0, 1))
        f = lambda x, y: {k: v for k, v in of_floats(x, y).items() if "round" not in k}
        vn.numba.compare_numba_and_py(f, [x, y], native=False, rtol=1e-5)


def test_python_runs_integer_programs_with_equal_results():
    x, y = _all_pairs([-128, -7, -1, 0, 1, 5, 100, 127], "int8")
    f = lambda x, y: {k: v for k, v in of_ints(x, y).items() if k not in ("power", "select")}
    vn.numba.compare_numba_and_py(f, [x, y], native=False)


def test_axes_of_size_1_broadcast():
    x, y = np.arange(3, dtype=np.float32)[:, None], np.arange(4, dtype=np.float32)[None]
    vn.numba.compare_numba_and_py(lambda x, y: jnp.where(x > y, x * y, x + y), [x, y], native=False)


def test_an_arithmetic_shift_of_unsigned_repeats_the_top_bit():
    x, y = _all_pairs([0, 1, 31, 32, 2**31, 2**32 - 1], "uint32")
    vn.numba.compare_jax_and_py(jax.lax.shift_right_arithmetic, [x, y])
    vn.numba.compare_numba_and_py(jax.lax.shift_right_arithmetic, [x, y], native=False)


def test_products_with_an_output_dtype_do_not_wrap():
    both = lambda x: [lax.mul(x, x, out_dtype=dtype) for dtype in ("int32", "float32", "int8")]
    args = [np.array([100, -7], np.int8)]
    vn.numba.compare_jax_and_py(both, args)
    vn.numba.compare_numba_and_py(both, args, native=False)


def test_conj_of_a_real_number_has_a_positive_imaginary_zero():
    f = lambda x: jnp.copysign(1, lax.imag(lax.conj(x)))
    args = [np.array([1, -2], np.float32)]
    vn.numba.compare_jax_and_py(f, args)
    vn.numba.compare_numba_and_py(f, args, native=False)


def of_bools(x, y):
    names = "max min eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor".split()
    results = {name: getattr(lax, name)(x, y) for name in names}
    results |= {"clamp": lax.clamp(x, y, ~x), "where": jnp.where(x, y, ~y), "not": ~x}
    results |= {f"to {d}": x.astype(d) for d in ("int8", "float32", "bfloat16")}
    for reduce in (jnp.all, jnp.any, jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.cumsum, jnp.sort):
        results[reduce.__name__] = reduce(jnp.stack([x, y]), axis=0)
    return results


@pytest.mark.usefixtures("current_emitters")
def test_bool_results_equal_jax():
    x, y = _all_pairs([False, True, True, False], "bool")
    assert _differences(vn.numba.compile(of_bools, x, y)(x, y), jax.jit(of_bools)(x, y), 0) == []
    vn.numba.compare_numba_and_py(of_bools, [x, y], native=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nextafter_is_exact(dtype):
    x = [1, 0, -2, 0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 6e-8, 65504, 0]
    y = [2, 1, 3, -1, 1, 0, 0, 1, np.nan, -1, -1, np.inf, -0.0]
    args = [np.asarray(v).astype(jnp.dtype(dtype)) for v in (x, y)]
    found, wanted = vn.numba.compile(lax.nextafter, *args)(*args), lax.nextafter(*args)
    found, wanted = (np.asarray(v, np.float32) for v in (found, wanted))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
