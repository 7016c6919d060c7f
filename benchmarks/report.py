"""Runs every benchmark, and writes what it prints into docs/benchmarks.md."""

import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from measure import parser

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


def printed_by(program: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / program), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def fill(page: str, name: str, text: str) -> str:
    """The page with the text between `<!-- name -->` and `<!-- end -->`."""
    start = re.escape(f"<!-- {name} -->")
    filled, count = re.subn(
        rf"({start}\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}\n{text}\n\n{m[2]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for {name}, not one")
    return filled


def main(folder: str, *, rounds: int) -> None:
    page = PAGE.read_text("utf-8")
    python, backend = platform.python_version(), jax.default_backend()
    page = fill(page, "made with", f"JAX {jax.__version__}, Python {python}, {backend}.")
    for program in sorted(re.findall(r"<!-- (\S+\.py) -->", page)):
        print(program, flush=True)
        extra = [folder] if program.startswith("peers/") else []
        page = fill(page, program, printed_by(program, "--rounds", str(rounds), *extra))
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--peers", help="where to keep the environments of the peers")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.peers or temporary, rounds=arguments.rounds)
