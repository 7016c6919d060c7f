"""Products of QArrays by kernels: from any contraction to one of matrices, and back.

Activations are dense, of f32, bf16 or f16; or int8 codes with a scale for each row, as those that
`act_qtype="int8"` makes, where the weight's codes are integers. Codes are summed before they are
scaled, in f32, or exactly where both are integers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...kernels import BYTES, Codes, MatmulOperands, MatmulProblem, matmul, select
from ..formats import get_format
from ..packing import Packing
from ..qarray import QArray
from ..tiles import over_tiles
from .contraction import Contraction
from .matrices import Stored, as_matrix, in_rows
from .operands import fits_int32, is_algorithm

Way = Callable[[Any, Any, Contraction], jax.Array]

_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


class Native(NamedTuple):
    """A product by a kernel: the name that it has on CPU, and what computes the product."""

    target: str
    compute: Callable[[], jax.Array]


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


def find(
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    contraction: Contraction,
    *,
    by_xla: Way,
    on_codes: bool,
) -> Native | None:
    """Returns a product by a kernel, or None where there is none for it.

    **Arguments:**

    - `by_xla`: the way to the same product by XLA: a function of a module, for programs are cached
      by it.
    - `on_codes`: whether that multiplies the codes of both operands, which then are not to be
      dequantised.
    """
    if select.chosen() == "xla" or is_algorithm(contraction.precision):
        return None
    if contraction.out_sharding is not None or _is_cut(lhs, rhs):
        return None
    if contraction.out_dtype(lhs, rhs) not in _DTYPES:
        return None
    operands = lhs, rhs
    known = _weight.get()
    for side in (1, 0) if known is None else (known,):
        q: Any = operands[side]
        if not isinstance(q, QArray):
            continue
        batch = math.prod(_sizes(q, contraction.batch(side)))
        if q.size == 0 or not select.may_serve("cpu", q.size // batch):
            continue
        x = _activations(operands[1 - side], q, contraction.contracting(1 - side), on_codes)
        if x is not None:
            out_dtype = contraction.out_dtype(lhs, rhs)
            found = _of_stored(x, in_rows(q), side, contraction, out_dtype, by_xla)
            if found is not None:
                return found
    return None


def _sizes(x: jax.Array | QArray, axes: Sequence[int]) -> list[Any]:
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
    - `scale`: of codes: f32, of the same shape but of size 1 along axes that are summed; else None.
    """

    values: jax.Array
    scale: jax.Array | None = None


def _activations(
    x: jax.Array | QArray, q: QArray, summed: Sequence[int], on_codes: bool
) -> Activations | None:
    """Returns the operand that meets the weight `q` as kernels take it, or None."""
    if isinstance(x, QArray):
        if q.format.is_integer and _has_rows(x, summed):
            terms = math.prod(_sizes(x, summed))
            return _rows(x, summed) if fits_int32(x, q, terms) else None
        if on_codes:
            return None
        x = x.dequantize()
    return Activations(x) if x.dtype == q.dtype and x.dtype in _DTYPES else None


def _has_rows(x: QArray, summed: Sequence[int]) -> bool:
    plain = x.qtype == "int8" and x.zero_point is None and x.scale.dtype != jnp.float64
    return plain and all(x.scale.shape[axis] == 1 for axis in summed)


def _rows(x: QArray, summed: Sequence[int]) -> Activations:
    shape = [1 if axis in summed else size for axis, size in enumerate(x.shape)]
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
        return (Codes(8, name), 0) if name in BYTES else None
    if format.bits not in (1, 2, 4):
        return None
    bits = int(format.bits)
    with jax.ensure_compile_time_eval():
        fields = jnp.arange(2**bits, dtype=jnp.uint8)
        values = format.decode(format.from_fields(fields), jnp.float32).tolist()
    centre = 2 ** (bits - 1) if has_zero_point and not format.signed else 0
    return Codes(bits, values=tuple(value - centre for value in values)), centre


# The product.


@dataclasses.dataclass(frozen=True)
class Reference:
    """The product of matrices by XLA, from the operands that a kernel takes.

    **Arguments:**

    - `by_xla`: the way to any product.
    - `qtype`, `dense_dtype`: of the weight.
    - `precision`: of the product.
    """

    by_xla: Way
    qtype: str
    dense_dtype: str
    precision: Any

    def __call__(self, operands: MatmulOperands, product: MatmulProblem) -> jax.Array:
        """Returns `[B, M, N]`."""
        batched = operands.x.shape[0] != 1
        if not batched:  # which not all that XLA has for products is as fast with
            operands = MatmulOperands(*(None if x is None else jnp.squeeze(x, 0) for x in operands))
        x, packed, scale, zero_point, x_scale = operands
        is_narrow = get_format(self.qtype).bits < 8
        q = QArray.from_packed(
            packed,
            scale,
            zero_point,
            qtype=self.qtype,
            packing=Packing(-1, product.columns) if is_narrow else None,
            dense_dtype=x.dtype if x_scale is None else self.dense_dtype,
        )
        if x_scale is not None:
            scale = x_scale[..., None]
            x = QArray.from_packed(x, scale, qtype="int8", dense_dtype=self.dense_dtype)
        summed = (x.ndim - 1,), (x.ndim - (2 if product.contracting == "rows" else 1),)
        batch = ((0,), (0,)) if batched else ((), ())
        contraction = Contraction((summed, batch), self.precision, product.out_dtype)
        out = self.by_xla(x, q, contraction)
        return out if batched else jnp.expand_dims(out, 0)


def _of_stored(
    x: Activations,
    array: Stored,
    side: int,
    contraction: Contraction,
    out_dtype: jnp.dtype,
    by_xla: Way,
) -> Native | None:
    """Returns the product of activations with a weight, as it is stored; or None."""
    q, axes = array
    summed, batch = (
        {axes[of_q]: of_x for of_x, of_q in zip(pair[1 - side], pair[side], strict=True)}
        for pair in contraction.dimension_numbers
    )
    matrix = as_matrix(q, tuple(summed), tuple(batch))
    codes = None if matrix is None else codes_of(q.qtype, q.zero_point is not None)
    if matrix is None or codes is None:
        return None
    # In the order in which the axes of the stored array follow each other.
    first, last = ([pairs[axis] for axis in sorted(pairs)] for pairs in (batch, summed))
    operands = MatmulOperands(
        _as_rows(x.values, first, last),
        jnp.asarray(matrix.q.packed),
        jnp.asarray(matrix.q.scale),
        matrix.q.zero_point,
        None if x.scale is None else _as_rows(x.scale, first, last)[..., 0],
    )
    reference = Reference(by_xla, q.qtype, q.dense_dtype, contraction.precision)
    product = MatmulProblem(
        codes[0], matrix.q.shape[2], matrix.contracting, out_dtype.name, codes[1], reference
    )
    target = select.find("cpu", product.codes, product.shape(operands))
    if target is None:
        return None

    def compute() -> jax.Array:
        out = matmul(operands, product)
        of_x = [axis for axis in range(x.values.ndim) if axis not in (*first, *last)]
        of_q = [axis for axis in range(q.ndim) if axis not in (*summed, *batch)]
        sizes = _sizes(q, sorted(batch)) + _sizes(x.values, of_x) + _sizes(q, of_q)
        # Where each axis of the result is now: those of the batch, and those of either operand.
        order = [sorted(batch).index(axes[axis]) for axis in contraction.batch(side)]
        x_order = [len(batch) + i for i in range(len(of_x))]
        q_order = [len(batch) + len(of_x) + of_q.index(axis) for axis in axes if axis in of_q]
        order += x_order + q_order if side else q_order + x_order
        return lax.transpose(out.reshape(sizes), order)

    return Native(target, compute)


def _as_rows(x: jax.Array, first: Sequence[int], last: Sequence[int]) -> jax.Array:
    """Returns an array as `[B, M, K]`: some axes, those that are left, and others."""
    others = [axis for axis in range(x.ndim) if axis not in (*first, *last)]
    sizes = [math.prod(_sizes(x, axes)) for axes in (first, others, last)]
    return lax.transpose(x, [*first, *others, *last]).reshape(sizes)
