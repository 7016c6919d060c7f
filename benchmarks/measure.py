"""Measure ratios of times: two sides alternate in one process, and the median ratio counts.

The speed of a machine drifts, and other programs disturb it. Times that are measured minutes apart
cannot be compared. The ratio of two adjacent times can, and the median of such ratios is stable.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
# Programs that the tests also run are in tests/support.
sys.path.append(str(ROOT / "tests"))

Thunk = Callable[[], Any]
# Seconds to wait before timing a side: threads of the previous side may still spin on its cores.
_SETTLE_SECONDS = 0.005


@dataclass(frozen=True)
class Side:
    """A function to time, and its name in the table.

    It runs inside the context manager `within`. Entering and leaving it are not timed.
    """

    name: str
    run: Thunk
    every: int = 1  # time it only in every n-th round, because it takes long
    within: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Claim:
    """Our side should take at most `target` times as long as theirs. None sets no limit."""

    ours: Side
    theirs: Side
    target: float | None = None


@dataclass(frozen=True)
class Result:
    """The median ratio of a claim, and the median seconds of our side and of theirs."""

    claim: Claim
    ratio: float
    seconds: tuple[float, float]


def measure(
    claims: Iterable[Claim], *, rounds: int, batches: int = 1, calls: int = 1
) -> list[Result]:
    """Time the claims. In each round, batches of calls of the two sides alternate.

    The time of a side in a round is the time of its fastest batch, because other programs can only
    slow a batch down.
    """
    claims = list(claims)
    for claim in claims:  # compile, and fill the caches
        for side in (claim.theirs, claim.ours) * 2:
            with side.within():
                jax.block_until_ready(side.run())
    times: list[list[tuple[float, float]]] = [[] for _ in claims]
    for _ in range(rounds):
        for claim, pairs in zip(claims, times, strict=True):
            gc.collect()  # removes the garbage of other claims; collection stays on during a batch
            sides = (claim.ours, claim.theirs) * batches
            seconds = [_timed(side, calls) for side in sides]
            pairs.append((min(seconds[::2]), min(seconds[1::2])))
    return [_result(claim, pairs) for claim, pairs in zip(claims, times, strict=True)]


def medians(sides: Iterable[Side], *, rounds: int) -> dict[str, float]:
    """Time the sides in rounds, each in a random order. Return a dict of median seconds.

    The previous side influences a time: through caches, the clock of the CPU, and threads that
    still spin. So the order is random, and each side runs once before its timed call.
    """
    sides, order = list(sides), random.Random(0)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    gc.collect()
    gc.disable()  # a collection would add to the time of one side
    for turn in range(rounds):
        due = [side for side in sides if turn % side.every == 0]
        for side in order.sample(due, len(due)):
            jax.block_until_ready(side.run())
            seconds[side.name].append(seconds_a_call(side.run, 1))
    gc.enable()
    return {name: statistics.median(times) for name, times in seconds.items()}


def seconds_a_call(thunk: Thunk, calls: int) -> float:
    """Return the mean seconds per call of a batch that ends when its last result is ready.

    A call returns before its result is computed, so a batch has to wait. Waiting for each call
    would add the same thread wake-up to both sides and make the ratio look better than it is.
    """
    time.sleep(_SETTLE_SECONDS)
    start = time.perf_counter()
    for _ in range(calls):
        result = thunk()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _timed(side: Side, calls: int) -> float:
    with side.within():
        return seconds_a_call(side.run, calls)


def _result(claim: Claim, pairs: Sequence[tuple[float, float]]) -> Result:
    ours, theirs = zip(*pairs, strict=True)
    ratio = statistics.median(mine / other for mine, other in pairs)
    return Result(claim, ratio, (statistics.median(ours), statistics.median(theirs)))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. The first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results_table(results: Iterable[Result], unit: str) -> str:
    """Return the results as a table, with times in `unit`: "ms" or "µs"."""
    scale = {"ms": 1e3, "µs": 1e6}[unit]

    def row(result: Result) -> list[str]:
        claim = result.claim
        ours, theirs = (f"{seconds * scale:.1f}" for seconds in result.seconds)
        target = "" if claim.target is None else f"≤ {claim.target:g}"
        return [claim.ours.name, ours, claim.theirs.name, theirs, f"**{result.ratio:.2f}**", target]

    return markdown_table(["", unit, "against", unit, "ratio", "target"], map(row, results))


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options that all benchmarks share."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=9, help="number of rounds (default 9)")
    return options
