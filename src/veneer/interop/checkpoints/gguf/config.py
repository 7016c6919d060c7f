"""What `config.json` says of a model, from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Hugging Face's model_type and class, by GGUF's architecture.
_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def huggingface_config(
    metadata: Mapping[str, Any], *, rope_factors: np.ndarray | None = None
) -> dict[str, Any]:
    """Returns what Hugging Face's `config.json` has, of a model of Llama's kind.

    Of a file, `GgufFile.config` says more: what its tensors tell.

    **Arguments:**

    - `metadata`: of a GGUF file whose architecture is llama (as those of Mistral's models are),
      qwen2 or qwen3.
    - `rope_factors`: the tensor `rope_freqs.weight`, `[head_dim / 2]`, where there is one: by what
      the wavelengths of the rotary embedding are longer.

    **Raises:** `ValueError` for other architectures and for mixtures of experts, where something is
    missing or another in each layer, and for factors that are not those of Llama 3.

    >>> from veneer.interop.checkpoints.gguf import huggingface_config
    >>> config = huggingface_config({
    ...     "general.architecture": "llama", "llama.embedding_length": 64,
    ...     "llama.feed_forward_length": 128, "llama.block_count": 2, "llama.context_length": 256,
    ...     "llama.vocab_size": 100, "llama.attention.head_count": 4,
    ...     "llama.attention.layer_norm_rms_epsilon": 1e-5,
    ... })
    >>> config["hidden_size"], config["head_dim"], config["rope_theta"]
    (64, 16, 10000.0)
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _MODELS:
        raise ValueError(
            f"config.json cannot be made for architecture {architecture!r}; supported are "
            f"{', '.join(_MODELS)}"
        )

    def value(key: str, default: Any = None, kind: type = int) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ValueError(f"the metadata have no {architecture}.{key}")
        found = found.item() if isinstance(found, np.generic) else found
        if not isinstance(found, kind):
            raise ValueError(f"{architecture}.{key} is {found!r}, not one {kind.__name__}")
        # Of an f32 the shortest number that is it, as it was written down: 1e-05.
        return float(str(np.float32(found))) if isinstance(found, float) else found

    if value("expert_count", 0):
        raise ValueError("config.json cannot be made for a mixture of experts")
    heads = value("attention.head_count")
    hidden = value("embedding_length")
    model_type, model_class = _MODELS[architecture]
    config = {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": value("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden // max(heads, 1)),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": value("rope.freq_base", 10000.0, float),
        "max_position_embeddings": value("context_length"),
        "hidden_act": "silu",
    }
    scaling = value("rope.scaling.type", "none", str)
    if scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": value("rope.scaling.factor", kind=float),
            "original_max_position_embeddings": value(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
        }
    if isinstance(rope_factors, np.ndarray) and np.any(rope_factors != 1):
        config["rope_scaling"] = _of_llama3(rope_factors, config["rope_theta"])
    if f"{architecture}.attention.sliding_window" in metadata:
        config["sliding_window"] = value("attention.sliding_window")
    for name, token in _TOKENS.items():
        if (number := metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            config[name] = number
    return config


# Those of all models that have this scaling. Of it, files hold what comes out.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _of_llama3(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """What `rope_scaling` says where the wavelengths are longer by these factors.

    As in Hugging Face's `modeling_rope_utils`: those that come less than once in the original
    context are longer by one factor, those that come more than four times stay, and frequencies in
    between are interpolated.
    """
    count = len(factors)
    turns = 8192 / (2 * np.pi) * theta ** -(np.arange(count) / count)
    factor = float(factors.max())
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    if not np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-4):
        raise ValueError("its rope_freqs.weight differs from Llama 3: config.json cannot state it")
    return _LLAMA3 | {"factor": factor}
