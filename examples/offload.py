"""QLoRA of a model that a device has no room for: its layers lie in the memory of the host.

The decoder of `fsdp.py` is trained as it is there, but what it gathers is moved: in its scan over
layers, each is sent to the device as it is stored, codes and scales, used and forgotten, and sent
again in the backward pass. Updates, their moments, embedding and head are on the device.

On a CPU both are the same memory, and a layer that is sent is copied; JAX and XLA treat it as they
do on a GPU or TPU, where `pinned_host` is another.

    python examples/offload.py
    python examples/offload.py --quick      # small sizes, to see that it runs
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fsdp
import jax
from jax.sharding import SingleDeviceSharding

import veneer as vn


def sent(x: Any, axis: int) -> Any:
    """An array on the device, wherever it was."""
    del axis  # along which `fsdp.py` gathers
    return jax.device_put(x, jax.memory.Space.Device)


def here(x: Any, axis: int) -> Any:
    """An array where it is."""
    del axis
    return x


def on_host(weights: dict) -> dict:
    """The weights, with those of layers in the host's memory."""
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return vn.device_put(weights, [(r"layers\..*", host)])


@dataclass(frozen=True)
class Way:
    """A step of training that is compiled for arrays where they lie."""

    name: str
    compiled: Any
    args: tuple[Any, ...]  # updates, state, weights

    @property
    def on_host(self) -> int:
        """The bytes of weights, updates and moments that lie in the host's memory."""
        arrays = jax.tree.leaves(self.args)
        return sum(x.nbytes for x in arrays if x.sharding.memory_kind == "pinned_host")

    @property
    def on_device(self) -> int:
        """The bytes that are needed at a time besides."""
        return fsdp.peak(self.compiled) - self.on_host


def ways(config: fsdp.Config, tokens: jax.Array) -> Iterator[Way]:
    """Weights in f32 and int4, on the device and on the host."""
    places: dict[str, tuple[Callable, Callable]] = {
        "on the device": (lambda weights: weights, here),
        "layers on the host": (on_host, sent),
    }
    for name, store in (("f32", lambda weights: weights), ("int4", fsdp.quantized)):
        for where, (put, whole) in places.items():
            weights, updates = fsdp.init(jax.random.key(0), config)
            args = updates, fsdp.OPTIMIZER.init(updates), put(store(weights))
            loss = lambda *args, whole=whole: fsdp.loss(*args, config, whole)
            step = lambda *args, loss=loss: fsdp.train_step(loss, *args)
            run = jax.jit(vn.implicit(step), donate_argnums=(0, 1))
            yield Way(f"{name}, {where}", run.lower(*args, tokens).compile(), args)


def main() -> None:
    """Prints what each way needs of the device, and the losses of some steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    config = fsdp.SMALL if arguments.quick else fsdp.Config()
    tokens = fsdp.text(config)
    print("| weights | on the host | on the device, at a time | first and last loss |")
    print("|---|---:|---:|---:|")
    for way in ways(config, tokens):
        updates, state, weights = way.args
        sizes, losses = (way.on_host, way.on_device), []
        for _ in range(arguments.steps):
            updates, state, value = way.compiled(updates, state, weights, tokens)
            losses.append(float(value))
        host, device = (f"{size / 1e6:.1f} MB" for size in sizes)
        print(f"| {way.name} | {host} | {device} | {losses[0]:.4f}, {losses[-1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
