"""Products of int8 activations and integer codes, exact in int32 within a tile.

    y[m, n] = x_scale[m] * sum of scale[tile, n] * (sum of x[m, k] * code[k, n] over the tile's k)

Codes are multiplied as bytes without a sign, larger by OFFSET. So sums begin with what has to be
taken off again: OFFSET times the sum of the activations.
"""

import functools
from typing import Any

from ...native.functions import compiled, native
from ...native.memory import free, word
from . import integer_blocks, integer_columns, integer_few, integer_rows
from .integer_panel import offset
from .job import SCRATCH


@functools.cache
def rows(kind: str) -> Any:
    """Returns a kernel where the rows of the matrix are contracted: its four functions of a job.

    `kind` is lookup1, lookup2, lookup4, int8 or uint8; what is looked up has to be integers from
    -128 to 127.
    """
    blocks = integer_blocks.kernel(integer_rows.orientation(kind), offset(kind))
    return (*map(compiled, blocks), _finish)


@functools.cache
def columns(kind: str) -> Any:
    """Returns a kernel where the columns are contracted; `kind` is as for `rows`."""
    blocks = integer_blocks.kernel(integer_columns.orientation(kind), offset(kind))
    *few, few_fits = integer_few.kernel(kind, offset(kind))
    prepare_few, count_few, work_few = map(native, few)
    prepare_all, count_all, work_all = map(native, blocks)

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
