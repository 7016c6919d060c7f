import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import Lora

from veneer.quant import (
    calibration_range,
    fake_quantize,
    fake_quantize_with_scale,
    quantize,
    quantize_with_scale,
)

X = arrays.normal(4, 64)
ROWS = {"channelwise_axes": [0]}
CLIPPING = ["absmax,0.5", "fixed,1", "rms,1.5", "percentile,80", "mse,6"]
BETWEEN_ENDS = ["minmax,0.5", "fixed,-0.5,1", "percentile,5,90"]
CASES = [("int4", method) for method in [*CLIPPING, *BETWEEN_ENDS]]
CASES += [("nf4", "rms,1.5"), ("uint3", "minmax,0.5"), ("uint3", "rms,1")]
KEEPING = [("int4", "absmax"), ("int8", "minmax"), ("ternary", "absmean"), ("nvfp4", None)]


def check(fake, dense, inside):
    """Check that values are quantized, and that the derivative is 1 inside the range, else 0."""
    fn = jax.jit(fake)
    np.testing.assert_array_equal(fn(X), dense)
    ones = np.where(inside, 1.0, 0.0)
    weights = jnp.arange(X.size, dtype=X.dtype).reshape(X.shape)
    loss = lambda x: (weights * fake(x)).sum()
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X), weights * ones)
    moved = jax.jvp(fn, (X,), (weights,))
    np.testing.assert_array_equal(moved[0], dense)
    np.testing.assert_array_equal(moved[1], weights * ones)
    # The second derivative of the square is 2 for each value with a derivative.
    square = lambda x: jnp.square(fake(x)).sum()
    second = jax.jvp(jax.grad(square), (X,), (jnp.ones_like(X),))[1]
    np.testing.assert_array_equal(second, 2 * ones)


@pytest.mark.parametrize(("qtype", "method"), CASES)
def test_clipped_values_have_no_derivative(qtype, method):
    how = {**ROWS, "calibration_method": method}
    low, high = calibration_range(X, qtype, **how)
    inside = ((-high if low is None else low) <= X) & (high >= X)
    assert 0 < inside.mean() < 1
    check(lambda x: fake_quantize(x, qtype, **how), quantize(X, qtype, **how).dequantize(), inside)


@pytest.mark.parametrize(("qtype", "method"), KEEPING)
def test_all_derivatives_are_one_if_nothing_is_clipped(qtype, method):
    how = {**ROWS, "calibration_method": method}
    check(lambda x: fake_quantize(x, qtype, **how), quantize(X, qtype, **how).dequantize(), True)


@pytest.mark.parametrize(
    ("qtype", "scale", "zero_point", "low", "high"),
    [
        ("int4", 0.1, None, -0.75, 0.75),
        ("int4", 0.1, 2, -1.0, 0.5),
        ("uint4", 0.1, 4, -0.4, 1.1),
        ("uint4", 0.1, None, 0, 1.5),
        ("nf4", 0.8, None, -0.8, 0.8),
        ("float8_e4m3fn", 1 / 448, None, -1, 1),
        ("mxfp4", 0.24, None, -1.5, 1.5),  # rounded up to 0.25
    ],
)
def test_a_given_scale_clips_beyond_its_codes(qtype, scale, zero_point, low, high):
    if qtype == "mxfp4":
        scale = jnp.full((4, 2), scale)
    inside = (low - 1e-6 <= X) & (high + 1e-6 >= X)
    assert 0 < inside.mean() < 1
    fake = lambda x: fake_quantize_with_scale(x, qtype, scale, zero_point)
    check(fake, quantize_with_scale(X, qtype, scale, zero_point).dequantize(), inside)


def test_unsigned_codes_clip_below_zero():
    fake = lambda x: fake_quantize_with_scale(x, "uint4", 0.1).sum()
    np.testing.assert_array_equal(jax.grad(fake)(jnp.array([-0.3, 0.3, 1.2, 1.7])), [0, 1, 1, 0])


def test_a_given_scale_has_no_derivative():
    loss = lambda scale: fake_quantize_with_scale(X, "int4", scale).sum()
    assert jax.grad(loss)(jnp.float32(0.1)) == 0


def test_vmap_gives_each_entry_its_own_range():
    fake = lambda x: fake_quantize(x, "int4", calibration_method="percentile,80")
    rows = lambda x: fake_quantize(x, "int4", **ROWS, calibration_method="percentile,80")
    np.testing.assert_array_equal(jax.vmap(fake)(X), rows(X))
    by_row = jax.vmap(jax.grad(lambda x: fake(x).sum()))(X)
    np.testing.assert_array_equal(by_row, jax.grad(lambda x: rows(x).sum())(X))


def test_stochastic_rounding_has_the_same_derivative():
    key = jax.random.key(0)
    how = {**ROWS, "calibration_method": "rms,1"}
    fake = lambda x: fake_quantize(x, "int4", **how, key=key)
    np.testing.assert_array_equal(fake(X), quantize(X, "int4", **how, key=key).dequantize())
    nearest = lambda x: fake_quantize(x, "int4", **how)
    of = lambda fn: jax.grad(lambda x: fn(x).sum())(X)
    np.testing.assert_array_equal(of(fake), of(nearest))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_keep_their_dtype(dtype):
    x = X.astype(dtype)
    fake = lambda x: fake_quantize(x, "int4", **ROWS, calibration_method="rms,1")
    grad = jax.grad(lambda x: fake(x).sum().astype(jnp.float32))(x)
    assert fake(x).dtype == grad.dtype == dtype
    assert set(np.unique(grad.astype(jnp.float32))) == {0.0, 1.0}


def test_the_leaves_of_an_implicit_array_get_gradients():
    lora = Lora(X, jnp.ones((4, 2)), jnp.ones((2, 64)))
    grad = jax.grad(lambda a: fake_quantize(Lora(X, a, lora.b), "int8").sum())(lora.a)
    np.testing.assert_allclose(grad, jnp.full((4, 2), 64.0))


def test_nan_stays_in_its_tile():
    x = X.at[1, 3].set(jnp.nan)
    assert np.isnan(fake_quantize(x, "int8", **ROWS)).all(axis=1).tolist() == [0, 1, 0, 0]
