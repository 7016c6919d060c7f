"""Stochastic rounding of gradients: unbiased, with keys as arguments, different for each use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import BackwardProduct, FakeQuantized, with_stochastic_rounding

X = arrays.normal(6, 8, seed=1)
W = arrays.array(np.random.default_rng(2).normal(size=(2, 8, 8)) / 3)
OF = {"qtype": "int8", "act_qtype": "int8", "grad_qtype": "int4"}


def gradient_of(program, *, w=W, of=OF):
    """Return a function from a key to the gradient of the weights."""

    def gradient(key):
        def loss(w):
            q = FakeQuantized(w, **of)
            q = q if key is None else with_stochastic_rounding(q, key)
            return vn.implicit(program)(q, X)

        return jax.grad(loss)(w)

    return gradient


def stack(w, x):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0].sum()


def product(w, x):
    return jnp.sin(x @ w).sum()


def test_the_mean_is_the_exact_gradient():
    gradient = gradient_of(product, w=W[0])
    exact = jax.grad(lambda w: product(w, X))(W[0])
    mean = jax.jit(jax.vmap(gradient))(jax.random.split(jax.random.key(0), 2000)).mean(0)
    to_nearest = gradient(None)
    fine = gradient_of(product, w=W[0], of=OF | {"grad_qtype": "int8"})(None)
    assert_close(mean, fine, 0.05)
    assert abs(mean - fine).max() < abs(to_nearest - fine).max() / 2
    assert_close(fine, exact, 0.2)


def test_the_same_key_gives_the_same_gradient():
    traced = []

    @jax.jit
    def gradient(key):
        traced.append(key)
        return gradient_of(stack)(key)

    first, again, other = (gradient(jax.random.key(i)) for i in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any((1, 2)).all()
    assert len(traced) == 1
    assert (gradient(jax.random.key(1)) == gradient_of(stack)(jax.random.key(1))).mean() > 0.9


def test_raw_keys_are_supported():
    raw = jax.random.key_data(jax.random.key(0))
    gradient = gradient_of(stack)
    assert_close(gradient(raw), gradient(jax.random.key(0)), 0)


def test_layers_of_a_stack_have_separate_keys():
    key = jax.random.key(0)
    q = with_stochastic_rounding(FakeQuantized(W, **OF), key)
    assert q.key.shape == (2,)
    assert q.key[0] != q.key[1]
    report = vn.explain(stack)(q, X)
    assert not report.materialised
    gradient = gradient_of(stack)

    def unrolled(w):
        x = X
        for i in range(2):
            layer = FakeQuantized(w[i], q.key[i], **OF)
            x = jnp.sin(vn.implicit(jnp.matmul)(x, layer))
        return x.sum()

    assert_close(gradient(key), jax.grad(unrolled)(W), 1e-5)


def test_uses_of_one_weight_round_differently():
    # If both uses rounded alike, the gradients of equal operands would be equal.
    def twice(w, x):
        pair = jax.lax.map(lambda scale: jnp.sin(scale * (x @ w)), jnp.array([1.0, 1.0001]))
        return pair.sum()

    gradient = gradient_of(twice, w=W[0])(jax.random.key(0))
    alone = gradient_of(product, w=W[0])(jax.random.key(0))
    assert (abs(gradient - 2 * alone) > 1e-2).mean() > 0.5


def test_members_of_a_batch_round_differently():
    def batched(w, x):
        return jax.vmap(lambda scale: jnp.sin(scale * (x @ w)))(jnp.array([1.0, 1.0001])).sum()

    gradient = gradient_of(batched, w=W[0])(jax.random.key(0))
    alone = gradient_of(product, w=W[0])(jax.random.key(0))
    assert (abs(gradient - 2 * alone) > 1e-2).mean() > 0.5


def test_a_product_can_opt_out_of_stochastic_rounding():
    both = lambda key: jax.jit(jax.grad(by_both, (0, 1)))(W[0], X, key)

    def by_both(w, x, key):
        of = OF | {"grad_input": BackwardProduct("int4", stochastic=False)}
        q = FakeQuantized(w, **of)
        q = q if key is None else with_stochastic_rounding(q, key)
        return vn.implicit(product)(q, x)

    (by_w, by_x), (nearest_w, nearest_x) = both(jax.random.key(0)), both(None)
    assert (by_x == nearest_x).all()
    assert (by_w != nearest_w).mean() > 0.3


def test_a_transposed_weight_keeps_its_keys():
    out_in = FakeQuantized(W[0], tile_axis=-1, **OF)
    q = with_stochastic_rounding(out_in, jax.random.key(0))
    transposed = vn.implicit(lambda w: w.T)(q)
    assert (q.key.shape, transposed.key.shape) == ((8,), ())
    back = vn.implicit(lambda w: w.T.T)(q)
    assert back.key.shape == (8,)
    stacked = with_stochastic_rounding(FakeQuantized(W, tile_axis=-1, **OF), jax.random.key(0))
    transposed = vn.implicit(lambda w: w.transpose(0, 2, 1))(stacked)
    assert (transposed.key == stacked.key[:, 0]).all()


@pytest.mark.parametrize("name", ["conv", "ragged"])
def test_convolutions_and_ragged_dot_round_stochastically(name):
    images, kernel = (
        jnp.reshape(X, (2, 4, 6, 1)),
        jax.random.normal(jax.random.key(3), (3, 3, 1, 4)),
    )
    layout = ("NHWC", "HWIO", "NHWC")
    conv = lambda w, _: jnp.sin(
        jax.lax.conv_general_dilated(images, w, (1, 1), "SAME", dimension_numbers=layout)
    ).sum()
    ragged = lambda w, x: jnp.sin(jax.lax.ragged_dot(x, w, jnp.array([2, 4]))).sum()
    program, w, axes = (conv, kernel, (-4, -3, -2)) if name == "conv" else (ragged, W, -2)
    gradient = gradient_of(program, w=w, of=OF | {"tile_axis": axes})
    first, other = (gradient(jax.random.key(i)) for i in (0, 1))
    assert (first != other).mean() > 0.25


def test_weights_without_gradient_formats_get_no_key():
    params = {"a": FakeQuantized(W[0], qtype="int4"), "b": W}
    with_keys = with_stochastic_rounding(params, jax.random.key(0))
    assert with_keys["a"].key is None
    assert with_keys["b"] is W


def test_a_number_is_not_a_key():
    with pytest.raises(TypeError, match=r"such as jax\.random\.key\(0\), not 0"):
        with_stochastic_rounding({"w": W}, 0)
