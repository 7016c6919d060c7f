"""vmap outside (over leaves), inside (over the program), and both."""

import jax
import jax.numpy as jnp
import pytest
from array_types import MAKERS, assert_close

import veneer as vn

X = jnp.linspace(-1.0, 1.0, 18).reshape(3, 6)
XS = jnp.stack([X, X * 2, X * 3])
KEY = jax.random.key(3)

f = lambda x, w: jnp.tanh(x @ w) + w[0]

AXES = {"both": (0, 0), "the weight": (None, 0), "the input": (0, None)}


def operands(name, axes):
    w = MAKERS[name](KEY, (6, 6) if axes[1] is None else (3, 6, 6))
    return (X if axes[0] is None else XS), w


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "transform",
    [
        lambda axes: jax.vmap(vn.implicit(f), axes),
        lambda axes: vn.implicit(jax.vmap(f, axes)),
        lambda axes: jax.jit(jax.vmap(vn.implicit(jax.jit(f)), axes)),
        lambda axes: vn.implicit(jax.vmap(jax.jit(f), axes)),
    ],
    ids=["outside", "inside", "outside, jit", "inside, jit"],
)
def test_vmap(name, axes, transform):
    x, w = operands(name, axes)
    assert_close(transform(axes)(x, w), jax.vmap(f, axes)(x, vn.materialise(w)))


def test_inner_axes_of_the_program():
    w = MAKERS["int4"](KEY)
    g = jax.vmap(lambda column: X @ column, in_axes=1, out_axes=1)
    assert_close(vn.implicit(g)(w), g(vn.materialise(w)))


@pytest.mark.parametrize("name", ["lora", "int8", "nf4"])
def test_nested(name):
    w = MAKERS[name](KEY, (2, 3, 6, 6))
    g = lambda wrap: jax.vmap(jax.vmap(wrap(lambda w: X @ w)))
    assert_close(g(vn.implicit)(w), g(lambda f: f)(vn.materialise(w)))
    h = jax.vmap(jax.vmap(lambda w: X @ w))
    assert_close(vn.implicit(h)(w), h(vn.materialise(w)))


def test_collectives_over_the_axis():
    w = MAKERS["lora"](KEY, (3, 6, 6))
    g = lambda wrap: jax.vmap(wrap(lambda w: jax.lax.psum(X @ w, "i")), axis_name="i")
    assert_close(g(vn.implicit)(w), g(lambda f: f)(vn.materialise(w)))


def test_per_example_gradients():
    w = MAKERS["int8"](KEY)
    loss = lambda x, w: jnp.sin(x @ w).sum()
    ours = vn.implicit(jax.vmap(jax.grad(loss, 1), (0, None)))(X, w)
    assert_close(ours, jax.vmap(jax.grad(loss, 1), (0, None))(X, vn.materialise(w)))
    ours = jax.vmap(jax.grad(vn.implicit(loss)), (0, None))(X, w)
    assert_close(ours, jax.vmap(jax.grad(loss), (0, None))(X, vn.materialise(w)))


def test_from_outside_only_leading_axes_of_packed_codes_may_be_mapped():
    w = MAKERS["int4"](KEY)
    with pytest.raises(ValueError, match=r"leading axes alone|inconsistent sizes"):
        jax.vmap(vn.implicit(lambda w: w + 0), in_axes=1)(w)


def test_a_vmapped_result_is_still_implicit():
    ws = MAKERS["int4"](KEY, (3, 6, 6))
    out = jax.vmap(vn.implicit(lambda w: w.T))(ws)
    assert isinstance(out, vn.quant.QArray)
    assert_close(out, jnp.swapaxes(vn.materialise(ws), 1, 2))
