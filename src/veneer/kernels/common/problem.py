"""What a product with a stored matrix is: its codes, its operands, and all else known of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .kinds import BYTES as BYTES
from .kinds import FLOATS as FLOATS
from .kinds import LOOKUP_BITS, row_bytes
from .kinds import PLANE_BITS as PLANE_BITS
from .kinds import SIX_BIT_FLOATS as SIX_BIT_FLOATS
from .kinds import ZERO_POINTS as ZERO_POINTS


@dataclasses.dataclass(frozen=True)
class Codes:
    """How the codes of a matrix `[R, C]` are stored, and what each is worth before its scale.

    Codes of 8 bits are numbers of a dtype. Those of 1, 2 and 4 share bytes with their neighbours
    along C, the first in the lowest bits, and are looked up. Others are bit planes of 8 neighbours
    (`bit_planes.py`): floats of 6 bits, and integers in order.

    **Arguments:**

    - `bits`: of a code: 1 to 8.
    - `dtype`: of codes of 8 bits: int8, uint8, float8_e4m3fn or float8_e5m2; of floats of 6 bits:
      float6_e2m3fn or float6_e3m2fn; else "".
    - `values`: what each of other codes is worth, as the field that is stored, `2**bits` of them.
      In bit planes they are fields with or without a sign, less any integer.

    **Raises:** `ValueError` where these do not fit together.

    >>> from veneer.kernels.common.problem import Codes
    >>> Codes(2, values=(0.0, 1.0, -2.0, -1.0)).kind
    'lookup2'
    >>> Codes(8, "int8").is_integer
    True
    >>> Codes(3, values=(0.0, 1.0, 2.0, 3.0, -4.0, -3.0, -2.0, -1.0)).kind
    'planes3'
    """

    bits: int
    dtype: str = ""
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        narrow = (
            not self.dtype
            and len(self.values) == 2**self.bits
            and (self.bits in LOOKUP_BITS.values() or self._of_planes is not None)
        )
        dtypes = {8: BYTES, 6: SIX_BIT_FLOATS}.get(self.bits, ())
        if not narrow and not (self.dtype in dtypes and not self.values):
            raise ValueError(
                f"no kernel reads codes of {self.bits} bits with dtype {self.dtype!r} and "
                f"{len(self.values)} values. Codes of 8 bits need a dtype: {', '.join(BYTES)}. "
                f"Codes of 6 bits can have one: {', '.join(SIX_BIT_FLOATS)}. Other codes need one "
                "value per code and no dtype; values of 3, 5, 6 and 7 bits are integers in order"
            )

    @property
    def kind(self) -> str:
        """What kernels are named after: the dtype, or lookup1, 2 or 4, or planes3, 5, 6 or 7."""
        return self.dtype or f"{'planes' if 8 % self.bits else 'lookup'}{self.bits}"

    @property
    def is_integer(self) -> bool:
        """Whether every code is worth an integer that int8 or uint8 holds."""
        if self.dtype:
            return self.dtype in ("int8", "uint8")
        return all(value == int(value) and -128 <= value <= 127 for value in self.values)

    @property
    def table(self) -> tuple[float, ...]:
        """What fields are worth, repeated to 16 entries; zeros where nothing is looked up.

        Of bit planes, what is flipped in a field, and how much less it is then worth; and zeros.
        """
        if self.dtype:
            of_sign = (32.0, 32.0) if self.bits == 6 else (0.0, 0.0)
            return (*of_sign, *(0.0,) * 14)
        if self._of_planes is not None:
            return (*self._of_planes, *(0.0,) * 14)
        return self.values * (16 // len(self.values))

    @property
    def _of_planes(self) -> tuple[float, float] | None:
        """For bit planes, the numbers by which a value is `(field ^ flipped) - less`; or None."""
        if self.bits not in PLANE_BITS.values() or len(self.values) != 2**self.bits:
            return None
        for flipped in (0, 2 ** (self.bits - 1)):
            less = flipped - self.values[0]
            worth = tuple((field ^ flipped) - less for field in range(2**self.bits))
            if worth == self.values and abs(less) <= 2 ** (self.bits - 1) and less == int(less):
                return float(flipped), float(less)
        return None

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes that a row of so many codes takes."""
        return row_bytes(columns, self.bits)


class MatmulOperands(NamedTuple):
    """The arrays of a product; or what is said of each, such as the axis that is mapped.

    **Arguments:**

    - `x`: activations, `[B, M, K]`: f32, bf16 or f16, or int8 codes.
    - `packed`: the stored matrix, `[B, R, bytes]`; or `[B / H, R, H, bytes]`, of which H lie side
      by side, as the heads of tokens do.
    - `scale`: of its tiles, `[B, R / tr, C / tc]`: f32, f16, bf16 or float8_e8m0fnu.
    - `zero_point`: the code that stands for 0, of any integer dtype; along each axis of the size of
      `scale` or of 1, or the other way round. Or None.
    - `x_scale`: of integer activations, f32 `[B, M]`; or one for each of the tiles that are summed,
      `[B, M, R / tr]` or `[B, M, C / tc]`. Else None.
    - `minimum`: what a code that is worth 0 stands for, of the shape of `scale` and of one of its
      dtypes. Or None.
    - `outer_scale`, `outer_minimum`: what scales and minima are scaled by, where these are codes:
      `[B, R / tr, some]`, of the same dtypes, each for as many neighbours. Else None.
    """

    x: Any
    packed: Any
    scale: Any
    zero_point: Any = None
    x_scale: Any = None
    minimum: Any = None
    outer_scale: Any = None
    outer_minimum: Any = None

    def of_floats(self) -> "MatmulOperands":
        """The operands of the same product, with activations of int8 as the f32 that they are."""
        scale = self.x_scale if self.x_scale.ndim == 3 else self.x_scale[..., None]
        each = self.x.shape[2] // max(1, scale.shape[2])
        tiles = self.x.astype(jnp.float32).reshape(*scale.shape, each)
        x = (tiles * scale[..., None]).reshape(self.x.shape)
        return self._replace(x=x, x_scale=None)

    def apart(self) -> "MatmulOperands":
        """The operands of the same product, whose matrices lie one after the other."""
        if self.packed.ndim == 3:
            return self
        some, rows, beside, row_bytes = self.packed.shape
        packed = self.packed.swapaxes(1, 2).reshape(some * beside, rows, row_bytes)
        return self._replace(packed=packed)


@dataclasses.dataclass(frozen=True)
class ScaleCodes:
    """Scales that are codes: as int8, or as bit planes of 6 bits without a sign in uint8.

    **Arguments:**

    - `count`: of a row.
    - `wide`: makes f32 of codes and what they are scaled by; hashable.
    """

    count: int
    wide: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """What a choice depends on, beside the codes: the product, as one of matrices.

    **Arguments:**

    - `contracting`: the side of the stored matrix that is summed over, "rows" or "columns".
    - `activations`: their type: "float" (f32), "bfloat16", "float16" or "int8".
    - `m`, `k`, `n`: the sizes of the product `[m, k] x [k, n]`; m may be symbolic.
    - `tile`: how many neighbours share a scale along the sum.
    - `batch`: of how many matrices; it may be symbolic.
    - `scale_columns`: how many scales there are along n.
    """

    contracting: str
    activations: str
    m: Any
    k: int
    n: int
    tile: int
    batch: Any = 1
    scale_columns: int | None = None


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
    - `opt_in`: whether kernels that are used only where that is asked for may compute it.
    - `tiles`: of scales that are codes, what they are; else None.
    - `leading`: how many axes of the stored matrices come before R. They are one, but where a
      program is lowered for a kernel of the CPU, which reads `[B1, B2, R, bytes]` as it lies.
    """

    codes: Codes
    columns: int
    contracting: str
    out_dtype: str
    offset: int
    reference: Callable[[MatmulOperands, "MatmulProblem"], jax.Array]
    opt_in: bool = False
    tiles: "ScaleCodes | None" = None
    leading: int = 1

    @property
    def transposed(self) -> "MatmulProblem":
        """The product with the same matrix by its other side."""
        other = {"rows": "columns", "columns": "rows"}[self.contracting]
        return dataclasses.replace(self, contracting=other)

    def out_shape(self, x: Any, packed: Any) -> tuple[Any, ...]:
        """Returns `[B, M, N]`."""
        n = self.columns if self.contracting == "rows" else packed.shape[self.leading]
        return (*x.shape[:2], n)

    def out_aval(self, x: Any, packed: Any) -> Any:
        """Returns the type of the result."""
        shape, dtype = self.out_shape(x, packed), jnp.dtype(self.out_dtype)
        return x.update(shape=shape, dtype=dtype, weak_type=False)

    def shape(self, operands: MatmulOperands) -> MatmulShape:
        """Returns what the choice of a kernel depends on."""
        x, packed = operands.x, operands.packed
        k = x.shape[2]
        activations = "float"
        if operands.x_scale is not None:
            activations = "int8"
        elif x.dtype in (jnp.bfloat16, jnp.float16):
            activations = x.dtype.name
        counts = self.counts(operands)
        along_k, along_n = counts if self.contracting == "rows" else counts[::-1]
        return MatmulShape(
            contracting=self.contracting,
            activations=activations,
            m=x.shape[1],
            k=k,
            n=self.columns if self.contracting == "rows" else packed.shape[self.leading],
            tile=k // max(1, along_k),
            batch=x.shape[0],
            scale_columns=along_n,
        )

    def counts(self, operands: MatmulOperands) -> tuple[int, int]:
        """How many tiles there are along rows, and along columns."""
        _, rows, columns = operands.scale.shape
        return rows, columns if self.tiles is None else self.tiles.count

    def plain(self, operands: MatmulOperands) -> tuple["MatmulProblem", MatmulOperands]:
        """The same product, with scales and minima that are floats; and its operands."""
        if self.tiles is None:
            return self, operands
        wide = self.tiles.wide
        minimum = operands.minimum
        if operands.outer_minimum is not None:
            minimum = wide(minimum, operands.outer_minimum)
        scale = wide(operands.scale, operands.outer_scale)
        operands = operands._replace(
            scale=scale, minimum=minimum, outer_scale=None, outer_minimum=None
        )
        return dataclasses.replace(self, tiles=None), operands

    def merged(self, operands: MatmulOperands) -> tuple["MatmulProblem", MatmulOperands]:
        """The product with one leading axis, and its operands."""
        if self.leading == 1:
            return self, operands
        *_, rows, row_bytes = operands.packed.shape
        packed = operands.packed.reshape(operands.x.shape[0], rows, row_bytes)
        return dataclasses.replace(self, leading=1), operands._replace(packed=packed)

    def __repr__(self) -> str:
        return f"MatmulProblem({self.codes.kind}, {self.contracting} contracted)"


def operands_of(arrays: Sequence[Any], present: Sequence[bool]) -> MatmulOperands:
    """Puts arrays in their places, of which `present` says whether there is something."""
    rest = iter(arrays)
    return MatmulOperands(*(next(rest) if there else None for there in present))
