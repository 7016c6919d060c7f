"""QLoRA on 8 devices, in one process or in two, for test_two_processes.

    python training.py ADDRESS RANK FOLDER [DIES_AT]

The int4 weights are read from FOLDER/model, and every second step is saved in FOLDER/steps. Each
process writes its losses, and the bytes of the weights that it holds, to FOLDER/RANK.json. With
DIES_AT, process 1 ends without a message before it saves that step.
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import veneer as vn

STEPS = 4
OPTIMIZER = optax.adam(1e-2)


def weights():
    """Return two matrices in int4, as in the checkpoint."""
    keys = jax.random.split(jax.random.key(0))
    dense = {
        "up": jax.random.normal(keys[0], (64, 128)),
        "down": jax.random.normal(keys[1], (128, 64)),
    }
    return vn.quant.quantize_tree(dense, [vn.quant.Rule(".*", "int4", tile_size=8)])


def updated(weights):
    """Return the weights with LoRA adapters, which are equal in all processes."""
    return vn.lora.init_tree(weights, [vn.lora.Rule(".*", rank=4)], key=jax.random.key(1))


def batch(mesh):
    """Return a batch whose rows are divided over the mesh. Each process makes its own rows."""
    x = jax.random.normal(jax.random.key(2), (16, 64))
    return vn.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


def loss(trained, rest, x):
    w = vn.tree.combine(trained, rest)
    return jnp.mean((jnp.tanh(x @ w["up"] / 8) @ w["down"] / 11 - x) ** 2)


@jax.jit
def step(trained, state, rest, x):
    value, grads = jax.value_and_grad(vn.implicit(loss))(trained, rest, x)
    changes, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(trained, changes), state, value


def begin(mesh, folder):
    """Return the adapters, the optimizer state and the frozen weights, placed on a mesh."""
    parts = [(".*", vn.fully_sharded(mesh, mesh.axis_names))]
    params = vn.device_put(updated(vn.load(folder / "model", shardings=parts)), parts)
    trained, rest = vn.tree.partition(params, vn.trainable(params))
    state = OPTIMIZER.init(trained)
    of_count = NamedSharding(mesh, P())
    state = jax.tree.map(lambda x: x if x.ndim else vn.device_put(x, of_count), state)
    return trained, state, rest


def manager(folder):
    return ocp.CheckpointManager(folder / "steps", options=ocp.CheckpointManagerOptions())


def train(mesh, folder, saves=lambda number, trained, state: None):
    """Train for some steps. Return the losses and the frozen weights."""
    trained, state, rest = begin(mesh, folder)
    x, losses = batch(mesh), []
    for number in range(1, STEPS + 1):
        trained, state, value = step(trained, state, rest, x)
        losses.append(float(value))
        if number % 2 == 0:
            saves(number, trained, state)
    return losses, rest


def line():
    return jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))


def sum_of_devices():
    """Return a quantized sum over devices, as this process sees it."""
    x = jax.random.normal(jax.random.key(3), (8, 2048))
    x = vn.device_put(x, NamedSharding(line(), P("i")))
    total = jax.shard_map(
        lambda x: vn.distributed.psum(x[0], "i"), mesh=line(), in_specs=P("i"), out_specs=P()
    )
    return jax.jit(total)(x).addressable_data(0).tolist()


def main(address, rank, folder, dies_at=None):
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(rank))
    folder = Path(folder)
    with manager(folder) as checkpoints:

        def save(number, trained, state):
            if rank == "1" and dies_at == str(number):
                os._exit(9)
            checkpoints.save(number, args=ocp.args.StandardSave({"w": trained, "state": state}))
            checkpoints.wait_until_finished()

        losses, rest = train(line(), folder, save)
    held = sum(s.data.nbytes for x in jax.tree.leaves(rest) for s in x.addressable_shards)
    told = {"losses": losses, "held": held, "devices": jax.device_count(), "sum": sum_of_devices()}
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
