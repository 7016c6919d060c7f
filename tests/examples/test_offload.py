"""Layers in host memory: the same values, sent packed, and less memory on the device."""

import re
from dataclasses import replace

import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import offload as example
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]

CONFIG = replace(fsdp.SMALL, num_layers=8)


@pytest.fixture(scope="module")
def tokens():
    return fsdp.make_tokens(CONFIG)


@pytest.fixture(scope="module")
def ways(tokens, current_emitters):
    return {way.name: way for way in example.setups(CONFIG, tokens)}


@pytest.mark.parametrize("format", ["f32", "int4"])
def test_a_step_agrees_with_weights_on_the_device(format, ways, tokens):
    def step(where):
        way = ways[f"{format}, {where}"]
        return way.compiled(*jax.tree.map(jnp.copy, way.args[:2]), way.args[2], tokens)

    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, step("layers on the host"), step("on the device"))


@pytest.mark.parametrize("format", ["f32", "int4"])
def test_the_device_holds_at_most_two_layers(format, ways):
    away, there = (ways[f"{format}, {where}"] for where in ("layers on the host", "on the device"))
    layers = sum(x.nbytes for x in jax.tree.leaves(away.args[2]["layers"]))
    assert (away.on_host, there.on_host) == (layers, 0)
    assert there.on_device - away.on_device > (1 - 2 / CONFIG.num_layers) * layers - 1e5


def test_layers_are_sent_packed_one_at_a_time(ways, tokens):
    updates, _, weights = ways["int4, layers on the host"].args
    loss = lambda *args: fsdp.loss(*args, tokens, CONFIG, example.send)
    run = jax.jit(vn.implicit(jax.grad(loss)))
    lowered = run.trace(updates, weights).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@annotate_device_placement\(.*?-> tensor<(.*?)>", lowered)
    sizes = [
        (dtype, np.prod([*map(int, shape)])) for *shape, dtype in (x.split("x") for x in found)
    ]
    codes = CONFIG.width * CONFIG.width // 2
    assert [n for dtype, n in sizes if dtype == "ui8"] == [codes] * 14  # of 7 weights, and again
    assert max(n for dtype, n in sizes if dtype == "f32") <= CONFIG.width * fsdp.TILE


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_layers_can_be_sharded_over_the_hosts(tokens):
    mesh = jax.make_mesh((8,), (fsdp.AXIS,), axis_types=(AxisType.Auto,))
    weights, updates = fsdp.init(jax.random.key(0), CONFIG)
    weights = fsdp.quantize(weights)
    specs = fsdp.specs(weights)
    kind = lambda spec: NamedSharding(mesh, spec, memory_kind="pinned_host")
    placed = vn.device_put(weights, jax.tree.map(kind, specs))
    assert placed["layers"]["up"].packed.sharding.memory_kind == "pinned_host"
    assert placed["layers"]["up"].packed.addressable_shards[0].data.shape[1] == CONFIG.width // 8
    whole = lambda x, axis: lax.all_gather(example.send(x, axis), fsdp.AXIS, axis=axis, tiled=True)

    def loss(updates, weights, tokens):
        own = lambda x, axis: x if x.ndim == 2 and CONFIG.rank in x.shape else whole(x, axis)
        return lax.pmean(fsdp.loss(updates, weights, tokens, CONFIG, own), fsdp.AXIS)

    step = jax.shard_map(loss, mesh=mesh, in_specs=(P(), specs, P(fsdp.AXIS)), out_specs=P())
    alone = vn.implicit(fsdp.loss)(updates, weights, tokens, CONFIG, example.keep)
    found = jax.jit(vn.implicit(step))(updates, placed, tokens)
    np.testing.assert_allclose(found, alone, rtol=1e-5)


def test_a_checkpoint_is_loaded_into_host_memory(tmp_path):
    weights, _ = fsdp.init(jax.random.key(0), fsdp.SMALL)
    vn.save(tmp_path / "model", fsdp.quantize(weights))
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    read = vn.load(tmp_path / "model", shardings=[(r"layers\..*", host)])
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(read["layers"])}
    assert (kinds, read["head"].packed.sharding.memory_kind) == ({"pinned_host"}, "device")
