"""A decoder with experts: as by loops over tokens, quantized as dense, and reading few experts."""

import re

import jax
import jax.numpy as jnp
import moe as example
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.plan import model_of

CONFIG = example.SMALL


@arrays.once
def params():
    return example.init(arrays.key(0), CONFIG)


@arrays.once
def layer_0():
    return {k.removeprefix("model.layers.0."): v for k, v in params().items()}


@arrays.once
def tokens():
    return jax.random.randint(arrays.key(1), (2, 9), 0, CONFIG.vocab_size)


def test_weights_have_the_names_and_shapes_of_the_checkpoint():
    said = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    model, shapes = model_of(said | {"model_type": "gpt_oss"}), {}
    for i, kind in enumerate(model.layers):  # of two layers, one of each kind
        shapes |= {w.path.replace("*", str(i)): w.shape for w in kind.weights}
    shapes |= {w.path: w.shape for w in model.outside}
    assert {name: x.shape for name, x in params().items()} == shapes


def token_by_token(layer, x):
    """The experts in float64, for each token by itself."""
    layer, out = {k: np.asarray(v, np.float64) for k, v in layer.items()}, []
    for row in np.asarray(x, np.float64):
        routed = layer["mlp.router.weight"] @ row + layer["mlp.router.bias"]
        best = np.argsort(-routed)[: CONFIG.num_experts_per_tok]
        share = np.exp(routed[best]) / np.exp(routed[best]).sum()
        of = lambda e, row, name: row @ layer[name][e] + layer[f"{name}_bias"][e]
        total = 0
        for e, part in zip(best, share, strict=True):
            wide = of(e, row, "mlp.experts.gate_up_proj")
            gate, up = np.minimum(wide[::2], 7), np.clip(wide[1::2], -7, 7)
            middle = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            total = total + part * of(e, middle, "mlp.experts.down_proj")
        out.append(total)
    return np.stack(out)


@pytest.mark.parametrize("product", [jax.lax.ragged_dot, example.row_by_row])
def test_each_token_uses_its_own_experts(product):
    x = 3 * jax.random.normal(jax.random.key(2), (7, CONFIG.hidden_size))
    of = {k: v + 0.1 if k.endswith("bias") else v for k, v in layer_0().items()}
    found = example.experts(of, CONFIG, x, product)
    np.testing.assert_allclose(found, token_by_token(of, x), rtol=1e-4, atol=1e-4)


def test_reading_a_prompt_agrees_with_single_tokens():
    whole, _ = example.logits(params(), CONFIG, tokens(), example.empty_cache(CONFIG, 2, 9))
    cache = example.empty_cache(CONFIG, 2, 9)
    step = jax.jit(example.logits, static_argnums=1)
    for i in range(9):
        one, cache = step(params(), CONFIG, tokens()[:, i : i + 1], cache, i)
    np.testing.assert_allclose(one, whole, rtol=1e-4, atol=1e-4)


def test_a_layer_attends_only_to_its_window():
    key = jax.random.key(3)
    x, other = jax.random.normal(key, (2, 1, 8, CONFIG.hidden_size))
    (cache, *_) = example.empty_cache(CONFIG, 1, 8)
    layer = layer_0()
    last = lambda x, window: example.attention(layer, CONFIG, x, cache, 0, window)[0][0, -1]
    changed = x.at[:, :4].set(other[:, :4])
    np.testing.assert_array_equal(last(x, 4), last(changed, 4))
    assert not np.allclose(last(x, 5), last(changed, 5))


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_quantized_experts_agree_with_dense_experts(format):
    small = example.quantize(params(), format)
    stacks = [
        small[f"model.layers.{i}.mlp.experts.{n}_proj"] for i in (0, 1) for n in ("gate_up", "down")
    ]
    assert {stack.qtype for stack in stacks} == {format}
    cache = example.empty_cache(CONFIG, 2, 9)
    run = jax.jit(vn.implicit(example.logits), static_argnums=1)
    found, _ = run(small, CONFIG, tokens(), cache)
    exact, _ = run(vn.materialise(small), CONFIG, tokens(), cache)
    assert jnp.linalg.norm(found - exact) <= 1e-4 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_a_step_copies_no_expert(format):
    small, cache = example.quantize(params(), format), example.empty_cache(CONFIG, 1, 9)
    run = jax.jit(vn.implicit(example.logits), static_argnums=1)
    compiled = run.lower(small, CONFIG, tokens()[:1, :1], cache, 3).compile()
    size = lambda shape: np.prod([int(n) for n in shape.split(",") if n])
    of_expert = CONFIG.hidden_size * CONFIG.intermediate_size
    moved = re.findall(r"= u8\[([\d,]+)\]\S* (?:dynamic-slice|copy|gather)\(", compiled.as_text())
    assert all(size(shape) < of_expert // 2 for shape in moved)
    dense = re.findall(r"f32\[([\d,]*)\]\S* (?!parameter)", compiled.as_text())
    assert all(size(shape) < of_expert for shape in dense)
    stored = sum(x.nbytes for x in jax.tree.leaves(small))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * stored
    assert 'custom_call_target="veneer_' in compiled.as_text()
