"""One rule quantizes a transformer of each framework, because its axes are found by tracing.

Each model has an embedding that is tied to its head, a convolution, attention, a feed-forward
block, layer norms and batch norms. All but the nnx model also have dropout, which would change the
state of an nnx module.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import Rule

VOCABULARY, WIDTH, HEADS, LENGTH = 96, 128, 4, 6
IDS = arrays.array(np.arange(LENGTH) * 7 % VOCABULARY)
KEYS = [arrays.key(seed) for seed in range(8)]


class Model(NamedTuple):
    """A model of a framework: its parameters, its program, and the tiles stated by hand."""

    params: Any
    program: Any  # None if the parameters are a module
    args: tuple[Any, ...]
    by_hand: dict[str, Any]  # the tile along each axis, by the end of the path


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.batch_norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.1, decode=False, deterministic=True, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=True)

    def __call__(self, ids):
        x = self.batch_norm(self.conv(self.embed(ids)[None]))
        x = x + self.attention(self.norm(x))
        x = x + self.dropout(self.down(jax.nn.gelu(self.up(x))))
        return self.embed.attend(x)


OF_FLAX = {
    "embedding": {-1: 64},
    "conv.kernel": {-2: 64},
    "query.kernel": {-3: 64},
    "key.kernel": {-3: 64},
    "value.kernel": {-3: 64},
    "out.kernel": {-3: 2, -2: 32},
    "up.kernel": {-2: 64},
    "down.kernel": {-2: 64},
}


def of_nnx():
    by_hand = {f"{name}.value": tiles for name, tiles in OF_FLAX.items()}
    return Model(NnxModel(nnx.Rngs(0)), None, (IDS,), by_hand)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, ids):
        embed = linen.Embed(VOCABULARY, WIDTH, name="embed")
        x = linen.Conv(WIDTH, (3,), name="conv")(embed(ids)[None])
        x = linen.BatchNorm(use_running_average=True)(x)
        attention = linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=0.1, deterministic=False, name="attention"
        )
        x = x + attention(linen.LayerNorm()(x))
        y = jax.nn.gelu(linen.Dense(2 * WIDTH, name="up")(x))
        x = x + linen.Dropout(0.1, deterministic=False)(linen.Dense(WIDTH, name="down")(y))
        return embed.attend(x)


def of_linen():
    model = LinenModel()
    rngs = {"dropout": KEYS[1]}
    variables = jax.jit(model.init)({"params": KEYS[0], **rngs}, IDS)
    return Model(variables, partial(model.apply, rngs=rngs), (IDS,), OF_FLAX)


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    batch_norm: eqx.nn.BatchNorm
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    feed_forward: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=KEYS[0])
        self.conv = eqx.nn.Conv1d(WIDTH, WIDTH, 3, padding=1, key=KEYS[1])
        self.batch_norm = eqx.nn.BatchNorm(WIDTH, "batch", inference=True, mode="ema")
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=KEYS[2])
        self.feed_forward = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=KEYS[3])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, ids, state):
        x = self.conv(jax.vmap(self.embed)(ids).T)
        x = self.batch_norm(x, state)[0].T
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        x = x + self.dropout(jax.vmap(self.feed_forward)(x), key=KEYS[4])
        return x @ self.embed.weight.T


def of_equinox():
    by_hand = {path: {-1: 64} for path in ("embed.weight", r"proj.weight", r"\d.weight")}
    model, state = eqx.nn.make_with_state(EquinoxModel)()
    state = jax.tree.map(jnp.ones_like, state)  # as after some batches
    return Model(model, None, (IDS, state), {"conv.weight": {-2: 64}, **by_hand})


def plain(params, ids, *, heads):
    """Run a model in plain JAX: scanned layers, experts, a convolution and a head."""
    x = params["embed"][ids] * 8
    x = jax.lax.conv_general_dilated(
        x[None], params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0]
    statistics = params["batch_norm"]
    x = (x - statistics["mean"]) * jax.lax.rsqrt(1 + jnp.square(statistics["deviation"]))
    x = jnp.where(jax.random.bernoulli(KEYS[1], 0.9, x.shape), x / 0.9, 0)

    def layer(x, weights):
        y = x * weights["norm"]
        q, k, v = (jnp.einsum("td,dhk->htk", y, weights[name]) for name in "qkv")
        p = jax.nn.softmax(jnp.einsum("htk,hsk->hts", q, k) / 4)
        x = x + jnp.einsum("htk,hkd->td", p @ v, weights["out"].reshape(heads, -1, WIDTH))
        return x + jax.nn.silu(x @ weights["up"]) @ weights["down"].T, None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    groups = jnp.full(2, LENGTH // 2)
    x = x + jax.lax.ragged_dot(x, params["experts"], groups)
    x = x + jnp.einsum("td,tdf->tf", x, params["experts"][jnp.arange(LENGTH) % 2])
    return x @ params["embed"].T


def of_plain():
    width, head = WIDTH, WIDTH // HEADS
    shapes = {
        "embed": (VOCABULARY, width),
        "conv": (3, width, width),
        "batch_norm": {"mean": (width,), "deviation": (width,)},
        "experts": (2, width, width),
        "layers": {
            **dict.fromkeys("qkv", (3, width, HEADS, head)),
            "norm": (3, width),
            "out": (3, width, width),
            "up": (3, width, 2 * width),
            "down": (3, width, 2 * width),
        },
    }
    is_shape = lambda x: isinstance(x, tuple)
    make = lambda shape: jax.random.normal(KEYS[0], shape) / 16
    by_hand = {
        "embed": {-1: 64},
        "(conv|experts)": {-2: 64},
        r"\.[qkv]": {-3: 64},
        "(up|out)": {-2: 64},
        "down": {-1: 64},
    }
    params = jax.tree.map(make, shapes, is_leaf=is_shape)
    return Model(params, partial(plain, heads=HEADS), (IDS,), by_hand)


MODELS = {"nnx": of_nnx, "linen": of_linen, "equinox": of_equinox, "plain": of_plain}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """Return a model."""
    return MODELS[request.param]()


def call(model, params):
    return params(*model.args) if model.program is None else model.program(params, *model.args)


def quantized(model, rules):
    return vn.quant.quantize_tree(model.params, rules, model=model.program, args=model.args)


def weights(params):
    paths = vn.tree.leaves_with_path(params)
    return {vn.tree.path_string(path): x for path, x in paths if isinstance(x, vn.Value)}


def test_one_rule_finds_the_axes_stated_by_hand(model):
    small = quantized(model, [Rule(".*", "nf4", tile_size=64)])
    rules = [
        Rule(rf".*{path}", "nf4", tile_size=tiles, tile_axis=tuple(tiles))
        for path, tiles in model.by_hand.items()
    ]
    by_hand = vn.quant.quantize_tree(model.params, rules)
    assert jax.tree.structure(small) == jax.tree.structure(by_hand)
    for one, other in zip(jax.tree.leaves(small), jax.tree.leaves(by_hand), strict=True):
        assert (one == other).all() if hasattr(one, "shape") else one is other
    for path, w in weights(small).items():
        assert 8 * w.nbytes / w.size == pytest.approx(4.5, rel=0.01), path  # 4 and 32 / 64
    out = vn.implicit(partial(call, model))(small)
    assert_close(out, call(model, vn.materialise(small)))


@pytest.mark.parametrize("qtype", ["int8", "int3", "mxfp4"])
def test_weights_take_the_bits_of_their_format(model, qtype):
    small = quantized(model, [Rule(".*", qtype)])
    bits = {"int8": 8, "int3": 3, "mxfp4": 4.25}[qtype]
    for path, w in weights(small).items():
        scales = 0 if qtype == "mxfp4" else 32 * w.scale.size / w.size
        assert 8 * w.nbytes / w.size == pytest.approx(bits + scales, rel=0.01), path
    assert len(weights(small)) == len(weights(quantized(model, [Rule(".*", "nf4")])))


def test_default_rules_keep_embeddings_in_8_bits(model):
    small = weights(quantized(model, "nf4"))
    embedding = next(w for path, w in small.items() if "embed" in path)
    assert (embedding.qtype, embedding.scale.shape) == ("int8", (VOCABULARY, 1))
    others = [w for path, w in small.items() if "embed" not in path]
    assert {w.qtype for w in others} == {"nf4"}
    for w in others:
        assert 8 * w.nbytes / w.size == pytest.approx(4.5, rel=0.01)


def test_adapters_of_every_product_change_nothing_at_first(model):
    small = quantized(model, "nf4")
    rules = [vn.lora.Rule(".*", rank=2)]
    key = jax.random.key(1)
    tuned = vn.lora.init_tree(small, rules, key=key, model=model.program, args=model.args)
    updates = weights(tuned)
    assert all(isinstance(w, vn.types.LoraArray) for w in updates.values())
    assert_close(vn.implicit(partial(call, model))(tuned), call(model, vn.materialise(small)))
    for path, w in updates.items():
        assert w.a.size + w.b.size < w.size / 4, path
