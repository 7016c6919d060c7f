"""The norms of the columns of a weight with an update, without the weight being made dense."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.value import materialise_one
from .labels import RANK, arrange, contract


def norm(w: Any, axes: Iterable[int]) -> jax.Array:
    """The norms over some axes, which stay with size 1; in float32 or wider.

    Of a weight that is not dense, entries are made as they are summed: under jit they are never
    stored.
    """
    return jnp.sqrt(_square(w, axes))


def over_norm(magnitude: Any, lengths: jax.Array) -> jax.Array:
    """`magnitude / lengths`, lengths being constants. A column of zeros stays one of zeros."""
    lengths = lax.stop_gradient(lengths)
    return jnp.asarray(magnitude) / jnp.where(lengths > 0, lengths, 1)


def norm_of_sum(lora: Any) -> jax.Array:
    """The norms of `v = w + scale * a @ b`, with size 1 in the axes over which they are taken.

    Of columns, `‖v‖² = ‖w‖² + Σ b · (2 s aᵀw + s² aᵀa b)`, summed over the rank. Where the update
    all but cancels the weight, digits are lost that the dense sum would keep.
    """
    factors = materialise_one(lora.a), materialise_one(lora.b)
    w, a, b = jax.tree.map(lax.stop_gradient, (lora.w, *factors))
    pair = (_wide(a), lora.a_labels), (_wide(b), lora.b_labels)
    (near, near_labels), (far, far_labels) = pair if lora.norm_axes == lora.ins else pair[::-1]
    again = tuple("again" if label == RANK else label for label in near_labels)
    cross, cross_labels = contract(near, near_labels, w, lora.w_labels, lora.norm_axes)
    gram, gram_labels = contract(near, near_labels, near, again, lora.norm_axes)
    square, square_labels = contract(gram, gram_labels, far, far_labels, [RANK])
    square_labels = tuple(RANK if label == "again" else label for label in square_labels)
    inner = 2 * arrange(cross, cross_labels, far_labels)
    inner += lora.scale * arrange(square, square_labels, far_labels)
    at = far_labels.index(RANK)
    added = lora.scale * jnp.sum(far * inner, at)
    added = arrange(added, (*far_labels[:at], *far_labels[at + 1 :]), lora.w_labels)
    return jnp.sqrt(jnp.maximum(_square(w, lora.norm_axes) + added, 0))


def _square(w: Any, axes: Iterable[int]) -> jax.Array:
    return jnp.sum(jnp.square(_wide(materialise_one(w))), tuple(axes), keepdims=True)


def _wide(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
