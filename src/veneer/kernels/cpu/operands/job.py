"""A job: what a kernel is to compute, as words of 64 bits in memory that all threads read.

Addresses and sizes are written once, before any part begins, and only FAILED after that. Sizes
count entries, not bytes.
"""

from typing import Any, NamedTuple

from ....native.functions import native
from ....native.memory import free, word

#: Words that a job has, and where each is.
WORDS = 30
(
    X,  # address of the activations, [BATCH, M, K]: f32, int8 or bf16, by the kernel
    W,  # of the stored matrices, [BATCH, R, ROW_BYTES]; several may lie side by side: see NEXT_ROW
    SCALE,  # of its scales, [BATCH, R / TR, C / TC]
    TABLE,  # of what fields are worth, f32 [16]
    OUT,  # of the result, f32 [BATCH, M, N]
    X_SCALE,  # of the scales of integer activations, f32 [BATCH, M, X_SCALES]; 0 if there are none
    X_SCALES,  # of a row of these: 1, or one for each tile
    BATCH,
    M,
    R,  # rows of the matrix: K where they are contracted, else N
    C,  # columns of the matrix, as codes
    ROW_BYTES,  # that a row of a matrix has
    TR,  # rows that share a scale
    TC,  # columns that share a scale
    SCRATCH,  # what `prepare` allocates for all parts, and `finish` frees; 0 if nothing
    THREADS,  # how many there are for the parts
    PARTS,  # how many there are
    FIRST,  # so many of the parts are done before the others begin: they make what those read
    SCALE_TYPE,  # of the scales, f32 or smaller, or codes: see `scales.py`
    MINIMUM,  # address of what a code worth 0 stands for, as many as there are scales; 0 if none
    MINIMUM_TYPE,  # of these, or of the zero points that they are made of: see `scales.py`
    OFFSET,  # what those are worth more than codes of the same bits
    OUTER_SCALE,  # address of what scales that are codes are scaled by; 0 if they are none
    OUTER_SCALE_TYPE,
    OUTER_SCALE_TILES,  # codes that share one
    OUTER_MINIMUM,  # the same of minima
    OUTER_MINIMUM_TYPE,
    OUTER_MINIMUM_TILES,
    NEXT_ROW,  # bytes from a row to the next: ROW_BYTES, or of all that lie side by side
    FAILED,  # 1 where there was no memory for what the kernel needs
) = range(WORDS)


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


class JobFunctions(NamedTuple):
    """The native functions of a kernel, which compute a job in parts.

    **Arguments:**

    - `prepare(job)`: allocates memory that all parts share, or sets FAILED.
    - `count(job)`: returns the number of parts.
    - `work(job, part)`: computes one part. Threads call it at the same time.
    - `finish(job)`: frees the memory.
    """

    prepare: Any
    count: Any
    work: Any
    finish: Any


@native
def do_nothing(job):
    """Prepare or finish a job that needs no shared memory."""


@native
def free_scratch(job):
    """Finish a job whose shared memory is SCRATCH."""
    free(word(job, SCRATCH))
