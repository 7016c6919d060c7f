"""Operations of PyTensor in JAX that its own JAX mode lacks, compared with its Python mode."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO
from pytensor import sparse
from pytensor.compile.mode import Mode
from pytensor.printing import Print
from pytensor.scalar import and_, or_, xor
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.linalg.solvers.tridiagonal import tridiagonal_lu_factor, tridiagonal_lu_solve

import veneer as vn
from veneer.interop.pytensor import compare_jax_and_py, register_in_pytensor, to_jax

RNG = np.random.default_rng(0)
PYTHON = Mode("py", None)


def entries(format, seed):
    return scipy.sparse.random(4, 5, 0.5, format, np.float64, random_state=seed)


X, Y = sparse.csr_matrix("X", dtype="float64"), sparse.csc_matrix("Y", dtype="float64")
A, B = pt.matrix("A", dtype="float64"), pt.matrix("B", dtype="float64")
V, W = pt.vector("v", dtype="float64"), pt.vector("w", dtype="float64")
VALUES = {
    X: entries("csr", 0),
    Y: entries("csc", 1),
    A: RNG.normal(size=(4, 5)),
    B: RNG.normal(size=(4, 4)),
    V: RNG.normal(size=5),
    W: RNG.normal(size=4),
}


def dense(x):
    return np.asarray(x.todense() if hasattr(x, "todense") else x)


def compare(graph, *runs, values=VALUES, rtol=1e-10):
    """Check the results of `to_jax`, under `jax.jit` and other functions, and their dtypes."""
    graph = graph if isinstance(graph, list) else [graph]
    used = set(pytensor.graph.traversal.ancestors(graph))
    inputs = [x for x in values if x in used]
    arguments = [values[x] for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy warns about writes of single entries
        expected = pytensor.function(inputs, graph, mode=PYTHON)(*arguments)
    with jax.enable_x64(True):
        function = to_jax(graph, inputs)
        arguments = [
            BCOO.from_scipy_sparse(x) if scipy.sparse.issparse(x) else x for x in arguments
        ]
        for run in runs or (jax.jit,):
            results = run(function)(*arguments)
            for result, value, variable in zip(results, expected, graph, strict=True):
                assert result.dtype == variable.type.dtype
                assert result.shape == value.shape
                np.testing.assert_allclose(dense(result), dense(value), rtol=rtol, atol=1e-12)


def run_numba(function):
    return lambda *arguments: vn.numba.compile(function, *arguments)(*arguments)


SPARSE = {
    "sum": lambda: X + Y,
    "difference with zeros": lambda: sparse.structured_exp(X - X),
    "function of a sum": lambda: sparse.structured_exp(X + Y),
    "sum of a function of a sum": lambda: sparse.sp_sum(sparse.structured_exp(X + Y)),
    "sum with a dense matrix": lambda: X + A,
    "sum with a vector": lambda: sparse.structured_add_s_v(X, V),
    "product of entries": lambda: X * Y,
    "product with a dense matrix": lambda: X * A,
    "product with a vector": lambda: X * V,
    "product with a number": lambda: X * W[0],
    "hstack": lambda: sparse.hstack([X, Y]),
    "vstack": lambda: sparse.vstack([X, Y], format="csr"),
    "scaled columns": lambda: sparse.col_scale(X, V),
    "scaled rows": lambda: sparse.row_scale(Y, W),
    "slice": lambda: X[1:3, ::-2],
    "slice to a shape": lambda: Y[: X.shape[0] // 2],
    "function of a slice": lambda: sparse.structured_exp(X[1:]),
    "product with a slice": lambda: sparse.dot(sparse.structured_exp(X[:, 1:4]), A.T[1:4]),
    "rows": lambda: sparse.get_item_list(X, [0, 2, 0]),
    "entries": lambda: sparse.get_item_2lists(X, [0, 2], [1, 3]),
    "entry": lambda: [X[1, 2], Y[-1, -2]],
    "written rows": lambda: sparse.get_item_list_grad(X, [0, 2, 0], X[1:4]),
    "written entries": lambda: sparse.get_item_2lists_grad(X, [0, 2, 0], [1, 1, 1], W[:3]),
    "rows of a dense matrix": lambda: sparse.construct_sparse_from_list(A, A[:2], [1, 3]),
    "to dense": lambda: sparse.dense_from_sparse(X),
    "from dense": lambda: [sparse.csr_from_dense(A), sparse.csc_from_dense(A)],
    "transposed": lambda: X.T,
    "cast": lambda: sparse.cast(X, "float32"),
    "diagonal": lambda: sparse.diag(sparse.true_dot(X, X.T)),
    "matrix of a diagonal": lambda: sparse.square_diagonal(V),
    "sparse by sparse": lambda: sparse.true_dot(X.T, X),
    "sparse by sparse, structured": lambda: sparse.structured_dot(Y.T, X),
    "sparse by sparse, dense": lambda: sparse.dot(X.T, Y),
    "sparse by dense": lambda: sparse.structured_dot(X.T, A),
    "sparse by vector": lambda: sparse.dot(X, V),
    "vector by sparse": lambda: sparse.dot(W, X),
    "dense by sparse": lambda: sparse.dot(A.T, Y),
    "scaled product and a sum": lambda: sparse.usmm(pt.ones((1, 1)) * 2, X, A.T, B),
    "sampled product": lambda: sparse.sampling_dot(A, A * 2, sparse.true_dot(X, X.T)),
    "sums": lambda: [sparse.sp_sum(X), sparse.sp_sum(X, axis=0), sparse.sp_sum(Y, axis=1)],
    "cleaned": lambda: sparse.clean(Y * 0),
    "comparisons": lambda: [sparse.eq(X, X), sparse.gt(X, A), sparse.lt(X, X * 2)],
    "parts": lambda: list(sparse.csm_properties(sparse.hstack([X, Y], format="csr"))),
    "of parts": lambda: sparse.CSC(*sparse.csm_properties(Y)),
    "gradient by a dense factor": lambda: pytensor.grad(sparse.sp_sum(X * A * A), A),
    "gradient by a dense operand": lambda: pytensor.grad(sparse.dot(X, A.T).sum(), A),
    "gradient by entries": lambda: pytensor.grad(
        (sparse.structured_dot(X, A.T) ** 2).sum() + sparse.sp_sum(sparse.structured_exp(X)), X
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_operations(name):
    compare(SPARSE[name]())


@pytest.mark.parametrize("name", ["function of a sum", "product of entries", "slice", "vstack"])
def test_sparse_operations_natively(name):
    compare(SPARSE[name](), run_numba)


def test_matrices_with_duplicate_and_unused_entries():
    data = jnp.asarray([1.0, 2.0, 3.0, 9.0])
    at = jnp.asarray([[0, 1], [0, 1], [2, 0], [3, 3]])  # the last one is outside
    x = BCOO((data, at), shape=(3, 3))
    z, d = sparse.csr_matrix("z", dtype="float32"), pt.matrix("d", dtype="float32")
    value, ones = np.asarray(x.todense()), np.ones((3, 3), np.float32)
    for graph, expected in {
        z * z: value**2,
        sparse.sp_sum(z, axis=1): value.sum(1),
        sparse.sp_sum(z): value.sum(),
        sparse.dot(z, d): value @ ones,
        z[1:]: value[1:],
        sparse.hstack([z, z]): np.hstack([value, value]),
        sparse.structured_add_s_v(z, d[0]): np.where(value, value + 1, 0),
    }.items():
        inputs = [z, d] if d in set(pytensor.graph.traversal.ancestors([graph])) else [z]
        result = to_jax(graph, inputs)(*[x, ones][: len(inputs)])
        np.testing.assert_allclose(dense(result), expected)


def test_entries_that_jax_cannot_count_are_not_read():
    for graph in (sparse.csm_data(X + Y), pt.exp(sparse.csm_data(X * Y)).sum()):
        with pytest.raises(
            NotImplementedError, match=r"reads the stored entries of .* number is unknown"
        ):
            to_jax(graph, [X, Y])


def test_sparse_arguments_are_checked():
    function = to_jax(X + X, [X])
    np.testing.assert_allclose(dense(function(VALUES[X].astype(np.float32))), 2 * dense(VALUES[X]))
    with pytest.raises(TypeError, match="got ndarray: pass a BCOO"):
        function(VALUES[A])
    with pytest.raises(TypeError, match="got BCOO: pass a dense array"):
        to_jax(A + A, [A])(BCOO.fromdense(jnp.ones((4, 5))))
    with pytest.raises(ValueError, match=r"needs equal shapes, but got \(4, 5\) and \(5, 4\)"):
        to_jax(X + X.T, [X])(VALUES[X].astype(np.float32))
    n = pt.iscalar("n")
    with pytest.raises(TypeError, match=r"input n \(.*determines a shape"):
        compare(X[:n], values={**VALUES, n: np.int32(2)})


M = A.shape[0]
SHAPES = {
    "half": lambda: A[: M // 2],
    "all but the last": lambda: A[:, : A.shape[1] - 1],
    "from the middle": lambda: A[M // 2 :],
    "repeat": lambda: pt.repeat(V, V.shape[0]),
    "repeat by a vector": lambda: pt.repeat(A, pt.stack([M, 1, 2, M - 3]), axis=0),
    "tile": lambda: pt.tile(V, M),
    "split": lambda: pt.split(A, [M // 2, M - M // 2], n_splits=2, axis=0),
    "arange of a product": lambda: pt.arange(M * A.shape[1]),
    "arange with a step": lambda: pt.arange(1, 2 * M, M // 2),
    "linspace": lambda: pt.linspace(0, 1, M),
    "zeros": lambda: pt.zeros((2 * M, A.shape[1] + 1)),
    "flat": lambda: A.reshape((M * A.shape[1],)),
    "eye": lambda: pt.eye(M + 1, M),
    "pad": lambda: pt.pad(A, (M, 1)),
    "ceil": lambda: pt.zeros(pt.ceil(M / 3).astype("int64")),
    "largest": lambda: pt.zeros(pt.max(pt.stack([M, A.shape[1]]))),
    "product of a vector of sizes": lambda: pt.ones(pt.prod(A.shape)),
    "last sizes": lambda: pt.zeros(A.shape[::-1]),
    "size in a sum": lambda: A.sum() / A.size,
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_computed_from_shapes(name):
    compare(SHAPES[name]())


@pytest.mark.parametrize("name", ["half", "split", "repeat"])
def test_sizes_computed_from_shapes_natively(name):
    compare(SHAPES[name](), run_numba)


def test_a_size_from_the_value_of_an_input_is_named():
    n = pt.iscalar("n")
    for graph in (pt.repeat(V, n), A.reshape((n * 2, -1)), pt.split(V, [n, 5 - n], n_splits=2)[0]):
        with pytest.raises(TypeError, match=r"input n \(.*determines a shape"):
            compare(graph, values={**VALUES, n: np.int32(2)})


@pytest.mark.parametrize("function", [and_, or_, xor], ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "bool", "uint64"])
def test_reductions_of_integers(function, dtype):
    x = pt.matrix("x", dtype=dtype)
    value = (5 * RNG.integers(0, 2, size=(3, 4)) + 2).astype(dtype)
    compare([CAReduce(function, axis=axis)(x) for axis in (None, 0, 1)], values={x: value})


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_ravel_multi_index_of_dims_that_are_an_input(mode, order):
    i, j, dims = (pt.vector(name, dtype="int64") for name in ("i", "j", "dims"))
    at = np.array([0, 2, 1]) if mode == "raise" else np.array([-1, 2, 7])
    values = {i: at, j: at[::-1].copy(), dims: np.array([3, 4])}
    compare(pt.ravel_multi_index((i, j), dims, mode=mode, order=order), values=values)


MATRIX = RNG.normal(size=(5, 5)) + 12 * np.eye(5)  # positive definite by either triangle


@pytest.mark.parametrize("lower", [True, False])
def test_one_triangle_of_a_matrix_is_read(lower):
    a, b = pt.matrix("a", dtype="float64"), pt.matrix("b", dtype="float64")
    values = {a: MATRIX, b: RNG.normal(size=(5, 2))}
    for kind in ("sym", "her", "pos"):
        compare(pt.linalg.solve(a, b, assume_a=kind, lower=lower), values=values)
    compare(pt.linalg.eigvalsh(a, None, lower=lower), jax.jit, run_numba, values=values)
    many = {pt.tensor3("a3", dtype="float64"): np.stack([MATRIX, 2 * MATRIX])}
    compare(pt.linalg.eigh(*many)[0], values=many)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_tridiagonal_factors(transposed, dtype):
    a, b = pt.matrix("a", dtype=dtype), pt.matrix("b", dtype=dtype)
    parts = [RNG.normal(size=shape).view(dtype) for shape in ((5, 10), (5, 4))]
    values = {a: parts[0][:, :5], b: parts[1][:, :2]}
    factors = list(tridiagonal_lu_factor(a))
    solutions = [
        tridiagonal_lu_solve(factors, right, b_ndim=right.ndim, transposed=transposed)
        for right in (b, b[:, 0])
    ]
    runs = (jax.jit, run_numba) if dtype == "float64" else (jax.jit,)
    compare([*factors, *solutions], *runs, values=values, rtol=1e-8)


def test_lu_with_the_order_of_rows():
    a = pt.matrix("a", dtype="float64")
    compare(list(pt.linalg.lu(a, p_indices=True)), values={a: RNG.normal(size=(4, 4))})


@pytest.mark.parametrize("options", [{}, {"sort": "lhp", "output": "complex"}], ids=str)
def test_generalized_schur_forms(options):
    compare(list(pt.linalg.qz(B, B.T @ B, **options)))


def test_print_shows_what_pytensor_shows(capfd):
    x = pt.vector("x", dtype="float64")
    graph = Print("x {here}", attrs=("__str__", "shape", "sum"))(x) * 2
    with jax.enable_x64(True):
        result = jax.jit(to_jax(graph, [x]))(np.arange(3.0))
        jax.effects_barrier()
    np.testing.assert_array_equal(result, [0, 2, 4])
    in_jax = capfd.readouterr().out
    pytensor.function([x], graph, mode=PYTHON)(np.arange(3.0))
    assert in_jax == capfd.readouterr().out != ""


def numbers_of(rng):
    return pt.random.normal(0, 1, size=(3,), rng=rng, return_next_rng=True)


def test_a_generator_is_an_input():
    rng = pt.random.type.random_generator_type("rng")
    next_rng, numbers = numbers_of(rng)
    function = jax.jit(to_jax([next_rng, numbers], [rng]))
    key = jax.random.key(0)
    following, first = function(key)
    np.testing.assert_array_equal(first, function(jax.random.key_data(key))[1])
    assert not np.allclose(first, function(following)[1])
    # A generator of NumPy gives the numbers of PyTensor's own JAX mode.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shared = pytensor.shared(np.random.default_rng(3))
        own = pytensor.function([], numbers_of(shared)[1], mode="JAX")()
    ours = to_jax(numbers, [rng])(np.random.default_rng(3))
    np.testing.assert_allclose(ours, own, rtol=1e-6)
    # A draw does not change the generator: two operations that read it draw the same numbers.
    once, again = to_jax([numbers, numbers_of(rng)[1] * 2], [rng])(key)
    np.testing.assert_allclose(2 * once, again)
    for wrong in (jnp.ones(3), 1, jax.random.split(key)):
        with pytest.raises(TypeError, match=r"is a random generator: pass a key"):
            to_jax(numbers, [rng])(wrong)


def test_shared_variables_have_their_values():
    x, state = pt.vector("x", dtype="float64"), pytensor.shared(np.ones(3), name="state")
    size, matrix = pytensor.shared(np.int64(2)), sparse.shared(VALUES[X])
    function = to_jax([x * state, x[:size], sparse.dot(matrix, V)], [x, V])
    state.set_value(np.zeros(3))
    arguments = [np.ones(n, np.float32) for n in (3, 5)]
    product, part, by_matrix = jax.jit(function)(*arguments)
    np.testing.assert_array_equal(product, np.ones(3))
    assert part.shape == (2,)
    np.testing.assert_allclose(by_matrix, VALUES[X] @ np.ones(5), rtol=1e-5)
    result = to_jax(x * state, [x, state])(arguments[0], np.full(3, 2.0, np.float32))
    np.testing.assert_array_equal(result, np.full(3, 2.0))


def test_a_shared_generator_draws_the_same_numbers_in_each_call():
    numbers = numbers_of(pytensor.shared(np.random.default_rng(3)))[1]
    function = to_jax(numbers, [])
    np.testing.assert_array_equal(function(), jax.jit(function)())


def test_the_order_of_pytensor_function_is_accepted():
    x, y = pt.vector("x", dtype="float32"), pt.vector("y", dtype="float32")
    one = np.ones(2, np.float32)
    for function in (to_jax([x, y], x + 2 * y), to_jax(x + 2 * y, [x, y])):
        np.testing.assert_array_equal(function(one, one), 3 * one)
    total, same = to_jax([x], [x + 1, x])(one)
    np.testing.assert_array_equal(total - same, one)
    np.testing.assert_array_equal(to_jax(x, x + 1)(one), one + 1)
    with pytest.raises(TypeError, match=r"depends on y .*list them in the inputs"):
        to_jax([x, y], [x])
    with pytest.raises(TypeError, match=r"computed or constant: .* List the variables"):
        to_jax(x + y, [x + 1, y])


def test_named_axes():
    xtensor = pytest.importorskip("pytensor.xtensor")
    x = xtensor.xtensor("x", dims=("a", "b"), shape=(2, 3), dtype="float32")
    y = xtensor.xtensor("y", dims=("b",), shape=(3,), dtype="float32")
    values = [RNG.normal(size=shape).astype(np.float32) for shape in ((2, 3), (3,))]
    results = jax.jit(to_jax([(x * y).sum("b"), (y * x).transpose("b", "a")], [x, y]))(*values)
    np.testing.assert_allclose(results[0], values[0] @ values[1], rtol=1e-5)
    np.testing.assert_allclose(results[1], (values[0] * values[1]).T, rtol=1e-5)
    with pytest.raises(TypeError, match="the graph's input x is XTensor"):
        to_jax(x * y, [x, y])(values[1], values[1])


def test_comparisons_take_sparse_matrices():
    _, (result,) = compare_jax_and_py([X, A], [X * A], [VALUES[X], VALUES[A]])
    assert result.shape == (4, 5)


def test_pytensor_has_our_implementations():
    classes = register_in_pytensor()
    assert {Print, type((X + Y).owner.op)} <= set(classes)
    assert register_in_pytensor() == classes
    graph = [sparse.dot(X, Y.T), X + Y, X]
    with jax.enable_x64(True):
        results = pytensor.function([X, Y], graph, mode="JAX")(VALUES[X], VALUES[Y])
        results = [dense(result) for result in results]
        total = pytensor.function([A], A.sum(0), mode="JAX")(VALUES[A])
    expected = pytensor.function([X, Y], graph, mode=PYTHON)(VALUES[X], VALUES[Y])
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, dense(value))
    np.testing.assert_allclose(total, VALUES[A].sum(0))


def test_duplicates_are_ignored_where_a_graph_says_so():
    at, amount = np.array([1, 3, 1]), np.array([2.0, 3.0, 2.0])
    for ignore in (True, False):
        compare(pt.inc_subtensor(V[at], amount, ignore_duplicates=ignore), jax.jit, run_numba)


def test_complex_eigenvectors_are_rejected():
    a = pt.zmatrix("a")
    with pytest.raises(NotImplementedError, match="eigenvectors of a complex matrix"):
        to_jax(list(pt.linalg.eigh(a)), [a])


def test_known_indices_out_of_range_are_rejected():
    i, j = pt.lvector("i"), pt.lvector("j")
    flat = to_jax(pt.ravel_multi_index((i, j), (3, 4)), [i, j])
    with pytest.raises(ValueError, match=r"not in \[0, 4\)"):
        flat(np.array([1]), np.array([5]))
    assert flat(np.array([1]), np.array([3])).tolist() == [7]
