"""Entries of a sparse array: of each, its value and its index along every axis."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Axes = Sequence[int]


class Entries:
    """The entries of a sparse array as if every axis were sparse, with padding made harmless.

    `data` is `[*batch, nse]`, and so is the index `columns[axis]` of each axis of size
    `sizes[axis]`. What is no entry is 0, and out of bounds along every sparse axis.
    """

    def __init__(self, data: Any, indices: Any, sparse_shape: tuple[int, ...]):
        data, indices = jnp.asarray(data), jnp.asarray(indices)
        sizes = np.array(sparse_shape, indices.dtype)
        self.is_entry = ((indices >= 0) & (indices < sizes)).all(-1)
        self.data = jnp.where(self.is_entry, data, 0)
        indices = jnp.where(self.is_entry[..., None], indices, sizes)
        self.sizes = (*data.shape[:-1], *sparse_shape)
        self.columns = [
            *(lax.broadcasted_iota(jnp.int32, data.shape, i) for i in range(data.ndim - 1)),
            *(indices[..., i] for i in range(len(sparse_shape))),
        ]

    def at(self, axes: Axes) -> tuple[Any, ...]:
        """An index of an array with these axes first: the place of each entry."""
        return tuple(self.columns[axis] for axis in axes)

    def scattered(self, values: Any, axes: Axes) -> Any:
        """An array over these axes, then those that values have after `[*batch, nse]`."""
        entries = self.data.ndim
        if not axes:
            return values.sum(range(entries), dtype=values.dtype)
        shape = [self.sizes[axis] for axis in axes]
        zeros = jnp.zeros((*shape, *values.shape[entries:]), values.dtype)
        return zeros.at[self.at(axes)].add(values, mode="drop") if zeros.size else zeros

    def gathered(self, y: Any, axes: Axes) -> Any:
        """What an array with these axes first has at each entry; 0 for what is no entry."""
        rest = y.shape[len(axes) :]
        if not axes:
            return y
        if y.size == 0:
            return jnp.zeros((*self.data.shape, *rest), y.dtype)
        return y.at[self.at(axes)].get(mode="fill", fill_value=0)
