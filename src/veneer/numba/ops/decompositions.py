"""Matrix decompositions and linear systems by LAPACK.

JAX calls the same functions on CPU, so signs of eigenvectors and factors agree.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, Index
from ..codegen.builder import Builder
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, funcify, perform
from ..maths import instructions
from .indexing import clamped_index, is_within
from .lapack import (
    Expression,
    PerMatrix,
    call_lapack,
    check_dtype,
    conjugate,
    fill_failures,
    real_of,
    scipy_function,
    transpose,
    vectorize,
    workspace,
    workspace_for,
)

# Cholesky.


@funcify.register("cholesky")
def _(b: Builder, x: ArrayExpr, **_: Any) -> ArrayExpr:
    dtype, n = check_dtype(x), x.shape[-1]
    out, info = b.copy(x), b.buffer(x.shape[:-2], np.int32)
    args = ["U", n, PerMatrix(out), n, PerMatrix(info)]
    call_lapack(b, "potrf", dtype, x.shape[:-2], args)
    zero = storage.literal(0, dtype)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        below = f"{index[-1]} <= {index[-2]}"
        return k.let(k.call(instructions.select, below, k.read(out, index), zero))

    return fill_failures(b, b.lazy(entry, out, cost=1), info)


@perform.register("cholesky")
def _(x: Any, **_: Any) -> Any:
    def factor(x: Any) -> Any:
        c, info = scipy_function("potrf", x.dtype)(x, lower=True, clean=True)
        return c if info == 0 else np.full_like(x, np.nan)

    return vectorize(factor, 2)(x)


# LU.


@funcify.register("lu")
def _(b: Builder, x: ArrayExpr) -> list[ArrayExpr]:
    dtype, (m, n) = check_dtype(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(transpose(b, x))
    pivots, info = b.buffer((*batch, min(m, n)), np.int32), b.buffer(batch, np.int32)
    if x.size == 0:
        return [b.buffer(x.shape, dtype), pivots, _permutation(b, pivots, m)]
    args = [m, n, PerMatrix(out), m, PerMatrix(pivots), PerMatrix(info)]
    call_lapack(b, "getrf", dtype, batch, args)
    first = b.lazy(
        lambda k, index: k.let(f"np.int32({k.read(pivots, index)} - 1)"),
        pivots, shape=pivots.shape, dtype=np.int32, cost=1,
    )  # fmt: skip
    return [transpose(b, out), first, _permutation(b, first, m)]


def _permutation(b: Builder, pivots: ArrayExpr, size: int) -> ArrayExpr:
    """Return the permutation of rows that pivots of an LU decomposition describe.

    Each row in turn is swapped with the row at its pivot. `size` is the number of rows.
    """
    *batch, n = pivots.shape
    out = b.buffer((*batch, size), np.int32)
    with b.kernel("permutation") as k, k.loops(batch) as matrix:
        with k.loops([size]) as (i,):
            k.store(out, (*matrix, i), f"np.int32({i})")
        with k.loops([n]) as (i,):
            pivot = k.read(pivots, (*matrix, i))
            at = clamped_index(k, pivot, pivots.dtype, size - 1)
            here, there = k.load(out, (*matrix, i)), k.load(out, (*matrix, at))
            k.store(out, (*matrix, i), there)
            with k.block(f"if {is_within(k, pivot, pivots.dtype, size - 1)}:"):
                k.store(out, (*matrix, at), here)
    return out


@funcify.register("lu_pivots_to_permutation")
def _(b: Builder, pivots: ArrayExpr, *, permutation_size: int) -> ArrayExpr:
    return _permutation(b, b.force_costly(pivots), permutation_size)


@perform.register("lu_pivots_to_permutation")
def _(pivots: Any, *, permutation_size: int) -> Any:
    def order(pivots: Any) -> Any:
        rows = np.arange(permutation_size, dtype=np.int32)
        for i, at in enumerate(pivots):
            rows[[i, at]] = rows[[at, i]]
        return rows

    return vectorize(order, 1)(pivots)


@perform.register("lu")
def _(x: Any) -> list[Any]:
    *batch, m, n = x.shape
    function = scipy_function("getrf", x.dtype)
    stack = x.reshape(-1, m, n) if x.size else ()  # SciPy rejects empty matrices
    results = [function(matrix)[:2] for matrix in stack]
    pivots = np.asarray([rows for _, rows in results], np.int32).reshape(*batch, min(m, n))
    order = perform["lu_pivots_to_permutation"](pivots, permutation_size=m)
    return [np.asarray([c for c, _ in results], x.dtype).reshape(x.shape), pivots, order]


# QR.


@funcify.register("geqrf")
def _geqrf(b: Builder, x: ArrayExpr, **_: Any) -> list[ArrayExpr]:
    dtype, (m, n) = check_dtype(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(transpose(b, x))
    taus, info = b.buffer((*batch, min(m, n)), dtype), b.buffer((), np.int32)
    size = workspace("geqrf", dtype, m, n)
    work = b.buffer((size,), dtype)
    args = [m, n, PerMatrix(out), m, PerMatrix(taus), work, size, info]
    call_lapack(b, "geqrf", dtype, batch, args)
    return [transpose(b, out), taus]


def _geqp3(b: Builder, x: ArrayExpr) -> list[ArrayExpr]:
    """Factor matrices as LAPACK's `geqrf`, with permuted columns.

    Return the results of `geqrf`, and the permutation.
    """
    dtype, (m, n) = check_dtype(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(transpose(b, x))
    taus, info = b.buffer((*batch, min(m, n)), dtype), b.buffer((), np.int32)
    columns = b.copy(b.constant(np.zeros((*batch, n), np.int32)))  # LAPACK may move every column
    size = workspace_for("geqp3", dtype, np.zeros((m, n), dtype))
    work = b.buffer((size,), dtype)
    rwork = [b.buffer((2 * n,), real_of(dtype))] if dtype.kind == "c" else []
    args = [m, n, PerMatrix(out), m, PerMatrix(columns), PerMatrix(taus), work, size, *rwork, info]
    call_lapack(b, "geqp3", dtype, batch, args)
    return [transpose(b, out), taus, *b.inline_function(lambda order: [order - 1], columns)]


@funcify.register("householder_product")
def _orgqr(b: Builder, x: ArrayExpr, taus: ArrayExpr) -> ArrayExpr:
    dtype, (m, n) = check_dtype(x), x.shape[-2:]
    reflections = taus.shape[-1]
    out, info = b.copy(transpose(b, x)), b.buffer((), np.int32)
    scales = PerMatrix(b.force(taus))
    size = workspace("geqrf", dtype, m, n)  # the same size; SciPy has no own query
    work = b.buffer((size,), dtype)
    args = [m, n, reflections, PerMatrix(out), m, scales, work, size, info]
    call_lapack(b, "orgqr", dtype, x.shape[:-2], args)
    return transpose(b, out)


@funcify.register("qr")
def _(
    b: Builder, x: ArrayExpr, *, pivoting: bool, full_matrices: bool, **_: Any
) -> list[ArrayExpr]:
    m, n = x.shape[-2:]
    if x.size == 0:
        rest = [b.constant(np.zeros(v.shape, v.dtype)) for v in b.outs[1:]]
        return [_identity(b, b.outs[0].shape, x.dtype), *rest]
    r, taus, *order = _geqp3(b, x) if pivoting else _geqrf(b, x)
    rows = columns = m if full_matrices or m < n else n
    # Columns that are not part of `r` are overwritten.
    pads = [(0, 0)] * (r.ndim - 1) + [(0, max(0, columns - n))]
    (first,) = b.inline_function(lambda r: [jnp.pad(r, pads)[..., :columns]], r)
    (upper,) = b.inline_function(lambda r: [jnp.triu(r[..., :rows, :])], r)
    return [_orgqr(b, first, taus), upper, *order]


def _identity(b: Builder, shape: Sequence[int], dtype: np.dtype) -> ArrayExpr:
    """Return a stack of identity matrices. They are the factors of empty matrices."""
    return b.constant(np.broadcast_to(np.eye(*shape[-2:], dtype=dtype), shape))


@perform.register("qr")
def _(x: Any, *, pivoting: bool, full_matrices: bool, **_: Any) -> list[Any]:
    how: Any = "complete" if full_matrices else "reduced"
    if not pivoting:
        return [*np.linalg.qr(x, how)]
    *batch, n = x.shape[:-2] + x.shape[-1:]
    function = scipy_function("geqp3", x.dtype)
    stack = x.reshape(-1, *x.shape[-2:]) if x.size else ()  # SciPy rejects empty matrices
    orders = [function(matrix)[1] - 1 for matrix in stack] or np.zeros((*batch, n))
    order = np.asarray(orders, np.int32).reshape(*batch, n)
    return [*np.linalg.qr(np.take_along_axis(x, order[..., None, :], -1), how), order]


@perform.register("geqrf")
def _(x: Any, **_: Any) -> list[Any]:
    h, taus = np.linalg.qr(x, "raw")
    return [np.swapaxes(h, -1, -2), taus]


@perform.register("householder_product")
def _(x: Any, taus: Any) -> Any:
    *_, m, n = x.shape
    q = np.broadcast_to(np.eye(m, n, dtype=x.dtype), x.shape)
    for i in reversed(range(taus.shape[-1])):
        v = np.where(np.arange(m) > i, x[..., :, i], (np.arange(m) == i).astype(x.dtype))
        q = q - taus[..., i, None, None] * v[..., None] * (np.conj(v[..., None, :]) @ q)
    return q


# Eigenvalues and singular values.


@funcify.register("eigh")
def _(
    b: Builder, x: ArrayExpr, *, lower: bool, subset_by_index: Any = None, **params: Any
) -> list[ArrayExpr]:
    dtype, n = check_dtype(x), x.shape[-1]
    _check_options(subset_by_index, (0, n), params.get("algorithm"), ("QR", "DEFAULT"))
    batch = x.shape[:-2]
    real = real_of(dtype)
    v, w, info = b.copy(transpose(b, x)), b.buffer((*batch, n), real), b.buffer(batch, np.int32)
    size = workspace("syevd", dtype, n)
    places, parts = 3 + 5 * n, 1 + 5 * n + 2 * n * n
    work, iwork = b.buffer((size,), dtype), b.buffer((places,), np.int32)
    rwork = [b.buffer((parts,), real), parts] if dtype.kind == "c" else []
    call_lapack(b, "syevd", dtype, batch, [
        "V", "L" if lower else "U", n, PerMatrix(v), n, PerMatrix(w), work, size, *rwork, iwork,
        places, PerMatrix(info),
    ])  # fmt: skip
    return [fill_failures(b, transpose(b, v), info), fill_failures(b, w, info)]


def _check_options(
    subset: Any, all_indices: tuple[int, int], algorithm: Any, supported: Sequence[str]
) -> None:
    if subset is not None and tuple(subset) != all_indices:
        raise Unsupported("subset_by_index", f"{subset} is not supported.")
    if algorithm is not None and algorithm.name not in supported:
        raise Unsupported("algorithm", f"{algorithm} is not supported.")


@perform.register("eigh")
def _(x: Any, *, lower: bool, **_: Any) -> list[Any]:
    function = scipy_function("syevd", x.dtype)
    results = [function(matrix, lower=lower) for matrix in x.reshape(-1, *x.shape[-2:])]
    or_nan = lambda n: [np.full_like(r[n], np.nan) if r[-1] else r[n] for r in results]
    return [np.asarray(or_nan(1)).reshape(x.shape), np.asarray(or_nan(0)).reshape(x.shape[:-1])]


@funcify.register("svd")
def _(
    b: Builder, x: ArrayExpr, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None,
    **params: Any,
) -> list[ArrayExpr]:  # fmt: skip
    dtype, (m, n) = check_dtype(x), x.shape[-2:]
    rank = min(m, n)
    _check_options(subset_by_index, (0, rank), params.get("algorithm"), ("DEFAULT",))
    batch, inner = x.shape[:-2], (m, n) if full_matrices else (rank, rank)
    real = real_of(dtype)
    out = b.copy(transpose(b, x))
    s, info = b.buffer((*batch, rank), real), b.buffer(batch, np.int32)
    if x.size == 0:
        return [s, *(_identity(b, v.shape, dtype) for v in b.outs[1:])]
    # LAPACK ignores the arguments for factors that are not computed.
    u = b.buffer((*batch, inner[0], m), dtype) if compute_uv else s
    vt = b.buffer((*batch, n, inner[1]), dtype) if compute_uv else s
    options = {"compute_uv": compute_uv, "full_matrices": full_matrices}
    size = workspace("gesdd", dtype, m, n, **options)
    work, iwork = b.buffer((size,), dtype), b.buffer((8 * rank,), np.int32)
    parts = rank * max(5 * rank + 7, 2 * max(m, n) + 2 * rank + 1)
    rwork = [b.buffer((parts,), real)] if dtype.kind == "c" else []
    job = ("A" if full_matrices else "S") if compute_uv else "N"
    call_lapack(b, "gesdd", dtype, batch, [
        job, m, n, PerMatrix(out), m, PerMatrix(s), PerMatrix(u), m, PerMatrix(vt), inner[1], work,
        size, *rwork, iwork, PerMatrix(info),
    ])  # fmt: skip
    factors = [s, transpose(b, u), transpose(b, vt)] if compute_uv else [s]
    return [fill_failures(b, x, info) for x in factors]


@perform.register("svd")
def _(x: Any, *, full_matrices: bool, compute_uv: bool, **_: Any) -> list[Any]:
    if not compute_uv:
        return [np.linalg.svd(x, compute_uv=False)]
    u, s, vt = np.linalg.svd(x, full_matrices)
    return [s, u, vt]


# Schur decomposition and eigenvalues of general matrices.


@funcify.register("schur")
def _(
    b: Builder, x: ArrayExpr, *, compute_schur_vectors: bool, sort_eig_vals: bool, **_: Any
) -> list[ArrayExpr]:
    if sort_eig_vals:
        raise Unsupported("sort_eig_vals", "True is not supported.")
    dtype, n, batch = check_dtype(x), x.shape[-1], x.shape[:-2]
    form, info = b.copy(transpose(b, x)), b.buffer(batch, np.int32)
    vectors = b.buffer(x.shape, dtype) if compute_schur_vectors else form
    unsorted, some = b.buffer((), np.int32), b.buffer((n,), np.int32)
    size = workspace_for("gees", dtype, lambda *_: 0, np.eye(n, dtype=dtype))
    work, values = b.buffer((size,), dtype), _allocate_eigenvalues(b, (n,), dtype)
    rwork = [b.buffer((n,), real_of(dtype))] if dtype.kind == "c" else []
    call_lapack(b, "gees", dtype, batch, [
        "V" if compute_schur_vectors else "N", "N", some, n, PerMatrix(form), n, unsorted, *values,
        PerMatrix(vectors), n, work, size, *rwork, some, PerMatrix(info),
    ])  # fmt: skip
    results = [form, vectors] if compute_schur_vectors else [form]
    return [fill_failures(b, transpose(b, x), info) for x in results]


def _allocate_eigenvalues(b: Builder, shape: Sequence[int], dtype: np.dtype) -> list[Buffer]:
    """Allocate memory for eigenvalues of matrices of a dtype.

    For complex matrices, this is one buffer. For real matrices, it is a buffer of real parts and a
    buffer of imaginary parts.
    """
    return [b.buffer(shape, dtype) for _ in range(1 if dtype.kind == "c" else 2)]


@funcify.register("eig")
def _(
    b: Builder, x: ArrayExpr, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool,
    **_: Any,
) -> list[ArrayExpr]:  # fmt: skip
    dtype, n, batch = check_dtype(x), x.shape[-1], x.shape[:-2]
    # LAPACK may not terminate for infinities and NaN, so matrices that have some become 0.
    is_bad = lambda x: [jnp.any(~jnp.isfinite(x), axis=(-1, -2)).astype(jnp.int32)]
    infinite = b.force(b.inline_function(is_bad, x)[0])
    matrix, info = b.copy(fill_failures(b, transpose(b, x), infinite, 0)), b.buffer(batch, np.int32)
    wants = [compute_left_eigenvectors, compute_right_eigenvectors]
    vectors = [b.buffer(x.shape, dtype) if wanted else matrix for wanted in wants]
    values = _allocate_eigenvalues(b, x.shape[:-1], dtype)
    size = workspace("geev", dtype, n)
    work = b.buffer((size,), dtype)
    rwork = [b.buffer((2 * n,), real_of(dtype))] if dtype.kind == "c" else []
    left, right = map(PerMatrix, vectors)
    call_lapack(b, "geev", dtype, batch, [
        *("V" if wanted else "N" for wanted in wants), n, PerMatrix(matrix), n,
        *map(PerMatrix, values), left, n, right, n, work, size, *rwork, PerMatrix(info),
    ])  # fmt: skip
    results: list[ArrayExpr] = [_join_values(b, values)]
    results += [
        _join_vectors(b, v, values) for v, wanted in zip(vectors, wants, strict=True) if wanted
    ]
    return [fill_failures(b, fill_failures(b, x, info), infinite) for x in results]


def _join_values(b: Builder, values: list[Buffer]) -> ArrayExpr:
    if len(values) == 1:
        return values[0]
    (result,) = b.inline_function(lambda x, y: [jax.lax.complex(x, y)], *values)
    return result


def _join_vectors(b: Builder, columns: Buffer, values: list[Buffer]) -> ArrayExpr:
    """Return eigenvectors as complex columns, given the buffer that LAPACK writes.

    For real matrices, a pair of conjugate eigenvectors is two vectors there: a real and an
    imaginary part. `values` are the buffers of eigenvalues.
    """

    def unpacked(v: Any, imag: Any) -> list[Any]:
        after, before = jnp.roll(v, -1, -2), jnp.roll(v, 1, -2)  # vectors are rows here
        imag = imag[..., None]
        real = jnp.where(imag < 0, before, v)
        return [jax.lax.complex(real, jnp.where(imag > 0, after, jnp.where(imag < 0, -v, 0)))]

    if len(values) == 1:
        return transpose(b, columns)
    return transpose(b, b.inline_function(unpacked, columns, values[1])[0])


@perform.register("schur")
def _(x: Any, *, compute_schur_vectors: bool, **_: Any) -> list[Any]:
    function = scipy_function("gees", x.dtype)
    results = [function(lambda *_: 0, matrix) for matrix in x.reshape(-1, *x.shape[-2:])]
    form, vectors = (np.asarray([r[n] for r in results]).reshape(x.shape) for n in (0, -3))
    return [form, vectors] if compute_schur_vectors else [form]


@perform.register("eig")
def _(
    x: Any, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool, **_: Any
) -> list[Any]:
    import scipy.linalg

    wants = [True, compute_left_eigenvectors, compute_right_eigenvectors]
    parts: list[list[Any]] = [[], [], []]
    for matrix in x.reshape(-1, *x.shape[-2:]):
        finite = np.isfinite(matrix).all()
        factors = scipy.linalg.eig(np.where(finite, matrix, 0), left=True, right=True)
        for part, factor in zip(parts, factors, strict=True):
            part.append(np.where(finite, factor, np.nan))
    dtype = np.result_type(x.dtype, np.complex64)
    shapes = (x.shape[:-1], x.shape, x.shape)
    arrays = [np.asarray(p, dtype).reshape(s) for p, s in zip(parts, shapes, strict=True)]
    return [array for array, wanted in zip(arrays, wants, strict=True) if wanted]


# Triangular and tridiagonal systems.


@funcify.register("triangular_solve")
def _(
    b: Builder, a: ArrayExpr, y: ArrayExpr, *, left_side: bool, lower: bool, transpose_a: bool,
    unit_diagonal: bool, conjugate_a: bool = False, **_: Any,
) -> ArrayExpr:  # fmt: skip
    dtype, (rows, columns) = check_dtype(a), y.shape[-2:]
    n = a.shape[-1]
    if conjugate_a and transpose_a:  # LAPACK has no letter for it, as it reads `a` transposed
        a, conjugate_a = conjugate(b, a), False
    # Solving from the other side, OpenBLAS returns NaN where JAX returns infinity.
    out = b.copy(transpose(b, y))
    matrices = PerMatrix(b.force(a))
    letters = [
        "L" if left_side else "R",
        "U" if lower else "L",
        "N" if transpose_a else "C" if conjugate_a and dtype.kind == "c" else "T",
        "U" if unit_diagonal else "N",
    ]
    one = storage.literal(1, dtype)
    args = [*letters, rows, columns, Expression(one), matrices, n, PerMatrix(out), rows]
    call_lapack(b, "trsm", dtype, y.shape[:-2], args)
    return transpose(b, out)


@perform.register("triangular_solve")
def _(
    a: Any,
    y: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
    conjugate_a: bool = False,
    **_: Any,
) -> Any:
    a = np.conj(a) if conjugate_a else a
    if not left_side:
        a, y = np.swapaxes(a, -1, -2), np.swapaxes(y, -1, -2)
        lower = not lower
    if transpose_a:
        a, lower = np.swapaxes(a, -1, -2), not lower
    x, n = np.array(y), a.shape[-1]
    for i in range(n) if lower else reversed(range(n)):
        if not unit_diagonal:
            x[..., i, :] /= a[..., i, i, None]
        rest = slice(i + 1, n) if lower else slice(0, i)
        x[..., rest, :] -= a[..., rest, i, None] * x[..., None, i, :]
    return x if left_side else np.swapaxes(x, -1, -2)


@funcify.register("tridiagonal_solve")
def _(
    b: Builder, lower: ArrayExpr, diagonal: ArrayExpr, upper: ArrayExpr, y: ArrayExpr, **params: Any
) -> ArrayExpr:
    dtype, (n, n_right) = check_dtype(lower), y.shape[-2:]
    if params.get("perturb_singular"):
        raise Unsupported("perturb_singular", "True is not supported.")
    out, info = b.copy(transpose(b, y)), b.buffer(y.shape[:-2], np.int32)
    # The first entry of the lower band is not part of the matrix.
    shape = (*lower.shape[:-1], max(n - 1, 1))
    first = min(1, n - 1)
    moved = b.lazy(
        lambda k, index: k.read(lower, (*index[:-1], index[-1] + first)),
        lower,
        shape=shape,
        dtype=dtype,
    )
    bands = [PerMatrix(b.copy(band)) for band in (moved, diagonal, upper)]
    args = [n, n_right, *bands, PerMatrix(out), n, PerMatrix(info)]
    call_lapack(b, "gtsv", dtype, y.shape[:-2], args)
    return fill_failures(b, transpose(b, out), info)


@perform.register("tridiagonal_solve")
def _(lower: Any, diagonal: Any, upper: Any, y: Any, **_: Any) -> Any:
    n = y.shape[-2]
    matrix = np.zeros((*y.shape[:-1], n), y.dtype)
    places = np.arange(n)
    matrix[..., places, places] = diagonal
    matrix[..., places[1:], places[:-1]] = lower[..., 1:]
    matrix[..., places[:-1], places[1:]] = upper[..., :-1]
    return np.linalg.solve(matrix, y)
