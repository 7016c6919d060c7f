"""`dot_general` with quantised operands.

Where a scale does not vary along the contracting axes it can be taken out of the sum:
`sum_k x[k] * (codes[k, n] * scale[n]) = (sum_k x[k] * codes[k, n]) * scale[n]`. Then the codes are
contracted as they are, and it is the output that is scaled. Where it varies, and the codes of both
operands can be multiplied, that is done for each tile. Otherwise an operand is dequantised.

That is what XLA computes. Where there is a kernel for the product (`native`), it is the reference.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..._core.array import ImplicitArray
from ..._core.policy import note_how
from ..._core.rules import register
from ..qarray import QUANTISABLE, QArray
from . import native
from .contraction import Contraction, DotDimensionNumbers
from .operands import (
    accumulator,
    as_operand,
    code_unit,
    dense,
    exact_in,
    fits_int32,
    int8_codes,
    is_algorithm,
    may_scale_outside,
    outer_scale,
    unscaled,
)
from .per_tile import common_tiles, sum_over_tiles

# Tiles that are summed by themselves. Each product of tiles is added to the whole output, which for
# smaller ones takes longer than to dequantise the operands, unless one of these is small, too.
_LEAST_TILE = 128
_LEAST_TILE_OF_FEW = 16
_FEW = 16


def dot_general(
    lhs: ArrayLike | ImplicitArray,
    rhs: ArrayLike | ImplicitArray,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Does what `jax.lax.dot_general` does; either operand, or both, may be a `QArray`.

    Where there is a kernel for the product, that reads codes as they are stored. By XLA, two
    operands of integer formats are multiplied as integers and summed exactly, with their zero
    points; two of float8 formats as they are. Where an axis that is summed is tiled, that is done
    for each tile, if tiles are large, and of whatever size on the two sides. Otherwise operands are
    dequantised within the product. Those of 16 bits are summed in f32. `vn.explain` shows what is
    done.

    **Arguments:** those of `jax.lax.dot_general`. Implicit arrays of other types are materialised.

    **Returns:** an array of the shape and dtype that the dense operands give. Values agree with
    theirs within rounding.

    **Raises:** what `jax.lax.dot_general` raises.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(3), "int8", channelwise_axes=[1])
    >>> y = vn.quant.dot_general(jnp.ones((2, 3)), w, (([1], [0]), ([], [])))
    >>> y.shape, bool(jnp.allclose(y, jnp.ones((2, 3)) @ w.dequantize()))
    ((2, 3), True)
    """
    contraction = Contraction(dimension_numbers, precision, preferred_element_type, out_sharding)
    lhs, rhs = as_operand(lhs), as_operand(rhs)
    found = _native(lhs, rhs, contraction)
    return _by_xla(lhs, rhs, contraction) if found is None else found.compute()


def _native(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, contraction: Contraction
) -> native.Native | None:
    return native.find(
        lhs,
        rhs,
        contraction,
        by_xla=_by_xla,
        on_codes=_on_codes(lhs, rhs, contraction) is not None,
    )


def _by_xla(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, contraction: Contraction
) -> jax.Array:
    _, way = _way(lhs, rhs, contraction)
    return way(lhs, rhs, contraction)


_Product = Callable[..., jax.Array]  # of the operands and the contraction


def _way(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, contraction: Contraction
) -> tuple[str, _Product]:
    """Chooses the way to a product, by types and shapes alone; and says what it is."""
    out_dtype = contraction.out_dtype(lhs, rhs)
    if is_algorithm(contraction.precision):
        return "dequantised, for precision fixes the types", _of_dense
    if out_dtype not in QUANTISABLE or contraction.terms(lhs) == 0:
        return "dequantised", _of_dense
    on_codes = _on_codes(lhs, rhs, contraction)
    if on_codes is not None:
        return on_codes
    if not may_scale_outside(lhs, rhs, out_dtype, contraction.precision):
        return f"dequantised, for {lhs.dtype.name} meets {rhs.dtype.name}", _of_dense
    sides = zip(("lhs", "rhs"), (lhs, rhs), (0, 1), strict=True)
    kept = {name: _why_inside(x, contraction, side) for name, x, side in sides}
    hows = [
        f"{name} scaled outside" if why == "" else f"{name} dequantised, for {why}"
        for name, why in kept.items()
        if why is not None
    ]
    return ", ".join(hows), _of_values


def _on_codes(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, contraction: Contraction
) -> tuple[str, _Product] | None:
    """Returns the way that multiplies the codes of both operands, or None where there is none."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)) or contraction.terms(lhs) == 0:
        return None
    kind = _codes_multiplied(lhs, rhs, contraction.out_dtype(lhs, rhs))
    return None if kind is None else _way_of_codes(kind, lhs, rhs, contraction)


def _codes_multiplied(lhs: QArray, rhs: QArray, out_dtype: jnp.dtype) -> str | None:
    """Returns what codes are multiplied as, "integer" or "float8", or None where they are not."""
    formats = lhs.format, rhs.format
    if all(format.is_integer for format in formats):
        return "integer"
    if all(format.codebook is None and not format.is_integer for format in formats):
        dtypes = {format.code_dtype.name for format in formats}
        multiplied = len(dtypes) == 1 or dtypes == {"float8_e4m3fn", "float8_e5m2"}  # by JAX
        return "float8" if multiplied and accumulator(out_dtype) == jnp.float32 else None
    return None


def _way_of_codes(
    kind: str, lhs: QArray, rhs: QArray, contraction: Contraction
) -> tuple[str, _Product] | None:
    tiles = common_tiles(lhs, rhs, contraction)
    terms = math.prod(tiles)
    if kind == "integer" and not fits_int32(lhs, rhs, terms):
        return None
    count = contraction.terms(lhs) // terms
    if count == 1:
        return f"{kind} product, scaled outside", _of_codes
    few = min(contraction.free_size(lhs, 0), contraction.free_size(rhs, 1)) <= _FEW
    if terms < (_LEAST_TILE_OF_FEW if few else _LEAST_TILE):
        return None
    way = functools.partial(_of_tiles, tiles=tiles)
    return f"{kind} product of each of {count} tiles, scaled and summed", way


def _why_inside(x: jax.Array | QArray, contraction: Contraction, side: int) -> str | None:
    """Returns why a scale is applied within the sum, "" where it is not; None if there is none."""
    if not isinstance(x, QArray):
        return None
    if not exact_in(x.format, x.dtype):
        return f"{x.qtype} is not exact in {x.dtype.name}"
    for axis in contraction.contracting(side):
        if x.scale.shape[axis] > 1:
            return f"it is tiled by {x.tile_shape[axis]} along the sum"
    return ""


# The ways.


def _of_dense(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, contraction: Contraction
) -> jax.Array:
    return contraction.dot(dense(lhs), dense(rhs), contraction.preferred_element_type)


def _of_values(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, contraction: Contraction
) -> jax.Array:
    """Multiplies floats, which codes become, and scales the output where that can be done."""
    out_dtype = contraction.out_dtype(lhs, rhs)
    values, scales = [], []
    for side, x in enumerate((lhs, rhs)):
        scale = None
        if _why_inside(x, contraction, side) == "":
            assert isinstance(x, QArray)
            x, scale = unscaled(x, x.dtype)
        values.append(dense(x))
        scales.append(scale)
    out = contraction.dot(values[0], values[1], accumulator(out_dtype))
    return _scaled(out, scales, lhs, rhs, contraction).astype(out_dtype)


def _of_codes(lhs: QArray, rhs: QArray, contraction: Contraction) -> jax.Array:
    """Multiplies codes as they are; scales and zero points do not vary along the sum."""
    out_dtype = contraction.out_dtype(lhs, rhs)
    if lhs.format.is_integer:
        out = _integer_product(lhs, rhs, contraction).astype(accumulator(out_dtype))
    else:
        out = contraction.dot(lhs.codes(), rhs.codes(), jnp.float32)
    out *= code_unit(lhs) * code_unit(rhs)
    scales = [outer_scale(lhs), outer_scale(rhs)]
    return _scaled(out, scales, lhs, rhs, contraction).astype(out_dtype)


def _of_tiles(
    lhs: QArray, rhs: QArray, contraction: Contraction, *, tiles: tuple[int, ...]
) -> jax.Array:
    out_dtype = contraction.out_dtype(lhs, rhs)
    wide = dataclasses.replace(contraction, preferred_element_type=accumulator(out_dtype))
    product = functools.partial(_of_codes, contraction=wide)
    return sum_over_tiles(product, lhs, rhs, wide, tiles).astype(out_dtype)


def _scaled(
    out: jax.Array,
    scales: Sequence[jax.Array | None],
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    contraction: Contraction,
) -> jax.Array:
    """Returns a sum times the scales of the operands, which are multiplied with each other first.

    So the product is in range wherever those of the largest values are, and the sum is then.
    """
    sides = zip(scales, (lhs, rhs), (0, 1), strict=True)
    arranged = [
        contraction.in_output(scale, side, x.shape, out.ndim).astype(out.dtype)
        for scale, x, side in sides
        if scale is not None
    ]
    return out * functools.reduce(jnp.multiply, arranged) if arranged else out


def _integer_product(lhs: QArray, rhs: QArray, contraction: Contraction) -> jax.Array:
    """Returns the sum of products of codes less their zero points, exactly, in int32.

    `sum (a - y) (b - z) = sum a b - y sum b - z (sum a - K y)`. Parts of it may wrap around, and
    wrap back in what they add up to.
    """
    codes, zero_points = zip(*(int8_codes(q) for q in (lhs, rhs)), strict=True)
    out = contraction.dot(codes[0], codes[1], jnp.int32)
    ndim = out.ndim

    def arranged(leaf: jax.Array, side: int) -> jax.Array:
        return contraction.in_output(leaf, side, (lhs, rhs)[side].shape, ndim)

    def summed(side: int) -> jax.Array:
        axes = contraction.contracting(side)
        return arranged(codes[side].sum(axes, keepdims=True, dtype=jnp.int32), side)

    if zero_points[0] is not None:
        out -= arranged(zero_points[0], 0) * summed(1)
    if zero_points[1] is not None:
        of_lhs = summed(0)
        if zero_points[0] is not None:
            of_lhs -= contraction.terms(lhs) * arranged(zero_points[0], 0)
        out -= arranged(zero_points[1], 1) * of_lhs
    return out


@register("dot_general")
def _dot_general(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray, **params: Any) -> jax.Array:
    contraction = Contraction(**params)
    lhs, rhs = as_operand(lhs), as_operand(rhs)
    how, way = _way(lhs, rhs, contraction)
    found = _native(lhs, rhs, contraction)
    if found is not None:
        note_how(f"CPU kernel {found.target.removeprefix('veneer_')}, else {how}")
        return found.compute()
    note_how(how)
    product: Callable[..., jax.Array] = functools.partial(way, contraction=contraction)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((lhs, rhs))):
        # A derivative dequantises once more, instead of keeping the dense weights of a whole model
        # from the forward pass to the backward one.
        product = jax.checkpoint(product)
    return product(lhs, rhs)
