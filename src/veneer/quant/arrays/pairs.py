"""Computing two neighboring values at once, which is faster on GPUs.

On a GPU, XLA lets each thread compute four elements of a result. To dequantize 4-bit codes to bf16,
a thread then reads 2 bytes and writes 8, which is too little to use the full memory bandwidth. If
an element is a 32-bit word with two neighboring bf16 values, a thread reads 4 bytes and writes 16.

Times to dequantize a weight of 4096 x 11008 to bf16 on an H200, in int4, uint4, nf4 and mxfp4, with
scales along either axis (part 8 of benchmarks/gpu_all.py measures the last line):

    `unpack`, one shift per code of a byte           63 to 121 µs
    `unpack` with `by_shifts`, one broadcast shift   62 to 64 µs
    compute both neighbors and write one word        36 to 47 µs

The results of all three methods are equal, bit for bit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..formats.packing import split_neighbors

if TYPE_CHECKING:
    from . import QArray

# The dtype of a word that holds two elements, by the bytes per element.
_WORDS = {1: jnp.uint16, 2: jnp.uint32}


def runs_on_gpu() -> bool:
    """Return whether the default platform of JAX is a GPU."""
    return jax.default_backend() == "gpu"


def compute_elementwise(
    compute: Callable[["QArray"], jax.Array], q: "QArray", dtype: DTypeLike
) -> jax.Array:
    """Return `compute(q)`. On a GPU, compute two neighboring elements at once if possible.

    **Arguments:**

    - `compute`: an elementwise function of a `QArray`. It returns an array of the same shape, and
      computes each element from the code, scale, zero point and minimum of that element.
    - `dtype`: the dtype of the result of `compute`.
    """
    if not runs_on_gpu():
        return compute(q)
    if q.packing is not None and q.packing.axis == -2:
        # Matrices are packed along the last axis, so `q` is a transposed matrix. Transpose it back
        # first, and transpose the result. In a product, XLA removes these transposes.
        leaves = {"packed": jnp.asarray(q.packed)} | _unpacked_scale_leaves(q)
        leaves = {k: x if x is None else jnp.swapaxes(x, -1, -2) for k, x in leaves.items()}
        transposed = q.changed(**leaves, packing=q.packing._replace(axis=-1))
        return jnp.swapaxes(compute_elementwise(compute, transposed, dtype), -1, -2)
    if not can_compute_pairs(q, dtype):
        return compute(q)
    even, odd = _split_even_and_odd(q)
    joined = _interleave(compute(even), compute(odd))
    size = q.shape[-1]  # `joined` has one value of padding if the size is odd
    return joined if joined.shape[-1] == size else lax.slice_in_dim(joined, 0, size, axis=-1)


def can_compute_pairs(q: "QArray", dtype: DTypeLike) -> bool:
    """Return whether `compute_elementwise` can compute two neighbors along the last axis at once.

    Their codes must share a byte, and a 32-bit word must hold two elements of `dtype`, the dtype of
    the result.
    """
    is_packed = q.packing is not None and q.packing.axis == -1 and q.format.bits in (1, 2, 4)
    return is_packed and q.size > 0 and jnp.dtype(dtype).itemsize in _WORDS


def _unpacked_scale_leaves(q: "QArray") -> dict[str, jax.Array | None]:
    """Return the scale, zero point and minimum as plain arrays, by field name. None if unset."""
    return {"scale": q.scales(), "zero_point": q.zero_points(), "minimum": q.minima()}


def _split_even_and_odd(q: "QArray") -> list["QArray"]:
    """Return a list of two arrays: the values of `q` at even and at odd indices of the last axis.

    Both have one code per byte. If the size is odd, the second array ends in one value of padding.
    """
    size, leaves = q.shape[-1], _unpacked_scale_leaves(q).items()
    halves = []
    for start, codes in enumerate(split_neighbors(q.packed, int(q.format.bits), size)):
        half = {k: None if x is None else _take_every_second(x, start, size) for k, x in leaves}
        halves.append(q.changed(packed=codes, packing=None, **half))
    return halves


def _take_every_second(leaf: jax.Array, start: int, size: int) -> jax.Array:
    """Return the scales of the values at indices `start`, `start + 2`, ... of the last axis.

    `leaf` has the scales, or the zero points or minima, with one entry per tile. `size` is the
    number of values along the last axis. `start` is 0 or 1.
    """
    entries = leaf.shape[-1]
    if entries == 1 or (size // entries) % 2 == 0:
        return leaf  # Both neighbors are in one tile.
    if entries != size:  # Tiles have an odd size, so make one entry per value.
        leaf = jnp.repeat(leaf, size // entries, -1, total_repeat_length=size)
    if size % 2:  # The padding gets the last entry.
        leaf = jnp.concatenate([leaf, lax.slice_in_dim(leaf, size - 1, size, axis=-1)], -1)
    return lax.slice_in_dim(leaf, start, leaf.shape[-1], 2, axis=-1)


@jax.custom_jvp
def _interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Return an array with the values of `even` at even and of `odd` at odd indices.

    The indices are along the last axis.
    """
    bits = 8 * even.dtype.itemsize
    word = _WORDS[even.dtype.itemsize]
    low, high = (lax.bitcast_convert_type(x, f"uint{bits}").astype(word) for x in (even, odd))
    # A bit cast to a narrower dtype adds an axis of size 2, with the low bits first.
    pairs = lax.bitcast_convert_type(low | high << bits, even.dtype)
    return pairs.reshape(*even.shape[:-1], 2 * even.shape[-1])


@_interleave.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    even, odd = tangents
    stacked = jnp.stack([even, odd], -1).reshape(*even.shape[:-1], 2 * even.shape[-1])
    return _interleave(*primals), stacked
