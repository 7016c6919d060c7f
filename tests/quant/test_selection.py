"""The selection of tensors of a checkpoint, and their formats."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from veneer.quant.models.checkpoint import (
    ANY_WEIGHT,
    Selector,
    TileError,
    UnknownAxisError,
    describe_adapted,
    find_unselected,
    plan,
    selectors_from_json,
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


def test_the_default_selects_floating_weights_of_rank_two():
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


def test_a_stated_axis_overrides_the_name():
    assert plan(AVALS, [Selector("table", "int8", 2, -1)])["table"].tile_axis == -1
    assert plan(AVALS, [Selector("embed.weight", "int8", 2, -2)])["embed.weight"].tile_axis == -2


def test_a_fixed_tile_size_is_the_default():
    wide = {"a.weight": aval(4, 64)}
    for qtype, tile in (("mxfp4", 32), ("nvfp4", 16), ("nf4", None)):
        assert plan(wide, [Selector(ANY_WEIGHT, qtype)])["a.weight"].tile_size == tile
    assert plan(wide, [Selector(ANY_WEIGHT, "mxfp4", 32)])["a.weight"].tile_size == 32


@pytest.mark.parametrize(
    ("qtype", "size", "expected"),
    [
        ("int8", 96, ("int8", 96)),
        ("nf4", 128, ("nf4", 64)),
        ("nf4", 96, ("nf4", 48)),
        ("nf4", 40, ("nf4", 40)),
        ("nf4", 134, ("nf4", 134)),  # 67 and 2, its divisors, are too large and too small
        ("int2", 64, ("int2", 32)),
        ("mxfp4", 64, ("mxfp4", 32)),
        ("mxfp4", 40, ("int8", 40)),
        ("nf4", 0, ("nf4", 0)),
    ],
)
def test_the_default_tile_fits_the_axis(qtype, size, expected):
    avals = {"a.weight": aval(4, size), "b.kernel": aval(3, size, 4)}
    chosen = plan(avals, [Selector(ANY_WEIGHT, qtype, "default")])
    shapes = {
        name: jax.eval_shape(chosen[name].quantize, aval).tile_shape for name, aval in avals.items()
    }
    assert {rule.qtype for rule in chosen.values()} == {expected[0]}
    assert shapes == {"a.weight": (1, expected[1]), "b.kernel": (1, expected[1], 1)}
    told = describe_adapted(avals, chosen, qtype)
    assert len(told) == (0 if expected in (("int8", 96), (qtype, 64), (qtype, 32)) else 2)


def test_unselected_tensors_are_those_that_could_be_quantized():
    assert find_unselected(AVALS, [Selector(ANY_WEIGHT, "int8")]) == ["table"]
    assert find_unselected(AVALS, [Selector("t.*", None), Selector(ANY_WEIGHT, "int8")]) == []


BAD = {
    "nothing": (Selector("layers", "int8"), r"'layers' matches no tensor. .* 'embed.weight'"),
    "nothing_dense": (Selector("norm", None), "'norm' matches no tensor"),
    "integers": (Selector("ids.*", "int8"), r"'ids.weight' is int64\[3, 3\].* bfloat16.*rank 2"),
    "float8": (Selector("fp8.*", "int8"), r"'fp8.weight' is float8_e4m3fn\[4, 8\]"),
    "vector": (Selector("norm.weight", "int8"), r"'norm.weight' is float32\[8\]"),
    "axis": (Selector("table", "int8", 2, -3), r"axis -3, which 'table' \[8, 6\] does not have"),
    "unknown_axis": (Selector("table", "int8"), r"'table' \[8, 6\] is unknown.*tile_axis"),
    "tile": (
        Selector("layers.0.weight", "int8", 3),
        r"tile 3 does not divide axis -1 of 'layers.0.weight' \[4, 8\]\. Tiles that do are 1, 2, "
        "4, 8, or leave it dense",
    ),
    "nothing_left": (Selector(".*", None), "no tensor is left to quantize"),
}


@pytest.mark.parametrize(("selector", "message"), BAD.values(), ids=BAD)
def test_an_impossible_plan_raises(selector, message):
    with pytest.raises(ValueError, match=message):
        plan(AVALS, [selector])


def test_unknown_axes_and_tiles_have_their_own_error_types():
    with pytest.raises(UnknownAxisError):
        plan(AVALS, [Selector("table", "int8")])
    with pytest.raises(TileError) as error:
        plan(AVALS, [Selector("layers.0.weight", "int8", 3)])
    assert error.value.tensor == "layers.0.weight"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("(", "int8"), r"'\(' is not a regex"),
        (("x", "int9"), "unknown format 'int9'; did you mean 'int8'"),
        (("x", "int8", 0), "not 0"),
        (("x", "mxfp4", 16), "needs tiles of 32, not 16"),
    ],
)
def test_a_selector_is_checked_when_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Selector(*arguments)


def test_rules_are_read_in_order_with_defaults():
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
        '[{"path": "x", "qtype": "int9"}]',
    ],
)
def test_malformed_rules_raise(text):
    with pytest.raises(ValueError, match=r"rule|format"):
        selectors_from_json(text)
