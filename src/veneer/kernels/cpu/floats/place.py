"""Where a stored matrix lies: by itself, or side by side with others, as the heads of tokens do."""

from ....native.functions import native
from ....native.memory import word
from ..job import NEXT_ROW, ROW_BYTES, R, W


@native
def row_of(job, batch, row):
    """The address of a row of a matrix; the next one is NEXT_ROW bytes on."""
    size, next_row = word(job, ROW_BYTES), word(job, NEXT_ROW)
    beside = next_row // size
    first = word(job, W) + batch % beside * size
    return first + (batch // beside * word(job, R) + row) * next_row
