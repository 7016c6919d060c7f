"""N:M sparsity: of each group of m weights, n are kept and the others are zero."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...kernels.pruning import largest_positions
from ..formats import get_format
from ..formats.tiles import Shape

# `(n, m)`: n of each m neighbors are kept. `(n, m, block)`: n of each m blocks of neighbors.
Sparsity = tuple[int, int] | tuple[int, int, int]


def check_sparsity(sparsity: Any, qtype: DTypeLike | None) -> Sparsity:
    """Return a sparsity that a user passes as a tuple of integers.

    **Raises:** `TypeError` if it is not two or three integers. `ValueError` if a number is out of
    range, or if the format of the weights has no code for 0.
    """
    try:
        n, m, *block = map(operator.index, sparsity)
        (size,) = block or [1]
    except (TypeError, ValueError):
        raise TypeError(
            "sparsity must be (n, m), such as (2, 4), or (n, m, block), in whole numbers, not "
            f"{sparsity!r}"
        ) from None
    if not 1 <= n <= m or m < 2:
        raise ValueError(f"sparsity (n, m) must have 1 <= n <= m and m >= 2, not ({n}, {m})")
    if size < 1:
        raise ValueError(f"the block of sparsity must be 1 or more, not {size}")
    if qtype is not None and not get_format(qtype).has_zero:
        raise ValueError(f"{qtype} has no code for 0, which sparsity needs. Use another qtype")
    return (n, m) if size == 1 else (n, m, size)


def group_size(sparsity: Sparsity) -> int:
    """Return the number of weights in a group."""
    return sparsity[1] * (sparsity[2] if len(sparsity) == 3 else 1)


def check_groups(sparsity: Sparsity, shape: Shape, axis: int) -> None:
    """Raise `ValueError` if groups do not divide their axis."""
    size = group_size(sparsity)
    if shape[axis] % size:
        raise ValueError(
            f"sparsity {sparsity} has groups of {size}, which do not divide axis "
            f"{axis - len(shape)} (size {shape[axis]}) of w of shape {shape}"
        )


def sparsity_mask(w: jax.Array, sparsity: Sparsity, axis: int) -> jax.Array:
    """Return a mask of the shape of `w` that keeps the n largest of each m neighbors.

    The order is by magnitude, and NaN is the largest. Among equal ones the first are kept, as in
    `NMSparse.prune`. Blocks are ordered by the sum of their magnitudes.
    """
    n, m = sparsity[:2]
    last = jnp.moveaxis(w, axis, -1)
    groups = last.reshape(*last.shape[:-1], -1, m, group_size(sparsity) // m)
    if groups.shape[-1] > 1:
        groups = abs(groups)
    positions = largest_positions(groups.sum(-1), n, -1)
    mask = (positions[..., None] == jnp.arange(m)).any(-2)
    mask = jnp.broadcast_to(mask[..., None], groups.shape)
    return jnp.moveaxis(mask.reshape(last.shape), -1, axis)
