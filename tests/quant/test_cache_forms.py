"""Programs with other cache layouts: ring buffers and pages."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.stored_values import stored_in_cache

import veneer as vn

H, D = 4, 64  # heads, width


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def attend(query, keys, values, is_seen):
    mask = is_seen[:, None, None]  # [batch, 1, 1, tokens]
    return jax.nn.dot_product_attention(query, keys, values, mask=mask)


def each_written(tokens, qtype):
    """Quantize and dequantize tokens with one scale each."""
    axes = [*range(tokens.ndim - 1)]
    return stored_in_cache(tokens, qtype, axes).dequantize()


def no_float_like(compiled, shape):
    """Return whether a program has no float array of the size of a cache."""
    shapes = re.findall(r"(?:f32|bf16|f16)\[([\d,]+)\]", compiled.as_text())
    return max(np.prod([*map(int, s.split(","))]) for s in shapes) < np.prod(shape)


@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8"])
def test_a_ring_buffer_holds_the_last_tokens(qtype):
    window, length = 256, 400
    tokens = draw(2, length, H, D)
    query = draw(2, 1, H, D, seed=1)

    def step(cache, at):
        new = lax.dynamic_slice_in_dim(tokens, at, 1, 1)
        return lax.dynamic_update_slice(cache, new, (0, at % window, 0, 0)), None

    def run(cache, query):
        cache = lax.scan(step, cache, jnp.arange(length))[0]
        return cache, attend(query, cache, cache, jnp.ones((2, window), bool))

    shape = 2, window, H, D
    empty = vn.quant.zeros(shape, qtype, channelwise_axes=(0, 1, 2))
    run = jax.jit(vn.implicit(run, on_materialise="error"))
    cache, out = run(empty, query)
    last = each_written(tokens, qtype)[:, -window:]  # in another order, which attention ignores
    expected = attend(query, last, last, jnp.ones((2, window), bool))
    np.testing.assert_array_equal(jnp.roll(cache.dequantize(), -(length % window), 1), last)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


BY_CHANNEL = {"channelwise_axes": (0, 2), "tiled_axes": {1: 32}, "block_axis": 1}
TILED = {
    "int8": ({"qtype": "int8", "channelwise_axes": (0, 1), "tiled_axes": {2: 32}},) * 2,
    "4 bits": (
        {"qtype": "uint4", "calibration_method": "minmax", **BY_CHANNEL},
        {"qtype": "nf4", "channelwise_axes": (0, 1), "tiled_axes": {2: 16}},
    ),
    "4 bits, with zero points": (
        {"qtype": "uint4", "calibration_method": "minmax", **BY_CHANNEL},
        {
            "qtype": "uint4",
            "calibration_method": "minmax",
            "channelwise_axes": (0, 1),
            "tiled_axes": {2: 16},
        },
    ),
}


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("name", TILED)
def test_attention_with_tiles_of_tokens_uses_kernels(name, queries):
    room, length = 2048, 1500
    tokens, query = draw(2, H, length, D), draw(H, queries, D, seed=1)

    def step(keys, values, tokens, query):
        keys, values = (
            lax.dynamic_update_slice(cache, new, (0, 0, 0))
            for cache, new in zip((keys, values), tokens, strict=True)
        )
        scores = jnp.einsum("hqd,hsd->hqs", query, keys) / D**0.5
        chance = jax.nn.softmax(jnp.where(jnp.arange(room) < length, scores, -jnp.inf))
        return keys, values, chance @ values

    empty = [vn.quant.zeros((H, room, D), scale_dtype="float16", **how) for how in TILED[name]]
    report = vn.explain(step)(*empty, tokens, query)
    products = [event.how for event in report.events if event.primitive == "dot_general"]
    assert sum("CPU kernel" in how for how in products) == 2
    assert not report.materialised
    *caches, out = jax.jit(vn.implicit(step, on_materialise="error"))(*empty, tokens, query)
    dense = [cache.materialise()[:, :length] for cache in caches]
    scores = jnp.einsum("hqd,hsd->hqs", query, dense[0]) / D**0.5
    np.testing.assert_allclose(out, jax.nn.softmax(scores) @ dense[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", *TILED])
def test_attention_equals_that_with_a_dense_cache(name):
    heads, room = 16, 256
    by_token = ({"qtype": name, "channelwise_axes": (0, 1)},) * 2
    empty = [vn.quant.zeros((heads, room, D), **how) for how in TILED.get(name, by_token)]
    tokens, queries = draw(room, 2, heads, 1, D), draw(room, heads, 2, D, seed=1)

    def attend(query, keys, values, at):
        scores = jnp.einsum("hqd,hsd->hqs", query, keys) / D**0.5
        return jax.nn.softmax(jnp.where(jnp.arange(room) <= at, scores, -jnp.inf)) @ values

    def step(caches, now):
        at, new, query = now
        caches = [
            lax.dynamic_update_slice(c, x, (0, at, 0)) for c, x in zip(caches, new, strict=True)
        ]
        dense = [vn.materialise(cache) for cache in caches]
        return caches, (attend(query, *caches, at), attend(query, *dense, at))

    program = lambda empty: lax.scan(step, empty, (jnp.arange(room), tokens, queries))
    assert "CPU kernel" in str(vn.explain(program)(empty))
    _, (found, expected) = jax.jit(vn.implicit(program))(empty)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8"])
def test_pages_hold_texts_of_unequal_lengths(qtype):
    size, pages, lengths = 32, 24, np.array([300, 70])
    table = np.random.default_rng(0).permutation(pages)[:20].reshape(2, 10)
    tokens, query = draw(2, 320, H, D), draw(2, 1, H, D, seed=1)

    def write(
        pool, new, at
    ):  # one token per text, `[batch, heads, width]`, each at its own position
        return pool.at[table[jnp.arange(2), at // size], at % size].set(new)

    def run(pool, query, lengths):
        step = lambda i, pool: write(pool, tokens[:, i], jnp.minimum(i, lengths - 1))
        pool = lax.fori_loop(0, 300, step, pool)
        return pool, read(pool, query, lengths)

    def read(pool, query, lengths):
        own = pool[jnp.asarray(table)].reshape(2, -1, H, D)
        is_seen = jnp.arange(own.shape[1]) < lengths[:, None]
        return attend(query, own, own, is_seen)

    table = jnp.asarray(table)
    empty = vn.quant.zeros((pages, size, H, D), qtype, channelwise_axes=(0, 1, 2))
    run = jax.jit(vn.implicit(run, on_materialise="error"))
    pool, out = run(empty, query, lengths)
    dense = each_written(tokens, qtype)
    dense = dense.at[1, 69].set(dense[1, 299])  # the shorter text is written up to the end
    expected = attend(query, dense, dense, jnp.arange(320) < lengths[:, None])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    reads = jax.jit(vn.implicit(read)).lower(pool, query, lengths).compile()
    if qtype != "fp8":  # XLA on CPU gathers fp8 as f16
        assert no_float_like(reads, (2, 320, H, D))
    writes = jax.jit(vn.implicit(write), donate_argnums=0)
    compiled = writes.lower(pool, tokens[:, 0], lengths).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
