"""Jobs: the addresses and sizes of products, as 64-bit words in memory that all threads read.

A job is one product. The handler writes its words before the first part runs, and `prepare` of the
kernel writes SCRATCH and FIRST. After that, only FAILED changes. Sizes count entries, not bytes. W
is a stored matrix `[R, C]`, and a tile of it is `[TR, TC]`.
"""

from typing import Any, NamedTuple

from ...native.functions import c_function, call, native
from ...native.memory import free, set_word, word
from ...native.xla_calls import new_job, run

#: The number of words of a job, and the index of each.
WORDS = 30
(
    X,  # address of the activations [BATCH, M, K]: f32, int8 or bf16, depending on the kernel
    W,  # address of the stored matrices [BATCH, R, ROW_BYTES], or interleaved: see NEXT_ROW
    SCALE,  # address of the scales [BATCH, R / TR, C / TC]
    TABLE,  # address of the numbers to decode codes with (`Codes.table`), f32 [16]
    OUT,  # address of the result, f32 [BATCH, M, N]
    X_SCALE,  # address of the scales of int8 activations, f32 [BATCH, M, X_SCALES], or 0
    X_SCALES,  # scales per row of activations: 1, or one per tile
    BATCH,
    M,  # rows of the activations
    R,  # rows of W: K if rows are contracted, otherwise N
    C,  # columns of W, in codes
    ROW_BYTES,  # bytes of a row of one matrix
    TR,  # rows that share a scale
    TC,  # columns that share a scale
    SCRATCH,  # address of memory that `prepare` allocates and `finish` frees, or 0
    THREADS,  # number of threads that compute parts
    PARTS,  # number of parts
    FIRST,  # number of parts that must be complete before the other parts start
    SCALE_TYPE,  # type of the scales: an index into FLOATS, or a type of codes (see `scales.py`)
    MINIMUM,  # address of the minima, in the shape of the scales, or 0
    MINIMUM_TYPE,  # type of the minima, or of the zero points they are computed from
    OFFSET,  # the minimum of a zero point is (OFFSET - zero_point) * scale
    OUTER_SCALE,  # address of the scales of scales that are codes, or 0
    OUTER_SCALE_TYPE,
    OUTER_SCALE_TILES,  # number of scales that share an outer scale
    OUTER_MINIMUM,  # address of the scales of minima that are codes, or 0
    OUTER_MINIMUM_TYPE,
    OUTER_MINIMUM_TILES,
    NEXT_ROW,  # row stride in bytes: ROW_BYTES, or H * ROW_BYTES if rows of H matrices alternate
    FAILED,  # 1 if an allocation of the kernel failed
) = range(WORDS)


@native
def count_interleaved(job):
    """Return H, the number of stored matrices of a job whose rows alternate in memory, or 1.

    Such interleaved matrices are stored as `[BATCH / H, R, H, ROW_BYTES]`, like the heads of
    tokens. With H = 1, each matrix is contiguous.
    """
    return word(job, NEXT_ROW) // word(job, ROW_BYTES)


@native
def row_address(job, batch, row):
    """Return the address of row `row` of the stored matrix with index `batch`.

    The next row of the matrix is NEXT_ROW bytes later.
    """
    heads = count_interleaved(job)
    first = word(job, W) + batch % heads * word(job, ROW_BYTES)
    return first + (batch // heads * word(job, R) + row) * word(job, NEXT_ROW)


@native
def contiguous_part(part, parts, threads):
    """Renumber part `part` of `parts` parts, so that each thread gets a contiguous range of parts.

    Threads take parts in turn: thread t of `threads` takes t, then t + threads. With contiguous
    ranges, a thread prefetches memory that its own next part reads.
    """
    thread, turn = part % threads, part // threads
    return thread * (parts // threads) + min(thread, parts % threads) + turn


class JobFunctions(NamedTuple):
    """The native functions of a kernel.

    `job` is the address of the words that describe a product. A part is a share of the product
    that one thread computes.

    **Arguments:**

    - `prepare(job)`: allocates memory that all parts share, or sets FAILED.
    - `count(job)`: returns the number of parts.
    - `work(job, part)`: computes one part. Threads call it at the same time.
    - `finish(job)`: frees the memory that `prepare` allocated.
    """

    prepare: Any
    count: Any
    work: Any
    finish: Any


@native
def do_nothing(job):
    """Do nothing. This is `prepare` or `finish` of a kernel that needs no memory."""


@native
def free_scratch(job):
    """Free the memory at SCRATCH. This is `finish` of a kernel whose `prepare` allocates it."""
    free(word(job, SCRATCH))


# A group is the jobs of one call. It begins with a header of words: the number of jobs, the C
# function that computes a part, and the number of parts that must be complete before the others.
_JOBS, _WORK, _GROUP_FIRST = 0, 1, 2
_HEADER = 3


@native
def new_group(jobs):
    """Allocate the words of `jobs` products that one call computes. Return their address.

    Return 0 if there is too little memory. `release` frees the words.
    """
    group = new_job(_HEADER + jobs * WORDS)
    if group != 0:
        set_word(group, _JOBS, jobs)
    return group


@native
def job_address(group, index):
    """Return the address of the words of product `index` of the products at `group`."""
    return group + 8 * (_HEADER + index * WORDS)


@native
def _do_part(group, part):
    """Compute part `part` of all products at `group`.

    Parts are numbered over all products: the first FIRST parts of each product, then all others.
    """
    job = job_address(group, 0)
    if part < word(group, _GROUP_FIRST):
        while part >= word(job, FIRST):
            part -= word(job, FIRST)
            job += 8 * WORDS
    else:
        part -= word(group, _GROUP_FIRST)
        while part >= word(job, PARTS) - word(job, FIRST):
            part -= word(job, PARTS) - word(job, FIRST)
            job += 8 * WORDS
        part += word(job, FIRST)
    return call(word(group, _WORK), (job, part))


@native
def run_group(frame, group, work, threads):
    """Compute all parts of the products at `group`, on `threads` threads.

    `frame` is the address of XLA's call frame. `work` is the address of the C function
    `work(job, part)`, which computes a part.
    """
    parts, first = 0, 0
    for i in range(word(group, _JOBS)):
        parts += word(job_address(group, i), PARTS)
        first += word(job_address(group, i), FIRST)
    set_word(group, _WORK, work)
    set_word(group, _GROUP_FIRST, first)
    run(frame, group, c_function(_do_part, "veneer_do_part"), parts, first, threads)
