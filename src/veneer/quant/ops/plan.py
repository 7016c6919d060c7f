"""Plans: how a product of stored operands is computed, chosen once, so that is told what is done.

A way to a product looks at types and shapes alone, and offers a plan or nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..._core.policy import note_how


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done for a product.

    **Arguments:**

    - `how`: what it is, as `vn.explain` tells it.
    - `compute`: from the operands to the product.
    - `operands`: arrays, and QArrays.
    - `is_kernel`: whether it is a kernel, which makes nothing dense. It is for some platforms, and
      on others what the next way plans is done.
    """

    how: str
    compute: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    is_kernel: bool = False

    def __call__(self) -> jax.Array:
        """Returns the product."""
        return self.compute(*self.operands)


def carry_out(plan: Plan) -> jax.Array:
    """Does what a rule does with a plan: says what it is, and computes the product."""
    note_how(plan.how)
    compute = plan.compute
    leaves = jax.tree.leaves(plan.operands)
    if not plan.is_kernel and any(isinstance(x, jax.core.Tracer) for x in leaves):
        # A derivative dequantises once more, instead of keeping the dense weights of a whole model
        # from the forward pass to the backward one.
        compute = jax.checkpoint(compute)
    return compute(*plan.operands)
