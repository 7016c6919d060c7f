"""Rules with `symbolic_zeros` get one zero or one tangent for each implicit array."""

import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import SymbolicZero

import veneer as vn

GIVEN = {"typed": lambda high: high, "a tree": lambda high: lambda w: w}
both_ways = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])


def is_zero(t):
    return isinstance(t, SymbolicZero)


def product(seen):
    """Return `x @ w` with a rule that appends to `seen` which tangents are zero."""
    f = jax.custom_jvp(jnp.matmul)

    def rule(primals, tangents):
        seen.append([is_zero(t) for t in tangents])
        (x, w), (dx, dw) = primals, tangents
        if is_zero(dw):
            assert (dw.aval.shape, dw.aval.dtype) == (w.shape, w.dtype)
            return jax.jvp(lambda x: x @ w, (x,), (dx,))
        return jax.jvp(lambda w: x @ w, (w,), (dw,))

    f.defjvp(rule, symbolic_zeros=True)
    return f


def product_backward(seen):
    f = jax.custom_vjp(jnp.matmul)

    def forward(x, w):
        seen.append([not x.perturbed, not w.perturbed])
        return x.value @ w.value, (x.value, w.value)

    def backward(kept, ct):
        cotangents = jax.vjp(jnp.matmul, *kept)[1](ct)
        return tuple(None if still else c for still, c in zip(seen[-1], cotangents, strict=True))

    f.defvjp(forward, backward, symbolic_zeros=True)
    return f


@both_ways
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("make", [product, product_backward], ids=["jvp", "vjp"])
def test_a_constant_value_has_a_symbolic_zero(make, given, jit, weight, x, high, agree):
    f, see = make(seen := []), GIVEN[given](high)
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(f(x, see(weight.value)))))
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ weight.dense)))(x)
    agree((jax.jit(grad) if jit else grad)(x), expected)
    assert seen[-1] == [False, True]


@both_ways
@pytest.mark.parametrize("make", [product, product_backward], ids=["jvp", "vjp"])
def test_a_value_with_a_varying_leaf_has_a_full_tangent(make, jit, x, agree_by_leaves):
    """The zero tangents of the other leaves are arrays."""
    f = make(seen := [])
    a, b = jnp.ones((4, 2)), jnp.arange(12.0).reshape(2, 6) / 7
    grad = jax.grad(lambda a: jnp.sum(jnp.sin(f(x, vn.types.LowRank(a, b)))))
    found = (jax.jit(grad) if jit else grad)(a)
    agree_by_leaves(found, jax.grad(lambda a: jnp.sum(jnp.sin(x @ (a @ b))))(a))
    assert seen[-1] == [True, False]
