"""Fine-tune quantized Flax and Equinox models with their own `grad`, without a decorator.

For users of Flax or Equinox. Two digit classifiers, an `nnx.Module` and an `eqx.nn.MLP`, do not use
veneer. Each is trained in f32. Then its hidden weights are quantized to four bits with LoRA
adapters (QLoRA), and the adapters are trained on mirrored digits. With high types on, the layers of
the models take such weights, and so do `jit` and `value_and_grad` of their framework.

    python examples/high_types.py            # 15 seconds on two cores

Prints the losses, and the bytes of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import veneer as vn

WIDTH, RANK = 128, 8


class Classifier(nnx.Module):
    """A network with two hidden layers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits `[count, 10]` of images `[count, 64]`."""
        hidden = nnx.gelu(self.first(images))
        return self.out(nnx.gelu(self.second(hidden)))


@dataclass(frozen=True)
class Model:
    """A model as a tree, the function that calls it, and the transformations of its framework."""

    framework: str
    tree: Any
    call: Callable[
        [Any, jax.Array], jax.Array
    ]  # takes images f32 [count, 64], returns logits [count, 10]
    jit: Callable
    value_and_grad: Callable
    in_axis: int  # of its weights


def make_flax_model() -> Model:
    graph, state = nnx.split(Classifier(rngs=nnx.Rngs(0)))
    call = lambda state, images: nnx.merge(graph, state)(images)
    return Model("flax.nnx", state, call, nnx.jit, nnx.value_and_grad, in_axis=0)


def make_equinox_model() -> Model:
    mlp = eqx.nn.MLP(64, 10, WIDTH, 2, jax.nn.gelu, key=jax.random.key(0))
    call = lambda mlp, images: jax.vmap(mlp)(images)
    return Model("equinox", mlp, call, eqx.filter_jit, eqx.filter_value_and_grad, in_axis=1)


def load_images(*, mirrored: bool) -> tuple[jax.Array, jax.Array]:
    """Return images, f32 `[count, 64]`, and their labels."""
    found = load_digits()
    images = found.images[:, :, ::-1] if mirrored else found.images
    images = images.reshape(-1, 64).astype(np.float32) / 16
    return jnp.asarray(images), jnp.asarray(found.target)


def train(model: Model, tree: Any, data: Any, *, steps: int) -> tuple[Any, list[float]]:
    """Train the trainable arrays of a model's tree. Return the tree and the losses."""
    trained, frozen = vn.tree.partition(tree, vn.trainable(tree))
    tx = optax.adam(3e-3)

    def loss(trained: Any, frozen: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.call(vn.tree.combine(trained, frozen), images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @model.jit
    def step(trained: Any, state: Any, *rest: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = model.value_and_grad(loss)(trained, *rest)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(trained, updates), state, value

    losses = []
    state = tx.init(trained)
    for _ in range(steps):
        trained, state, value = step(trained, state, frozen, *data)
        losses.append(float(value))
    return vn.tree.combine(trained, frozen), losses


def add_qlora(model: Model, tree: Any) -> Any:
    """Return the tree with hidden weights in nf4, and a LoRA adapter for each."""
    keys = iter(jax.random.split(jax.random.key(0), 2))

    def weight(x: Any) -> Any:
        if not hasattr(x, "ndim") or x.ndim != 2 or 10 in x.shape:  # not the last layer
            return x
        q = vn.quant.quantize(x, "nf4", tiled_axes={model.in_axis: 64})
        return vn.types.LoraArray.init(q, rank=RANK, key=next(keys), alpha=8)

    return jax.tree.map(weight, tree)


@dataclass(frozen=True)
class Result:
    """The trees and losses of a fine-tuned model."""

    framework: str
    dense: Any
    tuned: Any
    losses: list[float]


def nbytes(tree: Any) -> int:
    """Return the bytes of the arrays in a tree."""
    return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(tree))


def fine_tune(model: Model, *, steps: int) -> Result:
    """Train a model, quantize it, and fine-tune it on mirrored digits."""
    dense, _ = train(model, model.tree, load_images(mirrored=False), steps=steps)
    with vn.hijax.enabled():
        qlora = add_qlora(model, dense)
        tuned, losses = train(model, qlora, load_images(mirrored=True), steps=steps)
    return Result(model.framework, dense, tuned, losses)


def main(*, steps: int = 60) -> list[Result]:
    """Fine-tune each model, and print a table."""
    results = [fine_tune(model, steps=steps) for model in (make_flax_model(), make_equinox_model())]
    table = Table(box=SIMPLE_HEAD)
    for heading in ("model", "bytes in f32", "as QLoRA", "loss on mirrored digits", "after"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for r in results:
        ends = (f"{r.losses[0]:.2f}", f"{r.losses[-1]:.2f}")
        table.add_row(r.framework, f"{nbytes(r.dense):,}", f"{nbytes(r.tuned):,}", *ends)
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
