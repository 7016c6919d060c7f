"""Threads that trace at once do not disturb each other, and functions leave nothing behind."""

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from support import arrays
from support.array_types import MAKERS, assert_close

import veneer as vn
from veneer._core.primitives import programs, staging

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
VALUES = [
    arrays.once(functools.partial(make, arrays.key(i))) for i, make in enumerate(MAKERS.values())
]


def test_eight_threads_trace_at_once():
    def program(n):
        return jax.jit(
            lambda x, w: jax.lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w) + i, x) @ w
        )

    def work(thread):
        w = VALUES[thread % len(VALUES)]()
        results = []
        for n in range(1, 4):
            f = program(n)
            loss = lambda x, w, f=f: jnp.sum(vn.implicit(f)(x, w) ** 2)
            report = vn.explain(f)(X, w)
            results.append((jax.make_jaxpr(jax.grad(loss))(X, w), len(report.events)))
        return w, [str(jaxpr) for jaxpr, _ in results], [count for _, count in results]

    alone = [work(i) for i in range(len(VALUES))]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(16)))
    for i, (_, jaxprs, counts) in enumerate(together):
        _, expected_jaxprs, expected_counts = alone[i % len(VALUES)]
        assert counts == expected_counts
        assert jaxprs == expected_jaxprs


def test_threads_can_compute_at_once():
    w = VALUES[0]()
    f = vn.implicit(lambda x, w: jnp.tanh(x @ w).sum())
    expected = f(X, w)
    with ThreadPoolExecutor(8) as pool:
        for out in pool.map(lambda _: f(X, w), range(64)):
            assert_close(out, expected)


def test_a_thousand_functions_leave_nothing_behind():
    w = VALUES[0]()
    before = len(staging._staged), len(programs._compiled_functions)
    functions = []

    def use(i):
        f = jax.jit(lambda x, w: jnp.tanh(x @ w) + i)
        jax.make_jaxpr(vn.implicit(f))(X, w)
        functions.append(weakref.ref(f))

    for i in range(1000):
        use(i)
    gc.collect()
    assert sum(f() is not None for f in functions) <= 1
    assert (len(staging._staged), len(programs._compiled_functions)) <= (before[0] + 1, before[1])


def test_functions_run_eagerly_leave_nothing_behind():
    w = VALUES[0]()
    before = len(programs._compiled_functions)
    for i in range(5):
        vn.implicit(jax.jit(lambda x, w, i=i: x @ w + i))(X, w)
    gc.collect()
    assert len(programs._compiled_functions) <= before + 1
