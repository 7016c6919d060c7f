"""Writes into a value of any type give the same result as for the dense array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.every_type import EVERY_TYPE, T, plain, value

import veneer as vn

#: Write a value into a batch of three, or rows into the value, if it has rows.
WRITES = {
    "a slice, clamped": lambda w: lax.dynamic_update_slice(
        three(w), jnp.stack([-w]), (2,) + (1,) * w.ndim
    ),
    "one": lambda w: three(w).at[1].set(-w),
    "one of two, for the other is outside": lambda w: (
        three(w).at[jnp.array([0, 7])].set(jnp.stack([-w, -w]))
    ),
    "a row": lambda w: w.at[1].set(w[0]),
    "some rows": lambda w: lax.dynamic_update_slice(w, w[:1], (1,) + (0,) * (w.ndim - 1)),
    "nothing": lambda w: lax.dynamic_update_slice(w, w[:0], (0,) * w.ndim),
}

#: These types have no dense array. Random programs test their writes.
OTHERS = (T.Masked, T.Named, T.Quantity, T.PRNGKey)


def three(w):
    return jnp.stack([w, w, w])


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_writes_agree_with_the_dense_array(name):
    w = value(name, ())
    if isinstance(w, OTHERS):
        pytest.skip("the type has no dense array")
    for write, program in WRITES.items():
        try:
            expected = program(plain(w))
        except (TypeError, IndexError):  # the value has no rows
            assert plain(w).ndim == 0, write
            continue
        out = jax.tree.map(np.asarray, plain(vn.implicit(program)(w)))
        np.testing.assert_allclose(out, expected, atol=1e-4, err_msg=write)
