"""Dropout of the operand of a low-rank update.

The mask is a function of the key and of the shapes alone, for axes in one order: the leading axes
of the update, those of the operand, and those that are dropped. So a program and its transpose, by
which derivatives go back, drop the same.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .labels import Label, Labels, arrange


def drop(x: Any, labels: Labels, lora: Any, sizes: Mapping[Label, int]) -> tuple[Any, Labels]:
    """x with entries dropped, and the others larger for it.

    **Arguments:**

    - `x`: with labels of its axes, among them those that the update drops.
    - `sizes`: of the axes of `x` and of the update.

    **Returns:** the array, with the leading axes of the update first, and its labels.
    """
    lead, side = lora.lead, lora.ins if lora.dropped == "in" else lora.outs
    others = tuple(label for label in labels if label not in lead and label not in side)
    order = (*lead, *others, *side)
    shape = tuple(sizes[label] for label in order)
    return _masked(arrange(x, labels, order), lora, shape), order


def drop_any(x: Any, lora: Any) -> Any:
    """x with entries dropped, of an update without leading axes."""
    return _masked(x, lora, x.shape)


def _masked(x: Any, lora: Any, shape: tuple[int, ...]) -> Any:
    keep = 1 - lora.dropout
    return jnp.where(_mask(lora.dropout_key, keep, shape, len(lora.lead)), x / keep, 0)


def _mask(key: Any, keep: float, shape: tuple[int, ...], lead: int) -> jax.Array:
    """True with probability `keep`; for each index of the leading axes by its own key."""
    key = jnp.asarray(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    draw = lambda key: jax.random.bernoulli(key, keep, shape[lead:])
    if not lead:
        return draw(key)
    return jax.vmap(draw)(key.reshape(math.prod(shape[:lead]))).reshape(shape)
