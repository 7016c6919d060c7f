"""Make the constants of test modules without compiling a program.

Every worker imports every test module, so a program that a module compiles on import is compiled by
every worker. NumPy computes the dense arrays here, and `jax.device_put` moves them, which compiles
nothing. All other constants are computed when a test first asks for them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

import veneer as vn

T = TypeVar("T")


def _to_jax(function: Callable[..., np.ndarray]) -> Callable[..., jax.Array]:
    """Return a function that calls a NumPy function and moves its result to JAX."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> jax.Array:
        return jax.device_put(function(*args, **kwargs))

    return call


arange = _to_jax(np.arange)
array = _to_jax(np.array)
eye = _to_jax(np.eye)
full = _to_jax(np.full)
linspace = _to_jax(np.linspace)
ones = _to_jax(np.ones)
zeros = _to_jax(np.zeros)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    """Return random normal numbers. `jax.random.normal` draws different ones."""
    return array(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def key(seed: int) -> jax.Array:
    """Return the same key as `jax.random.key`."""
    return jax.random.wrap_key_data(array([0, seed], np.uint32))


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that computes a constant at its first call, which must not be traced."""

    @functools.cache
    @functools.wraps(make)
    def made() -> T:
        constant = make()
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(constant))
        return constant

    return made


class OnDemand(Mapping[Any, Any]):
    """A mapping whose values are computed at their first access."""

    def __init__(self, makers: Mapping[Any, Callable[[], Any]]):
        self._makers = {name: once(make) for name, make in makers.items()}

    def __getitem__(self, name: Any) -> Any:
        return self._makers[name]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def quantized(qtype: str, *shape: int, tile: int | None = None, seed: int = 0) -> vn.quant.QArray:
    """Return a random int8 or 4-bit array with one scale per column, or per tile of a column."""
    random = np.random.default_rng(seed)
    *stack, rows, columns = shape
    scales = random.uniform(0.5, 1.0, (*stack, 1 if tile is None else rows // tile, columns))
    if qtype == "int8":
        codes = random.integers(-127, 128, shape, np.int8)
        return vn.quant.QArray(*jax.device_put((codes, scales / 127)), qtype="int8")
    pairs = random.integers(0, 256, (*shape[:-1], columns // 2), np.uint8)
    packing = vn.quant.Packing(axis=-1, size=columns)
    leaves = jax.device_put((pairs, scales))
    return vn.quant.QArray.from_packed(*leaves, qtype=qtype, packing=packing)
