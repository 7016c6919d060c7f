"""Multiply activations by a packed weight in a Pallas kernel for TPUs.

A grid step loads a block of codes into VMEM, decodes and scales it, and multiplies activations by
it. The block of the result stays in VMEM and accumulates the steps along K. To expand the scales of
tiles to a block, the kernel multiplies them by a matrix of ones and zeros. This product is exact,
and needs no moves between lanes. Integers and small floats are decoded by arithmetic on their bits.
All other codes are looked up.

The kernel has never run on a TPU.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from ..common.problem import Codes

if TYPE_CHECKING:
    from .matmul import BlockSizes, StoredLayout


def multiply(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    codes: Codes,
    layout: "StoredLayout",
    blocks: "BlockSizes",
    *,
    interpret: bool = False,
) -> jax.Array:
    """Multiply activations by a packed weight. Return f32 `[out_fields, B, M, n]`.

    F is the number of fields, the codes in a byte, or 1. The sizes k and n are in entries, which
    are bytes. T is the number of scales along K.

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
    layout: "StoredLayout",
    blocks: "BlockSizes",
) -> None:
    """Add the product of one block of codes to a block of the result, field by field."""
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


def _spread(
    scale: jax.Array, first: Any, layout: "StoredLayout", blocks: "BlockSizes"
) -> jax.Array:
    """Expand scales to the entries of a block, or to a shape that broadcasts to the block.

    `first` is the index along K of the first entry of the block.
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
    >>> from veneer.kernels.tpu.kernel import decode
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
