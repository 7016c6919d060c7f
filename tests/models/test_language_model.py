"""Language models that are loaded from a file, chat, and are compared."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import optional

import veneer as vn
from veneer.models import WEIGHTS, LanguageModel, compare, llama, load, make_cache
from veneer.models.comparison import WINDOW, split_windows

pytestmark = optional.needs("demo")

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 258,
}
TEMPLATE = (
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def tokenizer():
    """Return a tokenizer with a token for each byte, and three special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<user>", "<model>", "<end>"])
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a Hugging Face folder of a small random Llama."""
    path = tmp_path_factory.mktemp("model")
    params = llama.init(jax.random.key(0), llama.LlamaConfig.from_dict(CONFIG))
    save_file({name: np.asarray(x) for name, x in params.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def test_a_chat_becomes_tokens_by_the_template(model):
    tokens = model.encode_chat([{"role": "user", "content": "ab"}])
    assert model.tokenizer.decode(tokens, skip_special_tokens=False) == "<user>ab<model>"
    assert model.encode_chat("ab") == tokens


def test_an_answer_has_the_most_likely_tokens(model):
    answer = model.generate("ab", max_tokens=4)
    tokens = model.encode_chat("ab")
    for token in answer.tokens:
        x, _ = llama.hidden(
            model.params,
            model.config,
            jnp.array([tokens]),
            llama.empty_cache(model.config, 1, len(tokens)),
        )
        assert token == int(llama.logits(model.params, x[0, -1]).argmax())
        tokens.append(token)
    assert answer.prompt_tokens == 4
    assert not answer.is_complete
    assert answer.text == model.tokenizer.decode(answer.tokens)


def test_pieces_of_an_answer_add_up_to_its_text(model):
    pieces = []
    answer = model.generate("ab", max_tokens=6, temperature=1.0, seed=3, on_text=pieces.append)
    assert "".join(pieces) == answer.text


def test_a_stop_token_ends_the_answer(model):
    first = model.generate("ab", max_tokens=1).tokens[0]
    stopped = LanguageModel(
        model.params, model.config, model.tokenizer, (first,), template=model.template
    ).generate("ab", max_tokens=4)
    assert stopped.is_complete
    assert stopped.tokens == []
    assert stopped.text == ""


def test_a_dense_model_is_quantized_on_request(folder, model):
    small = load(folder, "int8")
    assert small.nbytes < 0.3 * model.nbytes
    matrices = [name for name, x in model.params.items() if x.ndim == 2]
    assert all(small.params[name].qtype == "int8" for name in matrices)
    assert small.formats == ("int8", "float32")


def test_a_quantized_folder_is_loaded_packed(tmp_path, folder, model):
    small = load(folder, "int8")
    vn.save(tmp_path / "small", dict(small.params))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "small" / name).write_bytes((folder / name).read_bytes())
    again = load(tmp_path / "small")
    assert again.nbytes == small.nbytes
    assert again.generate("ab", max_tokens=3).tokens == small.generate("ab", max_tokens=3).tokens
    with pytest.raises(ValueError, match="already quantized"):
        load(tmp_path / "small", "nf4")


def test_a_make_cache_has_a_scale_per_token(model):
    cache = make_cache(model.config, 8, "int8")
    assert cache.keys[0].shape == (2, 8, 16)
    assert cache.keys[0].scale.shape == (2, 8, 1)
    dense, small = (model.generate("ab", max_tokens=3, cache_format=f) for f in (None, "int8"))
    assert len(small.tokens) == len(dense.tokens) == 3


@pytest.mark.parametrize(
    ("missing", "error"),
    [("config.json", "has no config.json"), ("tokenizer.json", "has no tokenizer.json")],
)
def test_a_missing_file_is_named(tmp_path, folder, missing, error):
    for file in folder.iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FileNotFoundError, match=error):
        load(tmp_path)


def test_another_architecture_is_rejected(tmp_path, folder):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"gpt2.*llama, mistral, qwen2, qwen3"):
        load(tmp_path)


def test_wrong_arguments_of_generate_raise(model):
    wrong = [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}]
    for options in [*wrong, {"temperature": 1e-40}, {"top_p": 2.0}, {"top_k": 0}]:
        with pytest.raises(ValueError, match="max_tokens and top_k must be 1 or more"):
            model.generate("ab", **options)
    for messages in (5, b"ab", ["ab"], [{"role": "user"}], {"content": "ab"}):
        with pytest.raises(TypeError):
            model.encode_chat(messages)
    strict = LanguageModel(
        model.params, model.config, model.tokenizer, template="{{ raise_exception('no') }}"
    )
    with pytest.raises(ValueError, match="the chat template rejects the messages: no"):
        strict.generate("ab")


def test_a_template_cannot_reach_python(model):
    hostile = LanguageModel(
        model.params, model.config, model.tokenizer, template="{{ ''.__class__.__mro__ }}"
    )
    with pytest.raises(ValueError, match="unsafe"):
        hostile.encode_chat("ab")


# Comparison.


TEXT = "The quick brown fox jumps over the lazy dog. " * 30


def test_a_comparison_agrees_with_numpy(model, folder):
    small = load(folder, "nf4")
    result = compare(model, small, TEXT, windows=2)
    log_p, log_q, targets = [], [], []
    for window in split_windows(model.tokenizer, TEXT, 2):
        for m, rows in ((model, log_p), (small, log_q)):
            params = vn.materialise(dict(m.params))
            cache = llama.empty_cache(m.config, 1, WINDOW)
            x, _ = llama.hidden(params, m.config, window[None], cache)
            logits = np.asarray(llama.logits(params, x[0, 256:511]), np.float64)
            rows.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        targets.append(window[257:])
    p, q, at = np.concatenate(log_p), np.concatenate(log_q), np.concatenate(targets)
    divergence = (np.exp(p) * (p - q)).sum(-1)
    loss = lambda x: -np.take_along_axis(x, at[:, None], 1).mean()
    assert result.tokens == 510
    assert result.reference_perplexity == pytest.approx(math.exp(loss(p)), rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(loss(q)), rel=1e-4)
    assert result.kl_mean == pytest.approx(divergence.mean(), rel=1e-3)
    assert result.kl_99_9 == pytest.approx(np.quantile(divergence, 0.999), rel=1e-3)
    assert result.same_top == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean(), abs=0.01)
    assert result.kl_mean > 1e-4
    assert (result.nbytes, result.reference_nbytes) == (small.nbytes, model.nbytes)


def test_a_model_agrees_with_itself(model):
    result = compare(model, model, TEXT, windows=1)
    assert result.kl_mean == result.kl_99_9 == 0
    assert result.same_top == 1
    assert result.perplexity == result.reference_perplexity


def test_a_text_that_is_too_short_raises(model):
    with pytest.raises(ValueError, match="the text has 3 tokens, but 512 are needed"):
        compare(model, model, "abc")


def test_different_vocabularies_raise(model):
    words = tokenizer()
    words.add_tokens(["fox"])
    other = LanguageModel(model.params, model.config, words)
    with pytest.raises(ValueError, match="different vocabularies"):
        compare(model, other, TEXT)


def test_all_matrices_of_a_model_match_the_pattern(model):
    import re

    matrices = {name for name, x in model.params.items() if x.ndim == 2}
    assert {name for name in model.params if re.fullmatch(WEIGHTS, name)} == matrices


# The command line.


@pytest.fixture
def veneer(monkeypatch, capsys):
    """Run a command. Return the exit code, stdout and stderr."""
    import io
    import sys

    from veneer import cli

    def run(*arguments, typed=""):
        monkeypatch.setattr(sys, "argv", ["veneer", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return run


def test_chat_prints_one_answer(veneer, folder, model):
    code, out, err = veneer("chat", folder, "--prompt", "ab", "--max-tokens", 5)
    assert (code, out, err) == (0, model.generate("ab", max_tokens=5).text + "\n", "")


def test_chat_prints_statistics(veneer, folder):
    options = ["--format", "int8", "--cache", "int8", "--json"]
    code, out, _ = veneer("chat", folder, "--prompt", "ab", "--max-tokens", 3, *options)
    document = json.loads(out)
    assert code == 0
    assert document["answer_tokens"] == 3
    assert document["prompt_tokens"] == 4
    assert document["weight_bytes"] == load(folder, "int8").nbytes
    assert document["formats"] == ["int8", "float32"]
    from veneer.cli.chat import COMMAND

    assert ", ".join(document).split(", ") == ", ".join(COMMAND.json_keys).split(", ")


def test_a_chat_remembers_earlier_messages(veneer, folder, model):
    _, out, _ = veneer("chat", folder, "--max-tokens", 2, typed="ab\n\ncd\n")
    first = model.generate("ab", max_tokens=2).text
    chat = [("user", "ab"), ("assistant", first), ("user", "cd")]
    messages = [{"role": role, "content": text} for role, text in chat]
    assert out == f"{first}\n{model.generate(messages, max_tokens=2).text}\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--json"], "--json prints one answer: add --prompt TEXT"),
        (["--format", "int99"], "int99"),
        (["--cache", "int99", "--prompt", "a"], "int99"),
    ],
)
def test_wrong_options_of_chat_are_rejected(veneer, folder, options, error):
    code, _, err = veneer("chat", folder, *options)
    assert code == 2
    assert error in err
    assert err.count("\n") == 1


def test_compare_prints_a_row_per_model(veneer, folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    for format in ("int8", "nf4"):
        assert veneer("quantize", folder, tmp_path / format, "--format", format)[0] == 0
    paths = [folder, tmp_path / "int8", tmp_path / "nf4"]
    options = ["--text", tmp_path / "text.txt", "--windows", 1]
    code, out, _ = veneer("compare", *paths, *options, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["tokens"] == 255
    assert document["reference"]["path"] == str(folder)
    int8, nf4 = document["models"]
    assert int8["kl_mean"] < nf4["kl_mean"]
    assert int8["same_top"] > nf4["same_top"]
    assert int8["bytes"] > nf4["bytes"]
    code, out, _ = veneer("compare", *paths, *options)
    assert code == 0
    assert f"{nf4['kl_mean']:.4f}" in out
    assert "255 tokens scored" in out


@pytest.mark.parametrize("library", ["gguf", "mlx", "gptq", "awq", "compressed-tensors"])
def test_a_model_is_quantized_for_a_library(veneer, folder, tmp_path, library):
    small, target = tmp_path / "small", tmp_path / ("x.gguf" if library == "gguf" else "x")
    assert veneer("quantize", folder, small, "--for", library)[0] == 0
    code, _, err = veneer("convert", small, target, "--format", library)
    assert code == 0, err
    if library != "gguf":
        assert load(target).generate("ab", max_tokens=2).tokens


def test_convert_names_all_weights_that_it_rejects(veneer, folder, tmp_path):
    veneer("quantize", folder, tmp_path / "nf4", "--format", "nf4")
    code, _, err = veneer("convert", tmp_path / "nf4", tmp_path / "x", "--format", "gptq")
    assert code == 2
    assert err.count("\n") == 1
    assert "cannot hold 'lm_head.weight', 'model.embed_tokens.weight', 'model.layers.0.mlp" in err
    assert "The reason for 'lm_head.weight': its codes are nf4" in err
    assert "--requantize int4 rounds to what it can hold" in err
    arguments = ["convert", tmp_path / "nf4", tmp_path / "x", "--format", "gptq"]
    code, out, err = veneer(*arguments, "--requantize", "int4")
    assert code == 0
    assert "model.layers.1.self_attn.v_proj.weight" in out
    assert "total of 14" in out
    assert "dense in" in err
    assert "lm_head.weight, model.embed_tokens.weight" in err
    assert load(tmp_path / "x").formats == ("int4", "float32")


def test_a_scale_dtype_is_chosen(veneer, folder, tmp_path):
    options = ["--format", "int4", "--tile", 32, "--scale-dtype", "float16"]
    assert veneer("quantize", folder, tmp_path / "small", *options)[0] == 0
    params = vn.load(tmp_path / "small")
    assert params["lm_head.weight"].scale.dtype == jnp.float16
    code, _, err = veneer("quantize", folder, tmp_path / "y", "--for", "mlx", "--tile", 32)
    assert code == 2
    assert "--for mlx cannot be combined with --tile" in err


# Files that other programs wrote.


def copy(folder, target, **files):
    """Copy a folder, with other JSON in some files."""
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (target / f"{name}.json").write_text(text)
    return target


def test_truncation_and_padding_of_a_tokenizer_are_ignored(folder, tmp_path, model):
    words = tokenizer()
    words.enable_truncation(6)
    words.enable_padding(length=8, pad_id=256)
    other = load(copy(folder, tmp_path / "x", tokenizer=words.to_str()))
    assert other.encode_chat("a long prompt") == model.encode_chat("a long prompt")


def test_tokens_that_the_model_does_not_have_are_rejected(folder, tmp_path):
    words = tokenizer()
    words.add_tokens([f"word{i}" for i in range(99)])
    other = load(copy(folder, tmp_path / "x", tokenizer=words.to_str()))
    with pytest.raises(ValueError, match="the model has only 320 tokens"):
        other.generate("word98")
    with pytest.raises(ValueError, match="a model has only 320 tokens"):
        compare(other, other, "word98 word97 " * 300, windows=1)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"tokenizer": "[1]"}, "tokenizer.json is not a tokenizer"),
        ({"config": CONFIG | {"hidden_size": None}}, "hidden_size must be a number, not None"),
        ({"config": CONFIG | {"num_hidden_layers": 1}}, "has more layers than config.json"),
        ({"config": CONFIG | {"num_hidden_layers": 3}}, r"has no tensor model.layers.2.*3 layers"),
        ({"config": CONFIG | {"num_key_value_heads": 4}}, r"has the shape .*, not .* of config"),
        ({"config": CONFIG | {"eos_token_id": "2"}}, "eos_token_id must be an integer"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template in .* is no text"),
        ({"config": "[]"}, "config.json is not a JSON object"),
    ],
)
def test_wrong_files_of_a_folder_are_rejected(folder, tmp_path, files, error):
    with pytest.raises(ValueError, match=error):
        load(copy(folder, tmp_path / "x", **files))


def test_null_entries_count_as_missing(folder, tmp_path, model):
    null = {
        "tokenizer_config": {"chat_template": None},
        "generation_config": {"eos_token_id": None},
    }
    other = load(copy(folder, tmp_path / "x", **null))
    assert other.stop == model.stop
    assert other.tokenizer.decode(other.encode_chat("ab")) == "ab"
    with pytest.raises(ValueError, match="the chat has 0 tokens; the model needs at least 1"):
        other.generate("")


def test_an_error_of_on_text_ends_the_answer(model):
    calls = []

    def fail(text):
        calls.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate("ab", max_tokens=50, temperature=1.0, on_text=fail)
    assert len(calls) == 1
    nested = lambda text: model.generate("cd", max_tokens=1)
    with pytest.raises(RuntimeError, match="on_text cannot call generate"):
        model.generate("ab", max_tokens=3, temperature=1.0, on_text=nested)
    assert model.generate("ab", max_tokens=1).tokens


def test_a_long_chat_is_rejected(folder, tmp_path):
    config = CONFIG | {"max_position_embeddings": 8}
    other = load(copy(folder, tmp_path / "x", config=config))
    assert len(other.generate("ab", max_tokens=50).tokens) <= 4
    with pytest.raises(ValueError, match="the model needs at least 1 and fewer than 8"):
        other.generate("a long prompt")


@pytest.mark.parametrize("format", ["bfloat16", "nf4"])
def test_a_cache_may_have_another_format(model, format):
    assert model.generate("ab", max_tokens=2, cache_format=format).tokens


def test_a_scale_that_overflows_is_an_error(veneer, tmp_path):
    large = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) * 1e7
    save_file({"a.weight": large}, tmp_path / "model.safetensors")
    code, _, err = veneer(
        "quantize", tmp_path / "model.safetensors", tmp_path / "x", "--for", "gptq"
    )
    assert code == 2
    assert "a.weight has values that scales in float16, for gptq, cannot represent" in err
    assert not (tmp_path / "x").exists()
