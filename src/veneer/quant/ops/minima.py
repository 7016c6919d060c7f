"""Minima of tiles: a sum apart from that of the codes.

`sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])`, where t is the tile of k, is what it is
without a minimum, and `sum_t (sum of x over t) * minimum[t, n]`: a product that is smaller by the
size of a tile. So the ways to a product by XLA, and kernels of integers, know codes and scales
alone. Those of floats add it themselves, in the same way. Where x is infinite the sum is
NaN if its parts are of opposite signs, or a code is worth 0, as it is with zero points.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.qarray import QArray
from ..formats.tiles import over_tiles
from .operands import accumulator, dequantized, has_minimum, may_scale_outside
from .product import DotParams, Plan


@dataclasses.dataclass(frozen=True)
class MinimaApart:
    """A product of which one operand has minima, as one that has none, and what they add.

    **Arguments:**

    - `lhs`, `rhs`, `params`: the product without them. Its sum is rounded when both are added.
    - `x`, `q`: what multiplies the minima, and the operand that has them.
    - `side`: which operand that is, 0 or 1.
    - `out_dtype`: of the whole.
    """

    lhs: jax.Array | QArray
    rhs: jax.Array | QArray
    params: DotParams
    x: jax.Array | QArray
    q: QArray
    side: int
    out_dtype: jnp.dtype

    def whole(self, plan: Plan) -> Plan:
        """Returns the plan for the whole, of one for the product without minima."""

        def compute(operands: tuple[Any, ...], x: Any, q: QArray) -> jax.Array:
            return (plan.compute(*operands) + self._sums_of_tiles(x, q)).astype(self.out_dtype)

        return dataclasses.replace(
            plan,
            how=f"{plan.how}; add minima times per-tile sums",
            compute=compute,
            operands=(plan.operands, self.x, self.q),
        )

    def _sums_of_tiles(self, x: jax.Array | QArray, q: QArray) -> jax.Array:
        dtype = accumulator(self.out_dtype)
        minima = q.minima()
        assert minima is not None
        contracting = self.params.dimension_numbers.contracting
        sums, summed = dequantized(x).astype(dtype), contracting[self.side]
        for axis, of_q in zip(contracting[1 - self.side], summed, strict=True):
            count = minima.shape[of_q]
            before, (size, *after) = sums.shape[:axis], sums.shape[axis:]
            sums = sums.reshape(*before, count, size // count, *after).sum(axis + 1)
        # Along other axes a tile of several stands for each of them.
        sizes = [minima.shape[i] if i in summed else n for i, n in enumerate(q.shape)]
        each = over_tiles(jnp.add, jnp.zeros(sizes, dtype), minima.astype(dtype))
        exact = dataclasses.replace(self.params, precision=lax.Precision.HIGHEST)
        return exact.dot(*((sums, each) if self.side else (each, sums)), dtype)


def minima_apart(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams
) -> MinimaApart | None:
    """Takes the minima of an operand apart; None where there are none, or it has to be dense.

    Of two that have minima the first becomes dense.
    """
    out_dtype = params.out_dtype(lhs, rhs)
    if not may_scale_outside(lhs, rhs, out_dtype, params.precision) or params.terms(lhs) == 0:
        return None
    wide = dataclasses.replace(params, preferred_element_type=accumulator(out_dtype))
    if isinstance(rhs, QArray) and rhs.minimum is not None:
        lhs = dequantized(lhs) if has_minimum(lhs) else lhs
        without = rhs.replace(minimum=None)
        return MinimaApart(lhs, without, wide, lhs, rhs, 1, out_dtype)
    if isinstance(lhs, QArray) and lhs.minimum is not None:
        without = lhs.replace(minimum=None)
        return MinimaApart(without, rhs, wide, rhs, lhs, 0, out_dtype)
    return None
