"""`SparseArray`: nonzero entries and their indices, in the layout of JAX's BCOO."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.surface import check_axes
from .._core.surface.array import ImplicitArray
from .._core.tree import static
from .._core.value import Value, materialise_one

Axes = Sequence[int]


class Entries:
    """The entries of a `SparseArray`, with an index along every axis, including batch axes.

    Each array of the batch stores the same number of entries, `nse`. Some of these are padding.

    - `data`: the entries `[*batch, nse]`, with 0 in place of padding.
    - `is_entry`: booleans `[*batch, nse]`, False for padding.
    - `columns`: for each axis, the indices `[*batch, nse]` of the entries along this axis. Padding
      has an index out of bounds along each sparse axis.
    - `sizes`: the sizes of all axes.
    """

    def __init__(self, x: "SparseArray"):
        data, indices = jnp.asarray(x.data), jnp.asarray(x.indices)
        sparse_sizes = np.array(x.sparse_shape, indices.dtype)
        self.is_entry = ((indices >= 0) & (indices < sparse_sizes)).all(-1)
        self.data = jnp.where(self.is_entry, data, 0)
        indices = jnp.where(self.is_entry[..., None], indices, sparse_sizes)
        self.sizes = (*data.shape[:-1], *x.sparse_shape)
        self.columns = [
            *(lax.broadcasted_iota(jnp.int32, data.shape, i) for i in range(data.ndim - 1)),
            *(indices[..., i] for i in range(len(x.sparse_shape))),
        ]

    def scatter(self, values: Any, axes: Axes) -> Any:
        """Return a dense array over `axes` that sums the values of entries with the same index.

        The values `[*batch, nse, ...]` are one number, or one array, per entry. If they are arrays,
        the axes of these arrays follow `axes` in the result.
        """
        n_axes = self.data.ndim
        if not axes:
            return values.sum(range(n_axes), dtype=values.dtype)
        shape = [self.sizes[axis] for axis in axes]
        zeros = jnp.zeros((*shape, *values.shape[n_axes:]), values.dtype)
        index = tuple(self.columns[axis] for axis in axes)
        return zeros.at[index].add(values, mode="drop") if zeros.size else zeros

    def gather(self, y: Any, axes: Axes) -> Any:
        """Return the value of `y` at the index of each entry, and 0 for padding.

        The first axes of the dense array `y` correspond to `axes`. Its other axes follow the axes
        `[*batch, nse]` of the entries in the result.
        """
        if not axes:
            return y
        if y.size == 0:
            return jnp.zeros((*self.data.shape, *y.shape[len(axes) :]), y.dtype)
        return y.at[tuple(self.columns[axis] for axis in axes)].get(mode="fill", fill_value=0)


class SparseArray(ImplicitArray):
    """A sparse array `[*batch, *sparse_shape]`, stored as nonzero entries and their indices.

    The layout is `jax.experimental.sparse.BCOO` without dense axes. Each array of the batch stores
    the same number of entries, `nse`. Entries whose index is out of bounds are padding. Entries
    with the same index are summed. Entries that are not stored contribute zero to products, matmuls
    and quotients, even if the other operand is infinite or NaN, or a divisor is 0.

    **Keeps the structure:** sums and elementwise products of two `SparseArray`; elementwise
    products with a number or a dense array, and quotients by them; elementwise functions that map 0
    to 0; `sum` over some of the axes; transposes, reshapes, broadcasts and slices. A matmul or
    `dot_general` with a dense array uses only the stored entries, and returns a dense array.

    **Materializes:** the operand with the smaller dense array in a matmul of two `SparseArray`, the
    divisor in a quotient of two, sums with a dense array, comparisons, sorts, gathers, and
    functions that map 0 to another number.

    A matmul with N vectors costs `nse * N` multiplications, a gather and a scatter. On CPU, it is
    faster than the dense matmul with 1% nonzero entries, but slower with 10%. Elementwise products
    of two `SparseArray` sort the entries of both. Nonlinear functions first sort the entries and
    sum duplicates, unless `unique_indices` is True.

    **Arguments:**

    - `data`: the entries `[*batch, nse]`, of any dtype except bool.
    - `indices`: int32 or int64 `[*batch, nse, n_sparse]`, the index of each entry along each sparse
      axis.
    - `sparse_shape`: the sizes of the last `n_sparse` axes, a nonempty tuple; static.
    - `unique_indices`: whether the indices in each array of the batch are distinct, apart from
      padding; static. This is not checked.

    **Raises:**

    - `TypeError` if `data` or `indices` is not a dense array, `data` is boolean, `indices` is not
      int32 or int64, or `sparse_shape` is not a tuple.
    - `ValueError` if `data` or `indices` has another shape than stated above, or `sparse_shape` is
      empty.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.SparseArray(jnp.array([2.0, 3.0]), jnp.array([[0, 1], [2, 0]]), (3, 2))
    >>> vn.materialise(a).tolist()
    [[0.0, 2.0], [0.0, 0.0], [3.0, 0.0]]
    >>> (a @ jnp.ones(2)).tolist()
    [2.0, 0.0, 3.0]
    """

    metadata_is_meaning: ClassVar[bool] = False

    data: jax.Array | np.ndarray  # [*batch, nse]
    indices: jax.Array | np.ndarray  # [*batch, nse, n_sparse]
    sparse_shape: tuple[int, ...] = static()
    unique_indices: bool = static(default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sparse_shape, tuple) or isinstance(self.data, Value):
            raise TypeError(
                "SparseArray takes an array for data and a tuple of sizes for sparse_shape, not "
                f"{self.data!r} and {self.sparse_shape!r}"
            )
        if not self.sparse_shape:
            raise ValueError("SparseArray takes at least one sparse axis: sparse_shape is empty")
        check_axes(self, data="nse", indices=f"nse {len(self.sparse_shape)}")
        _check_numbers("data", self.data)
        # Smaller dtypes may not hold an index out of bounds, which marks padding.
        if self.indices.dtype not in (jnp.int32, jnp.int64):
            raise TypeError(f"indices must be int32 or int64, not {self.indices.dtype.name}")

    @classmethod
    def from_dense(
        cls, x: ArrayLike | ImplicitArray, nse: int | None = None, n_batch: int = 0
    ) -> "SparseArray":
        """Build a sparse array from the nonzero entries of a dense array.

        **Arguments:**

        - `x`: an array of numbers. An implicit array is materialized.
        - `nse`: the number of entries to store per array of the batch. The default is the largest
          number of nonzero entries in an array of the batch. Under `jax.jit`, `nse` must be given.
        - `n_batch`: the number of leading batch axes.

        **Returns:** the `SparseArray`, with `unique_indices=True`. If `x` is traced and `nse` is
        too small, the stored entries are NaN.

        **Raises:**

        - `TypeError` if `x` is boolean.
        - `ValueError` if `nse` is too small and `x` is not traced.
        - `ValueError` if `n_batch` is not between 0 and `x.ndim - 1`.
        - `ValueError` if `x` is a traced integer array and `nse` is given, because integers have no
          NaN to mark an `nse` that is too small.
        - `jax.errors.ConcretizationTypeError` if `x` is traced and `nse` is missing.

        >>> import jax.numpy as jnp, veneer as vn
        >>> vn.types.SparseArray.from_dense(jnp.eye(3), nse=4)
        SparseArray(data=f32[4], indices=i32[4,2], sparse_shape=(3, 3), unique_indices=True)
        """
        from jax.experimental import sparse

        x = jnp.asarray(materialise_one(x))
        _check_numbers("x", x)
        if not 0 <= n_batch < x.ndim:
            raise ValueError(f"n_batch is {n_batch}, but must leave a sparse axis of {x.shape}")
        counts = (x != 0).sum(range(n_batch, x.ndim))
        is_traced = isinstance(x, jax.core.Tracer)
        if is_traced and nse is not None and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"whether {nse} entries are enough for {x.dtype.name}{list(x.shape)} is not known "
                "under a trace. Convert it to float first, or call from_dense outside of the trace."
            )
        if nse is not None and not is_traced and (most := int(counts.max(initial=0))) > nse:
            raise ValueError(f"nse is {nse}, but there are {most} nonzero entries")
        bcoo = sparse.BCOO.fromdense(x, nse=nse, n_batch=n_batch)
        if nse is None or not is_traced:
            return cls.from_bcoo(bcoo)
        data = jnp.where((counts > nse)[..., None], jnp.nan, bcoo.data)
        return cls(data, bcoo.indices, x.shape[n_batch:], unique_indices=True)

    @classmethod
    def from_bcoo(cls, bcoo: Any) -> "SparseArray":
        """Build a sparse array from a `jax.experimental.sparse.BCOO`.

        **Raises:**

        - `TypeError` if `bcoo` is not a BCOO.
        - `ValueError` if `bcoo` has dense axes (`n_dense`).
        """
        from jax.experimental import sparse

        if not isinstance(bcoo, sparse.BCOO):
            raise TypeError(f"from_bcoo takes a jax.experimental.sparse.BCOO, not {bcoo!r}")
        if bcoo.n_dense:
            raise ValueError(
                f"{bcoo!r} has dense axes ({bcoo.n_dense}), which SparseArray does not support. "
                "Pass bcoo.update_layout(n_dense=0)."
            )
        batch = bcoo.shape[: bcoo.n_batch]  # leaves can have size 1 along batch axes
        indices = bcoo.indices
        if indices.dtype != jnp.int64:
            indices = indices.astype(jnp.int32)
        return cls(
            jnp.broadcast_to(bcoo.data, (*batch, bcoo.nse)),
            jnp.broadcast_to(indices, (*batch, bcoo.nse, bcoo.n_sparse)),
            tuple(bcoo.shape[bcoo.n_batch :]),
            unique_indices=bcoo.unique_indices,
        )

    def to_bcoo(self) -> Any:
        """Return a `jax.experimental.sparse.BCOO` with the same entries and indices."""
        from jax.experimental import sparse

        leaves = jnp.asarray(self.data), jnp.asarray(self.indices)
        return sparse.BCOO(leaves, shape=self.shape, unique_indices=self.unique_indices)

    @property
    def nse(self) -> int:
        """The number of stored entries per array of the batch, including padding."""
        return self.data.shape[-1]

    @property
    def n_batch(self) -> int:
        """The number of leading batch axes."""
        return len(self.data.shape) - 1

    def sum_duplicates(self) -> "SparseArray":
        """Sort the entries, and sum entries that have the same index.

        **Returns:** an equal array with `unique_indices=True`. An array that already has
        `unique_indices=True` is returned unchanged.
        """
        from jax.experimental import sparse

        if self.unique_indices:
            return self
        nse = min(self.nse, math.prod(self.sparse_shape))
        if nse == 0:
            leaves = self.data[..., :0], self.indices[..., :0, :]
            return SparseArray(*leaves, self.sparse_shape, unique_indices=True)
        return self.from_bcoo(sparse.bcoo_sum_duplicates(self.to_bcoo(), nse=nse))

    def entries(self) -> Entries:
        """Return the entries and their indices along all axes, with padding marked."""
        return Entries(self)

    @property
    def pattern(self) -> tuple[Any, tuple[int, ...], bool]:
        """All fields except `data`. `SparseArray(data, *x.pattern)` has the indices of `x`."""
        return self.indices, self.sparse_shape, self.unique_indices

    def materialise(self) -> jax.Array:
        """Return the dense array `[*batch, *sparse_shape]`."""
        entries = self.entries()
        return entries.scatter(entries.data, range(len(entries.sizes)))


def _check_numbers(name: str, x: Any) -> None:
    # Entries with the same index are summed, which bool does not support.
    if x.dtype == jnp.bool_:
        raise TypeError(f"{name} must hold numbers, not bool. Convert it to int8.")
