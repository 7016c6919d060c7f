"""Formats that other libraries can hold: chosen, written, and rounded to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.files.checkpoint import convert
from veneer.files.targets import TARGETS, Requantized, choose_rules, find_unsupported

MODEL = {
    "model.embed_tokens.weight": (96, 128),
    "model.layers.0.self_attn.q_proj.weight": (128, 128),
    "model.layers.0.mlp.up_proj.weight": (256, 128),
    "model.layers.0.mlp.down_proj.weight": (128, 256),
    "model.norm.weight": (128,),
}
CASES = [(target, qtype) for target, row in TARGETS.items() for qtype in row.formats]


@arrays.once
def dense():
    return {name: arrays.normal(*shape, seed=i) for i, (name, shape) in enumerate(MODEL.items())}


@pytest.mark.parametrize(("target", "qtype"), CASES)
def test_chosen_formats_are_written_exactly(tmp_path, target, qtype):
    rules = choose_rules(target, MODEL, qtype)
    small = {name: rules[name].quantize(x) if name in rules else x for name, x in dense().items()}
    assert find_unsupported(target, small) == {}
    path = tmp_path / ("small.gguf" if target == "gguf" else "small")
    convert(path, small, target)
    again = vn.load(path)
    assert set(again) == set(MODEL)
    assert all(isinstance(again[name], vn.ImplicitArray) for name in rules)
    for name, x in small.items():
        np.testing.assert_allclose(
            vn.materialise(again[name]), vn.materialise(x), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("target", TARGETS)
def test_embeddings_stay_dense_where_the_library_needs_it(target):
    chosen = choose_rules(target, MODEL)
    assert ("model.embed_tokens.weight" in chosen) == (target in ("gguf", "mlx"))
    assert "model.norm.weight" not in chosen
    assert len(chosen) >= 3


def test_the_group_size_divides_all_inputs():
    shapes = {"a.weight": (128, 128), "b.weight": (128, 192)}
    assert {rule.tile_size for rule in choose_rules("gptq", shapes).values()} == {64}
    with pytest.raises(ValueError, match=r"groups of 128 or 64 or 32.*the 100 inputs of c.weight"):
        choose_rules("gptq", shapes | {"c.weight": (128, 100)})


def test_a_format_to_round_to_is_checked_first():
    with pytest.raises(
        ValueError, match="gptq has the formats int4, int2, int3, int8, but not nf4"
    ):
        Requantized({}, "gptq", "nf4")


def test_a_permuted_weight_is_rounded_for_gguf():
    q = vn.quant.quantize(arrays.normal(32, 64), "int4", channelwise_axes=[0], tiled_axes={1: 32})
    permuted = vn.types.Permuted(q, jnp.arange(64)[None, ::-1], -1)
    assert "Permuted" in find_unsupported("gguf", {"a.weight": permuted})["a.weight"]
    changed = Requantized({"a.weight": permuted}, "gguf", "int8")["a.weight"]
    np.testing.assert_allclose(vn.materialise(changed), vn.materialise(permuted), atol=0.03)


def test_weights_with_odd_outputs_stay_dense():
    assert set(choose_rules("awq", {"a.weight": (12, 128), "b.weight": (16, 128)})) == {"b.weight"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("onnx", MODEL), "unknown library 'onnx': choose from gguf, mlx"),
        (("awq", MODEL, "nf4"), "awq has the formats uint4, int4, but not nf4"),
        (("awq", {"kernel": (128, 128)}), "no tensor can be quantized for awq"),
    ],
)
def test_wrong_choices_raise(arguments, error):
    with pytest.raises(ValueError, match=error):
        choose_rules(*arguments)


@pytest.mark.parametrize("target", TARGETS)
def test_weights_of_another_format_are_rounded(tmp_path, target):
    rule = vn.quant.Rule(".*", "nf4", tile_size=64, tile_axis=-1)
    small = {name: x if x.ndim < 2 else rule.quantize(x) for name, x in dense().items()}
    matrices = [name for name, x in small.items() if x.ndim == 2]
    assert sorted(find_unsupported(target, small)) == sorted(matrices)
    changed = Requantized(small, target, TARGETS[target].formats[0])
    path = tmp_path / ("changed.gguf" if target == "gguf" else "changed")
    convert(path, changed, target)
    again = vn.load(path)
    assert sorted([*changed.errors, *changed.made_dense]) == sorted(matrices)
    for name, (error, norm) in changed.errors.items():
        before, after = vn.materialise(small[name]), vn.materialise(again[name])
        assert error == pytest.approx(float(jnp.linalg.norm(after - before)), rel=1e-3)
        assert norm == pytest.approx(float(jnp.linalg.norm(before)), rel=1e-3)
        assert 0 < error / norm < 0.2
    for name in changed.made_dense:
        np.testing.assert_array_equal(again[name], vn.materialise(small[name]))


def test_weights_that_a_library_holds_are_not_changed():
    q = choose_rules("gptq", MODEL)["model.layers.0.mlp.up_proj.weight"].quantize(
        dense()["model.layers.0.mlp.up_proj.weight"]
    )
    changed = Requantized({"model.layers.0.mlp.up_proj.weight": q}, "gptq", "int4")
    assert changed["model.layers.0.mlp.up_proj.weight"] is q
    assert changed.errors == {}
    assert changed.made_dense == []
    assert len(changed) == 1
    assert jax.tree.structure(q) == jax.tree.structure(changed[next(iter(changed))])


def test_scales_that_overflow_are_an_error():
    rule = vn.quant.Rule(".*", "nf4", tile_size=64, tile_axis=-1)
    large = {"a.weight": rule.quantize(arrays.normal(32, 64) * 1e7)}
    with pytest.raises(ValueError, match=r"the scales of a\.weight overflow float16"):
        Requantized(large, "gptq", "int4")["a.weight"]
