"""Time the compilation of CPU kernels, and loading them from the cache.

    python benchmarks/compile_time.py            # the table of docs/performance.md, in five minutes
    python benchmarks/compile_time.py --quick    # one kernel, to see that it runs

Each kernel is built in its own process by `kernels.cpu.build.register_target`, as for a program
that is lowered. Times are CPU seconds, which include the import of Numba or LLVM. *cached* is the
median of several processes. The code that all kernels share is compiled once per machine, before
the first row.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

from measure import markdown_table, parser

SIDES, KINDS, VARIANTS = ("rows", "columns"), ("int8", "lookup4"), ("few", "many")
NAMES = (
    *(f"{side}_{kind}_{how}" for side in SIDES for kind in KINDS for how in VARIANTS),
    *(f"integer_{side}_{kind}_{how}" for side in SIDES for kind in KINDS for how in VARIANTS),
    *(f"columns_{kind}_one" for kind in KINDS),
    "columns_int8_short",
    "rows_int8_tiled",
    "bf16_rows_lookup4_many",
    "quantize_int8",
)
SMALLEST = "quantize_nf4"
COMPILED, CACHED = 3.0, 60.0  # targets: seconds, and milliseconds

MAKE = """
import sys, time
import veneer
from veneer.kernels.cpu import build
start = time.process_time()
if "bf16" in sys.argv[1] and not build.has_bf16():
    sys.exit()
build.register_target(f"veneer_{sys.argv[1]}")
print(time.process_time() - start)
"""


def seconds(name: str, cache: str) -> float | None:
    """Return the CPU seconds to build a kernel, or None if this CPU does not support it."""
    command = [sys.executable, "-c", MAKE, name]
    environment = os.environ | {"VENEER_CACHE": cache}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout) if run.stdout else None


def rows(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as cache:
        seconds(SMALLEST, cache)  # compiles the code that all kernels share
        for name in names:
            first = seconds(name, cache)
            if first is None:
                continue
            later = statistics.median(seconds(name, cache) or 0.0 for _ in range(rounds)) * 1e3
            figures = [f"**{first:.1f}**", f"≤ {COMPILED:g}", f"**{later:.0f}**", f"≤ {CACHED:g}"]
            yield [name, *figures]


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one kernel, to see that it runs")
    arguments = options.parse_args()
    names = NAMES[:1] if arguments.quick else NAMES
    header = ["kernel", "compiled, s", "target", "cached, ms", "target"]
    print(markdown_table(header, rows(names, 1 if arguments.quick else arguments.rounds)))
