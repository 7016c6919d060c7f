"""N:M sparsity: of each group of m weights, n are kept and the others are zero."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...types.nm_sparse import largest_positions
from ..formats import get_format
from ..formats.tiles import Shape

# `(n, m)`: n of each m neighbors are kept. `(n, m, block)`: n of each m blocks of neighbors.
Sparsity = tuple[int, int] | tuple[int, int, int]


def check_sparsity(sparsity: Any, qtype: DTypeLike | None) -> Sparsity:
    """Convert a sparsity that a user passes to a tuple of integers.

    **Raises:** `TypeError` if `sparsity` is not two or three integers. `ValueError` if a number is
    out of range, or if the format `qtype` has no code for 0. Without quantization, `qtype` is None.
    """
    try:
        n, m, *rest = map(operator.index, sparsity)
        (block,) = rest or [1]  # This raises if there are more than three integers.
    except (TypeError, ValueError):
        raise TypeError(
            "sparsity must be (n, m), such as (2, 4), or (n, m, block), in whole numbers, not "
            f"{sparsity!r}"
        ) from None
    if not 1 <= n <= m or m < 2:
        raise ValueError(f"sparsity (n, m) must have 1 <= n <= m and m >= 2, not ({n}, {m})")
    if block < 1:
        raise ValueError(f"the block of sparsity must be 1 or more, not {block}")
    if qtype is not None and not get_format(qtype).has_zero:
        raise ValueError(f"{qtype} has no code for 0, which sparsity needs. Use another qtype")
    return (n, m) if block == 1 else (n, m, block)


def group_size(sparsity: Sparsity) -> int:
    """Return the number of weights per group: `m`, or `m * block` if sparsity has blocks."""
    return sparsity[1] * (sparsity[2] if len(sparsity) == 3 else 1)


def check_groups(sparsity: Sparsity, shape: Shape, axis: int) -> None:
    """Raise `ValueError` if the size of a group does not divide an axis of the weights."""
    size = group_size(sparsity)
    if shape[axis] % size:
        raise ValueError(
            f"sparsity {sparsity} has groups of {size}, which do not divide axis "
            f"{axis - len(shape)} (size {shape[axis]}) of w of shape {shape}"
        )


def sparsity_mask(w: jax.Array, sparsity: Sparsity, axis: int) -> jax.Array:
    """Return a mask of the shape of `w`, True for the n largest of each m neighbors along `axis`.

    Weights are compared by magnitude, and blocks by the sum of the magnitudes. NaN is the largest.
    Among equal weights or blocks, the first are kept, as in `NMSparse.prune`.
    """
    n, m = sparsity[:2]
    block = group_size(sparsity) // m
    axis_last = jnp.moveaxis(w, axis, -1)
    groups = axis_last.reshape(*axis_last.shape[:-1], -1, m, block)
    if block > 1:  # `largest_positions` takes the magnitudes of single weights itself.
        groups = abs(groups)
    positions = largest_positions(groups.sum(-1), n, -1)
    is_kept = (positions[..., None] == jnp.arange(m)).any(-2)  # [..., groups, m]
    mask = jnp.broadcast_to(is_kept[..., None], groups.shape)
    return jnp.moveaxis(mask.reshape(axis_last.shape), -1, axis)
