"""`jax.nn.dot_product_attention` with quantized queries, keys and values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer.quant import quantize

B, T, S, H, D = 2, 4, 8, 2, 16


def normal(*shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attention(dtype=jnp.float32):
    q = normal(B, T, H, D, seed=1, dtype=dtype)
    k, v = (normal(B, S, H, D, seed=seed, dtype=dtype) for seed in (2, 3))
    return q, k, v


def cache(k, v, qtype):
    """Return keys with scales per token, and values with scales per channel."""
    return quantize(k, qtype, channelwise_axes=[0, 1, 2]), quantize(
        v, qtype, channelwise_axes=[0, 2, 3]
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("qtype", ["int8", "uint4", "nf4"])
def test_attention_agrees_with_dense_keys_and_values(qtype, dtype):
    q, k, v = attention(dtype)
    args = (q, *cache(k, v, qtype))
    actual = jax.jit(vn.implicit(attend))(*args)
    expected = attend(*vn.materialise(args))
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03  # bf16 rounds scores, weights and the sum
    np.testing.assert_allclose(
        *(np.asarray(y, np.float32) for y in (actual, expected)), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_attention_agrees_for_a_cache_with_scales_per_token(qtype):
    q, k, v = attention()
    empty = vn.quant.zeros(k.shape, qtype, channelwise_axes=[0, 1, 2])
    written = vn.implicit(lambda c, x: c.at[:, :4].set(x[:, :4]), on_materialise="error")
    args = (q, written(empty, k), written(empty, v))
    actual = jax.jit(vn.implicit(attend))(*args)
    np.testing.assert_allclose(actual, attend(*vn.materialise(args)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8"])
def test_a_long_cache_is_read_by_kernels_and_not_materialized(qtype):
    """The cache is stored with tokens before heads, and two queries share a head."""
    n, heads, width = 320, 4, 64
    q = normal(1, 1, 2 * heads, width, seed=1)
    empty = vn.quant.zeros((1, n, heads, width), qtype, channelwise_axes=[0, 1, 2])
    written = vn.implicit(lambda c, x: c.at[:].set(x), on_materialise="error")
    k, v = (written(empty, normal(*empty.shape, seed=seed)) for seed in (2, 3))
    f = lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=jnp.arange(n)[None, None, None] < 300)
    events = [e for e in vn.explain(f)(q, k, v).events if e.primitive == "dot_general"]
    assert all("kernel" in e.how for e in events)
    assert len(events) == 2
    compiled = jax.jit(vn.implicit(f)).lower(q, k, v).compile()
    sizes = re.findall(r"f(?:32|16)\[([\d,]+)\]", compiled.as_text())
    assert max(np.prod([int(n) for n in size.split(",")]) for size in sizes) < n * heads * width
    np.testing.assert_allclose(
        compiled(q, k, v), f(*vn.materialise((q, k, v))), rtol=1e-5, atol=1e-5
    )


def test_quantized_queries_and_keys_are_multiplied_as_integers():
    q, k, v = attention()
    args = (quantize(q, "int8", channelwise_axes=[0, 1, 2]), *cache(k, v, "int8"))
    report = vn.explain(attend)(*args)
    assert [event.primitive for event in report.materialised] == ["dot_general"]  # values
    hows = [event.how for event in report.events if event.primitive == "dot_general"]
    assert hows[0] == "multiply integer codes, scale the output"
    assert "scale the output" in hows[1]
    np.testing.assert_allclose(
        vn.implicit(attend)(*args), attend(*vn.materialise(args)), rtol=1e-5, atol=1e-5
    )


def test_explain_reports_values_that_are_dequantized():
    q, k, v = attention()
    args = q, k, quantize(v, "int8", channelwise_axes=[0, 1, 2])
    [event] = [e for e in vn.explain(attend)(*args).events if e.primitive == "dot_general"]
    assert event.how.endswith("tiled by 1 along the contracted axis")
    np.testing.assert_allclose(
        vn.implicit(attend)(*args), attend(*vn.materialise(args)), rtol=1e-5, atol=1e-5
    )


def test_gradients_of_queries_and_scales_agree():
    q, k, v = attention()
    k, v = cache(k, v, "int4")

    def loss(q, scales, dense):
        args = q, k.replace(scale=scales[0]), v.replace(scale=scales[1])
        return jnp.sum(
            jnp.sin(attend(*vn.materialise(args)) if dense else vn.implicit(attend)(*args))
        )

    grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    grads = [jax.tree.leaves(grad(q, (k.scale, v.scale), dense)) for dense in (False, True)]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
