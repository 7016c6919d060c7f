"""Products: dot_general with any dimension numbers, and products with sparse arrays.

Small products are loops. Large ones of float32 call a function in vector instructions that this
package compiles, see `simd_products`. Large ones of float64 call BLAS.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from ..._jax.primitives import get_sparse_implementation
from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, Index, Memory, strides_of
from ..codegen.builder import Builder
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, funcify, perform
from ..maths import instructions
from ..maths.instructions import at, external, scalar

#: From these numbers of multiplications, rows and columns on, a call is faster than loops.
_CALL_FROM = {np.dtype(np.float32): (16 * 32 * 32, 6, 16), np.dtype(np.float64): (64**3, 6, 6)}
#: The number of entries of a row of the result that registers hold, by the size of an entry.
_REGISTER_COLUMNS = {4: 64, 8: 32}


@dataclass
class _DotOperand:
    """An operand of `dot_general`, with the numbers of its batch, free and contracted axes."""

    value: ArrayExpr
    batch: Sequence[int]
    free: Sequence[int]
    contracted: Sequence[int]

    def sizes(self, axes: Sequence[int]) -> list[int]:
        return [self.value.shape[axis] for axis in axes]

    def size(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes(axes))

    @property
    def axes(self) -> list[int]:
        return [*self.batch, *self.free, *self.contracted]

    def read(self, k: LoopNest, *index: Sequence[Index]) -> str:
        """Return an expression for the entry at indices along batch, free and contracted axes."""
        parts = dict(zip(self.axes, [i for part in index for i in part], strict=True))
        return k.read(self.value, [parts[axis] for axis in range(len(parts))])


@funcify.register("dot_general")
def _(
    b: Builder,
    x: ArrayExpr,
    y: ArrayExpr,
    *,
    dimension_numbers: Any,
    precision: Any = None,
    **_: Any,
) -> ArrayExpr:
    _check_algorithm(precision, np.dtype(b.out.dtype))
    (cx, cy), (bx, by) = dimension_numbers
    fx = [axis for axis in range(x.ndim) if axis not in (*cx, *bx)]
    fy = [axis for axis in range(y.ndim) if axis not in (*cy, *by)]
    left, right = _DotOperand(x, bx, fx, cx), _DotOperand(y, by, fy, cy)
    if left.size(cx) == 1:
        return _outer_product(b, left, right)
    left.value, right.value = b.force_costly(x), b.force_costly(y)
    out = b.buffer(dtype=storage.computed_dtype(np.dtype(b.out.dtype)))  # holds sums
    if not _write_call(b, left, right, out):
        with b.kernel() as k:
            _write_loops(k, left, right, out)
    return b.convert(out, b.out.dtype)


def _check_algorithm(precision: Any, dtype: np.dtype) -> None:
    """Raise `Unsupported` if `precision` is an algorithm that computes in another dtype.

    `dtype` is the dtype of the result.
    """
    if not isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return
    same = {"float32": "F32_F32_F32", "float64": "F64_F64_F64"}.get(dtype.name)
    if getattr(precision, "name", None) not in ("DEFAULT", same):
        raise Unsupported("precision", f"{precision} is not supported for results of {dtype}.")


def _outer_product(b: Builder, x: _DotOperand, y: _DotOperand) -> ArrayExpr:
    """Return the product of two operands as a lazy array, if the contracted axes have one entry."""
    dtype, zeros = np.dtype(b.out.dtype), [Index()] * len(x.contracted)
    n_batch, n_rows = len(x.batch), len(x.free)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        batch, rest = index[:n_batch], index[n_batch:]
        factors = [
            _entry(k, x, dtype, batch, rest[:n_rows], zeros),
            _entry(k, y, dtype, batch, rest[n_rows:], zeros),
        ]
        zero = storage.literal(0, dtype)
        return k.let(
            " * ".join(factors) if dtype.kind in "fcV" else _accumulate(k, dtype, zero, factors)
        )

    return b.lazy(entry, x.value, y.value, cost=1)


# Loops.


def _write_loops(k: LoopNest, x: _DotOperand, y: _DotOperand, out: Buffer) -> None:
    """Write loops that compute a product, in an order that reads `y` contiguously."""
    view = _as_strided(y.value)
    long = [axis for axis in y.contracted if y.value.shape[axis] > 1]
    is_contracted_dense = view is not None and bool(long) and view.strides[long[-1]] == 1
    by_rows = y.size(y.free) > 1 and not is_contracted_dense
    (_write_row_loops if by_rows else _write_entry_loops)(k, x, y, out)


def _write_entry_loops(k: LoopNest, x: _DotOperand, y: _DotOperand, out: Buffer) -> None:
    """Write loops that compute the product of `x` and `y` entry by entry."""
    dtype = out.dtype
    with (
        k.loops(x.sizes(x.batch)) as batch,
        k.loops(x.sizes(x.free)) as rows,
        k.loops(y.sizes(y.free)) as columns,
    ):
        total = k.assign(storage.literal(0, dtype), "total")
        with k.loops(x.sizes(x.contracted)) as inner:
            factors = [
                _entry(k, x, dtype, batch, rows, inner),
                _entry(k, y, dtype, batch, columns, inner),
            ]
            k.line(f"{total} = {_accumulate(k, dtype, total, factors)}")
        k.store(out, (*batch, *rows, *columns), total)


def _write_row_loops(k: LoopNest, x: _DotOperand, y: _DotOperand, out: Buffer) -> None:
    """Write loops that compute the product of `x` and `y` row by row.

    A row of the result is a sum of rows of `y` times entries of `x`. A long row is computed in
    parts that stay in registers.
    """
    *others, n = y.sizes(y.free)
    width = _REGISTER_COLUMNS.get(out.dtype.itemsize, 64)
    n_full = n // width if n > width else 0
    parts = [(0, n_full, width), (n_full * width, 1, n - n_full * width)]
    with k.loops(x.sizes(x.batch)) as batch:
        for start, count, size in parts:
            if count * size == 0:
                continue
            with k.loops([count]) as (part,), k.loops(x.sizes(x.free)) as rows:
                shape = [*others, size]
                _write_row(k, x, y, out, batch, rows, part * width + start, shape)


def _write_row(
    k: LoopNest,
    x: _DotOperand,
    y: _DotOperand,
    out: Buffer,
    batch: Sequence[Index],
    rows: Sequence[Index],
    start: Index,
    shape: Sequence[int],
) -> None:
    dtype = out.dtype
    with k.loops(shape) as (*first, last):
        k.store(out, (*batch, *rows, *first, last + start), storage.literal(0, dtype))
    with k.loops(x.sizes(x.contracted)) as inner:
        factor = _entry(k, x, dtype, batch, rows, inner)
        with k.loops(shape) as (*first, last):
            columns = (*first, last + start)
            factors = [factor, _entry(k, y, dtype, batch, columns, inner)]
            total = k.load(out, (*batch, *rows, *columns))
            k.store(out, (*batch, *rows, *columns), _accumulate(k, dtype, total, factors, True))


def _entry(k: LoopNest, x: _DotOperand, dtype: np.dtype, *index: Sequence[Index]) -> str:
    return k.let(storage.cast(k, x.read(k, *index), x.value.dtype, dtype))


def _accumulate(
    k: LoopNest, dtype: np.dtype, total: str, factors: list[str], in_order: bool = False
) -> str:
    product = (" & " if dtype.kind == "b" else " * ").join(factors)
    if dtype.kind in "iu":
        return f"{storage.type_name(dtype)}({total} + {product})"
    if dtype.kind == "b":
        return f"{total} | ({product})"
    if dtype.kind == "c" or in_order:
        return f"{total} + {product}"
    return k.call(instructions.add_in_any_order, total, product)


@perform.register("dot_general")
def _(
    x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any = None, **_: Any
) -> Any:
    (cx, cy), (bx, by) = dimension_numbers
    dtype = np.dtype(preferred_element_type or np.result_type(x, y))
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    nx = [next(letters) for _ in range(np.ndim(x))]
    ny = [next(letters) for _ in range(np.ndim(y))]
    for i, j in [*zip(cx, cy, strict=True), *zip(bx, by, strict=True)]:
        ny[j] = nx[i]
    rest = [n for i, n in enumerate(nx) if i not in (*cx, *bx)]
    rest += [n for j, n in enumerate(ny) if j not in (*cy, *by)]
    result = [*(nx[i] for i in bx), *rest]
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    spec = f"{''.join(nx)},{''.join(ny)}->{''.join(result)}"
    return np.einsum(spec, np.asarray(x, wide), np.asarray(y, wide)).astype(dtype)


# Large products, of operands that are views of memory.


@dataclass(frozen=True)
class _Strided:
    """A strided view of a block of memory, which starts at `offset` in it.

    The entry at an index is at the position `offset + start + sum(index * strides)`.
    """

    memory: Memory
    offset: str
    start: int
    strides: tuple[int, ...]

    @property
    def pointer(self) -> Buffer:
        """A buffer at the first entry."""
        offset = self.offset
        if self.start:
            offset = str(self.start) if offset == "0" else f"{offset} + {self.start}"
        return Buffer((), self.memory.dtype, self.memory, offset)


def _as_strided(value: ArrayExpr) -> _Strided | None:
    """Return an array as a strided view of memory, or None if its entries are computed."""
    if isinstance(value, Buffer):
        return _Strided(value.memory, value.offset, 0, strides_of(value.shape))
    k = LoopNest()
    with k.loops(value.shape) as index:
        text = k.read(value, index)
        access = k.access_of(text)
    if access is None:
        return None
    position = access.position
    variables = [i.terms[0][0] if i.terms else None for i in index]
    if {variable for variable, _ in position.terms} - set(variables):
        return None
    strides = tuple(position.factor(v) if v else 0 for v in variables)
    return _Strided(access.memory, access.offset, position.constant, strides)


@dataclass
class _Matrices:
    """A batch of matrices in memory. `pointer` is a buffer at the first entry.

    `step` is the distance between matrices, and `row` the distance between rows, in entries. If
    `transposed`, `row` is the distance between columns.
    """

    pointer: Buffer
    step: int
    transposed: bool
    row: int


def _write_call(b: Builder, x: _DotOperand, y: _DotOperand, out: Buffer) -> bool:
    """Write a call of a matrix product, if the product is large and its dtype float32 or float64.

    Return whether a call was written.
    """
    n_batches, m, n, k = x.size(x.batch), x.size(x.free), y.size(y.free), x.size(x.contracted)
    dtypes = {x.value.dtype, y.value.dtype, out.dtype}
    if len(dtypes) > 1 or out.dtype not in _CALL_FROM:
        return False
    products, rows, columns = _CALL_FROM[out.dtype]
    if m * n * k < products or m < rows or n < columns:
        return False
    left = _as_matrices(b, x, x.free, x.contracted)
    right = _as_matrices(b, y, y.contracted, y.free)
    if out.dtype == np.float32:
        if right.transposed:
            right = _as_matrices(b, y, y.contracted, y.free, always_copy=True)
        steps = (1, left.row) if left.transposed else (left.row, 1)
        numbers = [n_batches, left.step, right.step, m, n, k, *steps, right.row]
        name = b.function(products_f32)
    else:
        letters = [_TRANSPOSED if side.transposed else _NOT_TRANSPOSED for side in (left, right)]
        numbers = [n_batches, left.step, right.step, m, n, k]
        numbers += [letters[0], left.row, letters[1], right.row]
        name = b.function(products_f64)
    text = ", ".join(map(str, numbers))
    b.line(f"{name}(", out, ", ", left.pointer, ", ", right.pointer, f", {text})")
    return True


def _as_matrices(
    b: Builder,
    x: _DotOperand,
    rows: Sequence[int],
    columns: Sequence[int],
    always_copy: bool = False,
) -> _Matrices:
    """Return an operand as a batch of matrices: a view if possible, or else a copy.

    `rows` and `columns` are the axes of the operand that become the rows and the columns of a
    matrix. With `always_copy`, the operand is copied, so that rows are contiguous.
    """
    view = _as_strided(x.value)
    in_place = None if view is None or always_copy else _view_matrices(view, x, rows, columns)
    if in_place is not None:
        return in_place
    order = [*x.batch, *rows, *columns]
    positions = [order.index(axis) for axis in range(len(order))]
    moved = b.lazy(
        lambda k, index: k.read(x.value, [index[n] for n in positions]),
        x.value,
        shape=x.sizes(order),
        dtype=x.value.dtype,
    )
    n_rows, n_columns = x.size(rows), x.size(columns)
    return _Matrices(b.force(moved), n_rows * n_columns, False, n_columns)


def _view_matrices(
    view: _Strided, x: _DotOperand, rows: Sequence[int], columns: Sequence[int]
) -> _Matrices | None:
    """Return an operand as a batch of matrices without a copy, given its strided view.

    `rows` and `columns` are the axes that become rows and columns. Return None if neither the rows
    nor the columns of the matrices are contiguous.
    """
    steps = [_joint_stride(view, x, axes) for axes in (x.batch, rows, columns)]
    if None in steps:
        return None
    batch, row, column = (step or 0 for step in steps)
    n_rows, n_columns = x.size(rows), x.size(columns)
    if column == 1 and row >= n_columns:
        return _Matrices(view.pointer, batch, False, row)
    if row == 1 and column >= n_rows:
        return _Matrices(view.pointer, batch, True, column)
    return None


def _joint_stride(view: _Strided, x: _DotOperand, axes: Sequence[int]) -> int | None:
    """Return the stride of some axes of a view merged into one, or None if this is impossible."""
    long = [axis for axis in axes if x.value.shape[axis] > 1]
    for outer, inner in itertools.pairwise(long):
        if view.strides[outer] != view.strides[inner] * x.value.shape[inner]:
            return None
    return view.strides[long[-1]] if long else 0


# The functions that large products call.

#: The letters N and T, by which BLAS reads a matrix normally or transposed.
_NOT_TRANSPOSED, _TRANSPOSED = 78, 84


@external("veneer.numba.ops.simd_products")
def matrix_product(out, x, y, m, n, k, x_row, x_step, y_row):
    """Compute `out = x @ y` for float32 matrices, with `m * k` and `k * n` entries.

    `x_row` and `x_step` are the strides of the rows and the columns of `x`, and `y_row` is the
    stride of the rows of `y`, all in entries. Rows of `y` and `out` are contiguous.
    """
    for i in range(m):
        for j in range(n):
            total = np.float32(0)
            for p in range(k):
                total += x[i * x_row + p * x_step] * y[p * y_row + j]
            out[i * n + j] = total


@external("scipy.linalg.cython_blas")
def dgemm(turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Compute `c = a @ b` for float64 matrices in column-major order, as BLAS does.

    `c` has m rows and n columns, and k is the size of the contracted axis. `turn_a` and `turn_b`
    are the letters N, or T for a transposed matrix. `lda`, `ldb` and `ldc` are the strides of
    columns.
    """
    for i in range(m):
        for j in range(n):
            total = type(c[0])(0)
            for p in range(k):
                x = a[p + i * lda if turn_a == _TRANSPOSED else i + p * lda]
                y = b[j + p * ldb if turn_b == _TRANSPOSED else p + j * ldb]
                total += x * y
            c[i + j * ldc] = total


@scalar
def products_f32(out, x, y, n_batches, x_batch, y_batch, m, n, k, x_row, x_step, y_row):
    """Compute `out[i] = x[i] @ y[i]` for `n_batches` pairs of float32 matrices.

    `x_batch` and `y_batch` are the strides of matrices in entries. All other arguments are as in
    `matrix_product`.
    """
    for i in range(n_batches):
        to, a, b = at(out, i * m * n), at(x, i * x_batch), at(y, i * y_batch)
        matrix_product(to, a, b, m, n, k, x_row, x_step, y_row)


@scalar
def products_f64(out, x, y, n_batches, x_step, y_step, m, n, k, turn_x, x_row, turn_y, y_row):
    """Compute `out[i] = x[i] @ y[i]` for `n_batches` pairs of float64 matrices.

    The matrices have `m * k` and `k * n` entries. `x_step` and `y_step` are the strides of
    matrices, and `x_row` and `y_row` the strides of rows, in entries. `turn_x` and `turn_y` are the
    letters N, or T for a transposed matrix, whose columns have the stride.
    """
    one, zero = np.float64(1), np.float64(0)
    for i in range(n_batches):
        to, a, b = at(out, i * m * n), at(x, i * x_step), at(y, i * y_step)
        dgemm(np.int8(turn_y), np.int8(turn_x), n, m, k, one, b, y_row, a, x_row, zero, to, n)


# Arrays of `jax.experimental.sparse`. JAX evaluates products with gathers and scatters.


@funcify.register("bcoo_dot_general", "bcoo_todense")
def _(b: Builder, *operands: ArrayExpr, **params: Any) -> ArrayExpr:
    program = get_sparse_implementation(b.primitive)
    return b.inline_function(lambda *xs: [program(*xs, **params)], *operands)[0]


@perform.register("bcoo_todense")
def _todense(data: Any, indices: Any, *, spinfo: Any) -> Any:
    batch = indices.ndim - 2
    out = np.zeros(spinfo.shape, data.dtype)
    sizes = spinfo.shape[batch : batch + indices.shape[-1]]
    data = np.broadcast_to(data, (*spinfo.shape[:batch], *data.shape[batch:]))
    indices = np.broadcast_to(indices, (*spinfo.shape[:batch], *indices.shape[batch:]))
    for member in np.ndindex(*spinfo.shape[:batch]):
        entries, places = data[member], indices[member]
        stored = (places < np.asarray(sizes, places.dtype)).all(-1)  # not padding
        np.add.at(out[member], tuple(places[stored].T), entries[stored])
    return out


@perform.register("bcoo_dot_general")
def _(data: Any, indices: Any, rhs: Any, *, lhs_spinfo: Any, **params: Any) -> Any:
    dense = _todense(data, indices, spinfo=lhs_spinfo)
    return perform["dot_general"](dense, rhs, **params)
