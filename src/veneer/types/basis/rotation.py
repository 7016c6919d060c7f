"""The rotation of a dense array: signs, and a Kronecker product of Hadamard and Hartley matrices.

Of any length, fast: of its prime factors, as many as make up to 64 are one matrix, and an axis is
gone through by one after the other. QuaRot (Ashkboos et al., arXiv 2404.00456) rotates activations
so, by Hadamard matrices and random signs (QuIP#, arXiv 2402.04396), to spread what stands out.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LARGEST = 64


def rotated(x: jax.Array, axis: int) -> jax.Array:
    """Returns `T @ x` along an axis, for T orthogonal and the same for each length.

    **Arguments:**

    - `x`: floating or complex; of halves, what is between is in f32.

    >>> import jax.numpy as jnp
    >>> from veneer.types.basis.rotation import rotated, rotated_back
    >>> peak = jnp.zeros(64).at[5].set(8.0)
    >>> float(abs(rotated(peak, 0)).max()), float(rotated_back(rotated(peak, 0), 0)[5])
    (1.0, 8.0)
    """
    signs = _along(_signs(x.shape[axis]), axis, x.ndim)
    return _mixed(x * signs.astype(x.dtype), axis)


def rotated_back(x: jax.Array, axis: int) -> jax.Array:
    """Returns `T.T @ x` along an axis, which undoes `rotated`."""
    signs = _along(_signs(x.shape[axis]), axis, x.ndim)
    return _mixed(x, axis) * signs.astype(x.dtype)


def _mixed(x: jax.Array, axis: int) -> jax.Array:
    """The product with a symmetric and orthogonal matrix along an axis."""
    axis, dtype = axis % x.ndim, x.dtype
    sizes = factors(x.shape[axis])
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    wide = x.astype(jnp.promote_types(dtype, jnp.float32)).reshape(*before, *sizes, *after)
    for i, size in enumerate(sizes):
        matrix = jnp.asarray(_symmetric(size), wide.dtype)
        product = lax.dot_general(
            wide, matrix, (([axis + i], [0]), ([], [])), precision=lax.Precision.HIGHEST
        )
        wide = jnp.moveaxis(product, -1, axis + i)
    return wide.reshape(x.shape).astype(dtype)


@functools.cache
def factors(n: int) -> tuple[int, ...]:
    """Returns sizes whose product is n, up to 64 or prime.

    >>> from veneer.types.basis.rotation import factors
    >>> factors(4096), factors(384), factors(1), factors(67 * 4)
    ((64, 64), (48, 8), (1,), (67, 4))
    """
    sizes = [1]
    for prime in sorted(_primes(n), reverse=True):
        if sizes[-1] > 1 and sizes[-1] * prime > _LARGEST:
            sizes.append(1)
        sizes[-1] *= prime
    return tuple(sizes)


def _primes(n: int) -> list[int]:
    primes, divisor = [], 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            primes.append(divisor)
            n //= divisor
        divisor += 1
    return primes + [n] * (n > 1)


@functools.lru_cache(maxsize=64)
def _symmetric(n: int) -> np.ndarray:
    """A Hadamard matrix for each 2 in n, and a Hartley matrix of each other prime."""
    matrix: np.ndarray = np.ones((1, 1))
    for prime in _primes(n):
        angles = 2 * math.pi * np.outer(np.arange(prime), np.arange(prime)) / prime
        matrix = np.kron(matrix, (np.cos(angles) + np.sin(angles)) / math.sqrt(prime))
    return matrix


@functools.lru_cache(maxsize=64)
def _signs(n: int) -> np.ndarray:
    # A single entry stays as it is, so that an axis of size 1 may come and go.
    if n == 1:
        return np.ones(1, int)
    # NumPy keeps what RandomState gives by a seed; so files can be read by any later version.
    return np.random.RandomState(0).randint(0, 2, n) * 2 - 1


def _along(leaf: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return leaf.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])
