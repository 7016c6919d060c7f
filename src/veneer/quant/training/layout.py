"""Rules for what moves a weight about before it is used, so that it still knows its recipe.

Batch axes come and go without a rule. What else is done to a weight, is done to it as quantised.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.rules import register
from .fake_quantized import FakeQuantized


@register("convert_element_type")
def _convert_element_type(
    w: FakeQuantized, *, new_dtype: Any, weak_type: bool, sharding: Any
) -> Any:
    if weak_type or sharding is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    if jnp.dtype(new_dtype).itemsize < 2:
        return NotImplemented
    return w.changed(dense_dtype=jnp.dtype(new_dtype).name)


@register("transpose")
def _transpose(w: FakeQuantized, *, permutation: Sequence[int]) -> Any:
    ndim = w.ndim
    matrix = {ndim - 2, ndim - 1}
    if w.format is not None and w.scales_are_quantised:
        # Which scales have one in common depends on the order of axes, if not all of a matrix do.
        same = w.format.scale_tile == 0 and {permutation[-2], permutation[-1]} == matrix
        if not same:
            return NotImplemented
    moved = lambda axis: list(permutation).index(axis % ndim) - ndim
    tile_size = w.tile_size
    if isinstance(tile_size, tuple):
        tile_size = tuple(sorted((moved(axis), size) for axis, size in tile_size))
    new = w.changed(
        w=jax.lax.transpose(w.w, permutation),
        tile_axis=tuple(map(moved, w.tile_axes)),
        tile_size=tile_size,
        key=None,
        mask=None if w.mask is None else jax.lax.transpose(w.mask, permutation),
    )
    return new if w.key is None else new.changed(key=_transposed_key(w, new, permutation))


def _transposed_key(w: FakeQuantized, new: FakeQuantized, permutation: Sequence[int]) -> Any:
    """The keys for the axes that are now before the first of `tile_axis`.

    Along one that was not so, they are the same; along one that is so no more, the first is taken.
    """
    kept = permutation[: new.lead]
    key = w.key[tuple(slice(None) if axis in kept else 0 for axis in range(w.lead))]
    had = [axis for axis in range(w.lead) if axis in kept]
    order = [had.index(axis) for axis in kept if axis in had]
    key = jnp.transpose(key, order)
    key = jnp.expand_dims(key, [i for i, axis in enumerate(kept) if axis not in had])
    return jnp.broadcast_to(key, [w.shape[axis] for axis in kept])
