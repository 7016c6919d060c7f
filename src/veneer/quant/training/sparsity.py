"""N:M sparsity: which weights of each group are kept."""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.pruning import largest_positions
from ..formats import get_format
from ..formats.tiles import Shape


def check_sparsity(sparsity: Any, qtype: str | None) -> tuple[int, int]:
    """Returns `(n, m)`, for weights of a format.

    **Raises:** `TypeError` where it is no pair of whole numbers; `ValueError` where they do not
    fit, or the format has no code for 0.
    """
    try:
        n, m = map(operator.index, sparsity)
    except (TypeError, ValueError):
        raise TypeError(
            f"sparsity is (n, m), n values kept of each m, as (2, 4), not {sparsity!r}"
        ) from None
    if not 1 <= n <= m or m < 2:
        raise ValueError(f"sparsity keeps 1 <= n <= m values of each 2 <= m, and is {n}:{m}")
    if qtype is not None and not get_format(qtype).has_zero:
        raise ValueError(f"{qtype} has no code for 0, which what sparsity does not keep would have")
    return n, m


def check_groups(sparsity: tuple[int, int], shape: Shape, axis: int) -> None:
    """Raises `ValueError` where groups do not divide the axis that they lie along."""
    n, m = sparsity
    if shape[axis] % m:
        raise ValueError(
            f"{n}:{m} sparsity has groups of {m}, which do not divide axis {axis - len(shape)} "
            f"(size {shape[axis]}) of w of shape {shape}"
        )


def mask_of(w: jax.Array, sparsity: tuple[int, int], axis: int) -> jax.Array:
    """Returns a mask of the shape of `w`: of each m neighbours the n largest in magnitude.

    Of equal ones the first are kept, and NaN before all others: as `NMSparse.prune` does.
    """
    n, m = sparsity
    last = jnp.moveaxis(w, axis, -1)
    groups = last.reshape(*last.shape[:-1], last.shape[-1] // m, m)
    places = largest_positions(groups, n, -1)
    kept = (places[..., None] == jnp.arange(m)).any(-2)
    return jnp.moveaxis(kept.reshape(last.shape), -1, axis)
