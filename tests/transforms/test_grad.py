"""Derivatives in both orders: of the rules, by leaves; of the program, by the dense array."""

import jax
import jax.numpy as jnp
import pytest
from array_types import MAKERS, Lora, assert_close

import veneer as vn

X = jnp.linspace(-1.0, 1.0, 18).reshape(3, 6)
KEY = jax.random.key(2)
LORA = MAKERS["lora"](KEY)

f = lambda x, w: jnp.sin(jnp.tanh(x @ w) + (w**2).sum()).sum()


def by_leaves(f, *, at=LORA):
    """The dense program as one of a Lora's leaves."""
    return lambda x, leaves: f(
        x, vn.materialise(jax.tree.unflatten(jax.tree.structure(at), leaves))
    )


WRAPS = {
    "eager": lambda f: f,
    "jit inside": jax.jit,
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
class TestOfTheRules:
    def check(self, transform, wrap):
        ours = transform(vn.implicit(wrap(f)))(X, LORA)
        theirs = transform(by_leaves(f))(X, jax.tree.leaves(LORA))
        assert_close(jax.tree.leaves(ours), jax.tree.leaves(theirs), tol=2e-5)

    def test_grad(self, wrap):
        self.check(lambda f: jax.grad(f, (0, 1)), wrap)

    def test_value_and_grad_under_jit(self, wrap):
        self.check(lambda f: jax.jit(jax.value_and_grad(f, 1)), wrap)

    def test_jacfwd(self, wrap):
        self.check(lambda f: jax.jacfwd(f, 1), wrap)

    def test_jacrev(self, wrap):
        self.check(lambda f: jax.jacrev(f, 1), wrap)

    def test_second_order(self, wrap):
        self.check(lambda f: jax.jacfwd(jax.grad(f, 0), 0), wrap)

    def test_linearize(self, wrap):
        def transform(f):
            def run(x, w):
                out, linear = jax.linearize(f, x, w)
                return out, linear(x, jax.tree.map(jnp.ones_like, w))

            return run

        self.check(transform, wrap)


def test_the_gradient_by_leaves_is_of_the_same_type():
    g = jax.grad(vn.implicit(f), 1)(X, LORA)
    assert isinstance(g, Lora)
    assert g.scale == LORA.scale


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
class TestOfTheProgram:
    def check(self, transform, name, wrap):
        w = MAKERS[name](KEY)
        ours = vn.implicit(wrap(transform(f)))(X, w)
        assert_close(ours, transform(f)(X, vn.materialise(w)), tol=2e-5)

    def test_grad_is_dense(self, name, wrap):
        self.check(lambda f: jax.grad(f, (0, 1)), name, wrap)

    def test_jvp(self, name, wrap):
        tangents = X, jnp.ones((6, 6))
        self.check(lambda f: lambda x, w: jax.jvp(f, (x, w), tangents), name, wrap)

    def test_second_order(self, name, wrap):
        self.check(lambda f: jax.jacfwd(jax.grad(f, 0), 0), name, wrap)


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_gradients_flow_past_a_quantised_weight(name):
    w = MAKERS[name](KEY)
    ours = jax.grad(vn.implicit(f))(X, w)
    assert_close(ours, jax.grad(f)(X, vn.materialise(w)))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_gradient_by_the_scale(name):
    w = MAKERS[name](KEY)
    rebuilt = lambda s: vn.quant.QArray.from_packed(w.packed, s, qtype=w.qtype, packing=w.packing)
    ours = jax.grad(lambda s: vn.implicit(f)(X, rebuilt(s)))(w.scale)
    theirs = jax.grad(lambda s: f(X, vn.materialise(rebuilt(s))))(w.scale)
    assert_close(ours, theirs, tol=2e-5)
