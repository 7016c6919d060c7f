"""Products of int8 activations and integer codes, exact in int32 within a tile.

    y[m, n] = x_scale[m] * sum of scale[tile, n] * (sum of x[m, k] * code[k, n] over the tile's k)

Codes are multiplied as bytes without a sign, larger by OFFSET. So sums begin with what has to be
taken off again: OFFSET times the sum of the activations.
"""

import functools
from collections.abc import Sequence
from typing import Any

from ....native.functions import native
from ....native.memory import free, word
from ..job import SCRATCH
from ..scales import forget_wide
from . import blocks, columns, columns_few, rows, rows_few
from .panel import offset


@functools.cache
def rows_kernel(kind: str) -> Any:
    """Returns a kernel where the rows of the matrix are contracted: its four functions of a job.

    `kind` is lookup1, lookup2, lookup4, int8 or uint8; what is looked up has to be integers from
    -128 to 127.
    """
    by_blocks = blocks.kernel(rows.orientation(kind), offset(kind))
    return _by_size(rows_few.kernel(kind, offset(kind)), by_blocks)


@functools.cache
def columns_kernel(kind: str) -> Any:
    """Returns a kernel where the columns are contracted; `kind` is as for `rows_kernel`."""
    by_blocks = blocks.kernel(columns.orientation(kind), offset(kind))
    return _by_size(columns_few.kernel(kind, offset(kind)), by_blocks)


def _by_size(few: Sequence[Any], many: Sequence[Any]) -> Any:
    """Returns the functions of a job of those for few rows of activations, and of others."""
    *few, is_few = few
    prepare_few, count_few, work_few = map(native, few)
    prepare_many, count_many, work_many = map(native, many)

    @native
    def prepare(job):
        if is_few(job):
            prepare_few(job)
        else:
            prepare_many(job)

    @native
    def count(job):
        return count_few(job) if is_few(job) else count_many(job)

    @native
    def work(job, part):
        if is_few(job):
            work_few(job, part)
        else:
            work_many(job, part)

    return prepare, count, work, _finish


@native
def _finish(job):
    free(word(job, SCRATCH))
    forget_wide(job)
