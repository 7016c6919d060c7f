"""Arrays with minima, in products and movements: they agree with the dense array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.quant import QArray

RNG = np.random.default_rng(0)


def affine(shape, counts, *, qtype="uint4", scale_dtype="float16", nested=False):
    """Return a QArray with minima, and the represented array by NumPy."""
    format = vn.quant.get_format(qtype)
    low, high = format.code_range
    codes = RNG.integers(low, high + 1, shape)
    if nested:  # like K-quants: 6-bit codes with scales of their own
        outer = (*counts[:-1], max(1, counts[-1] // 2))
        steps = [RNG.integers(0, 64, counts).astype(np.uint8) for _ in range(2)]
        wide = [np.asarray(RNG.normal(size=outer), scale_dtype) for _ in range(2)]
        scale, minimum = (QArray(s, w, qtype="uint6") for s, w in zip(steps, wide, strict=True))
        dense_scale, dense_minimum = (
            s.astype("f4") * np.repeat(w.astype("f4"), s.shape[-1] // w.shape[-1], -1)
            for s, w in zip(steps, wide, strict=True)
        )
    else:
        scale, minimum = (np.asarray(RNG.normal(size=counts), scale_dtype) for _ in range(2))
        dense_scale, dense_minimum = scale.astype("f4"), minimum.astype("f4")
        scale, minimum = jnp.asarray(scale), jnp.asarray(minimum)
    dtype = np.int8 if format.signed else np.uint8
    q = QArray(jnp.asarray(codes.astype(dtype)), scale, qtype=qtype, minimum=minimum)
    values = codes if format.codebook is None else np.asarray(format.codebook, "f4")[codes]

    def spread(x):
        for axis, size in enumerate(shape):
            x = np.repeat(x, size // x.shape[axis], axis)
        return x

    dense = values.astype("f4") * spread(dense_scale) + spread(dense_minimum)
    return q.replace(dense_dtype="float32"), dense


CASES = [
    ((8, 64), (8, 2), "uint4"),
    ((8, 64), (8, 4), "uint5"),
    ((8, 64), (1, 2), "int8"),
    ((8, 64), (4, 4), "uint2"),
    ((8, 64), (8, 2), "nf4"),
    ((8, 64), (1, 1), "uint8"),
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "counts", "qtype"), CASES)
def test_values_are_codes_times_scales_plus_minima(shape, counts, qtype, nested):
    q, dense = affine(shape, counts, qtype=qtype, nested=nested)
    np.testing.assert_array_equal(vn.materialise(q), dense)
    np.testing.assert_array_equal(jax.jit(vn.materialise)(q), dense)
    leaves = [q.packed, q.zero_point, *jax.tree.leaves((q.scale, q.minimum))]
    assert q.nbytes == sum(leaf.nbytes for leaf in leaves if leaf is not None)


def close(ours, dense, rtol=2e-5):
    dense = np.asarray(dense, "f8")
    np.testing.assert_allclose(np.asarray(ours, "f8"), dense, rtol, rtol * np.abs(dense).max())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "counts", "qtype"), CASES)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_products_agree_with_the_dense_array(shape, counts, qtype, nested, side):
    q, dense = affine(shape, counts, qtype=qtype, nested=nested)
    axis = 0 if side == "rows" else 1
    x = jnp.asarray(RNG.normal(size=(3, shape[axis])), jnp.float32)
    product = lambda x, w: lax.dot_general(x, w, (([1], [axis]), ([], [])))
    expected = product(x, jnp.asarray(dense))
    close(vn.implicit(product)(x, q), expected)
    close(jax.jit(vn.implicit(product))(x, q), expected)
    flipped = lambda x, w: lax.dot_general(w, x, (([axis], [1]), ([], [])))
    close(vn.implicit(flipped)(x, q), flipped(x, jnp.asarray(dense)))
    gradient = jax.grad(lambda x: (vn.implicit(product)(x, q) ** 2).sum())(x)
    close(gradient, jax.grad(lambda x: (product(x, jnp.asarray(dense)) ** 2).sum())(x))
    mapped = jax.vmap(vn.implicit(lambda x, w: w @ x if axis else x @ w), (0, None))
    close(mapped(x, q), expected)


@pytest.mark.parametrize("qtype", ["int8", "uint4"])
def test_products_with_quantized_activations_agree(qtype):
    q, dense = affine((8, 64), (8, 2), qtype="uint4")
    x = vn.quant.quantize(
        jnp.asarray(RNG.normal(size=(5, 64)), jnp.float32), qtype, channelwise_axes=[0]
    )
    product = lambda x, w: x @ w.T
    close(vn.implicit(product)(x, q), x.dequantize() @ dense.T)
    weight = vn.quant.ActivationQuantized(q, contracting=(-1,), qtype="int8")
    close(vn.implicit(product)(x.dequantize(), weight), x.dequantize() @ dense.T, 2e-2)


def test_both_operands_can_have_minima():
    (q, dense), (r, other) = affine((8, 64), (8, 2)), affine((4, 64), (4, 4), qtype="int8")
    close(vn.implicit(lambda q, r: q @ r.T)(q, r), dense @ other.T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_values_are_rounded_once(dtype):
    q, dense = affine((8, 64), (8, 2))
    x = jnp.asarray(RNG.normal(size=(3, 64)), dtype)
    w = q.replace(dense_dtype=dtype)
    ours = vn.implicit(lambda x, w: x @ w.T)(x, w)
    assert ours.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    close(ours, np.asarray(x, "f4") @ dense.T, 4 * eps)


def test_batched_ragged_and_convolution_products_agree():
    q, dense = affine((3, 8, 64), (3, 8, 2), nested=True)
    x = jnp.asarray(RNG.normal(size=(3, 5, 64)), jnp.float32)
    close(vn.implicit(jnp.einsum)("bmk,bnk->bmn", x, q), jnp.einsum("bmk,bnk->bmn", x, dense))
    sizes = jnp.array([2, 0, 3])
    ragged = lambda x, w: lax.ragged_dot(x, w.mT, sizes)
    close(vn.implicit(ragged)(x[0], q), ragged(x[0], jnp.asarray(dense)))
    kernel, values = affine((4, 2, 3, 3), (4, 1, 1, 1))
    images = jnp.asarray(RNG.normal(size=(1, 2, 6, 6)), jnp.float32)
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME")
    close(vn.implicit(conv)(images, kernel), conv(images, jnp.asarray(values)))


MOVEMENTS = {
    "row": lambda w: w[3],
    "rows": lambda w: w[jnp.array([1, 5, 1])],
    "rows out of bounds": lambda w: w.at[jnp.array([1, 99])].get(mode="fill"),
    "column": lambda w: w[:, 40],
    "part of a tile": lambda w: w[:, 3:20],
    "transposed": lambda w: w.T,
    "reshaped": lambda w: w.reshape(2, 4, 64),
    "joined": lambda w: jnp.concatenate([w, w]),
    "cast": lambda w: w.astype(jnp.bfloat16),
    "scaled": lambda w: w * 2.0,
    "compared": lambda w: w > 0.5,
    "at an index": lambda w: lax.dynamic_index_in_dim(w, jnp.int32(2), 0),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_movements_agree_with_the_dense_array(name, nested):
    q, dense = affine((8, 64), (8, 2), nested=nested)
    ours = vn.implicit(MOVEMENTS[name])(q)
    expected = MOVEMENTS[name](jnp.asarray(dense))
    np.testing.assert_array_equal(vn.materialise(ours), expected)


def test_layers_are_scanned():
    q, dense = affine((3, 8, 8), (3, 8, 2), nested=True)
    x = jnp.asarray(RNG.normal(size=8), jnp.float32)
    layers = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, w)[0]
    close(vn.implicit(layers)(q, x), layers(jnp.asarray(dense), x))


def test_constant_tiles_and_empty_arrays_are_supported():
    q = QArray(jnp.zeros((2, 4), jnp.uint4), jnp.zeros((2, 1)), minimum=jnp.full((2, 1), 0.3))
    np.testing.assert_array_equal(vn.materialise(q), np.full((2, 4), np.float32(0.3)))
    close(vn.implicit(jnp.matmul)(jnp.ones((1, 2)), q), np.full((1, 4), 0.6))
    empty = QArray(jnp.zeros((0, 4), jnp.uint4), jnp.zeros((0, 1)), minimum=jnp.zeros((0, 1)))
    assert not vn.implicit(jnp.matmul)(jnp.ones((2, 0)), empty).any()


def test_minima_are_saved_and_loaded(tmp_path):
    tree = {"a": affine((8, 64), (8, 2))[0], "b": affine((8, 64), (8, 4), nested=True)[0]}
    vn.save(tmp_path / "saved", tree)
    loaded = vn.load(tmp_path / "saved")
    for name, q in tree.items():
        assert jax.tree.structure(loaded[name]) == jax.tree.structure(q)
        np.testing.assert_array_equal(vn.materialise(loaded[name]), vn.materialise(q))


def test_minima_that_do_not_fit_raise():
    codes, scale = jnp.zeros((4, 6), jnp.uint4), jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"minimum of shape \(4, 4\) does not tile"):
        QArray(codes, scale, minimum=jnp.ones((4, 4)))
    with pytest.raises(ValueError, match="minimum must have a floating dtype, not int32"):
        QArray(codes, scale, minimum=jnp.ones((4, 2), jnp.int32))
    with pytest.raises(TypeError, match="minimum must be a JAX or NumPy array"):
        QArray(codes, scale, minimum=1.0)


def test_codebooks_equal_bitsandbytes():
    values = np.asarray(vn.quant.get_format("dynamic8").codebook, np.float32)
    assert len(set(values.tolist())) == 256
    assert (np.diff(values) > 0).all()
    assert values[0] == -np.float32(0.99296875)
    fp4 = vn.quant.get_format("fp4_bnb").codebook
    assert np.float32(fp4[1]) == np.float32(0.0625) / np.float32(12)
