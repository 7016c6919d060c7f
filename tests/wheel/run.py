"""Install the wheel in empty environments, and try it: `make test-wheel`.

There is one environment for each extra, and one without extras. In each, the package is imported
from the wheel, and the first program of the README runs. Extras can be named: `make test-wheel
ARGS='none numba'`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A program that needs each extra.
EXTRAS = {
    "none": "import sys; assert 'numba' not in sys.modules",
    "numba": "assert vn.numba.compile(lambda x: x + 1, 1.0)(2.0) == 3",
    "interop": "vn.save('small', small); vn.load('small')",
    "cli": "from veneer.cli import main",
    "demo": "import veneer.demo; from veneer.cli import main",
    "examples": "import optax, sklearn",
    "pytensor": "import veneer.interop.pytensor",
    "units": "import veneer.interop.quax, unxt",
}


def run(*command: object, within: Path) -> None:
    subprocess.run([str(part) for part in command], cwd=within, check=True)


def first_program() -> str:
    """Return the first program of the README."""
    readme = (ROOT / "README.md").read_text("utf-8")
    match = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert match
    return match[1]


def try_extra(extra: str, wheel: Path, jax: str, folder: Path) -> None:
    """Install the wheel with an extra, and run its program in an empty folder."""
    run(sys.executable, "-m", "venv", folder / "environment", within=folder)
    python = folder / "environment" / "bin" / "python"
    what = wheel if extra == "none" else f"{wheel}[{extra}]"
    run(
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what, jax),
        within=folder,
    )
    inside = f"import veneer; assert veneer.__file__.startswith({str(folder)!r}), veneer.__file__"
    program = folder / "first_program.py"
    program.write_text(f"{first_program()}\n{inside}\n{EXTRAS[extra]}\n", "utf-8")
    run(python, "-I", program, within=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", default=[*EXTRAS], metavar="EXTRA")
    parser.add_argument("--jax", default="jax", help="the JAX to install, as jax==0.11.0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        run(sys.executable, "-m", "build", "--outdir", root, ROOT, within=root)
        (wheel,) = root.glob("*.whl")
        for extra in arguments.extras:
            start = time.perf_counter()
            folder = root / extra
            folder.mkdir()
            try_extra(extra, wheel, arguments.jax, folder)
            print(f"{extra}: installed and ran in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
