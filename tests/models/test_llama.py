"""The Llama in plain JAX: logits, sampling, batches, caches and checkpoints."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

import veneer as vn
from veneer.models import llama

CONFIG = llama.LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
LENGTH = 12


@pytest.fixture(scope="module")
def params():
    return llama.init(jax.random.key(0), CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, LENGTH), 0, CONFIG.vocab_size)


def forward(params, config, tokens):
    """The logits of all positions, as the definitions have them: no cache, heads one by one."""
    p = {name: np.asarray(w, np.float64) for name, w in params.items()}
    rms = lambda x, w: w * x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)
    half = config.head_dim // 2
    found = []
    for row in np.asarray(tokens):
        x = p["model.embed_tokens.weight"][row]
        frequency = config.rope_theta ** (-np.arange(half) / half)
        if config.rope_scaling:  # as transformers has it
            factor, low, high, before = config.rope_scaling
            wave = 2 * np.pi / frequency
            share = (before / wave - low) / (high - low)
            between = (1 - share) * frequency / factor + share * frequency
            frequency = np.select(
                [wave > before / low, wave < before / high],
                [frequency / factor, frequency],
                between,
            )
        turns = np.arange(len(row))[:, None] * frequency
        turn = np.exp(1j * turns)
        for i in range(config.num_hidden_layers):
            w = lambda name, i=i: p[f"model.layers.{i}.{name}.weight"]
            b = lambda name, i=i: p.get(f"model.layers.{i}.{name}.bias", 0.0)
            y = rms(x, w("input_layernorm"))
            heads = []
            for h in range(config.num_attention_heads):
                shared = h * config.num_key_value_heads // config.num_attention_heads

                def of(name, head, y=y, w=w, b=b, i=i, turn=turn):
                    at = slice(head * config.head_dim, (head + 1) * config.head_dim)
                    z = (y @ w(f"self_attn.{name}_proj").T + b(f"self_attn.{name}_proj"))[:, at]
                    scale = p.get(f"model.layers.{i}.self_attn.{name}_norm.weight")
                    z = z if scale is None else rms(z, scale)
                    if name == "v":
                        return z
                    turned = (z[:, :half] + 1j * z[:, half:]) * turn
                    return np.concatenate([turned.real, turned.imag], 1)

                scores = of("q", h) @ of("k", shared).T / np.sqrt(config.head_dim)
                seen = np.tril(np.ones_like(scores))
                if config.sliding_window:
                    seen = np.triu(seen, 1 - config.sliding_window)
                scores = np.exp(np.where(seen, scores, -np.inf))
                heads.append(scores / scores.sum(1, keepdims=True) @ of("v", shared))
            x = x + np.concatenate(heads, 1) @ w("self_attn.o_proj").T
            y = rms(x, w("post_attention_layernorm"))
            gate = y @ w("mlp.gate_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
        found.append(rms(x, p["model.norm.weight"]) @ head.T)
    return np.stack(found)


def logits(params, config, tokens):
    cache = llama.empty_cache(config, *tokens.shape)
    return llama.logits(params, llama.hidden(params, config, tokens, cache)[0])


def with_biases(params):
    rng = np.random.default_rng(0)
    names = [n for n in params if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj")]
    biases = {n.replace("weight", "bias"): rng.normal(size=len(params[n])) for n in names}
    return params | {n: jnp.asarray(b, jnp.float32) for n, b in biases.items()}


def with_normed_heads(params):
    scales = jnp.linspace(0.5, 1.5, CONFIG.head_dim)
    layers = [f"model.layers.{i}.self_attn" for i in range(CONFIG.num_hidden_layers)]
    return params | {f"{n}.{x}_norm.weight": scales for n in layers for x in "qk"}


KINDS = {
    "llama": (lambda p: p, {}),
    "tied": (lambda p: {k: v for k, v in p.items() if k != "lm_head.weight"}, {}),
    "qwen2": (with_biases, {"rope_theta": 1e6}),
    "qwen3": (with_normed_heads, {}),
    "mistral": (lambda p: p, {"sliding_window": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_the_definition(params, tokens, kind):
    change, of = KINDS[kind]
    config, params = dataclasses.replace(CONFIG, **of), change(params)
    found = jax.jit(logits, static_argnums=1)(params, config, tokens)
    np.testing.assert_allclose(found, forward(params, config, tokens), rtol=1e-4, atol=1e-5)


def test_rope_scaling_slows_low_frequencies():
    scaled = dataclasses.replace(CONFIG, head_dim=64, rope_scaling=(8.0, 1.0, 4.0, 8192.0))
    plain = dataclasses.replace(scaled, rope_scaling=None)
    ours, before = (llama.rope_angles(c, jnp.arange(2))[1] for c in (scaled, plain))
    waves = 8192 * np.asarray(before) / (2 * np.pi)
    np.testing.assert_allclose(ours[waves > 4], before[waves > 4], rtol=1e-6)
    np.testing.assert_allclose(ours[waves < 1], before[waves < 1] / 8, rtol=1e-6)
    between = (waves > 1) & (waves < 4)
    assert between.any()
    assert ((ours < before) & (ours > before / 8))[between].all()


def greedy(params, tokens, count):
    """Continue texts by computing all logits again for each token."""
    for _ in range(count):
        following = logits(params, CONFIG, tokens)[:, -1].argmax(-1)
        tokens = jnp.concatenate([tokens, following[:, None]], 1)
    return tokens[:, -count:]


@pytest.mark.parametrize("padding", [0, 3])
def test_greedy_decoding_writes_the_most_likely_tokens(params, tokens, padding):
    prompt = jnp.pad(tokens, ((0, 0), (0, padding)), constant_values=7)
    write = llama.compile_generate()
    found = write(params, CONFIG, prompt, LENGTH, jax.random.key(0), count=5)
    np.testing.assert_array_equal(found, greedy(params, tokens, 5))


def test_a_text_ends_at_a_stop_token_and_is_streamed(params, tokens):
    expected = np.asarray(greedy(params, tokens, 6))
    stop = int(expected[0, 2])
    shown = []
    found = llama.compile_generate()(
        params,
        CONFIG,
        tokens,
        LENGTH,
        jax.random.key(0),
        count=6,
        stop=(stop,),
        show=lambda token: shown.append(np.asarray(token)),
    )
    jax.effects_barrier()
    for row, whole in zip(np.asarray(found), expected, strict=True):
        end = int(np.argmax(whole == stop)) if stop in whole else len(whole)
        np.testing.assert_array_equal(row[: end + 1], whole[: end + 1])
        assert (row[end:] == stop).all()
    np.testing.assert_array_equal(np.stack(shown, 1), found[:, : len(shown)])


def test_a_temperature_samples_tokens(params, tokens):
    write = lambda key, t: llama.compile_generate()(
        params, CONFIG, tokens, LENGTH, jax.random.key(key), count=8, temperature=t
    )
    assert (write(0, 2.0) != write(1, 2.0)).any()
    np.testing.assert_array_equal(write(0, 2.0), write(0, 2.0))
    np.testing.assert_array_equal(write(0, 1e-6), greedy(params, tokens, 8))


def test_losses_agree_with_the_logits(params, tokens):
    found = jax.nn.log_softmax(forward(params, CONFIG, tokens)[:, :-1])
    expected = -np.take_along_axis(np.asarray(found), np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(llama.losses(params, CONFIG, tokens), expected, rtol=1e-4)


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_a_packed_model_materializes_no_weight(params, tokens, format):
    matrices = r".*(proj|embed_tokens|lm_head)\.weight"
    rule = vn.quant.Rule(matrices, format, tile_size=16, tile_axis=-1)
    packed = vn.quant.quantize_tree(params, [rule])
    write = llama.compile_generate(vn.implicit(llama.generate))
    found = write(packed, CONFIG, tokens, LENGTH, jax.random.key(0), count=5)
    np.testing.assert_array_equal(found, greedy(vn.materialise(packed), tokens, 5))


def test_config_json_is_read_and_checked():
    said = {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    assert (
        llama.LlamaConfig.from_dict(json.loads(json.dumps(said | {"rms_norm_eps": 1e-5}))) == CONFIG
    )
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert llama.LlamaConfig.from_dict(said | {"rope_scaling": scaling}).rope_scaling == (
        8,
        1,
        4,
        8192,
    )
    window = lambda **others: (
        llama.LlamaConfig.from_dict(said | {"sliding_window": 64} | others).sliding_window
    )
    qwen = {"model_type": "qwen2", "use_sliding_window": True}
    assert window() == window(model_type="mistral") == window(**qwen, max_window_layers=0) == 64
    assert (
        window(model_type="qwen2") is window(**qwen, max_window_layers=2) is window(**qwen) is None
    )
    assert window(**qwen, layer_types=["full_attention"] * 2) is None
    with pytest.raises(ValueError, match="1 of 2 layers have no sliding window"):
        window(**qwen, max_window_layers=1)
    with pytest.raises(ValueError, match="activations are 'gelu'"):
        llama.LlamaConfig.from_dict(said | {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match="a 'gemma' model; this program runs llama, mistral"):
        llama.LlamaConfig.from_dict(said | {"model_type": "gemma"})
    with pytest.raises(ValueError, match="scaled as 'yarn'"):
        llama.LlamaConfig.from_dict(said | {"rope_scaling": {"rope_type": "yarn"}})


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
FOLDERS = {
    "llama_3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama_3_tied": ("tied", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 8}),
    "llama_of_version_5": ("llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "qwen2": (
        "qwen2",
        {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 4, "max_window_layers": 2}
        | {"use_sliding_window": False},
    ),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 8, "rope_theta": 1e6}),
    "mistral": ("mistral", {"model_type": "mistral", "sliding_window": 4}),
}


@pytest.mark.parametrize("format", [None, "gptq", "compressed-tensors"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_transformers_can_be_loaded(tmp_path, params, tokens, name, format):
    kind, said = FOLDERS[name]
    said = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6} | said
    said |= {n: getattr(CONFIG, n) for n in llama.LlamaConfig.__match_args__[:6]}
    params = KINDS[kind][0](params)
    if format is None:
        tmp_path.joinpath("model").mkdir()
        save_file(params, tmp_path / "model" / "model.safetensors")
        (tmp_path / "model" / "config.json").write_text(json.dumps(said))
    else:
        rule = vn.quant.Rule(r".*_proj\.weight", "int4", tile_size=16, tile_axis=-1)
        small = vn.quant.quantize_tree(params, [rule])
        vn.save(tmp_path / "model", small, format=format, config=said)
    config = llama.LlamaConfig.from_dict(
        json.loads((tmp_path / "model" / "config.json").read_text())
    )
    assert config.sliding_window == (4 if name == "mistral" else None)
    loaded = vn.load(tmp_path / "model")
    found = jax.jit(vn.implicit(logits), static_argnums=1)(loaded, config, tokens)
    expected = forward(vn.materialise(loaded), config, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert any(isinstance(w, vn.quant.QArray) for w in loaded.values()) == (format is not None)


@pytest.mark.slow
def test_a_real_packed_model_has_the_perplexity_of_its_values():
    # Computed from the values that gguf 0.19 dequantizes.
    expected = 17.5526
    from veneer.demo import fetch, language_model

    try:
        model = language_model.load(fetch.fetch(fetch.LANGUAGE_MODEL))
        text = language_model.split_windows(model.tokenizer, "\n".join(fetch.all_sentences()), 1)
    except FileNotFoundError as error:  # neither a cache nor a network
        pytest.skip(str(error))
    losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
    packed = language_model.perplexity(losses, model, model.params, text)
    dense = language_model.perplexity(losses, model, vn.materialise(model.params), text)
    assert packed == pytest.approx(dense, abs=0.05)
    assert dense == pytest.approx(expected, abs=0.01)


LENGTHS = (12, 5, 9)


@pytest.fixture(scope="module")
def texts():
    """Return a batch of texts with different lengths, padded."""
    drawn = jax.random.randint(jax.random.key(2), (len(LENGTHS), LENGTH), 0, CONFIG.vocab_size)
    return jnp.where(jnp.arange(LENGTH) < jnp.array(LENGTHS)[:, None], drawn, 7)


def continued(params, texts, lengths=LENGTHS, run=llama.generate, config=CONFIG, **how):
    lengths, key = jnp.asarray(lengths), jax.random.key(0)
    return llama.compile_generate(run)(params, config, texts, lengths, key, count=5, **how)


def quantized(qtype, *sizes):
    """Return a cache with a scale per token and head. None is dense."""
    zeros = lambda x: vn.quant.zeros(x.shape, qtype, dtype=x.dtype, channelwise_axes=(0, 1))
    cache = llama.empty_cache(*sizes)
    return cache if qtype is None else jax.tree.map(zeros, cache)


@pytest.mark.parametrize("window", [None, 4])
def test_a_batched_text_continues_like_a_single_text(params, texts, window):
    config = dataclasses.replace(CONFIG, sliding_window=window)
    found = continued(params, texts, config=config)
    for row, text, length in zip(found, texts, LENGTHS, strict=True):
        for alone in (text[None, :length], text[None]):  # as long as it is, and filled up
            (expected,) = continued(params, alone, length, config=config)
            np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("qtype", [None, "int8"])
@pytest.mark.parametrize("chunk", [1, 3, 5, 8, 12])
def test_reading_in_chunks_agrees_for_any_size(params, texts, chunk, qtype):
    """Compare the last hidden states, and the cache of all tokens."""
    cache, lengths = quantized(qtype, CONFIG, 3, LENGTH + 5), jnp.array(LENGTHS)

    def read(params, texts, cache, chunk):
        first = LENGTH - lengths
        moved = jnp.maximum(jnp.arange(LENGTH) - first[:, None], 0)
        tokens = jnp.take_along_axis(texts, moved, 1)
        return llama.read(params, CONFIG, tokens, cache, first, chunk)

    run = jax.jit(vn.implicit(read), static_argnums=3)
    (x, kept), (expected, at_once) = (run(params, texts, cache, n) for n in (chunk, LENGTH))
    atol = 1e-5 if qtype is None else 0.05  # one code more or less
    np.testing.assert_allclose(x, expected, atol=atol)
    is_text = jnp.repeat(jnp.arange(LENGTH + 5) >= LENGTH - lengths[:, None], 2, 0)[..., None]
    for part, other in zip(
        jax.tree.leaves(vn.materialise(kept)), jax.tree.leaves(vn.materialise(at_once)), strict=True
    ):
        np.testing.assert_allclose(part * is_text, other * is_text, atol=atol)
    generate = vn.implicit(llama.generate)
    found, expected = (
        continued(params, texts, cache=cache, chunk=n, run=generate) for n in (chunk, LENGTH)
    )
    np.testing.assert_array_equal(found, expected)


def test_chunks_of_padding_are_not_read(params, monkeypatch):
    read, hidden = [], llama.hidden

    def seen(params, config, part, cache, start, first):
        jax.debug.callback(lambda at: read.append(int(at)), start)
        return hidden(params, config, part, cache, start, first)

    monkeypatch.setattr(llama, "hidden", seen)
    for length, starts in {(7, 5): [8, 12], (15, 1): [0, 3, 7, 11], (1, 1): [11]}.items():
        size = 16 if length[0] == 7 else 15
        cache = llama.empty_cache(CONFIG, 2, size)
        prompt, first = jnp.ones((2, size), jnp.int32), size - jnp.array(length)
        run = jax.jit(lambda *args: llama.read(args[0], CONFIG, *args[1:], 4))
        jax.block_until_ready(run(params, prompt, cache, first))
        jax.effects_barrier()
        assert sorted(read) == starts
        read.clear()


def test_each_text_stops_at_its_own_stop_token(params, texts):
    whole = np.asarray(continued(params, texts))
    stop = (int(whole[0, 1]), int(whole[1, 3]))
    found = np.asarray(continued(params, texts, stop=stop))
    for row, expected in zip(found, whole, strict=True):
        ends = np.flatnonzero(np.isin(expected, stop))
        end = ends[0] + 1 if len(ends) else len(expected)
        np.testing.assert_array_equal(row[:end], expected[:end])
        assert (row[end:] == stop[0]).all()


def test_top_k_and_top_p_restrict_sampling(params):
    chances = jnp.array([[0.05, 0.5, 0.3, 0.15]] * 400)
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = lambda *how: set(llama.next_token(jnp.log(chances), keys, *how).tolist())
    assert drawn(1.0, None, 1.0) == {0, 1, 2, 3}
    assert drawn(1.0, 3, 1.0) == {1, 2, 3}
    assert drawn(1.0, None, 0.6) == drawn(1.0, 3, 0.6) == drawn(1.0, 2, 1.0) == {1, 2}
    assert drawn(1.0, None, 0.4) == drawn(1.0, 1, 1.0) == drawn(0, None, 1.0) == {1}
    share = (llama.next_token(jnp.log(chances), keys, 1.0, 2, 1.0) == 1).mean()
    assert abs(share - 0.5 / 0.8) < 0.1


def test_the_first_text_of_a_batch_samples_like_a_single_text(params, texts):
    how = {"temperature": 2.0, "top_k": 20, "top_p": 0.9}
    together = continued(params, texts, **how)
    alone = continued(params, texts[:1], LENGTHS[:1], **how)
    np.testing.assert_array_equal(together[:1], alone)
    assert (alone != continued(params, texts[:1], LENGTHS[:1])).any()


@pytest.mark.parametrize(("qtype", "error"), [("int8", 0.02), ("int4", 0.3)])
def test_losses_with_a_quantized_cache_are_close(params, tokens, qtype, error):
    cache = quantized(qtype, CONFIG, *tokens.shape)
    found = jax.jit(vn.implicit(llama.losses), static_argnums=1)(params, CONFIG, tokens, cache)
    expected = llama.losses(params, CONFIG, tokens)
    assert np.abs(found - expected).mean() < error
    assert (found != expected).any()


@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8"])
def test_a_quantized_cache_stays_packed(params, texts, qtype):
    """Kernels read the cache and loops carry it, so nothing is materialized."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    params = llama.init(jax.random.key(0), config)
    cache = quantized(qtype, config, 3, 256)
    run = vn.implicit(llama.generate, on_materialise="error")
    found = continued(params, texts, run=run, config=config, cache=cache, chunk=4)
    assert found.shape == (3, 5)
    if qtype == "int8":
        np.testing.assert_array_equal(found, continued(params, texts, config=config))


def test_keys_can_share_scales_in_blocks_of_tokens(texts):
    """Use scales as in KIVI, in the same program."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    params = llama.init(jax.random.key(0), config)
    cache = quantized("int8", config, 3, 2048)
    how = {"channelwise_axes": (0, 2), "tiled_axes": {1: 32}, "block_axis": 1}
    by_channel = lambda x: vn.quant.zeros(x.shape, "int8", **how)
    cache = cache._replace(keys=tuple(map(by_channel, cache.keys)))
    run = vn.implicit(llama.generate, on_materialise="error")
    found = continued(params, texts, run=run, config=config, cache=cache, chunk=4)
    np.testing.assert_array_equal(found, continued(params, texts, config=config))


def test_a_cache_without_room_raises(params, texts):
    cache = llama.empty_cache(CONFIG, 3, 16)
    with pytest.raises(ValueError, match="has room for 16 tokens, but 17 are needed"):
        continued(params, texts, cache=cache)
