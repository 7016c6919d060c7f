"""`dot_general` with quantized operands, computed by the first strategy that supports it."""

import dataclasses
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from ..._core.policy import ALLOW, current_policy
from ..._core.primitives.dimension_numbers import NestedAxes
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..arrays.qarray import QArray
from .by_kernel import (
    describe_small_operand,
    plan_kernel,
    plan_kernel_with_folded_scale,
    plan_kernel_without_minimum,
)
from .by_xla import XLA_STRATEGIES
from .product import Plan, QuantizedProduct, execute, first_plan

#: All strategies in order of preference. The last strategy supports all products.
STRATEGIES = (
    plan_kernel_with_folded_scale,
    plan_kernel,
    plan_kernel_without_minimum,
    *XLA_STRATEGIES,
)


def dot_general(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    dimension_numbers: NestedAxes,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiply two arrays like `jax.lax.dot_general`; one or both can be a `QArray`.

    A product uses the first of these strategies that supports it:

    | strategy | condition |
    |---|---|
    | a kernel that reads packed codes | the platform has a kernel for the formats and sizes |
    | `jax.nn.scaled_matmul` | both operands are mxfp8, on a Blackwell GPU |
    | exact sums of integer codes | both operands have integer formats of at most 8 bits |
    | sums of float8 codes | both operands have float8 formats |
    | codes as floats, scales applied to the output | scales do not vary along contracted axes |
    | dequantized operands | all other cases |

    Sums of integer and float8 codes also support scales per tile: the products of each tile are
    summed separately. If the tiles have fewer than 128 values (16 if the output has at most 16 rows
    or columns), operands with tiles are dequantized instead. Products of 16-bit floats are summed
    in f32. A dense int8 or uint8 array is used as codes if the other operand has an integer format.
    `vn.explain` reports the strategy.

    **Arguments:**

    - `lhs`, `rhs`: arrays or QArrays. Implicit arrays of other types are materialized.
    - `dimension_numbers`, `precision`, `preferred_element_type`, `out_sharding`: as for
      `jax.lax.dot_general`.

    **Returns:** an array with the shape and dtype of the product of the dense arrays. The values
    are the same up to rounding.

    **Raises:** the errors of `jax.lax.dot_general`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int8", channelwise_axes=[1])
    >>> y = vn.quant.dot_general(jnp.ones((2, 3)), w, (([1], [0]), ([], [])))
    >>> y.shape, bool(jnp.allclose(y, jnp.ones((2, 3)) @ w.dequantize()))
    ((2, 3), True)
    """
    arguments = dimension_numbers, precision, preferred_element_type, out_sharding
    return first_plan(QuantizedProduct.create(lhs, rhs, *arguments), STRATEGIES)()


@register("dot_general")
def _dot_general(
    lhs: ArrayLike | QArray, rhs: ArrayLike | QArray, *, dimension_numbers: Any, **others: Any
) -> jax.Array:
    product = QuantizedProduct.create(lhs, rhs, dimension_numbers, **others)
    plan = first_plan(product, STRATEGIES)
    if current_policy() is not ALLOW:  # a report, a warning or an error shows the plan
        plan = complete_report(plan, product)
    return execute(plan)


def complete_report(plan: Plan, product: QuantizedProduct) -> Plan:
    """Return a copy of `plan` whose texts for `vn.explain` are complete.

    If a kernel computes the product, the field `how` also names the fallback for other platforms.
    If no kernel does because an operand is too small, the field `no_kernel` says so.
    """
    if not plan.kernels_for:
        return dataclasses.replace(plan, no_kernel=describe_small_operand(product))
    fallback = first_plan(product, XLA_STRATEGIES)
    has_kernel = jax.default_backend() in plan.kernels_for
    return dataclasses.replace(
        plan,
        how=f"{plan.how} (fallback: {fallback.how})",
        dense=plan.dense if has_kernel else fallback.dense,
    )
