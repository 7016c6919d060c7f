"""Quantization-aware training of a small network that classifies digits.

For users whose quantized model is not accurate enough. The network is `digits_network.py`, which
does not use veneer, and the digits come from scikit-learn. It is trained in f32. Then its weights
are quantized after training, or trained further with quantization-aware training: quantized in each
step, with a straight-through gradient.

    python examples/qat_digits.py            # about a minute on two cores
    python examples/qat_digits.py --quick    # a few steps, to see that it runs

Prints the accuracy and the bytes of each network, and plots them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import digits_network
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import veneer as vn

BATCH = 64


class Digits(NamedTuple):
    """Images of digits, and their labels."""

    images: np.ndarray  # f32 [count, 8, 8], in [0, 1]
    labels: np.ndarray  # int32 [count]


@dataclass(frozen=True)
class Result:
    """A quantized network, with its bytes and its accuracy."""

    format: str
    method: str
    params: Any
    nbytes: int  # of all parameters
    accuracy: float  # on held-out digits


def load(held_out: float = 0.25) -> tuple[Digits, Digits]:
    """Return digits for training, and held-out digits."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = found.images[order].astype(np.float32) / 16
    labels = found.target[order].astype(np.int32)
    split = int(len(order) * held_out)
    return Digits(images[split:], labels[split:]), Digits(images[:split], labels[:split])


def rules(format: str) -> list[vn.quant.Rule]:
    """Return a rule for the kernels: the format, with a scale per output channel."""
    convolutions = vn.quant.Rule(r"conv\d\.kernel", format, tile_axis=(-4, -3, -2))
    return [convolutions, vn.quant.Rule(r"out\.kernel", format)]


def train(params: Any, digits: Digits, *, epochs: int, learning_rate: float, seed: int) -> Any:
    """Train parameters of any type with Adam. The learning rate falls to zero."""
    steps = len(digits.labels) // BATCH
    schedule = optax.cosine_decay_schedule(learning_rate, epochs * steps)
    tx = optax.adam(schedule)

    @vn.implicit
    def loss(params: Any, batch: Digits) -> jax.Array:
        found = digits_network.logits(params, batch.images)
        return optax.softmax_cross_entropy_with_integer_labels(found, batch.labels).mean()

    def step(carry: Any, batch: Digits) -> tuple[Any, jax.Array]:
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    @partial(jax.jit, donate_argnums=0)
    def epoch(carry: Any, order: jax.Array, digits: Digits) -> tuple[Any, jax.Array]:
        return jax.lax.scan(step, carry, jax.tree.map(lambda x: x[order], digits))

    rng = np.random.default_rng(seed)
    carry = jax.tree.map(jnp.copy, (params, tx.init(params)))
    digits = jax.device_put(digits)
    for _ in range(epochs):
        order = rng.permutation(len(digits.labels))[: steps * BATCH].reshape(steps, BATCH)
        carry, _ = epoch(carry, order, digits)
    return carry[0]


def accuracy(params: Any, digits: Digits) -> float:
    logits = jax.jit(vn.implicit(digits_network.logits))(params, digits.images)
    return float((logits.argmax(-1) == digits.labels).mean())


def nbytes(params: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))


def compare(*, epochs: int, more: int) -> list[Result]:
    """Train in f32, then further in f32 and with QAT. Quantize the f32 networks."""
    digits, held_out = load()
    results: list[Result] = []

    def add(format: str, method: str, params: Any) -> None:
        results.append(Result(format, method, params, nbytes(params), accuracy(params, held_out)))

    begin = digits_network.init(jax.random.key(0))
    dense = train(begin, digits, epochs=epochs, learning_rate=3e-3, seed=0)
    train_on = partial(train, digits=digits, epochs=more, learning_rate=2e-3, seed=1)
    add("f32", "", dense)
    add("f32", "trained on", train_on(dense))
    for format in ("int8", "int4", "int2"):
        add(format, "after training", vn.quant.quantize_tree(dense, rules(format)))
    for format in ("int4", "int2"):
        start = vn.quant.quantize_tree(dense, rules(format), train=True)
        add(format, "QAT", vn.quant.convert(train_on(start)))
    return results


def table(results: Sequence[Result]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("weights")
    table.add_column("")
    for heading in ("held-out accuracy", "bytes", "of f32"):
        table.add_column(heading, justify="right")
    for r in results:
        share = r.nbytes / results[0].nbytes
        table.add_row(r.format, r.method, f"{r.accuracy:.1%}", f"{r.nbytes:,}", f"{share:.0%}")
    return table


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot accuracy over bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    dense = results[0]
    axes.axhline(100 * dense.accuracy, color="#8c6d46", lw=1.5, label="f32", zorder=1)
    for method, color in (("after training", "#2a6f97"), ("QAT", "#c8553d")):
        found = [r for r in results if r.method == method]
        sizes, scores = [r.nbytes for r in found], [100 * r.accuracy for r in found]
        axes.plot(sizes, scores, "o-", color=color, lw=2, label=method)
        for r in found:
            up = 8 if method == "QAT" else -16
            point = (r.nbytes, 100 * r.accuracy)
            axes.annotate(r.format, point, (0, up), textcoords="offset points", ha="center")
    axes.set(xlabel="bytes of the parameters", ylabel="held-out accuracy, %")
    axes.set_title(f"A network for digits, quantized (f32: {dense.nbytes:,} bytes)", loc="left")
    axes.margins(0.08, 0.15)
    axes.grid(color="#e4e7eb", lw=0.8)
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main(plot: Path, *, quick: bool = False) -> list[Result]:
    """Train and quantize each network, print a table, and draw `plot`."""
    console = Console()
    results = compare(epochs=1 if quick else 20, more=1 if quick else 15)
    console.print(table(results))
    draw(results, plot)
    console.print(f"Accuracy against bytes: {plot}", soft_wrap=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plot", type=Path, default=Path("qat_digits.png"))
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    main(arguments.plot, quick=arguments.quick)
