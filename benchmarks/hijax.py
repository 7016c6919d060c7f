"""Time tracing and calls with high types, compared with programs without them.

    python benchmarks/hijax.py    # the tables of docs/benchmarks.md, in two minutes

Prints three tables:

- the time to trace a transformer of 12 layers: with dense weights while high types are on, and with
  LoRA weights, compared with the same model written by hand. Then the time of dense code that JAX
  calls through wrappers of high types: 30 calls of `relu`, and 20 scans
- the time of a call with implicit arguments or results, compared with a call on their leaves
- the time of a call that writes a `Box`, compared with a function that returns the new value

Each trace uses a new function. The arrays of a call are small, so that handling the arguments takes
most of the time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from lora import LIBRARIES
from measure import Claim, Result, Side, Thunk, markdown_table, measure, parser, results_table
from support import transformer

import veneer as vn

# The additional µs per leaf of an implicit argument or result.
LEAF_TARGET = 2.0


def traced(function: Callable, *args: Any) -> Thunk:
    """Return a call that traces a new function, so that JAX finds nothing in its caches."""
    return lambda: jax.make_jaxpr(lambda *args: function(*args))(*args)


def tracing() -> list[Claim]:
    """Return claims about a forward pass and about its gradient."""
    dense = transformer.init(jax.random.key(0))
    make_lora = LIBRARIES["veneer"][0]().lora
    lora, ids = transformer.with_low_rank(dense, make_lora), jnp.zeros((2, 16), int)
    written, forward = transformer.with_low_rank(dense), transformer.forward
    by_hand = lambda params, ids: forward(params, ids, matmul=transformer.by_hand)
    gradient = lambda f: jax.value_and_grad(lambda params, ids: jnp.mean(f(params, ids) ** 2))
    claims = []
    for name, of in (("forward", lambda f: f), ("value and gradient", gradient)):
        off = traced(of(forward), dense, ids)
        hand = Side("the model written by hand", traced(of(by_hand), written, ids))
        typed, implicit = (
            traced(of(forward), lora, ids),
            traced(of(vn.implicit(forward)), lora, ids),
        )
        for weights, thunk, other, target in (
            ("dense", off, Side("high types off", off), 1.02),
            ("LoRA", typed, hand, None),
        ):
            side = Side(f"{name}, {weights} weights, high types on", thunk, within=vn.hijax.enabled)
            claims.append(Claim(side, other, target))
        claims.append(Claim(Side(f"{name}, LoRA weights, `vn.implicit`", implicit), hand))
    for name, thunk in (
        ("30 `relu`, dense, traced", traced(relus, jnp.ones(8))),
        ("30 `relu`, dense, eager", lambda: relus(jnp.ones(8))),
        ("20 scans, dense, traced", traced(scans, jnp.ones(8))),
    ):
        side = Side(f"{name}, high types on", thunk, within=vn.hijax.enabled)
        claims.append(Claim(side, Side("high types off", thunk)))
    return claims


def relus(x: jax.Array) -> jax.Array:
    """Call a function with a custom derivative 30 times."""
    for _ in range(30):
        x = jax.nn.relu(x)
    return x


def scans(x: jax.Array) -> jax.Array:
    """Run 20 short scans, each with a new body."""
    for _ in range(20):
        x, _ = jax.lax.scan(lambda carry, _: (carry * 1.5, None), x, None, length=3)
    return x


def calls() -> list[tuple[Claim, int]]:
    """Return claims about calls with implicit arrays, with the number of their leaves."""
    w, a, b = jnp.ones((8, 8)), jnp.ones((8, 2)), jnp.ones((2, 8))
    x, lora = jnp.ones((2, 8)), vn.types.LoraArray(w, a, b)
    q = vn.quant.quantize(w, "int8", channelwise_axes=(1,))
    by_hand = jax.jit(lambda x, w, a, b: x @ w + (x @ a) @ b)
    of_codes = jax.jit(lambda x, codes, scale: (x @ codes.astype(x.dtype)) * scale)
    turned = jax.jit(lambda codes, scale: (codes.T, scale.T))
    layers, leaves = [lora] * 16, [(w, a, b)] * 16
    through = jax.jit(lambda x, leaves: x + 1)
    through_ours = vn.jit(lambda x, layers: x + 1)
    dot_ours = vn.jit(lambda x, w: jnp.dot(x, w))
    dot, turn = jax.jit(lambda x, w: jnp.dot(x, w)), jax.jit(lambda w: jnp.transpose(w))
    codes, scale = q.packed, q.scale

    def claim(name: str, ours: Thunk, theirs: Thunk) -> Claim:
        return Claim(Side(name, ours), Side("on its leaves", theirs))

    return [
        (claim("a LoRA weight", lambda: dot(x, lora), lambda: by_hand(x, w, a, b)), 3),
        (claim("an int8 weight", lambda: dot(x, q), lambda: of_codes(x, codes, scale)), 2),
        (
            claim("an int8 weight and result", lambda: turn(q), lambda: turned(codes, scale)),
            4,
        ),
        (
            claim(
                "an int8 weight, `vn.jit`",
                lambda: dot_ours(x, q),
                lambda: of_codes(x, codes, scale),
            ),
            2,
        ),
        (
            claim(
                "16 LoRA weights, `vn.jit`",
                lambda: through_ours(x, layers),
                lambda: through(x, leaves),
            ),
            48,
        ),
    ]


def boxes() -> list[Claim]:
    """Return claims about calls that count in a Box."""
    one = jnp.ones(())
    plain = jax.jit(lambda count, x: (count + x, x))
    given, held = vn.hijax.Box(one), vn.hijax.Box(one)
    count = vn.jit(lambda box, x: (box.update(lambda count: count + x), x)[1])
    count_held = jax.jit(lambda x: (held.update(lambda count: count + x), x)[1])
    theirs = Side("given and returned", lambda: plain(one, one))
    return [
        Claim(Side("a Box given to `vn.jit`", lambda: count(given, one)), theirs),
        Claim(Side("a Box that `jax.jit` closes over", lambda: count_held(one)), theirs),
    ]


def calls_table(results: list[Result], leaves: list[int]) -> str:
    """Return the microseconds of calls, and the additional microseconds per leaf."""

    def row(result: Result, count: int) -> list[str]:
        ours, theirs = (seconds * 1e6 for seconds in result.seconds)
        more = f"**{(ours - theirs) / count:.1f}**"
        return [result.claim.ours.name, f"{ours:.1f}", f"{theirs:.1f}", str(count), more]

    header = ["", "µs", "on its leaves, µs", "leaves", f"µs more a leaf (≤ {LEAF_TARGET:g})"]
    return markdown_table(header, map(row, results, leaves))


def main(rounds: int) -> None:
    print(results_table(measure(tracing(), rounds=rounds, batches=3), "ms"))
    claims, leaves = zip(*calls(), strict=True)
    with vn.hijax.enabled():
        results = measure(claims, rounds=rounds, batches=20, calls=100)
    print()
    print(calls_table(results, list(leaves)))
    print()
    print(results_table(measure(boxes(), rounds=rounds, batches=10, calls=50), "µs"))


if __name__ == "__main__":
    main(parser(__doc__).parse_args().rounds)
