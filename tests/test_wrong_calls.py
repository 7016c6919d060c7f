"""The errors of wrong calls that new users make name the mistake and the right call."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.annotations import ARE_CHECKED

import veneer as vn
from veneer.quant import Rule, calibrate, convert, observe, quantize, quantize_tree

W = arrays.ones((8, 4), np.float32)
PARAMS = {"w": W, "b": arrays.zeros(4, np.float32)}
X = arrays.ones((2, 8), np.float32)
KEY = arrays.key(0)
RULES = [Rule("w", "int8")]
LORA_RULES = [vn.lora.Rule("w", rank=2)]
LISTS = [[1.0, 2.0]]


def f(params, x):
    return x @ params["w"] + params["b"]


def save(name, tree=PARAMS):
    """Return a call of `vn.save` with a path that nothing may be written to."""
    return lambda: vn.save(f"/nowhere/{name}", tree)


CALLS = {
    # A tree without arrays.
    "quantize_tree of a function": (
        lambda: quantize_tree(f, "int8", args=(PARAMS, X)),
        "params, a function, holds no arrays. Pass the parameters, a tree of arrays: "
        "quantize_tree(params, 'int8', model=f, args=(x,))",
    ),
    "quantize_tree of a function, by rules": (
        lambda: quantize_tree(f, RULES),
        "params, a function, holds no arrays",
    ),
    "quantize_tree of nothing": (lambda: quantize_tree({}, RULES), "params, a dict, holds no"),
    "init_tree of a function": (
        lambda: vn.lora.init_tree(f, LORA_RULES, key=KEY, args=(PARAMS, X)),
        "init_tree(params, rules, key=key, model=f, args=(x,))",
    ),
    "convert of a function": (lambda: convert(f), "params, a function, holds no arrays"),
    "observe with a function": (
        lambda: observe(f, RULES, params=f),
        "params, a function, holds no arrays",
    ),
    "calibrate with a function": (
        lambda: calibrate(f, "int8", params=f),
        "params, a function, holds no arrays",
    ),
    # Arguments in another order.
    "quantize_tree, swapped": (
        lambda: quantize_tree("int8", PARAMS),
        "not a dict. The rules are the second argument, after the parameters or the model",
    ),
    "quantize_tree, a list of arrays as rules": (
        lambda: quantize_tree(RULES, [W]),
        "rules[0] must be a Rule, such as Rule('.*', 'int8'), not a ",
    ),
    "init_tree, swapped": (
        lambda: vn.lora.init_tree(LORA_RULES, PARAMS, key=KEY),
        "not a dict. The rules are the second argument, after the parameters",
    ),
    "calibrate without a model": (
        lambda: calibrate(PARAMS, "int4"),
        "the model must be a function or a module, not a dict. Call calibrate(model, rules, "
        "params=params)",
    ),
    "observe without a model": (
        lambda: observe(PARAMS, RULES),
        "not a dict. Call observe(model, rules, params=params)",
    ),
    "allocate_bits without a model": (
        lambda: vn.quant.allocate_bits(PARAMS, RULES, 4),
        "not a dict. Call allocate_bits(model, choices, bits, params=params)",
    ),
    "tune without a model": (
        lambda: vn.quant.tune(PARAMS, PARAMS),
        "not a dict. Call tune(model, quantized, params=params)",
    ),
    "quantize, swapped": (
        lambda: quantize("int8", W),
        "Pass the array first, then the format: quantize(array, 'int8')",
    ),
    "quantize, swapped, a dtype": (lambda: quantize(jnp.int8, W), "Pass the array first"),
    "a rule, swapped": (
        lambda: Rule("int8", ".*"),
        "the arguments of Rule are swapped: write Rule('.*', 'int8')",
    ),
    "save, swapped": (
        lambda: vn.save(PARAMS, "model"),
        "path must be a string or a Path, not a dict. Pass the path first: vn.save(path, tree)",
    ),
    "implicit with arguments": (
        lambda: vn.implicit(f, PARAMS),
        "filter_spec holds arrays, but it must be a bool, a predicate, or a pytree of them. Pass "
        "arguments of the function to the result: vn.implicit(f)(params, x)",
    ),
    # One array, axes and paths.
    "quantize of a tree": (
        lambda: quantize(PARAMS, "int8"),
        "quantize takes one array, not a dict.",
    ),
    "quantize of a list": (lambda: quantize(LISTS, "int8"), "quantize takes one array, not a list"),
    "tiled_axes, a size": (
        lambda: quantize(W, "int4", tiled_axes=64),
        "tiled_axes must be {axis: tile size}, such as {0: 64}, not 64",
    ),
    "tiled_axes, a list": (lambda: quantize(W, "int4", tiled_axes=[64]), "{0: 64}, not [64]"),
    "channelwise_axes, an axis": (
        lambda: quantize(W, "int8", channelwise_axes=1),
        "channelwise_axes must be a list of axes, such as [1], not 1",
    ),
    "path_regex": (lambda: Rule(3, "int8"), "path_regex must be a string that is a regex, not 3"),
    "path_regex of an adapter": (lambda: vn.lora.Rule(3, 4), "path_regex must be a string"),
    "where": (
        lambda: vn.trainable(PARAMS, where=3),
        "where must be a regex, a class or a function, not 3",
    ),
    # Keys and adapters.
    "init_tree, a seed": (
        lambda: vn.lora.init_tree(PARAMS, LORA_RULES, key=0),
        "key must be a JAX PRNG key, such as jax.random.key(0), not 0",
    ),
    "LoraArray.init, a seed": (lambda: vn.types.LoraArray.init(W, 2, key=0), "key must be a JAX"),
    "with_dropout, a seed": (lambda: vn.lora.with_dropout(PARAMS, 0), "key must be a JAX"),
    "with_stochastic_rounding, floats": (
        lambda: vn.quant.with_stochastic_rounding(PARAMS, jnp.ones(3)),
        "key must be a JAX PRNG key, such as jax.random.key(0), not an array float32[3]",
    ),
    "LoraArray.init of integers": (
        lambda: vn.types.LoraArray.init(W.astype(int), 2, key=KEY),
        "LoraArray takes a floating weight, not int32",
    ),
    # Folders that are named like files.
    "save to .gguf": (
        save("x.gguf"),
        "Name the folder without .gguf. To write a GGUF file, pass format='gguf'.",
    ),
    "save to .safetensors": (save("x.safetensors"), "Name the folder without .safetensors."),
    # Fields that are not arrays.
    "Permuted": (lambda: vn.types.Permuted(W, LISTS), "Permuted takes an array for order, not [["),
    "Rotated": (lambda: vn.types.Rotated(LISTS), "Rotated takes an array for array, not [["),
    "Scaled": (lambda: vn.types.Scaled(W, LISTS), "Scaled takes an array for factor, not [["),
}

FORMATS = {
    "gptq": "a method of calibration. .*calibrate(model, 'int4', params=params, method='gptq')",
    "awq": "method='awq')",
    "smoothquant": "act_qtype='int8')], params=params, method='smoothquant')",
    "w8a8": "use vn.quant.Rule('.*', 'int8', act_qtype='int8')",
    "w4a16": "did you mean 'int4'?",
    "4bit": "did you mean 'int4'?",
    "8bit": "did you mean 'int8'?",
    "int8_channel": "did you mean 'int8'?",
    "int8_per_channel": "did you mean 'int8'?",
}

untyped = pytest.mark.skipif(ARE_CHECKED, reason="the annotations reject these calls")


@untyped
@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_a_wrong_call_gets_the_right_call(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as error:
        call()
    assert type(error.value) in (TypeError, ValueError)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(("name", "message"), FORMATS.items(), ids=FORMATS)
def test_an_unknown_format_name_suggests_a_format(name, message):
    pattern = re.escape(message).replace(r"\.\*calibrate", ".*calibrate")
    with pytest.raises(ValueError, match=rf"unknown format '{name}'.*{pattern}"):
        vn.quant.get_format(name)
