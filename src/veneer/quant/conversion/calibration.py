"""Calibration: from the values of a tile to the range that its codes cover.

A method is written as `"<name>[,<number>...]"`: "absmax", "rms,7", "fixed,-1,3". One row of one
table each.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..formats import Format
from .scales import usable


class Range(NamedTuple):
    """What codes cover, tile by tile: from `low` to `high`.

    `low=None` is a symmetric range, from `-high`, which needs no zero point.
    """

    low: jax.Array | None
    high: jax.Array


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Values of at least f32, the axes of a tile among theirs, and what they are calibrated for.

    **Arguments:**

    - `stored_worth`: from scales to what these are worth as they are stored.
    """

    values: jax.Array
    axes: tuple[int, ...]
    format: Format
    stored_worth: Callable[[jax.Array], jax.Array]


def _absmax(tiles: Tiles, factor: float = 1.0) -> Range:
    return Range(None, _largest(tiles) * factor)


# The largest value with all mantissa bits set, and that value half a step further, of each element:
# 6 and 7 of float4_e2m1fn, 480 and 496 of float8_e4m3fn.
_BIASED = {"mxfp8": 30 / 31, "mxfp8_16": 30 / 31, "mxfp4": 6 / 7}


def _oas_range(tiles: Tiles) -> Range:
    """Return the range whose power of two clips the largest value by at most half a step.

    Outlier Aware Scaling (OAS, arXiv 2603.08713) adds a bias to the logarithm of the scale. Qwix
    first rounds the biased scale to bfloat16. A scale less than a relative 2**-9 below a power of
    two becomes that power.
    """
    factor = _BIASED[tiles.format.name] / (1 - 2.0**-9)
    return Range(None, _largest(tiles) * factor)


def _largest(tiles: Tiles) -> jax.Array:
    """The largest magnitude; NaN where there is one.

    XLA's own maximum drops NaN on CPU, in arrays of some size. As integers, the bits of magnitudes
    have the same order, and those of NaN are the largest.
    """
    dtype = tiles.values.dtype
    bits = jnp.dtype(f"int{8 * dtype.itemsize}")
    magnitudes = jax.lax.bitcast_convert_type(jnp.abs(tiles.values), bits)
    most = jnp.max(magnitudes, axis=tiles.axes, initial=0)
    return jax.lax.bitcast_convert_type(most, dtype)


def _minmax(tiles: Tiles, factor: float = 1.0) -> Range:
    low = jnp.min(tiles.values, axis=tiles.axes, initial=0)
    high = jnp.max(tiles.values, axis=tiles.axes, initial=0)
    return Range(low * factor, high * factor)


def _rms(tiles: Tiles, factor: float) -> Range:
    # Squares of values next to 1 neither overflow nor vanish.
    unit = usable(_largest(tiles))
    squares = jnp.square(tiles.values / jnp.expand_dims(unit, tiles.axes))
    return Range(None, unit * jnp.sqrt(jnp.mean(squares, axis=tiles.axes)) * factor)


def _absmean(tiles: Tiles) -> Range:
    # The mean magnitude is what a code of 1 stands for.
    return Range(None, jnp.mean(jnp.abs(tiles.values), axis=tiles.axes) * tiles.format.bound)


def _fixed(tiles: Tiles, *ends: float) -> Range:
    low, high = ends if len(ends) == 2 else (-ends[0], ends[0])
    shape = [n for axis, n in enumerate(tiles.values.shape) if axis not in tiles.axes]
    filled = [jnp.full(shape, end, tiles.values.dtype) for end in (low, high)]
    return Range(None if low == -high else filled[0], filled[1])


def _percentile(tiles: Tiles, *percents: float) -> Range:
    if len(percents) == 1:
        return Range(None, jnp.percentile(jnp.abs(tiles.values), percents[0], axis=tiles.axes))
    low, high = (jnp.percentile(tiles.values, percent, axis=tiles.axes) for percent in percents)
    return Range(jnp.minimum(low, 0), jnp.maximum(high, 0))


def _least_error(tiles: Tiles, candidates: float = 40, power: float = 2) -> Range:
    """Return the fraction of the full range with the smallest quantization error.

    The fractions are 1/candidates, 2/candidates, ..., 1. The error is the mean of `|error|**power`.
    A power above 2 preserves the largest values better (GPTQ's own code uses 2.4).
    """
    whole = _whole_range(tiles)
    part = lambda factor: jax.tree.map(lambda end: end * factor, whole)
    factors = jnp.arange(int(candidates), 0, -1, dtype=tiles.values.dtype) / candidates

    def error(factor: jax.Array) -> jax.Array:
        scale, zero_point = range_to_scale(part(factor), tiles.format)
        scale = jnp.expand_dims(tiles.stored_worth(scale), tiles.axes)
        zero = 0 if zero_point is None else jnp.expand_dims(zero_point, tiles.axes)
        codes = tiles.format.encode(tiles.values / scale + zero)
        values = (tiles.format.decode(codes, scale.dtype) - zero) * scale
        if power == 2:
            return jnp.mean(jnp.square(values - tiles.values), axis=tiles.axes)
        # In units of the range, for powers of large numbers overflow.
        unit = jnp.expand_dims(
            usable(whole.high - (0 if whole.low is None else whole.low)), tiles.axes
        )
        return jnp.mean((jnp.abs(values - tiles.values) / unit) ** power, axis=tiles.axes)

    def step(best: tuple, factor: jax.Array) -> tuple[tuple, None]:
        at, least = best
        mine = error(factor)
        return (jnp.where(mine < least, factor, at), jnp.minimum(mine, least)), None

    ones = jnp.ones_like(whole.high)
    (factor, _), _ = jax.lax.scan(step, (ones, jnp.full_like(ones, jnp.inf)), factors)
    return part(factor)


def _whole_range(tiles: Tiles) -> Range:
    symmetric = tiles.format.signed or not tiles.format.is_integer
    return _absmax(tiles) if symmetric else _minmax(tiles)


_STEPS, _PENALTY, _GROWTH = 20, 10.0, 1.05


def _half_quadratic(tiles: Tiles, power: float = 0.7) -> Range:
    """Return the range with the smallest sum of `|error|**power`, for a power of at most 1.

    Half-quadratic quantization (HQQ; Badri and Shaji, 2023) tolerates a few large errors. It
    alternates two steps: shrink the error to find outliers, then fit the rest by least squares.
    The penalty on their difference grows. This version fits the scale as well as the zero point.
    It starts at the range of `_least_error`, and returns the best range of all steps.
    """
    format, whole = tiles.format, _least_error(tiles, power=power)
    start, zero = range_to_scale(whole, format)
    unit = usable(start)
    expand = lambda x: jnp.expand_dims(x, tiles.axes)
    total = lambda x: jnp.sum(x, axis=tiles.axes)

    def step(state: tuple, penalty: jax.Array) -> tuple[tuple, None]:
        factor, zero, best, least = state
        worth = expand(tiles.stored_worth(unit * factor))
        scaled = tiles.values / worth
        codes = format.decode(
            format.encode(scaled + (0 if zero is None else expand(zero))), worth.dtype
        )
        steps = codes if zero is None else codes - expand(zero)
        lost = scaled - steps
        error = total((jnp.abs(lost) * (worth / expand(unit))) ** power)
        better = error < least
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), (factor, zero), best)
        outliers = jnp.sign(lost) * jax.nn.relu(
            jnp.abs(lost) - jnp.abs(lost) ** (power - 1) / penalty
        )
        target = scaled - outliers
        if zero is not None:
            zero = jnp.clip(
                jnp.round(jnp.mean(codes - target, axis=tiles.axes)), *format.code_range
            )
            steps = codes - expand(zero)
        growth = total(steps * target) / total(jnp.square(steps))
        moved = jnp.where((growth > 0) & jnp.isfinite(growth), factor * growth, factor)
        return (moved, zero, best, jnp.minimum(error, least)), None

    ones = jnp.ones_like(unit)
    penalties = _PENALTY * _GROWTH ** jnp.arange(_STEPS, dtype=ones.dtype)
    state = (ones, zero, (ones, zero), jnp.full_like(ones, jnp.inf))
    (_, _, (factor, zero), _), _ = jax.lax.scan(step, state, penalties)
    if whole.low is None or zero is None:
        return Range(None, whole.high * factor)
    least, largest = format.code_range
    return Range((least - zero) * start * factor, (largest - zero) * start * factor)


def _positive(*numbers: float) -> bool:
    return all(number > 0 for number in numbers)


def _whole(*numbers: float) -> bool:
    return all(number >= 1 and number == int(number) for number in numbers)


def _whole_and_power(candidates: float, power: float = 2) -> bool:
    return _whole(candidates) and power > 0


def _below_one(power: float) -> bool:
    return 0 < power <= 1


def _around_zero(*ends: float) -> bool:
    return ends[0] <= 0 <= ends[1] != ends[0] if len(ends) == 2 else ends[0] > 0


def _in_order(*percents: float) -> bool:
    low = percents[0] if len(percents) == 2 else 0
    return 0 <= low < percents[-1] <= 100


@dataclasses.dataclass(frozen=True)
class _Method:
    """A row of the table.

    **Arguments:**

    - `find`: from tiles, and the numbers after the name, to their range.
    - `forms`: the ways to write it, for messages.
    - `counts`: how many numbers may be given.
    - `fits`: whether these numbers will do.
    """

    find: Callable[..., Range]
    forms: str
    counts: tuple[int, ...]
    fits: Callable[..., bool] = _positive


METHODS = {
    "absmax": _Method(_absmax, "absmax[,factor]", (0, 1)),
    "oas": _Method(_oas_range, "oas", (0,)),
    "minmax": _Method(_minmax, "minmax[,factor]", (0, 1)),
    "rms": _Method(_rms, "rms,factor", (1,)),
    "absmean": _Method(_absmean, "absmean", (0,)),
    "fixed": _Method(
        _fixed, "fixed,bound or fixed,low,high with 0 in between", (1, 2), _around_zero
    ),
    "percentile": _Method(
        _percentile, "percentile,p or percentile,low,high, up to 100", (1, 2), _in_order
    ),
    "mse": _Method(_least_error, "mse[,candidates[,power]]", (0, 1, 2), _whole_and_power),
    "hqq": _Method(_half_quadratic, "hqq[,power up to 1]", (0, 1), _below_one),
}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A method of `METHODS` and its numbers."""

    name: str
    numbers: tuple[float, ...]

    @property
    def symmetric(self) -> bool:
        """Whether its ranges reach as far below 0 as above."""
        if self.name in ("fixed", "percentile") and len(self.numbers) == 2:
            return self.name == "fixed" and sum(self.numbers) == 0
        return self.name != "minmax"

    @property
    def clips(self) -> bool:
        """Whether values beyond its range are meant to be cut off, as outliers."""
        if self.name in ("absmax", "minmax"):
            return any(factor < 1 for factor in self.numbers)
        return self.name not in ("absmean", "oas")  # a step's size, and half a step at most


def check_calibration(method: str, format: Format) -> Calibration:
    """Returns the method of this name, with its numbers, for a format.

    **Raises:** `ValueError` where there is no such method, its numbers do not fit, or the format
    cannot follow it.

    >>> import veneer as vn
    >>> from veneer.quant.conversion.calibration import check_calibration
    >>> check_calibration("fixed,-1,3", vn.quant.get_format("int8"))
    Calibration(name='fixed', numbers=(-1.0, 3.0))
    """
    name, *written = (part.strip() for part in method.lower().split(","))
    if name not in METHODS:
        known = "; ".join(row.forms for row in METHODS.values())
        raise ValueError(f"unknown calibration_method {method!r}; the methods are {known}")
    row = METHODS[name]
    try:
        numbers = tuple(map(float, written))
    except ValueError:
        numbers = (math.nan,)
    if (
        len(numbers) not in row.counts
        or not all(map(math.isfinite, numbers))
        or not (row.fits(*numbers) if numbers else True)
    ):
        raise ValueError(f"calibration_method {method!r} does not have the form {row.forms}")
    calibration = Calibration(name, numbers)
    if not calibration.symmetric and not has_zero_point(format):
        raise ValueError(
            f"{format.name} has no zero_point, which calibration_method {method!r} needs: use "
            "'absmax', or an integer format"
        )
    if name == "oas" and format.name not in _BIASED:
        raise ValueError(
            f"calibration_method 'oas' is for {', '.join(_BIASED)}, not for {format.name}: use "
            "'absmax'"
        )
    if name == "hqq" and format.scale_dtype == "float8_e8m0fnu":
        raise ValueError(
            f"calibration_method 'hqq' cannot choose scales that are powers of two, as in "
            f"{format.name}: use 'mse'"
        )
    return calibration


def has_zero_point(format: Format) -> bool:
    """Return whether a format supports a zero point: integer formats of at least 2 bits."""
    return format.is_integer and format.bits >= 2


def find_range(
    calibration: Calibration,
    values: jax.Array,
    axes: tuple[int, ...],
    format: Format,
    stored_worth: Callable[[jax.Array], jax.Array] = lambda scale: scale,
) -> Range:
    """Returns the range of each tile; NaN where a value in it is NaN or infinite.

    **Arguments:**

    - `values`: of at least f32, from which `axes`, those of a tile, are reduced.
    - `stored_worth`: from scales to what these are worth as they are stored, for "mse" and "hqq".
    """
    if 0 in [values.shape[axis] for axis in axes]:
        shape = [n for axis, n in enumerate(values.shape) if axis not in axes]
        nothing = jnp.zeros(shape, values.dtype)
        return Range(None if calibration.symmetric else nothing, nothing)
    tiles = Tiles(values, axes, format, stored_worth)
    ends = METHODS[calibration.name].find(tiles, *calibration.numbers)
    finite = jnp.isfinite(_largest(tiles))
    return jax.tree.map(lambda end: jnp.where(finite, end, jnp.nan), ends)


def range_to_scale(ends: Range, format: Format) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale, and the zero point as a whole number, of codes that cover a range."""
    low, high = ends
    scale, zero_point = high / format.bound, None
    least, largest = format.code_range if format.is_integer else (0, 0)
    if low is not None:
        scale = (high - low) / (largest - least)
        zero_point = jnp.clip(jnp.round(least - low / usable(scale)), least, largest)
    elif format.is_integer and not format.signed:
        middle = 2 ** (int(format.bits) - 1)
        scale = high / (middle - 0.5)
        zero_point = jnp.full(scale.shape, middle, scale.dtype)
    return scale, zero_point


def stable_scale(
    calibration: Calibration,
    values: jax.Array,
    axes: tuple[int, ...],
    format: Format,
    stored_worth: Callable[[jax.Array], jax.Array],
    scale_dtype: str,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array | None]:
    """Return scales and zero points that quantizing the dequantized values gives again.

    Dequantizing and quantizing again must not change values. Two properties ensure this:

    - The value at an end of the range gets the last code.
    - For f32 values, a scale has 8 bits fewer than f32. Its product with a code is then exact.

    If `dtype` has 16 bits, dequantized values are rounded once more. With a zero point, both ends
    of the range are rounded, so the scale has one bit fewer than `dtype`. This is not always enough
    if codes have more bits than the mantissa of `dtype`, if the ends of a codebook have different
    magnitudes, or if the scale is subnormal in f16.

    **Arguments:**

    - `calibration`: "absmax", "minmax" or "absmean".
    - `values`, `axes`, `format`, `stored_worth`: as for `find_range`.
    - `scale_dtype`: the dtype of stored scales.
    - `dtype`: the dtype of the dequantized values.
    """
    tiles = Tiles(values, axes, format, stored_worth)
    finite = jnp.isfinite(_largest(tiles))
    info = jnp.finfo(values.dtype)
    nmant = info.nmant - 8
    if not calibration.symmetric and format.bits <= jnp.finfo(dtype).nmant:
        nmant = min(nmant, jnp.finfo(dtype).nmant - 1)

    def rounded(scale: jax.Array) -> jax.Array:
        few_bits = jax.lax.reduce_precision(scale, info.nexp, nmant)
        is_usable = (scale >= info.tiny) & (scale <= 1 / info.tiny)
        return jnp.where(finite, jnp.where(is_usable, few_bits, scale), jnp.nan)

    if calibration.name == "absmean":
        return rounded(_mean_of_kept(tiles)), None
    if calibration.symmetric:
        least, largest = format.ends
        as_positive = jnp.where(values < 0, values * (largest / least), values)
        scale = _largest(dataclasses.replace(tiles, values=as_positive)) / largest
        return rounded(scale), None
    low = jnp.min(values, axis=axes, initial=0)
    high = jnp.max(values, axis=axes, initial=0)
    least, largest = format.code_range
    steps = largest - least

    def place(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the number of codes below zero, and how far the ends are from the last codes."""
        below, above = -low / scale, high / scale
        too_many = jnp.where(below + above < steps / 4, 0, steps - below - above) / 2
        middle = below + too_many
        zero = jnp.clip(jnp.round(middle), 0, steps)
        return zero, jnp.abs(zero - middle) + too_many

    scale = stored_worth(rounded((high - low) / steps))
    # An end of the range may lie halfway between two codes. A smaller scale moves it past the last.
    factor = 1.0
    if scale_dtype != "float8_e8m0fnu":
        factor -= 0.7 * max(float(jnp.finfo(scale_dtype).eps), 2.0**-nmant)
    is_halfway = place(scale)[1] > 0.5 - 2.0**-6
    scale = jnp.where(is_halfway, stored_worth(rounded(scale * factor)), scale)
    return scale, place(scale)[0] + least


def _mean_of_kept(tiles: Tiles) -> jax.Array:
    """Return the mean of the magnitudes that keep a nonzero code; exact if they are all equal."""
    magnitudes, largest = jnp.abs(tiles.values), _largest(tiles)
    mean = jnp.mean(magnitudes, axis=tiles.axes, keepdims=True)
    kept = magnitudes > mean / 2 if tiles.format.has_zero else jnp.full_like(magnitudes, True)
    less = jnp.where(kept, jnp.expand_dims(largest, tiles.axes) - magnitudes, 0)
    return largest - less.sum(tiles.axes) / jnp.maximum(kept.sum(tiles.axes), 1)
