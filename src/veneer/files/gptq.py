"""GPTQ: codes in words along the input, zero points in words along the output.

AutoGPTQ and GPTQModel write `qweight` i32 `[in * bits / 32, out]` and `qzeros` i32
`[groups, out * bits / 32]`, which are bit streams along their packed axis, `scales`
`[groups, out]`, and `g_idx` i32 `[in]`, the group of each input. With `desc_act`, groups are in any
order. The value is `(q - z) * s`. In version 1 of the format, z is the stored zero point plus one.

So AutoGPTQ cannot store a zero point of 0. GPTQModel can: it subtracts 1 from each field of a word
as from one number, so that a field of 0 borrows from the next field. With 3 bits, it subtracts 1
from each field modulo 8.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .._core.value import Value
from ..quant.formats.packing import packed_size
from ..types.basis import Permuted
from . import codes
from .codes import (
    EncodedWeight,
    UnsupportedByFormat,
    make_affine,
    most_common,
    pack,
    split_affine,
)
from .stored_tensors import FLOATS, StoredTensors, Weight, sort_by_group

# The number of modules whose zero points are read to find the version of a symmetric folder.
_SAMPLED_MODULES = 4


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the quantized weights of a folder in GPTQ format."""
    version = source.quantization.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"{source.folder.path} has 'checkpoint_format': {version!r:.20}; supported are gptq "
            "and gptq_v2. vn.load(..., raw=True) loads the stored tensors"
        )
    plus_one = _is_version_1(source)
    for module in source.modules(".qweight"):
        yield _make_weight(source, module, plus_one)


def has_layout(source: StoredTensors, module: str) -> bool:
    """Return whether the codes of a module are packed along its inputs, as in GPTQ.

    In AWQ, whose tensors have the same names, they are packed along the outputs.
    """
    headers = source.headers
    qweight, scales = headers.get(f"{module}.qweight"), headers.get(f"{module}.scales")
    return bool(qweight and scales and qweight.shape[1:] == scales.shape[1:])


def _make_weight(source: StoredTensors, module: str, plus_one: bool) -> Weight:
    qweight, qzeros = f"{module}.qweight", f"{module}.qzeros"
    scales, g_idx = f"{module}.scales", f"{module}.g_idx"
    words, out = source.shape(qweight, rank=2, dtypes=("int32", "uint32"))
    groups, _ = source.shape(scales, rank=2, dtypes=FLOATS)
    bits = _find_bits(source, module, out)
    size = words * 32 // bits
    source.check(scales, (groups, out), FLOATS, qweight)
    source.check(qzeros, (groups, out * bits // 32), ("int32", "uint32"), scales)
    if words * 32 % bits or not size or not groups:
        raise source.error(qweight, f"has {words} words, which do not fit codes of {bits} bits")
    if g_idx in source.headers:
        source.check(g_idx, (size,), ("int32", "int64"), qweight)
        tile = None
    else:
        stated = source.stated_size(_find_module_config(source, module))
        tile = source.tile(scales, size, groups, stated)
    dtype = source.dense_dtype(source.header(scales).dtype.name)
    stored = [name for name in (qweight, qzeros, scales, g_idx) if name in source.headers]
    read = partial(_read, source, module, bits, size, tile, plus_one, dtype)
    return Weight(f"{module}.weight", (out, size), dtype, tuple(stored), read)


def _read(
    source: StoredTensors,
    module: str,
    bits: int,
    size: int,
    tile: int | None,
    plus_one: bool,
    dtype: str,
) -> Any:
    scale = source.read(f"{module}.scales").T
    zero = _read_zero_points(source, module, bits, plus_one).T
    order = None
    groups = _read_groups(source, module, size, scale.shape[1], tile)
    if groups is not None:
        order, of_tile = sort_by_group(groups)
        if not np.array_equal(of_tile, np.arange(scale.shape[1])):
            scale, zero = scale[:, of_tile], zero[:, of_tile]

    def packed_rows(words: np.ndarray) -> np.ndarray:
        data = codes.as_bytes(words)
        if order is None:
            return codes.stream_to_packed(data, bits, size)
        return pack(np.take(codes.unpack_stream(data, bits, size), order, 1), bits)

    width = size if bits == 8 else packed_size(size, bits)
    packed = codes.map_rows(packed_rows, source.read(f"{module}.qweight").T, width)
    weight = make_affine(packed, scale, zero, bits=bits, size=size, dtype=dtype)
    return weight if order is None else Permuted(weight, order[None])


def _read_groups(
    source: StoredTensors, module: str, size: int, groups: int, tile: int | None
) -> np.ndarray | None:
    """Return the group of each input, or None if groups are consecutive and of equal size.

    **Arguments:**

    - `module`: the name of the module with the weight.
    - `size`, `groups`: the number of inputs and of groups.
    - `tile`: the stated group size. None to read the group of each input from the tensor `g_idx`.
    """
    index = source.read(f"{module}.g_idx") if tile is None else np.arange(size) // tile
    if index.min() < 0 or index.max() >= groups:
        raise source.error(f"{module}.g_idx", f"names groups that are not in 0 to {groups - 1}")
    even = size % groups == 0 and np.array_equal(index, np.arange(size) // (size // groups))
    return None if even else index


def _read_zero_points(source: StoredTensors, module: str, bits: int, plus_one: bool) -> np.ndarray:
    out = source.header(f"{module}.scales").shape[1]
    words = source.read(f"{module}.qzeros").view(np.uint32)
    if plus_one and bits != 3:
        words = words + np.uint32(sum(1 << place for place in range(0, 32, bits)))
    zeros = codes.unpack_stream(codes.as_bytes(words), bits, out)
    return (zeros + np.uint8(1)) & np.uint8(7) if plus_one and bits == 3 else zeros


def _find_bits(source: StoredTensors, module: str, out: int) -> int:
    """Return the bits per code of a module, from the shapes of its tensors."""
    _, words = source.shape(f"{module}.qzeros", rank=2, dtypes=("int32", "uint32"))
    bits, rest = divmod(words * 32, max(out, 1))
    if rest or bits not in (2, 3, 4, 8):
        raise source.error(
            f"{module}.qzeros",
            f"has {words} words for {out} outputs, which is not 2, 3, 4 or 8 bits each",
        )
    return bits


def _find_module_config(source: StoredTensors, module: str) -> Mapping[str, Any]:
    """Return the entries of `quantization_config` that apply to a module.

    The first pattern in `dynamic` that matches the module overrides the common entries.
    """
    dynamic = source.quantization.get("dynamic")
    for pattern, stated in dynamic.items() if isinstance(dynamic, Mapping) else ():
        is_skipped = pattern.startswith("-:")  # a module that is left dense
        if not is_skipped and source.matches(pattern.removeprefix("+:"), module):
            return {**source.quantization, **(stated if isinstance(stated, Mapping) else {})}
    return source.quantization


def _is_version_1(source: StoredTensors) -> bool:
    """Return whether a folder has version 1 of the format: stored zero points are too small by one.

    `checkpoint_format` in the configuration states the version. But if the weights are symmetric,
    all zero points must be `2**(bits - 1)`, so the stored ones decide. If they contradict the
    stated version, a warning says so.
    """
    stated = source.quantization.get("checkpoint_format", "gptq") != "gptq_v2"
    if source.quantization.get("sym") is False:
        return stated
    offsets = set()
    for module in list(source.modules(".qweight"))[:_SAMPLED_MODULES]:
        if not has_layout(source, module):
            return stated
        bits = _find_bits(source, module, source.header(f"{module}.scales").shape[1])
        zeros = np.unique(_read_zero_points(source, module, bits, plus_one=False))
        offsets.add(2 ** (bits - 1) - int(zeros[0]) if len(zeros) == 1 else None)
    if len(offsets) != 1 or not offsets <= {0, 1} or offsets == {int(stated)}:
        return stated
    label, version = ("gptq", 2) if stated else ("gptq_v2", 1)
    warnings.warn(
        f"{source.folder.path} has 'checkpoint_format': {label!r}, but it is symmetric with "
        f"the zero points of version {version}: it is loaded as version {version}",
        UserWarning,
        stacklevel=2,
    )
    return not stated


def encode_weight(value: Any, *, plus_one: bool = True) -> EncodedWeight:
    """Return a quantized matrix in GPTQ format.

    **Arguments:**

    - `plus_one`: whether to store zero points minus one, as in version 1 of the format, whose
      readers add one.

    **Raises:** `UnsupportedByFormat` if GPTQ cannot hold the matrix.
    """
    parts = split_affine(value)
    bits, (out, size) = parts.bits, parts.fields.shape
    if bits not in (2, 3, 4, 8):
        raise UnsupportedByFormat(f"it has {bits} bits, not 2, 3, 4 or 8")
    if out * bits % 32 or size * bits % 32:
        raise UnsupportedByFormat(
            f"codes of {bits} bits in shape {[out, size]} do not fill words of 32 bits. Both sizes "
            f"must be multiples of {32 // math.gcd(32, bits)}"
        )
    group_of = np.arange(size) // parts.tile if parts.group_of is None else parts.group_of
    zero = (parts.zero - plus_one).T.astype(np.uint8)
    words = lambda rows: codes.pack_to_stream(np.ascontiguousarray(rows), bits).view(np.int32)
    tensors = {
        ".qweight": words(parts.fields).T,
        ".qzeros": words(zero),
        ".scales": parts.scale.T,
        ".g_idx": group_of.astype(np.int32),
    }
    settings = {
        "bits": parts.bits,
        "group_size": parts.tile if parts.scale.shape[1] > 1 else -1,
        "sym": parts.is_symmetric,
        "desc_act": parts.group_of is not None,
    }
    return EncodedWeight(tensors, settings)


def make_config(
    settings: Mapping[str, dict[str, Any]], dense: Sequence[str], *, plus_one: bool
) -> dict[str, Any]:
    """Return the `quantization_config` entry of `config.json`.

    **Arguments:**

    - `settings`: a dict from the names of modules to `EncodedWeight.settings` of their weights.
    - `dense`: unused. GPTQ does not list modules with dense weights.
    - `plus_one`: whether the weights are in version 1 of the format. See `encode_weight`.
    """
    usual = most_common([(x["bits"], x["group_size"]) for x in settings.values()])
    others = {
        f"+:^{re.escape(module)}$": {"bits": x["bits"], "group_size": x["group_size"]}
        for module, x in settings.items()
        if (x["bits"], x["group_size"]) != usual
    }
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if plus_one else "gptq_v2",
        "bits": usual[0],
        "group_size": usual[1],
        "sym": all(x["sym"] for x in settings.values()),
        "desc_act": any(x["desc_act"] for x in settings.values()),
        **({"dynamic": others} if others else {}),
    }


def choose_version(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `encode_weight` for the tensors of a model: `plus_one`.

    It selects version 1 of the format, which stores zero points minus one, unless a zero point is
    0.
    """
    weights = (tensors[name] for name in tensors)
    return {"plus_one": all(_fits_version_1(x) for x in weights if isinstance(x, Value))}


def _fits_version_1(value: Value) -> bool:
    try:
        return bool((split_affine(value).zero > 0).all())
    except UnsupportedByFormat:
        return True  # `encode_weight` raises the error
