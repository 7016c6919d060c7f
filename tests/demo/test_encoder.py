"""`demo.encoder.load` reads a Hugging Face BERT folder, or raises an error with the reason."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import veneer as vn
from veneer.demo import encoder


def test_load_reads_parameters_and_config(bert_folder, params):
    bert = encoder.load(bert_folder)
    assert bert.params.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(bert.params[name], value)
    assert (bert.config.num_layers, bert.config.num_heads) == (2, 4)
    assert bert.contracted == (32, 64)
    assert bert.max_tokens == 80


def test_load_reads_shards(bert_folder, params):
    (bert_folder / "model.safetensors").unlink()
    names = sorted(params)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: params[name] for name in held}, bert_folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (bert_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert encoder.load(bert_folder).params.keys() == params.keys()


def test_load_reads_old_names_and_f16_and_drops_buffers(write_bert, params):
    old = {
        "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in params.items()
    }
    old = {name: value.astype(np.float16) for name, value in old.items()}
    old["bert.embeddings.position_ids"] = np.arange(80)[None]
    found = encoder.load(write_bert(old)).params
    assert found.keys() == params.keys()
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_raises_with_its_name(bert_folder, name):
    (bert_folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}"):
        encoder.load(bert_folder)


def test_a_missing_folder_raises_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="none is not a folder"):
        encoder.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "relu"),
        ("position_embedding_type", "relative_key"),
    ],
)
def test_an_unsupported_config_raises(write_bert, params, key, value):
    folder = write_bert(params, **{key: value})
    with pytest.raises(ValueError, match=f"has {key} '{value}'; the demo's encoder takes"):
        encoder.load(folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json is not a JSON object"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", '{"hidden_size": 32}', "config.json has no intermediate_size, "),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("model.safetensors", "{", "model.safetensors"),
    ],
)
def test_a_broken_file_raises_with_its_name(bert_folder, file, text, message):
    (bert_folder / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        encoder.load(bert_folder)


def test_tensors_that_do_not_fit_the_config_raise(write_bert, params):
    folder = write_bert(params, num_attention_heads=5)
    with pytest.raises(ValueError, match=r"do not fit its config\.json"):
        encoder.load(folder)


def test_a_missing_tensor_raises_with_its_name(write_bert, params):
    del params["encoder.layer.1.output.dense.weight"]
    folder = write_bert(params)
    with pytest.raises(ValueError, match=r"no tensor 'encoder.layer.1.output.dense.weight'"):
        encoder.load(folder)


def test_a_quantized_folder_raises(bert_folder, params):
    tree = vn.quant.quantize_tree(params, [vn.quant.Rule(r".*dense\.weight", "int8", tile_axis=-1)])
    quantized = bert_folder.with_name("quantized")
    vn.save(quantized, tree)
    for name in ("config.json", "tokenizer.json"):
        (quantized / name).write_bytes((bert_folder / name).read_bytes())
    with pytest.raises(ValueError, match="is already quantized"):
        encoder.load(quantized)


def test_batches_have_each_sentence_once_shortest_first(bert_folder):
    bert = encoder.load(bert_folder)
    lengths = [(7 * i) % 90 + 1 for i in range(100)]
    batches = list(bert.batches([" ".join(["the"] * length) for length in lengths]))
    # Lengths are rounded up to multiples of 32, up to the maximum of the model.
    assert [batch.ids.shape for _, batch in batches] == [(64, 64), (64, 80)]
    rows = np.concatenate([rows for rows, _ in batches])
    assert sorted(rows) == list(range(100))
    tokens = np.concatenate([batch.mask.sum(1) for _, batch in batches])
    expected = [min(lengths[row] + 2, 80) for row in rows]  # [CLS] and [SEP] around each
    np.testing.assert_array_equal(tokens, expected + [0] * 28)


def test_one_sentence_is_a_batch_of_one(bert_folder):
    [(rows, batch)] = encoder.load(bert_folder).batches(["the statement"])
    assert batch.ids.shape == (1, 32)
    assert list(batch.ids[0, batch.mask[0]]) == [2, 4, 11, 3]
    assert list(rows) == [0]
