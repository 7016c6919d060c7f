"""`StoredMatrix`, a weight viewed as the matrices that kernels read, without moving codes.

Kernels read codes `[B, R, C]`, which are B matrices of R rows and C columns, and contract rows or
columns. A weight can be viewed like this if its axes have one of two orders: batch, contracted and
free axes, or batch, free and contracted axes. Kernels also read `[B, R, H, C]`, where H is the size
of further batch axes between rows and columns, such as the heads of a KV cache.
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
from ..arrays import QArray
from ..formats.packing import Packing, ternary_to_int2
from ..formats.tiles import Shape


class StoredMatrix(NamedTuple):
    """A weight as a batch of stored matrices: its arrays, and their description for kernels.

    **Arguments:**

    - `operands`: the arrays of the weight, as arguments of a kernel. Its fields for the arrays of
      activations are None.
    - `columns`: the number of codes in a row, before packing.
    - `contracting`: the axis of each matrix that a product sums over, "rows" or "columns".
    - `qtype`: the format of the codes.
    - `scale_codes`: how kernels decode quantized scales. None if the scales are floats.
    """

    operands: MatmulOperands
    columns: int
    contracting: str
    qtype: str
    scale_codes: ScaleCodes | None


@dataclasses.dataclass(frozen=True)
class DequantizeScales:
    """A hashable function that dequantizes quantized scales, for kernels that read float scales.

    **Arguments:**

    - `qtype`: the format of the scales.
    - `count`: the number of scales per row of the matrix.
    """

    qtype: str
    count: int

    def __call__(self, packed: jax.Array, outer_scale: jax.Array) -> jax.Array:
        """Return the scales in f32, computed from quantized scales.

        `packed` has the stored codes of the scales, and `outer_scale` the scales of these codes.
        """
        packing = None if self.qtype == "int8" else Packing(-1, self.count)
        return QArray.from_packed(
            packed, outer_scale, qtype=self.qtype, packing=packing, dense_dtype="float32"
        ).dequantize()


def swap_packed_axis(q: QArray) -> QArray:
    """Return a QArray with its last two axes swapped. The codes must be packed along axis -2.

    Such an array is the transpose of a stored weight, whose codes are packed along axis -1. XLA
    cancels that transpose and this one, so that a kernel reads the stored weight.
    """
    assert q.packing is not None
    swapped_axes = list(range(len(q.scale.shape)))
    swapped_axes[-2:] = swapped_axes[-1], swapped_axes[-2]

    def swap(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, QArray):
            return lax.transpose(jnp.asarray(leaf), swapped_axes)
        packing = leaf.packing and leaf.packing._replace(axis=-1)
        return leaf.replace(packed=swap(leaf.packed), scale=swap(leaf.scale), packing=packing)

    scale, minimum = q.scale, q.minimum
    if isinstance(scale, QArray) and not can_read_scale_codes(q, axis=-2):
        scale, minimum = q.scales(), q.minima()
    return q.replace(
        packed=swap(q.packed),
        scale=swap(scale),
        zero_point=swap(q.zero_points()),
        minimum=swap(minimum),
        packing=q.packing._replace(axis=-1),
    )


def _leaves_for_kernels(q: QArray, *, keep_scale_codes: bool) -> dict[str, Any] | None:
    """Return the arrays of a weight in dtypes that kernels read, as a dict by field of `QArray`.

    Quantized scales and minima are kept if `keep_scale_codes` is True and kernels can read them.
    Otherwise they are converted to f32. Return None if scales or minima are f64, or if kernels do
    not support the tiles of the zero points.
    """
    scale: Any
    minimum: Any
    zero_point: Any
    scale, minimum, zero_point = q.scale, q.minimum, q.zero_point
    if not (keep_scale_codes and isinstance(scale, QArray) and can_read_scale_codes(q)):
        if isinstance(scale, QArray) or scale.dtype.name not in FLOATS:
            scale = q.scales()
        has_minimum = minimum is not None
        if has_minimum and (isinstance(minimum, QArray) or minimum.dtype.name not in FLOATS):
            minimum = q.minima()
        for leaf in (scale, minimum):
            if leaf is not None and leaf.dtype.name not in FLOATS:  # f64
                return None
    if zero_point is not None:
        zero_point = q.zero_points()
        # Along each axis, both must have tiles of one size, or one of them has a single tile.
        for counts in zip(scale.shape, zero_point.shape, strict=True):
            if 1 not in counts and counts[0] != counts[1]:
                return None
    return {"packed": q.packed, "scale": scale, "minimum": minimum, "zero_point": zero_point}


def can_read_scale_codes(q: QArray, axis: int = -1) -> bool:
    """Return whether kernels can read the quantized scales and minima of an array.

    Scales and minima must be int8, or uint6 packed along `axis`. Their own scales must be floats
    with tiles along `axis`: the axis of the columns of the stored matrix, -1 or -2.
    """
    leaves: list[Any] = [q.scale] if q.minimum is None else [q.scale, q.minimum]
    for leaf in leaves:
        if not isinstance(leaf, QArray) or leaf.qtype not in ("int8", "uint6"):
            return False
        if leaf.zero_point is not None or leaf.minimum is not None:
            return False
        count, outer_scale = leaf.shape[axis], leaf.scale
        packing = None if leaf.qtype == "int8" else Packing(axis, count)
        if leaf.packing != packing or (packing and count % 8):
            return False
        # The scales of these codes must be floats with tiles along `axis` only.
        if isinstance(outer_scale, QArray) or outer_scale.dtype.name not in FLOATS:
            return False
        outer_count = outer_scale.shape[axis]
        outer_shape = [*leaf.shape]
        outer_shape[axis] = outer_count
        if [*outer_scale.shape] != outer_shape or outer_count == 0 or count % outer_count:
            return False
    have_same_format = len({leaf.qtype for leaf in leaves}) == 1
    return have_same_format and all(leaf.shape[:-2] == q.shape[:-2] for leaf in leaves)


def as_stored_matrix(
    q: QArray, shape: Shape, contracted: Sequence[int], batch: Sequence[int]
) -> StoredMatrix | None:
    """View a weight as stored matrices, or return None if the layout of the weight prevents this.

    **Arguments:**

    - `q`, `shape`: the weight and its dense shape.
    - `contracted`, `batch`: the contracted axes and the batch axes of `q`, in increasing order.
    """
    # Find the first axis of rows, heads and columns. The axes are [batch, rows, heads, columns].
    # Heads are the batch axes that do not come first.
    ndim, rows_start = len(shape), 0
    while rows_start < len(batch) and batch[rows_start] == rows_start:
        rows_start += 1
    head_axes = [*batch[rows_start:]]
    if not contracted:
        return None
    if [*contracted] == [*range(ndim - len(contracted), ndim)]:
        contracting, heads_start = "columns", ndim - len(contracted) - len(head_axes)
    elif [*contracted] == [*range(rows_start, rows_start + len(contracted))]:
        contracting, heads_start = "rows", rows_start + len(contracted)
    else:
        return None
    columns_start = heads_start + len(head_axes)
    if head_axes:
        are_between = head_axes == [*range(heads_start, columns_start)] and columns_start < ndim
        if not are_between or q.format.bits == 1.6:
            return None
    count, rows = math.prod(shape[:rows_start]), math.prod(shape[rows_start:heads_start])
    heads, columns = math.prod(shape[heads_start:columns_start]), math.prod(shape[columns_start:])
    sizes: Shape = (count, rows, heads, columns) if head_axes else (count, rows, columns)

    # Reshape all leaves to these sizes.
    is_matrix = sizes in (shape, (1, *shape)) and ndim < 4
    leaves = _leaves_for_kernels(q, keep_scale_codes=is_matrix)
    if leaves is None:
        return None
    packing = None if q.format.bits == 8 else Packing(-1, columns)
    if sizes == (1, *shape) and q.packing == packing:  # the common case, without a general reshape
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

    # Split quantized scales into codes and their scales. Broadcast all leaves but the codes of the
    # weight along the batch axes, because kernels read them for each matrix.
    scale_codes = None
    for name, leaf in [*leaves.items()]:
        if leaf is None:
            continue
        if isinstance(leaf, QArray):
            if name == "scale":
                row_count = leaf.shape[-1]
                scale_codes = ScaleCodes(row_count, DequantizeScales(leaf.qtype, row_count))
            leaves[f"outer_{name}"], leaf = jnp.asarray(leaf.scale), leaf.packed
        if name != "packed" and head_axes:
            leaf = jnp.broadcast_to(leaf, (count, leaf.shape[1], heads, leaf.shape[3]))
            leaf = leaf.swapaxes(1, 2).reshape(count * heads, leaf.shape[1], leaf.shape[3])
        elif name != "packed" and leaf.shape[0] != count:
            leaf = jnp.broadcast_to(leaf, (count, *leaf.shape[1:]))
        leaves[name] = jnp.asarray(leaf)
    qtype = q.qtype
    if q.format.bits == 1.6:
        # No kernel reads digits of base 3. The five digits of a byte would be in two vectors.
        leaves["packed"], qtype = ternary_to_int2(leaves["packed"], columns), "int2"
    return StoredMatrix(MatmulOperands(None, **leaves), columns, contracting, qtype, scale_codes)
