"""N:M sparsity: which weights of each group are kept."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...kernels.pruning import largest_positions
from ..formats import get_format
from ..formats.tiles import Shape

# n kept of each m; or of each m blocks, of so many neighbours.
Sparsity = tuple[int, int] | tuple[int, int, int]


def check_sparsity(sparsity: Any, qtype: DTypeLike | None) -> Sparsity:
    """Returns `(n, m)` or `(n, m, block)`, for weights of a format.

    **Raises:** `TypeError` where it is not two or three whole numbers; `ValueError` where they do
    not fit, or the format has no code for 0.
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
    """How many neighbours there are in a group, of which some are kept."""
    return sparsity[1] * (sparsity[2] if len(sparsity) == 3 else 1)


def check_groups(sparsity: Sparsity, shape: Shape, axis: int) -> None:
    """Raises `ValueError` where groups do not divide the axis that they lie along."""
    size = group_size(sparsity)
    if shape[axis] % size:
        raise ValueError(
            f"sparsity {sparsity} has groups of {size}, which do not divide axis "
            f"{axis - len(shape)} (size {shape[axis]}) of w of shape {shape}"
        )


def mask_of(w: jax.Array, sparsity: Sparsity, axis: int) -> jax.Array:
    """Returns a mask of the shape of `w`: of each m neighbours the n largest in magnitude.

    Of equal ones the first are kept, and NaN before all others: as `NMSparse.prune` does. Of blocks
    those are largest whose magnitudes sum to the most.
    """
    n, m = sparsity[:2]
    last = jnp.moveaxis(w, axis, -1)
    groups = last.reshape(*last.shape[:-1], -1, m, group_size(sparsity) // m)
    if groups.shape[-1] > 1:
        groups = abs(groups)
    places = largest_positions(groups.sum(-1), n, -1)
    kept = (places[..., None] == jnp.arange(m)).any(-2)
    spread = jnp.broadcast_to(kept[..., None], groups.shape)
    return jnp.moveaxis(spread.reshape(last.shape), -1, axis)
