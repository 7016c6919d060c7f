"""Products of floats: `y[B, M, C] = x[B, M, R] @ W[B, R, C]`, or `x[B, M, C] @ W[B, R, C].T`.

With few rows of x, time goes into reading the matrix; with many, into arithmetic.
"""

from typing import Any

from ....native.functions import native
from ....native.memory import free, word
from ..operands.job import BATCH, SCRATCH, R
from . import columns_few, columns_many, columns_one, columns_short, rows_few, rows_many, rows_tiled
from .columns_x import order
from .pairs import Numbers
from .panels import PART


def kernel(
    contracting: str, kind: str, variant: str, numbers: Numbers
) -> tuple[Any, Any, Any, Any]:
    """Makes the functions of a job: `prepare, count, work, finish`.

    **Arguments:**

    - `contracting`: rows or columns.
    - `variant`: of `variants.py`.
    - `numbers`: what x has; pairs of bf16 only where there are many rows of it.
    """
    if contracting == "rows":
        many = rows_many.multiplier(kind, numbers)
        if variant == "many":
            return _nothing, many.count, many.work, _nothing
        work = rows_tiled.worker(kind) if variant == "tiled" else rows_few.worker(kind, many)
        return rows_few.prepare, rows_few.count, work, rows_few.finish
    if variant == "many":
        return _nothing, columns_many.count, columns_many.worker(kind, numbers), _nothing
    if variant == "short":
        return _nothing, columns_short.count, columns_short.worker(kind), _nothing
    few = columns_one if variant == "one" else columns_few
    return order(kind).prepare, _count_columns, few.worker(kind), _free_scratch


@native
def _nothing(job):
    pass


@native
def _count_columns(job):
    return word(job, BATCH) * ((word(job, R) + PART - 1) // PART)


@native
def _free_scratch(job):
    free(word(job, SCRATCH))
