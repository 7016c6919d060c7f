"""The weights and caches of a language model, from its `config.json`: shapes with named axes.

Weights have the names and shapes of Hugging Face checkpoints, `[out, in]`, with `*` in place of the
number of a layer. The experts of a layer are one stacked weight, as in gpt-oss.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The names of the axes that a split can shard. Axes with other names are not sharded.
AXES = ("vocabulary", "heads", "kv_heads", "mlp", "experts", "batch", "length")


class NamedShape(NamedTuple):
    """The shape of a weight, with a name for each axis.

    **Arguments:**

    - `path`: the name of the weight, with `*` in place of the number of a layer.
    - `shape`, `axes`: the size and the name of each axis. The name, such as "mlp", decides how the
      axis is sharded: see `AXES`.
    - `contracted`: the axis that products contract, -1 or -2. None for a weight that is used in no
      product, such as a norm. It is not quantized.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contracted: int | None = None

    @property
    def size(self) -> int:
        """The number of values of the weight."""
        return math.prod(self.shape)

    @property
    def free(self) -> int:
        """The axis that products do not contract, -1 or -2, ignoring an axis of experts."""
        return -2 if self.contracted == -1 else -1


class CachedShape(NamedTuple):
    """The shape of one array of a KV cache, in one layer.

    - `sizes`: the size of each axis. None for the axes "batch" and "length", because it depends on
      the planned step.
    - `axes`: the name of each axis.
    """

    sizes: tuple[int | None, ...]
    axes: tuple[str, ...]

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the full shape for `batch` sequences of `length` tokens."""
        of_step = {"batch": batch, "length": length}
        pairs = zip(self.axes, self.sizes, strict=True)
        return tuple(of_step[axis] if size is None else size for axis, size in pairs)


@dataclass(frozen=True)
class LayerKind:
    """A group of layers with the same shapes.

    **Arguments:**

    - `count`: the number of layers in the group.
    - `weights`: the shapes of the weights of one layer.
    - `cache`: the shapes of the arrays of its KV cache.
    - `window`: the number of tokens that attention sees (a sliding window). None for all tokens.
    """

    count: int
    weights: tuple[NamedShape, ...]
    cache: tuple[CachedShape, ...]
    window: int | None = None


class ModelShapes(NamedTuple):
    """The shapes of a language model.

    **Arguments:**

    - `architecture`: `model_type` of its `config.json`.
    - `dtype`: the dtype of weights and activations.
    - `width`: the size of the hidden state.
    - `heads`: the number of query heads.
    - `experts_per_token`: the number of experts that a token uses. 0 if the model has no experts.
    - `outside`: the weights outside the layers: the embedding, the output head and the last norm.
    - `layers`: the layers, grouped by their shapes.
    """

    architecture: str
    dtype: str
    width: int
    heads: int
    experts_per_token: int
    outside: tuple[NamedShape, ...]
    layers: tuple[LayerKind, ...]

    @property
    def counted(self) -> list[tuple[int, NamedShape]]:
        """All weights, each with the number of layers that have it (1 outside the layers)."""
        return [(1, w) for w in self.outside] + [
            (kind.count, w) for kind in self.layers for w in kind.weights
        ]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(count * weight.size for count, weight in self.counted)

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 1 if the model has none."""
        stacks = [w.shape[0] for _, w in self.counted if w.axes[0] == "experts"]
        return max(stacks, default=1)

    @property
    def head(self) -> NamedShape:
        """The weight that computes the logits: the output head, or the embedding if it is tied."""
        return [w for w in self.outside if "vocabulary" in w.axes][-1]


class _ConfigEntries(dict):
    """The entries of a `config.json`. A missing entry raises a `ValueError` with its name."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"config.json of a {self['model_type']!r} model has no entry {name!r}")


def model_of(config: Mapping[str, Any]) -> ModelShapes:
    """Return the shapes of the model that a parsed `config.json` describes.

    **Raises:** `ValueError` if the architecture is not supported, or an entry is missing.

    >>> from veneer.plan import model_of
    >>> sizes = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008}
    >>> heads = {"num_attention_heads": 32, "num_hidden_layers": 32}
    >>> model_of({"model_type": "llama"} | sizes | heads).size
    6738415616
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} of config.json is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    config = _ConfigEntries(config)
    layers = ARCHITECTURES[kind](config)
    vocabulary, width = config["vocab_size"], config["hidden_size"]
    table = lambda path: NamedShape(path, (vocabulary, width), ("vocabulary", "embed"), -1)
    outside = [table("model.embed_tokens.weight"), _vector("model.norm.weight", width)]
    if not config.get("tie_word_embeddings", False):
        outside.append(table("lm_head.weight"))
    return ModelShapes(
        kind,
        config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        width,
        config["num_attention_heads"],
        config.get("num_experts_per_tok", 0),
        tuple(outside),
        tuple(layers),
    )


_LAYER = "model.layers.*."


def _vector(path: str, size: int, axis: str = "embed") -> NamedShape:
    return NamedShape(path, (size,), (axis,))


def _norms(width: int) -> list[NamedShape]:
    names = "input_layernorm", "post_attention_layernorm"
    return [_vector(f"{_LAYER}{name}.weight", width) for name in names]


class _LayerWeights:
    """A list of the shapes of matrices `[out, in]` of a layer and their biases: `weights`.

    **Arguments:**

    - `prefix`: the common prefix of their names after the name of the layer, such as "mlp.".
    - `bias`: the names of the matrices with a bias, or True for all.
    """

    def __init__(self, prefix: str = "", *, bias: tuple[str, ...] | bool = ()) -> None:
        self.prefix, self.bias, self.weights = _LAYER + prefix, bias, list[NamedShape]()

    def add(self, name: str, out: tuple[int, str], into: tuple[int, str]) -> None:
        """Add a matrix, and its bias if it has one.

        `out` and `into` are the output axis and the input axis of the matrix, each a pair of a size
        and a name.
        """
        shape, axes = (out[0], into[0]), (out[1], into[1])
        self.weights.append(NamedShape(f"{self.prefix}{name}.weight", shape, axes, -1))
        if self.bias is True or (self.bias and name in self.bias):
            self.weights.append(_vector(f"{self.prefix}{name}.bias", *out))


def _gated_mlp(prefix: str, width: int, wide: int) -> list[NamedShape]:
    mlp = _LayerWeights(prefix)
    for name in ("gate_proj", "up_proj"):
        mlp.add(name, (wide, "mlp"), (width, "embed"))
    mlp.add("down_proj", (width, "embed"), (wide, "mlp"))
    return mlp.weights


def _attention(
    config: Mapping[str, Any], bias: tuple[str, ...] | bool
) -> tuple[list[NamedShape], tuple[CachedShape, ...]]:
    """Return the shapes of the weights, and of the keys and values, of grouped-query attention.

    `bias` has the names of the matrices with a bias, or True for all.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = _LayerWeights("self_attn.", bias=bias)
    attention.add("q_proj", (heads * head, "heads"), (width, "embed"))
    for name in ("k_proj", "v_proj"):
        attention.add(name, (kv_heads * head, "kv_heads"), (width, "embed"))
    attention.add("o_proj", (width, "embed"), (heads * head, "heads"))
    cached = CachedShape((None, kv_heads, None, head), ("batch", "kv_heads", "length", "head"))
    return attention.weights, (cached, cached)


def _llama(config: Mapping[str, Any]) -> list[LayerKind]:
    kind, layers = config["model_type"], config["num_hidden_layers"]
    qwen2_biases = ("q_proj", "k_proj", "v_proj") if kind == "qwen2" else ()
    weights, cache = _attention(config, config.get("attention_bias") or qwen2_biases)
    if kind == "qwen3":
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        names = "q_norm", "k_norm"
        weights += [_vector(f"{_LAYER}self_attn.{name}.weight", head, "head") for name in names]
    weights += _gated_mlp("mlp.", config["hidden_size"], config["intermediate_size"])
    slides = config.get("use_sliding_window", kind == "mistral")
    window = config.get("sliding_window") if slides else None
    return [LayerKind(layers, (*weights, *_norms(config["hidden_size"])), cache, window)]


def _gpt_oss(config: Mapping[str, Any]) -> list[LayerKind]:
    width, wide, experts = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    weights, cache = _attention(config, bias=True)
    weights.append(_vector(f"{_LAYER}self_attn.sinks", config["num_attention_heads"], "heads"))
    mlp = f"{_LAYER}mlp."
    weights += [
        NamedShape(f"{mlp}router.weight", (experts, width), ("routed", "embed")),
        _vector(f"{mlp}router.bias", experts, "routed"),
    ]
    # The checkpoint also has these weights as stacks of [in, out].
    for name, into, out, axes in (
        ("gate_up_proj", width, 2 * wide, ("experts", "embed", "mlp")),
        ("down_proj", wide, width, ("experts", "mlp", "embed")),
    ):
        path = f"{mlp}experts.{name}"
        weights.append(NamedShape(path, (experts, into, out), axes, -2))
        weights.append(NamedShape(f"{path}_bias", (experts, out), (axes[0], axes[2])))
    weights += _norms(width)
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or ["sliding_attention", "full_attention"] * (layers // 2)
    sliding = types.count("sliding_attention")
    kinds = (sliding, config["sliding_window"]), (len(types) - sliding, None)
    return [LayerKind(count, tuple(weights), cache, window) for count, window in kinds if count]


def _deepseek(config: Mapping[str, Any]) -> list[LayerKind]:
    """Return the layers of DeepSeek-V3: latent attention (arXiv 2405.04434) and shared experts.

    The first layers have an MLP without experts.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    latent, queries = config["kv_lora_rank"], config.get("q_lora_rank")
    rotary, plain, value = (
        config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    attention, all_queries = _LayerWeights("self_attn."), (heads * (plain + rotary), "heads")
    norms = [_vector(f"{_LAYER}self_attn.kv_a_layernorm.weight", latent, "latent")]
    if queries:
        attention.add("q_a_proj", (queries, "latent"), (width, "embed"))
        attention.add("q_b_proj", all_queries, (queries, "latent"))
        norms.append(_vector(f"{_LAYER}self_attn.q_a_layernorm.weight", queries, "latent"))
    else:
        attention.add("q_proj", all_queries, (width, "embed"))
    attention.add("kv_a_proj_with_mqa", (latent + rotary, "latent"), (width, "embed"))
    attention.add("kv_b_proj", (heads * (plain + value), "heads"), (latent, "latent"))
    attention.add("o_proj", (width, "embed"), (heads * value, "heads"))
    weights = (*attention.weights, *norms, *_norms(width))
    cache = (CachedShape((None, None, latent + rotary), ("batch", "length", "latent")),)

    experts, wide = config["n_routed_experts"], config["moe_intermediate_size"]
    mlp = f"{_LAYER}mlp."
    moe = [
        NamedShape(f"{mlp}gate.weight", (experts, width), ("routed", "embed")),
        _vector(f"{mlp}gate.e_score_correction_bias", experts, "routed"),
    ]
    for weight in _gated_mlp("mlp.experts.", width, wide):
        axes = ("experts", *weight.axes)
        moe.append(NamedShape(weight.path, (experts, *weight.shape), axes, -1))
    if config.get("n_shared_experts"):
        moe += _gated_mlp("mlp.shared_experts.", width, wide * config["n_shared_experts"])
    first = config["first_k_dense_replace"]
    dense = _gated_mlp("mlp.", width, config["intermediate_size"])
    kinds = (first, dense), (config["num_hidden_layers"] - first, moe)
    return [LayerKind(count, (*weights, *own), cache) for count, own in kinds if count]


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], list[LayerKind]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
}
