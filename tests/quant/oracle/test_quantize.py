"""Codes, scales and zero points of `quantize`, compared with Qwix 0.1.8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from support.qwix_arrays import QWIX_NAMES, from_qwix, to_qwix

from veneer.quant import FORMATS, QArray, dequantize, quantize

SHAPE = (64, 96)

# Arguments of `quantize` in both libraries.
TILINGS = {
    "one scale": {},
    "channelwise": {"channelwise_axes": [1]},
    "tiled": {"channelwise_axes": [1], "tiled_axes": {0: 32}},
    "tiled on both axes": {"tiled_axes": {0: 16, 1: 48}},
}
ANY_TILE = [name for name in QWIX_NAMES if FORMATS[name].tile_size is None]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def normal(dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), dtype)


def float64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x, np.float64)


def exact_values(q: QArray) -> np.ndarray:
    """Dequantize in float64 by NumPy, without the last rounding."""
    values = float64(q.format.decode(q.codes(), jnp.float32))
    scale, zero_point = float64(q.scales()), q.zero_point
    if zero_point is not None:
        values = values - spread(np.asarray(zero_point, np.float64))
    return values * spread(scale)


def spread(scale: np.ndarray) -> np.ndarray:
    for axis, (count, size) in enumerate(zip(scale.shape, SHAPE, strict=True)):
        scale = np.repeat(scale, size // count, axis)
    return scale


def both(x, qtype, **arguments) -> tuple[QArray, QArray]:
    theirs = qwix.quantize(x, QWIX_NAMES[qtype], **arguments)
    return quantize(x, qtype, **arguments), from_qwix(theirs)


def assert_same_to_rounding(x, ours: QArray, theirs: QArray):
    """Assert that both chose a nearest value, with scales that differ by one rounding at most."""
    assert (ours.zero_point is None) == (theirs.zero_point is None)
    if ours.zero_point is not None:
        np.testing.assert_array_equal(ours.zero_point, theirs.zero_point)
    eps = float(jnp.finfo(x.dtype).eps)
    our_scale, their_scale = float64(ours.scales()), float64(theirs.scales())
    np.testing.assert_allclose(our_scale, their_scale, rtol=eps)
    x, a, b = float64(x), exact_values(ours), exact_values(theirs)
    differ = ~np.isclose(a, b, rtol=2 * eps, atol=0)
    # A tie, up to the precision of the quotient, can get either code. The largest value of a tile
    # is a tie, because `scale = absmax / (qmax + 1/2)`.
    slack = 4 * eps * np.abs(x)
    assert (np.abs(np.abs(a - x) - np.abs(b - x))[differ] <= slack[differ]).all()
    # Qwix divides in the dtype of the array. We divide in f32 at least, so our code is nearer.
    comparable = differ & spread(our_scale == their_scale)
    rounding = 4e-7 * np.abs(x)
    assert (np.abs(a - x) <= np.abs(b - x) + rounding)[comparable].all()
    if eps < 1e-6:
        assert differ.mean() < 0.02


CASES = [(tiling, "float32") for tiling in TILINGS] + [("tiled", "bfloat16"), ("tiled", "float16")]
# In these formats, Qwix replaces normal scales in f16 by 1: see below.
TOO_SMALL_IN_F16 = ["float8_e4m3fn", "float8_e5m2", "int8"]
ODD_WIDTHS = {"int3", "int5", "int6", "int7"}  # covered by the other formats


@pytest.mark.parametrize(
    ("qtype", "tiling", "dtype"),
    [
        (qtype, tiling, dtype)
        for qtype in ANY_TILE
        for tiling, dtype in CASES
        if not (dtype == "float16" and qtype in TOO_SMALL_IN_F16)
        and not (qtype in ODD_WIDTHS and (tiling, dtype) != ("tiled", "float32"))
    ],
)
def test_absmax_gives_the_scales_and_codes_of_qwix(qtype, tiling, dtype):
    x = normal(DTYPES[dtype])
    assert_same_to_rounding(x, *both(x, qtype, **TILINGS[tiling]))


EXACT = ["int8", "int6", "int4", "int3", "nf4", "float8_e4m3fn"]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("qtype", EXACT)
def test_absmax_gives_the_bits_of_qwix_compiled(qtype, tiling):
    # The largest value of a tile is a tie, so the last bit of the scale decides.
    quantize_compiled = jax.jit(
        functools.partial(qwix.quantize, qtype=QWIX_NAMES[qtype], **TILINGS[tiling])
    )
    for seed in range(20 if tiling == "one scale" else 2):
        x = normal(jnp.float32, seed)
        ours, theirs = quantize(x, qtype, **TILINGS[tiling]), from_qwix(quantize_compiled(x))
        np.testing.assert_array_equal(ours.scale, theirs.scale)
        np.testing.assert_array_equal(ours.codes(), theirs.codes())


def test_one_eager_scale_of_qwix_differs_when_compiled():
    eager = functools.partial(qwix.quantize, qtype=jnp.int4)
    compiled = jax.jit(eager)
    pairs = [
        (eager(x).scale, compiled(x).scale) for x in (normal(jnp.float32, s) for s in range(20))
    ]
    apart = [abs(float((a / b).item()) - 1) for a, b in pairs]
    assert 0 < max(apart) < 2 * float(jnp.finfo(jnp.float32).eps)


def test_unsigned_codes_by_absmax_cover_negative_values():
    x = jnp.abs(normal(jnp.float32))
    options = {"channelwise_axes": [1], "calibration_method": "absmax"}
    ours, theirs = quantize(x, "uint8", **options), qwix.quantize(x, jnp.uint8, **options)
    assert theirs.zero_point is None
    assert (np.asarray(ours.zero_point) == 128).all()
    np.testing.assert_allclose(ours.scale, theirs.scale * (255.5 / 127.5), rtol=1e-6)
    error = lambda x, values: rms(float64(values) - float64(x))
    # For positive values, the default method "minmax" has the same error.
    assert error(x, dequantize(quantize(x, "uint8", channelwise_axes=[1]))) < 1.01 * error(
        x, qwix.dequantize(theirs)
    )
    # In Qwix, all negative values become 0.
    x = normal(jnp.float32)
    theirs = qwix.dequantize(qwix.quantize(x, jnp.uint8, **options))
    assert (theirs >= 0).all()
    assert error(x, dequantize(quantize(x, "uint8", **options))) < 0.02 * error(x, theirs)


@pytest.mark.parametrize("qtype", TOO_SMALL_IN_F16)
def test_f16_weights_keep_scales_that_qwix_replaces(qtype):
    # Qwix replaces scales below the root of the smallest normal number (1/128 in f16) by 1.
    x = normal(jnp.float16) * 0.1
    ours, theirs = both(x, qtype, channelwise_axes=[1])
    assert (theirs.scale == 1).all()
    assert rms(exact_values(ours) - float64(x)) < 0.1 * rms(float64(x))
    if qtype == "int8":
        assert (exact_values(theirs) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qtype", ["int8", "int4"])  # Qwix has zero points only for these
def test_minmax_gives_the_scales_codes_and_zero_points_of_qwix(qtype, dtype):
    x = normal(DTYPES[dtype]) + 0.7
    ours, theirs = both(x, qtype, calibration_method="minmax", **TILINGS["tiled"])
    assert ours.zero_point.dtype == theirs.zero_point.dtype
    apart = np.abs(ours.zero_point.astype(int) - theirs.zero_point.astype(int))
    assert apart.max() <= (dtype != "float32")  # Qwix computes it in the dtype of the array
    if dtype == "float32":
        assert_same_to_rounding(x, ours, theirs)
    else:
        eps = float(jnp.finfo(x.dtype).eps)
        levels = 2**ours.format.bits
        step = spread(float64(theirs.scales())) * (1 + levels * eps)
        assert (np.abs(exact_values(ours) - exact_values(theirs)) <= step).all()


@pytest.mark.usefixtures("current_emitters")
@pytest.mark.parametrize("qtype", ["mxfp8", "mxfp4"])
def test_microscaling_gives_the_powers_of_two_and_codes_of_qwix(qtype):
    x = normal(jnp.float32)
    ours, theirs = both(x, qtype, channelwise_axes=[1], tiled_axes={0: 32})
    assert ours.scale.dtype == jnp.float8_e8m0fnu  # Qwix keeps the dtype of the array
    np.testing.assert_array_equal(ours.scales(), theirs.scales())
    # Dividing by a power of two is exact, so no tie can get another code.
    np.testing.assert_array_equal(exact_values(ours), exact_values(theirs))


def test_microscaling_does_not_clip_bf16_tiles_as_qwix_does():
    # Qwix computes the logarithm of the scale in bf16. This can round a scale down to a power of
    # two, which clips the largest value by up to two percent.
    x = normal(jnp.bfloat16)
    ours, theirs = both(x, "mxfp8", channelwise_axes=[1], tiled_axes={0: 32})
    largest = np.abs(float64(x)).reshape(2, 32, 96).max(1)
    bound = ours.format.bound
    assert (float64(ours.scales()) * bound >= largest).all()
    ratio = float64(ours.scales()) / float64(theirs.scales())
    assert np.isin(ratio, [1, 2]).all()
    clipped = largest / (float64(theirs.scales()) * bound)
    assert clipped[ratio == 2].size > 0
    assert (clipped[ratio == 2] > 1).all()
    assert (clipped < 1.03).all()


def test_nvfp4_has_one_more_scale_than_qwix():
    x = normal(jnp.float32)
    tiling = {"channelwise_axes": [1], "tiled_axes": {0: 16}}
    ours, theirs = both(x, "nvfp4", **tiling)
    assert theirs.scale.scale.size == 1
    assert (theirs.scale.scale == 1).all()
    assert ours.scale.scale.shape == (1, 1)
    # The largest scale is the largest number of e4m3, so that few scales are subnormal.
    np.testing.assert_allclose(float(ours.scale.codes().astype(jnp.float32).max()), 448)
    eps = float(jnp.finfo(jnp.float8_e4m3fn).eps)
    np.testing.assert_allclose(ours.scales(), theirs.scales(), rtol=eps)
    assert rms(exact_values(ours) - x) < 1.05 * rms(exact_values(theirs) - x)


def test_nvfp4_keeps_small_weights_that_qwix_rounds_to_zero():
    x = normal(jnp.float32) * 1e-3  # scales below 2**-9 become 0 in e4m3
    ours, theirs = both(x, "nvfp4", channelwise_axes=[1], tiled_axes={0: 16})
    assert rms(exact_values(ours) - x) < 0.15 * rms(x)
    assert np.isnan(exact_values(theirs)).any() or rms(exact_values(theirs) - x) > 0.5 * rms(x)


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_codes_use_the_stored_scale_unlike_qwix(scale_dtype):
    x = normal(jnp.float32)
    ours, theirs = both(x, "int8", channelwise_axes=[1], scale_dtype=scale_dtype)
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    # Qwix dequantizes to the dtype of the scale. We keep the dtype of the input.
    assert (theirs.dtype, ours.dtype) == (scale_dtype, x.dtype)
    assert rms(exact_values(ours) - x) <= rms(exact_values(theirs) - x)


@pytest.mark.parametrize("qtype", QWIX_NAMES)
def test_the_same_codes_dequantize_to_the_same_values(qtype):
    tile = FORMATS[qtype].tile_size or 32
    theirs = qwix.quantize(
        normal(jnp.float32), QWIX_NAMES[qtype], channelwise_axes=[1], tiled_axes={0: tile}
    )
    ours = from_qwix(theirs)
    np.testing.assert_array_equal(dequantize(ours), qwix.dequantize(theirs))
    back = to_qwix(ours)
    assert (back.qvalue.dtype, back.qtype) == (theirs.qvalue.dtype, theirs.qtype)
    assert (back.qvalue.astype(jnp.float32) == theirs.qvalue.astype(jnp.float32)).all()
    np.testing.assert_array_equal(back.scale, theirs.scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("qtype", "method"),
    [
        ("int8", "absmax,0.8"),
        ("int4", "minmax,0.9"),
        ("int4", "rms,2.5"),
        ("nf4", "rms,3"),
        ("float8_e4m3fn", "rms,4"),
    ],
)
def test_the_numbers_of_a_method_mean_the_same_as_in_qwix(qtype, method, dtype):
    x = normal(DTYPES[dtype])
    ours, theirs = both(x, qtype, calibration_method=method, **TILINGS["tiled"])
    if dtype == "float32":
        # The order of sums differs, so scales can differ by a few roundings. No value outside of
        # the range is a tie.
        np.testing.assert_allclose(ours.scales(), theirs.scales(), rtol=1e-6)
        a, b = exact_values(ours), exact_values(theirs)
        assert (~np.isclose(a, b, rtol=2e-6, atol=1e-7)).mean() < 0.002
    else:
        # Qwix computes the mean of squares in bf16, so its scales differ by a percent.
        np.testing.assert_allclose(float64(ours.scales()), float64(theirs.scales()), rtol=0.03)


@pytest.mark.parametrize("method", ["fixed,2", "fixed,-2,2", "fixed,-1,3"])
def test_a_fixed_range_equals_qwix_per_tile(method):
    x = normal(jnp.float32)
    ours, theirs = both(x, "int8", calibration_method=method, channelwise_axes=[1])
    # Qwix ignores the tiles and has one scale. Ours are all equal.
    assert (theirs.scale.shape, ours.scale.shape) == ((1, 1), (1, SHAPE[1]))
    zero_point = None if ours.zero_point is None else ours.zero_point[:, :1]
    one = QArray(ours.qvalue, ours.scale[:, :1], zero_point)
    assert_same_to_rounding(x, one, theirs)


def test_a_tile_of_zeros_has_scale_one_in_both():
    x = normal(jnp.float32).at[:, 3].set(0)
    ours, theirs = both(x, "int8", channelwise_axes=[1])
    assert ours.scale[0, 3] == theirs.scale[0, 3] == 1
    assert (exact_values(ours)[:, 3] == 0).all()


def test_tiny_values_are_kept_and_become_zero_in_qwix():
    x = (
        normal(jnp.float32) * 1e-21
    )  # Qwix replaces scales below the root of the smallest normal number
    ours, theirs = both(x, "int8", channelwise_axes=[1])
    assert (exact_values(theirs) == 0).all()
    assert rms(exact_values(ours) - x) < 0.01 * rms(x)


def test_nan_stays_in_its_tile_and_becomes_a_number_in_qwix():
    x = normal(jnp.float32).at[0, 0].set(jnp.nan)
    ours, theirs = both(x, "int8", channelwise_axes=[1])
    assert np.isnan(exact_values(ours)[:, 0]).all()
    assert np.isfinite(exact_values(ours)[:, 1:]).all()
    assert np.isfinite(exact_values(theirs)[:, 1:]).all()
