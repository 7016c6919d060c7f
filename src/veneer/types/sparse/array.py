"""`SparseArray`: the entries that are not zero, and where they are. The layout is JAX's BCOO."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core.surface.array import ImplicitArray
from ..._core.tree import static
from ..._core.value import Value, materialise_one
from ..axes import check_axes
from .entries import Entries


class SparseArray(ImplicitArray):
    """An array most of whose entries are zero: the others, and their indices.

    The leaves are those of a `jax.experimental.sparse.BCOO` without dense axes. Each batch has the
    same number `nse` of entries. Fewer are padded: an entry with an index that is out of bounds is
    no entry, whatever its value. Entries of the same index are summed.

    What is not stored is zero whatever it meets: the product of a structural zero with inf or NaN,
    and its quotient by 0, are 0.

    **Algebra:** a dot_general with a dense array, over any axes and on either side, is dense; of
    two sparse ones the smaller is made dense for it. Sums and elementwise products of two sparse
    arrays, products with and quotients by a number or a dense array, elementwise functions that
    give 0 for 0, sums over axes, transposes, reshapes, broadcasts and slices are sparse. So is a
    quotient of two, of which the divisor is made dense.

    **Cost** of a matmul with N vectors: `nse·N` multiplications, and as many numbers in memory
    between a gather and a scatter; the same in its derivatives. A dense one does more of them, each
    at a fraction of the cost. Measured on a CPU for 1024 x 1024 in f32, with one entry in a hundred
    it took 0.2 to 0.6 of the time of the dense one, for N from 1 to 256; with one in ten it took
    1.4 times as long for N = 1, and 13 times for N = 256. Functions that are not linear need each
    entry once: unless `unique_indices`, they sort them. So does a product of two.

    **Arguments:**

    - `data`: the entries, `[*batch, nse]`, of any dtype but bool.
    - `indices`: int32 or int64, `[*batch, nse, n_sparse]`: of each entry, that along each sparse
      axis.
    - `sparse_shape`: the sizes of those axes, the last ones of the array; at least one.
    - `unique_indices`: whether no two entries of a batch have the same index, padding aside. This
      is taken on trust.

    **Raises:** `TypeError` where a leaf is no array or has another dtype, or `sparse_shape` is no
    tuple; `ValueError` where shapes do not fit.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer.types.sparse import SparseArray
    >>> a = SparseArray(jnp.array([2.0, 3.0]), jnp.array([[0, 1], [2, 0]]), (3, 2))
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
        if self.indices.dtype not in (jnp.int32, jnp.int64):  # which hold what is out of bounds
            raise TypeError(f"indices are int32 or int64, not {self.indices.dtype.name}")

    @classmethod
    def from_dense(
        cls, x: ArrayLike | ImplicitArray, nse: int | None = None, n_batch: int = 0
    ) -> "SparseArray":
        """The entries of a dense array that are not zero.

        **Arguments:**

        - `x`: an array of numbers. An implicit array is materialised.
        - `nse`: how many entries each batch stores; the largest number that one has if None, which
          only concrete values tell: under a trace it must be given.
        - `n_batch`: how many leading axes are batch axes.

        **Raises:** `TypeError` for bool. `ValueError` if `nse` is too small for the entries of `x`.
        Under a trace that cannot be known, so there an inexact array becomes NaN, and another is
        refused.

        >>> import jax.numpy as jnp
        >>> from veneer.types.sparse import SparseArray
        >>> SparseArray.from_dense(jnp.eye(3), nse=4)
        SparseArray(data=f32[4], indices=i32[4,2], sparse_shape=(3, 3), unique_indices=True)
        """
        from jax.experimental import sparse

        x = jnp.asarray(materialise_one(x))
        _check_numbers("x", x)
        if not 0 <= n_batch < x.ndim:
            raise ValueError(f"n_batch is {n_batch}, and must leave a sparse axis of {x.shape}")
        count = (x != 0).sum(range(n_batch, x.ndim))
        traced = isinstance(x, jax.core.Tracer)
        if traced and nse is not None and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"whether {nse} entries are enough for {x.dtype.name}{list(x.shape)} is not known "
                "under a trace; convert to a float first, or call from_dense outside"
            )
        if nse is not None and not traced and (most := int(count.max(initial=0))) > nse:
            raise ValueError(f"nse is {nse}, and there are {most} entries that are not zero")
        bcoo = sparse.BCOO.fromdense(x, nse=nse, n_batch=n_batch)
        if nse is None or not traced:
            return cls.from_bcoo(bcoo)
        data = jnp.where((count > nse)[..., None], jnp.nan, bcoo.data)
        return cls(data, bcoo.indices, x.shape[n_batch:], unique_indices=True)

    @classmethod
    def from_bcoo(cls, bcoo: Any) -> "SparseArray":
        """The array that a `jax.experimental.sparse.BCOO` is, with its leaves.

        **Raises:** `TypeError` for anything else. `ValueError` if it has dense axes.
        """
        from jax.experimental import sparse

        if not isinstance(bcoo, sparse.BCOO):
            raise TypeError(f"from_bcoo takes a jax.experimental.sparse.BCOO, not {bcoo!r}")
        if bcoo.n_dense:
            raise ValueError(
                f"{bcoo!r} has {bcoo.n_dense} dense axes, and a SparseArray has none: pass "
                "bcoo.update_layout(n_dense=0)"
            )
        batch = bcoo.shape[: bcoo.n_batch]  # of which a leaf may have some as 1
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
        """A `jax.experimental.sparse.BCOO` with the same leaves."""
        from jax.experimental import sparse

        leaves = jnp.asarray(self.data), jnp.asarray(self.indices)
        return sparse.BCOO(leaves, shape=self.shape, unique_indices=self.unique_indices)

    @property
    def nse(self) -> int:
        """The number of stored entries of each batch, padding included."""
        return self.data.shape[-1]

    @property
    def n_batch(self) -> int:
        """The number of leading axes that the leaves carry."""
        return len(self.data.shape) - 1

    def sum_duplicates(self) -> "SparseArray":
        """The same array with each index once, by a sort; itself if `unique_indices` says so.

        `nse` stays, but is no more than a batch has places.
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
        """What the rules compute with."""
        return Entries(self.data, self.indices, self.sparse_shape)

    @property
    def pattern(self) -> tuple[Any, tuple[int, ...], bool]:
        """What a SparseArray has beside its data: `SparseArray(data, *x.pattern)`."""
        return self.indices, self.sparse_shape, self.unique_indices

    def materialise(self) -> jax.Array:
        """Returns the dense array, `[*batch, *sparse_shape]`."""
        entries = self.entries()
        return entries.scattered(entries.data, range(len(entries.sizes)))


def _check_numbers(name: str, x: Any) -> None:
    """Refuses bool: entries of one index are summed."""
    if x.dtype == jnp.bool_:
        raise TypeError(f"{name} holds numbers, not bool; convert to int8")
