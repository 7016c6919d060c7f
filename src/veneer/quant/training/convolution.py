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
from ..ops.convolution import conv_general_dilated
from ..qarray import QArray
from ..tiles import over_tiles
from .operand import (
    Operand,
    codes_of,
    has_scale_along,
    keys_for,
    quantise_gradient,
    reversed_codes,
)

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Convolution:
    """A convolution, and how its operands and gradients are quantised. Hashable: it is static."""

    window_strides: tuple[int, ...]
    padding: Pads
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    more: tuple[tuple[str, Any], ...]  # precision, preferred_element_type, out_sharding
    operands: tuple[Operand, Operand]
    grad_qtype: str

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
def quantised_convolution(lhs: Any, rhs: Any, key: Any, convolution: Convolution) -> jax.Array:
    """The convolution of two arrays, on their codes."""
    return _forward(lhs, rhs, key, convolution)[0]


def _forward(lhs: Any, rhs: Any, key: Any, convolution: Convolution) -> tuple[jax.Array, Any]:
    given = lhs, rhs
    taken = [of.quantised(x) for of, x in zip(convolution.operands, given, strict=True)]
    x, w = taken
    out = conv_general_dilated(x, w, **convolution.numbers, **dict(convolution.more))
    if convolution.is_grouped:
        return out, (taken, key)
    numbers = convolution.dimension_numbers
    # The axes that a derivative sums over: the batch, and the output channels.
    outer = (numbers.lhs_spec[0],), (numbers.rhs_spec[0],)
    saved = [
        q if has_scale_along(q, axes) else x for x, q, axes in zip(given, taken, outer, strict=True)
    ]
    return out, (saved, key)


def _backward(convolution: Convolution, residuals: Any, g: jax.Array) -> tuple[Any, Any, None]:
    saved, key = residuals
    keys = keys_for(key, g)
    if convolution.is_grouped:
        by_lhs, by_rhs = _grouped(convolution, saved, g, keys[0])
        return by_lhs, by_rhs, None
    x, w = saved
    by_lhs = _by_lhs(convolution, x, w, g, keys[0])
    by_rhs = _by_rhs(convolution, x, w, g, keys[1])
    of_lhs, of_rhs = convolution.operands
    return by_lhs.astype(of_lhs.dtype), by_rhs.astype(of_rhs.dtype), None


quantised_convolution.defvjp(_forward, _backward)


def _grouped(convolution: Convolution, saved: Any, g: jax.Array, key: Any) -> list[jax.Array]:
    """Both derivatives in floating point, of one gradient with a scale for each of the batch."""
    out = convolution.dimension_numbers.out_spec
    q = quantise_gradient(g, convolution.grad_qtype, (*out[2:], out[1]), key)
    dense = [materialise_one(x) for x in saved]
    conv = partial(lax.conv_general_dilated, **convolution.numbers, **dict(convolution.more))
    found = jax.vjp(conv, *dense)[1](q.dequantize())
    return [x.astype(of.dtype) for x, of in zip(found, convolution.operands, strict=True)]


def _by_lhs(c: Convolution, x: Any, w: Any, g: jax.Array, key: Any) -> jax.Array:
    """The gradient of the input: that of the output, dilated, with the reversed kernel."""
    lhs, rhs, out = c.dimension_numbers.lhs_spec, *_specs(c)
    dimension_numbers = lax.ConvDimensionNumbers(out, _swapped(rhs), lhs)
    wide = jnp.promote_types(g.dtype, jnp.float32)
    spatial = rhs[2:]
    if isinstance(w, QArray):
        g = _scaled(g.astype(wide), w, rhs[0], out[1])
        w = reversed_codes(w, wide, spatial)
    else:
        w = c.operands[1].requantised(lax.rev(w, spatial), (*spatial, rhs[0]))
        g = g.astype(w.dtype)
    q = quantise_gradient(g, c.grad_qtype, (*out[2:], out[1]), key)
    return conv_general_dilated(
        q,
        w,
        window_strides=c.lhs_dilation,
        padding=_pads_by_lhs(c, _sizes(x, lhs), _sizes(w, rhs), _sizes(g, out)),
        lhs_dilation=c.window_strides,
        rhs_dilation=c.rhs_dilation,
        dimension_numbers=dimension_numbers,
        preferred_element_type=wide,
    )


def _by_rhs(c: Convolution, x: Any, w: Any, g: jax.Array, key: Any) -> jax.Array:
    """The gradient of the kernel: the input with that of the output, the batch as its channels."""
    lhs, rhs, out = c.dimension_numbers.lhs_spec, *_specs(c)
    dimension_numbers = lax.ConvDimensionNumbers(_swapped(lhs), _swapped(out), _swapped(rhs))
    wide = jnp.promote_types(g.dtype, jnp.float32)
    padding = _pads_by_rhs(c, _sizes(x, lhs), _sizes(w, rhs), _sizes(g, out))
    if isinstance(x, QArray):
        g = _scaled(g.astype(wide), x, lhs[0], out[0])
        x = codes_of(x, wide)
    else:
        x = c.operands[0].requantised(x, (*lhs[2:], lhs[0]))
        g = g.astype(x.dtype)
    q = quantise_gradient(g, c.grad_qtype, (*out[2:], out[0]), key)
    return conv_general_dilated(
        x,
        q,
        window_strides=c.rhs_dilation,
        padding=padding,
        lhs_dilation=c.lhs_dilation,
        rhs_dilation=c.window_strides,
        dimension_numbers=dimension_numbers,
        preferred_element_type=wide,
    )


def _specs(c: Convolution) -> tuple[Sequence[int], Sequence[int]]:
    return c.dimension_numbers.rhs_spec, c.dimension_numbers.out_spec


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


def _pads_by_lhs(c: Convolution, x: Any, w: Any, g: Any) -> Pads:
    """Each entry of the input has met the whole kernel, but for what the padding let it miss.

    The gradient is padded by a kernel less one on either side, less the padding before; and after,
    by as much as gives the input its length.
    """
    pads = []
    for i, (low, _) in enumerate(c.padding):
        window = _dilated(w[i], c.rhs_dilation[i])
        before = window - 1 - low
        length = _dilated(x[i], c.lhs_dilation[i]) + window - 1
        pads.append((before, length - _dilated(g[i], c.window_strides[i]) - before))
    return tuple(pads)


def _pads_by_rhs(c: Convolution, x: Any, w: Any, g: Any) -> Pads:
    """The input as it was padded before; and after, by as much as gives the kernel its length."""
    pads = []
    for i, (low, _) in enumerate(c.padding):
        length = _dilated(w[i], c.rhs_dilation[i]) - 1 + _dilated(g[i], c.window_strides[i])
        pads.append((low, length - _dilated(x[i], c.lhs_dilation[i]) - low))
    return tuple(pads)
