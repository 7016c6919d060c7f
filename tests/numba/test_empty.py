"""Arrays without entries.

Some rules get them as operands, but none has to compute them as results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

SHAPES = [((0, 2), (3, 4)), ((2, 3), (0, 4)), ((0,), (3,)), ((2, 0), (0, 3)), ((3,), (0, 2))]


def check(f, *args):
    vn.numba.compare_jax_and_py(f, args)
    vn.numba.compare_numba_and_py(f, args, native=False)


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_kron_agrees_with_jax(a, b):
    check(jnp.kron, np.ones(a, np.float32), np.ones(b, np.float32))


def to_no_entries(x):
    rows = x.reshape(2, -1)
    return {
        "reshaped": [x.reshape(-1), x.reshape(0, 5), rows.T],
        "elementwise": [jnp.tanh(x) + x[:1] * 2, jnp.where(x > 0, x, 1)],
        "cumulative": [jnp.cumsum(rows, 1), lax.cummax(rows, 1)],
        "sorted": [jnp.sort(rows, 1), jnp.argsort(rows), lax.top_k(rows, 0)],
        "moved": [jnp.flip(x), jnp.roll(x, 1), jnp.concatenate([x, x]), jnp.repeat(x, 2, 0)],
        "indexed": [x.at[:, :1].set(3), lax.dynamic_slice(rows, (0, 0), (2, 0)), x[::2]],
        "product": [x @ jnp.ones((x.shape[-1], 3)), jnp.einsum("...i,...j->...ij", x, x)],
        "scan": lax.scan(lambda c, row: (c + 1, row * c), 1.0, rows),
        "window": lax.reduce_window(rows, 0.0, lax.add, (1, 2), (1, 1), "SAME"),
    }


def of_no_entries(x):
    rows = x.reshape(2, -1)
    return {
        "reduced": [rows.sum(1), rows.prod(1), (rows > 0).any(1), (rows > 0).all(1)],
        "largest": [rows.max(1, initial=-1), jax.nn.logsumexp(rows, 1)],
        "padded": [jnp.pad(rows, [(0, 1), (1, 2)]), jnp.concatenate([rows, jnp.ones((2, 3))], 1)],
        "product": [rows @ rows.T, jnp.tensordot(x, x, x.ndim)],
        "norm": jnp.linalg.norm(x),
    }


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("f", [to_no_entries, of_no_entries])
def test_operations_of_empty_arrays_agree_with_jax(f, shape):
    check(f, np.ones(shape, np.float32))


def test_native_code_takes_empty_arrays():
    args = [np.ones((0, 4), np.float32)]
    vn.numba.compare_numba_and_py(of_no_entries, args)
    vn.numba.compare_numba_and_py(jnp.kron, [args[0], np.ones((3, 2), np.float32)])
