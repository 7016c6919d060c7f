"""Rules of JAX's primitives for `LoraArray`, and the DoRA and dropout of its products."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.trace import redispatch
from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from ..structured.matrix import Matrix
from ..structured.product import LowRank, concatenate
from .array import LoraArray
from .contractions import (
    RANK,
    Label,
    Labels,
    arrange,
    contract,
    divide_by_norm,
    scale_by,
    squared_norm,
    widen,
    widen_dtype,
)

Shape = tuple[int, ...]


@register("dot_general")
def _dot_general(
    lhs: LoraArray | ArrayLike, rhs: LoraArray | ArrayLike, *, dimension_numbers: Any, **params: Any
) -> Any:
    """Compute `x @ w + scale * (x @ a) @ b`, for any contracted axes."""
    lora_first = isinstance(lhs, LoraArray)
    lora: Any = lhs if lora_first else rhs
    x: Any = rhs if lora_first else lhs
    if isinstance(x, LoraArray):
        return NotImplemented
    swap = lambda pair: pair[::-1] if lora_first else pair
    (x_contracted, w_contracted), (x_batch, w_batch) = map(swap, dimension_numbers)
    contracted = frozenset(w_contracted)
    dropped_operand = _dropped_operand(lora, contracted)
    if (
        params["out_sharding"] is not None
        or not set(w_batch) <= set(lora.lead)
        or contracted.isdisjoint((*lora.ins, *lora.outs))
        or dropped_operand is None
    ):
        return NotImplemented
    x = jnp.asarray(x)
    shared = dict(zip((*x_contracted, *x_batch), (*w_contracted, *w_batch), strict=True))
    labels: Labels = tuple(shared.get(i, ("x", i)) for i in range(x.ndim))
    free = [label for label in labels if label not in shared.values()]
    w_free = [i for i in lora.w_labels if i not in shared.values()]
    out_labels = (*w_batch, *(w_free + free if lora_first else free + w_free))

    # DoRA multiplies the columns. If they are contracted, the factors go to `x`.
    columns = set(lora.w_labels).difference(lora.norm_axes) if lora.norm_axes else set()
    magnitude_on_x = not contracted.isdisjoint(columns)
    if magnitude_on_x:
        if not columns <= set(labels):
            return NotImplemented
        x = _apply_magnitude(x, labels, lora)

    dot = partial(redispatch, lambda x, y: lax.dot_general(x, y, dimension_numbers, **params))
    out = dot(lora.w, x) if lora_first else dot(x, lora.w)

    def multiply(x: Any, labels: Labels, factor: Any, own: Labels, contracted: Any) -> Any:
        if lora_first:
            x, labels, factor, own = factor, own, x, labels
        return contract(x, labels, factor, own, contracted, **params)

    pair = (lora.a, lora.a_labels), (lora.b, lora.b_labels)
    first, second = pair[::-1] if contracted.isdisjoint(lora.ins) else pair
    sizes = dict(zip((*lora.w_labels, *labels), (*lora.shape, *x.shape), strict=True))
    if dropped_operand == "operand":
        x, labels = _drop(x, labels, lora, sizes)
    # Both factors have the leading axes. If these are contracted, the second product does it.
    low, labels = multiply(x, labels, *first, contracted.difference(lora.lead))
    update, labels = multiply(scale_by(lora.scale, low), labels, *second, {RANK, *contracted})
    if dropped_operand == "result":
        update, labels = _drop(update, labels, lora, sizes)
    total = out + arrange(update, labels, out_labels).astype(out.dtype)
    return total if magnitude_on_x else _apply_magnitude(total, out_labels, lora)


def _dropped_operand(lora: LoraArray, contracted: Collection[int]) -> str | None:
    """Return the array that dropout applies to: "operand", "result", or "nothing" if it is off.

    In `x @ w`, entries of the operand `x` are dropped. In the transposed product, which computes
    gradients, the same entries of the result are dropped. Return None for any other product.

    `contracted` are the contracted axes of `w`.
    """
    if not lora.drops:
        return "nothing"
    dropped, other = (lora.ins, lora.outs) if lora.dropped == "in" else (lora.outs, lora.ins)
    contracted = set(contracted)
    if contracted >= set(dropped) and contracted.isdisjoint(other):
        return "operand"
    if contracted.isdisjoint((*dropped, *lora.lead)) and contracted >= set(other):
        return "result"
    return None


# DoRA.


def _apply_magnitude(x: Any, labels: Sequence[Label], lora: LoraArray) -> Any:
    """Multiply an array by `magnitude / norm(w + scale * a @ b)`. Without DoRA, return `x`.

    `labels` are the labels of the axes of `x`, as in the module `contractions`.
    """
    if lora.magnitude is None:
        return x
    own_labels = tuple(label for label in lora.w_labels if label not in lora.norm_axes)
    factor = divide_by_norm(lora.magnitude, _norm_of_sum(lora))
    factor = arrange(lax.squeeze(factor, lora.norm_axes), own_labels, labels)
    return (x * factor).astype(x.dtype)


def _norm_of_sum(lora: LoraArray) -> jax.Array:
    """Return the norms of `v = w + scale * a @ b` along `norm_axes`, without computing `a @ b`.

    For columns, `‖v‖² = ‖w‖² + Σ b · (2 s aᵀw + s² aᵀa b)`, summed over the rank. The result loses
    precision if the update nearly cancels the weight.
    """
    lora = lora.with_dense_factors()
    w, a, b = jax.tree.map(lax.stop_gradient, (lora.w, lora.a, lora.b))
    pair = (widen(a), lora.a_labels), (widen(b), lora.b_labels)
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
    return jnp.sqrt(jnp.maximum(squared_norm(w, lora.norm_axes) + update, 0))


# Dropout.


def _drop(
    x: Any, labels: Labels, lora: LoraArray, sizes: Mapping[Label, int]
) -> tuple[Any, Labels]:
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
    return _drop_entries(arrange(x, labels, order), lora, shape), order


def _drop_entries(x: Any, lora: LoraArray, shape: tuple[int, ...]) -> Any:
    """Apply the dropout of a `LoraArray` to `x`, broadcast to `shape`.

    The first axes of `shape` are the leading axes of the adapter. The adapter has one dropout key
    for each index of these axes.
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


@register("conv_general_dilated")
def _conv(
    x: ArrayLike,
    kernel: LoraArray,
    *,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    **params: Any,
) -> Any:
    """Convolve with one factor of the adapter, then multiply the channels by the other factor.

    The output channels must be the only output axis or the only input axis of the kernel.
    """
    channels, feature = dimension_numbers.rhs_spec[0], dimension_numbers.out_spec[1]
    if kernel.outs == (channels,):
        first, second, second_labels, side = kernel.a, kernel.b, kernel.b_labels, "in"
    elif kernel.ins == (channels,):
        first, second, second_labels, side = kernel.b, kernel.a, kernel.a_labels, "out"
    else:
        return NotImplemented
    is_grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    if is_grouped or kernel.lead or channels in kernel.norm_axes:
        return NotImplemented
    if kernel.drops and kernel.dropped != side:
        return NotImplemented

    def conv(x: Any, kernel: Any) -> Any:
        return find_primitive("conv_general_dilated").bind(
            x,
            kernel,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=widen_dtype(preferred_element_type, x.dtype),
            **params,
        )

    x = jnp.asarray(x)
    out = redispatch(conv, x, kernel.w)
    dtype = jnp.result_type(x, first)
    x = _drop_entries(x, kernel, x.shape) if kernel.drops else x
    low = conv(x.astype(dtype), jnp.asarray(first, dtype))
    low_labels: Labels = tuple(RANK if i == feature else ("x", i) for i in range(low.ndim))
    update, labels = contract(
        scale_by(kernel.scale, low),
        low_labels,
        second,
        second_labels,
        [RANK],
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    out_labels = tuple(channels if label == RANK else label for label in low_labels)
    out += arrange(update, labels, out_labels).astype(out.dtype)
    return _apply_magnitude(out, out_labels, kernel)


@register("gather")
def _gather(
    x: LoraArray,
    indices: ArrayLike,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    """Look up rows, as in an embedding: `w[ids] + scale * a[ids] @ b`. Dropout does not apply."""
    numbers, axis, index_ndim = dimension_numbers, len(x.lead), jnp.ndim(indices) - 1
    row_shape = x.shape[axis + 1 :]
    # Rows out of bounds must stay equal when DoRA multiplies them. The default, None, is NaN.
    fills_with_nan = fill_value is None or bool(fill_value != fill_value)
    is_row_lookup = (
        x.in_ndim == 1
        and tuple(numbers.start_index_map) == tuple(numbers.collapsed_slice_dims) == (axis,)
        and tuple(numbers.operand_batching_dims) == x.lead
        and tuple(slice_sizes) == (*[1] * (axis + 1), *row_shape)
        and tuple(numbers.offset_dims) == tuple(range(index_ndim, index_ndim + x.out_ndim))
        and (x.magnitude is None or (x.norm_axes == x.ins and fills_with_nan))
    )
    if not is_row_lookup:
        return NotImplemented

    def look_up(leaf: Any, row_shape: tuple[int, ...], fill_value: Any) -> Any:
        offset_dims = tuple(range(index_ndim, index_ndim + len(row_shape)))
        return find_primitive("gather").bind(
            leaf,
            indices,
            dimension_numbers=numbers._replace(offset_dims=offset_dims),
            slice_sizes=(*[1] * (axis + 1), *row_shape),
            fill_value=fill_value,
            **params,
        )

    # If `w` is quantized, only the rows that are looked up are materialized.
    rows = redispatch(lambda w: look_up(w, row_shape, fill_value), x.w)
    rows = jnp.asarray(materialise_one(rows))
    # The update of rows out of bounds is 0, so they keep `fill_value`.
    scaled_rows = lambda a: look_up(scale_by(x.scale, jnp.asarray(a)), x.a.shape[-1:], 0)
    low = redispatch(scaled_rows, x.a)
    batch = dict(zip(numbers.start_indices_batching_dims, x.lead, strict=True))
    index_labels: Labels = tuple(batch.get(i, ("x", i)) for i in range(index_ndim))
    update, labels = contract(low, (*index_labels, RANK), x.b, x.b_labels, [RANK])
    out_labels = (*index_labels, *x.outs)
    out = rows + arrange(update, labels, out_labels).astype(rows.dtype)
    return _apply_magnitude(out, out_labels, x)


@register("transpose")
def _transpose(x: LoraArray, *, permutation: Any) -> Any:
    return x.permuted(permutation)


@register("reshape")
def _reshape(x: LoraArray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    groups = _regroup(x, tuple(new_sizes))
    if dimensions is not None or sharding is not None or groups is None:
        return NotImplemented
    lead, ins, outs = groups
    ones = lambda sizes: (1,) * len(sizes)
    norm_shape = (*ones(ins), *outs) if x.norm_axes == x.ins else (*ins, *ones(outs))
    key, magnitude, rank = x.dropout_key, x.magnitude, x.a.shape[-1]
    return x.changed(
        w=redispatch(lambda w: w.reshape(*lead, *ins, *outs), x.w),
        a=jnp.reshape(x.a, (*lead, *ins, rank)),
        b=jnp.reshape(x.b, (*lead, rank, *outs)),
        magnitude=None if magnitude is None else jnp.reshape(magnitude, (*lead, *norm_shape)),
        dropout_key=None if key is None else key.reshape(*lead, *key.shape[len(x.lead) :]),
        in_ndim=len(ins),
        out_ndim=len(outs),
    )


def _regroup(x: LoraArray, sizes: Shape) -> tuple[Shape, Shape, Shape] | None:
    """Split a new shape into the sizes of leading, input and output axes.

    Return None if the reshape merges axes of two of these kinds, such as an input axis and an
    output axis.
    """
    shape, n_lead = x.shape, len(x.lead)
    ins, outs = shape[n_lead : n_lead + x.in_ndim], shape[n_lead + x.in_ndim :]
    split = len(sizes) - len(ins) - len(outs)
    if split >= 0 and sizes[split:] == (*ins, *outs):
        return sizes[:split], ins, outs
    if sizes[:n_lead] != shape[:n_lead]:
        return None
    for i in range(n_lead + 1, len(sizes)):
        new_ins, new_outs = sizes[n_lead:i], sizes[i:]
        if math.prod(new_ins) == math.prod(ins) and math.prod(new_outs) == math.prod(outs):
            return shape[:n_lead], new_ins, new_outs
    return None


# Sums with a `LowRank`. JAX's primitive broadcasts axes of size 1, so the shapes are compared.


@register("add")
def _(x: Matrix, y: LowRank, **params: Any) -> Any:
    if x.shape != y.shape or not jnp.issubdtype(x.dtype, jnp.inexact):
        return NotImplemented
    return LoraArray(x, y.a, y.b)


@register("add")
def _(x: LoraArray, y: LowRank, **params: Any) -> Any:
    if x.shape != y.shape or not x.is_sum:
        return NotImplemented
    b = concatenate(scale_by(x.scale, x.b), y.b, -2)
    return LoraArray(x.w, concatenate(x.a, y.a, -1), b)
