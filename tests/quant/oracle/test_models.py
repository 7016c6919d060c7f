"""A model quantized by Qwix's provider, and by our rules for its parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from support import arrays

import veneer as vn
from veneer.quant import Rule, quantize_tree

# Qwix 0.1.8 imports a name that newer versions of Flax have renamed.
pytestmark = pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Conv(8, (3, 3), strides=(2, 2), name="conv")(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.gelu(nn.Dense(32, name="hidden")(x))
        return nn.Dense(5, name="out")(x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(32, name="up")(x))
        return nn.Dense(5, name="down")(nn.relu(nn.Dense(64, name="middle")(x)))


IMAGES = arrays.normal(4, 8, 8, 3, seed=1)
VECTORS = arrays.normal(4, 6, 16, seed=2)


def by_qwix(model, params, x, *rules):
    quantized = qwix.quantize_model(model, qwix.PtqProvider(rules))
    abstract = jax.eval_shape(quantized.init, jax.random.key(0), x)["params"]
    return quantized.apply({"params": qwix.quantize_params(params["params"], abstract)}, x)


def by_us(model, params, x, *rules):
    return jax.jit(vn.implicit(model.apply))(quantize_tree(params, rules), x)


@pytest.mark.parametrize(("qtype", "tile"), [("int8", None), ("int4", 8), ("nf4", 16)])
def test_quantized_weights_give_the_outputs_of_qwix(qtype, tile):
    model = Attention()
    params = model.init(jax.random.key(0), VECTORS)
    theirs = qwix.QuantizationRule(weight_qtype=getattr(jnp, qtype, qtype), tile_size=tile)
    expected = by_qwix(model, params, VECTORS, theirs)
    found = by_us(model, params, VECTORS, Rule(r".*\.kernel", qtype, tile_size=tile))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert np.abs(found - model.apply(params, VECTORS)).max() > 1e-4  # differs from the dense model


def test_quantized_activations_give_the_outputs_of_qwix():
    model = Network()
    params = model.init(jax.random.key(0), IMAGES)
    expected = by_qwix(
        model,
        params,
        IMAGES,
        qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=jnp.int8),
    )
    found = by_us(
        model,
        params,
        IMAGES,
        Rule(r".*conv\.kernel", "int8", tile_axis=(-4, -3, -2), act_qtype="int8"),
        Rule(r".*\.kernel", "int8", act_qtype="int8"),
    )
    # A difference in the last bit can change the code of an activation by one.
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())
    dense = model.apply(params, IMAGES)
    assert np.abs(found - dense).max() > 3 * np.abs(found - expected).max()
