"""Measure the cost of dispatch: tracing a model with implicit weights, and one eager operation.

    python benchmarks/dispatch.py tracing    # one minute
    python benchmarks/dispatch.py eager      # one minute

`tracing` measures the time to trace a transformer of 12 layers with LoRA weights, compared with the
same model written by hand. Each trace uses a new function, as in the first call of a `jax.jit`.
Nothing is compiled or run.

`eager` measures one operation outside `jit`, compared with the same operation on dense arrays.
x is `[4, 64]` and the weights are `[64, 64]`, so small that dispatch takes most of the time.

`json` prints all ratios for one `--library` as JSON. `peers.py` runs this for Quax and eformer,
in environments without veneer.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from import_time import import_times
from lora import LIBRARIES, Library
from measure import Claim, Side, Thunk, measure, parser, results_table
from support import transformer


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


def quantized() -> list[Claim]:
    """Return a claim about an operator with an int8 weight."""
    import veneer as vn

    x, w = jnp.ones((4, 64)), jax.random.normal(jax.random.key(0), (64, 64))
    q = vn.quant.quantize(w, "int8", channelwise_axes=[1])
    return [Claim(Side("`x @ q`, int8", lambda: x @ q), Side("`x @ w`", lambda: x @ w), target=3)]


def compiled_calls() -> list[Claim]:
    """Return a claim about a call of a compiled function, which flattens its arguments."""
    import veneer as vn

    w = jnp.ones((64, 64))
    arrays = [vn.quant.quantize(w, "int8", channelwise_axes=[1]) for _ in range(100)]
    tuples = [(q.packed, q.scale) for q in arrays]
    first = jax.jit(lambda tree: jax.tree.leaves(tree)[0])
    ours = Side("a compiled function of 100 arrays in int8", lambda: first(arrays))
    return [Claim(ours, Side("of tuples of their leaves", lambda: first(tuples)), target=4)]


def figures(name: str, rounds: int) -> dict[str, str]:
    """Measure one library. Return its ratios, its number of equations and its import time."""
    make, module = LIBRARIES[name]
    library = make()
    traced = tracing(library)
    results = measure(traced, rounds=rounds, batches=3)
    results += measure(eager(library), rounds=rounds, batches=20, calls=50)
    found = {f"{r.claim.ours.name} / {r.claim.theirs.name}": f"{r.ratio:.2f}" for r in results}
    ours, theirs = equations(traced[0])
    found["its equations / those written by hand"] = f"{ours} / {theirs}"
    _, seconds = import_times(module, rounds=rounds)
    return found | {"import, once JAX is imported": f"{seconds * 1e3:.0f} ms"}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("what", choices=["tracing", "eager", "json"])
    options.add_argument("--library", choices=LIBRARIES, default="veneer", help="for `json`")
    arguments = options.parse_args()
    if arguments.what == "json":
        print(json.dumps(figures(arguments.library, arguments.rounds)))
    elif arguments.what == "tracing":
        claims = tracing(LIBRARIES["veneer"][0]())
        print(results_table(measure(claims, rounds=arguments.rounds, batches=3), "ms"))
    else:
        claims = eager(LIBRARIES["veneer"][0]()) + quantized() + compiled_calls()
        print(results_table(measure(claims, rounds=arguments.rounds, batches=20, calls=50), "µs"))
