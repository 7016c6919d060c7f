"""f32 times a stored matrix whose rows are contracted: `y[B, M, C] = x[B, M, R] @ w[B, R, C]`.

With few rows of x, time goes into reading the matrix (`rows_few.py`); with many, into arithmetic
(`rows_many.py`).
"""

from typing import Any

from ....native.functions import native
from ....native.memory import word
from ..job import TR, M
from . import rows_few, rows_many


def kernel(kind: str) -> tuple[Any, Any, Any, Any]:
    """Makes the functions of a job, for a kind of codes: `prepare, count, work, finish`."""
    many = rows_many.multiplier(kind)
    work_of_few, count_of_many, work_of_many = rows_few.worker(kind, many), many.count, many.work

    @native
    def prepare(job):
        if _is_few(job):
            rows_few.prepare(job)

    @native
    def count(job):
        return rows_few.count(job) if _is_few(job) else count_of_many(job)

    @native
    def work(job, part):
        if _is_few(job):
            work_of_few(job, part)
        else:
            work_of_many(job, part)

    @native
    def finish(job):
        if _is_few(job):
            rows_few.finish(job)

    return prepare, count, work, finish


@native
def _is_few(job):
    return word(job, M) <= rows_few.MOST and word(job, TR) >= rows_few.LEAST
