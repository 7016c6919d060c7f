"""Time solves and products of structured matrices, compared with dense matrices, by size.

    python benchmarks/structured_solves.py    # the tables of docs/benchmarks.md, in ten minutes

A program is `jnp.linalg.solve(A, b)` or `A @ x` for one vector, under `jax.jit`, with the matrix as
an argument. The tables also show how many times as many operations the dense program takes. `python
docs/site/gallery.py` draws the plots of the tables.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from measure import markdown_table, parser, seconds_a_call

import veneer as vn
from veneer.types.structured import LowRank
from veneer.types.structured.banded import Tridiagonal
from veneer.types.structured.diagonal import Diagonal, Identity, Permutation
from veneer.types.structured.partwise import BlockDiagonal, Kronecker
from veneer.types.structured.toeplitz import Circulant, Toeplitz
from veneer.types.structured.triangular import Triangular

SIZES = (64, 128, 256, 512, 1024, 2048)
BLOCK, RANK = 16, 8
BATCHES = 3  # the fastest batch of calls counts in each round
PROGRAMS = {"solve": jnp.linalg.solve, "product": jnp.matmul}


def normal(key: jax.Array) -> Callable[..., jax.Array]:
    """Return a function that draws normal arrays of a shape."""
    count = itertools.count()
    return lambda *shape: jax.random.normal(jax.random.fold_in(key, next(count)), shape)


def factor_sizes(n: int) -> tuple[int, int]:
    """Return the sizes of the two factors of a Kronecker product. `n` is a power of two."""
    first = 2 ** (int(math.log2(n)) // 2)
    return first, n // first


@dataclass(frozen=True)
class Structure:
    """A type of matrix, its constructor, and the number of operations of its programs.

    **Arguments:**

    - `make`: takes a function that draws normal arrays, and the size n.
    - `solve`, `product`: the number of operations for the size n.
    - `orders`: the order of both numbers, as text.
    """

    name: str
    make: Callable[[Callable, int], Any]
    solve: Callable[[int], float]
    product: Callable[[int], float]
    orders: tuple[str, str]

    def promised(self, program: str, n: int) -> float:
        """Return how many times as many operations the dense program takes."""
        dense = {"solve": 2 / 3 * n**3 + 2 * n**2, "product": 2 * n**2}[program]
        return dense / getattr(self, program)(n)


def near_identity(draw: Callable, *shape: int) -> jax.Array:
    """Return matrices without small eigenvalues."""
    return draw(*shape) / math.sqrt(shape[-1]) + 4 * jnp.eye(shape[-1])


def _kronecker_solve(n: int) -> float:
    n1, n2 = factor_sizes(n)
    return 2 / 3 * (n1**3 + n2**3) + 2 * n * (n1 + n2)


STRUCTURES = [
    Structure("Diagonal", lambda d, n: Diagonal(d(n)), float, float, ("n", "n")),
    Structure(
        "Permutation",
        lambda d, n: Permutation(jnp.argsort(d(n)), jnp.float32),
        float,
        float,
        ("n", "n"),
    ),
    Structure(
        "Tridiagonal",
        lambda d, n: Tridiagonal(d(n - 1), d(n) + 4, d(n - 1)),
        lambda n: 8 * n,
        lambda n: 5 * n,
        ("n", "n"),
    ),
    Structure(
        f"BlockDiagonal, blocks of {BLOCK}",
        lambda d, n: BlockDiagonal(near_identity(d, n // BLOCK, BLOCK, BLOCK)),
        lambda n: n * (2 / 3 * BLOCK**2 + 2 * BLOCK),
        lambda n: 2 * n * BLOCK,
        ("n", "n"),
    ),
    Structure(
        f"Identity + LowRank, rank {RANK}",
        lambda d, n: Identity(n, jnp.float32) + LowRank(d(n, RANK) / n, d(RANK, n)),
        lambda n: n * (2 * RANK**2 + 4 * RANK),
        lambda n: 4 * n * RANK,
        ("n", "n"),
    ),
    Structure(
        "Kronecker of two",
        lambda d, n: Kronecker(*(near_identity(d, size, size) for size in factor_sizes(n))),
        _kronecker_solve,
        lambda n: 2 * n * sum(factor_sizes(n)),
        ("n^1.5", "n^1.5"),
    ),
    Structure(
        "Circulant",
        lambda d, n: Circulant(d(n).at[0].add(4 * math.sqrt(n))),
        lambda n: 7.5 * n * math.log2(n),
        lambda n: 7.5 * n * math.log2(n),
        ("n log n", "n log n"),
    ),
    Structure(
        "Toeplitz",
        lambda d, n: Toeplitz(d(n).at[0].add(4 * math.sqrt(n)), d(n)),
        lambda n: 10 * n**2,
        lambda n: 15 * n * math.log2(2 * n),
        ("n^2", "n log n"),
    ),
    Structure(
        "Triangular",
        lambda d, n: Triangular(near_identity(d, n, n)),
        lambda n: n**2,
        lambda n: 2 * n**2,
        ("n^2", "n^2"),
    ),
]

Seconds = dict[tuple[str, int], list[float]]  # of each side and size, one a round


def times(program: str, *, rounds: int) -> Seconds:
    """Return the seconds per call and round: dense, with each structure, and of `-b`."""
    found: Seconds = {}
    for n in SIZES:
        draw = normal(jax.random.key(n))
        run = jax.jit(vn.implicit(PROGRAMS[program], on_materialise="error"))
        b = draw(n)
        operands = {"dense": near_identity(draw, n, n)}
        operands |= {structure.name: structure.make(draw, n) for structure in STRUCTURES}
        sides = {name: partial(run, a, b) for name, a in operands.items()}
        sides["a call"] = partial(jax.jit(jnp.negative), b)
        for side in sides.values():
            jax.block_until_ready((side(), side()))
        calls = dict.fromkeys(sides, 20) | {"dense": max(1, 2**18 // n**2)}
        for _ in range(rounds):
            for name, side in sides.items():
                fastest = min(seconds_a_call(side, calls[name]) for _ in range(BATCHES))
                found.setdefault((name, n), []).append(fastest)
    return found


def table(program: str, found: Seconds) -> str:
    """Return the microseconds by size, and the measured and promised ratios at the largest size."""
    shown, last = [SIZES[0], SIZES[2], *SIZES[-2:]], SIZES[-1]
    middle = lambda name, n: f"{statistics.median(found[name, n]) * 1e6:,.0f}"

    def row(name: str, order: str, promised: str) -> list[str]:
        pairs = zip(found["dense", last], found[name, last], strict=True)
        ratio = statistics.median(dense / own for dense, own in pairs)
        measured = "" if name == "dense" else f"**{ratio:,.0f}**" if ratio > 10 else f"{ratio:.1f}"
        return [name, order, *(middle(name, n) for n in shown), measured, promised]

    index = list(PROGRAMS).index(program)
    rows = [row("dense", ("n^3", "n^2")[index], "")]
    rows += [row(s.name, s.orders[index], f"{s.promised(program, last):,.0f}") for s in STRUCTURES]
    rows.append(row("a call", "", ""))
    header = [program, "operations", *(f"µs, n = {n}" for n in shown)]
    return markdown_table([*header, f"faster at {last}", "fewer operations"], rows)


def main(*, rounds: int) -> None:
    measured = {program: times(program, rounds=rounds) for program in PROGRAMS}
    print("\n\n".join(table(program, found) for program, found in measured.items()))


if __name__ == "__main__":
    main(rounds=parser(__doc__).parse_args().rounds)
