"""QArrays as the matrices that kernels multiply: seen so, with no code moved.

A kernel takes a batch of matrices `[B, R, C]` as they are stored, and sums one side. An array is
one where its axes lie so in memory: those of the batch, and then those that are summed, on either
side of those that are left.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ..._core.primitives.movement import reshape
from ..packing import Packing
from ..qarray import QArray


class Stored(NamedTuple):
    """An array with its codes in rows, and where the axes of the one multiplied are in it."""

    q: QArray
    axes: tuple[int, ...]


def in_rows(q: QArray) -> Stored:
    """Returns an array that is packed along its last axis but one with the last two swapped.

    That is what a transposition leaves behind. XLA drops two that undo each other; and the product
    sums the other side.
    """
    order = list(range(q.ndim))
    if q.packing is None or q.packing.axis != -2:
        return Stored(q, tuple(order))
    order[-2:] = q.ndim - 1, q.ndim - 2
    packed, scale = (lax.transpose(leaf, order) for leaf in (q.packed, q.scales()))
    zero_point = None if q.zero_point is None else lax.transpose(q.zero_point, order)
    packing = q.packing._replace(axis=-1)
    leaves = {"packed": packed, "scale": scale, "zero_point": zero_point}
    return Stored(q.replace(**leaves, packing=packing), tuple(order))


class Matrix(NamedTuple):
    """A batch of matrices, `[B, R, C]`, and the side that a product sums: "rows" or "columns"."""

    q: QArray
    contracting: str


def as_matrix(q: QArray, summed: Sequence[int], batch: Sequence[int]) -> Matrix | None:
    """Returns an array as matrices for a product, or None where it does not lie so in memory.

    **Arguments:**

    - `summed`, `batch`: axes of the array.
    """
    first, end = len(batch), len(batch) + len(summed)
    if sorted(batch) != list(range(first)) or not summed:
        return None
    if sorted(summed) == list(range(q.ndim - len(summed), q.ndim)):
        contracting, cut = "columns", q.ndim - len(summed)
    elif sorted(summed) == list(range(first, end)):
        contracting, cut = "rows", end
    else:
        return None
    scale = q.scales()
    if scale.dtype != jnp.float32 or not _go_together(q):
        return None
    sizes = [math.prod(part) for part in (q.shape[:first], q.shape[first:cut], q.shape[cut:])]
    matrix = reshape(q.replace(scale=scale), tuple(sizes))
    if matrix is NotImplemented:
        return None
    as_kernels_read = None if q.format.bits == 8 else Packing(-1, sizes[2])
    return Matrix(matrix, contracting) if matrix.packing == as_kernels_read else None


def _go_together(q: QArray) -> bool:
    """Whether zero points are for tiles of scales, or several of these, along each axis."""
    if q.zero_point is None:
        return True
    counts = zip(q.scale.shape, q.zero_point.shape, strict=True)
    return all(1 in pair or pair[0] == pair[1] for pair in counts)
