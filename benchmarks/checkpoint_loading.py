"""Measure the time and memory of `vn.load(path, shardings=...)`.

    python benchmarks/checkpoint_loading.py            # for docs/checkpoints.md; ten minutes
    python benchmarks/checkpoint_loading.py --quick    # small sizes, to see that it runs

A checkpoint of each family has four matrices of 8192 by 8192. A new process loads it to eight host
devices, with the outputs of each matrix divided over the devices. It first loads a small
checkpoint, so that imports and compilation do not count.

Seconds are CPU seconds, because other programs do not change them. *above the result* is the peak
memory beside the returned arrays, in matrices of the loaded size. It is the private memory of the
process, sampled every millisecond. Memory-mapped files do not count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from checkpoint_products import FORMATS, stored
from measure import markdown_table

import veneer as vn

COUNT = 4
SMALL = 512


def weights(size: int) -> Iterator[tuple[str, str, Any]]:
    """Yield the name of a row, the format of the checkpoint, and a matrix to write."""
    rng = np.random.default_rng(0)
    codes = {bits: jnp.asarray(rng.integers(0, 2**bits, (size, size), np.uint8)) for bits in (3, 4)}
    scale = jnp.ones((size, size // 128), jnp.float16)
    zero = jnp.asarray(rng.integers(1, 8, scale.shape, np.uint8))
    of = lambda bits: vn.quant.QArray(codes[bits], scale, zero, qtype=f"uint{bits}")
    order = jnp.asarray(rng.permutation(size)[None], jnp.int32)
    yield "GPTQ, 4 bits", "gptq", of(4)
    yield "GPTQ, 3 bits", "gptq", of(3)
    yield "GPTQ, 4 bits, desc_act", "gptq", vn.types.Permuted(of(4), order)
    yield "AWQ", "awq", of(4)
    yield "compressed-tensors, 4 bits", "compressed-tensors", of(4)
    known = {name: how for name, *how in FORMATS}
    yield "MLX, 4 bits", "mlx", stored(size, size, *known["MLX, 4 bits"])
    for name in ("Q4_0", "Q4_K", "Q6_K", "TQ2_0"):
        yield f"GGUF, {name}", "gguf", stored(size, size, *known[name])
    yield "FP8, blocks of 128", "fp8", None
    yield "bfloat16", "dense", None


def write(path: Path, format: str, matrix: Any, size: int) -> None:
    names = [f"model.layers.{i}.up_proj.weight" for i in range(COUNT)]
    if matrix is not None:
        vn.save(path, dict.fromkeys(names, matrix), format=format)
        return
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    path.mkdir()
    floats = rng.normal(size=(size, size)).astype(np.float32)
    config: Mapping[str, Any] = {}
    if format == "fp8":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        tensors = dict.fromkeys(names, floats.astype(ml_dtypes.float8_e4m3fn))
        scale = np.ones((size // 128, size // 128), np.float32)
        tensors |= {f"{name}_scale_inv": scale for name in names}
    else:
        tensors = dict.fromkeys(names, floats.astype(ml_dtypes.bfloat16))
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))


def read(path: str, warm: str) -> None:
    """Load a checkpoint in this process. Wait for a line of input before and after."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("model", None)
    load = lambda path: vn.load(path, shardings=jax.sharding.NamedSharding(mesh, spec))
    jax.block_until_ready(load(warm))
    print("ready", flush=True)
    input()
    start = time.process_time()
    params = jax.block_until_ready(load(path))
    seconds = time.process_time() - start
    nbytes = sum(x.nbytes for x in params.values())
    print(json.dumps({"seconds": seconds, "bytes": nbytes}), flush=True)
    input()


def own_bytes(pid: int) -> int:
    """Return the private memory of a process, from Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measured(path: Path, warm: Path) -> tuple[float, int, int]:
    """Load a checkpoint in a new process.

    **Returns:** the CPU seconds, the bytes of the loaded arrays, and the growth of the memory at
    its peak.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    child = subprocess.Popen(
        [sys.executable, __file__, "--read", str(path), str(warm)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "ready\n"
        before = most = own_bytes(child.pid)
        os.set_blocking(child.stdout.fileno(), False)
        child.stdin.write("\n")
        child.stdin.flush()
        while not (line := child.stdout.readline()):
            most = max(most, own_bytes(child.pid))
            time.sleep(0.001)
        child.stdin.write("\n")
        child.stdin.flush()
        said = json.loads(line)
    return said["seconds"], said["bytes"], most - before


def rows_of_table(size: int) -> Iterator[list[str]]:
    """Write and load a checkpoint of each family, and yield its row."""
    for (name, format, matrix), (*_, other) in zip(weights(size), weights(SMALL), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            whole, small = Path(folder) / "model", Path(folder) / "warm"
            write(whole, format, matrix, size)
            write(small, format, other, SMALL)
            stored_bytes = sum(x.stat().st_size for x in whole.glob("*.safetensors"))
            stored_bytes = stored_bytes or whole.stat().st_size
            seconds, held, most = measured(whole, small)
        speed = stored_bytes / 1e6 / seconds
        above = (most - held) / (held / COUNT)
        figures = f"{stored_bytes / 1e6:.0f}", f"{held / 1e6:.0f}", f"{seconds:.2f}", f"{speed:.0f}"
        yield [name, *figures, f"{above:.1f}"]


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.read:
        read(*arguments.read)
    else:
        header = ["", "MB of the files", "MB held", "CPU s", "MB/s", "above the result, matrices"]
        print(markdown_table(header, rows_of_table(SMALL if arguments.quick else 8192)))
