import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.stored_values import stored_values

import veneer as vn
from veneer.quant import FORMATS, Packing, QArray, dequantize, quantize

KINDS = ["int8", "int4", "int3", "ternary", "nf4", "float8_e4m3fn"]


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


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
        ((arrays.ones(2), arrays.ones(1)), {}, "float32, .* pass qtype"),
        ((arrays.ones(2, jnp.int8), arrays.ones(1)), {"qtype": "int9"}, "unknown format 'int9'"),
        ((arrays.ones((2, 3), jnp.int8), arrays.ones(3)), {}, r"scale of shape \(3,\).* \(2, 3\)"),
        ((arrays.ones((2, 3), jnp.int8), arrays.ones((1, 2))), {}, r"scale of shape \(1, 2\)"),
        ((arrays.ones((2, 3), jnp.int8), arrays.ones((0, 1))), {}, r"scale of shape \(0, 1\)"),
        (
            (arrays.ones(2, jnp.int8), arrays.ones(1, jnp.int32)),
            {},
            "scale must have a floating dtype",
        ),
        (
            (arrays.ones(2, jnp.int8), arrays.ones(1), arrays.ones(4)),
            {},
            r"zero_point of shape \(4,\)",
        ),
        (
            (arrays.ones(2, jnp.uint4), arrays.ones(1), arrays.ones(1)),
            {"qtype": "nf4"},
            "no zero_point",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        QArray(*args, **kwargs)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("qtype", ["int8", "int5", "int4", "uint4", "nf4"])
def test_codes_of_a_wider_dtype_are_taken_where_they_fit(qtype, dtype):
    codes = np.array([[0, 1, 7]])
    q = QArray(jnp.array(codes, dtype), jnp.ones((1, 1)), qtype=qtype)
    assert q.qvalue.dtype == q.format.code_dtype
    np.testing.assert_array_equal(q.qvalue.astype(int), codes)


@pytest.mark.parametrize(("qtype", "code"), [("int4", 8), ("int4", -9), ("nf4", -1), ("int8", 128)])
def test_codes_out_of_range_are_refused(qtype, code):
    with pytest.raises(ValueError, match=rf"codes of {qtype} are from .* from {code}"):
        QArray(jnp.array([code, code]), jnp.ones(1), qtype=qtype)


def test_codes_whose_range_cannot_be_checked_are_refused():
    build = lambda codes: QArray(codes, jnp.ones(1), qtype="int4").dequantize()
    assert jax.jit(build)(jnp.ones(2, jnp.int4)).shape == (2,)
    with pytest.raises(ValueError, match=r"cannot be checked in a traced program"):
        jax.jit(build)(jnp.ones(2, jnp.int8))


@pytest.mark.parametrize("qtype", KINDS)
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
        (np.ones(2, np.int8), {"qtype": "int4"}, "stored in uint8, but packed has dtype int8"),
        (np.ones(2, np.int8), {"qtype": "int8", "packing": Packing(-1, 4)}, "packing must be None"),
        (np.ones(2, np.uint8), {"qtype": "nf4", "packing": Packing(-1, 5)}, "have 3 bytes"),
        (
            np.ones(2, np.uint8),
            {"qtype": "nf4", "packing": Packing(0, 4)},
            "the axis must be negative",
        ),
        (
            np.ones(2, np.uint8),
            {"qtype": "nf4", "packing": Packing(-2, 4)},
            "the axis must be negative",
        ),
        (
            np.ones(2, np.int8),
            {"qtype": "int8", "dense_dtype": "int32"},
            "a floating dtype, not int32",
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
        (lambda q: dequantize(jnp.ones(3)), r"q|dequantize"),
    ],
)
def test_what_is_not_an_array_is_refused_by_name(build, name):
    with pytest.raises(TypeError, match=name):
        build(quantize(normal(2, 4), "int8"))


@pytest.mark.skipif(not hasattr(copy, "replace"), reason="it came with Python 3.13")
def test_copy_replace_is_the_method():
    q = quantize(normal(3, 5), "int4")
    new = copy.replace(q, scale=2 * q.scale)
    np.testing.assert_array_equal(new.dequantize(), 2 * q.dequantize())


@pytest.mark.parametrize("qtype", KINDS)
def test_replace_keeps_the_other_parts(qtype):
    q = quantize(normal(3, 5, dtype=jnp.bfloat16), qtype, scale_dtype=jnp.float32)
    new = q.replace(scale=2 * q.scale)
    assert new.packed is q.packed
    assert jax.tree.structure(new) == jax.tree.structure(q)
    np.testing.assert_array_equal(new.dequantize(), 2 * q.dequantize())
    assert q.replace(dense_dtype=jnp.float16).dtype == jnp.float16


def test_replace_refuses_what_does_not_fit():
    q = quantize(normal(3, 5), "nf4")
    with pytest.raises(ValueError, match=r"scale of shape \(5,\)"):
        q.replace(scale=jnp.ones(5))
    with pytest.raises(TypeError, match="no field 'qvalue'; its fields are packed, scale"):
        q.replace(qvalue=q.qvalue)


@pytest.mark.parametrize(
    ("shape", "tiling", "expected"),
    [((6, 8), {"channelwise_axes": [0], "tiled_axes": {1: 4}}, (1, 4)), ((0, 4), {}, (0, 4))],
)
def test_the_tile_shape_is_how_many_values_share_a_scale(shape, tiling, expected):
    assert quantize(jnp.ones(shape), "int8", **tiling).tile_shape == expected


# As a pytree.


@pytest.mark.parametrize("qtype", KINDS)
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


# One number everywhere. However a value is decoded, in however many steps, it has the same bits.


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [("bfloat16", None), ("float32", None), ("float64", None), ("float64", "float32")],
)
@pytest.mark.parametrize("qtype", FORMATS)
def test_a_value_has_the_same_bits_eagerly_compiled_and_by_numpy(qtype, dtype, scale_dtype):
    format = FORMATS[qtype]
    if scale_dtype is not None and format.scale_dtype is not None:
        pytest.skip("its scales have one dtype")
    with jax.enable_x64(dtype == "float64"):
        x = normal(2, 64, dtype=dtype)
        tiled = {1: format.tile_size or 4}
        q = quantize(x, qtype, channelwise_axes=[0], tiled_axes=tiled, scale_dtype=scale_dtype)
        expected = stored_values(q)
        assert expected.dtype == dtype
        np.testing.assert_array_equal(q.dequantize(), expected)
        np.testing.assert_array_equal(jax.jit(dequantize)(q), expected)
