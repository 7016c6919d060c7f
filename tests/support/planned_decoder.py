"""A decoder that is divided over devices as `veneer plan` says, under `jax.shard_map`.

The heads, the inner width of the MLP and the vocabulary are divided over the mesh axis `tensor`,
and texts over `data`. Weights that are also divided over `data` are gathered when they are used. A
program is a decoding step, or a training step of LoRA adapters. Tests and
`benchmarks/planned_decoder.py` compare its bytes with the plan.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn
from veneer.plan import ModelShapes, PlannedStep, Split, SplitPlan, model_of, plans
from veneer.plan.splits import (
    PlacedWeight,
    abstract_cache,
    abstract_weight,
    leaf_destinations,
    place_updates,
    place_weight,
)

SAID = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
STEPS = {
    "serving": PlannedStep(batch=64, length=128),
    "fine-tuning": PlannedStep(batch=16, length=64, rank=8),
}
_SPLITS = (8, 1, 1, True), (2, 1, 4), (2, 1, 4, True), (1, 1, 8)
SPLITS = [Split(*split) for split in _SPLITS]
AXES = "data", "tensor"  # the axes of the mesh: the model has no experts
OPTIMIZER = optax.adam(1e-2)


# The decoder on one device.


def normed(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Return the RMSNorm of x, marked as varying over `tensor`.

    All products with divided weights use this copy, so that its gradient is summed only once.
    """
    y = scale * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return lax.pcast(y, "tensor", to="varying")


def layer(
    p: Callable, x: jax.Array, head: int, cache: Any = None, at: Any = 0
) -> tuple[jax.Array, Any]:
    """Run one layer.

    **Arguments:**

    - `p`: takes a name, and returns a weight `[out, in]` of the layer.
    - `head`: the width of a head.
    - `cache`: keys and values `[batch, heads, length, head]`, or None.
    - `at`: the position in the cache.

    **Returns:** the output and the new cache.
    """
    y = normed(p("input_layernorm"), x)
    of = lambda name: (y @ p(f"self_attn.{name}").T).reshape(*y.shape[:2], -1, head).swapaxes(1, 2)
    query, key, value = map(of, ("q_proj", "k_proj", "v_proj"))
    if cache is not None:
        write = lambda kept, new: lax.dynamic_update_slice(kept, new, (0, 0, at, 0))
        key, value = cache = write(cache[0], key), write(cache[1], value)
    query = query.reshape(*key.shape[:2], -1, *query.shape[2:])
    scores = jnp.einsum("bgrlh,bgmh->bgrlm", query, key) * head**-0.5
    is_seen = jnp.arange(x.shape[1])[:, None] + at >= jnp.arange(key.shape[2])
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
    mixed = jnp.einsum("bgrlm,bgmh->blgrh", weights, value)
    x = x + lax.psum(mixed.reshape(*x.shape[:2], -1) @ p("self_attn.o_proj").T, "tensor")
    y = normed(p("post_attention_layernorm"), x)
    wide = jax.nn.silu(y @ p("mlp.gate_proj").T) * (y @ p("mlp.up_proj").T)
    return x + lax.psum(wide @ p("mlp.down_proj").T, "tensor"), cache


def own(tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Find the tokens in the device's part of the vocabulary.

    **Returns:** a mask, and the row of each such token, both with the shape of `tokens`.
    """
    place = tokens - lax.axis_index("tensor") * count
    is_own = (place >= 0) & (place < count)
    return is_own, jnp.where(is_own, place, 0)


def embedded(table: Any, tokens: jax.Array) -> jax.Array:
    is_own, place = own(tokens, table.shape[0])
    return lax.psum(jnp.where(is_own[..., None], table[place], 0), "tensor")


def surprise(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the mean cross entropy over all devices. Each has a part of the logits."""
    most = lax.pmax(lax.stop_gradient(logits).max(-1), "tensor")
    total = lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "tensor")
    is_own, place = own(tokens, logits.shape[-1])
    found = jnp.take_along_axis(logits, place[..., None], -1)[..., 0]
    found = lax.psum(jnp.where(is_own, found, 0), "tensor")
    return lax.pmean((jnp.log(total) + most - found).mean(), "data")


# The steps.


class Program(NamedTuple):
    """A decoding step or a training step of the decoder, for one plan.

    Weights are named as in the checkpoint. To train, the layers are stacked. An adapter is a pair
    `(a, b)`.
    """

    model: ModelShapes
    split: Split
    step: PlannedStep
    of: dict[str, PlacedWeight]
    updates: dict[str, list[PlacedWeight]]

    @classmethod
    def of_model(
        cls, model: ModelShapes, split: Split, step: PlannedStep, format: str
    ) -> "Program":
        """Return the program whose arrays are placed as in the plan."""
        every = dict.fromkeys(weight for _, weight in model.counted)
        stored = {w: abstract_weight(w, format, None, model.dtype) for w in every}
        of = {w.path: place_weight(w, x, split) for w, x in stored.items()}
        layers = model.layers[0].weights if step.rank else ()
        updates = {w.path: place_updates(w, step.rank or 0, split) for w in layers}
        return cls(
            model, split, step, of, {path: found for path, found in updates.items() if found}
        )

    @property
    def head(self) -> int:
        """The width of a head."""
        size = self.model.layers[0].cache[0].sizes[-1]
        assert size is not None
        return size

    def by_name(self, weights: Any, updates: Any) -> Callable:
        """Return a function that takes a name and gathers a weight of one layer."""

        def of(name: str) -> Any:
            path = f"model.layers.*.{name}.weight"
            w = gathered(weights[path], self.of[path])
            if path not in updates:
                return w
            pairs = zip(updates[path], self.updates[path], strict=True)
            return vn.types.LoraArray(w, *(gathered(x, side) for x, side in pairs))

        return of

    def outside(self, weights: Any, path: str) -> Any:
        """Gather a weight that belongs to no layer."""
        return gathered(weights[path], self.of[path])

    def decode(self, outside: Any, layers: Any, caches: Any, tokens: jax.Array, at: Any) -> Any:
        """Decode a token per text. Return logits `[batch, 1, vocabulary part]` and caches."""
        x, kept = embedded(self.outside(outside, "model.embed_tokens.weight"), tokens), []
        for weights, cache in zip(layers, caches, strict=True):
            x, cache = layer(self.by_name(weights, {}), x, self.head, cache, at)
            kept.append(cache)
        x = normed(self.outside(outside, "model.norm.weight"), x)
        return x @ self.outside(outside, "lm_head.weight").T, kept

    def train(self, outside: Any, layers: Any, updates: Any, state: Any, tokens: jax.Array) -> Any:
        """Run a step of Adam. Return the adapters, the optimizer state and the loss."""

        @jax.checkpoint
        def step(x: jax.Array, of: Any) -> Any:
            return layer(self.by_name(*of), x, self.head)

        def loss(updates: Any) -> jax.Array:
            x = embedded(self.outside(outside, "model.embed_tokens.weight"), tokens[:, :-1])
            x, _ = lax.scan(step, x, (layers, updates))
            x = normed(self.outside(outside, "model.norm.weight"), x)
            return surprise(x @ self.outside(outside, "lm_head.weight").T, tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(updates)
        changes, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(updates, changes), state, value

    def stepped(self, mesh: Any) -> tuple[Any, Any]:
        """Return the jitted step, and abstract arguments with their shardings."""
        of = self.of.items()
        outside, layers = ({p: x.array for p, x in of if ("*" in p) is it} for it in (False, True))
        of_outside, of_layers = (
            {p: x.spec for p, x in of if ("*" in p) is it} for it in (False, True)
        )
        batch, length, count = self.step.batch, self.step.length, self.model.layers[0].count
        shape = jax.ShapeDtypeStruct
        if self.step.rank is None:
            cached = self.model.layers[0].cache[0]
            cache = abstract_cache(cached, batch, length, self.step.cache, self.model.dtype)
            caches, of_caches = ([(x, x)] * count for x in (cache, P("data", "tensor")))
            args = outside, [layers] * count, caches, shape((batch, 1), "int32"), shape((), "int32")
            specs = of_outside, [of_layers] * count, of_caches, P("data"), P()
            program, results, donated = self.decode, (P("data", None, "tensor"), of_caches), (2,)
        else:
            pairs = self.updates.items()
            updates = {path: [stacked(x.array, count) for x in sides] for path, sides in pairs}
            of_updates = {path: [P(None, *x.spec) for x in sides] for path, sides in pairs}
            state = jax.eval_shape(OPTIMIZER.init, updates)
            of_state = optax.tree_utils.tree_map_params(
                OPTIMIZER,
                lambda _, spec: spec,
                state,
                of_updates,
                transform_non_params=lambda _: P(),
            )
            layers = {path: stacked(x, count) for path, x in layers.items()}
            of_layers = {path: P(None, *spec) for path, spec in of_layers.items()}
            args = outside, layers, updates, state, shape((batch, length + 1), "int32")
            specs = of_outside, of_layers, of_updates, of_state, P("data")
            program, results, donated = self.train, (of_updates, of_state, P()), (2, 3)
        args = vn.tree.map(lambda x, spec: lying(x, NamedSharding(mesh, spec)), args, specs)
        step = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=results)
        return jax.jit(vn.implicit(step), donate_argnums=donated), args

    def compiled(self) -> Any:
        """Compile the step for the devices of this process."""
        sizes = self.split.data, self.split.tensor
        run, args = self.stepped(jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2))
        return run.lower(*args).compile()

    def lowered(self, platform: str = "cuda") -> Any:
        """Lower the step for abstract devices of another platform."""
        sizes = self.split.data, self.split.tensor
        run, args = self.stepped(AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2))
        with vn.kernels.use("xla"):  # kernels would be selected for the devices of this process
            return run.trace(*args).lower(lowering_platforms=(platform,))


def stacked(x: Any, count: int) -> Any:
    return jax.tree.map(lambda y: jax.ShapeDtypeStruct((count, *y.shape), y.dtype), x)


def gathered(x: Any, placed: PlacedWeight) -> Any:
    """Gather a weight along the axes that are divided over `data`."""
    for axis, (given, cut) in enumerate(zip(placed.spec_in_use, placed.spec, strict=True)):
        if given != cut:
            x = lax.all_gather(x, cut, axis=axis, tiled=True)
    return x


def lying(x: Any, sharding: NamedSharding) -> Any:
    """Return an abstract array, implicit or dense, with a sharding."""
    leaves, structure = jax.tree.flatten(x)
    pairs = zip(leaves, leaf_destinations(x, sharding), strict=True)
    return jax.tree.unflatten(
        structure, [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=s) for y, s in pairs]
    )


# The bytes of a compiled program.

#: The bytes that each of `n` devices receives, by the bytes of its result.
RECEIVED: dict[str, Callable[[int, int], int]] = {
    "all-gather": lambda size, n: size - size // n,
    "all-reduce": lambda size, n: 2 * (size - size // n),
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-to-all": lambda size, n: size - size // n,
}
_COLLECTIVE = rf"= (.*?) ({'|'.join(RECEIVED)})(?:-start)?\((.*)"
_ITEMSIZE = {"f32": 4, "bf16": 2, "u8": 1, "s8": 1}


def received(program: str, layers: int) -> int:
    """Return the bytes that collectives of a compiled program send to one device.

    A collective in the body of a loop counts once per layer.
    """
    total, times = 0, 1
    for line in program.splitlines():
        if line.endswith("{"):
            times = 1 if line.startswith("ENTRY") else layers
        if (found := re.search(_COLLECTIVE, line)) is None:
            continue
        results, name, rest = found.groups()
        count = _devices_of(rest)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            size = _ITEMSIZE[dtype] * math.prod(int(n) for n in shape.split(",") if n)
            total += times * RECEIVED[name](size, count)
    return total


def _devices_of(rest: str) -> int:
    """Return the number of devices in a collective. Versions of XLA print it differently."""
    found = re.search(
        r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\}|mesh\[(.*?)\] *\{(.*?)\})", rest
    )
    assert found is not None
    if found[3]:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[3]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", found[4]))
    return int(found[1]) if found[1] else len(found[2].split(","))


def taken(program: Program) -> tuple[int, int, int]:
    """Return the bytes of the arguments, of the peak memory, and of the collectives."""
    compiled = program.compiled()
    m = compiled.memory_analysis()
    given = m.argument_size_in_bytes
    peak = given + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return given, peak, received(compiled.as_text(), program.model.layers[0].count)


def compared(use: str, format: str) -> Iterator[tuple[SplitPlan, tuple[int, int, int]]]:
    """Yield the plan of each split, and the bytes of its compiled program."""
    model, step = model_of(SAID), STEPS[use]
    found = {plan.split: plan for plan in plans(model, format, step, 8)}
    for split in SPLITS:
        yield found[split], taken(Program.of_model(model, split, step, format))


def held(plan: SplitPlan) -> int:
    """Return the planned bytes of the arguments of a step."""
    return plan.total - plan.held["activations"] - plan.held.get("gradients", 0)
