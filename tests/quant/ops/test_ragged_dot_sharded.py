"""Quantized experts on 8 devices, which exchange tokens and results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.policies import only_by_rules

import veneer as vn

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

MESH = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
EXPERTS, K, N, SENT = 16, 64, 32, 4  # two experts per device; each device sends 4 tokens to each
KEY = arrays.key(0)
X = arrays.normal(8 * 8 * SENT, K)

#: The number of tokens that a device sends to the first and second expert of another device.
COUNTS = np.array([[1, 3], [2, 2]] * 32).reshape(8, 8, 2)
SIZES = arrays.array(COUNTS)

#: The expert of each token.
OF_TOKENS = arrays.array(np.repeat(np.tile(np.arange(EXPERTS), 8), COUNTS.reshape(-1)))


def experts(x, w, sizes):
    """Return the results for the tokens of a device `[8 * SENT, K]`, in the order of experts."""
    received = lax.all_to_all(x, "i", 0, 0, tiled=True)
    sizes = lax.all_to_all(sizes[0], "i", 0, 0, tiled=True)
    expert = jnp.repeat(
        jnp.tile(jnp.arange(2), 8), sizes.reshape(-1), total_repeat_length=len(received)
    )
    order = jnp.argsort(expert, stable=True)
    y = lax.ragged_dot(received[order], w, sizes.sum(0))[jnp.argsort(order)]
    return lax.all_to_all(jnp.tanh(y), "i", 0, 0, tiled=True)


OVER_DEVICES = jax.shard_map(experts, mesh=MESH, in_specs=(P("i"),) * 3, out_specs=P("i"))


def one_by_one(x, w):
    return jnp.tanh(jnp.einsum("tk,tkn->tn", x, w[OF_TOKENS]))


@pytest.fixture(params=["int4", "mxfp4"])
def stored(request):
    w = jax.random.normal(KEY, (EXPERTS, K, N))
    return vn.quant.quantize(w, request.param, channelwise_axes=(0, 2), tiled_axes={1: 32})


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_are_sent_to_their_experts(stored):
    run = jax.jit(vn.implicit(OVER_DEVICES, on_materialise=only_by_rules))
    close(run(X, stored, SIZES), one_by_one(X, stored.dequantize()))


def test_gradients_by_tokens_and_dense_experts_agree(stored):
    loss = lambda x, w: jnp.sum(OVER_DEVICES(x, w, SIZES) ** 2)
    expected = jax.grad(lambda x, w: jnp.sum(one_by_one(x, w) ** 2), (0, 1))
    of_tokens, of_experts = expected(X, stored.dequantize())
    close(jax.jit(jax.grad(vn.implicit(loss)))(X, stored), of_tokens)
    close(jax.jit(vn.implicit(jax.grad(loss, 1)))(X, stored), of_experts)


def test_sharded_experts_under_jit_agree(stored):
    sizes = jnp.full((EXPERTS,), len(X) // EXPERTS, jnp.int32)
    placed = vn.device_put(stored, NamedSharding(MESH, P("i")))
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(placed))
    run = jax.jit(vn.implicit(lax.ragged_dot, on_materialise=only_by_rules))
    close(run(X, placed, sizes), lax.ragged_dot(X, stored.dequantize(), sizes))
