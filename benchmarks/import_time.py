"""The time that `import veneer` takes once JAX is imported, each time in a new interpreter."""

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
    """The median times, in seconds, to import JAX, and then `module`."""
    command = [sys.executable, "-c", PROGRAM, module]
    run = lambda: subprocess.run(command, capture_output=True, text=True, check=True).stdout
    run()  # writes bytecode, and brings files into memory
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
            "≤ 60",
        ],
    ]
    print(markdown_table(["", "ms", "of that", "target"], rows))
