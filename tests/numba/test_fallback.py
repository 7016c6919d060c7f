"""Primitives without a rule, which JAX runs with `fallback="jax"`."""

import ast
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer.numba import compiler
from veneer.numba.codegen.calls import Fallbacks
from veneer.numba.codegen.graph import trace
from veneer.numba.testing import python_program

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def squared(x):
    if np.any(x > 100):
        raise ValueError("too large for us")
    return np.square(x)


def f(x):
    """Call JAX in a loop, between compiled operations, with two results and half precision."""

    def step(carry, row):
        shapes = [jax.ShapeDtypeStruct((3,), dtype) for dtype in (np.float32, jnp.bfloat16)]
        call = lambda r: (squared(r), (r > 1).astype(jnp.bfloat16))
        square, more = jax.pure_callback(call, shapes, row * 2)
        return carry + square.sum(), more + 1

    return jax.lax.scan(step, jnp.float32(0), x)


LINE = f.__code__.co_firstlineno + 6


def imported_modules(source):
    """Return the names of the modules that a source imports."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    froms = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return froms + [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]


@pytest.fixture(scope="module")
def compiled():
    with pytest.warns(UserWarning, match="JAX runs") as told:
        result = vn.numba.compile(f, X, fallback="jax")
    (warning,) = told
    text = str(warning.message)
    assert f"'pure_callback', from {__file__}:{LINE}" in text
    assert "tens of microseconds" in text
    assert warning.filename == __file__
    return result


def test_jax_runs_primitives_without_a_rule(compiled):
    jax.tree.map(np.testing.assert_array_equal, compiled(X), f(X))
    assert "# pure_callback is run by JAX" in compiled.source
    assert not any("veneer" in module for module in imported_modules(compiled.source))


def test_errors_of_jax_are_raised(compiled):
    with pytest.raises(Exception, match="too large for us") as error:
        compiled(X + 100)
    frames = [entry.frame.f_locals for entry in error.traceback]
    assert not any("views" in frame for frame in frames)  # of freed memory
    jax.tree.map(np.testing.assert_array_equal, compiled(X), f(X))


def test_an_error_is_raised_in_its_own_thread(compiled):
    found = {}

    def work(n):
        for _ in range(20):
            try:
                found[n] = compiled(X + 100 * (n % 2))
            except Exception as error:
                found[n] = str(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        if n % 2:
            assert "too large for us" in found[n]
        else:
            jax.tree.map(np.testing.assert_array_equal, found[n], f(X))


def test_raw_raises_for_programs_that_call_jax(compiled):
    with pytest.raises(NotImplementedError, match=r"pure_callback.*funcify.register"):
        _ = compiled.raw


def test_python_can_run_the_program():
    fallbacks = Fallbacks()
    source = compiler.source_of(trace(f, (X,))[0], fallbacks)
    *results, finished = python_program(source)(X)
    jax.tree.map(np.testing.assert_array_equal, tuple(results), f(X))
    assert finished == 1
    assert python_program(source)(X + 100)[-1] == 0


def test_float64_stays_float64_in_a_call_without_x64():
    call = lambda x: jax.pure_callback(lambda x: x * 2, x, x) + 1
    x = np.full(2, 1 / 3)
    with jax.enable_x64(True), pytest.warns(UserWarning, match="pure_callback"):
        compiled = vn.numba.compile(call, x, fallback="jax")
    np.testing.assert_array_equal(compiled(x), x * 2 + 1)


def test_fallback_does_not_change_programs_with_rules():
    compiled = vn.numba.compile(lambda x: x * 2, X, fallback="jax")
    np.testing.assert_array_equal(compiled(X), X * 2)
    assert compiled.raw(X)[0, 1] == 2


def test_primitives_that_jax_cannot_run_raise():
    from jax.extend.core import Primitive

    unknown = Primitive("unknown_to_jax_too")
    unknown.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match=r"unknown_to_jax_too.*cannot compile it"):
        vn.numba.compile(lambda x: unknown.bind(x), X, fallback="jax")


def test_the_error_without_fallback_names_fallback():
    with pytest.raises(NotImplementedError, match="fallback='jax'"):
        vn.numba.compile(f, X)
