"""Calibration methods: from the values of a tile to the range that its codes cover.

Users write a method as `"<name>[,<number>...]"`: "absmax", "rms,7", "fixed,-1,3".
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..formats import Format
from ..formats.tiles import Shape, split_tiles


class Range(NamedTuple):
    """The range that codes cover, per tile: from `low` to `high`.

    If `low` is None, the range is symmetric, from `-high`, and needs no zero point.
    """

    low: jax.Array | None
    high: jax.Array


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The values of an array in f32 or f64, split into tiles, and the format to quantize them in.

    **Arguments:**

    - `values`: `[..., count, tile, ...]`, two axes per axis of the array.
    - `round_scale`: a function that rounds scales as storing them does, for "mse" and "hqq".
    """

    values: jax.Array
    format: Format
    round_scale: Callable[[jax.Array], jax.Array] = lambda scale: scale

    @classmethod
    def split(cls, array: jax.Array, counts: Shape, *args: Any) -> "Tiles":
        """Split an array into tiles, without a derivative. `args` are the other fields."""
        wide = jax.lax.stop_gradient(array).astype(jnp.promote_types(array.dtype, jnp.float32))
        return cls(split_tiles(wide, counts), *args)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of `values` that run within a tile."""
        return tuple(range(1, self.values.ndim, 2))

    def expand(self, x: jax.Array) -> jax.Array:
        """Return an array with one entry per tile in a shape that broadcasts to `values`."""
        return jnp.expand_dims(x, self.axes)

    def largest_magnitude(self) -> jax.Array:
        """Return the largest magnitude of each tile, or NaN if the tile contains NaN.

        XLA's maximum drops NaN on CPU, in arrays of some size. The bits of magnitudes, compared as
        integers, have the same order, and NaN has the largest bits.
        """
        dtype = self.values.dtype
        bits = jnp.dtype(f"int{8 * dtype.itemsize}")
        magnitudes = jax.lax.bitcast_convert_type(jnp.abs(self.values), bits)
        largest = jnp.max(magnitudes, axis=self.axes, initial=0)
        return jax.lax.bitcast_convert_type(largest, dtype)

    def limits(self) -> tuple[jax.Array, jax.Array]:
        """Return the smallest and the largest value of each tile, or 0 if 0 is beyond them."""
        low = jnp.min(self.values, axis=self.axes, initial=0)
        return low, jnp.max(self.values, axis=self.axes, initial=0)


def as_divisor(scale: jax.Array) -> jax.Array:
    """Return a scale to divide by: 1 if it is too small, and NaN if it is too large.

    XLA divides by multiplying with the reciprocal, so that must be a normal number, too.
    """
    tiny = jnp.finfo(scale.dtype).tiny
    return jnp.where(scale < tiny, 1, jnp.where(scale <= 1 / tiny, scale, jnp.nan))


def range_to_scale(ends: Range, format: Format) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale, and the zero point in the same float dtype, to cover a range with codes."""
    low, high = ends
    scale, zero_point = high / format.bound, None
    if low is not None:
        least, largest = format.code_range
        scale = (high - low) / (largest - least)
        zero_point = jnp.clip(jnp.round(least - low / as_divisor(scale)), least, largest)
    elif format.is_integer and not format.signed:
        middle = 2 ** (int(format.bits) - 1)
        scale = high / (middle - 0.5)
        zero_point = jnp.full(scale.shape, middle, scale.dtype)
    return scale, zero_point


class _Method(NamedTuple):
    find: Callable[..., Range]
    forms: str
    counts: tuple[int, ...]
    is_valid: Callable[..., bool]


METHODS: dict[str, _Method] = {}


def _method(
    name: str,
    forms: str,
    counts: tuple[int, ...],
    is_valid: Callable[..., bool] = lambda *numbers: min(numbers) > 0,
) -> Callable:
    """Register a function from tiles, and the numbers after the name of a method, to a `Range`.

    **Arguments:**

    - `forms`: how users write the method, for messages.
    - `counts`: the allowed counts of numbers.
    - `is_valid`: a function that checks the numbers, if there are any.
    """

    def register(find: Callable[..., Range]) -> Callable[..., Range]:
        METHODS[name] = _Method(find, forms, counts, is_valid)
        return find

    return register


@_method("absmax", "absmax[,factor]", (0, 1))
def _absmax(tiles: Tiles, factor: float = 1.0) -> Range:
    return Range(None, tiles.largest_magnitude() * factor)


@_method("minmax", "minmax[,factor]", (0, 1))
def _minmax(tiles: Tiles, factor: float = 1.0) -> Range:
    low, high = tiles.limits()
    return Range(low * factor, high * factor)


# The value whose mantissa bits are all set, divided by the value half a step beyond it: 6 / 7 in
# float4_e2m1fn, 480 / 496 in float8_e4m3fn.
_OAS_BIAS = {"mxfp8": 30 / 31, "mxfp8_16": 30 / 31, "mxfp4": 6 / 7}


@_method("oas", "oas", (0,))
def _oas_range(tiles: Tiles) -> Range:
    """Return the range whose power of two clips the largest value by at most half a step.

    Outlier Aware Scaling (OAS, arXiv 2603.08713) adds a bias to the logarithm of the scale. Qwix
    first rounds the biased scale to bfloat16. A scale less than a relative 2**-9 below a power of
    two becomes that power.
    """
    return _absmax(tiles, _OAS_BIAS[tiles.format.name] / (1 - 2.0**-9))


@_method("rms", "rms,factor", (1,))
def _rms(tiles: Tiles, factor: float) -> Range:
    # Values are divided by the largest one, so that their squares neither overflow nor vanish.
    unit = as_divisor(tiles.largest_magnitude())
    squares = jnp.square(tiles.values / tiles.expand(unit))
    return Range(None, unit * jnp.sqrt(jnp.mean(squares, axis=tiles.axes)) * factor)


@_method("absmean", "absmean", (0,))
def _absmean(tiles: Tiles) -> Range:
    # The scale, which is the value of code 1, becomes the mean magnitude.
    return Range(None, jnp.mean(jnp.abs(tiles.values), axis=tiles.axes) * tiles.format.bound)


@_method(
    "fixed",
    "fixed,bound or fixed,low,high with 0 in between",
    (1, 2),
    lambda low, high=None: low > 0 if high is None else low <= 0 <= high != low,
)
def _fixed(tiles: Tiles, *ends: float) -> Range:
    low, high = ends if len(ends) == 2 else (-ends[0], ends[0])
    shape = tiles.values.shape[::2]
    filled = [jnp.full(shape, end, tiles.values.dtype) for end in (low, high)]
    return Range(None if low == -high else filled[0], filled[1])


@_method(
    "percentile",
    "percentile,p or percentile,low,high, up to 100",
    (1, 2),
    lambda *percents: percents[0] >= 0 and [0, *percents][-2] < percents[-1] <= 100,
)
def _percentile(tiles: Tiles, *percents: float) -> Range:
    if len(percents) == 1:
        return Range(None, jnp.percentile(jnp.abs(tiles.values), percents[0], axis=tiles.axes))
    low, high = (jnp.percentile(tiles.values, percent, axis=tiles.axes) for percent in percents)
    return Range(jnp.minimum(low, 0), jnp.maximum(high, 0))


@_method(
    "mse",
    "mse[,candidates[,power]]",
    (0, 1, 2),
    lambda candidates, power=2: candidates >= 1 and candidates % 1 == 0 and power > 0,
)
def _least_error(tiles: Tiles, candidates: float = 40, power: float = 2) -> Range:
    """Return the fraction of the full range with the smallest quantization error.

    The fractions are 1/candidates, 2/candidates, ..., 1. The error is the mean of `|error|**power`.
    A power above 2 preserves the largest values better (GPTQ's own code uses 2.4).
    """
    format = tiles.format
    is_symmetric = format.signed or not format.is_integer
    full = _absmax(tiles) if is_symmetric else _minmax(tiles)
    shrink = lambda factor: jax.tree.map(lambda end: end * factor, full)
    factors = jnp.arange(int(candidates), 0, -1, dtype=tiles.values.dtype) / candidates

    def mean_error(factor: jax.Array) -> jax.Array:
        scale, zero_point = range_to_scale(shrink(factor), format)
        scale = tiles.expand(tiles.round_scale(scale))
        zero = 0 if zero_point is None else tiles.expand(zero_point)
        codes = format.encode(tiles.values / scale + zero)
        values = (format.decode(codes, scale.dtype) - zero) * scale
        if power == 2:
            return jnp.mean(jnp.square(values - tiles.values), axis=tiles.axes)
        # Errors are divided by the size of the range, because powers of large numbers overflow.
        unit = tiles.expand(as_divisor(full.high - (0 if full.low is None else full.low)))
        return jnp.mean((jnp.abs(values - tiles.values) / unit) ** power, axis=tiles.axes)

    def step(best: tuple, factor: jax.Array) -> tuple[tuple, None]:
        best_factor, least = best
        error = mean_error(factor)
        return (jnp.where(error < least, factor, best_factor), jnp.minimum(error, least)), None

    ones = jnp.ones_like(full.high)
    (factor, _), _ = jax.lax.scan(step, (ones, jnp.full_like(ones, jnp.inf)), factors)
    return shrink(factor)


@_method("hqq", "hqq[,power up to 1]", (0, 1), lambda power: 0 < power <= 1)
def _half_quadratic(tiles: Tiles, power: float = 0.7) -> Range:
    """Return the range with the smallest sum of `|error|**power`, for a power of at most 1.

    Half-quadratic quantization (HQQ; Badri and Shaji, 2023) tolerates a few large errors. It
    alternates two steps: shrink the error to find outliers, then fit the rest by least squares.
    The penalty on their difference grows. This version fits the scale as well as the zero point.
    It starts at the range of `_least_error`, and returns the best range of all steps.
    """
    format, start = tiles.format, _least_error(tiles, power=power)
    start_scale, zero = range_to_scale(start, format)
    unit = as_divisor(start_scale)
    total = lambda x: jnp.sum(x, axis=tiles.axes)

    def step(state: tuple, penalty: jax.Array) -> tuple[tuple, None]:
        factor, zero, best, least = state
        scale = tiles.expand(tiles.round_scale(unit * factor))
        scaled = tiles.values / scale
        shift = 0 if zero is None else tiles.expand(zero)
        codes = format.decode(format.encode(scaled + shift), scale.dtype)
        steps = codes if zero is None else codes - shift
        error = scaled - steps
        loss = total((jnp.abs(error) * (scale / tiles.expand(unit))) ** power)
        is_better = loss < least
        best = jax.tree.map(lambda new, old: jnp.where(is_better, new, old), (factor, zero), best)
        shrunk = jnp.abs(error) - jnp.abs(error) ** (power - 1) / penalty
        target = scaled - jnp.sign(error) * jax.nn.relu(shrunk)  # without the outliers
        if zero is not None:
            zero = jnp.round(jnp.mean(codes - target, axis=tiles.axes))
            zero = jnp.clip(zero, *format.code_range)
            steps = codes - tiles.expand(zero)
        growth = total(steps * target) / total(jnp.square(steps))
        new_factor = jnp.where((growth > 0) & jnp.isfinite(growth), factor * growth, factor)
        return (new_factor, zero, best, jnp.minimum(loss, least)), None

    ones = jnp.ones_like(unit)
    penalties = 10.0 * 1.05 ** jnp.arange(20, dtype=ones.dtype)
    state = (ones, zero, (ones, zero), jnp.full_like(ones, jnp.inf))
    (_, _, (factor, zero), _), _ = jax.lax.scan(step, state, penalties)
    if start.low is None or zero is None:
        return Range(None, start.high * factor)
    ends = [(code - zero) * start_scale * factor for code in format.code_range]
    return Range(*ends)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A method of `METHODS` and its numbers."""

    name: str
    numbers: tuple[float, ...]

    @property
    def symmetric(self) -> bool:
        """True if all ranges of the method are symmetric around 0."""
        if self.name in ("fixed", "percentile") and len(self.numbers) == 2:
            return self.name == "fixed" and sum(self.numbers) == 0
        return self.name != "minmax"

    @property
    def clips(self) -> bool:
        """True if the method clips outliers, the values beyond its range, on purpose."""
        if self.name in ("absmax", "minmax"):
            return any(factor < 1 for factor in self.numbers)
        # "absmean" chooses the scale of code 1, and "oas" clips by half a step at most.
        return self.name not in ("absmean", "oas")


def check_calibration(method: str, format: Format) -> Calibration:
    """Parse a `calibration_method` for a format.

    **Raises:** `ValueError` if the method is unknown, its numbers are invalid, or the format does
    not support it.
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
        or (numbers and not row.is_valid(*numbers))
    ):
        raise ValueError(f"calibration_method {method!r} does not have the form {row.forms}")
    calibration = Calibration(name, numbers)
    if not calibration.symmetric and not format.has_zero_point:
        raise ValueError(
            f"{format.name} has no zero_point, which calibration_method {method!r} needs: use "
            "'absmax', or an integer format"
        )
    if name == "oas" and format.name not in _OAS_BIAS:
        raise ValueError(
            f"calibration_method 'oas' is for {', '.join(_OAS_BIAS)}, not for {format.name}: use "
            "'absmax'"
        )
    if name == "hqq" and format.scale_dtype == "float8_e8m0fnu":
        raise ValueError(
            f"calibration_method 'hqq' cannot choose scales that are powers of two, as in "
            f"{format.name}: use 'mse'"
        )
    return calibration


def find_range(calibration: Calibration, tiles: Tiles) -> Range:
    """Return the range of each tile. It is NaN if the tile contains NaN or infinity."""
    if 0 in [tiles.values.shape[axis] for axis in tiles.axes]:
        zeros = jnp.zeros(tiles.values.shape[::2], tiles.values.dtype)
        return Range(None if calibration.symmetric else zeros, zeros)
    ends = METHODS[calibration.name].find(tiles, *calibration.numbers)
    is_finite = jnp.isfinite(tiles.largest_magnitude())
    return jax.tree.map(lambda end: jnp.where(is_finite, end, jnp.nan), ends)
