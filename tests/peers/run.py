"""The suites of Quax, quaxed, unxt and Qwix's core on ours: `make test-peers`.

Their sources are fetched by pip, as data, in the versions that are installed here (of which
`pyproject.toml` names each in the extra `peers`), into the environment that runs this. Qwix's tests
are in its repository alone: git clones it there, and where it cannot, that suite is not run, which
is said. Arguments are passed on to pytest: `make test-peers ARGS='-k matmul'`.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # for the package `support`
SOURCES = Path(sys.prefix) / "peers"

# Where the tests of each lie; of unxt, the benchmarks do too.
SUITES = {
    "quax": ["tests/unit", "tests/usage"],
    "quaxed": ["tests/unit"],
    "unxt": ["tests/unit", "tests/integration"],
    "qwix": ["tests/_src/core"],
}

# Where the tests are that are in no distribution, by the tag that is the version.
REPOSITORIES = {"qwix": "https://github.com/google/qwix"}


from support import environment  # noqa: E402


def source(name: str) -> Path:
    """The folder of a package's sources, fetched if they are not there."""
    folder = SOURCES / f"{name}-{version(name)}"
    if not folder.exists():
        # pip asks the package's build for its metadata, and what that needs is in the extra.
        fetch = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest"]
        fetch += [str(SOURCES), "--no-binary", name, "--no-build-isolation"]
        subprocess.run(
            [sys.executable, "-m", "pip", *fetch, f"{name}=={version(name)}"], check=True
        )
        with tarfile.open(folder.with_name(f"{folder.name}.tar.gz")) as archive:
            archive.extractall(SOURCES, filter="data")
    return folder


def clone(name: str) -> Path | None:
    """The folder of a package's repository, cloned if it is not there; None if it cannot be."""
    folder = SOURCES / f"{name}-{version(name)}"
    if not folder.exists():
        how = ["clone", "--quiet", "--depth", "1", "--branch", version(name)]
        git = ["git", "-c", "advice.detachedHead=false", *how, REPOSITORIES[name], str(folder)]
        if subprocess.run(git, check=False).returncode:
            return None
    return folder


def run(name: str, arguments: list[str]) -> int:
    """Runs the suite of a package on ours; returns the exit status of pytest."""
    print(f"\n{name} {version(name)}", flush=True)
    folder = clone(name) if name in REPOSITORIES else source(name)
    if folder is None:
        print(f"NOT RUN: its tests are at {REPOSITORIES[name]}, which git could not clone")
        return 0
    of_version = HERE / "expected" / f"{name}-{version(name)}.toml"  # if versions differ
    expected = of_version if of_version.exists() else HERE / "expected" / f"{name}.toml"
    left_out = tomllib.loads(expected.read_text(encoding="utf-8")).get("left_out", [])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "verdicts"]
    command += ["--expected", str(expected)]
    if name == "qwix":
        command += ["-p", "qwix_names", "-o", "python_files=*_test.py"]
    else:
        command += ["-p", "stand_in", "--quax", str(source("quax") / "src" / "quax")]
    # Their settings hold, but for the plugins that their options name, and for the examples in
    # their documentation.
    command += ["-c", "pyproject.toml", "-o", "addopts=", "-o", "pythonpath="]
    command += ["--rootdir", ".", "--confcutdir", "tests"]
    # Another worker is writing the file of that program: JAX compiles it again.
    command += ["-W", "ignore:Error (reading|writing) persistent compilation cache entry"]
    command += [f"--ignore={path}" for group in left_out for path in group["files"]]
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environ = {
        "JAX_PLATFORMS": "cpu",
        "UNXT_ENABLE_RUNTIME_TYPECHECKING": "beartype.beartype",  # as unxt's own settings have it
        "PYTHONHASHSEED": "0",  # quaxed takes cases from sets, and workers must agree on them
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    if name == "quax":  # as its own CI does
        environ["JAX_CHECK_TRACER_LEAKS"] = "1"
    environment.set_defaults(environ)
    command += [*arguments, *SUITES[name]]
    return subprocess.run(command, cwd=folder, env=environ, check=False).returncode


if __name__ == "__main__":
    # All are run, whatever fails. 5 is that -k left no test.
    codes = [run(name, sys.argv[1:]) for name in SUITES]
    sys.exit(any(code not in (0, 5) for code in codes))
