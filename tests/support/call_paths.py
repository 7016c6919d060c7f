"""List the functions of veneer that run in a call: its call path.

    python tests/support/call_paths.py    # print all call paths, in about 15 seconds

Each call path is recorded in a new process, which finds its kernels compiled.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import veneer as vn

PACKAGE = Path(vn.__file__).parent


def model(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def loss(params, x):
    return (model(params, x) ** 2).mean()


def parameters():
    up, down, x = (jnp.ones(shape) for shape in ((512, 1024), (1024, 512), (8, 512)))
    rules = [vn.quant.Rule(".*", "nf4", tile_size=64)]
    return vn.quant.quantize_tree({"up": up, "down": down}, rules), x


def implicit() -> Callable[[], object]:
    small, x = parameters()
    return lambda: jax.jit(vn.implicit(model))(small, x)


def high_types() -> Callable[[], object]:
    small, x = parameters()
    vn.hijax.install()
    return lambda: jax.jit(jax.grad(loss))(small, x)


def native() -> Callable[[], object]:
    def energy(w, at):
        return jnp.sum(jnp.tanh(at @ w) ** 2)

    w, at = np.eye(8, dtype=np.float32), np.ones(8, np.float32)
    compile = vn.numba.compile
    return lambda: compile(energy, w, at)(w, at)


PROGRAMS = {
    "jax.jit(vn.implicit(model))(small, x)": implicit,
    "jax.jit(jax.grad(loss))(small, x), with high types on": high_types,
    "vn.numba.compile(energy, w, at)(w, at)": native,
}


def steps(program: Callable[[], object]) -> list[str]:
    """Return the functions of veneer that a call runs, as `file:function`, by first call."""
    seen: dict[str, None] = {}

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            name = frame.f_code.co_qualname.replace("<locals>.", "")
            if name != "<module>":
                seen[f"{Path(file).relative_to(PACKAGE).as_posix()}:{name}"] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        program()
    finally:
        sys.setprofile(before)
    return list(seen)


def steps_of_cached(name: str) -> list[str]:
    """Return the steps of a call path in a second process. The first one compiles the kernels."""
    command = [sys.executable, __file__, "--program", name]
    for _ in range(2):
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout.split("\n")[:-1]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--program", help="record only this call path, in this process")
    arguments = options.parse_args()
    if arguments.program:
        print(*steps(PROGRAMS[arguments.program]()), sep="\n")
    else:
        for name in PROGRAMS:
            print(name, *steps_of_cached(name), "", sep="\n    ")
