"""Products of int8 activations and integer codes, exact in int32 within a tile.

    y[m, n] = x_scale[m] * sum of scale[tile, n] * (sum of x[m, k] * code[k, n] over the tile's k)

Codes are multiplied as bytes without a sign, larger by OFFSET. So sums begin with what has to be
taken off again: OFFSET times the sum of the activations.
"""

import functools
from typing import Any

from ....native.functions import compiled, native
from ....native.memory import free, word
from ..job import SCRATCH
from . import blocks, columns, few, rows
from .panel import offset


@functools.cache
def rows_kernel(kind: str) -> Any:
    """Returns a kernel where the rows of the matrix are contracted: its four functions of a job.

    `kind` is lookup1, lookup2, lookup4, int8 or uint8; what is looked up has to be integers from
    -128 to 127.
    """
    by_blocks = blocks.kernel(rows.orientation(kind), offset(kind))
    return (*map(compiled, by_blocks), _finish)


@functools.cache
def columns_kernel(kind: str) -> Any:
    """Returns a kernel where the columns are contracted; `kind` is as for `rows_kernel`."""
    by_blocks = blocks.kernel(columns.orientation(kind), offset(kind))
    *by_few, few_fits = few.kernel(kind, offset(kind))
    prepare_few, count_few, work_few = map(native, by_few)
    prepare_all, count_all, work_all = map(native, by_blocks)

    @compiled
    def prepare(job):
        if few_fits(job):
            prepare_few(job)
        else:
            prepare_all(job)

    @compiled
    def count(job):
        return count_few(job) if few_fits(job) else count_all(job)

    @compiled
    def work(job, part):
        if few_fits(job):
            work_few(job, part)
        else:
            work_all(job, part)

    return prepare, count, work, _finish


@compiled
def _finish(job):
    free(word(job, SCRATCH))
