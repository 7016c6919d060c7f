"""Contractions of arrays with labeled axes, and norms.

The label of an axis of a weight `w` is its index. Axes of the factors `a` and `b`, and of an
operand `x` of a product, that correspond to an axis of `w` have the same label. The label of the
rank axis is `RANK`, and the label of an axis `i` of `x` that corresponds to no axis of `w` is
`("x", i)`.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.trace import redispatch
from ..._core.value import materialise_one

Label = int | str | tuple[str, int]
Labels = tuple[Label, ...]

RANK = "rank"


def contract(
    x: Any,
    x_labels: Labels,
    y: Any,
    y_labels: Labels,
    contracted: Collection[Label],
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: None = None,
) -> tuple[Any, Labels]:
    """Contract two arrays over the axes that both have and whose label is in `contracted`.

    `x_labels` and `y_labels` have a label per axis. Other axes that both arrays have are batch
    axes. The operands are promoted to one dtype. The product has this dtype, or
    `preferred_element_type` if that is wider.

    **Returns:** the product, and the labels of its axes: batch axes, axes of `x`, axes of `y`.
    """
    shared = [label for label in x_labels if label in y_labels]
    batch = [label for label in shared if label not in contracted]
    shared_contracted = [label for label in shared if label in contracted]
    indices = lambda labels: ([*map(x_labels.index, labels)], [*map(y_labels.index, labels)])
    dimension_numbers = indices(shared_contracted), indices(batch)
    dtype = jnp.result_type(x.dtype, y.dtype)
    preferred = widen_dtype(preferred_element_type, dtype)
    dot = lambda x, y: lax.dot_general(
        x, y, dimension_numbers, precision=precision, preferred_element_type=preferred
    )
    product = redispatch(dot, _convert(x, dtype), _convert(y, dtype))
    free = [label for label in (*x_labels, *y_labels) if label not in shared]
    return product, (*batch, *free)


def widen_dtype(preferred: Any, dtype: Any) -> Any:
    """Return the wider dtype for a `preferred_element_type`, or None if `preferred` is None."""
    return None if preferred is None else jnp.promote_types(preferred, dtype)


def arrange(x: Any, labels: Labels, new_labels: Sequence[Label]) -> Any:
    """Transpose `x` to the order of `new_labels`. Labels that `x` does not have get size 1."""
    order = [labels.index(label) for label in new_labels if label in labels]
    new_axes = [i for i, label in enumerate(new_labels) if label not in labels]
    return redispatch(lambda x: lax.expand_dims(lax.transpose(x, order), new_axes), x)


def scale_by(scale: float, x: Any) -> Any:
    """Return `scale * x`. If `scale` is 1, return `x` without a multiplication."""
    return x if scale == 1 else scale * x


def _convert(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else redispatch(lambda x: x.astype(dtype), x)


def norm(w: Any, axes: Iterable[int]) -> jax.Array:
    """Return the norms of `w` along `axes`, which are kept with size 1, in float32 or wider.

    An implicit `w` is materialized. Under `jax.jit`, XLA fuses the materialization with the sum,
    and stores no dense array.
    """
    return jnp.sqrt(squared_norm(w, axes))


def divide_by_norm(magnitude: Any, norms: jax.Array) -> jax.Array:
    """Return `magnitude / norms` without a gradient for `norms`. A norm of 0 counts as 1."""
    norms = lax.stop_gradient(norms)
    return jnp.asarray(magnitude) / jnp.where(norms > 0, norms, 1)


def squared_norm(w: Any, axes: Iterable[int]) -> jax.Array:
    """Return the sums of the squares of `w` along `axes`, which are kept with size 1.

    The result is in float32 or wider. An implicit `w` is materialized.
    """
    return jnp.sum(jnp.square(widen(materialise_one(w))), tuple(axes), keepdims=True)


def widen(x: Any) -> jax.Array:
    """Convert an array to float32, if its dtype is narrower."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
