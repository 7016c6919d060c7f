"""MLX: codes of 2 to 8 bits in words along the input, each group with a scale and a minimum.

`weight` u32 `[..., out, in * bits / 32]` is a bit stream, `scales` and `biases` are
`[..., out, groups]`, and the value is `q * s + bias`. In the modes mxfp4, nvfp4 and mxfp8 codes are
small floats, scales are u8, and there is no bias. `quantization` of `config.json` says bits, group
size and mode; of a layer that differs, under its name.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..quant import QArray
from . import codes
from .affine import (
    Stored,
    UnsupportedByFormat,
    affine_parts,
    by_rows,
    fields_of,
    matrix,
    most_common,
)
from .stored_tensors import FLOATS, StoredTensors, Weight, quantized

BITS = (2, 3, 4, 5, 6, 8)
TILES = (32, 64, 128)

# Bits, values that share a scale, and the dtype of scales that are stored as u8.
MODES = {
    "mxfp4": (4, 32, np.dtype(jnp.float8_e8m0fnu)),
    "nvfp4": (4, 16, np.dtype(jnp.float8_e4m3fn)),
    "mxfp8": (8, 32, np.dtype(jnp.float8_e8m0fnu)),
}


def weights(source: StoredTensors) -> Iterator[Weight]:
    """The weights of a folder of MLX's."""
    for module in source.modules(".scales"):
        if f"{module}.weight" in source.headers:
            yield _weight(source, module)


def _weight(source: StoredTensors, module: str) -> Weight:
    name, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
    header, of_scales = source.header(name), source.header(scales)
    *lead, words = source.shape(name, rank=max(len(header.shape), 2), dtypes=("uint32",))
    stated = {**source.quantization, **_of_layer(source, module)}
    mode = stated.get("mode", "affine")
    mode = "affine" if biases in source.headers else mode
    if mode not in ("affine", *MODES):
        raise source.error(name, f"has mode {mode!r:.20}; MLX has affine, {', '.join(MODES)}")
    bits, tile, _ = MODES.get(mode, (0, 0, None))
    bits = bits or source.number(stated, "bits", 4)
    tile = tile or source.number(stated, "group_size", 64)
    size = words * 32 // bits if bits <= 8 else 0
    if bits not in BITS or words * 32 % bits or size % tile:
        raise source.error(
            name, f"has {words} words, which do not fit groups of {tile} codes of {bits} bits"
        )
    counts = (*lead, size // tile)
    source.check(scales, counts, FLOATS if mode == "affine" else ("uint8",), name)
    parts = [name, scales]
    if mode == "affine":
        source.check(biases, counts, (of_scales.dtype.name,), scales)
        parts.append(biases)
    dtype = source.dense_dtype(of_scales.dtype.name)
    read = partial(_read, source, tuple(parts), mode, bits, size, dtype)
    return Weight(name, (*lead, size), dtype, tuple(parts), read)


def _of_layer(source: StoredTensors, module: str) -> Mapping[str, Any]:
    stated = source.quantization.get(module)
    return stated if isinstance(stated, Mapping) else {}


def _read(
    source: StoredTensors, parts: tuple[str, ...], mode: str, bits: int, size: int, dtype: str
) -> Any:
    packed = codes.from_stream(codes.bytes_of(source.read(parts[0])), bits, size)
    scale, packing = source.read(parts[1]), codes.packing_of(size, bits)
    if mode == "affine":
        minimum = np.ascontiguousarray(source.read(parts[2]))
        qtype = f"uint{bits}"
        return quantized(packed, scale, qtype=qtype, packing=packing, dtype=dtype, minimum=minimum)
    packed = packed.view(jnp.float8_e4m3fn) if mode == "mxfp8" else packed
    scale = scale.view(MODES[mode][2])
    return quantized(packed, scale, qtype=mode, packing=packing, dtype=dtype)


def stored(value: Any) -> Stored:
    """A weight as MLX has it: of a minimum, or a zero point whose product with the scale is exact.

    **Raises:** `UnsupportedByFormat` where it cannot be.
    """
    q = matrix(value)
    if q.qtype in MODES:
        return _stored_floats(q)
    if q.minimum is not None:
        if q.zero_point is not None or q.qtype not in (f"uint{b}" for b in BITS):
            raise UnsupportedByFormat("it has both a minimum and zero points, or signed codes")
        bits, fields = int(q.format.bits), fields_of(q)
        scale, minimum = (by_rows(x, *q.shape) for x in (q.scale, q.minimum))
        groups = max(scale.shape[1], minimum.shape[1])
        scale, minimum = (np.repeat(x, groups // x.shape[1], 1) for x in (scale, minimum))
    else:
        bits, fields, scale, zero, _, group_of = affine_parts(q)
        if group_of is not None:
            raise UnsupportedByFormat("it is permuted")
        wide = -(zero * scale.astype(np.float64))
        minimum = wide.astype(scale.dtype)
        if not np.array_equal(minimum.astype(np.float64), wide):
            raise UnsupportedByFormat(
                f"its zero points times its scales are not exact in {scale.dtype.name}: use "
                "float32 scales"
            )
    if minimum.dtype != scale.dtype:
        raise UnsupportedByFormat(
            f"its scales are {scale.dtype.name} but its minima {minimum.dtype.name}"
        )
    size, tile = q.shape[1], q.shape[1] // scale.shape[1]
    if bits not in BITS or tile not in TILES or size * bits % 32:
        raise UnsupportedByFormat(
            f"rows of {size} codes of {bits} bits in groups of {tile} do not fill words"
        )
    words = codes.stream_of_fields(fields, bits).view(np.uint32)
    tensors: dict[str, np.ndarray] = {".weight": words, ".scales": scale, ".biases": minimum}
    return Stored(tensors, {"group_size": tile, "bits": bits, "mode": "affine"})


def _stored_floats(q: QArray) -> Stored:
    bits, tile, of_scale = MODES[q.qtype]
    if isinstance(q.scale, QArray) or np.dtype(q.scale.dtype) != of_scale:
        raise UnsupportedByFormat(f"its scales are not {of_scale.name}")
    if tuple(q.scale.shape) != (q.shape[0], q.shape[1] // tile) or q.shape[1] * bits % 32:
        raise UnsupportedByFormat(
            f"it needs one scale per {tile} inputs, and rows whose codes fill words of 32 bits"
        )
    if bits < 8 and (q.packing is None or q.packing.axis != -1):
        raise UnsupportedByFormat(
            "its codes are not packed along the inputs: quantize the weight with shape [out, in]"
        )
    words = codes.bytes_of(np.asarray(q.packed)).view(np.uint32)
    tensors: dict[str, np.ndarray] = {
        ".weight": words,
        ".scales": np.asarray(q.scale).view(np.uint8),
    }
    return Stored(tensors, {"group_size": tile, "bits": bits, "mode": q.qtype})


def configuration(stated: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The `quantization` of weights, of which this is what `stored` says, by module."""
    usual = most_common([*stated.values()])
    return {**usual, **{module: x for module, x in stated.items() if x != usual}}
