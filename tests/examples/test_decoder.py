"""The decoder and its decoding in fewer bits, at a small size."""

import contextlib
import io

import decoder
import decoder_speed as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.policies import without_rule

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]

CONFIG = example.SMALL
LENGTH = 12


@pytest.fixture(scope="module")
def params():
    return decoder.init(jax.random.key(0), CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, LENGTH), 0, CONFIG.vocabulary)


def read(params, tokens, *, at_once=LENGTH):
    """Return the logits of texts that are read in chunks of `at_once` tokens."""
    cache = decoder.empty_cache(CONFIG, len(tokens), params["norm"].dtype)
    run = jax.jit(vn.implicit(decoder.logits), static_argnums=1)
    found = []
    for start in range(0, LENGTH, at_once):
        part, cache = run(params, CONFIG, tokens[:, start : start + at_once], cache, start)
        found.append(part)
    return np.concatenate(found, 1)


def attended_in_full(p, x):
    """Return causal attention by JAX's own function, without a cache: `[batch, length, width]`."""
    heads = lambda name, count: (x @ p[name]).reshape(*x.shape[:2], count, -1)
    turn = lambda x: decoder.apply_rope(x.swapaxes(1, 2), jnp.arange(LENGTH), CONFIG.rotary_base)
    query = turn(heads("query", CONFIG.num_heads)).swapaxes(1, 2)
    key = turn(heads("key", CONFIG.num_groups)).swapaxes(1, 2)
    value = heads("value", CONFIG.num_groups)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(x.shape) @ p["mixed"]


def test_attention_agrees_with_jax(params):
    x = jax.random.normal(jax.random.key(2), (2, LENGTH, CONFIG.width))
    p, cache = params["layers"][0], decoder.empty_cache(CONFIG, 2)
    found, _, _ = decoder.attention(p, CONFIG, x, cache.keys[0], cache.values[0], 0)
    np.testing.assert_allclose(found, attended_in_full(p, x), atol=1e-5)


def test_only_differences_of_positions_matter():
    x, y = jax.random.normal(jax.random.key(3), (2, 1, 8))
    product = lambda i, j: (
        decoder.apply_rope(x, jnp.array([i]), 1e4) * decoder.apply_rope(y, jnp.array([j]), 1e4)
    ).sum()
    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


@pytest.mark.parametrize("at_once", [1, 4])
def test_reading_in_chunks_agrees_with_reading_at_once(params, tokens, at_once):
    np.testing.assert_allclose(
        read(params, tokens, at_once=at_once), read(params, tokens), atol=1e-4
    )


def test_later_tokens_do_not_change_earlier_logits(params, tokens):
    changed = tokens.at[:, 8:].set(0)
    one, other = read(params, tokens), read(params, changed)
    np.testing.assert_array_equal(one[:, :8], other[:, :8])
    assert (one[:, 8:] != other[:, 8:]).any()


def test_decoding_writes_the_most_likely_tokens(params, tokens):
    step, prompt = decoder.compile_step(), tokens[:, :8]
    written = decoder.decode(step, params, CONFIG, prompt, count=LENGTH - 8 + 1)
    text = jnp.concatenate([prompt, written[:, :-1]], 1)
    np.testing.assert_array_equal(read(params, text)[:, 7:].argmax(-1), written)


@pytest.mark.parametrize("variant", example.VARIANTS, ids=lambda variant: variant.name)
def test_each_variant_agrees_with_its_dense_weights(variant, params, tokens):
    stored = variant.store(params)
    found = read(stored, tokens)
    # Activations that are rounded, to 8 bits in all, change the logits somewhat.
    atol = 1e-4 if variant.act_qtype is None and variant.dtype == "float32" else 0.2
    np.testing.assert_allclose(found, read(vn.materialise(stored), tokens), atol=atol)


def test_no_kernel_is_materialized(params, tokens):
    stored = example.VARIANTS[3].store(params)
    cache = decoder.empty_cache(CONFIG, 2)
    step = lambda params: decoder.step(params, CONFIG, tokens, cache, 0)
    report = vn.explain(step)(stored)
    products = [event for event in report.events if event.primitive == "dot_general"]
    assert len(products) == 7 * CONFIG.num_layers + 1
    # Only the embedding rows that are looked up are materialized: in the norm and in the addition.
    assert {event.primitive for event in without_rule(report)} == {"mul", "add"}
    assert all(event.nbytes <= 2 * tokens.size * CONFIG.width * 4 for event in without_rule(report))


def test_the_example_prints_a_row_for_each_variant():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = example.main(["f32", "int4"], quick=True)
    rows = {line.split()[0]: line for line in printed.getvalue().splitlines() if line.split()}
    kernels = sum(w.size for w in jax.tree.leaves(decoder.init(jax.random.key(0), CONFIG)))
    dense, int4 = results
    assert dense.nbytes == 4 * kernels
    assert int4.nbytes < 0.14 * dense.nbytes
    for result in results:
        assert f"{result.nbytes:,}" in rows[result.variant.name]
        assert f"{result.tokens_per_second:.1f}" in rows[result.variant.name]
