"""`dot_general` with quantized operands, and `einsum` and `dot`, which are made of it.

A `dot_general` is computed by the first strategy that supports it.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from opt_einsum import get_symbol
from opt_einsum.parser import parse_einsum_input

from ..._core.policy import ALLOW, current_policy
from ..._core.primitives.axes import NestedAxes
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.trace import redispatch
from ..._core.value import materialise
from ..arrays import QArray
from .by_kernel import (
    describe_small_operand,
    plan_kernel,
    plan_kernel_with_folded_scale,
    plan_kernel_without_minimum,
)
from .by_xla import XLA_STRATEGIES
from .operands import as_operand
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


def einsum(*args: Any, preferred_element_type: DTypeLike | None = None, **kwargs: Any) -> jax.Array:
    """Evaluate an Einstein sum like `jax.numpy.einsum`; any operand can be a `QArray`.

    Operands are contracted in pairs, each pair like `vn.quant.dot_general`. If an axis appears in
    only one operand and is summed, this operand is dequantized.

    Two operands can have different sizes along an axis of the result, if one size is a multiple of
    the other. Each entry of the smaller operand is then multiplied with a group of neighbors in the
    larger operand, as in grouped-query attention. Nothing is repeated in memory.

    **Arguments:**

    - `args`: the subscripts and the operands, in both forms that `jax.numpy.einsum` accepts.
      Implicit arrays of other types are materialized. Dense float8 arrays are converted to the
      dtype of the QArrays.
    - `preferred_element_type`, `kwargs` (`optimize`, `precision`, `out_sharding`): as for
      `jax.numpy.einsum`.

    **Returns:** an array with the shape and dtype of the result for the dense arrays.

    **Raises:**

    - The errors of `jax.numpy.einsum`.
    - `ValueError` if two operands differ in the size of an axis of the result, and neither size is
      a multiple of the other.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int4", channelwise_axes=[1])
    >>> vn.quant.einsum("...k,kn->n...", jnp.ones((2, 3)), w).shape
    (3, 2)

    Eight heads of queries and two heads of keys:

    >>> q, k = jnp.ones((5, 8, 16)), vn.quant.quantize(jnp.ones((7, 2, 16)), "int8")
    >>> vn.quant.einsum("qhd,khd->hqk", q, k).shape
    (8, 5, 7)
    """
    options = {"preferred_element_type": preferred_element_type, **kwargs}
    dense_args = _widen_bytes([as_operand(x) if isinstance(x, ImplicitArray) else x for x in args])
    out = redispatch(lambda args: _einsum_with_groups(args, options), dense_args)
    return materialise(out)  # the einsum of a single operand can be a QArray


def _widen_bytes(args: list[Any]) -> list[Any]:
    """Convert dense floats of one byte, which JAX does not promote, to the dtype of the QArrays.

    Return all other arguments unchanged.
    """
    dtypes = [x.dtype for x in args if isinstance(x, QArray)]
    if not dtypes:
        return args
    is_byte_float = lambda x: (
        isinstance(x, jax.Array | np.ndarray)
        and x.dtype.itemsize == 1
        and jnp.issubdtype(x.dtype, jnp.floating)
    )
    return [jnp.asarray(x, jnp.result_type(*dtypes)) if is_byte_float(x) else x for x in args]


def _einsum_with_groups(args: list[Any], options: dict[str, Any]) -> jax.Array:
    """Call `jnp.einsum`. If an axis has two sizes, split it in the operand with the larger size.

    For example, an axis h of sizes 2 and 8 becomes axes h and g of sizes 2 and 4 in the operand of
    size 8. The other operand has no axis g. In the result, h and g are merged again.

    **Arguments:**

    - `args`: subscripts and operands, in both forms that `jnp.einsum` accepts.
    - `options`: keyword arguments of `jnp.einsum`.
    """
    if len(args) < 2:
        return jnp.einsum(*args, **options)  # raises the error of JAX

    # Parse the subscripts. They are one string before the operands, or a list after each operand
    # and a list for the result. The parser needs shapes in place of operands.
    is_string = isinstance(args[0], str)
    operands = args[1:] if is_string else args[: len(args) // 2 * 2 : 2]
    shapes = iter(map(jnp.shape, operands))
    is_subscript = lambda i: i == 0 if is_string else i % 2 or i == 2 * len(operands)
    parser_args = [x if is_subscript(i) else next(shapes) for i, x in enumerate(args)]
    inputs, output, _ = parse_einsum_input(parser_args, shapes=True)
    terms = inputs.split(",")

    # Find the axes of the result with two sizes above 1.
    sizes: dict[str, set[int]] = {}
    for term, x in zip(terms, operands, strict=True):
        for name, size in zip(term, jnp.shape(x), strict=False):  # JAX raises if they differ
            sizes.setdefault(name, set()).add(size)
    split_axes = {}
    for name in output:
        axis_sizes = sizes.get(name, set()) - {1}
        if len(axis_sizes) == 2 and all(isinstance(size, int) for size in axis_sizes):
            small, large = sorted(axis_sizes)
            if not small or large % small:
                raise ValueError(
                    f"Cannot broadcast axis {name!r} of {inputs}->{output}: of its sizes {small} "
                    f"and {large}, one must be a multiple of the other"
                )
            split_axes[name] = small, large
    if not split_axes:
        return jnp.einsum(*args, **options)

    # Split these axes, the last axis of an operand first, and name the second parts.
    unused_names = (name for i in itertools.count() if (name := get_symbol(i)) not in sizes)
    second_names = dict(zip(split_axes, unused_names, strict=False))
    for i, (term, x) in enumerate(zip(terms, operands, strict=True)):
        for axis, name in reversed([*enumerate(term)]):
            if name in split_axes and x.shape[axis] == split_axes[name][1]:
                small, large = split_axes[name]
                x = x.reshape(*x.shape[:axis], small, large // small, *x.shape[axis + 1 :])
                term = term[: axis + 1] + second_names[name] + term[axis + 1 :]
        terms[i], operands[i] = term, x
    split_output = "".join(name + second_names.get(name, "") for name in output)
    out = jnp.einsum(f"{','.join(terms)}->{split_output}", *operands, **options)
    return out.reshape([max(sizes[name]) for name in output])


def dot(
    a: ArrayLike | ImplicitArray,
    b: ArrayLike | ImplicitArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiply two arrays like `jax.numpy.dot`; one or both can be a `QArray`.

    **Arguments:**

    - `a`, `b`: arrays or QArrays. Implicit arrays of other types are materialized. Dense float8
      arrays are converted to the dtype of the QArray.
    - `precision`, `preferred_element_type`, `out_sharding`: as for `jax.numpy.dot`.

    **Returns:** an array with the shape and dtype of the product of the dense arrays.

    **Raises:** the errors of `jax.numpy.dot`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int4", channelwise_axes=[1])
    >>> vn.quant.dot(jnp.ones((2, 3)), w).shape
    (2, 3)
    """
    product = functools.partial(
        jnp.dot,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return materialise(redispatch(product, *_widen_bytes([as_operand(a), as_operand(b)])))
