"""`Permuted`: held to the dense program, dense or quantised inside; its products apply it once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer.types import Permuted

X = jax.random.normal(jax.random.key(1), (5, 16))


def permuted(*shape, axis=-1, quantised=False, seed=0):
    key = jax.random.key(seed)
    w = jax.random.normal(key, shape)
    sizes = [n if i == len(shape) + axis else 1 for i, n in enumerate(shape)]
    order = jax.random.permutation(key, shape[axis]).reshape(sizes)
    if quantised:
        w = vn.quant.quantize(w, "int4", channelwise_axes=[0], tiled_axes={1: 4})
    return Permuted(w, order, axis)


VALUES = {
    "columns": permuted(8, 16),
    "rows": permuted(16, 8, axis=-2),
    "quantised": permuted(8, 16, quantised=True),
    "stacked": permuted(2, 8, 16),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_it_is_held_to_the_dense_program(value):
    axis = value.axis + value.ndim
    split = lambda n: (n // 2, 2)
    heads = [k for i, n in enumerate(value.shape) for k in ((n,) if i == axis else split(n))]
    vn.testing.check_rules(
        Permuted,
        value,
        programs={"heads": lambda w, _: w.reshape(heads)},
    )


PROGRAMS = {
    "x @ w.T": lambda w, x: x @ w.T,
    "w @ x.T": lambda w, x: w @ x.T,
    "w.T is contracted": lambda w, x: x[:, :8] @ w,
    "from the left": lambda w, x: w.T @ x[:, :8].T,
    "einsum": lambda w, x: jnp.einsum("bi,oi->bo", x, w),
    "heads": lambda w, x: jnp.einsum("bi,hdi->bhd", x, w.reshape(2, 4, 16)),
    "half of the rows": lambda w, x: x @ w[:4].T,
    "rows looked up": lambda w, x: w[jnp.array([3, 0, 3])] + x[:3],
    "gradient": jax.grad(lambda w, x: jnp.sum((x @ w.T) ** 2), argnums=1),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("name", ["columns", "quantised"])
def test_a_product_permutes_its_operand_and_is_not_dense(program, name):
    w = VALUES[name]
    report = vn.explain(program)(w, X)
    assert not [row for row in report.materialised if "Permuted" in str(row)]
    y, dense = jax.jit(vn.implicit(program))(w, X), program(vn.materialise(w), X)
    assert (y.shape, y.dtype) == (dense.shape, dense.dtype)
    np.testing.assert_allclose(vn.materialise(y), dense, 1e-4, 1e-4)


def test_matrices_of_a_stack_have_orders_of_their_own():
    key = jax.random.split(jax.random.key(0), 3)
    order = jax.vmap(lambda k: jax.random.permutation(k, 16))(key)[:, None]
    w = Permuted(jax.random.normal(key[0], (3, 8, 16)), order)
    x = jax.random.normal(key[1], (3, 5, 16))
    program = lambda w, x: jnp.einsum("lbi,loi->lbo", x, w)
    dense = program(w.materialise(), x)
    np.testing.assert_allclose(vn.implicit(program)(w, x), dense, 1e-5, 1e-5)

    def scanned(w, x):
        return jax.lax.scan(lambda c, wx: (c, wx[1] @ wx[0].T), 0, (w, x))[1]

    np.testing.assert_allclose(vn.implicit(scanned)(w, x), dense, 1e-5, 1e-5)


REFUSED = {
    "floats": (jnp.ones((1, 16)), -1, TypeError, "of integers, not float32"),
    "short": (jnp.arange(15)[None], -1, ValueError, r"order has shape \(1, 15\)"),
    "rank": (jnp.arange(16), -1, ValueError, r"order has shape \(16,\)"),
    "axis": (jnp.arange(16)[None], 1, ValueError, "axis is negative"),
}


@pytest.mark.parametrize(("order", "axis", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_an_order_that_does_not_fit_is_refused(order, axis, error, message):
    with pytest.raises(error, match=message):
        Permuted(jnp.ones((8, 16)), order, axis)
