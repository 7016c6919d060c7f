"""Calibration methods, which choose the range of values that the codes of a tile cover.

Users write a method as `"<name>[,<number>...]"`: "absmax", "rms,7", "fixed,-1,3".
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..formats import Format
from ..formats.tiles import Shape, split_tiles


class Range(NamedTuple):
    """The smallest and the largest value that codes cover, as arrays with one entry per tile.

    If `low` is None, ranges are symmetric, from `-high` to `high`, and need no zero point.
    """

    low: jax.Array | None
    high: jax.Array


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An array in f32 or f64, split into tiles, and the format in which to quantize it.

    **Arguments:**

    - `values`: the array with each axis split in two: the tiles, and the values within a tile.
    - `format`: the format.
    - `round_scale`: a function that rounds scales to the values that they will have when stored.
    """

    values: jax.Array
    format: Format
    round_scale: Callable[[jax.Array], jax.Array]

    @property
    def scale_shape(self) -> Shape:
        """The number of tiles along each axis of the array."""
        return self.values.shape[::2]

    @property
    def inner_axes(self) -> tuple[int, ...]:
        """The axes of `values` within a tile. Reducing them leaves one entry per tile."""
        return tuple(range(1, self.values.ndim, 2))

    def expand(self, x: jax.Array) -> jax.Array:
        """Reshape an array with one entry per tile so that it broadcasts to `values`."""
        return jnp.expand_dims(x, self.inner_axes)

    def largest_magnitude(self) -> jax.Array:
        """Return the largest magnitude of each tile, or NaN if the tile contains NaN.

        XLA's maximum drops NaN on CPU, in arrays of some size. So compare the bits of magnitudes as
        integers instead. They have the same order, and NaN has the largest bits.
        """
        dtype = self.values.dtype
        bits = jnp.dtype(f"int{8 * dtype.itemsize}")
        magnitudes = jax.lax.bitcast_convert_type(jnp.abs(self.values), bits)
        largest = jnp.max(magnitudes, axis=self.inner_axes, initial=0)
        return jax.lax.bitcast_convert_type(largest, dtype)

    def limits(self) -> tuple[jax.Array, jax.Array]:
        """Return `(low, high)` per tile: the smallest range with 0 and all values of the tile."""
        low = jnp.min(self.values, axis=self.inner_axes, initial=0)
        return low, jnp.max(self.values, axis=self.inner_axes, initial=0)


def split_into_tiles(
    array: jax.Array,
    scale_shape: Shape,
    format: Format,
    round_scale: Callable[[jax.Array], jax.Array] = lambda scale: scale,
) -> Tiles:
    """Split an array into one tile per entry of the scale. The tiles have no derivative.

    `round_scale` is a field of `Tiles`. By default, scales are not rounded.
    """
    wide = jax.lax.stop_gradient(array).astype(jnp.promote_types(array.dtype, jnp.float32))
    return Tiles(split_tiles(wide, scale_shape), format, round_scale)


def as_divisor(scale: jax.Array) -> jax.Array:
    """Return scales by which values can be divided: 1 for too small scales, NaN for too large ones.

    XLA may multiply by `1 / scale` instead, so `1 / scale` must be a normal number, too.
    """
    tiny = jnp.finfo(scale.dtype).tiny
    return jnp.where(scale < tiny, 1, jnp.where(scale <= 1 / tiny, scale, jnp.nan))


def range_to_scale(ranges: Range, format: Format) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point with which the codes of a format cover a range.

    The zero point has the dtype of the scale. It is None if the range is symmetric, except in
    unsigned integer formats.
    """
    low, high = ranges
    scale, zero_point = high / format.bound, None
    if low is not None:
        least, largest = format.code_range
        scale = (high - low) / (largest - least)
        zero_point = jnp.clip(jnp.round(least - low / as_divisor(scale)), least, largest)
    elif format.is_integer and not format.signed:
        # As in the signed format of the same width, but with codes that are shifted by `middle`.
        middle = 2 ** (int(format.bits) - 1)
        scale = high / (middle - 0.5)
        zero_point = jnp.full(scale.shape, middle, scale.dtype)
    return scale, zero_point


class _Method(NamedTuple):
    """A calibration method.

    - `find_range`: a function `(tiles, *numbers) -> Range`. In "rms,7", 7 is the only number.
    - `syntax`: how users write the method, for error messages.
    - `number_counts`: how many numbers can follow the name.
    - `is_valid`: a function `(*numbers) -> bool` that checks the numbers, if there are any.
    """

    find_range: Callable[..., Range]
    syntax: str
    number_counts: tuple[int, ...]
    is_valid: Callable[..., bool]


#: From the name of a calibration method, such as "absmax", to the method.
METHODS: dict[str, _Method] = {}


def _method(
    name: str,
    numbers: str,
    number_counts: tuple[int, ...],
    is_valid: Callable[..., bool] = lambda *numbers: min(numbers) > 0,
) -> Callable[[Callable[..., Range]], Callable[..., Range]]:
    """Return a decorator that adds a calibration method to `METHODS`.

    The decorated function becomes the `find_range` of the method. `numbers` is the syntax after the
    name in error messages, such as ",factor". The other arguments are as in `_Method`.
    """

    def add(find_range: Callable[..., Range]) -> Callable[..., Range]:
        METHODS[name] = _Method(find_range, name + numbers, number_counts, is_valid)
        return find_range

    return add


@_method("absmax", "[,factor]", (0, 1))
def _find_absmax_range(tiles: Tiles, factor: float = 1.0) -> Range:
    return Range(None, tiles.largest_magnitude() * factor)


@_method("minmax", "[,factor]", (0, 1))
def _find_minmax_range(tiles: Tiles, factor: float = 1.0) -> Range:
    low, high = tiles.limits()
    return Range(low * factor, high * factor)


# The bias of OAS by format. It is the value whose mantissa bits are all set, divided by the value
# half a step beyond: 6 / 7 in float4_e2m1fn, 480 / 496 in float8_e4m3fn.
_OAS_BIAS = {"mxfp8": 30 / 31, "mxfp8_16": 30 / 31, "mxfp4": 6 / 7}


@_method("oas", "", (0,))
def _find_oas_range(tiles: Tiles) -> Range:
    """Return ranges that may clip the largest value of a tile, by at most half a step.

    Outlier Aware Scaling (OAS, arXiv 2603.08713) multiplies the scale by a bias below 1, and then
    rounds it up to a power of two. Qwix also rounds the biased scale to bfloat16. So it treats a
    scale just below a power of two, by a relative 2**-9 at most, like that power. Dividing the bias
    by 1 - 2**-9 has the same effect.
    """
    return _find_absmax_range(tiles, _OAS_BIAS[tiles.format.name] / (1 - 2.0**-9))


@_method("rms", ",factor", (1,))
def _find_rms_range(tiles: Tiles, factor: float) -> Range:
    # Divide by the largest magnitude, so that squares neither overflow nor vanish.
    largest = as_divisor(tiles.largest_magnitude())
    squares = jnp.square(tiles.values / tiles.expand(largest))
    return Range(None, largest * jnp.sqrt(jnp.mean(squares, axis=tiles.inner_axes)) * factor)


@_method("absmean", "", (0,))
def _find_absmean_range(tiles: Tiles) -> Range:
    # With this range, the scale, which is the value of code 1, is the mean magnitude.
    mean = jnp.mean(jnp.abs(tiles.values), axis=tiles.inner_axes)
    return Range(None, mean * tiles.format.bound)


@_method(
    "fixed",
    ",bound or fixed,low,high with 0 in between",
    (1, 2),
    lambda low, high=None: low > 0 if high is None else low <= 0 <= high != low,
)
def _find_fixed_range(tiles: Tiles, *ends: float) -> Range:
    low, high = ends if len(ends) == 2 else (-ends[0], ends[0])
    fill = lambda end: jnp.full(tiles.scale_shape, end, tiles.values.dtype)
    return Range(None if low == -high else fill(low), fill(high))


@_method(
    "percentile",
    ",p or percentile,low,high, up to 100",
    (1, 2),
    lambda low, high=None: 0 < low <= 100 if high is None else 0 <= low < high <= 100,
)
def _find_percentile_range(tiles: Tiles, *percents: float) -> Range:
    percentile = lambda x, percent: jnp.percentile(x, percent, axis=tiles.inner_axes)
    if len(percents) == 1:
        return Range(None, percentile(jnp.abs(tiles.values), percents[0]))
    low, high = (percentile(tiles.values, percent) for percent in percents)
    return Range(jnp.minimum(low, 0), jnp.maximum(high, 0))


@_method(
    "mse",
    "[,candidates[,power]]",
    (0, 1, 2),
    lambda candidates, power=2: candidates >= 1 and candidates % 1 == 0 and power > 0,
)
def _find_mse_range(tiles: Tiles, candidates: float = 40, power: float = 2) -> Range:
    """Return the range of each tile, shrunk by the factor with the smallest quantization error.

    The factors are 1/candidates, 2/candidates, ..., 1. The error is the mean of `|error|**power`.
    A power above 2 preserves the largest values better (GPTQ's own code uses 2.4).
    """
    format = tiles.format
    is_symmetric = format.signed or not format.is_integer
    full_range = _find_absmax_range(tiles) if is_symmetric else _find_minmax_range(tiles)
    shrink = lambda factor: jax.tree.map(lambda end: end * factor, full_range)
    factors = jnp.arange(int(candidates), 0, -1, dtype=tiles.values.dtype) / candidates

    def mean_error(factor: jax.Array) -> jax.Array:
        """Return the mean error of each tile if its range is `factor` times the full range."""
        scale, zero_point = range_to_scale(shrink(factor), format)
        scale = tiles.expand(tiles.round_scale(scale))
        zero = 0 if zero_point is None else tiles.expand(zero_point)
        codes = format.encode(tiles.values / scale + zero)
        errors = (format.decode(codes, scale.dtype) - zero) * scale - tiles.values
        if power == 2:
            return jnp.mean(jnp.square(errors), axis=tiles.inner_axes)
        # Divide errors by the size of the range, because powers of large numbers overflow.
        low, high = full_range
        size = tiles.expand(as_divisor(high - (0 if low is None else low)))
        return jnp.mean((jnp.abs(errors) / size) ** power, axis=tiles.inner_axes)

    def try_factor(best: tuple, factor: jax.Array) -> tuple[tuple, None]:
        best_factor, least_error = best
        error = mean_error(factor)
        best_factor = jnp.where(error < least_error, factor, best_factor)
        return (best_factor, jnp.minimum(error, least_error)), None

    ones = jnp.ones_like(full_range.high)
    start = (ones, jnp.full_like(ones, jnp.inf))
    (best_factor, _), _ = jax.lax.scan(try_factor, start, factors)
    return shrink(best_factor)


@_method("hqq", "[,power up to 1]", (0, 1), lambda power: 0 < power <= 1)
def _find_hqq_range(tiles: Tiles, power: float = 0.7) -> Range:
    """Return the range with the smallest sum of `|error|**power`, for a power of at most 1.

    Half-quadratic quantization (HQQ; Badri and Shaji, 2023) tolerates a few large errors. Each step
    quantizes the values, shrinks the errors so that small errors become 0, and subtracts the rest
    from the values. It fits the zero point, and in this version also the scale, to the difference
    by least squares. A penalty grows with each step, and shrinks the errors less. The search starts
    at the range of `_find_mse_range`, and the result is the best range of all steps.
    """
    format, start = tiles.format, _find_mse_range(tiles, power=power)
    start_scale, start_zero = range_to_scale(start, format)
    unit = as_divisor(start_scale)
    sum_tiles = lambda x: jnp.sum(x, axis=tiles.inner_axes)

    def step(state: tuple, penalty: jax.Array) -> tuple[tuple, None]:
        factor, zero, best, least_loss = state
        # Quantize with the scale `unit * factor`. Values and errors are in units of the scale.
        scale = tiles.expand(tiles.round_scale(unit * factor))
        scaled = tiles.values / scale
        shift = 0 if zero is None else tiles.expand(zero)
        codes = format.decode(format.encode(scaled + shift), scale.dtype)
        quantized = codes if zero is None else codes - shift
        error = scaled - quantized
        # Keep the factor and the zero point if the loss is the smallest so far.
        loss = sum_tiles((jnp.abs(error) * (scale / tiles.expand(unit))) ** power)
        is_better = loss < least_loss
        best = jax.tree.map(lambda new, old: jnp.where(is_better, new, old), (factor, zero), best)
        # Subtract the shrunk errors, and fit the zero point and the scale to the result.
        shrunk = jax.nn.relu(jnp.abs(error) - jnp.abs(error) ** (power - 1) / penalty)
        target = scaled - jnp.sign(error) * shrunk
        if zero is not None:
            zero = jnp.round(jnp.mean(codes - target, axis=tiles.inner_axes))
            zero = jnp.clip(zero, *format.code_range)
            quantized = codes - tiles.expand(zero)
        change = sum_tiles(quantized * target) / sum_tiles(jnp.square(quantized))
        factor = jnp.where((change > 0) & jnp.isfinite(change), factor * change, factor)
        return (factor, zero, best, jnp.minimum(loss, least_loss)), None

    ones = jnp.ones_like(unit)
    penalties = 10.0 * 1.05 ** jnp.arange(20, dtype=ones.dtype)
    state = (ones, start_zero, (ones, start_zero), jnp.full_like(ones, jnp.inf))
    (_, _, (factor, zero), _), _ = jax.lax.scan(step, state, penalties)
    if zero is None:
        return Range(None, start.high * factor)
    low, high = ((code - zero) * start_scale * factor for code in format.code_range)
    return Range(low, high)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A parsed calibration method: a key of `METHODS`, and the numbers after the name."""

    name: str
    numbers: tuple[float, ...]

    @property
    def symmetric(self) -> bool:
        """True if the ranges of this method are from -x to x, so that they need no zero point.

        "mse" and "hqq" also work without zero points, so they are symmetric here. But in unsigned
        integer formats they choose ranges with a zero point.
        """
        if self.name in ("fixed", "percentile") and len(self.numbers) == 2:
            return self.name == "fixed" and sum(self.numbers) == 0  # such as "fixed,-3,3"
        return self.name != "minmax"

    @property
    def clips(self) -> bool:
        """True if the method chooses ranges that exclude outliers, which are then clipped."""
        if self.name in ("absmax", "minmax"):
            return any(factor < 1 for factor in self.numbers)
        # The range of "absmean" only sets the scale, and "oas" clips by half a step at most.
        return self.name not in ("absmean", "oas")


def check_calibration(method: str, format: Format) -> Calibration:
    """Parse the `calibration_method` that a user passes to `quantize`.

    **Raises:** `ValueError` if the method is unknown, if the numbers after the name are invalid, or
    if the format does not support the method.
    """
    name, *number_texts = (part.strip() for part in method.lower().split(","))
    if name not in METHODS:
        known = "; ".join(row.syntax for row in METHODS.values())
        raise ValueError(f"unknown calibration_method {method!r}; the methods are {known}")
    row = METHODS[name]
    try:
        numbers = tuple(map(float, number_texts))
    except ValueError:
        numbers = (math.nan,)  # rejected below
    if (
        len(numbers) not in row.number_counts
        or not all(map(math.isfinite, numbers))
        or (numbers and not row.is_valid(*numbers))
    ):
        raise ValueError(f"calibration_method {method!r} does not have the form {row.syntax}")
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
    """Return the range that a calibration method chooses for each tile.

    Tiles with NaN or infinity get the range NaN.
    """
    if 0 in [tiles.values.shape[axis] for axis in tiles.inner_axes]:  # Tiles have no values.
        zeros = jnp.zeros(tiles.scale_shape, tiles.values.dtype)
        return Range(None if calibration.symmetric else zeros, zeros)
    ranges = METHODS[calibration.name].find_range(tiles, *calibration.numbers)
    is_finite = jnp.isfinite(tiles.largest_magnitude())
    return jax.tree.map(lambda end: jnp.where(is_finite, end, jnp.nan), ranges)
