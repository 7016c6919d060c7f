"""FFI handlers: functions that XLA calls, and that run the kernels.

A handler reads the operands of a call into jobs, and threads compute the parts of the jobs. All
kernels of products share one handler, and all kernels that quantize share another. The C functions
of a kernel and constants such as the bits of its codes are arguments of the handler.
"""

from ...native.functions import call, native
from ...native.memory import load_i32, set_word, store_i32, word
from ...native.xla_calls import (
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
    new_job,
    pool_threads,
    rank,
    release,
    result_buffer,
    result_count,
    run,
)
from ..common.problem import ACTIVATIONS, PLANES, PLANES_TYPE
from ..common.table import QUANTIZE_TABLE
from . import job as words
from .decoding import row_bytes
from .job import job_address, new_group, run_group
from .scales import ZERO_POINT_TYPE, entry_bytes

_, _INT8, _BF16 = range(len(ACTIVATIONS))

#: A job with fewer multiplications than this is complete before another thread wakes up.
_MULTI_THREADED = 1 << 18


@native
def handle_product(frame, bits, contracts_rows, activations, prepare, count, work, finish):
    """Handle a call from XLA that multiplies. Return the address of an error, or 0.

    A call multiplies the same activations by one or more matrices, and has one result per matrix.

    **Arguments:**

    - `frame`: the address of the call frame, XLA's structure with the operands of the call.
    - `bits`, `contracts_rows`: the bits per code, and whether the rows of the matrices are
      contracted, not their columns.
    - `activations`: the dtype of activations, as an index into `ACTIVATIONS` of common/problem.py.
    - `prepare`, `count`, `work`, `finish`: the C functions of the kernel: see `JobFunctions`.
    """
    if answer_metadata_query(frame):
        return 0
    jobs = result_count(frame)
    group = new_group(jobs)
    if group == 0:
        return create_error(frame, RESOURCE_EXHAUSTED, "veneer: no memory for a job")
    failure, multiplications = 0, 0
    for i in range(jobs):
        job = job_address(group, i)
        if not _read_product(frame, job, i, bits, contracts_rows, activations):
            release(group)
            return create_error(frame, INVALID_ARGUMENT, "veneer: operands do not fit together")
        multiplications += _count_multiplications(job)
    threads, has_failed = _count_threads(frame, multiplications), False
    for i in range(jobs):
        job = job_address(group, i)
        set_word(job, words.THREADS, threads)
        if word(job, words.R) * word(job, words.C) == 0:
            _fill_zeros(job, contracts_rows)
        elif _count_multiplications(job) > 0:
            call(prepare, (job,))
            set_word(job, words.PARTS, call(count, (job,)))
        has_failed = has_failed or word(job, words.FAILED) != 0
    if not has_failed:
        run_group(frame, group, work, threads)
    for i in range(jobs):
        job = job_address(group, i)
        call(finish, (job,))
        has_failed = has_failed or word(job, words.FAILED) != 0
    if has_failed:
        failure = create_error(
            frame, RESOURCE_EXHAUSTED, "veneer: no memory for the buffers of a kernel"
        )
    release(group)
    return failure


@native
def _count_multiplications(job):
    rows, columns = word(job, words.R), word(job, words.C)
    return word(job, words.BATCH) * word(job, words.M) * rows * columns


@native
def _count_threads(frame, multiplications):
    return max(pool_threads(frame), 1) if multiplications >= _MULTI_THREADED else 1


@native
def _fill_zeros(job, contracts_rows):
    # The contracted axis is empty.
    n = word(job, words.C if contracts_rows else words.R)
    for i in range(word(job, words.BATCH) * word(job, words.M) * n):
        store_i32(word(job, words.OUT) + 4 * i, 0)


@native
def _is_array(buffer, entry, axes):
    return dtype(buffer) == entry and rank(buffer) == axes


# A type is the number of a dtype of scales or minima: see `scales.py`.


@native
def _float_type(buffer):
    # An index into `FLOATS` of common/problem.py, or -1 for any other dtype.
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
    # Minima are floats, and zero points are int8 or uint8.
    entry = dtype(buffer)
    if entry == S8:
        return ZERO_POINT_TYPE
    return ZERO_POINT_TYPE + 1 if entry == U8 else _float_type(buffer)


@native
def _code_type(buffer):
    # Codes are int8, or uint8 if they are bit planes.
    entry = dtype(buffer)
    return ZERO_POINT_TYPE if entry == S8 else PLANES_TYPE if entry == U8 else -1


@native
def _has_tiles(type, buffer):
    return type >= 0 and rank(buffer) == 3


@native
def _count_tiles(type, size):
    """Return how many scales are stored in an axis of `size` entries.

    `type` is the number of the dtype of the entries: see `scales.py`. If scales are codes in bit
    planes, 8 scales take PLANES bytes. Return -1 if `size` is not a multiple of that.
    """
    if type != PLANES_TYPE:
        return size
    return size // PLANES * 8 if size % PLANES == 0 else -1


# A stack is an operand `[places * batch, ...]`, and the next operand is the index of a place. XLA
# would copy that place with a dynamic slice. A kernel reads it in the stack.


@native
def _is_stack(frame, index, batch):
    """Return whether operand `index` of a call is a stack, and the next operand an index of it.

    `frame` is the address of the call frame. A stack `[places * batch, ...]` has the matrices of
    several places, `batch` for each. The next operand selects a place.
    """
    size = dim(argument_buffer(frame, index), 0)
    fits = size == 0 if batch == 0 else size > 0 and size % batch == 0
    return fits and _is_array(argument_buffer(frame, index + 1), S32, 0)


@native
def _place_address(frame, index, batch, width):
    """Return the address of the matrices that a call selects from its operand `index`, a stack.

    A stack `[places * batch, ...]` has `batch` matrices per place, with entries of `width` bytes.
    The next operand selects a place. Out of range, it selects the first or the last place, as in
    XLA's dynamic slice. `frame` is the address of the call frame.
    """
    stack = argument_buffer(frame, index)
    if batch == 0:
        return data(stack)
    place = min(load_i32(data(argument_buffer(frame, index + 1))), dim(stack, 0) // batch - 1)
    return data(stack) + max(place, 0) * batch * dim(stack, 1) * dim(stack, 2) * width


@native
def _tile_size(size, scales):
    """Return how many of `size` entries share a scale, or 0 if `scales` does not divide `size`."""
    if scales <= 0 or size % scales != 0:
        return 0
    return size // scales


@native
def _read_product(frame, job, index, bits, contracts_rows, activations):
    """Read the operands of matrix `index` of a call, and write the words of its product to `job`.

    Return whether the operands fit together. `frame` is the address of the call frame, and the
    other arguments are the same as for `handle_product`.

    The operands are x, for int8 also its scales, and then the operands of each matrix: the matrix
    and scales as stacks, and the table. Minima may follow as a stack and an offset, and then outer
    scales of the scales, or of scales and minima, as stacks. A stack is two operands.
    """
    is_integer = activations == _INT8
    entry = S8 if is_integer else BF16 if activations == _BF16 else F32
    lead = 2 if is_integer else 1
    count = (argument_count(frame) - lead) // result_count(frame)
    if argument_count(frame) != lead + count * result_count(frame):
        return False
    # 5 operands: matrix, scales and table. Minima add 3, and the outer scales of each leaf add 2.
    has_code_minima = count == 12
    has_minima = has_code_minima or count == 10 or count == 8
    has_code_scales = has_code_minima or count == 10 or count == 7
    if not has_minima and not has_code_scales and count != 5:
        return False
    first = lead + count * index
    x, matrix, out = (
        argument_buffer(frame, 0),
        argument_buffer(frame, first),
        result_buffer(frame, index),
    )
    scale, table = argument_buffer(frame, first + 2), argument_buffer(frame, first + 4)
    scale_type = _code_type(scale) if has_code_scales else _float_type(scale)
    tiles = _count_tiles(scale_type, dim(scale, 2)) if rank(scale) == 3 else 0
    if not (
        _is_array(x, entry, 3)
        and (rank(matrix) == 3 or rank(matrix) == 4)
        and _has_tiles(scale_type, scale)
        and _is_array(table, F32, 1)
        and _is_array(out, F32, 3)
    ):
        return False
    batch, m, k, n = dim(x, 0), dim(x, 1), dim(x, 2), dim(out, 2)
    r, c = (k, n) if contracts_rows else (n, k)
    matrix_row, heads, width = row_bytes(c, bits), 1, 1
    has_two_batch_axes = rank(matrix) == 4 and dim(matrix, 1) != r  # [B1, B2, R, bytes]
    if rank(matrix) == 4 and not has_two_batch_axes:  # interleaved: [B / H, R, H, bytes]
        heads, width = dim(matrix, 2), matrix_row
        if is_integer or heads == 0 or batch % heads != 0:
            return False
    if has_two_batch_axes:
        if dim(matrix, 2) != r or dim(matrix, 0) * dim(matrix, 1) != batch:
            return False
    elif dim(matrix, 1) != r or not _is_stack(frame, first, batch // heads):
        return False
    if not (
        dim(matrix, rank(matrix) - 1) == matrix_row
        and _is_stack(frame, first + 2, batch)
        and dim(table, 0) == 16
        and dim(out, 0) == batch
        and dim(out, 1) == m
    ):
        return False
    if is_integer:
        x_scale = argument_buffer(frame, 1)
        has_x_tiles = rank(x_scale) == 3
        if not (
            _is_array(x_scale, F32, 3 if has_x_tiles else 2)
            and dim(x_scale, 0) == batch
            and dim(x_scale, 1) == m
        ):
            return False
        if has_x_tiles and dim(x_scale, 2) != (dim(scale, 1) if contracts_rows else tiles):
            return False
        set_word(job, words.X_SCALES, dim(x_scale, 2) if has_x_tiles else 1)
        if has_minima and contracts_rows:
            return False
        set_word(job, words.X_SCALE, data(x_scale))
    if has_minima:
        minimum, offset = argument_buffer(frame, first + 5), argument_buffer(frame, first + 7)
        type = _code_type(minimum) if has_code_minima else _minimum_type(minimum)
        if not (
            _has_tiles(type, minimum)
            and dim(minimum, 1) == dim(scale, 1)
            and _count_tiles(type, dim(minimum, 2)) == tiles
            and _is_stack(frame, first + 5, batch)
            and _is_array(offset, S32, 0)
        ):
            return False
        minima = _place_address(frame, first + 5, batch, entry_bytes(type))
        set_word(job, words.MINIMUM, minima)
        set_word(job, words.MINIMUM_TYPE, type)
        set_word(job, words.OFFSET, load_i32(data(offset)))
    outer = first + 8 if has_minima else first + 5
    if has_code_scales and not _read_outer_scales(
        frame, job, outer, batch, scale, tiles, words.OUTER_SCALE
    ):
        return False
    if has_code_minima and not _read_outer_scales(
        frame, job, outer + 2, batch, scale, tiles, words.OUTER_MINIMUM
    ):
        return False
    set_word(job, words.SCALE_TYPE, scale_type)
    set_word(job, words.X, data(x))
    w = data(matrix) if has_two_batch_axes else _place_address(frame, first, batch // heads, width)
    set_word(job, words.W, w)
    set_word(job, words.NEXT_ROW, heads * matrix_row)
    scales = _place_address(frame, first + 2, batch, entry_bytes(scale_type))
    set_word(job, words.SCALE, scales)
    set_word(job, words.M, m)
    has_all_scales = _write_sizes(job, table, out, batch, r, c, matrix_row, dim(scale, 1), tiles)
    return has_all_scales or r * c == 0


@native
def _read_outer_scales(frame, job, index, batch, scale, tiles, first_word):
    """Read outer scales, the scales of `scale`, which are operand `index` of a call.

    Write their address, the number of their dtype, and the number of codes per outer scale to the
    words of `job` from `first_word` on. `scale` is a buffer of codes, with `tiles` codes per row.
    Return whether the outer scales fit it.
    """
    outer = argument_buffer(frame, index)
    type, share = _float_type(outer), 0
    if rank(outer) == 3:
        share = _tile_size(tiles, dim(outer, 2))
    if not (
        _has_tiles(type, outer)
        and _is_stack(frame, index, batch)
        and dim(outer, 1) == dim(scale, 1)
        and share > 0
    ):
        return False
    set_word(job, first_word, _place_address(frame, index, batch, entry_bytes(type)))
    set_word(job, first_word + 1, type)
    set_word(job, first_word + 2, share)
    return True


@native
def _write_sizes(job, table, out, batch, r, c, matrix_row, tile_rows, tiles):
    """Write the addresses of the lookup table and the result, and all sizes, to the words of `job`.

    The matrix is `[r, c]`, its rows have `matrix_row` bytes, and it has `[tile_rows, tiles]` tiles.
    `table` and `out` are buffers. Return whether the tiles divide the matrix.
    """
    tr, tc = _tile_size(r, tile_rows), _tile_size(c, tiles)
    set_word(job, words.TABLE, data(table))
    set_word(job, words.OUT, data(out))
    set_word(job, words.BATCH, batch)
    set_word(job, words.R, r)
    set_word(job, words.C, c)
    set_word(job, words.ROW_BYTES, matrix_row)
    set_word(job, words.TR, tr)
    set_word(job, words.TC, tc)
    return tr * tc > 0


@native
def handle_quantize(frame, bits, count, work):
    """Handle a call from XLA that quantizes. Return the address of an error, or 0.

    `frame` is the address of the call frame, XLA's structure with the operands of the call. `bits`
    are the bits per code. `count` and `work` are the C functions of the kernel: see `JobFunctions`.
    """
    if answer_metadata_query(frame):
        return 0
    job = new_job(words.WORDS)
    if job == 0:
        return create_error(frame, RESOURCE_EXHAUSTED, "veneer: no memory for a job")
    failure = 0
    if not _read_quantize(frame, job, bits):
        failure = create_error(frame, INVALID_ARGUMENT, "veneer: operands do not fit together")
    elif _count_multiplications(job) > 0:
        threads = _count_threads(frame, _count_multiplications(job))
        set_word(job, words.THREADS, threads)
        run(frame, job, work, call(count, (job,)), 0, threads)
    release(job)
    return failure


@native
def _read_quantize(frame, job, bits):
    """Read the operands of a call that quantizes, and write the words that describe it to `job`.

    Return whether the operands fit together.
    """
    if not has_buffers(frame, 2, 2):
        return False
    x, table = argument_buffer(frame, 0), argument_buffer(frame, 1)
    out, scale = result_buffer(frame, 0), result_buffer(frame, 1)
    if not (
        _is_array(x, F32, 3)
        and _is_array(table, F32, 1)
        and rank(out) == 3
        and _is_array(scale, F32, 3)
    ):
        return False
    batch, r, c = dim(x, 0), dim(x, 1), dim(x, 2)
    matrix_row = row_bytes(c, bits)
    if not (
        dim(table, 0) == QUANTIZE_TABLE
        and dim(out, 0) == batch
        and dim(out, 1) == r
        and dim(out, 2) == matrix_row
        and dim(scale, 0) == batch
    ):
        return False
    set_word(job, words.X, data(x))
    set_word(job, words.SCALE, data(scale))
    # To quantize a value takes about as long as this number of multiplications.
    set_word(job, words.M, 4)
    has_all_scales = _write_sizes(
        job, table, out, batch, r, c, matrix_row, dim(scale, 1), dim(scale, 2)
    )
    return has_all_scales or batch * r * c == 0
