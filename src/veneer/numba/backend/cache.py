"""Object code of programs on disk, for all processes of a user."""

from collections.abc import Callable

from ...native.cache import Cache

CACHE = Cache("numba", "veneer.numba")


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """What the cache has under a key, or else makes it and puts it there."""
    return CACHE.cached(key[:32], make)
