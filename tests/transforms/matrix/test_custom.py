"""Functions with custom derivatives, checkpoints with policies, custom solvers, callbacks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from support.matrix import Cell, cells, matrix

POLICIES = {
    "everything saved": jax.checkpoint_policies.everything_saveable,
    "nothing saved": jax.checkpoint_policies.nothing_saveable,
    "dots saved": jax.checkpoint_policies.dots_saveable,
    "names saved": jax.checkpoint_policies.save_only_these_names("step"),
}


def by_jvp(m):
    """The step, with a wrong derivative that shows that the rule ran."""

    @jax.custom_jvp
    def function(c, w):
        return m.step(c, w)

    @function.defjvp
    def _(primals, tangents):
        return jax.jvp(m.step, primals, (tangents[0] * 3, tangents[1] * 5))

    return function


def by_jvp_of_zeros(m):
    function = jax.custom_jvp(lambda c, w: m.step(c, w))

    def jvp(primals, tangents):
        scaled = [
            p * 0 if isinstance(t, SymbolicZero) else t * k
            for p, t, k in zip(primals, tangents, (3, 5), strict=True)
        ]
        return jax.jvp(m.step, primals, tuple(scaled))

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def by_vjp(m):
    """A function whose residuals are its operands."""
    function = jax.custom_vjp(lambda c, w: m.step(c, w))

    def bwd(residuals, ct):
        dc, dw = jax.vjp(m.step, *residuals)[1](ct)
        return dc * 3, dw * 5

    function.defvjp(lambda c, w: (m.step(c, w), (c, w)), bwd)
    return function


def by_vjp_with_nondiff(m):
    function = jax.custom_vjp(lambda k, c, w: m.step(c, w) * k, nondiff_argnums=(0,))

    def bwd(k, residuals, ct):
        dc, dw = jax.vjp(m.step, *residuals)[1](ct)
        return dc * k * 3, dw * k * 5

    function.defvjp(lambda k, c, w: (m.step(c, w) * k, (c, w)), bwd)
    return lambda c, w: function(2, c, w)


def by_vjp_of_zeros(m):
    function = jax.custom_vjp(lambda c, w: m.step(c, w))

    def fwd(c, w):
        return m.step(c.value, w.value), (c.value, w.value)

    def bwd(residuals, ct):
        if isinstance(ct, SymbolicZero):
            return None, None
        dc, dw = jax.vjp(m.step, *residuals)[1](ct)
        return dc * 3, dw * 5

    function.defvjp(fwd, bwd, symbolic_zeros=True)
    return function


def by_gradient(m):
    @jax.custom_gradient
    def function(c, w):
        out, pull = jax.vjp(m.step, c, w)
        return out, lambda ct: tuple(k * d for k, d in zip((3, 5), pull(ct), strict=True))

    return function


def by_closure(m):
    """The step closed over the value, converted to a function of the value."""

    def function(c, w):
        converted, constants = jax.closure_convert(lambda c: m.step(c, w), c)
        return converted(c, *constants)

    return function


def checkpointed(m, policy=None):
    return jax.checkpoint(lambda c, w: checkpoint_name(m.step(c, w), "step"), policy=policy)


FUNCTIONS = {
    "custom_jvp": by_jvp,
    "custom_jvp, symbolic zeros": by_jvp_of_zeros,
    "custom_vjp": by_vjp,
    "custom_vjp, nondiff argument": by_vjp_with_nondiff,
    "custom_vjp, symbolic zeros": by_vjp_of_zeros,
    "custom_gradient": by_gradient,
    "closure_convert": by_closure,
    "checkpoint": checkpointed,
}


def called(name, make):
    return cells(
        "c",
        {
            name: lambda m: m.implicit(make(m))(m.c, m.w),
            f"jit of {name}": lambda m: jax.jit(m.implicit(jax.jit(make(m))))(m.c, m.w),
            f"vmap of {name}": lambda m: m.implicit(jax.vmap(make(m), (None, 0)))(m.c, m.ws),
        },
    )


def differentiated(name, make):
    loss = lambda m: lambda c, w: m.loss_of(make(m)(c, w), c)
    inside = lambda m: m.implicit(jax.grad(loss(m), 1))(m.c, m.w)
    outside = lambda m: jax.grad(m.scalar(loss(m)), 1, allow_int=True)(m.c, m.w)
    return {
        **cells("dloss", {f"implicit of grad of {name}": inside}),
        **cells(None, {f"grad of implicit of {name}": outside}),
    }


CELLS: dict[str, Cell] = {}
for _name, _make in FUNCTIONS.items():
    CELLS |= called(_name, _make) | differentiated(_name, _make)
for _name, _policy in POLICIES.items():  # policies only affect derivatives
    CELLS |= differentiated(f"checkpoint, {_name}", partial(checkpointed, policy=_policy))

test_functions = matrix(CELLS)


def solved(m):
    """A diagonal system with its own solver."""

    def function(c, w):
        diagonal = 2 + jnp.tanh(w / c)
        matvec = lambda x: x * diagonal
        solve = lambda matvec, b: b / diagonal
        return lax.custom_linear_solve(matvec, c, solve, solve, symmetric=True)

    return function


NAME = "custom_linear_solve"
test_solve = matrix(called(NAME, solved) | differentiated(NAME, solved))
