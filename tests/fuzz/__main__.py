"""Run random programs for a while, and print each one that fails, shrunk."""

import argparse

from .operands import KINDS
from .programs import MODES
from .run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="types and formats, by commas")
    parser.add_argument("--mode", choices=MODES, default="both")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.programs)
    counts = run(numbers, options.seed, options.kinds.split(","), options.mode, options.seconds)
    print(f"{counts.total()} programs: {dict(counts)}")
    return int(counts["fails"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
