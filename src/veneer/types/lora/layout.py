"""Rules for primitives that move entries about: on each leaf, along the axes that it has."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import implicit
from .array import LoraArray
from .labels import RANK


def _by_leaf(lora: LoraArray, function: Callable[[Any, Sequence[int | None]], Any]) -> LoraArray:
    """`function` of each leaf and of its axes: numbers of those of the array, or None."""
    key = lora.dropout_key
    of_key = () if key is None else (*lora.lead, *[None] * (key.ndim - len(lora.lead)))
    axes = {
        "w": lora.w_labels,
        "a": lora.a_labels,
        "b": lora.b_labels,
        "magnitude": [None if i in lora.norm_axes else i for i in lora.w_labels],
        "dropout_key": of_key,
    }
    changes = {}
    for name, own in axes.items():
        leaf = getattr(lora, name)
        if leaf is not None:
            own = [None if label == RANK else label for label in own]
            changes[name] = implicit(lambda x, own=own: function(x, own))(leaf)
    return lora.changed(**changes)


@register("transpose")
def _transpose(x: LoraArray, *, permutation: Any) -> Any:
    return x.permuted(permutation)


def _cut(x: LoraArray, spans: Mapping[int, tuple[int, int, int]]) -> Any:
    """The entries from a start to a limit, by a stride, along some axes."""
    if not spans.keys().isdisjoint(x.norm_axes):  # the norm of a part is another
        return NotImplemented

    def of(leaf: Any, axes: Sequence[int | None]) -> Any:
        own = [spans.get(i, (0, n, 1)) for i, n in zip(axes, leaf.shape, strict=True)]  # type: ignore[arg-type]
        return lax.slice(leaf, *zip(*own, strict=True)) if spans.keys() & set(axes) else leaf

    return _by_leaf(x, of)


@register("slice")
def _slice(x: LoraArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    spans = zip(start_indices, limit_indices, strides or (1,) * x.ndim, strict=True)
    return _cut(x, {i: s for i, s in enumerate(spans) if s != (0, x.shape[i], 1)})


@register("split")
def _split(x: LoraArray, *, sizes: Any, axis: int) -> Any:
    if axis in x.norm_axes:
        return NotImplemented
    limits = list(itertools.accumulate(map(int, sizes)))
    starts = [0, *limits]
    return [_cut(x, {axis: (starts[i], limit, 1)}) for i, limit in enumerate(limits)]


@register("dynamic_slice")
def _dynamic_slice(x: LoraArray, *indices: ArrayLike, slice_sizes: Any) -> Any:
    cut = {i: n for i, n in enumerate(slice_sizes) if n != x.shape[i]}
    if not cut.keys().isdisjoint(x.norm_axes):
        return NotImplemented

    def of(leaf: Any, axes: Sequence[int | None]) -> Any:
        if not cut.keys() & set(axes):
            return leaf
        starts = [indices[i] if i in cut else jnp.zeros_like(indices[0]) for i in axes]
        sizes = [cut.get(i, n) for i, n in zip(axes, leaf.shape, strict=True)]  # type: ignore[arg-type]
        return lax.dynamic_slice(leaf, starts, sizes)

    return _by_leaf(x, of)


@register("rev")
def _rev(x: LoraArray, *, dimensions: Any) -> LoraArray:
    def of(leaf: Any, axes: Sequence[int | None]) -> Any:
        own = [j for j, i in enumerate(axes) if i in dimensions]
        return lax.rev(leaf, own) if own else leaf

    return _by_leaf(x, of)


@register("reshape")
def _reshape(x: LoraArray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    """Of the leading axes; or of those that come in or go out, each among themselves."""
    if dimensions is not None or sharding is not None:
        return NotImplemented
    found = _regrouped(x, new_sizes)
    if found is None:
        return NotImplemented
    lead, ins, outs = found
    key, n = x.dropout_key, len(x.lead)
    ones = lambda sizes: (1,) * len(sizes)
    of_magnitude = (*ones(ins), *outs) if x.norm_axes == x.ins else (*ins, *ones(outs))
    magnitude = x.magnitude
    rank = x.a.shape[-1]
    return x.changed(
        w=implicit(lambda w: w.reshape(*lead, *ins, *outs))(x.w),
        a=jnp.reshape(x.a, (*lead, *ins, rank)),
        b=jnp.reshape(x.b, (*lead, rank, *outs)),
        magnitude=magnitude
        if magnitude is None
        else jnp.reshape(magnitude, (*lead, *of_magnitude)),
        dropout_key=None if key is None else key.reshape(*lead, *key.shape[n:]),
        in_ndim=len(ins),
        out_ndim=len(outs),
    )


Shape = tuple[int, ...]


def _regrouped(x: LoraArray, sizes: Sequence[int]) -> tuple[Shape, Shape, Shape] | None:
    """The new sizes of the leading axes, of those that come in, and of those that go out."""
    shape, sizes, n = x.shape, tuple(sizes), len(x.lead)
    inner, count = shape[n:], x.in_ndim
    if sizes[len(sizes) - len(inner) :] == inner and len(sizes) >= len(inner):
        return sizes[: len(sizes) - len(inner)], inner[:count], inner[count:]
    if sizes[:n] != shape[:n]:
        return None
    sizes = sizes[n:]
    old = math.prod(inner[:count]), math.prod(inner[count:])
    for i in range(1, len(sizes)):
        if (math.prod(sizes[:i]), math.prod(sizes[i:])) == old:
            return shape[:n], sizes[:i], sizes[i:]
    return None
