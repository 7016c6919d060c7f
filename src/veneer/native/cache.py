"""Object files on disk that all processes of a user share, and the lock of compilation.

The files are in `$VENEER_CACHE`, or in `veneer` in the user's cache directory. They are executed,
so only the user should be able to write there.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_MAX_AGE = 30 * 24 * 3600  # seconds

#: Held while code is compiled or loaded, and during a fork. The child of a fork has one thread, so
#: nothing could release a lock of Numba, LLVM or JAX's tracing that another thread holds.
COMPILING = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=COMPILING.acquire,
        after_in_parent=COMPILING.release,
        after_in_child=COMPILING.release,
    )


class Cache:
    """A folder of object files that are compiled from one package and this one.

    The name of a file contains a fingerprint of everything that its code depends on: the sources of
    both packages, the versions of Python, Numba and NumPy, the CPU, and environment variables.

    **Arguments:**

    - `package`: the name of the package, which must be imported. Its last part is the name of the
      folder in `root()`.
    - `text`: returns a text that describes anything else that the code depends on. It becomes part
      of the fingerprint.
    """

    def __init__(self, package: str, text: Callable[[], str] = str):
        self._folder, self._text = package.rpartition(".")[2], text
        (package_folder,) = sys.modules[package].__path__
        self._packages = {Path(__file__).parent, Path(package_folder)}
        self._sources = hash_sources(self._packages)  # as they were imported

    @property
    def directory(self) -> Path:
        """The path of the folder."""
        return root() / self._folder

    def cached(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the bytes of an object file. If it is missing, call `make` and store the result.

        Errors of reading and writing are ignored, and a damaged file is made again.
        """
        with COMPILING:
            file = self._file(name)
            with contextlib.suppress(OSError, ValueError):
                return _read(file)
            content = make()
            # Do not store the code if its sources were edited after their import.
            if hash_sources(self._packages) == self._sources:
                with contextlib.suppress(OSError):
                    _write(file, hashlib.sha256(content).digest() + content)
                    _remove_old(file)
            return content

    def holds(self, name: str) -> bool:
        """Return whether the cache has an object file of this name and the current fingerprint."""
        return self._file(name).exists()

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}-{self.fingerprint}.o"

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything that compiled code depends on."""
        digest = hashlib.sha256(self._sources)
        for part in (self._text(), *_dependencies()):
            digest.update(hashlib.sha256(part.encode()).digest())
        return digest.hexdigest()[:32]


def root() -> Path:
    """Return the folder that has the folders of all caches."""
    if folder := os.environ.get("VENEER_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "veneer"


def save_isa(isa: str | None) -> None:
    """Save the vector instruction set that later processes use on CPUs with the same `host_cpu()`.

    If `isa` is None, they use the best instruction set that the CPU has.

    **Raises:** `OSError` if the cache cannot be written.
    """
    choices = _saved_isas()
    if isa is None:
        choices.pop(host_cpu(), None)
    else:
        choices[host_cpu()] = isa
    _write(root() / "isa.json", json.dumps(choices, indent=1).encode())


def saved_isa() -> str | None:
    """Return the instruction set that `save_isa` saved last for this `host_cpu()`, or None."""
    return _saved_isas().get(host_cpu())


def _saved_isas() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):  # no file, or no JSON
        saved = json.loads((root() / "isa.json").read_bytes())
        if isinstance(saved, dict):
            return {cpu: isa for cpu, isa in saved.items() if isinstance(isa, str)}
    return {}


def host_cpu() -> str:
    """Return the name that LLVM gives this CPU, with its features."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def hash_sources(folders: set[Path]) -> bytes:
    """Return a hash of all Python files in these folders and their subfolders."""
    digest = hashlib.sha256()
    for folder in sorted(folders):
        for source in sorted(folder.rglob("*.py")):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.digest()


def _dependencies() -> Iterator[str]:
    for package in ("numba", "llvmlite", "numpy"):
        yield importlib.metadata.version(package)
    yield f"{sys.version} {sys.platform} {platform.machine()}"
    yield host_cpu()
    for key, value in sorted(os.environ.items()):
        if key.startswith("NUMBA_"):
            yield f"{key}={value}"
    yield os.environ.get("VENEER_KERNELS_ISA") or saved_isa() or ""


def _remove_old(file: Path) -> None:
    """Remove object files with the same name as `file` but another fingerprint, if they are old.

    If two fingerprints are in use at the same time, each file is made again once per `_MAX_AGE`.
    """
    name = file.name.rpartition("-")[0]
    for other in file.parent.glob(f"{name}-*{file.suffix}"):
        if other != file and time.time() - other.stat().st_mtime > _MAX_AGE:
            other.unlink(missing_ok=True)


def _read(file: Path) -> bytes:
    """Read an object file and compare its hash. LLVM ends the process over a damaged file."""
    content = file.read_bytes()
    digest, code = content[:32], content[32:]
    if hashlib.sha256(code).digest() != digest:
        raise ValueError(f"{file} is damaged: its checksum does not match")
    return code


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(content)
        os.replace(temporary, file)
    except OSError:
        os.unlink(temporary)
        raise
