"""Tests of `SparseArray` against the dense program, and of the sizes of its temporaries."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse as jax_sparse
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.elementwise import NONLINEAR
from veneer.types.sparse import SparseArray


def entries(*shape, repeated=False, count=6):
    """Return a maker of sparse arrays `[*batch, *shape]`. A size of None is the `n` of the draw.

    The last entry is padding: NaN, with an index out of bounds along the last axis.
    """

    def make(draw):
        sizes = tuple(draw.n if size is None else size for size in shape)
        total = math.prod(sizes)
        if repeated and total:
            places = jax.random.randint(draw.key, (*draw.batch, count), 0, min(total, 3))
        else:
            order = jnp.argsort(jax.random.uniform(draw.key, (*draw.batch, total)), -1)
            places = order[..., : min(count, total)]
        indices = jnp.stack(jnp.unravel_index(places, sizes), -1).astype(jnp.int32)
        data = draw.positive(places.shape[-1]) / 2
        pad = jnp.broadcast_to(jnp.array([*[0] * (len(sizes) - 1), sizes[-1]]), indices.shape)
        return SparseArray(
            jnp.concatenate([data, jnp.full_like(data, jnp.nan, shape=(*draw.batch, 1))], -1),
            jnp.concatenate([indices, pad[..., :1, :].astype(jnp.int32)], -2)
            if total
            else jnp.zeros((*draw.batch, 1, len(sizes)), jnp.int32),
            sizes,
            unique_indices=not repeated,
        )

    return make


FEW = {"sizes": (0, 1), "dtypes": ("bfloat16", "float64")}
MOVES = {"sizes": (0,), "dtypes": ("float64",)}  # for operations that only move entries
MATRIX, REPEATED, TENSOR = entries(None, 3), entries(None, 3, repeated=True), entries(2, None, 3)

FUNCTIONS = {name: getattr(jax.lax, name) for name in ("neg", *NONLINEAR)}
FUNCTIONS["integer_pow"] = lambda x: x**3
SMOOTH = "neg square integer_pow sin tanh expm1 log1p erf".split()

CLAIMS = {
    "elementwise functions": Claim(
        lambda x: [FUNCTIONS[name](x) for name in SMOOTH], [MATRIX], SparseArray, **FEW
    ),
    "elementwise functions of sums": Claim(
        lambda x: [FUNCTIONS[name](x) for name in SMOOTH], [REPEATED], SparseArray, **FEW
    ),
    "conversions": Claim(
        lambda x, y: [x.astype(jnp.float32), y.astype(jnp.bfloat16)],
        [MATRIX, REPEATED],
        SparseArray,
    ),
    "times and over a number": Claim(
        lambda x, y: [2 * x, x * y[0, 0], x / y[0, 0]],
        [REPEATED, lambda draw: draw.positive(1, 1)],
        SparseArray,
        **FEW,
    ),
    "times and over dense": Claim(
        lambda x, y, z: [x * y, y * x, x / y, x * z],
        [REPEATED, lambda draw: draw.positive(draw.n, 3), lambda draw: draw.positive(3)],
        SparseArray,
        **FEW,
    ),
    "sums": Claim(
        lambda x, y: [x + y, x - y, x + x, x * x],
        [MATRIX, REPEATED],
        SparseArray,
        **FEW,
    ),
    "transposes": Claim(
        lambda x: [x.T, jnp.transpose(x, (1, 0, 2)), jnp.transpose(x, (0, 2, 1))],
        [TENSOR],
        SparseArray,
        **MOVES,
    ),
    "sums over axes": Claim(
        lambda x: [x.sum(0), x.sum(1), x.sum((0, 2)), x.sum((1, 2))], [TENSOR], SparseArray, **FEW
    ),
    "the sum over all axes": Claim(lambda x: x.sum(), [TENSOR], **FEW),
    "broadcasts": Claim(
        lambda x: [
            x[:, None],
            x[..., None],
            jnp.broadcast_to(x, (2, *x.shape)),
            jnp.broadcast_to(x[:, None, :1], (x.shape[0], 2, 4)),
        ],
        [MATRIX],
        SparseArray,
        **MOVES,
    ),
    "reshapes": Claim(
        lambda x: [x.reshape(-1), x.reshape(x.shape[1], 6), x.reshape(1, 2, -1, 3)],
        [TENSOR],
        SparseArray,
        **MOVES,
    ),
    "slices": Claim(
        lambda x: [x[0], x[:, 1:], x[..., ::2], x[1:, :, 2], jax.lax.squeeze(x[:, :, :1], (2,))],
        [TENSOR],
        SparseArray,
        **MOVES,
    ),
    "dynamic slices": Claim(
        lambda x, i: jax.lax.dynamic_slice(x, (i, jnp.int32(1)), (1, 2)),
        [MATRIX, lambda draw: jnp.full(draw.batch, 2, jnp.int32)],
        SparseArray,
        sizes=(1, 5),  # there is no slice of 1 of no rows
        dtypes=(),
        without=("implicit of vmap",),  # of many starts, a slice is a gather
    ),
    "matmul": Claim(
        lambda x, y, z: [x @ y, z @ x, x.T @ z.T, x @ y[:, 0], y.T @ x.T],
        [MATRIX, lambda draw: draw(3, 2), lambda draw: draw(2, draw.n)],
    ),
    "einsum": Claim(
        lambda x, y: [
            jnp.einsum("bij,bjk->bik", x, y),
            jnp.einsum("bij,bjk->ik", x, y),
            jnp.einsum("bij,cjk->kcbi", x, y),
            jnp.einsum("bij,bji->b", x, jnp.broadcast_to(y[..., :1], (2, 3, x.shape[1]))),
            jnp.einsum("bji,akj->ikba", y, x),
        ],
        [TENSOR, lambda draw: draw(2, 3, 2)],
        **FEW,
    ),
    "matmul of two sparse": Claim(
        lambda x, y: [x @ y.T, y.T @ x], [MATRIX, REPEATED], made_dense=True, **FEW
    ),
    "max": Claim(lambda x: jnp.max(x, -1, initial=0), [MATRIX], made_dense=True, **MOVES),
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)

DENSE = arrays.array([[0.0, 2.0, 0.0], [-1.0, 0.0, 0.0]])


@pytest.fixture
def matrix():
    """DENSE with two entries of padding, one of them in bounds along the first axis."""
    return SparseArray(
        jnp.array([2.0, jnp.nan, -1.0, jnp.inf]),
        jnp.array([[0, 1], [2, 3], [1, 0], [0, 3]]),
        (2, 3),
        unique_indices=True,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_gradients_are_finite_at_padding(name):
    function = FUNCTIONS[name]
    data = jnp.array([0.25, jnp.nan])
    loss = lambda data: vn.implicit(function)(
        SparseArray(data, jnp.array([[1], [3]]), (3,), unique_indices=True)
    )
    out = loss(data)
    assert isinstance(out, SparseArray)
    expected = function(jnp.array([0.0, 0.25, 0.0]))
    np.testing.assert_allclose(vn.materialise(out), expected, rtol=1e-6)
    gradient = jax.grad(lambda data: vn.materialise(loss(data)).sum())(data)
    np.testing.assert_allclose(gradient, [jax.grad(lambda x: function(x))(0.25), 0.0], rtol=1e-6)


@pytest.mark.parametrize("function", [jnp.cos, jnp.exp, lambda x: x + 1, lambda x: x**0])
def test_functions_that_do_not_map_0_to_0_materialize(function, matrix):
    report = vn.explain(function)(matrix)
    assert report.materialised
    np.testing.assert_allclose(vn.implicit(function)(matrix), function(DENSE))


def test_real_imag_conj_and_abs_stay_sparse():
    x = SparseArray(jnp.array([1 + 2j]), jnp.array([[1]]), (2,))
    for function in (jnp.conj, jnp.real, jnp.imag, abs):
        out = vn.implicit(function, on_materialise="error")(x)
        np.testing.assert_allclose(vn.materialise(out), function(vn.materialise(x)))


def test_integer_quotients_sum_duplicates_first():
    x = SparseArray(jnp.array([1, 1]), jnp.array([[0], [0]]), (2,))
    assert vn.materialise(vn.implicit(jax.lax.div)(x, jnp.array([2, 2]))).tolist() == [1, 0]


def test_padding_affects_no_result(matrix):
    ones = jnp.ones((3, 1))
    assert vn.materialise(matrix).tolist() == DENSE.tolist()
    assert (matrix @ ones).tolist() == (DENSE @ ones).tolist()
    assert (jnp.ones((1, 2)) @ matrix).tolist() == DENSE.sum(0, keepdims=True).tolist()
    assert vn.materialise(matrix.sum(0)).tolist() == DENSE.sum(0).tolist()
    assert vn.materialise(matrix.reshape(6)).tolist() == DENSE.reshape(6).tolist()
    assert vn.materialise(matrix[:, :1]).tolist() == DENSE[:, :1].tolist()


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_entries_that_are_not_stored_ignore_nan_and_inf(bad, matrix):
    y = jnp.where(DENSE == 0, bad, 2.0)
    assert vn.materialise(matrix * y).tolist() == (2 * DENSE).tolist()
    assert vn.materialise(matrix / jnp.where(DENSE == 0, 0.0, 2.0)).tolist() == (DENSE / 2).tolist()
    assert (matrix @ jnp.array([1.0, 1.0, bad])).tolist() == [2.0, -1.0]


def test_stored_entries_propagate_nan_and_inf():
    x = SparseArray.from_dense(DENSE)
    y = jnp.array([jnp.inf, jnp.nan, 1.0])
    np.testing.assert_array_equal(x @ y, [jnp.nan, -jnp.inf])


def test_gradients_of_data_match_the_dense_gradient(matrix):
    w = jnp.arange(6.0).reshape(3, 2)
    loss = lambda x: (jnp.tanh(x @ w) ** 2).sum()
    sampled = jax.grad(vn.implicit(loss), allow_int=True)(matrix)
    dense = vn.implicit(jax.grad(loss))(matrix)
    assert dense.shape == (2, 3)
    np.testing.assert_allclose(sampled.data, [dense[0, 1], 0, dense[1, 0], 0], rtol=1e-5)
    assert sampled.indices.dtype == jax.dtypes.float0


def sizes_in(jaxpr):
    """Yield the sizes of all intermediate arrays of a program."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for param in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(param, "jaxpr", param)  # JAX < 0.12: a ClosedJaxpr
            if hasattr(inner, "eqns"):
                yield from sizes_in(inner)


LARGE = 1000
PROGRAMS = {
    "a matmul": lambda x, w: x @ w,
    "a batch of matmuls": lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
    "activations of three axes": lambda x, w: jnp.einsum("bij,cjk->bick", x, w),
    "arithmetic": lambda x, w: jnp.sin(2 * (x + x.mT) * w[:, :1, :1]).sum(),
    "slices and reshapes": lambda x, w: x[:, 3:].reshape(2, -1).T.sum(0),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("derivative", [False, True])
def test_no_intermediate_array_has_the_dense_size(name, derivative):
    program, key = PROGRAMS[name], jax.random.key(0)
    data = jnp.ones((2, 8))
    indices = jax.random.randint(key, (2, 8, 2), 0, LARGE)
    w = jnp.ones((2, LARGE, 3))
    run = lambda data, w: vn.materialise(
        vn.implicit(program)(SparseArray(data, indices, (LARGE, LARGE)), w)
    ).sum()
    run = jax.grad(run, (0, 1)) if derivative else run
    jaxpr = jax.make_jaxpr(run)(data, w)
    assert max(sizes_in(jaxpr.jaxpr)) < LARGE**2


def test_bf16_is_accumulated_in_f32():
    n = 1024
    x = SparseArray(
        jnp.ones(n, jnp.bfloat16), jnp.stack([jnp.zeros(n, int), jnp.arange(n)], -1), (1, n)
    )
    assert (x @ jnp.full(n, 1.01, jnp.bfloat16)).tolist() == [n * 1.0078125]


def test_a_dynamic_slice_clamps_its_start(matrix):
    starts = jnp.int32(-1), jnp.int32(7)
    cut = lambda x: jax.lax.dynamic_slice_p.bind(x, *starts, slice_sizes=(1, 2))
    strict = vn.implicit(cut, on_materialise="error")
    assert vn.materialise(strict(matrix)).tolist() == cut(DENSE).tolist()


def test_a_product_of_two_materializes_the_smaller(matrix):
    large = SparseArray(jnp.ones(1), jnp.zeros((1, 2), int), (3, 99))
    report = vn.explain(lambda x, y: x @ y)(matrix, large)
    assert [event.operands for event in report.materialised] == [("SparseArray:f32[2,3]",)]


def test_a_quotient_of_two_materializes_the_divisor(matrix):
    divide = lambda x, y: x / y.sum(0, keepdims=True)
    report = vn.explain(divide)(matrix, matrix)
    assert [event.operands for event in report.materialised] == [("SparseArray:f32[1,3]",)]
    out = vn.implicit(divide)(matrix, matrix)
    assert vn.materialise(out).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_branches_with_different_nse_return_a_dense_array(matrix):
    branch = lambda x: jax.lax.cond(True, lambda x: x + x.T.T, lambda x: x, x)
    assert vn.implicit(branch)(matrix).tolist() == (2 * DENSE).tolist()


def test_a_scan_goes_over_the_batches():
    x = SparseArray.from_dense(jnp.stack([DENSE, 2 * DENSE]), n_batch=1)
    rows = lambda x: jax.lax.scan(lambda total, one: (total + one.sum(), one), 0.0, x)
    total, again = vn.implicit(rows, on_materialise="error")(x)
    assert (float(total), type(again)) == (3.0, SparseArray)


def test_conversions_from_and_to_bcoo_are_inverse():
    bcoo = jax_sparse.BCOO.fromdense(jnp.stack([DENSE, DENSE]), n_batch=1)
    x = SparseArray.from_bcoo(bcoo)
    assert (x.n_batch, x.nse, x.sparse_shape, x.unique_indices) == (1, 2, (2, 3), True)
    assert (x.to_bcoo().todense() == bcoo.todense()).all()
    shared = jax_sparse.BCOO((bcoo.data[:1], bcoo.indices[:1]), shape=(2, 2, 3))
    assert vn.materialise(SparseArray.from_bcoo(shared)).tolist() == [DENSE.tolist()] * 2
    small = jax_sparse.BCOO((bcoo.data, bcoo.indices.astype(jnp.int8)), shape=bcoo.shape)
    assert SparseArray.from_bcoo(small).indices.dtype == jnp.int32


def test_sum_duplicates_stores_each_index_once():
    x = SparseArray(jnp.array([1.0, 2.0, 4.0]), jnp.array([[1], [1], [2]]), (2,))
    once = x.sum_duplicates()
    assert vn.materialise(once).tolist() == [0.0, 3.0]
    assert (once.nse, once.unique_indices) == (2, True)
    assert once.sum_duplicates() is once


def test_nbytes_counts_entries_and_indices():
    x = SparseArray.from_dense(jnp.eye(16))
    assert x.nbytes == 16 * 4 + 16 * 2 * 4


def test_repr_shows_leaves_and_shape():
    assert repr(SparseArray.from_dense(DENSE)) == (
        "SparseArray(data=f32[2], indices=i32[2,2], sparse_shape=(2, 3), unique_indices=True)"
    )


def test_from_dense_takes_an_implicit_array():
    q = vn.quant.quantize(DENSE, "int8")
    assert vn.materialise(SparseArray.from_dense(q)).tolist() == vn.materialise(q).tolist()


def test_from_dense_never_drops_an_entry_silently():
    with pytest.raises(ValueError, match="nse is 1, but there are 2 nonzero"):
        SparseArray.from_dense(DENSE, nse=1)
    with pytest.raises(ValueError, match="not known under a trace"):
        jax.jit(lambda x: SparseArray.from_dense(x, nse=1))(DENSE.astype(int))
    lost = jax.jit(lambda x: SparseArray.from_dense(x, nse=1))(DENSE)
    assert jnp.isnan(lost.data).all()
    kept = jax.jit(lambda x: SparseArray.from_dense(x, nse=2))(DENSE)
    assert vn.materialise(kept).tolist() == DENSE.tolist()


DATA, INDICES = arrays.ones(2), arrays.zeros((2, 2), int)
REFUSED = {
    "data that is no array": (lambda: SparseArray([1.0], INDICES, (2, 3)), TypeError),
    "a list of sizes": (lambda: SparseArray(DATA, INDICES, [2, 3]), TypeError),
    "no sparse axis": (lambda: SparseArray(DATA, INDICES[:, :0], ()), ValueError),
    "indices of another rank": (lambda: SparseArray(DATA, INDICES, (2, 3, 4)), ValueError),
    "indices of other entries": (lambda: SparseArray(DATA[:1], INDICES, (2, 3)), ValueError),
    "other batches": (lambda: SparseArray(DATA[None], INDICES, (2, 3)), ValueError),
    "bools": (lambda: SparseArray.from_dense(DENSE != 0), TypeError),
    "floating indices": (lambda: SparseArray(DATA, INDICES + 0.0, (2, 3)), TypeError),
    "narrow indices": (lambda: SparseArray(DATA, INDICES.astype("int8"), (2, 3)), TypeError),
    "no BCOO": (lambda: SparseArray.from_bcoo(DENSE), TypeError),
    "dense axes": (
        lambda: SparseArray.from_bcoo(jax_sparse.BCOO.fromdense(DENSE, n_dense=1)),
        ValueError,
    ),
    "all axes batch axes": (lambda: SparseArray.from_dense(DENSE, n_batch=2), ValueError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_raise(name):
    make, error = REFUSED[name]
    with pytest.raises(error, match=r"SparseArray|indices|from_bcoo|n_batch|int8"):
        make()
