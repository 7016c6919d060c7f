"""f32 kernels that contract rows equal a dense product, and stay inside their arrays."""

import os
import subprocess
import sys

import numpy as np
import pytest
from kernels.cpu.driver import KINDS, guarded, rows_contracted, run, stored

from veneer.native.simd import ISA, ISAS, select_isa

#: B, M, R, C, TR, TC: few and many rows of x, tiles of all shapes, and a rest in every dimension.
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (1, 1, 64, 128, 64, 1),
    (1, 1, 300, 4500, 60, 4500),
    (1, 2, 300, 513, 300, 27),
    (1, 3, 1000, 40, 1000, 40),
    (1, 4, 17, 131, 17, 1),
    (2, 5, 256, 129, 64, 3),
    (1, 8, 333, 640, 111, 1),
    (1, 16, 96, 257, 32, 257),
    (1, 17, 100, 130, 100, 130),
    (2, 7, 96, 256, 1, 32),
    (1, 6, 49, 301, 7, 43),
    (1, 200, 5, 9, 5, 3),
    (2, 1, 300, 64, 300, 1),  # values of an attention head
    (1, 2, 100, 192, 50, 64),
    (1, 7, 48, 64, 48, 1),
    (1, 16, 40, 64, 40, 64),
    (2, 1, 300, 64, 1, 16),  # values with per-token scales of tiles
    (1, 5, 70, 192, 1, 64),
    (1, 3, 130, 64, 1, 64),
    (1, 15, 37, 9216, 1, 512),
    (3, 8, 33, 128, 1, 128),
]


def product(x, w, **options):
    """Run a kernel on arrays that end right before inaccessible memory."""
    out = guarded(np.full((*x.shape[:2], w.columns), np.nan, np.float32))
    leaves = {name: getattr(w, name) for name in ("packed", "scale", "minimum")}
    w = w._replace(**{name: guarded(x) for name, x in leaves.items() if x is not None})
    run(f"veneer_rows_{w.kind}", guarded(x), w, out, **options)
    return out


def random(*shape):
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


def check(kind, shape):
    batch, m, r, c, tr, tc = shape
    x, w = random(batch, m, r), stored(kind, (batch, r, c), (tr, tc))
    expected, size = rows_contracted(x, w)
    assert np.max(np.abs(product(x, w) - expected) / size) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_dense_product(kind, shape):
    check(kind, shape)


@pytest.mark.parametrize("kind", ["lookup4", "int8", "planes6", "float8_e5m2"])
@pytest.mark.parametrize("tile", [(1, 16), (1, 32), (1, 192), (64, 1), (16, 48), (1, 3)], ids=str)
def test_minima_are_added(tile, kind):
    w = stored(kind, (2, 128, 192), tile, has_minima=True)
    for m in (1, 2, 7, 12, 20):
        x = random(2, m, 128)
        expected, size = rows_contracted(x, w)
        assert np.max(np.abs(product(x, w) - expected) / size) < 1e-6


@pytest.mark.parametrize("m", range(1, 24))
def test_any_number_of_rows_of_x(m):
    check("lookup4", (1, m, 70, 141, 35, 1))


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("kind", ["lookup4", "planes3"])
def test_arrays_need_no_alignment(kind, m, offset, at_end):
    x, w = random(1, m, 66), stored(kind, (1, 66, 259), (33, 7))
    expected, size = rows_contracted(x, w)
    w = w._replace(
        **{name: guarded(getattr(w, name), at_end, offset) for name in ("packed", "scale", "table")}
    )
    out = guarded(np.empty((1, m, 259), np.float32), at_end, offset)
    run(f"veneer_rows_{kind}", guarded(x, at_end, offset), w, out)
    assert np.max(np.abs(out - expected) / size) < 1e-6


@pytest.mark.parametrize("m", [1, 4, 20])
def test_result_does_not_depend_on_threads(m):
    x, w = random(1, m, 512), stored("lookup4", (1, 512, 300), (32, 1))
    np.testing.assert_array_equal(product(x, w), product(x, w, threads=4))


@pytest.mark.parametrize("m", [1, 5, 20])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_non_finite_numbers_spread_as_in_dense_products(m, number):
    x, w = random(1, m, 128), stored("lookup4", (1, 128, 130), (32, 1))
    x[0, 0, 3] = number
    w.scale[0, 2, 5] = number
    w.scale[0, 1, 129] = number
    with np.errstate(invalid="ignore"):
        expected = x @ w.dense.astype(np.float32)
    finite = np.isfinite(expected)
    out = product(x, w)
    np.testing.assert_array_equal(out[~finite], expected[~finite])
    np.testing.assert_allclose(out[finite], expected[finite], rtol=1e-3, atol=1e-2)


OTHERS = [isa for isa in ISAS if isa not in (ISA, "avx512")]


@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets_give_the_same_products(isa):
    try:
        select_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    program = """
from kernels.cpu.test_rows import SHAPES, check
for kind in ("lookup4", "int8"):
    for shape in SHAPES:
        check(kind, shape)
"""
    environment = os.environ | {
        "VENEER_KERNELS_ISA": isa,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr
