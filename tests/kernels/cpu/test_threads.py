"""Parts for any number of threads, which take them in any order: they are all of the product."""

import numpy as np
import pytest
from kernels.cpu.driver import columns_contracted, guarded, rows_contracted, run, stored

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
def test_parts_are_all_of_the_product(family, m, threads):
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
