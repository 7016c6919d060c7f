"""Claims about the cost of dispatch, for veneer and for other libraries of custom arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import transformer
from measure import Claim, Side, Thunk


@dataclass(frozen=True)
class Library:
    """A library: its transformation, and a constructor of an array `w + a @ b` written with it."""

    implicit: Callable[[Callable], Callable]
    lora: Callable[[Any, Any, Any], Any]
    has_operators: bool = True  # whether `x @ lora` works outside the transformation


def tracing(library: Library) -> list[Claim]:
    """Return claims about the time to trace a transformer of 12 layers for the first time."""
    dense = transformer.init(jax.random.key(0))
    everywhere = transformer.with_low_rank(dense, library.lora)
    once = transformer.with_low_rank(dense, library.lora, layers=1, matrices=("q",))
    ids = jnp.zeros((2, 16), int)
    implicit = library.implicit(transformer.forward)
    by_hand = lambda params, ids: transformer.forward(params, ids, matmul=transformer.by_hand)
    hand = Side(
        "the model written by hand",
        _fresh_trace(by_hand, transformer.with_low_rank(dense), ids),
    )
    plain = Side("plain JAX", _fresh_trace(transformer.forward, dense, ids))
    ours = lambda name, params: Side(name, _fresh_trace(implicit, params, ids))
    return [
        Claim(ours("LoRA weights everywhere", everywhere), hand, target=1.05),
        Claim(ours("one LoRA weight, the rest dense", once), plain, target=1.05),
        Claim(ours("no implicit value", dense), plain, target=1.0),
    ]


def _fresh_trace(function: Callable, *args: Any) -> Thunk:
    """Return a call that traces a new function, so that JAX finds nothing in its caches."""
    return lambda: jax.make_jaxpr(lambda *args: function(*args))(*args)


def eager(library: Library) -> list[Claim]:
    """Return claims about one operation outside `jit`, so small that it measures dispatch."""
    implicit = library.implicit
    x = jnp.ones((4, 64))
    low_rank = transformer.low_rank(jax.random.key(0), jnp.ones((64, 64)))
    w, lora = low_rank.w, library.lora(*low_rank)
    matmul = implicit(lambda x, w: x @ w)
    sin = implicit(jnp.sin)
    by_hand = jax.jit(transformer.by_hand)
    assert jnp.allclose(matmul(x, lora), by_hand(x, low_rank), rtol=1e-5)
    product = Side("`x @ w`", lambda: x @ w)
    return [
        Claim(Side("`implicit(lambda x, w: x @ w)(x, lora)`", lambda: matmul(x, lora)), product, 5),
        *(_operators(x, w, lora) if library.has_operators else []),
        Claim(Side("the LoRA product by hand, under `jit`", lambda: by_hand(x, low_rank)), product),
        Claim(
            Side("`implicit(jnp.sin)(x)`, dense", lambda: sin(x)),
            Side("`jnp.sin(x)`", lambda: jnp.sin(x)),
        ),
    ]


def _operators(x: jax.Array, w: jax.Array, lora: Any) -> list[Claim]:
    return [
        Claim(Side("`x @ lora`", lambda: x @ lora), Side("`x @ w`", lambda: x @ w), 2),
        Claim(Side("`lora.T`", lambda: lora.T), Side("`w.T`", lambda: w.T)),
    ]


def equations(claim: Claim) -> tuple[int, int]:
    """Return the numbers of equations in the two jaxprs of a claim about tracing."""
    return _count_equations(claim.ours.run()), _count_equations(claim.theirs.run())


def _count_equations(jaxpr: Any) -> int:
    is_jaxpr = lambda x: hasattr(x, "eqns")
    params = [equation.params for equation in jaxpr.eqns]
    inner = filter(is_jaxpr, jax.tree.leaves(params, is_leaf=is_jaxpr))
    return len(jaxpr.eqns) + sum(map(_count_equations, inner))
