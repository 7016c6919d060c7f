"""Count the files and functions of veneer that run in one call: its call path.

Each call path is traced in two new processes. The first one compiles kernels into the cache, and
the second one is counted.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import markdown_table, parser

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
    """Return the steps of a call path in a process that finds its kernels compiled."""
    command = [sys.executable, __file__, "--program", name]
    for _ in range(2):
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout.split("\n")[:-1]


def files(steps: list[str]) -> list[str]:
    return list(dict.fromkeys(step.partition(":")[0] for step in steps))


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--program", help="print only the steps of this call path")
    options.add_argument("--steps", action="store_true", help="print the steps of all call paths")
    arguments = options.parse_args()
    if arguments.program:
        print(*steps(PROGRAMS[arguments.program]()), sep="\n")
        sys.exit()
    rows = []
    for name in PROGRAMS:
        path = steps_of_cached(name)
        rows.append([f"`{name}`", str(len(files(path))), str(len(path))])
        if arguments.steps:
            print(name, *path, "", sep="\n    ")
    print(markdown_table(["call", "files", "functions"], rows))
