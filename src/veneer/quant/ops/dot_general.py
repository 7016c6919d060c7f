"""`dot_general` with quantised operands: the ways to a product, in the order they are preferred."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers, NestedAxes
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..arrays.pairs import runs_on_gpu
from ..arrays.qarray import QArray
from ..formats.tiles import over_tiles
from .by_kernel import by_kernel, too_small_for_kernels
from .by_xla import WAYS_BY_XLA
from .minima import minima_apart
from .operands import has_minimum, may_scale_outside, operand_pair
from .product import DotParams, Plan, carry_out, runs_on_cpu

# Each offers a plan or nothing: by_kernel, by_scaled_matmul, on_codes, by_tiles, by_values, dense.
WAYS = (by_kernel, *WAYS_BY_XLA)


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
    numbers = DotDimensionNumbers.of(dimension_numbers)
    params = DotParams(numbers, precision, preferred_element_type, out_sharding)
    pair = operand_pair(lhs, rhs, precision, preferred_element_type)
    plan = next(_plans(*pair, params))
    return plan()


def plan_of(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Plan:
    """Returns the first plan that there is; of a kernel, with what is done on other platforms."""
    plans = _plans(lhs, rhs, params)
    plan = next(plans)
    if not plan.is_kernel:
        return dataclasses.replace(plan, no_kernel=too_small_for_kernels(lhs, rhs, params))
    otherwise = next(plans)
    return dataclasses.replace(
        plan,
        how=f"{plan.how} (fallback: {otherwise.how})",
        dense=(plan if jax.default_backend() in plan.kernels_for else otherwise).dense,
    )


def _plans(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Iterator[Plan]:
    """Yields what the ways offer, the plan to carry out first; no way is asked twice."""
    has_minima = has_minimum(lhs) or has_minimum(rhs)
    apart = minima_apart(lhs, rhs, params) if has_minima else None
    if apart is not None:
        whole = by_kernel(lhs, rhs, params)
        if whole is not None:
            yield whole
        for without in _plans(apart.lhs, apart.rhs, apart.params):
            if whole is None or not without.is_kernel:
                yield apart.whole(without)
        return
    for way in WAYS:
        plan = way(lhs, rhs, params)
        if way is by_kernel and _may_fold_scale(plan, lhs, rhs):
            plan = _fold_scale_into_other(lhs, rhs, params) or plan
        if plan is not None:
            yield plan


def _may_fold_scale(plan: Plan | None, lhs: jax.Array | QArray, rhs: jax.Array | QArray) -> bool:
    """Return whether `_fold_scale_into_other` may give a faster plan than a plan of `by_kernel`.

    Kernels for CPUs read one scale per term of the sum, but are slow. Those for GPUs read none.
    """
    if runs_on_cpu():
        return plan is not None and "cpu" in plan.kernels_for
    # The product with the scale is rounded to the dtype of the other operand. In f16 it might
    # overflow where the dense product does not. GPUs have no kernel for f32.
    are_bf16 = lhs.dtype == rhs.dtype == jnp.bfloat16
    return runs_on_gpu() and are_bf16 and (plan is None or "gpu" not in plan.kernels_for)


def _fold_scale_into_other(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams
) -> Plan | None:
    """Plan a product by a kernel, with the scale of each term multiplied into the other operand.

    `sum_k x[k] * (codes[k, n] * scale[k])` is `sum_k (x[k] * scale[k]) * codes[k, n]`, and x has
    fewer rows. The values of a cache have such scales, one per token.

    On CPUs, x times the scale is f32, which kernels read. On GPUs it is rounded to the dtype of x,
    as XLA rounds codes times the scale in the dense product.
    """
    side = 1 if isinstance(rhs, QArray) else 0
    x, q = (lhs, rhs) if side else (rhs, lhs)
    if isinstance(x, QArray) or not isinstance(q, QArray) or has_minimum(q):
        return None
    is_last = q.ndim - 1 in params.dimension_numbers.contracting[side]
    if q.zero_point is not None and is_last:  # those are a row, as scales are: kernels read both
        return None
    out_dtype = params.out_dtype(lhs, rhs)
    if not may_scale_outside(lhs, rhs, out_dtype, params.precision) or params.terms(lhs) <= 1:
        return None
    counts, free = q.scale.shape, params.dimension_numbers.free(side, q.ndim)
    summed = params.dimension_numbers.contracting[side]
    if any(counts[i] != q.shape[i] for i in summed) or any(counts[i] > 1 for i in free):
        return None
    # From the axes of x to those of q. Along others of x the scale is the same.
    axes = {
        of_x: of_q
        for pair in params.dimension_numbers
        for of_x, of_q in zip(pair[1 - side], pair[side], strict=True)
    }
    scale = lax.transpose(q.scales(), [*(axes[i] for i in sorted(axes)), *free])
    scale = scale.reshape([counts[axes[i]] if i in axes else 1 for i in range(x.ndim)])
    dtype = scale.dtype if runs_on_cpu() else x.dtype
    x = over_tiles(jnp.multiply, x.astype(scale.dtype), scale).astype(dtype)
    one = jnp.ones([1] * q.ndim, scale.dtype)
    q = q.replace(scale=one, dense_dtype=dtype)
    params = dataclasses.replace(params, preferred_element_type=out_dtype)
    plan = by_kernel(x, q, params) if side else by_kernel(q, x, params)
    if plan is None or jax.default_backend() not in plan.kernels_for:
        return None
    name, other = ("rhs", "lhs") if side else ("lhs", "rhs")
    return dataclasses.replace(plan, how=f"{plan.how}; scale of {name} multiplied into {other}")


@register("dot_general")
def _dot_general(
    lhs: ArrayLike | QArray, rhs: ArrayLike | QArray, *, dimension_numbers: Any, **others: Any
) -> jax.Array:
    params = DotParams(DotDimensionNumbers.of(dimension_numbers), **others)
    pair = operand_pair(lhs, rhs, params.precision, params.preferred_element_type)
    return carry_out(plan_of(*pair, params))
