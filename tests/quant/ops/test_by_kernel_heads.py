"""Kernels of attention with an axis of heads, which a program reshapes, go by CPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer.quant import quantize

WIDTH, HEADS, SIZE = 256, 4, 64
X = jax.random.normal(jax.random.key(0), (3, WIDTH))
W = jax.random.normal(jax.random.key(1), (WIDTH, HEADS, SIZE))
OUT = W.transpose(1, 2, 0)  # of heads, to the width
OF_HEADS = X.reshape(3, HEADS, SIZE)

INTO = {  # [d, h, k], summed over d
    "reshaped": lambda x, w: x @ w.reshape(WIDTH, -1),
    "reshaped and turned": lambda x, w: x @ w.reshape(WIDTH, -1).T,
    "einsum": lambda x, w: jnp.einsum("td,dhk->thk", x, w),
    "there and back": lambda x, w: jnp.tensordot(x, w.reshape(WIDTH, -1).reshape(w.shape), 1),
}
FROM = {  # [h, k, d], summed over both
    "reshaped": lambda x, w: x @ w.reshape(-1, WIDTH),
    "einsum": lambda x, w: jnp.einsum("thk,hkd->td", OF_HEADS, w),
    "tensordot": lambda x, w: jnp.tensordot(OF_HEADS, w, 2),
}
GIVEN = [(INTO, W, (1, 2), {0: 64}), (FROM, OUT, (0, 2), {1: 32})]
CASES = [
    (program, quantize(w, qtype, channelwise_axes=channelwise, tiled_axes=tiled))
    for programs, w, channelwise, tiled in (
        (INTO, W, (1, 2), {0: 64}),
        (FROM, OUT, (0, 2), {1: 32}),
    )
    for qtype in ("int8", "nf4")
    for program in programs.values()
]


@pytest.mark.parametrize(("program", "w"), CASES)
def test_heads_that_are_reshaped_are_not_decoded(program, w):
    *_, product = vn.explain(program)(X, w).events
    assert product.primitive == "dot_general"
    assert product.how.startswith("CPU kernel")
    assert not vn.explain(program)(X, w).materialised
    found, expected = jax.jit(vn.implicit(program))(X, w), program(X, vn.materialise(w))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-5
