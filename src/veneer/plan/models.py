"""What a model is made of, by its `config.json`: shapes, with a name for each axis.

Weights have the names and the shapes of the checkpoint, `[out, in]`, of which a layer's number is
left out. Experts are stacks, as gpt-oss has them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Axes that a split may cut; an axis of any other name is whole on each device.
AXES = ("vocabulary", "heads", "kv_heads", "mlp", "experts", "batch", "length")


class NamedShape(NamedTuple):
    """A weight of a model.

    **Arguments:**

    - `path`: its name, with `*` for the number of a layer.
    - `shape`, `axes`: its sizes, and their names.
    - `contracted`: the axis that products sum; None for what stays dense, as norms.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contracted: int | None = None

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def free(self) -> int:
        """The axis that a product leaves."""
        return -2 if self.contracted == -1 else -1


class CachedShape(NamedTuple):
    """What a layer keeps of the tokens that it read: the sizes of axes, and None of two of them.

    These are "batch" and "length", whose sizes a step says.
    """

    sizes: tuple[int | None, ...]
    axes: tuple[str, ...]

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        """All sizes, for so many texts of so many tokens."""
        said = {"batch": batch, "length": length}
        pairs = zip(self.axes, self.sizes, strict=True)
        return tuple(said[axis] if size is None else size for axis, size in pairs)


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike.

    **Arguments:**

    - `count`: how many there are.
    - `weights`, `cache`: of one.
    - `window`: how many tokens a token sees, or None for all before it.
    """

    count: int
    weights: tuple[NamedShape, ...]
    cache: tuple[CachedShape, ...]
    window: int | None = None


class ModelShapes(NamedTuple):
    """A model.

    **Arguments:**

    - `architecture`: its `model_type`.
    - `dtype`: of its weights, and of activations.
    - `width`, `heads`: of the hidden state, and of queries.
    - `experts_per_token`: 0 without experts.
    - `outside`: weights of no layer: embedding, head and last norm.
    - `layers`: the others, by kind.
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
        """Each weight, with how many there are of it."""
        return [(1, w) for w in self.outside] + [
            (kind.count, w) for kind in self.layers for w in kind.weights
        ]

    @property
    def size(self) -> int:
        """How many parameters it has."""
        return sum(count * weight.size for count, weight in self.counted)

    @property
    def experts(self) -> int:
        """How many experts a layer has, 1 where it has none."""
        stacks = [w.shape[0] for _, w in self.counted if w.axes[0] == "experts"]
        return max(stacks, default=1)


class _Said(dict):
    """A `config.json`, of which a missing entry is told by name."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"config.json of a {self['model_type']!r} model has no entry {name!r}")


def model_of(said: Mapping[str, Any]) -> ModelShapes:
    """Reads a `config.json`, parsed.

    **Raises:** `ValueError` for another architecture, and where an entry is missing.

    >>> from veneer.plan import model_of
    >>> sizes = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008}
    >>> heads = {"num_attention_heads": 32, "num_hidden_layers": 32}
    >>> model_of({"model_type": "llama"} | sizes | heads).size
    6738415616
    """
    kind = said.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} of config.json is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    said = _Said(said)
    layers = ARCHITECTURES[kind](said)
    vocabulary, width = said["vocab_size"], said["hidden_size"]
    table = lambda path: NamedShape(path, (vocabulary, width), ("vocabulary", "embed"), -1)
    outside = [table("model.embed_tokens.weight"), _vector("model.norm.weight", width)]
    if not said.get("tie_word_embeddings", False):
        outside.append(table("lm_head.weight"))
    return ModelShapes(
        kind,
        said.get("dtype") or said.get("torch_dtype") or "bfloat16",
        width,
        said["num_attention_heads"],
        said.get("num_experts_per_tok", 0),
        tuple(outside),
        tuple(layers),
    )


_LAYER = "model.layers.*."


def _vector(path: str, size: int, axis: str = "embed") -> NamedShape:
    return NamedShape(path, (size,), (axis,))


def _norms(width: int) -> list[NamedShape]:
    names = "input_layernorm", "post_attention_layernorm"
    return [_vector(f"{_LAYER}{name}.weight", width) for name in names]


class _LayerProducts:
    """Matrices `[out, in]` of a layer, each with the names of its two axes, and biases."""

    def __init__(self, prefix: str = "", *, bias: tuple[str, ...] | bool = ()) -> None:
        self.prefix, self.bias, self.found = _LAYER + prefix, bias, list[NamedShape]()

    def add(self, name: str, out: tuple[int, str], into: tuple[int, str]) -> None:
        shape, axes = (out[0], into[0]), (out[1], into[1])
        self.found.append(NamedShape(f"{self.prefix}{name}.weight", shape, axes, -1))
        if self.bias is True or (self.bias and name in self.bias):
            self.found.append(_vector(f"{self.prefix}{name}.bias", *out))


def _gated(prefix: str, width: int, wide: int) -> list[NamedShape]:
    """A wide layer whose activations are gated."""
    made = _LayerProducts(prefix)
    for name in ("gate_proj", "up_proj"):
        made.add(name, (wide, "mlp"), (width, "embed"))
    made.add("down_proj", (width, "embed"), (wide, "mlp"))
    return made.found


def _attention(
    said: Mapping[str, Any], bias: tuple[str, ...] | bool
) -> tuple[list[NamedShape], tuple[CachedShape, ...]]:
    """Of queries in groups, with keys and values."""
    width, heads = said["hidden_size"], said["num_attention_heads"]
    head = said.get("head_dim") or width // heads
    kv_heads = said.get("num_key_value_heads") or heads
    made = _LayerProducts("self_attn.", bias=bias)
    made.add("q_proj", (heads * head, "heads"), (width, "embed"))
    for name in ("k_proj", "v_proj"):
        made.add(name, (kv_heads * head, "kv_heads"), (width, "embed"))
    made.add("o_proj", (width, "embed"), (heads * head, "heads"))
    kept = CachedShape((None, kv_heads, None, head), ("batch", "kv_heads", "length", "head"))
    return made.found, (kept, kept)


def _llama(said: Mapping[str, Any]) -> list[LayerKind]:
    kind, layers = said["model_type"], said["num_hidden_layers"]
    of_qwen2 = ("q_proj", "k_proj", "v_proj") if kind == "qwen2" else ()
    weights, cache = _attention(said, said.get("attention_bias") or of_qwen2)
    if kind == "qwen3":
        head = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
        names = "q_norm", "k_norm"
        weights += [_vector(f"{_LAYER}self_attn.{name}.weight", head, "head") for name in names]
    weights += _gated("mlp.", said["hidden_size"], said["intermediate_size"])
    slides = said.get("use_sliding_window", kind == "mistral")
    window = said.get("sliding_window") if slides else None
    return [LayerKind(layers, (*weights, *_norms(said["hidden_size"])), cache, window)]


def _gpt_oss(said: Mapping[str, Any]) -> list[LayerKind]:
    width, wide, experts = (
        said[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    weights, cache = _attention(said, bias=True)
    weights.append(_vector(f"{_LAYER}self_attn.sinks", said["num_attention_heads"], "heads"))
    mlp = f"{_LAYER}mlp."
    weights += [
        NamedShape(f"{mlp}router.weight", (experts, width), ("routed", "embed")),
        _vector(f"{mlp}router.bias", experts, "routed"),
    ]
    # These are stacks of [in, out], in the checkpoint, too.
    for name, into, out, axes in (
        ("gate_up_proj", width, 2 * wide, ("experts", "embed", "mlp")),
        ("down_proj", wide, width, ("experts", "mlp", "embed")),
    ):
        path = f"{mlp}experts.{name}"
        weights.append(NamedShape(path, (experts, into, out), axes, -2))
        weights.append(NamedShape(f"{path}_bias", (experts, out), (axes[0], axes[2])))
    weights += _norms(width)
    layers = said["num_hidden_layers"]
    types = said.get("layer_types") or ["sliding_attention", "full_attention"] * (layers // 2)
    slide = types.count("sliding_attention")
    kinds = (slide, said["sliding_window"]), (len(types) - slide, None)
    return [LayerKind(count, tuple(weights), cache, window) for count, window in kinds if count]


def _deepseek(said: Mapping[str, Any]) -> list[LayerKind]:
    """Latent attention (arXiv 2405.04434), shared experts, and the first layers without experts."""
    width, heads = said["hidden_size"], said["num_attention_heads"]
    latent, queries = said["kv_lora_rank"], said.get("q_lora_rank")
    turned, still, value = (
        said[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    attention, of_heads = _LayerProducts("self_attn."), (heads * (still + turned), "heads")
    norms = [_vector(f"{_LAYER}self_attn.kv_a_layernorm.weight", latent, "latent")]
    if queries:
        attention.add("q_a_proj", (queries, "latent"), (width, "embed"))
        attention.add("q_b_proj", of_heads, (queries, "latent"))
        norms.append(_vector(f"{_LAYER}self_attn.q_a_layernorm.weight", queries, "latent"))
    else:
        attention.add("q_proj", of_heads, (width, "embed"))
    attention.add("kv_a_proj_with_mqa", (latent + turned, "latent"), (width, "embed"))
    attention.add("kv_b_proj", (heads * (still + value), "heads"), (latent, "latent"))
    attention.add("o_proj", (width, "embed"), (heads * value, "heads"))
    weights = (*attention.found, *norms, *_norms(width))
    cache = (CachedShape((None, None, latent + turned), ("batch", "length", "latent")),)

    experts, wide = said["n_routed_experts"], said["moe_intermediate_size"]
    mlp = f"{_LAYER}mlp."
    routed = [
        NamedShape(f"{mlp}gate.weight", (experts, width), ("routed", "embed")),
        _vector(f"{mlp}gate.e_score_correction_bias", experts, "routed"),
    ]
    for weight in _gated("mlp.experts.", width, wide):
        axes = ("experts", *weight.axes)
        routed.append(NamedShape(weight.path, (experts, *weight.shape), axes, -1))
    if said.get("n_shared_experts"):
        routed += _gated("mlp.shared_experts.", width, wide * said["n_shared_experts"])
    dense = said["first_k_dense_replace"]
    plain = _gated("mlp.", width, said["intermediate_size"])
    kinds = (dense, plain), (said["num_hidden_layers"] - dense, routed)
    return [LayerKind(count, (*weights, *own), cache) for count, own in kinds if count]


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], list[LayerKind]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
}
