"""Products by kernels, `by_kernel`: from any product to one of matrices, and back.

Activations are dense, of f32, bf16 or f16; or int8 codes with a scale for each row, as those that
`act_qtype="int8"` makes, where the weight's codes are integers. Codes are summed before they are
scaled, in f32, or exactly where both are integers.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

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
from ..formats import get_format
from ..formats.packing import Packing
from ..formats.tiles import over_tiles
from ..qarray import QArray
from .by_xla import by_xla, multiplied_codes
from .operands import fits_int32, is_algorithm
from .product import DotParams, Plan, dense_nbytes
from .stored_matrix import as_matrix, in_rows

_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


# Which operand is the weight, 0 or 1, where both are QArrays and it is known.
_weight: ContextVar[int | None] = ContextVar("weight", default=None)


@contextmanager
def weight_is(side: int) -> Iterator[None]:
    """Says which operand of the products within is the weight: the first, 0, or the second, 1.

    Activations that are quantised look like one. A weight is read as it is stored, and has the time
    that they take to be arranged for it. Where nothing says it, the weight is the second operand.
    """
    token = _weight.set(side)
    try:
        yield
    finally:
        _weight.reset(token)


def by_kernel(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Plan | None:
    """Reads codes as they are stored, if some platform has a kernel for them."""
    if select.chosen() == "xla" or is_algorithm(params.precision):
        return None
    if params.out_sharding is not None or _is_cut(lhs, rhs):
        return None
    if params.out_dtype(lhs, rhs) not in _DTYPES:
        return None
    operands = lhs, rhs
    known = _weight.get()
    for side in (1, 0) if known is None else (known,):
        q: Any = operands[side]
        if not isinstance(q, QArray):
            continue
        batch = math.prod(_sizes(q, params.dimension_numbers.batch[side]))
        if q.size == 0 or not select.may_serve(q.size // batch, batch):
            continue
        for x in _activations(lhs, rhs, side, params):
            plan = _plan(x, q, side, params, params.out_dtype(lhs, rhs))
            if plan is None:
                continue
            other = operands[1 - side]
            if isinstance(other, QArray) and x.scale is None:  # it was made floats
                (nbytes,) = dense_nbytes(other)
                return dataclasses.replace(plan, dense=(nbytes, 0) if side else (0, nbytes))
            return plan
    return None


def _sizes(x: Any, axes: Sequence[int]) -> list[Any]:
    return [x.shape[axis] for axis in axes]


def _is_cut(*operands: jax.Array | QArray) -> bool:
    """Whether operands' types say that they are cut over devices, and so must the result's."""
    specs = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(operands)]
    return any(entry is not None for spec in specs for entry in spec)


# The operands.


class Activations(NamedTuple):
    """What a weight meets: floats, or int8 codes and the scale of each row.

    **Arguments:**

    - `values`: `[...]`, with the axes of the operand.
    - `scale`: of codes: f32, of the same shape but of size 1 along axes that are summed; or as many
      along the one that is as the weight has scales. Else None.
    """

    values: jax.Array
    scale: jax.Array | None = None


def _activations(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, side: int, params: DotParams
) -> Iterator[Activations]:
    """Yields what the weight, which is the operand of a side, meets, as kernels may take it.

    Codes that XLA would multiply with those of the weight are not dequantised for a kernel, but
    where the weight's are in bit planes, which take XLA longer to read.
    """
    q: Any
    x, q = (lhs, rhs) if side else (rhs, lhs)
    if isinstance(x, QArray):
        summed = params.dimension_numbers.contracting[1 - side]
        of_weight = params.dimension_numbers.contracting[side]
        tiles = _sizes(q.scale, of_weight)
        has_rows = q.format.is_integer and _has_rows(x, summed, tiles)
        if has_rows and fits_int32(x, q, math.prod(_sizes(x, summed))):
            yield _rows(x, summed, tiles)
        is_multiplied = has_rows or multiplied_codes(lhs, rhs, params) is not None
        if is_multiplied and q.format.bits not in PLANE_BITS.values():
            return
        x = x.dequantize()
    if x.dtype == q.dtype and x.dtype in _DTYPES:
        yield Activations(x)


def _has_rows(x: QArray, summed: Sequence[int], tiles: Sequence[int]) -> bool:
    """Whether a row of activations has one scale, or some for as many `tiles` of a weight each."""
    plain = x.qtype == "int8" and x.zero_point is None and x.scale.dtype != jnp.float64
    scales = _sizes(x.scale, summed)
    is_tiled = len(summed) == 1 and tiles[0] % max(1, scales[0]) == 0 and x.minimum is None
    return plain and (is_tiled or all(size == 1 for size in scales))


def _rows(x: QArray, summed: Sequence[int], tiles: Sequence[int]) -> Activations:
    shape = [*x.shape]
    for axis, count in zip(summed, tiles, strict=True):
        shape[axis] = 1 if x.scale.shape[axis] == 1 else count
    scale = over_tiles(jnp.multiply, jnp.ones(shape, jnp.float32), x.scales())
    return Activations(x.codes(), scale)


@functools.cache
def codes_of(qtype: str, has_zero_point: bool) -> tuple[Codes, int] | None:
    """Returns the codes of a format as kernels know them, or None; and what they are centred by.

    Unsigned codes that are looked up are worth less by half their range if there is a zero point,
    which is then, too: so sums that are subtracted from each other are no larger than they must be.
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
    centre = 2 ** (bits - 1) if has_zero_point and not format.signed else 0
    return Codes(bits, values=tuple(value - centre for value in values)), centre


# The product.


@dataclasses.dataclass(frozen=True)
class ProductByXla:
    """The product of matrices by XLA, from the operands that a kernel takes.

    **Arguments:**

    - `qtype`, `dense_dtype`: of the weight.
    - `precision`: of the product.
    """

    qtype: str
    dense_dtype: str
    precision: Any

    def __call__(self, operands: MatmulOperands, product: MatmulProblem) -> jax.Array:
        """Returns `[B, M, N]`."""
        operands = operands.apart()
        batched = operands.x.shape[0] != 1
        if not batched:  # which not all that XLA has for products is as fast with
            operands = MatmulOperands(*(None if x is None else jnp.squeeze(x, 0) for x in operands))
        x, packed, scale, zero_point, x_scale, minimum, *_ = operands
        is_narrow = get_format(self.qtype).bits < 8
        q = QArray.from_packed(
            packed,
            scale,
            zero_point,
            minimum=minimum,
            qtype=self.qtype,
            packing=Packing(-1, product.columns) if is_narrow else None,
            dense_dtype=x.dtype if x_scale is None else self.dense_dtype,
        )
        if x_scale is not None:
            scale = x_scale if x_scale.ndim == x.ndim else x_scale[..., None]
            x = QArray.from_packed(x, scale, qtype="int8", dense_dtype=self.dense_dtype)
        summed = (x.ndim - 1,), (x.ndim - (2 if product.contracting == "rows" else 1),)
        numbers = DotDimensionNumbers(summed, ((0,), (0,)) if batched else ((), ()))
        out = by_xla(x, q, DotParams(numbers, self.precision, product.out_dtype))
        return out if batched else jnp.expand_dims(out, 0)


def _plan(
    x: Activations, weight: QArray, side: int, params: DotParams, out_dtype: jnp.dtype
) -> Plan | None:
    """Returns the product of activations with a weight, the operand of a side; or None."""
    q, axes = in_rows(weight)
    # From the axes of what is stored to those of the activations.
    summed, batch = (
        {axes[of_q]: of_x for of_x, of_q in zip(pair[1 - side], pair[side], strict=True)}
        for pair in params.dimension_numbers
    )
    matrix = as_matrix(q, tuple(summed), tuple(batch))
    codes = None if matrix is None else codes_of(matrix.q.qtype, q.zero_point is not None)
    if matrix is None or codes is None:
        return None
    minimum = matrix.q.minimum
    if minimum is not None and minimum.shape != matrix.q.scale.shape:
        return None
    is_beside = matrix.q.ndim > 3
    if is_beside and x.scale is not None:
        return None
    # In the order in which the axes of the stored array follow each other.
    first, last = ([pairs[axis] for axis in sorted(pairs)] for pairs in (batch, summed))
    operands = MatmulOperands(
        _as_rows(x.values, first, last),
        matrix.leaf("packed"),
        matrix.leaf("scale"),
        matrix.leaf("zero_point"),
        None if x.scale is None else _as_scales(x.scale, first, last),
        matrix.leaf("minimum"),
        matrix.outer("scale"),
        matrix.outer("minimum"),
    )
    reference = ProductByXla(matrix.q.qtype, q.dense_dtype, params.precision)
    opt_in = select.chosen() == "pallas"
    product = MatmulProblem(
        codes[0],
        matrix.columns,
        matrix.contracting,
        out_dtype.name,
        codes[1],
        reference,
        opt_in,
        matrix.tiles,
    )
    shape = product.shape(operands)
    found = {
        platform: select.find(platform, product.codes, shape, opt_in)
        for platform in select.PLATFORMS
    }
    targets = {platform: target for platform, target in found.items() if target is not None}
    if not targets:
        return None

    def compute(*operands: Any) -> jax.Array:
        out = matmul(MatmulOperands(*operands), product)
        of_x = [axis for axis in range(x.values.ndim) if axis not in (*first, *last)]
        of_q = [axis for axis in range(q.ndim) if axis not in (*summed, *batch)]
        sizes = _sizes(q, sorted(batch)) + _sizes(x.values, of_x) + _sizes(q, of_q)
        # Where each axis of the result is now: those of the batch, and those of either operand.
        order = [sorted(batch).index(axes[axis]) for axis in params.dimension_numbers.batch[side]]
        x_order = [len(batch) + i for i in range(len(of_x))]
        q_order = [len(batch) + len(of_x) + of_q.index(axis) for axis in axes if axis in of_q]
        order += x_order + q_order if side else q_order + x_order
        return lax.transpose(out.reshape(sizes), order)

    how = ", ".join(
        f"{platform.upper()} kernel {target.removeprefix('veneer_')}"
        for platform, target in targets.items()
    )
    return Plan(how, compute, operands, kernels_for=tuple(targets))


def _as_rows(x: jax.Array, first: Sequence[int], last: Sequence[int]) -> jax.Array:
    """Returns an array as `[B, M, K]`: some axes, those that are left, and others."""
    others = [axis for axis in range(x.ndim) if axis not in (*first, *last)]
    sizes = [math.prod(_sizes(x, axes)) for axes in (first, others, last)]
    return lax.transpose(x, [*first, *others, *last]).reshape(sizes)


def _as_scales(scale: jax.Array, first: Sequence[int], last: Sequence[int]) -> jax.Array:
    """Returns scales of activations as `[B, M]`, or `[B, M, tiles]` where there are several."""
    rows = _as_rows(scale, first, last)
    return rows[..., 0] if rows.shape[2] == 1 else rows
