"""Kernels of all families handle interleaved matrices and any number of threads."""

import numpy as np
import pytest
from kernels.cpu.driver import columns_contracted, guarded, rows_contracted, run, stored

SIDES = {"columns": columns_contracted, "rows": rows_contracted}
#: Shapes `[R, C]` of matrices and their tiles.
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
def test_interleaved_matrices_equal_separate_ones(side, shape, tile, kind):
    groups, heads = 2, 3
    w = stored(kind, (groups * heads, *shape), tile)
    packed = w.packed.reshape(groups, heads, *w.packed.shape[1:]).swapaxes(1, 2)
    terms, n = shape[::-1] if side == "columns" else shape
    for m in (1, 2, 6, 26):
        x = np.random.default_rng(1).normal(size=(groups * heads, m, terms)).astype(np.float32)
        expected, sizes = SIDES[side](x, w)
        for at_end in (True, False):
            out = np.full((groups * heads, m, n), np.nan, np.float32)
            interleaved = guarded(np.ascontiguousarray(packed), at_end)
            run(f"veneer_{side}_{kind}", x, w, out, packed=interleaved)
            assert np.all(np.abs(out - expected) <= 1e-6 * sizes)


#: The shape of a matrix, and the tile of each kernel family.
SHAPE = 192, 448
FAMILIES = {
    "veneer_rows_lookup4": (32, 1),
    "veneer_rows_int8": (1, 64),
    "veneer_rows_planes3": (192, 1),
    "veneer_columns_lookup4": (1, 64),
    "veneer_columns_int8": (1, 448),
    "veneer_columns_float8_e4m3fn": (8, 1),
    "veneer_integer_rows_lookup4": (48, 1),
    "veneer_integer_rows_int8": (192, 1),
    "veneer_integer_columns_lookup4": (1, 64),
    "veneer_integer_columns_int8": (1, 448),
}


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("m", [1, 4, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_product_is_complete_on_any_number_of_threads(family, m, threads):
    rng, is_integer = np.random.default_rng(0), "integer" in family
    contracted = rows_contracted if "rows" in family else columns_contracted
    k, n = SHAPE if "rows" in family else SHAPE[::-1]
    w = stored(family.split("_", 3 if is_integer else 2)[-1], (2, *SHAPE), FAMILIES[family])
    x = rng.integers(-127, 128, (2, m, k)) if is_integer else rng.normal(size=(2, m, k))
    x = x.astype(np.int8 if is_integer else np.float32)
    x_scale = np.ones((2, m), np.float32) if is_integer else None
    expected, sizes = contracted(x, w)
    for cut in {threads, 2}:
        out = guarded(np.full((2, m, n), np.nan, np.float32))
        run(family, guarded(x), w, out, x_scale, threads=threads, cut=cut)
        assert np.all(np.abs(out - expected) <= 1e-6 * sizes)
