"""`FORMATS`, the table of all number formats, and `get_format`, which looks up a name.

The error of `get_format` for an unknown name suggests the closest format.
"""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from .format import Format

# NormalFloat (QLoRA): quantiles of N(0, 1), normalized to [-1, 1], with an exact zero.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# IQ4_NL of llama.cpp: integers that are denser around zero.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# fp4 of bitsandbytes: its positive values, times 12, in the order of their bit patterns.
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4_BNB = [float(np.float32(sign * value / 12)) for sign in (1, -1) for value in _FP4]


def _dynamic_codebook() -> list[float]:
    """Return the 256 values of the dynamic 8-bit format of bitsandbytes, in ascending order.

    The values are 0, 1, and for each i from 0 to 6 the centers of 2**i equal intervals between
    10**(i - 7) and 10**(i - 6), with both signs. They are computed in float32, as torch does on
    processors with fused multiply-add. On other processors, torch rounds some last bits
    differently.
    """
    values = [0.0, 1.0]
    for i in range(7):
        # The bounds of 2**i intervals of [0.1, 1], which the last step scales. Like torch.linspace,
        # compute the lower half of the bounds from 0.1, and the upper half from 1.
        count = 2**i + 1
        index = np.arange(count)
        step = np.float64(np.float32(0.9) / np.float32(count - 1))
        from_low = np.float32(0.1) + step * index
        from_high = np.float32(1.0) - step * index[::-1]
        bounds = np.where(index < count // 2, from_low, from_high).astype(np.float32)
        centers = np.float32(10.0 ** (i - 6)) * ((bounds[:-1] + bounds[1:]) / np.float32(2))
        values += [*centers.tolist(), *(-centers).tolist()]
    return sorted(values)


def _integer(
    name: str, bits: int | float, bound: float, source: str, calibration: str = "absmax"
) -> Format:
    """Return an integer format, which is unsigned if `name` starts with "u".

    The arguments are fields of `Format`.
    """
    # Codes of 4 and 16 bits have a dtype of that width. All other codes are in int8 or uint8.
    sign, width = "u" if name.startswith("u") else "", bits if bits in (4, 16) else 8
    dtype = jnp.dtype(f"{sign}int{width}")
    return Format(name, bits, dtype, bound, None, source, calibration=calibration)


def _float8(dtype: DTypeLike, source: str) -> Format:
    dtype = np.dtype(dtype)
    return Format(dtype.name, 8, dtype, float(jnp.finfo(dtype).max), None, source)


def _codebook_format(name: str, values: Sequence[int | float], source: str) -> Format:
    """Return a format whose code i represents `values[i]`, with scales `absmax / max(values)`.

    `absmax` is the largest magnitude of a tile. `source` is a field of `Format`.
    """
    bits = len(values).bit_length() - 1
    dtype = np.dtype(jnp.uint4 if bits == 4 else np.uint8)
    return Format(name, bits, dtype, float(max(values)), tuple(map(float, values)), source)


def _small_float(name: str, bits: int) -> Format:
    """Return a float format of 4 or 6 bits. Its codes are the bit patterns of the floats.

    `name` is also the dtype of `ml_dtypes` that defines the value of each bit pattern.
    """
    values = np.arange(2**bits, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(float)
    return _codebook_format(name, values.tolist(), "OCP Microscaling Formats (MX) 1.0, section 5.3")


def _microscaling(name: str, element: Format) -> Format:
    """Return a microscaling (MX) format: one power-of-two scale per 32 values.

    `element` is the format of the codes, such as float8_e4m3fn.
    """
    return dataclasses.replace(
        element,
        name=name,
        tile_size=32,
        scale_dtype="float8_e8m0fnu",
        source="OCP Microscaling Formats (MX) 1.0, table 1; the power of two rounded up, as "
        "arXiv 2506.08027, so that nothing is clipped",
    )


# This scale maps the largest magnitude to half a step beyond the largest code. Values up to there
# are still rounded to that code.
_SYMMETRIC = "symmetric, scale = absmax / (qmax + 1/2), as Qwix 0.1.8"
_AFFINE = "affine, scale = (max - min) / (2**bits - 1), as Qwix 0.1.8's asymmetric int8"
_TERNARY = "-1, 0, 1; BitNet b1.58, arXiv 2402.17764: scale = mean magnitude"
_BINARY = "-1, 1; BitNet, arXiv 2310.11453: scale = mean magnitude"
_OCP = "FP8 Formats for Deep Learning, arXiv 2209.05433"
_IEEE = "IEEE 754's interchange rules, in 8 bits; ml_dtypes"
_FNUZ = "8-bit Numerical Formats, arXiv 2206.02915"
_DYNAMIC = "8-bit Optimizers, arXiv 2110.02861: dynamic tree quantization, as in bitsandbytes"

_E4M3, _E5M2 = _float8(jnp.float8_e4m3fn, _OCP), _float8(jnp.float8_e5m2, _OCP)
_E2M1 = _small_float("float4_e2m1fn", 4)
_E2M3, _E3M2 = _small_float("float6_e2m3fn", 6), _small_float("float6_e3m2fn", 6)
_NORMAL = _codebook_format("nf4", _NF4, "QLoRA, arXiv 2305.14314, appendix E")


class _Formats(dict[str, Format]):
    """All number formats: a dict from the name, such as "int8", to the `Format`.

    docs/formats.md has a table of them, with their sizes and errors.
    """


FORMATS: dict[str, Format] = _Formats(
    (format.name, format)
    for format in (
        *(_integer(f"int{b}", b, 2 ** (b - 1) - 0.5, _SYMMETRIC) for b in range(8, 1, -1)),
        _integer("int16", 16, 2.0**15, "symmetric, scale = absmax / 2**15, as LiteRT"),
        _integer("ternary", 1.6, 1.5, _TERNARY, "absmean"),
        _integer("int1", 1, 1.0, _BINARY, "absmean"),
        *(_integer(f"uint{b}", b, 2.0**b - 1, _AFFINE, "minmax") for b in range(8, 1, -1)),
        _E4M3,
        _E5M2,
        _float8(jnp.float8_e4m3, _IEEE),
        _float8(jnp.float8_e3m4, _IEEE),
        _float8(jnp.float8_e4m3fnuz, _FNUZ),
        _float8(jnp.float8_e5m2fnuz, _FNUZ),
        _float8(jnp.float8_e4m3b11fnuz, "Hybrid 8-bit Floating Point, NeurIPS 2019"),
        _E2M3,
        _E3M2,
        _E2M1,
        _NORMAL,
        dataclasses.replace(
            _NORMAL,
            name="nf4_dq",
            source="QLoRA, arXiv 2305.14314, section 3: double quantization",
            scale_dtype="float8_e4m3fn",
            scale_tile=256,
        ),
        _codebook_format("fp4_bnb", _FP4_BNB, "bitsandbytes 0.45, fp4"),
        _codebook_format("iq4_nl", _IQ4_NL, "llama.cpp, IQ4_NL and IQ4_XS"),
        _codebook_format("dynamic8", _dynamic_codebook(), _DYNAMIC),
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
# The site shows this docstring, and `help(FORMATS)` shows the docstring of the class.
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

# The closest format and tile size to each quantization type of GGUF.
_GGUF_TYPES = {
    "q4_0": ("int4", 32),
    "q4_1": ("uint4", 32),
    "q5_0": ("int5", 32),
    "q5_1": ("uint5", 32),
    "q8_0": ("int8", 32),
    "q2_k": ("uint2", 16),
    "q3_k": ("int3", 16),
    "q4_k": ("uint4", 32),
    "q5_k": ("uint5", 32),
    "q6_k": ("int6", 16),
    "iq4_xs": ("iq4_nl", 32),
    "tq1_0": ("ternary", 256),
    "tq2_0": ("ternary", 256),
}

_DENSE = re.compile(r"(b?f|fp|b?float)(16|32|64)|half|float|double")
_INTEGER = re.compile(r"(u?)int(\d+)(?:[-_].*)?")  # matches int8_per_channel too
_BITS = re.compile(r"(\d+)[-_ ]?bits?")
_WEIGHTS_AND_ACTIVATIONS = re.compile(r"w(\d+)a(\d+)")
_METHOD = re.compile(r"(gptq|awq|smoothquant)(\+gptq)?")


def is_format(name: Any) -> bool:
    """Return whether `name`, which can be any object, is the name or an alias of a format."""
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
        # A `Format` is not a valid `qtype`, but its name is.
        example = qtype.name if isinstance(qtype, Format) else "nf4"
        wrong = "None" if qtype is None else f"a {type(qtype).__name__}"
        raise TypeError(f"a format is a name, such as {example!r}, or a dtype, not {wrong}")
    if not is_format(name):
        raise ValueError(f"unknown format {name!r}{_suggest(name.lower())}")
    return FORMATS[ALIASES.get(name, name)]


def format_of_codes(qvalue: jax.Array | np.ndarray, qtype: DTypeLike | None) -> Format:
    """Return the format of codes that a user passes to `QArray`.

    If `qtype` is None, the dtype of the codes has the name of the format, such as "int8".

    **Raises:** `ValueError` if the dtype or the range of the codes does not fit the format.
    """
    dtype = qvalue.dtype
    if qtype is None and dtype.name not in FORMATS:
        raise ValueError(f"qvalue has dtype {dtype.name}, which is not a format: pass qtype")
    format = get_format(dtype.name if qtype is None else qtype)
    has_integers = format.is_integer or format.codebook is not None
    if dtype != format.code_dtype and not (has_integers and jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(
            f"qvalue has dtype {dtype.name}, but codes of {format.name} are "
            f"{format.code_dtype.name}. To quantize values, call vn.quant.quantize"
        )
    # If every value of the dtype is a code, such as uint4 for nf4, there is nothing to check.
    has_only_codes = dtype == format.code_dtype and format.bits in (4, 8, 16)
    if has_integers and not has_only_codes and dtype.name != format.name:
        _check_code_range(qvalue, format)
    return format


def _check_code_range(qvalue: jax.Array | np.ndarray, format: Format) -> None:
    """Raise `ValueError` if an integer in `qvalue` is not a code of the format.

    The values of a tracer are unknown, so a tracer must have the `code_dtype` of the format.
    """
    if isinstance(qvalue, jax.core.Tracer):
        if qvalue.dtype == format.code_dtype:
            return
        raise ValueError(
            f"codes of {format.name} are {format.code_dtype.name}, and the range of "
            f"{qvalue.dtype.name} codes cannot be checked in a traced program: pass "
            f"qvalue.astype(jnp.{format.code_dtype})"
        )
    low, high = format.code_range
    codes = np.asarray(qvalue)
    if codes.size and not low <= codes.min() <= codes.max() <= high:
        raise ValueError(
            f"codes of {format.name} are from {low} to {high}, but qvalue has codes from "
            f"{codes.min()} to {codes.max()}"
        )
    if format.bits == 1 and format.signed and not codes.all():
        raise ValueError(f"codes of {format.name} are -1 and 1, but qvalue has code 0")


def _suggest(name: str) -> str:
    """Return what to use instead of an unknown format, as the end of an error message."""
    # Q4_K_M is a mixture of GGUF types, most of them Q4_K. Suggest a format for that type.
    if (gguf_type := re.sub(r"_[sml]$", "", name)) in _GGUF_TYPES:
        closest = "{!r} with tile_size={}".format(*_GGUF_TYPES[gguf_type])
        if re.fullmatch(r"q\d_[01]", gguf_type):  # The format stores the same codes and scales.
            return f"; use {closest}, which is GGUF's {name.upper()}"
        return (
            f", a type of GGUF: vn.load reads it from a GGUF file. To quantize, the closest "
            f"format is {closest}"
        )
    if _DENSE.fullmatch(name):
        return ", a dense dtype: to keep a weight dense, write None as the format of its rule"
    if _METHOD.fullmatch(name):
        has_activations = name.startswith("smoothquant")
        rules = "[vn.quant.Rule('.*', 'int8', act_qtype='int8')]" if has_activations else "'int4'"
        return (
            ", which is a method of calibration. Choose a format, and call vn.quant.calibrate("
            f"model, {rules}, params=params, method={name!r})"
        )
    if (widths := _WEIGHTS_AND_ACTIVATIONS.fullmatch(name)) is not None and int(widths[2]) < 16:
        weights, activations = (_closest(f"int{bits}") for bits in widths.groups())
        return f"; use vn.quant.Rule('.*', {weights!r}, act_qtype={activations!r})"
    close = _closest(name)
    if close is None:
        return f"; the formats are {', '.join(FORMATS)}; aliases are {', '.join(ALIASES)}"
    return f"; did you mean {close!r}? vn.quant.FORMATS has all formats"


def _closest(name: str) -> str | None:
    """Return the known format that is most similar to an unknown name, or None.

    A name with a width, such as "int9" or "3bit", is most similar to the integer format of the
    nearest width.
    """
    if (width := _BITS.fullmatch(name) or _WEIGHTS_AND_ACTIVATIONS.fullmatch(name)) is not None:
        name = f"int{width[1]}"
    if (integer := _INTEGER.fullmatch(name)) is not None:
        prefix, bits = integer.groups()  # The prefix is "u" or "".
        known = [match for other in FORMATS if (match := _INTEGER.fullmatch(other))]
        # Prefer the nearest width, then the same prefix, then the larger width.
        order = lambda m: (abs(int(m[2]) - int(bits)), m[1] != prefix, -int(m[2]))
        return min(known, key=order)[0]
    names = (*FORMATS, *ALIASES)
    longer_names = [known for known in names if len(name) > 2 and name in known]
    return next(iter(longer_names or difflib.get_close_matches(name, names)), None)
