"""`vmap` over implicit arrays, before and after derivatives."""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn


def map_over_weights(f):
    return lambda x, ws: jax.vmap(f, (None, 0))(x, ws)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_vmap_over_stacked_weights_agrees(jit, x, weight, high, agree):
    run = map_over_weights(lambda x, w: jnp.dot(x, high(w)))
    agree((jax.jit(run) if jit else run)(x, weight.stack), run(x, weight.dense_stack))


def test_vmap_over_typed_values_agrees(x, weight, high, agree):
    run = lambda x, ws: jax.vmap(lambda w: jnp.dot(x, w))(jax.vmap(high)(ws))
    agree(jax.jit(run)(x, weight.stack), run(x, weight.dense_stack))


def test_vmap_over_the_other_operand_agrees(x, weight, high, agree):
    run = lambda x, w: jax.vmap(lambda row, w: jnp.dot(row, w), (0, None))(x, high(w))
    agree(jax.jit(run)(x, weight.value), x @ weight.dense)


def test_vmap_along_axis_1_of_the_leaves_agrees(x, agree):
    leaves = [jax.random.normal(jax.random.key(0), (3, *s)) for s in ((4, 6), (4, 2), (2, 6))]
    stack = vn.types.LoraArray(*leaves)
    w = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), stack)
    run = lambda w: jax.vmap(lambda w: jnp.dot(x, w), in_axes=1)(w)
    agree(run(w), jnp.einsum("ij,njk->nik", x, stack.materialise()))


def test_vmap_of_a_symbolic_batch_size_can_be_exported(x, weight, agree):
    (b,) = jax.export.symbolic_shape("b")
    like = lambda leaf: jax.ShapeDtypeStruct((b, *leaf.shape[1:]), leaf.dtype)
    f = jax.jit(jax.vmap(lambda w: jnp.dot(x, w)))
    program = jax.export.export(f)(jax.tree.map(like, weight.stack))
    agree(program.call(weight.stack), x @ weight.dense_stack)


def test_vmap_stacks_implicit_results(weight, agree):
    out = jax.vmap(jnp.transpose)(weight.stack)
    assert type(out) is type(weight.stack)
    agree(out, jnp.swapaxes(weight.dense_stack, 1, 2))


def test_vmap_materializes_values_that_cannot_be_stacked(agree):
    class Normed(vn.ImplicitArray):
        x: jax.Array
        batch_transparent = False

        def materialise(self):
            return self.x / jnp.linalg.norm(self.x)

    x = jnp.arange(6.0).reshape(2, 3)
    of_rows = lambda convert: jax.vmap(lambda row: jnp.exp(convert(row)))
    agree(of_rows(Normed)(x), of_rows(lambda row: row / jnp.linalg.norm(row))(x))


def test_psum_over_a_named_vmap_axis_agrees(x, weight, high, agree):
    run = lambda ws: jax.vmap(lambda w: jax.lax.psum(jnp.dot(x, high(w)), "i"), axis_name="i")(ws)
    agree(run(weight.stack), run(weight.dense_stack))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_gradients_of_vmap_agree(jit, x, weight, high, agree_by_leaves):
    loss = lambda ws: jnp.sum(jnp.sin(map_over_weights(lambda x, w: jnp.dot(x, high(w)))(x, ws)))
    grad = jax.jit(jax.grad(loss)) if jit else jax.grad(jax.jit(loss))
    agree_by_leaves(grad(weight.stack), weight.reference(jax.grad, loss, stacked=True))


def test_vmap_of_gradients_agrees(x, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    transform = lambda f: jax.vmap(jax.grad(f))
    if weight.dense_tangent:
        expected = transform(loss)(weight.dense_stack)
    else:
        expected = transform(lambda v: loss(v.materialise()))(weight.stack)
    agree_by_leaves(transform(loss)(weight.stack), expected)
    agree_by_leaves(jax.jit(transform(loss))(weight.stack), expected)


def test_gradients_of_unmapped_weights_sum_over_the_batch(x, weight, agree_by_leaves):
    loss = lambda product: lambda w: jnp.sum(product(w) ** 2)
    by_rows = loss(lambda w: jax.vmap(lambda row: jnp.dot(row, w))(x))
    expected = weight.reference(jax.grad, loss(lambda w: jnp.dot(x, w)))
    agree_by_leaves(jax.grad(by_rows)(weight.value), expected)
