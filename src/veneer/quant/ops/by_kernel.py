"""The strategies that use kernels, which read the stored codes of a weight.

Activations are floats (f32, bf16 or f16). If the weight has an integer format, they can also be
int8 codes with scales per row, as `act_qtype="int8"` creates them. Kernels first sum products of
codes, in f32 or exactly if both operands are integers. Then they apply scales.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.primitives.axes import DotDimensionNumbers
from ...kernels import (
    BYTES,
    PLANE_BITS,
    SIX_BIT_FLOATS,
    Codes,
    MatmulOperands,
    MatmulProblem,
    matmul,
    select,
)
from ..arrays import QArray
from ..arrays.pairs import runs_on_gpu
from ..formats import get_format
from ..formats.packing import Packing
from ..formats.tiles import over_tiles
from .by_xla import XLA_STRATEGIES, find_code_product
from .operands import fits_int32, fixes_dtypes, has_minimum, multiply_by_scale
from .product import (
    SIDES,
    Plan,
    QuantizedProduct,
    dense_nbytes,
    first_plan,
    runs_on_cpu,
    split_minimum,
)
from .stored_matrix import as_stored_matrix, swap_packed_axis

_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def plan_kernel(product: QuantizedProduct) -> Plan | None:
    """Return a plan in which a kernel reads the stored codes of a weight, or None if none can.

    If both operands are QArrays, rhs is tried as the weight first, unless `product.weight_side`
    names the weight.
    """
    if select.current_choice() == "xla" or fixes_dtypes(product.precision):
        return None
    if product.out_dtype not in _DTYPES or product.out_sharding is not None:
        return None
    for leaf in jax.tree.leaves(product.operands):
        if any(jax.typeof(leaf).sharding.spec):  # an explicit mesh distributes the array
            return None
    for side in (1, 0) if product.weight_side is None else (product.weight_side,):
        x: Any = product.operands[1 - side]
        if not isinstance(product.operands[side], QArray):
            continue
        shape, batch_size = product.shapes[side], 1
        for axis in product.dimension_numbers.batch[side]:
            batch_size *= shape[axis]
        # Kernels multiply neither empty nor small matrices.
        if 0 in shape or not select.can_have_kernel(math.prod(shape) // batch_size, batch_size):
            continue
        is_quantized = isinstance(x, QArray)
        candidates = _activation_candidates(product, side) if is_quantized else [(x, None)]
        for values, scale in candidates:
            plan = _plan_matmul(product, side, values, scale)
            if plan is None:
                continue
            if is_quantized and scale is None:  # report the bytes of dequantized activations
                (nbytes,) = dense_nbytes(x)
                plan = dataclasses.replace(plan, dense=(nbytes, 0) if side else (0, nbytes))
            return plan
    return None


def plan_kernel_with_folded_scale(product: QuantizedProduct) -> Plan | None:
    """Return a plan that multiplies activations x by the scale of a weight before the kernel runs.

    The kernel then multiplies the scaled activations and the codes of the weight. This is possible
    if the scale varies along the contracted axis k, but not along the free axis n:
    `sum_k x[k] * (codes[k, n] * scale[k])` is `sum_k (x[k] * scale[k]) * codes[k, n]`. The values
    in a KV cache have such scales, one per token.

    Return None for other scales. If this order is not faster, return the result of `plan_kernel`.
    """
    side = 1 if isinstance(product.operands[1], QArray) else 0
    x: Any
    q: Any
    x, q = product.operands[1 - side], product.operands[side]
    contracting, batch = product.dimension_numbers
    if isinstance(x, QArray) or not isinstance(q, QArray) or product.terms <= 1:
        return None
    # The scale must have one entry per term, and must not vary along the free axes.
    for axis, count in enumerate(q.scale.shape):
        if axis in contracting[side]:
            is_per_term = count == product.shapes[side][axis]
        else:
            is_per_term = axis in batch[side] or count in (0, 1)  # also with a symbolic count
        if not is_per_term:
            return None
    if has_minimum(q) or not product.can_scale_output:
        return None
    if q.zero_point is not None and q.ndim - 1 in contracting[side]:
        return None  # kernels read a row of zero points and a row of scales together
    plan = plan_kernel(product)
    if runs_on_cpu():
        # Kernels for CPUs read one scale per term, but they are slow.
        can_be_faster = plan is not None and "cpu" in plan.kernels_for
    else:
        # GPU kernels read no scales per term, and no f32. In f16, x times the scale could overflow
        # although the dense product does not.
        is_bf16 = product.dtypes[side] == jnp.bfloat16
        can_be_faster = runs_on_gpu() and is_bf16 and not (plan and "gpu" in plan.kernels_for)
    if not can_be_faster:
        return plan

    # CPU kernels read f32. On GPUs, x times the scale is rounded to the dtype of x, as XLA rounds
    # codes times the scale in the dense product.
    scale = q.scales()
    dtype = scale.dtype if runs_on_cpu() else x.dtype
    q_to_x = {
        q_axis: x_axis
        for pair in product.dimension_numbers
        for q_axis, x_axis in zip(pair[side], pair[1 - side], strict=True)
    }
    x = multiply_by_scale(x.astype(scale.dtype), scale, q_to_x).astype(dtype)
    one = jnp.ones([1] * q.ndim, scale.dtype)
    q = q.replace(scale=one, dense_dtype=dtype)
    folded = plan_kernel(product.replace(*((x, q) if side else (q, x)), product.out_dtype))
    if folded is None or jax.default_backend() not in folded.kernels_for:
        return plan
    how = f"{folded.how}; scale of {SIDES[side]} multiplied into {SIDES[1 - side]}"
    return dataclasses.replace(folded, how=how)


def plan_kernel_without_minimum(product: QuantizedProduct) -> Plan | None:
    """Return a plan in which a kernel multiplies codes, and a second product adds the minima.

    Minima are offsets, one per tile. Return None if no operand has minima, or if no kernel can
    multiply the codes.
    """
    split = split_minimum(product)
    if split is None:
        return None
    main_product, add_minimum_term = split
    plan = plan_kernel_with_folded_scale(main_product) or plan_kernel(main_product)
    return None if plan is None else add_minimum_term(plan)


def describe_small_operand(product: QuantizedProduct) -> str:
    """Return a message if a QArray operand is too small for a kernel, and "" otherwise."""
    for side, q in enumerate(product.operands):
        if not isinstance(q, QArray) or q.size == 0 or select.current_choice() == "xla":
            continue
        if not all(isinstance(n, int) for n in q.shape):  # exported programs call no kernel
            continue
        matrices = math.prod(q.shape[axis] for axis in product.dimension_numbers.batch[side])
        values = q.size // matrices
        needed_values = select.least_entries(jax.default_backend(), values, matrices)
        if needed_values is not None:
            in_each = f" in each of {matrices:,} matrices" if matrices > 1 else ""
            return (
                f"{SIDES[side]} is too small for a kernel ({values:,} values{in_each}, "
                f"and kernels need {needed_values:,})"
            )
    return ""


# Activations.


def _activation_candidates(
    product: QuantizedProduct, side: int
) -> Iterator[tuple[jax.Array, jax.Array | None]]:
    """Yield the forms in which a kernel may read activations that are a QArray, the best first.

    Each form is a pair: int8 codes and their scale, or dequantized activations and None. Yield
    nothing if XLA computes the product faster. `side` is 0 if the weight is lhs, 1 if it is rhs.
    """
    x: Any
    q: Any
    x, q = product.operands[1 - side], product.operands[side]
    contracted = product.dimension_numbers.contracting[1 - side]
    # The numbers of scales along contracted axes.
    q_counts = [q.scale.shape[axis] for axis in product.dimension_numbers.contracting[side]]
    x_counts = [x.scale.shape[axis] for axis in contracted]
    # Kernels read int8 codes with one scale per row, or with one scale per tile of the weight.
    has_scales_per_tile = len(contracted) == 1 and q_counts[0] % max(1, x_counts[0]) == 0
    are_int8_rows = (
        q.format.is_integer
        and x.qtype == "int8"
        and x.zero_point is None
        and x.minimum is None
        and x.scale.dtype != jnp.float64
        and (has_scales_per_tile or all(count == 1 for count in x_counts))
    )
    if are_int8_rows and fits_int32(x, q, product.terms):
        scale_shape = [*x.shape]
        for axis, count in zip(contracted, q_counts, strict=True):
            scale_shape[axis] = 1 if x.scale.shape[axis] == 1 else count
        yield x.codes(), over_tiles(jnp.multiply, jnp.ones(scale_shape, jnp.float32), x.scales())
    # Activations are not dequantized for a kernel if XLA multiplies the codes of both operands,
    # except for weights in bit planes, which XLA reads slowly.
    has_code_product = are_int8_rows or find_code_product(product) is not None
    if not has_code_product or q.format.bits in PLANE_BITS.values():
        yield x.dequantize(), None


# The call of a kernel.


@functools.cache
def codes_of(qtype: str, has_zero_point: bool) -> tuple[Codes, int] | None:
    """Return how kernels decode the codes of a format, or None if no kernel reads these codes.

    **Returns:** a pair. The first entry is a `Codes`, the description of the codes for kernels. The
    second is an offset that is already subtracted from the values in `Codes`. Pass it to kernels in
    the `MatmulProblem`: they also subtract it from zero points, so the product is the same. The
    offset is half the range for unsigned codes of fewer than 8 bits with a zero point, because
    smaller values round less in float sums. Otherwise it is 0.
    """
    format = get_format(qtype)
    if format.bits == 8:
        name = format.code_dtype.name
        return (Codes(8, name), 0) if name in BYTES and format.codebook is None else None
    for name in SIX_BIT_FLOATS:
        if format.codebook == get_format(name).codebook:
            return Codes(6, name), 0
    if format.bits not in (1, 2, 4) and not (format.is_integer and format.bits in (3, 5, 6, 7)):
        return None
    bits = int(format.bits)
    with jax.ensure_compile_time_eval():
        fields = jnp.arange(2**bits, dtype=jnp.uint8)
        values = format.decode(format.from_fields(fields), jnp.float32).tolist()
    offset = 2 ** (bits - 1) if has_zero_point and not format.signed else 0
    return Codes(bits, values=tuple(value - offset for value in values)), offset


def _plan_matmul(
    product: QuantizedProduct, side: int, x: jax.Array, x_scale: jax.Array | None
) -> Plan | None:
    """Return a plan that calls a kernel, or None if no platform has a kernel for the operands.

    **Arguments:**

    - `side`: 0 if the weight is lhs, 1 if it is rhs.
    - `x`: the activations as floats or int8 codes, with the same axes as operand `1 - side`.
    - `x_scale`: the f32 scale of int8 codes, with the same axes as `x`. Its size along a contracted
      axis is 1 or the number of scales of the weight. None if `x` has floats.
    """
    if x_scale is None and (x.dtype != product.dtypes[side] or x.dtype not in _DTYPES):
        return None

    # View the weight as stored. `stored_axes[i]` is the stored axis of axis i of the operand.
    q: Any = product.operands[side]
    shape = product.shapes[side]
    stored_axes = list(range(len(shape)))
    if q.packing is not None and q.packing.axis == -2:
        stored_axes[-2:] = stored_axes[-1], stored_axes[-2]
        q, shape = swap_packed_axis(q), tuple(map(shape.__getitem__, stored_axes))
    # Pair the stored axes with axes of x, in increasing order of the stored axes.
    axes: list[Any] = []
    for pair in product.dimension_numbers:
        pairs = sorted(zip(map(stored_axes.__getitem__, pair[side]), pair[1 - side], strict=True))
        axes.append(zip(*pairs, strict=True) if pairs else ((), ()))
    (q_contracted, x_contracted), (q_batch, x_batch) = axes

    # Find the layout and the codes.
    matrix = as_stored_matrix(q, shape, q_contracted, q_batch)
    if matrix is None:
        return None
    codes_and_offset = codes_of(matrix.qtype, q.zero_point is not None)
    if codes_and_offset is None:
        return None
    operands = matrix.operands
    if operands.minimum is not None and operands.minimum.shape != operands.scale.shape:
        return None
    if x_scale is not None:
        if operands.packed.ndim > 3:
            return None
        x_scale = _as_rows(x_scale, x_batch, x_contracted)
        x_scale = x_scale[..., 0] if x_scale.shape[2] == 1 else x_scale  # one scale per row
    operands = operands._replace(x=_as_rows(x, x_batch, x_contracted), x_scale=x_scale)

    # Find the kernels.
    codes, offset = codes_and_offset
    fallback = ProductByXla(matrix.qtype, q.dense_dtype, product.precision)
    allows_unmeasured_kernels = select.current_choice() == "experimental"
    problem = MatmulProblem(
        codes,
        matrix.columns,
        matrix.contracting,
        product.out_dtype.name,
        offset,
        fallback,
        allows_unmeasured_kernels,
        matrix.scale_codes,
    )
    kernels = select.usable_kernels(operands, problem)
    if not kernels:
        return None

    def compute(*arrays: Any) -> jax.Array:
        out = matmul(MatmulOperands(*arrays), problem)
        # Split the three axes `[B, M, N]` of `out` into the batch axes, the free axes of x, and the
        # free axes of the weight. Batch axes and axes of the weight are in stored order.
        x_free = [i for i in range(x.ndim) if i not in (*x_batch, *x_contracted)]
        q_free = [i for i in range(len(shape)) if i not in (*q_batch, *q_contracted)]
        sizes = [shape[i] for i in q_batch]
        sizes += [x.shape[i] for i in x_free] + [shape[i] for i in q_free]
        # Transpose to the order of `dot_general`: batch axes, free axes of lhs, free axes of rhs.
        batch_order = [q_batch.index(stored_axes[i]) for i in product.dimension_numbers.batch[side]]
        x_order = [len(q_batch) + i for i in range(len(x_free))]
        q_start = len(q_batch) + len(x_free)
        q_order = [q_start + q_free.index(i) for i in stored_axes if i in q_free]
        free_order = x_order + q_order if side == 1 else q_order + x_order
        return lax.transpose(out.reshape(sizes), batch_order + free_order)

    descriptions = []
    for platform, kernel in kernels.items():
        descriptions.append(f"{platform.upper()} kernel {kernel.name}_{codes.kind}")
    return Plan(", ".join(descriptions), compute, operands, kernels_for=tuple(kernels))


def _as_rows(x: jax.Array, batch: Sequence[int], contracted: Sequence[int]) -> jax.Array:
    """Return an operand as `[B, M, K]`: its batch, free and contracted axes, each group merged.

    `batch` and `contracted` are axes of `x`. All other axes are free.
    """
    free = []
    for axis in range(x.ndim):
        if axis not in batch and axis not in contracted:
            free.append(axis)
    merged_sizes = []
    for axes in (batch, free, contracted):
        merged_sizes.append(math.prod(map(x.shape.__getitem__, axes)))
    return lax.transpose(x, [*batch, *free, *contracted]).reshape(merged_sizes)


@dataclasses.dataclass(frozen=True)
class ProductByXla:
    """A hashable function that computes a product with XLA, on platforms without a kernel.

    The primitive of the kernel calls it there with the operands and the problem of the kernel.

    **Arguments:**

    - `qtype`, `dense_dtype`: the format of the weight, and the dtype of its dense array.
    - `precision`: the precision of the product, as for `jax.lax.dot_general`.
    """

    qtype: str
    dense_dtype: str
    precision: Any

    def __call__(self, operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
        """Return the product as `[B, M, N]`: batch, rows of activations, outputs per row.

        `operands` and `problem` are the arguments of the kernel's function `matmul`.
        """
        operands = operands.deinterleaved()  # codes [B, R, H, C] become [B * H, R, C]
        is_batched = operands.x.shape[0] != 1
        if not is_batched:  # XLA computes some products faster without a batch axis
            operands = MatmulOperands(*(None if x is None else jnp.squeeze(x, 0) for x in operands))
        x, packed, scale, zero_point, x_scale, minimum, *_ = operands
        is_packed = get_format(self.qtype).bits < 8
        q = QArray.from_packed(
            packed,
            scale,
            zero_point,
            minimum=minimum,
            qtype=self.qtype,
            packing=Packing(-1, problem.columns) if is_packed else None,
            dense_dtype=x.dtype if x_scale is None else self.dense_dtype,
        )
        if x_scale is not None:
            # A scale per row has no contracted axis yet. A scale per tile of a row has this axis.
            scale = x_scale if x_scale.ndim == x.ndim else x_scale[..., None]
            x = QArray.from_packed(x, scale, qtype="int8", dense_dtype=self.dense_dtype)
        contracted = (x.ndim - 1,), (x.ndim - (2 if problem.contracting == "rows" else 1),)
        numbers = DotDimensionNumbers(contracted, ((0,), (0,)) if is_batched else ((), ()))
        product = QuantizedProduct.create(x, q, numbers, self.precision, problem.out_dtype)
        out = first_plan(product, XLA_STRATEGIES)()
        return out if is_batched else jnp.expand_dims(out, 0)
