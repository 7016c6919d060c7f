"""Linear algebra by LAPACK, as JAX has it on the CPU: the same functions, so the same signs.

LAPACK's matrices are column by column. Those that it may take as they are are given to it
transposed; of others it is given a transposed copy.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import bits, lapack, storage
from ..builder import Builder
from ..index import Index
from ..kernel import Kernel
from ..registry import Unsupported, funcify, perform
from ..values import Buffer, Value


def _checked(*operands: Value) -> np.dtype:
    dtype = operands[0].dtype
    if lapack.letter_of(dtype) is None:
        raise Unsupported("dtype", f"{dtype} is not supported, float32 and float64 are.")
    if any(x.size == 0 for x in operands):
        raise Unsupported("operand", "it is empty.")
    return dtype


def _call(
    b: Builder, name: str, dtype: np.dtype, n: int, args: Callable[[Callable[..., Any]], list[Any]]
) -> None:
    """Calls a function of LAPACK for each of `n` matrices.

    `args` gives its arguments: numbers, letters and buffers, given what takes the part of a buffer
    that is one matrix's.
    """
    with b.repeat(n) as step:
        pieces: list[str | Buffer] = [f"{b.function(lapack.function_of(name, dtype))}("]
        for arg in args(lambda buffer: buffer.part(step)):
            letter = isinstance(arg, str)
            text = (
                f"np.int8({ord(arg)})" if letter else arg if isinstance(arg, Buffer) else str(arg)
            )
            pieces += [text, ", "]
        b.line(*pieces[:-1], ")")


def _stacked(value: Buffer, n_axes: int) -> tuple[int, Buffer]:
    """How many arrays of so many axes there are, and those, one after another."""
    own = value.shape[value.ndim - n_axes :]
    n = math.prod(value.shape[: value.ndim - n_axes])
    return n, value.reshaped((n, *own))


def _transposed(b: Builder, x: Value) -> Value:
    """Matrices transposed."""
    entry = lambda k, index: k.read(x, (*index[:-2], index[-1], index[-2]))
    return b.lazy(entry, x, shape=(*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype)


def _known(b: Builder, x: Value, info: Buffer) -> Value:
    """The value where LAPACK was able to, and NaN elsewhere."""
    n_batch = info.ndim
    nan = storage.literal(np.nan, x.dtype)

    def entry(k: Kernel, index: tuple[Index, ...]) -> str:
        able = f"{k.read(info, index[:n_batch])} == 0"
        return k.let(k.call(bits.select, able, k.read(x, index), nan))

    return b.lazy(entry, x, info, shape=x.shape, dtype=x.dtype, cost=1)


# Cholesky's factor, and triangular systems.


@funcify.register("cholesky")
def _(b: Builder, x: Value, **_: Any) -> Value:
    dtype, n = _checked(x), x.shape[-1]
    out, info = b.copy(x), b.buffer(x.shape[:-2], np.int32)
    count, matrices = _stacked(out, 2)
    infos = _stacked(info, 0)[1]
    _call(b, "potrf", dtype, count, lambda of: ["U", n, of(matrices), n, of(infos)])
    zero = storage.literal(0, dtype)

    def entry(k: Kernel, index: tuple[Index, ...]) -> str:
        below = f"{index[-1]} <= {index[-2]}"
        return k.let(k.call(bits.select, below, k.read(out, index), zero))

    return _known(b, b.lazy(entry, out, cost=1), info)


@perform.register("cholesky")
def _(x: Any, **_: Any) -> Any:
    from scipy.linalg import lapack as own

    def factor(x: Any) -> Any:
        function = own.spotrf if x.dtype == np.float32 else own.dpotrf
        c, info = function(x, lower=True, clean=True)
        return c if info == 0 else np.full_like(x, np.nan)

    return _of_each(factor, 2)(x)


@funcify.register("triangular_solve")
def _(
    b: Builder, a: Value, y: Value, *, left_side: bool, lower: bool, transpose_a: bool,
    unit_diagonal: bool, **_: Any,
) -> Value:  # fmt: skip
    dtype, (rows, columns) = _checked(a, y), y.shape[-2:]
    n = a.shape[-1]
    out = b.copy(y)
    count, results = _stacked(out, 2)
    matrices = _stacked(b.force(a), 2)[1]
    # Row by row is transposed, for LAPACK: so sides change, and the other triangle is the lower.
    letters = [
        "R" if left_side else "L",
        "U" if lower else "L",
        "T" if transpose_a else "N",
        "U" if unit_diagonal else "N",
    ]
    one = storage.literal(1, dtype)
    _call(b, "trsm", dtype, count, lambda of: [
        *letters, columns, rows, _Text(one), of(matrices), n, of(results), columns,
    ])  # fmt: skip
    return out


class _Text:
    """An argument that is an expression."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


@perform.register("triangular_solve")
def _(
    a: Any,
    y: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
    **_: Any,
) -> Any:
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
def _(b: Builder, lower: Value, diagonal: Value, upper: Value, y: Value, **params: Any) -> Value:
    dtype, (n, n_right) = _checked(lower, y), y.shape[-2:]
    if params.get("perturb_singular"):
        raise Unsupported("perturb_singular", "True is not supported.")
    out, info = b.copy(_transposed(b, y)), b.buffer(y.shape[:-2], np.int32)
    # The first number of the lower band is none of the matrix's.
    shape = (*lower.shape[:-1], max(n - 1, 1))
    first = min(1, n - 1)
    moved = b.lazy(
        lambda k, index: k.read(lower, (*index[:-1], index[-1] + first)),
        lower,
        shape=shape,
        dtype=dtype,
    )
    count, results = _stacked(out, 2)
    bands = [_stacked(b.copy(band), 1)[1] for band in (moved, diagonal, upper)]
    infos = _stacked(info, 0)[1]
    _call(b, "gtsv", dtype, count, lambda of: [
        n, n_right, *map(of, bands), of(results), n, of(infos),
    ])  # fmt: skip
    return _known(b, _transposed(b, out), info)


@perform.register("tridiagonal_solve")
def _(lower: Any, diagonal: Any, upper: Any, y: Any, **_: Any) -> Any:
    n = y.shape[-2]
    matrix = np.zeros((*y.shape[:-1], n), y.dtype)
    places = np.arange(n)
    matrix[..., places, places] = diagonal
    matrix[..., places[1:], places[:-1]] = lower[..., 1:]
    matrix[..., places[:-1], places[1:]] = upper[..., :-1]
    return np.linalg.solve(matrix, y)


# LU.


@funcify.register("lu")
def _(b: Builder, x: Value) -> list[Value]:
    dtype, (m, n) = _checked(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(_transposed(b, x))
    pivots, info = b.buffer((*batch, min(m, n)), np.int32), b.buffer(batch, np.int32)
    count, matrices = _stacked(out, 2)
    own = [_stacked(pivots, 1)[1], _stacked(info, 0)[1]]
    _call(b, "getrf", dtype, count, lambda of: [m, n, of(matrices), m, *map(of, own)])
    first = b.lazy(
        lambda k, index: k.let(f"np.int32({k.read(pivots, index)} - 1)"),
        pivots, shape=pivots.shape, dtype=np.int32, cost=1,
    )  # fmt: skip
    return [_transposed(b, out), first, _permutation(b, first, m)]


def _permutation(b: Builder, pivots: Value, size: int) -> Value:
    """The order of rows, of which each was exchanged with that at a pivot in turn."""
    *batch, n = pivots.shape
    out = b.buffer((*batch, size), np.int32)
    with b.kernel("permutation") as k, k.loops(batch) as own:
        with k.loops([size]) as (i,):
            k.store(out, (*own, i), f"np.int32({i})")
        with k.loops([n]) as (i,):
            at = k.variable(k.read(pivots, (*own, i)), size)
            here, there = k.load(out, (*own, i)), k.load(out, (*own, at))
            k.store(out, (*own, i), there)
            k.store(out, (*own, at), here)
    return out


@funcify.register("lu_pivots_to_permutation")
def _(b: Builder, pivots: Value, *, permutation_size: int) -> Value:
    return _permutation(b, b.cheap(pivots), permutation_size)


@perform.register("lu_pivots_to_permutation")
def _(pivots: Any, *, permutation_size: int) -> Any:
    def order(pivots: Any) -> Any:
        rows = np.arange(permutation_size, dtype=np.int32)
        for i, at in enumerate(pivots):
            rows[[i, at]] = rows[[at, i]]
        return rows

    return _of_each(order, 1)(pivots)


@perform.register("lu")
def _(x: Any) -> list[Any]:
    from scipy.linalg import lapack as own

    function = own.sgetrf if x.dtype == np.float32 else own.dgetrf
    results = [function(matrix)[:2] for matrix in x.reshape(-1, *x.shape[-2:])]
    pivots = np.asarray([found for _, found in results], np.int32)
    pivots = pivots.reshape(*x.shape[:-2], -1)
    order = perform["lu_pivots_to_permutation"](pivots, permutation_size=x.shape[-2])
    return [np.asarray([c for c, _ in results]).reshape(x.shape), pivots, order]


# QR.


@funcify.register("geqrf")
def _geqrf(b: Builder, x: Value, **_: Any) -> list[Value]:
    dtype, (m, n) = _checked(x), x.shape[-2:]
    batch = x.shape[:-2]
    out = b.copy(_transposed(b, x))
    taus, info = b.buffer((*batch, min(m, n)), dtype), b.buffer((), np.int32)
    count, matrices = _stacked(out, 2)
    own = _stacked(taus, 1)[1]
    size = lapack.workspace("geqrf", dtype, m, n)
    work = b.buffer((size,), dtype)
    _call(b, "geqrf", dtype, count, lambda of: [
        m, n, of(matrices), m, of(own), work, size, info,
    ])  # fmt: skip
    return [_transposed(b, out), taus]


@funcify.register("householder_product")
def _orgqr(b: Builder, x: Value, taus: Value) -> Value:
    dtype, (m, n) = _checked(x), x.shape[-2:]
    reflections = taus.shape[-1]
    out, info = b.copy(_transposed(b, x)), b.buffer((), np.int32)
    count, matrices = _stacked(out, 2)
    own = _stacked(b.force(taus), 1)[1]
    size = lapack.workspace("geqrf", dtype, m, n)  # SciPy has none for it alone; it is as much
    work = b.buffer((size,), dtype)
    _call(b, "orgqr", dtype, count, lambda of: [
        m, n, reflections, of(matrices), m, of(own), work, size, info,
    ])  # fmt: skip
    return _transposed(b, out)


@funcify.register("qr")
def _(b: Builder, x: Value, *, pivoting: bool, full_matrices: bool, **_: Any) -> list[Value]:
    if pivoting:
        raise Unsupported("pivoting", "True is not supported.")
    m, n = x.shape[-2:]
    r, taus = _geqrf(b, x)
    rows = columns = m if full_matrices or m < n else n
    # What of those columns is no part of `r` is written over.
    pads = [(0, 0)] * (r.ndim - 1) + [(0, max(0, columns - n))]
    first = _through(b, lambda r: jnp.pad(r, pads)[..., :columns], r)
    return [_orgqr(b, first, taus), _through(b, lambda r: jnp.triu(r[..., :rows, :]), r)]


def _through(b: Builder, f: Callable[..., Any], x: Value) -> Value:
    """A function of JAX of a value."""
    (result,) = b.inline(jax.make_jaxpr(f)(jax.ShapeDtypeStruct(x.shape, x.dtype)), x)
    return result


@perform.register("qr")
def _(x: Any, *, full_matrices: bool, **_: Any) -> list[Any]:
    return [*np.linalg.qr(x, "complete" if full_matrices else "reduced")]


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
        q = q - taus[..., i, None, None] * v[..., None] * (v[..., None, :] @ q)
    return q


# Eigenvalues and singular values.


@funcify.register("eigh")
def _(
    b: Builder, x: Value, *, lower: bool, subset_by_index: Any = None, **params: Any
) -> list[Value]:
    dtype, n = _checked(x), x.shape[-1]
    _check_whole(subset_by_index, (0, n), params.get("algorithm"), ("QR", "DEFAULT"))
    batch = x.shape[:-2]
    v, w, info = b.copy(_transposed(b, x)), b.buffer((*batch, n), dtype), b.buffer(batch, np.int32)
    count, matrices = _stacked(v, 2)
    values, infos = _stacked(w, 1)[1], _stacked(info, 0)[1]
    size = lapack.workspace("syevd", dtype, n)
    places = 3 + 5 * n
    work, iwork = b.buffer((size,), dtype), b.buffer((places,), np.int32)
    _call(b, "syevd", dtype, count, lambda of: [
        "V", "L" if lower else "U", n, of(matrices), n, of(values), work, size, iwork, places,
        of(infos),
    ])  # fmt: skip
    return [_known(b, _transposed(b, v), info), _known(b, w, info)]


def _check_whole(subset: Any, whole: tuple[int, int], algorithm: Any, known: Sequence[str]) -> None:
    if subset is not None and tuple(subset) != whole:
        raise Unsupported("subset_by_index", f"{subset} is not supported.")
    if algorithm is not None and algorithm.name not in known:
        raise Unsupported("algorithm", f"{algorithm} is not supported.")


@perform.register("eigh")
def _(x: Any, *, lower: bool, **_: Any) -> list[Any]:
    w, v = np.linalg.eigh(x, "L" if lower else "U")
    return [v, w]


@funcify.register("svd")
def _(
    b: Builder, x: Value, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None,
    **params: Any,
) -> list[Value]:  # fmt: skip
    dtype, (m, n) = _checked(x), x.shape[-2:]
    few = min(m, n)
    _check_whole(subset_by_index, (0, few), params.get("algorithm"), ("DEFAULT",))
    batch, inner = x.shape[:-2], (m, n) if full_matrices else (few, few)
    out = b.copy(_transposed(b, x))
    s, info = b.buffer((*batch, few), dtype), b.buffer(batch, np.int32)
    # LAPACK does not look at what it is not asked for.
    u = b.buffer((*batch, inner[0], m), dtype) if compute_uv else s
    vt = b.buffer((*batch, n, inner[1]), dtype) if compute_uv else s
    count, matrices = _stacked(out, 2)
    results = [_stacked(u, 2)[1], _stacked(vt, 2)[1]] if compute_uv else [_stacked(s, 1)[1]] * 2
    values, infos = _stacked(s, 1)[1], _stacked(info, 0)[1]
    options = {"compute_uv": compute_uv, "full_matrices": full_matrices}
    size = lapack.workspace("gesdd", dtype, m, n, **options)
    work, iwork = b.buffer((size,), dtype), b.buffer((8 * few,), np.int32)
    job = ("A" if full_matrices else "S") if compute_uv else "N"
    _call(b, "gesdd", dtype, count, lambda of: [
        job, m, n, of(matrices), m, of(values), of(results[0]), m, of(results[1]), inner[1],
        work, size, iwork, of(infos),
    ])  # fmt: skip
    found = [s, _transposed(b, u), _transposed(b, vt)] if compute_uv else [s]
    return [_known(b, x, info) for x in found]


@perform.register("svd")
def _(x: Any, *, full_matrices: bool, compute_uv: bool, **_: Any) -> list[Any]:
    if not compute_uv:
        return [np.linalg.svd(x, compute_uv=False)]
    u, s, vt = np.linalg.svd(x, full_matrices)
    return [s, u, vt]


def _of_each(function: Callable[..., Any], n_axes: int) -> Callable[..., Any]:
    """A function of arrays of so many axes, for stacks of them."""

    def of_all(x: Any) -> Any:
        own = x.shape[x.ndim - n_axes :]
        results = [function(part) for part in x.reshape(-1, *own)]
        return np.asarray(results).reshape(*x.shape[: x.ndim - n_axes], *results[0].shape)

    return of_all
