"""The strategies by kernels, which read the stored codes of a weight.

Activations are floats (f32, bf16 or f16), or int8 codes with scales per row, as `act_qtype="int8"`
creates them, if the weight has an integer format. Kernels sum products of codes before they apply
scales: in f32, or exactly if both operands are integers.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
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
from ..arrays.pairs import runs_on_gpu
from ..arrays.qarray import QArray
from ..formats import get_format
from ..formats.packing import Packing
from ..formats.tiles import over_tiles
from .by_xla import XLA_STRATEGIES, multiplied_codes
from .minima import split_minimum
from .operands import fits_int32, fixes_dtypes, has_minimum
from .product import SIDES, Plan, QuantizedProduct, dense_nbytes, first_plan, runs_on_cpu
from .stored_matrix import as_stored_matrix, swap_packed_axis

_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def plan_kernel(product: QuantizedProduct) -> Plan | None:
    """Plan to read packed codes by a kernel, if a platform has one for them."""
    if select.chosen() == "xla" or fixes_dtypes(product.precision) or _is_sharded(product):
        return None
    if product.out_dtype not in _DTYPES:
        return None
    for side in (1, 0) if product.weight_side is None else (product.weight_side,):
        x: Any = product.operands[1 - side]
        if not isinstance(product.operands[side], QArray):
            continue
        shape, batch = product.shapes[side], 1
        for axis in product.dimension_numbers.batch[side]:
            batch *= shape[axis]
        if 0 in shape or not select.may_serve(math.prod(shape) // batch, batch):
            continue
        is_quantized = isinstance(x, QArray)
        candidates = _quantized_activations(product, side) if is_quantized else [(x, None)]
        for values, scale in candidates:
            plan = _plan_matmul(product, side, values, scale)
            if plan is not None and is_quantized and scale is None:
                (nbytes,) = dense_nbytes(x)
                return dataclasses.replace(plan, dense=(nbytes, 0) if side else (0, nbytes))
            if plan is not None:
                return plan
    return None


def _is_sharded(product: QuantizedProduct) -> bool:
    """Return whether explicit sharding, in the types of arrays, distributes an operand."""
    if product.out_sharding is not None:
        return True
    for leaf in jax.tree.leaves(product.operands):
        for axis_names in jax.typeof(leaf).sharding.spec:
            if axis_names is not None:
                return True
    return False


def plan_kernel_with_folded_scale(product: QuantizedProduct) -> Plan | None:
    """Plan to multiply the scale of each term into the activations, and call a kernel for the rest.

    `sum_k x[k] * (codes[k, n] * scale[k])` is `sum_k (x[k] * scale[k]) * codes[k, n]`, and x has
    fewer rows. The values of a cache have such scales, one per token.

    On CPUs, x times the scale is f32, which kernels read. On GPUs it is rounded to the dtype of x,
    as XLA rounds codes times the scale in the dense product.
    """
    side = 1 if isinstance(product.operands[1], QArray) else 0
    x: Any
    q: Any
    x, q = product.operands[1 - side], product.operands[side]
    contracting, batch = product.dimension_numbers
    if isinstance(x, QArray) or not isinstance(q, QArray) or product.terms <= 1:
        return None
    for axis, count in enumerate(q.scale.shape):
        if axis in contracting[side]:
            is_per_term = count == product.shapes[side][axis]
        else:
            is_per_term = count <= 1 or axis in batch[side]
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

    # Map axes of x to axes of q. Along the other axes of x, the scale is the same.
    axes = {
        x_axis: q_axis
        for pair in product.dimension_numbers
        for x_axis, q_axis in zip(pair[1 - side], pair[side], strict=True)
    }
    order = [*(axes[i] for i in sorted(axes)), *product.free(side)]
    scale = lax.transpose(q.scales(), order)
    scale = scale.reshape([q.scale.shape[axes[i]] if i in axes else 1 for i in range(x.ndim)])
    dtype = scale.dtype if runs_on_cpu() else x.dtype
    x = over_tiles(jnp.multiply, x.astype(scale.dtype), scale).astype(dtype)
    one = jnp.ones([1] * q.ndim, scale.dtype)
    q = q.replace(scale=one, dense_dtype=dtype)
    folded = plan_kernel(product.replace(*((x, q) if side else (q, x)), product.out_dtype))
    if folded is None or jax.default_backend() not in folded.kernels_for:
        return plan
    how = f"{folded.how}; scale of {SIDES[side]} multiplied into {SIDES[1 - side]}"
    return dataclasses.replace(folded, how=how)


def plan_kernel_without_minimum(product: QuantizedProduct) -> Plan | None:
    """Plan to call a kernel that adds no minima, and add the minima in a second product."""
    split = split_minimum(product)
    if split is None:
        return None
    rest, add_minimum_term = split
    plan = plan_kernel_with_folded_scale(rest) or plan_kernel(rest)
    return None if plan is None else add_minimum_term(plan)


def describe_small_operand(product: QuantizedProduct) -> str:
    """Return the reason why no kernel is used here, if it is the size of an operand, else ""."""
    for side, q in enumerate(product.operands):
        if not isinstance(q, QArray) or q.size == 0 or select.chosen() == "xla":
            continue
        if not all(isinstance(n, int) for n in q.shape):  # exported programs call no kernel
            continue
        batch = math.prod(q.shape[axis] for axis in product.dimension_numbers.batch[side])
        least = select.least_entries(jax.default_backend(), q.size // batch, batch)
        if least is not None:
            in_each = f" in each of {batch:,} matrices" if batch > 1 else ""
            return (
                f"{SIDES[side]} is too small for a kernel ({q.size // batch:,} values{in_each}, "
                f"and kernels need {least:,})"
            )
    return ""


# Activations.


def _quantized_activations(
    product: QuantizedProduct, side: int
) -> Iterator[tuple[jax.Array, jax.Array | None]]:
    """Yield the forms in which a kernel may read activations that are a QArray, best first.

    Each is an array and its scale, as in `_plan_matmul`. If XLA multiplies the codes of both
    operands, activations are not dequantized for a kernel. The exception are weights in bit planes,
    which XLA reads slowly.
    """
    x: Any
    q: Any
    x, q = product.operands[1 - side], product.operands[side]
    contracted = product.dimension_numbers.contracting[1 - side]
    tiles = [q.scale.shape[axis] for axis in product.dimension_numbers.contracting[side]]
    scales = [x.scale.shape[axis] for axis in contracted]
    # Kernels read int8 codes with one scale per row, or scales per tile of the weight.
    is_tiled = len(contracted) == 1 and tiles[0] % max(1, scales[0]) == 0
    has_rows = (
        q.format.is_integer
        and x.qtype == "int8"
        and x.zero_point is None
        and x.minimum is None
        and x.scale.dtype != jnp.float64
        and (is_tiled or all(count == 1 for count in scales))
    )
    if has_rows and fits_int32(x, q, product.terms):
        shape = [*x.shape]
        for axis, count in zip(contracted, tiles, strict=True):
            shape[axis] = 1 if x.scale.shape[axis] == 1 else count
        scale = over_tiles(jnp.multiply, jnp.ones(shape, jnp.float32), x.scales())
        yield x.codes(), scale
    are_multiplied = has_rows or multiplied_codes(product) is not None
    if not are_multiplied or q.format.bits in PLANE_BITS.values():
        yield x.dequantize(), None


# The call of a kernel.


@functools.cache
def codes_of(qtype: str, has_zero_point: bool) -> tuple[Codes, int] | None:
    """Return the codes of a format as kernels know them, or None if no kernel reads them.

    With a zero point, half the range is subtracted from unsigned codes that are looked up, and from
    the zero point. Then sums that are subtracted from each other are as small as possible.

    **Returns:** the codes, and the number that was subtracted.
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
    center = 2 ** (bits - 1) if has_zero_point and not format.signed else 0
    return Codes(bits, values=tuple(value - center for value in values)), center


def _plan_matmul(
    product: QuantizedProduct, side: int, x: jax.Array, x_scale: jax.Array | None
) -> Plan | None:
    """Plan the kernel call for a weight, the operand `side`, and its activations.

    **Arguments:**

    - `x`: the activations, floats or int8 codes, with the axes of the operand.
    - `x_scale`: the scale of codes, in f32. Along contracted axes it has size 1, or the number of
      scales of the weight. None for floats.
    """
    if x_scale is None and (x.dtype != product.dtypes[side] or x.dtype not in _DTYPES):
        return None
    q: Any = product.operands[side]
    shape = product.shapes[side]
    stored = list(range(len(shape)))  # the axis of the stored weight for each axis of the operand
    if q.packing is not None and q.packing.axis == -2:
        stored[-2:] = stored[-1], stored[-2]
        q, shape = swap_packed_axis(q), tuple(map(shape.__getitem__, stored))
    # Contracted axes and batch axes, of the stored weight and of x, as the former are ordered.
    axes: list[Any] = []
    for pair in product.dimension_numbers:
        pairs = sorted(zip(map(stored.__getitem__, pair[side]), pair[1 - side], strict=True))
        axes.append(zip(*pairs, strict=True) if pairs else ((), ()))
    (q_contracted, x_contracted), (q_batch, x_batch) = axes

    matrix = as_stored_matrix(q, shape, q_contracted, q_batch)
    codes = None if matrix is None else codes_of(matrix.qtype, q.zero_point is not None)
    if matrix is None or codes is None:
        return None
    operands = matrix.operands
    if operands.minimum is not None and operands.minimum.shape != operands.scale.shape:
        return None
    if x_scale is not None:
        if operands.packed.ndim > 3:
            return None
        x_scale = _as_rows(x_scale, x_batch, x_contracted)
        x_scale = x_scale[..., 0] if x_scale.shape[2] == 1 else x_scale
    operands = operands._replace(x=_as_rows(x, x_batch, x_contracted), x_scale=x_scale)
    problem = MatmulProblem(
        codes[0],
        matrix.columns,
        matrix.contracting,
        product.out_dtype.name,
        codes[1],
        ProductByXla(matrix.qtype, q.dense_dtype, product.precision),
        select.chosen() == "experimental",
        matrix.scale_codes,
    )
    kernels = select.usable(operands, problem)
    if not kernels:
        return None

    def compute(*arrays: Any) -> jax.Array:
        out = matmul(MatmulOperands(*arrays), problem)
        # The result has the batch axes as the stored weight has them, the free axes of x and those
        # of the stored weight.
        x_free = [i for i in range(x.ndim) if i not in (*x_batch, *x_contracted)]
        q_free = [i for i in range(len(shape)) if i not in (*q_batch, *q_contracted)]
        sizes = [shape[i] for i in q_batch]
        sizes += [x.shape[i] for i in x_free] + [shape[i] for i in q_free]
        order = [q_batch.index(stored[i]) for i in product.dimension_numbers.batch[side]]
        x_order = [len(q_batch) + i for i in range(len(x_free))]
        q_start = len(q_batch) + len(x_free)
        q_order = [q_start + q_free.index(i) for i in stored if i in q_free]
        order += x_order + q_order if side else q_order + x_order
        return lax.transpose(out.reshape(sizes), order)

    hows = []
    for platform, name in kernels.items():
        hows.append(f"{platform.upper()} kernel {name.removeprefix('veneer_')}")
    return Plan(", ".join(hows), compute, operands, kernels_for=tuple(kernels))


def _as_rows(x: jax.Array, batch: Sequence[int], contracted: Sequence[int]) -> jax.Array:
    """Return activations as `[B, M, K]`: batch axes, free axes and contracted axes."""
    axes: list[int] = [*batch]
    rows = 1
    for axis, size in enumerate(x.shape):
        if axis not in batch and axis not in contracted:
            axes.append(axis)
            rows *= size
    sizes = map(x.shape.__getitem__, batch), map(x.shape.__getitem__, contracted)
    count, terms = map(math.prod, sizes)
    return lax.transpose(x, [*axes, *contracted]).reshape(count, rows, terms)


@dataclasses.dataclass(frozen=True)
class ProductByXla:
    """A hashable function that computes a `MatmulProblem` by XLA, for platforms without a kernel.

    **Arguments:**

    - `qtype`, `dense_dtype`: of the weight.
    - `precision`: of the product.
    """

    qtype: str
    dense_dtype: str
    precision: Any

    def __call__(self, operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
        """Return the product `[B, M, N]`."""
        operands = operands.apart()
        batched = operands.x.shape[0] != 1
        if not batched:  # XLA computes some products faster without a batch axis
            operands = MatmulOperands(*(None if x is None else jnp.squeeze(x, 0) for x in operands))
        x, packed, scale, zero_point, x_scale, minimum, *_ = operands
        is_narrow = get_format(self.qtype).bits < 8
        q = QArray.from_packed(
            packed,
            scale,
            zero_point,
            minimum=minimum,
            qtype=self.qtype,
            packing=Packing(-1, problem.columns) if is_narrow else None,
            dense_dtype=x.dtype if x_scale is None else self.dense_dtype,
        )
        if x_scale is not None:
            scale = x_scale if x_scale.ndim == x.ndim else x_scale[..., None]
            x = QArray.from_packed(x, scale, qtype="int8", dense_dtype=self.dense_dtype)
        contracted = (x.ndim - 1,), (x.ndim - (2 if problem.contracting == "rows" else 1),)
        numbers = DotDimensionNumbers(contracted, ((0,), (0,)) if batched else ((), ()))
        product = QuantizedProduct.create(x, q, numbers, self.precision, problem.out_dtype)
        out = first_plan(product, XLA_STRATEGIES)()
        return out if batched else jnp.expand_dims(out, 0)
