"""The operands of a product with a stored matrix, and the description of the product."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .codes import Codes


class MatmulOperands(NamedTuple):
    """The arrays of a product, or a fact about each of them, such as the axis that `vmap` maps.

    A tile is `tr` rows and `tc` columns of the matrix that share a scale.

    **Arguments:**

    - `x`: activations, `[B, M, K]`: f32, bf16, f16, or int8 codes.
    - `packed`: the stored matrices, `[B, R, bytes]`. Or `[B / H, R, H, bytes]`, with H matrices
      interleaved, such as the heads of tokens.
    - `scale`: `[B, R / tr, C / tc]`: f32, f16, bf16 or float8_e8m0fnu.
    - `zero_point`: the code whose value is 0, of any integer dtype. Each axis has the size of the
      axis of `scale`, or one of the two sizes is 1. Or None.
    - `x_scale`: the scales of int8 activations, f32 `[B, M]`; or per tile, `[B, M, R / tr]` or
      `[B, M, C / tc]`. None for float activations.
    - `minimum`: the dense value of a code whose value is 0, with the shape of `scale` and one of
      its dtypes. Or None.
    - `outer_scale`, `outer_minimum`: the scales of `scale` and of `minimum`, if these are codes:
      `[B, R / tr, count]` with the dtypes of `scale`. Each applies to a group of neighbors. Else
      None.
    """

    x: Any
    packed: Any
    scale: Any
    zero_point: Any = None
    x_scale: Any = None
    minimum: Any = None
    outer_scale: Any = None
    outer_minimum: Any = None

    def with_float_activations(self) -> "MatmulOperands":
        """Return the operands with int8 activations multiplied by their scales, in f32."""
        scale = self.x_scale if self.x_scale.ndim == 3 else self.x_scale[..., None]
        tile = self.x.shape[2] // max(1, scale.shape[2])
        tiles = self.x.astype(jnp.float32).reshape(*scale.shape, tile)
        x = (tiles * scale[..., None]).reshape(self.x.shape)
        return self._replace(x=x, x_scale=None)

    def deinterleaved(self) -> "MatmulOperands":
        """Return the operands with the stored matrices one after the other, `[B, R, bytes]`."""
        if self.packed.ndim == 3:
            return self
        groups, rows, interleaved, row_bytes = self.packed.shape
        packed = self.packed.swapaxes(1, 2).reshape(groups * interleaved, rows, row_bytes)
        return self._replace(packed=packed)


def unflatten(arrays: Sequence[Any], present: Sequence[bool]) -> MatmulOperands:
    """Return operands from the arrays of the fields that are `present`. All others are None."""
    rest = iter(arrays)
    return MatmulOperands(*(next(rest) if is_present else None for is_present in present))


@dataclasses.dataclass(frozen=True)
class ScaleCodes:
    """The encoding of scales that are codes: int8, or uint8 with bit planes of 6 bits.

    **Arguments:**

    - `count`: the number of scales in a row.
    - `dequantize`: takes codes and their scales, and returns f32; hashable.
    """

    count: int
    dequantize: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """The sizes and types of a product `[m, k] x [k, n]` that the choice of a kernel depends on.

    **Arguments:**

    - `contracting`: the contracted axis of the stored matrix, "rows" or "columns".
    - `activations`: their type: "float" (f32), "bfloat16", "float16" or "int8".
    - `m`, `k`, `n`: the sizes. m may be symbolic.
    - `tile`: the codes along k that share a scale.
    - `batch`: the number of matrices, which may be symbolic.
    - `scale_columns`: the number of scales along n. By default, one per column.
    """

    contracting: str
    activations: str
    m: Any
    k: int
    n: int
    tile: int
    batch: Any = 1
    scale_columns: int | None = None

    @property
    def rows(self) -> int:
        """The rows of the stored matrix."""
        return self.k if self.contracting == "rows" else self.n

    @property
    def columns(self) -> int:
        """The columns of the stored matrix."""
        return self.n if self.contracting == "rows" else self.k

    @property
    def tile_rows(self) -> int:
        """The rows of the stored matrix that share a scale."""
        return self.tile if self.contracting == "rows" else self._tile_n

    @property
    def tile_columns(self) -> int:
        """The columns of the stored matrix that share a scale."""
        return self._tile_n if self.contracting == "rows" else self.tile

    @property
    def _tile_n(self) -> int:
        return 1 if self.scale_columns is None else self.n // max(1, self.scale_columns)


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """The description of a product, apart from its arrays.

    **Arguments:**

    - `codes`: the encoding of the stored matrix.
    - `columns`: the number of codes in a row, C.
    - `contracting`: the contracted axis of the stored matrix, "rows" or "columns".
    - `out_dtype`: the dtype of the result.
    - `offset`: added to codes before zero points are subtracted. It is not 0 if `codes` has
      centered values.
    - `reference`: computes the product by XLA, from the operands and this object. It is hashable,
      so that programs are cached.
    - `opt_in`: whether kernels that were never measured may compute the product.
    - `tiles`: the encoding of scales that are codes, or None.
    - `leading`: the number of axes of the stored matrices before R. It is 1, or 2 in a program for
      a CPU kernel that reads `[B1, B2, R, bytes]`.
    """

    codes: Codes
    columns: int
    contracting: str
    out_dtype: str
    offset: int
    reference: Callable[[MatmulOperands, "MatmulProblem"], jax.Array]
    opt_in: bool = False
    tiles: ScaleCodes | None = None
    leading: int = 1

    @property
    def other_axis(self) -> str:
        """The axis of the stored matrix that is not contracted, "rows" or "columns"."""
        return "columns" if self.contracting == "rows" else "rows"

    @property
    def transposed(self) -> "MatmulProblem":
        """The product that contracts the other axis of the same matrix."""
        return dataclasses.replace(self, contracting=self.other_axis)

    def out_shape(self, x: Any, packed: Any) -> tuple[Any, ...]:
        """Return the shape of the product of activations and stored matrices, `[B, M, N]`."""
        n = self.columns if self.contracting == "rows" else packed.shape[self.leading]
        return (*x.shape[:2], n)

    def out_aval(self, x: Any, packed: Any) -> Any:
        """Return the aval of the product of activations and stored matrices, given their avals."""
        shape, dtype = self.out_shape(x, packed), jnp.dtype(self.out_dtype)
        return x.update(shape=shape, dtype=dtype, weak_type=False)

    def shape(self, operands: MatmulOperands) -> MatmulShape:
        """Return the sizes and types that the choice of a kernel depends on."""
        x = operands.x
        batch, m, k = x.shape
        activations = "float"
        if operands.x_scale is not None:
            activations = "int8"
        elif x.dtype in (jnp.bfloat16, jnp.float16):
            activations = x.dtype.name
        _, along_rows, along_columns = operands.scale.shape
        if self.tiles is not None:
            along_columns = self.tiles.count
        if self.contracting == "rows":
            n, along_k, along_n = self.columns, along_rows, along_columns
        else:
            n, along_k, along_n = operands.packed.shape[self.leading], along_columns, along_rows
        tile = k // max(1, along_k)
        return MatmulShape(self.contracting, activations, m, k, n, tile, batch, along_n)

    def counts(self, operands: MatmulOperands) -> tuple[int, int]:
        """Return the number of tiles of a stored matrix along R, and along C."""
        _, rows, columns = operands.scale.shape
        return rows, columns if self.tiles is None else self.tiles.count

    def with_float_scales(self, operands: MatmulOperands) -> tuple["MatmulProblem", MatmulOperands]:
        """Return the same product and its operands, with scales and minima decoded to floats."""
        if self.tiles is None:
            return self, operands
        dequantize, minimum = self.tiles.dequantize, operands.minimum
        if operands.outer_minimum is not None:
            minimum = dequantize(minimum, operands.outer_minimum)
        scale = dequantize(operands.scale, operands.outer_scale)
        operands = operands._replace(
            scale=scale, minimum=minimum, outer_scale=None, outer_minimum=None
        )
        return dataclasses.replace(self, tiles=None), operands

    def flatten_batch(self, operands: MatmulOperands) -> tuple["MatmulProblem", MatmulOperands]:
        """Return the same product and its operands, with one axis of stored matrices before R."""
        if self.leading == 1:
            return self, operands
        *_, rows, row_bytes = operands.packed.shape
        packed = operands.packed.reshape(operands.x.shape[0], rows, row_bytes)
        return dataclasses.replace(self, leading=1), operands._replace(packed=packed)

    def with_transposed_matrix(
        self, operands: MatmulOperands
    ) -> tuple["MatmulProblem", MatmulOperands]:
        """Return the product by the other axis of a matrix whose codes are already transposed.

        **Arguments:**

        - `operands`: the operands of this product, but `packed` is `[B, C, R]`. Codes have 8 bits.
        """
        leaves = {name: getattr(operands, name) for name in ("scale", "zero_point", "minimum")}
        swapped = {k: jnp.swapaxes(x, 1, 2) for k, x in leaves.items() if x is not None}
        problem = dataclasses.replace(self.transposed, columns=operands.packed.shape[2])
        return problem, operands._replace(**swapped)

    def __repr__(self) -> str:
        return f"MatmulProblem({self.codes.kind}, {self.contracting} contracted)"
