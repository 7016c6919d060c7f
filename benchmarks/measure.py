"""Ratios of times: the two sides measured in one process, by turns, and the median taken.

A machine's speed drifts, and other programs disturb it. Two times measured minutes apart cannot be
compared; the ratio of two that are neighbours can, and the median of such ratios is steady.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

Thunk = Callable[[], Any]


@dataclass(frozen=True)
class Claim:
    """That one thing takes at most `target` times as long as another."""

    name: str
    measured: Thunk
    against: str
    reference: Thunk
    target: float | None = None


@dataclass(frozen=True)
class Result:
    """The median ratio for a claim, and the median times of its sides, in seconds."""

    claim: Claim
    ratio: float
    measured: float
    reference: float


def measure(
    claims: Iterable[Claim], *, rounds: int, batches: int = 1, calls: int = 1
) -> list[Result]:
    """Times the claims by turns: in each round, batches of calls of one side and of the other.

    The time of a side in a round is that of its fastest batch: other programs can only slow it.
    """
    claims = list(claims)
    for claim in claims:  # compile, and fill what caches there are
        for thunk in (claim.reference, claim.measured) * 2:
            jax.block_until_ready(thunk())
    times: list[list[tuple[float, float]]] = [[] for _ in claims]
    for _ in range(rounds):
        for claim, pairs in zip(claims, times, strict=True):
            gc.collect()  # the garbage of others; our own is collected as it falls due
            sides = (claim.measured, claim.reference) * batches
            seconds = [_seconds_a_call(side, calls) for side in sides]
            pairs.append((min(seconds[::2]), min(seconds[1::2])))
    return [_result(claim, pairs) for claim, pairs in zip(claims, times, strict=True)]


def _seconds_a_call(thunk: Thunk, calls: int) -> float:
    """The time of a call in a batch, at the end of which its last result is waited for.

    A call returns before its result is computed, so a batch that nobody waits for would leave work
    out. To wait for each call would add the same wake-up of a thread to both sides, which flatters
    the ratio.
    """
    start = time.perf_counter()
    for _ in range(calls):
        result = thunk()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _result(claim: Claim, pairs: Sequence[tuple[float, float]]) -> Result:
    measured, reference = zip(*pairs, strict=True)
    ratio = statistics.median(m / r for m, r in pairs)
    return Result(claim, ratio, statistics.median(measured), statistics.median(reference))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(results: Iterable[Result], unit: str) -> str:
    """The results as a table, with times in `unit`: "ms" or "µs"."""
    scale = {"ms": 1e3, "µs": 1e6}[unit]
    return table(
        ["", f"{unit}", "against", f"{unit}", "ratio", "target"],
        [
            [
                result.claim.name,
                f"{result.measured * scale:.1f}",
                result.claim.against,
                f"{result.reference * scale:.1f}",
                f"**{result.ratio:.2f}**",
                "" if result.claim.target is None else f"≤ {result.claim.target:g}",
            ]
            for result in results
        ],
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=9, help="the median is of so many (default 9)")
    return made
