"""Test each probe type under each transformation: the matrix of probes and cells.

A cell is a program that calls `m.implicit`. It runs twice: with `vn.implicit`, and with `dense`,
which materializes the operands at the same point. So in both runs, a derivative taken outside is
with respect to the leaves, and a derivative taken inside is with respect to the dense array.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import veneer as vn
from support.array_types import lora, lora_of_int8, quantized
from support.probes import Opaque, Quantity, bare, doubly_scaled, lora_of_lora, unit

N = 4
VALUES = {"is_leaf": lambda x: isinstance(x, vn.Value)}


def plain(tree: Any) -> Any:
    """Materialize a tree. Types that cannot be materialized give the array inside."""
    refuses = lambda x: isinstance(x, Opaque | Quantity)
    return jax.tree.map(lambda x: bare(x) if refuses(x) else vn.materialise(x), tree, **VALUES)


def dense(function: Callable) -> Callable:
    """Return a function that materializes its arguments and calls `function`."""
    return lambda *args: function(*plain(args))


is_dense = lambda x: not isinstance(x, vn.Value)
is_opaque = lambda x: isinstance(x, Opaque)
has_unit = lambda **exponents: lambda x: getattr(x, "unit", ()) == unit(**exponents)


@dataclass(frozen=True)
class Probe:
    """A type, and a program for its values.

    `kinds` maps a kind of result to a check of its type. The kinds are the result of a step ("c"),
    the loss, and derivatives of the loss with respect to the value or the carry.
    """

    make: Callable  # makes a value from a key and a shape [..., N, N]
    wrap: Callable = lambda x: x  # makes a carry from an array
    step: Callable = lambda c, w: jnp.tanh(c @ w)  # [N, N], [N, N] -> [N, N]
    loss_of: Callable = lambda y, c: jnp.sin(y).sum()
    kinds: dict[str, Callable] = field(default_factory=dict)

    def loss(self, c: Any, w: Any) -> Any:
        return self.loss_of(self.step(c, w), c)

    def check_kind(self, kind: str, results: Any) -> None:
        """Check that results have the type of their kind, including metadata."""
        metadata = jax.tree.structure(self.make(jax.random.key(0), (N, N)))
        same = lambda x: jax.tree.structure(x) == metadata
        is_right = same if kind == "w" else self.kinds.get(kind, is_dense)
        for x in jax.tree.leaves(results, **VALUES):
            assert is_right(x), f"{x} is not of the type of {kind!r}"


def positive(wrap: Callable) -> Callable:
    return lambda key, shape: wrap(jax.random.uniform(key, shape, minval=0.5, maxval=1.5))


def metres(x: jax.Array) -> Quantity:
    return Quantity(x, unit(m=1))


PROBES = {
    "opaque": Probe(
        positive(Opaque),
        Opaque,
        kinds=dict.fromkeys("c loss dloss ddloss jacobian".split(), is_opaque),
    ),
    "quantity": Probe(
        positive(metres),
        metres,
        step=lambda c, w: c * (c / (c + w)),
        loss_of=lambda y, c: jnp.sin(y / c).sum(),
        kinds={"c": has_unit(m=1), "dloss": has_unit(m=-1), "ddloss": has_unit(m=-2)},
    ),
    "lora": Probe(lora),
    "int8": Probe(quantized("int8", None)),
    "int4": Probe(quantized("int4", 2)),
    "nf4": Probe(quantized("nf4", 2)),
    "lora of int8": Probe(lora_of_int8),
    "lora of lora": Probe(lora_of_lora),
    "doubly scaled": Probe(doubly_scaled),
}


def of(make: Callable) -> Callable:
    """Return a maker of values. `make` gets a function that draws arrays with the leading axes."""

    def value(key: jax.Array, shape: tuple[int, ...]) -> Any:
        lead, count = shape[:-2], iter(range(100))
        fresh = lambda: jax.random.fold_in(key, next(count))
        return make(lambda *inner: jax.random.normal(fresh(), (*lead, *inner)) / 2)

    return value


# The public types, in a program that multiplies by them. Types that a matmul cannot tell from their
# leaf are tested by claims instead.
T = vn.types
TYPES = {
    "LoraArray": Probe(of(lambda a: T.LoraArray(a(N, N), a(N, 2), a(2, N), scale=0.5))),
    "LoraArray, DoRA": Probe(of(lambda a: T.LoraArray(a(N, N), a(N, 2), a(2, N), abs(a(1, N))))),
    "LowRank": Probe(of(lambda a: T.LowRank(a(N, 2), a(2, N)))),
    "Frozen": Probe(of(lambda a: T.Frozen(a(N, N)))),
    "SparseArray": Probe(
        lambda key, shape: T.SparseArray.from_dense(
            jax.random.normal(key, shape) * jnp.tri(N), n_batch=len(shape) - 2
        )
    ),
    "NMSparse": Probe(lambda key, shape: T.NMSparse.prune(jax.random.normal(key, shape), 2, 4)),
    "Diagonal": Probe(of(lambda a: T.Diagonal(a(N)))),
    "Tridiagonal": Probe(of(lambda a: T.Tridiagonal(a(N - 1), a(N), a(N - 1)))),
    "Banded": Probe(of(lambda a: T.Banded(a(3, N), 2, 0))),
    "Toeplitz": Probe(of(lambda a: T.Toeplitz(a(N), a(N)))),
    "Circulant": Probe(of(lambda a: T.Circulant(a(N)))),
    "Kronecker": Probe(of(lambda a: T.Kronecker(a(2, 2), T.Diagonal(a(2))))),
    "BlockDiagonal": Probe(of(lambda a: T.BlockDiagonal(a(2, 2, 2)))),
    "Product": Probe(of(lambda a: T.Product(T.Diagonal(a(N)), T.Circulant(a(N))))),
    "Triangular": Probe(of(lambda a: T.Triangular(a(N, N)))),
    "Symmetric": Probe(of(lambda a: T.Symmetric(a(N * (N + 1) // 2)))),
    "Permutation": Probe(of(lambda a: T.Permutation(jnp.argsort(a(N), -1)))),
    "Identity": Probe(lambda key, shape: T.Identity(N, "float32", leading=shape[:-2])),
    "Constant": Probe(of(lambda a: T.Constant(a(), (N, N)))),
}


class Operands:
    """The input of a cell: the transform, the program of the probe, and its operands."""

    def __init__(self, name: str, implicit: Callable):
        probe = (PROBES | TYPES)[name]
        self.implicit, self.wrap = implicit, probe.wrap
        self.step, self.loss, self.loss_of = probe.step, probe.loss, probe.loss_of
        carry, value = jax.random.split(jax.random.key(3))
        array = positive(lambda x: x)
        self.c = probe.wrap(array(carry, (N, N)))
        self.cs = probe.wrap(array(carry, (3, N, N)))
        self.w = probe.make(value, (N, N))
        self.ws = probe.make(value, (2, N, N))

    # Cells that call the transform inside a loop of JAX need an array as carry, so they use `wrap`
    # and `unwrap`.
    unwrap = staticmethod(plain)

    def scalar(self, function: Callable) -> Callable:
        """Return the transformed function, with materialized results that JAX can differentiate."""
        return lambda *args: plain(self.implicit(function)(*args))


operands = cache(Operands)


@dataclass(frozen=True)
class Cell:
    run: Callable[[Operands], Any]
    kinds: Any  # a tree prefix of the results with their kinds; None allows any type


def cells(kinds: Any, table: dict[str, Callable[[Operands], Any]]) -> dict[str, Cell]:
    return {name: Cell(run, kinds) for name, run in table.items()}


@dataclass(frozen=True)
class Refusal:
    """A cell that JAX cannot run: the reason, and the error message."""

    reason: str
    message: str
    of_dense_too: bool  # whether the dense program raises the same error


# One probe for metadata, trained leaves, codes, and types inside types.
KINDS = ("opaque", "quantity", "lora", "int4", "lora of int8", "doubly scaled")
OTHERS = tuple(name for name in PROBES if name not in KINDS)


def matrix(
    cells: dict[str, Cell],
    probes: Iterable[str] = KINDS,
    *,
    refused: dict[tuple[str, str], Refusal] | None = None,
) -> Callable:
    """Return a test of a table of cells. Cells in `refused` must raise."""
    grid = [
        pytest.param(cell, probe, (refused or {}).get((name, probe)), id=f"{name}-{probe}")
        for name, cell in cells.items()
        for probe in probes
    ]

    @pytest.mark.parametrize(("cell", "probe", "refusal"), grid)
    def test(cell, probe, refusal):
        implicit, reference = operands(probe, vn.implicit), operands(probe, dense)
        if refusal is not None:
            for m in (implicit, reference) if refusal.of_dense_too else (implicit,):
                with pytest.raises(TypeError, match=refusal.message):
                    cell.run(m)
            return
        out, expected = cell.run(implicit), cell.run(reference)
        assert_same(out, expected)
        if cell.kinds is not None:
            of_probe = (PROBES | TYPES)[probe]
            jax.tree.map(lambda kind, part: of_probe.check_kind(kind, part), cell.kinds, out)

    return test


def assert_same(out: Any, expected: Any) -> None:
    """Compare the leaves of two trees, or their dense arrays if the structures differ."""
    for x in (out, expected):
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    if jax.tree.structure(out) != jax.tree.structure(expected):
        out, expected = plain(out), plain(expected)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), jnp.result_type(y))
        if jnp.result_type(x) != jax.dtypes.float0:
            # Sums may run in another order, so the error is relative to the largest entry.
            tolerance = 2e-5 * max(1.0, float(jnp.max(jnp.abs(y), initial=0.0)))
            assert jnp.allclose(x, y, rtol=0, atol=tolerance), (x, y)
