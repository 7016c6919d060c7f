"""Products of an operand with minima, computed as a product of codes and a smaller product.

A minimum is an offset of all values of a tile. If t is the tile that contains k, then
`sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])` is the sum of

- the main product, `sum_k x[k] * codes[k, n] * scale[t, n]`, and
- the minimum term, `sum_t (sum of x over t) * minimum[t, n]`, which is smaller by the tile size.

If x is infinite, the result is NaN if these two terms have opposite signs, or if an integer code is
equal to its zero point.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.qarray import QArray
from .operands import accumulator, dequantized, has_minimum
from .product import Operand, Plan, QuantizedProduct, broadcast_tiles


def split_minimum(
    product: QuantizedProduct,
) -> tuple[QuantizedProduct, Callable[[Plan], Plan]] | None:
    """Split a product of an operand with minima into its main product and its minimum term.

    If both operands have minima, lhs is dequantized.

    **Returns:** a pair: the main product, and a function that takes a plan for the main product and
    returns a plan that also adds the minimum term. None if no operand has minima, or if codes
    cannot be multiplied before scales are applied.
    """
    lhs, rhs = product.operands
    if not (has_minimum(lhs) or has_minimum(rhs)):
        return None
    if not product.can_scale_output or product.terms == 0:
        return None
    side = 1 if has_minimum(rhs) else 0
    x: Operand = dequantized(lhs) if side and has_minimum(lhs) else product.operands[1 - side]
    q: Any = product.operands[side]
    q_main, dtype = q.replace(minimum=None), accumulator(product.out_dtype)
    main = product.replace(x, q_main, dtype) if side == 1 else product.replace(q_main, x, dtype)

    def add_minimum_term(main_plan: Plan) -> Plan:
        def compute(main_operands: tuple[Any, ...], x: Operand, q: QArray) -> jax.Array:
            out = main_plan.compute(*main_operands) + _minimum_term(main, x, q, side)
            return out.astype(product.out_dtype)

        return dataclasses.replace(
            main_plan,
            how=f"{main_plan.how}; add minima times per-tile sums",
            compute=compute,
            operands=(main_plan.operands, x, q),
        )

    return main, add_minimum_term


def _minimum_term(product: QuantizedProduct, x: Operand, q: QArray, side: int) -> jax.Array:
    """Return the minimum term: the product of the sums of `x` over tiles and the minima of `q`.

    `product` is the main product, which has the same output. `side` is 0 if `q` is lhs, 1 if rhs.
    """
    dtype = jnp.dtype(product.out_dtype)
    minima = q.minima()
    assert minima is not None
    # Sum x over the tiles of each contracted axis.
    contracting = product.dimension_numbers.contracting
    sums, q_contracted = dequantized(x).astype(dtype), contracting[side]
    for x_axis, q_axis in zip(contracting[1 - side], q_contracted, strict=True):
        count = minima.shape[q_axis]
        before, (size, *after) = sums.shape[:x_axis], sums.shape[x_axis:]
        sums = sums.reshape(*before, count, size // count, *after).sum(x_axis + 1)
    # Along the other axes, repeat the minimum of each tile.
    sizes = [minima.shape[i] if i in q_contracted else n for i, n in enumerate(q.shape)]
    minima = broadcast_tiles(minima.astype(dtype), sizes)
    exact = dataclasses.replace(product, precision=lax.Precision.HIGHEST)
    return exact.dot(*((sums, minima) if side == 1 else (minima, sums)), dtype)
