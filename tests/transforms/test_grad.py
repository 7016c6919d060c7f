"""Derivatives with respect to dense operands and to leaves, and their types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import MAKERS, Lora, assert_close

import veneer as vn

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
KEY = arrays.key(2)
LORA = MAKERS["lora"](KEY)

f = lambda x, w: jnp.sin(jnp.tanh(x @ w) + (w**2).sum()).sum()


def test_gradients_of_leaves_have_the_type_of_the_argument():
    g = jax.grad(vn.implicit(f), 1)(X, LORA)
    assert isinstance(g, Lora)
    assert g.scale == LORA.scale


@pytest.mark.parametrize("name", MAKERS)
def test_jvp_takes_a_dense_tangent_of_an_implicit_array(name):
    w = MAKERS[name](KEY)
    pushed = lambda x, w: jax.jvp(f, (x, w), (X, jnp.ones((6, 6))))
    assert_close(vn.implicit(pushed)(X, w), pushed(X, vn.materialise(w)), tol=2e-5)


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_gradients_flow_past_a_quantized_weight(name):
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
