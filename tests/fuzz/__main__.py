"""Runs programs for a while, and prints each that fails, as small as it can be made."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

import jax
from support import contexts

from .checks import Disagreement, check
from .operands import KINDS
from .programs import MODES, Program, program


def smallest(failing: Program) -> tuple[Program, str]:
    """A program that fails as one does, with as little as can be, and what is wrong."""
    said = failure(failing)
    for simpler in failing.smaller():
        if failure(simpler) is not None:
            return smallest(simpler)
    return failing, str(said)


def failure(of: Program) -> str | None:
    """What is wrong with what a program gives."""
    try:
        check(of)
    except Disagreement as error:
        return str(error)
    return None


def run(numbers: range, seed: int, kinds: Sequence[str], mode: str, seconds: float) -> Counter[str]:
    """Runs the programs of these numbers, and prints what fails."""
    end, counts, printed = time.monotonic() + seconds, Counter[str](), set[str]()
    for number in numbers:
        if time.monotonic() > end:
            break
        one = program(Random(f"{seed} {number}"), kinds, mode)
        try:
            counts[check(one)] += 1
        except Disagreement:
            counts["fails"] += 1
            small, said = smallest(one)
            if str(small) not in printed:
                printed.add(str(small))
                print(f"{small}\n# {number}: {said[:600]}\n", flush=True)
        if number % 1000 == 999:
            jax.clear_caches()  # or memory fills up with programs
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="types and formats, by commas")
    parser.add_argument("--mode", choices=MODES, default="both")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    contexts.reuse()
    numbers = range(options.first, options.first + options.programs)
    counts = run(numbers, options.seed, options.kinds.split(","), options.mode, options.seconds)
    print(f"{counts.total()} programs: {dict(counts)}")
    return int(counts["fails"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
