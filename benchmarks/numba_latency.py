"""Time calls of functions compiled by `vn.numba.compile`, compared with `jax.jit`.

    python benchmarks/numba_latency.py                      # the table of docs/numba.md; an hour
    python benchmarks/numba_latency.py --cases mlp,adam     # only these cases

The programs are small, as in samplers, solvers and controllers, which call them millions of times.
Both sides take NumPy arrays, alternate in one process, and wait for the result. The table shows
median times and ratios, the seconds to compile, and the seconds to load the function from the cache
on disk. The process compiles another function before.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import stats
from measure import Claim, Side, markdown_table, measure, parser

import veneer as vn

_random = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A function and its arguments, and how many times as fast as `jax.jit` it should be."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    target: float | None = None


def normal(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


def layers(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(normal(n, n) / np.float32(n**0.5), normal(n)) for _ in range(3)]


def mlp(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def closed_mlp(n: int) -> Callable[..., Any]:
    params = layers(n)
    return lambda x: mlp(params, x)


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(mlp(params, x) ** 2)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


def quantized(n: int) -> Callable[..., Any]:
    weight = vn.quant.quantize(jnp.asarray(normal(n, n)), "int8", channelwise_axes=(1,))
    return vn.implicit(lambda x: x @ weight)


def adam_step(state: Any, grads: Any) -> Any:
    params, mean, square, step = state
    step = step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, square, grads)
    scale = 1e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    update = lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8)
    return jax.tree.map(update, params, mean, square), mean, square, step


def block(p: Any, x: Any) -> Any:
    h = layer_norm(x)
    q, k, v = (split(h @ p[name]) for name in ("q", "k", "v"))
    weights = jax.nn.softmax(q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5)
    x = x + (weights @ v).transpose(1, 0, 2).reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(layer_norm(x) @ p["up"]) @ p["down"]


def split(x: Any) -> Any:
    return x.reshape(x.shape[0], 4, -1).transpose(1, 0, 2)


def layer_norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def transformer(params: Any, x: Any) -> Any:
    for p in params:
        x = block(p, x)
    return x


def transformer_params(d: int, n_layers: int) -> list[dict[str, np.ndarray]]:
    shapes = dict.fromkeys("qkvo", (d, d)) | {"up": (d, 4 * d), "down": (4 * d, d)}
    scale = np.float32(d**-0.5)
    return [
        {name: normal(*shape) * scale for name, shape in shapes.items()} for _ in range(n_layers)
    ]


def adam_case() -> tuple[Any, Any]:
    params = layers(16)
    zeros = jax.tree.map(np.zeros_like, params)
    return (params, zeros, zeros, np.float32(0)), jax.tree.map(np.ones_like, params)


def cases() -> list[Case]:
    x = np.float32(0.7)
    found = [Case("nothing", lambda x: x, (normal(8),))]
    for n, target in ((8, 8), (64, 8), (512, 0.7)):
        found.append(Case(f"MLP n={n}, batch 1", closed_mlp(n), (normal(1, n),), target))
    found.append(Case("MLP n=64, batch 32", closed_mlp(64), (normal(32, 64),), 0.7))
    found.append(Case("MLP n=512, batch 32", closed_mlp(512), (normal(32, 512),), 0.7))
    found.append(Case("gradient of MLP n=8", jax.grad(loss), (layers(8), normal(1, 8)), 10))
    found.append(Case("gradient of MLP n=64", jax.grad(loss), (layers(64), normal(1, 64)), 10))
    for d, target in ((8, 7), (32, 7), (512, 0.7)):
        args = tuple(normal(min(d, 64), d) for _ in range(3))
        found.append(Case(f"attention d={d}", attention, args, target))
    for n in (8, 64):
        found.append(Case(f"int8 matmul n={n}", quantized(n), (normal(1, n),), 7))
    logpdfs = {
        "normal": (lambda x: stats.norm.logpdf(x, 0.5, 2.0), x),
        "student t": (lambda x: stats.t.logpdf(x, 3.0), x),
        "gamma": (lambda x: stats.gamma.logpdf(x, 2.0), x),
        "beta": (lambda x: stats.beta.logpdf(x, 2.0, 3.0), x),
        "Poisson": (lambda k: stats.poisson.logpmf(k, 2.5), np.int32(3)),
    }
    for name, (function, at) in logpdfs.items():
        found.append(Case(f"log-density, {name}", function, (at,), 7))
    found.append(Case("adam step, 3 layers of 16", adam_step, adam_case(), 15))
    found.append(
        Case(
            "2-layer transformer d=32",
            transformer,
            (transformer_params(32, 2), normal(16, 32)),
            2.5,
        )
    )
    return found


def compiled(case: Case) -> tuple[Any, float, float]:
    """Return the compiled function, the seconds to compile it, and to load it from the cache."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        function = vn.numba.compile(case.function, *case.args)
        seconds.append(time.perf_counter() - start)
    return function, seconds[0], seconds[1]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", help="names or parts of names, with commas between them")
    chosen = options.parse_args()
    names = (chosen.cases or "").split(",")
    picked = [case for case in cases() if any(name in case.name for name in names)]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["VENEER_CACHE"] = directory
        vn.numba.compile(lambda x: x + 1, normal(3))  # loads the compiler
        made = [compiled(case) for case in picked]
    claims = []
    for case, (ours, *_) in zip(picked, made, strict=True):
        theirs = jax.jit(case.function)
        claims.append(
            Claim(
                Side(case.name, lambda f=ours, args=case.args: f(*args)),
                Side("jit", lambda f=theirs, args=case.args: jax.block_until_ready(f(*args))),
            )
        )
    results = measure(claims, rounds=chosen.rounds, batches=2, calls=20)
    rows = []
    for case, (_, first, again), result in zip(picked, made, results, strict=True):
        ours, theirs = (f"{seconds * 1e6:.2f}" for seconds in result.seconds)
        target = "" if case.target is None else f"≥ {case.target:g}"
        cost = [f"{first:.2f}", f"{again:.3f}"]
        rows.append([case.name, ours, theirs, f"**{1 / result.ratio:.1f}**", target, *cost])
    header = ["", "µs", "jit, µs", "times as fast", "target", "compiled in s", "from cache"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
