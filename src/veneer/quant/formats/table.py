"""Formats: how a number becomes few bits. One row of one table each.

A value is stored as a code and its tile's scale. What a code is worth before the scale is

- the code itself in an integer format (less the tile's zero point, where it has one),
- the code as a number in a float format of 8 bits,
- `codebook[code]` in every other one.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .codebooks import FP4_BNB, IQ4_NL, NF4, dynamic_map, minifloat
from .rounding import round_to_dtype
from .unknown import unknown_format


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format, which divides values by a scale and encodes the results in a few bits.

    `vn.quant.FORMATS` maps names to formats. `vn.quant.get_format` also takes aliases.

    **Arguments:**

    - `name`: the name, such as "nf4", which other functions take as `qtype`.
    - `bits`: the size of a stored code. It can be a fraction: ternary has 1.6 bits, because a byte
      stores five codes.
    - `code_dtype`: the dtype of unpacked codes, as in `QArray.qvalue`.
    - `bound`: the divisor in the scale of a tile: `absmax / bound`, where `absmax` is the largest
      magnitude of the tile. In uint2 to uint8, the scale is `(max - min) / bound`.
    - `codebook`: the value of each code, or None if each code is its own value.
    - `source`: the specification, paper or library that defines the format.
    - `tile_size`: the only tile size that the format allows. None allows any size.
    - `scale_dtype`: the dtype of the scales, or their format if they are quantized. None allows any
      float dtype. Scales in float8_e8m0fnu are powers of two.
    - `scale_tile`: the number of quantized scales that share one f32 scale. With 0, all scales of a
      matrix share one. With None, scales are not quantized.
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
        """The dtype that holds an unpacked integer code or zero point in whole bytes.

        It is int8 for int4, and uint8 for uint4 and nf4. Their `code_dtype` is int4 or uint4.
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

        It is False for int1, whose values are -1 and 1, and for iq4_nl, whose values closest to 0
        are 1 and -10.
        """
        return self.bits != 1 if self.codebook is None else 0 in self.codebook

    @property
    def code_range(self) -> tuple[int, int]:
        """The smallest and the largest code: (-8, 7) for int4, (0, 15) for nf4.

        **Raises:** `TypeError` if the codes are floats.
        """
        if self.codebook is None and not self.is_integer:
            raise TypeError(
                f"codes of {self.name} are {self.code_dtype.name}, which have no code_range"
            )
        if self.codebook is not None:
            return 0, len(self.codebook) - 1
        if self.bits < 2:  # int1 and ternary
            return -1, 1
        levels = 2 ** int(self.bits)
        return (-levels // 2, levels // 2 - 1) if self.signed else (0, levels - 1)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the largest symmetric range of codes, such as (-7.0, 7.0) for int4.

        If the format has a codebook, this is a range of values of the codebook, such as (-1.0, 1.0)
        for nf4. If the codebook has no symmetric range, the ends are its smallest and its largest
        value.
        """
        if self.codebook is None:
            largest = float(self.code_range[1] if self.is_integer else self.bound)
            return -largest, largest
        least, largest = float(min(self.codebook)), float(max(self.codebook))
        both = min(-least, largest)
        is_symmetric = {both, -both} <= set(self.codebook)
        return (-both, both) if is_symmetric else (least, largest)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the nearest codes of values that are already divided by their scale.

        A value halfway between two codes gets the even code. Values beyond the range are clipped.
        NaN is encoded like 0. int1 has no zero, and encodes 0 and NaN as -1.

        **Arguments:**

        - `x`: floats of any shape.

        **Returns:** unpacked codes of the same shape.
        """
        x = jnp.where(jnp.isnan(x), 0, x)
        if self.codebook is not None:
            return self._nearest(x)
        if not self.is_integer:
            largest = float(jnp.finfo(self.code_dtype).max)
            clipped = jnp.clip(x, -largest, largest)
            return round_to_dtype(clipped, self.code_dtype).astype(self.code_dtype)
        if self.bits == 1:
            return jnp.where(x > 0, 1, -1).astype(self.byte_dtype)
        return jnp.clip(jnp.round(x), *self.code_range).astype(self.byte_dtype)

    def _nearest(self, x: jax.Array) -> jax.Array:
        if self.bits == 8:  # a search takes fewer steps than there are thresholds
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # in which these differ
            highest = [
                np.nextafter(at, -np.inf, dtype=x.dtype) if is_beyond else at
                for at, is_beyond, _ in self.thresholds(x.dtype)
            ]
            place = jnp.searchsorted(jnp.asarray(highest, x.dtype), x)
            return jnp.asarray([code for _, code in self._ascending()], jnp.uint8)[place]
        code = jnp.full(x.shape, self._ascending()[0][1], jnp.uint8)
        # Adding up comparisons needs no array of [..., 16], compiled or not.
        for threshold, is_beyond, step in self.thresholds(x.dtype):
            beyond = x >= threshold if is_beyond else x > threshold
            code += beyond.astype(jnp.uint8) * jnp.uint8(step)
        return code

    def _ascending(self) -> list[tuple[float, int]]:
        """The values of the codebook, and the first code of each."""
        assert self.codebook is not None
        return sorted({v: code for code, v in reversed([*enumerate(self.codebook)])}.items())

    def thresholds(self, dtype: DTypeLike) -> list[tuple[float, bool, int]]:
        """Return the values at which the nearest code of a codebook changes, in ascending order.

        **Arguments:**

        - `dtype`: the dtype in which values are compared.

        **Returns:** a list of `(threshold, is_beyond, step)`. `is_beyond` is True if a value equal
        to the threshold gets the code above it. `step` is the code above the threshold minus the
        code below it, modulo 256.
        """
        thresholds = []
        for (below, low), (above, high) in itertools.pairwise(self._ascending()):
            middle = (below + above) / 2
            threshold = float(np.asarray(middle, dtype))
            # Where the dtype has no such number, the values on either side of it are no ties.
            is_beyond = high % 2 == 0 if threshold == middle else threshold > middle
            thresholds.append((threshold, is_beyond, (high - low) % 256))
        return thresholds

    def decode(self, codes: ArrayLike, dtype: DTypeLike) -> jax.Array:
        """Return the values of codes before zero points and scales are applied.

        **Arguments:**

        - `codes`: unpacked codes of any shape.
        - `dtype`: the dtype of the result.
        """
        if self.codebook is None:
            return jnp.asarray(codes).astype(dtype)
        codes = jnp.asarray(codes)
        sharding = jax.typeof(codes).sharding  # on a mesh of explicit axes, that of the values too
        return (
            jnp.asarray(self.codebook, dtype)
            .at[codes]
            .get(mode="promise_in_bounds", out_sharding=None if sharding.mesh.empty else sharding)
        )

    def to_fields(self, codes: jax.Array) -> jax.Array:
        """Return codes as unsigned integers in uint8, to be packed. -1 becomes 15 in int4."""
        if not self.signed:
            return codes.astype(jnp.uint8)
        if self.bits == 1:
            return (codes > 0).astype(jnp.uint8)
        if self.bits < 2:
            return (codes + 1).astype(jnp.uint8)
        return codes.astype(jnp.uint8) & (2 ** int(self.bits) - 1)  # two's complement

    def from_fields(self, fields: jax.Array) -> jax.Array:
        """Convert unsigned integers back to codes. This is the inverse of `to_fields`.

        **Arguments:**

        - `fields`: unsigned integers, unpacked from storage.

        **Returns:** in signed formats, signed integers of the same width. In other formats,
        `fields`.
        """
        if not self.signed:
            return fields
        codes = fields.astype(f"int{8 * fields.dtype.itemsize}")
        if self.bits == 1:
            return 2 * codes - 1
        if self.bits < 2:
            return codes - 1
        half = 2 ** (int(self.bits) - 1)
        return (codes ^ half) - half  # flipping the sign bit and taking its weight off extends it


def _integer(bits: int) -> Format:
    # Half a step beyond the largest code: that code's bucket reaches so far, and is used in full.
    bound = 2 ** (bits - 1) - 0.5
    source = "symmetric, scale = absmax / (qmax + 1/2), as Qwix 0.1.8"
    return Format(f"int{bits}", bits, _code_dtype(f"int{bits}"), bound, None, source)


def _unsigned(bits: int) -> Format:
    source = "affine, scale = (max - min) / (2**bits - 1), as Qwix 0.1.8's asymmetric int8"
    dtype = _code_dtype(f"uint{bits}")
    return Format(f"uint{bits}", bits, dtype, 2.0**bits - 1, None, source, calibration="minmax")


def _code_dtype(name: str) -> np.dtype:
    narrow = {"int4": jnp.int4, "uint4": jnp.uint4, "int16": np.int16}
    return np.dtype(narrow.get(name, np.int8 if name.startswith("int") else np.uint8))


def _float8(
    dtype: DTypeLike, source: str = "FP8 Formats for Deep Learning, arXiv 2209.05433"
) -> Format:
    dtype = np.dtype(dtype)
    return Format(dtype.name, 8, dtype, float(jnp.finfo(dtype).max), None, source)


def _small_float(name: str, codebook: tuple[float, ...]) -> Format:
    bits = len(codebook).bit_length() - 1
    dtype = np.dtype(jnp.uint4 if bits == 4 else jnp.uint8)
    source = "OCP Microscaling Formats (MX) 1.0, section 5.3"
    return Format(name, bits, dtype, max(codebook), codebook, source)


def _microscaling(name: str, element: Format) -> Format:
    return dataclasses.replace(
        element,
        name=name,
        tile_size=32,
        scale_dtype="float8_e8m0fnu",
        source="OCP Microscaling Formats (MX) 1.0, table 1; the power of two rounded up, as "
        "arXiv 2506.08027, so that nothing is clipped",
    )


_OTHER_FLOAT8 = "IEEE 754's interchange rules, in 8 bits; ml_dtypes"

_E2M1 = _small_float("float4_e2m1fn", minifloat(exponent_bits=2, mantissa_bits=1, bias=1))
_E2M3 = _small_float("float6_e2m3fn", minifloat(exponent_bits=2, mantissa_bits=3, bias=1))
_E3M2 = _small_float("float6_e3m2fn", minifloat(exponent_bits=3, mantissa_bits=2, bias=3))
_E4M3 = _float8(jnp.float8_e4m3fn)
_E5M2 = _float8(jnp.float8_e5m2)
_NF4 = Format("nf4", 4, np.dtype(jnp.uint4), 1.0, NF4, "QLoRA, arXiv 2305.14314, appendix E")
_TERNARY = Format(
    "ternary",
    1.6,
    np.dtype(np.int8),
    1.5,
    None,
    "-1, 0, 1; BitNet b1.58, arXiv 2402.17764: scale = mean magnitude",
    calibration="absmean",
)
_BINARY = Format(
    "int1",
    1,
    np.dtype(np.int8),
    1.0,
    None,
    "-1, 1; BitNet, arXiv 2310.11453: scale = mean magnitude",
    calibration="absmean",
)


class _Formats(dict[str, Format]):
    """All number formats: a dict from the name, such as "int8", to the `Format`.

    docs/formats.md has a table of them, with their sizes and errors.
    """


FORMATS: dict[str, Format] = _Formats(
    (format.name, format)
    for format in (
        *map(_integer, range(8, 1, -1)),
        dataclasses.replace(
            _integer(16), bound=2.0**15, source="symmetric, scale = absmax / 2**15, as LiteRT"
        ),
        _TERNARY,
        _BINARY,
        *map(_unsigned, range(8, 1, -1)),
        _E4M3,
        _E5M2,
        _float8(jnp.float8_e4m3, _OTHER_FLOAT8),
        _float8(jnp.float8_e3m4, _OTHER_FLOAT8),
        _float8(jnp.float8_e4m3fnuz, "8-bit Numerical Formats, arXiv 2206.02915"),
        _float8(jnp.float8_e5m2fnuz, "8-bit Numerical Formats, arXiv 2206.02915"),
        _float8(jnp.float8_e4m3b11fnuz, "Hybrid 8-bit Floating Point, NeurIPS 2019"),
        _E2M3,
        _E3M2,
        _E2M1,
        _NF4,
        dataclasses.replace(
            _NF4,
            name="nf4_dq",
            source="QLoRA, arXiv 2305.14314, section 3: double quantization",
            scale_dtype="float8_e4m3fn",
            scale_tile=256,
        ),
        Format("fp4_bnb", 4, np.dtype(jnp.uint4), 1.0, FP4_BNB, "bitsandbytes 0.45, fp4"),
        Format("iq4_nl", 4, np.dtype(jnp.uint4), 113.0, IQ4_NL, "llama.cpp, IQ4_NL and IQ4_XS"),
        Format(
            "dynamic8",
            8,
            np.dtype(np.uint8),
            1.0,
            dynamic_map(),
            "8-bit Optimizers, arXiv 2110.02861: dynamic tree quantization, as in bitsandbytes",
        ),
        _microscaling("mxfp8", _E4M3),
        dataclasses.replace(
            _microscaling("mxfp8_16", _E4M3),
            tile_size=16,
            calibration="oas",
            source="mxfp8 in tiles of 16, whose scales have a bias, as Qwix's main branch",
        ),
        _microscaling("mxfp8_e5m2", _E5M2),
        _microscaling("mxfp6", _E2M3),
        _microscaling("mxfp6_e3m2", _E3M2),
        _microscaling("mxfp4", _E2M1),
        dataclasses.replace(
            _E2M1,
            name="nvfp4",
            tile_size=16,
            scale_dtype="float8_e4m3fn",
            scale_tile=0,
            source="NVFP4, arXiv 2509.25149: scales in e4m3 and one in f32 above them",
        ),
    )
)
# For the site. `help(FORMATS)` shows the docstring of the class.
"""All number formats: a dict from the name, such as "int8", to the `Format`.

| formats | values |
|---|---|
| int2 to int8, int16 | signed integers |
| uint2 to uint8 | unsigned integers with a zero point |
| ternary, int1 | -1, 0, 1; -1, 1 |
| float8_*, float6_*, float4_e2m1fn | floats of 8, 6 and 4 bits |
| nf4, nf4_dq, fp4_bnb, iq4_nl, dynamic8 | codebooks |
| mxfp8*, mxfp6*, mxfp4, nvfp4 | floats with a fixed tile size and scale dtype |
"""

# Shorter names of formats.
ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp6_e2m3": "float6_e2m3fn",
    "fp6_e3m2": "float6_e3m2fn",
    "fp4": "float4_e2m1fn",
    "fp4_e2m1": "float4_e2m1fn",
    "b1.58": "ternary",
}


def is_format(name: Any) -> bool:
    """Return whether something is the name or an alias of a format."""
    return isinstance(name, str) and (name in FORMATS or name in ALIASES)


def get_format(qtype: DTypeLike) -> Format:
    """Return the format of a name, an alias or a dtype.

    **Arguments:**

    - `qtype`: a key of `vn.quant.FORMATS` ("nf4"), an alias ("fp8", "fp4", "b1.58"), or a dtype
      whose name is a key (`jnp.int8`, `jnp.float8_e4m3fn`).

    **Returns:** a `Format`, which is a value of `vn.quant.FORMATS`.

    **Raises:**

    - `TypeError` if `qtype` is neither a name nor a dtype.
    - `ValueError` if no format has this name. The message names the closest format.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.get_format("nf4").bits, vn.quant.get_format(jnp.int8).name
    (4, 'int8')
    >>> vn.quant.get_format("fp8").name
    'float8_e4m3fn'
    """
    try:
        name = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
    except (TypeError, ValueError):
        name = None
    if qtype is None or name is None:
        example = qtype.name if isinstance(qtype, Format) else "nf4"
        given = "None" if qtype is None else f"a {type(qtype).__name__}"
        raise TypeError(f"a format is a name, such as {example!r}, or a dtype, not {given}")
    if not is_format(name):
        raise unknown_format(name, tuple(FORMATS), tuple(ALIASES))
    return FORMATS[ALIASES.get(name, name)]
