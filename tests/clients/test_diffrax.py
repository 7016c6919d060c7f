"""Diffrax solves systems with implicit weights as it solves dense ones."""

from functools import cache

import diffrax as dfx
import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import Lora, assert_close, lora, lora_of_int8
from support.policies import only_by_rules

import veneer as vn

pytestmark = pytest.mark.divided


class Weight(Lora):
    """A low-rank update with rules for products from both sides, also for backward passes."""


@vn.register("dot_general")
def _(x: vn.ArrayLike, w: Weight, *, dimension_numbers, **params):
    (contract, (side,)), batch = dimension_numbers
    first, second = (w.a, w.b) if side == 0 else (w.b, w.a)
    dot = vn.implicit(lambda x, w, dims: jax.lax.dot_general(x, w, (dims, batch), **params))
    low = dot(x, first, (contract, (side,)))
    return dot(x, w.w, (contract, (side,))) + w.scale * dot(low, second, ((low.ndim - 1,), (side,)))


def weight(make) -> Weight:
    w = make(jax.random.key(0), (3, 3))
    return Weight(w.w, w.a, w.b, scale=w.scale)


WEIGHTS = arrays.OnDemand(
    {"lora": lambda: weight(lora), "lora of int8": lambda: weight(lora_of_int8)}
)
Y0 = arrays.array([0.5, -1.0, 0.3])

METHODS = {
    "constant": (dfx.Euler(), dfx.ConstantStepSize()),
    "adaptive": (dfx.Heun(), dfx.PIDController(rtol=0.05, atol=0.05)),
}


def solve(y0, w, method="adaptive", adjoint=None):
    """Return the final state of a system of neurons with weights `w`."""
    solver, controller = METHODS[method]
    return dfx.diffeqsolve(
        dfx.ODETerm(lambda t, y, w: jnp.tanh(y @ w) - y),
        solver,
        t0=0.0,
        t1=1.0,
        dt0=0.5,
        y0=y0,
        args=w,
        adjoint=adjoint or dfx.RecursiveCheckpointAdjoint(),
        stepsize_controller=controller,
        max_steps=16,
    ).ys[-1]


def loss(*args, **kwargs):
    return (solve(*args, **kwargs) ** 2).sum()


@cache
def dense(kind: str, method: str = "adaptive"):
    """Return the loss of the dense system, and its gradients by the state and the weights."""
    of = lambda y0, w: loss(y0, w, method)
    return jax.value_and_grad(of, (0, 1))(Y0, vn.materialise(WEIGHTS[kind]))


def strictly(f):
    return vn.implicit(f, on_materialise=only_by_rules)


# Recursive checkpointing is by a custom_vjp, whose author's rule gives a dense gradient of the
# weights; the direct adjoint is by a checkpointed scan, forward mode by a while loop.
ADJOINTS = {
    "checkpointed": dfx.RecursiveCheckpointAdjoint(),
    "direct": dfx.DirectAdjoint(),
    "forward": dfx.ForwardMode(),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_solve_agrees_with_the_dense_system(kind, method):
    w = WEIGHTS[kind]
    value = jax.jit(strictly(lambda y0, w: loss(y0, w, method)))(Y0, w)
    assert_close(value, dense(kind, method)[0])


def test_the_loop_multiplies_weights_by_their_rule():
    report = vn.explain(solve)(Y0, WEIGHTS["lora"])
    ran = {(e.primitive, e.rule is not None) for e in report.events}
    assert ("dot_general", True) in ran
    assert not [e for e in report.events if e.rule is None]


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_gradients_by_state_and_leaves_agree(kind, adjoint):
    w = WEIGHTS[kind]

    def of_leaves(y0, a, b, run):
        return run(lambda y0, w: loss(y0, w, adjoint=ADJOINTS[adjoint]))(
            y0, Weight(w.w, a, b, scale=w.scale)
        )

    by = jax.jacfwd if adjoint == "forward" else jax.grad
    y0_grad, *leaf_grads = by(lambda *x: of_leaves(*x, strictly), (0, 1, 2))(Y0, w.a, w.b)
    _, (dense_y0_grad, dense_w_grad) = dense(kind)
    stands_for = lambda a, b: vn.materialise(Weight(w.w, a, b, scale=w.scale))
    assert_close(y0_grad, dense_y0_grad)
    assert_close(leaf_grads, list(jax.vjp(stands_for, w.a, w.b)[1](dense_w_grad)))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_gradient_of_the_dense_program_agrees(kind):
    value, grads = vn.implicit(jax.value_and_grad(loss, (0, 1)))(Y0, WEIGHTS[kind])
    assert_close((value, grads), dense(kind))


@pytest.mark.parametrize("order", ["implicit of vmap", "vmap of implicit"])
def test_a_batch_of_adaptive_solves_agrees(order):
    # Under vmap the loop runs until the last solve is done, and selects.
    batch, w = jnp.stack([Y0, 3 * Y0]), WEIGHTS["lora of int8"]
    grad = jax.grad(loss)
    if order == "implicit of vmap":
        found = jax.jit(vn.implicit(jax.vmap(grad, (0, None))))(batch, w)
    else:
        found = jax.jit(jax.vmap(strictly(grad), (0, None)))(batch, w)
    expected = jax.vmap(grad, (0, None))(batch, vn.materialise(w))
    assert_close(found, expected)
