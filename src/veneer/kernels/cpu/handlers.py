"""FFI handlers: a call from XLA becomes a job, whose parts a kernel computes.

All kernels of products share one handler, and all that quantise another. It is told what it needs
to know of each.
"""

from ...native.call_frame import (
    BF16,
    E8M0,
    F16,
    F32,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    S8,
    S32,
    U8,
    answer_metadata_query,
    argument_buffer,
    argument_count,
    create_error,
    data,
    dim,
    dtype,
    has_buffers,
    pool_threads,
    rank,
    result_buffer,
    result_count,
)
from ...native.functions import c_function, call, native
from ...native.memory import load_i32, set_word, store_i32, word
from ...native.threads import new_job, release, run
from ..common import kinds
from .operands import job as words
from .operands.scales import size_of

_, _INT8, _BF16 = range(len(kinds.ACTIVATIONS))
_row_bytes = native(kinds.row_bytes)
_ZERO_POINT = len(kinds.FLOATS)

#: A job of fewer products than this is done before another thread has woken up.
_WORTH_SHARING = 1 << 18


@native
def handle_product(frame, bits, contracts_rows, activations, prepare, count, work, finish):
    """Handles a call from XLA by a kernel's four C functions; returns an error's address, or 0.

    There is a result for each matrix that the same activations are multiplied by.
    """
    if answer_metadata_query(frame):
        return 0
    jobs = result_count(frame)
    group = _new_group(jobs)
    if group == 0:
        return create_error(frame, RESOURCE_EXHAUSTED, "veneer: no memory for a job")
    failure, products = 0, 0
    for i in range(jobs):
        job = _job_of(group, i)
        if not _read(frame, job, i, bits, contracts_rows, activations):
            release(group)
            return create_error(frame, INVALID_ARGUMENT, "veneer: operands do not fit together")
        products += _products(job)
    threads, has_failed = _threads(frame, products), False
    for i in range(jobs):
        job = _job_of(group, i)
        set_word(job, words.THREADS, threads)
        if word(job, words.R) * word(job, words.C) == 0:
            _fill_zeros(job, contracts_rows)
        elif _products(job) > 0:
            call(prepare, (job,))
            set_word(job, words.PARTS, call(count, (job,)))
        has_failed = has_failed or word(job, words.FAILED) != 0
    if not has_failed:
        _run_group(frame, group, work, threads)
    for i in range(jobs):
        job = _job_of(group, i)
        call(finish, (job,))
        has_failed = has_failed or word(job, words.FAILED) != 0
    if has_failed:
        failure = create_error(
            frame, RESOURCE_EXHAUSTED, "veneer: no memory for the buffers of a kernel"
        )
    release(group)
    return failure


@native
def _products(job):
    rows, columns = word(job, words.R), word(job, words.C)
    return word(job, words.BATCH) * word(job, words.M) * rows * columns


@native
def _threads(frame, products):
    """How many threads so many products are worth."""
    return max(pool_threads(frame), 1) if products >= _WORTH_SHARING else 1


@native
def _fill_zeros(job, contracts_rows):
    """A sum over nothing is 0."""
    n = word(job, words.C if contracts_rows else words.R)
    for i in range(word(job, words.BATCH) * word(job, words.M) * n):
        store_i32(word(job, words.OUT) + 4 * i, 0)


@native
def _is_array(buffer, entry, axes):
    return dtype(buffer) == entry and rank(buffer) == axes


@native
def _type(buffer):
    """Which of `kinds.FLOATS` a buffer has, or -1."""
    entry = dtype(buffer)
    if entry == F32:
        return 0
    if entry == F16:
        return 1
    if entry == BF16:
        return 2
    return 3 if entry == E8M0 else -1


@native
def _minimum_type(buffer):
    """Which of these or, behind them, of `kinds.ZERO_POINTS` a buffer has, or -1."""
    entry = dtype(buffer)
    if entry == S8:
        return _ZERO_POINT
    return _ZERO_POINT + 1 if entry == U8 else _type(buffer)


@native
def _are_numbers(type, buffer):
    return type >= 0 and rank(buffer) == 3


@native
def _type_of_codes(buffer):
    """The type of scales or minima that are codes, or -1."""
    entry = dtype(buffer)
    return _ZERO_POINT if entry == S8 else kinds.PLANES_TYPE if entry == U8 else -1


@native
def _count(type, size):
    """How many numbers so many entries of a type are; -1 if they are not whole."""
    if type != kinds.PLANES_TYPE:
        return size
    return size // kinds.PLANES * 8 if size % kinds.PLANES == 0 else -1


@native
def _is_stack(frame, index, batch):
    """Whether an operand `[places * batch, ...]` has the place of those that are meant after it."""
    size = dim(argument_buffer(frame, index), 0)
    fits = size == 0 if batch == 0 else size > 0 and size % batch == 0
    return fits and _is_array(argument_buffer(frame, index + 1), S32, 0)


@native
def _part(frame, index, batch, width):
    """The address of the part of a stack that is meant, of entries of so many bytes.

    What is outside is the first or the last, as for XLA's dynamic slice.
    """
    stack = argument_buffer(frame, index)
    if batch == 0:
        return data(stack)
    place = min(load_i32(data(argument_buffer(frame, index + 1))), dim(stack, 0) // batch - 1)
    return data(stack) + max(place, 0) * batch * dim(stack, 1) * dim(stack, 2) * width


@native
def _share(size, scales):
    """How many of `size` share each of so many scales; 0 where they cannot."""
    if scales <= 0 or size % scales != 0:
        return 0
    return size // scales


@native
def _read(frame, job, index, bits, contracts_rows, activations):
    """Fills in a job, and returns whether the operands of a call fit together."""
    is_integer = activations == _INT8
    entry = S8 if is_integer else BF16 if activations == _BF16 else F32
    lead = 2 if is_integer else 1  # the activations, and maybe their scales; the rest is each job's
    each = (argument_count(frame) - lead) // result_count(frame)
    if argument_count(frame) != lead + each * result_count(frame):
        return False
    # There may follow three of minima, two of what scales are scaled by, two of what minima are.
    has_both = each == 12
    has_minima = has_both or each == 10 or each == 8
    are_codes = has_both or each == 10 or each == 7
    if not has_minima and not are_codes and each != 5:
        return False
    first = lead + each * index
    x, matrix, out = (
        argument_buffer(frame, 0),
        argument_buffer(frame, first),
        result_buffer(frame, index),
    )
    scale, table = argument_buffer(frame, first + 2), argument_buffer(frame, first + 4)
    type_of_scale = _type_of_codes(scale) if are_codes else _type(scale)
    tiles = _count(type_of_scale, dim(scale, 2)) if rank(scale) == 3 else 0
    if not (
        _is_array(x, entry, 3)
        and (rank(matrix) == 3 or rank(matrix) == 4)
        and _are_numbers(type_of_scale, scale)
        and _is_array(table, F32, 1)
        and _is_array(out, F32, 3)
    ):
        return False
    batch, m, k, n = dim(x, 0), dim(x, 1), dim(x, 2), dim(out, 2)
    r, c = (k, n) if contracts_rows else (n, k)
    row_bytes, beside, width = _row_bytes(c, bits), 1, 1
    are_apart = rank(matrix) == 4 and dim(matrix, 1) != r  # [B1, B2, R, bytes]
    if rank(matrix) == 4 and not are_apart:  # side by side: [B / H, R, H, bytes]
        beside, width = dim(matrix, 2), row_bytes
        if is_integer or beside == 0 or batch % beside != 0:
            return False
    if are_apart:
        if dim(matrix, 2) != r or dim(matrix, 0) * dim(matrix, 1) != batch:
            return False
    elif dim(matrix, 1) != r or not _is_stack(frame, first, batch // beside):
        return False
    if not (
        dim(matrix, rank(matrix) - 1) == row_bytes
        and _is_stack(frame, first + 2, batch)
        and dim(table, 0) == 16
        and dim(out, 0) == batch
        and dim(out, 1) == m
    ):
        return False
    if is_integer:
        x_scale = argument_buffer(frame, 1)
        are_of_tiles = rank(x_scale) == 3
        if not (
            _is_array(x_scale, F32, 3 if are_of_tiles else 2)
            and dim(x_scale, 0) == batch
            and dim(x_scale, 1) == m
        ):
            return False
        if are_of_tiles and dim(x_scale, 2) != (dim(scale, 1) if contracts_rows else tiles):
            return False
        set_word(job, words.X_SCALES, dim(x_scale, 2) if are_of_tiles else 1)
        if has_minima and contracts_rows:
            return False
        set_word(job, words.X_SCALE, data(x_scale))
    if has_minima:
        minimum, offset = argument_buffer(frame, first + 5), argument_buffer(frame, first + 7)
        type = _type_of_codes(minimum) if has_both else _minimum_type(minimum)
        if not (
            _are_numbers(type, minimum)
            and dim(minimum, 1) == dim(scale, 1)
            and _count(type, dim(minimum, 2)) == tiles
            and _is_stack(frame, first + 5, batch)
            and _is_array(offset, S32, 0)
        ):
            return False
        set_word(job, words.MINIMUM, _part(frame, first + 5, batch, size_of(type)))
        set_word(job, words.MINIMUM_TYPE, type)
        set_word(job, words.OFFSET, load_i32(data(offset)))
    outer = first + 8 if has_minima else first + 5
    if are_codes and not _read_outer(frame, job, outer, batch, scale, tiles, words.OUTER_SCALE):
        return False
    if has_both and not _read_outer(
        frame, job, outer + 2, batch, scale, tiles, words.OUTER_MINIMUM
    ):
        return False
    set_word(job, words.SCALE_TYPE, type_of_scale)
    set_word(job, words.X, data(x))
    place = data(matrix) if are_apart else _part(frame, first, batch // beside, width)
    set_word(job, words.W, place)
    set_word(job, words.NEXT_ROW, beside * row_bytes)
    set_word(job, words.SCALE, _part(frame, first + 2, batch, size_of(type_of_scale)))
    set_word(job, words.M, m)
    return _write(job, table, out, batch, r, c, row_bytes, dim(scale, 1), tiles) or r * c == 0


@native
def _read_outer(frame, job, index, batch, scale, tiles, place):
    """Fills in what codes are scaled by, from a place of a job on; whether it fits to scales."""
    outer = argument_buffer(frame, index)
    type, each = _type(outer), _share(tiles, dim(outer, 2)) if rank(outer) == 3 else 0
    if not (
        _are_numbers(type, outer)
        and _is_stack(frame, index, batch)
        and dim(outer, 1) == dim(scale, 1)
        and each > 0
    ):
        return False
    set_word(job, place, _part(frame, index, batch, size_of(type)))
    set_word(job, place + 1, type)
    set_word(job, place + 2, each)
    return True


@native
def _write(job, table, out, batch, r, c, row_bytes, tile_rows, tiles):
    """Writes what all jobs have, and returns whether each tile has a scale."""
    tr, tc = _share(r, tile_rows), _share(c, tiles)
    set_word(job, words.TABLE, data(table))
    set_word(job, words.OUT, data(out))
    set_word(job, words.BATCH, batch)
    set_word(job, words.R, r)
    set_word(job, words.C, c)
    set_word(job, words.ROW_BYTES, row_bytes)
    set_word(job, words.TR, tr)
    set_word(job, words.TC, tc)
    return tr * tc > 0


@native
def handle_quantize(frame, bits, count, work):
    """Handles a call from XLA to quantise; returns an error's address, or 0."""
    if answer_metadata_query(frame):
        return 0
    job = new_job(words.WORDS)
    if job == 0:
        return create_error(frame, RESOURCE_EXHAUSTED, "veneer: no memory for a job")
    failure = 0
    if not _read_quantize(frame, job, bits):
        failure = create_error(frame, INVALID_ARGUMENT, "veneer: operands do not fit together")
    elif _products(job) > 0:
        threads = _threads(frame, _products(job))
        set_word(job, words.THREADS, threads)
        run(frame, job, work, call(count, (job,)), 0, threads)
    release(job)
    return failure


@native
def _read_quantize(frame, job, bits):
    """Fills in a job, and returns whether the operands of a call fit together."""
    if not has_buffers(frame, 2, 2):
        return False
    x, table, out, scale = (
        argument_buffer(frame, 0),
        argument_buffer(frame, 1),
        result_buffer(frame, 0),
        result_buffer(frame, 1),
    )
    if not (
        _is_array(x, F32, 3)
        and _is_array(table, F32, 1)
        and rank(out) == 3
        and _is_array(scale, F32, 3)
    ):
        return False
    batch, r, c = dim(x, 0), dim(x, 1), dim(x, 2)
    row_bytes = _row_bytes(c, bits)
    if not (
        dim(table, 0) == kinds.QUANTIZE_TABLE
        and dim(out, 0) == batch
        and dim(out, 1) == r
        and dim(out, 2) == row_bytes
        and dim(scale, 0) == batch
    ):
        return False
    set_word(job, words.X, data(x))
    set_word(job, words.SCALE, data(scale))
    set_word(job, words.M, 4)  # what a value costs, in products
    tile_rows, tiles = dim(scale, 1), dim(scale, 2)
    return _write(job, table, out, batch, r, c, row_bytes, tile_rows, tiles) or batch * r * c == 0


# Jobs of several products.

#: Words about all: how many jobs there are, the C function of a part, and how many parts are first.
_JOBS, _WORK, _FIRST = 0, 1, 2
#: How many those are.
_HEADER = 3


@native
def _new_group(jobs):
    """Returns the address of so many new jobs, which `release` frees; or 0 without memory."""
    group = new_job(_HEADER + jobs * words.WORDS)
    if group != 0:
        set_word(group, _JOBS, jobs)
    return group


@native
def _job_of(group, index):
    """Returns the address of a job."""
    return group + 8 * (_HEADER + index * words.WORDS)


@native
def _do_part(group, part):
    """Computes a part of some job."""
    job = _job_of(group, 0)
    if part < word(group, _FIRST):
        while part >= word(job, words.FIRST):
            part -= word(job, words.FIRST)
            job += 8 * words.WORDS
    else:
        part -= word(group, _FIRST)
        while part >= word(job, words.PARTS) - word(job, words.FIRST):
            part -= word(job, words.PARTS) - word(job, words.FIRST)
            job += 8 * words.WORDS
        part += word(job, words.FIRST)
    return call(word(group, _WORK), (job, part))


@native
def _run_group(frame, group, work, threads):
    """Has all parts of all jobs computed by a C function, on so many threads."""
    parts, first = 0, 0
    for i in range(word(group, _JOBS)):
        parts += word(_job_of(group, i), words.PARTS)
        first += word(_job_of(group, i), words.FIRST)
    set_word(group, _WORK, work)
    set_word(group, _FIRST, first)
    run(frame, group, c_function(_do_part, "veneer_do_part"), parts, first, threads)
