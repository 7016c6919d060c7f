"""Pruning by magnitude: which entries of a group are kept."""

import jax
import jax.numpy as jnp
from jax import lax


def largest_positions(groups: jax.Array, n: int, axis: int) -> jax.Array:
    """Returns the positions of the n entries along an axis that are largest in magnitude.

    Of equal ones the first, and NaN before all others: it counts as infinite.

    **Returns:** int32, in ascending order along the axis, which has size n.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.pruning import largest_positions
    >>> largest_positions(jnp.array([1.0, -4.0, 3.0, 3.0]), 2, 0).tolist()
    [1, 2]
    """
    magnitude = jnp.abs(groups)
    magnitude = jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude)
    order = jnp.argsort(-magnitude, axis, stable=True)
    return jnp.sort(lax.slice_in_dim(order, 0, n, axis=axis % groups.ndim), axis)
