"""`conv_general_dilated` on codes, forward and backward: quantised training.

As `dot_general.py`: both derivatives of a convolution are convolutions, by the reversed kernel and
of the input with the gradient. Those of grouped ones are not computed on codes here, but in
floating point, with the same values of the operands and of the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.value import materialise_one
from ..arrays.qarray import QArray
from ..formats.tiles import over_tiles
from ..ops.convolution import conv_general_dilated
from .backward import BackwardProduct
from .operand import (
    OperandRecipe,
    codes_of,
    dense_residual,
    has_scale_along,
    keys_for,
    quantize_gradient,
    quantized_operands,
    reversed_codes,
    saved_operands,
)

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ConvolutionRecipe:
    """How the operands and gradients of a convolution are quantised. Hashable: it is static."""

    window_strides: tuple[int, ...]
    padding: Pads
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    more: tuple[tuple[str, Any], ...]  # precision, preferred_element_type, out_sharding
    operands: tuple[OperandRecipe, OperandRecipe]
    backward: tuple[BackwardProduct, BackwardProduct]  # for the gradients of the operands

    @property
    def is_grouped(self) -> bool:
        """Whether an output channel sees a part of the input alone."""
        return self.feature_group_count != 1 or self.batch_group_count != 1

    @property
    def numbers(self) -> dict[str, Any]:
        """What `conv_general_dilated` takes, but for types."""
        names = "window_strides padding lhs_dilation rhs_dilation dimension_numbers"
        groups = "feature_group_count batch_group_count"
        return {name: getattr(self, name) for name in (*names.split(), *groups.split())}


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantized_convolution(lhs: Any, rhs: Any, key: Any, recipe: ConvolutionRecipe) -> jax.Array:
    """The convolution of two arrays, on their codes."""
    return _forward(lhs, rhs, key, recipe)[0]


def _forward(lhs: Any, rhs: Any, key: Any, recipe: ConvolutionRecipe) -> tuple[jax.Array, Any]:
    x, w = quantized = quantized_operands(recipe.operands, (lhs, rhs))
    out = conv_general_dilated(x, w, **recipe.numbers, **dict(recipe.more))
    # Of the axes that a derivative sums over, those that may have scales: the batch, and the
    # output channels.
    outer = (recipe.dimension_numbers.lhs_spec[0],), (recipe.dimension_numbers.rhs_spec[0],)
    fits = [recipe.is_grouped or has_scale_along(*of) for of in zip(quantized, outer, strict=True)]
    return out, (saved_operands((lhs, rhs), quantized, fits, recipe.backward), key)


def _backward(recipe: ConvolutionRecipe, residuals: Any, g: jax.Array) -> tuple[Any, Any, None]:
    saved, key = residuals
    keys = keys_for(key, g)
    if recipe.is_grouped:
        by_lhs, by_rhs = _grouped(recipe, saved, g, keys)
        return by_lhs, by_rhs, None
    x, w = saved
    by_lhs = _by_lhs(recipe, x, w, g, keys[0])
    by_rhs = _by_rhs(recipe, x, w, g, keys[1])
    of_lhs, of_rhs = recipe.operands
    return by_lhs.astype(of_lhs.dtype), by_rhs.astype(of_rhs.dtype), None


quantized_convolution.defvjp(_forward, _backward)


def _grouped(recipe: ConvolutionRecipe, saved: Any, g: jax.Array, keys: Any) -> list[jax.Array]:
    """Both derivatives in floating point, of a gradient as it is quantised for each of them."""
    out, rhs = recipe.dimension_numbers.out_spec, recipe.dimension_numbers.rhs_spec
    lhs = recipe.dimension_numbers.lhs_spec
    # What is summed over: of the gradient, and of the other operand.
    summed = ((*out[2:], out[1]), (*rhs[2:], rhs[0])), ((*out[2:], out[0]), (*lhs[2:], lhs[0]))
    conv = partial(lax.conv_general_dilated, **recipe.numbers, **dict(recipe.more))
    gradients = []
    for i, (of_g, of_other) in enumerate(summed):
        product = recipe.backward[i]
        other = dense_residual(recipe.operands[1 - i], saved[1 - i], of_other, product)
        of_operand = partial(conv, rhs=other) if i == 0 else partial(conv, other)
        x = jnp.zeros(saved[i].shape, recipe.operands[i].dense_dtype)  # it is linear in x
        q = materialise_one(quantize_gradient(g, product, of_g, keys[i]))
        gradients += jax.vjp(of_operand, x)[1](q)
    return [x.astype(of.dtype) for x, of in zip(gradients, recipe.operands, strict=True)]


def _by_lhs(recipe: ConvolutionRecipe, x: Any, w: Any, g: jax.Array, key: Any) -> jax.Array:
    """The gradient of the input: that of the output, dilated, with the reversed kernel."""
    lhs, rhs, out = recipe.dimension_numbers.lhs_spec, *_specs(recipe)
    dimension_numbers = lax.ConvDimensionNumbers(out, _swapped(rhs), lhs)
    product = recipe.backward[0]
    wide = jnp.promote_types(g.dtype, jnp.float32)
    spatial = rhs[2:]
    if not isinstance(w, QArray):
        w = recipe.operands[1].requantized(lax.rev(w, spatial), (*spatial, rhs[0]), product)
        g = g.astype(w.dtype)
    elif product.qtype is not None:
        g = _scaled(g.astype(wide), w, rhs[0], out[1])
        w = reversed_codes(w, wide, spatial)
    else:
        g, w = g.astype(wide), lax.rev(w.dequantize().astype(wide), spatial)
    q = quantize_gradient(g, product, (*out[2:], out[1]), key)
    return conv_general_dilated(
        q,
        w,
        window_strides=recipe.lhs_dilation,
        padding=_pads_by_lhs(recipe, _sizes(x, lhs), _sizes(w, rhs), _sizes(g, out)),
        lhs_dilation=recipe.window_strides,
        rhs_dilation=recipe.rhs_dilation,
        dimension_numbers=dimension_numbers,
        preferred_element_type=wide,
    )


def _by_rhs(recipe: ConvolutionRecipe, x: Any, w: Any, g: jax.Array, key: Any) -> jax.Array:
    """The gradient of the kernel: the input with that of the output, the batch as its channels."""
    product = recipe.backward[1]
    lhs, rhs, out = recipe.dimension_numbers.lhs_spec, *_specs(recipe)
    dimension_numbers = lax.ConvDimensionNumbers(_swapped(lhs), _swapped(out), _swapped(rhs))
    wide = jnp.promote_types(g.dtype, jnp.float32)
    padding = _pads_by_rhs(recipe, _sizes(x, lhs), _sizes(w, rhs), _sizes(g, out))
    if not isinstance(x, QArray):
        x = recipe.operands[0].requantized(x, (*lhs[2:], lhs[0]), product)
        g = g.astype(x.dtype)
    elif product.qtype is not None:
        g = _scaled(g.astype(wide), x, lhs[0], out[0])
        x = codes_of(x, wide)
    else:
        g, x = g.astype(wide), x.dequantize().astype(wide)
    q = quantize_gradient(g, product, (*out[2:], out[0]), key)
    return conv_general_dilated(
        x,
        q,
        window_strides=recipe.rhs_dilation,
        padding=padding,
        lhs_dilation=recipe.lhs_dilation,
        rhs_dilation=recipe.window_strides,
        dimension_numbers=dimension_numbers,
        preferred_element_type=wide,
    )


def _specs(recipe: ConvolutionRecipe) -> tuple[Sequence[int], Sequence[int]]:
    return recipe.dimension_numbers.rhs_spec, recipe.dimension_numbers.out_spec


def _swapped(spec: Sequence[int]) -> tuple[int, ...]:
    return (spec[1], spec[0], *spec[2:])


def _sizes(x: Any, spec: Sequence[int]) -> list[int]:
    return [x.shape[axis] for axis in spec[2:]]


def _scaled(g: jax.Array, q: QArray, axis: int, at: int) -> jax.Array:
    """The gradient times the scale of an operand, whose `axis` is that `at` of the gradient."""
    shape = [1] * g.ndim
    shape[at] = q.scale.shape[axis]
    return over_tiles(jnp.multiply, g, q.scales().reshape(shape).astype(g.dtype))


def _dilated(size: int, dilation: int) -> int:
    """How long an axis is with gaps between its entries."""
    return 0 if size == 0 else 1 + dilation * (size - 1)


def _pads_by_lhs(recipe: ConvolutionRecipe, x: Any, w: Any, g: Any) -> Pads:
    """Each entry of the input has met the whole kernel, but for what the padding let it miss.

    The gradient is padded by a kernel less one on either side, less the padding before; and after,
    by as much as gives the input its length.
    """
    pads = []
    for i, (low, _) in enumerate(recipe.padding):
        window = _dilated(w[i], recipe.rhs_dilation[i])
        before = window - 1 - low
        length = _dilated(x[i], recipe.lhs_dilation[i]) + window - 1
        pads.append((before, length - _dilated(g[i], recipe.window_strides[i]) - before))
    return tuple(pads)


def _pads_by_rhs(recipe: ConvolutionRecipe, x: Any, w: Any, g: Any) -> Pads:
    """The input as it was padded before; and after, by as much as gives the kernel its length."""
    pads = []
    for i, (low, _) in enumerate(recipe.padding):
        length = (
            _dilated(w[i], recipe.rhs_dilation[i]) - 1 + _dilated(g[i], recipe.window_strides[i])
        )
        pads.append((low, length - _dilated(x[i], recipe.lhs_dilation[i]) - low))
    return tuple(pads)
