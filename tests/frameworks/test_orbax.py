"""Orbax saves and restores trees with implicit arrays as pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.every_type import EVERY_TYPE, value

import veneer as vn


def restored(tree, path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, like)


def assert_same(found, tree):
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (x.dtype, np.asarray(x).tobytes()) == (y.dtype, np.asarray(y).tobytes())


# Orbax cannot save empty arrays, such as the leaf of an Identity.
@pytest.mark.parametrize("name", [name for name in EVERY_TYPE if name != "Identity"])
def test_every_type_is_restored(name, tmp_path):
    tree = {"w": value(name)}
    assert_same(restored(tree, tmp_path / "saved", jax.eval_shape(lambda: tree)), tree)


def test_adapters_and_their_optimizer_state_are_restored(tmp_path):
    w = vn.quant.quantize(jnp.ones((64, 8)), "nf4", channelwise_axes=[1], tiled_axes={0: 32})
    params = {"w": vn.types.LoraArray.init(w, 2, key=jax.random.key(0)), "b": jnp.zeros(8)}
    adapters, _ = vn.tree.partition(params, vn.trainable(params))
    tree = {"adapters": adapters, "state": optax.adam(1e-3).init(adapters)}
    assert_same(restored(tree, tmp_path / "saved", jax.eval_shape(lambda: tree)), tree)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_sharded_arrays_are_restored_with_their_sharding(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q = vn.quant.quantize(jnp.ones((64, 8)), "nf4", channelwise_axes=[1], tiled_axes={0: 16})
    tree = {"w": jax.device_put(q, NamedSharding(mesh, P("x")))}
    found = restored(tree, tmp_path / "saved", tree)
    assert_same(found, tree)
    assert found["w"].packed.sharding.spec == P("x")
