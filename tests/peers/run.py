"""Run the suites of Quax, quaxed, unxt, Qwix, eformer and PyTensor on ours: `make test-peers`.

pip fetches the sources, in the versions that are installed here, into the environment that runs
this. The tests of Qwix, eformer and PyTensor are only in their repositories. git fetches those. If
it cannot, that suite is not run, and a line says so. Arguments are passed on to pytest, after names
of suites to run: `make test-peers ARGS='quax -k matmul'`.

The environment variable QWIX names a checkout of Qwix's main branch, to run its package and tests
instead: `make test-peers QWIX=../qwix`. PyTensor holds Numba to an older version, so its suite
needs an environment with the group `test` and the extra `pytensor`, which make does not create:
`python tests/peers/run.py pytensor`.
"""

import itertools
import os
import shutil
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

# The test folders of each package. The tests of unxt include benchmarks.
SUITES = {
    "quax": ["tests/unit", "tests/usage"],
    "quaxed": ["tests/unit"],
    "unxt": ["tests/unit", "tests/integration"],
    "qwix": ["tests/_src/core"],
    "eformer": ["tests/ops/quantization"],
    "pytensor": ["tests/link/jax", "tests/link/numba"],
}

# Repositories whose tests are in no distribution. The tag of the installed version is fetched, or a
# commit of COMMITS.
REPOSITORIES = {
    "qwix": "https://github.com/google/qwix",
    "eformer": "https://github.com/erfanzar/eformer",
    "pytensor": "https://github.com/pymc-devs/pytensor",
}
COMMITS = {
    "eformer": "4b17881393601885298725e5aef82592c325f19a",
    "pytensor": "f857e69611b9e36be2443f8e1905f5aa484aa455",
}
# Only the tests of these packages are checked out. Otherwise Python would import the package
# beside them instead of the installed one.
ONLY_TESTS = {"pytensor": ["tests", "pyproject.toml"]}


from support import environment  # noqa: E402


def source(name: str) -> Path:
    """Return the folder of a package's sources. Fetch them if they are missing."""
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


def revision(name: str) -> str:
    """Return the commit of a repository, or the version of a package that is installed."""
    return COMMITS.get(name) or version(name)


def clone(name: str) -> Path | None:
    """Return the folder of a repository. Fetch it if it is missing. None if git fails."""
    folder = SOURCES / f"{name}-{revision(name)}"
    if not folder.exists():
        only = ONLY_TESTS.get(name)
        fetched = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(fetched, ignore_errors=True)
        git = ["git", "-C", str(fetched), "-c", "advice.detachedHead=false"]
        for command in (
            ["git", "init", "--quiet", str(fetched)],
            [*git, "fetch", "--quiet", "--depth", "1", REPOSITORIES[name], revision(name)],
            [*git, "checkout", "--quiet", "FETCH_HEAD", *(["--", *only] if only else [])],
        ):
            if subprocess.run(command, check=False).returncode:
                return None
        fetched.rename(folder)
    return folder


def run(name: str, arguments: list[str]) -> int:
    """Run the suite of a package on ours. Return the exit status of pytest."""
    if name == "pytensor" and not find_spec(name):
        print("\npytensor\nNOT RUN: it is missing: pip install '.[pytensor]' --group test")
        return 0
    checkout = os.environ.get("QWIX") if name == "qwix" else None
    print(f"\n{name} {checkout or revision(name)}", flush=True)
    if checkout is not None:
        folder: Path | None = Path(checkout).resolve(strict=True)
    else:
        folder = clone(name) if name in REPOSITORIES else source(name)
    if folder is None:
        print(f"NOT RUN: its tests are at {REPOSITORIES[name]}, which git could not fetch")
        return 0
    of_version = "main" if checkout else revision(name)
    expected = HERE / "expected" / f"{name}-{of_version}.toml"
    if not expected.exists():  # the same for all versions
        expected = HERE / "expected" / f"{name}.toml"
    left_out = tomllib.loads(expected.read_text(encoding="utf-8")).get("left_out", [])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "verdicts"]
    command += ["--expected", str(expected)]
    if name == "qwix":
        command += ["-p", "qwix_names", "-o", "python_files=*_test.py"]
    elif name == "eformer":
        command += ["-p", "jaximus_names"]
    elif name == "pytensor":
        command += ["-p", "pytensor_compare", "-m", "not slow"]
    else:
        command += ["-p", "stand_in", "--quax", str(source("quax") / "src" / "quax")]
    # Their settings apply, except the plugins in their options and the examples in
    # their documentation.
    command += ["-c", "pyproject.toml", "-o", "addopts=", "-o", "pythonpath="]
    command += ["--rootdir", ".", "--confcutdir", "tests"]
    # Another worker is writing the file of that program: JAX compiles it again.
    command += ["-W", "ignore:Error (reading|writing) persistent compilation cache entry"]
    command += [f"--ignore={path}" for group in left_out for path in group["files"]]
    paths = [str(HERE), str(folder) if checkout else "", os.environ.get("PYTHONPATH", "")]
    environ = {
        "JAX_PLATFORMS": "cpu",
        "UNXT_ENABLE_RUNTIME_TYPECHECKING": "beartype.beartype",  # as unxt's own settings have it
        "PYTHONHASHSEED": "0",  # quaxed takes cases from sets, and workers must agree on them
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    if name == "quax":  # as its own CI does
        environ["JAX_CHECK_TRACER_LEAKS"] = "1"
    if name == "eformer":  # a test of sharding is skipped on one device
        environ["JAX_NUM_CPU_DEVICES"] = "2"
    environment.set_defaults(environ)
    command += [*arguments, *SUITES[name]]
    return subprocess.run(command, cwd=folder, env=environ, check=False).returncode


if __name__ == "__main__":
    # Run all suites, even if one fails. Status 5 means that -k selected no test.
    chosen = list(itertools.takewhile(SUITES.__contains__, sys.argv[1:]))
    arguments = sys.argv[1 + len(chosen) :]
    codes = [run(name, arguments) for name in chosen or SUITES]
    sys.exit(any(code not in (0, 5) for code in codes))
