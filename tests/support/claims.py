"""Test claims about operations of array types under every transformation.

A claim is a function of some operands. Under each transformation, it runs with `vn.implicit` and
with `dense`, which materializes the operands at the same point. The results must agree. Unless the
claim allows it, no operand may be materialized.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from support.policies import only_by_rules

VALUES = {"is_leaf": lambda x: isinstance(x, vn.Value)}


class Draw:
    """A source of random arrays with given batch axes, size `n` and dtype.

    `draw(m, n)` is a normal array of shape `[*batch, m, n]`; `draw.positive(n)` is in [0.5, 1.5).
    """

    def __init__(self, seed: int, batch: tuple[int, ...], n: int, dtype: Any):
        self._key, self._count = jax.random.key(seed), 0
        self.batch, self.n, self.dtype = batch, n, jnp.dtype(dtype)

    @property
    def key(self) -> jax.Array:
        """A new random key at each access."""
        self._count += 1
        return jax.random.fold_in(self._key, self._count)

    def __call__(self, *shape: int) -> jax.Array:
        return jax.random.normal(self.key, (*self.batch, *shape)).astype(self.dtype) / 2

    def positive(self, *shape: int) -> jax.Array:
        return (jax.random.uniform(self.key, (*self.batch, *shape)) + 0.5).astype(self.dtype)


Maker = Callable[[Draw], Any]


def undress(tree: Any) -> Any:
    """Materialize a tree. A type that cannot be materialized gives its only leaf."""

    def dense(x: Any) -> Any:
        if not isinstance(x, vn.Value):
            return x
        try:
            return vn.materialise(x)
        except (TypeError, ValueError, RuntimeError):
            (leaf,) = jax.tree.leaves(x)
            return leaf

    return jax.tree.map(dense, tree, **VALUES)


def dense(function: Callable) -> Callable:
    """Return a function that materializes its arguments and calls `function`."""
    return lambda *args: function(*undress(args))


@dataclass(frozen=True)
class Claim:
    """A function of random operands, and the type of its results.

    **Arguments:**

    - `run`: the function.
    - `operands`: a function from a `Draw` to an operand, for each operand.
    - `kept`: the type of every result, as a class; None for dense arrays.
    - `made_dense`: whether an operand may be materialized.
    - `sizes`: sizes `n` to test, besides 4.
    - `dtypes`: dtypes to test, besides float32.
    - `tolerance`: the allowed error, in units of the epsilon of the dtype times the largest result.
    - `without`: transformations that do not apply. A comment gives the reason.
    """

    run: Callable
    operands: Sequence[Maker]
    kept: type | None = None
    made_dense: bool = False
    sizes: tuple[int, ...] = (0, 1, 5)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float64")
    tolerance: float = 256
    without: tuple[str, ...] = ()

    def make(self, batch: tuple[int, ...] = (), n: int = 4, dtype: Any = "float32") -> list[Any]:
        return [make(Draw(i, batch, n, dtype)) for i, make in enumerate(self.operands)]


def scalar(tree: Any) -> jax.Array:
    """Return a scalar that depends on every entry of a tree."""
    leaves = jax.tree.leaves(undress(tree))
    return sum((jnp.sin(x.astype(jnp.float32)).sum() for x in leaves), jnp.float32(0))


def floats(operands: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the operands that a program can be differentiated with respect to."""
    differentiable = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return tuple(i for i, x in enumerate(operands) if any(map(differentiable, jax.tree.leaves(x))))


def _grad(function: Callable, operands: Sequence[Any]) -> Callable:
    return jax.grad(lambda *xs: scalar(function(*xs)), floats(operands), allow_int=True)


# Functions of a transform m (vn.implicit or `dense`), a function f, operands x and stacks xs. All
# but the first compile the whole program, which is faster than eager operations.
TRANSFORMATIONS: dict[str, Callable] = {
    "implicit": lambda m, f, x, xs: m(f)(*x),
    "jit of implicit": lambda m, f, x, xs: jax.jit(m(f))(*x),
    "implicit of jit": lambda m, f, x, xs: m(jax.jit(f))(*x),
    "vmap of implicit": lambda m, f, x, xs: jax.jit(jax.vmap(m(f)))(*xs),
    "implicit of vmap": lambda m, f, x, xs: m(jax.jit(jax.vmap(f)))(*xs),
    "implicit of scan": lambda m, f, x, xs: m(
        lambda *xs: jax.lax.scan(lambda c, x: (c, f(*x)), 0, xs)[1]
    )(*xs),
    "grad of implicit": lambda m, f, x, xs: jax.jit(_grad(m(f), x))(*x),
    "implicit of grad": lambda m, f, x, xs: m(
        jax.jit(jax.grad(lambda *a: scalar_of_arrays(f(*a)), floats(undress(x))))
    )(*x),
}


def scalar_of_arrays(tree: Any) -> jax.Array:
    """Return the same scalar as `scalar`, without a reference to implicit arrays."""
    return sum(
        (jnp.sin(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(tree)), jnp.float32(0)
    )


def _of_structured(claim: Claim) -> Callable:
    policy = "allow" if claim.made_dense else only_by_rules
    return lambda f: vn.implicit(f, on_materialise=policy)


# A derivative with respect to the dense array is dense, so these results have no special type.
_BY_THE_DENSE = ("implicit of grad",)


def claims(table: Mapping[str, Claim]) -> tuple[Callable, Callable]:
    """Return two tests of a table of claims: under transformations, and over sizes and dtypes."""
    grid = [
        pytest.param(claim, how, id=f"{name}-{how}")
        for name, claim in table.items()
        for how in TRANSFORMATIONS
        if how not in claim.without
    ]

    @pytest.mark.parametrize(("claim", "how"), grid)
    def test_under(claim, how):
        run, x, xs = TRANSFORMATIONS[how], claim.make(), claim.make(batch=(3,))
        m = vn.implicit if how in _BY_THE_DENSE else _of_structured(claim)
        out = run(m, claim.run, x, xs)
        # The reference is always compiled.
        reference = TRANSFORMATIONS["jit of implicit"] if how == "implicit" else run
        assert_agrees(out, reference(dense, claim.run, x, xs), claim)
        if "grad" not in how:
            check_kept(out, claim)

    others = [
        pytest.param(claim, n, dtype, id=f"{name}-{dtype if n == 4 else n}")
        for name, claim in table.items()
        for n, dtype in [*((n, "float32") for n in claim.sizes), *((4, d) for d in claim.dtypes)]
    ]

    @pytest.mark.parametrize(("claim", "n", "dtype"), others)
    def test_over_sizes_and_dtypes(claim, n, dtype):
        with jax.enable_x64(True) if dtype == "float64" else nullcontext():
            x = claim.make(n=n, dtype=dtype)
            out = jax.jit(_of_structured(claim)(claim.run))(*x)
            assert_agrees(out, jax.jit(dense(claim.run))(*x), claim)
            check_kept(out, claim)

    return test_under, test_over_sizes_and_dtypes


def check_kept(out: Any, claim: Claim) -> None:
    """Check that every result has the claimed type."""
    for x in jax.tree.leaves(out, **VALUES):
        if claim.kept is None:
            assert not isinstance(x, vn.Value), f"{x!r} is claimed to be dense"
        else:
            assert isinstance(x, claim.kept), f"{x!r} is claimed to be of {claim.kept.__name__}"


def assert_agrees(out: Any, expected: Any, claim: Claim) -> None:
    """Compare the leaves of two trees, or their dense arrays if the structures differ."""
    for x in (out, expected):
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    if jax.tree.structure(out) != jax.tree.structure(expected):
        out, expected = undress(out), undress(expected)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        dtype = jnp.result_type(y)
        assert (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), dtype)
        if jnp.issubdtype(dtype, jnp.inexact):
            x, y = map(_in_double, (x, y))
            largest = np.max(np.abs(y), initial=1.0, where=np.isfinite(y))
            atol = claim.tolerance * float(jnp.finfo(dtype).eps) * largest
            assert np.allclose(x, y, rtol=0, atol=atol, equal_nan=True), (x, y)
        elif dtype != jax.dtypes.float0:
            assert bool((jnp.asarray(x) == jnp.asarray(y)).all()), (x, y)


def _in_double(x: Any) -> np.ndarray:
    # NumPy, because jax.numpy would compile each function for each shape.
    wide = "complex128" if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating) else "float64"
    return np.asarray(x).astype(wide)
