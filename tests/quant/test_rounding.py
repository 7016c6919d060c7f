import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veneer.quant import FORMATS, quantize, quantize_with_scale
from veneer.quant.formats.format import encode_stochastically

DRAWS = 4000
# One format for each kind of rounding.
KINDS = ["int8", "int4", "int1", "ternary", "uint4", "nf4", "float4_e2m1fn", "float6_e3m2fn"]
KINDS += ["float8_e4m3fn", "float8_e5m2"]


def values_of(format):
    if format.codebook is not None:
        return np.unique(format.codebook)
    if format.is_integer:
        least, largest = format.code_range
        return np.array([-1, 1] if format.bits == 1 else range(least, largest + 1))
    values = np.arange(256, dtype=np.uint8).view(format.code_dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def rounded(x, format, seed=0):
    codes = encode_stochastically(jnp.asarray(x, jnp.float32), format, jax.random.key(seed))
    return np.asarray(format.decode(codes, jnp.float32))


@pytest.mark.parametrize("qtype", KINDS)
def test_draws_are_neighbors_and_their_mean_is_the_value(qtype):
    format = FORMATS[qtype]
    values = values_of(format).astype(np.float32)
    at = np.linspace(0, len(values) - 2, 12).astype(int)
    low, high = values[at], values[at + 1]
    share = np.linspace(0.05, 0.95, 12).astype(np.float32)
    x = low + share * (high - low)
    draws = rounded(np.tile(x, (DRAWS, 1)), format)
    assert ((draws == low) | (draws == high)).all()
    deviation = (high - low) * np.sqrt(share * (1 - share) / DRAWS)
    assert (np.abs(draws.mean(0) - x) < 4.5 * deviation).all()


@pytest.mark.parametrize("qtype", KINDS)
def test_exact_values_are_kept_and_large_ones_clipped(qtype):
    format = FORMATS[qtype]
    values = values_of(format).astype(np.float32)
    draws = rounded(np.tile(values, (300, 1)), format)
    assert (draws == values).all()
    beyond = np.array([1e9, -1e9, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(
        rounded(beyond, format), np.where(beyond > 0, values.max(), values.min())
    )


@pytest.mark.parametrize("qtype", ["int4", "uint4", "nf4", "mxfp8", "nvfp4"])
def test_stochastic_rounding_has_the_right_mean(qtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)), jnp.float32)
    draw = lambda key: quantize(x, qtype, channelwise_axes=[0], key=key).dequantize()
    draws = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 1500)))
    nearest = np.asarray(quantize(x, qtype, channelwise_axes=[0]).dequantize())
    # The rounding of the scale or zero point can clip the ends of a tile of at least 16 values.
    tiles = np.asarray(x).reshape(2, 4, 16)
    ends = 0.85 * tiles.min(-1, keepdims=True), 0.85 * tiles.max(-1, keepdims=True)
    inside = ((ends[0] < tiles) & (tiles < ends[1])).reshape(2, 64)
    # A code with probability 0.001 may never be drawn.
    rare = 10 / 1500 * np.ptp(draws, axis=0).max()
    error = np.abs(draws.mean(0) - x)[inside]
    assert (error <= 5 * draws.std(0)[inside] / np.sqrt(1500) + rare).all()
    assert np.abs(nearest - x)[inside].mean() > 5 * error.mean()


def test_the_key_determines_the_rounding():
    x = jnp.linspace(-1, 1, 999)
    codes = lambda seed: np.asarray(
        quantize_with_scale(x, "int8", 0.01, key=jax.random.key(seed)).codes()
    )
    np.testing.assert_array_equal(codes(0), codes(0))
    assert (codes(0) != codes(1)).any()
    old = quantize_with_scale(x, "int8", 0.01, key=jax.random.PRNGKey(0)).codes()
    np.testing.assert_array_equal(old, codes(0))


def test_nan_is_encoded_like_zero():
    x = jnp.array([[jnp.nan, 1.0], [0.3, 1.0]])
    dense = quantize(x, "int8", channelwise_axes=[0], key=jax.random.key(0)).dequantize()
    assert np.isnan(dense).tolist() == [[True, True], [False, False]]
