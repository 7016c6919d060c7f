"""Train a transformer with its products in int8 and fp8, forward and backward.

For users who train with quantized matmuls. The transformer classifies scikit-learn's digits, which
it reads row by row. The network is `row_transformer.py`, which does not use veneer. Weights,
activations and gradients each have a format. Gradients are rounded to nearest, or stochastically.

    python examples/low_precision_training.py            # two minutes on two cores
    python examples/low_precision_training.py --quick    # a few steps, to see that it runs

Prints the accuracy on held-out digits for each variant, and plots the losses.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import row_transformer
from qat_digits import BATCH, Digits, load
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import veneer as vn


@dataclass(frozen=True)
class Variant:
    """The formats of a training run. None is f32."""

    weights: str | None = None
    activations: str | None = None
    gradients: str | None = None
    stochastic: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        if self.weights is None:
            return "f32"
        kinds = (self.weights, self.activations, self.gradients)
        return " ".join(short(kind) for kind in kinds) + (" stochastic" if self.stochastic else "")


def short(format: str | None) -> str:
    return "f32" if format is None else format.removeprefix("float8_").removesuffix("fn")


FP8 = Variant("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")
VARIANTS = (
    Variant(),
    Variant("int8", "int8", "int8"),
    Variant("int8", "int8", "int8", stochastic=True),
    FP8,
    Variant(FP8.weights, FP8.activations, FP8.gradients, stochastic=True),
    Variant("int8", "int8", "int4"),
    Variant("int8", "int8", "int4", stochastic=True),
)


@dataclass(frozen=True)
class Result:
    """The losses and the accuracy of a variant."""

    variant: Variant
    losses: list[float]  # one per batch
    held_out: float  # the loss on held-out digits
    accuracy: float  # the share of correct held-out digits


def quantize(params: Any, variant: Variant) -> Any:
    """Return the parameters with quantized kernels."""
    if variant.weights is None:
        return params
    rule = vn.quant.Rule(
        r"embedding|layers\.(qkv|mixed|up|down)|out",
        variant.weights,
        act_qtype=variant.activations,
        grad_qtype=variant.gradients,
    )
    return vn.quant.quantize_tree(params, [rule], train=True)


def evaluate(params: Any, batch: Digits) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross entropy, and the number of correct digits."""
    logits = row_transformer.logits(params, batch.images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()
    return loss, (logits.argmax(-1) == batch.labels).mean()


def train(digits: Digits, held_out: Digits, variant: Variant, *, steps: int) -> Result:
    """Train from the same initial weights on the same batches."""
    params = quantize(row_transformer.init(jax.random.key(0)), variant)
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-2, max(1, steps // 10), steps)
    tx = optax.chain(optax.clip_by_global_norm(1), optax.adam(schedule))

    def step(carry: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (params, state), (key, rows) = carry, given

        def loss(params: Any) -> jax.Array:
            if variant.stochastic:
                params = vn.quant.with_stochastic_rounding(params, key)
            return vn.implicit(evaluate)(params, jax.tree.map(lambda x: x[rows], digits))[0]

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    rng = np.random.default_rng(0)
    order = rng.integers(0, len(digits.labels), (steps, BATCH))
    keys = jax.random.split(jax.random.key(1), steps)
    digits = jax.device_put(digits)
    run = jax.jit(lambda params, given: jax.lax.scan(step, (params, tx.init(params)), given))
    (params, _), losses = run(params, (keys, order))
    found, accuracy = jax.jit(vn.implicit(evaluate))(params, held_out)
    return Result(variant, losses.tolist(), float(found), float(accuracy))


def table(results: Sequence[Result]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("weights", "activations", "gradients", "rounded"):
        table.add_column(heading)
    for heading in ("held-out loss", "accuracy"):
        table.add_column(heading, justify="right")
    for r in results:
        v = r.variant
        kinds = [short(kind) for kind in (v.weights, v.activations, v.gradients)]
        rounded = "" if v.gradients is None else "stochastic" if v.stochastic else "to nearest"
        table.add_row(*kinds, rounded, f"{r.held_out:.3f}", f"{r.accuracy:.1%}")
    return table


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot the losses, averaged over adjacent steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = {"f32": "#8c6d46", "int8": "#2a6f97", "e5m2": "#5a8f5a", "int4": "#c8553d"}
    for result in results:
        v = result.variant
        style = "--" if v.gradients and not v.stochastic else "-"
        label = f"{v.name}: {result.held_out:.3f}"
        smooth = smooth_losses(result.losses)
        axes.plot(smooth, style, color=colors[short(v.gradients)], lw=1.6, label=label)
    axes.set(xlabel="step", ylabel="cross entropy of a batch")
    axes.set(yscale="log")
    axes.set_title("One transformer, trained in several formats", loc="left")
    axes.grid(color="#e4e7eb", lw=0.8)
    axes.spines[:].set_visible(False)
    title = "weights, activations, gradients: held-out loss"
    axes.legend(title=title, frameon=False, alignment="left", fontsize="small")
    figure.savefig(path)


def smooth_losses(losses: Sequence[float], width: int = 15) -> np.ndarray:
    window = np.ones(min(width, len(losses)))
    return np.convolve(losses, window, "same") / np.convolve(np.ones(len(losses)), window, "same")


def main(plot: Path, *, quick: bool = False) -> list[Result]:
    """Train each variant, print a table, and draw `plot`."""
    console = Console()
    digits, held_out = load()
    console.print(f"{len(digits.labels)} digits to train on, and {len(held_out.labels)} others")
    steps = 3 if quick else 400
    each = track(VARIANTS, "Training", transient=True)
    results = [train(digits, held_out, variant, steps=steps) for variant in each]
    console.print(table(results))
    draw(results, plot)
    console.print(f"The losses: {plot}", soft_wrap=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plot", type=Path, default=Path("low_precision_training.png"))
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    main(arguments.plot, quick=arguments.quick)
