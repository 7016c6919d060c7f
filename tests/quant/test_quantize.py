import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError
from support import arrays
from support.array_types import Lora

from veneer.quant import FORMATS, QArray, dequantize, quantize, quantize_with_scale
from veneer.quant.conversion import compute
from veneer.quant.conversion.compute import CHUNK_BYTES, choose_chunks
from veneer.quant.conversion.quantize import quantize_params
from veneer.quant.formats.tiles import dividing_tiles

# Arguments of quantize for an array of shape (6, 8), and the expected shape of the scale.
TILINGS = [
    ({}, (1, 1)),
    ({"channelwise_axes": [1]}, (1, 8)),
    ({"channelwise_axes": [-1, 0]}, (6, 8)),
    ({"tiled_axes": {0: 3}}, (2, 1)),
    ({"tiled_axes": {0: 0.5}}, (2, 1)),
    ({"tiled_axes": {-1: 4}, "channelwise_axes": [0]}, (6, 2)),
    ({"tiled_axes": {np.int32(0): np.int64(2), 1: 8}}, (3, 1)),
]
FREE = [name for name, format in FORMATS.items() if format.tile_size is None]
OF_A_TILE = [name for name, format in FORMATS.items() if format.tile_size is not None]


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def spread(scale, shape):
    """Repeat the scale over its tiles, by NumPy."""
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        scale = np.repeat(scale, size // count, axis)
    return scale


def widest_gap(format):
    codes = np.arange(256, dtype=np.uint8).view(format.code_dtype if format.bits == 8 else np.uint8)
    if format.is_integer or format.codebook is not None:
        codes = np.arange(format.code_range[0], format.code_range[1] + 1)
        codes = codes[codes != 0] if format.bits == 1 else codes
    values = np.asarray(format.decode(jnp.asarray(codes), np.float32))
    return np.max(np.diff(np.unique(values[np.isfinite(values)])))


def error_bound(q, x):
    """Return half a step, plus the clipping error of a scale that was rounded down."""
    step = widest_gap(q.format) * spread(np.asarray(q.scales()), x.shape)
    # f32 rounds 127.5 steps; a scale in e4m3 has 3 bits after the first.
    rounding = 2.0**-4 if isinstance(q.scale, QArray) else 1e-5
    return step / 2 + rounding * np.abs(x).max() + 1e-30


@pytest.mark.parametrize("qtype", FORMATS)
def test_each_value_is_within_half_a_step_of_its_tile(qtype):
    x = normal(3, 64)
    q = quantize(x, qtype, channelwise_axes=[0], calibration_method=largest_kept(qtype))
    assert q.scale.shape == (3, 64 // (q.format.tile_size or 64))
    assert (np.abs(q.dequantize() - x) <= error_bound(q, np.asarray(x))).all()


def largest_kept(qtype):
    """Return a calibration method that clips nothing."""
    return "absmax" if FORMATS[qtype].calibration == "absmean" else None


@pytest.mark.parametrize("qtype", ["int8", "int3", "uint4", "nf4", "float8_e5m2"])
@pytest.mark.parametrize(("tiling", "scale_shape"), TILINGS)
def test_tiles_are_along_the_requested_axes(qtype, tiling, scale_shape):
    x = normal(6, 8)
    q = quantize(x, qtype, **tiling)
    assert q.scale.shape == scale_shape
    assert (np.abs(q.dequantize() - x) <= error_bound(q, np.asarray(x))).all()


@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize(("tiling", "scale_shape"), TILINGS)
def test_integer_codes_equal_numpy(qtype, tiling, scale_shape):
    x = normal(6, 8)
    q = quantize(x, qtype, **tiling)
    rows, columns = scale_shape
    tiles = np.asarray(x).reshape(rows, 6 // rows, columns, 8 // columns)
    bound = np.float32(FORMATS[qtype].bound)
    scale = np.abs(tiles).max(axis=(1, 3)) / bound
    np.testing.assert_allclose(q.scale, scale, rtol=2e-7)  # XLA multiplies by 1 / bound
    quotient = np.asarray(x) / spread(np.asarray(q.scale), x.shape)
    codes = np.clip(np.rint(quotient), -bound - 0.5, bound - 0.5)
    # The largest value of a tile is a tie, so the rounding of the scale decides.
    tie = np.abs(np.abs(quotient - np.rint(quotient)) - 0.5) < 1e-4
    np.testing.assert_array_equal(np.where(tie, codes, q.qvalue), codes)
    assert tie.sum() <= q.scale.size


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [
        (jnp.float16, None),
        (jnp.bfloat16, None),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.float32, jnp.float8_e8m0fnu),
    ],
)
@pytest.mark.parametrize("qtype", ["int8", "int4", "uint8", "nf4", "float8_e4m3fn"])
def test_codes_are_computed_with_the_stored_scale(qtype, dtype, scale_dtype):
    x = normal(4, 16, dtype=dtype)
    q = quantize(x, qtype, channelwise_axes=[0], scale_dtype=scale_dtype)
    assert q.dtype == dtype
    assert q.scale.dtype == (scale_dtype or dtype)
    error = np.abs(q.dequantize().astype(jnp.float32) - x.astype(jnp.float32))
    # A scale that is rounded down clips the largest value, and the result is rounded as well.
    stored = 0 if q.scale.dtype == jnp.float8_e8m0fnu else jnp.finfo(q.scale.dtype).eps
    largest = np.abs(np.asarray(x, np.float32)).max(axis=1, keepdims=True)
    half_step = widest_gap(q.format) / 2 * np.asarray(q.scales(), np.float32)
    assert (error <= half_step + 2 * largest * (stored + jnp.finfo(dtype).eps)).all()


def test_small_f16_weights_keep_their_precision():
    x = normal(4, 64, dtype=jnp.float16) * 1e-3
    q = quantize(x, "int8", channelwise_axes=[0])
    assert jnp.abs(q.dequantize() - x).max() < 1e-2 * jnp.abs(x).max()


@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_float64_is_quantized_in_float64(qtype):
    with jax.enable_x64(True):
        x = normal(4, 8, dtype=np.float64)
        q = quantize(x, qtype, channelwise_axes=[0])
        assert q.dtype == q.scale.dtype == q.dequantize().dtype == np.float64
        assert (np.abs(q.dequantize() - x) <= np.asarray(q.scale) / 2 * (1 + 1e-12)).all()
        again = quantize_with_scale(x, qtype, q.scale, q.zero_point)
        np.testing.assert_array_equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_tile_of_nan_or_zeros_does_not_affect_others(qtype):
    rows = np.array(normal(6, 128)) + 0.1
    rows[0] = 0
    rows[1, 2], rows[2, 3], rows[3, 4] = np.nan, np.inf, -np.inf
    rows[4] = 1e-38  # too small for a scale
    q = quantize(rows, qtype, channelwise_axes=[0], tiled_axes={1: FORMATS[qtype].tile_size or 128})
    dense = np.asarray(q.dequantize())
    if qtype != "int1":  # which has no 0
        assert (dense[[0, 4]] == 0).all()
    tile = slice(0, FORMATS[qtype].tile_size)
    assert np.isnan(dense[1:4, tile]).all()
    assert np.isnan(dense).sum() == 3 * len(dense[0, tile])


def test_a_scale_per_value_warns():
    with pytest.warns(UserWarning, match=r"float32\[10\] gets .*, so nf4 takes 36 bits"):
        quantize(jnp.ones(10), "nf4", channelwise_axes=[0])


@pytest.mark.parametrize("shape", [(), (1,), (0, 3)])
@pytest.mark.filterwarnings("error")  # after the filter of all tests
def test_scalars_and_empty_arrays_do_not_warn(shape):
    q = quantize(jnp.ones(shape), "int8", channelwise_axes=range(len(shape)))
    assert q.shape == shape


@pytest.mark.filterwarnings("error")
def test_a_small_scale_per_value_does_not_warn():
    q = quantize(jnp.ones(16), "int8", channelwise_axes=[0], scale_dtype="float16")
    assert q.nbytes == 48


@pytest.mark.filterwarnings("error")
def test_a_large_scale_per_value_raises_if_warnings_do():
    with pytest.raises(UserWarning, match="gets one scale per value"):
        quantize(jnp.ones(16), "int8", channelwise_axes=[0])


def test_a_symbolic_axis_with_a_scale_per_value_exports():
    (n,) = export.symbolic_shape("n")
    f = jax.jit(lambda x: quantize(x, "int8", channelwise_axes=[0]).dequantize())
    exported = export.export(f)(jax.ShapeDtypeStruct((n,), jnp.float32))
    np.testing.assert_allclose(exported.call(jnp.arange(3.0)), jnp.arange(3.0), rtol=0.01)


@pytest.mark.parametrize("key", [0, 1.5, "key", np.zeros(2)])
def test_keys_that_are_not_of_jax_raise(key):
    message = r"key must be a JAX PRNG key, such as jax\.random\.key|quantize"
    with pytest.raises((TypeError, TypeCheckError), match=message):
        quantize(jnp.ones((4, 4)), "int8", key=key)


@pytest.mark.parametrize("array", [[1.0, 2.0], (1.0,)])
def test_sequences_raise(array):
    message = f"takes an array, not a {type(array).__name__}|quantize"
    with pytest.raises((TypeError, TypeCheckError), match=message):
        quantize(array, "int8")


# XLA's maximum drops NaN on CPU, in large arrays.
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_nan_and_infinity_are_seen_in_tiles_of_any_size(bad, size):
    x = normal(3, size).at[1, size // 2].set(bad)
    dense = quantize(x, "int8", channelwise_axes=[0]).dequantize()
    assert np.isnan(dense).all(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("qtype", FORMATS)
def test_the_largest_values_are_kept_or_become_nan(qtype, dtype):
    largest = jnp.finfo(dtype).max
    x = jnp.tile(jnp.array([largest, -largest], dtype), 32)
    dense = np.asarray(quantize(x, qtype).dequantize().astype(jnp.float32))
    kept = 0.49  # the largest code of int2 is 1, and the least -2
    assert (np.isnan(dense) | (np.abs(dense) > kept * float(largest))).all()
    assert not np.isinf(dense).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("qtype", FORMATS)
def test_no_finite_value_becomes_infinite(qtype, dtype):
    format, largest = FORMATS[qtype], float(jnp.finfo(dtype).max)
    shares = np.array([1, 0.999, 0.97, 0.95, 0.9, 0.8, 0.75, 0.6])
    x = np.concatenate([np.linspace(low, 1, 128) * shares[:, None] for low in (-1, 0)])
    x = jnp.asarray(np.concatenate([x, -x[8:]]) * largest, dtype)
    how = {"channelwise_axes": [0], "tiled_axes": {1: format.tile_size or 128}}
    has_zeros = format.is_integer and format.bits >= 2
    for method in (None, "minmax") if has_zeros else (None,):
        assert not np.isinf(quantize(x, qtype, calibration_method=method, **how).dequantize()).any()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("qtype", ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2"])
def test_the_least_powers_of_two_keep_normal_numbers(qtype, compiled):
    codes = quantize(normal(8, 32), qtype)
    powers = jnp.arange(8, dtype=jnp.uint8)[:, None]
    q = codes.replace(scale=jax.lax.bitcast_convert_type(powers, jnp.float8_e8m0fnu))
    units = codes.dequantize() / codes.scales()
    expected = np.asarray(units, np.float64) * 2.0 ** (np.arange(8)[:, None] - 127)
    expected = np.where(np.abs(expected) < 2.0**-126, 0, expected)  # subnormal: 0 to XLA for CPUs
    dense = (jax.jit(dequantize) if compiled else dequantize)(q)
    np.testing.assert_array_equal(np.where(np.abs(dense) < 2.0**-126, 0, dense), expected)


@pytest.mark.parametrize("qtype", ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_beyond_the_last_power_of_two_are_clipped(qtype, dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.linspace(-largest, largest, 32).astype(dtype)
    dense = quantize(x, qtype).dequantize().astype("float32")
    x = x.astype("float32")
    np.testing.assert_allclose(dense, x, rtol=0.26, atol=largest / 6)


@pytest.mark.parametrize("qtype", ["int4", "uint3", "ternary", "nf4", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (1,), (2, 1, 3)])
def test_any_shape_is_kept(qtype, shape):
    x = jnp.ones(shape)
    q = quantize(x, qtype, channelwise_axes=range(len(shape)))
    assert q.shape == q.qvalue.shape == q.dequantize().shape == shape
    np.testing.assert_allclose(q.dequantize(), x, rtol=0.07)
    assert quantize(x, qtype).shape == shape


@pytest.mark.parametrize("qtype", OF_A_TILE)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0)])
def test_formats_with_a_fixed_tile_accept_empty_arrays(qtype, shape):
    assert quantize(jnp.ones(shape), qtype).dequantize().shape == shape


@pytest.mark.parametrize("key", [None, arrays.key(3)])
@pytest.mark.parametrize("qtype", ["int4", "uint8", "nf4", "mxfp4", "nvfp4"])
def test_jit_gives_the_same_codes(qtype, key):
    x = normal(3, 4, 64)
    params = {"channelwise_axes": [0, 1], "tiled_axes": {2: FORMATS[qtype].tile_size or 32}}
    expected = quantize(x, qtype, **params, key=key)
    compiled = jax.jit(lambda x: quantize(x, qtype, **params, key=key))(x)
    assert jax.tree.structure(compiled) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, compiled, expected)


@pytest.mark.parametrize("qtype", ["int4", "uint8", "nf4", "mxfp4"])
def test_vmap_gives_the_same_codes(qtype):
    x = normal(3, 4, 64)
    tiled = {2: FORMATS[qtype].tile_size or 32}
    expected = quantize(x, qtype, channelwise_axes=[0, 1], tiled_axes=tiled)
    tiled = {1: tiled[2]}
    mapped = jax.vmap(lambda x: quantize(x, qtype, channelwise_axes=[0], tiled_axes=tiled))(x)
    assert jax.tree.structure(mapped) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, mapped, expected)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("qtype", ["int4", "uint8", "nf4"])
def test_sharded_arrays_get_the_same_codes(qtype):
    x = normal(64, 6)
    params = {"channelwise_axes": [1], "tiled_axes": {0: 8}}
    expected = quantize(x, qtype, **params)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.jit(lambda x: quantize(x, qtype, **params))
    sharded = whole(jax.device_put(x, NamedSharding(mesh, P("x"))))
    by_shard = jax.shard_map(whole, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
    for q in (sharded, by_shard):
        jax.tree.map(np.testing.assert_array_equal, q, expected)


# Chunks of large arrays.


@pytest.mark.parametrize(
    ("qtype", "tiling"),
    [
        ("int4", {"channelwise_axes": [1], "tiled_axes": {0: 100}}),
        ("int4", {"channelwise_axes": [0], "tiled_axes": {1: 52}}),
        ("nf4", {"channelwise_axes": [1]}),
        ("uint8", {"channelwise_axes": [1], "tiled_axes": {0: 700}}),
        ("int3", {"tiled_axes": {1: 4}}),
        ("int3", {"tiled_axes": {1: 52}}),  # two tiles fill whole bytes
        ("mxfp8", {"channelwise_axes": [0], "tiled_axes": {1: 32}}),
    ],
)
def test_large_arrays_are_quantized_in_chunks(qtype, tiling):
    x = normal(2100, 2080)
    params = quantize_params(
        x, qtype, tiling.get("channelwise_axes", ()), tiling.get("tiled_axes"), None, None
    )
    chunks = choose_chunks(x, params.scale_shape, FORMATS[qtype])
    assert chunks is not None
    whole = compute._quantize(x, None, params, None)
    in_chunks = compute._quantize.lower(x, None, params, chunks).compile()
    jax.tree.map(np.testing.assert_array_equal, in_chunks(x, None), whole)
    # Temporary arrays have the size of a chunk, not the 17 MB of the array.
    assert in_chunks.memory_analysis().temp_size_in_bytes < 2.5 * CHUNK_BYTES


@pytest.mark.parametrize("qtype", ["int8", "int3"])
def test_chunks_of_a_long_axis_are_written_in_place(qtype):
    # A tile times the size of a chunk exceeds int32 here, as in an embedding of 2**20 short rows.
    x = normal(2**16, 64, dtype="bfloat16")
    rows = quantize(x, qtype, channelwise_axes=[0])
    tiles = quantize(x.reshape(-1), qtype, tiled_axes={0: 64})
    np.testing.assert_array_equal(tiles.codes(), rows.codes().reshape(-1))
    np.testing.assert_array_equal(tiles.scale, rows.scale.reshape(-1))


def test_each_chunk_has_its_own_key():
    x = jnp.full((2048, 2048), 0.5).at[:, 0].set(1.0)
    q = quantize(x, "int8", channelwise_axes=[0], key=jax.random.key(0))
    up = np.asarray(q.codes()[:, 1:] == 64)  # 0.5 is 63.75 steps
    assert abs(up.mean() - 0.75) < 0.01
    assert (up[:512] != up[512:1024]).mean() > 0.3


@pytest.mark.parametrize(
    ("qtype", "nbytes"), [("int8", 15), ("int4", 9), ("nf4", 9), ("int3", 9), ("ternary", 3)]
)
def test_nbytes_counts_all_stored_arrays(qtype, nbytes):
    q = quantize(normal(3, 5), qtype)
    assert q.nbytes == nbytes + 4 == sum(leaf.nbytes for leaf in jax.tree.leaves(q))


def test_values_and_scales_have_no_derivative():
    of_array = lambda x: quantize(x, "int8").dequantize().sum()
    of_scale = lambda s: quantize_with_scale(jnp.ones(3), "int8", s).dequantize().sum()
    assert jax.grad(of_array)(normal(8)).tolist() == [0] * 8
    assert jax.grad(of_scale)(jnp.ones(1)).tolist() == [0]


@pytest.mark.parametrize(
    ("shape", "kwargs", "error", "message"),
    [
        (
            (6, 8),
            {"tiled_axes": {1: 3}},
            ValueError,
            r"tile of 3 .*axis 1 \(size 8\) of shape \(6, 8\)",
        ),
        ((6, 8), {"tiled_axes": {1: 3}}, ValueError, "sizes that do: 1, 2, 4, 8"),
        ((6, 8), {"tiled_axes": {0: 0}}, ValueError, "tile of 0 does not divide"),
        (
            (6, 8),
            {"tiled_axes": {0: 1.5}},
            ValueError,
            r"tile size of axis 0 .* is 1.5: .* a fraction",
        ),
        ((6, 8), {"tiled_axes": {0: 0.7}}, ValueError, "tile of 4 does not divide"),
        ((6, 8), {"tiled_axes": {5: 0.5}}, ValueError, "axis 5 is out of range"),
        ((6, 8), {"tiled_axes": {2: 1}}, ValueError, r"axis 2 is out of range .* \(6, 8\)"),
        ((), {"channelwise_axes": [0]}, ValueError, r"axis 0 is out of range .* \(\)"),
        ((6, 8), {"channelwise_axes": [1], "tiled_axes": {-1: 2}}, ValueError, "named twice"),
        ((6, 8), {"channelwise_axes": [1, -1]}, ValueError, "named twice"),
        ((6, 8), {"calibration_method": "max"}, ValueError, "the methods are absmax"),
        (
            (6, 8),
            {"scale_dtype": jnp.int8},
            TypeError,
            "scale_dtype is int8, but must be one of float16",
        ),
    ],
)
def test_invalid_arguments_raise(shape, kwargs, error, message):
    with pytest.raises(error, match=message):
        quantize(jnp.ones(shape), "int8", **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tiled_axes": {1: 16}}, "mxfp4 needs tiles of 32 along one axis"),
        ({"channelwise_axes": [0, 1]}, "mxfp4 needs an axis with tiles of 32"),
        ({"scale_dtype": jnp.float32}, "needs scale_dtype float8_e8m0fnu, not float32"),
    ],
)
def test_formats_with_a_fixed_tile_reject_others(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones((2, 64)), "mxfp4", **kwargs)


def test_only_floating_arrays_are_quantized():
    for refused in (quantize, lambda x, qtype: quantize_with_scale(x, qtype, 1.0)):
        with pytest.raises(TypeError, match="array has dtype int32, but quantize takes float16"):
            refused(jnp.arange(3), "int8")


def test_the_nearest_dividing_tile_sizes_are_suggested():
    assert dividing_tiles(384, 100) == [32, 48, 64, 96, 128, 192]
    assert dividing_tiles(7, 4) == [1, 7]


def test_other_implicit_arrays_are_materialized():
    low_rank = Lora(normal(6, 4), normal(6, 2), normal(2, 4))
    expected = quantize(low_rank.materialise(), "int8")
    for q in (quantize(low_rank, "int8"), jax.jit(lambda w: quantize(w, "int8"))(low_rank)):
        np.testing.assert_allclose(q.dequantize(), expected.dequantize(), rtol=1e-5)


# quantize_with_scale.


@pytest.mark.parametrize("qtype", FORMATS)
def test_the_scale_of_quantize_gives_the_same_codes(qtype):
    x = normal(3, 64)
    q = quantize(x, qtype, channelwise_axes=[0])
    again = quantize_with_scale(x, qtype, q.scale, q.zero_point)
    assert jax.tree.structure(again) == jax.tree.structure(q)
    jax.tree.map(np.testing.assert_array_equal, again, q)


def test_a_given_scale_clips_and_keeps_nan():
    x = jnp.array([[1.0, 100.0], [-100.0, 0.3], [jnp.nan, 1.0], [1.0, jnp.inf]])
    q = quantize_with_scale(x, "int8", jnp.full((4, 1), 0.5))
    expected = [[1, 63.5], [-64, 0.5], [np.nan] * 2, [np.nan] * 2]
    np.testing.assert_array_equal(q.dequantize(), expected)
    assert q.dtype == jnp.float32
    shifted = quantize_with_scale(x[:2], "uint4", 0.5, 3)
    np.testing.assert_array_equal(shifted.dequantize(), [[1, 6], [-1.5, 0.5]])  # 0.3 / 0.5 is 0.6


def test_a_given_scale_is_stored_in_the_dtype_of_the_format():
    x = normal(2, 64)
    q = quantize_with_scale(x, "mxfp4", jnp.full((2, 2), 0.3))
    assert q.scale.dtype == jnp.float8_e8m0fnu
    assert (q.scales() == 0.5).all()  # a power of two, rounded up
    np.testing.assert_allclose(
        quantize_with_scale(x, "nvfp4", jnp.full((2, 4), 0.3)).scales(), 0.3, rtol=1e-6
    )
    assert quantize_with_scale(x.astype(jnp.bfloat16), "int8", 0.5).scale.dtype == jnp.bfloat16
    assert quantize_with_scale(x, "int8", jnp.bfloat16(0.5)).scale.dtype == jnp.bfloat16
    assert quantize_with_scale(x, "int8", 0.0).scale.item() == 1  # cannot be divided by


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("int8", arrays.ones(8)), ValueError, r"scale of shape \(8,\) .* shape \(6, 8\)"),
        (("int8", arrays.ones((1, 3))), ValueError, r"scale of shape \(1, 3\)"),
        (("int8", 1.0, arrays.ones((4, 1))), ValueError, r"zero_point of shape \(4, 1\)"),
        (("nf4", 1.0, 3), ValueError, "nf4 has no zero_point"),
        (("int8", arrays.ones((1, 1), jnp.int32)), TypeError, "scale_dtype is int32"),
    ],
)
def test_a_given_scale_that_does_not_fit_raises(args, error, message):
    with pytest.raises(error, match=message):
        quantize_with_scale(normal(6, 8), *args)


def test_dequantize_rejects_other_types():
    with pytest.raises(TypeError, match=r"q|dequantize"):
        dequantize(jnp.ones(3))


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_tile_of_zeros_stays_zero_without_a_zero_code(qtype):
    w = jnp.ones((32, 2)).at[:, 0].set(0)
    tile = FORMATS[qtype].tile_size or 32
    q = quantize(w, qtype, channelwise_axes=[1], tiled_axes={0: tile})
    assert not q.dequantize()[:, 0].any()
    assert q.dequantize()[:, 1].all()


def test_a_given_scale_of_zero_gives_zeros_without_a_zero_code():
    assert not quantize_with_scale(jnp.zeros(4), "int1", 0.0).dequantize().any()
