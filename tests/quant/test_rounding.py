import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veneer.quant import FORMATS, quantize, quantize_with_scale
from veneer.quant.formats.rounding import encode_stochastically

DRAWS = 4000
# Formats whose codes are rounded alike are one of these.
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
def test_the_mean_is_the_value_and_each_draw_a_neighbour(qtype):
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
def test_values_that_the_format_has_are_kept_and_others_clipped(qtype):
    format = FORMATS[qtype]
    values = values_of(format).astype(np.float32)
    draws = rounded(np.tile(values, (300, 1)), format)
    assert (draws == values).all()
    beyond = np.array([1e9, -1e9, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(
        rounded(beyond, format), np.where(beyond > 0, values.max(), values.min())
    )


@pytest.mark.parametrize("qtype", ["int4", "uint4", "nf4", "mxfp8", "nvfp4"])
def test_quantising_with_a_key_is_right_on_average(qtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)), jnp.float32)
    draw = lambda key: quantize(x, qtype, channelwise_axes=[0], key=key).dequantize()
    draws = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 1500)))
    nearest = np.asarray(quantize(x, qtype, channelwise_axes=[0]).dequantize())
    # Rounded, the scale or the zero point may clip the ends of a tile, of 16 values and more.
    tiles = np.asarray(x).reshape(2, 4, 16)
    ends = 0.85 * tiles.min(-1, keepdims=True), 0.85 * tiles.max(-1, keepdims=True)
    inside = ((ends[0] < tiles) & (tiles < ends[1])).reshape(2, 64)
    # What comes up once in a thousand draws may not come up at all.
    rare = 10 / 1500 * np.ptp(draws, axis=0).max()
    error = np.abs(draws.mean(0) - x)[inside]
    assert (error <= 5 * draws.std(0)[inside] / np.sqrt(1500) + rare).all()
    assert np.abs(nearest - x)[inside].mean() > 5 * error.mean()


def test_the_same_key_rounds_alike_and_another_does_not():
    x = jnp.linspace(-1, 1, 999)
    codes = lambda seed: np.asarray(
        quantize_with_scale(x, "int8", 0.01, key=jax.random.key(seed)).codes()
    )
    np.testing.assert_array_equal(codes(0), codes(0))
    assert (codes(0) != codes(1)).any()
    old = quantize_with_scale(x, "int8", 0.01, key=jax.random.PRNGKey(0)).codes()
    np.testing.assert_array_equal(old, codes(0))


def test_nan_is_left_to_the_scale():
    x = jnp.array([[jnp.nan, 1.0], [0.3, 1.0]])
    dense = quantize(x, "int8", channelwise_axes=[0], key=jax.random.key(0)).dequantize()
    assert np.isnan(dense).tolist() == [[True, True], [False, False]]
