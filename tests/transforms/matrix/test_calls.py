"""Eager calls, jit with each option, inside and outside, compilation, abstract evaluation."""

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from support.matrix import PROBES, VALUES, cells, matrix

copied = lambda tree: jax.tree.map(jnp.copy, tree)


def by_jaxpr(m):
    out = jax.eval_shape(m.implicit(m.step), m.c, m.w)
    jaxpr = jax.make_jaxpr(m.implicit(m.step))(m.c, m.w)
    leaves = jaxpr_as_fun(jaxpr)(*jax.tree.leaves((m.c, m.w)))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def abstract(m):
    out = jax.eval_shape(m.implicit(lambda c, w: (m.step(c, w), w)), m.c, m.w)
    return [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(out, **VALUES)]


CELLS = cells(
    "c",
    {
        "eager": lambda m: m.implicit(m.step)(m.c, m.w),
        "implicit twice": lambda m: m.implicit(m.implicit(m.step))(m.c, m.w),
        "jit of implicit": lambda m: jax.jit(m.implicit(m.step))(m.c, m.w),
        "implicit of jit": lambda m: m.implicit(jax.jit(m.step))(m.c, m.w),
        "jit of implicit of jit": lambda m: jax.jit(m.implicit(jax.jit(m.step)))(m.c, m.w),
        "implicit of jit of jit": lambda m: m.implicit(
            jax.jit(lambda c, w: jax.jit(m.step)(jax.jit(m.step)(c, w), w))
        )(m.c, m.w),
        "jit, static argument": lambda m: m.implicit(
            jax.jit(lambda c, w, n: m.step(c, w) * n, static_argnums=2)
        )(m.c, m.w, 2),
        "jit, argument by name": lambda m: m.implicit(lambda c, w: jax.jit(m.step)(c, w=w))(
            m.c, m.w
        ),
        "jit, donated argument": lambda m: m.implicit(jax.jit(m.step, donate_argnums=0))(
            copied(m.c), m.w
        ),
        "jit of implicit, donated argument": lambda m: jax.jit(
            m.implicit(m.step), donate_argnums=0
        )(copied(m.c), m.w),
        "jit, inlined": lambda m: m.implicit(jax.jit(m.step, inline=True))(m.c, m.w),
        "jit, unused operand": lambda m: m.implicit(jax.jit(lambda c, w: c * 2))(m.c, m.w),
        "ahead of time": lambda m: jax.jit(m.implicit(m.step)).lower(m.c, m.w).compile()(m.c, m.w),
        "captured by jit": lambda m: m.implicit(lambda c, w: jax.jit(lambda c: m.step(c, w))(c))(
            m.c, m.w
        ),
        "make_jaxpr": by_jaxpr,
    },
)
CELLS |= cells(
    ("w", "c"),
    {
        "a value that passes": lambda m: m.implicit(lambda c, w: (w, c))(m.c, m.w),
        "a value that passes jit": lambda m: m.implicit(jax.jit(lambda c, w: (w, c)))(m.c, m.w),
    },
)
CELLS |= cells(None, {"eval_shape": abstract})

test_cell = matrix(CELLS, PROBES)
