"""Convert between GGUF and Hugging Face: names of tensors, order of rows, and `config.json`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Origin(NamedTuple):
    """The place in a GGUF file of a tensor of the Hugging Face checkpoint.

    - `stored`: the name of the GGUF tensor.
    - `expert`: the index along its first axis, for one of several stacked experts. None if the
      tensor is the whole GGUF tensor.
    """

    stored: str
    expert: int | None = None


_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

_QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

# The names in a layer, by architecture. Mistral and Mixtral models have the architecture llama.
_ARCHITECTURES = {
    "llama": _IN_LAYER | _MIXTRAL,
    "granite": _IN_LAYER,
    "smollm3": _IN_LAYER,
    "qwen2": _IN_LAYER,
    "qwen3": _IN_LAYER,
    "qwen2moe": _IN_LAYER | _QWEN_MOE,
    "qwen3moe": _IN_LAYER | _QWEN_MOE,
}

# Architectures whose GGUF files interleave the two halves of a head, for the rotary embedding.
_PAIRED = ("llama", "granite", "smollm3")


def names_of(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Origin]:
    """Return a dict from names of Hugging Face to the origins of these tensors in a GGUF file.

    Tensors without such a name keep their GGUF names. Stacked experts become one tensor per expert.

    **Arguments:**

    - `metadata`: the metadata of the file.
    - `shapes`: a dict from GGUF names to the shapes of tensors.

    **Raises:** `ValueError` for an unknown architecture.
    """
    in_layer = _names_in_layer(metadata)
    origins: dict[str, Origin] = {}
    for stored, shape in shapes.items():
        name = _rename(stored, in_layer)
        experts = range(shape[0]) if "{}" in name and shape else [None]
        for expert in experts:
            origins[name.format(expert) if "{}" in name else name] = Origin(stored, expert)
    return origins


def stored_names(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, str | list[str]]:
    """Return a dict from GGUF names to names of Hugging Face, the inverse of `names_of`.

    The value is a list for the experts of a layer, which GGUF stacks to one tensor. `metadata`
    has the architecture, and `names` are the names of all tensors.

    **Raises:** `ValueError` for an unknown architecture, for two names of one tensor, and if an
    expert is missing.
    """
    in_layer = _names_in_layer(metadata)
    names_of_stored: dict[str, str | list[str]] = {}
    experts: dict[str, dict[int, str]] = {}
    for name in names:
        stored, expert = _find_origin(name, in_layer)
        if expert is not None:
            experts.setdefault(stored, {})[expert] = name
        elif stored in names_of_stored:
            raise ValueError(f"there are two tensors for {stored!r}")
        else:
            names_of_stored[stored] = name
    for stored, by_index in experts.items():
        if by_index.keys() != set(range(len(by_index))):
            raise ValueError(f"{stored!r} has only {len(by_index)} of {max(by_index) + 1} experts")
        names_of_stored[stored] = [by_index[i] for i in range(len(by_index))]
    return names_of_stored


def _find_origin(name: str, in_layer: Mapping[str, str]) -> Origin:
    """Return where a GGUF file holds the tensor with the Hugging Face name `name`.

    `in_layer` maps GGUF names in a layer to names of Hugging Face. An unknown name is its own GGUF
    name.
    """
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return Origin(name)
    for stored, outside in _OUTSIDE.items():
        if module == outside:
            return Origin(f"{stored}.{kind}")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        for stored, inside in in_layer.items():
            pattern = re.escape(inside).replace(r"\{\}", r"(\d+)")
            if expert := re.fullmatch(pattern, match[2]):
                index = int(expert[1]) if expert.groups() else None
                return Origin(f"blk.{match[1]}.{stored}.{kind}", index)
    return Origin(name)


def _names_in_layer(metadata: Mapping[str, Any]) -> dict[str, str]:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"names='huggingface' is not supported for architecture {architecture!r}, only for "
            f"{', '.join(_ARCHITECTURES)}. vn.load(path) loads it with GGUF's names"
        )
    return _ARCHITECTURES[architecture]


def _rename(stored: str, in_layer: Mapping[str, str]) -> str:
    module, _, kind = stored.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if kind not in ("weight", "bias"):
        return stored
    if match and match[2] in in_layer:
        return f"model.layers.{match[1]}.{in_layer[match[2]]}.{kind}"
    return f"{_OUTSIDE[module]}.{kind}" if module in _OUTSIDE else stored


def order_of_rows(
    stored: str, shape: tuple[int, ...], metadata: Mapping[str, Any]
) -> np.ndarray | None:
    """Return the row of a GGUF tensor at each row of the Hugging Face tensor: `int[rows]`.

    Some architectures reorder the rows of queries and keys in each head, for the rotary embedding.
    For other tensors the result is None, because the order is the same.

    **Arguments:**

    - `stored`, `shape`: the GGUF name and the shape of the tensor.
    - `metadata`: the metadata of the file, with the number of heads.

    **Raises:** `ValueError` if the rows cannot be divided among the heads.
    """
    architecture = metadata.get("general.architecture")
    match = re.fullmatch(r"blk\.(\d+)\.attn_([qk])\.(weight|bias)", stored)
    if architecture not in _PAIRED or match is None:
        return None
    heads = metadata.get(f"{architecture}.attention.head_count")
    if match[2] == "k":
        heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if isinstance(heads, np.ndarray):  # one number per layer
        layer = int(match[1])
        heads = heads[layer] if layer < len(heads) else None
    rows = shape[0] if shape else 0
    if not isinstance(heads, int | np.integer) or heads < 1 or rows % (2 * heads):
        raise ValueError(f"its {rows} rows are not pairs of {heads!r} heads")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


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
    """Return the content of `config.json` for a model of the Llama kind.

    `GgufFile.config` calls it, and adds the facts that follow from its tensors.

    **Arguments:**

    - `metadata`: the metadata of a GGUF file with the architecture llama (also of Mistral models),
      qwen2 or qwen3.
    - `rope_factors`: the tensor `rope_freqs.weight`, `[head_dim / 2]`, if the file has it: the
      factors of the wavelengths of the rotary embedding.

    **Raises:** `ValueError` for other architectures and for mixtures of experts, if an entry is
    missing or differs by layer, and if the factors differ from Llama 3.

    >>> from veneer.files.gguf import huggingface_config
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
        x = metadata.get(f"{architecture}.{key}", default)
        if x is None:
            raise ValueError(f"the metadata have no {architecture}.{key}")
        x = x.item() if isinstance(x, np.generic) else x
        if not isinstance(x, kind):
            raise ValueError(f"{architecture}.{key} is {x!r}, not one {kind.__name__}")
        # The shortest decimal that is this float32, such as 1e-05.
        return float(str(np.float32(x))) if isinstance(x, float) else x

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
        config["rope_scaling"] = _find_llama3_scaling(rope_factors, config["rope_theta"])
    if f"{architecture}.attention.sliding_window" in metadata:
        config["sliding_window"] = value("attention.sliding_window")
    for name, token in _TOKENS.items():
        if (number := metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            config[name] = number
    eot = metadata.get("tokenizer.ggml.eot_token_id")  # the token that ends a message of a chat
    if eot is not None and eot != config.get("eos_token_id"):
        config["eos_token_id"] = [x for x in (config.get("eos_token_id"), eot) if x is not None]
    return config


# All models with this scaling have these values. GGUF files hold only the resulting factors.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _find_llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the `rope_scaling` of Llama 3 that gives these factors.

    As in `modeling_rope_utils` of Hugging Face: wavelengths longer than the original context get
    one factor, wavelengths shorter than a quarter of it get none, and others are interpolated.

    **Raises:** `ValueError` if no scaling of this kind gives these factors.
    """
    count = len(factors)
    turns = 8192 / (2 * np.pi) * theta ** -(np.arange(count) / count)
    factor = float(factors.max())
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    if not np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-4):
        raise ValueError("its rope_freqs.weight differs from Llama 3: config.json cannot state it")
    return _LLAMA3 | {"factor": factor}
