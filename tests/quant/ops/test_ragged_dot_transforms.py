import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.arrays import normal
from support.policies import only_by_rules

import veneer as vn
from veneer.quant import quantize

M, G, K, N = 10, 4, 8, 8
SIZES = arrays.array([3, 0, 5, 1])


WEIGHTS = arrays.OnDemand(
    {
        "int4 channelwise": lambda: quantize(normal(G, K, N), "int4", channelwise_axes=[0, 2]),
        "nf4 tiled": lambda: quantize(
            normal(G, K, N), "nf4", channelwise_axes=[0, 2], tiled_axes={1: 4}
        ),
    }
)


@pytest.fixture(params=WEIGHTS)
def w(request):
    return WEIGHTS[request.param]


def loss(x, w):
    return jnp.sum(jnp.sin(lax.ragged_dot(x, w, SIZES)))


def batched(x, w):
    xs, ws, sizes = (jnp.stack([a, a[::-1]]) for a in (x, w, SIZES))
    return jax.vmap(lax.ragged_dot)(xs, ws, sizes)


PROGRAMS = {
    "ragged_dot": lambda x, w: lax.ragged_dot(x, w, SIZES),
    "jit": jax.jit(lambda x, w: lax.ragged_dot(x, w, SIZES)),
    "vmap": batched,
    "scan over rows": lambda x, w: lax.scan(
        lambda c, x: (c, lax.ragged_dot(x[None], w, jnp.array([0, 0, 1, 0]))), 0.0, x
    )[1],
    "scan": lambda x, w: lax.scan(
        lambda c, _: (jnp.tanh(lax.ragged_dot(c, w, SIZES)), None), x, length=2
    )[0],
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(lax.ragged_dot(x, w, SIZES))),
    "grad of x": jax.grad(loss),
    "grad of w": jax.grad(loss, argnums=1),
    "grad of checkpoint": jax.grad(jax.checkpoint(loss)),
    "jvp": lambda x, w: jax.jvp(lambda x: lax.ragged_dot(x, w, SIZES), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_under_implicit_agree_with_dense_experts(name, w):
    x, program = normal(M, K, seed=1), PROGRAMS[name]
    actual = vn.materialise(jax.jit(vn.implicit(program))(x, w))
    np.testing.assert_allclose(actual, program(x, w.dequantize()), rtol=1e-5, atol=2e-5)


def test_derivatives_agree_with_dense_experts(w):
    x = normal(M, K, seed=1)
    by_hand = lambda x, scale: loss(x, w.replace(scale=scale).dequantize())
    ours = lambda x, scale: vn.implicit(loss)(x, w.replace(scale=scale))

    @jax.jit
    def run(x, scale):
        def derivatives(f):
            gradient = jax.grad(f, argnums=(0, 1))
            return gradient(x, scale), jax.jvp(gradient, (x, scale), (x, scale))[1]

        return derivatives(ours), derivatives(by_hand)

    for actual, expected in zip(*map(jax.tree.leaves, run(x, w.scale)), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_vmap_over_each_argument_agrees(w):
    x = normal(2, M, K, seed=1)
    sizes = jnp.stack([SIZES, SIZES[::-1]])
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), w)
    q = jax.vmap(lambda x: quantize(x, "int8", channelwise_axes=[0]))(x)
    cases = [
        ((0, None, None), (x, w, SIZES)),
        ((None, 0, None), (x[0], both, SIZES)),
        ((None, None, 0), (x[0], w, sizes)),
        ((0, 0, 0), (x, both, sizes)),
        ((0, 0, 0), (q, both, sizes)),
    ]

    @jax.jit
    def run(operands):
        axes = [axes for axes, _ in cases]
        return [
            jax.vmap(vn.quant.ragged_dot, in_axes=a)(*args)
            for a, args in zip(axes, operands, strict=True)
        ]

    for (axes, args), actual in zip(cases, run([args for _, args in cases]), strict=True):
        for i in range(2):
            x_i, w_i, s_i = (
                a if axis is None else jax.tree.map(operator.itemgetter(i), a)
                for axis, a in zip(axes, args, strict=True)
            )
            expected = lax.ragged_dot(*vn.materialise((x_i, w_i)), s_i)
            np.testing.assert_allclose(actual[i], expected, rtol=1e-5, atol=1e-5)


def test_explain_reports_the_strategy(w):
    x = normal(M, K)
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])

    def run(x, w):
        return lax.ragged_dot(x, w, SIZES), lax.ragged_dot_general(x, w[0].T, SIZES, numbers)

    report = vn.explain(run)(jnp.ones((8, K)), w)
    hows = [event.how for event in report.events if event.primitive == "ragged_dot_general"]
    assert hows == [
        "one group at a time on CPU (fallback: dequantize rhs)",
        "dequantize rhs",
    ]
    vn.implicit(lambda x, w: lax.ragged_dot(x, w, SIZES), on_materialise=only_by_rules)(x, w)


# A program written for dense arrays.


def mixture_of_experts(params, x):
    """Return the outputs of the two best experts per token, weighted by the router."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    group_sizes = jnp.bincount(expert, length=params["router"].shape[1])
    sorted_tokens = x[order // 2]
    hidden = jax.nn.silu(lax.ragged_dot(sorted_tokens, params["up"], group_sizes))
    out = lax.ragged_dot(hidden, params["down"], group_sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)
    return jnp.sum(weights[..., None] * out, axis=1)


@pytest.mark.parametrize("qtype", ["int4", "nf4"])
def test_a_mixture_of_quantized_experts_agrees(qtype):
    dense = {
        "router": normal(8, 6),
        "up": normal(6, 8, 16, seed=1),
        "down": normal(6, 16, 8, seed=2),
    }
    params = vn.quant.quantize_tree(dense, [vn.quant.Rule("up|down", qtype)])
    dense, x = vn.materialise(params), normal(7, 8, seed=3)
    loss = lambda router, x, params: jnp.sum(
        mixture_of_experts(params | {"router": router}, x) ** 2
    )

    @jax.jit
    def run(params, x):
        out = vn.implicit(mixture_of_experts, on_materialise=only_by_rules)(params, x)
        gradients = jax.grad(vn.implicit(loss), argnums=(0, 1))(params["router"], x, params)
        return out, gradients

    for actual, expected in zip(
        *map(jax.tree.leaves, (run(params, x), run(dense, x))), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
