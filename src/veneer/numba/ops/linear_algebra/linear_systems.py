"""Triangular and tridiagonal systems, by the functions of LAPACK that JAX has on the CPU."""

from typing import Any

import numpy as np

from ...codegen import storage
from ...codegen.arrays import ArrayExpr
from ...codegen.builder import Builder
from ...registry import Unsupported, funcify, perform
from .matrices import Text, call_lapack, checked, conjugate, known, stacked, transposed


@funcify.register("triangular_solve")
def _(
    b: Builder, a: ArrayExpr, y: ArrayExpr, *, left_side: bool, lower: bool, transpose_a: bool,
    unit_diagonal: bool, conjugate_a: bool = False, **_: Any,
) -> ArrayExpr:  # fmt: skip
    dtype, (rows, columns) = checked(a), y.shape[-2:]
    n = a.shape[-1]
    if conjugate_a and transpose_a:  # for which LAPACK has no letter, as it reads `a` transposed
        a, conjugate_a = conjugate(b, a), False
    # From the other side, OpenBLAS computes NaN where JAX has infinity.
    out = b.copy(transposed(b, y))
    count, results = stacked(out, 2)
    matrices = stacked(b.force(a), 2)[1]
    letters = [
        "L" if left_side else "R",
        "U" if lower else "L",
        "N" if transpose_a else "C" if conjugate_a and dtype.kind == "c" else "T",
        "U" if unit_diagonal else "N",
    ]
    one = storage.literal(1, dtype)
    call_lapack(b, "trsm", dtype, count, lambda of: [
        *letters, rows, columns, Text(one), of(matrices), n, of(results), rows,
    ])  # fmt: skip
    return transposed(b, out)


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
    dtype, (n, n_right) = checked(lower), y.shape[-2:]
    if params.get("perturb_singular"):
        raise Unsupported("perturb_singular", "True is not supported.")
    out, info = b.copy(transposed(b, y)), b.buffer(y.shape[:-2], np.int32)
    # The first number of the lower band is none of the matrix's.
    shape = (*lower.shape[:-1], max(n - 1, 1))
    first = min(1, n - 1)
    moved = b.lazy(
        lambda k, index: k.read(lower, (*index[:-1], index[-1] + first)),
        lower,
        shape=shape,
        dtype=dtype,
    )
    count, results = stacked(out, 2)
    bands = [stacked(b.copy(band), 1)[1] for band in (moved, diagonal, upper)]
    infos = stacked(info, 0)[1]
    call_lapack(b, "gtsv", dtype, count, lambda of: [
        n, n_right, *map(of, bands), of(results), n, of(infos),
    ])  # fmt: skip
    return known(b, transposed(b, out), info)


@perform.register("tridiagonal_solve")
def _(lower: Any, diagonal: Any, upper: Any, y: Any, **_: Any) -> Any:
    n = y.shape[-2]
    matrix = np.zeros((*y.shape[:-1], n), y.dtype)
    places = np.arange(n)
    matrix[..., places, places] = diagonal
    matrix[..., places[1:], places[:-1]] = lower[..., 1:]
    matrix[..., places[:-1], places[1:]] = upper[..., :-1]
    return np.linalg.solve(matrix, y)
