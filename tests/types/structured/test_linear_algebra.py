"""Products and linear algebra of all structured matrices, by the methods of `Matrix`."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal
from veneer.types.structured.matrix import Matrix, matmul_rule


class Full(Matrix):
    """A matrix that stores its dense matrix, and implements the methods with it."""

    x: jax.Array  # [..., m, n]

    linear_in: ClassVar[tuple[str, ...]] = ("x",)

    def materialise(self):
        return self.x

    def matvec(self, x, *, precision=None):
        return jnp.matmul(x, self.x.mT, precision=precision)

    def transposed(self):
        return Full(self.x.mT)

    def solve(self, b):
        return jnp.linalg.solve(self.x, b.mT).mT

    def slogdet(self):
        return jnp.linalg.slogdet(self.x)

    def main_diagonal(self):
        return jnp.linalg.diagonal(self.x)


@matmul_rule
def _(x: Full, y: Full) -> Full:
    return Full(x.x @ y.x)


class Bare(Matrix):
    """A matrix that implements no methods."""

    x: jax.Array  # [..., m, n]

    def materialise(self):
        return self.x


diagonal = lambda draw: Diagonal(draw.positive(draw.n))
well_conditioned = lambda draw: draw(draw.n, draw.n) / 4 + jnp.eye(draw.n, dtype=draw.dtype)
full = lambda draw: Full(well_conditioned(draw))
wide = lambda draw: Full(draw(draw.n, 3))
vector, vectors, rows = (
    lambda draw: draw(draw.n),
    lambda draw: draw(draw.n, 3),
    lambda draw: draw(3, draw.n),
)
positive_definite = lambda draw: Full(
    (lambda x: x @ x.mT + jnp.eye(draw.n, dtype=draw.dtype))(draw(draw.n, draw.n))
)

PRODUCTS = {
    "x @ w": Claim(lambda x, w: x @ w, (rows, wide)),
    "w @ x": Claim(lambda w, x: w @ x, (wide, lambda draw: draw(3, 5))),
    "w.T @ x": Claim(lambda w, x: w.T @ x, (full, vectors)),
    "vector @ w": Claim(lambda x, w: x @ w, (vector, wide)),
    "w @ vector": Claim(lambda w, x: w @ x, (full, vector)),
    "einsum": Claim(lambda w, x: jnp.einsum("...ij,...ki->k...j", w, x), (wide, rows)),
    "in f32": Claim(
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32),
        (rows, wide),
        dtypes=("bfloat16",),
    ),
    "w @ w": Claim(lambda v, w: v @ w, (full, full), kept=Full),
    "w.T @ w": Claim(lambda v, w: v.T @ w, (wide, wide), kept=Full),
    "w @ w.T": Claim(lambda v, w: jnp.einsum("...ij,...kj->...ik", v, w), (wide, wide), kept=Full),
    "multiples": Claim(lambda w: (2 * w, w / 3, -w), (wide,), kept=Full),
    "sums": Claim(lambda w: (w.sum(), w.sum(-1), w.sum(-2)), (wide,)),
}
test_products, test_products_in_other_dtypes = claims(PRODUCTS)

SOLVES = {
    name: Claim(run, (make, b), dtypes=("float64",), sizes=(1, 5))
    for name, run, make, b in [
        ("solve", jnp.linalg.solve, full, vectors),
        ("solve, diagonal", jnp.linalg.solve, diagonal, vectors),
        ("solve, a vector", jnp.linalg.solve, full, vector),
        ("scipy's solve", lambda a, b: jax.scipy.linalg.solve(a, b), full, vectors),
        (
            "solve, positive definite",
            lambda a, b: jax.scipy.linalg.solve(a, b, assume_a="pos"),
            positive_definite,
            vectors,
        ),
        ("solve, transposed", lambda a, b: jnp.linalg.solve(a.T, b), full, vectors),
        (
            "vmap of solve over right-hand sides",
            lambda a, b: jax.vmap(jnp.linalg.solve, (None, -1), -1)(a, b),
            full,
            vectors,
        ),
    ]
}
test_solves, test_solves_in_other_dtypes = claims(SOLVES)

OF_ONE = {
    name: Claim(run, (full,), dtypes=("float64",), sizes=(1, 5))
    for name, run in {
        "det": jnp.linalg.det,
        "slogdet": lambda a: tuple(jnp.linalg.slogdet(a)),
        "trace": jnp.trace,
        "linalg's trace": lambda a: jnp.trace(a, axis1=-2, axis2=-1),
        "diagonal": jnp.diagonal,
        "linalg's diagonal": lambda a: jnp.linalg.diagonal(a),
        "inv": jnp.linalg.inv,
    }.items()
}
test_functions, test_functions_in_other_dtypes = claims(OF_ONE)


@given(st.data())
def test_dot_general_with_random_axes(data):
    draw = data.draw
    lead = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    matrix = jax.random.normal(jax.random.key(0), (*lead, 4, 5))
    batch = draw(st.permutations([i for i in range(len(lead)) if draw(st.booleans())]))
    contracted = draw(st.sampled_from([len(lead), len(lead) + 1]))
    free = draw(st.lists(st.sampled_from([1, 6, 7]), max_size=2))
    # The sizes of the dense operand, with its axes in a random order.
    sizes = [lead[i] for i in batch] + [matrix.shape[contracted], *free]
    order = draw(st.permutations(range(len(sizes))))
    x = jax.random.normal(jax.random.key(1), [sizes[i] for i in order])
    of_x = [order.index(i) for i in range(len(sizes))]
    pairs = ((contracted,), (of_x[len(batch)],)), (tuple(batch), tuple(of_x[: len(batch)]))
    for first in (True, False):
        numbers = pairs if first else tuple(side[::-1] for side in pairs)
        dot = lambda v, w, numbers=numbers: lax.dot_general(v, w, numbers)
        operands = (Full(matrix), x) if first else (x, Full(matrix))
        out = vn.implicit(dot, on_materialise="error")(*operands)
        assert jnp.allclose(out, dot(*vn.materialise(operands)), atol=1e-5)


def test_other_contractions_materialize():
    w, x = Full(jnp.ones((2, 3, 4))), jnp.ones((2, 3, 4))
    for equation in ("bij,bij->b", "bij,bij->ij", "bij,bkl->ijkl"):
        run = lambda w, x, equation=equation: jnp.einsum(equation, w, x)
        assert jnp.allclose(vn.implicit(run)(w, x), run(x, x))


def test_missing_methods_materialize():
    x = jnp.arange(1.0, 17.0).reshape(4, 4) + 20 * jnp.eye(4)
    for run in (
        lambda a: a @ jnp.ones(4),
        lambda a: 2 * a,
        lambda a: a - a,
        lambda a: a.sum(0),
        lambda a: jnp.linalg.solve(a, jnp.ones(4)),
        jnp.linalg.det,
        jnp.linalg.inv,
        jnp.trace,
    ):
        out = vn.implicit(run)(Bare(x))
        assert jnp.allclose(vn.materialise(out), run(x), rtol=1e-4)
        with pytest.raises(vn.MaterialiseError):
            vn.implicit(run, on_materialise="error")(Bare(x))


def test_factors_that_are_read_are_dense_factors():
    a = Full(jnp.arange(9.0).reshape(3, 3) + 4 * jnp.eye(3))
    dense = vn.materialise(a)
    for run in (
        jax.scipy.linalg.lu,
        lambda a: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), jnp.ones(3)),
        lambda a: lax.linalg.lu(a)[1] + 1,
        lambda a: lax.linalg.cholesky(a @ a.T).sum(),
    ):
        out = vn.materialise(vn.implicit(run)(a))
        for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(run(dense)), strict=True):
            assert jnp.allclose(x, y, rtol=1e-4)


def test_structured_solve_computes_no_factors():
    d = Diagonal(jnp.arange(1.0, 5.0))
    program = str(jax.make_jaxpr(vn.implicit(jnp.linalg.solve))(d, jnp.ones(4)))
    assert "lu[" not in program
    assert "f32[4,4]" not in program


def test_iterative_solver_still_iterates():
    d = Diagonal(jnp.arange(1.0, 5.0))
    run = lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=2)[0]
    out = vn.implicit(run, on_materialise="error")(d, jnp.ones(4))
    expected = run(vn.materialise(d), jnp.ones(4))
    assert jnp.allclose(out, expected, atol=1e-6)
    assert not jnp.allclose(out, 1 / d.diagonal, atol=1e-3)  # two iterations are not enough


def test_division_does_not_overflow_in_the_reciprocal():
    x = jnp.array([1e-3], "float16")
    d = vn.implicit(lambda d: d / jnp.float16(1e-5))(Diagonal(x))
    assert jnp.isfinite(d.diagonal).all()


def test_gradients_of_a_solve_do_not_materialize():
    d, b = Diagonal(jnp.arange(1.0, 5.0)), jnp.ones(4)
    loss = lambda a, b: jnp.sin(jnp.linalg.solve(a, b)).sum()
    strict = vn.implicit(jax.grad(loss, (0, 1)), on_materialise="error")
    for x, y in zip(strict(d, b), jax.grad(loss, (0, 1))(vn.materialise(d), b), strict=True):
        assert jnp.allclose(x, y, rtol=1e-4, atol=1e-6)


def test_product_of_two_matrices_has_the_given_precision():
    product = vn.implicit(lambda x, y: jnp.matmul(x, y, precision="highest"))
    program = str(jax.make_jaxpr(product)(Full(jnp.ones((3, 4))), Full(jnp.ones((4, 2)))))
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in program


@pytest.mark.parametrize(
    "run",
    [
        lambda a: jnp.linalg.solve(a, jnp.ones(4)),
        jnp.linalg.inv,
        jnp.linalg.det,
        lambda a: a.sum(0),
    ],
)
def test_linear_algebra_and_sums_have_full_precision(run):
    update = vn.types.LowRank(jnp.ones((4, 1)), jnp.ones((1, 4)))
    a = update + Diagonal(jnp.arange(1.0, 5.0))
    program = str(jax.make_jaxpr(vn.implicit(run, on_materialise="error"))(a))
    assert program.count("dot_general[") > 0
    assert program.count("dot_general[") == program.count("precision=(Precision.HIGHEST,")
