"""Compare the cost of dispatch in veneer, Quax and eformer.

    python benchmarks/peers.py [FOLDER]    # ten minutes; the first run also installs the libraries

All libraries run the same array type (`lora.py`) on the same model (`dispatch.py`). Quax and
eformer need different versions of plum, so each gets its own virtual environment, with the version
of JAX that runs this program. FOLDER keeps the environments for the next run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from venv import EnvBuilder

import jax
from measure import markdown_table, parser

HERE = Path(__file__).parent
PEERS = {"quax": "quax==0.4.6", "eformer": "eformer==0.0.101"}


def make_environment(folder: Path, requirement: str) -> Path:
    """Install the requirement into a virtual environment. Return its interpreter."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        EnvBuilder(with_pip=True).create(folder)
    wanted = [requirement, f"jax=={jax.__version__}"]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)
    return python


def measure_in(python: Path, library: str, *, rounds: int) -> dict[str, str]:
    """Measure a library with an interpreter. Return its figures by row of the table."""
    command = [str(python), str(HERE / "dispatch.py"), "json", "--library", library]
    done = subprocess.run(
        [*command, "--rounds", str(rounds)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def main(folder: Path, *, rounds: int) -> None:
    figures = {"veneer": measure_in(Path(sys.executable), "veneer", rounds=rounds)}
    for name, requirement in PEERS.items():
        python = make_environment(folder / name, requirement)
        figures[requirement.replace("==", " ")] = measure_in(python, name, rounds=rounds)
    rows = [[row, *(f.get(row, "") for f in figures.values())] for row in figures["veneer"]]
    print(markdown_table(["", *figures], rows))


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("folder", nargs="?", type=Path, help="where to keep the environments")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary), rounds=arguments.rounds)
