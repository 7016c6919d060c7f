"""Some functions of libraries on top of JAX compile."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy import stats
from support import arrays

import veneer as vn

KEY = arrays.key(0)
X = np.array([0.3, 0.7, 0.5], np.float32)


def _updated(optimizer):
    def update(x):
        params = {"w": x, "m": jnp.outer(x, x)}
        return optimizer.update(jax.tree.map(jnp.sin, params), optimizer.init(params), params)[0]

    return update


FUNCTIONS = {
    "densities": lambda x: [stats.t.logpdf(x, 3.0), stats.beta.logpdf(x, 2.0, 3.0)],
    "distributions": lambda x: [stats.norm.logcdf(x), stats.poisson.logpmf(2.0, x)],
    "activations": lambda x: [jax.nn.gelu(x), jax.nn.softmax(x), jax.nn.silu(x)],
    "adamw": _updated(optax.adamw(1e-2)),
    "adafactor": _updated(optax.adafactor(1e-2)),
}


def _layers():
    gru = eqx.nn.GRUCell(3, 4, key=KEY)
    norm = eqx.nn.LayerNorm(3)
    attention = eqx.nn.MultiheadAttention(1, 3, key=KEY)
    return lambda x: [gru(x, jnp.ones(4)), norm(x), attention(*[jnp.outer(x, x)] * 3)]


@pytest.mark.parametrize("name", [*FUNCTIONS, "layers"])
def test_functions_of_libraries_compile(name):
    f = _layers() if name == "layers" else FUNCTIONS[name]
    result = vn.numba.compare_numba_and_py(f, [X], native=False, rtol=1e-4)
    for found, want in zip(jax.tree.leaves(result), jax.tree.leaves(jax.jit(f)(X)), strict=True):
        np.testing.assert_allclose(found, want, 1e-3, 1e-6)
