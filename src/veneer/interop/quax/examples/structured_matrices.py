"""`TridiagonalMatrix`, as in `quax.examples.structured_matrices`."""

from typing import Any

import equinox as eqx
import jax
from jax import Array

from .... import types
from ..core import Delegating, RefusesToMaterialise, delegate

__all__ = ["TridiagonalMatrix"]


class _StrictTridiagonal(RefusesToMaterialise, types.Tridiagonal):
    name_in_quax = "TridiagonalMatrix"

    def aval(self) -> jax.core.ShapedArray:
        *batch, n = self.diagonal.shape
        return jax.core.ShapedArray((*batch, n, n), self.diagonal.dtype)


class TridiagonalMatrix(Delegating):
    """A matrix `[*batch, n, n]` with three diagonals.

    It computes with `veneer.types.Tridiagonal`. Products with arrays and with matrices of this
    type, sums, transposes and products with a number do not materialize it.

    **Arguments:**

    - `lower_diag`: `[*batch, n - 1]`, the entries below the diagonal.
    - `main_diag`: `[*batch, n]`.
    - `upper_diag`: `[*batch, n - 1]`, the entries above the diagonal.
    - `allow_materialise`: whether other operations materialize the matrix. If False, they raise a
      `RuntimeError`.

    **Raises:** `ValueError` if shapes or dtypes do not fit.

    >>> import jax.numpy as jnp, veneer.interop.quax as quax
    >>> TridiagonalMatrix = quax.examples.structured_matrices.TridiagonalMatrix
    >>> a = TridiagonalMatrix(jnp.ones(2), jnp.full(3, 2.0), jnp.ones(2))
    >>> quax.quaxify(jnp.matmul)(a, jnp.arange(3.0)).tolist()
    [1.0, 4.0, 5.0]
    """

    lower_diag: Array  # [*batch, n - 1]
    main_diag: Array  # [*batch, n]
    upper_diag: Array  # [*batch, n - 1]
    allow_materialise: bool = eqx.field(default=False, static=True)

    def __check_init__(self) -> None:
        self.to_veneer()  # checks the shapes
        dtypes = {x.dtype.name for x in (self.lower_diag, self.main_diag, self.upper_diag)}
        if len(dtypes) > 1:
            raise ValueError(f"TridiagonalMatrix takes diagonals of one dtype, not {dtypes}")

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        *batch, n = self.main_diag.shape
        return jax.core.ShapedArray((*batch, n, n), self.main_diag.dtype)

    def to_veneer(self) -> types.Tridiagonal:
        """Return the array as a type of Veneer."""
        cls = types.Tridiagonal if self.allow_materialise else _StrictTridiagonal
        return cls(self.lower_diag, self.main_diag, self.upper_diag)

    def from_veneer(self, ours: Any) -> Any:
        """Convert a result of Veneer's rules to this type, if it has the same structure."""
        if not isinstance(ours, types.Tridiagonal):
            return ours
        diagonals = ours.lower, ours.diagonal, ours.upper
        return TridiagonalMatrix(*diagonals, self.allow_materialise)


delegate(TridiagonalMatrix, ["dot_general", "add", "sub", "mul", "div"])
delegate(TridiagonalMatrix, ["neg", "transpose"], operands=1)
