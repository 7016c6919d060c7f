"""`tune` stores the trained tree in every format and basis, with less loss."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.quant import QArray, Rule, quantize_tree, tune
from veneer.quant.ptq.tune import relative_error


def array(*shape, seed=0, scale=1.0):
    return arrays.array(scale * np.random.default_rng([seed, *shape]).normal(size=shape))


X = [array(24, 32, seed=i) for i in range(3)]
PARAMS = {
    "w": array(32, 32, scale=1 / 6),
    "v": array(32, 16, scale=1 / 6),
    "bias": array(16, scale=0.1),
}


def model(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"] + params["bias"]


def quantized(qtype, params=PARAMS, **how):
    tile = None if vn.quant.FORMATS[qtype].tile_size else 16
    return quantize_tree(
        params, [Rule("[wv]", qtype, tile_size=tile, **how)], model=model, args=X[:1]
    )


def loss_of(small, params=PARAMS):
    run = jax.jit(vn.implicit(model))
    return float(np.mean([relative_error(run(small, x), model(params, x)) for x in X]))


FORMS = {
    "int2": {},
    "uint3": {},
    "nf4": {},
    "mxfp4": {},
    "ternary": {},
    "int3": {"rotate": True},
    "uint2": {"act_qtype": "int8"},
    "int4": {"scale_dtype": "bfloat16", "act_qtype": "int8", "rotate": True},
}


@pytest.mark.parametrize("qtype", FORMS)
def test_the_stored_tree_has_the_trained_loss(qtype):
    small = quantized(qtype, **FORMS[qtype])
    tuning = tune(model, small, params=PARAMS, epochs=12, learning_rate=0.02)
    better = tuning(X)
    assert vn.tree.structure(better) == vn.tree.structure(small)
    like = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert like(better) == like(small)
    assert len(tuning.losses) == 14
    np.testing.assert_allclose(tuning.losses[0], loss_of(small), rtol=0.02)
    np.testing.assert_allclose(tuning.losses[-1], loss_of(better), rtol=0.05)
    assert tuning.losses[-1] < 0.9 * tuning.losses[0]
    np.testing.assert_array_equal(better["bias"], PARAMS["bias"])


@pytest.mark.parametrize("part", ["codes", "scales", "dense"])
def test_only_the_named_parts_are_trained(part):
    small = quantized("int2")
    better = tune(model, small, params=PARAMS, train=[part], epochs=8, learning_rate=0.03)(X)
    changed = {
        "codes": bool((better["w"].codes() != small["w"].codes()).any()),
        "scales": bool((better["w"].scale != small["w"].scale).any()),
        "dense": bool((better["bias"] != small["bias"]).any()),
    }
    assert changed == {name: name == part for name in changed}
    assert loss_of(better) < loss_of(small)


def test_tuning_starts_from_the_calibrated_codes():
    calibrated = vn.quant.calibrate(model, [Rule("[wv]", "int3")], params=PARAMS)(X)
    tuning = tune(model, calibrated, params=PARAMS, epochs=1, learning_rate=1e-9)
    with pytest.warns(UserWarning, match="did not reduce the loss"):
        same = tuning(X)
    assert same is calibrated
    np.testing.assert_allclose(tuning.losses, tuning.losses[0], rtol=1e-5)


@pytest.mark.parametrize("qtype", ["ternary", "int1"])  # their bytes differ from their codes
def test_codes_of_one_byte_each_are_tuned(qtype):
    small = jax.tree.map(
        lambda x: x.unpacked() if isinstance(x, QArray) else x,
        quantized(qtype),
        is_leaf=lambda x: isinstance(x, QArray),
    )
    tuning = tune(model, small, params=PARAMS, epochs=2)
    np.testing.assert_allclose(loss_of(tuning(X)), tuning.losses[-1], rtol=1e-4)


def test_transposed_weights_and_adapters_are_tuned():
    params = {"w": PARAMS["w"].T, "v": PARAMS["v"], "bias": PARAMS["bias"]}
    transposed = lambda params, x: model(params | {"w": params["w"].T}, x)
    small = quantized("int2")
    small = {"w": vn.implicit(jnp.transpose)(small["w"]), "v": small["v"], "bias": small["bias"]}
    assert isinstance(small["w"], QArray)
    better = tune(transposed, small, params=params, epochs=8, learning_rate=0.02)(X)
    untransposed = better | {"w": vn.implicit(jnp.transpose)(better["w"])}
    assert loss_of(untransposed) < 0.8 * loss_of(quantized("int2"))

    lora = quantized("int2")
    lora["w"] = vn.types.LoraArray.init(lora["w"], rank=4, key=jax.random.key(0))
    tuned = tune(model, lora, params=PARAMS, train=["dense"], epochs=20, learning_rate=0.02)(X)
    assert (tuned["w"].w.packed == lora["w"].w.packed).all()
    assert loss_of(tuned) < 0.9 * loss_of(lora)


def test_a_module_is_tuned_with_a_custom_loss():
    module = eqx.nn.MLP(32, 8, 16, 1, key=jax.random.key(0))
    call = eqx.filter_vmap(lambda module, x: module(x), in_axes=(None, 0))
    small = quantize_tree(module, [Rule(".*weight", "int2", tile_axis=-1)])
    seen = []

    def loss(outputs, expected):
        seen.append(outputs.shape)
        return jnp.abs(outputs - expected).mean()

    tuning = tune(call, small, params=module, epochs=10, learning_rate=0.02, loss=loss)
    better = tuning(X)
    assert isinstance(better, eqx.nn.MLP)
    assert seen
    assert tuning.losses[-1] < 0.9 * tuning.losses[0]


def test_wrong_arguments_raise():
    small = quantized("int2")
    with pytest.raises(TypeError, match=r"read only once\. Pass a list"):
        tune(model, small, params=PARAMS)(iter(X))
    with pytest.raises(ValueError, match="there are no batches to tune with"):
        tune(model, small, params=PARAMS)([])
    with pytest.raises(ValueError, match="train must be a list of names"):
        tune(model, small, params=PARAMS, train="codes")
    with pytest.raises(ValueError, match="train must be a list of names"):
        tune(model, small, params=PARAMS, train=["code"])
    with pytest.raises(ValueError, match="epochs must be 1 or more"):
        tune(model, small, params=PARAMS, epochs=0)
    with pytest.raises(ValueError, match="there is nothing to train: the tree has no scales"):
        tune(model, quantized("mxfp4"), params=PARAMS, train=["scales"])(X)
    with pytest.raises(ValueError, match="the loss is nan"):
        tune(model, small, params=PARAMS)([X[0].at[0, 0].set(jnp.nan)])
    with pytest.raises(ValueError, match="no floating output"):
        tune(lambda params, x: model(params, x) > 0, small, params=PARAMS)(X)
