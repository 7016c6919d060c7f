"""Packed zero points, as in checkpoints: several of them share a byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.quant import QArray

N, K, TILE = 128, 256, 32


def weights(qtype="uint4"):
    """Return a weight `[N, K]` with packed zero points, and one with a byte per zero point."""
    rng, most = np.random.default_rng(0), vn.quant.get_format(qtype).code_range[1]
    dtype = vn.quant.get_format(qtype).code_dtype
    codes = jnp.asarray(rng.integers(0, most + 1, (N, K)), dtype)
    zeros = jnp.asarray(rng.integers(0, most + 1, (N, K // TILE)), dtype)
    scale = jnp.asarray(rng.uniform(0.5, 2, zeros.shape), jnp.float32)
    packed = QArray(zeros, jnp.ones((1, 1)), qtype=qtype)
    return (
        QArray(codes, scale, packed, qtype=qtype),
        QArray(codes, scale, zeros.astype(jnp.uint8), qtype=qtype),
    )


X = arrays.normal(3, K, seed=1)

PROGRAMS = {
    "dense": vn.materialise,
    "columns": lambda q: X @ q.T,
    "rows": lambda q: X[:, :N] @ q,
    "by_xla": lambda q: (X[:, :, None] * q.T).sum(1),
    "rows_looked_up": lambda q: q[jnp.array([5, 2, 1000])],
    "a_row": lambda q: q[7],
    "whole_units": lambda q: q[:64, : 2 * TILE],
    "within_a_tile": lambda q: q[:, 3:9],
    "from_the_second_tile": lambda q: q[:, TILE:],
    "a_column": lambda q: q[:, 70],
    "mapped": lambda q: jax.vmap(lambda row, x: row @ x, (0, None))(q, X[0]),
    "scanned": lambda q: jax.lax.scan(lambda c, row: (c, row @ X[0]), 0, q)[1],
    "transposed": lambda q: q.T[: 2 * TILE],
    "reshaped": lambda q: q.reshape(2, 64, K) @ X[0],
    "joined": lambda q: jnp.concatenate([q, q]) @ X[0],
    "int8_activations": lambda q: vn.quant.quantize(X, "int8", channelwise_axes=[0]) @ q.T,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_packed_zero_points_give_the_same_values(name):
    packed, wide = weights()
    run = jax.jit(vn.implicit(lambda q: vn.materialise(PROGRAMS[name](q))))
    np.testing.assert_array_equal(run(packed), run(wide))


def test_derivatives_by_scales_are_the_same():
    product = vn.implicit(lambda q: ((X @ q.T) ** 2).sum())
    by_scale = lambda q: jax.grad(lambda scale: product(q.replace(scale=scale)))(q.scale)
    packed, wide = map(by_scale, weights())
    np.testing.assert_array_equal(packed, wide)


@pytest.mark.parametrize("qtype", ["uint2", "uint3", "uint4"])
def test_products_use_the_same_kernel(qtype):
    packed, wide = weights(qtype)
    assert packed.nbytes < wide.nbytes
    said = [vn.explain(lambda x, q: x @ q.T)(X, q).events[-1].how for q in (packed, wide)]
    assert said[0].startswith("CPU kernel")
    assert said[0] == said[1]
    compiled = jax.jit(vn.implicit(lambda x, q: x @ q.T)).lower(X, packed).compile().as_text()
    assert not any(f"f32[{a},{b}]" in compiled for a, b in ((N, K), (K, N)))


def test_zero_points_must_be_integers():
    packed, _ = weights()
    floats = vn.quant.quantize(jnp.ones((N, K // TILE)), "nf4")
    with pytest.raises(ValueError, match="zero_point must have an integer format, not nf4"):
        packed.replace(zero_point=floats)
