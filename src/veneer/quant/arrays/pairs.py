"""Computing neighboring values in pairs, for XLA on GPUs.

XLA gives each thread of a GPU four elements of a result. For packed codes, these are 2 bytes to
read and 8 to write in bf16, too few to use the memory bandwidth. If two neighbors of 16 bits are
computed as one word of 32 bits, a thread reads 4 bytes and writes 16.

Times to dequantize a weight of 4096 x 11008 to bf16 on an H200, in int4, uint4, nf4 and mxfp4, with
scales along either axis (part 8 of benchmarks/gpu_all.py measures the last line):

    stack the codes of a byte along a new axis, as on CPU      63 to 121 µs
    shift a byte by each place, broadcast along a new axis     62 to 64 µs
    compute both neighbors of a byte, and write one word       36 to 47 µs

So GPUs compute pairs if `can_compute_pairs` holds, and shift otherwise. All results have the same
bits.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..formats.packing import split_neighbors

if TYPE_CHECKING:
    from .qarray import QArray

_WORDS = {1: jnp.uint16, 2: jnp.uint32}


def runs_on_gpu() -> bool:
    """Return whether the default platform of JAX is a GPU."""
    return jax.default_backend() == "gpu"


def compute_elementwise(
    compute: Callable[["QArray"], jax.Array], q: "QArray", dtype: DTypeLike
) -> jax.Array:
    """Return `compute(q)`, in pairs on a GPU if possible.

    **Arguments:**

    - `compute`: a function of a `QArray` that computes each element of its result, of the shape of
      `q`, from the code, scale, zero point and minimum of that element.
    - `dtype`: of the result.
    """
    if not runs_on_gpu():
        return compute(q)
    if q.packing is not None and q.packing.axis == -2:
        # Matrices are packed along the last axis, so this is the transpose of a stored one. XLA
        # removes the transposes below in a product with it, and writes no transposed leaves.
        leaves = {"packed": jnp.asarray(q.packed)} | _unpacked_companions(q)
        leaves = {k: x if x is None else jnp.swapaxes(x, -1, -2) for k, x in leaves.items()}
        stored = q.changed(**leaves, packing=q.packing._replace(axis=-1))
        return jnp.swapaxes(compute_elementwise(compute, stored, dtype), -1, -2)
    if not can_compute_pairs(q, dtype):
        return compute(q)
    joined = _interleave(*map(compute, _split_pairs(q)))
    size = q.shape[-1]
    return joined if joined.shape[-1] == size else lax.slice_in_dim(joined, 0, size, axis=-1)


def can_compute_pairs(q: "QArray", dtype: DTypeLike) -> bool:
    """Return whether a GPU can compute elements of `dtype` in pairs along the last axis."""
    is_packed = q.packing is not None and q.packing.axis == -1 and q.format.bits in (1, 2, 4)
    return is_packed and q.size > 0 and jnp.dtype(dtype).itemsize in _WORDS


def _unpacked_companions(q: "QArray") -> dict[str, jax.Array | None]:
    return {"scale": q.scales(), "zero_point": q.zero_points(), "minimum": q.minima()}


def _split_pairs(q: "QArray") -> list["QArray"]:
    """Return the values at even and at odd indices of the last axis, with one code per byte.

    If the size is odd, the second array has one value of padding.
    """
    size, leaves = q.shape[-1], _unpacked_companions(q).items()
    halves = []
    for start, codes in enumerate(split_neighbors(q.packed, int(q.format.bits), size)):
        half = {k: None if x is None else _every_second(x, start, size) for k, x in leaves}
        halves.append(q.changed(packed=codes, packing=None, **half))
    return halves


def _every_second(leaf: jax.Array, start: int, size: int) -> jax.Array:
    """Return the entries of a leaf that belong to every second value of the last axis."""
    entries = leaf.shape[-1]
    if entries == 1 or (size // entries) % 2 == 0:
        return leaf  # both neighbors have the same entry
    if entries != size:
        leaf = jnp.repeat(leaf, size // entries, -1, total_repeat_length=size)
    if size % 2:
        leaf = jnp.concatenate([leaf, lax.slice_in_dim(leaf, size - 1, size, axis=-1)], -1)
    return lax.slice_in_dim(leaf, start, leaf.shape[-1], 2, axis=-1)


@jax.custom_jvp
def _interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Alternate the values of two arrays along the last axis."""
    bits = 8 * even.dtype.itemsize
    word = _WORDS[even.dtype.itemsize]
    low, high = (lax.bitcast_convert_type(x, f"uint{bits}").astype(word) for x in (even, odd))
    pairs = lax.bitcast_convert_type(low | high << bits, even.dtype)
    return pairs.reshape(*even.shape[:-1], 2 * even.shape[-1])


@_interleave.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    even, odd = tangents
    stacked = jnp.stack([even, odd], -1).reshape(*even.shape[:-1], 2 * even.shape[-1])
    return _interleave(*primals), stacked
