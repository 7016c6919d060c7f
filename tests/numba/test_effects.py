"""Debugging effects of a program: run by JAX, omitted with a warning, or rejected."""

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

import veneer as vn


def looped(x, show):
    """Show `x` in each of three steps."""

    def step(i, x):
        show(x)
        return x + i

    return jax.lax.fori_loop(0, 3, step, x)


def shown_by_callback(seen):
    return lambda x: looped(x, lambda x: jax.debug.callback(lambda x: seen.append(float(x)), x))


def printed(x):
    return looped(x, lambda x: jax.debug.print("x is {x}", x=x))


PRINTED = f"{printed.__code__.co_filename}:{printed.__code__.co_firstlineno + 1} "


def test_a_warning_names_the_line_of_an_omitted_effect():
    with pytest.warns(UserWarning, match=f"leaves out 'debug.*', from {PRINTED}"):
        f = vn.numba.compile(printed, 1.0)
    assert f(1.0) == 4


def test_with_fallback_jax_runs_the_effect():
    seen = []
    with pytest.warns(UserWarning, match="JAX runs 'debug_callback'"):
        f = vn.numba.compile(shown_by_callback(seen), 1.0, fallback="jax")
    assert f(1.0) == 4
    jax.effects_barrier()
    assert seen == [1, 1, 2]


@pytest.mark.filterwarnings("ignore:vn.numba leaves out")
def test_references_and_native_code_omit_effects():
    vn.numba.compare_numba_and_py(printed, [np.float32(1)], native=False)
    vn.numba.compare_jax_and_py(shown_by_callback([]), [np.float32(1)])


def acting(seen):
    def f(x):
        io_callback(lambda x: seen.append(float(x)), None, x)
        return x + 1

    return f


def test_an_effect_with_unused_results_is_kept():
    with pytest.raises(NotImplementedError, match="no rule for the primitive 'io_callback'"):
        vn.numba.compile(acting([]), 1.0)
    seen = []
    with pytest.warns(UserWarning, match="JAX runs 'io_callback'"):
        f = vn.numba.compile(acting(seen), 1.0, fallback="jax")
    assert f(2.0) == 3
    assert seen == [2]
