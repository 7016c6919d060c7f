"""What dispatch costs, for any library of custom arrays: the same claims, measured the same way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import transformer
from measure import Claim, Thunk


@dataclass(frozen=True)
class Library:
    """The transformation that a library offers, and an array type `w + a @ b` written with it."""

    implicit: Callable[[Callable], Callable]
    lora: Callable[[Any, Any, Any], Any]
    has_operators: bool = True  # whether `x @ lora` works outside the transformation


def tracing(library: Library) -> list[Claim]:
    """Claims about the time to trace a transformer of 12 layers, anew in each call."""
    dense = transformer.init(jax.random.key(0))
    everywhere = transformer.with_low_rank(dense, library.lora)
    once = transformer.with_low_rank(dense, library.lora, layers=1, matrices=("q",))
    ids = jnp.zeros((2, 16), int)
    implicit = library.implicit(transformer.forward)
    by_hand = lambda params, ids: transformer.forward(params, ids, matmul=transformer.by_hand)
    hand = _fresh_trace(by_hand, transformer.with_low_rank(dense), ids)
    plain = _fresh_trace(transformer.forward, dense, ids)
    return [
        Claim(
            "LoRA weights everywhere",
            _fresh_trace(implicit, everywhere, ids),
            "the model written by hand",
            hand,
            target=1.05,
        ),
        Claim(
            "one LoRA weight, the rest dense",
            _fresh_trace(implicit, once, ids),
            "plain JAX",
            plain,
            target=1.05,
        ),
        Claim(
            "no implicit value",
            _fresh_trace(implicit, dense, ids),
            "plain JAX",
            plain,
            target=1.0,
        ),
    ]


def _fresh_trace(function: Callable, *args: Any) -> Thunk:
    """Traces `function`, as a function that JAX has not seen before and so has in no cache."""
    return lambda: jax.make_jaxpr(lambda *args: function(*args))(*args)


def eager(library: Library) -> list[Claim]:
    """Claims about one operation outside `jit`, on x `[4, 64]` and w `[64, 64]`: all dispatch."""
    implicit = library.implicit
    x = jnp.ones((4, 64))
    low_rank = transformer.low_rank(jax.random.key(0), jnp.ones((64, 64)))
    w, lora = low_rank.w, library.lora(*low_rank)
    matmul = implicit(lambda x, w: x @ w)
    sin = implicit(jnp.sin)
    by_hand = jax.jit(transformer.by_hand)
    assert jnp.allclose(matmul(x, lora), by_hand(x, low_rank), rtol=1e-5)
    plain = "`x @ w`", lambda: x @ w
    claims = [
        Claim("`implicit(lambda x, w: x @ w)(x, lora)`", lambda: matmul(x, lora), *plain, 5),
        Claim("the LoRA product by hand, under `jit`", lambda: by_hand(x, low_rank), *plain),
        Claim("`implicit(jnp.sin)(x)`, dense", lambda: sin(x), "`jnp.sin(x)`", lambda: jnp.sin(x)),
    ]
    if library.has_operators:
        claims[1:1] = [
            Claim("`x @ lora`", lambda: x @ lora, *plain, 3),
            Claim("`lora.T`", lambda: lora.T, "`w.T`", lambda: w.T),
        ]
    return claims


def equations(claim: Claim) -> tuple[int, int]:
    """How many equations there are in the two jaxprs of a claim about tracing."""
    return _count(claim.measured()), _count(claim.reference())


def _count(jaxpr: Any) -> int:
    is_jaxpr = lambda x: hasattr(x, "eqns")
    params = [equation.params for equation in jaxpr.eqns]
    inner = filter(is_jaxpr, jax.tree.leaves(params, is_leaf=is_jaxpr))
    return len(jaxpr.eqns) + sum(map(_count, inner))
