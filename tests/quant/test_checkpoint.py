"""Quantized checkpoints: outcomes, and a limit on memory."""

import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veneer.files.folder import FolderWriter, TensorFolder
from veneer.files.load_save import load, save
from veneer.files.new_folder import write_aside
from veneer.quant import Rule, quantize
from veneer.quant.models.checkpoint import (
    ANY_WEIGHT,
    Outcome,
    Selector,
    describe_format,
    plan,
    quantize_stream,
    relative_error,
    summarize,
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_stream_quantizes_only_tensors_with_a_rule():
    w, b = normal(4, 8), normal(4)
    q = quantize(w, "int8")
    stream = quantize_stream([("w", w), ("b", b), ("q", q)], {"w": Rule("w", "nf4", tile_axis=-1)})
    (new, outcome), (same, _), (old, _) = stream
    expected = quantize(w, "nf4", channelwise_axes=[0])
    assert jax.tree.structure(new) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, new, expected))
    assert same is b
    assert old is q
    lost = np.linalg.norm(w - np.asarray(expected.dequantize()))
    np.testing.assert_allclose(outcome.error, lost, rtol=1e-6)
    np.testing.assert_allclose(outcome.norm, np.linalg.norm(w), rtol=1e-6)
    assert (outcome.bytes_before, outcome.bytes_after) == (128, 4 * 4 + 4 * 4)


def test_a_summary_groups_names_that_differ_in_numbers():
    groups = summarize(
        [
            Outcome("layers.0.w", "nf4, tile 64", 100, 20, 3.0, 10.0),
            Outcome("layers.10.w", "nf4, tile 64", 100, 20, 4.0, 0.0),
            Outcome("layers.2.w", "float32", 100, 100),
        ]
    )
    assert [(g.name, g.format, g.tensors, g.bytes_after) for g in groups] == [
        ("layers.*.w", "nf4, tile 64", 2, 40),
        ("layers.*.w", "float32", 1, 100),
    ]
    assert groups[0].relative_error == pytest.approx(0.5)
    assert groups[1].relative_error is None


def test_float64_weights_are_quantized_in_float32():
    ((q, outcome),) = quantize_stream(
        [("w", np.ones((4, 8)))], {"w": Rule("w", "int8", tile_axis=-1)}
    )
    assert q.dtype == jnp.float32
    assert outcome.bytes_before == 4 * 8 * 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "int8, one scale"),
        ({"channelwise_axes": [0]}, "int8, channelwise"),
        ({"channelwise_axes": [0], "tiled_axes": {1: 4}}, "int8, tile 4"),
        ({"tiled_axes": {0: 2, 1: 4}}, "int8, tile 2×4"),
        ({"tiled_axes": {0: 2, 1: 8}}, "int8, tile 2×8"),  # two whole rows
    ],
)
def test_describe_format_names_the_tiles(options, expected):
    assert describe_format(quantize(normal(4, 8), "int8", **options)) == expected


@pytest.mark.parametrize(
    ("error", "norm", "expected"), [(1.0, 4.0, 0.25), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf)]
)
def test_the_relative_error_of_nothing_is_zero(error, norm, expected):
    assert relative_error(error, norm) == expected


def test_memory_is_bounded_by_a_few_tensors(tmp_path):
    count, shape = 48, (256, 256)
    tensor = 4 * math.prod(shape)
    save(tmp_path / "model", {f"{i}.weight": normal(*shape, seed=i) for i in range(count)})
    # Compiling a kernel takes memory, so do it before the measurement.
    quantize(normal(*shape), "int8", channelwise_axes=[-1])
    before = most_in_jax = sum(x.nbytes for x in jax.live_arrays())

    def watched(source):
        nonlocal most_in_jax
        for name in source:
            most_in_jax = max(most_in_jax, sum(x.nbytes for x in jax.live_arrays()))
            yield name, source.read(name)

    tracemalloc.start()  # NumPy and Python report to it, JAX does not
    with TensorFolder(tmp_path / "model") as source, write_aside(tmp_path / "out") as folder:
        chosen = plan(source.dense_avals(), [Selector(ANY_WEIGHT, "int8")])
        writer = FolderWriter(folder, source, shard_bytes=2 * tensor)
        for value, outcome in quantize_stream(watched(source), chosen):
            writer.add(outcome.name, value)
        writer.finish()
    _, most_in_numpy = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The original is 48 tensors and the result 12; a shard is 2, and one tensor has a few copies.
    assert most_in_jax - before + most_in_numpy < 8 * tensor
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 4
    assert len(load(tmp_path / "out")) == count
