"""A small convolutional network for digits of 8 by 8 pixels, in plain JAX.

It does not import veneer. This file is not a script: `qat_digits.py` trains the network.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, dict[str, Any]]

# [height, width, in, out] of the convolutions, [in, out] of the last layer.
SHAPES = {"conv0": (3, 3, 1, 16), "conv1": (3, 3, 16, 32), "out": (4 * 4 * 32, 10)}


def init(key: jax.Array) -> Params:
    """Return random parameters."""
    params = {}
    for name, shape in SHAPES.items():
        key, own = jax.random.split(key)
        kernel = jax.nn.initializers.he_normal()(own, shape)
        params[name] = {"kernel": kernel, "bias": jnp.zeros(shape[-1])}
    return params


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Return logits `[batch, 10]` of the digits in images `[batch, 8, 8]` with values in [0, 1]."""
    x = images[..., None]
    for name, stride in (("conv0", 1), ("conv1", 2)):
        layout = ("NHWC", "HWIO", "NHWC")
        kernel, strides = params[name]["kernel"], (stride, stride)
        x = jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + params[name]["bias"])
    return x.reshape(len(x), -1) @ params["out"]["kernel"] + params["out"]["bias"]
