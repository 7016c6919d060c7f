"""`convert` returns a model with the results of the trained one."""

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import ActivationQuantized, FakeQuantized, QArray, Rule, convert, quantize_tree

W = arrays.normal(2, 32, 32)
X = arrays.normal(5, 32, seed=1)


def program(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["out"] + params["bias"]


@pytest.mark.parametrize(
    "rule",
    [
        Rule("layers|out", "int4"),
        Rule("layers|out", "int8", act_qtype="int8"),
        Rule("layers|out", "int8", act_qtype="int8", grad_qtype="int8"),
        Rule("layers|out", "int4", tile_size=8, act_qtype="int8", calibration_method="mse"),
        Rule("layers|out", "nvfp4"),
        Rule("layers|out", "int8", tile_size={-2: 8, -1: 16}, act_qtype="int8", act_tile_size=8),
        Rule("layers|out", None, act_qtype="int8"),
    ],
    ids=lambda rule: f"{rule.qtype}, {rule.act_qtype}, {rule.grad_qtype}",
)
def test_a_converted_model_gives_the_same_results(rule):
    params = {"layers": W, "out": W[0], "bias": jnp.ones(32)}
    trained = quantize_tree(params, [rule], train=True)
    # Without optimization, the activations of the two programs differ by rounding, and some codes.
    optimized = {"xla_backend_optimization_level": 3}
    run = jax.jit(
        lambda *trees: [vn.implicit(program)(tree, X) for tree in trees], compiler_options=optimized
    )
    before, after = run(trained, convert(trained))
    assert_close(after, before, 1e-3)


def test_convert_equals_quantizing_the_trained_weights():
    rule = Rule("w", "int4", tile_size=8, act_qtype="int8")
    trained = quantize_tree({"w": W}, [rule], train=True)
    found, wanted = convert(trained)["w"], quantize_tree({"w": trained["w"].w}, [rule])["w"]
    assert isinstance(found, ActivationQuantized)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True))


def test_convert_reaches_nested_weights_only():
    lora = vn.types.LoraArray.init(FakeQuantized(W[0], qtype="int4"), 2, key=jax.random.key(0))
    found = convert({"a": lora, "b": W})
    assert isinstance(found["a"].w, QArray)
    assert found["b"] is W


def test_convert_keeps_the_dense_dtype():
    q = FakeQuantized(W[0], qtype="int4", dense_dtype="bfloat16")
    assert convert(q).dtype == jnp.bfloat16
