"""LAPACK in compiled programs: its functions as instructions, and calls for stacks of matrices.

LAPACK reads matrices in column-major order, so rules give it transposed ones. In Python, each
function is run by SciPy's wrapper, on the memory that it is given.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, Index
from ..codegen.builder import Builder
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported
from ..maths import instructions
from ..maths.instructions import external

# Names of functions. The first letter is for the dtype.

_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}

#: Functions that have another name for complex numbers.
_COMPLEX_NAMES = {"orgqr": "ungqr", "syevd": "heevd"}


def lapack_function(name: str, dtype: np.dtype) -> Callable[..., Any]:
    """Return the instruction for a LAPACK function, such as "getrf", for a dtype."""
    return _FUNCTIONS[_name_of(name, dtype)]


def scipy_function(name: str, dtype: np.dtype) -> Callable[..., Any]:
    """Return SciPy's Python wrapper of a LAPACK function, such as "getrf", for a dtype."""
    from scipy.linalg import lapack

    return getattr(lapack, _name_of(name, dtype))


def _name_of(name: str, dtype: np.dtype) -> str:
    if dtype.kind == "c":
        plain, _, end = name.partition("_")
        name = f"{_COMPLEX_NAMES.get(plain, plain)}{'_' if end else ''}{end}"
    return f"{_LETTERS[dtype.name]}{name}"


def real_of(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the absolute values of numbers of `dtype`."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def workspace(name: str, dtype: np.dtype, *args: Any, **options: Any) -> int:
    """Return the best workspace size of a LAPACK function in entries.

    This calls SciPy's function for the size, whose name ends in `_lwork`, with the other arguments.
    """
    sizes = scipy_function(f"{name}_lwork", dtype)(*args, **options)
    return int(np.real(sizes[0]))


def workspace_for(name: str, dtype: np.dtype, *args: Any) -> int:
    """Return the best workspace size of a LAPACK function for which SciPy has no `..._lwork`.

    This calls the function with `lwork=-1`, which only computes the size.
    """
    *_, work, _ = scipy_function(name, dtype)(*args, lwork=-1)
    return int(np.real(work[0]))


# Calls, and views of arrays for them.


def check_dtype(x: ArrayExpr) -> np.dtype:
    """Return the dtype of an array. Raise `Unsupported` if LAPACK has no functions for it."""
    if x.dtype.name not in _LETTERS:
        raise Unsupported("dtype", f"{x.dtype} is not supported, numbers of 32 and 64 bits are.")
    return x.dtype


@dataclass(frozen=True)
class PerMatrix:
    """An argument of `call_lapack`: a buffer with a part for each matrix of the batch.

    Each call gets a pointer to the part of its matrix.
    """

    buffer: Buffer


@dataclass(frozen=True)
class Expression:
    """An argument of `call_lapack` that is an expression of the generated program."""

    text: str

    def __str__(self) -> str:
        return self.text


def call_lapack(
    b: Builder, name: str, dtype: np.dtype, batch: Sequence[int], args: Sequence[Any]
) -> None:
    """Write a loop that calls a LAPACK function for each matrix of a batch.

    **Arguments:**

    - `name`, `dtype`: the function, such as "getrf", and the dtype of the matrices.
    - `batch`: the shape of the batch.
    - `args`: integers, letters as `str`, `PerMatrix`, `Expression`, and buffers that all calls use.
    """
    n = math.prod(batch)
    with b.repeat(n) as step:
        pieces: list[str | Buffer] = [f"{b.function(lapack_function(name, dtype))}("]
        for arg in args:
            if isinstance(arg, PerMatrix):
                shape = arg.buffer.shape[len(batch) :]
                arg = arg.buffer.reshape((n, *shape)).part(step)
            elif isinstance(arg, str):
                arg = f"np.int8({ord(arg)})"
            pieces += [arg if isinstance(arg, Buffer) else str(arg), ", "]
        b.line(*pieces[:-1], ")")


def transpose(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """Return a stack of matrices transposed: swap the last two axes."""
    entry = lambda k, index: k.read(x, (*index[:-2], index[-1], index[-2]))
    return b.lazy(entry, x, shape=(*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype)


def conjugate(b: Builder, x: ArrayExpr) -> ArrayExpr:
    """Return the complex conjugate of an array. Return a real array unchanged."""
    if x.dtype.kind != "c":
        return x
    name = storage.type_name(x.dtype)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        text = k.let(k.read(x, index))
        return f"{name}(complex({text}.real, -{text}.imag))"

    return b.lazy(entry, x, shape=x.shape, dtype=x.dtype, cost=1)


def fill_failures(b: Builder, x: ArrayExpr, info: Buffer, value: Any = np.nan) -> ArrayExpr:
    """Return results of LAPACK calls, with `value` in place of the results of failed calls.

    `info` has an entry for each call, which is not 0 if the call failed.
    """
    n_batch = info.ndim
    filler = storage.literal(complex(value, value) if x.dtype.kind == "c" else value, x.dtype)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        succeeded = f"{k.read(info, index[:n_batch])} == 0"
        if x.dtype.kind == "c":  # `select` does not take complex numbers
            return k.let(f"{k.read(x, index)} if {succeeded} else {filler}")
        return k.let(k.call(instructions.select, succeeded, k.read(x, index), filler))

    return b.lazy(entry, x, info, shape=x.shape, dtype=x.dtype, cost=1)


def vectorize(function: Callable[..., Any], n_axes: int) -> Callable[..., Any]:
    """Return a function that applies `function` to the last `n_axes` axes of a NumPy array.

    It loops over the leading axes, and stacks the results.
    """

    def apply(x: Any) -> Any:
        inner = x.shape[x.ndim - n_axes :]
        batch = x.shape[: x.ndim - n_axes]
        results = [function(part) for part in x.reshape(math.prod(batch), *inner)]
        return np.asarray(results).reshape(*batch, *results[0].shape)

    return apply


# The functions in Python. They take SciPy's wrapper and the arguments of LAPACK.

_LOWER, _UNIT, _LEFT = (ord(letter) for letter in "LUL")
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _routine(module: str = "lapack", **names: str) -> Callable[[Any], Any]:
    """Return a decorator that registers a function as the Python version of LAPACK functions.

    `names` maps letters of dtypes to the rest of the name: `sdcz="getrf"` is for `sgetrf`,
    `dgetrf`, `cgetrf` and `zgetrf`. `module` is the module of `scipy.linalg` with the functions.
    """

    def decorate(body: Any) -> Any:
        for letters, name in names.items():
            for letter in letters:
                _FUNCTIONS[letter + name] = _make_instruction(letter + name, body, module)
        return body

    return decorate


def _make_instruction(name: str, body: Callable[..., Any], module: str) -> Callable[..., Any]:
    def run(*args):
        import scipy.linalg

        body(getattr(getattr(scipy.linalg, module), name), *args)

    plain = inspect.unwrap(run)  # tests wrap all functions, to check their annotations
    plain.__name__ = plain.__qualname__ = name
    return external(f"scipy.linalg.cython_{module}")(plain)


def _read(pointer: Any, rows: int, columns: int) -> np.ndarray:
    """Return the column-major matrix at a pointer as an array of shape `(rows, columns)`."""
    entries = [pointer[i] for i in range(rows * columns)]
    return np.asarray(entries).reshape(columns, rows).T.copy(order="F")


def _write(pointer: Any, array: Any) -> None:
    for i, x in enumerate(np.asarray(array).T.reshape(-1)):
        pointer[i] = x


def _with_info(results: Any) -> list[Any]:
    return [*results[:-1], np.int32(results[-1])]


@_routine(sdcz="potrf")
def _(routine: Any, uplo, n, a, lda, info):
    c, info[0] = _with_info(routine(_read(a, lda, n), lower=uplo == _LOWER, clean=False))
    _write(a, c)


@_routine(sdcz="trsm", module="blas")
def _(routine: Any, side, uplo, turn, diagonal, m, n, alpha, a, lda, b, ldb):
    turns = {ord("N"): 0, ord("T"): 1, ord("C"): 2}
    options = {"side": side != _LEFT, "lower": uplo == _LOWER, "trans_a": turns[turn]}
    order = m if side == _LEFT else n
    x = routine(alpha, _read(a, lda, order), _read(b, ldb, n), diag=diagonal == _UNIT, **options)
    _write(b, x)


@_routine(sdcz="getrf")
def _(routine: Any, m, n, a, lda, pivots, info):
    c, rows, info[0] = _with_info(routine(_read(a, lda, n)))
    _write(a, c)
    _write(pivots, rows + np.int32(1))


@_routine(sdcz="geqrf")
def _(routine: Any, m, n, a, lda, taus, work, lwork, info):
    c, scales, _, info[0] = _with_info(routine(_read(a, lda, n), lwork=lwork))
    _write(a, c)
    _write(taus, scales)


@_routine(sdcz="geqp3")
def _(routine: Any, m, n, a, lda, pivots, taus, work, lwork, *rest):
    c, columns, scales, _, rest[-1][0] = _with_info(routine(_read(a, lda, n), lwork=lwork))
    _write(a, c)
    _write(pivots, columns)
    _write(taus, scales)


@_routine(sd="orgqr", cz="ungqr")
def _(routine: Any, m, n, k, a, lda, taus, work, lwork, info):
    c, _, info[0] = _with_info(routine(_read(a, lda, n), _read(taus, k, 1)[:, 0], lwork=lwork))
    _write(a, c)


@_routine(sd="syevd", cz="heevd")
def _(routine: Any, job, uplo, n, a, lda, w, work, lwork, *rest):
    values, v, rest[-1][0] = _with_info(
        routine(_read(a, lda, n), lower=uplo == _LOWER, lwork=lwork)
    )
    _write(a, v)
    _write(w, values)


@_routine(sdcz="gesdd")
def _(routine: Any, job, m, n, a, lda, s, u, ldu, vt, ldvt, work, lwork, *rest):
    options = {"compute_uv": job != ord("N"), "full_matrices": job == ord("A")}
    left, values, right, rest[-1][0] = _with_info(routine(_read(a, lda, n), lwork=lwork, **options))
    _write(s, values)
    if options["compute_uv"]:
        _write(u, left)
        _write(vt, right)


@_routine(sdcz="gees")
def _(routine: Any, job, sort, chosen, n, a, lda, sdim, *rest):
    matrix = _read(a, lda, n)
    t, *_, vectors, _, rest[-1][0] = _with_info(routine(lambda *_: 0, matrix))
    _write(a, t)
    if job == ord("V"):
        _write(rest[-7 if np.iscomplexobj(matrix) else -6], vectors)


@_routine(sdcz="geev")
def _(routine: Any, left, right, n, a, lda, *rest):
    matrix = _read(a, lda, n)
    n_values = 1 if np.iscomplexobj(matrix) else 2
    wanted = [job == ord("V") for job in (left, right)]
    *results, rest[-1][0] = _with_info(routine(matrix, *wanted))
    targets = [*rest[:n_values], rest[n_values], rest[n_values + 2]]
    for target, x, is_wanted in zip(targets, results, [True] * n_values + wanted, strict=True):
        if is_wanted:
            _write(target, x)


@_routine(sdcz="gtsv")
def _(routine: Any, n, n_right, lower, diagonal, upper, b, ldb, info):
    if n == 1:  # SciPy's Python function rejects it
        _write(b, _read(b, ldb, n_right) / _read(diagonal, n, 1))
        info[0] = np.int32(_read(diagonal, n, 1)[0, 0] == 0)
        return
    bands = (_read(lower, n - 1, 1), _read(diagonal, n, 1), _read(upper, n - 1, 1))
    *_, x, info[0] = _with_info(routine(*(band[:, 0] for band in bands), _read(b, ldb, n_right)))
    _write(b, x)
