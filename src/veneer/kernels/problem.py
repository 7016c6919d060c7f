"""What a product with a stored matrix is: its operands, and all else that is known of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import select
from .codes import Codes


class MatmulOperands(NamedTuple):
    """The arrays of a product; or what is said of each, such as the axis that is mapped.

    **Arguments:**

    - `x`: activations, `[B, M, K]`: f32, bf16 or f16, or int8 codes.
    - `packed`: the stored matrix, `[B, R, bytes]`.
    - `scale`: of its tiles, f32 `[B, R / tr, C / tc]`.
    - `zero_point`: the code that stands for 0, of any integer dtype; along each axis of the size of
      `scale` or of 1, or the other way round. Or None.
    - `x_scale`: of integer activations, f32 `[B, M]`; else None.
    """

    x: Any
    packed: Any
    scale: Any
    zero_point: Any = None
    x_scale: Any = None


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """What a product is, beside the arrays.

    **Arguments:**

    - `codes`: of the stored matrix.
    - `columns`: how many codes a row of it has, C.
    - `contracting`: the side of it that is summed over: "rows", R, or "columns", C.
    - `out_dtype`: of the result.
    - `offset`: what a zero point is worth more than a code of the same bits: where `codes` has
      values that are centred, it is not.
    - `reference`: XLA's way, from the operands and this; hashable, so that programs are cached.
    """

    codes: Codes
    columns: int
    contracting: str
    out_dtype: str
    offset: int
    reference: Callable[[MatmulOperands, "MatmulProblem"], jax.Array]

    @property
    def transposed(self) -> "MatmulProblem":
        """The product with the same matrix by its other side."""
        other = {"rows": "columns", "columns": "rows"}[self.contracting]
        return dataclasses.replace(self, contracting=other)

    def out_shape(self, x: Any, packed: Any) -> tuple[Any, ...]:
        """Returns `[B, M, N]`."""
        n = self.columns if self.contracting == "rows" else packed.shape[1]
        return (*x.shape[:2], n)

    def out_aval(self, x: Any, packed: Any) -> Any:
        """Returns the type of the result."""
        shape, dtype = self.out_shape(x, packed), jnp.dtype(self.out_dtype)
        return x.update(shape=shape, dtype=dtype, weak_type=False)

    def shape(self, operands: MatmulOperands) -> select.MatmulShape:
        """Returns what the choice of a kernel depends on."""
        x, packed, scale, _, x_scale = operands
        k = x.shape[2]
        return select.MatmulShape(
            contracting=self.contracting,
            activations="float" if x_scale is None else "int8",
            m=x.shape[1],
            k=k,
            n=self.out_shape(x, packed)[2],
            tile=k // max(1, scale.shape[1 if self.contracting == "rows" else 2]),
        )

    def __repr__(self) -> str:
        return f"MatmulProblem({self.codes.kind}, {self.contracting} contracted)"


def operands_of(arrays: Sequence[Any], present: Sequence[bool]) -> MatmulOperands:
    """Puts arrays in their places, of which `present` says whether there is something."""
    rest = iter(arrays)
    return MatmulOperands(*(next(rest) if there else None for there in present))
