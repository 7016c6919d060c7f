"""Products of int8 activations and integer codes, exact in int32 within a tile.

    y[m, n] = x_scale[m] * sum of scale[tile, n] * (sum of x[m, k] * code[k, n] over the tile's k)

Codes are multiplied as bytes without a sign, larger by OFFSET. So sums begin with what has to be
taken off again: OFFSET times the sum of the activations.
"""

from typing import Any

from ....native.functions import native
from ....native.memory import free, word
from ..operands.job import SCRATCH
from . import blocks, columns, columns_few, rows, rows_few
from .panel import offset


def kernel(contracting: str, kind: str, variant: str) -> tuple[Any, Any, Any, Any]:
    """Makes the functions of a job: `prepare, count, work, finish`.

    `kind` is one of `INTEGERS` or, for few rows that contract columns, of `INTEGER_PLANES`; what is
    looked up has to be integers from -128 to 127. `variant` is few or many.
    """
    if variant == "few":
        few = rows_few if contracting == "rows" else columns_few
        functions = few.kernel(kind, offset(kind))
    else:
        by = rows if contracting == "rows" else columns
        functions = blocks.kernel(by.orientation(kind), offset(kind))
    prepare, count, work = map(native, functions)
    return prepare, count, work, _finish


@native
def _finish(job):
    free(word(job, SCRATCH))
