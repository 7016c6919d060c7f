"""Kernels of int8 activations and integer codes compute what exact sums of integers give."""

import os
import subprocess
import sys

import numpy as np
import pytest
from kernels.cpu.driver import columns_contracted, guarded, rows_contracted, run, stored

from veneer.kernels.cpu.integers import columns_few
from veneer.native import isa

KINDS = ["int8", "uint8", "lookup4", "lookup2", "lookup1"]
CONTRACTED = {"rows": rows_contracted, "columns": columns_contracted}
#: The sums of a tile are exact. What is left are the roundings of f32: of a sum as it is scaled, of
#: the sums of tiles, and by the scale of the activations.
ROUNDINGS = 4 * 2.0**-24


def activations(batch, m, k, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.integers(-128, 128, (batch, m, k), np.int8)
    return x, rng.uniform(0.5, 2, (batch, m)).astype(np.float32)


def product(contracted, x, x_scale, w, threads=1, guard=lambda array: array):
    """What the kernel computes, out of arrays that `guard` brings to where they may be harmed."""
    n = w.packed.shape[1] if contracted == "columns" else w.columns
    out = guard(np.full((*x.shape[:2], n), np.nan, np.float32))
    w = w._replace(packed=guard(w.packed), scale=guard(w.scale), table=guard(w.table))
    target = f"veneer_integer_{contracted}_{w.kind}"
    run(target, guard(x), w, out, guard(x_scale), threads)
    return out


def check(contracted, kind, shape, tile, m, of_tiles=False, **how):
    """`shape` and `tile` are [B, K, N], and K x N; activations may have scales of tiles, too."""
    batch, k, n = shape
    if contracted == "columns":
        shape, tile = (batch, n, k), tile[::-1]
    w = stored(kind, shape, tile)
    x, x_scale = activations(batch, m, k)
    each = x_scale[..., None]
    if of_tiles:
        rng = np.random.default_rng(2)
        tiles = k // tile[contracted == "columns"]
        x_scale = rng.uniform(0.5, 2, (batch, m, tiles)).astype(np.float32)
        each = x_scale.repeat(k // tiles, 2).astype(np.float64)
        expected, size = CONTRACTED[contracted](x * each, w)
    else:
        expected, size = (of * each for of in CONTRACTED[contracted](x, w))
    found = product(contracted, x, x_scale, w, **how)
    tiles = k // tile[contracted == "columns"]
    assert np.all(np.abs(found - expected) <= size * ROUNDINGS * max(1, np.sqrt(tiles)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contracted", CONTRACTED)
class TestProduct:
    @pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 300])
    def test_of_any_number_of_rows(self, contracted, kind, m):
        check(contracted, kind, (1, 256, 128), (128, 1), m)

    @pytest.mark.parametrize("m", [3, 19])
    @pytest.mark.parametrize("tile", [(512, 1), (128, 1), (64, 1), (32, 1), (32, 128), (512, 8)])
    def test_of_usual_tiles(self, contracted, kind, tile, m):
        check(contracted, kind, (2, 512, 128), tile, m)

    @pytest.mark.parametrize("tile", [(1, 1), (2, 1), (3, 5), (7, 1), (21, 35), (42, 7), (301, 1)])
    def test_of_tiles_of_any_size(self, contracted, kind, tile):
        check(contracted, kind, (1, 602 if tile[0] == 301 else 42, 35), tile, 7)

    @pytest.mark.parametrize("m", [1, 4, 7])
    @pytest.mark.parametrize(("k", "tile"), [(576, 64), (96, 32), (352, 352), (32, 32), (608, 608)])
    def test_of_rows_that_end_within_a_vector(self, contracted, kind, k, tile, m):
        check(contracted, kind, (2, k, 70), (tile, 1), m)

    @pytest.mark.parametrize("m", [1, 2, 5, 17, 40])
    @pytest.mark.parametrize(
        ("k", "tile"), [(512, 32), (512, 128), (576, 64), (1024, 512), (300, 60), (42, 7), (96, 96)]
    )
    def test_activations_have_scales_of_tiles(self, contracted, kind, k, tile, m):
        check(contracted, kind, (2, k, 70), (tile, 1), m, of_tiles=True)

    @pytest.mark.parametrize(("k", "n"), [(1, 1), (3, 200), (130, 3), (257, 129), (515, 64)])
    def test_of_any_shape(self, contracted, kind, k, n):
        check(contracted, kind, (2, k, n), (k, 1), 5)

    @pytest.mark.parametrize("m", [1, 2, 4])
    @pytest.mark.parametrize(
        ("k", "tile"), [(16, 16), (300, 300), (520, 260), (1200, 400), (1216, 76), (900, 20)]
    )
    def test_of_tiles_of_which_each_depth_has_some_or_a_part(self, contracted, kind, k, tile, m):
        check(contracted, kind, (2, k, 1100), (tile, 1), m, threads=3)

    @pytest.mark.parametrize("at_end", [True, False])
    @pytest.mark.parametrize(
        ("k", "n", "tile"),
        [(67, 130, 67), (256, 64, 64), (30, 77, 5), (300, 77, 60), (224, 70, 224), (352, 66, 32)],
    )
    @pytest.mark.parametrize("m", [3, 7])
    def test_reads_and_writes_nothing_else(self, contracted, kind, at_end, k, n, tile, m):
        check(contracted, kind, (2, k, n), (tile, 1), m, guard=lambda of: guarded(of, at_end))

    @pytest.mark.parametrize("m", [3, 9])
    @pytest.mark.parametrize("tile", [128, 640])
    def test_is_the_same_on_any_number_of_threads(self, contracted, kind, tile, m):
        w = stored(kind, (2, 640, 640), (tile, 128))
        x, x_scale = activations(2, m, 640)
        once, again = (product(contracted, x, x_scale, w, threads) for threads in (1, 3))
        np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("kind", KINDS)
def test_of_rows_whose_strips_begin_within_a_scale(kind):
    check("rows", kind, (1, 64, 700), (64, 100), 3)


@pytest.mark.parametrize("contracted", CONTRACTED)
class TestExactness:
    def test_sums_of_a_long_tile_do_not_overflow(self, contracted):
        """Every product is the largest that there is, over tiles that int32 cannot sum up."""
        k = 140_000
        shape = (1, k, 1) if contracted == "rows" else (1, 1, k)
        w = stored("uint8", shape, shape[1:])
        w.packed[...] = 255
        x, x_scale = activations(1, 2, k)
        x[...] = [[[-128], [127]]]
        expected, _ = (of * x_scale[..., None] for of in CONTRACTED[contracted](x, w))
        found = product(contracted, x, x_scale, w)
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    def test_sums_that_cancel_are_exact(self, contracted):
        """In f32, sums this large would have lost the last bits that are all that is left."""
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
    for m in (3, 9, 20):  # each in a way of its own
        test_integer.check(contracted, kind, (2, 512, 150), (32, 1), m)
"""


@pytest.mark.parametrize("name", [name for name in isa.ISAS if name != isa.ISA])
def test_every_isa_computes_the_same(name):
    try:
        isa.chosen(name)
    except ValueError as error:
        pytest.skip(str(error))
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "VENEER_KERNELS_ISA": name, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", CHECKS], env=environment, check=True)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_part_is_in_one_stretch(threads):
    contiguous_part = columns_few.contiguous_part.py_func
    for parts in range(1, 20):
        done = [contiguous_part(part, parts, threads) for part in range(parts)]
        assert sorted(done) == [*range(parts)]
        for thread in range(min(threads, parts)):  # which take them in turn
            mine = done[thread::threads]
            assert mine == [*range(mine[0], mine[0] + len(mine))]
