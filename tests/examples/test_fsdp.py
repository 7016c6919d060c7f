"""QLoRA in parts on 8 devices, at a small size, held to one device."""

import re

import fsdp as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

CONFIG = example.SMALL


@pytest.fixture(scope="module")
def tokens():
    return example.make_tokens(CONFIG)


@pytest.fixture(scope="module")
def ways(tokens):
    return {way.name: way for way in example.setups(CONFIG, tokens)}


@pytest.fixture(scope="module")
def gradients(tokens):
    """Return the loss and the gradients of the adapters on one device, with dense weights."""
    weights, updates = example.init(jax.random.key(0), CONFIG)
    dense = vn.materialise(example.quantize(weights))
    alone = lambda x, axis: x
    loss = lambda updates: vn.implicit(example.loss)(updates, dense, tokens, CONFIG, alone)
    return jax.jit(jax.value_and_grad(loss))(updates)


@pytest.mark.parametrize("how", ["on each device", "in parts, by jit", "in parts, by shard_map"])
def test_gradients_agree_with_one_device(how, ways, tokens, gradients):
    way, (loss, expected) = ways[f"int4, {how}"], gradients
    args = jax.tree.map(jnp.copy, way.args)  # which the step is given for good
    _, state, value = way.compiled(*args, tokens)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    # The first moments are a tenth of the gradients, after a first step.
    found = jax.tree.map(lambda mu: 10 * mu, state[0].mu)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), found, expected
    )
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 1e-3


@pytest.mark.parametrize("how", ["in parts, by jit", "in parts, by shard_map"])
def test_collectives_gather_packed_weights(how, ways):
    program = ways[f"int4, {how}"].compiled.as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather(?:-start)?\(", program)
    sizes = [(dtype, int(np.prod([*map(int, shape.split(","))]))) for dtype, shape in gathered]
    assert max(size for dtype, size in sizes if dtype == "f32") <= 512 * 8  # scales and updates
    codes = 512 * 512 // 2
    assert (
        sum(dtype == "u8" and size == codes for dtype, size in sizes) == 14
    )  # and again, backward


def test_each_device_holds_an_eighth_of_the_weights(ways):
    whole = ways["int4, on each device"]
    for how in ("in parts, by jit", "in parts, by shard_map"):
        parts = ways[f"int4, {how}"]
        assert parts.held < 0.13 * whole.held
        assert example.peak_bytes(parts.compiled) < example.peak_bytes(whole.compiled)
        assert example.peak_bytes(parts.compiled) < example.peak_bytes(ways[f"f32, {how}"].compiled)


def test_the_moments_of_the_optimizer_are_sharded(ways):
    updates, state, weights = ways["int4, in parts, by shard_map"].args
    for tree in (updates, state[0].mu, state[0].nu, weights["layers"]):
        for x in jax.tree.leaves(tree):
            assert x.addressable_shards[0].data.nbytes == x.nbytes // 8
