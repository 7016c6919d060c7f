"""Run a CPU kernel on NumPy arrays, and compute the expected result.

The kernel comes from the object file that XLA calls. The driver writes a job itself, and runs its
parts in any order and on any number of threads.
"""

import ctypes
import functools
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from veneer.kernels.common.problem import BITS, PLANE_BITS, MatmulShape, row_bytes
from veneer.kernels.common.table import TABLE
from veneer.kernels.cpu import build, job
from veneer.native import machine_code

#: The kinds of codes that kernels are tested with. Other bit planes have tests of their reader.
KINDS = [kind for kind in BITS if kind not in PLANE_BITS or kind == "planes3"]


class Stored(NamedTuple):
    """A stored matrix `[B, R, C]`."""

    kind: str
    columns: int
    packed: Any  # uint8[B, R, bytes]
    scale: Any  # f32[B, R / tr, C / tc]
    table: Any  # f32[16]
    minimum: Any = None  # f32[B, R / tr, C / tc], added to scaled codes

    @property
    def codes(self) -> Any:
        """The decoded codes before scaling, f64[B, R, C]."""
        bits = BITS[self.kind]
        if bits == 8:
            dtype = getattr(ml_dtypes, self.kind, self.kind)
            return self.packed.view(dtype).astype(np.float64)
        if self.kind.startswith("planes"):
            flipped, less = self.table[:2].astype(int)
            return (fields_of_planes(self.packed, bits)[..., : self.columns] ^ flipped) - less * 1.0
        fields = [self.packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
        fields = np.stack(fields, -1).reshape(*self.packed.shape[:2], -1)
        return self.table[fields[..., : self.columns]].astype(np.float64)

    @property
    def dense(self) -> Any:
        """The dense matrix, f64[B, R, C]."""
        codes = self.codes
        tr, tc = (codes.shape[i] // self.scale.shape[i] for i in (1, 2))
        expand = lambda tiles: tiles.repeat(tr, 1).repeat(tc, 2).astype(np.float64)
        return codes * expand(self.scale) + (0 if self.minimum is None else expand(self.minimum))


def fields_of_planes(packed: Any, bits: int) -> Any:
    """Unpack numbers of `bits` bits. Byte p of a unit of 8 numbers has bit p of each of them."""
    planes = packed.reshape(*packed.shape[:-1], -1, bits, 1) >> np.arange(8) & 1
    fields = (planes.astype(int) << np.arange(bits)[:, None]).sum(-2)
    return fields.reshape(*packed.shape[:-1], -1)


def stored(
    kind: str,
    shape: tuple[int, int, int],
    tile: tuple[int, int],
    seed: int = 0,
    has_minima: bool = False,
) -> Stored:
    """Return a random matrix `[B, R, C]` with a scale per `tile`. No code is NaN.

    Bits of padding are random, too.
    """
    rng = np.random.default_rng(seed)
    batch, rows, columns = shape
    bits = BITS[kind]
    packed = rng.integers(0, 256, (batch, rows, row_bytes(columns, bits)), np.uint8)
    if kind.startswith("float8"):  # Clear a bit of the exponent, so that all codes are finite.
        packed &= 0xBF
    scale = rng.uniform(0.5, 2, (batch, rows // tile[0], columns // tile[1]))
    values = rng.integers(-128, 128, 2 ** min(bits, 4)) if bits < 8 else np.zeros(1)
    if kind.startswith("planes"):
        values = np.pad([2 ** (bits - 1)] * 2, (0, 14))
    table = np.resize(values, 16).astype(np.float32)
    minimum = rng.normal(size=scale.shape).astype(np.float32) if has_minima else None
    return Stored(kind, columns, packed, scale.astype(np.float32), table, minimum)


@functools.cache
def _functions(name: str) -> list[Any]:
    """Return the functions `prepare(job)`, `count(job)`, `work(job, part)`, `finish(job)`."""
    build.register_target(name)  # This compiles the kernel, and loads the functions that it calls.
    code = build.CACHE.cached(name, lambda: build.object_code(name))
    parts = {"prepare": 1, "count": 1, "work": 2, "finish": 1}
    addresses = machine_code.load(code, *(f"{name}_{part}" for part in parts))
    return [
        ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n_args)(address)
        for n_args, address in zip(parts.values(), addresses, strict=True)
    ]


def target_for(family: str, m: int, w: Stored) -> str:
    """Return the target of the first row of the table for a product, of a matrix of any size.

    **Arguments:**

    - `family`: the name of the target without its variant, such as `veneer_rows_lookup4`.
    - `m`: the rows of activations.
    """
    sizes, tiles = (w.packed.shape[1], w.columns), w.scale.shape[1:]
    for row in TABLE:
        k, n = sizes if row.contracting == "rows" else sizes[::-1]
        along_k, along_n = tiles if row.contracting == "rows" else tiles[::-1]
        shape = MatmulShape(
            *(row.contracting, row.activations[0], m, k, n, k // along_k), scale_columns=along_n
        )
        is_few = row.most_rows is None or m <= row.most_rows
        fits = row.fits is None or row.fits(shape, BITS[w.kind])
        is_in_family = w.kind in row.kinds and f"veneer_{row.name}_{w.kind}" == family
        if row.platform == "cpu" and is_in_family and is_few and fits:
            return row.target(w.kind)
    raise AssertionError(f"no row of the table is for {family} of {m} rows")


def run(
    family: str,
    x: Any,
    w: Stored,
    out: Any,
    x_scale: Any = None,
    threads: int = 1,
    packed: Any = None,
    cut: int = 2,
) -> None:
    """Run a kernel and write its result to `out`.

    Arrays must be contiguous, and need no alignment. Parts run from the last to the first.

    **Arguments:**

    - `family`: the name of the target without its variant.
    - `x`: f32, bf16 or int8 `[B, M, K]`.
    - `out`: f32 `[B, M, N]`.
    - `x_scale`: for int8, f32 `[B, M]` or `[B, M, tiles]`.
    - `threads`: the threads that run parts.
    - `packed`: the codes of `w` as interleaved matrices, uint8 `[B / H, R, H, bytes]`.
    - `cut`: the number of threads that the kernel plans its parts for.
    """
    prepare, count, work, finish = _functions(target_for(family, x.shape[1], w))
    arrays = (x, w.packed, w.scale, w.table, out)
    assert all(array.flags.c_contiguous for array in arrays)
    batch, rows, row_bytes = w.packed.shape
    packed = w.packed if packed is None else packed
    assert packed.flags.c_contiguous
    words = np.zeros(job.WORDS, np.int64)
    for index, value in {
        job.X: x.ctypes.data,
        job.W: packed.ctypes.data,
        job.SCALE: w.scale.ctypes.data,
        job.TABLE: w.table.ctypes.data,
        job.OUT: out.ctypes.data,
        job.X_SCALE: 0 if x_scale is None else x_scale.ctypes.data,
        job.X_SCALES: 1 if x_scale is None or x_scale.ndim == 2 else x_scale.shape[2],
        job.BATCH: batch,
        job.M: x.shape[1],
        job.R: rows,
        job.C: w.columns,
        job.ROW_BYTES: row_bytes,
        job.THREADS: cut,
        job.NEXT_ROW: packed[0, 0].nbytes,
        job.TR: rows // w.scale.shape[1],
        job.TC: w.columns // w.scale.shape[2],
        job.MINIMUM: 0 if w.minimum is None else w.minimum.ctypes.data,
    }.items():
        words[index] = value
    address = words.ctypes.data
    prepare(address)
    parts, first = range(count(address)), words[job.FIRST]
    for some in (parts[:first], parts[first:]):
        if threads == 1:
            for part in reversed(some):
                work(address, part)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda part: work(address, part), reversed(some)))
    finish(address)


def rows_contracted(x: Any, w: Stored) -> Any:
    """Return `x @ W` in f64, and the sum of the magnitudes of its terms, to compare errors with."""
    x = x.astype(np.float64)
    return x @ w.dense, np.abs(x) @ np.abs(w.dense)


def columns_contracted(x: Any, w: Stored) -> Any:
    """Return `x @ W.T` in f64, and the sum of the magnitudes of its terms."""
    dense = w.dense.swapaxes(1, 2)
    x = x.astype(np.float64)
    return x @ dense, np.abs(x) @ np.abs(dense)


def guarded(array: Any, at_end: bool = True, offset: int = 0) -> Any:
    """Return a copy that ends `offset` bytes before an inaccessible page, or begins after one.

    A kernel that reads or writes that page kills the process.
    """
    page = mmap.PAGESIZE
    size = -(-(array.nbytes + offset) // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for start in (0, page + size):
        nothing_allowed = 0
        address = ctypes.c_void_p(whole.ctypes.data + start)
        assert protect(address, ctypes.c_size_t(page), nothing_allowed) == 0
    start = page + (size - array.nbytes - offset if at_end else offset)
    copy = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
