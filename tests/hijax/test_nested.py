"""LoRA adapters of quantized weights. The quantized part has a dense gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import veneer as vn


@pytest.fixture
def weight():
    q = vn.quant.quantize(
        jax.random.normal(jax.random.key(0), (4, 6)), "int8", channelwise_axes=(1,)
    )
    keys = jax.random.split(jax.random.key(1))
    return vn.types.LoraArray(
        q, jax.random.normal(keys[0], (4, 2)), jax.random.normal(keys[1], (2, 6)), scale=0.5
    )


@pytest.fixture
def dense(weight):
    """Return the same adapter with the quantized weight materialized."""
    return replace(weight, w=vn.materialise(weight.w))


def product(x, w, high):
    return jnp.dot(x, high(w))


def scanned(x, w, high):
    return lax.scan(lambda c, row: (c, jnp.dot(row, high(w))), 0.0, x)[1]


def carried(x, w, high):
    return jnp.dot(x, lax.scan(lambda c, _: (high(c), None), w, None, length=2)[0])


def branched(x, w, high):
    return jnp.dot(x, lax.cond(x[0, 0] > -9, lambda w: w, high, w))


def mapped(x, w, high):
    return jax.vmap(lambda row: jnp.dot(row, high(w)))(x)


def checkpointed(x, w, high):
    return jax.checkpoint(lambda w: jnp.dot(x, high(w)))(w)


PROGRAMS = [product, scanned, carried, branched, mapped, checkpointed]
TRANSFORMS = {
    "grad": jax.grad,
    "jitted grad": lambda f: jax.jit(jax.grad(f)),
    "grad of a jitted function": lambda f: jax.grad(jax.jit(f)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_of_nested_arrays_agree(program, name, x, weight, dense, high, agree_by_leaves):
    transform = TRANSFORMS[name]
    loss = lambda convert: lambda w: jnp.sum(jnp.sin(program(x, convert(w), high)))
    actual = transform(loss(lambda w: w))(weight)
    assert type(actual) is vn.types.LoraArray
    agree_by_leaves(actual, jax.grad(loss(vn.materialise))(dense))


@pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.jit(jax.hessian(jax.jit(f)))])
def test_second_derivatives_of_nested_arrays_agree(
    transform, x, weight, dense, high, agree_by_leaves
):
    loss = lambda convert: lambda w: jnp.sum(jnp.sin(product(x, w, convert)))
    agree_by_leaves(transform(loss(high))(weight), jax.hessian(loss(vn.materialise))(dense))


@pytest.mark.parametrize("program", [product, carried, branched])
def test_products_of_nested_arrays_agree(program, x, weight, agree):
    run = lambda x, w: program(x, w, lambda w: jnp.swapaxes(jnp.swapaxes(w, -1, -2), -1, -2))
    agree(jax.jit(run)(x, weight), x @ vn.materialise(weight))


def test_jaxprs_show_both_types(x, weight):
    text = str(jax.make_jaxpr(jnp.dot)(x, weight))
    assert "q8[4,6] = pack" in text
    assert "lora[4,6] = pack" in text


def test_gradients_of_stacked_nested_arrays_agree(x, weight, high, agree_by_leaves):
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), weight)
    dense = replace(stack, w=vn.materialise(stack.w))
    products = lambda convert: jax.vmap(lambda w: jnp.dot(x, convert(w)))
    loss = lambda convert: lambda ws: jnp.sum(jnp.sin(products(convert)(ws)))
    actual = jax.jit(jax.grad(loss(high)))(stack)
    agree_by_leaves(actual, jax.grad(loss(vn.materialise))(dense))


def test_gradients_of_the_adapter_alone_agree(x, weight, dense, high, agree_by_leaves):
    """Differentiating only `a` and `b` avoids the dense gradient of the quantized weight."""
    loss = lambda convert: lambda w: jnp.sum(jnp.sin(jnp.dot(x, convert(w))))
    in_adapter = lambda f, w: lambda a, b: f(replace(w, a=a, b=b))
    gradients = lambda f, w: jax.jit(jax.grad(in_adapter(f, w), (0, 1)))(w.a, w.b)
    agree_by_leaves(gradients(loss(high), weight), gradients(loss(vn.materialise), dense))
