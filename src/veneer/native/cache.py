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

_KEPT = 30 * 24 * 3600  # seconds

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
    """Object files of one folder of the cache, that are compiled from one package and this one.

    A file is named after all that it may depend on, and made again when that changes: every source
    of these packages, Numba, the CPU, the variables that either is told by, and what was chosen.

    **Arguments:**

    - `folder`: in `root()`.
    - `package`: the name of the package, which is imported.
    - `text`: of what else compiled code depends on.
    """

    def __init__(self, folder: str, package: str, text: Callable[[], str] = str):
        self._folder, self._text = folder, text
        self._packages = {Path(__file__).parent, _folder_of(package)}
        self._sources = sources(self._packages)  # as they were imported

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return root() / self._folder

    def cached(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Returns what the cache has of this name, or else makes it and puts it there.

        A cache that cannot be read or written, or is damaged, only costs time.
        """
        with COMPILING:
            file = self._file(name)
            with contextlib.suppress(OSError, ValueError):
                return _read(file)
            content = make()
            # Or who edits them would find what was before.
            if sources(self._packages) == self._sources:
                with contextlib.suppress(OSError):
                    _write(file, hashlib.sha256(content).digest() + content)
                    _remove_old(file)
            return content

    def holds(self, name: str) -> bool:
        """Return whether the cache has an object file of this name."""
        return self._file(name).exists()

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}-{self.fingerprint}.o"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that compiled code depends on."""
        digest = hashlib.sha256(self._sources)
        for part in (self._text(), *_dependencies()):
            digest.update(hashlib.sha256(part.encode()).digest())
        return digest.hexdigest()[:32]


def root() -> Path:
    """Returns where all that is compiled is kept."""
    chosen = os.environ.get("VENEER_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(shared) / "veneer"


def save_isa(isa: str | None) -> None:
    """Has processes on CPUs like this one use these vector instructions; None: the best there are.

    **Raises:** `OSError` where the cache cannot be written.
    """
    choices = _choices()
    if isa is None:
        choices.pop(host_cpu(), None)
    else:
        choices[host_cpu()] = isa
    _write(root() / "isa.json", json.dumps(choices, indent=1).encode())


def saved_isa() -> str | None:
    """Returns what `save_isa` was told last on a CPU like this one, or None."""
    return _choices().get(host_cpu())


def _choices() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):  # there are none, or none that make sense
        found = json.loads((root() / "isa.json").read_bytes())
        if isinstance(found, dict):
            return {cpu: isa for cpu, isa in found.items() if isinstance(isa, str)}
    return {}


def host_cpu() -> str:
    """Return the name that LLVM gives this CPU, with its features."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def sources(folders: set[Path]) -> bytes:
    """Returns a digest of all Python files of packages, and of the packages in them."""
    digest = hashlib.sha256()
    for folder in sorted(folders):
        for source in sorted(folder.rglob("*.py")):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.digest()


def _folder_of(package: str) -> Path:
    (folder,) = sys.modules[package].__path__
    return Path(folder)


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
    """Removes what was made long ago under another fingerprint: of other sources, or another CPU.

    Two that are in use at the same time are made again at most once in so many days.
    """
    name = file.name.rpartition("-")[0]
    for other in file.parent.glob(f"{name}-*{file.suffix}"):
        if other != file and time.time() - other.stat().st_mtime > _KEPT:
            other.unlink(missing_ok=True)


def _read(file: Path) -> bytes:
    """An object file after its digest: LLVM ends the process over one that is not whole."""
    content = file.read_bytes()
    digest, code = content[:32], content[32:]
    if hashlib.sha256(code).digest() != digest:
        raise ValueError(f"{file} is damaged: its checksum does not match")
    return code


def _write(file: Path, content: bytes) -> None:
    """Writes a file; who reads at the same time sees all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(content)
        os.replace(aside, file)
    except OSError:
        os.unlink(aside)
        raise
