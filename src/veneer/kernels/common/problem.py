"""Describe a product with a stored matrix: its codes, its operands, its shape, and all together.

The kind of codes is the name of their encoding, such as "lookup4" (`Codes.kind`). It is part of the
names of kernels. Codes of 1, 2, 4 and 8 bits are packed in bytes one after the other. All other
codes are in bit planes: eight neighbors along an axis take as many bytes as a code has bits. Byte p
holds bit p of each of them, with the first neighbor in the lowest bit. So no code crosses a byte.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

#: The bits of codes whose values are looked up in a table.
LOOKUP_BITS = {"lookup1": 1, "lookup2": 2, "lookup4": 4}
SIX_BIT_FLOATS = ("float6_e2m3fn", "float6_e3m2fn")
#: The bits of codes in bit planes.
PLANE_BITS = {"planes3": 3, "planes5": 5, "planes6": 6, "planes7": 7} | dict.fromkeys(
    SIX_BIT_FLOATS, 6
)
#: Dtypes of codes of 8 bits.
BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")

#: The bits of a code of each kind.
BITS = LOOKUP_BITS | PLANE_BITS | dict.fromkeys(BYTES, 8)

#: The kinds that kernels multiply by int8 activations. Only the kernel for few rows of activations
#: that contracts columns reads the planes.
INTEGERS = (*LOOKUP_BITS, "int8", "uint8")
INTEGER_PLANES = ("planes3", "planes5", "planes6", "planes7")

#: The dtypes of activations. Compiled code contains the index of a dtype here.
ACTIVATIONS = ("float32", "int8", "bfloat16")

#: The dtypes of scales and minima. Compiled code contains the index of a dtype here.
FLOATS = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
#: The dtypes of zero points, whose indices follow the dtypes in `FLOATS`.
ZERO_POINTS = ("int8", "uint8")
#: Scales and minima that are codes are int8, or bit planes of `PLANES` bits with this index.
PLANES_TYPE, PLANES = len(FLOATS) + len(ZERO_POINTS), 6


def byte_of_planes(kind: str) -> str:
    """Return the name of the dtype of codes in bit planes, after each is expanded to a byte.

    Integers become int8. 6-bit floats keep their dtype, which is their `kind` (see `Codes.kind`).
    """
    return kind if kind in SIX_BIT_FLOATS else "int8"


def row_bytes(columns: int, bits: int) -> int:
    """Return the number of bytes that a row of `columns` codes of `bits` bits takes.

    Codes whose bits divide 8 share bytes. Eight neighbors of other codes take `bits` bytes.

    >>> row_bytes(9, 4), row_bytes(9, 3)
    (5, 6)
    """
    if 8 % bits:
        return (columns + 7) // 8 * bits
    return (columns * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Codes:
    """The encoding of a matrix `[R, C]` of codes, and the value of each code before its scale.

    Codes of 8 bits are numbers of a dtype. Codes of 1, 2 and 4 bits share bytes with their
    neighbors along C, with the first in the lowest bits, and kernels look their values up. Codes of
    other bits are in bit planes of 8 neighbors: floats of 6 bits, and integers in order.

    **Arguments:**

    - `bits`: the bits of a code, 1 to 8.
    - `dtype`: the dtype of codes of 8 bits (int8, uint8, float8_e4m3fn or float8_e5m2) or of floats
      of 6 bits (float6_e2m3fn or float6_e3m2fn). "" for all other codes.
    - `values`: the `2**bits` values of all other codes, in the order of their bits as unsigned
      integers. For bit planes, a value must be the bits of the code as an unsigned or signed
      integer, minus a constant integer.

    **Raises:** `ValueError` if no kernel reads such codes.

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
        has_values = not self.dtype and len(self.values) == 2**self.bits
        is_narrow = has_values and (
            self.bits in LOOKUP_BITS.values() or self._plane_constants is not None
        )
        dtypes = {8: BYTES, 6: SIX_BIT_FLOATS}.get(self.bits, ())
        if not is_narrow and not (self.dtype in dtypes and not self.values):
            raise ValueError(
                f"no kernel reads codes of {self.bits} bits with dtype {self.dtype!r} and "
                f"{len(self.values)} values. Codes of 8 bits need a dtype: {', '.join(BYTES)}. "
                f"Codes of 6 bits can have one: {', '.join(SIX_BIT_FLOATS)}. Other codes need one "
                "value per code and no dtype; values of 3, 5, 6 and 7 bits are integers in order"
            )

    @property
    def kind(self) -> str:
        """The name of the encoding: `dtype`, or else "lookup" or "planes" followed by `bits`."""
        return self.dtype or f"{'planes' if 8 % self.bits else 'lookup'}{self.bits}"

    @property
    def is_integer(self) -> bool:
        """True if the value of every code is an integer that int8 or uint8 can hold."""
        if self.dtype:
            return self.dtype in ("int8", "uint8")
        return all(value == int(value) and -128 <= value <= 127 for value in self.values)

    @property
    def table(self) -> tuple[float, ...]:
        """The 16 numbers that a kernel decodes with.

        They are the values of the codes, repeated. For bit planes, they are the mask by which a
        field is flipped, the number that is subtracted, and zeros. Otherwise, they are zeros.
        """
        if self.dtype:
            first = (32.0, 32.0) if self.bits == 6 else (0.0, 0.0)
        elif self._plane_constants is not None:
            first = self._plane_constants
        else:
            return self.values * (16 // len(self.values))
        return (*first, *(0.0,) * 14)

    @property
    def _plane_constants(self) -> tuple[float, float] | None:
        """The mask and the number by which values in bit planes are `(field ^ mask) - number`.

        None if the values have no such form.
        """
        if self.bits not in PLANE_BITS.values() or len(self.values) != 2**self.bits:
            return None
        for mask in (0, 2 ** (self.bits - 1)):
            number = mask - self.values[0]
            values = tuple((field ^ mask) - number for field in range(2**self.bits))
            is_small = abs(number) <= 2 ** (self.bits - 1) and number == int(number)
            if values == self.values and is_small:
                return float(mask), float(number)
        return None


# Bit planes.


def planes_size(size: int, bits: int) -> int:
    """Return the number of bytes that `size` codes of `bits` bits take in bit planes.

    Some bits of the last bytes are unused if `size` is not a multiple of 8.
    """
    return -(-size // 8) * bits


def pack_bits(codes: ArrayLike, bits: int, axis: int) -> jax.Array:
    """Pack codes into bit planes along an axis.

    **Arguments:**

    - `codes`: uint8, each less than `2**bits`. They have `size` entries along the axis.
    - `bits`: the number of bits per code.
    - `axis`: the axis, counted from the end: -1 is the last.

    **Returns:** uint8 with `planes_size(size, bits)` on that axis.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.common.problem import pack_bits, unpack_bits
    >>> packed = pack_bits(jnp.array([5, 0, 1], jnp.uint8), bits=3, axis=-1)
    >>> packed.tolist()
    [5, 0, 1]
    >>> unpack_bits(packed, 3, -1, 3).tolist()
    [5, 0, 1]
    """
    codes = jnp.asarray(codes)
    at = codes.ndim + axis
    before, after, size = codes.shape[:at], codes.shape[at + 1 :], codes.shape[at]
    codes = jnp.pad(codes, [(0, -size % 8 if i == at else 0) for i in range(codes.ndim)])
    eights = codes.reshape(*before, -(-size // 8), 8, *after)
    shifts = _shifts(axis)
    planes = [(((eights >> bit) & 1) << shifts).sum(at + 1, dtype=jnp.uint8) for bit in range(bits)]
    return jnp.stack(planes, at + 1).reshape(*before, planes_size(size, bits), *after)


def unpack_bits(packed: ArrayLike, bits: int, axis: int, size: int) -> jax.Array:
    """Return the `size` codes that `pack_bits` packed along `axis`, as uint8.

    `bits` and `axis` have the values that `pack_bits` was called with.
    """
    packed = jnp.asarray(packed)
    at = packed.ndim + axis
    before, after = packed.shape[:at], packed.shape[at + 1 :]
    count = packed.shape[at] // bits
    planes = packed.reshape(*before, count, bits, *after)
    shifts = _shifts(axis)
    codes = jnp.zeros((), jnp.uint8)
    for bit in range(bits):
        plane = jax.lax.slice_in_dim(planes, bit, bit + 1, axis=at + 1)
        codes = codes | (((plane >> shifts) & 1) << bit)
    codes = codes.reshape(*before, count * 8, *after)
    return jax.lax.slice_in_dim(codes, 0, size, axis=at)


def _shifts(axis: int) -> jax.Array:
    """Return the bit positions that eight neighboring codes have in a byte of a bit plane: 0 to 7.

    The array has shape `[8, 1, ...]` and broadcasts to codes whose packed axis is split into groups
    of eight. `axis` is the packed axis before the split, counted from the end.
    """
    return jnp.arange(8, dtype=jnp.uint8).reshape(8, *[1] * (-1 - axis))


# Operands and products.


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
      `[B, R / tr, count]` with the dtypes of `scale`. Each row has `count` outer scales, and each
      outer scale applies to a group of neighboring scales. Else None.
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
    """Build `MatmulOperands` from the arrays of some of its fields. All other fields are None.

    `present` says for each field whether `arrays` has an array for it.
    """
    rest = iter(arrays)
    return MatmulOperands(*(next(rest) if is_present else None for is_present in present))


@dataclasses.dataclass(frozen=True)
class ScaleCodes:
    """The encoding of scales that are codes: int8, or uint8 with bit planes of 6 bits.

    **Arguments:**

    - `count`: the number of scales per row of the matrix of scales.
    - `dequantize`: takes the codes and their outer scales, and returns the scales as f32. It is
      hashable.
    """

    count: int
    dequantize: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """The sizes and types of a product `[m, k] x [k, n]` that the choice of a kernel depends on.

    **Arguments:**

    - `contracting`: the contracted axis of the stored matrix, "rows" or "columns".
    - `activations`: the type of the activations: "float" (f32), "bfloat16", "float16" or "int8".
    - `m`, `k`, `n`: the sizes. m may be symbolic.
    - `tile`: the number of codes along k that share a scale.
    - `batch`: the number of stored matrices, which may be symbolic.
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
        """The number of rows of the stored matrix."""
        return self.k if self.contracting == "rows" else self.n

    @property
    def columns(self) -> int:
        """The number of columns of the stored matrix, in codes."""
        return self.n if self.contracting == "rows" else self.k

    @property
    def tile_rows(self) -> int:
        """The number of neighboring rows of the stored matrix that share a scale."""
        return self.tile if self.contracting == "rows" else self._tile_n

    @property
    def tile_columns(self) -> int:
        """The number of neighboring columns of the stored matrix that share a scale."""
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
    - `offset`: added to the values of codes before zero points are subtracted. It is not 0 if
      `codes` has the values of unsigned codes minus half their range.
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
        """Return the same product and its operands, with a single batch axis of stored matrices.

        Matrices `[B1, B2, R, bytes]` become `[B, R, bytes]`.
        """
        if self.leading == 1:
            return self, operands
        *_, rows, row_bytes = operands.packed.shape
        packed = operands.packed.reshape(operands.x.shape[0], rows, row_bytes)
        return dataclasses.replace(self, leading=1), operands._replace(packed=packed)

    def with_transposed_matrix(
        self, operands: MatmulOperands
    ) -> tuple["MatmulProblem", MatmulOperands]:
        """Return the same product for transposed codes: a problem and its operands.

        The new problem contracts the other axis of the stored matrix. Scales, zero points and
        minima are transposed here, but codes must already be.

        **Arguments:**

        - `operands`: the operands of this product, but `packed` is `[B, C, R]`. Codes have 8 bits.
        """
        leaves = {name: getattr(operands, name) for name in ("scale", "zero_point", "minimum")}
        swapped = {k: jnp.swapaxes(x, 1, 2) for k, x in leaves.items() if x is not None}
        problem = dataclasses.replace(self.transposed, columns=operands.packed.shape[2])
        return problem, operands._replace(**swapped)

    def __repr__(self) -> str:
        return f"MatmulProblem({self.codes.kind}, {self.contracting} contracted)"
