"""jit inside, outside, nested, with static and donated arguments, and ahead of time."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from array_types import MAKERS, assert_close

import veneer as vn

X = jnp.linspace(-1.0, 1.0, 18).reshape(3, 6)
KEY = jax.random.key(1)

f = lambda x, w: jnp.tanh(x @ w) * 2


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "wrap",
    [
        vn.implicit,
        lambda f: jax.jit(vn.implicit(f)),
        lambda f: vn.implicit(jax.jit(f)),
        lambda f: jax.jit(vn.implicit(jax.jit(lambda x, w: jax.jit(f)(x, w)))),
    ],
    ids=["eager", "outside", "inside", "nested"],
)
def test_matmul(name, wrap):
    w = MAKERS[name](KEY)
    assert_close(wrap(f)(X, w), f(X, vn.materialise(w)))


def test_implicit_results_leave_jit_as_they_are():
    w = MAKERS["int4"](KEY)
    for wrap in (lambda f: jax.jit(vn.implicit(f)), lambda f: vn.implicit(jax.jit(f))):
        out = wrap(lambda w: (w, w.T))(w)
        assert [type(o) for o in out] == [vn.quant.QArray] * 2
        assert_close(out, (vn.materialise(w), vn.materialise(w).T))


def test_static_arguments():
    w = MAKERS["lora"](KEY)
    g = jax.jit(lambda x, w, n: x @ w * n, static_argnums=2)
    assert_close(vn.implicit(g)(X, w, 3), X @ vn.materialise(w) * 3)
    g = jax.jit(vn.implicit(lambda x, w, n: x @ w * n), static_argnums=2)
    assert_close(g(X, w, 3), X @ vn.materialise(w) * 3)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_leaves_are_taken():
    w = MAKERS["lora"](KEY)
    dense = vn.materialise(w)
    g = jax.jit(lambda w: w, donate_argnums=0)
    out = vn.implicit(g)(w)
    assert_close(out, dense)
    assert w.w.is_deleted()
    assert w.a.is_deleted()


def test_ahead_of_time():
    w = MAKERS["nf4"](KEY)
    compiled = jax.jit(vn.implicit(f)).lower(X, w).compile()
    assert_close(compiled(X, w), f(X, vn.materialise(w)))


def test_dense_weights_do_not_appear_for_lora():
    w = MAKERS["lora"](KEY, (512, 512))
    text = jax.jit(vn.implicit(lambda x, w: x @ w)).lower(jnp.ones((1, 512)), w).as_text()
    assert text.count("512x512") > 0  # the weight itself
    assert "add" in text
    assert "tensor<512x512xf32>, tensor<512x512xf32>" not in text  # no sum of two such


def test_a_jitted_function_that_captures_a_value():
    w = MAKERS["lora"](KEY)
    outer = lambda x, w: jax.jit(lambda x: x @ w)(x)
    assert_close(vn.implicit(outer)(X, w), X @ vn.materialise(w))


def test_a_second_call_stages_nothing_new():
    w = MAKERS["lora"](KEY)
    traces = []

    @jax.jit
    def g(x, w):
        traces.append(None)
        return x @ w

    for _ in range(3):
        vn.implicit(g)(X, w)
    assert len(traces) == 1


def test_staged_programs_are_freed_with_the_function():
    w = MAKERS["lora"](KEY)
    token = type("Token", (), {})()
    freed = weakref.ref(token)

    def scope(token):
        g = jax.jit(lambda x, w: (token, x @ w)[1])
        vn.implicit(g)(X, w)

    scope(token)
    del token
    jax.clear_caches()
    gc.collect()
    assert freed() is None
