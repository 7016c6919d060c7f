"""QLoRA of a model that does not fit on the device: its layers are in host memory.

For GPUs and TPUs with too little memory. The decoder is the one of `fsdp.py`. Its scan over layers
moves the packed weights of each layer to the device, uses them and frees them. The backward pass
moves them again. The adapters, their moments, the embedding and the head stay on the device.

On a CPU, both are the same memory, and a moved layer is copied. JAX and XLA treat it as on a GPU or
TPU, where `pinned_host` is a different memory.

    python examples/offload.py              # two minutes on two cores
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


def send(x: Any, axis: int) -> Any:
    """Return the array on the device. `axis` is ignored."""
    del axis  # along which `fsdp.py` gathers
    return jax.device_put(x, jax.memory.Space.Device)


def keep(x: Any, axis: int) -> Any:
    """Return the array unchanged."""
    del axis
    return x


def on_host(weights: dict) -> dict:
    """Return the weights with the layers in host memory."""
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return vn.device_put(weights, [(r"layers\..*", host)])


@dataclass(frozen=True)
class Setup:
    """A training step that is compiled for arrays with a placement."""

    name: str
    compiled: Any
    args: tuple[Any, ...]  # updates, state, weights

    @property
    def on_host(self) -> int:
        """The bytes of weights, adapters and moments in host memory."""
        arrays = jax.tree.leaves(self.args)
        return sum(x.nbytes for x in arrays if x.sharding.memory_kind == "pinned_host")

    @property
    def on_device(self) -> int:
        """The peak bytes on the device."""
        return fsdp.peak_bytes(self.compiled) - self.on_host


def setups(config: fsdp.Config, tokens: jax.Array) -> Iterator[Setup]:
    """Yield the steps with f32 and int4 weights, on the device and on the host."""
    places: dict[str, tuple[Callable, Callable]] = {
        "on the device": (lambda weights: weights, keep),
        "layers on the host": (on_host, send),
    }
    for name, store in (("f32", lambda weights: weights), ("int4", fsdp.quantize)):
        for where, (put, gather) in places.items():
            weights, updates = fsdp.init(jax.random.key(0), config)
            args = updates, fsdp.OPTIMIZER.init(updates), put(store(weights))
            loss = lambda *args, gather=gather: fsdp.loss(*args, config, gather)
            step = lambda *args, loss=loss: fsdp.train_step(loss, *args)
            run = jax.jit(vn.implicit(step), donate_argnums=(0, 1))
            yield Setup(f"{name}, {where}", run.lower(*args, tokens).compile(), args)


def main() -> None:
    """Print the memory of each step, and some losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    config = fsdp.SMALL if arguments.quick else fsdp.Config()
    tokens = fsdp.make_tokens(config)
    print("| weights | on the host | on the device, at a time | first and last loss |")
    print("|---|---:|---:|---:|")
    for setup in setups(config, tokens):
        updates, state, weights = setup.args
        sizes, losses = (setup.on_host, setup.on_device), []
        for _ in range(arguments.steps):
            updates, state, value = setup.compiled(updates, state, weights, tokens)
            losses.append(float(value))
        host, device = (f"{size / 1e6:.1f} MB" for size in sizes)
        print(
            f"| {setup.name} | {host} | {device} | {losses[0]:.4f}, {losses[-1]:.4f} |", flush=True
        )


if __name__ == "__main__":
    main()
