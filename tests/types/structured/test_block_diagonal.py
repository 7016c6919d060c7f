"""`BlockDiagonal`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal
from veneer.types.structured.partwise import BlockDiagonal


def sizes(n):
    """Return the number of blocks of an n x n matrix, and their size."""
    return (2, n // 2) if n % 2 == 0 else (n, 1)


def blocks(draw):
    k, size = sizes(draw.n)
    return BlockDiagonal(draw(k, size, size))


def rectangular(draw):
    k, size = sizes(draw.n)
    return BlockDiagonal(draw(k, 3, size))


def regular(draw):
    k, size = sizes(draw.n)
    w = draw(k, size, size) / 4 + jnp.eye(size, dtype=draw.dtype)
    return BlockDiagonal((w + w.mT) / 2)


diagonal = lambda draw: Diagonal(draw.positive(draw.n))
vectors = lambda draw: draw(draw.n, 3)
square = lambda draw: draw(draw.n, draw.n)
FACTORED = {"dtypes": ("float64",), "sizes": (1, 5)}


def determinant_and_trace(a):
    return *jnp.linalg.slogdet(a), jnp.linalg.det(a), jnp.trace(a), jnp.diagonal(a)


test_under, test_over = claims(
    {
        "b @ x": Claim(lambda a, x: a @ x, (rectangular, vectors)),
        "x.T @ b": Claim(lambda a, x: x.mT @ a, (blocks, vectors)),
        "b.T @ b": Claim(lambda a: a.T @ a, (rectangular,), kept=BlockDiagonal),
        "2 b - b": Claim(lambda a, b: 2 * a - b / 3, (blocks,) * 2, kept=BlockDiagonal),
        "d @ b @ d": Claim(lambda a, d: d @ a @ d, (blocks, diagonal), kept=BlockDiagonal),
        "b * b": Claim(lambda a, b: a * b, (blocks,) * 2, kept=BlockDiagonal),
        "b * x": Claim(lambda a, x: x * a, (blocks, square), kept=BlockDiagonal),
        "zero-preserving": Claim(lambda a: jnp.sin(a) ** 2, (rectangular,), kept=BlockDiagonal),
        "sum": Claim(lambda a: (a.sum(), a.sum(0), a.sum(1)), (rectangular,)),
        "solve": Claim(jnp.linalg.solve, (regular, vectors), **FACTORED),
        "inv": Claim(jnp.linalg.inv, (regular,), kept=BlockDiagonal, **FACTORED),
        "cholesky": Claim(jnp.linalg.cholesky, (regular,), kept=BlockDiagonal, **FACTORED),
        "determinant and trace": Claim(determinant_and_trace, (regular,), **FACTORED),
    }
)


def test_dense_matrix_agrees_with_scipy():
    matrices = [jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))]
    a = BlockDiagonal.from_blocks(*matrices)
    np.testing.assert_array_equal(vn.materialise(a), scipy.linalg.block_diag(*matrices))


def test_structured_blocks_keep_their_type():
    a = BlockDiagonal.from_blocks(Diagonal(jnp.array([1.0, 2.0])), Diagonal(jnp.array([3.0, 4.0])))
    inverse = vn.implicit(jnp.linalg.inv, on_materialise="error")(a.T @ a)
    assert isinstance(inverse.blocks, Diagonal)
    assert jnp.allclose(inverse @ jnp.ones(4), 1 / jnp.array([1.0, 4.0, 9.0, 16.0]))


def test_quantized_blocks_are_multiplied():
    w = jax.random.normal(jax.random.key(0), (2, 8, 8))
    a = BlockDiagonal(vn.quant.quantize(w, "int8", channelwise_axes=[0, 1]))
    x = jnp.arange(16.0)
    assert jnp.allclose(a @ x, vn.materialise(a) @ x, rtol=1e-5)
    assert a.nbytes == 2 * 8 * 8 + 4 * 2 * 8


def test_entries_outside_of_infinite_blocks_are_zero():
    a = BlockDiagonal(jnp.full((2, 1, 1), jnp.inf))
    assert vn.materialise(a)[0, 1] == 0
    assert (a @ jnp.ones(2) == jnp.inf).all()


def test_functions_that_do_not_keep_zeros_materialize():
    a = BlockDiagonal(jnp.ones((2, 1, 1)))
    assert (vn.implicit(jnp.cos)(a) == jnp.cos(jnp.eye(2))).all()


def test_operations_on_different_block_sizes_agree_with_dense():
    a, b = BlockDiagonal(jnp.ones((2, 3, 3))), BlockDiagonal(jnp.ones((3, 2, 2)))
    for f in (jnp.add, jnp.multiply, jnp.matmul):
        out = vn.implicit(f)(a, b)
        assert jnp.allclose(vn.materialise(out), f(vn.materialise(a), vn.materialise(b)))


def test_trace_materializes_if_blocks_are_not_square():
    a = BlockDiagonal(jnp.arange(6.0).reshape(1, 2, 3))
    both = vn.implicit(jnp.matmul)(a, BlockDiagonal(jnp.ones((1, 3, 2))))
    assert vn.implicit(jnp.trace)(both) == 15
    assert vn.implicit(jnp.trace)(a) == 4


def test_only_blocks_are_stored():
    assert BlockDiagonal(jnp.ones((4, 8, 8))).nbytes == 4 * 4 * 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockDiagonal(jnp.ones((2, 2))), "too few axes"),
        (
            lambda: BlockDiagonal.from_blocks(jnp.ones((2, 2)), jnp.ones((3, 3))),
            r"\[\(2, 2\), \(3, 3\)\]",
        ),
        (lambda: BlockDiagonal.from_blocks(), "one shape, got"),
    ],
)
def test_invalid_blocks_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
