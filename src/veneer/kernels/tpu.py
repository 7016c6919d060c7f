"""Multiply activations by a packed weight on a TPU, in an experimental Pallas kernel.

The kernel has never run on a TPU. It is used only with `VENEER_KERNELS=experimental`, and only then
is this module imported, because importing Pallas is slow.

An entry is one byte. Its codes are called fields. The kernel decodes one field of a block at a
time, so values stay in their lanes. If rows are contracted, the fields of an entry contribute to
neighboring columns of the result. If columns are contracted, they are multiplied by neighboring
columns of the activations. Therefore activations are split into one array per field.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from .common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape, row_bytes

#: The sizes of a block, in entries. An axis that is shorter is a single block.
_M, _N, _K = 256, 512, 512
#: The most scales along K that fit into VMEM for a block of columns.
_MOST_TILES = 1024


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """The sizes of a product `[m, k] x [k, n]`, and of its tiles.

    The sizes k and n count entries: stored bytes, each with one or more codes.

    **Arguments:**

    - `contracts_rows`: whether the stored matrix is `[k, n]`. Otherwise it is `[n, k]`.
    - `fields`: the number of codes per entry: along N if rows are contracted, otherwise along K.
    - `tile`: the number of codes along K that share a scale.
    - `tiles`: the number of tiles along K.
    - `columns`: the number of result columns.
    """

    contracts_rows: bool
    fields: int
    m: int
    n: int
    k: int
    tile: int
    tiles: int
    columns: int

    @property
    def out_fields(self) -> int:
        """The number of result columns that one entry, a stored byte, contributes to."""
        return self.fields if self.contracts_rows else 1

    @property
    def entries(self) -> int:
        """The number of entries (stored bytes) along K that share a scale, at least 1."""
        return self.tile if self.contracts_rows else max(1, self.tile // self.fields)


class BlockSizes(NamedTuple):
    """The sizes of a block of a product `[m, k] x [k, n]`, in entries (bytes of codes)."""

    m: int
    n: int
    k: int


def layout_of(codes: Codes, shape: MatmulShape) -> StoredLayout | None:
    """Return the sizes of a product in entries, which are stored bytes of `fields` codes.

    Return None if a tile along the columns of W is neither whole bytes nor an equal share of one.

    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> from veneer.kernels.tpu import layout_of
    >>> int4 = Codes(4, values=(*map(float, range(8)), *map(float, range(-8, 0))))
    >>> layout = layout_of(int4, MatmulShape("columns", "float", m=1, k=256, n=64, tile=32))
    >>> layout.fields, layout.k, layout.tiles
    (2, 128, 8)
    """
    fields, contracts_rows = 8 // codes.bits, shape.contracting == "rows"
    tiles = shape.k // shape.tile
    if not contracts_rows and tiles > 1 and shape.tile % fields and fields % shape.tile:
        return None
    n, k = shape.n, shape.k
    if contracts_rows:
        n = row_bytes(n, codes.bits)
    else:
        k = row_bytes(k, codes.bits)
    return StoredLayout(contracts_rows, fields, shape.m, n, k, shape.tile, tiles, shape.n)


def blocks_of(layout: StoredLayout) -> BlockSizes | None:
    """Return the block sizes for a product, or None if its scales do not fit into VMEM."""
    if layout.entries > 1 and layout.tiles > _MOST_TILES:
        return None
    return BlockSizes(min(layout.m, _M), min(layout.n, _N), min(layout.k, _K))


def can_compute(codes: Codes, shape: MatmulShape) -> bool:
    """Return whether the kernel supports the sizes and codes of a product."""
    if not isinstance(shape.m, int) or shape.m == 0:  # m is symbolic in programs for export
        return False
    layout = layout_of(codes, shape)
    return layout is not None and blocks_of(layout) is not None


def is_available() -> bool:
    """Return True: programs with the kernel can be traced in every process."""
    return True


def has_device() -> bool:
    """Return True: programs with the kernel can be lowered on machines without a TPU."""
    return True


def compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Lower the kernel for one product, to check that this JAX version can.

    **Raises:** any error of Pallas.
    """
    _compile(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands), problem)


@functools.cache
def _compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    compute = jax.jit(functools.partial(product, problem=problem))
    compute.trace(operands).lower(lowering_platforms=("tpu",))


def product(
    operands: MatmulOperands, problem: MatmulProblem, *, interpret: bool = False
) -> jax.Array:
    """Multiply activations by a packed weight, without the terms of zero points and minima.

    The product must be one that the kernel supports (`can_compute`).

    **Arguments:**

    - `operands`: `x` is f32, bf16 or f16 `[B, M, K]`.
    - `interpret`: run the kernel in Pallas's interpreter, on any device.

    **Returns:** `[B, M, N]`. The dtype is f32 if the caller must still add zero points or minima.
    """
    layout = layout_of(problem.codes, problem.shape(operands))
    assert layout is not None
    blocks = blocks_of(layout)
    assert blocks is not None
    packed, scale = operands.packed, operands.scale
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = _decode_exponents(lax.bitcast_convert_type(scale, jnp.uint8))
    out = multiply(
        _split_fields(operands.x, layout),
        lax.bitcast_convert_type(packed, jnp.uint8),
        _split_scales(scale.astype(jnp.float32), layout),
        problem.codes,
        layout,
        blocks,
        interpret=interpret,
    )
    is_complete = operands.zero_point is None and operands.minimum is None
    out = jnp.moveaxis(out, 0, 3).reshape(*out.shape[1:3], -1)[..., : layout.columns]
    return out.astype(problem.out_dtype if is_complete else "float32")


def _decode_exponents(bits: jax.Array) -> jax.Array:
    """Decode float8_e8m0fnu scales, stored as uint8, to f32."""
    bits = bits.astype(jnp.int32)
    scale = lax.bitcast_convert_type(bits << 23, jnp.float32)
    scale = jnp.where(bits == 0, jnp.float32(2.0**-127), scale)
    return jnp.where(bits == 255, jnp.nan, scale)


def _split_fields(x: jax.Array, layout: StoredLayout) -> jax.Array:
    """Split activations `[B, M, K]` into one array per field: `[F, B, M, k]`.

    An entry is one byte, and its codes are called fields. F is the number of fields if columns are
    contracted, else 1. The size k counts entries.
    """
    if layout.contracts_rows or layout.fields == 1:
        return x[None]
    batch, m, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, layout.k * layout.fields - k)))
    return jnp.moveaxis(x.reshape(batch, m, layout.k, layout.fields), 3, 0)


def _split_scales(scale: jax.Array, layout: StoredLayout) -> jax.Array:
    """Arrange f32 scales by field and entry.

    **Returns:** `[F, B, T, n]` if rows are contracted, otherwise `[F, B, n, T]`. T is the number of
    scales along K. F is the number of fields, or 1 if all fields of an entry share their scale.
    """
    column_axis = 2 if layout.contracts_rows else 1
    n_tile = layout.columns // scale.shape[column_axis]
    scale = jnp.repeat(scale, n_tile, column_axis, total_repeat_length=layout.columns)
    if not layout.contracts_rows and layout.tiles > 1 and layout.tile < layout.fields:
        terms = layout.tile * layout.tiles
        scale = jnp.repeat(scale, layout.tile, 2, total_repeat_length=terms)
        last = layout.k
    elif layout.contracts_rows:
        last = layout.n
    else:
        return scale[None]
    scale = jnp.pad(scale, ((0, 0), (0, 0), (0, last * layout.fields - scale.shape[2])))
    return jnp.moveaxis(scale.reshape(*scale.shape[:2], last, layout.fields), 3, 0)


def takes_zero_points(operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return False: this kernel never subtracts zero points, so the caller must."""
    return False


# The kernel. A grid step loads a block of codes into VMEM, decodes and scales it, and multiplies
# activations by it. The block of the result stays in VMEM and accumulates the steps along K. To
# expand the scales of tiles to a block, the kernel multiplies them by a matrix of ones and zeros.
# This product is exact, and needs no moves between lanes. Integers and small floats are decoded by
# arithmetic on their bits. All other codes are looked up.


def multiply(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    codes: Codes,
    layout: StoredLayout,
    blocks: BlockSizes,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Multiply activations by a packed weight. Return f32 `[out_fields, B, M, n]`.

    An entry is one byte, and its codes are called fields. The sizes k and n count entries. F is the
    number of fields, or 1 if all fields share the array. `out_fields` is the number of result
    columns per entry. T is the number of scales along K.

    **Arguments:**

    - `x`: f32, bf16 or f16 `[F, B, M, k]`.
    - `packed`: uint8 `[B, k, n]` if the layout contracts rows, otherwise `[B, n, k]`.
    - `scale`: f32 `[F, B, T, n]` if the layout contracts rows, otherwise `[F, B, n, T]`.
    - `interpret`: run the kernel in Pallas's interpreter, on any device.
    """
    batch, m = x.shape[1:3]
    has_scale_per_entry = layout.tiles > 1 and layout.entries == 1
    block_tiles = blocks.k if has_scale_per_entry else layout.tiles

    def spec(fields: int, axes: str) -> pl.BlockSpec:
        # `axes` names the axes after the fields and the batch.
        size = {"m": blocks.m, "n": blocks.n, "k": blocks.k, "t": block_tiles}
        shape = (fields, None, *(size[axis] for axis in axes))

        def place(batch: Any, m: Any, n: Any, k: Any) -> tuple[Any, ...]:
            index = {"m": m, "n": n, "k": k, "t": k if has_scale_per_entry else 0}
            return (0, batch, *(index[axis] for axis in axes))

        return pl.BlockSpec(shape, place)

    matrix, scales = ("kn", "tn") if layout.contracts_rows else ("nk", "nt")
    grid = batch, pl.cdiv(m, blocks.m), pl.cdiv(layout.n, blocks.n), pl.cdiv(layout.k, blocks.k)
    return pl.pallas_call(
        functools.partial(_kernel, codes=codes, layout=layout, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct((layout.out_fields, batch, m, layout.n), jnp.float32),
        grid=grid,
        in_specs=[spec(len(x), "mk"), spec(1, matrix), spec(len(scale), scales)],
        out_specs=spec(layout.out_fields, "mn"),
        interpret=interpret,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name=f"veneer_{'rows' if layout.contracts_rows else 'columns'}_{codes.kind}",
    )(x, packed[None], scale)


def _kernel(
    x_ref: Any,
    packed_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    *,
    codes: Codes,
    layout: StoredLayout,
    blocks: BlockSizes,
) -> None:
    """Add the product of one block of codes to a block of the result.

    A field is the position of a code in a byte. Fields are multiplied one after the other.
    """
    first = pl.program_id(3) * blocks.k
    packed = packed_ref[0].astype(jnp.int32)
    k_axis = 0 if layout.contracts_rows else 1
    # Mask entries beyond the end of K. Their memory is undefined.
    in_w = first + lax.broadcasted_iota(jnp.int32, packed.shape, k_axis) < layout.k
    in_x = first + lax.broadcasted_iota(jnp.int32, (blocks.m, blocks.k), 1) < layout.k

    @pl.when(first == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    for field in range(layout.fields):
        x_field, out_field = (0, field) if layout.contracts_rows else (field, 0)
        scale = scale_ref[field if scale_ref.shape[0] > 1 else 0]
        bits = packed >> field * codes.bits & (1 << codes.bits) - 1
        w = decode(codes, bits) * _spread(scale, first, layout, blocks)
        x = x_ref[x_field]
        w = jnp.where(in_w, w, 0).astype(x.dtype)
        out_ref[out_field] += _dot(jnp.where(in_x, x, jnp.zeros_like(x)), w, k_axis)


def _spread(scale: jax.Array, first: Any, layout: StoredLayout, blocks: BlockSizes) -> jax.Array:
    """Expand scales to one per entry of a block, or to a shape that broadcasts to the block.

    An entry is a stored byte. `first` is the index along K of the first entry of the block.
    """
    if layout.tiles == 1 or layout.entries == 1:
        return scale
    shape = (blocks.k, layout.tiles) if layout.contracts_rows else (layout.tiles, blocks.k)
    k_axis, t_axis = (0, 1) if layout.contracts_rows else (1, 0)
    tile = (first + lax.broadcasted_iota(jnp.int32, shape, k_axis)) // layout.entries
    ones = (tile == lax.broadcasted_iota(jnp.int32, shape, t_axis)).astype(jnp.float32)
    return _dot(ones, scale, 0) if layout.contracts_rows else _dot(scale, ones, 0)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """Contract the columns of `x` with an axis of `w`, and accumulate in f32."""
    is_f32 = x.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_f32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, w, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


class SmallFloat(NamedTuple):
    """A float format of at most 8 bits: a sign, an exponent and a mantissa.

    **Arguments:**

    - `bits`: the number of bits.
    - `mantissa`: the number of mantissa bits.
    - `bias`: the exponent bias.
    - `infinite`: the bits of positive infinity, or None.
    - `nan`: the bits of the smallest positive NaN, or None.
    """

    bits: int
    mantissa: int
    bias: int
    infinite: int | None = None
    nan: int | None = None

    def decode(self, codes: jax.Array) -> jax.Array:
        """Decode i32 codes to f32, by shifting their bits to the positions of f32.

        No step uses subnormal f32 numbers, because devices may flush them to 0.
        """
        magnitude = codes & (1 << self.bits - 1) - 1
        moved = (magnitude << 23 - self.mantissa) + (127 - self.bias << 23)
        number = lax.bitcast_convert_type(moved, jnp.float32)
        subnormal = magnitude.astype(jnp.float32) * 2.0 ** (1 - self.bias - self.mantissa)
        number = jnp.where(magnitude >> self.mantissa == 0, subnormal, number)
        if self.nan is not None:
            number = jnp.where(magnitude >= self.nan, jnp.nan, number)
        if self.infinite is not None:
            number = jnp.where(magnitude == self.infinite, jnp.inf, number)
        return jnp.where(codes >> self.bits - 1 == 0, number, -number)


#: See the OCP's "8-bit Floating Point Specification" and "Microscaling Formats Specification".
SMALL_FLOATS = {
    "float8_e4m3fn": SmallFloat(8, mantissa=3, bias=7, nan=0x7F),
    "float8_e5m2": SmallFloat(8, mantissa=2, bias=15, infinite=0x7C, nan=0x7D),
    "float4_e2m1fn": SmallFloat(4, mantissa=1, bias=1),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode(codes: Codes, bits: jax.Array) -> jax.Array:
    """Decode codes to f32.

    **Arguments:**

    - `bits`: i32, the unsigned bits of one code per entry.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.tpu import decode
    >>> from veneer.kernels.common.problem import Codes
    >>> decode(Codes(8, "int8"), jnp.arange(127, 130)).tolist()
    [127.0, -128.0, -127.0]
    """
    dtype = "float4_e2m1fn" if codes.values == _E2M1 else codes.dtype
    if dtype in SMALL_FLOATS:
        return SMALL_FLOATS[dtype].decode(bits)
    values = codes.values
    if not values:  # int8 or uint8
        values = tuple(np.arange(256).astype(codes.dtype).astype(float).tolist())
    for flipped in (0, len(values) // 2):  # consecutive integers, unsigned or signed
        offset = flipped - values[0]
        if values == tuple((code ^ flipped) - offset for code in range(len(values))):
            return (bits ^ flipped).astype(jnp.float32) - offset
    # Look up the values in a tree of selects, one level per bit.
    selected: list[Any] = [np.float32(value) for value in values]
    for bit in range(codes.bits):
        is_set = (bits >> bit & 1) == 1
        pairs = zip(selected[::2], selected[1::2], strict=True)
        selected = [jnp.where(is_set, odd, even) for even, odd in pairs]
    return selected[0]
