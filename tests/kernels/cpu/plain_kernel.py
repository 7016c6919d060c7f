"""A slow and simple kernel, to test how kernels are called.

It contracts the rows of int8 codes. Its first part copies the activations, and all other parts wait
for it. Entry 14 of the table is a number of wrong copies that delay the right copy. Entry 15 makes
an allocation fail: before all parts if it is 1, and in the last part if it is 2.
"""

import functools
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from veneer.kernels.cpu import build

#: The name has a hash of this file, because names are keys of the cache of compiled kernels.
NAME = f"veneer_test_{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
#: Columns of a part.
COLUMNS = 16


def compile() -> bytes:
    from veneer.kernels.cpu import build
    from veneer.kernels.cpu import job as words
    from veneer.native.functions import native
    from veneer.native.memory import free, load_f32, load_i8, malloc, set_word, store_f32, word

    @native
    def wrong_copies(job):
        return int(load_f32(word(job, words.TABLE) + 4 * 14))

    @native
    def failure(job):
        return load_f32(word(job, words.TABLE) + 4 * 15)

    @native
    def numbers(job):
        return word(job, words.BATCH) * word(job, words.M) * word(job, words.R)

    @native
    def prepare(job):
        if failure(job) == 1:
            set_word(job, words.FAILED, 1)
            return
        set_word(job, words.SCRATCH, malloc(4 * numbers(job)))
        set_word(job, words.FIRST, 1)

    @native
    def count(job):
        return 1 + word(job, words.BATCH) * (-(-word(job, words.C) // COLUMNS))

    @native
    def copy(job):
        for left in range(wrong_copies(job), -1, -1):
            for i in range(numbers(job)):
                number = load_f32(word(job, words.X) + 4 * i) + np.float32(left)
                store_f32(word(job, words.SCRATCH) + 4 * i, number)

    @native
    def multiply(job, part):
        m, r, c = word(job, words.M), word(job, words.R), word(job, words.C)
        tr, tc = word(job, words.TR), word(job, words.TC)
        parts = -(-c // COLUMNS)
        batch, first = part // parts, part % parts * COLUMNS
        for i in range(m):
            for column in range(first, min(first + COLUMNS, c)):
                total = 0.0
                for row in range(r):
                    x = load_f32(word(job, words.SCRATCH) + 4 * ((batch * m + i) * r + row))
                    code = load_i8(word(job, words.W) + (batch * r + row) * c + column)
                    tile = (batch * (r // tr) + row // tr) * (c // tc) + column // tc
                    scale = load_f32(word(job, words.SCALE) + 4 * tile)
                    total += np.float64(x) * code * scale
                store_f32(
                    word(job, words.OUT) + 4 * ((batch * m + i) * c + column), np.float32(total)
                )

    @native
    def work(job, part):
        if part == 0:
            copy(job)
        elif part + 1 == count(job) and failure(job) == 2:
            set_word(job, words.FAILED, 1)
        else:
            multiply(job, part - 1)

    @native
    def finish(job):
        free(word(job, words.SCRATCH))

    functions = words.JobFunctions(prepare, count, work, finish)
    return build.product_code(functions, NAME, bits=8, contracts_rows=True, dtype="float32")


@functools.cache
def target() -> str:
    return build.register_function(NAME, compile)


def product(x, codes, scale, table=None, places=(0, 0)):
    """Return `x @ (codes * scale)` by the kernel, f32 `[B, M, N]`, at these places of stacks."""
    table = jnp.zeros(16) if table is None else table
    shape = (*x.shape[:2], codes.shape[-1])
    call = jax.ffi.ffi_call(target(), jax.ShapeDtypeStruct(shape, jnp.float32))
    of_codes, of_scale = (np.asarray(place, np.int32) for place in places)
    return jax.jit(call)(x, codes, of_codes, scale, of_scale, table)


def operands(batch=1, m=3, r=64, c=100, tr=32, tc=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, m, r)).astype(np.float32)
    codes = rng.integers(-128, 128, (batch, r, c), np.int8)
    scale = rng.uniform(0.5, 2, (batch, r // tr, c // tc)).astype(np.float32)
    return x, codes, scale


def expected(x, codes, scale):
    """Return the dense product in f64."""
    tr, tc = (codes.shape[i] // scale.shape[i] if scale.shape[i] else 1 for i in (1, 2))
    return x.astype(np.float64) @ (codes * scale.repeat(tr, 1).repeat(tc, 2).astype(np.float64))


def check(*args, **sizes):
    """Check that the kernel equals the dense product."""
    x, codes, scale = operands(*args, **sizes)
    want = expected(x, codes, scale)
    np.testing.assert_allclose(product(x, codes, scale), want, rtol=1e-5, atol=1e-3)
