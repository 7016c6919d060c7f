"""The suites of Quax, quaxed, unxt, Qwix's core and PyTensor's JAX and Numba: `make test-peers`.

Their sources are fetched by pip, as data, in the versions that are installed here (of which
`pyproject.toml` names each in the extra `peers`), into the environment that runs this. Qwix's tests
are in its repository alone: git clones it there, and where it cannot, that suite is not run, which
is said. Arguments are passed on to pytest: `make test-peers ARGS='-k matmul'`. PyTensor holds Numba
to an older version, so its suite needs an environment with `veneer[test,pytensor]`:
`python tests/peers/run.py pytensor`. Names of suites before the arguments choose among them.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
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
    "pytensor": ["tests/link/jax", "tests/link/numba"],
}

# Where the tests are that are in no distribution, by the tag that is the version.
REPOSITORIES = {
    "qwix": "https://github.com/google/qwix",
    "pytensor": "https://github.com/pymc-devs/pytensor",
}
# The commit that `expected/pytensor.toml` is of. Only its tests are fetched, because Python would
# import a package beside them in the place of the one that is installed.
PYTENSOR = "f857e69611b9e36be2443f8e1905f5aa484aa455"


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


def fetch_tests(name: str) -> Path | None:
    """Return the folder of PyTensor's tests, fetched if they are missing, or None."""
    folder = SOURCES / f"{name}-{PYTENSOR[:12]}"
    if not (folder / "tests").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", REPOSITORIES[name], PYTENSOR],
            ["checkout", "--quiet", "FETCH_HEAD", "--", "tests", "pyproject.toml"],
        ):
            if subprocess.run(["git", *command], cwd=folder, check=False).returncode:
                return None
    return folder


def run(name: str, arguments: list[str]) -> int:
    """Runs the suite of a package on ours; returns the exit status of pytest."""
    if name == "pytensor" and not find_spec(name):
        print("\npytensor\nNOT RUN: it is not installed here: pip install '.[test,pytensor]'")
        return 0
    print(f"\n{name} {version(name)}", flush=True)
    fetch = fetch_tests if name == "pytensor" else clone if name in REPOSITORIES else source
    folder = fetch(name)
    if folder is None:
        print(f"NOT RUN: its tests are at {REPOSITORIES[name]}, which git could not clone")
        return 0
    expected = HERE / "expected" / f"{name}.toml"
    left_out = tomllib.loads(expected.read_text(encoding="utf-8")).get("left_out", [])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "verdicts"]
    command += ["--expected", str(expected)]
    if name == "qwix":
        command += ["-p", "qwix_names", "-o", "python_files=*_test.py"]
    elif name == "pytensor":
        command += ["-p", "pytensor_compare", "-m", "not slow"]
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
    chosen = [name for name in sys.argv[1:] if name in SUITES]
    arguments = [argument for argument in sys.argv[1:] if argument not in SUITES]
    codes = [run(name, arguments) for name in chosen or SUITES]
    sys.exit(any(code not in (0, 5) for code in codes))
