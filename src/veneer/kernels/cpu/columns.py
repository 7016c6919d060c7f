"""The f32 kernel that contracts columns: `y[B, M, R] = x[B, M, C] @ W[B, R, C].T`.

A row of W lies in memory as it is contracted, so W is read from its first byte to its last. Codes
are decoded in panels, and x is brought into the order that they have there (`columns_x.py`). It
depends on how many rows of x there are what happens next: see `columns_few.py` and
`columns_many.py`.

Scales meet panels in three ways, by where they change:

- ONE number scales a panel, where a tile is whole panels, or all columns.
- SOME do, one each lane, where a panel is tiles of whole lanes. Lanes are several neighbouring
  columns only where codes have fewer than 8 bits.
- FOLDED into x otherwise, for all rows of W that share scales: so it is where they change from
  column to column, in the gradient of a matrix whose tiles are along the other dimension.
"""

import functools
from typing import Any

from . import columns_few, columns_many
from .columns_x import MANY, order
from .job import BATCH, SCRATCH, TC, C, M, R
from .memory import free, word
from .native import native
from .panels import COLUMNS, FOLDED, ONE, SOME, VECTORS
from .simd import compiled

_FEW_PART, _MANY_PART = columns_few.PART, columns_many.PART


@functools.cache
def kernel(kind: str) -> tuple[Any, Any, Any, Any]:
    """Returns `prepare`, `count`, `work` and `finish` for codes of this kind: Numba functions.

    A job is as `job.py` says, with x f32[BATCH, M, C] and the result f32[BATCH, M, R].

    **Raises:** `KeyError` for an unknown kind.
    """
    few, many, way = columns_few.worker(kind), columns_many.worker(kind), _way(kind)

    @compiled
    def work(job, part):
        if word(job, M) < MANY:
            few(job, part, way(job))
        else:
            many(job, part, way(job))

    return order(kind).prepare, _count, work, _finish


def _way(kind: str) -> Any:
    """What says how scales meet panels."""
    PANEL = COLUMNS[kind]
    LANE = VECTORS[kind] if kind.startswith("lookup") else PANEL

    @native
    def way(job):
        tile = word(job, TC)
        if tile % PANEL == 0 or tile == word(job, C):
            return ONE
        return SOME if PANEL % tile == 0 and tile % LANE == 0 else FOLDED

    return way


@compiled
def _count(job):
    part = _FEW_PART if word(job, M) < MANY else _MANY_PART
    return word(job, BATCH) * ((word(job, R) + part - 1) // part)


@compiled
def _finish(job):
    free(word(job, SCRATCH))
