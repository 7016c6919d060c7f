"""Compile, time and record programs for `gpu_all.py`."""

import argparse
import collections
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import gpu_tables
import jax
import jax.numpy as jnp
from gpu_tables import Format
from jax import lax
from measure import seconds_a_call

THREADS = 8  # for compiling
ROUNDS, ROUND_SECONDS = 7, 0.012  # per measurement
_CUDA_IS_LOST = 3  # the exit code of a worker
QUICK = {"xla_gpu_autotune_level": 0}  # for programs that are not timed

INT4, INT8, FP8 = Format("int4", 128), Format("int8"), Format("float8_e4m3fn")
UINT4, NF4, MXFP4 = Format("uint4", 128), Format("nf4", 64), Format("mxfp4", 32)
CHECKED = (INT4, Format("int4", 32), Format("int4"), INT8, Format("uint4"), UINT4, NF4, FP8, MXFP4)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements of all parts."""

    copied: int = 1 << 30  # bytes
    peak: int = 8192
    checked: tuple[tuple[int, int], ...] = ((1024, 512), (1024, 480))
    checked_rows: tuple[int, ...] = (1, 3, 16, 17, 64)
    checked_formats: tuple[Format, ...] = CHECKED
    weights: tuple[tuple[int, int], ...] = ((4096, 11008), (8192, 28672))
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)  # M
    rows_large: tuple[int, ...] = (1, 16, 1024)
    rows_others: tuple[int, ...] = (1, 16, 128, 1024)
    #: The K and N of the weights in the model of part 5.
    decoded: tuple[tuple[int, int], ...] = ((2048, 512), (2048, 2048), (2048, 8192), (8192, 2048))
    dequantized: tuple[Format, ...] = (INT4, UINT4, INT8, NF4, MXFP4)
    rotated: int = 200_000_000  # bytes of weights to rotate through, more than the L2 cache holds
    least: int = 3  # fewest copies of a weight
    most: int = 12  # most copies of a weight
    llama: tuple[int, ...] = (128256, 2048, 8192, 16, 32, 8, 64)
    batches: tuple[int, ...] = (1, 16)
    tokens: int = 64
    trained: tuple[int, int] = (4, 512)  # texts, tokens
    head_parts: int = 6  # a training step computes the logits of one part after the other
    attention: tuple[int, ...] = (8, 8, 4, 128)  # batch, KV heads, queries per head, width
    contexts: tuple[tuple[int, int], ...] = ((4096, 4), (32768, 1))  # tokens, layers


SMALL = Sizes(
    copied=1 << 16,
    peak=64,
    checked=((256, 128), (256, 96)),
    checked_rows=(1, 3),
    checked_formats=(INT4,),
    weights=((256, 128), (256, 256)),
    rows=(1, 16),
    rows_large=(1,),
    rows_others=(1,),
    decoded=((512, 128),),
    dequantized=(INT4,),
    rotated=1,
    least=2,
    most=2,
    llama=(64, 128, 256, 1, 2, 1, 64),
    batches=(1, 2),
    tokens=4,
    trained=(1, 16),
    head_parts=2,
    attention=(1, 2, 2, 64),
    contexts=((64, 2),),
)


class Worker:
    """A process that compiles and times programs, and writes their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.sizes = SMALL if options.small else Sizes()
        self.deadline = self.until = options.until
        self.pool = ThreadPoolExecutor(2 if options.small else THREADS)
        self.lock = threading.Lock()
        journal = self.out / "journal.jsonl"
        self.suspects = _unfinished(journal)
        self.done = set(gpu_tables.read(self.out))
        self.early: dict[str, Future] = {}
        self.journal = journal.open("a")
        self._log(worker=os.getpid())

    def _log(self, **event: Any) -> None:
        with self.lock:
            print(json.dumps(event), file=self.journal, flush=True)

    def time_left(self) -> float:
        """Return the seconds until the deadline of the part."""
        return self.deadline - time.time()

    def record(self, key: str, **values: Any) -> None:
        """Write and print a result. The first character of its key is the part."""
        with self.lock:
            with (self.out / f"part{key[0]}.jsonl").open("a") as file:
                print(json.dumps({"key": key, **values}), file=file, flush=True)
            self.done.add(key)
            told = ", ".join(f"{k} {short(v)}" for k, v in values.items() if k != "count")
            print(f"{key}: {told}", flush=True)

    @contextlib.contextmanager
    def attempt(self, key: str, kind: str) -> Iterator[None]:
        """Record an exception as a result. Exit the worker if CUDA is no longer usable."""
        self._log(start=key, kind=kind)
        try:
            yield
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:200]
            self.record(key, error=f"{kind}: {type(error).__name__}: {reason}")
            if re.search(r"CUDA_ERROR_(ILLEGAL|LAUNCH|MISALIGNED|HARDWARE|ASSERT)", str(error)):
                os._exit(_CUDA_IS_LOST)
        self._log(end=key, kind=kind)

    def compile(self, jobs: Sequence["Job"]) -> dict[str, "Program"]:
        """Compile programs in threads. Return the finished programs by key."""
        skipped = {job.key for job in jobs if self.suspects[job.key] > 1}
        for key in skipped - self.done:
            self.record(key, error="aborted the process")
        jobs = [job for job in jobs if job.key not in skipped]
        owners: dict[str, str] = {}
        reserve = min(5, 0.2 * self.time_left())  # for timing the programs
        alone = [job for job in jobs if self.suspects[job.key]]
        built = {
            job.key: self.early.pop(job.key, None) or self.pool.submit(self._build, job, owners)
            for job in jobs
            if job not in alone
        }
        programs = {}
        for job in jobs:
            if job in alone:
                continue
            try:
                programs[job.key] = built[job.key].result(max(0.1, self.time_left() - reserve))
            except TimeoutError:
                built[job.key].cancel()
                self.record(job.key, error="compile: not within its time")
        for job in alone:
            if self.time_left() > 0:
                programs[job.key] = self._build(job, owners)
        return {key: program for key, program in programs.items() if program is not None}

    def compile_early(self, jobs: Sequence["Job"]) -> None:
        """Start compiling programs for a later part, each in its own thread."""
        jobs = [job for job in jobs if not self.suspects[job.key] and job.key not in self.done]
        if jobs:
            pool = ThreadPoolExecutor(len(jobs))
            self.early |= {job.key: pool.submit(self._build, job, {}) for job in jobs}

    def _build(self, job: "Job", owners: dict[str, str]) -> "Program | None":
        if self.time_left() <= 0:
            return None
        with self.attempt(job.key, "compile"):
            start = time.perf_counter()
            with job.context():
                lowered = jax.jit(job.function, donate_argnums=job.donated).lower(*job.args)
            text = f"{lowered.as_text()}{job.options}".encode()
            with self.lock:
                owner = owners.setdefault(hashlib.sha256(text).hexdigest(), job.key)
            if owner != job.key:
                self.record(job.key, same_as=owner)
                return None
            run = lowered.compile(job.options)
            analysis = run.memory_analysis()
            return Program(
                run,
                {
                    "temp_bytes": None if analysis is None else analysis.temp_size_in_bytes,
                    "kernels": kernel_kinds(run.as_text()),
                    "compile_s": round(time.perf_counter() - start, 2),
                },
            )
        return None

    def time(self, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Time calls alternately, in random order. Return the seconds per call, for each round."""
        calls, seconds, order = {}, collections.defaultdict(list), random.Random(0)
        for name, run in runs.items():
            if self.suspects[name] > 1:
                continue
            with self.attempt(name, "run"):
                jax.block_until_ready(run())
                took = seconds_a_call(run, 2)
                calls[name] = max(1, min(400, round(ROUND_SECONDS / took)))
        gc.collect()
        gc.disable()
        for _ in range(1 if self.options.small else ROUNDS):
            for name in order.sample(list(calls), len(calls)):
                seconds[name].append(seconds_a_call(runs[name], calls[name]))
        gc.enable()
        return seconds


class Job(NamedTuple):
    """A program to compile. The arguments may be `ShapeDtypeStruct`s."""

    key: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    context: Callable[[], Any] = contextlib.nullcontext
    options: dict[str, Any] | None = None
    donated: tuple[int, ...] = ()


class Program(NamedTuple):
    """A compiled program, and facts to record with its time."""

    run: Any
    facts: dict[str, Any]


def _unfinished(journal: Path) -> collections.Counter:
    """Count, per key, how often a worker died in that step.

    A death while compiling counts 1, any other counts 2.
    """
    counts: collections.Counter = collections.Counter()
    begun: dict[tuple[str, str], int] = {}
    events = (
        [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    )
    for event in [*events, {"worker": 0}]:
        if "worker" in event:
            for key, kind in begun:
                counts[key] += 1 if kind == "compile" else 2
            begun = {}
        elif "start" in event:
            begun[event["start"], event["kind"]] = 1
        else:
            begun.pop((event["end"], event["kind"]), None)
    return counts


def kernel_kinds(hlo: str) -> str:
    """Count the custom calls and the kinds of fusions in optimized HLO. Return them as text."""
    kinds: collections.Counter = collections.Counter()
    for line in hlo.splitlines():
        target = re.search(r'custom_call_target="([^"]+)"', line)
        if target:
            kinds[target[1]] += 1
        elif " fusion(" in line:
            named = re.search(r'"kind":"__(\w+)"', line) or re.search(r"kind=k(\w+)", line)
            kinds[named[1] if named else "fusion"] += 1
        elif re.search(r" (while|convolution|scaled-dot)\(", line):
            kinds[re.search(r" ([\w-]+)\(", line)[1]] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(6))


def short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def stored_bytes(leaves: Any) -> int:
    """Return the bytes of arrays or avals. Two 4-bit values take one byte."""
    bits = lambda x: (
        4 if x.dtype.name in ("int4", "uint4", "float4_e2m1fn") else 8 * x.dtype.itemsize
    )
    return sum(x.size * bits(x) // 8 for x in jax.tree.leaves(leaves))


def device_seconds(runs: dict[str, list[Callable[[], Any]]], rounds: int = 4) -> dict[str, float]:
    """Measure the GPU time of each call with the profiler. Return the median seconds by key.

    Without a GPU, measure wall time.
    """
    if jax.default_backend() != "gpu":
        return {key: _call_seconds(calls) for key, calls in runs.items()}
    # Reverse an array between programs. Its kernel separates the programs in the profile.
    mark = functools.partial(jax.jit(lambda x: lax.rev(x, (0,))), jnp.ones(32))
    jax.block_until_ready(mark())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for calls in runs.values():
                jax.block_until_ready(mark())
                for _ in range(rounds):
                    results = [call() for call in calls]
                jax.block_until_ready(results)
            jax.block_until_ready(mark())
        events = _kernel_events(folder)
    marks = [i for i, event in enumerate(events) if event[2] == events[0][2]]
    if len(marks) != len(runs) + 1:
        print(f"{len(marks)} marks for {len(runs)} programs: {events[:3]}", flush=True)
        return {key: _call_seconds(calls) for key, calls in runs.items()}
    seconds = {}
    for (key, calls), (first, last) in zip(runs.items(), itertools.pairwise(marks), strict=True):
        between = [duration for _, duration, _ in events[first + 1 : last]]
        kernels, rest = divmod(len(between), rounds * len(calls))
        if rest or not kernels:
            print(f"{key}: {len(between)} kernels in {rounds * len(calls)} calls", flush=True)
            seconds[key] = sum(between) / (rounds * len(calls)) / 1e9
            continue
        each = [sum(between[i : i + kernels]) for i in range(0, len(between), kernels)]
        seconds[key] = statistics.median(each[len(calls) :]) / 1e9  # the first round warms up
    return seconds


def _kernel_events(folder: str) -> list[tuple[float, float, str]]:
    """Return the start (ns), duration (ns) and name of each kernel in a profile, by start."""
    (path,) = Path(folder).rglob("*.xplane.pb")
    return sorted(
        (event.start_ns, event.duration_ns, event.name)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )


def _call_seconds(calls: list[Callable[[], Any]]) -> float:
    return statistics.median(seconds_a_call(call, 10) for call in calls)
