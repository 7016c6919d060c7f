"""Where the rows of a matrix lie, and which of its parts a thread does."""

from ...native.functions import native
from ...native.memory import word
from .job import NEXT_ROW, ROW_BYTES, R, W


@native
def row_of(job, batch, row):
    """The address of a row of a matrix; the next one is NEXT_ROW bytes on.

    Matrices lie by themselves, or side by side, as the heads of tokens do.
    """
    size, next_row = word(job, ROW_BYTES), word(job, NEXT_ROW)
    beside = next_row // size
    first = word(job, W) + batch % beside * size
    return first + (batch // beside * word(job, R) + row) * next_row


@native
def in_stretches(part, parts, threads):
    """Which part to do instead of one, so that what threads do in turns is a stretch for each.

    So what is fetched beforehand, behind the end of a part, is of the same thread's next.
    """
    stretch, at = part % threads, part // threads
    return stretch * (parts // threads) + min(stretch, parts % threads) + at
