"""Lookup of formats, with an error that suggests the closest name."""

import difflib
import re
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .format import Format
from .table import FORMATS

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
