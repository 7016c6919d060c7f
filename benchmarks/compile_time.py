"""What a kernel of the CPU takes where a program first needs it: compiled, and from the cache.

Each is made in processes of its own, by `kernels.cpu.build.target`, as for a program that is
lowered. Times are of a CPU, which other programs leave as they are, with what it takes to import
Numba, or LLVM alone; *cached* is the median of some. What all kernels share is compiled once a
machine, and was there.
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
build.target(f"veneer_{sys.argv[1]}")
print(time.process_time() - start)
"""


def seconds(name: str, cache: str) -> float | None:
    """What a process takes for a kernel; or None where this CPU has no such kernel."""
    command = [sys.executable, "-c", MAKE, name]
    environment = os.environ | {"VENEER_CACHE": cache}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout) if run.stdout else None


def rows(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as cache:
        seconds(SMALLEST, cache)  # which leaves what all share there
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
