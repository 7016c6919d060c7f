"""The second part of the demo, with a small language model."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

import veneer as vn
from veneer.cli.demo import COMMAND
from veneer.demo import language_model
from veneer.files.gguf import write_gguf
from veneer.models import llama, load
from veneer.models.comparison import split_windows

HIDDEN, WIDE, LAYERS, HEADS, GROUPS = 64, 96, 2, 4, 2
END = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '\n' }}"


def alphabet():
    """Return the letters that represent bytes in the vocabulary of GPT-2."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A GGUF file of a Llama with random weights, whose tokens are bytes."""
    rng = np.random.default_rng(0)
    tokens = [*alphabet(), "Ġt", END]

    def weight(*shape):
        w = rng.normal(size=shape).astype(np.float16) * shape[-1] ** -0.5
        return vn.quant.quantize(w, "int8", channelwise_axes=[0], tiled_axes={1: 32})

    half = HIDDEN * GROUPS // HEADS
    tensors = {"token_embd.weight": weight(len(tokens), HIDDEN)}
    tensors["output_norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (half, HIDDEN), "attn_v": (half, HIDDEN)}
        shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (WIDE, HIDDEN)}
        shapes |= {"ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE)}
        for name, shape in shapes.items():
            tensors[f"blk.{i}.{name}.weight"] = weight(*shape)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": WIDE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": GROUPS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, tensors, metadata)
    return path


@pytest.fixture(scope="module")
def model(gguf):
    return load(gguf)


def test_a_model_is_loaded_packed(model, gguf):
    packed = [w for w in model.params.values() if isinstance(w, vn.ImplicitArray)]
    assert len(packed) == 1 + 7 * LAYERS
    assert sum(x.nbytes for x in jax.tree.leaves(model.params)) <= 1.02 * gguf.stat().st_size
    assert model.formats[0] == "Q8_0"


def test_a_prompt_follows_the_chat_template(model):
    assert model.tokenizer.decode(model.encode_chat("why {{ 1 }}?")) == "why {{ 1 }}?\n"


def test_an_answer_equals_the_dense_one_and_is_streamed(model):
    shown = []
    answer = model.generate("the text", max_tokens=12, on_text=shown.append)
    assert answer.text.startswith("".join(shown))  # without an incomplete letter at the end
    assert len(shown) > 1
    dense = replace(model, params=vn.materialise(model.params))
    assert dense.generate("the text", max_tokens=12).text == answer.text
    assert answer.tokens_per_second > 0


def test_perplexity_equals_the_perplexity_of_dense_weights(model):
    tokens = split_windows(model.tokenizer, "some words, and others. \n" * 50, 2)
    losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
    packed = language_model.perplexity(losses, model, model.params, tokens)
    dense = language_model.perplexity(losses, model, vn.materialise(model.params), tokens)
    assert packed == pytest.approx(dense, rel=1e-4)
    with pytest.raises(ValueError, match="the text has 10 tokens, but 512 are needed"):
        split_windows(model.tokenizer, "ten words.", 1)


def test_main_prints_an_answer_and_a_table(model, monkeypatch, capsys):
    text = ("A sentence of some words.",) * 100
    monkeypatch.setattr(language_model, "all_sentences", lambda: text)
    monkeypatch.setattr(language_model, "_WINDOWS", 1)
    monkeypatch.setattr(language_model, "MAX_ANSWER", 8)
    found = language_model.main(model, "the text")
    assert set(re.findall(r"\w+", COMMAND.json_keys["language_model"])) >= {
        *found,
        *found["variants"][0],
    }
    assert len(found["variants"]) == 4
    printed = capsys.readouterr().out
    assert found["answer"] in printed
    for text in ("Q8_0, as in the file", "int8, channelwise", "No weight was materialized"):
        assert text in printed
