"""Errors of JAX and optax for implicit arrays outside `implicit` have a note with the remedy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from support import arrays
from support.annotations import ARE_CHECKED

import veneer as vn

pytestmark = pytest.mark.skipif(ARE_CHECKED, reason="wrappers stand between JAX and flatten")

W = arrays.normal(3, 8, 4)
X = arrays.ones((2, 8))


def loss(params, x):
    return vn.implicit(lambda p, x: jnp.sum(x @ p["w"]))(params, x)


def quantized():
    return {"w": vn.quant.quantize(W[0], "int8", channelwise_axes=[1])}


def notes_of(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value), "\n".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "transformation", ["grad", "value_and_grad", "jacrev", "jacfwd", "hessian"]
)
def test_gradients_of_quantized_weights_get_a_note(transformation, jit):
    f = jit(getattr(jax, transformation)(loss))
    text, notes = notes_of(TypeError, lambda: f(quantized(), X))
    assert "got int8" in text
    assert "QArray(q8[8,4]" in notes
    assert "vn.implicit(jax.grad(f))" in notes
    assert "vn.lora.split" in notes


def test_gradients_of_quantized_adapters_get_a_note():
    params = {"w": vn.types.LoraArray(quantized()["w"], jnp.ones((8, 2)), jnp.ones((2, 4)))}
    _, notes = notes_of(TypeError, lambda: jax.grad(loss)(params, X))
    assert "vn.lora.split" in notes


def test_gradients_that_jax_takes_have_no_error():
    q = quantized()
    jax.grad(loss, argnums=1)(q, X)
    jax.jacfwd(lambda x: q["w"])(jnp.ones(()))  # a result, not an argument
    gradient = jax.grad(loss, allow_int=True)(q, X)
    assert gradient["w"].scale.shape == (1, 4)
    dense = vn.implicit(jax.grad(lambda p, x: jnp.sum(x @ p["w"])))(q, X)
    assert dense["w"].shape == (8, 4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, vn.implicit], ids=["eager", "jit", "in"])
def test_optax_rejects_dense_updates_of_quantized_weights(wrap):
    params = quantized()
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    gradient = {"w": jnp.ones((8, 4))}

    @wrap
    def step(params, state, gradient):
        updates, _ = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates)

    text, _ = notes_of(TypeError, lambda: step(params, state, gradient))
    assert text.startswith("optax.apply_updates: quantized weights cannot be updated")
    assert "vn.tree.partition" in text


HOLD_CODES = {
    "QArray": lambda q: q,
    "Scaled": lambda q: vn.types.Scaled(q, jnp.ones((1, 4))),
    "LoraArray": lambda q: vn.types.LoraArray(q, jnp.ones((8, 2)), jnp.ones((2, 4))),
}


@pytest.mark.parametrize("apply", [optax.apply_updates, eqx.apply_updates], ids=["optax", "eqx"])
@pytest.mark.parametrize("wrap", [lambda f: f, vn.implicit], ids=["outside", "implicit"])
@pytest.mark.parametrize("make", HOLD_CODES.values(), ids=HOLD_CODES)
def test_dense_updates_of_quantized_weights_raise(make, wrap, apply):
    params = {"w": make(quantized()["w"])}
    with pytest.raises(TypeError, match=r"apply_updates: quantized weights cannot be updated"):
        wrap(apply)(params, {"w": jnp.ones((8, 4))})


@pytest.mark.parametrize("apply", [optax.apply_updates, eqx.apply_updates], ids=["optax", "eqx"])
def test_a_quantized_update_of_dense_weights_is_applied(apply):
    updated = vn.implicit(apply)({"w": W[0]}, quantized())
    assert jnp.allclose(updated["w"], W[0] + vn.materialise(quantized()["w"]))


def test_optax_updates_float_leaves():
    params = {"w": vn.types.LoraArray(jnp.ones((8, 4)), jnp.ones((8, 2)), jnp.ones((2, 4)))}
    updated = optax.apply_updates(params, jax.tree.map(jnp.ones_like, params))
    assert (updated["w"].a == 2).all()
    with pytest.raises(ValueError, match="pytree structure"):  # a leaf is no implicit array
        optax.apply_updates({"b": [1.0], **quantized()}, {"b": 1.0, "w": jnp.ones((8, 4))})


class Half(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return 0.5 * self.x


class Unshown(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return self.x * 1.0

    def __repr__(self):
        raise ZeroDivisionError


def test_other_update_errors_are_unchanged():
    assert optax.apply_updates(Half(2.0), Half(1.0)).x == 3
    with pytest.raises(ValueError, match="pytree structure error: different types"):
        optax.apply_updates(vn.types.Diagonal(jnp.ones(3)), jnp.ones((3, 3)))


def test_a_loop_may_have_arrays_without_leaves():
    params = {"w": vn.quant.quantize(W, "int8", channelwise_axes=[0, 2]), "b": jnp.zeros((3, 4))}
    parts = vn.tree.partition(params, vn.trainable(params))
    jax.lax.scan(lambda c, layer: (c, None), 0, parts)
    jax.vmap(lambda parts: parts[0]["b"])(parts)


@pytest.mark.parametrize(
    "program",
    [
        lambda q: jax.grad(lambda d: d.sum(), holomorphic=True)(vn.types.Diagonal(jnp.ones(3))),
        lambda q: jax.lax.scan(lambda c, w: (c, None), 0, q, length=5),
        lambda q: jax.vmap(lambda w, x: x)(q, jnp.ones(2)),
        lambda q: jax.lax.scan(lambda c, _: ((*c, 1), None), (q,), None, length=2),
        lambda q: jax.grad(jnp.sum)(Unshown(jnp.arange(3))),
    ],
    ids=["holomorphic", "length", "other argument", "carry of other length", "repr"],
)
def test_errors_with_other_causes_have_no_note(program):
    stacked = vn.quant.quantize(W, "int8", channelwise_axes=[0, 2])
    _, notes = notes_of((TypeError, ValueError), lambda: program(stacked))
    assert "vn." not in notes


@pytest.mark.parametrize(
    ("module", "name"),
    [("jax._src.api", "value_and_grad_f"), ("jax._src.tree_util", "_prefix_error")],
)
def test_a_renamed_function_of_jax_only_loses_its_note(module, name):
    namespace = {"__name__": module}
    exec(f"import jax\ndef {name}(x):\n    return jax.tree_util.tree_leaves(x)", namespace)
    assert len(namespace[name](quantized())) == 2


def shared_scale():
    """Return stacked weights whose scale has no stacked axis."""
    return vn.quant.quantize(W, "int8", channelwise_axes=[2])


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda q: jax.vmap(lambda w: X @ w)(q), "inconsistent sizes"),
        (lambda q: jax.jit(jax.vmap(lambda w: X @ w))(q), "inconsistent sizes"),
        (lambda q: jax.lax.scan(lambda c, w: (c, X @ w), 0, q), "different leading axis sizes"),
        (lambda q: jax.lax.map(lambda w: X @ w, q), "different leading axis sizes"),
    ],
    ids=["vmap", "jit", "scan", "map"],
)
def test_mapping_leaves_of_different_sizes_gets_a_note(run, text):
    message, notes = notes_of(ValueError, lambda: run(shared_scale()))
    assert text in message
    assert "QArray(q8[3,8,4]" in notes
    assert "Move the transformation inside vn.implicit" in " ".join(notes.split())
    assert vn.implicit(run)(shared_scale()) is not None


@pytest.mark.parametrize(
    "loop",
    [
        lambda q: jax.lax.scan(lambda c, _: (c * 0.5, None), q, None, length=3),
        lambda q: jax.lax.fori_loop(0, 3, lambda i, c: c * 0.5, q),
        lambda q: jax.lax.while_loop(lambda c: c[0, 0] > 1, lambda c: c * 0.5, q),
    ],
    ids=["scan", "fori_loop", "while_loop"],
)
def test_a_materialized_carry_gets_a_note(loop):
    text, notes = notes_of(TypeError, lambda: loop(quantized()["w"]))
    assert "pytree structure" in text
    assert "Move the loop inside vn.implicit" in notes
    vn.implicit(loop)(quantized()["w"])


def test_loops_over_leaves_of_one_size_have_no_error():
    stacked = vn.quant.quantize(W, "int8", channelwise_axes=[0, 2])
    carried = quantized()["w"]
    _, y = jax.lax.scan(lambda c, w: (c, X @ w), carried, stacked)
    assert y.shape == (3, 2, 4)
    assert jax.vmap(lambda w: X @ w)(stacked).shape == (3, 2, 4)
    with pytest.raises(ValueError, match="different leading axis sizes"):  # an error of its caller
        jax.lax.scan(lambda c, w: (c, None), 0, (stacked, jnp.ones(2)))
