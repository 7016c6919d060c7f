"""Contractions of arrays with labeled axes, and two parts of LoRA products: DoRA and dropout.

The label of an axis of `w` is its index. Axes of `a`, `b` and the operand `x` of a product that
correspond to an axis of `w` have the same label. The label of the rank axis is `RANK`, and the
label of an axis `i` of `x` that corresponds to no axis of `w` is `("x", i)`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.transform import redispatch
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

    Other axes that both arrays have are batch axes. The operands are promoted to one dtype. The
    product has this dtype, or `preferred_element_type` if that is wider.

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
    """Return `preferred` promoted with `dtype`, or None if `preferred` is None."""
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


# DoRA. The arguments `lora` are a `LoraArray`, which `array.py` defines with these functions.


def norm(w: Any, axes: Iterable[int]) -> jax.Array:
    """Return the norms of `w` along `axes`, which are kept with size 1, in float32 or wider.

    An implicit `w` is materialized. Under jit, XLA fuses this with the sum and stores no array.
    """
    return jnp.sqrt(_squared_norm(w, axes))


def divide_by_norm(magnitude: Any, norms: jax.Array) -> jax.Array:
    """Return `magnitude / norms`, with constant norms. A norm of 0 counts as 1."""
    norms = lax.stop_gradient(norms)
    return jnp.asarray(magnitude) / jnp.where(norms > 0, norms, 1)


def apply_magnitude(x: Any, labels: Sequence[Label], lora: Any) -> Any:
    """Multiply an array by `magnitude / norm(w + scale * a @ b)`. Without DoRA, return `x`."""
    if lora.magnitude is None:
        return x
    own_labels = tuple(label for label in lora.w_labels if label not in lora.norm_axes)
    factor = divide_by_norm(lora.magnitude, _norm_of_sum(lora))
    factor = arrange(lax.squeeze(factor, lora.norm_axes), own_labels, labels)
    return (x * factor).astype(x.dtype)


def _norm_of_sum(lora: Any) -> jax.Array:
    """Return the norms of `v = w + scale * a @ b` along `norm_axes`, without computing `a @ b`.

    For columns, `‖v‖² = ‖w‖² + Σ b · (2 s aᵀw + s² aᵀa b)`, summed over the rank. The result loses
    precision if the update nearly cancels the weight.
    """
    lora = lora.with_dense_factors()
    w, a, b = jax.tree.map(lax.stop_gradient, (lora.w, lora.a, lora.b))
    pair = (_widen(a), lora.a_labels), (_widen(b), lora.b_labels)
    (near, near_labels), (far, far_labels) = pair if lora.norm_axes == lora.ins else pair[::-1]
    other_labels = tuple("other rank" if label == RANK else label for label in near_labels)
    cross, cross_labels = contract(near, near_labels, w, lora.w_labels, lora.norm_axes)
    gram, gram_labels = contract(near, near_labels, near, other_labels, lora.norm_axes)
    square, square_labels = contract(gram, gram_labels, far, far_labels, [RANK])
    square_labels = tuple(RANK if label == "other rank" else label for label in square_labels)
    inner = 2 * arrange(cross, cross_labels, far_labels)
    inner += lora.scale * arrange(square, square_labels, far_labels)
    rank_axis = far_labels.index(RANK)
    update = lora.scale * jnp.sum(far * inner, rank_axis)
    update_labels = (*far_labels[:rank_axis], *far_labels[rank_axis + 1 :])
    update = arrange(update, update_labels, lora.w_labels)
    return jnp.sqrt(jnp.maximum(_squared_norm(w, lora.norm_axes) + update, 0))


def _squared_norm(w: Any, axes: Iterable[int]) -> jax.Array:
    return jnp.sum(jnp.square(_widen(materialise_one(w))), tuple(axes), keepdims=True)


def _widen(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def drop(x: Any, labels: Labels, lora: Any, sizes: Mapping[Label, int]) -> tuple[Any, Labels]:
    """Apply the dropout of a `LoraArray` to an operand or a result of a product.

    The mask depends only on the key and on the sizes of the axes in a fixed order: leading axes,
    other axes of `x`, dropped axes. So a product and its transpose drop the same entries.

    **Arguments:**

    - `x`, `labels`: an array that has the dropped axes of the adapter, and the labels of its axes.
    - `sizes`: the size of the axis with each label.

    **Returns:** the array with its axes in the order of the mask, and their labels.
    """
    lead, dropped = lora.lead, lora.ins if lora.dropped == "in" else lora.outs
    others = tuple(label for label in labels if label not in lead and label not in dropped)
    order = (*lead, *others, *dropped)
    shape = tuple(sizes[label] for label in order)
    return drop_entries(arrange(x, labels, order), lora, shape), order


def drop_entries(x: Any, lora: Any, shape: tuple[int, ...]) -> Any:
    """Apply the dropout of a `LoraArray` to `x`, broadcast to `shape`.

    The first axes of `shape` are the leading axes of the adapter. Each of their indices has its own
    key.
    """
    keep_rate, n_lead = 1 - lora.dropout, len(lora.lead)
    key = jnp.asarray(lora.dropout_key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    draw = lambda key: jax.random.bernoulli(key, keep_rate, shape[n_lead:])
    if n_lead:
        mask = jax.vmap(draw)(key.reshape(math.prod(shape[:n_lead]))).reshape(shape)
    else:
        mask = draw(key)
    return jnp.where(mask, x / keep_rate, 0)
