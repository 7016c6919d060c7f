"""The f32 kernel that contracts columns: `y[B, M, R] = x[B, M, C] @ W[B, R, C].T`.

A row of W lies in memory as it is contracted, so W is read from its first byte to its last. What
happens depends on how many rows of x there are: see `columns_few.py`, `columns_short.py`
and `columns_many.py`.
"""

import functools
from typing import Any

from ....native.functions import native
from ....native.memory import free, word
from ..job import BATCH, SCRATCH, M, R
from . import columns_few, columns_many, columns_short
from .columns_x import order

#: From so many rows of x on, W is decoded for all of them.
_MANY = 24
_PART = columns_few.PART


@functools.cache
def kernel(kind: str) -> tuple[Any, Any, Any, Any]:
    """Returns `prepare`, `count`, `work` and `finish` for codes of this kind: Numba functions.

    A job is as `job.py` says, with x f32[BATCH, M, C] and the result f32[BATCH, M, R].

    **Raises:** `KeyError` for an unknown kind.
    """
    few, many, short = (of.worker(kind) for of in (columns_few, columns_many, columns_short))
    prepare_few = order(kind).prepare

    @native
    def prepare(job):
        if word(job, M) < _MANY and not columns_short.fits(job):
            prepare_few(job)

    @native
    def work(job, part):
        if word(job, M) >= _MANY:
            many(job, part)
        elif columns_short.fits(job):
            short(job, part)
        else:
            few(job, part)

    return prepare, _count, work, _finish


@native
def _count(job):
    if word(job, M) >= _MANY:
        return columns_many.count(job)
    if columns_short.fits(job):
        return columns_short.count(job)
    return word(job, BATCH) * ((word(job, R) + _PART - 1) // _PART)


@native
def _finish(job):
    free(word(job, SCRATCH))
