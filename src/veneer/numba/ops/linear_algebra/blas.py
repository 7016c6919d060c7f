"""Products of matrices: of float32 in the CPU's vectors, of float64 by BLAS."""

import numpy as np

from ...maths.instructions import at
from ...maths.scalar import external, scalar

#: Whether a matrix is taken transposed, as BLAS is told: the letters N and T.
AS_IT_IS, TRANSPOSED = 78, 84


@external("veneer.numba.ops.linear_algebra.simd_products")
def matrix_product(out, x, y, m, n, k, x_row, x_step, y_row):
    """`out = x @ y` of float32; strides are in entries, and columns of y are neighbours."""
    for i in range(m):
        for j in range(n):
            total = np.float32(0)
            for p in range(k):
                total += x[i * x_row + p * x_step] * y[p * y_row + j]
            out[i * n + j] = total


@external("scipy.linalg.cython_blas")
def dgemm(turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """`c = a @ b` of float64, column by column."""
    _gemm(turn_a, turn_b, m, n, k, a, lda, b, ldb, c, ldc)


def _gemm(turn_a, turn_b, m, n, k, a, lda, b, ldb, c, ldc):
    for i in range(m):
        for j in range(n):
            total = type(c[0])(0)
            for p in range(k):
                x = a[p + i * lda if turn_a == TRANSPOSED else i + p * lda]
                y = b[j + p * ldb if turn_b == TRANSPOSED else p + j * ldb]
                total += x * y
            c[i + j * ldc] = total


@scalar
def products_f32(out, x, y, n_batches, x_batch, y_batch, m, n, k, x_row, x_step, y_row):
    """`out[i] = x[i] @ y[i]`, row by row, of matrices that are so many entries apart."""
    for i in range(n_batches):
        to, a, b = at(out, i * m * n), at(x, i * x_batch), at(y, i * y_batch)
        matrix_product(to, a, b, m, n, k, x_row, x_step, y_row)


@scalar
def products_f64(out, x, y, n_batches, x_step, y_step, m, n, k, turn_x, x_row, turn_y, y_row):
    """`out[i] = x[i] @ y[i]`, of float64 and row by row."""
    one, zero = np.float64(1), np.float64(0)
    for i in range(n_batches):
        to, a, b = at(out, i * m * n), at(x, i * x_step), at(y, i * y_step)
        dgemm(np.int8(turn_y), np.int8(turn_x), n, m, k, one, b, y_row, a, x_row, zero, to, n)
