"""Ways to divide a model over devices: what each device has of it, and what it receives in a step.

A mesh has three axes. *tensor*: heads and the width of the layers between them are cut. *expert*:
experts are, and texts. *data*: texts are. What is the same on several devices may be cut over
them, too, and gathered as it is used: *in parts*.

Weights are as `placing` has them. What else is there and sent follows from their shapes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core.primitives.sharding import axes_of
from .._core.value import is_value
from .models import LayerKind, ModelShapes, NamedShape
from .placing import (
    CUT,
    PlacedWeight,
    Split,
    cache_of,
    nbytes,
    placed,
    same_along,
    spec_by_names,
    stored_as,
    updates_of,
)


class PlannedStep(NamedTuple):
    """What a step is: a token for each text, or, of fine-tuning, all tokens of texts.

    **Arguments:**

    - `batch`, `length`: texts, on all devices together, and their tokens.
    - `rank`: of the updates that are trained; None where nothing is.
    - `cache`: a format or a dtype of the keys and values; that of the model if None.
    - `fused`: whether scores of attention are never all in memory.
    """

    batch: int
    length: int
    rank: int | None = None
    cache: str | None = None
    fused: bool = False


class DeviceRates(NamedTuple):
    """Bytes a second, by default as NVIDIA states them for an H100 SXM and a NIC of 400 Gb/s each.

    **Arguments:**

    - `memory`: that a device reads of its own.
    - `link`, `network`: that it receives of devices near by, and of others.
    - `near`: how many devices are near each other.
    """

    memory: float = 3.35e12
    link: float = 450e9
    network: float = 50e9
    near: int = 8


H100 = DeviceRates()


class SplitPlan(NamedTuple):
    """What a split takes.

    **Arguments:**

    - `split`: it.
    - `held`: bytes of a device, by what they are of.
    - `received`: bytes that a device receives in a step, by the axes that they go along.
    - `seconds`: a step takes at least, of reading and receiving.
    - `shardings`: specs of weights, by their names.
    - `whole`: what could not be cut as asked, and why.
    """

    split: Split
    held: dict[str, int]
    received: dict[str, int]
    seconds: float
    shardings: dict[str, P]
    whole: dict[str, str]

    @property
    def total(self) -> int:
        """The bytes of a device."""
        return sum(self.held.values())

    def fits(self, memory: float) -> bool:
        """Whether a device has room for it, with a tenth left free."""
        return self.total <= 0.9 * memory


def splits_of(model: ModelShapes, devices: int, batch: int) -> Iterator[Split]:
    """All splits that give each device as many heads, experts and texts."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor in (n for n in divisors if model.heads % n == 0):
        rest = devices // tensor
        for expert in (n for n in divisors if rest % n == 0 and model.experts % n == 0):
            if batch % rest == 0:
                alone = Split(rest // expert, expert, tensor)
                yield from (alone, alone._replace(in_parts=True))[: 1 if rest == 1 else 2]


def plans(
    model: ModelShapes,
    format: str,
    step: PlannedStep,
    devices: int,
    *,
    tile: int | None = None,
    rates: DeviceRates = H100,
) -> list[SplitPlan]:
    """What each split takes, those that are fastest first.

    **Arguments:**

    - `format`: of weights, in tiles of `tile`; embedding and head have 8 bits, as by the usual
      rules of `vn.quant.quantize_tree`. Or a dtype.

    **Raises:** `ValueError` for an unknown format, and where no split gives devices the same.

    >>> from veneer.plan import PlannedStep, model_of, plans
    >>> said = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "head_dim": 32}
    >>> said |= {"num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 512}
    >>> best = plans(model_of(said), "int4", PlannedStep(batch=8, length=128), 8)[0]
    >>> best.split.tensor, best.total < 1_000_000, best.shardings["lm_head.weight"]
    (4, True, P('tensor', None))
    """
    stored = {w: stored_as(w, format, tile, model.dtype) for _, w in model.counted}
    found = [
        _plan(model, stored, step, split, rates) for split in splits_of(model, devices, step.batch)
    ]
    if not found:
        raise ValueError(
            f"{devices} devices cannot evenly divide a batch of {step.batch}, {model.heads} heads "
            f"and {model.experts} experts: use a batch size that is a multiple of {devices}"
        )
    return sorted(found, key=lambda plan: (plan.seconds, plan.total))


def _plan(
    model: ModelShapes,
    stored: Mapping[NamedShape, Any],
    step: PlannedStep,
    over: Split,
    rates: DeviceRates,
) -> SplitPlan:
    of = {weight: placed(weight, array, over) for weight, array in stored.items()}
    every = [(count, of[weight]) for count, weight in model.counted]
    held = {"weights": sum(count * x.nbytes for count, x in every)}
    received = _received(model, every, step, over)
    read = _read(model, every, step, over)
    if step.rank is None:
        held["cache"] = _cache(model, step, over)
        read += held["cache"]
    else:
        layers = [(kind.count, w) for kind in model.layers for w in kind.weights]
        updates = [(n, x) for n, w in layers for x in updates_of(w, step.rank, over)]
        size = sum(count * x.nbytes for count, x in updates)
        held |= {"updates": size, "gradients": size, "moments": 2 * size}
        received += _received_of_updates(updates, over)
    held["activations"] = _activations(model, of, step, over)
    seconds = read / rates.memory
    seconds += sum(n / _rate(axes, over, rates) for axes, n in received.items())
    return SplitPlan(
        over,
        held,
        {" ".join(axes): n for axes, n in received.items() if n},
        seconds,
        {x.weight.path: x.spec for x in of.values() if any(x.spec)},
        {x.weight.path: x.why for x in of.values() if x.why},
    )


def _rate(axes: tuple[str, ...], over: Split, rates: DeviceRates) -> float:
    """Bytes a second along axes: those of the mesh follow each other, and the last is closest."""
    span = math.prod(over[min(map(over._fields.index, axes)) : 3])
    return rates.link if span <= rates.near else rates.network


def _cache(model: ModelShapes, step: PlannedStep, over: Split) -> int:
    total = 0
    for kind in model.layers:
        for cached in kind.cache:
            array = cache_of(cached, step.batch, _seen(kind, step), step.cache, model.dtype)
            spec, _ = spec_by_names(array, cached.axes, over)
            total += kind.count * nbytes(array, NamedSharding(over.mesh, spec))
    return total


def _seen(kind: LayerKind, step: PlannedStep) -> int:
    return min(step.length, kind.window or step.length)


def _tokens(step: PlannedStep, over: Split) -> int:
    """How many a device computes in a step."""
    texts = step.batch // over.count(("data", "expert"))
    return texts * (1 if step.rank is None else step.length)


def _activations(
    model: ModelShapes, of: Mapping[NamedShape, PlacedWeight], step: PlannedStep, over: Split
) -> int:
    """What is there for a time: that of the layer, or the head, that needs most.

    Of a layer these are what its products give, the scores of attention, in f32, with what they
    become; the layer and the next one gathered; and one weight dense, as XLA unpacks it. Trained,
    each of these has a gradient, and each layer keeps the hidden state that it was given.
    """
    train, size = step.rank is not None, jnp.dtype(model.dtype).itemsize
    tokens, sides = _tokens(step, over), 2 if train else 1
    state = tokens * model.width * size

    def of_layer(kind: LayerKind) -> int:
        widths = 2 * model.width
        for weight in kind.weights:
            if weight.contracted is not None:
                times = model.experts_per_token if "experts" in weight.axes else 1
                widths += times * _local(of[weight], weight.free, over)
        seen = step.length if train else _seen(kind, step)
        scores = 0 if step.fused else 2 * 4 * tokens * model.heads * seen // over.tensor
        gathered = 2 * sum(x.whole_nbytes for w in kind.weights if (x := of[w]).spec != x.by_name)
        unpacked = max(_unpacked(of[w], size, over) for w in kind.weights)
        return sides * (tokens * widths * size + scores) + gathered + unpacked

    head = of[_head(model)]
    logits = sides * 4 * tokens * _local(head, -2, over) + _unpacked(head, size, over)
    logits += head.whole_nbytes if head.spec != head.by_name else 0
    kept = sum(kind.count for kind in model.layers) * state if train else 0
    return kept + max(logits, *map(of_layer, model.layers))


def _head(model: ModelShapes) -> NamedShape:
    return [w for w in model.outside if "vocabulary" in w.axes][-1]


def _local(placed: PlacedWeight, axis: int, over: Split) -> int:
    return placed.weight.shape[axis] // over.count(placed.by_name[axis])


def _unpacked(placed: PlacedWeight, itemsize: int, over: Split) -> int:
    """The bytes of a weight where it's made dense for a product; none of one that is."""
    if not is_value(placed.stored):
        return 0
    cut = NamedSharding(over.mesh, placed.by_name).shard_shape(placed.weight.shape)
    return math.prod(cut) * itemsize


def _received(
    model: ModelShapes, every: list[tuple[int, PlacedWeight]], step: PlannedStep, over: Split
) -> Counter[tuple[str, ...]]:
    """Bytes that a device receives, by the axes that they go along.

    A sum comes in parts and then whole. Trained, what is summed, sent or gathered in a layer is so
    again in the backward pass, and once more as the layer is computed again, but for its last sum.
    """
    train, size = step.rank is not None, jnp.dtype(model.dtype).itemsize
    state = _tokens(step, over) * model.width * size
    found = Counter[tuple[str, ...]]()
    for count, x in every:
        axes, summed = x.weight.axes, x.weight.contracted
        if "vocabulary" in axes:
            # Rows that are looked up; of a head, the gradient.
            sums = (x.weight == model.outside[0]) + (train and x.weight == _head(model))
            if x.by_name[0] is not None:
                found["tensor",] += sums * _sum(state, over, ("tensor",))
        elif summed is not None and "tensor" in CUT.get(axes[summed], ()):
            passes = (2 if axes[summed] == "mlp" else 3) if train else 1
            if x.by_name[summed] is not None:
                found["tensor",] += count * passes * _sum(state, over, ("tensor",))
            else:  # what it takes is gathered
                times = model.experts_per_token if "experts" in axes else 1
                taken = times * state * x.weight.shape[summed] // model.width
                found["tensor",] += count * passes * _gather(taken, over, ("tensor",))
        if x.spec != x.by_name:
            times, same = 1 + (train and "*" in x.weight.path), same_along(x.weight)
            found[same] += count * times * _gather(x.whole_nbytes, over, same)
    for kind in model.layers:
        if any("experts" in weight.axes for weight in kind.weights):  # there and back
            sent = 2 * min(model.experts_per_token, over.expert) * state
            times = 3 if train else 1
            found["expert",] += kind.count * times * _gather(sent, over, ("expert",))
    return found


def _gather(n: int, over: Split, axes: tuple[str, ...]) -> int:
    """The bytes that each receives of `n` that all have in parts, or send each other."""
    return n - n // over.count(axes)


def _sum(n: int, over: Split, axes: tuple[str, ...]) -> int:
    return 2 * _gather(n, over, axes)


def _received_of_updates(
    updates: list[tuple[int, PlacedWeight]], over: Split
) -> Counter[tuple[str, ...]]:
    """Of updates in parts, which are gathered twice, and of their gradients, which are summed."""
    found = Counter[tuple[str, ...]]()
    for count, x in updates:
        same = same_along(x.weight)
        times = 3 if x.spec != x.by_name else 2
        found[same] += count * times * _gather(x.whole_nbytes, over, same)
        if not any("tensor" in axes_of(entry) for entry in x.by_name):
            found["tensor",] += count * _sum(x.whole_nbytes, over, ("tensor",))
    return found


def _read(
    model: ModelShapes, every: list[tuple[int, PlacedWeight]], step: PlannedStep, over: Split
) -> float:
    """Bytes of weights that a device reads in a step, of experts those that some token takes."""
    tokens = _tokens(step, over) * over.expert
    missed = (1 - model.experts_per_token / model.experts) ** tokens
    used = lambda x: 1 - missed if "experts" in x.weight.axes else 1
    weights = sum(count * x.whole_nbytes * used(x) for count, x in every)
    return float(weights * (1 if step.rank is None else 3))
