"""Derivatives: of leaves, or of the dense array where a type says so."""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn

TRANSFORMS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "jitted grad": lambda f: jax.jit(jax.grad(f)),
    "grad of a jitted function": lambda f: jax.grad(jax.jit(f)),
    "vjp": lambda f: lambda w: jax.vjp(f, w)[1](jnp.ones(())),
    "hessian": lambda f: jax.hessian(f),
    "jitted hessian": lambda f: jax.jit(jax.hessian(jax.jit(f))),
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
}


@pytest.fixture(params=["argument", "typed"])
def loss(request, x, high):
    """A function of a weight, which is as it was given or has a high type all along."""
    see = high if request.param == "typed" else lambda w: w
    return lambda w: jnp.sum(jnp.sin(jnp.dot(x, see(w))))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_by_the_weight(name, loss, weight, agree_by_leaves):
    transform = TRANSFORMS[name]
    agree_by_leaves(transform(loss)(weight.value), weight.reference(transform, loss))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_by_the_other_operand(name, x, weight, high, agree):
    loss = lambda x, w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    transform = TRANSFORMS[name]
    found = transform(lambda x: loss(x, weight.value))(x)
    agree(found, transform(lambda x: loss(x, weight.dense))(x), atol=1e-4)


def test_by_both(x, weight, high, agree):
    loss = lambda x, w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    mixed = jax.jacrev(jax.grad(loss, 0), 1)
    expected = weight.reference(lambda f: jax.jacrev(f), lambda dense: jax.grad(loss, 0)(x, dense))
    agree(jax.tree.leaves(mixed(x, weight.value)), jax.tree.leaves(expected))


def tangent_of(weight):
    return weight.dense if weight.dense_tangent else weight.value


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_forward(jit, loss, weight, agree):
    t = tangent_of(weight)
    push = lambda f: lambda w: jax.jvp(f, (w,), (t,))
    pushed = jax.jit(push(loss)) if jit else push(loss)
    if weight.dense_tangent:
        expected = jax.jvp(loss, (weight.dense,), (t,))
    else:
        expected = jax.jvp(lambda v: loss(vn.materialise(v)), (weight.value,), (t,))
    agree(pushed(weight.value), expected)


def test_linearized(loss, weight, agree):
    t = tangent_of(weight)
    value, linear = jax.linearize(loss, weight.value)
    agree((value, linear(t)), jax.jvp(loss, (weight.value,), (t,)))


def test_the_gradient_is_of_the_kind_that_the_type_says(loss, weight):
    found = jax.jit(jax.grad(loss))(weight.value)
    expected = jax.Array if weight.dense_tangent else vn.types.LoraArray
    assert isinstance(found, expected)
    assert found.shape == (4, 6)


def test_the_tangent_of_a_typed_result_is_a_tree(weight):
    t = tangent_of(weight)
    out, tangent = jax.jvp(jnp.transpose, (weight.value,), (t,))
    assert type(out) is type(weight.value)
    assert tangent.shape == (6, 4)


def test_a_quantised_array_made_within(x, high, agree):
    """The gradient with respect to what a leaf was computed from: of the scales here."""
    q = vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 6)), "int8")
    of = lambda see: lambda scale: jnp.sum(jnp.sin(jnp.dot(x, see(q.replace(scale=scale)))))
    agree(jax.grad(of(high))(q.scale), jax.grad(of(vn.materialise))(q.scale))


def test_auxiliary_results_are_values(loss, weight):
    _, aux = jax.grad(lambda w: (loss(w), w), has_aux=True)(weight.value)
    assert type(aux) is type(weight.value)


def test_a_part_of_a_value_is_a_tree(x, agree):
    """As equinox.filter_grad takes a quantised array: its scale, without the codes."""
    q = vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 6)), "int8")
    part = vn.quant.QArray.from_packed(q.packed, q.scale, qtype="int8")
    object.__setattr__(part, "packed", None)

    def loss(part):
        whole = q.replace(scale=part.scale)
        return jnp.sum(jnp.sin(jnp.dot(x, whole)))

    dense = lambda scale: jnp.sum(jnp.sin(x @ vn.materialise(q.replace(scale=scale))))
    agree(jax.grad(loss)(part).scale, jax.grad(dense)(q.scale))


def test_the_leaves_of_a_dense_tangent_have_none(x):
    """A gradient that would have to be taken apart into those of codes and scales is refused."""
    from veneer.hijax.high import Unpack, apply
    from veneer.hijax.types import type_of

    q = vn.quant.quantize(jnp.ones((4, 6)), "int8")
    with pytest.raises(NotImplementedError, match=r"unpack\(q8\[4,6\]\) cannot be differentiated"):
        jax.grad(lambda w: apply(Unpack(type_of(q)), w)[1].sum())(q)
