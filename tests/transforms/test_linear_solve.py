"""Implicit operators and right-hand sides of custom_linear_solve and of solvers built on it."""

import jax
import jax.numpy as jnp
import pytest
from support.array_types import MAKERS, Lora, assert_close
from support.policies import only_by_rules
from support.probes import Quantity, unit

import veneer as vn

N = 6


def matrix(kind):
    """An implicit matrix not far from the identity, so that all solvers converge."""
    if kind == "lora":
        a, b = jax.random.normal(jax.random.key(0), (2, N, 2)) / 5
        return Lora(jnp.eye(N), a, b.T, scale=0.5)
    dense = jnp.eye(N) + jax.random.normal(jax.random.key(0), (N, N)) / 10
    qtype, tile = {"int8": ("int8", N), "int4": ("int4", 3)}[kind]
    return vn.quant.quantize(dense, qtype, channelwise_axes=[1], tiled_axes={0: tile})


def solve(w, b):
    """Gradients by the implicit function theorem; solved by a fixed number of steps."""

    def richardson(matvec, b):
        return jax.lax.fori_loop(0, 60, lambda i, x: x + 0.6 * (b - matvec(x)), jnp.zeros_like(b))

    return jax.lax.custom_linear_solve(lambda x: x @ w, b, richardson, richardson)


def cg(w, b):
    matvec = lambda x: (x @ w) @ w.T
    return jax.scipy.sparse.linalg.cg(matvec, b, tol=1e-7)[0]


def gmres(w, b):
    return jax.scipy.sparse.linalg.gmres(lambda x: x @ w, b, tol=1e-7)[0]


def bicgstab(w, b):
    return jax.scipy.sparse.linalg.bicgstab(lambda x: x @ w, b, tol=1e-7)[0]


def root(w, b):
    """The root of x w + tanh(x) / 4 - b, by a fixed number of steps."""
    f = lambda x: x @ w + jnp.tanh(x) / 4 - b
    steps = lambda f, x: jax.lax.fori_loop(0, 30, lambda i, x: x - 0.6 * f(x), x)
    tangent = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
    return jax.lax.custom_root(f, jnp.zeros_like(b), steps, tangent)


SOLVERS = {f.__name__: f for f in (solve, cg, gmres, bicgstab, root)}
KINDS = ["lora", "int8", "int4"]


@pytest.fixture
def b():
    return jax.random.normal(jax.random.key(1), (N,))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("kind", KINDS)
def test_solutions_agree_with_the_dense_program(kind, solver, b):
    w = matrix(kind)
    expected = jax.jit(solver)(vn.materialise(w), b)
    assert_close(jax.jit(vn.implicit(solver))(w, b), expected, 1e-4)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_gradients_inside_implicit_agree_with_dense(solver, b):
    w = matrix("lora")
    loss = lambda w, b: jnp.sum(solver(w, b) ** 2)
    expected = jax.jit(jax.grad(loss, (0, 1)))(vn.materialise(w), b)
    assert_close(jax.jit(vn.implicit(jax.grad(loss, (0, 1))))(w, b), expected, 1e-3)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_gradients_of_leaves_agree_with_dense(solver, b):
    w = matrix("lora")
    loss = lambda w, b: jnp.sum(solver(w, b) ** 2)
    of_leaves = jax.jit(jax.grad(lambda w, b: loss(w.materialise(), b), (0, 1)))(w, b)
    grads = jax.jit(jax.grad(vn.implicit(loss), (0, 1)))(w, b)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(of_leaves), strict=True):
        assert_close(one, other, 1e-3)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_solves_do_not_materialize_the_operator(kind, solver, b):
    jax.jit(vn.implicit(solver, on_materialise=only_by_rules)).lower(matrix(kind), b)


@pytest.mark.parametrize("solver", [solve, root])
@pytest.mark.parametrize("kind", KINDS)
def test_jvp_agrees_with_dense(kind, solver, b):
    w = matrix(kind)
    expected = jax.jvp(lambda b: solver(vn.materialise(w), b), (b,), (b + 1,))
    assert_close(jax.jvp(lambda b: vn.implicit(solver)(w, b), (b,), (b + 1,)), expected, 1e-4)
    inside = vn.implicit(lambda w, b: jax.jvp(lambda b: solver(w, b), (b,), (b + 1,)))
    assert_close(inside(w, b), expected, 1e-4)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_vmap_over_right_hand_sides(kind, solver):
    w, bs = matrix(kind), jax.random.normal(jax.random.key(1), (3, N))
    expected = jax.jit(jax.vmap(solver, (None, 0)))(vn.materialise(w), bs)
    assert_close(jax.jit(jax.vmap(vn.implicit(solver), (None, 0)))(w, bs), expected, 1e-4)
    assert_close(jax.jit(vn.implicit(jax.vmap(solver, (None, 0))))(w, bs), expected, 1e-4)


@pytest.mark.parametrize("solver", [solve, root])
def test_vmap_over_operators_agrees_with_dense(solver, b):
    ws = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), matrix("lora"))
    expected = jax.vmap(solver, (0, None))(vn.materialise(ws), b)
    assert_close(jax.vmap(vn.implicit(solver), (0, None))(ws, b), expected, 1e-4)
    assert_close(vn.implicit(jax.vmap(solver, (0, None)))(ws, b), expected, 1e-4)


def test_a_materialized_right_hand_side_is_reported():
    b = MAKERS["lora"](jax.random.key(1), (N, 1))
    a = jnp.eye(N) * 2
    f = lambda a, b: jax.lax.custom_linear_solve(lambda x: a @ x, b, lambda mv, b: b / 2)
    assert_close(vn.implicit(f)(a, b), vn.materialise(b) / 2)
    (event,) = vn.explain(f)(a, b).materialised
    assert event.primitive == "custom_linear_solve"


def test_auxiliary_results_of_a_solver_are_kept(b):
    w = matrix("int4")

    def f(w, b):
        solve = lambda matvec, b: (b + (b - matvec(b)), {"w": w, "rest": matvec(b)})
        return jax.lax.custom_linear_solve(lambda x: x @ w, b, solve, has_aux=True)

    x, aux = vn.implicit(f)(w, b)
    assert isinstance(aux["w"], vn.quant.QArray)
    assert_close((x, aux), f(vn.materialise(w), b))


# Labels: a quantity with a unit.


def scale(a, b):
    """Solves a x = b, elementwise."""
    solve = lambda matvec, b: b / a
    return jax.lax.custom_linear_solve(lambda x: x * a, b, solve, solve, symmetric=True)


@pytest.fixture
def area():
    return Quantity(jnp.array([2.0, 4.0]), unit(m=1)), Quantity(jnp.array([6.0, 20.0]), unit(m=3))


def test_the_solution_has_its_own_metadata(area):
    for f in (vn.implicit(scale), jax.jit(vn.implicit(scale))):
        x = f(*area)
        assert x.unit == unit(m=2)
        assert_close(x.x, jnp.array([3.0, 5.0]))


def test_derivatives_of_a_solution_with_metadata(area):
    a, b = area
    out, vjp = jax.vjp(vn.implicit(scale), a, b)
    expected, vjp_of_numbers = jax.vjp(scale, a.x, b.x)
    assert_close(out.x, expected)
    of_a, of_b = vjp(Quantity(jnp.ones(2), unit(m=2)))
    assert_close([of_a.x, of_b.x], list(vjp_of_numbers(jnp.ones(2))))
    assert (of_a.unit, of_b.unit) == (a.unit, b.unit)


def test_a_solution_with_wrong_metadata_is_rejected(area):
    f = lambda a, b: jax.lax.custom_linear_solve(lambda x: x * a, b, lambda mv, b: b * a)
    with pytest.raises(TypeError, match=r"custom_linear_solve.*'m', 3.0.*'m', 5.0"):
        vn.implicit(f)(*area)
