"""Matrices that lie side by side in memory, as the heads of tokens do, against float64."""

import numpy as np
import pytest
from kernels.cpu.driver import columns_contracted, guarded, rows_contracted, run, stored

SIDES = {"columns": columns_contracted, "rows": rows_contracted}
SHAPES = [
    ((50, 64), (1, 64)),
    ((33, 64), (1, 16)),
    ((40, 128), (40, 1)),
    ((7, 37), (1, 37)),
    ((48, 200), (16, 200)),
    ((20, 3), (20, 3)),
]


@pytest.mark.parametrize("kind", ["lookup1", "lookup4", "planes3", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "tile"), SHAPES, ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_is_as_one_after_the_other(side, shape, tile, kind):
    outer, beside = 2, 3
    w = stored(kind, (outer * beside, *shape), tile)
    packed = w.packed.reshape(outer, beside, *w.packed.shape[1:]).swapaxes(1, 2)
    terms, n = shape[::-1] if side == "columns" else shape
    for m in (1, 2, 6, 26):
        x = np.random.default_rng(1).normal(size=(outer * beside, m, terms)).astype(np.float32)
        expected, sizes = SIDES[side](x, w)
        for at_end in (True, False):
            out = np.full((outer * beside, m, n), np.nan, np.float32)
            there = guarded(np.ascontiguousarray(packed), at_end)
            run(f"veneer_{side}_{kind}", x, w, out, packed=there)
            assert np.all(np.abs(out - expected) <= 1e-6 * sizes)
