"""Compiled kernels on disk, for all processes of a user.

They are in `$VENEER_CACHE`, or `veneer` in the user's cache directory. Nobody else should be able
to write there, as what is read is run.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .ffi_header import header_text

_KEPT = 30 * 24 * 3600  # seconds


def cached(name: str, make: Callable[[], bytes]) -> bytes:
    """Returns what the cache has of this name, or else makes it and puts it there.

    It is made again when something changes that it may depend on: the kernels' sources, the CPU,
    Numba. A cache that cannot be read or written, or is damaged, only costs time.
    """
    unchanged = lambda: _sources() == _SOURCES  # or who edits them would find what was before
    return kept(directory() / f"{name}-{_fingerprint()}.o", make, unchanged)


def kept(file: Path, make: Callable[[], bytes], if_: Callable[[], bool] = lambda: True) -> bytes:
    """Returns what a file has, or else makes it and puts it there, if it should be kept."""
    with contextlib.suppress(OSError, ValueError):
        return _read(file)
    content = make()
    if if_():
        with contextlib.suppress(OSError):
            _write(file, content)
            _remove_old(file)
    return content


def _remove_old(file: Path) -> None:
    """Removes what was made long ago under another fingerprint: of other sources, or another CPU.

    Two that are in use at the same time are made again at most once in so many days.
    """
    name = file.name.rpartition("-")[0]
    for other in file.parent.glob(f"{name}-*{file.suffix}"):
        if other != file and time.time() - other.stat().st_mtime > _KEPT:
            other.unlink(missing_ok=True)


def directory() -> Path:
    """Returns where compiled kernels are kept."""
    own = os.environ.get("VENEER_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return (Path(own) if own else Path(shared) / "veneer") / "kernels"


@functools.cache
def _fingerprint() -> str:
    """Of all that compiled code depends on."""
    digest = hashlib.sha256()
    for part in _dependencies():
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _sources() -> bytes:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.digest()


_SOURCES = _sources()


def _dependencies() -> Iterator[bytes]:
    from . import machine_code

    yield _SOURCES
    yield header_text().encode()
    for package in ("numba", "llvmlite"):
        yield importlib.metadata.version(package).encode()
    yield f"{sys.version} {sys.platform} {platform.machine()}".encode()
    yield machine_code.host().encode()
    for key, value in sorted(os.environ.items()):
        if key == "VENEER_KERNELS_ISA" or key.startswith("NUMBA_"):
            yield f"{key}={value}".encode()


def _read(file: Path) -> bytes:
    """An object file that is whole: LLVM ends the process over one that is not."""
    content = file.read_bytes()
    digest, code = content[:32], content[32:]
    if hashlib.sha256(code).digest() != digest:
        raise ValueError(f"{file} is damaged")
    return code


def _write(file: Path, code: bytes) -> None:
    """Writes an object file after its digest; who reads at the same time sees all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(hashlib.sha256(code).digest() + code)
        os.replace(aside, file)
    except OSError:
        os.unlink(aside)
        raise
