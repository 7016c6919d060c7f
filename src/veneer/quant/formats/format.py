"""`Format`: encoding values as codes of few bits, and decoding them.

A value is divided by the scale of its tile, a group of neighboring values, and stored as a code.
Before the zero point and the scale are applied again, a code represents

- itself, in integer formats and in 8-bit float formats;
- `codebook[code]`, in all other formats.

`Format.encode` rounds to the nearest value. `encode_stochastically` picks the next value below or
above at random. The nearer value has the higher probability, so that the expected result is the
exact value. Values that the format represents exactly do not change, and values beyond its range
are clipped.
"""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format, which encodes values, divided by a scale, as codes of few bits.

    `vn.quant.FORMATS` maps names to formats. `vn.quant.get_format` also accepts aliases.

    **Arguments:**

    - `name`: the name, such as "nf4", which other functions take as `qtype`.
    - `bits`: the number of bits per stored code. Ternary has 1.6 bits, because a byte stores five
      codes.
    - `code_dtype`: the dtype of `QArray.qvalue`, the unpacked codes.
    - `bound`: the divisor in the scale of a tile: `absmax / bound`, where `absmax` is the largest
      magnitude of the tile. In uint2 to uint8, the scale is `(max - min) / bound`.
    - `codebook`: the value of each code, or None if each code represents itself.
    - `source`: the specification, paper or library that defines the format.
    - `tile_size`: the only tile size that the format allows. None allows any size.
    - `scale_dtype`: the dtype of the scales, or the format of quantized scales. None allows any
      float dtype. Scales in float8_e8m0fnu are powers of two.
    - `scale_tile`: the number of quantized scales that share one f32 scale. With 0, all scales of a
      matrix share one f32 scale. With None, scales are not quantized.
    - `calibration`: the default `calibration_method` of `vn.quant.quantize`.

    >>> import veneer as vn
    >>> nf4 = vn.quant.FORMATS["nf4"]
    >>> nf4.bits, nf4.code_dtype.name, nf4.storage_dtype.name, nf4.codebook[::5]
    (4, 'uint4', 'uint8', (-1.0, -0.18477343022823334, 0.24611230194568634, 1.0))
    """

    name: str
    bits: int | float
    code_dtype: np.dtype
    bound: float
    codebook: tuple[float, ...] | None
    source: str
    _: dataclasses.KW_ONLY
    tile_size: int | None = None
    scale_dtype: str | None = None
    scale_tile: int | None = None
    calibration: str = "absmax"

    @property
    def storage_dtype(self) -> np.dtype:
        """The dtype of stored codes: uint8 for codes of fewer than 8 bits, else `code_dtype`."""
        return np.dtype(np.uint8) if self.bits < 8 else self.code_dtype

    @property
    def byte_dtype(self) -> np.dtype:
        """The integer dtype, of 8 bits or more, in which codes and zero points are computed.

        For example, int8 for int4, and uint8 for uint4 and nf4.
        """
        return np.dtype(f"{'' if self.signed else 'u'}int{max(8, math.ceil(self.bits))}")

    @property
    def is_integer(self) -> bool:
        """True if codes are integers that represent themselves, as in int4 but not in nf4."""
        return self.codebook is None and jnp.issubdtype(self.code_dtype, jnp.integer)

    @property
    def signed(self) -> bool:
        """True if codes are signed integers."""
        return jnp.issubdtype(self.code_dtype, jnp.signedinteger)

    @property
    def has_zero(self) -> bool:
        """True if one of the codes represents the value 0.

        False for int1, whose values are -1 and 1, and for iq4_nl, whose values closest to 0 are 1
        and -10.
        """
        return self.bits != 1 if self.codebook is None else 0 in self.codebook

    @property
    def has_zero_point(self) -> bool:
        """True if a `QArray` can have a zero point: in integer formats of at least 2 bits."""
        return self.is_integer and self.bits >= 2

    @property
    def code_range(self) -> tuple[int, int]:
        """The smallest and the largest code: (-8, 7) for int4, (0, 15) for nf4.

        **Raises:** `TypeError` if the codes are floats.
        """
        if self.codebook is not None:
            return 0, len(self.codebook) - 1
        if not self.is_integer:
            raise TypeError(
                f"codes of {self.name} are {self.code_dtype.name}, which have no code_range"
            )
        if self.bits < 2:  # int1 and ternary
            return -1, 1
        levels = 2 ** int(self.bits)
        return (-levels // 2, levels // 2 - 1) if self.signed else (0, levels - 1)

    @property
    def value_range(self) -> tuple[float, float]:
        """The smallest and the largest value of a code, before a zero point and a scale apply.

        For example, (-8.0, 7.0) for int4 and (-1.0, 1.0) for nf4.
        """
        if self.codebook is not None:
            return float(min(self.codebook)), float(max(self.codebook))
        if not self.is_integer:
            return -self.bound, self.bound
        least, largest = self.code_range
        return float(least), float(largest)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the largest symmetric range whose ends are values of the format.

        For example, (-7.0, 7.0) for int4 and (-1.0, 1.0) for nf4. iq4_nl has no such range, so its
        ends are the smallest and the largest value of its codebook, (-127.0, 113.0).
        """
        least, largest = self.value_range
        if self.codebook is None:
            return -largest, largest
        magnitude = min(-least, largest)
        is_symmetric = {-magnitude, magnitude} <= set(self.codebook)
        return (-magnitude, magnitude) if is_symmetric else (least, largest)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the nearest unpacked codes of values that are already divided by their scale.

        A value halfway between two codes gets the even code. Values out of range are clipped.
        NaN is encoded like 0. int1 has no code for 0, and encodes 0 and NaN as -1.
        """
        x = jnp.where(jnp.isnan(x), 0, x)
        if self.codebook is not None:
            return self._nearest_codes(x)
        if not self.is_integer:
            clipped = jnp.clip(x, -self.bound, self.bound)
            return round_to_dtype(clipped, self.code_dtype).astype(self.code_dtype)
        if self.bits == 1:
            return jnp.where(x > 0, 1, -1).astype(self.byte_dtype)
        return jnp.clip(jnp.round(x), *self.code_range).astype(self.byte_dtype)

    def _nearest_codes(self, x: jax.Array) -> jax.Array:
        """Return the codes of the codebook values nearest to `x`."""
        codes = [code for _, code in self.sorted_codebook()]
        if self.bits == 8:  # A binary search takes fewer steps than 255 comparisons.
            # Neighboring thresholds can be equal in 16 bits.
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            # `searchsorted` returns the index of the first entry that is not below x. So entry i
            # must be the largest value that is encoded as `codes[i]`.
            largest_values = [
                np.nextafter(threshold, -np.inf, dtype=x.dtype) if is_above else threshold
                for threshold, is_above, _ in self.thresholds(x.dtype)
            ]
            index = jnp.searchsorted(jnp.asarray(largest_values, x.dtype), x)
            return jnp.asarray(codes, jnp.uint8)[index]
        # Start at the code of the smallest value, and add the step of each threshold below x. This
        # needs no temporary array with 16 entries per value, even without `jax.jit`.
        code = jnp.full(x.shape, codes[0], jnp.uint8)
        for threshold, is_above, step in self.thresholds(x.dtype):
            has_passed = x >= threshold if is_above else x > threshold
            code += has_passed.astype(jnp.uint8) * jnp.uint8(step)
        return code

    def sorted_codebook(self) -> list[tuple[float, int]]:
        """Return the pairs `(value, code)` of the codebook in ascending order of the values.

        If several codes represent a value, the pair has the lowest code.
        """
        assert self.codebook is not None
        code_of_value: dict[float, int] = {}
        for code, value in enumerate(self.codebook):
            code_of_value.setdefault(value, code)
        return sorted(code_of_value.items())

    def thresholds(self, dtype: DTypeLike) -> list[tuple[float, bool, int]]:
        """Return the values in `dtype` at which the nearest code changes, in ascending order.

        The result is a list of `(threshold, is_above, step)`. `is_above` is True if a value equal
        to the threshold gets the code above the threshold. `step` is the code above the threshold
        minus the code below the threshold, modulo 256.
        """
        thresholds = []
        for (low, low_code), (high, high_code) in itertools.pairwise(self.sorted_codebook()):
            middle = (low + high) / 2
            threshold = float(np.asarray(middle, dtype))
            # The middle gets the even code. If `dtype` rounds it up, the threshold lies above it.
            is_above = high_code % 2 == 0 if threshold == middle else threshold > middle
            thresholds.append((threshold, is_above, (high_code - low_code) % 256))
        return thresholds

    def decode(self, codes: ArrayLike, dtype: DTypeLike) -> jax.Array:
        """Return the value of each unpacked code in `dtype`, without zero point and scale."""
        codes = jnp.asarray(codes)
        if self.codebook is None:
            return codes.astype(dtype)
        # On a mesh with explicit axes, a gather must state the sharding of its result.
        sharding = jax.typeof(codes).sharding
        out_sharding = None if sharding.mesh.empty else sharding
        values = jnp.asarray(self.codebook, dtype).at[codes]
        return values.get(mode="promise_in_bounds", out_sharding=out_sharding)

    def to_fields(self, codes: jax.Array) -> jax.Array:
        """Convert codes to fields: the unsigned integers to pack, in uint8. In int4, -1 is 15."""
        if not self.signed:
            return codes.astype(jnp.uint8)
        if self.bits == 1:  # -1 and 1 become 0 and 1.
            return (codes > 0).astype(jnp.uint8)
        if self.bits < 2:  # Ternary codes -1, 0 and 1 become 0, 1 and 2.
            return (codes + 1).astype(jnp.uint8)
        return codes.astype(jnp.uint8) & (2 ** int(self.bits) - 1)  # two's complement

    def from_fields(self, fields: jax.Array) -> jax.Array:
        """Convert fields, as `to_fields` returns them, back to codes. In int4, 15 becomes -1.

        `fields` can have any unsigned dtype. Signed codes get the signed dtype of the same width.
        """
        if not self.signed:
            return fields
        codes = fields.astype(f"int{8 * fields.dtype.itemsize}")
        if self.bits == 1:  # 0 and 1 become -1 and 1.
            return 2 * codes - 1
        if self.bits < 2:  # 0, 1 and 2 become -1, 0 and 1 (ternary).
            return codes - 1
        sign_bit = 2 ** (int(self.bits) - 1)
        return (codes ^ sign_bit) - sign_bit  # sign extension of two's complement


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round values to the precision of a narrower signed float dtype, without a conversion.

    The result keeps the dtype of `x`. Ties are rounded to even, and values beyond the range become
    infinite, as in a conversion. The derivative is 1.

    Call this function before a conversion to a narrow dtype. By default, XLA for GPUs removes a
    conversion to 8 or 16 bits and back (`xla_allow_excess_precision`), so it would not round.

    >>> import jax.numpy as jnp
    >>> from veneer.quant.formats.format import round_to_dtype
    >>> round_to_dtype(jnp.array([0.33, 300.0, 0.003, 500.0]), "float8_e4m3fn").tolist()
    [0.34375, 288.0, 0.00390625, inf]
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    info, wide_info = jnp.finfo(dtype), jnp.finfo(wide.dtype)
    if info.bits >= wide_info.bits:
        return x
    rounded = jax.lax.reduce_precision(wide, wide_info.nexp, info.nmant)
    infinite = jnp.sign(rounded) * jnp.inf
    rounded = jnp.where(jnp.abs(rounded) > float(info.max), infinite, rounded)
    if info.tiny > wide_info.tiny:  # Otherwise both dtypes have the same exponents.
        # Below the smallest normal number, the numbers of a dtype have equal distances.
        step = float(info.smallest_subnormal)
        subnormal = jnp.round(wide / step) * step
        rounded = jnp.where(jnp.abs(wide) < float(info.tiny), subnormal, rounded)
    return rounded.astype(x.dtype)


@round_to_dtype.defjvp
def _round_to_dtype_jvp(dtype: DTypeLike, primals: tuple, tangents: tuple) -> tuple:
    return round_to_dtype(*primals, dtype), tangents[0]


def encode_stochastically(x: jax.Array, format: Format, key: jax.Array) -> jax.Array:
    """Round each value up or down at random to a value of a format, and return the unpacked codes.

    `x` has f32 or f64 values that are already divided by their scale. NaN gets the code of 0.
    """
    x = jnp.where(jnp.isnan(x), 0, x)
    # A value is rounded up if `random` times the gap between the values below and above is less
    # than the distance to the value below. `random` is in [0, 1), so exact values do not change.
    random = jax.random.uniform(key, x.shape, x.dtype)
    if format.codebook is not None:
        return _encode_in_codebook(x, format, random)
    if not format.is_integer:
        return _encode_in_float8(x, format, random)
    if format.bits == 1:  # The gap between -1 and 1 is 2.
        return jnp.where(2 * random < x + 1, 1, -1).astype(format.byte_dtype)
    floor = jnp.floor(x)
    return jnp.clip(floor + (random < x - floor), *format.code_range).astype(format.byte_dtype)


def _encode_in_codebook(x: jax.Array, format: Format, random: jax.Array) -> jax.Array:
    """Round values at random to neighboring values of the codebook, and return their codes.

    `random` has a number in [0, 1) for each value of `x`. The value is rounded up if the number is
    less than the distance to the codebook value below, relative to the gap to the next one.
    """
    ascending = format.sorted_codebook()
    code = jnp.full(x.shape, ascending[0][1], jnp.uint8)  # the code of the smallest value
    for (low, low_code), (high, high_code) in itertools.pairwise(ascending):
        start = jnp.asarray(low, x.dtype)
        gap = jnp.asarray(high, x.dtype) - start
        # `x` passes all gaps below it, and none above. It passes the gap around it if it rounds up.
        passes_gap = (random * gap < x - start).astype(jnp.uint8)
        code += passes_gap * jnp.uint8((high_code - low_code) % 256)
    return code


def _encode_in_float8(x: jax.Array, format: Format, random: jax.Array) -> jax.Array:
    """Round values at random to neighboring values of a float8 format, and return these values.

    `random` is as in `_encode_in_codebook`.
    """
    dtype = format.code_dtype
    x = jnp.clip(x, -format.bound, format.bound)
    magnitude = jnp.abs(x)
    to_value = lambda bits: jax.lax.bitcast_convert_type(bits, dtype).astype(x.dtype)
    # Positive floats have the same order as their bit patterns, so adding 1 gives the next float.
    nearest = round_to_dtype(magnitude, dtype)
    nearest_bits = jax.lax.bitcast_convert_type(nearest.astype(dtype), jnp.uint8)
    low_bits = nearest_bits - (nearest > magnitude).astype(jnp.uint8)
    low, high = to_value(low_bits), to_value(low_bits + 1)
    # If `low` is the largest float, `high` is NaN or infinity. Then `magnitude` equals `low`.
    rounds_up = (magnitude > low) & (random * (high - low) < magnitude - low)
    rounded = to_value(low_bits + rounds_up.astype(jnp.uint8))
    return jnp.where(x < 0, -rounded, rounded).astype(dtype)
