"""Which tensors of a checkpoint are quantised, and that they pass one at a time."""

import json
import math
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from veneer.interop.folder import FolderWriter, TensorFolder, write_aside
from veneer.interop.safetensors import load, save
from veneer.quant import Rule, quantize
from veneer.quant.checkpoint import (
    ANY_WEIGHT,
    Outcome,
    Selector,
    describe_format,
    plan,
    quantize_stream,
    relative_error,
    selectors_from_json,
    summarise,
)


def aval(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


AVALS = {
    "embed.weight": aval(10, 8),
    "layers.0.weight": aval(4, 8),
    "layers.0.kernel": aval(8, 4),
    "layers.1.weight": aval(4, 8, dtype=ml_dtypes.bfloat16),
    "norm.weight": aval(8),
    "table": aval(8, 6),
    "ids.weight": aval(3, 3, dtype=np.int64),
    "fp8.weight": aval(4, 8, dtype=ml_dtypes.float8_e4m3fn),
}


def test_the_default_takes_floating_weights_and_kernels_of_rank_two_and_up():
    chosen = plan(AVALS, [Selector(ANY_WEIGHT, "int8")])
    assert {name: rule.tile_axis for name, rule in chosen.items()} == {
        "embed.weight": -1,
        "layers.0.weight": -1,
        "layers.0.kernel": -2,
        "layers.1.weight": -1,
    }


def test_the_first_selector_that_matches_wins():
    chosen = plan(
        AVALS,
        [Selector("embed.*", None), Selector("layers.0.*", "nf4", 4), Selector(ANY_WEIGHT, "int8")],
    )
    assert {name: (rule.qtype, rule.tile_size) for name, rule in chosen.items()} == {
        "layers.0.weight": ("nf4", 4),
        "layers.0.kernel": ("nf4", 4),
        "layers.1.weight": ("int8", None),
    }


def test_a_stated_axis_counts_more_than_the_name():
    assert plan(AVALS, [Selector("table", "int8", 2, -1)])["table"].tile_axis == -1
    assert plan(AVALS, [Selector("embed.weight", "int8", 2, -2)])["embed.weight"].tile_axis == -2


BAD = {
    "nothing": (Selector("layers", "int8"), r"'layers' matches no tensor; .* 'embed.weight'"),
    "nothing_dense": (Selector("norm", None), "'norm' matches no tensor"),
    "integers": (Selector("ids.*", "int8"), r"'ids.weight' is int64\[3, 3\].* bfloat16.*rank 2"),
    "float8": (Selector("fp8.*", "int8"), r"'fp8.weight' is float8_e4m3fn\[4, 8\]"),
    "vector": (Selector("norm.weight", "int8"), r"'norm.weight' is float32\[8\]"),
    "axis": (Selector("table", "int8", 2, -3), r"axis -3, and 'table' \[8, 6\] has none"),
    "unknown_axis": (Selector("table", "int8"), r"'table' \[8, 6\] is unknown.*--layout torch"),
    "tile": (
        Selector("layers.0.weight", "int8", 3),
        r"tile 3 does not divide axis -1 of 'layers.0.weight' \[4, 8\]: tiles that do are 1, 2, 4, "
        r"8, .*--exclude 'layers\\.0\\.weight'",
    ),
    "nothing_left": (Selector(".*", None), "no tensor is left to quantise"),
}


@pytest.mark.parametrize(("selector", "message"), BAD.values(), ids=BAD)
def test_a_plan_that_cannot_be_is_refused(selector, message):
    with pytest.raises(ValueError, match=message):
        plan(AVALS, [selector])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("(", "int8"), r"'\(' is not a regex"),
        (("x", "int9"), "unknown format 'int9'.*int4"),
        (("x", "int8", 0), "not 0"),
    ],
)
def test_a_selector_is_checked_when_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Selector(*arguments)


def test_rules_are_read_in_order_with_what_is_missing_by_default():
    text = json.dumps(
        [
            {"path": "embed.*", "qtype": None},
            {"path": ".*", "qtype": "int4", "tile_size": 32, "tile_axis": -2},
            {"path": "x", "qtype": "int8", "tile_size": None},
        ]
    )
    assert selectors_from_json(text, tile_axis=-1) == [
        Selector("embed.*", None, None, -1),
        Selector(".*", "int4", 32, -2),
        Selector("x", "int8", None, -1),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '[{"path": "x"}]',
        '[{"path": "x", "qtype": "int8", "tile": 4}]',
        '[{"path": "x", "qtype": "int8", "tile_size": "4"}]',
        '[{"path": "x", "qtype": "int8", "tile_size": true}]',
        '[{"path": "x", "qtype": "int8", "tile_axis": null}]',
        '[{"path": "x", "qtype": "int7"}]',
    ],
)
def test_malformed_rules_are_refused(text):
    with pytest.raises(ValueError, match=r"rule|format"):
        selectors_from_json(text)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_stream_quantises_as_quantize_does_and_passes_the_rest_through():
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


def test_a_summary_folds_numbers_and_takes_a_group_as_one_vector():
    groups = summarise(
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


def test_float64_weights_are_quantised_in_float32_as_jax_does_without_x64():
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
    ],
)
def test_a_format_is_described_with_its_tiles(options, expected):
    assert describe_format(quantize(normal(4, 8), "int8", **options)) == expected


@pytest.mark.parametrize(
    ("error", "norm", "expected"), [(1.0, 4.0, 0.25), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf)]
)
def test_relative_error(error, norm, expected):
    assert relative_error(error, norm) == expected


def test_memory_is_bounded_by_a_few_tensors_and_a_shard(tmp_path):
    count, shape = 48, (256, 256)
    tensor = 4 * math.prod(shape)
    save(tmp_path / "model", {f"{i}.weight": normal(*shape, seed=i) for i in range(count)})
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
