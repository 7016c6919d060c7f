"""`NMSparse`: a matrix that stores n of every m neighboring entries, as in 2:4 sparsity."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.rules import register
from .._core.surface import check_axes
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._core.tree import static
from .._core.value import materialise_one
from .._jax.primitives import find_primitive
from ..kernels.common.problem import pack_bits, planes_size, unpack_bits
from .elementwise import register_zero_preserving


class NMSparse(ImplicitArray):
    """A matrix `[..., K, N]` that stores n of every m neighboring entries along an axis.

    The other entries are zero (n:m sparsity). NVIDIA's sparse tensor cores use 2:4 (Mishra et al.,
    arXiv 2104.08378). Groups of m neighbors lie along the contracted axis: -2 for a JAX kernel
    `[..., in, out]`, -1 for a weight `[..., out, in]`. The position of each value in its group
    takes `ceil(log2 m)` bits. So a 2:4 matrix in float32 takes 68 bits per group, instead of 128.
    This saves memory, not time: a matmul expands the matrix to a temporary dense array.

    In elementwise operations, entries that are not stored stay zero, even if the other operand is
    NaN. In a matmul, NaN times such an entry is NaN.

    **Keeps the structure:** transposes; elementwise products with a number or a dense array, and
    quotients by them; floating dtype conversions; and elementwise functions that map 0 to 0.

    **Materializes:** sums, slices along the last two axes, and functions that map 0 to another
    number.

    **Arguments:**

    - `values`: the stored entries, `[..., K/m*n, N]` for axis -2 or `[..., N, K/m*n]` for axis -1.
      They can be implicit, such as a `QArray`.
    - `indices`: the positions of the values in their groups, packed to uint8 along the same axis
      by `veneer.kernels.common.problem.pack_bits`. `NMSparse.prune` returns both.
    - `n`, `m`: the pattern, `1 <= n <= m` and `2 <= m <= 256`; static.
    - `axis`: the axis of the groups, -2 or -1; static.

    **Raises:**

    - `TypeError` if `values` or `indices` is not an array, or `indices` is not uint8.
    - `ValueError` if `values` or `indices` has another shape than stated above, or `n`, `m` or
      `axis` is out of range.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.NMSparse.prune(jnp.array([[1.0, -4.0, 3.0, 2.0]]), axis=-1)
    >>> vn.materialise(w).tolist()
    [[0.0, -4.0, 3.0, 0.0]]
    >>> (jnp.ones((1, 1)) @ w).tolist()
    [[0.0, -4.0, 3.0, 0.0]]
    """

    metadata_is_meaning: ClassVar[bool] = False

    values: jax.Array | np.ndarray | ImplicitArray  # [..., K/m·n, N] or [..., N, K/m·n]
    indices: jax.Array | np.ndarray  # uint8
    n: int = static()
    m: int = static()
    axis: int = static(default=-2)

    def __post_init__(self) -> None:
        _check_pattern(self.n, self.m, self.axis)
        axes = {-2: "{} N", -1: "N {}"}[self.axis]
        check_axes(self, values=axes.format("kept"))
        kept = self.values.shape[self.axis]
        packed = planes_size(kept, self.bits)
        check_axes(self, values=axes.format(kept), indices=axes.format(packed))
        if kept % self.n:
            raise ValueError(
                f"NMSparse takes values whose axis {self.axis} is a multiple of n={self.n}, got "
                f"shape {tuple(self.values.shape)}"
            )
        if self.indices.dtype != jnp.uint8:
            raise TypeError(f"indices must be uint8, not {self.indices.dtype.name}")

    @classmethod
    def prune(
        cls, w: ArrayLike | ImplicitArray, n: int = 2, m: int = 4, axis: int = -2
    ) -> "NMSparse":
        """Prune a matrix: keep the n entries of largest magnitude in each group of m.

        If entries have the same magnitude, the first ones are kept. NaN counts as infinite.

        **Arguments:**

        - `w`: a floating or complex matrix `[..., K, N]`. An implicit array is materialized.
        - `n`, `m`, `axis`: the pattern and the axis of the groups, as in `NMSparse`. `m` must
          divide the size of the axis.

        **Raises:**

        - `TypeError` if `w` is not floating or complex.
        - `ValueError` if `w` has fewer than two axes, `m` does not divide the axis, or `n`, `m` or
          `axis` is out of range.

        >>> import jax.numpy as jnp, veneer as vn
        >>> w = vn.types.NMSparse.prune(jnp.ones((16, 8)))
        >>> w
        NMSparse(values=f32[8,8], indices=u8[2,8], n=2, m=4, axis=-2)
        >>> w.nbytes, 4 * w.size
        (272, 512)
        """
        _check_pattern(n, m, axis)
        w = jnp.asarray(materialise_one(w))
        if not jnp.issubdtype(w.dtype, jnp.inexact):
            raise TypeError(f"prune takes floating or complex arrays, not {w.dtype.name}")
        if w.ndim < 2 or w.shape[axis] % m:
            raise ValueError(
                f"prune takes a matrix whose axis {axis} is a multiple of m={m}, got shape "
                f"{w.shape}. Pad it with zeros, or choose another axis."
            )
        values, indices = _keep_largest(w, n, m, axis)
        return cls(values, indices, n, m, axis)

    @property
    def bits(self) -> int:
        """The number of bits per packed position, `ceil(log2 m)`."""
        return _bits(self.m)

    @property
    def positions(self) -> jax.Array:
        """The position of each value in its group, as uint8 in the shape of `values`."""
        kept = self.values.shape[self.axis]
        return unpack_bits(self.indices, self.bits, self.axis, kept)

    def mask(self) -> jax.Array:
        """Return a dense boolean array that is True where an entry is stored."""
        return self._expanded(jnp.ones(self.values.shape, jnp.bool_))

    def materialise(self) -> jax.Array:
        """Return the dense matrix."""
        return self._expanded(jnp.asarray(materialise_one(self.values)))

    def _expanded(self, values: jax.Array) -> jax.Array:
        """Return a dense array with `values` at the stored positions, and zeros elsewhere."""
        axis = self.axis
        groups, positions = (_split(x, axis, self.n) for x in (values, self.positions))
        all_positions = jnp.arange(self.m, dtype=jnp.uint8).reshape(-1, *[1] * (-1 - axis))
        dense = jnp.zeros((), values.dtype)
        for i in range(self.n):
            take = lambda x, i=i: lax.slice_in_dim(x, i, i + 1, axis=x.ndim + axis)
            dense = jnp.where(take(positions) == all_positions, take(groups), dense)
        return _merge(dense, axis)

    def gather(self, dense: ArrayLike) -> jax.Array:
        """Return the entries of a dense array at the stored positions, in the shape of `values`."""
        groups = _split(jnp.asarray(dense), self.axis, self.m)
        positions = _split(self.positions, self.axis, self.n).astype(jnp.int32)
        return _merge(jnp.take_along_axis(groups, positions, self.axis), self.axis)


def _bits(m: int) -> int:
    return (m - 1).bit_length()


def _check_pattern(n: int, m: int, axis: int) -> None:
    if not 1 <= n <= m or not 2 <= m <= 256:
        raise ValueError(f"n:m needs 1 <= n <= m and 2 <= m <= 256, got {n}:{m}")
    if axis not in (-2, -1):
        raise ValueError(f"axis must be -2 or -1, not {axis}")


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Split an axis, -2 or -1, into two: the groups, and the `size` entries of each group."""
    front = x.ndim + axis
    groups = x.shape[front] // size
    return x.reshape(*x.shape[:front], groups, size, *x.shape[front + 1 :])


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Undo `_split`: merge `axis`, the entries of each group, with the axis before it."""
    front = x.ndim + axis
    size = x.shape[front - 1] * x.shape[front]
    return x.reshape(*x.shape[: front - 1], size, *x.shape[front + 1 :])


# Without jit, each operation would store a temporary array as large as w.
@partial(jax.jit, static_argnames=("n", "m", "axis"))
def _keep_largest(w: jax.Array, n: int, m: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the n entries of largest magnitude in each group of m, and their packed positions.

    The entries of a group keep their order. Both results have the axes of `w`.
    """
    groups = _split(w, axis, m)
    positions = largest_positions(groups, n, axis)
    values = _merge(jnp.take_along_axis(groups, positions, axis), axis)
    return values, pack_bits(_merge(positions.astype(jnp.uint8), axis), _bits(m), axis)


def largest_positions(groups: jax.Array, n: int, axis: int) -> jax.Array:
    """Return the positions of the n entries with the largest magnitudes along an axis.

    If magnitudes are equal, the first entries are chosen. NaN counts as infinite.

    **Returns:** int32 positions in ascending order. The axis has size n.

    >>> import jax.numpy as jnp
    >>> from veneer.types.nm_sparse import largest_positions
    >>> largest_positions(jnp.array([1.0, -4.0, 3.0, 3.0]), 2, 0).tolist()
    [1, 2]
    """
    magnitude = jnp.abs(groups)
    magnitude = jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude)
    order = jnp.argsort(-magnitude, axis, stable=True)
    return jnp.sort(lax.slice_in_dim(order, 0, n, axis=axis % groups.ndim), axis)


@register("transpose")
def _(x: NMSparse, *, permutation: Any) -> Any:
    if {*permutation[-2:]} != {x.ndim - 2, x.ndim - 1}:
        return NotImplemented
    axis = -3 - x.axis if permutation[-1] == x.ndim - 2 else x.axis
    transpose = partial(redispatch, lambda leaf: lax.transpose(leaf, permutation))
    return NMSparse(transpose(x.values), transpose(x.indices), x.n, x.m, axis)


@register("dot_general")
def _(x: ArrayLike | NMSparse, y: ArrayLike | NMSparse, **params: Any) -> Any:
    dense = [jnp.asarray(materialise_one(z)) for z in (x, y)]
    return find_primitive("dot_general").bind(*dense, **params)


def _map_values(x: NMSparse, function: Callable, *others: Any) -> NMSparse:
    """Return a copy of `x` with `function(x.values, *others)` as its values."""
    return dataclasses.replace(x, values=redispatch(function, x.values, *others))


register_zero_preserving(NMSparse, _map_values)


@register("convert_element_type")
def _(x: NMSparse, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Any:
    if weak_type or sharding is not None:
        return NotImplemented
    return _map_values(x, lambda values: lax.convert_element_type(values, new_dtype))


def _register_by_dense(name: str) -> None:
    """Register rules for products with a dense array ("mul"), or quotients by it ("div")."""
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: NMSparse, y: ArrayLike, **params: Any) -> Any:
        y = jnp.asarray(y)
        if jnp.broadcast_shapes(x.shape, y.shape) != x.shape:
            return NotImplemented
        is_number_per_matrix = set(y.shape[-2:]) <= {1}
        factors = y if is_number_per_matrix else x.gather(jnp.broadcast_to(y, x.shape))
        return _map_values(x, lambda *factors: primitive.bind(*factors, **params), factors)


for _name in ("mul", "div"):
    _register_by_dense(_name)
