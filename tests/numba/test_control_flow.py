"""Loops and branches, and the memory of carried values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.numba import compiler
from veneer.numba.codegen.graph import trace

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def check(f, *args, native=False, **tolerances):
    """Compare the references with JAX, and the program with the references."""
    vn.numba.compare_jax_and_py(f, args, **tolerances)
    vn.numba.compare_numba_and_py(f, args, native=native, **tolerances)


def body_of_loop(f, *args):
    """Return the lines of the last loop of a program."""
    text = compiler.source_of(trace(f, args)[0]).text
    lines = text.partition("def program")[2].splitlines()
    start = max(n for n, line in enumerate(lines) if re.match(r" *(for|while) ", line))
    return [line.strip() for line in lines[start + 1 :] if line.startswith(" " * 8)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_scan_agrees_with_jax(length, reverse):
    def step(carry, y):
        total, same, last = carry
        return (total + y.sum() * same, same, y), (total * y, y > 0, last)

    def f(x):
        carry = (0.0, 2.0, jnp.ones(4))
        return lax.scan(step, carry, x[:length], length=length, reverse=reverse)

    check(f, X)


def test_scan_reads_computed_arrays():
    step = lambda x: lambda c, y: (c + y * x.T @ jnp.exp(x), None)
    check(lambda x: lax.scan(step(x), jnp.eye(4), jnp.arange(5)), X)
    check(lambda x: lax.map(lambda y: y * x[0] + x.T[0, 0], (x * 2)[:, ::-1]), X)


def test_carried_values_can_be_exchanged():
    def body(i, carry):
        a, b, c, d, e = carry
        return b, a + b, c[::-1] + e, (c + d * i).sum() * jnp.ones(4), d

    start = (1.0, 1.0, jnp.arange(4.0), jnp.ones(4), jnp.zeros(4))
    check(lambda n: lax.fori_loop(0, n, body, start), 5)


def test_carried_values_can_read_each_other_at_other_indices():
    def body(i, carry):
        x, y, n = carry
        return x.T + y.sum(), jnp.roll(y, 1) * x[0, 0] + n, n + y[0] + x[1, 2]

    start = (jnp.arange(9.0).reshape(3, 3), jnp.arange(4.0), 1.0)
    check(lambda n: lax.fori_loop(0, n, body, start), 3)


def test_scans_can_be_nested():
    def outer(carry, row):
        def inner(c, entry):
            return c * 0.5 + entry * carry.sum(), c

        last, all = lax.scan(inner, carry, row)
        return last, (all, carry, all.sum())

    check(lambda x: lax.scan(outer, jnp.ones(2), x), X)


def test_while_agrees_with_jax():
    def f(x, most):
        def goes_on(carry):
            return (carry[0] < most) & (carry[1].sum() < 100 * x.sum() ** 0)

        def body(carry):
            n, y, same = carry
            return n + 1, y * 2 + x[0] * same, same

        return lax.while_loop(goes_on, body, (0, jnp.abs(x[1]), 3.0))

    for most in (0, 3, 100):
        check(f, X, most)
    check(jax.vmap(f, (None, 0)), X, np.array([0, 2, 5]))


@pytest.mark.parametrize("which", [-7, 0, 1, 2, 9])
def test_switch_agrees_with_jax(which):
    branches = [
        lambda x, y: (x, y),
        lambda x, y: (x * 2, y + 1),
        lambda x, y: (x[::-1], y.sum() + y),
    ]
    check(lambda i, x: lax.switch(i, branches, x, jnp.exp(x)), which, X)


def test_cond_agrees_with_jax():
    def f(x, y):
        x, sign = lax.cond(x.sum() > y, lambda x: (x * y, 1), lambda x: (x, -1), x)
        return lax.cond(True, lambda x: x + sign, lambda x: x, x)

    check(f, X, -1.0)
    check(f, X, 1.0)
    check(jax.vmap(f, (None, 0)), X, np.array([-1.0, 1.0], np.float32))


def test_only_the_branch_for_the_cpu_is_compiled():
    f = lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=lambda x: x[::-1])
    g = lambda x: lax.platform_dependent(x, tpu=jnp.sin, default=jnp.cos)
    check(lambda x: f(x) + g(x), X)


def test_custom_linear_solve_agrees_with_jax():
    def f(x, y):
        half = lambda matvec, y: y / x[0, 0]
        return lax.custom_linear_solve(lambda y: x[0, 0] * y, y, half, half)

    check(f, X, X[1])
    check(jax.grad(lambda x, y: f(x, y).sum(), 1), X, X[1])


def rnn(weight, x):
    def step(h, x):
        h = jnp.tanh(h @ weight + x)
        return h, h

    last, all = lax.scan(step, jnp.zeros(4), x)
    return (last * all).sum()


def test_derivatives_of_scans_agree_with_jax():
    def f(weight, x):
        def step(carry, i):
            row = lax.dynamic_index_in_dim(x, i, keepdims=False)
            carry = lax.cond(i > 1, jnp.sin, lambda c: c * row, carry)
            return carry, carry[i]

        return rnn(weight, x) + lax.scan(step, x[0], jnp.arange(3))[1].sum()

    weight = np.eye(4, dtype=np.float32) * 0.5 + 0.1
    check(jax.value_and_grad(f, (0, 1)), weight, X, native=True, rtol=1e-4)


def test_carried_arrays_are_updated_in_place():
    def f(x):
        def body(i, carry):
            samples, x = carry
            return samples.at[i].set(x).at[i, 0].add(samples[i - 1, 0]), x * 2

        return lax.fori_loop(0, 5, body, (jnp.zeros((5, 3)), x))

    check(f, X[0, :3])
    text = compiler.source_of(trace(f, (X[0, :3],))[0]).text
    assert text.count("range(15)") == 1  # only where zeros are written, not in the loop


def test_an_iteration_copies_nothing():
    lines = body_of_loop(rnn, np.eye(4, dtype=np.float32), X)
    assert [re.match(r"[a-z_]+", line)[0] for line in lines] == ["dot_general_", "assign_"]


def test_results_of_iterations_survive_later_iterations():
    def f(x):
        def step(c, y):
            product = (y @ x.T).sum() * y
            return c + product @ product, product

        total, products = lax.scan(step, 0.0, x)
        return total, products, products @ x.T

    check(f, X)
