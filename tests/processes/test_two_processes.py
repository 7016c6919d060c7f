"""Two processes with 4 devices each read a model, train it and save it. One is killed."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import veneer as vn

pytestmark = [pytest.mark.divided(by="file"), pytest.mark.slow]

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

PROGRAM = Path(__file__).with_name("training.py")
_spec = importlib.util.spec_from_file_location("training_in_processes", PROGRAM)
training = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(training)


@contextlib.contextmanager
def started(folder, *args):
    """Start the two processes, each with its messages in a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    source = str(Path(vn.__file__).parents[1])
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": source}
    processes = []
    for rank in range(2):
        command = [sys.executable, PROGRAM, address, str(rank), folder, *args]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train in two processes. Return their folder and their results."""
    folder = tmp_path_factory.mktemp("run")
    vn.save(folder / "model", training.weights())
    with started(folder) as processes:
        for rank, process in enumerate(processes):
            assert process.wait(timeout=100) == 0, (folder / f"{rank}.log").read_text()
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_train_like_one(trained):
    folder, (one, other) = trained
    assert one["devices"] == 8
    assert one["losses"] == other["losses"]
    assert one["losses"][-1] < one["losses"][0]
    alone = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    losses, rest = training.train(alone, folder)
    np.testing.assert_allclose(one["losses"], losses, rtol=1e-5)
    # Each has read its half, packed.
    whole = sum(x.nbytes for x in jax.tree.leaves(rest))
    assert one["held"] == other["held"] == whole / 2


def test_quantized_sums_agree_in_both_processes(trained):
    _, (one, other) = trained
    assert one["sum"] == other["sum"]
    x = jax.random.normal(jax.random.key(3), (8, 2048))
    assert 0 < abs(jnp.array(one["sum"]) - x.sum(0)).max() < 0.1


def restored(folder, shape, number):
    """Load the checkpoint of a step on a mesh of this shape."""
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    trained, state, rest = training.begin(mesh, folder)
    like = {"w": trained, "state": state}
    with training.manager(folder) as checkpoints:
        assert number == checkpoints.latest_step()
        found = checkpoints.restore(number, args=ocp.args.StandardRestore(like))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    return mesh, found, rest


@pytest.mark.parametrize("shape", [(1, 8), (4, 2)])
def test_a_checkpoint_of_two_processes_loads_on_another_mesh(trained, shape):
    folder, (told, _) = trained
    mesh, found, rest = restored(folder, shape, training.STEPS)
    *_, value = training.step(found["w"], found["state"], rest, training.batch(mesh))
    alone = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    again = []

    def keep(number, w, state):
        if number == training.STEPS:
            again.append((w, state))

    training.train(alone, folder, keep)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        jax.tree.leaves((found["w"], found["state"])),
        jax.tree.leaves(again[0]),
    )
    assert value < told["losses"][-1]


def test_a_killed_process_leaves_the_previous_checkpoint(tmp_path):
    vn.save(tmp_path / "model", training.weights())
    with started(tmp_path, "4") as (_, second):  # the first waits for it
        assert second.wait(timeout=100) == 9, (tmp_path / "1.log").read_text()
    assert not (tmp_path / "0.json").exists()
    mesh, found, rest = restored(tmp_path, (4, 2), 2)
    *_, value = training.step(found["w"], found["state"], rest, training.batch(mesh))
    assert np.isfinite(value)
