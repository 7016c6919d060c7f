"""Attention weights with an axis of heads, which a program reshapes, use CPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.quant import quantize

WIDTH, HEADS, SIZE = 256, 4, 64
X = arrays.normal(3, WIDTH)
OF_HEADS = arrays.normal(3, HEADS, SIZE)

INTO = {  # [d, h, k], contracts d
    "reshaped": lambda x, w: x @ w.reshape(WIDTH, -1),
    "reshaped and transposed": lambda x, w: x @ w.reshape(WIDTH, -1).T,
    "einsum": lambda x, w: jnp.einsum("td,dhk->thk", x, w),
    "there and back": lambda x, w: jnp.tensordot(x, w.reshape(WIDTH, -1).reshape(w.shape), 1),
}
FROM = {  # [h, k, d], contracts h and k
    "reshaped": lambda x, w: x @ w.reshape(-1, WIDTH),
    "einsum": lambda x, w: jnp.einsum("thk,hkd->td", OF_HEADS, w),
    "tensordot": lambda x, w: jnp.tensordot(OF_HEADS, w, 2),
}
# The shape of a weight, its channelwise axes, and its tiled axes.
SIDES = {
    "into": (INTO, (WIDTH, HEADS, SIZE), (1, 2), {0: 64}),
    "from": (FROM, (HEADS, SIZE, WIDTH), (0, 2), {1: 32}),
}


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("side", "name"), [(side, name) for side, (programs, *_) in SIDES.items() for name in programs]
)
def test_reshaped_heads_are_multiplied_without_decoding(side, name, qtype):
    programs, shape, channelwise, tiled = SIDES[side]
    w = arrays.normal(*shape, seed=1)
    w = quantize(w, qtype, channelwise_axes=channelwise, tiled_axes=tiled)
    program = programs[name]
    *_, product = vn.explain(program)(X, w).events
    assert product.primitive == "dot_general"
    assert product.how.startswith("CPU kernel")
    assert not vn.explain(program)(X, w).materialised
    found, expected = jax.jit(vn.implicit(program))(X, w), program(X, vn.materialise(w))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-5
