"""`BCOO`, as in `quax.examples.sparse`."""

# Equinox lets `__init__` assign the fields of a frozen module.
# mypy: disable-error-code="misc"

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .... import types
from ...._core.trace import redispatch
from ..core import Delegating, RefusesToMaterialise, delegate, register

__all__ = ["BCOO"]


class _StrictSparse(RefusesToMaterialise, types.SparseArray):
    name_in_quax = "BCOO"

    def aval(self) -> jax.core.ShapedArray:
        batch = tuple(self.data.shape[:-1])
        return jax.core.ShapedArray((*batch, *self.sparse_shape), self.data.dtype)


class BCOO(Delegating):
    """A sparse array in coordinate format. It computes with `veneer.types.SparseArray`.

    Sums and products with arrays or with another `BCOO`, matrix products, transposes, reshapes,
    slices and sums over axes do not materialize it. Entries with the same index are summed.

    **Arguments:**

    - `data`: `[*batch, nse]`, the entries.
    - `indices`: `int[*batch, nse, n_sparse]`, the index of each entry along the sparse axes.
    - `shape`: the shape of the dense array: the batch axes, then the sparse axes.
    - `allow_materialise`: whether other operations materialize the array. If False, they raise a
      `RuntimeError`.

    **Raises:** `ValueError` if shapes do not fit.

    >>> import jax.numpy as jnp, veneer.interop.quax as quax
    >>> x = quax.examples.sparse.BCOO(jnp.array([2.0, 3.0]), jnp.array([[0], [2]]), (4,))
    >>> quax.quaxify(jnp.multiply)(x, jnp.arange(4.0)).data.tolist()
    [0.0, 6.0]
    """

    data: Array  # [*batch, nse]
    indices: Array  # int[*batch, nse, n_sparse]
    _shape: tuple[int, ...] = eqx.field(static=True)
    allow_materialise: bool = eqx.field(static=True)

    def __init__(
        self,
        data: Array,
        indices: Array,
        shape: tuple[int, ...],
        allow_materialise: bool = False,
    ):
        self.data = data
        self.indices = indices
        self._shape = shape
        self.allow_materialise = allow_materialise

    def __check_init__(self) -> None:
        batch = tuple(self.data.shape[:-1])
        if tuple(self._shape[: len(batch)]) != batch:
            raise ValueError(
                f"BCOO takes a shape that begins with the batch axes {batch} of data, not "
                f"{self._shape}"
            )
        self.to_veneer()  # checks the other axes

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        return jax.core.ShapedArray(self._shape, self.data.dtype)

    def enable_materialise(self, allow_materialise: bool = True) -> "BCOO":
        """Return the same array with the given `allow_materialise`."""
        return BCOO(self.data, self.indices, self._shape, allow_materialise)

    def to_veneer(self) -> types.SparseArray:
        """Return the array as a type of Veneer."""
        cls = types.SparseArray if self.allow_materialise else _StrictSparse
        return cls(self.data, self.indices, tuple(self._shape[self.data.ndim - 1 :]))

    def from_veneer(self, ours: Any) -> Any:
        """Convert a result of Veneer's rules to this type, if it has the same structure."""
        if not isinstance(ours, types.SparseArray):
            return ours
        return BCOO(
            jnp.asarray(ours.data), jnp.asarray(ours.indices), ours.shape, self.allow_materialise
        )


delegate(BCOO, ["add", "sub", "mul", "dot_general"])
delegate(BCOO, ["neg", "broadcast_in_dim", "reduce_sum", "reshape", "slice"], operands=1)
delegate(BCOO, ["squeeze", "transpose"], operands=1)


@register(lax.add_p)
def _add_dense(x: BCOO, y: ArrayLike) -> Any:
    y = jnp.broadcast_to(y, jnp.broadcast_shapes(x.shape, jnp.shape(y)))
    wide = redispatch(lambda x: jnp.broadcast_to(x, y.shape), x)
    entries = wide.to_veneer().entries()
    return y.at[tuple(entries.columns)].add(entries.data, mode="drop")


@register(lax.add_p)
def _(x: ArrayLike, y: BCOO) -> Any:
    return _add_dense(y, x)
