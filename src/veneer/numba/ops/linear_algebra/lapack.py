"""Functions of LAPACK, and BLAS's triangular solve, as instructions.

In Python each is run by SciPy's wrapper of it, on the memory that it is given.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ...maths.scalar import external

#: What functions are called of complex numbers, where it is not as of real ones.
_OF_COMPLEX = {"orgqr": "ungqr", "syevd": "heevd"}

_LOWER, _UNIT, _LEFT = (ord(letter) for letter in "LUL")


def letter_of(dtype: np.dtype) -> str | None:
    """The first letter of the names of functions of a dtype, if they are here."""
    return {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}.get(dtype.name)


def real_of(dtype: np.dtype) -> np.dtype:
    """The dtype of the parts of numbers, if they have parts; and of their absolute values."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def function_of(name: str, dtype: np.dtype) -> Callable[..., Any]:
    """The function of a name without its first letter."""
    return _FUNCTIONS[_name_of(name, dtype)]


def scipy_function(name: str, dtype: np.dtype) -> Callable[..., Any]:
    """SciPy's wrapper of it, for Python."""
    from scipy.linalg import lapack

    return getattr(lapack, _name_of(name, dtype))


def _name_of(name: str, dtype: np.dtype) -> str:
    if dtype.kind == "c":
        plain, _, end = name.partition("_")
        name = f"{_OF_COMPLEX.get(plain, plain)}{'_' if end else ''}{end}"
    return f"{letter_of(dtype)}{name}"


def workspace(name: str, dtype: np.dtype, *args: Any, **options: Any) -> int:
    """How much memory a function works on, in entries, as LAPACK says it works best."""
    sizes = scipy_function(f"{name}_lwork", dtype)(*args, **options)
    return int(np.real(sizes[0]))


def workspace_for(name: str, dtype: np.dtype, *args: Any) -> int:
    """That of what SciPy has no such function for, which is asked on its arguments."""
    *_, work, _ = scipy_function(name, dtype)(*args, lwork=-1)
    return int(np.real(work[0]))


def _read(pointer: Any, rows: int, columns: int) -> np.ndarray:
    """A matrix in memory column by column."""
    entries = [pointer[i] for i in range(rows * columns)]
    return np.asarray(entries).reshape(columns, rows).T.copy(order="F")


def _write(pointer: Any, array: Any) -> None:
    for i, x in enumerate(np.asarray(array).T.reshape(-1)):
        pointer[i] = x


def _potrf(routine: Any, uplo, n, a, lda, info):
    c, info[0] = _with_info(routine(_read(a, lda, n), lower=uplo == _LOWER, clean=False))
    _write(a, c)


def _trsm(routine: Any, side, uplo, turn, diagonal, m, n, alpha, a, lda, b, ldb):
    turns = {ord("N"): 0, ord("T"): 1, ord("C"): 2}
    options = {"side": side != _LEFT, "lower": uplo == _LOWER, "trans_a": turns[turn]}
    order = m if side == _LEFT else n
    x = routine(alpha, _read(a, lda, order), _read(b, ldb, n), diag=diagonal == _UNIT, **options)
    _write(b, x)


def _getrf(routine: Any, m, n, a, lda, pivots, info):
    c, rows, info[0] = _with_info(routine(_read(a, lda, n)))
    _write(a, c)
    _write(pivots, rows + np.int32(1))


def _geqrf(routine: Any, m, n, a, lda, taus, work, lwork, info):
    c, scales, _, info[0] = _with_info(routine(_read(a, lda, n), lwork=lwork))
    _write(a, c)
    _write(taus, scales)


def _geqp3(routine: Any, m, n, a, lda, pivots, taus, work, lwork, *rest):
    c, columns, scales, _, rest[-1][0] = _with_info(routine(_read(a, lda, n), lwork=lwork))
    _write(a, c)
    _write(pivots, columns)
    _write(taus, scales)


def _orgqr(routine: Any, m, n, k, a, lda, taus, work, lwork, info):
    c, _, info[0] = _with_info(routine(_read(a, lda, n), _read(taus, k, 1)[:, 0], lwork=lwork))
    _write(a, c)


def _ungqr(routine: Any, *args):
    _orgqr(routine, *args)


def _syevd(routine: Any, job, uplo, n, a, lda, w, work, lwork, iwork, liwork, info):
    values, v, info[0] = _with_info(routine(_read(a, lda, n), lower=uplo == _LOWER, lwork=lwork))
    _write(a, v)
    _write(w, values)


def _heevd(routine: Any, job, uplo, n, a, lda, w, work, lwork, rwork, lrwork, iwork, liwork, info):
    _syevd(routine, job, uplo, n, a, lda, w, work, lwork, iwork, liwork, info)


def _gesdd(routine: Any, job, m, n, a, lda, s, u, ldu, vt, ldvt, work, lwork, *rest):
    info = rest[-1]
    options = {"compute_uv": job != ord("N"), "full_matrices": job == ord("A")}
    left, values, right, info[0] = _with_info(routine(_read(a, lda, n), lwork=lwork, **options))
    _write(s, values)
    if options["compute_uv"]:
        _write(u, left)
        _write(vt, right)


def _gees(routine: Any, job, sort, chosen, n, a, lda, sdim, *rest):
    matrix = _read(a, lda, n)
    t, *_, vectors, _, rest[-1][0] = _with_info(routine(lambda *_: 0, matrix))
    _write(a, t)
    if job == ord("V"):
        _write(rest[-7 if np.iscomplexobj(matrix) else -6], vectors)


def _geev(routine: Any, left, right, n, a, lda, *rest):
    matrix = _read(a, lda, n)
    n_values = 1 if np.iscomplexobj(matrix) else 2
    asked = [job == ord("V") for job in (left, right)]
    *results, rest[-1][0] = _with_info(routine(matrix, *asked))
    targets = [*rest[:n_values], rest[n_values], rest[n_values + 2]]
    for to, x, wanted in zip(targets, results, [True] * n_values + asked, strict=True):
        if wanted:
            _write(to, x)


def _gtsv(routine: Any, n, n_right, lower, diagonal, upper, b, ldb, info):
    if n == 1:  # which SciPy's function of Python's does not take
        _write(b, _read(b, ldb, n_right) / _read(diagonal, n, 1))
        info[0] = np.int32(_read(diagonal, n, 1)[0, 0] == 0)
        return
    bands = (_read(lower, n - 1, 1), _read(diagonal, n, 1), _read(upper, n - 1, 1))
    *_, x, info[0] = _with_info(routine(*(band[:, 0] for band in bands), _read(b, ldb, n_right)))
    _write(b, x)


def _with_info(results: Any) -> list[Any]:
    return [*results[:-1], np.int32(results[-1])]


def _instruction(name: str, body: Callable[..., Any], module: str) -> Callable[..., Any]:
    def run(*args):
        import scipy.linalg

        body(getattr(getattr(scipy.linalg, module), name), *args)

    plain = inspect.unwrap(run)  # tests wrap all functions, to check their annotations
    plain.__name__ = plain.__qualname__ = name
    return external(f"scipy.linalg.cython_{module}")(plain)


#: By the letters of the dtypes that have them.
_BODIES = {
    "sdcz": (_potrf, _trsm, _getrf, _geqrf, _geqp3, _gesdd, _gees, _geev, _gtsv),
    "sd": (_orgqr, _syevd),
    "cz": (_ungqr, _heevd),
}
_FUNCTIONS = {
    f"{letter}{body.__name__[1:]}": _instruction(
        f"{letter}{body.__name__[1:]}", body, "blas" if body is _trsm else "lapack"
    )
    for letters, bodies in _BODIES.items()
    for body in bodies
    for letter in letters
}
