"""The error for an unknown format: the name that was probably meant, or what to do instead."""

import difflib
import re
from collections.abc import Sequence

# The format and tile size that equal each quantization type of GGUF.
_GGUF = {
    "q4_0": "'int4' with tile_size=32",
    "q4_1": "'uint4' with tile_size=32",
    "q5_0": "'int5' with tile_size=32",
    "q5_1": "'uint5' with tile_size=32",
    "q8_0": "'int8' with tile_size=32",
}

# Types of GGUF whose scales are quantized too. `vn.load` reads them, and `quantize` has formats
# that are close. Names of mixtures, such as Q4_K_M, count as their most frequent type.
_CLOSE_TO_GGUF = {
    "q2_k": "'uint2' with tile_size=16",
    "q3_k": "'int3' with tile_size=16",
    "q4_k": "'uint4' with tile_size=32",
    "q5_k": "'uint5' with tile_size=32",
    "q6_k": "'int6' with tile_size=16",
    "iq4_xs": "'iq4_nl' with tile_size=32",
    "tq1_0": "'ternary' with tile_size=256",
    "tq2_0": "'ternary' with tile_size=256",
}

_DENSE = re.compile(r"(b?f|fp|b?float)(16|32|64)|half|float|double")
_INTEGER = re.compile(r"(u?)int(\d+)(?:[-_].*)?")  # also int8_per_channel
_BITS = re.compile(r"(\d+)[-_ ]?bits?")
_WEIGHTS_AND_ACTIVATIONS = re.compile(r"w(\d+)a(\d+)")
_METHOD = re.compile(r"(gptq|awq|smoothquant)(\+gptq)?")


def unknown_format(name: str, formats: Sequence[str], aliases: Sequence[str]) -> ValueError:
    """Return the error for a name that is neither a format nor an alias."""
    return ValueError(f"unknown format {name!r}{_advice(name.lower(), formats, aliases)}")


def _advice(name: str, formats: Sequence[str], aliases: Sequence[str]) -> str:
    if name in _GGUF:
        return f"; use {_GGUF[name]}, which is GGUF's {name.upper()}"
    gguf = re.sub(r"_[sml]$", "", name)
    if gguf in _CLOSE_TO_GGUF:
        return (
            f", a type of GGUF: vn.load reads it from a GGUF file. To quantize, the closest "
            f"format is {_CLOSE_TO_GGUF[gguf]}"
        )
    if _DENSE.fullmatch(name):
        return ", a dense dtype: to keep a weight dense, write None as the format of its rule"
    if _METHOD.fullmatch(name):
        acts = name.startswith("smoothquant")
        rules = "[vn.quant.Rule('.*', 'int8', act_qtype='int8')]" if acts else "'int4'"
        return (
            ", which is a method of calibration. Choose a format, and call vn.quant.calibrate("
            f"model, {rules}, params=params, method={name!r})"
        )
    if (bits := _WEIGHTS_AND_ACTIVATIONS.fullmatch(name)) is not None and int(bits[2]) < 16:
        weights, activations = (_closest(f"int{n}", formats, aliases) for n in bits.groups())
        return f"; use vn.quant.Rule('.*', {weights!r}, act_qtype={activations!r})"
    close = _closest(name, formats, aliases)
    if close is None:
        return f"; the formats are {', '.join(formats)}; aliases are {', '.join(aliases)}"
    return f"; did you mean {close!r}? vn.quant.FORMATS has all formats"


def _closest(name: str, formats: Sequence[str], aliases: Sequence[str]) -> str | None:
    """Return the integer format of the most similar width, or else the most similar name."""
    if (width := _BITS.fullmatch(name) or _WEIGHTS_AND_ACTIVATIONS.fullmatch(name)) is not None:
        name = f"int{width[1]}"
    if (integer := _INTEGER.fullmatch(name)) is not None:
        sign, bits = integer.groups()
        known = [match for other in formats if (match := _INTEGER.fullmatch(other))]

        def distance(other: re.Match[str]) -> tuple[int, bool, int]:
            width = int(other[2])
            return abs(width - int(bits)), other[1] != sign, -width

        return min(known, key=distance)[0]
    names = (*formats, *aliases)
    holding = [known for known in names if len(name) > 2 and name in known]
    return next(iter(holding or difflib.get_close_matches(name, names)), None)
