"""`ragged_dot` and `ragged_dot_general` with quantized operands, as in a mixture of experts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.value import materialise_one
from ..arrays.qarray import QUANTIZABLE, QArray
from .dot_general import STRATEGIES, complete_report
from .group_tiles import GroupedDotParams, multiply_groups
from .operands import accumulator, dequantized, fixes_dtypes, operand_pair
from .product import (
    Operand,
    Plan,
    QuantizedProduct,
    dense_nbytes,
    describe_dequantized,
    execute,
    first_plan,
    runs_on_cpu,
)

_MATRICES = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])


def ragged_dot(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    group_sizes: ArrayLike | ImplicitArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
) -> jax.Array:
    """Multiply groups of rows like `jax.lax.ragged_dot`; one or both operands can be a `QArray`.

    This is the product of a mixture of experts: tokens sorted by expert, times one matrix per
    expert. Quantize experts `[G, K, N]` with `channelwise_axes=[0, 2]`, or with tiles along axis 1.

    **Arguments:**

    - `lhs`: the rows, `[M, K]`.
    - `rhs`: the matrices, `[G, K, N]`.
    - `group_sizes`: the number of rows of each group, `[G]`.
    - `precision`, `preferred_element_type`, `group_offset`: as for `jax.lax.ragged_dot`. JAX does
      not implement `group_offset` on all platforms.

    **Returns:** an array `[M, N]`: each row times the matrix of its group. It has the dtype of the
    product of the dense arrays. Rows that belong to no group are 0.

    **Raises:** the errors of `jax.lax.ragged_dot`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> experts = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> q = vn.quant.quantize(experts, "nf4", channelwise_axes=[0, 2])
    >>> vn.quant.ragged_dot(jnp.ones((4, 2)), q, jnp.array([1, 2]))[:, 0].tolist()
    [1.0, 10.0, 10.0, 0.0]
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, _MATRICES, precision, preferred_element_type, group_offset
    )


def ragged_dot_general(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    group_sizes: ArrayLike | ImplicitArray,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
) -> jax.Array:
    """Multiply groups like `jax.lax.ragged_dot_general`; one or both operands can be a `QArray`.

    The ragged axis determines how the product is computed:

    | ragged axis | product |
    |---|---|
    | a batch axis | by `vn.quant.dot_general`, because the group sizes have no effect |
    | a free axis of `lhs`, and `rhs` is quantized | on CPU, one group at a time; else dequantized |
    | any other case, such as a contracted axis | the operands are dequantized |

    If groups are multiplied one at a time, `rhs` is never dequantized as a whole. A NaN in a row of
    `lhs` then affects only that row of the result. A NaN in the matrix of a group affects only the
    rows of that group.

    **Arguments:**

    - `lhs`, `rhs`, `group_sizes`: arrays; `lhs` and `rhs` can be QArrays. Implicit arrays of other
      types are materialized.
    - `dimension_numbers`: a `jax.lax.RaggedDotDimensionNumbers`. In JAX, this argument is called
      `ragged_dot_dimension_numbers`.
    - `precision`, `preferred_element_type`, `group_offset`: as for `jax.lax.ragged_dot_general`.

    **Returns:** an array with the shape and dtype of the product of the dense arrays. The values
    are the same up to rounding.

    **Raises:** the errors of `jax.lax.ragged_dot_general`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.ones((2, 3)), "int8")
    >>> summed = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    >>> y = vn.quant.ragged_dot_general(jnp.ones((2, 1)), w, jnp.array([2, 0]), summed)
    >>> y.shape, [round(float(v), 1) for v in y[:, 0, 0]]
    ((2, 1, 3), [2.0, 0.0])
    """
    group_sizes = jnp.asarray(materialise_one(group_sizes))
    params = dimension_numbers, precision, preferred_element_type, group_offset
    return _plan_ragged(lhs, rhs, group_sizes, *params)()


def _plan_ragged(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    group_sizes: jax.Array,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
    preferred_element_type: DTypeLike | None,
    group_offset: ArrayLike | None,
) -> Plan:
    """Return a plan for `ragged_dot_general`, as described in the table of that function.

    **Raises:** the errors of `jax.lax.ragged_dot_general`, for shapes that do not match.
    """
    lhs, rhs = operand_pair(lhs, rhs, precision, preferred_element_type)
    multiply: Callable[..., jax.Array] = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs, group_sizes)]
    out = jax.eval_shape(multiply, *avals)
    operands = lhs, rhs, group_sizes
    how_dense = describe_dequantized(lhs, rhs)

    def multiply_dense(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        lhs, rhs = dequantized(lhs), dequantized(rhs)
        return multiply(lhs, rhs, group_sizes, group_offset=group_offset)

    dense = Plan(how_dense, multiply_dense, operands, dense_nbytes(lhs, rhs))
    if group_offset is not None:
        return dense
    dot_numbers = DotDimensionNumbers.of(dimension_numbers.dot_dimension_numbers)
    (ragged_axis,) = dimension_numbers.lhs_ragged_dimensions
    if ragged_axis in dot_numbers.batch[0]:  # groups do not change the result
        product = QuantizedProduct.create(lhs, rhs, dot_numbers, precision, preferred_element_type)
        plan = complete_report(first_plan(product, STRATEGIES), product)
        return dataclasses.replace(plan, how=f"as dot_general: {plan.how}")
    # Symbolic sizes, in programs for export, cannot be cut into tiles.
    are_known = all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape))
    has_group_axis = bool(dimension_numbers.rhs_group_dimensions)
    if not (isinstance(rhs, QArray) and has_group_axis and are_known):
        return dense
    how = f"one group at a time on CPU (fallback: {how_dense})"
    if 0 in (lhs.shape[ragged_axis], group_sizes.size):
        return Plan(how, lambda: jnp.zeros(out.shape, out.dtype), ())
    compute = functools.partial(
        _multiply_groups,
        dimension_numbers=dimension_numbers,
        precision=precision,
        out_dtype=out.dtype,
    )
    return Plan(how, compute, operands, () if runs_on_cpu() else dense.dense)


# Jitted, because outside of `jit` the loop would be compiled in each call.
@functools.partial(jax.jit, static_argnames=("dimension_numbers", "precision", "out_dtype"))
def _multiply_groups(
    lhs: Operand,
    rhs: QArray,
    group_sizes: jax.Array,
    *,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """Compute `ragged_dot_general`, one group at a time on CPU, with dense operands elsewhere.

    The ragged axis of `lhs` must be a free axis, and `rhs` must have a group axis.
    """
    params = GroupedDotParams(
        DotDimensionNumbers.of(dimension_numbers.dot_dimension_numbers),
        int(dimension_numbers.lhs_ragged_dimensions[0]),
        int(dimension_numbers.rhs_group_dimensions[0]),
        precision,
        out_dtype,
    )

    def multiply_by_group(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        dtype = out_dtype
        if {lhs.dtype, rhs.dtype, out_dtype} <= set(QUANTIZABLE) and not fixes_dtypes(precision):
            # CPUs multiply f32 several times faster than floats of 16 bits.
            dtypes = lhs.dtype, rhs.dtype, accumulator(out_dtype)
            dtype = functools.reduce(jnp.promote_types, dtypes)
            lhs, rhs = (
                x.replace(dense_dtype=dtype) if isinstance(x, QArray) else x.astype(dtype)
                for x in (lhs, rhs)
            )
        wide_params = params._replace(preferred_element_type=dtype)
        return multiply_groups(lhs, rhs, group_sizes, wide_params).astype(out_dtype)

    def multiply_dense(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        # JAX 0.10 to 0.12 batch `ragged_dot_general` only if all operands are batched. Make each
        # operand depend on all operands, through the scalar `false`. Then `vmap` batches all of
        # them if it batches one.
        arrays = dequantized(lhs), dequantized(rhs), group_sizes
        false = functools.reduce(jnp.logical_or, [x.ravel()[:1].any() for x in arrays]) & False
        lhs, rhs, group_sizes = [jnp.where(false, jnp.zeros_like(x), x) for x in arrays]
        return lax.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            dimension_numbers,
            precision=precision,
            preferred_element_type=out_dtype,
        )

    # A derivative dequantizes again. Otherwise dense weights would be kept for the backward pass.
    @jax.checkpoint
    def multiply(*args: Any) -> jax.Array:
        return lax.platform_dependent(*args, cpu=multiply_by_group, default=multiply_dense)

    return multiply(lhs, rhs, group_sizes)


@register("ragged_dot_general")
def _ragged_dot_general(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    group_sizes: ArrayLike,
    *,
    ragged_dot_dimension_numbers,
    precision,
    preferred_element_type,
    group_offset,
    out_sharding,
) -> Any:
    if out_sharding is not None:
        return NotImplemented
    params = ragged_dot_dimension_numbers, precision, preferred_element_type, group_offset
    return execute(_plan_ragged(lhs, rhs, jnp.asarray(group_sizes), *params))
