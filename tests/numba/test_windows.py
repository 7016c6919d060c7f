"""Convolutions, pooling, and derivatives of pooling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 4, 6, 5)).astype(np.float32)
KERNEL = RANDOM.normal(size=(6, 4, 3, 2)).astype(np.float32)
IMAGES = RANDOM.normal(size=(2, 7, 6)).astype(np.float32)
ROUNDED = np.round(IMAGES)  # with equal entries
WINDOW, STRIDES, PADDING = (1, 3, 2), (1, 2, 1), [(0, 0), (1, 2), (0, 1)]
conv = lax.conv_general_dilated


def both(f, args, native=False, rtol=1e-4):
    """Check the references and the program. Sums of a few dozen terms may have another order."""
    vn.numba.compare_jax_and_py(f, args, rtol=rtol)
    vn.numba.compare_numba_and_py(f, args, native=native, rtol=rtol)


CONVOLUTIONS = {
    "same": lambda x, w: conv(x, w, (1, 1), "SAME"),
    "dilated": lambda x, w: conv(
        x, w, (2, 1), [(1, 2), (-1, 3)], lhs_dilation=(1, 2), rhs_dilation=(2, 1)
    ),
    "channels last": lambda x, w: conv(
        x.transpose(0, 2, 3, 1),
        w.transpose(2, 3, 1, 0),
        (1, 2),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    "any order": lambda x, w: conv(
        x.transpose(1, 3, 0, 2),
        w.transpose(0, 3, 1, 2),
        (1, 2),
        "VALID",
        dimension_numbers=("CWNH", "OWIH", "WCHN"),
    ),
    "groups": lambda x, w: conv(x, w[:, :2], (1, 1), "SAME", feature_group_count=2),
    "depthwise": lambda x, w: conv(x, w[:4, :1], (1, 1), "SAME", feature_group_count=4),
    "groups of examples": lambda x, w: conv(x, w, (1, 1), "SAME", batch_group_count=2),
    "one axis": lambda x, w: conv(x[..., 0], w[..., 0], (1,), [(3, 3)]),
    "no windows": lambda x, w: conv(x[:, :, :2], w, (1, 1), "VALID"),
    "integers": lambda x, w: conv(
        (x * 9).astype(jnp.int8),
        (w * 9).astype(jnp.int8),
        (1, 1),
        "SAME",
        preferred_element_type=jnp.int32,
    ),
}


@pytest.mark.parametrize("f", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_agree_with_jax(f):
    both(f, [X, KERNEL])


def test_a_convolution_of_bfloat16_agrees_with_jax():
    arrays = [jnp.asarray(a, "bfloat16") for a in (X, KERNEL)]
    both(CONVOLUTIONS["same"], arrays, rtol=2e-2)


def test_gradients_of_convolutions_agree_with_jax():
    def f(x, w):
        loss = lambda f: lambda x, w: (f(x, w) ** 2).sum()
        return [jax.grad(loss(CONVOLUTIONS[name]), (0, 1))(x, w) for name in ("dilated", "groups")]

    both(f, [X, KERNEL])


def pools(x, zero=0.0, least=-np.inf, most=np.inf):
    kinds = [(zero, lax.add), (least, lax.max), (most, lax.min)]
    options = [
        {"padding": "VALID"},
        {"padding": PADDING, "base_dilation": (1, 2, 1), "window_dilation": (1, 1, 2)},
    ]
    return [
        lax.reduce_window(x, start, function, WINDOW, STRIDES, **own)
        for start, function in kinds
        for own in options
    ]


def test_pooling_agrees_with_jax():
    both(pools, [IMAGES])


def test_pooling_of_other_dtypes_agrees_with_jax():
    integers = [np.int8(n) for n in (0, -128, 127)]
    both(lambda x: pools((x * 50).astype(jnp.int8), *integers), [IMAGES])
    both(lambda x: pools(x.astype(jnp.bfloat16)), [IMAGES], rtol=1e-2)
    both(
        lambda x: lax.reduce_window(x > 0, False, lax.bitwise_or, WINDOW, STRIDES, "SAME"), [IMAGES]
    )


def by_a_function(x):
    product = lambda a, b: lax.max(a, b) * lax.min(a, b)
    return lax.reduce_window(x, 2.0, product, WINDOW, STRIDES, PADDING)


def test_reductions_by_a_function_skip_padding():
    both(by_a_function, [IMAGES])


def greatest(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, WINDOW, STRIDES, PADDING)


def smallest(x):
    return lax.reduce_window(x, jnp.inf, lax.min, WINDOW, STRIDES, PADDING)


def pooled_gradients(x):
    return [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (greatest, smallest)]


def tangents(x, t):
    return [jax.jvp(f, (x,), (t,)) for f in (greatest, smallest)]


def test_derivatives_of_pooling_agree_with_jax():
    both(pooled_gradients, [ROUNDED])
    both(tangents, [IMAGES, ROUNDED])


def test_native_code_agrees_with_the_references():
    def f(x, w, images, rounded):
        return {
            "convolutions": [CONVOLUTIONS[name](x, w) for name in ("dilated", "depthwise")],
            "pools": pools(images)[1::2],
            "function": by_a_function(images),
            "gradients": pooled_gradients(rounded),
            "tangents": tangents(images, rounded),
        }

    vn.numba.compare_numba_and_py(f, [X, KERNEL, IMAGES, ROUNDED], rtol=1e-4)
