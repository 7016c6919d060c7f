"""The same measurements for Quax and eformer, in a table beside ours.

The two need different versions of plum, so each gets an environment of its own, with the JAX that
runs this program. Environments stay in FOLDER for the next time, or in a temporary folder for none.
All three run the same array type (`w + a @ b`, one rule for `dot_general`) on the same model.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from venv import EnvBuilder

import jax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from measure import markdown_table, parser  # noqa: E402  # it is found by the line above

PEERS = {"quax": "quax==0.4.6", "eformer": "eformer==0.0.101"}


def make_environment(folder: Path, requirement: str) -> Path:
    """The interpreter of an environment in which the requirement is installed."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        EnvBuilder(with_pip=True).create(folder)
    wanted = [requirement, f"jax=={jax.__version__}"]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)
    return python


def measure_in(python: Path, program: str, *, rounds: int) -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(python), str(HERE / f"{program}_lora.py"), "--rounds", str(rounds)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def main(folder: Path, *, rounds: int) -> None:
    found = {"veneer": measure_in(Path(sys.executable), "veneer", rounds=rounds)}
    for name, requirement in PEERS.items():
        python = make_environment(folder / name, requirement)
        found[requirement.replace("==", " ")] = measure_in(python, name, rounds=rounds)
    print(
        markdown_table(
            ["", *found],
            [[row, *(f.get(row, "") for f in found.values())] for row in found["veneer"]],
        )
    )


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("folder", nargs="?", type=Path, help="where to keep the environments")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary), rounds=arguments.rounds)
