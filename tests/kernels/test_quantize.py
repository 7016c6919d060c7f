"""The kernel that quantizes returns the same bits as XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.stored_values import stored_in_cache

import veneer as vn
from veneer import kernels
from veneer.kernels.cpu import build
from veneer.kernels.quantize import can_quantize

if build.unavailable_reason() is not None:
    pytest.skip("kernels cannot run here", allow_module_level=True)

LAYOUTS = {
    "tiles over rows": ((256, 512), {"channelwise_axes": [1], "tiled_axes": {0: 64}}),
    "odd columns": ((64, 1031), {"channelwise_axes": [1], "tiled_axes": {0: 32}}),
    "tiles within rows": ((128, 512), {"channelwise_axes": [0], "tiled_axes": {1: 32}}),
    "whole rows": ((40, 1056), {"channelwise_axes": [0]}),
    "narrow tiles": ((300, 210), {"tiled_axes": {0: 3, 1: 7}}),
    "squares": ((256, 256), {"tiled_axes": {0: 128, 1: 128}}),
    "a batch": ((3, 96, 256), {"channelwise_axes": [0, 2], "tiled_axes": {1: 96}}),
    "heads": ((256, 8, 32), {"channelwise_axes": [1, 2], "tiled_axes": {0: 64}}),
    "a row": ((65536,), {"tiled_axes": {0: 64}}),
    "values of another layout": ((8, 64, 128), {"channelwise_axes": [2]}),
}


def values(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x = x.astype(np.float32)
    flat = x.reshape(-1)
    flat[:3000:500] = [np.nan, np.inf, -np.inf, 3e38, 1e-39, -0.0]
    flat[4000:8000] = 0
    flat[9000:12000] *= 1e-38
    flat[12000:16000] *= np.float32(3.4e38) / np.abs(flat[12000:16000]).max()
    return jnp.asarray(x)


def assert_same(found, want):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.structure(found) == jax.tree.structure(want)


def by_xla(compute, x):
    with kernels.use("xla"):
        return jax.block_until_ready(compute(x))


@pytest.mark.parametrize("quantize", [vn.quant.quantize, stored_in_cache])
@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales_equal_the_results_of_xla(layout, qtype, quantize):
    shape, tiles = LAYOUTS[layout]
    compute = lambda x: quantize(x, qtype, **tiles)
    x = values(shape)
    assert_same(compute(x), by_xla(compute, x))


def test_a_kernel_serves_arrays_that_it_quantizes_faster():
    assert can_quantize("int4", (256, 512), (4, 512))
    assert can_quantize("int8", (3, 64), (3, 1))  # a token of a small model
    assert not can_quantize("int4", (8, 8), (1, 8))
    assert not can_quantize("int3", (256, 512), (4, 512))
    assert not can_quantize("int8", (256, 512), (256, 512))  # a scale each
    assert not can_quantize("int8", (2048, 1024), (1, 1))  # which one thread would do
    with kernels.use("xla"):
        assert not can_quantize("int4", (256, 512), (4, 512))


def test_mapped_arrays_are_quantized_by_a_kernel():
    x = values((4, 256, 128))
    compute = jax.jit(jax.vmap(lambda x: vn.quant.quantize(x, "int8", channelwise_axes=[0])))
    assert "veneer_quantize_int8" in compute.lower(x).as_text()
    assert_same(compute(x), by_xla(compute, x))


def test_gradients_equal_the_gradients_of_xla():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
    loss = lambda x: jnp.sum(vn.quant.fake_quantize(x, "int8", channelwise_axes=[0]) ** 2)
    assert_same(jax.grad(loss)(x), by_xla(jax.grad(loss), x))


def test_arrays_on_several_devices_are_left_to_xla():
    x = values((256, 512))
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x", None)))
    compute = jax.jit(lambda x: vn.quant.quantize(x, "int8", channelwise_axes=[0]))
    assert "veneer_quantize" not in compute.lower(placed).compile().as_text()
    assert_same(compute(placed), by_xla(compute, x))
