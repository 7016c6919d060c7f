"""Decompositions by LAPACK, as JAX has them on the CPU: the same functions, so the same signs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...codegen import storage
from ...codegen.arrays import ArrayExpr, Buffer
from ...codegen.builder import Builder
from ...codegen.index import Index
from ...codegen.loop_nest import LoopNest
from ...maths import instructions
from ...registry import Unsupported, funcify, perform
from ..indexing import clamped, within
from . import lapack
from .matrices import call_lapack, checked, known, of_each, stacked, transposed

# Cholesky's factor.


@funcify.register("cholesky")
def _(b: Builder, x: ArrayExpr, **_: Any) -> ArrayExpr:
    dtype, n = checked(x), x.shape[-1]
    out, info = b.copy(x), b.buffer(x.shape[:-2], np.int32)
    count, matrices = stacked(out, 2)
    infos = stacked(info, 0)[1]
    call_lapack(b, "potrf", dtype, count, lambda of: ["U", n, of(matrices), n, of(infos)])
    zero = storage.literal(0, dtype)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        below = f"{index[-1]} <= {index[-2]}"
        return k.let(k.call(instructions.select, below, k.read(out, index), zero))

    return known(b, b.lazy(entry, out, cost=1), info)


@perform.register("cholesky")
def _(x: Any, **_: Any) -> Any:
    def factor(x: Any) -> Any:
        c, info = lapack.scipy_function("potrf", x.dtype)(x, lower=True, clean=True)
        return c if info == 0 else np.full_like(x, np.nan)

    return of_each(factor, 2)(x)


# LU.


@funcify.register("lu")
def _(b: Builder, x: ArrayExpr) -> list[ArrayExpr]:
    dtype, (m, n) = checked(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(transposed(b, x))
    pivots, info = b.buffer((*batch, min(m, n)), np.int32), b.buffer(batch, np.int32)
    count, matrices = stacked(out, 2)
    per_matrix = [stacked(pivots, 1)[1], stacked(info, 0)[1]]
    if x.size == 0:
        return [b.buffer(x.shape, dtype), pivots, _permutation(b, pivots, m)]
    call_lapack(b, "getrf", dtype, count, lambda of: [m, n, of(matrices), m, *map(of, per_matrix)])
    first = b.lazy(
        lambda k, index: k.let(f"np.int32({k.read(pivots, index)} - 1)"),
        pivots, shape=pivots.shape, dtype=np.int32, cost=1,
    )  # fmt: skip
    return [transposed(b, out), first, _permutation(b, first, m)]


def _permutation(b: Builder, pivots: ArrayExpr, size: int) -> ArrayExpr:
    """The order of rows, of which each was exchanged with that at a pivot in turn."""
    *batch, n = pivots.shape
    out = b.buffer((*batch, size), np.int32)
    with b.kernel("permutation") as k, k.loops(batch) as matrix:
        with k.loops([size]) as (i,):
            k.store(out, (*matrix, i), f"np.int32({i})")
        with k.loops([n]) as (i,):
            pivot = k.read(pivots, (*matrix, i))
            at = clamped(k, pivot, pivots.dtype, size - 1)
            here, there = k.load(out, (*matrix, i)), k.load(out, (*matrix, at))
            k.store(out, (*matrix, i), there)
            with k.under(f"if {within(k, pivot, pivots.dtype, size - 1)}:"):
                k.store(out, (*matrix, at), here)
    return out


@funcify.register("lu_pivots_to_permutation")
def _(b: Builder, pivots: ArrayExpr, *, permutation_size: int) -> ArrayExpr:
    return _permutation(b, b.cheap(pivots), permutation_size)


@perform.register("lu_pivots_to_permutation")
def _(pivots: Any, *, permutation_size: int) -> Any:
    def order(pivots: Any) -> Any:
        rows = np.arange(permutation_size, dtype=np.int32)
        for i, at in enumerate(pivots):
            rows[[i, at]] = rows[[at, i]]
        return rows

    return of_each(order, 1)(pivots)


@perform.register("lu")
def _(x: Any) -> list[Any]:
    *batch, m, n = x.shape
    function = lapack.scipy_function("getrf", x.dtype)
    stack = x.reshape(-1, m, n) if x.size else ()  # which SciPy takes none of
    results = [function(matrix)[:2] for matrix in stack]
    pivots = np.asarray([rows for _, rows in results], np.int32).reshape(*batch, min(m, n))
    order = perform["lu_pivots_to_permutation"](pivots, permutation_size=m)
    return [np.asarray([c for c, _ in results], x.dtype).reshape(x.shape), pivots, order]


# QR.


@funcify.register("geqrf")
def _geqrf(b: Builder, x: ArrayExpr, **_: Any) -> list[ArrayExpr]:
    dtype, (m, n) = checked(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(transposed(b, x))
    taus, info = b.buffer((*batch, min(m, n)), dtype), b.buffer((), np.int32)
    count, matrices = stacked(out, 2)
    scales = stacked(taus, 1)[1]
    size = lapack.workspace("geqrf", dtype, m, n)
    work = b.buffer((size,), dtype)
    call_lapack(b, "geqrf", dtype, count, lambda of: [
        m, n, of(matrices), m, of(scales), work, size, info,
    ])  # fmt: skip
    return [transposed(b, out), taus]


def _geqp3(b: Builder, x: ArrayExpr) -> list[ArrayExpr]:
    """As geqrf, of columns in an order of LAPACK's; and that order."""
    dtype, (m, n) = checked(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(transposed(b, x))
    taus, info = b.buffer((*batch, min(m, n)), dtype), b.buffer((), np.int32)
    columns = b.copy(b.constant(np.zeros((*batch, n), np.int32)))  # none of which is to be first
    count, matrices = stacked(out, 2)
    scales, orders = stacked(taus, 1)[1], stacked(columns, 1)[1]
    size = lapack.workspace_for("geqp3", dtype, np.zeros((m, n), dtype))
    work = b.buffer((size,), dtype)
    rwork = [b.buffer((2 * n,), lapack.real_of(dtype))] if dtype.kind == "c" else []
    call_lapack(b, "geqp3", dtype, count, lambda of: [
        m, n, of(matrices), m, of(orders), of(scales), work, size, *rwork, info,
    ])  # fmt: skip
    return [transposed(b, out), taus, *b.traced(lambda order: [order - 1], columns)]


@funcify.register("householder_product")
def _orgqr(b: Builder, x: ArrayExpr, taus: ArrayExpr) -> ArrayExpr:
    dtype, (m, n) = checked(x), x.shape[-2:]
    reflections = taus.shape[-1]
    out, info = b.copy(transposed(b, x)), b.buffer((), np.int32)
    count, matrices = stacked(out, 2)
    scales = stacked(b.force(taus), 1)[1]
    size = lapack.workspace("geqrf", dtype, m, n)  # SciPy has none for it alone; it is as much
    work = b.buffer((size,), dtype)
    call_lapack(b, "orgqr", dtype, count, lambda of: [
        m, n, reflections, of(matrices), m, of(scales), work, size, info,
    ])  # fmt: skip
    return transposed(b, out)


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
    # What of those columns is no part of `r` is written over.
    pads = [(0, 0)] * (r.ndim - 1) + [(0, max(0, columns - n))]
    (first,) = b.traced(lambda r: [jnp.pad(r, pads)[..., :columns]], r)
    (upper,) = b.traced(lambda r: [jnp.triu(r[..., :rows, :])], r)
    return [_orgqr(b, first, taus), upper, *order]


def _identity(b: Builder, shape: Sequence[int], dtype: np.dtype) -> ArrayExpr:
    """What factors of matrices without rows or columns are."""
    return b.constant(np.broadcast_to(np.eye(*shape[-2:], dtype=dtype), shape))


@perform.register("qr")
def _(x: Any, *, pivoting: bool, full_matrices: bool, **_: Any) -> list[Any]:
    how: Any = "complete" if full_matrices else "reduced"
    if not pivoting:
        return [*np.linalg.qr(x, how)]
    *batch, n = x.shape[:-2] + x.shape[-1:]
    function = lapack.scipy_function("geqp3", x.dtype)
    stack = x.reshape(-1, *x.shape[-2:]) if x.size else ()  # which SciPy takes none of
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
    dtype, n = checked(x), x.shape[-1]
    _check_whole(subset_by_index, (0, n), params.get("algorithm"), ("QR", "DEFAULT"))
    batch = x.shape[:-2]
    real = lapack.real_of(dtype)
    v, w, info = b.copy(transposed(b, x)), b.buffer((*batch, n), real), b.buffer(batch, np.int32)
    count, matrices = stacked(v, 2)
    values, infos = stacked(w, 1)[1], stacked(info, 0)[1]
    size = lapack.workspace("syevd", dtype, n)
    places, parts = 3 + 5 * n, 1 + 5 * n + 2 * n * n
    work, iwork = b.buffer((size,), dtype), b.buffer((places,), np.int32)
    rwork = [b.buffer((parts,), real), parts] if dtype.kind == "c" else []
    call_lapack(b, "syevd", dtype, count, lambda of: [
        "V", "L" if lower else "U", n, of(matrices), n, of(values), work, size, *rwork, iwork,
        places, of(infos),
    ])  # fmt: skip
    return [known(b, transposed(b, v), info), known(b, w, info)]


def _check_whole(subset: Any, whole: tuple[int, int], algorithm: Any, known: Sequence[str]) -> None:
    if subset is not None and tuple(subset) != whole:
        raise Unsupported("subset_by_index", f"{subset} is not supported.")
    if algorithm is not None and algorithm.name not in known:
        raise Unsupported("algorithm", f"{algorithm} is not supported.")


@perform.register("eigh")
def _(x: Any, *, lower: bool, **_: Any) -> list[Any]:
    function = lapack.scipy_function("syevd", x.dtype)
    results = [function(matrix, lower=lower) for matrix in x.reshape(-1, *x.shape[-2:])]
    able = lambda n: [np.full_like(r[n], np.nan) if r[-1] else r[n] for r in results]
    return [np.asarray(able(1)).reshape(x.shape), np.asarray(able(0)).reshape(x.shape[:-1])]


@funcify.register("svd")
def _(
    b: Builder, x: ArrayExpr, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None,
    **params: Any,
) -> list[ArrayExpr]:  # fmt: skip
    dtype, (m, n) = checked(x), x.shape[-2:]
    few = min(m, n)
    _check_whole(subset_by_index, (0, few), params.get("algorithm"), ("DEFAULT",))
    batch, inner = x.shape[:-2], (m, n) if full_matrices else (few, few)
    real = lapack.real_of(dtype)
    out = b.copy(transposed(b, x))
    s, info = b.buffer((*batch, few), real), b.buffer(batch, np.int32)
    if x.size == 0:
        return [s, *(_identity(b, v.shape, dtype) for v in b.outs[1:])]
    # LAPACK does not look at what it is not asked for.
    u = b.buffer((*batch, inner[0], m), dtype) if compute_uv else s
    vt = b.buffer((*batch, n, inner[1]), dtype) if compute_uv else s
    count, matrices = stacked(out, 2)
    results = [stacked(u, 2)[1], stacked(vt, 2)[1]] if compute_uv else [stacked(s, 1)[1]] * 2
    values, infos = stacked(s, 1)[1], stacked(info, 0)[1]
    options = {"compute_uv": compute_uv, "full_matrices": full_matrices}
    size = lapack.workspace("gesdd", dtype, m, n, **options)
    work, iwork = b.buffer((size,), dtype), b.buffer((8 * few,), np.int32)
    parts = few * max(5 * few + 7, 2 * max(m, n) + 2 * few + 1)
    rwork = [b.buffer((parts,), real)] if dtype.kind == "c" else []
    job = ("A" if full_matrices else "S") if compute_uv else "N"
    call_lapack(b, "gesdd", dtype, count, lambda of: [
        job, m, n, of(matrices), m, of(values), of(results[0]), m, of(results[1]), inner[1],
        work, size, *rwork, iwork, of(infos),
    ])  # fmt: skip
    factors = [s, transposed(b, u), transposed(b, vt)] if compute_uv else [s]
    return [known(b, x, info) for x in factors]


@perform.register("svd")
def _(x: Any, *, full_matrices: bool, compute_uv: bool, **_: Any) -> list[Any]:
    if not compute_uv:
        return [np.linalg.svd(x, compute_uv=False)]
    u, s, vt = np.linalg.svd(x, full_matrices)
    return [s, u, vt]


# What is not symmetric: Schur's form, eigenvalues and eigenvectors.


@funcify.register("schur")
def _(
    b: Builder, x: ArrayExpr, *, compute_schur_vectors: bool, sort_eig_vals: bool, **_: Any
) -> list[ArrayExpr]:
    if sort_eig_vals:
        raise Unsupported("sort_eig_vals", "True is not supported.")
    dtype, n, batch = checked(x), x.shape[-1], x.shape[:-2]
    form, info = b.copy(transposed(b, x)), b.buffer(batch, np.int32)
    vectors = b.buffer(x.shape, dtype) if compute_schur_vectors else form
    count, matrices = stacked(form, 2)
    columns, infos = stacked(vectors, 2)[1], stacked(info, 0)[1]
    unsorted, some = b.buffer((), np.int32), b.buffer((n,), np.int32)
    size = lapack.workspace_for("gees", dtype, lambda *_: 0, np.eye(n, dtype=dtype))
    work, values = b.buffer((size,), dtype), _eigenvalues(b, (n,), dtype)
    rwork = [b.buffer((n,), lapack.real_of(dtype))] if dtype.kind == "c" else []
    call_lapack(b, "gees", dtype, count, lambda of: [
        "V" if compute_schur_vectors else "N", "N", some, n, of(matrices), n, unsorted, *values,
        of(columns), n, work, size, *rwork, some, of(infos),
    ])  # fmt: skip
    results = [form, vectors] if compute_schur_vectors else [form]
    return [known(b, transposed(b, x), info) for x in results]


def _eigenvalues(b: Builder, shape: Sequence[int], dtype: np.dtype) -> list[Buffer]:
    """Memory for eigenvalues; of real matrices their parts are apart."""
    return [b.buffer(shape, dtype) for _ in range(1 if dtype.kind == "c" else 2)]


@funcify.register("eig")
def _(
    b: Builder, x: ArrayExpr, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool,
    **_: Any,
) -> list[ArrayExpr]:  # fmt: skip
    dtype, n, batch = checked(x), x.shape[-1], x.shape[:-2]
    infinite = _infinite(b, x)
    matrix, info = b.copy(known(b, transposed(b, x), infinite, 0)), b.buffer(batch, np.int32)
    asked = [compute_left_eigenvectors, compute_right_eigenvectors]
    vectors = [b.buffer(x.shape, dtype) if wanted else matrix for wanted in asked]
    values = _eigenvalues(b, x.shape[:-1], dtype)
    count, matrices = stacked(matrix, 2)
    sides = [stacked(buffer, 2)[1] for buffer in vectors]
    parts, infos = [stacked(buffer, 1)[1] for buffer in values], stacked(info, 0)[1]
    size = lapack.workspace("geev", dtype, n)
    work = b.buffer((size,), dtype)
    rwork = [b.buffer((2 * n,), lapack.real_of(dtype))] if dtype.kind == "c" else []
    call_lapack(b, "geev", dtype, count, lambda of: [
        *("V" if wanted else "N" for wanted in asked), n, of(matrices), n, *map(of, parts),
        of(sides[0]), n, of(sides[1]), n, work, size, *rwork, of(infos),
    ])  # fmt: skip
    results: list[ArrayExpr] = [_complex_values(b, values)]
    results += [
        _complex_vectors(b, v, values) for v, wanted in zip(vectors, asked, strict=True) if wanted
    ]
    return [known(b, known(b, x, info), infinite) for x in results]


def _infinite(b: Builder, x: ArrayExpr) -> Buffer:
    """1 for matrices with a number that is not finite, over which LAPACK may not end; or else 0."""
    (result,) = b.traced(lambda x: [jnp.any(~jnp.isfinite(x), axis=(-1, -2)).astype(jnp.int32)], x)
    return b.force(result)


def _complex_values(b: Builder, values: list[Buffer]) -> ArrayExpr:
    if len(values) == 1:
        return values[0]
    (result,) = b.traced(lambda x, y: [jax.lax.complex(x, y)], *values)
    return result


def _complex_vectors(b: Builder, columns: Buffer, values: list[Buffer]) -> ArrayExpr:
    """Eigenvectors, of which LAPACK has those of two conjugate values as real and imaginary."""

    def unpacked(v: Any, imag: Any) -> list[Any]:
        after, before = jnp.roll(v, -1, -2), jnp.roll(v, 1, -2)  # a vector is a row here
        imag = imag[..., None]
        real = jnp.where(imag < 0, before, v)
        return [jax.lax.complex(real, jnp.where(imag > 0, after, jnp.where(imag < 0, -v, 0)))]

    if len(values) == 1:
        return transposed(b, columns)
    return transposed(b, b.traced(unpacked, columns, values[1])[0])


@perform.register("schur")
def _(x: Any, *, compute_schur_vectors: bool, **_: Any) -> list[Any]:
    function = lapack.scipy_function("gees", x.dtype)
    results = [function(lambda *_: 0, matrix) for matrix in x.reshape(-1, *x.shape[-2:])]
    form, vectors = (np.asarray([r[n] for r in results]).reshape(x.shape) for n in (0, -3))
    return [form, vectors] if compute_schur_vectors else [form]


@perform.register("eig")
def _(
    x: Any, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool, **_: Any
) -> list[Any]:
    import scipy.linalg

    asked = [True, compute_left_eigenvectors, compute_right_eigenvectors]
    parts: list[list[Any]] = [[], [], []]
    for matrix in x.reshape(-1, *x.shape[-2:]):
        finite = np.isfinite(matrix).all()
        factors = scipy.linalg.eig(np.where(finite, matrix, 0), left=True, right=True)
        for part, factor in zip(parts, factors, strict=True):
            part.append(np.where(finite, factor, np.nan))
    dtype = np.result_type(x.dtype, np.complex64)
    shapes = (x.shape[:-1], x.shape, x.shape)
    arrays = [np.asarray(p, dtype).reshape(s) for p, s in zip(parts, shapes, strict=True)]
    return [array for array, wanted in zip(arrays, asked, strict=True) if wanted]
