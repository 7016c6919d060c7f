"""`model_of` gives the shapes of programs and the published parameter counts."""

import re

import jax
import pytest
from support.model_configs import SMALL, config

from veneer.models import llama
from veneer.plan import model_of


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-405b", 405_853_388_800),
        ("gpt-oss-120b", 116_829_156_672),  # 116.83 billion in its model card, arXiv 2508.10925
        ("deepseek-v3", 671_026_419_200),  # 671 billion in arXiv 2412.19437
    ],
)
def test_parameter_counts_are_those_published(name, parameters):
    assert model_of(config(name)).size == parameters


def named(model):
    """Return the shapes of all weights by their full names, with layer numbers."""
    found, first = {w.path: w.shape for w in model.outside}, 0
    for kind in model.layers:
        for layer in range(first, first + kind.count):
            found |= {w.path.replace("*", str(layer)): w.shape for w in kind.weights}
        first += kind.count
    return found


def test_names_and_shapes_equal_the_llama_program():
    config = llama.LlamaConfig.from_dict(SMALL)
    params = jax.eval_shape(lambda key: llama.init(key, config), jax.random.key(0))
    assert named(model_of(SMALL)) == {name: x.shape for name, x in params.items()}


def test_tied_embeddings_have_no_output_head():
    outside = model_of(SMALL | {"tie_word_embeddings": True}).outside
    assert [w.path for w in outside] == ["model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"model_type": "qwen2"}, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        ({"model_type": "qwen3"}, {"q_norm.weight", "k_norm.weight"}),
        ({"attention_bias": True}, {f"{x}_proj.bias" for x in "qkvo"}),
    ],
)
def test_some_architectures_have_biases_or_query_norms(entries, expected):
    one, other = (named(model_of(SMALL | extra)) for extra in ({}, entries))
    assert {re.sub(r".*attn\.", "", path) for path in other.keys() - one.keys()} == expected


def test_layers_with_a_sliding_window_are_one_kind():
    entries = config("gpt-oss-120b")
    kinds = model_of(entries).layers
    assert [(kind.count, kind.window) for kind in kinds] == [(18, 128), (18, None)]
    types = ["full_attention"] * 30 + ["sliding_attention"] * 6
    kinds = model_of(entries | {"layer_types": types}).layers
    assert [(kind.count, kind.window) for kind in kinds] == [(6, 128), (30, None)]


def test_an_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(
        ValueError,
        match=r"model_type 'mamba' of config.json is not supported; supported are llama, mistral, ",
    ):
        model_of({"model_type": "mamba"})


def test_a_missing_config_entry_is_named():
    with pytest.raises(
        ValueError, match=r"config.json of a 'llama' model has no entry 'hidden_size'"
    ):
        model_of({name: n for name, n in SMALL.items() if name != "hidden_size"})
