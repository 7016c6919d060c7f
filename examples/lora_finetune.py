"""Fine-tune a sentence encoder: all parameters, by LoRA, and by QLoRA on nf4 weights.

For users who fine-tune a quantized model. The task is to classify sentences of Python's language
reference by topic (`pydoc_data.topics`, the text behind `help("lambda")`). The encoder is
`sentence_encoder.py` with the weights of all-MiniLM-L6-v2. It does not use veneer.

    python examples/lora_finetune.py            # three minutes on two cores
    python examples/lora_finetune.py --quick    # a few steps, to see that it runs

Prints the cost and the accuracy of each variant, and plots the losses.
"""

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense_weights import DenseWeights, dense_weights
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import veneer as vn
from veneer.demo.encoder import BertEncoder, load
from veneer.demo.encoder_demo import NF4
from veneer.demo.fetch import ENCODER, fetch, program

RANK = 8
# On a CPU, XLA keeps every materialized weight for the backward pass, unless these options make it
# save memory and keep it from merging the recomputation with the forward pass.
SAVE_MEMORY = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cse_barrier_expander",
}


# The task.


class Examples(NamedTuple):
    """Sentences and their topics."""

    ids: np.ndarray  # int32 [count, length], tokens
    mask: np.ndarray  # bool [count, length], false where ids holds padding
    topic: np.ndarray  # int32 [count]

    def __getitem__(self, rows: Any) -> "Examples":
        return Examples(*(part[rows] for part in tuple(self)))


@dataclass(frozen=True)
class Task:
    """Examples for training, and held-out examples."""

    names: list[str]
    train: Examples
    held_out: Examples


def split_sentences(topic: str) -> list[str]:
    """Return the sentences of a text that are prose and not short."""
    blocks = (" ".join(block.split()) for block in topic.split("\n\n"))
    found = (s for block in blocks for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", block))
    return [s for s in found if re.fullmatch(r"[A-Z].*[a-z]\.", s) and 8 <= len(s.split()) <= 60]


def make_task(bert: BertEncoder, *, count: int, most: int, length: int) -> Task:
    """Return the topics with the most sentences, at most `most` of each. Hold out a third."""
    topics_of: dict[str, set[str]] = {}
    for name in sorted(topics):
        for sentence in split_sentences(topics[name]):
            topics_of.setdefault(sentence, set()).add(name)
    of_topic: dict[str, list[str]] = {}
    for sentence, found in topics_of.items():
        if len(found) == 1:
            of_topic.setdefault(*found, []).append(sentence)
    names = sorted(of_topic, key=lambda name: -len(of_topic[name]))[:count]
    rng = np.random.default_rng(0)
    train: list[tuple[str, int]] = []
    held_out: list[tuple[str, int]] = []
    for topic, name in enumerate(names):
        chosen = rng.permutation(of_topic[name])[:most]
        third = len(chosen) // 3
        held_out += [(str(sentence), topic) for sentence in chosen[:third]]
        train += [(str(sentence), topic) for sentence in chosen[third:]]
    return Task(names, tokenize(bert, train, length), tokenize(bert, held_out, length))


def tokenize(bert: BertEncoder, pairs: Sequence[tuple[str, int]], length: int) -> Examples:
    ids = np.zeros((len(pairs), length), np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, encoding in enumerate(bert.tokenizer.encode_batch([sentence for sentence, _ in pairs])):
        tokens = encoding.ids[:length]
        ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, True
    return Examples(ids, mask, np.array([topic for _, topic in pairs], np.int32))


# The variants.


@dataclass(frozen=True)
class Variant:
    """A way to fine-tune: the parameters, which of them are trained, and the learning rate."""

    name: str
    adapted: Callable[[BertEncoder], Any]  # the encoder's parameters
    trains: Callable[[str, Any], bool]  # given an array's path and the array
    learning_rate: float  # of the encoder


def is_linear(name: str) -> bool:
    """Return whether a parameter is the weight `[out, in]` of a linear layer."""
    return re.fullmatch(r"encoder\..*(query|key|value|dense)\.weight", name) is not None


def add_lora(params: dict[str, Any]) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), len(params)))
    adapted = lambda w: vn.types.LoraArray.init(w, RANK, key=next(keys), alpha=2 * RANK)
    return {name: adapted(w) if is_linear(name) else w for name, w in params.items()}


def quantize(bert: BertEncoder) -> dict[str, Any]:
    """Return the parameters with every matrix in nf4, also the embeddings."""
    nf4 = NF4.fit_tile(bert)
    rule = vn.quant.Rule(r".*weight", nf4.qtype, tile_size=nf4.tile_size, tile_axis=-1)
    return vn.quant.quantize_tree(jax.device_put(bert.params), [rule])


def is_adapter(path: str, x: Any) -> bool:
    return path.startswith("head") or isinstance(x, vn.types.LoraArray)


VARIANTS = (
    Variant("full", lambda bert: jax.device_put(bert.params), lambda path, x: True, 1e-4),
    Variant("LoRA", lambda bert: add_lora(jax.device_put(bert.params)), is_adapter, 2e-3),
    Variant("QLoRA", lambda bert: add_lora(quantize(bert)), is_adapter, 2e-3),
)


# Training.


def make_logits(bert: BertEncoder) -> Callable[[Any, Examples], jax.Array]:
    """Return a function that applies the encoder and a linear head to parameters."""
    encode = program("sentence_encoder").encode

    def logits(params: Any, batch: Examples) -> jax.Array:
        unit = encode(params["encoder"], bert.config, batch.ids, batch.mask)
        return 10 * unit @ params["head"]["weight"] + params["head"]["bias"]

    return logits


def optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Return Adam with a schedule and clipped gradients. The new head has a higher rate."""

    def adam(rate: float) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0, rate, max(1, steps // 10), steps)
        return optax.adamw(schedule, weight_decay=0.01)

    parts = {"encoder": adam(learning_rate), "head": adam(2e-3)}
    by_part = optax.multi_transform(parts, {name: name for name in parts})
    return optax.chain(optax.clip_by_global_norm(1), by_part)


def make_step(logits: Callable, tx: optax.GradientTransformation) -> Callable:
    """Return a step from `(trained, state, frozen, batch)` to `(trained, state, loss)`."""

    @vn.implicit
    def loss(params: Any, batch: Examples) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), batch.topic)
        return losses.mean()

    def step(trained: Any, state: Any, frozen: Any, batch: Examples) -> tuple[Any, Any, jax.Array]:
        of_trained = lambda trained: loss(vn.tree.combine(trained, frozen), batch)
        value, gradient = jax.value_and_grad(of_trained)(trained)
        updates, state = tx.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, value

    return step


class Run:
    """A variant in training, with its measurements. Sizes are in bytes."""

    def __init__(
        self, bert: BertEncoder, task: Task, variant: Variant, *, steps: int, first: Examples
    ):
        count = len(task.names)
        head = {"weight": jnp.zeros((bert.contracted[0], count)), "bias": jnp.zeros(count)}
        params = {"encoder": variant.adapted(bert), "head": head}
        tx = optimizer(variant.learning_rate, steps)
        step = make_step(make_logits(bert), tx)
        mask = vn.trainable(params, where=variant.trains)
        self.trained, self.frozen = vn.tree.partition(params, mask)
        self.state = jax.jit(tx.init)(self.trained)

        self.name = variant.name
        self.trained_count = sum(x.size for x in jax.tree.leaves(self.trained))
        self.stored = nbytes(params)
        self.gradient = nbytes(self.trained)  # the same shapes and dtypes
        self.optimizer = nbytes(self.state)
        args = self.trained, self.state, self.frozen, first
        self.dense = find_dense_weights(step, args, bert)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        self.compiled = compiled.compile(SAVE_MEMORY if jax.default_backend() == "cpu" else None)
        self.temporary = self.compiled.memory_analysis().temp_size_in_bytes
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.accuracy = math.nan  # on held-out sentences, after training

    def step(self, batch: Examples) -> None:
        """Train on one batch."""
        start = time.perf_counter()
        self.trained, self.state, loss = self.compiled(self.trained, self.state, self.frozen, batch)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - start)

    @property
    def params(self) -> Any:
        """The current parameters of the encoder and its head."""
        return vn.tree.combine(self.trained, self.frozen)


def fine_tune(bert: BertEncoder, task: Task, *, steps: int, batch: int) -> list[Run]:
    """Train all variants on the same batches, alternately, so that times can be compared."""
    batches = list(sample(task.train, steps=steps, batch=batch))
    runs = [Run(bert, task, variant, steps=steps, first=batches[0]) for variant in VARIANTS]
    for examples in track(batches, "Fine-tuning", transient=True):
        for run in runs:
            run.step(examples)
    for run in runs:
        run.accuracy = accuracy(make_logits(bert), run.params, task.held_out, batch)
    return runs


def sample(examples: Examples, *, steps: int, batch: int) -> Iterator[Examples]:
    """Yield `steps` batches. Each sentence is used once before any is used again."""
    rng = np.random.default_rng(0)
    epochs = -(-steps * batch // len(examples.topic))
    order = np.concatenate([rng.permutation(len(examples.topic)) for _ in range(epochs)])
    for start in range(0, steps * batch, batch):
        yield examples[order[start : start + batch]]


def accuracy(logits: Callable, params: Any, examples: Examples, batch: int) -> float:
    guess = jax.jit(vn.implicit(lambda params, batch: logits(params, batch).argmax(-1)))
    starts = range(0, len(examples.topic), batch)
    guesses = [guess(params, examples[start : start + batch]) for start in starts]
    return float((np.concatenate(guesses) == examples.topic).mean())


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def find_dense_weights(step: Callable, args: tuple[Any, ...], bert: BertEncoder) -> DenseWeights:
    """Count the dense weights that a step computes from the frozen ones."""
    leaves = [len(jax.tree.leaves(arg)) for arg in args]
    frozen = [i == 2 for i, many in enumerate(leaves) for _ in range(many)]
    shapes = [w.shape for name, w in bert.params.items() if is_linear(name)]
    return dense_weights(jax.make_jaxpr(step)(*args), frozen, shapes)


# The report.


def table(runs: Sequence[Run]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns are enough
    table.add_column("", no_wrap=True)
    headings = (
        "held-out\naccuracy, parameters\ntrained, stored\nMB, grads\nMB, moments\nMB, sum\nMB, "
        "temp.\nMB, steps\na sec."
    )
    for heading in headings.split(", "):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in runs:
        kept = r.stored, r.gradient, r.optimizer
        table.add_row(
            r.name,
            f"{r.accuracy:.1%}",
            f"{r.trained_count:,}",
            *(f"{size / 1e6:.1f}" for size in (*kept, sum(kept), r.temporary)),
            f"{1 / statistics.median(r.seconds):.2f}",
        )
    return table


def describe_dense_weights(run: Run, whole: int) -> str:
    """Describe the dense weights of a step. `whole` is the bytes of all dense weights."""
    dense, makers = run.dense, ", ".join(sorted(run.dense.dequantized))
    return (
        f"In a step of {run.name}, dense weights that are alive at a time: {dense.alive}, of "
        f"{dense.nbytes / 1e6:.1f} MB; all are {whole / 1e6:.1f} MB. What makes them of codes and "
        f"scales: {makers}. Gradients of a weight's shape, and what is made of them: "
        f"{sum(dense.others.values())}."
    )


def draw(runs: Sequence[Run], path: Path) -> None:
    """Plot the losses, averaged over adjacent steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run, color in zip(runs, ("#8c6d46", "#2a6f97", "#c8553d"), strict=True):
        steps = np.arange(1, len(run.losses) + 1)
        label = f"{run.name}: {run.trained_count:,} parameters, {run.accuracy:.1%}"
        axes.plot(steps, run.losses, color=color, lw=0.6, alpha=0.35)
        axes.plot(steps, smoothed(run.losses), color=color, lw=2, label=label)
    axes.set(xlabel="step", ylabel="cross entropy of a batch", ylim=(0, None))
    axes.set_title("The same encoder, fine-tuned in three ways", loc="left")
    axes.grid(color="#e4e7eb", lw=0.8)
    axes.spines[:].set_visible(False)
    axes.legend(title="trained, and held-out accuracy", frameon=False, alignment="left")
    figure.savefig(path)


def smoothed(losses: Sequence[float], width: int = 15) -> np.ndarray:
    window = np.ones(min(width, len(losses)))
    counts = np.convolve(np.ones(len(losses)), window, "same")
    return np.convolve(losses, window, "same") / counts


def main(bert: BertEncoder, plot: Path, *, steps: int, quick: bool = False) -> list[Run]:
    """Fine-tune each variant, print a table, and draw `plot`."""
    console = Console()
    task = make_task(bert, count=3 if quick else 8, most=12 if quick else 140, length=32)
    console.print(
        f"{len(task.train.topic)} sentences of {len(task.names)} topics to train on, and "
        f"{len(task.held_out.topic)} others: {', '.join(task.names)}"
    )
    runs = fine_tune(bert, task, steps=steps, batch=4 if quick else 16)
    console.print(table(runs))
    whole = sum(w.nbytes for name, w in bert.params.items() if is_linear(name))
    console.print(describe_dense_weights(runs[-1], whole), highlight=False)
    draw(runs, plot)
    console.print(f"The losses: {plot}", soft_wrap=True)
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face BERT folder")
    parser.add_argument("--plot", type=Path, default=Path("lora_finetune.png"))
    parser.add_argument("--steps", type=int, help="160, or 6 if quick")
    parser.add_argument("--quick", action="store_true", help="few sentences and steps")
    given = parser.parse_args()
    main(
        load(given.model or fetch(ENCODER)),
        given.plot,
        steps=given.steps or (6 if given.quick else 160),
        quick=given.quick,
    )
