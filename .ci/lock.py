"""Write .ci/constraints-oldest.txt: `make lock PYTHON=python3.11`.

The file pins every package that CI installs with the oldest Python and the oldest JAX, so that a
new release of a dependency cannot break the checks of an unrelated change. On the newest Python, CI
and the nightly workflow install the newest releases.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / ".ci" / "constraints-oldest.txt"
GROUPS = ("bench", "docs", "peers")  # bench and peers include dev

HEADER = """\
# The versions that CI installs with JAX {jax}. To update: make lock PYTHON=python{python}
"""


def main() -> None:
    """Let pip resolve the requirements, and write the versions that it chooses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    if python != "{}.{}".format(*sys.version_info):
        sys.exit(f"the constraints are for Python {python}: make lock PYTHON=python{python}")
    jax = oldest_jax(project["dependencies"])
    report = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        + [option for group in GROUPS for option in ("--group", group)]
        + ["--report", "-", "--editable", ".[demo]", f"jax=={jax}"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    packages = [package["metadata"] for package in json.loads(report)["install"]]
    pins = [f"{p['name']}=={p['version']}" for p in packages if p["name"] != project["name"]]
    lines = "\n".join(sorted(pins, key=str.lower))
    TARGET.write_text(f"{HEADER.format(python=python, jax=jax)}{lines}\n", "utf-8")
    print(f"{TARGET.relative_to(ROOT)}: {len(pins)} packages")


def oldest_jax(dependencies: list[str]) -> str:
    """Return the lower bound of JAX."""
    (bound,) = (match[1] for d in dependencies if (match := re.match(r"jax>=([\d.]+)", d)))
    return bound


if __name__ == "__main__":
    main()
