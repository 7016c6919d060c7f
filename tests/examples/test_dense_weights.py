"""The counts of dense weights, for programs in which they can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from dense_weights import dense_weights
from support import arrays

X = arrays.ones((3, 8))
CODES = [arrays.ones((8, 8), jnp.int8)] * 3


def counted(program, *, weights=CODES):
    jaxpr = jax.make_jaxpr(program)(weights, X)
    return dense_weights(jaxpr, [True] * len(weights) + [False], [(8, 8)])


def one_by_one(codes, x):
    for code in codes:
        x = x @ code.astype(jnp.float32)
    return x


def all_at_first(codes, x):
    dense = [code.astype(jnp.float32) for code in codes]
    for w in dense:
        x = x @ w
    return x


def in_calls(codes, x):
    dot = jax.checkpoint(jax.jit(lambda x, code: x @ (2 * code.astype(jnp.float32))))
    for code in codes:
        x = dot(x, code)
    return x


def test_a_weight_is_alive_until_its_last_use():
    found = counted(one_by_one)
    assert found.dequantized == {"convert_element_type": 3}
    assert (found.alive, found.nbytes) == (1, 8 * 8 * 4)
    assert counted(all_at_first).alive == 3


def test_weights_inside_calls_are_counted():
    found = counted(in_calls)
    assert (found.alive, found.dequantized) == (1, {"convert_element_type": 3, "mul": 3})


def test_only_checkpointed_derivatives_release_dense_weights():
    grad = lambda f: lambda codes, x: jax.grad(lambda x: f(codes, x).sum())(x)
    assert counted(grad(one_by_one)).alive == 3
    found = counted(grad(in_calls))
    # One for the product before, and one for its transpose, except for the first transpose.
    assert found.alive <= 2
    assert found.dequantized["convert_element_type"] >= 5


def test_gradients_are_not_counted_as_weights():
    loss = lambda ws, x: (x @ ws[0]).sum()
    found = counted(jax.grad(loss), weights=[jnp.ones((8, 8))])
    assert (found.alive, sum(found.dequantized.values())) == (0, 0)
    assert found.others.total() > 0


def test_a_loop_raises():
    loop = lambda codes, x: jax.lax.fori_loop(0, 2, lambda i, x: x + 1, x)
    with pytest.raises(NotImplementedError, match=r"scan|while"):
        counted(loop)
