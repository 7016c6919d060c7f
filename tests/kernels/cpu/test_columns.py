"""f32 kernels that contract columns equal a dense product in f64."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from kernels.cpu.driver import KINDS, columns_contracted, guarded, run, stored
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from veneer.native import simd
from veneer.native.memory import I8, pointer
from veneer.native.simd.blocks import call_llvm

# The error of a sum in f32, in any order, relative to the sum of the magnitudes of its terms.
TOLERANCE = 1e-6


def product(kind, x, w, threads=1):
    out = np.full((x.shape[0], x.shape[1], w.packed.shape[1]), np.nan, np.float32)
    run(f"veneer_columns_{kind}", x, w, out, threads=threads)
    return out


def activations(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def check(kind, batch, m, shape, tile):
    w = stored(kind, (batch, *shape), tile)
    x = activations(batch, m, shape[1])
    expected, sizes = columns_contracted(x, w)
    assert np.all(np.abs(product(kind, x, w) - expected) <= TOLERANCE * sizes)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((13, 1024), (1, 1024)),  # one scale per row
        ((13, 1024), (1, 512)),  # a tile is several panels
        ((13, 1024), (1, 256)),
        ((7, 1024), (1, 128)),
        ((7, 1024), (1, 64)),  # a panel is several tiles, except for few bits
        ((50, 640), (1, 32)),
        ((7, 640), (1, 16)),
        ((8, 64), (1, 8)),
        ((6, 96), (1, 3)),  # tiles and panels do not divide each other
        ((6, 480), (1, 96)),  # a vector of bytes is within one tile
        ((9, 336), (1, 48)),
        ((64, 200), (32, 1)),  # tiles along the other axis
        ((50, 300), (50, 1)),
        ((6, 128), (2, 1)),
        ((12, 300), (3, 100)),  # tiles along both axes
        ((5, 15), (1, 1)),
        ((1, 1), (1, 1)),
        ((99, 33), (1, 33)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_may_have_any_shape(kind, shape, tile):
    for m in (1, 8, 26):
        check(kind, 1, m, shape, tile)


@pytest.mark.parametrize("kind", ["lookup4", "int8"])
@pytest.mark.parametrize("m", [*range(1, 18), 23, 24, 25, 400])
def test_any_number_of_rows_of_x(kind, m):
    check(kind, 2, m, (51, 320), (1, 64))


@pytest.mark.parametrize("m", [1, 2, 8, 24])
@pytest.mark.parametrize("kind", ["lookup1", "lookup4", "uint8"])
def test_rows_of_x_may_exceed_the_cache(kind, m):
    """They are then multiplied in ranges of panels, and the last panel is incomplete."""
    check(kind, 1, m, (5, 16400), (1, 16400))
    check(kind, 1, m, (5, 16400), (5, 1))


@pytest.mark.parametrize(("rows", "width"), [(16, 64), (1100, 64), (35, 128), (40, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_short_rows_may_have_one_scale_per_row(kind, rows, width):
    w = stored(kind, (2, rows, width), (1, width))
    fields = {"packed": guarded(w.packed), "scale": guarded(w.scale)}
    for m in (1, 3, 8):
        x = activations(2, m, width)
        expected, sizes = columns_contracted(x, w)
        out = guarded(np.full((2, m, rows), np.nan, np.float32))
        run(f"veneer_columns_{kind}", guarded(x), w._replace(**fields), out, threads=3)
        assert np.all(np.abs(out - expected) <= TOLERANCE * sizes)
        np.testing.assert_array_equal(out, product(kind, x, w))  # on one thread
        x[0, 0, 5], scale = np.nan, w.scale.copy()
        scale[1, 7] = np.inf
        changed = product(kind, x, w._replace(scale=scale))
        assert np.isnan(changed[0, 0]).all()
        np.testing.assert_array_equal(changed[0, 1:], out[0, 1:])
        others = [row for row in range(rows) if row != 7]
        np.testing.assert_array_equal(changed[1][:, others], out[1][:, others])


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((16, 64), (1, 64)),
        ((35, 128), (1, 128)),
        ((53, 64), (1, 16)),  # tiles within rows
        ((300, 128), (1, 32)),
        ((16, 256), (1, 64)),
        ((96, 64), (32, 1)),  # rows that share per-channel scales
        ((64, 128), (64, 1)),
        ((2048, 64), (512, 1)),
        ((48, 192), (16, 3)),
        ((32, 64), (32, 64)),
        ((40, 64), (40, 1)),  # tiles of other variants
        ((40, 64), (8, 1)),
        ((32, 192), (1, 48)),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_minima", [False, True], ids=["", "minima"])
@pytest.mark.parametrize("kind", ["lookup4", "int8", "planes5", "float8_e4m3fn"])
def test_short_rows_may_have_any_tiles(kind, has_minima, shape, tile):
    w = stored(kind, (2, *shape), tile, has_minima=has_minima)
    for m in (1, 2, 3, 7):
        x = activations(2, m, shape[1])
        expected, sizes = columns_contracted(x, w)
        assert np.all(np.abs(product(kind, x, w) - expected) <= TOLERANCE * sizes)


@pytest.mark.parametrize("kind", ["lookup2", "lookup4", "planes3", "int8", "float8_e5m2"])
@pytest.mark.parametrize(
    ("width", "tile"),
    [
        (301, (1, 301)),
        (301, (5, 1)),
        (301, (1, 43)),
        (256, (1, 256)),
        (256, (1, 32)),
        (257, (1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [1, 3, 25])
def test_memory_outside_arrays_is_not_touched(kind, width, tile, m):
    w = stored(kind, (2, 50, width), tile)
    x = activations(2, m, width)
    expected, sizes = columns_contracted(x, w)
    for at_end in (True, False):
        fields = {"packed": w.packed, "scale": w.scale, "table": w.table}
        inside = w._replace(**{name: guarded(a, at_end) for name, a in fields.items()})
        out = guarded(np.full((2, m, 50), np.nan, np.float32), at_end)
        run(f"veneer_columns_{kind}", guarded(x, at_end), inside, out)
        assert np.all(np.abs(out - expected) <= TOLERANCE * sizes)


def test_arrays_need_no_alignment():
    w = stored("lookup4", (1, 20, 320), (1, 64))
    x = activations(1, 5, 320)
    w = w._replace(packed=guarded(w.packed, offset=1), scale=guarded(w.scale, offset=4))
    expected, sizes = columns_contracted(x, w)
    assert np.all(np.abs(product("lookup4", guarded(x, offset=4), w) - expected) <= 1e-6 * sizes)


@pytest.mark.parametrize("kind", ["lookup4", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("m", [9, 24])
def test_non_finite_activations_stay_in_their_row(kind, m):
    w = stored(kind, (1, 50, 301), (1, 301))
    x = activations(1, m, 301)
    plain = product(kind, x, w)
    x[0, 3, 300], x[0, 8, 0] = np.inf, np.nan
    changed = product(kind, x, w)
    rows = [0, 1, 2, 4, 5, 6, 7]
    np.testing.assert_array_equal(changed[:, rows], plain[:, rows])
    assert np.isnan(changed[0, 8]).all()
    with np.errstate(invalid="ignore"):
        expected, _ = columns_contracted(x[:, 3:4], w)
    np.testing.assert_array_equal(changed[0, 3], expected[0, 0])


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("m", [1, 5, 24])
def test_non_finite_codes_stay_in_their_row(kind, m):
    w = stored(kind, (1, 50, 33), (1, 33))
    x = np.abs(activations(1, m, 33))
    plain = product(kind, x, w)
    w.packed[0, 20, 0] = 0x7F  # the first code of its row, after the end of another row
    changed = product(kind, x, w)
    rows = [r for r in range(50) if r != 20]
    np.testing.assert_array_equal(changed[..., rows], plain[..., rows])
    assert np.isnan(changed[..., 20]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [16, 32, 96, 288])
@pytest.mark.parametrize("m", [1, 5])
def test_non_finite_scales_stay_in_their_row(kind, tile, m):
    """If a row ends inside a panel, the scales of the next row follow in memory."""
    w = stored(kind, (1, 50, 288), (1, tile))
    x = activations(1, m, 288)
    plain = product(kind, x, w)
    w.scale[0, 20, 0] = np.nan
    changed = product(kind, x, w)
    rows = [r for r in range(50) if r != 20]
    np.testing.assert_array_equal(changed[..., rows], plain[..., rows])
    assert np.isnan(changed[..., 20]).all()


@intrinsic
def _set_float_control(typing_context, address):
    """Set the floating-point control register of an x86 CPU from an int32 at an address."""

    def emit(context, builder, signature, args):
        call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), pointer(builder, args[0], I8))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@njit
def _control_floats(address):
    _set_float_control(address)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has this control register")
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_small_codes_survive_flushing_of_denormals(kind):
    """XLA flushes denormals to zero in its threads."""
    codes = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    w = stored(kind, (1, 8, 1), (1, 1))._replace(packed=codes, scale=np.ones((1, 8, 1), np.float32))
    default, zeros = np.array([0x1F80], np.int32), np.array([0x1F80 | 0x8040], np.int32)
    x = np.ones((1, 1, 1), np.float32)
    product(kind, x, w)  # Compile the kernel before the register changes.
    _control_floats(default.ctypes.data)
    _control_floats(zeros.ctypes.data)
    found = product(kind, x, w)
    _control_floats(default.ctypes.data)
    np.testing.assert_array_equal(found.ravel(), w.dense.ravel())


@pytest.mark.parametrize("m", [5, 24])
def test_result_does_not_depend_on_threads(m):
    w = stored("lookup4", (2, 500, 320), (1, 32))
    x = activations(2, m, 320)
    np.testing.assert_array_equal(product("lookup4", x, w), product("lookup4", x, w, threads=3))


_OTHER = """
from kernels.cpu.test_columns import check
for m in (1, 2, 3, 9, 40):
    for shape, tile in [((51, 320), (1, 64)), ((9, 300), (9, 1)), ((9, 256), (1, 128))]:
        check({kind!r}, 1, m, shape, tile)
    check({kind!r}, 2, m, (40, 64), (1, 64))
"""


@pytest.mark.parametrize(("name", "kind"), [("avx2", "lookup4"), ("portable", "float8_e4m3fn")])
def test_other_instruction_sets_give_the_same_products(name, kind):
    """A process chooses its instruction set once."""
    try:
        simd.select_isa(name)
    except ValueError as reason:
        pytest.skip(str(reason))
    here = os.path.abspath("tests")
    path = os.pathsep.join([here, *sys.path])
    environment = os.environ | {"VENEER_KERNELS_ISA": name, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", _OTHER.format(kind=kind)], env=environment, check=True)
