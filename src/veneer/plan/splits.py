"""Estimate the bytes that a device holds and receives, for each split of a model over devices.

The mesh has three axes. `tensor` shards heads, the vocabulary and the width of MLPs. `expert`
shards experts and sequences, and `data` shards sequences. In a split "in parts" (fully sharded,
FSDP), the weights that would be replicated along `data` or `expert` are sharded there as well, and
gathered when they are used.

Arrays are abstract. They are quantized as by `vn.quant.quantize`, and sharded as by
`vn.device_put`. If a sharding would split a tile or a byte of codes, the axis stays unsharded, and
the plan has the reason.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._core.primitives.sharding import axes_of, block_specs, leaf_destinations, why_not_split
from .._core.value import is_value
from ..placement import fully_sharded
from ..quant import Rule, get_format, zeros
from ..quant.models.uses import VOCABULARY_QTYPE, default_tile, fit_default_rule
from .models import AXES, CachedShape, LayerKind, ModelShapes, NamedShape

#: The mesh axes that shard an axis of a weight or a cache, by the name of this axis.
MESH_AXES = dict.fromkeys(AXES, ("tensor",)) | {"experts": ("expert",), "batch": ("data", "expert")}


class Split(NamedTuple):
    """The numbers of devices along each mesh axis.

    `in_parts` says whether weights are fully sharded (FSDP): also along the mesh axes on which they
    would be replicated.
    """

    data: int
    expert: int
    tensor: int
    in_parts: bool = False

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh. Devices along its last axis, `tensor`, are the closest."""
        return AbstractMesh(self[:3], self._fields[:3], axis_types=(AxisType.Auto,) * 3)

    def count(self, axes: Any) -> int:
        """Return the number of devices along `axes`: None, a mesh axis, or a tuple of them.

        An entry of a `PartitionSpec` splits an axis into this number of blocks.
        """
        return math.prod(getattr(self, name) for name in axes_of(axes))

    def spec_entry(self, axes: Sequence[str]) -> Any:
        """Return the entry of a `PartitionSpec` that shards an axis along the mesh axes `axes`.

        Mesh axes with one device are left out. If none is left, the entry is None.
        """
        several = tuple(name for name in axes if self.count(name) > 1)
        return several[0] if len(several) == 1 else several or None


class PlannedStep(NamedTuple):
    """A step of decoding, with one token per sequence, or of fine-tuning, with all tokens.

    **Arguments:**

    - `batch`, `length`: the number of sequences on all devices, and the tokens per sequence.
    - `rank`: the rank of the LoRA updates that are trained. None for decoding.
    - `cache`: the format or dtype of the KV cache. None for the dtype of the model.
    - `fused`: whether attention is fused (flash attention), so that its scores need no memory.
    """

    batch: int
    length: int
    rank: int | None = None
    cache: str | None = None
    fused: bool = False


class DeviceRates(NamedTuple):
    """The rates of a device, in bytes per second. The defaults describe an H100 SXM.

    **Arguments:**

    - `memory`: reading the memory of the device.
    - `link`: receiving from devices of the same node.
    - `network`: receiving from other nodes. The default is one NIC of 400 Gb/s per device.
    - `near`: the number of devices per node.
    """

    memory: float = 3.35e12
    link: float = 450e9
    network: float = 50e9
    near: int = 8


class SplitPlan(NamedTuple):
    """The memory, the communication and the shardings of one split.

    **Arguments:**

    - `split`: the split.
    - `held`: the bytes that a device holds: weights, cache, activations and so on.
    - `received`: a dict from mesh axes, such as "data expert", to the bytes that a device receives
      per step from devices along them.
    - `seconds`: the time to read the weights and the cache and to receive these bytes, a lower
      bound of the time of a step.
    - `shardings`: a dict from the names of sharded weights to their `PartitionSpec`.
    - `whole`: a dict from names of weights to the reason why an axis stays unsharded.
    """

    split: Split
    held: dict[str, int]
    received: dict[str, int]
    seconds: float
    shardings: dict[str, P]
    whole: dict[str, str]

    @property
    def total(self) -> int:
        """The bytes that a device holds in total."""
        return sum(self.held.values())

    def fits(self, memory: float) -> bool:
        """Return whether a device with `memory` bytes is large enough, with a tenth left free."""
        return self.total <= 0.9 * memory


def plans(
    model: ModelShapes,
    format: str,
    step: PlannedStep,
    devices: int,
    *,
    tile: int | None = None,
    rates: DeviceRates = DeviceRates(),  # noqa: B008
) -> list[SplitPlan]:
    """Return the plans of all splits of a model over devices, with the fastest first.

    **Arguments:**

    - `model`: its shapes, from `model_of`.
    - `format`: a format for the weights, or a dtype. With a format of fewer than 8 bits, the
      embedding and the output head have 8 bits, as in `vn.quant.quantize_tree`.
    - `step`: the step to plan.
    - `devices`: the number of devices.
    - `tile`: the number of values that share a scale. The default depends on the format.
    - `rates`: the rates of a device.

    **Raises:** `ValueError` if the format is unknown, or if no split gives all devices equal work.

    >>> from veneer.plan import PlannedStep, model_of, plans
    >>> config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "head_dim": 32}
    >>> config |= {"num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 512}
    >>> best = plans(model_of(config), "int4", PlannedStep(batch=8, length=128), 8)[0]
    >>> best.split.tensor, best.total < 1_000_000, best.shardings["lm_head.weight"]
    (4, True, P('tensor', None))
    """
    arrays = {w: abstract_weight(w, format, tile, model.dtype) for _, w in model.counted}
    results = []
    for split in _all_splits(model, devices, step.batch):
        placed = {weight: place_weight(weight, x, split) for weight, x in arrays.items()}
        results.append(_SplitEstimate(model, step, split, placed).plan(rates))
    if not results:
        raise ValueError(
            f"{devices} devices cannot evenly divide a batch of {step.batch}, {model.heads} heads "
            f"and {model.experts} experts: use a batch size that is a multiple of {devices}"
        )
    return sorted(results, key=lambda plan: (plan.seconds, plan.total))


def _all_splits(model: ModelShapes, devices: int, batch: int) -> Iterator[Split]:
    """Yield the splits that give all devices equal numbers of heads, experts and sequences.

    `batch` is the number of sequences on all devices.
    """
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor in (n for n in divisors if model.heads % n == 0):
        rest = devices // tensor
        for expert in (n for n in divisors if rest % n == 0 and model.experts % n == 0):
            if batch % rest == 0:
                split = Split(rest // expert, expert, tensor)
                yield split
                if rest > 1:
                    yield split._replace(in_parts=True)


# The arrays of a device.


class PlacedWeight(NamedTuple):
    """An abstract weight with its sharding.

    **Arguments:**

    - `weight`: its shape and the names of its axes.
    - `array`: the weight, dense or quantized.
    - `spec`: its sharding between uses.
    - `spec_in_use`: its sharding in products. It differs from `spec` if the weight is gathered
      before use (FSDP).
    - `nbytes`, `nbytes_in_use`: the bytes per device, with these two shardings.
    - `why`: the reason why an axis with a name is not sharded, or "".
    """

    weight: NamedShape
    array: Any
    spec: P
    spec_in_use: P
    nbytes: int
    nbytes_in_use: int
    why: str = ""

    @property
    def is_gathered(self) -> bool:
        """True if the weight is gathered before use."""
        return self.spec != self.spec_in_use


def abstract_weight(weight: NamedShape, format: str, tile: int | None, dtype: str) -> Any:
    """Return an abstract array for a weight: quantized in `format`, or dense.

    Weights that are used in no product have the dtype of the model, `dtype`. With a format of fewer
    than 8 bits, the embedding and the output head have 8 bits. `tile` is the number of values that
    share a scale, or None for the default of the format.

    **Raises:** `ValueError` if `format` is neither a format nor a dtype.
    """
    dense = _dense_dtype(format)
    x = jax.ShapeDtypeStruct(weight.shape, dense or dtype)
    if dense is not None or weight.contracted is None:
        return x
    if get_format(format).bits < 8 and "vocabulary" in weight.axes:
        rule = Rule(".*", VOCABULARY_QTYPE)
    else:
        rule = Rule(".*", format, tile_size=tile or default_tile(format))
    fitted = fit_default_rule(rule, {weight.contracted}, weight.shape)
    return jax.eval_shape(fitted.quantize, x)


def abstract_cache(
    cached: CachedShape, batch: int, length: int, format: str | None, dtype: str
) -> Any:
    """Return an abstract array for the keys, the values or the latents of one layer.

    It holds `batch` sequences of `length` tokens. `format` is a dtype, or a quantized format, which
    has one scale per token and head. None selects the dtype of the model, `dtype`.
    """
    shape, format = cached.shape(batch, length), format or dtype
    if (dense := _dense_dtype(format)) is not None:
        return jax.ShapeDtypeStruct(shape, dense)
    axes = tuple(range(len(shape) - 1))
    make = functools.partial(zeros, shape, format, dtype=jnp.dtype(dtype), channelwise_axes=axes)
    return jax.eval_shape(make)


def _dense_dtype(format: str) -> str | None:
    """Return the name of the dtype for a format such as "bf16". None for a quantized format."""
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    names |= {name: name for name in names.values()}
    return names.get(format)


def device_nbytes(array: Any, sharding: NamedSharding) -> int:
    """Return the bytes of an array, dense or quantized, that each device holds."""
    leaves = zip(jax.tree.leaves(array), leaf_destinations(array, sharding), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)


def spec_by_names(array: Any, axes: tuple[str, ...], split: Split) -> tuple[P, str]:
    """Choose the sharding of an array by the names of its axes, `axes`.

    **Returns:** the `PartitionSpec`, and the reason why an axis that should be sharded cannot be,
    or "".
    """
    entries: list[Any] = [None] * len(axes)
    why, used = "", set[str]()
    for i, name in enumerate(axes):
        entry = split.spec_entry(MESH_AXES.get(name, ()))
        if entry is None or used & {*axes_of(entry)}:
            continue
        spec = P(*entries[:i], entry, *entries[i + 1 :])
        if _can_shard(array, spec, split.mesh):
            entries[i], used = entry, used | {*axes_of(entry)}
        else:
            told = why_not_split(array, spec, split.mesh.shape) if is_value(array) else ""
            why = told or f"{split.count(entry)} devices do not divide its axis of {array.shape[i]}"
    return P(*entries), why


def _can_shard(array: Any, spec: P, mesh: AbstractMesh) -> bool:
    if is_value(array):
        return block_specs(array, spec, mesh.shape) is not None
    counts = [math.prod(mesh.shape[name] for name in axes_of(entry)) for entry in spec]
    return all(size % count == 0 for size, count in zip(array.shape, counts, strict=True))


def replication_axes(weight: NamedShape) -> tuple[str, ...]:
    """Return the mesh axes along which a weight is replicated, unless it is fully sharded."""
    return ("data",) if "experts" in weight.axes else ("data", "expert")


def place_weight(weight: NamedShape, array: Any, split: Split) -> PlacedWeight:
    """Shard an abstract weight `array` by the names of its axes.

    If the split is `in_parts`, also shard it along the mesh axes on which it would be replicated.
    """
    in_use, why = spec_by_names(array, weight.axes, split)
    spec, replicated = in_use, split.spec_entry(replication_axes(weight))
    if split.in_parts and replicated is not None and weight.contracted is not None:
        spec = fully_sharded(split.mesh, replicated, in_use)(array).spec
    stored, used = (device_nbytes(array, NamedSharding(split.mesh, s)) for s in (spec, in_use))
    return PlacedWeight(weight, array, spec, in_use, stored, used, why)


def place_updates(weight: NamedShape, rank: int, split: Split) -> list[PlacedWeight]:
    """Return the two factors of the LoRA update of a weight, sharded like the weight.

    They are `[out, rank]` and `[rank, in]`, in f32. The list is empty for experts and for weights
    that are used in no product, which get no update.
    """
    if weight.contracted is None or "experts" in weight.axes:
        return []
    (rows, columns), (row_axis, column_axis) = weight.shape, weight.axes
    factors = ((rows, rank), (row_axis, "rank")), ((rank, columns), ("rank", column_axis))
    return [
        place_weight(
            NamedShape(weight.path, shape, axes, -1), jax.ShapeDtypeStruct(shape, "float32"), split
        )
        for shape, axes in factors
    ]


# The bytes of a step.


def _gathered_bytes(nbytes: int, count: int) -> int:
    """Return the bytes that a device receives when `count` devices gather an array of `nbytes`.

    Each device already holds its own part.
    """
    return nbytes - nbytes // count


class _SplitEstimate:
    """An estimate of the bytes that one device holds, reads and receives in a step, with one split.

    **Arguments:**

    - `model`: the shapes of the model.
    - `step`: the step of decoding or fine-tuning.
    - `split`: the split over devices.
    - `placed`: a dict from the shapes of the weights to the weights with their shardings.
    """

    def __init__(
        self,
        model: ModelShapes,
        step: PlannedStep,
        split: Split,
        placed: Mapping[NamedShape, PlacedWeight],
    ):
        self.model, self.step, self.split, self.placed = model, step, split, placed
        self.weights = [(count, placed[weight]) for count, weight in model.counted]
        self.is_training = step.rank is not None
        self.itemsize = jnp.dtype(model.dtype).itemsize
        sequences = step.batch // split.count(("data", "expert"))
        self.tokens = sequences * (step.length if self.is_training else 1)
        #: The bytes of the hidden state of all tokens of the device.
        self.state = self.tokens * model.width * self.itemsize

    def plan(self, rates: DeviceRates) -> SplitPlan:
        """Return the plan of the split."""
        held = {"weights": sum(count * x.nbytes for count, x in self.weights)}
        received, read = self.received_for_model(), self.read_weights()
        if self.step.rank is None:
            held["cache"] = self.cache()
            read += held["cache"]
        else:
            updates = [
                (kind.count, x)
                for kind in self.model.layers
                for weight in kind.weights
                for x in place_updates(weight, self.step.rank, self.split)
            ]
            size = sum(count * x.nbytes for count, x in updates)
            held |= {"updates": size, "gradients": size, "moments": 2 * size}
            received += self.received_for_updates(updates)
        held["activations"] = self.activations()

        def rate(axes: tuple[str, ...]) -> float:
            # Devices along the first of these mesh axes are this far apart.
            span = math.prod(self.split[min(map(Split._fields.index, axes)) : 3])
            return rates.link if span <= rates.near else rates.network

        seconds = read / rates.memory + sum(n / rate(axes) for axes, n in received.items())
        return SplitPlan(
            self.split,
            held,
            {" ".join(axes): n for axes, n in received.items() if n},
            seconds,
            {x.weight.path: x.spec for x in self.placed.values() if any(x.spec)},
            {x.weight.path: x.why for x in self.placed.values() if x.why},
        )

    def cache(self) -> int:
        """Return the bytes of the KV cache on a device, in all layers."""
        total = 0
        for kind in self.model.layers:
            length, batch = self.seen_tokens(kind), self.step.batch
            for cached in kind.cache:
                array = abstract_cache(cached, batch, length, self.step.cache, self.model.dtype)
                spec, _ = spec_by_names(array, cached.axes, self.split)
                sharding = NamedSharding(self.split.mesh, spec)
                total += kind.count * device_nbytes(array, sharding)
        return total

    def seen_tokens(self, kind: LayerKind) -> int:
        """Return how many tokens a new token attends to in decoding, in layers of this kind."""
        return min(self.step.length, kind.window or self.step.length)

    def read_weights(self) -> float:
        """Return the bytes of weights that a device reads in a step.

        Training reads them three times. An expert is read only if a token chooses it, so the
        expected number of chosen experts counts.
        """
        model, tokens = self.model, self.tokens * self.split.expert
        unused = (1 - model.experts_per_token / model.experts) ** tokens
        nbytes = sum(
            count * x.nbytes_in_use * (1 - unused if "experts" in x.weight.axes else 1)
            for count, x in self.weights
        )
        return float(nbytes * (3 if self.is_training else 1))

    def activations(self) -> int:
        """Return the peak bytes of temporary arrays, in the largest layer or in the output head.

        They are the results of products, attention scores in f32 and their softmax, the gathered
        weights of this layer and the next one (FSDP), and one materialized weight, because XLA
        unpacks weights. In training, results and scores also have gradients, and each layer keeps
        its input.
        """
        sides = 2 if self.is_training else 1

        def of_layer(kind: LayerKind) -> int:
            widths = 2 * self.model.width
            for weight in kind.weights:
                if weight.contracted is not None:
                    times = self.model.experts_per_token if "experts" in weight.axes else 1
                    widths += times * self.local_size(self.placed[weight], weight.free)
            seen = self.step.length if self.is_training else self.seen_tokens(kind)
            scores = 2 * 4 * self.tokens * self.model.heads * seen // self.split.tensor
            placed = [self.placed[weight] for weight in kind.weights]
            gathered = 2 * sum(x.nbytes_in_use for x in placed if x.is_gathered)
            unpacked = max(map(self.unpacked_bytes, placed))
            results = self.tokens * widths * self.itemsize + (0 if self.step.fused else scores)
            return sides * results + gathered + unpacked

        head = self.placed[self.model.head]
        logits = sides * 4 * self.tokens * self.local_size(head, -2) + self.unpacked_bytes(head)
        logits += head.nbytes_in_use if head.is_gathered else 0
        layers = sum(kind.count for kind in self.model.layers)
        inputs = layers * self.state if self.is_training else 0
        return inputs + max(logits, *map(of_layer, self.model.layers))

    def local_size(self, placed: PlacedWeight, axis: int) -> int:
        """Return the size of an axis of a weight on one device, with the sharding in products."""
        return placed.weight.shape[axis] // self.split.count(placed.spec_in_use[axis])

    def unpacked_bytes(self, placed: PlacedWeight) -> int:
        """Return the bytes on a device of a weight after materializing it; 0 if it is dense."""
        if not is_value(placed.array):
            return 0
        sharding = NamedSharding(self.split.mesh, placed.spec_in_use)
        return math.prod(sharding.shard_shape(placed.weight.shape)) * self.itemsize

    def received_for_model(self) -> Counter[tuple[str, ...]]:
        """Return the bytes that a device receives in a step for weights and activations.

        The keys are the mesh axes of the devices that send them. In an all-reduce, a device
        receives partial sums, and then totals. In training, the communication of a
        layer is repeated in the backward pass, and again when the layer is recomputed, except for
        its last all-reduce.
        """
        model, train = self.model, self.is_training
        received = Counter[tuple[str, ...]]()
        gather = lambda nbytes, *axes: _gathered_bytes(nbytes, self.split.count(axes))
        all_reduce = 2 * gather(self.state, "tensor")
        for count, x in self.weights:
            axes, contracted = x.weight.axes, x.weight.contracted
            if "vocabulary" in axes:
                # The looked up rows of the embedding, and the gradient from the head.
                sums = (x.weight == model.outside[0]) + (train and x.weight == model.head)
                if x.spec_in_use[0] is not None:
                    received["tensor",] += sums * all_reduce
            elif contracted is not None and "tensor" in MESH_AXES.get(axes[contracted], ()):
                passes = (2 if axes[contracted] == "mlp" else 3) if train else 1
                if x.spec_in_use[contracted] is not None:
                    received["tensor",] += count * passes * all_reduce
                else:  # the weight is not sharded, so its inputs are gathered
                    times = model.experts_per_token if "experts" in axes else 1
                    inputs = times * self.state * x.weight.shape[contracted] // model.width
                    received["tensor",] += count * passes * gather(inputs, "tensor")
            if x.is_gathered:
                times, replicated = 1 + (train and "*" in x.weight.path), replication_axes(x.weight)
                received[replicated] += count * times * gather(x.nbytes_in_use, *replicated)
        for kind in model.layers:
            if any("experts" in weight.axes for weight in kind.weights):
                # Tokens are sent to their experts and back.
                sent = 2 * min(model.experts_per_token, self.split.expert) * self.state
                times = 3 if train else 1
                received["expert",] += kind.count * times * gather(sent, "expert")
        return received

    def received_for_updates(
        self, updates: list[tuple[int, PlacedWeight]]
    ) -> Counter[tuple[str, ...]]:
        """Return the bytes that a device receives in a training step for LoRA updates.

        The keys are the mesh axes of the devices that send them. Gradients are summed over devices.
        Fully sharded updates are gathered in the forward and in the backward pass. `updates` has
        pairs of the number of layers and a factor from `place_updates`.
        """
        received = Counter[tuple[str, ...]]()
        for count, x in updates:
            replicated = replication_axes(x.weight)
            times = 3 if x.is_gathered else 2
            gathered = _gathered_bytes(x.nbytes_in_use, self.split.count(replicated))
            received[replicated] += count * times * gathered
            if not any("tensor" in axes_of(entry) for entry in x.spec_in_use):
                gathered = _gathered_bytes(x.nbytes_in_use, self.split.count("tensor"))
                received["tensor",] += 2 * count * gathered
        return received
