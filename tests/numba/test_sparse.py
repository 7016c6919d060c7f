"""Compiled products of `jax.experimental.sparse`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import veneer as vn

RANDOM = np.random.default_rng(0)
SPARSE = RANDOM.normal(size=(2, 5, 4)).astype(np.float32) * (RANDOM.random((2, 5, 4)) < 0.4)
X = RANDOM.normal(size=(2, 4, 3)).astype(np.float32)


def bcoo(data, indices, *shape):
    return sparse.BCOO((data, indices), shape=shape)


PRODUCTS = {
    "matrix by vector": lambda d, i, x: bcoo(d, i, 5, 4) @ x[0, :, 0],
    "matrix by matrix": lambda d, i, x: bcoo(d, i, 5, 4) @ x[0],
    "dense by sparse": lambda d, i, x: jnp.resize(x, (3, 5)) @ bcoo(d, i, 5, 4),
    "dense": lambda d, i, x: bcoo(d, i, 5, 4).todense(),
    "sum": lambda d, i, x: bcoo(d, i, 5, 4).sum(1).todense(),
    "gradient": lambda d, i, x: jax.grad(lambda x: jnp.sum(jnp.sin(bcoo(d, i, 5, 4) @ x)))(x[0]),
}


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_sparse_matrix_agree_with_jax(name, padded, native):
    m = sparse.BCOO.fromdense(SPARSE[0], nse=18 if padded else None)
    args = [np.asarray(m.data), np.asarray(m.indices), X]
    vn.numba.compare_jax_and_py(PRODUCTS[name], args, rtol=1e-5, atol=1e-6)
    vn.numba.compare_numba_and_py(PRODUCTS[name], args, rtol=1e-5, atol=1e-6, native=native)


def test_products_of_a_sparse_batch_agree_with_jax():
    m = sparse.BCOO.fromdense(SPARSE, n_batch=1)
    numbers = (((2,), (1,)), ((0,), (0,)))
    f = lambda d, i, x: sparse.bcoo_dot_general(bcoo(d, i, 2, 5, 4), x, dimension_numbers=numbers)
    args = [np.asarray(m.data), np.asarray(m.indices), X]
    vn.numba.compare_jax_and_py(f, args, rtol=1e-5, atol=1e-6)
    vn.numba.compare_numba_and_py(f, args, rtol=1e-5, atol=1e-6, native=True)
    np.testing.assert_allclose(vn.numba.compile(f, *args)(*args), SPARSE @ X, rtol=1e-5, atol=1e-6)
