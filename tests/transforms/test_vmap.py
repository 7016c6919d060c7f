"""vmap outside `implicit`, over leaves, and inside, over axes of the dense array.

matrix/test_batching.py tests it together with other transformations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import MAKERS, assert_close

import veneer as vn

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
KEY = arrays.key(3)


def test_vmap_in_a_program_maps_any_axis():
    w = MAKERS["int4"](KEY)
    g = jax.vmap(lambda column: X @ column, in_axes=1, out_axes=1)
    assert_close(vn.implicit(g)(w), g(vn.materialise(w)))


@pytest.mark.parametrize("name", ["lora", "int8", "nf4"])
def test_two_nested_vmaps_agree_with_dense(name):
    w = MAKERS[name](KEY, (2, 3, 6, 6))
    g = lambda wrap: jax.vmap(jax.vmap(wrap(lambda w: X @ w)))
    assert_close(g(vn.implicit)(w), g(lambda f: f)(vn.materialise(w)))
    h = jax.vmap(jax.vmap(lambda w: X @ w))
    assert_close(vn.implicit(h)(w), h(vn.materialise(w)))


def test_per_example_gradients_agree_with_dense():
    w = MAKERS["int8"](KEY)
    loss = lambda x, w: jnp.sin(x @ w).sum()
    ours = vn.implicit(jax.vmap(jax.grad(loss, 1), (0, None)))(X, w)
    assert_close(ours, jax.vmap(jax.grad(loss, 1), (0, None))(X, vn.materialise(w)))
    ours = jax.vmap(jax.grad(vn.implicit(loss)), (0, None))(X, w)
    assert_close(ours, jax.vmap(jax.grad(loss), (0, None))(X, vn.materialise(w)))


def test_outer_vmap_raises_for_inner_axes_of_codes():
    w = MAKERS["int4"](KEY)
    with pytest.raises(ValueError, match=r"leading axes alone|inconsistent sizes"):
        jax.vmap(vn.implicit(lambda w: w + 0), in_axes=1)(w)


def test_results_of_an_outer_vmap_stay_implicit():
    ws = MAKERS["int4"](KEY, (3, 6, 6))
    out = jax.vmap(vn.implicit(lambda w: w.T))(ws)
    assert isinstance(out, vn.quant.QArray)
    assert_close(out, jnp.swapaxes(vn.materialise(ws), 1, 2))
