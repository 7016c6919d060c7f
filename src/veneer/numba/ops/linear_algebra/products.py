"""Products: dot_general with any dimension numbers."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from ...codegen import storage
from ...codegen.arrays import ArrayExpr, Buffer, Memory
from ...codegen.builder import Builder
from ...codegen.index import Index, strides_of
from ...codegen.loop_nest import LoopNest
from ...maths import instructions
from ...registry import Unsupported, funcify, perform
from . import blas

#: From so many multiplications, rows and columns on, vectors and BLAS are faster than loops.
_FROM = {np.dtype(np.float32): (16 * 32 * 32, 6, 16), np.dtype(np.float64): (64**3, 6, 6)}
#: As many numbers of a row of the result as vectors in registers hold.
_COLUMNS = {4: 64, 8: 32}


@dataclass
class _DotOperand:
    """An operand with its axes by what they are: of batches, free, contracted."""

    value: ArrayExpr
    batch: Sequence[int]
    free: Sequence[int]
    inner: Sequence[int]

    def sizes(self, axes: Sequence[int]) -> list[int]:
        return [self.value.shape[axis] for axis in axes]

    def size(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes(axes))

    @property
    def axes(self) -> list[int]:
        return [*self.batch, *self.free, *self.inner]

    def read(self, k: LoopNest, *index: Sequence[Index]) -> str:
        """The entry at the indices of batches, free axes and contracted ones."""
        places = dict(zip(self.axes, [i for part in index for i in part], strict=True))
        return k.read(self.value, [places[axis] for axis in range(len(places))])


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
        return _of_single_entries(b, left, right)
    left.value, right.value = b.cheap(x), b.cheap(y)
    out = b.buffer(dtype=storage.computed_dtype(np.dtype(b.out.dtype)))  # in which sums are kept
    if not _by_blas(b, left, right, out):
        with b.kernel() as k:
            _by_loops(k, left, right, out)
    return b.converted(out, b.out.dtype)


def _check_algorithm(precision: Any, dtype: np.dtype) -> None:
    """Refuses algorithms that compute in another dtype than that of the result."""
    if not isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return
    same = {"float32": "F32_F32_F32", "float64": "F64_F64_F64"}.get(dtype.name)
    if getattr(precision, "name", None) not in ("DEFAULT", same):
        raise Unsupported("precision", f"{precision} is not supported for results of {dtype}.")


def _of_single_entries(b: Builder, x: _DotOperand, y: _DotOperand) -> ArrayExpr:
    """The outer product: nothing is summed."""
    dtype, none = np.dtype(b.out.dtype), [Index()] * len(x.inner)
    n_batch, n_rows = len(x.batch), len(x.free)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        batch, rest = index[:n_batch], index[n_batch:]
        factors = [
            _entry(k, x, dtype, batch, rest[:n_rows], none),
            _entry(k, y, dtype, batch, rest[n_rows:], none),
        ]
        zero = storage.literal(0, dtype)
        return k.let(
            " * ".join(factors) if dtype.kind in "fcV" else _added(k, dtype, zero, factors)
        )

    return b.lazy(entry, x.value, y.value, cost=1)


# Loops.


def _by_loops(k: LoopNest, x: _DotOperand, y: _DotOperand, out: Buffer) -> None:
    """Writes loops in the order in which memory is read."""
    rows = y.size(y.free) > 1 and not _inner_is_dense(y)
    (_by_rows if rows else _by_entries)(k, x, y, out)


def _inner_is_dense(y: _DotOperand) -> bool:
    """Whether neighbours in memory are summed up."""
    view = strided(y.value)
    long = [axis for axis in y.inner if y.value.shape[axis] > 1]
    return view is not None and bool(long) and view.strides[long[-1]] == 1


def _by_entries(k: LoopNest, x: _DotOperand, y: _DotOperand, out: Buffer) -> None:
    """A sum for each entry."""
    dtype = out.dtype
    with (
        k.loops(x.sizes(x.batch)) as batch,
        k.loops(x.sizes(x.free)) as rows,
        k.loops(y.sizes(y.free)) as columns,
    ):
        total = k.here(storage.literal(0, dtype), "total")
        with k.loops(x.sizes(x.inner)) as inner:
            factors = [
                _entry(k, x, dtype, batch, rows, inner),
                _entry(k, y, dtype, batch, columns, inner),
            ]
            k.line(f"{total} = {_added(k, dtype, total, factors)}")
        k.store(out, (*batch, *rows, *columns), total)


def _by_rows(k: LoopNest, x: _DotOperand, y: _DotOperand, out: Buffer) -> None:
    """A row of the result is the sum of rows of y, times numbers of x.

    A long one is done part by part, each of which stays in registers.
    """
    *others, n = y.sizes(y.free)
    width = _COLUMNS.get(out.dtype.itemsize, 64)
    whole = n - n % width if n > width else 0
    parts = [(0, whole // width, width), (whole, 1, n - whole)]
    with k.loops(x.sizes(x.batch)) as batch:
        for start, count, size in parts:
            if count * size == 0:
                continue
            with k.loops([count]) as (part,), k.loops(x.sizes(x.free)) as rows:
                shape = [*others, size]
                _row(k, x, y, out, batch, rows, part * width + start, shape)


def _row(
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
    with k.loops(x.sizes(x.inner)) as inner:
        factor = _entry(k, x, dtype, batch, rows, inner)
        with k.loops(shape) as (*first, last):
            columns = (*first, last + start)
            factors = [factor, _entry(k, y, dtype, batch, columns, inner)]
            total = k.load(out, (*batch, *rows, *columns))
            k.store(out, (*batch, *rows, *columns), _added(k, dtype, total, factors, True))


def _entry(k: LoopNest, x: _DotOperand, dtype: np.dtype, *index: Sequence[Index]) -> str:
    return k.let(storage.cast(k, x.read(k, *index), x.value.dtype, dtype))


def _added(
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


# BLAS, for operands that are views of memory.


@dataclass(frozen=True)
class Strided:
    """An array whose entry at an index is in memory at `start` and the index times the strides."""

    memory: Memory
    offset: str
    start: int
    strides: tuple[int, ...]

    @property
    def pointer(self) -> Buffer:
        """Its first entry."""
        offset = self.offset
        if self.start:
            offset = str(self.start) if offset == "0" else f"{offset} + {self.start}"
        return Buffer((), self.memory.dtype, self.memory, offset)


def strided(value: ArrayExpr) -> Strided | None:
    """The strides of a value that is a view of memory, as read by a kernel; None of any other."""
    if isinstance(value, Buffer):
        return Strided(value.memory, value.offset, 0, strides_of(value.shape))
    k = LoopNest()
    with k.loops(value.shape) as index:
        text = k.read(value, index)
        access = k.access_of(text)
    if access is None:
        return None
    place = access.place
    variables = [i.terms[0][0] if i.terms else None for i in index]
    if {variable for variable, _ in place.terms} - set(variables):
        return None
    strides = tuple(place.factor(v) if v else 0 for v in variables)
    return Strided(access.memory, access.offset, place.constant, strides)


@dataclass
class _Matrices:
    """Matrices in memory as BLAS takes them: how far they, and their rows, are apart."""

    pointer: Buffer
    step: int
    turned: bool
    row: int


def _by_blas(b: Builder, x: _DotOperand, y: _DotOperand, out: Buffer) -> bool:
    """Calls BLAS, if it pays and it knows the dtype."""
    n_batches, m, n, k = x.size(x.batch), x.size(x.free), y.size(y.free), x.size(x.inner)
    dtypes = {x.value.dtype, y.value.dtype, out.dtype}
    if len(dtypes) > 1 or out.dtype not in _FROM:
        return False
    products, rows, columns = _FROM[out.dtype]
    if m * n * k < products or m < rows or n < columns:
        return False
    left = _matrices(b, x, x.free, x.inner)
    right = _matrices(b, y, y.inner, y.free)
    if out.dtype == np.float32:
        if right.turned:
            right = _matrices(b, y, y.inner, y.free, in_memory=True)
        steps = (1, left.row) if left.turned else (left.row, 1)
        numbers = [n_batches, left.step, right.step, m, n, k, *steps, right.row]
        name = b.function(blas.products_f32)
    else:
        letters = [blas.TRANSPOSED if side.turned else blas.AS_IT_IS for side in (left, right)]
        numbers = [n_batches, left.step, right.step, m, n, k]
        numbers += [letters[0], left.row, letters[1], right.row]
        name = b.function(blas.products_f64)
    text = ", ".join(map(str, numbers))
    b.line(f"{name}(", out, ", ", left.pointer, ", ", right.pointer, f", {text})")
    return True


def _matrices(
    b: Builder,
    x: _DotOperand,
    rows: Sequence[int],
    columns: Sequence[int],
    in_memory: bool = False,
) -> _Matrices:
    """The matrices where they are, or else, or if they must be, row by row in memory."""
    view = strided(x.value)
    in_place = None if view is None or in_memory else _view(view, x, rows, columns)
    if in_place is not None:
        return in_place
    order = [*x.batch, *rows, *columns]
    places = [order.index(axis) for axis in range(len(order))]
    moved = b.lazy(
        lambda k, index: k.read(x.value, [index[place] for place in places]),
        x.value,
        shape=x.sizes(order),
        dtype=x.value.dtype,
    )
    n_rows, n_columns = x.size(rows), x.size(columns)
    return _Matrices(b.force(moved), n_rows * n_columns, False, n_columns)


def _view(
    view: Strided, x: _DotOperand, rows: Sequence[int], columns: Sequence[int]
) -> _Matrices | None:
    """The matrices in the memory that they are in, if BLAS can take them from there."""
    steps = [_one_stride(view, x, axes) for axes in (x.batch, rows, columns)]
    if None in steps:
        return None
    batch, row, column = (step or 0 for step in steps)
    n_rows, n_columns = x.size(rows), x.size(columns)
    if column == 1 and row >= n_columns:
        return _Matrices(view.pointer, batch, False, row)
    if row == 1 and column >= n_rows:
        return _Matrices(view.pointer, batch, True, column)
    return None


def _one_stride(view: Strided, x: _DotOperand, axes: Sequence[int]) -> int | None:
    """The stride of axes taken as one, or None if they are not evenly apart."""
    long = [axis for axis in axes if x.value.shape[axis] > 1]
    for outer, inner in itertools.pairwise(long):
        if view.strides[outer] != view.strides[inner] * x.value.shape[inner]:
            return None
    return view.strides[long[-1]] if long else 0


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
