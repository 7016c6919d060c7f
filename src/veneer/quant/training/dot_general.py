"""`dot_general` on codes, forward and backward: quantised training.

Forward, `q(x) · q(w)`. Backward, `dx = q(g) · q(w)ᵀ` and `dw = q(x)ᵀ · q(g)`, each with `g`
quantised by its own channels, as its `BackwardProduct` says. A scale that varies along what such a
product contracts cannot be taken out of its sum: that of the other operand is multiplied with `g`
before it is quantised, if it is channelwise; an operand with tiles along the other axis, a zero
point or a codebook is quantised anew, from what it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.tiles import over_tiles
from ..ops.dot_general import dot_general
from .backward import BackwardProduct
from .operand import (
    OperandRecipe,
    codes_of,
    has_scale_along,
    has_tiles_along,
    keys_for,
    quantize_gradient,
    quantized_operands,
    saved_operands,
)


@dataclass(frozen=True)
class DotRecipe:
    """How the operands and gradients of a product are quantised. Hashable, for it is static."""

    dimension_numbers: DotDimensionNumbers
    params: tuple[tuple[str, Any], ...]
    operands: tuple[OperandRecipe, OperandRecipe]
    backward: tuple[BackwardProduct, BackwardProduct]  # for the gradients of the operands


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantized_dot_general(lhs: Any, rhs: Any, key: Any, recipe: DotRecipe) -> jax.Array:
    """The product of two arrays, on their codes."""
    return _forward(lhs, rhs, key, recipe)[0]


def _forward(lhs: Any, rhs: Any, key: Any, recipe: DotRecipe) -> tuple[jax.Array, Any]:
    numbers = recipe.dimension_numbers
    x, w = quantized = quantized_operands(recipe.operands, (lhs, rhs))
    out = dot_general(x, w, numbers, **dict(recipe.params))
    fits = [_fits(q, numbers.batch[i], numbers.free(i, q.ndim)) for i, q in enumerate(quantized)]
    return out, (saved_operands((lhs, rhs), quantized, fits, recipe.backward), key)


def _fits(q: Any, batch: Sequence[int], summed: Sequence[int]) -> bool:
    """Whether a product on codes that sums over other axes can be one of these codes."""
    return has_scale_along(q, (*batch, *summed)) or has_tiles_along(q, summed)


def _backward(recipe: DotRecipe, residuals: Any, g: jax.Array) -> tuple[Any, Any, None]:
    saved, key = residuals
    keys = keys_for(key, g)
    gradients = [
        _gradient(recipe, i, saved, g, keys[i]) if operand.has_gradient else None
        for i, operand in enumerate(recipe.operands)
    ]
    return gradients[0], gradients[1], None


quantized_dot_general.defvjp(_forward, _backward)


def _gradient(recipe: DotRecipe, i: int, saved: Sequence[Any], g: jax.Array, key: Any) -> jax.Array:
    """The gradient of operand `i`: a product of `g` with the other one."""
    x, y = saved[i], saved[1 - i]
    numbers = recipe.dimension_numbers if i == 0 else recipe.dimension_numbers.swapped  # x, then y
    (contracted, y_contracted), (batch, y_batch) = numbers
    x_free, y_free = numbers.free(0, x.ndim), numbers.free(1, y.ndim)
    # g has the batch axes, those left of the first operand, and those left of the second.
    of_second = range(g.ndim - (len(y_free) if i == 0 else len(x_free)), g.ndim)
    of_first = range(len(batch), of_second.start)
    g_contracted = tuple(of_second if i == 0 else of_first)
    of_g = DotDimensionNumbers((g_contracted, y_free), (tuple(range(len(batch))), y_batch))

    product = recipe.backward[i]
    wide = jnp.promote_types(g.dtype, jnp.float32)
    if not isinstance(y, QArray):
        y = recipe.operands[1 - i].requantized(y, y_free, product)
        y = y if y.dtype in QUANTIZABLE else y.astype(wide)  # lest g be rounded to integers
        g = g.astype(y.dtype)
    elif product.qtype is not None and has_scale_along(y, (*y_batch, *y_free)):
        g = _scaled(g.astype(wide), y, y_batch, y_free, g_contracted)
        y = codes_of(y, wide)
    else:
        g, y = g.astype(wide), y.replace(dense_dtype=wide.name)
    q = quantize_gradient(g, product, g_contracted, key)
    out = dot_general(q, y, of_g, preferred_element_type=wide)

    # Its axes are the batch axes, those of x that are free, and those contracted, as y has them.
    pairs = sorted(zip(y_contracted, contracted, strict=True))
    labels = (*batch, *x_free, *(axis for _, axis in pairs))
    order = sorted(range(len(labels)), key=labels.__getitem__)
    return lax.transpose(out, order).astype(recipe.operands[i].dtype)


def _scaled(
    g: jax.Array, y: QArray, batch: Sequence[int], free: Sequence[int], at: Sequence[int]
) -> jax.Array:
    """The gradient times the scale of `y`, whose free axes are those `at` of the gradient."""
    order = (*batch, *free)
    others = [axis for axis in range(y.ndim) if axis not in order]
    scale = lax.squeeze(lax.transpose(y.scales(), (*order, *others)), range(len(order), y.ndim))
    elsewhere = [axis for axis in range(len(batch), g.ndim) if axis not in at]
    return over_tiles(jnp.multiply, g, lax.expand_dims(scale, elsewhere).astype(g.dtype))
