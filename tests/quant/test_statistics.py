import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer.quant import ActivationStatistics, load_statistics, save_statistics
from veneer.quant.recording import Recording
from veneer.quant.statistics import static_range


def batches(*shape, count=4, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) * (i + 1) + i for i in range(count)]


def reduced(x):
    """Reduce activations `[M, K]`, as rules for products do on the device."""
    sums = np.stack([x.sum(0), np.abs(x).sum(0), np.square(x).sum(0)])
    return x.min(0)[None], x.max(0)[None], sums[:, None], (x.T @ x)[None]


def recorded(xs, *, shape=(6, 3), decay=0.75, gram=True):
    recording = Recording(shape, (-2,), gram=gram, decay=decay)
    for x in xs:
        for half in np.array_split(x, 2):  # the operands of two products
            recording.add(len(half), np.arange(x.shape[1])[None], *reduced(half))
        recording.end_batch()
    return recording.statistics()


def test_channels_have_the_moments_of_all_batches():
    xs = batches(10, 6)
    x, found = np.concatenate(xs), recorded(xs)
    expected = {
        "count": np.full(6, 40.0),
        "minimum": x.min(0),
        "maximum": x.max(0),
        "mean": x.mean(0),
        "absmean": np.abs(x).mean(0),
        "mean_square": np.square(x).mean(0),
        "absmax": np.abs(x).max(0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value[:, None], rtol=1e-12)
    np.testing.assert_allclose(found.gram, x.T @ x / 40, rtol=1e-12)


def test_ranges_are_averaged_over_batches():
    xs = batches(10, 6)
    found = recorded(xs, decay=0.75)
    for x_of, name in ((np.min, "lows"), (np.max, "highs")):
        ends = [x_of(x) for x in xs]
        moving = ends[0]
        for end in ends[1:]:
            moving = 0.75 * moving + 0.25 * end
        averages = getattr(found, name)
        np.testing.assert_allclose(averages["mean"], [[np.mean(ends)]], rtol=1e-12)
        np.testing.assert_allclose(averages["exponential"], [[moving]], rtol=1e-12)
    low, high = found.range("widest")
    x = np.concatenate(xs)
    np.testing.assert_array_equal((low, high), ([[x.min()]], [[x.max()]]))
    with pytest.raises(ValueError, match=r"unknown average 'median'; .*mean, exponential, widest"):
        found.range("median")


def test_a_range_with_nan_raises():
    x = batches(10, 6, count=1)[0]
    x[3, 2] = np.nan
    one = recorded([x])
    assert np.isnan(one.maximum).ravel().tolist() == [False, False, True, False, False, False]
    for average in ("mean", "exponential", "widest"):
        with pytest.raises(ValueError, match="not finite"):
            static_range(one, "int8", (6, 3), average=average)


@pytest.mark.parametrize(
    ("method", "ends"),
    [
        (None, lambda x: (None, np.abs(x).max())),
        ("absmax,0.5", lambda x: (None, np.abs(x).max() / 2)),
        ("minmax", lambda x: (x.min(), x.max())),
        ("rms,3", lambda x: (None, 3 * np.sqrt(np.mean(np.square(x))))),
        ("fixed,2.5", lambda x: (None, 2.5)),
    ],
)
def test_calibration_methods_use_recorded_ranges(method, ends):
    (x,) = xs = batches(50, 6, count=1)
    scale, zero_point = static_range(recorded(xs), "int8", (6, 3), calibration_method=method)
    low, high = ends(x)
    scale_, zero_point_ = vn.quant.scale_of_range("int8", high, low)
    assert scale.shape == (1, 1)
    np.testing.assert_allclose(scale.ravel(), scale_, rtol=1e-5)
    assert (zero_point is None) == (zero_point_ is None)
    if zero_point is not None:
        assert abs(int(zero_point.ravel()[0]) - int(zero_point_)) <= 1


def test_a_method_that_needs_activations_raises():
    with pytest.raises(ValueError, match=r"'mse' needs the activations themselves"):
        static_range(recorded(batches(5, 6)), "int8", (6, 3), calibration_method="mse")


def test_statistics_of_a_weight_of_another_shape_raise():
    with pytest.raises(ValueError, match=r"ranges of shape \(1, 1\), which do not fit"):
        static_range(recorded(batches(5, 6)), "int8", (2, 6, 3))


def test_statistics_are_saved_and_loaded(tmp_path):
    statistics = {
        "layers.0:a/b": recorded(batches(5, 6)),
        "w": recorded(batches(5, 6, seed=1), gram=False),
    }
    save_statistics(tmp_path / "activations", statistics)
    loaded = load_statistics(tmp_path / "activations")
    assert jax.tree.structure(loaded) == jax.tree.structure(statistics)
    jax.tree.map(np.testing.assert_array_equal, loaded, statistics)
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    with pytest.raises(ValueError, match="no activation statistics"):
        load_statistics(tmp_path / "other.npz")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut"], ids=repr)
def test_a_damaged_file_of_statistics_raises(content, tmp_path):
    file = tmp_path / "statistics.npz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is empty, damaged or no"):
        load_statistics(file)


def test_statistics_are_a_pytree_of_arrays():
    one = recorded(batches(5, 6))
    halves = jax.tree.map(lambda x: x / 2, {"w": one})
    assert isinstance(halves["w"], ActivationStatistics)
    np.testing.assert_allclose(halves["w"].mean, one.mean / 2)
    assert dataclasses.replace(one, gram=None).gram is None
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(one))
    jax.jit(lambda s: jnp.sum(s["w"].absmean))({"w": one})
