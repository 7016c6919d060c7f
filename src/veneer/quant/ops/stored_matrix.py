"""A weight as the matrix that kernels multiply: seen so, with no code moved.

They take a batch of matrices `[B, R, C]` as they are stored, and sum one side. An array is one
where its axes lie so in memory: those of the batch, and then those that are summed, on either side
of those that are left. Scales and minima are as they are stored, where kernels read that.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.primitives.movement import reshape
from ...kernels import FLOATS, ScaleCodes
from ..formats.packing import Packing, packed_size
from ..qarray import QArray


def in_rows(q: QArray) -> tuple[QArray, tuple[int, ...]]:
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


@dataclasses.dataclass(frozen=True)
class ScalesByXla:
    """What scales that are codes are worth, in f32.

    **Arguments:**

    - `qtype`: of the codes; and how many a row has: `count`.
    """

    qtype: str
    count: int

    def __call__(self, packed: jax.Array, outer: jax.Array) -> jax.Array:
        """Returns them, `[B, R / tr, C / tc]`."""
        packing = None if self.qtype == "int8" else Packing(-1, self.count)
        leaf = QArray.from_packed(
            packed, outer, qtype=self.qtype, packing=packing, dense_dtype="float32"
        )
        return leaf.dequantize()


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


def as_matrix(q: QArray, summed: Sequence[int], batch: Sequence[int]) -> StoredMatrix | None:
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
    return q.replace(packed=_two_bits(q.packed, q.shape[-1]), qtype="int2")


@functools.partial(jax.jit, static_argnames="size")
def _two_bits(packed: jax.Array, size: int) -> jax.Array:
    """Packs -1, 0 and 1, which lie five in a byte, four in a byte: of each 4 bytes, 5.

    Each byte is looked up, for XLA of JAX 0.10 does all that is here anew for each of the 5: with
    digits that are divided out it takes three times as long.
    """
    units = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)])
    units = units.reshape(*packed.shape[:-1], -1, 4)
    tens = jnp.asarray(_TEN_BITS).at[units].get(mode="promise_in_bounds")

    def byte(place: int) -> jax.Array:
        first, shift = divmod(8 * place, 10)
        bits = tens[..., first] >> shift
        if shift > 2:
            bits |= tens[..., first + 1] << 10 - shift
        return bits.astype(jnp.uint8)

    bytes_ = [byte(place) for place in range(5)]
    bytes_ = lax.optimization_barrier(bytes_)  # XLA would ask for each byte which of 5 it is
    out = jnp.stack(bytes_, -1).reshape(*packed.shape[:-1], -1)
    return out[..., : packed_size(size, 2)]


def _ten_bits() -> np.ndarray:
    """Five digits of base 3 that a byte has, as -1, 0 and 1 in 2 bits each: `uint16[256]`."""
    digits = np.arange(256)[:, None] // 3 ** np.arange(5) % 3
    return ((digits - 1 & 3) << 2 * np.arange(5)).sum(1).astype(np.uint16)


_TEN_BITS = _ten_bits()


def _go_together(q: QArray) -> bool:
    """Whether zero points are for tiles of scales, or several of these, along each axis."""
    if q.zero_point is None:
        return True
    counts = zip(q.scale.shape, q.zero_point.shape, strict=True)
    return all(1 in pair or pair[0] == pair[1] for pair in counts)
