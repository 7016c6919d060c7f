"""Compare kernels for int8 activations and integer codes with exact sums of integers."""

import os
import subprocess
import sys

import numpy as np
import pytest
from kernels.cpu.driver import columns_contracted, guarded, rows_contracted, run, stored

from veneer.kernels.cpu.integers import columns_few
from veneer.native import simd

KINDS = ["int8", "uint8", "lookup4", "lookup2", "lookup1"]
CONTRACTED = {"rows": rows_contracted, "columns": columns_contracted}
#: The sums of a tile are exact. Only three steps round to f32: scaling a sum, adding the sums of
#: tiles, and multiplying by the scale of the activations.
ROUNDINGS = 4 * 2.0**-24


def activations(batch, m, k, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.integers(-128, 128, (batch, m, k), np.int8)
    return x, rng.uniform(0.5, 2, (batch, m)).astype(np.float32)


def product(contracted, x, x_scale, w, threads=1, guard=lambda array: array):
    """Return the result of the kernel. `guard` copies each array to memory that detects misuse."""
    n = w.packed.shape[1] if contracted == "columns" else w.columns
    out = guard(np.full((*x.shape[:2], n), np.nan, np.float32))
    w = w._replace(packed=guard(w.packed), scale=guard(w.scale), table=guard(w.table))
    target = f"veneer_integer_{contracted}_{w.kind}"
    run(target, guard(x), w, out, guard(x_scale), threads)
    return out


def check(contracted, kind, shape, tile, m, has_tile_scales=False, **options):
    """Compare a product with its exact value.

    **Arguments:**

    - `shape`: `[B, K, N]`.
    - `tile`: the sizes of a tile along K and along N.
    - `has_tile_scales`: whether activations have a scale per tile instead of per row.
    - `options`: more arguments of `product`.
    """
    batch, k, n = shape
    tiles = k // tile[0]
    if contracted == "columns":
        shape, tile = (batch, n, k), tile[::-1]
    w = stored(kind, shape, tile)
    x, x_scale = activations(batch, m, k)
    if has_tile_scales:
        x_scale = np.random.default_rng(2).uniform(0.5, 2, (batch, m, tiles)).astype(np.float32)
        dense = x * x_scale.repeat(k // tiles, 2).astype(np.float64)
        expected, size = CONTRACTED[contracted](dense, w)
    else:
        expected, size = (array * x_scale[..., None] for array in CONTRACTED[contracted](x, w))
    actual = product(contracted, x, x_scale, w, **options)
    assert np.all(np.abs(actual - expected) <= size * ROUNDINGS * max(1, np.sqrt(tiles)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contracted", CONTRACTED)
class TestProduct:
    @pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 300])
    def test_is_exact_for_any_number_of_rows(self, contracted, kind, m):
        check(contracted, kind, (1, 256, 128), (128, 1), m)

    @pytest.mark.parametrize("m", [3, 19])
    @pytest.mark.parametrize("tile", [(512, 1), (128, 1), (64, 1), (32, 1), (32, 128), (512, 8)])
    def test_is_exact_for_usual_tiles(self, contracted, kind, tile, m):
        check(contracted, kind, (2, 512, 128), tile, m)

    @pytest.mark.parametrize("tile", [(1, 1), (2, 1), (3, 5), (7, 1), (21, 35), (42, 7), (301, 1)])
    def test_is_exact_for_tiles_of_any_size(self, contracted, kind, tile):
        check(contracted, kind, (1, 602 if tile[0] == 301 else 42, 35), tile, 7)

    @pytest.mark.parametrize("m", [1, 4, 7])
    @pytest.mark.parametrize(("k", "tile"), [(576, 64), (96, 32), (352, 352), (32, 32), (608, 608)])
    def test_is_exact_for_rows_that_end_within_a_vector(self, contracted, kind, k, tile, m):
        check(contracted, kind, (2, k, 70), (tile, 1), m)

    @pytest.mark.parametrize("m", [1, 2, 5, 17, 40])
    @pytest.mark.parametrize(
        ("k", "tile"), [(512, 32), (512, 128), (576, 64), (1024, 512), (300, 60), (42, 7), (96, 96)]
    )
    def test_is_exact_with_activation_scales_per_tile(self, contracted, kind, k, tile, m):
        check(contracted, kind, (2, k, 70), (tile, 1), m, has_tile_scales=True)

    @pytest.mark.parametrize(("k", "n"), [(1, 1), (3, 200), (130, 3), (257, 129), (515, 64)])
    def test_is_exact_for_any_shape(self, contracted, kind, k, n):
        check(contracted, kind, (2, k, n), (k, 1), 5)

    @pytest.mark.parametrize("m", [1, 2, 4])
    @pytest.mark.parametrize(
        ("k", "tile"), [(16, 16), (300, 300), (520, 260), (1200, 400), (1216, 76), (900, 20)]
    )
    def test_is_exact_for_splits_of_tiles_and_within_tiles(self, contracted, kind, k, tile, m):
        check(contracted, kind, (2, k, 1100), (tile, 1), m, threads=3)

    @pytest.mark.parametrize("at_end", [True, False])
    @pytest.mark.parametrize(
        ("k", "n", "tile"),
        [(67, 130, 67), (256, 64, 64), (30, 77, 5), (300, 77, 60), (224, 70, 224), (352, 66, 32)],
    )
    @pytest.mark.parametrize("m", [3, 7])
    def test_touches_no_memory_outside_the_arrays(self, contracted, kind, at_end, k, n, tile, m):
        check(contracted, kind, (2, k, n), (tile, 1), m, guard=lambda array: guarded(array, at_end))

    @pytest.mark.parametrize("m", [3, 9])
    @pytest.mark.parametrize("tile", [128, 640])
    def test_does_not_depend_on_the_number_of_threads(self, contracted, kind, tile, m):
        w = stored(kind, (2, 640, 640), (tile, 128))
        x, x_scale = activations(2, m, 640)
        single, several = (product(contracted, x, x_scale, w, threads) for threads in (1, 3))
        np.testing.assert_array_equal(single, several)


@pytest.mark.parametrize("kind", KINDS)
def test_strips_can_begin_within_the_columns_of_a_scale(kind):
    check("rows", kind, (1, 64, 700), (64, 100), 3)


@pytest.mark.parametrize("contracted", CONTRACTED)
class TestExactness:
    def test_sums_of_a_long_tile_do_not_overflow(self, contracted):
        # Each product of two codes has the largest size, and int32 cannot hold the sum of a tile.
        k = 140_000
        shape = (1, k, 1) if contracted == "rows" else (1, 1, k)
        w = stored("uint8", shape, shape[1:])
        w.packed[...] = 255
        x, x_scale = activations(1, 2, k)
        x[...] = [[[-128], [127]]]
        expected = CONTRACTED[contracted](x, w)[0] * x_scale[..., None]
        np.testing.assert_allclose(product(contracted, x, x_scale, w), expected, rtol=1e-6)

    def test_sums_that_cancel_are_exact(self, contracted):
        # Large terms cancel. In f32, they would round away the small rest.
        k, n = 4096, 3
        shape = (1, k, n) if contracted == "rows" else (1, n, k)
        w = stored("int8", shape, (k, 1) if contracted == "rows" else (1, k))
        w.scale[...] = 1
        x, x_scale = activations(1, 2, k)
        x_scale[...] = 1
        codes = w.packed.view(np.int8) if contracted == "columns" else w.packed.view(np.int8).mT
        codes[..., k // 2 :] = codes[..., : k // 2]
        x[..., : k // 2] = 127
        x[..., k // 2 :] = -127
        x[..., -1] = -126
        expected, _ = CONTRACTED[contracted](x, w)
        assert np.abs(expected).max() < 2**8
        np.testing.assert_array_equal(product(contracted, x, x_scale, w), expected)


CHECKS = """
import test_integer
for contracted, kind in (("rows", "uint8"), ("columns", "lookup2")):
    for m in (3, 9, 20):  # each uses another path through the kernels
        test_integer.check(contracted, kind, (2, 512, 150), (32, 1), m)
"""


@pytest.mark.parametrize("name", [name for name in simd.ISAS if name != simd.ISA])
def test_every_instruction_set_is_exact(name):
    try:
        simd.select_isa(name)
    except ValueError as error:
        pytest.skip(str(error))
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "VENEER_KERNELS_ISA": name, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", CHECKS], env=environment, check=True)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_thread_gets_a_contiguous_range_of_parts(threads):
    contiguous_part = columns_few.contiguous_part.py_func
    for parts in range(1, 20):
        order = [contiguous_part(part, parts, threads) for part in range(parts)]
        assert sorted(order) == [*range(parts)]
        for thread in range(min(threads, parts)):
            parts_of_thread = order[thread::threads]
            first = parts_of_thread[0]
            assert parts_of_thread == [*range(first, first + len(parts_of_thread))]
