import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_types import Lora

import veneer as vn
from veneer.quant import FORMATS, Packing, QArray, dequantize, quantize
from veneer.quant.tiles import dividing_tiles

# Arguments of quantize for an array of shape (6, 8), and the shape of the scale that they ask for.
TILINGS = [
    ({}, (1, 1)),
    ({"channelwise_axes": [1]}, (1, 8)),
    ({"channelwise_axes": [-1, 0]}, (6, 8)),
    ({"tiled_axes": {0: 3}}, (2, 1)),
    ({"tiled_axes": {-1: 4}, "channelwise_axes": [0]}, (6, 2)),
    ({"tiled_axes": {0: 2, 1: 8}}, (3, 1)),
]


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def spread(scale, shape):
    """The scale repeated over its tiles, by NumPy."""
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        scale = np.repeat(scale, size // count, axis)
    return scale


def widest_gap(format):
    return 1.0 if format.codebook is None else float(np.max(np.diff(format.codebook)))


@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize(("tiling", "scale_shape"), TILINGS)
def test_each_value_is_within_half_a_step_of_its_tile(qtype, tiling, scale_shape):
    x = normal(6, 8)
    q = quantize(x, qtype, **tiling)
    assert q.scale.shape == scale_shape
    half_step = widest_gap(q.format) / 2 * spread(np.asarray(q.scale), x.shape)
    assert (np.abs(q.dequantize() - x) <= half_step * (1 + 1e-4)).all()  # f32 rounds 127.5 steps


@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize(("tiling", "scale_shape"), TILINGS)
def test_integer_codes_are_what_numpy_finds_by_hand(qtype, tiling, scale_shape):
    x = normal(6, 8)
    q = quantize(x, qtype, **tiling)
    rows, columns = scale_shape
    tiles = np.asarray(x).reshape(rows, 6 // rows, columns, 8 // columns)
    bound = np.float32(FORMATS[qtype].bound)
    scale = np.abs(tiles).max(axis=(1, 3)) / bound
    np.testing.assert_allclose(q.scale, scale, rtol=2e-7)  # XLA multiplies by 1 / bound
    quotient = np.asarray(x) / spread(np.asarray(q.scale), x.shape)
    codes = np.clip(np.rint(quotient), -bound - 0.5, bound - 0.5)
    # The largest value of a tile lies half-way between two codes, so its rounding decides.
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
        (jnp.float32, jnp.float16),
    ],
)
@pytest.mark.parametrize("qtype", FORMATS)
def test_codes_are_found_from_the_scale_as_stored(qtype, dtype, scale_dtype):
    x = normal(4, 16, dtype=dtype)
    q = quantize(x, qtype, channelwise_axes=[0], scale_dtype=scale_dtype)
    assert q.dtype == dtype
    assert q.scale.dtype == (scale_dtype or dtype)
    error = np.abs(q.dequantize().astype(jnp.float32) - x.astype(jnp.float32))
    # A scale that was rounded down may clip the largest value, and the result has its own rounding.
    rounding = jnp.finfo(q.scale.dtype).eps + jnp.finfo(dtype).eps
    largest = np.abs(np.asarray(x, np.float32)).max(axis=1, keepdims=True)
    half_step = widest_gap(q.format) / 2 * np.asarray(q.scale, np.float32)
    assert (error <= half_step + largest * rounding).all()


def test_small_f16_weights_keep_their_precision():
    x = normal(4, 64, dtype=jnp.float16) * 1e-3
    q = quantize(x, "int8", channelwise_axes=[0])
    assert jnp.abs(q.dequantize() - x).max() < 1e-2 * jnp.abs(x).max()


def test_float64_is_quantised_in_float64():
    with jax.enable_x64(True):
        x = normal(4, 8, dtype=np.float64)
        q = quantize(x, "int8", channelwise_axes=[0])
        assert q.dtype == q.scale.dtype == q.dequantize().dtype == np.float64
        assert (np.abs(q.dequantize() - x) <= np.asarray(q.scale) / 2 * (1 + 1e-12)).all()


def test_a_stored_float64_is_float32_where_jax_has_no_float64():
    q = QArray.from_packed(np.ones(2, np.int8), np.full(1, 0.5), qtype="int8")
    assert q.dense_dtype == "float64"
    assert q.dtype == q.dequantize().dtype == np.float32
    assert q.dequantize().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_tile_of_zeros_has_scale_one(qtype):
    q = quantize(jnp.zeros((2, 4)).at[1].set(1.0), qtype, channelwise_axes=[0])
    assert q.scale[0, 0] == 1
    assert (q.dequantize()[0] == 0).all()


def test_values_too_small_for_a_scale_become_zero():
    q = quantize(jnp.full(4, 1e-38), "int8")
    assert (q.scale.item(), q.dequantize().tolist()) == (1, [0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("qtype", FORMATS)
def test_the_largest_values_are_kept_or_nan_never_zero(qtype, dtype):
    largest = jnp.finfo(dtype).max
    dense = quantize(jnp.array([largest, -largest]), qtype).dequantize().astype(jnp.float32)
    assert (np.isnan(dense) | (np.abs(dense) > 0.9 * float(largest))).all()


@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [4, 128, 1000])  # XLA's max drops a NaN on CPU, if there are many
def test_a_value_that_is_not_finite_makes_its_own_tile_nan(qtype, bad, size):
    x = normal(3, size).at[1, 2].set(bad)
    dense = quantize(x, qtype, channelwise_axes=[0]).dequantize()
    assert np.isnan(dense).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(dense[::2]).all()


@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (1,), (2, 1, 3)])
def test_any_shape_is_kept(qtype, shape):
    x = jnp.ones(shape)
    q = quantize(x, qtype, channelwise_axes=range(len(shape)))
    assert q.shape == q.qvalue.shape == q.dequantize().shape == shape
    np.testing.assert_allclose(q.dequantize(), x, rtol=0.07)


@pytest.mark.parametrize("qtype", FORMATS)
def test_quantising_under_jit_and_vmap_is_the_same(qtype):
    x = normal(3, 4, 5)
    expected = quantize(x, qtype, channelwise_axes=[0, 2])
    compiled = jax.jit(lambda x: quantize(x, qtype, channelwise_axes=[0, 2]))(x)
    mapped = jax.vmap(lambda x: quantize(x, qtype, channelwise_axes=[1]))(x)
    for q in (compiled, mapped):
        assert jax.tree.structure(q) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, q, expected)


@pytest.mark.parametrize(("qtype", "nbytes"), [("int8", 15), ("int4", 9), ("nf4", 9)])
def test_nbytes_counts_what_is_stored(qtype, nbytes):
    q = quantize(normal(3, 5), qtype)
    assert q.nbytes == nbytes + 4 == sum(leaf.nbytes for leaf in jax.tree.leaves(q))


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
        ((6, 8), {"tiled_axes": {0: 1.5}}, TypeError, "float|tiled_axes"),
        ((6, 8), {"tiled_axes": {2: 1}}, ValueError, r"axis 2 is out of range .* \(6, 8\)"),
        ((), {"channelwise_axes": [0]}, ValueError, r"axis 0 is out of range .* \(\)"),
        ((6, 8), {"channelwise_axes": [1], "tiled_axes": {-1: 2}}, ValueError, "named twice"),
        ((6, 8), {"channelwise_axes": [1, -1]}, ValueError, "named twice"),
        ((6, 8), {"calibration_method": "max"}, ValueError, "the methods are absmax"),
        (
            (6, 8),
            {"scale_dtype": jnp.int8},
            TypeError,
            "scale_dtype is int8; quantize takes float16",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(shape, kwargs, error, message):
    with pytest.raises(error, match=message):
        quantize(jnp.ones(shape), "int8", **kwargs)


def test_only_floating_arrays_are_quantised():
    with pytest.raises(TypeError, match="array is int32; quantize takes float16"):
        quantize(jnp.arange(3), "int8")


def test_the_sizes_offered_are_the_nearest_that_divide():
    assert dividing_tiles(384, 100) == [32, 48, 64, 96, 128, 192]
    assert dividing_tiles(7, 4) == [1, 7]


# The constructor.


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_the_format_follows_from_the_dtype_of_the_codes(dtype):
    codes = jnp.array([[-8, 7, 3], [0, 1, -1]], dtype)
    q = QArray(codes, jnp.ones((1, 3)))
    assert q.qtype == codes.dtype.name
    assert q.qvalue.dtype == dtype
    np.testing.assert_array_equal(q.qvalue, codes)
    np.testing.assert_array_equal(q.dequantize(), codes.astype(jnp.float32))


def test_codebook_codes_index_the_codebook():
    q = QArray(jnp.arange(16, dtype=jnp.uint4), jnp.array([2.0]), qtype="nf4")
    np.testing.assert_allclose(q.dequantize(), 2 * np.array(FORMATS["nf4"].codebook), rtol=1e-6)


@pytest.mark.parametrize("zero_dtype", [jnp.int8, jnp.int4, jnp.float32])
@pytest.mark.parametrize("code_dtype", [jnp.int8, jnp.int4])
def test_the_zero_point_is_subtracted_tile_by_tile(code_dtype, zero_dtype):
    codes = jnp.array([[1, 2, 3, 4], [-1, 0, 5, 6]], code_dtype)
    scale, zero = jnp.array([[2.0], [0.5]]), jnp.array([[1, -3]], zero_dtype)
    q = QArray(codes, scale, zero)
    assert q.zero_point.dtype != jnp.int4  # a leaf has a dtype that files have
    expected = (codes.astype(jnp.float32) - jnp.array([1, 1, -3, -3])) * scale
    np.testing.assert_array_equal(dequantize(q), expected)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((jnp.ones(2), jnp.ones(1)), {}, "integer codes, not float32"),
        ((jnp.ones(2, jnp.uint8), jnp.ones(1)), {}, "pass qtype"),
        ((jnp.ones(2, jnp.int8), jnp.ones(1)), {"qtype": "int3"}, "unknown format 'int3'"),
        ((jnp.ones((2, 3), jnp.int8), jnp.ones(3)), {}, r"scale has shape \(3,\).* \(2, 3\)"),
        ((jnp.ones((2, 3), jnp.int8), jnp.ones((1, 2))), {}, r"scale has shape \(1, 2\)"),
        ((jnp.ones((2, 3), jnp.int8), jnp.ones((0, 1))), {}, r"scale has shape \(0, 1\)"),
        ((jnp.ones(2, jnp.int8), jnp.ones(1, jnp.int32)), {}, "scale is floating, not int32"),
        ((jnp.ones(2, jnp.int8), jnp.ones(1), jnp.ones(4)), {}, r"zero_point has shape \(4,\)"),
        ((jnp.ones(2, jnp.uint4), jnp.ones(1), jnp.ones(1)), {"qtype": "nf4"}, "no zero_point"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        QArray(*args, **kwargs)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("qtype", FORMATS)
def test_codes_of_a_wider_dtype_are_taken_where_they_fit(qtype, dtype):
    codes = np.array([[0, 1, 7]])
    q = QArray(jnp.array(codes, dtype), jnp.ones((1, 1)), qtype=qtype)
    assert q.qvalue.dtype == q.format.code_dtype
    np.testing.assert_array_equal(q.qvalue.astype(int), codes)


@pytest.mark.parametrize(("qtype", "code"), [("int4", 8), ("int4", -9), ("nf4", -1), ("int8", 128)])
def test_codes_out_of_range_are_refused(qtype, code):
    with pytest.raises(ValueError, match=rf"codes of {qtype} lie in .* holds {code}"):
        QArray(jnp.array([code, code]), jnp.ones(1), qtype=qtype)


def test_codes_whose_range_cannot_be_checked_are_refused():
    build = lambda codes: QArray(codes, jnp.ones(1), qtype="int4").dequantize()
    assert jax.jit(build)(jnp.ones(2, jnp.int4)).shape == (2,)
    with pytest.raises(ValueError, match=r"cannot be checked under a trace"):
        jax.jit(build)(jnp.ones(2, jnp.int8))


@pytest.mark.parametrize("qtype", FORMATS)
def test_from_packed_takes_the_leaves_as_they_are(qtype):
    q = quantize(normal(3, 5, dtype=jnp.bfloat16), qtype, scale_dtype=jnp.float32)
    stored = jax.tree.map(np.asarray, q)
    again = QArray.from_packed(
        stored.packed, stored.scale, qtype=q.qtype, packing=q.packing, dense_dtype=q.dense_dtype
    )
    assert again.packed is stored.packed
    assert again.dtype == jnp.bfloat16
    assert jax.tree.structure(again) == jax.tree.structure(q)
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("packed", "kwargs", "message"),
    [
        (np.ones(2, np.int8), {"qtype": "int4"}, "stored as uint8, not int8"),
        (np.ones(2, np.int8), {"qtype": "int8", "packing": Packing(-1, 4)}, "has no packing"),
        (np.ones(2, np.uint8), {"qtype": "nf4", "packing": Packing(-1, 5)}, "of 3 bytes"),
        (np.ones(2, np.uint8), {"qtype": "nf4", "packing": Packing(0, 4)}, "negative axis"),
        (np.ones(2, np.uint8), {"qtype": "nf4", "packing": Packing(-2, 4)}, "negative axis"),
        (
            np.ones(2, np.int8),
            {"qtype": "int8", "dense_dtype": "int32"},
            "floating array, not int32",
        ),
    ],
)
def test_from_packed_refuses_what_does_not_fit(packed, kwargs, message):
    with pytest.raises(ValueError, match=message):
        QArray.from_packed(packed, np.ones(1, np.float32), **kwargs)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda q: QArray(q.qvalue, 0.5), "scale"),
        (lambda q: QArray([[1, 2]], q.scale), "qvalue"),
        (lambda q: QArray(q.qvalue, q.scale, 3), "zero_point"),
        (lambda q: QArray.from_packed(q.packed, 0.5, qtype="int8"), "scale"),
        (lambda q: q.replace(packed=[[1, 2]]), "packed"),
        (lambda q: dequantize(jnp.ones(3)), "q|dequantize"),
    ],
)
def test_what_is_not_an_array_is_refused_by_name(build, name):
    with pytest.raises(TypeError, match=name):
        build(quantize(normal(2, 4), "int8"))


@pytest.mark.parametrize("qtype", FORMATS)
def test_replace_keeps_the_other_parts(qtype):
    q = quantize(normal(3, 5, dtype=jnp.bfloat16), qtype, scale_dtype=jnp.float32)
    new = q.replace(scale=2 * q.scale)
    assert new.packed is q.packed
    assert jax.tree.structure(new) == jax.tree.structure(q)
    np.testing.assert_array_equal(new.dequantize(), 2 * q.dequantize())
    assert q.replace(dense_dtype=jnp.float16).dtype == jnp.float16


def test_replace_refuses_what_does_not_fit():
    q = quantize(normal(3, 5), "nf4")
    with pytest.raises(ValueError, match=r"scale has shape \(5,\)"):
        q.replace(scale=jnp.ones(5))
    with pytest.raises(TypeError, match="no 'qvalue' to replace, but packed, scale"):
        q.replace(qvalue=q.qvalue)


def test_an_implicit_array_of_another_type_is_materialised_first():
    low_rank = Lora(normal(6, 4), normal(6, 2), normal(2, 4))
    expected = quantize(low_rank.materialise(), "int8")
    for q in (quantize(low_rank, "int8"), jax.jit(lambda w: quantize(w, "int8"))(low_rank)):
        np.testing.assert_allclose(q.dequantize(), expected.dequantize(), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "tiling", "expected"),
    [((6, 8), {"channelwise_axes": [0], "tiled_axes": {1: 4}}, (1, 4)), ((0, 4), {}, (0, 4))],
)
def test_the_tile_shape_is_how_many_values_share_a_scale(shape, tiling, expected):
    assert quantize(jnp.ones(shape), "int8", **tiling).tile_shape == expected


# As a pytree.


@pytest.mark.parametrize("qtype", FORMATS)
def test_the_shape_follows_leading_axes_that_come_and_go(qtype):
    q = quantize(normal(2, 3, 5), qtype, channelwise_axes=[0])
    dense = q.dequantize()
    seen = []

    def row(q):
        seen.append(q.shape)
        return q.dequantize()

    np.testing.assert_array_equal(jax.vmap(row)(q), dense)
    np.testing.assert_array_equal(jax.lax.scan(lambda _, q: (None, row(q)), None, q)[1], dense)
    assert set(seen) == {(3, 5)}


def test_it_passes_through_jit_and_abstract_evaluation():
    q = quantize(normal(3, 5), "int4")
    assert jax.tree.structure(jax.jit(lambda q: q)(q)) == jax.tree.structure(q)
    abstract = jax.eval_shape(lambda q: q, q)
    assert (abstract.shape, abstract.dtype, abstract.nbytes) == (q.shape, q.dtype, q.nbytes)


def test_materialise_is_dequantize():
    q = quantize(normal(3, 5), "nf4")
    np.testing.assert_array_equal(vn.materialise({"w": q})["w"], dequantize(q))
