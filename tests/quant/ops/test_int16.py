"""int16 activations, and their products with weights of fewer bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.arrays import normal

import veneer as vn
from veneer.quant import QArray, quantize

NHWC = ("NHWC", "HWIO", "NHWC")
WEIGHTS = ["int8", "int4", "uint4", "nf4"]


def in_float64(x):
    return np.asarray(vn.materialise(x), np.float64)


def assert_near(actual, expected, dtype=jnp.float32):
    # f32 rounds sums of some hundred terms. Narrower results are rounded once more.
    tolerance = 1e-6 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    expected = np.asarray(expected, np.float64)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    largest = max(np.abs(expected).max(initial=0), 1e-30)
    actual = np.asarray(actual, np.float64) / largest
    np.testing.assert_allclose(actual, expected / largest, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_codes_of_int16_are_within_half_a_step(dtype, method):
    x = normal(5, 33, dtype=dtype)
    q = quantize(x, "int16", channelwise_axes=[0], calibration_method=method, scale_dtype="float32")
    assert (q.qvalue.dtype, q.packing, q.nbytes) == (
        jnp.int16,
        None,
        5 * 33 * 2 + 5 * (4 if method == "absmax" else 6),
    )
    step = np.asarray(q.scale)
    # The largest magnitude is scaled to 2**15, which only the least code reaches.
    reach = 1 if method == "absmax" else 0.5
    error = np.abs(in_float64(q) - np.asarray(x, np.float64))
    rounding = np.abs(in_float64(q)) * float(jnp.finfo(dtype).eps)
    assert (error <= (reach + 0.01) * step + rounding).all()


@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 1, 1), (3, 0, 2), (0, 4, 2)])
def test_products_agree_with_the_dense_arrays(sizes, weight, method):
    m, k, n = sizes
    x = quantize(normal(m, k) + 0.5, "int16", channelwise_axes=[0], calibration_method=method)
    w = quantize(normal(k, n, seed=1), weight, channelwise_axes=[1])
    expected = in_float64(x) @ in_float64(w)
    assert_near(jax.jit(vn.quant.dot)(x, w), expected)
    assert_near(vn.quant.einsum("mk,kn->mn", x, w), expected)
    assert_near(vn.quant.dot(x, w.dequantize()), expected)


@pytest.mark.parametrize("weight", ["int16", "int8"])
def test_sums_of_the_largest_codes_do_not_overflow(weight):
    k = 3000  # 32767 * 127 * 3000 is beyond int32
    x, w = jnp.full((2, k), 3.0), jnp.full((k, 2), -5.0)
    q = quantize(x, "int16"), quantize(w, weight)
    # f32 rounds a sum of equal terms to the same side each time.
    y = jax.jit(vn.quant.dot)(*q)
    np.testing.assert_allclose(y, in_float64(q[0]) @ in_float64(q[1]), rtol=1e-4)
    kernel = quantize(jnp.full((1, 1, k, 2), -5.0), weight)
    image = quantize(jnp.full((1, 1, 1, k), 3.0), "int16")
    y = vn.quant.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=NHWC)
    expected = in_float64(image)[0, 0] @ in_float64(kernel)[0, 0]
    np.testing.assert_allclose(y[0, 0], expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_results_agree_with_the_dense_arrays(dtype):
    x = quantize(normal(4, 65, dtype=dtype), "int16", channelwise_axes=[0])
    w = quantize(normal(65, 3, seed=1, dtype=dtype), "int8", channelwise_axes=[1])
    assert_near(vn.quant.dot(x, w), in_float64(x) @ in_float64(w), dtype)


@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_convolutions_and_groups_agree_with_the_dense_arrays(method):
    images = quantize(
        normal(2, 5, 5, 3) + 0.5, "int16", channelwise_axes=[0], calibration_method=method
    )
    kernel = quantize(normal(3, 3, 3, 4, seed=1), "int4", channelwise_axes=[3])
    conv = jax.jit(
        lambda conv, x, k: conv(x, k, (1, 1), "SAME", dimension_numbers=NHWC), static_argnums=0
    )
    expected = conv(lax.conv_general_dilated, *vn.materialise((images, kernel)))
    assert_near(conv(vn.quant.conv_general_dilated, images, kernel), expected)
    rows = quantize(normal(6, 16) + 0.5, "int16", channelwise_axes=[0], calibration_method=method)
    experts = quantize(normal(2, 16, 3, seed=1), "int8", channelwise_axes=[0, 2])
    sizes = jnp.array([4, 2])
    expected = lax.ragged_dot(*vn.materialise((rows, experts)), sizes)
    assert_near(vn.quant.ragged_dot(rows, experts, sizes), expected)


def test_batches_and_derivatives_agree_with_the_dense_arrays():
    x = quantize(normal(3, 5, 32), "int16", channelwise_axes=[0, 1])
    w = quantize(normal(32, 4, seed=1), "int8", channelwise_axes=[1])
    mapped = jax.jit(jax.vmap(vn.quant.dot, in_axes=(0, None)))(x, w)
    assert_near(mapped, in_float64(x) @ in_float64(w))
    loss = lambda w, x: (vn.quant.dot(x, w) ** 2).sum()
    dense = w.dequantize()
    assert_near(jax.grad(loss)(dense, x[0]), jax.grad(loss)(dense, x[0].dequantize()))


@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_activations_are_quantized_in_the_products_of_a_model(weight):
    model = lambda params, x: x @ params["w"]
    params, x = {"w": normal(64, 9)}, normal(5, 64, seed=1)
    errors = {}
    for act_qtype in ("int8", "int16"):
        rules = [vn.quant.Rule(".*", weight, act_qtype=act_qtype)]
        small = vn.quant.quantize_tree(params, rules, model=model, args=(x,))
        expected = x @ vn.materialise(small["w"])
        run = vn.implicit(model)
        errors[act_qtype] = float(jnp.abs(jax.jit(run)(small, x) - expected).max())
        grad = jax.grad(lambda x, run=run, small=small: run(small, x).sum())(x)
        assert_near(grad, np.ones((5, 9)) @ in_float64(small["w"]).T)
    assert errors["int16"] < errors["int8"] / 50


def test_files_slices_and_constructors_keep_int16(tmp_path):
    q = quantize(normal(4, 6), "int16", channelwise_axes=[0])
    vn.save(tmp_path / "saved", {"x": q})
    again = vn.load(tmp_path / "saved")["x"]
    assert (again.qtype, again.packed.dtype) == ("int16", jnp.int16)
    np.testing.assert_array_equal(again.packed, q.packed)
    np.testing.assert_array_equal(q[1:3].dequantize(), q.dequantize()[1:3])
    np.testing.assert_array_equal(QArray(q.qvalue, q.scale).dequantize(), q.dequantize())
    with pytest.raises(ValueError, match=r"codes of int16 are from -32768 to 32767"):
        QArray(jnp.array([40000]), jnp.ones(1), qtype="int16")


@pytest.mark.parametrize("deviation", [0.02, 0.001, 1e-6])
def test_float16_arrays_keep_their_precision(deviation):
    w = (deviation * jax.random.normal(jax.random.key(0), (64, 64))).astype(jnp.float16)
    q = vn.quant.quantize(w, "int16", channelwise_axes=(1,))
    assert q.scale.dtype == jnp.float32
    error = jnp.abs(q.dequantize().astype(jnp.float32) - w.astype(jnp.float32)).max()
    # Half a step of int16, and half a step of float16 for the result.
    largest = jnp.abs(w).max().astype(jnp.float32)
    assert error <= largest * 2**-15 + max(largest * 2**-11, 2**-25)
