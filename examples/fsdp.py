"""Fine-tune a fully sharded decoder with QLoRA (FSDP): a device holds one full layer at a time.

For models that are larger than one device. An int4 decoder, its LoRA adapters, the moments of Adam
and the batch are divided over 8 devices. A scan over layers gathers the packed weights of each
layer, uses them and frees them. The backward pass gathers them again (`jax.checkpoint`), and
scatters the gradients.

The program runs in two ways: by `jax.jit` with shardings, where a constraint gathers a layer, and
by `jax.shard_map`, where `lax.all_gather` does.

    python examples/fsdp.py              # many minutes on two cores
    python examples/fsdp.py --quick      # small sizes, to see that it runs
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn

AXIS = "devices"


@dataclass(frozen=True)
class Config:
    """The sizes. The widths are multiples of 8 tiles of 64, one for each device."""

    vocabulary: int = 512
    width: int = 512
    wide: int = 1536
    num_layers: int = 16
    num_heads: int = 8
    rank: int = 8
    batch: int = 8
    length: int = 32


SMALL = Config(width=512, wide=512, num_layers=2, batch=8, length=8)
OPTIMIZER = optax.adam(1e-2)
TILE = 64


def init(key: jax.Array, config: Config) -> tuple[dict, dict]:
    """Return random weights with the layers stacked, and LoRA adapters for each layer."""
    wide = {"up": (config.width, config.wide), "gate": (config.width, config.wide)}
    square = dict.fromkeys(("query", "key", "value", "mixed"), (config.width, config.width))
    shapes = {**square, **wide, "down": (config.wide, config.width)}
    keys = iter(jax.random.split(key, 2 * len(shapes) + 2))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    layers = {name: normal(config.num_layers, *shape) for name, shape in shapes.items()}
    weights = {
        "embedding": config.vocabulary**0.5 * normal(config.vocabulary, config.width),
        "head": normal(config.width, config.vocabulary),
        "layers": layers,
    }
    updates = {
        name: {
            "a": normal(config.num_layers, rows, config.rank),
            "b": jnp.zeros((config.num_layers, config.rank, columns)),
        }
        for name, (rows, columns) in shapes.items()
    }
    return weights, updates


def quantize(weights: dict) -> dict:
    """Quantize the layers to int4, and the other weights to int8."""
    layers = vn.quant.Rule(r"layers\..*", "int4", tile_size=TILE)
    return vn.quant.quantize_tree(weights, [layers, vn.quant.Rule(r".*", "int8")])


# The model, in plain JAX. `gather(x, axis)` gathers an array that is sharded along an axis.


def norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def layer(p: Any, x: jax.Array, num_heads: int) -> jax.Array:
    """Run one layer on `x`, `[batch, length, width]`."""
    heads = lambda name: (norm(x) @ p[name]).reshape(*x.shape[:2], num_heads, -1)
    mixed = jax.nn.dot_product_attention(
        heads("query"), heads("key"), heads("value"), is_causal=True
    )
    x = x + mixed.reshape(x.shape) @ p["mixed"]
    return x + (jax.nn.silu(norm(x) @ p["gate"]) * (norm(x) @ p["up"])) @ p["down"]


def loss(updates: Any, weights: Any, tokens: jax.Array, config: Config, gather: Callable) -> Any:
    """Return the mean cross entropy of the next token."""

    @jax.checkpoint
    def step(x: jax.Array, parts: Any) -> Any:
        stored, by = parts
        p = {
            name: vn.types.LoraArray(
                gather(w, 0), gather(by[name]["a"], 0), gather(by[name]["b"], 1), scale=2.0
            )
            for name, w in stored.items()
        }
        return layer(p, x, config.num_heads), None

    x = gather(weights["embedding"], 0)[tokens[:, :-1]]
    x, _ = lax.scan(step, x, (weights["layers"], updates))
    logits = norm(x) @ gather(weights["head"], 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(loss: Callable, updates: Any, state: Any, weights: Any, tokens: jax.Array) -> Any:
    """Run one step of Adam. It is elementwise, so it also works on shards."""
    value, grads = jax.value_and_grad(loss)(updates, weights, tokens)
    changes, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(updates, changes), state, value


# Placement.


def specs(tree: Any) -> Any:
    """Return a spec for each array: weights and `a` are divided along rows, `b` along columns."""

    def of(path: str, x: Any) -> P:
        if x.ndim < 2:  # the number of steps
            return P()
        entries = [None] * x.ndim
        entries[-1 if path.endswith(".b") else -2] = AXIS
        return P(*entries)

    paths = [vn.tree.path_string(path) for path, _ in vn.tree.flatten_with_path(tree)[0]]
    leaves, structure = vn.tree.flatten(tree)
    return jax.tree.unflatten(structure, list(map(of, paths, leaves)))


def by_jit(mesh: Mesh, config: Config, *trees: Any) -> Callable:
    """Return the step as `jax.jit` partitions it, by shardings and constraints."""
    del trees  # placement is in the types
    everywhere = NamedSharding(mesh, P())
    gather = lambda x, axis: lax.with_sharding_constraint(x, everywhere)
    of_batch = lambda *args: loss(*args, config, gather)
    return jax.jit(vn.implicit(lambda *args: train_step(of_batch, *args)), donate_argnums=(0, 1))


def by_shard_map(mesh: Mesh, config: Config, *trees: Any) -> Callable:
    """Return the step as each device runs it, on its shards of the trees and the batch."""
    gather = lambda x, axis: lax.all_gather(x, AXIS, axis=axis, tiled=True)
    of_part = lambda *args: lax.pmean(loss(*args, config, gather), AXIS)
    updates, state, weights = map(specs, trees)
    step = jax.shard_map(
        lambda *args: train_step(of_part, *args),
        mesh=mesh,
        in_specs=(updates, state, weights, P(AXIS)),
        out_specs=(updates, state, P()),
    )
    return jax.jit(vn.implicit(step), donate_argnums=(0, 1))


def shard(mesh: Mesh, tree: Any) -> Any:
    """Place a tree so that each device has its shards."""
    return vn.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree)))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Place a tree so that each device has all of it."""
    return vn.device_put(tree, NamedSharding(mesh, P()))


def peak_bytes(compiled: Any) -> int:
    """Return the peak bytes per device: arguments, temporaries and results."""
    m = compiled.memory_analysis()
    given = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return given + m.temp_size_in_bytes


@dataclass(frozen=True)
class Setup:
    """A step that is compiled for arrays with a placement."""

    name: str
    compiled: Any
    args: tuple[Any, ...]  # updates, state, weights

    @property
    def held(self) -> int:
        """The bytes of weights, adapters and moments on a device."""
        first = jax.devices()[0]
        arrays = jax.tree.leaves(self.args)
        return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == first)


def setups(config: Config, tokens: jax.Array) -> Iterator[Setup]:
    """Yield the steps with f32 and int4 weights, replicated and sharded."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(AXIS)))
    for name, store in (("f32", lambda weights: weights), ("int4", quantize)):
        for how, put, make in (
            ("on each device", replicate, by_jit),
            ("in parts, by jit", shard, by_jit),
            ("in parts, by shard_map", shard, by_shard_map),
        ):
            weights, updates = init(jax.random.key(0), config)
            trees = updates, OPTIMIZER.init(updates), store(weights)
            args = tuple(put(mesh, tree) for tree in trees)
            compiled = make(mesh, config, *trees).lower(*args, tokens).compile()
            yield Setup(f"{name}, {how}", compiled, args)


def make_tokens(config: Config) -> jax.Array:
    """Return sequences `[batch, length + 1]` that count with different steps."""
    key = jax.random.key(1)
    start, step = jax.random.randint(key, (2, config.batch, 1), 1, config.vocabulary)
    return (start + step * jnp.arange(config.length + 1)) % config.vocabulary


def main() -> None:
    """Print the memory per device of each step, and some losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    config = SMALL if arguments.quick else Config()
    tokens = make_tokens(config)
    print("| weights | held by a device | needed at a time | first and last loss |")
    print("|---|---:|---:|---:|")
    for setup in setups(config, tokens):
        updates, state, weights = setup.args
        held, losses = setup.held, []
        for _ in range(arguments.steps):
            updates, state, value = setup.compiled(updates, state, weights, tokens)
            losses.append(float(value))
        sizes = f"{held / 1e6:.1f} MB | {peak_bytes(setup.compiled) / 1e6:.1f} MB"
        print(f"| {setup.name} | {sizes} | {losses[0]:.4f}, {losses[-1]:.4f} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
