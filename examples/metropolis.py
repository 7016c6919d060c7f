"""A Metropolis sampler in Numba that calls a JAX log-density a million times.

    python examples/metropolis.py [--steps 1000000] [--rounds 5]        # 15 seconds

For users of Numba who want to call JAX functions. The model is a logistic regression with a normal
prior. The chain starts at its mode, which is found by gradients of JAX. Each step calls a compiled
log-density. Numba code calls its attribute `.raw`. The same chain also runs as a Python loop over
`jax.jit`, with fewer steps. Both alternate, and the times are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax.scipy.stats import norm

import veneer as vn

N, DIM = 32, 4
TRUE = np.array([1.0, -2.0, 0.5, 0.0], np.float32)


def make_log_density(x: np.ndarray, y: np.ndarray) -> Callable[[Any], Any]:
    """Return the log-density of the weights `[DIM]`, up to a constant."""

    def log_density(w):
        return jnp.sum(jax.nn.log_sigmoid((2 * y - 1) * (x @ w))) + jnp.sum(norm.logpdf(w))

    return log_density


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, DIM)).astype(np.float32)
    y = rng.uniform(size=N) < 1 / (1 + np.exp(-x @ TRUE))
    return x, y.astype(np.float32)


def chain(log_density: Any, start: np.ndarray, steps: int, seed: int, size: float) -> Any:
    """Return the mean and the standard deviation of each weight, and the share of accepted steps.

    Python and Numba both run this function, and draw the same random numbers.
    """
    np.random.seed(seed)
    at, new = start.copy(), start.copy()
    here = log_density(at)
    total, squares = np.zeros(len(start)), np.zeros(len(start))
    accepted = 0
    for _ in range(steps):
        for n in range(len(start)):
            new[n] = at[n] + size * np.random.normal()
        there = log_density(new)
        if np.log(np.random.random()) < there - here:
            at[:] = new
            here = there
            accepted += 1
        total += at
        squares += at.astype(np.float64) ** 2
    mean = total / steps
    return mean, np.sqrt(squares / steps - mean**2), accepted / steps


class Run(NamedTuple):
    """The results of a chain, and the median seconds per step."""

    mean: np.ndarray
    deviation: np.ndarray
    accepted: float
    seconds: float


def time_chains(*chains: tuple[Callable[[int], Any], int], rounds: int) -> list[Run]:
    """Run the chains alternately."""
    for sample, _ in chains:
        sample(10)  # compiles
    seconds: list[list[float]] = [[] for _ in chains]
    results = [None for _ in chains]
    for _ in range(rounds):
        for n, (sample, steps) in enumerate(chains):
            start = time.perf_counter()
            results[n] = sample(steps)
            seconds[n].append((time.perf_counter() - start) / steps)
    medians = map(statistics.median, seconds)
    return [Run(*result, each) for result, each in zip(results, medians, strict=True)]


def main(
    steps: int = 1_000_000, slow_steps: int = 10_000, rounds: int = 5, seed: int = 0
) -> tuple[Run, Run]:
    log_density = make_log_density(*data())
    start = np.zeros(DIM, np.float32)
    climb = jax.jit(lambda w: w + 0.05 * jax.grad(log_density)(w))
    for _ in range(100):
        start = climb(start)
    start = np.asarray(start)

    compiled = vn.numba.compile(log_density, start)
    jitted, native = jax.jit(log_density), numba.njit(chain)
    fast, slow = time_chains(
        (lambda steps: native(compiled.raw, start, steps, seed, 0.5), steps),
        (lambda steps: chain(lambda w: float(jitted(w)), start, steps, seed, 0.5), slow_steps),
        rounds=rounds,
    )

    print(f"{'weight':>8}{'mean':>9}{'deviation':>11}")
    for n, (mean, deviation) in enumerate(zip(fast.mean, fast.deviation, strict=True)):
        print(f"{n:>8}{mean:>9.3f}{deviation:>11.3f}")
    print(f"{steps} steps in Numba: {fast.seconds * 1e6:.2f} µs a step, {fast.accepted:.0%} taken")
    print(f"{slow_steps} steps in Python over jax.jit: {slow.seconds * 1e6:.2f} µs a step")
    print(f"ratio of the medians of {rounds} rounds: {slow.seconds / fast.seconds:.0f}")
    return fast, slow


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    main(options.steps, rounds=options.rounds)
