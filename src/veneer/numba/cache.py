"""Object code of programs on disk, for all processes of a user."""

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

from ..kernels.cpu import cache, machine_code


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """What the cache has under a key, or else makes it and puts it there.

    It is made again when what it depends on changes: this package, Numba, the CPU.
    """
    return cache.kept(cache.directory().parent / "numba" / f"{key[:32]}-{_fingerprint()}.o", make)


def _sources() -> bytes:
    digest = hashlib.sha256()
    kernels = Path(cache.__file__).parent
    for source in sorted([*Path(__file__).parent.rglob("*.py"), *kernels.glob("*.py")]):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.digest()


#: As they were imported: an upgrade while this process runs is of no concern to what it compiles.
_SOURCES = _sources()


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256(_SOURCES)
    digest.update(machine_code.host().encode())
    own = [x for x in os.environ.items() if x[0].startswith("NUMBA_")]
    # That which products of matrices are compiled for; see `simd_products`.
    digest.update(f"{sorted(own)}{os.environ.get('VENEER_KERNELS_ISA')}".encode())
    return digest.hexdigest()[:32]
