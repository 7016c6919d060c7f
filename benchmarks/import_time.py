"""Time `import veneer` after `import jax`, in new interpreters.

    python benchmarks/import_time.py    # one minute

The modules have bytecode files, as after an installation with pip.
"""

import os
import statistics
import subprocess
import sys

from measure import markdown_table, parser

PROGRAM = """
import sys, time
start = time.perf_counter()
import jax
between = time.perf_counter()
__import__(sys.argv[1])
print(between - start, time.perf_counter() - between)
"""


def import_times(module: str, *, rounds: int) -> tuple[float, float]:
    """Return the median seconds to import JAX, and then to import `module`."""
    command = [sys.executable, "-c", PROGRAM, module]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = lambda: (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )
    run()  # writes bytecode, and reads the files into memory
    jax_times, module_times = zip(*(map(float, run().split()) for _ in range(rounds)), strict=True)
    return statistics.median(jax_times), statistics.median(module_times)


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    jax_time, ours = import_times("veneer", rounds=arguments.rounds)
    rows = [
        ["`import jax`", f"{jax_time * 1e3:.0f}", "", ""],
        [
            "and then `import veneer`",
            f"**{ours * 1e3:.0f}**",
            f"{ours / jax_time:.0%}",
            "≤ 40",
        ],
    ]
    print(markdown_table(["", "ms", "of that", "target"], rows))
