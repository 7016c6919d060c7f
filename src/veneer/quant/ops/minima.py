"""Products of an operand with minima, computed as a product of codes and a smaller product.

`sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])`, where t is the tile of k, is the same
sum without the minimum, plus `sum_t (sum of x over t) * minimum[t, n]`. The second sum is smaller
by the tile size. Strategies by XLA and kernels for integers compute the first sum. Kernels for
floats compute both. If x is infinite, the result is NaN if the two sums have opposite signs, or if
an integer code is equal to its zero point.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.qarray import QArray
from ..formats.tiles import over_tiles
from .operands import accumulator, dequantized, has_minimum
from .product import Operand, Plan, QuantizedProduct


def split_minimum(
    product: QuantizedProduct,
) -> tuple[QuantizedProduct, Callable[[Plan], Plan]] | None:
    """Return a product without its minimum, and a function that adds the minimum to its plan.

    Return None if no operand has a minimum, or if this operand must be dequantized. If both have
    minima, lhs is dequantized.
    """
    lhs, rhs = product.operands
    if not (has_minimum(lhs) or has_minimum(rhs)):
        return None
    if not product.can_scale_output or product.terms == 0:
        return None
    side = 1 if has_minimum(rhs) else 0
    x: Operand = dequantized(lhs) if side and has_minimum(lhs) else product.operands[1 - side]
    q: Any = product.operands[side]
    without, dtype = q.replace(minimum=None), accumulator(product.out_dtype)
    rest = product.replace(x, without, dtype) if side else product.replace(without, x, dtype)

    def add_minimum_term(plan: Plan) -> Plan:
        def compute(operands: tuple[Any, ...], x: Operand, q: QArray) -> jax.Array:
            out = plan.compute(*operands) + _minimum_term(rest, x, q, side)
            return out.astype(product.out_dtype)

        return dataclasses.replace(
            plan,
            how=f"{plan.how}; add minima times per-tile sums",
            compute=compute,
            operands=(plan.operands, x, q),
        )

    return rest, add_minimum_term


def _minimum_term(product: QuantizedProduct, x: Operand, q: QArray, side: int) -> jax.Array:
    """Return the product of the sums of x over tiles and the minima."""
    dtype = jnp.dtype(product.out_dtype)
    minima = q.minima()
    assert minima is not None
    contracting = product.dimension_numbers.contracting
    sums, contracted = dequantized(x).astype(dtype), contracting[side]
    for x_axis, q_axis in zip(contracting[1 - side], contracted, strict=True):
        count = minima.shape[q_axis]
        before, (size, *after) = sums.shape[:x_axis], sums.shape[x_axis:]
        sums = sums.reshape(*before, count, size // count, *after).sum(x_axis + 1)
    # Along the other axes, each value needs the minimum of its tile.
    sizes = [minima.shape[i] if i in contracted else n for i, n in enumerate(q.shape)]
    each = over_tiles(jnp.add, jnp.zeros(sizes, dtype), minima.astype(dtype))
    exact = dataclasses.replace(product, precision=lax.Precision.HIGHEST)
    return exact.dot(*((sums, each) if side else (each, sums)), dtype)
