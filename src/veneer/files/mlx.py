"""MLX: codes of 2 to 8 bits in words along the input, with a scale and a minimum per group.

`weight` u32 `[..., out, in * bits / 32]` is a bit stream, `scales` and `biases` are `[..., out,
groups]`, and the value is `q * s + bias`. In the modes mxfp4, nvfp4 and mxfp8, codes are small
floats, scales are u8, and there is no bias. The entry `quantization` of `config.json` states bits,
group size and mode. Layers that differ have their own entries in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..quant import QArray
from . import codes
from .codes import (
    EncodedWeight,
    UnsupportedByFormat,
    entries_per_row,
    most_common,
    require_matrix,
    split_affine,
    unsigned_codes,
)
from .stored_tensors import FLOATS, StoredTensors, Weight, make_qarray

BITS = (2, 3, 4, 5, 6, 8)
TILES = (32, 64, 128)

# By mode: the bits of a code, the group size, and the dtype of the scales, which are stored as u8.
MODES = {
    "mxfp4": (4, 32, np.dtype(jnp.float8_e8m0fnu)),
    "nvfp4": (4, 16, np.dtype(jnp.float8_e4m3fn)),
    "mxfp8": (8, 32, np.dtype(jnp.float8_e8m0fnu)),
}


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the quantized weights of a folder in the format of MLX."""
    for module in source.modules(".scales"):
        if f"{module}.weight" in source.headers:
            yield _make_weight(source, module)


def _make_weight(source: StoredTensors, module: str) -> Weight:
    name, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
    header, of_scales = source.header(name), source.header(scales)
    *lead, words = source.shape(name, rank=max(len(header.shape), 2), dtypes=("uint32",))
    of_layer = source.quantization.get(module)
    stated = {**source.quantization, **(of_layer if isinstance(of_layer, Mapping) else {})}
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


def _read(
    source: StoredTensors, parts: tuple[str, ...], mode: str, bits: int, size: int, dtype: str
) -> Any:
    packed = codes.stream_to_packed(codes.as_bytes(source.read(parts[0])), bits, size)
    scale, packing = source.read(parts[1]), codes.last_axis_packing(size, bits)
    if mode == "affine":
        minimum = np.ascontiguousarray(source.read(parts[2]))
        qtype = f"uint{bits}"
        return make_qarray(
            packed, scale, qtype=qtype, packing=packing, dtype=dtype, minimum=minimum
        )
    packed = packed.view(jnp.float8_e4m3fn) if mode == "mxfp8" else packed
    scale = scale.view(MODES[mode][2])
    return make_qarray(packed, scale, qtype=mode, packing=packing, dtype=dtype)


def encode_weight(value: Any) -> EncodedWeight:
    """Return a quantized matrix in the format of MLX.

    It may have a minimum, or zero points whose products with the scales are exact.

    **Raises:** `UnsupportedByFormat` if MLX cannot hold the matrix.
    """
    q = require_matrix(value)
    if q.qtype in MODES:
        return _encode_floats(q)
    if q.minimum is not None:
        if q.zero_point is not None or q.qtype not in (f"uint{b}" for b in BITS):
            raise UnsupportedByFormat("it has both a minimum and zero points, or signed codes")
        bits, fields = int(q.format.bits), unsigned_codes(q)
        scale, minimum = (entries_per_row(x, *q.shape) for x in (q.scale, q.minimum))
        groups = max(scale.shape[1], minimum.shape[1])
        scale, minimum = (np.repeat(x, groups // x.shape[1], 1) for x in (scale, minimum))
    else:
        bits, fields, scale, zero, _, group_of = split_affine(q)
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
    words = codes.pack_to_stream(fields, bits).view(np.uint32)
    tensors: dict[str, np.ndarray] = {".weight": words, ".scales": scale, ".biases": minimum}
    return EncodedWeight(tensors, {"group_size": tile, "bits": bits, "mode": "affine"})


def _encode_floats(q: QArray) -> EncodedWeight:
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
    words = codes.as_bytes(np.asarray(q.packed)).view(np.uint32)
    tensors: dict[str, np.ndarray] = {
        ".weight": words,
        ".scales": np.asarray(q.scale).view(np.uint8),
    }
    return EncodedWeight(tensors, {"group_size": tile, "bits": bits, "mode": q.qtype})


def make_config(settings: Mapping[str, dict[str, Any]], dense: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization` entry of `config.json`.

    **Arguments:**

    - `settings`: a dict from the names of modules to `EncodedWeight.settings` of their weights.
    - `dense`: unused. MLX does not list modules with dense weights.
    """
    usual = most_common([*settings.values()])
    return {**usual, **{module: x for module, x in settings.items() if x != usual}}
