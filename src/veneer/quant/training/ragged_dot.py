"""`ragged_dot_general` in training: in floating point, on operands and gradients as quantised."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from .backward import BackwardProduct
from .operand import (
    OperandRecipe,
    dense_residual,
    keys_for,
    quantize_gradient,
    quantized_operands,
    saved_operands,
)


@dataclass(frozen=True)
class RaggedDotRecipe:
    """How the operands and gradients of a product of groups are quantised. Hashable: static."""

    params: tuple[tuple[str, Any], ...]
    operands: tuple[OperandRecipe, OperandRecipe]
    backward: tuple[BackwardProduct, BackwardProduct]  # for the gradients of the operands

    def product(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Returns the product of dense operands."""
        bind = find_primitive("ragged_dot_general").bind
        return bind(lhs, rhs, group_sizes, **dict(self.params))

    def free(self, i: int, ndim: int) -> tuple[int, ...]:
        """Returns the axes of an operand that the output has, but for the batch."""
        numbers = dict(self.params)["ragged_dot_dimension_numbers"]
        contracted, batch = (pair[i] for pair in numbers.dot_dimension_numbers)
        groups = numbers.rhs_group_dimensions if i == 1 else ()
        return tuple(axis for axis in range(ndim) if axis not in (*contracted, *batch, *groups))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def quantized_ragged_dot(
    lhs: Any, rhs: Any, group_sizes: Any, key: Any, recipe: RaggedDotRecipe
) -> jax.Array:
    """The product of two arrays as quantised."""
    return _forward(lhs, rhs, group_sizes, key, recipe)[0]


def _forward(
    lhs: Any, rhs: Any, group_sizes: Any, key: Any, recipe: RaggedDotRecipe
) -> tuple[jax.Array, Any]:
    quantized = quantized_operands(recipe.operands, (lhs, rhs))
    x, w = map(materialise_one, quantized)
    out = recipe.product(x, w, group_sizes)
    saved = saved_operands((lhs, rhs), quantized, (True, True), recipe.backward)
    return out, (saved, group_sizes, key)


def _backward(
    recipe: RaggedDotRecipe, residuals: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    saved, group_sizes, key = residuals
    keys = keys_for(key, g)
    gradients = [_gradient(recipe, i, saved, group_sizes, g, keys[i]) for i in range(2)]
    return gradients[0], gradients[1], None, None


quantized_ragged_dot.defvjp(_forward, _backward)


def _gradient(
    recipe: RaggedDotRecipe,
    i: int,
    saved: Sequence[Any],
    group_sizes: jax.Array,
    g: jax.Array,
    key: Any,
) -> jax.Array:
    """The gradient of operand `i`: a product of `g` with the other one."""
    product, of_operand = recipe.backward[i], recipe.operands[i]
    free = recipe.free(1 - i, saved[1 - i].ndim)
    other = dense_residual(recipe.operands[1 - i], saved[1 - i], free, product)
    # g has the batch axes, those left of the first operand, and those left of the second.
    start = g.ndim - len(recipe.free(1, saved[1].ndim))
    before = start - len(recipe.free(0, saved[0].ndim))
    summed = range(start, g.ndim) if i == 0 else range(before, start)
    q = materialise_one(quantize_gradient(g, product, tuple(summed), key))

    def of(x: jax.Array) -> jax.Array:
        lhs, rhs = (x, other) if i == 0 else (other, x)
        return recipe.product(lhs, rhs, group_sizes)

    x = jnp.zeros(saved[i].shape, of_operand.dense_dtype)  # the product is linear in it
    return jax.vjp(of, x)[1](q)[0].astype(of_operand.dtype)
