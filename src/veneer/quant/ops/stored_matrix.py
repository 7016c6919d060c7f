"""`StoredMatrix`, a weight in the layout that kernels multiply, without moving codes.

Kernels read a stored batch of matrices `[B, R, C]`, and contract R or C. A weight has this
layout if its batch axes come first and the contracted axes lie together, before or after the free
axes. Further batch axes, such as heads, can lie between R and C.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.primitives.movement import reshape
from ...kernels import FLOATS, MatmulOperands, ScaleCodes
from ..arrays.qarray import QArray
from ..formats.packing import Packing, ternary_to_int2
from ..formats.tiles import Shape


class StoredMatrix(NamedTuple):
    """A batch of stored matrices `[B, R, C]`.

    **Arguments:**

    - `operands`: the arrays of the weight. Those of the activations are missing.
    - `columns`: the number of codes in a row, C.
    - `contracting`: the contracted side, "rows" or "columns".
    - `qtype`: the format of the codes.
    - `scale_codes`: a description of the scales if they are quantized, or None.
    """

    operands: MatmulOperands
    columns: int
    contracting: str
    qtype: str
    scale_codes: ScaleCodes | None


@dataclasses.dataclass(frozen=True)
class DequantizeScales:
    """A hashable function that dequantizes quantized scales, for `veneer.kernels.ScaleCodes`.

    **Arguments:**

    - `qtype`: the format of the scales.
    - `count`: the number of scales per row of the matrix.
    """

    qtype: str
    count: int

    def __call__(self, packed: jax.Array, outer: jax.Array) -> jax.Array:
        """Return the scales `[B, R / tr, C / tc]` in f32."""
        packing = None if self.qtype == "int8" else Packing(-1, self.count)
        return QArray.from_packed(
            packed, outer, qtype=self.qtype, packing=packing, dense_dtype="float32"
        ).dequantize()


def swap_packed_axis(q: QArray) -> QArray:
    """Return an array that is packed along the last axis but one with its last two axes swapped.

    Such an array is the transpose of a stored weight. XLA removes two transposes that undo each
    other, and the kernel contracts the other side.
    """
    assert q.packing is not None
    order = list(range(len(q.scale.shape)))
    order[-2:] = order[-1], order[-2]

    def swap(leaf: Any) -> Any:
        if not isinstance(leaf, QArray):
            return leaf if leaf is None else lax.transpose(jnp.asarray(leaf), order)
        packing = leaf.packing and leaf.packing._replace(axis=-1)
        return leaf.replace(packed=swap(leaf.packed), scale=swap(leaf.scale), packing=packing)

    leaves: dict[str, Any] = {"packed": q.packed, "zero_point": q.zero_points()}
    leaves |= {"scale": q.scale, "minimum": q.minimum}
    if isinstance(q.scale, QArray) and not can_read_scale_codes(q, axis=-2):
        leaves |= {"scale": q.scales(), "minimum": q.minima()}
    swapped = {name: swap(leaf) for name, leaf in leaves.items()}
    return q.replace(**swapped, packing=q.packing._replace(axis=-1))


def _leaves_for_kernels(q: QArray, *, can_have_scale_codes: bool) -> dict[str, Any] | None:
    """Return the arrays of a weight in dtypes that kernels read, or None if this is impossible.

    Scales and minima that kernels cannot read are converted to f32.
    """
    leaves: dict[str, Any] = {"packed": q.packed, "scale": q.scale, "minimum": q.minimum}
    has_scale_codes = can_have_scale_codes and isinstance(q.scale, QArray)
    if not (has_scale_codes and can_read_scale_codes(q)):
        for name, leaf in (("scale", q.scale), ("minimum", q.minimum)):
            if isinstance(leaf, QArray) or (leaf is not None and leaf.dtype.name not in FLOATS):
                leaves[name] = wide = q.scales() if name == "scale" else q.minima()
                if wide is not None and wide.dtype.name not in FLOATS:  # f64
                    return None
    leaves["zero_point"] = zero_point = q.zero_point
    if zero_point is not None:
        leaves["zero_point"] = q.zero_points()
        # Along each axis, both must have tiles of one size, or one of them has a single tile.
        for counts in zip(q.scale.shape, zero_point.shape, strict=True):
            if 1 not in counts and counts[0] != counts[1]:
                return None
    return leaves


def can_read_scale_codes(q: QArray, axis: int = -1) -> bool:
    """Return whether kernels read the quantized scales of an array, and its minima, if any.

    **Arguments:**

    - `axis`: the axis along which they may be packed.
    """
    leaves: list[Any] = [q.scale] if q.minimum is None else [q.scale, q.minimum]
    for leaf in leaves:
        if not isinstance(leaf, QArray) or leaf.qtype not in ("int8", "uint6"):
            return False
        count, outer = leaf.shape[axis], leaf.scale
        packing = None if leaf.qtype == "int8" else Packing(axis, count)
        if leaf.packing != packing or (packing and count % 8) or isinstance(outer, QArray):
            return False
        if leaf.zero_point is not None or leaf.minimum is not None:
            return False
        outer_count = outer.shape[axis]
        expected = [*leaf.shape]
        expected[axis] = outer_count
        if outer.dtype.name not in FLOATS or [*outer.shape] != expected:
            return False
        if outer_count == 0 or count % outer_count:
            return False
    are_alike = len({leaf.qtype for leaf in leaves}) == 1
    return are_alike and all(leaf.shape[:-2] == q.shape[:-2] for leaf in leaves)


def as_stored_matrix(
    q: QArray, shape: Shape, contracted: Sequence[int], batch: Sequence[int]
) -> StoredMatrix | None:
    """Return a weight as stored matrices, or None if it does not have their layout.

    **Arguments:**

    - `q`, `shape`: the weight and its dense shape.
    - `contracted`, `batch`: its contracted axes and its batch axes, in increasing order.
    """
    ndim, outer_ndim = len(shape), 0
    while outer_ndim < len(batch) and batch[outer_ndim] == outer_ndim:
        outer_ndim += 1
    inner = [*batch[outer_ndim:]]  # such as heads, between the rows and the columns
    if not contracted:
        return None
    if [*contracted] == [*range(ndim - len(contracted), ndim)]:
        contracting, start = "columns", ndim - len(contracted) - len(inner)
    elif [*contracted] == [*range(outer_ndim, outer_ndim + len(contracted))]:
        contracting, start = "rows", outer_ndim + len(contracted)
    else:
        return None
    end = start + len(inner)
    if inner and (inner != [*range(start, end)] or end == ndim or q.format.bits == 1.6):
        return None
    columns = math.prod(shape[end:])
    count, rows = math.prod(shape[:outer_ndim]), math.prod(shape[outer_ndim:start])
    heads = math.prod(shape[start:end])
    sizes: Shape = (count, rows, heads, columns) if inner else (count, rows, columns)

    is_matrix = sizes in (shape, (1, *shape)) and ndim < 4
    leaves = _leaves_for_kernels(q, can_have_scale_codes=is_matrix)
    if leaves is None:
        return None
    packing = None if q.format.bits == 8 else Packing(-1, columns)
    if sizes == (1, *shape) and q.packing == packing:  # as most weights are
        for name, leaf in leaves.items():
            if isinstance(leaf, QArray):
                leaves[name] = jax.tree.map(lambda x: x.reshape(1, *x.shape), leaf)
            elif leaf is not None:
                leaves[name] = leaf.reshape(1, *leaf.shape)
    else:
        matrix = reshape(q.replace(**leaves), sizes)
        if matrix is NotImplemented or matrix.packing != packing:
            return None
        leaves = {name: getattr(matrix, name) for name in leaves}

    # Kernels read scales, zero points and minima of each matrix, also if the matrices share them.
    scale_codes = None
    for name, leaf in [*leaves.items()]:
        if leaf is None:
            continue
        if isinstance(leaf, QArray):
            if name == "scale":
                scales = leaf.shape[-1]
                scale_codes = ScaleCodes(scales, DequantizeScales(leaf.qtype, scales))
            leaves[f"outer_{name}"], leaf = jnp.asarray(leaf.scale), leaf.packed
        if name != "packed":
            full = (count, leaf.shape[1], heads, leaf.shape[-1]) if inner else None
            full = full or (count, *leaf.shape[1:])
            if leaf.shape != full:
                leaf = jnp.broadcast_to(leaf, full)
            if inner:
                leaf = jnp.asarray(leaf).swapaxes(1, 2).reshape(count * heads, full[1], full[3])
        leaves[name] = jnp.asarray(leaf)
    qtype = q.qtype
    if q.format.bits == 1.6:
        # No kernel reads digits of base 3. The five digits of a byte would be in two vectors.
        leaves["packed"], qtype = ternary_to_int2(leaves["packed"], columns), "int2"
    return StoredMatrix(MatmulOperands(None, **leaves), columns, contracting, qtype, scale_codes)
