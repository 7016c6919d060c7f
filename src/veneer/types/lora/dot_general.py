"""The product of a `LoraArray` with a dense array: `x @ w + scale * (x @ a) @ b`, of any axes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from .array import LoraArray, scaled
from .dropout import drop
from .labels import RANK, Label, Labels, arrange, contract
from .magnitude import norm_of_sum, over_norm


@register("dot_general")
def _dense_lora(x: ArrayLike, w: LoraArray, *, dimension_numbers: Any, **params: Any) -> Any:
    return _dot_general(x, w, dimension_numbers, params, dense_first=True)


@register("dot_general")
def _lora_dense(w: LoraArray, x: ArrayLike, *, dimension_numbers: Any, **params: Any) -> Any:
    (w_summed, x_summed), (w_batch, x_batch) = dimension_numbers
    swapped = (x_summed, w_summed), (x_batch, w_batch)
    return _dot_general(x, w, swapped, params, dense_first=False)


@dataclass(frozen=True)
class _LoraProduct:
    """A product of a dense array and a `LoraArray`, by labels of their axes."""

    lora: LoraArray
    summed: frozenset[int]
    sizes: Mapping[Label, int]
    params: Mapping[str, Any]
    dense_first: bool

    def step(self, x: Any, labels: Labels, factor: Any, own: Labels, summed: Any) -> Any:
        pair = (x, labels), (factor, own)
        first, second = pair if self.dense_first else pair[::-1]
        return contract(*first, *second, summed, **self.params)

    def sums(self, axes: tuple[int, ...]) -> str:
        """Whether it sums over "none", "some" or "all" of the axes of the weight."""
        count = len(self.summed.intersection(axes))
        return "none" if count == 0 else "all" if count == len(axes) else "some"

    def drops(self) -> str | None:
        """What is dropped: parts of the "operand", of the "result", "nothing"; None if unknown."""
        lora = self.lora
        if not lora.drops:
            return "nothing"
        ins, outs = self.sums(lora.ins), self.sums(lora.outs)
        dropped, other = (ins, outs) if lora.dropped == "in" else (outs, ins)
        if (dropped, other) == ("all", "none"):
            return "operand"
        transposed = (dropped, other) == ("none", "all") and self.summed.isdisjoint(lora.lead)
        return "result" if transposed else None

    def update(self, x: Any, labels: Labels) -> tuple[Any, Labels]:
        """The product with `scale * a @ b`, and the labels of its axes."""
        lora, drops = self.lora, self.drops()
        pair = (lora.a, lora.a_labels), (lora.b, lora.b_labels)
        near, far = pair if self.sums(lora.ins) != "none" else pair[::-1]
        if drops == "operand":
            x, labels = drop(x, labels, lora, self.sizes)
        # The leading axes that are summed over are those of both factors, so they come second.
        low, labels = self.step(x, labels, *near, self.summed.difference(lora.lead))
        y, labels = self.step(scaled(low, lora.scale), labels, *far, {RANK, *self.summed})
        return drop(y, labels, lora, self.sizes) if drops == "result" else (y, labels)


def _dot_general(
    x: Any, lora: LoraArray, dimension_numbers: Any, params: dict[str, Any], dense_first: bool
) -> Any:
    """The rule, of dimension numbers with those of the dense array first."""
    if params["out_sharding"] is not None:
        return NotImplemented
    x = jnp.asarray(x)
    (x_summed, w_summed), (x_batch, w_batch) = dimension_numbers
    if not set(w_batch) <= set(lora.lead):
        return NotImplemented
    shared = dict(zip((*x_summed, *x_batch), (*w_summed, *w_batch), strict=True))
    labels: Labels = tuple(shared.get(i, ("x", i)) for i in range(x.ndim))
    sizes = dict(zip((*lora.w_labels, *labels), (*lora.shape, *x.shape), strict=True))
    product = _LoraProduct(lora, frozenset(w_summed), sizes, params, dense_first)
    neither = product.summed.isdisjoint((*lora.ins, *lora.outs))
    if neither or product.drops() is None:
        return NotImplemented
    free = [label for label in labels if label not in shared.values()]
    w_free = [i for i in lora.w_labels if i not in shared.values()]
    wanted = (*w_batch, *(free + w_free if dense_first else w_free + free))

    factor = None
    if lora.magnitude is not None:
        own = tuple(i for i in lora.w_labels if i not in lora.norm_axes)
        factor = lax.squeeze(over_norm(lora.magnitude, norm_of_sum(lora)), lora.norm_axes)
        if not product.summed.isdisjoint(own):
            if not set(own) <= set(labels):
                return NotImplemented
            x, factor = (x * arrange(factor, own, labels)).astype(x.dtype), None
    numbers: Any = (
        dimension_numbers if dense_first else tuple(pair[::-1] for pair in dimension_numbers)
    )
    dot = partial(redispatch, lambda x, y: lax.dot_general(x, y, numbers, **params))
    out = dot(x, lora.w) if dense_first else dot(lora.w, x)
    update, update_labels = product.update(x, labels)
    total = out + arrange(update, update_labels, wanted).astype(out.dtype)
    return total if factor is None else (total * arrange(factor, own, wanted)).astype(out.dtype)
