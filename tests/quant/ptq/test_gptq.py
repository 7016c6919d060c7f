import numpy as np
import pytest

from veneer.quant import FORMATS, quantize
from veneer.quant.ptq.gptq import Moments, cholesky, damp, gptq, inverse_factor

RNG = np.random.default_rng(0)
MIX = RNG.normal(size=(96, 96)) / 10
X = RNG.normal(size=(512, 96)) @ MIX * np.linspace(0.3, 3, 96)
W = RNG.normal(size=(96, 24)).astype(np.float32)


def grid(w, qtype, tile=32):
    """Return the nearest codes, and the scale and the zero point of each entry."""
    q = quantize(w, qtype, channelwise_axes=[1], tiled_axes={0: tile})
    of_entries = lambda x: np.repeat(np.asarray(x, np.float32), tile, axis=0)
    zero = None if q.zero_point is None else of_entries(q.zero_point)
    return q, of_entries(q.scales()), zero


def gptq_in_numpy(w, gram, scale, zero, low, high, damping=0.01):
    w = w.astype(float).copy()
    gram = gram + damping * np.mean(np.diag(gram)) * np.eye(len(gram))
    order = np.argsort(-np.diag(gram))
    inverse = np.linalg.inv(gram[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    w, scale, zero, codes = w[order], scale[order], zero[order], np.zeros(w.shape)
    for i in range(len(w)):
        codes[i] = np.clip(np.round(w[i] / scale[i] + zero[i]), low, high)
        error = (w[i] - (codes[i] - zero[i]) * scale[i]) / upper[i, i]
        w[i:] -= np.outer(upper[i, i:], error)
    return codes[np.argsort(order)]


@pytest.mark.parametrize("qtype", ["int4", "uint3"])
def test_codes_equal_a_numpy_reference(qtype):
    _, scale, zero = grid(W, qtype)
    gram = X.T @ X / len(X)
    codes = gptq(W, Moments(gram), scale, zero, qtype)
    zeros = np.zeros_like(W) if zero is None else zero
    expected = gptq_in_numpy(W, gram, scale, zeros, *FORMATS[qtype].code_range)
    # Float32 can round a tie to the other side, after which the rest of the column differs.
    assert (codes.astype(int) == expected).all(0).mean() > 0.9


def lost(w, q, x=X):
    return np.square(x @ (np.asarray(q, float) - w)).mean(0)


def value(codes, scale, zero, qtype):
    decoded = np.asarray(FORMATS[qtype].decode(np.asarray(codes), np.float32))
    return (decoded - (0 if zero is None else zero)) * scale


@pytest.mark.parametrize("qtype", ["int4", "uint2", "nf4", "float8_e4m3fn", "ternary"])
def test_no_output_is_worse_than_rounding_to_nearest(qtype):
    q, scale, zero = grid(W, qtype)
    codes = gptq(W, Moments(X.T @ X / len(X)), scale, zero, qtype)
    assert codes.dtype == FORMATS[qtype].code_dtype
    before, after = lost(W, q.dequantize()), lost(W, value(codes, scale, zero, qtype))
    assert (after <= before * 1.0001).all()
    assert after.sum() < 0.75 * before.sum()


def test_unused_channels_are_rounded_to_nearest():
    x = X * (np.arange(96) % 3 > 0)
    q, scale, zero = grid(W, "int4")
    codes = gptq(W, Moments(x.T @ x / len(x)), scale, zero, "int4")
    assert_as_near(value(codes, scale, zero, "int4")[::3], q.dequantize()[::3], W[::3])
    nothing = gptq(W, Moments(np.zeros((96, 96))), scale, zero, "int4")
    assert_as_near(value(nothing, scale, zero, "int4"), q.dequantize(), W)


def assert_as_near(ours, nearest, w):
    """The largest magnitude of a tile is half a step beyond its code, which is a tie."""
    np.testing.assert_allclose(np.abs(ours - w), np.abs(nearest - w), atol=1e-5)


def test_uncorrelated_channels_are_rounded_to_nearest():
    q, scale, zero = grid(W, "int4")
    codes = gptq(W, Moments(np.diag(np.linspace(1, 2, 96))), scale, zero, "int4")
    assert_as_near(value(codes, scale, zero, "int4"), q.dequantize(), W)


def test_fewer_rows_than_channels_are_damped():
    few = X[:20]
    q, scale, zero = grid(W, "int4")
    codes = gptq(W, Moments(few.T @ few), scale, zero, "int4")
    before = lost(W, q.dequantize(), few).sum()
    assert lost(W, value(codes, scale, zero, "int4"), few).sum() < 0.3 * before


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nonfinite_weight_affects_only_its_tile(bad):
    w = W.copy()
    w[40, 3] = bad
    _, scale, zero = grid(w, "int4")
    gram = Moments(X.T @ X)
    codes = gptq(w, gram, scale, zero, "int4")
    _, good, _ = grid(W, "int4")
    others = np.arange(24) != 3
    np.testing.assert_array_equal(codes[:, others], gptq(W, gram, good, None, "int4")[:, others])
    assert np.isnan(value(codes, scale, zero, "int4")[32:64, 3]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_moments_raise(bad):
    gram = X.T @ X
    gram[3, 5] = bad
    with pytest.raises(ValueError, match="activations are not finite"):
        Moments(gram)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (65, 2)])
def test_matrices_can_have_any_size(shape):
    x = RNG.normal(size=(7, shape[0]))
    w = np.ones(shape, np.float32)
    assert gptq(w, Moments(x.T @ x), w, None, "int4").tolist() == w.astype(int).tolist()


def test_inverse_factor_is_triangular_and_exact():
    metric = damp(X.T @ X, 0.01)
    upper = inverse_factor(cholesky(metric[::-1, ::-1]))
    np.testing.assert_allclose(upper.T @ upper @ metric, np.eye(96), atol=1e-9)
    assert (np.tril(upper, -1) == 0).all()
    # A singular matrix.
    assert np.isfinite(inverse_factor(cholesky(np.ones((8, 8))))).all()


def test_losses_are_precise_when_errors_cancel():
    x = X + 1e3 * RNG.normal(size=(512, 1))  # the same in all channels
    error = W - W.mean(0)
    expected = np.square(x @ error.astype(float)).mean(0)
    np.testing.assert_allclose(Moments(x.T @ x / len(x)).loss(error, 0 * W), expected, rtol=1e-3)
    assert (Moments(np.zeros((96, 96))).loss(W, 0 * W) == 0).all()
