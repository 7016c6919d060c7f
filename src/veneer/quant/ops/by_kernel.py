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

from ..._core.primitives.reshaping import reshape
from ...kernels import (
    BYTES,
    FLOATS,
    PLANE_BITS,
    SIX_BIT_FLOATS,
    Codes,
    MatmulOperands,
    MatmulProblem,
    ScaleCodes,
    matmul,
    select,
)
from ..arrays.qarray import QArray
from ..formats import get_format
from ..formats.packing import Packing, two_bits
from ..formats.tiles import over_tiles
from .by_xla import multiplied_codes
from .kernel_references import ProductByXla, ScalesByXla
from .operands import fits_int32, is_algorithm
from .product import DotParams, Plan, dense_nbytes

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


def too_small_for_kernels(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams
) -> str:
    """Return the reason why no kernel here reads an operand, if that is its size; else ""."""
    for side, q in enumerate((lhs, rhs)):
        if not isinstance(q, QArray) or q.size == 0 or select.chosen() == "xla":
            continue
        if not all(isinstance(n, int) for n in q.shape):  # exported programs call no kernel
            continue
        batch = math.prod(_sizes(q, params.dimension_numbers.batch[side]))
        least = select.least_entries(jax.default_backend(), q.size // batch, batch)
        if least is not None:
            in_each = f" in each of {batch:,} matrices" if batch > 1 else ""
            name = "rhs" if side else "lhs"
            return (
                f"{name} is too small for a kernel ({q.size // batch:,} values{in_each}, and "
                f"kernels need {least:,})"
            )
    return ""


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
    is_plain = x.qtype == "int8" and x.zero_point is None and x.minimum is None
    if not is_plain or x.scale.dtype == jnp.float64:
        return False
    scales = _sizes(x.scale, summed)
    is_tiled = len(summed) == 1 and tiles[0] % max(1, scales[0]) == 0
    return is_tiled or all(size == 1 for size in scales)


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


def _plan(
    x: Activations, weight: QArray, side: int, params: DotParams, out_dtype: jnp.dtype
) -> Plan | None:
    """Returns the product of activations with a weight, the operand of a side; or None."""
    q, axes = _in_rows(weight)
    # From the axes of what is stored to those of the activations.
    summed, batch = (
        {axes[of_q]: of_x for of_x, of_q in zip(pair[1 - side], pair[side], strict=True)}
        for pair in params.dimension_numbers
    )
    matrix = _as_matrix(q, tuple(summed), tuple(batch))
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
    opt_in = select.chosen() == "experimental"
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
    targets = {
        platform: target
        for platform in select.PLATFORMS
        if (target := select.usable(platform, operands, product)) is not None
    }
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


# A weight as the matrix that kernels multiply: seen so, with no code moved. They take a batch of
# matrices `[B, R, C]` as they are stored, and sum one side. An array is one where its axes lie so
# in memory: those of the batch, and then those that are summed, on either side of those that are
# left. Scales and minima are as they are stored, where kernels read that.


def _in_rows(q: QArray) -> tuple[QArray, tuple[int, ...]]:
    """Returns an array that is packed along its last axis but one with the last two swapped.

    That is what a transposition leaves behind. XLA drops two that undo each other; and the product
    sums the other side.

    **Returns:** the array, with its codes in rows, and where the axes of the one given are in it.
    """
    order = list(range(q.ndim))
    if q.packing is None or q.packing.axis != -2:
        return q, tuple(order)
    order[-2:] = q.ndim - 1, q.ndim - 2
    floats = {"scale": q.scale, "minimum": q.minimum}
    if not _has_codes(q, axis=-2):
        floats = _floats(q)
    leaves = {"packed": q.packed, "zero_point": q.zero_points()} | floats
    swapped = {name: _swapped(leaf, order) for name, leaf in leaves.items()}
    return q.replace(**swapped, packing=q.packing._replace(axis=-1)), tuple(order)


def _swapped(leaf: Any, order: Sequence[int]) -> Any:
    """A leaf, or None, with its last two axes swapped; of codes, with these in rows."""
    if not isinstance(leaf, QArray):
        return leaf if leaf is None else lax.transpose(leaf, order)
    packed, scale = (lax.transpose(jnp.asarray(x), order) for x in (leaf.packed, leaf.scale))
    packing = leaf.packing and leaf.packing._replace(axis=-1)
    return leaf.replace(packed=packed, scale=scale, packing=packing)


def _floats(q: QArray) -> dict[str, Any]:
    """Returns scales and minima as kernels read them: as they are stored, or else in f32."""
    leaves = {"scale": (q.scale, q.scales), "minimum": (q.minimum, q.minima)}
    return {
        name: leaf
        if leaf is not None and leaf.dtype.name in FLOATS and not isinstance(leaf, QArray)
        else wide()
        for name, (leaf, wide) in leaves.items()
    }


def _has_codes(q: QArray, axis: int = -1) -> bool:
    """Whether scales, and minima if there are some, are codes along an axis that kernels read."""
    leaves: list[Any] = [q.scale] if q.minimum is None else [q.scale, q.minimum]
    if not all(_are_codes(leaf, axis) for leaf in leaves):
        return False
    are_alike = len({leaf.qtype for leaf in leaves}) == 1
    return are_alike and all(leaf.shape[:-2] == q.shape[:-2] for leaf in leaves)


def _are_codes(leaf: Any, axis: int) -> bool:
    if not isinstance(leaf, QArray) or leaf.qtype not in ("int8", "uint6"):
        return False
    count, outer = leaf.shape[axis], leaf.scale
    packing = None if leaf.qtype == "int8" else Packing(axis, count)
    if leaf.packing != packing or (packing and count % 8) or isinstance(outer, QArray):
        return False
    is_plain = leaf.zero_point is None and leaf.minimum is None and outer.dtype.name in FLOATS
    some = outer.shape[axis]
    each = [some if i == leaf.ndim + axis else size for i, size in enumerate(leaf.shape)]
    return is_plain and [*outer.shape] == each and some > 0 and count % some == 0


class StoredMatrix(NamedTuple):
    """A batch of matrices, `[B, R, C]`, and the side that a product sums: "rows" or "columns".

    **Arguments:**

    - `q`: the array as `[B, R, C]`; or, of matrices that lie side by side, `[B / H, R, H, C]`.
    - `columns`: C.
    """

    q: QArray
    columns: int
    contracting: str

    def leaf(self, name: str) -> Any:
        """The codes as kernels read them, or `[B, R / tr, C / tc]` of scales and their kin."""
        leaf = getattr(self.q, name)
        if isinstance(leaf, QArray):
            return jnp.asarray(leaf.packed)
        if leaf is None or self.q.ndim == 3 or name == "packed":
            return leaf if leaf is None else jnp.asarray(leaf)
        some, rows, _, columns = leaf.shape
        return leaf.swapaxes(1, 2).reshape(some * leaf.shape[2], rows, columns)

    def outer(self, name: str) -> Any:
        """What scales or minima that are codes are scaled by, or None."""
        leaf = getattr(self.q, name)
        return jnp.asarray(leaf.scale) if isinstance(leaf, QArray) else None

    @property
    def tiles(self) -> ScaleCodes | None:
        """What scales are, where they are codes."""
        leaf = self.q.scale
        if not isinstance(leaf, QArray):
            return None
        return ScaleCodes(leaf.shape[-1], ScalesByXla(leaf.qtype, leaf.shape[-1]))


def _as_matrix(q: QArray, summed: Sequence[int], batch: Sequence[int]) -> StoredMatrix | None:
    """Returns an array as matrices for a product, or None where it does not lie so in memory.

    **Arguments:**

    - `summed`, `batch`: axes of the array.
    """
    # Axes of the batch come first; others of it, such as heads, may lie within each row.
    first = next((i for i, axis in enumerate(sorted(batch)) if axis != i), len(batch))
    within = sorted(batch)[first:]
    end = first + len(summed)
    if not summed:
        return None
    if sorted(summed) == list(range(q.ndim - len(summed), q.ndim)):
        contracting, cut = "columns", q.ndim - len(summed) - len(within)
    elif sorted(summed) == list(range(first, end)):
        contracting, cut = "rows", end
    else:
        return None
    behind = cut + len(within)
    if within and (within != [*range(cut, behind)] or behind == q.ndim or q.format.bits == 1.6):
        return None
    parts = q.shape[:first], q.shape[first:cut], q.shape[cut:behind], q.shape[behind:]
    outer, rows, inner, columns = map(math.prod, parts)
    sizes = (outer, rows, inner, columns) if within else (outer, rows, columns)
    is_matrix = sizes in (q.shape, (1, *q.shape))  # already, so that nothing of scales is moved
    floats = {} if is_matrix and q.ndim < 4 and _has_codes(q) else _floats(q)
    are_read = all(leaf is None or leaf.dtype.name in FLOATS for leaf in floats.values())
    if not are_read or not _go_together(q):
        return None
    as_kernels_read = None if q.format.bits == 8 else Packing(-1, columns)
    q = q.replace(**floats, zero_point=q.zero_points())
    if sizes == (1, *q.shape) and q.packing == as_kernels_read:  # as most are
        matrix = jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), q)
    else:
        matrix = reshape(q, sizes)
    if matrix is NotImplemented or matrix.packing != as_kernels_read:
        return None
    # A leaf that matrices share is there for each, as kernels read it.
    of_batch = (outer, inner) if within else (outer,)
    leaves = {"zero_point": matrix.zero_point, "scale": matrix.scale, "minimum": matrix.minimum}
    shared = {
        k: x for k, x in leaves.items() if x is not None and x.shape != _of_batch(x.shape, of_batch)
    }
    if shared:
        spread = {k: jnp.broadcast_to(x, _of_batch(x.shape, of_batch)) for k, x in shared.items()}
        matrix = matrix.replace(**spread)
    return StoredMatrix(_in_bits(matrix), columns, contracting)


def _of_batch(shape: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """The shape of a leaf of matrices, of which there is one for each of a batch."""
    return (*batch, *shape[1:]) if len(batch) == 1 else (batch[0], shape[1], batch[1], shape[3])


def _in_bits(q: QArray) -> QArray:
    """Returns an array of digits of base 3, five in a byte, with codes of 2 bits; others as given.

    No kernel reads such digits: five that share a byte are in two vectors.
    """
    if q.format.bits != 1.6:
        return q
    return q.replace(packed=two_bits(q.packed, q.shape[-1]), qtype="int2")


def _go_together(q: QArray) -> bool:
    """Whether zero points are for tiles of scales, or several of these, along each axis."""
    if q.zero_point is None:
        return True
    counts = zip(q.scale.shape, q.zero_point.shape, strict=True)
    return all(1 in pair or pair[0] == pair[1] for pair in counts)
