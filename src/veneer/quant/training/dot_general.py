"""`dot_general` on codes, forward and backward: quantised training.

Forward, `q(x) · q(w)`. Backward, `dx = q(g) · q(w)ᵀ` and `dw = q(x)ᵀ · q(g)`, each with `g`
quantised by its own channels. A scale that varies along what such a product contracts cannot be
taken out of its sum: that of the other operand is multiplied with `g` before it is quantised, if it
is channelwise; an operand with tiles, a zero point or a codebook is quantised anew, from what it
was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ops.dot_general import DotDimensionNumbers, dot_general
from ..qarray import QArray
from ..tiles import over_tiles
from .operand import Operand, codes_of, has_scale_along, keys_for, quantise_gradient


@dataclass(frozen=True)
class Product:
    """A product, and how its operands and gradients are quantised. Hashable, for it is static."""

    dimension_numbers: Any
    params: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, Operand]
    grad_qtype: str

    def contracted(self, i: int) -> tuple[int, ...]:
        """The axes of an operand that are contracted."""
        return self.dimension_numbers[0][i]

    def batch(self, i: int) -> tuple[int, ...]:
        """Its batch axes."""
        return self.dimension_numbers[1][i]

    def free(self, i: int, ndim: int) -> tuple[int, ...]:
        """Its other axes."""
        taken = (*self.contracted(i), *self.batch(i))
        return tuple(axis for axis in range(ndim) if axis not in taken)


def normalised(dimension_numbers: DotDimensionNumbers) -> Any:
    """Dimension numbers that can be hashed."""
    return tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantised_dot_general(lhs: Any, rhs: Any, key: Any, product: Product) -> jax.Array:
    """The product of two arrays, on their codes."""
    return _forward(lhs, rhs, key, product)[0]


def _forward(lhs: Any, rhs: Any, key: Any, product: Product) -> tuple[jax.Array, Any]:
    given = lhs, rhs
    taken = [of.quantised(x) for of, x in zip(product.operands, given, strict=True)]
    x, w = taken
    out = dot_general(x, w, product.dimension_numbers, **dict(product.params))
    saved = []
    for i, (x, q) in enumerate(zip(given, taken, strict=True)):
        outer = (*product.batch(i), *product.free(i, x.ndim))
        saved.append(q if has_scale_along(q, outer) else x)
    return out, (saved, key)


def _backward(product: Product, residuals: Any, g: jax.Array) -> tuple[Any, Any, None]:
    saved, key = residuals
    keys = keys_for(key, g)
    gradients = [_gradient(product, i, saved, g, keys[i]) for i in range(2)]
    return gradients[0], gradients[1], None


quantised_dot_general.defvjp(_forward, _backward)


def _gradient(product: Product, i: int, saved: Sequence[Any], g: jax.Array, key: Any) -> jax.Array:
    """The gradient of operand `i`: a product of `g` with the other one."""
    x, y = saved[i], saved[1 - i]
    batch = len(product.batch(i))
    x_free, y_free = product.free(i, x.ndim), product.free(1 - i, y.ndim)
    # g has the batch axes, those left of the first operand, and those left of the second.
    of_second = range(g.ndim - (len(y_free) if i == 0 else len(x_free)), g.ndim)
    of_first = range(batch, of_second.start)
    g_contracted = tuple(of_second if i == 0 else of_first)
    dimension_numbers = ((g_contracted, y_free), (tuple(range(batch)), product.batch(1 - i)))

    wide = jnp.promote_types(g.dtype, jnp.float32)
    if isinstance(y, QArray):
        g = _scaled(g.astype(wide), y, product.batch(1 - i), y_free, g_contracted)
        y = codes_of(y, wide)
    else:
        y = product.operands[1 - i].requantised(y, y_free)
        g = g.astype(y.dtype)
    q = quantise_gradient(g, product.grad_qtype, g_contracted, key)
    out = dot_general(q, y, dimension_numbers, preferred_element_type=wide)

    # Its axes are the batch axes, those of x that are free, and those contracted, as y has them.
    pairs = sorted(zip(product.contracted(1 - i), product.contracted(i), strict=True))
    labels = (*product.batch(i), *x_free, *(axis for _, axis in pairs))
    order = sorted(range(len(labels)), key=labels.__getitem__)
    return lax.transpose(out, order).astype(product.operands[i].dtype)


def _scaled(
    g: jax.Array, y: QArray, batch: Sequence[int], free: Sequence[int], at: Sequence[int]
) -> jax.Array:
    """The gradient times the scale of `y`, whose free axes are those `at` of the gradient."""
    order = (*batch, *free)
    others = [axis for axis in range(y.ndim) if axis not in order]
    scale = lax.squeeze(lax.transpose(y.scales(), (*order, *others)), range(len(order), y.ndim))
    elsewhere = [axis for axis in range(len(batch), g.ndim) if axis not in at]
    return over_tiles(jnp.multiply, g, lax.expand_dims(scale, elsewhere).astype(g.dtype))
