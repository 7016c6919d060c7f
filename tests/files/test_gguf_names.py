"""The Hugging Face names, row order and configuration of GGUF files."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.gguf_files import HEADS, assert_same_tensor, blocks_of, in_nvfp4, read_all

import veneer as vn
from veneer.files.gguf import GgufFile, huggingface_config, write_gguf
from veneer.files.gguf_blocks import BLOCK_TYPES


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def paired(w, heads):
    """Return the rows of a matrix in the order of a llama file: the halves of a head in pairs."""
    halves = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def test_hugging_faces_names_and_its_order_of_rows(path):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 32)).astype(np.float32) for n in (32, 16, 16))
    bias = np.arange(32, dtype=np.float32)
    tensors = {
        "token_embd.weight": blocks_of("Q8_0", 5, 32),
        "blk.11.attn_q.weight": paired(q, 4),
        "blk.11.attn_q.bias": paired(bias, 4),
        "blk.11.attn_k.weight": paired(k, 2),
        "blk.11.attn_v.weight": v,
        "blk.11.attn_output.weight": v,
        "blk.11.attn_norm.weight": bias,
        "blk.11.ffn_norm.weight": bias,
        "blk.11.ffn_gate.weight": v,
        "blk.11.ffn_up.weight": v,
        "blk.11.ffn_down.weight": v,
        "output_norm.weight": bias,
        "output.weight": v,
        "rope_freqs.weight": bias,
    }
    write_gguf(path, tensors, {"general.architecture": "llama"} | HEADS)
    named = read_all(path, names="huggingface")
    layer = "model.layers.11."
    assert list(named) == [
        "model.embed_tokens.weight",
        layer + "self_attn.q_proj.weight",
        layer + "self_attn.q_proj.bias",
        layer + "self_attn.k_proj.weight",
        layer + "self_attn.v_proj.weight",
        layer + "self_attn.o_proj.weight",
        layer + "input_layernorm.weight",
        layer + "post_attention_layernorm.weight",
        layer + "mlp.gate_proj.weight",
        layer + "mlp.up_proj.weight",
        layer + "mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
        "rope_freqs.weight",
    ]
    np.testing.assert_array_equal(named[layer + "self_attn.q_proj.weight"], q)
    np.testing.assert_array_equal(named[layer + "self_attn.q_proj.bias"], bias)
    np.testing.assert_array_equal(named[layer + "self_attn.k_proj.weight"], k)
    np.testing.assert_array_equal(named[layer + "self_attn.v_proj.weight"], v)


@pytest.mark.parametrize("row", BLOCK_TYPES.values(), ids=lambda row: row.name)
def test_packed_rows_are_put_in_order_with_their_tiles(path, row):
    name = "blk.0.attn_k.weight"
    write_gguf(
        path,
        {name: blocks_of(row.name, 16, 2 * row.values)},
        {"general.architecture": "llama"} | HEADS,
    )
    stored = read_all(path)[name]
    named = read_all(path, names="huggingface")["model.layers.0.self_attn.k_proj.weight"]
    dense = np.asarray(vn.materialise(stored))
    assert named.nbytes == stored.nbytes
    np.testing.assert_array_equal(paired(np.asarray(vn.materialise(named)), 2), dense)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_other_architectures_stay_in_order(path, architecture):
    w = np.arange(32, dtype=np.float32).reshape(16, 2)
    tensors = {"blk.0.attn_q.weight": w, "blk.0.attn_q_norm.weight": w}
    write_gguf(path, tensors, {"general.architecture": architecture})
    named = read_all(path, names="huggingface")
    np.testing.assert_array_equal(named["model.layers.0.self_attn.q_proj.weight"], w)
    assert "model.layers.0.self_attn.q_norm.weight" in named


def test_heads_may_be_other_in_each_layer(path):
    w = np.arange(16, dtype=np.float32)
    tensors = {f"blk.{i}.attn_q.weight": paired(w, heads) for i, heads in enumerate((2, 4))}
    metadata = {"llama.attention.head_count": np.array([2, 4], np.uint32)}
    write_gguf(path, tensors, {"general.architecture": "llama"} | metadata)
    for value in read_all(path, names="huggingface").values():
        np.testing.assert_array_equal(value, w)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("llama", "block_sparse_moe.experts.{}.w2"), ("qwen3moe", "mlp.experts.{}.down_proj")],
)
def test_experts_are_a_tensor_each(path, architecture, expected):
    q = blocks_of("Q6_K", 3, 4, 256)
    write_gguf(path, {"blk.0.ffn_down_exps.weight": q}, {"general.architecture": architecture})
    named = read_all(path, names="huggingface")
    assert list(named) == [f"model.layers.0.{expected.format(i)}.weight" for i in range(3)]
    for i, expert in enumerate(named.values()):
        np.testing.assert_array_equal(vn.materialise(expert), vn.materialise(q)[i])


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_a_model_with_hugging_face_names_is_written_unchanged(path, tmp_path, architecture):
    keys = {k.replace("llama", architecture): v for k, v in HEADS.items()}
    tensors = {
        "token_embd.weight": blocks_of("Q6_K", 5, 256),
        "blk.0.attn_q.weight": blocks_of("Q4_K", 32, 256),
        "blk.0.attn_q.bias": np.arange(32, dtype=np.float32),
        "blk.0.attn_k.weight": blocks_of("Q8_0", 16, 256),
        "blk.0.attn_k.bias": np.arange(16, dtype=np.float32),
        "blk.0.ffn_gate_inp.weight": np.ones((3, 4), np.float32),
        "blk.0.ffn_up_exps.weight": blocks_of("Q5_1", 3, 4, 64),
        "blk.0.ffn_down_exps.weight": in_nvfp4(3, 4, 64),
        "rope_freqs.weight": np.ones(4, np.float32),
    }
    write_gguf(path, tensors, {"general.architecture": architecture} | keys)
    again = tmp_path / "again.gguf"
    with GgufFile(path, names="huggingface") as file:

        class OneAtATime(dict):
            def __getitem__(self, name):
                return file.read(name)

        named = OneAtATime.fromkeys(reversed(list(file)))
        write_gguf(again, named, file.metadata, names="huggingface")
    back, stored = read_all(again), read_all(path)
    assert back.keys() == stored.keys() == tensors.keys()
    for name, value in stored.items():
        assert_same_tensor(back[name], value)


def test_vectors_of_a_model_are_written_in_32_bits(path):
    tensors = {"model.norm.weight": jnp.ones(3, jnp.bfloat16), "ids": np.ones(3, np.int16)}
    write_gguf(path, tensors, {"general.architecture": "qwen2"}, names="huggingface")
    assert GgufFile(path).types() == {"output_norm.weight": "F32", "ids": "I16"}


def test_experts_that_are_no_tensor_together(path):
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    metadata = {"general.architecture": "qwen3moe"}
    experts = {name.format(i): np.ones((2, 32), np.float32) for i in (0, 2)}
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_up_exps\.weight' has only 2 of 3 experts"):
        write_gguf(path, experts, metadata, names="huggingface")
    experts[name.format(1)] = blocks_of("Q8_0", 2, 32)
    with pytest.raises(ValueError, match=r"experts of 'blk\.0\.ffn_up_exps\.weight' differ in"):
        write_gguf(path, experts, metadata, names="huggingface")
    with pytest.raises(ValueError, match="names must be 'huggingface' or None, not 'hf'"):
        write_gguf(path, experts, metadata, names="hf")


def test_two_tensors_of_one_name(path):
    tensors = {"model.norm.weight": np.ones(2), "output_norm.weight": np.ones(2)}
    with pytest.raises(ValueError, match=r"two tensors for 'output_norm\.weight'"):
        write_gguf(path, tensors, {"general.architecture": "llama"}, names="huggingface")
    tensors = {"w.weight": in_nvfp4(2, 64), "w.scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match=r"two tensors for 'w\.scale'"):
        write_gguf(path, tensors)


def test_names_of_an_architecture_that_is_not_known(path):
    write_gguf(path, {"w": np.ones(2, np.float32)}, {"general.architecture": "mamba"})
    with pytest.raises(
        ValueError,
        match=r"model\.gguf: names='huggingface' is not supported for architecture 'mamba'.*vn",
    ):
        GgufFile(path, names="huggingface")
    with pytest.raises(ValueError, match="names must be 'huggingface' or None, not 'hf'"):
        GgufFile(path, names="hf")


def test_rows_that_do_not_match_the_heads_raise(path):
    tensors = {"blk.0.attn_q.weight": np.ones((6, 2), np.float32)}
    write_gguf(path, tensors, {"general.architecture": "llama"} | HEADS)
    with pytest.raises(ValueError, match=r"q_proj\.weight': its 6 rows are not pairs of 4 heads"):
        read_all(path, names="huggingface")


CONFIG = {
    "general.architecture": "qwen3",
    "qwen3.embedding_length": np.uint64(1024),
    "qwen3.feed_forward_length": 3072,
    "qwen3.block_count": 28,
    "qwen3.context_length": 40960,
    "qwen3.attention.head_count": 16,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "qwen3.rope.freq_base": 1000000.0,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_the_configuration_of_a_model():
    assert huggingface_config(CONFIG) == {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_the_configuration_tells_whether_embeddings_are_tied(path):
    write_gguf(path, {"output.weight": np.ones(2, np.float32)}, CONFIG)
    assert GgufFile(path).config == huggingface_config(CONFIG) | {"tie_word_embeddings": False}
    write_gguf(path, {}, CONFIG, overwrite=True)
    assert GgufFile(path).config["tie_word_embeddings"]


def test_a_longer_context_and_a_window_in_the_configuration():
    scaled = CONFIG | {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32768,
        "qwen3.attention.sliding_window": 4096,
    }
    config = huggingface_config(scaled)
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    assert config["sliding_window"] == 4096


def test_a_configuration_that_cannot_be_made():
    with pytest.raises(ValueError, match=r"for architecture 'bert'; supported are llama, "):
        huggingface_config({"general.architecture": "bert"})
    with pytest.raises(ValueError, match=r"the metadata have no qwen3\.block_count"):
        huggingface_config({k: v for k, v in CONFIG.items() if k != "qwen3.block_count"})
    with pytest.raises(ValueError, match=r"qwen3\.feed_forward_length is array.* not one int"):
        huggingface_config(CONFIG | {"qwen3.feed_forward_length": np.arange(2)})


def llama3_factors(factor, count=64, theta=500000.0):
    """Compute frequency factors by the definition in Hugging Face's `modeling_rope_utils`."""
    factors = []
    for i in range(count):
        wavelength = 2 * np.pi * theta ** (i / count)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_scaling_of_llama_3_is_read_from_its_factors(path):
    config = {key.replace("qwen3", "llama"): value for key, value in CONFIG.items()}
    config |= {"general.architecture": "llama", "llama.rope.freq_base": 500000.0}
    factors = llama3_factors(8.0)
    write_gguf(path, {"rope_freqs.weight": factors}, config)
    assert GgufFile(path).config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_scaling" not in huggingface_config(config, rope_factors=np.ones(64, np.float32))
    write_gguf(path, {"rope_freqs.weight": 2 * factors}, config, overwrite=True)
    with pytest.raises(ValueError, match=r"model\.gguf: its rope_freqs\.weight differs from"):
        GgufFile(path).config  # noqa: B018


def test_no_configuration_is_made_for_experts():
    with pytest.raises(ValueError, match="for a mixture of experts"):
        huggingface_config(CONFIG | {"qwen3.expert_count": 8})
