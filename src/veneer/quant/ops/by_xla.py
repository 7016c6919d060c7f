"""Ways to a product by XLA: by scaled_matmul, on codes, by tiles, by values, dense.

Where a scale does not vary along the contracting axes it can be taken out of the sum:
`sum_k x[k] * (codes[k, n] * scale[n]) = (sum_k x[k] * codes[k, n]) * scale[n]`. Then the codes are
contracted as they are, and it is the output that is scaled. Where it varies, and the codes of both
operands can be multiplied, that is done for each tile. Otherwise an operand is dequantised.

XLA multiplies arrays that lie in memory. So where codes become floats, by values or dense, all of
an operand is there in floats, and each plan says how many bytes that is.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.pairs import runs_on_gpu
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.tiles import Shape, over_tiles
from .minima import minima_apart
from .operands import (
    accumulator,
    code_unit,
    dequantized,
    exact_in,
    fits_int32,
    has_minimum,
    have_byte_codes,
    int8_codes,
    is_algorithm,
    may_scale_outside,
    outer_scale,
    unscaled,
)
from .product import (
    DotParams,
    Plan,
    broadcast_tiles,
    dense_nbytes,
    how_dense,
    runs_on_cpu,
)
from .tile_sums import common_tiles, sum_over_tiles

# Tiles that are summed by themselves. Each product of tiles is added to the whole output, which for
# smaller ones takes longer than to dequantise the operands, unless one of these is small, too.
_LEAST_TILE = 128
_LEAST_TILE_OF_FEW = 16
_FEW = 16


def by_xla(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> jax.Array:
    """Returns the product by the first of these ways that there is."""
    apart = minima_apart(lhs, rhs, params)
    if apart is not None:
        lhs, rhs, params = apart.lhs, apart.rhs, apart.params
    plans = (way(lhs, rhs, params) for way in WAYS_BY_XLA)
    plan = next(plan for plan in plans if plan is not None)
    return (plan if apart is None else apart.whole(plan))()


def by_scaled_matmul(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams
) -> Plan | None:
    """Multiply codes of mxfp8 and their scales by `jax.nn.scaled_matmul`, on GPUs that have it."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray) and has_block_scaled_matmul()):
        return None
    otherwise = by_values(lhs, rhs, params)
    is_fit = all(_has_blocks(x, params, side) for side, x in enumerate((lhs, rhs)))
    if otherwise is None or not is_fit or params.out_sharding is not None:
        return None
    if 0 in (*lhs.shape, *rhs.shape) or params.out_dtype(lhs, rhs) == jnp.float64:
        return None
    scaled = functools.partial(product_by_scaled_matmul, params=params)

    # JAX has no derivative of scaled_matmul.
    @jax.custom_jvp
    def compute(lhs: QArray, rhs: QArray) -> jax.Array:
        return lax.platform_dependent(lhs, rhs, cuda=scaled, default=otherwise.compute)

    @compute.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        return compute(*primals), jax.jvp(otherwise.compute, primals, tangents)[1]

    return Plan("jax.nn.scaled_matmul of codes and scales", compute, (lhs, rhs))


def on_codes(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Plan | None:
    """Multiplies the codes of both operands, and scales what they add up to."""
    codes = multiplied_codes(lhs, rhs, params)
    if codes is None or codes[1] > 1:
        return None
    kind, _, _ = codes
    compute = functools.partial(_product_of_codes, params=params)
    # On a CPU XLA multiplies no float8: it makes f32 of both operands.
    is_widened = kind == "float8" and runs_on_cpu()
    made = dense_nbytes(lhs, rhs, dtype="float32") if is_widened else ()
    return Plan(f"multiply {kind} codes, scale the output", compute, (lhs, rhs), made)


def by_tiles(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Plan | None:
    """Multiplies the codes of both operands, scales the sum over each tile, and adds these up."""
    codes = multiplied_codes(lhs, rhs, params)
    if codes is None or codes[1] == 1:
        return None
    kind, count, tiles = codes
    how = f"multiply {kind} codes in {count} tiles, scale and add the results"
    compute = functools.partial(_sum_of_tiles, params=params, tiles=tiles)
    return Plan(how, compute, (lhs, rhs))


def by_values(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Plan | None:
    """Multiplies floats, which codes become, and scales the output where that can be done."""
    if not may_scale_outside(lhs, rhs, params.out_dtype(lhs, rhs), params.precision):
        return None
    if params.terms(lhs) == 0:
        return None
    reasons = [_why_inside(x, params, side) for side, x in enumerate((lhs, rhs))]
    hows = [
        f"dequantize {name}, {reason}"
        if reason
        else f"convert codes of {name} to float, scale the output"
        for name, reason in zip(("lhs", "rhs"), reasons, strict=True)
        if reason is not None
    ]
    are_outside = tuple(reason == "" for reason in reasons)
    compute = functools.partial(_product_of_values, params=params, are_outside=are_outside)
    return Plan("; ".join(hows), compute, (lhs, rhs), dense_nbytes(lhs, rhs))


def dense(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> Plan:
    """Multiplies what the operands stand for."""
    how = how_dense(lhs, rhs)
    if is_algorithm(params.precision):
        how += ", precision fixes the dtypes"
    elif _is_sum_of_floats(lhs, rhs, params):
        how += f", lhs is {lhs.dtype.name} and rhs {rhs.dtype.name}"
    compute = functools.partial(_product_of_dense, params=params)
    return Plan(how, compute, (lhs, rhs), dense_nbytes(lhs, rhs))


WAYS_BY_XLA = (by_scaled_matmul, on_codes, by_tiles, by_values, dense)


# What there is a way for.


def has_block_scaled_matmul() -> bool:
    """Return whether the default device multiplies mx formats: NVIDIA's GPUs from Blackwell on.

    On older GPUs XLA dequantizes the operands of scaled_matmul.
    """
    if not runs_on_gpu():
        return False
    major, _, _ = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return major.isdecimal() and int(major) >= 10


def _has_blocks(q: QArray, params: DotParams, side: int) -> bool:
    """Return whether an operand is mxfp8 with tiles along the only contracted axis.

    These are the mx formats that cuDNN takes: float8, with one float8_e8m0fnu per 32 codes.
    """
    contracting = params.dimension_numbers.contracting[side]
    is_mxfp8 = q.qtype in ("mxfp8", "mxfp8_e5m2") and q.scale.dtype == jnp.float8_e8m0fnu
    return is_mxfp8 and len(contracting) == 1 and q.tile_shape[contracting[0]] == 32


def _is_sum_of_floats(lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams) -> bool:
    return params.out_dtype(lhs, rhs) in QUANTIZABLE and params.terms(lhs) != 0


def multiplied_codes(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams
) -> tuple[str, int, Shape] | None:
    """Returns how the codes of both operands are multiplied, or None where they are not.

    **Returns:** what they are, "integer" or "float8"; in how many tiles the sum is cut, and how
    large these are along the contracting axes.
    """
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return None
    if has_minimum(lhs) or has_minimum(rhs):
        return None
    if is_algorithm(params.precision) or not _is_sum_of_floats(lhs, rhs, params):
        return None
    kind = _kind_of_codes(lhs, rhs, params.out_dtype(lhs, rhs))
    if kind is None:
        return None
    tiles = common_tiles(lhs, rhs, params)
    terms = math.prod(tiles)
    if not isinstance(terms, int):  # symbolic, in programs for export
        return None
    if kind == "integer" and not fits_int32(lhs, rhs, terms):
        return None
    count = params.terms(lhs) // terms
    return (kind, count, tiles) if count == 1 or _are_large(lhs, rhs, params, terms) else None


def _are_large(lhs: QArray, rhs: QArray, params: DotParams, terms: int) -> bool:
    """Whether tiles of so many terms are large enough to be summed by themselves."""
    sizes = params.free_size(lhs, 0), params.free_size(rhs, 1)
    few = any(isinstance(size, int) and size <= _FEW for size in sizes)  # or symbolic, for export
    return terms >= (_LEAST_TILE_OF_FEW if few else _LEAST_TILE)


def _kind_of_codes(lhs: QArray, rhs: QArray, out_dtype: jnp.dtype) -> str | None:
    formats = lhs.format, rhs.format
    if have_byte_codes(lhs, rhs):
        return "integer"
    if all(format.codebook is None and not format.is_integer for format in formats):
        dtypes = {format.code_dtype.name for format in formats}
        multiplied = len(dtypes) == 1 or dtypes == {"float8_e4m3fn", "float8_e5m2"}  # by JAX
        return "float8" if multiplied and accumulator(out_dtype) == jnp.float32 else None
    return None


def _why_inside(x: jax.Array | QArray, params: DotParams, side: int) -> str | None:
    """Returns why a scale is applied within the sum, "" where it is not; None if there is none."""
    if not isinstance(x, QArray):
        return None
    if not exact_in(x.format, x.dtype):
        return f"{x.dtype.name} cannot represent the values of {x.qtype} exactly"
    for axis in params.dimension_numbers.contracting[side]:
        if x.scale.shape[axis] != 1:
            return f"tiled by {x.tile_shape[axis]} along the contracted axis"
    return ""


# What they compute.


def product_by_scaled_matmul(lhs: QArray, rhs: QArray, params: DotParams) -> jax.Array:
    """Reshape codes and scales to `[batch, rows, terms]` and call `jax.nn.scaled_matmul`."""
    operands, shape = [], []
    for side, q in enumerate((lhs, rhs)):
        (contracted,), batch = (pair[side] for pair in params.dimension_numbers)
        free = params.dimension_numbers.free(side, q.ndim)
        counts = [q.scale.shape[i] if i == contracted else n for i, n in enumerate(q.shape)]
        assert not isinstance(q.scale, QArray)  # as `_has_blocks` says
        scale = over_tiles(broadcast_tiles, jnp.zeros(counts, q.scale.dtype), q.scale)
        sizes = [math.prod(q.shape[i] for i in axes) for axes in (batch, free)]
        for leaf in (q.codes(), scale):
            leaf = lax.transpose(leaf, [*batch, *free, contracted])
            operands.append(leaf.reshape(*sizes, leaf.shape[-1]))
        shape += [q.shape[i] for i in (*batch, *free)] if side == 0 else [q.shape[i] for i in free]
    lhs_codes, lhs_scale, rhs_codes, rhs_scale = operands
    out = _scaled_matmul(lhs_codes, rhs_codes, lhs_scale, rhs_scale)
    return out.reshape(shape).astype(params.out_dtype(lhs, rhs))


@jax.custom_batching.custom_vmap
def _scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scales: jax.Array, rhs_scales: jax.Array
) -> jax.Array:
    return jax.nn.scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, jnp.float32)


# JAX 0.10.2 batches scaled_matmul only if all operands are batched.
@_scaled_matmul.def_vmap
def _(size: int, are_batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
    whole = [
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(operands, are_batched, strict=True)
    ]
    out = _scaled_matmul(*(x.reshape(-1, *x.shape[2:]) for x in whole))
    return out.reshape(size, -1, *out.shape[1:]), True


def _product_of_dense(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, params: DotParams
) -> jax.Array:
    return params.dot(dequantized(lhs), dequantized(rhs), params.preferred_element_type)


def _product_of_values(
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    params: DotParams,
    are_outside: tuple[bool, ...],
) -> jax.Array:
    """The product of floats, with the scales of those operands that have theirs taken out."""
    out_dtype = params.out_dtype(lhs, rhs)
    values, scales = [], []
    for x, is_outside in zip((lhs, rhs), are_outside, strict=True):
        scale = None
        if is_outside:
            assert isinstance(x, QArray)
            x, scale = unscaled(x, x.dtype)
        values.append(dequantized(x))
        scales.append(scale)
    out = params.dot(values[0], values[1], accumulator(out_dtype))
    return _scaled(out, scales, lhs, rhs, params).astype(out_dtype)


def _product_of_codes(lhs: QArray, rhs: QArray, params: DotParams) -> jax.Array:
    """The product of codes as they are; scales and zero points do not vary along the sum."""
    out_dtype = params.out_dtype(lhs, rhs)
    if lhs.format.is_integer:
        out = _integer_product(lhs, rhs, params).astype(accumulator(out_dtype))
    else:
        out = params.dot(lhs.codes(), rhs.codes(), jnp.float32)
    out *= code_unit(lhs) * code_unit(rhs)
    scales = [outer_scale(lhs), outer_scale(rhs)]
    return _scaled(out, scales, lhs, rhs, params).astype(out_dtype)


def _sum_of_tiles(lhs: QArray, rhs: QArray, params: DotParams, tiles: Shape) -> jax.Array:
    out_dtype = params.out_dtype(lhs, rhs)
    wide = dataclasses.replace(params, preferred_element_type=accumulator(out_dtype))
    product = functools.partial(_product_of_codes, params=wide)
    return sum_over_tiles(product, lhs, rhs, wide, tiles).astype(out_dtype)


def _scaled(
    out: jax.Array,
    scales: Sequence[jax.Array | None],
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    params: DotParams,
) -> jax.Array:
    """Returns a sum times the scales of the operands, which are multiplied with each other first.

    So the product is in range wherever those of the largest values are, and the sum is then.
    """
    sides = zip(scales, (lhs, rhs), (0, 1), strict=True)
    arranged = [
        params.in_output(scale, side, x.shape, out.ndim).astype(out.dtype)
        for scale, x, side in sides
        if scale is not None
    ]
    return out * functools.reduce(jnp.multiply, arranged) if arranged else out


def _integer_product(lhs: QArray, rhs: QArray, params: DotParams) -> jax.Array:
    """Returns the sum of products of codes less their zero points, exactly, in int32.

    `sum (a - y) (b - z) = sum a b - y sum b - z (sum a - K y)`. Parts of it may wrap around, and
    wrap back in what they add up to.
    """
    codes, zero_points = zip(*(int8_codes(q) for q in (lhs, rhs)), strict=True)
    out = params.dot(codes[0], codes[1], jnp.int32)
    ndim = out.ndim

    def arranged(leaf: jax.Array, side: int) -> jax.Array:
        return params.in_output(leaf, side, (lhs, rhs)[side].shape, ndim)

    def summed(side: int) -> jax.Array:
        axes = params.dimension_numbers.contracting[side]
        return arranged(codes[side].sum(axes, keepdims=True, dtype=jnp.int32), side)

    if zero_points[0] is not None:
        out -= arranged(zero_points[0], 0) * summed(1)
    if zero_points[1] is not None:
        of_lhs = summed(0)
        if zero_points[0] is not None:
            of_lhs -= params.terms(lhs) * arranged(zero_points[0], 0)
        out -= arranged(zero_points[1], 1) * of_lhs
    return out
