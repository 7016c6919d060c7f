"""Random keys, as in `quax.examples.prng`."""

# Equinox lets `__init__` assign the fields of a frozen module.
# mypy: disable-error-code="misc"

import abc
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ...._core.rules import register as register_ours
from ...._core.surface.array import ImplicitArray
from ...._core.trace import redispatch
from ..core import ArrayValue, register

__all__ = ["PRNG", "ThreeFry", "normal", "split", "uniform"]

_IMPL = "threefry2x32"
PRNG_T = TypeVar("PRNG_T", bound="PRNG")


class PRNG(ArrayValue):
    """A base class for types of random keys. Define `random_bits`, `split` and `aval`."""

    def materialise(self) -> Any:
        """Raise a `TypeError`, because a key has no dense array."""
        raise TypeError(
            f"a {type(self).__name__} is a random key and has no dense array. Draw numbers with "
            "uniform or normal, or select between keys with jnp.where"
        )

    @abc.abstractmethod
    def random_bits(self, bit_width: int, shape: tuple[int, ...]) -> Array:
        """Return random bits, as an array of unsigned integers with a given width and shape."""

    @abc.abstractmethod
    def split(self: PRNG_T, num: int) -> Sequence[PRNG_T]:
        """Return `num` new keys."""


class ThreeFry(PRNG):
    """A key of JAX's own generator, stored as its integers. `veneer.types.PRNGKey` is similar.

    **Arguments:**

    - `seed`: an integer.

    >>> import jax, veneer.interop.quax as quax
    >>> prng = quax.examples.prng
    >>> bool(prng.uniform(prng.ThreeFry(0)) == jax.random.uniform(jax.random.key(0)))
    True
    """

    value: Array  # uint32[*batch, 2]

    def __init__(self, seed: ArrayLike):
        self.value = jax.random.key_data(jax.random.key(seed, impl=_IMPL))

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        return jax.core.ShapedArray(self.value.shape[:-1], jnp.uint32)

    def _typed(self) -> Any:
        return jax.random.wrap_key_data(self.value, impl=_IMPL)

    def random_bits(self, bit_width: int, shape: tuple[int, ...]) -> Array:
        """Return random bits, as `jax.random.bits` draws them."""
        return jax.random.bits(self._typed(), shape, f"uint{bit_width}")

    def split(self, num: int) -> Sequence["ThreeFry"]:
        """Return `num` new keys, as `jax.random.split` does."""
        data = jax.random.key_data(jax.random.split(self._typed(), num))
        return [eqx.tree_at(lambda key: key.value, self, row) for row in data]


class _AsTypedKey(ImplicitArray):
    """A `PRNG` that the functions of `jax.random` take as a typed key."""

    key: Any

    def aval(self) -> jax.core.ShapedArray:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=_IMPL)).dtype
        return jax.core.ShapedArray((), dtype)


@register_ours("random_bits")
def _(key: _AsTypedKey, *, bit_width: int, shape: tuple[int, ...]) -> Any:
    return key.key.random_bits(bit_width, shape)


@register_ours("random_split")
def _(key: _AsTypedKey, *, shape: tuple[int, ...]) -> Any:
    del shape
    raise TypeError("a PRNG is split by its own method, into a sequence of keys")


def uniform(
    key: PRNG,
    shape: tuple[int, ...] = (),
    dtype: Any = float,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
) -> Array:
    """Draw from `[minval, maxval)` as `jax.random.uniform` does, with random bits from `key`."""
    draw = lambda key: jax.random.uniform(key, shape, dtype, minval, maxval)
    return redispatch(draw, _AsTypedKey(key))


def normal(key: PRNG, shape: tuple[int, ...] = (), dtype: Any = float) -> Array:
    """Draw from the normal distribution as `jax.random.normal` does, with random bits from `key`.

    **Raises:** `ValueError` if `dtype` is neither float nor complex.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = jnp.finfo(dtype).dtype
        parts = [normal(part, shape, real) for part in split(key)]
        return (lax.complex(*parts) / jnp.sqrt(2).astype(real)).astype(dtype)
    return redispatch(lambda key: jax.random.normal(key, shape, dtype), _AsTypedKey(key))


def split(key: PRNG_T, num: int = 2) -> Sequence[PRNG_T]:
    """Return `num` new keys, by the method `split` of the key."""
    return key.split(num)


@register(lax.select_n_p)
def _(which: Any, *cases: PRNG) -> PRNG:
    def select(*leaves: Array) -> Array:
        shape = (*jnp.shape(which), *[1] * (leaves[0].ndim - jnp.ndim(which)))
        by_entry = jnp.broadcast_to(jnp.reshape(which, shape), leaves[0].shape)
        return lax.select_n(which if jnp.ndim(which) == 0 else by_entry, *leaves)

    return jax.tree.map(select, *cases)
