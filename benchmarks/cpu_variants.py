"""Compare special CPU kernels with the more general kernels that could replace them.

    python benchmarks/cpu_variants.py    # five minutes

- `columns_one` multiplies one row of activations. `columns_few` pads one row to two, so it is timed
  with two rows.
- `rows_tiled` reads matrices with tiles along each row, such as cached values. `rows_few` can also
  multiply them.

Prints a table of times. A ratio above 1 means that the special kernel is faster, so that its row in
the table of kernels (`kernels/common/table.py`) is justified. The sides alternate in one process.
"""

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure import Side, markdown_table, medians

import veneer as vn
from veneer.kernels import select
from veneer.kernels.common.table import TABLE


class Case(NamedTuple):
    """A product `[rows, k] x [k, n]`, and the two kernels that compute it."""

    format: str
    k: int
    n: int
    tile: int
    rows: tuple[int, int]  # for the special kernel, and for the general one
    kernels: tuple[str, str]


ONE, TILED = ("columns one", "columns few"), ("rows tiled", "rows few")
CASES = (
    Case("int8", 4096, 4096, 4096, (1, 2), ONE),
    Case("int4", 4096, 4096, 128, (1, 2), ONE),
    Case("int4", 1024, 1024, 32, (1, 2), ONE),
    Case("int6", 4096, 4096, 32, (1, 2), ONE),
    Case("nf4", 4096, 11008, 64, (1, 2), ONE),
    Case("int8", 2048, 128, 64, (1, 1), TILED),
    Case("int8", 4096, 1024, 128, (4, 4), TILED),
    Case("int4", 4096, 4096, 64, (1, 1), TILED),
)


def side(case: Case, which: int) -> Side:
    """Return the product by the special kernel (0) or the general one (1)."""
    name, variant = case.kernels[which].split()
    (row,) = [r for r in TABLE if (r.platform, r.name, r.variant) == ("cpu", name, variant)]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(case.rows[which], case.k)), jnp.float32)
    shape = (case.n, case.k) if name == "columns" else (case.k, case.n)
    weight = jnp.asarray(rng.normal(size=shape), jnp.float32)
    small = vn.quant.quantize(weight, case.format, channelwise_axes=[0], tiled_axes={1: case.tile})
    multiply = (lambda x, w: x @ w.T) if name == "columns" else jnp.matmul
    selected = select.find_kernel
    select.find_kernel = lambda platform, *args: row if platform == "cpu" else None
    try:
        compiled = jax.jit(vn.implicit(multiply)).lower(x, small).compile()
    finally:
        select.find_kernel = selected
    assert f"_{variant}" in compiled.as_text(), f"{case}: the kernel {variant} did not run"
    expected = multiply(x, small.dequantize())
    np.testing.assert_allclose(compiled(x, small), expected, rtol=1e-3, atol=0.05)
    return Side(f"{case}, {case.kernels[which]}", functools.partial(compiled, x, small))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    sides = [[side(case, which) for which in (0, 1)] for case in CASES]
    seconds = medians([s for pair in sides for s in pair], rounds=rounds)
    rows = []
    for case, (special, general) in zip(CASES, sides, strict=True):
        a, b = seconds[special.name], seconds[general.name]
        size = f"{case.rows[0]} x {case.k} x {case.n}, tile {case.tile}"
        times = f"{a * 1e6:.0f} µs", f"{b * 1e6:.0f} µs"
        rows.append([case.format, size, case.kernels[0], *times, f"{b / a:.2f}"])
    header = ["format", "product", "kernel", "time", "general kernel", "ratio"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
