"""vmap over implicit arrays, in any order with derivatives."""

import jax
import jax.numpy as jnp
import pytest

import veneer as vn


def stacked(f):
    return lambda x, ws: jax.vmap(f, (None, 0))(x, ws)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_over_weights(jit, x, weight, high, agree):
    run = stacked(lambda x, w: jnp.dot(x, high(w)))
    agree((jax.jit(run) if jit else run)(x, weight.stack), run(x, weight.dense_stack))


def test_over_values_of_high_types(x, weight, high, agree):
    run = lambda x, ws: jax.vmap(lambda w: jnp.dot(x, w))(jax.vmap(high)(ws))
    agree(jax.jit(run)(x, weight.stack), run(x, weight.dense_stack))


def test_over_the_other_operand(x, weight, high, agree):
    run = lambda x, w: jax.vmap(lambda row, w: jnp.dot(row, w), (0, None))(x, high(w))
    agree(jax.jit(run)(x, weight.value), x @ weight.dense)


def test_along_another_axis_of_the_leaves(x, agree):
    leaves = [jax.random.normal(jax.random.key(0), (3, *s)) for s in ((4, 6), (4, 2), (2, 6))]
    stack = vn.types.LoraArray(*leaves)
    w = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), stack)
    run = lambda w: jax.vmap(lambda w: jnp.dot(x, w), in_axes=1)(w)
    agree(run(w), jnp.einsum("ij,njk->nik", x, stack.materialise()))


def test_a_batch_of_a_symbolic_size(x, weight, agree):
    (b,) = jax.export.symbolic_shape("b")
    like = lambda leaf: jax.ShapeDtypeStruct((b, *leaf.shape[1:]), leaf.dtype)
    f = jax.jit(jax.vmap(lambda w: jnp.dot(x, w)))
    program = jax.export.export(f)(jax.tree.map(like, weight.stack))
    agree(program.call(weight.stack), x @ weight.dense_stack)


def test_implicit_results_are_stacks(weight, agree):
    out = jax.vmap(jnp.transpose)(weight.stack)
    assert type(out) is type(weight.stack)
    agree(out, jnp.swapaxes(weight.dense_stack, 1, 2))


def test_a_value_that_is_no_stack_of_values_is_dense(agree):
    class Normed(vn.ImplicitArray):
        x: jax.Array
        batch_transparent = False

        def materialise(self):
            return self.x / jnp.linalg.norm(self.x)

    x = jnp.arange(6.0).reshape(2, 3)
    of_rows = lambda see: jax.vmap(lambda row: jnp.exp(see(row)))
    agree(of_rows(Normed)(x), of_rows(lambda row: row / jnp.linalg.norm(row))(x))


def test_named_axes(x, weight, high, agree):
    run = lambda ws: jax.vmap(lambda w: jax.lax.psum(jnp.dot(x, high(w)), "i"), axis_name="i")(ws)
    agree(run(weight.stack), run(weight.dense_stack))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_gradient_of_the_mapped(jit, x, weight, high, agree_by_leaves):
    loss = lambda ws: jnp.sum(jnp.sin(stacked(lambda x, w: jnp.dot(x, high(w)))(x, ws)))
    grad = jax.jit(jax.grad(loss)) if jit else jax.grad(jax.jit(loss))
    agree_by_leaves(grad(weight.stack), weight.reference(jax.grad, loss, stacked=True))


def test_gradients_mapped(x, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(jnp.dot(x, high(w))))
    transform = lambda f: jax.vmap(jax.grad(f))
    if weight.dense_tangent:
        expected = transform(loss)(weight.dense_stack)
    else:
        expected = transform(lambda v: loss(v.materialise()))(weight.stack)
    agree_by_leaves(transform(loss)(weight.stack), expected)
    agree_by_leaves(jax.jit(transform(loss))(weight.stack), expected)


def test_a_derivative_by_what_is_not_mapped_sums_over_the_axis(x, weight, agree_by_leaves):
    loss = lambda product: lambda w: jnp.sum(product(w) ** 2)
    by_rows = loss(lambda w: jax.vmap(lambda row: jnp.dot(row, w))(x))
    expected = weight.reference(jax.grad, loss(lambda w: jnp.dot(x, w)))
    agree_by_leaves(jax.grad(by_rows)(weight.value), expected)
