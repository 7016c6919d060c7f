"""Rules that return a Numba function, and Numba functions that are rules."""

import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax.extend.core import Primitive

import veneer as vn

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def primitive(name, like=lambda x: x, run=None, many=False):
    """Return a primitive whose results have the shapes and dtypes that `like` gives."""
    result = Primitive(name)
    result.multiple_results = many
    result.def_abstract_eval(like)
    if run is not None:
        result.def_impl(run)
        vn.numba.perform.register(result)(run)
    return result


def running(x, *, axis, mode):
    """Return running sums or products, in NumPy."""
    return (np.cumsum if mode == "add" else np.cumprod)(x, axis=axis, dtype=x.dtype)


CUM = primitive("njit_cum", lambda x, *, axis, mode: x, running)


@vn.numba.funcify.register(CUM)
def cum_rule(b, x, *, axis, mode):
    if mode not in ("add", "mul"):
        raise NotImplementedError(f"cum has no mode {mode!r}")
    is_sum = mode == "add"

    @numba.njit
    def cum(x):
        out = x.copy()
        entries = out if axis == 0 else out.T
        for i in range(1, len(entries)):
            for j in range(entries.shape[1]):
                if is_sum:
                    entries[i, j] += entries[i - 1, j]
                else:
                    entries[i, j] *= entries[i - 1, j]
        return out

    return cum


TWICE = primitive("njit_twice", lambda x: x, lambda x: x * np.asarray(2, x.dtype))


@vn.numba.funcify.register("njit_twice")
@numba.njit
def twice_function(x):
    return x + x


def split_avals(x):
    return [jax.core.ShapedArray((), x.dtype), x, jax.core.ShapedArray((), jnp.dtype("int32"))]


SPLIT = primitive(
    "njit_split",
    split_avals,
    lambda x: [x.sum(), x - x.sum(), np.int32(x.size)],
    many=True,
)


@vn.numba.funcify.register([SPLIT])
def split_rule(b, x):
    size = np.int32(x.size)

    @numba.njit
    def split(x):
        total = x.sum()
        return total, x - total, size

    return split


def compare(f, *args):
    return vn.numba.compare_numba_and_py(f, args)


# What rules may be.


@pytest.mark.parametrize(
    ("axis", "mode", "dtype"),
    [(0, "add", "float32"), (1, "mul", "int32"), (0, "mul", "complex64"), (1, "add", "uint8")],
)
def test_a_rule_returns_an_njit_function(axis, mode, dtype):
    compare(lambda x: CUM.bind(x + 1, axis=axis, mode=mode) - 1, X.astype(dtype))


def test_an_error_of_a_rule_is_raised_unchanged():
    with pytest.raises(NotImplementedError, match="cum has no mode 'max'"):
        vn.numba.compile(lambda x: CUM.bind(x, axis=0, mode="max"), X)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3), "int8"), ((6,), "bfloat16"), ((), "float32"), ((), "float16"), ((2, 0), "float32")],
    ids=str,
)
def test_an_njit_function_can_be_a_rule(shape, dtype):
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    compare(lambda x: TWICE.bind(x) + TWICE.bind(x[::-1] if x.ndim else x), x)


def test_a_function_can_return_several_results():
    compare(lambda x: SPLIT.bind(x + 1), X)
    compare(lambda x: SPLIT.bind(x)[1], X.ravel())


def test_empty_operands_reach_the_function():
    total, rest, size = compare(lambda x: SPLIT.bind(x), X[:, :0])
    assert (total, rest.shape, size) == (0, (2, 0), 0)


def test_functions_get_bool_operands():
    flip = primitive("njit_flip", run=np.logical_not)

    @vn.numba.funcify.register(flip)
    def _(b, x):
        return numba.njit(lambda x: ~x) if x.ndim else numba.njit(lambda x: not x)

    compare(lambda x: flip.bind(x > 2), X)
    compare(lambda x: flip.bind(x > 2), np.float32(1))


def test_an_njit_function_receives_primitive_parameters():
    scaled = primitive(
        "njit_scaled",
        lambda x, *, by, parts, hint: x,
        lambda x, *, by, parts, hint: x * np.float32(by) + np.float32(sum(parts)),
    )

    @vn.numba.funcify.register(scaled)
    @numba.njit
    def _(x, by, parts):
        return x * np.float32(by) + np.float32(parts[0] + parts[1])

    bind = lambda x, by: scaled.bind(x, by=by, parts=(1, 2), hint=None)
    compare(lambda x: bind(x, 2) + bind(x, 2.5) + bind(x, True) + bind(x, 1), X)
    with pytest.raises(TypeError, match=r"takes no 'hint', but the equation has hint=7\. Add"):
        vn.numba.compile(lambda x: scaled.bind(x, by=1, parts=(1, 2), hint=7), X)
    with pytest.raises(TypeError, match=r"Numba has no type for by=<object .*>\. Register a rule"):
        vn.numba.compile(lambda x: bind(x, object()), X)


def test_numba_compiles_a_python_function_of_a_rule():
    plain = primitive("njit_plain", run=lambda x: x - 1)

    @vn.numba.funcify.register(plain)
    def _(b, x):
        def minus_one(x):
            return x - np.float32(1)

        return minus_one

    compare(lambda x: plain.bind(x), X)


def test_a_numba_ufunc_can_be_a_rule():
    third = primitive("njit_third", run=lambda x: x / np.float32(3))

    @vn.numba.funcify.register(third)
    @numba.vectorize(["float32(float32)"])
    def _(x):
        return x / np.float32(3)

    compare(lambda x: third.bind(x), X)


def test_a_compiled_program_can_be_the_function_of_a_rule():
    inner = primitive("njit_inner", run=lambda x: np.tanh(x))

    @vn.numba.funcify.register(inner)
    def _(b, x):
        return vn.numba.compile(jnp.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype)).raw

    compare(lambda x: inner.bind(x) + inner.bind(x[:1]), X)


def test_a_later_rule_replaces_an_earlier_rule():
    replaced = primitive("njit_replaced")
    f = lambda x: replaced.bind(x)
    vn.numba.funcify.register(replaced)(numba.njit(lambda x: x + np.float32(1)))
    first = vn.numba.compile(f, X)
    vn.numba.funcify.register(replaced)(numba.njit(lambda x: x + np.float32(2)))
    np.testing.assert_array_equal(vn.numba.compile(f, X)(X), X + 2)
    np.testing.assert_array_equal(first(X), X + 1)


def test_our_own_rules_can_be_replaced():
    before = vn.numba.funcify["tanh"]
    try:
        vn.numba.funcify.register(jax.lax.tanh_p)(
            lambda b, x, **_: numba.njit(lambda x: x * np.float32(10))
        )
        f = vn.numba.compile(lambda x: jnp.tanh(x) + 1, X)
    finally:
        vn.numba.funcify.register("tanh")(before)
    np.testing.assert_array_equal(f(X), X * 10 + 1)
    compare(jnp.tanh, X)


def test_only_primitives_and_names_can_be_registered():
    with pytest.raises(TypeError, match="a JAX primitive, its name, or a sequence of them"):
        vn.numba.funcify.register(3)


# Where they run.


def test_functions_run_in_scan():
    def f(x):
        def step(carry, row):
            total, rest, _ = SPLIT.bind(row * 2)
            return TWICE.bind(carry) + rest, total

        return jax.lax.scan(step, x[0], x, reverse=True)

    compare(f, X)


def test_functions_run_in_while():
    def f(x):
        below = lambda state: SPLIT.bind(state[1])[0] < 500
        step = lambda state: (state[0] + 1, TWICE.bind(state[1]))
        return jax.lax.while_loop(below, step, (0, x))

    compare(f, X)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_functions_run_in_branches(which):
    def f(n, x):
        branches = [TWICE.bind, lambda x: CUM.bind(x, axis=0, mode="add"), lambda x: x]
        return jax.lax.switch(n, branches, x) + 1

    compare(f, np.int32(which), X)


def test_functions_run_under_raw():
    def f(x, y):
        total, rest, n = SPLIT.bind(x)
        return total * TWICE.bind(y), rest, n

    raw = vn.numba.compile(f, X, np.float32(1)).raw

    @numba.njit
    def loop(x, n):
        out = np.float32(0)
        for i in range(n):
            total, rest, size = raw(x, i)
            out += total + rest[0, 0] + size
        return out

    assert loop(X, 3) == sum(15 * 2 * i - 15 + 6 for i in range(3))


def test_raw_runs_functions_in_threads_of_numba():
    raw = vn.numba.compile(lambda x: CUM.bind(x, axis=0, mode="add"), X).raw

    @numba.njit(parallel=True)
    def loop(n):
        out = np.zeros(n, np.float32)
        for i in numba.prange(n):
            out[i] = raw(np.full((2, 3), np.float32(i)))[1, 2]
        return out

    np.testing.assert_array_equal(loop(100), 2 * np.arange(100))


def test_threads_of_python_call_one_program():
    f = vn.numba.compile(lambda x: SPLIT.bind(CUM.bind(x, axis=0, mode="add"))[0], X)
    results = {}

    def work(n):
        results[n] = [float(f(X * n)) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [18.0 * n] * 50 for n in range(4)}


def test_functions_and_fallbacks_run_in_one_program():
    f = lambda x: TWICE.bind(jax.pure_callback(np.square, x, x)) + 1
    with pytest.warns(UserWarning, match="pure_callback"):
        compiled = vn.numba.compile(f, X, fallback="jax")
    np.testing.assert_array_equal(compiled(X), 2 * X**2 + 1)


def test_a_program_with_an_empty_result_runs():
    f = vn.numba.compile(lambda x: (TWICE.bind(x), {}), X)
    np.testing.assert_array_equal(f(X)[0], 2 * X)


def test_a_function_that_writes_to_its_operand_gets_a_copy():
    sort = primitive("njit_sorted", run=lambda x: np.sort(x)[::-1])

    @vn.numba.funcify.register(sort)
    @numba.njit
    def _(x):
        x.sort()
        return x[::-1]

    y = X.ravel()[::-1].copy()
    compare(lambda y: sort.bind(y) + y, y)


# Errors.


WRONG = primitive("njit_wrong", lambda *xs: jax.core.ShapedArray((2, 3), jnp.dtype("float32")))


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        (lambda x: x.astype(np.float64), r"array\(float64, 2d, C\)"),
        (lambda x: x[0], r"array\(float32, 1d, C\)|readonly array\(float32, 1d, C\)"),
        (lambda x: x[0, 0], "float32"),
        (lambda x: (x, x), r".*, .*"),
        (lambda x: None, "nothing"),
        (lambda x: [x], r"(reflected )?list\(.*\)(<iv=None>)?"),
    ],
    ids=["dtype", "rank", "number", "two", "none", "list"],
)
def test_the_error_names_wrong_result_types(function, gives):
    line = function.__code__.co_firstlineno

    @vn.numba.funcify.register(WRONG)
    def wrong_rule(b, x):
        return numba.njit(function)

    expected = (
        rf"the Numba function '<lambda>' \({re.escape(__file__)}:{line}\), "
        rf"by the rule of 'njit_wrong' \({re.escape(__file__)}:\d+\), "
        rf"gives ({gives}) for \(float32\[2, 3\]\), but JAX has \(float32\[2, 3\]\)\."
    )
    with pytest.raises(TypeError, match=expected):
        vn.numba.compile(lambda x: WRONG.bind(x), X)


def test_the_error_names_a_function_that_numba_rejects():
    vn.numba.funcify.register(WRONG)(lambda b, x: numba.njit(lambda x: x.no_such_thing))
    with pytest.raises(TypeError, match=r"(?s)'njit_wrong'.*cannot be compiled.*no_such_thing"):
        vn.numba.compile(lambda x: WRONG.bind(x), X)


def test_the_error_names_a_function_with_other_arguments():
    vn.numba.funcify.register(WRONG)(numba.njit(lambda x, y: x))
    with pytest.raises(TypeError, match=r"(?s)'njit_wrong', cannot be compiled.*argument.*'y'"):
        vn.numba.compile(lambda x: WRONG.bind(x), X)


@pytest.mark.parametrize("value", [None, 3, X, []], ids=["none", "number", "array", "empty"])
def test_the_error_names_a_rule_that_returns_no_function(value):
    vn.numba.funcify.register(WRONG)(lambda b, x: value)
    with pytest.raises(TypeError, match=r"(?s)'njit_wrong' gave .* an @numba.njit function"):
        vn.numba.compile(lambda x: WRONG.bind(x), X)


@pytest.fixture(scope="module")
def risky():
    """Return a program whose function gives another shape for 1, and raises for 2."""
    result = primitive("njit_risky")

    @vn.numba.funcify.register(result)
    @numba.njit
    def risky_function(x):
        if x[0, 0] == 1:
            return x[:, :1].copy()
        if x[0, 0] == 2:
            raise ValueError("too large for us")
        return x.copy()

    def f(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: result.bind(x) + 0, x)

    return vn.numba.compile(f, X)


def test_errors_of_a_function_are_raised(risky):
    with pytest.raises(ValueError, match="too large for us"):
        risky(X + 2)
    np.testing.assert_array_equal(risky(X), X)


def test_a_call_raises_for_results_of_wrong_shapes(risky):
    expected = r"'risky_function' .*gave arrays of shape \[2, 1\] for .*, but JAX has .*\[2, 3\]"
    with pytest.raises(ValueError, match=expected):
        risky(X + 1)


@pytest.mark.parametrize("number", [1, 2])
def test_raw_raises_if_a_function_fails(risky, number):
    @numba.njit
    def call(x):
        return risky_raw(x)

    risky_raw = risky.raw
    np.testing.assert_array_equal(call(X), X)
    with pytest.raises(RuntimeError, match="njit_risky is the Numba function risky_function"):
        call(X + np.float32(number))


def test_a_function_cannot_be_called_within_a_kernel():
    def f(x):
        return jax.lax.reduce(x, np.float32(0), lambda x, y: x + TWICE.bind(y), (0,))

    with pytest.raises(NotImplementedError, match="njit_twice"):
        vn.numba.compile(f, X)


# The cache.

PROGRAM = """
import sys
import numba, numpy as np, veneer as vn
from jax.extend.core import Primitive
from veneer.numba import machine

made = []
object_code = machine.object_code
machine.object_code = lambda source: made.append(source) or object_code(source)
p = Primitive("njit_cached")
p.def_abstract_eval(lambda x: x)
NUMBER = np.float32({number})
vn.numba.funcify.register(p)(numba.njit(lambda x: x * NUMBER))
f = vn.numba.compile(lambda x: p.bind(x) + 1, np.ones(2, np.float32))
print(f(np.ones(2, np.float32))[0], f.raw(np.ones(2, np.float32))[1], len(made))
"""


def test_the_cache_has_no_code_of_a_function(monkeypatch, tmp_path):
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path))
    lines = []
    for number in (3, 3, 5):
        command = [sys.executable, "-c", PROGRAM.format(number=number)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        lines.append(run.stdout.split())
    assert lines == [["4.0", "4.0", "1"], ["4.0", "4.0", "0"], ["6.0", "6.0", "0"]]


def test_equal_calls_share_a_wrapper(monkeypatch):
    from veneer.numba.codegen import njit_functions

    made = []
    compiled = njit_functions.NativeFunction._make_c_function
    count = lambda self, returned: made.append(self) or compiled(self, returned)
    monkeypatch.setattr(njit_functions.NativeFunction, "_make_c_function", count)
    f = lambda x: TWICE.bind(TWICE.bind(x)) + TWICE.bind(x[:1])
    vn.numba.compile(f, X)
    assert len(made) == 2
