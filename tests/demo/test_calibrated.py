"""`veneer quantize --calibrate` on small models."""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import veneer as vn
from veneer.cli import app
from veneer.demo.calibrated import load_text_model
from veneer.models import llama

from .conftest import WORDS


@pytest.fixture
def text(tmp_path):
    words = np.random.default_rng(0).choice(WORDS[4:], (80, 12))
    path = tmp_path / "text.txt"
    path.write_text("\n".join(map(" ".join, words)))
    return path


@pytest.fixture
def quantize(capsys, monkeypatch):
    """Return a function that runs `veneer quantize`: the exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["veneer", "quantize", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def squared_error(folder, small, batches):
    """Return the squared error of the outputs of a quantized model, summed over batches."""
    dense = load_text_model(folder)
    params = {dense.name_in_program(name): x for name, x in vn.load(small).items()}
    run = jax.jit(vn.implicit(dense.call))
    return sum(
        float(jnp.sum((run(params, *x) - dense.call(dense.params, *x)) ** 2)) for x in batches
    )


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_calibration_lowers_the_error_of_an_encoder(
    prefix, write_bert, params, text, quantize, tmp_path
):
    folder = write_bert({prefix + name: x for name, x in params.items()})
    options = "--format", "int3", "--tile", "16"
    code, out, _ = quantize(folder, tmp_path / "calibrated", *options, "--calibrate", text)
    assert code == 0
    assert "relative error of the outputs on the text" in out
    assert quantize(folder, tmp_path / "nearest", *options)[0] == 0
    batches = load_text_model(folder).batches(text.read_text())
    assert [batch[0].shape for batch in batches] == [(80, 8)]
    calibrated, nearest = (
        squared_error(folder, tmp_path / name, batches) for name in ("calibrated", "nearest")
    )
    assert calibrated < 0.7 * nearest
    small, plain = (vn.load(tmp_path / name) for name in ("calibrated", "nearest"))
    like = lambda tree: {name: (str(x), x.nbytes) for name, x in tree.items()}
    assert small.keys() == {prefix + name for name in params}
    assert {n: b for n, (_, b) in like(small).items()} == {
        n: b for n, (_, b) in like(plain).items()
    }


def test_a_decoder_is_calibrated_on_windows_of_text(tmp_path, bert_folder, quantize):
    folder = tmp_path / "llama"
    config = {
        "model_type": "llama",
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    params = llama.init(jax.random.key(0), llama.LlamaConfig.from_dict(config))
    folder.mkdir()
    save_file({name: np.asarray(x) for name, x in params.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(bert_folder / "tokenizer.json", folder)
    words = np.random.default_rng(0).choice(WORDS[4:], 1100)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(words))
    options = "--format", "int3", "--tile", "16", "--calibrate", text
    assert quantize(folder, tmp_path / "small", *options)[0] == 0
    assert {x.qtype for x in vn.load(tmp_path / "small").values() if hasattr(x, "qtype")} == {
        "int3"
    }
    text.write_text("the statement")
    code, _, err = quantize(folder, tmp_path / "again", *options)
    assert code == 2
    assert "the text has 2 tokens, but 512 are needed" in err
    assert not (tmp_path / "again").exists()


def test_wrong_options_and_models_raise_in_one_line(bert_folder, text, quantize, tmp_path):
    out = tmp_path / "out"
    int4 = "--format", "int4"

    def assert_fails(message, *arguments):
        code, _, err = quantize(*arguments)
        assert (code, len(err.splitlines())) == (2, 1)
        assert message in err
        assert not out.exists()

    assert_fails("give a text with --calibrate TEXT", bert_folder, out, *int4, "--method", "gptq")
    assert_fails(
        "use gptq or nearest", bert_folder, out, *int4, "--calibrate", text, "--method", "awq"
    )
    assert_fails("is not a file", bert_folder, out, *int4, "--calibrate", tmp_path / "none")
    config = json.loads((bert_folder / "config.json").read_text()) | {"model_type": "gpt2"}
    (bert_folder / "config.json").write_text(json.dumps(config))
    assert_fails("a 'gpt2' model", bert_folder, out, *int4, "--calibrate", text)
    (bert_folder / "config.json").unlink()
    assert_fails("has no config.json", bert_folder, out, *int4, "--calibrate", text)
