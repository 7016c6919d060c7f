"""Derivatives by leaves (`grad` of `implicit`) and by the dense array (`implicit` of `grad`)."""

import jax
import jax.numpy as jnp
import numpy as np
from support.matrix import PROBES, N, Refusal, cells, matrix


def tangents(tree):
    """Return the tree as a tangent of itself."""
    zero = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x if is_float(x) else zero(x), tree)


def second(m):
    """The derivative of a derivative, along the value."""
    return lambda c, w: jax.grad(lambda w: (jax.grad(m.loss, 1)(c, w) * w).sum())(w)


grad = lambda f, argnums=1: jax.grad(f, argnums, allow_int=True)

BY_LEAVES = cells(
    None,
    {
        "grad of implicit": lambda m: grad(m.scalar(m.loss))(m.c, m.w),
        "grad of jit of implicit": lambda m: grad(jax.jit(m.scalar(m.loss)))(m.c, m.w),
        "grad of implicit of jit": lambda m: grad(m.scalar(jax.jit(m.loss)))(m.c, m.w),
        "jit of grad of implicit": lambda m: jax.jit(jax.grad(m.scalar(m.loss), 1))(m.c, m.w),
        "value_and_grad of implicit": lambda m: jax.value_and_grad(
            m.scalar(m.loss), (0, 1), allow_int=True
        )(m.c, m.w),
        "jvp of implicit": lambda m: jax.jvp(
            m.scalar(m.step), (m.c, m.w), (tangents(m.c), tangents(m.w))
        ),
        "linearize of implicit": lambda m: jax.linearize(m.scalar(m.step), m.c, m.w)[1](
            tangents(m.c), tangents(m.w)
        ),
        "vjp of implicit": lambda m: jax.vjp(m.scalar(m.step), m.c, m.w)[1](jnp.ones((N, N))),
        "jacrev of implicit": lambda m: jax.jacrev(m.scalar(m.step), 1, allow_int=True)(m.c, m.w),
        "jacfwd of implicit": lambda m: jax.jacfwd(m.scalar(m.step), 1)(m.c, m.w),
        "hessian of implicit": lambda m: jax.hessian(m.scalar(m.loss), 1)(m.c, m.w),
        "grad of implicit of grad": lambda m: grad(
            m.scalar(lambda c, w: (jax.grad(m.loss, 1)(c, w) * w).sum())
        )(m.c, m.w),
    },
)

BY_THE_DENSE_ARRAY = {
    **cells(
        "dloss",
        {
            "implicit of grad": lambda m: m.implicit(jax.grad(m.loss, 1))(m.c, m.w),
            "implicit of grad, by the dense": lambda m: m.implicit(jax.grad(m.loss))(m.c, m.w),
            "implicit of grad of jit": lambda m: m.implicit(jax.grad(jax.jit(m.loss), 1))(m.c, m.w),
            "implicit of jit of grad": lambda m: m.implicit(jax.jit(jax.grad(m.loss, 1)))(m.c, m.w),
            "jit of implicit of grad": lambda m: jax.jit(m.implicit(jax.grad(m.loss, 1)))(m.c, m.w),
            "implicit of grad of grad": lambda m: m.implicit(second(m))(m.c, m.w),
        },
    ),
    **cells(
        ("loss", ("dloss", "dloss")),
        {
            "implicit of value_and_grad": lambda m: m.implicit(jax.value_and_grad(m.loss, (0, 1)))(
                m.c, m.w
            )
        },
    ),
    **cells(
        ("c", "c"),
        {
            "implicit of jvp": lambda m: m.implicit(lambda c, w: jax.jvp(m.step, (c, w), (c, w)))(
                m.c, m.w
            ),
            "implicit of jvp of jit": lambda m: m.implicit(
                lambda c, w: jax.jvp(jax.jit(m.step), (c, w), (c, w))
            )(m.c, m.w),
            "implicit of linearize": lambda m: m.implicit(
                lambda c, w: (lambda y, push: (y, push(c, w)))(*jax.linearize(m.step, c, w))
            )(m.c, m.w),
            "implicit of vjp": lambda m: m.implicit(
                lambda c, w: (lambda y, pull: pull(y))(*jax.vjp(m.step, c, w))
            )(m.c, m.w),
            "implicit of vjp of jit": lambda m: m.implicit(
                lambda c, w: (lambda y, pull: pull(y))(*jax.vjp(jax.jit(m.step), c, w))
            )(m.c, m.w),
        },
    ),
    **cells(
        "jacobian",
        {
            "implicit of jacfwd": lambda m: m.implicit(jax.jacfwd(m.step, 1))(m.c, m.w),
            "implicit of jacrev": lambda m: m.implicit(jax.jacrev(m.step, 1))(m.c, m.w),
        },
    ),
    **cells(
        "ddloss",
        {"implicit of hessian": lambda m: m.implicit(jax.hessian(m.loss, 1))(m.c, m.w)},
    ),
}

NO_TANGENTS = Refusal(
    "integers have no derivative, and jacfwd, hessian and a jitted grad take no allow_int",
    "requires real-valued|requires real- or complex-valued inputs",
    of_dense_too=True,
)
REFUSED = {
    (f"{name} of implicit", probe): NO_TANGENTS
    for name in ("jacfwd", "hessian", "jit of grad")
    for probe in ("int8", "int4", "nf4", "lora of int8", "doubly scaled")
}

test_by_leaves = matrix(BY_LEAVES, PROBES, refused=REFUSED)
test_by_the_dense_array = matrix(BY_THE_DENSE_ARRAY, PROBES)
