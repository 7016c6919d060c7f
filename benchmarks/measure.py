"""Ratios of times: the two sides measured in one process, by turns, and the median taken.

A machine's speed drifts, and other programs disturb it. Two times measured minutes apart cannot be
compared; the ratio of two that are neighbours can, and the median of such ratios is steady.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

Thunk = Callable[[], Any]
#: Seconds for which a side waits: threads of the one before may still look for work, on its cores.
_SETTLES = 0.005


@dataclass(frozen=True)
class Side:
    """Something that is timed, and what a table calls it; one that takes long, in fewer rounds.

    It runs `within` a context, of which entering and leaving are not timed.
    """

    name: str
    run: Thunk
    every: int = 1  # of so many rounds, it is timed in one
    within: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Claim:
    """That our side takes at most `target` times as long as the other; None claims nothing."""

    ours: Side
    theirs: Side
    target: float | None = None


@dataclass(frozen=True)
class Result:
    """The median ratio for a claim, and the median seconds of our side and of the other."""

    claim: Claim
    ratio: float
    seconds: tuple[float, float]


def measure(
    claims: Iterable[Claim], *, rounds: int, batches: int = 1, calls: int = 1
) -> list[Result]:
    """Times the claims by turns: in each round, batches of calls of one side and of the other.

    The time of a side in a round is that of its fastest batch: other programs can only slow it.
    """
    claims = list(claims)
    for claim in claims:  # compile, and fill what caches there are
        for side in (claim.theirs, claim.ours) * 2:
            with side.within():
                jax.block_until_ready(side.run())
    times: list[list[tuple[float, float]]] = [[] for _ in claims]
    for _ in range(rounds):
        for claim, pairs in zip(claims, times, strict=True):
            gc.collect()  # the garbage of others; our own is collected as it falls due
            sides = (claim.ours, claim.theirs) * batches
            seconds = [_timed(side, calls) for side in sides]
            pairs.append((min(seconds[::2]), min(seconds[1::2])))
    return [_result(claim, pairs) for claim, pairs in zip(claims, times, strict=True)]


def medians(sides: Iterable[Side], *, rounds: int) -> dict[str, float]:
    """Times the sides in rounds, in each in another order; returns the median seconds by name.

    The order is random, for what ran before leaves something behind: in caches, in the clock of a
    CPU, in threads that look for more work for a while. So a side runs once before it is timed, and
    is timed as one call among others.
    """
    sides, order = list(sides), random.Random(0)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    gc.collect()
    gc.disable()  # it would fall into the time of somebody
    for turn in range(rounds):
        due = [side for side in sides if turn % side.every == 0]
        for side in order.sample(due, len(due)):
            jax.block_until_ready(side.run())
            seconds[side.name].append(seconds_a_call(side.run, 1))
    gc.enable()
    return {name: statistics.median(times) for name, times in seconds.items()}


def seconds_a_call(thunk: Thunk, calls: int) -> float:
    """The time of a call in a batch, at the end of which its last result is waited for.

    A call returns before its result is computed, so a batch that nobody waits for would leave work
    out. To wait for each call would add the same wake-up of a thread to both sides, which flatters
    the ratio.
    """
    time.sleep(_SETTLES)
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
    """A table in Markdown; the first column is text, the others are figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results_table(results: Iterable[Result], unit: str) -> str:
    """The results as a table, with times in `unit`: "ms" or "µs"."""
    scale = {"ms": 1e3, "µs": 1e6}[unit]

    def row(result: Result) -> list[str]:
        claim = result.claim
        ours, theirs = (f"{seconds * scale:.1f}" for seconds in result.seconds)
        target = "" if claim.target is None else f"≤ {claim.target:g}"
        return [claim.ours.name, ours, claim.theirs.name, theirs, f"**{result.ratio:.2f}**", target]

    return markdown_table(["", unit, "against", unit, "ratio", "target"], map(row, results))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--rounds", type=int, default=9, help="the median is of so many (default 9)"
    )
    return options
