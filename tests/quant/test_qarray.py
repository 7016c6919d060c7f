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
    assert q.zero_point.dtype != jnp.int4  # file formats have no int4
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
def test_fields_that_do_not_fit_together_raise(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        QArray(*args, **kwargs)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("qtype", ["int8", "int5", "int4", "uint4", "nf4"])
def test_codes_of_a_wider_dtype_are_accepted_if_in_range(qtype, dtype):
    codes = np.array([[0, 1, 7]])
    q = QArray(jnp.array(codes, dtype), jnp.ones((1, 1)), qtype=qtype)
    assert q.qvalue.dtype == q.format.code_dtype
    np.testing.assert_array_equal(q.qvalue.astype(int), codes)


@pytest.mark.parametrize(("qtype", "code"), [("int4", 8), ("int4", -9), ("nf4", -1), ("int8", 128)])
def test_codes_out_of_range_raise(qtype, code):
    with pytest.raises(ValueError, match=rf"codes of {qtype} are from .* from {code}"):
        QArray(jnp.array([code, code]), jnp.ones(1), qtype=qtype)


def test_traced_codes_whose_range_is_unknown_raise():
    build = lambda codes: QArray(codes, jnp.ones(1), qtype="int4").dequantize()
    assert jax.jit(build)(jnp.ones(2, jnp.int4)).shape == (2,)
    with pytest.raises(ValueError, match=r"cannot be checked in a traced program"):
        jax.jit(build)(jnp.ones(2, jnp.int8))


@pytest.mark.parametrize("qtype", KINDS)
def test_from_packed_stores_its_arrays_unchanged(qtype):
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
def test_from_packed_checks_shapes_and_dtypes(packed, kwargs, message):
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
def test_fields_that_are_no_arrays_raise_with_their_name(build, name):
    with pytest.raises(TypeError, match=name):
        build(quantize(normal(2, 4), "int8"))


@pytest.mark.skipif(not hasattr(copy, "replace"), reason="it came with Python 3.13")
def test_copy_replace_calls_the_method():
    q = quantize(normal(3, 5), "int4")
    new = copy.replace(q, scale=2 * q.scale)
    np.testing.assert_array_equal(new.dequantize(), 2 * q.dequantize())


@pytest.mark.parametrize("qtype", KINDS)
def test_replace_keeps_the_other_fields(qtype):
    q = quantize(normal(3, 5, dtype=jnp.bfloat16), qtype, scale_dtype=jnp.float32)
    new = q.replace(scale=2 * q.scale)
    assert new.packed is q.packed
    assert jax.tree.structure(new) == jax.tree.structure(q)
    np.testing.assert_array_equal(new.dequantize(), 2 * q.dequantize())
    assert q.replace(dense_dtype=jnp.float16).dtype == jnp.float16


def test_replace_checks_the_new_fields():
    q = quantize(normal(3, 5), "nf4")
    with pytest.raises(ValueError, match=r"scale of shape \(5,\)"):
        q.replace(scale=jnp.ones(5))
    with pytest.raises(TypeError, match="no field 'qvalue'; its fields are packed, scale"):
        q.replace(qvalue=q.qvalue)


@pytest.mark.parametrize(
    ("shape", "tiling", "expected"),
    [((6, 8), {"channelwise_axes": [0], "tiled_axes": {1: 4}}, (1, 4)), ((0, 4), {}, (0, 4))],
)
def test_tile_shape_counts_the_values_per_scale(shape, tiling, expected):
    assert quantize(jnp.ones(shape), "int8", **tiling).tile_shape == expected


# As a pytree.


@pytest.mark.parametrize("qtype", KINDS)
def test_the_shape_follows_added_and_removed_leading_axes(qtype):
    q = quantize(normal(2, 3, 5), qtype, channelwise_axes=[0])
    dense = q.dequantize()
    seen = []

    def row(q):
        seen.append(q.shape)
        return q.dequantize()

    np.testing.assert_array_equal(jax.vmap(row)(q), dense)
    np.testing.assert_array_equal(jax.lax.scan(lambda _, q: (None, row(q)), None, q)[1], dense)
    assert set(seen) == {(3, 5)}


def test_qarrays_pass_through_jit_and_eval_shape():
    q = quantize(normal(3, 5), "int4")
    assert jax.tree.structure(jax.jit(lambda q: q)(q)) == jax.tree.structure(q)
    abstract = jax.eval_shape(lambda q: q, q)
    assert (abstract.shape, abstract.dtype, abstract.nbytes) == (q.shape, q.dtype, q.nbytes)


def test_materialise_equals_dequantize():
    q = quantize(normal(3, 5), "nf4")
    np.testing.assert_array_equal(vn.materialise({"w": q})["w"], dequantize(q))


# A value has the same bits, however it is decoded.


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [("bfloat16", None), ("float32", None), ("float64", None), ("float64", "float32")],
)
@pytest.mark.parametrize("qtype", FORMATS)
def test_values_have_the_same_bits_eager_compiled_and_in_numpy(qtype, dtype, scale_dtype):
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


@pytest.mark.parametrize("qtype", FORMATS)
def test_replaced_codes_are_packed_like_the_old_ones(qtype):
    q = quantize(normal(2, 64), qtype)
    one_per_byte = q if q.packing is None else q.unpacked()
    for x in (q, one_per_byte):  # in int1 and ternary, a stored byte differs from its code
        new = x.with_codes(x.codes()[::-1])
        assert (new.packing, new.packed.shape) == (x.packing, x.packed.shape)
        assert new.packed.dtype == x.packed.dtype
        np.testing.assert_array_equal(new.codes(), x.codes()[::-1])
