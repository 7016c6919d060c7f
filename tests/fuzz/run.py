"""Run programs in worker processes, because XLA can end a process and memory fills up."""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from random import Random

import jax
from support import contexts

from .checks import Disagreement, check
from .programs import Program, program

#: Every n-th program is compiled. NumPy runs the others, which is many times as fast.
COMPILED = 32
#: A program may take this many seconds, with all smaller ones if it fails.
LONGEST = 600


def smallest(failing: Program, compiled: bool) -> tuple[Program, str]:
    """Shrink a failing program. Return the smallest failing one found, and its failure."""
    said = failure(failing, compiled)
    for simpler in failing.smaller():
        if failure(simpler, compiled) is not None:
            return smallest(simpler, compiled)
    return failing, str(said)


def failure(of: Program, compiled: bool) -> str | None:
    """Return how a program disagrees with the dense one, or None if it does not."""
    try:
        check(of, compiled)
    except Disagreement as error:
        return str(error)
    return None


def tried(number: int, seed: int, kinds: Sequence[str], mode: str) -> tuple[str, str]:
    """Check the program of this number. Return its outcome, and its shrunk text on failure."""
    one = program(Random(f"{seed} {number}"), kinds, mode)
    compiled = number % COMPILED == 0
    try:
        return check(one, compiled), ""
    except Disagreement:
        small, said = smallest(one, compiled)
        return "fails", f"{small}\n# {number}: {said[:600]}\n"


def prepare() -> None:
    """Configure JAX for many small programs."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    contexts.reuse()


def new_process() -> ProcessPoolExecutor:
    """Start a worker process. It is replaced every 1000 programs, to bound memory use."""
    return ProcessPoolExecutor(1, get_context("spawn"), prepare, max_tasks_per_child=1000)


def run(numbers: range, seed: int, kinds: Sequence[str], mode: str, seconds: float) -> Counter[str]:
    """Run the numbered programs. Print those that fail, hang or abort the process."""
    end, counts, printed = time.monotonic() + seconds, Counter[str](), set[str]()
    process = new_process()
    for number in numbers:
        if time.monotonic() > end:
            break
        try:
            result, text = process.submit(tried, number, seed, kinds, mode).result(LONGEST)
        except (BrokenProcessPool, TimeoutError) as error:
            result = "hangs" if isinstance(error, TimeoutError) else "ends the process"
            for worker in [*(process._processes or {}).values()]:
                worker.kill()
            process = new_process()
            one = program(Random(f"{seed} {number}"), kinds, mode)
            text = f"{one}\n# {number}: {result}\n"
        counts[result] += 1
        source, _, _ = text.rpartition("\n# ")
        if text and source not in printed:
            printed.add(source)
            print(text, flush=True)
    process.shutdown()
    return counts
