"""compressed-tensors, the format of llm-compressor: packed integers, and codes of 8 or 4 bits.

The stored tensors tell its formats apart. A matrix `[out, in]` has:

- pack-quantized: `weight_packed` i32, with codes plus `2**(bits - 1)` along the input;
  `weight_scale` `[out, groups]`; `weight_shape`; if it is not symmetric, `weight_zero_point`,
  packed along the *output*; and optionally `weight_g_idx` `[in]`, the group of each input. Since
  version 0.18, codes are a bit stream. Before, a word held as many whole codes as fit.
- int-quantized, float-quantized: `weight` i8 or e4m3, and `weight_scale` per tensor, row, group or
  block.
- nvfp4-pack-quantized: `weight_packed` u8, e2m1, with the first of two codes in the low half of a
  byte; `weight_scale` e4m3 per 16 values; and `weight_global_scale` f32, by which the scales are
  **divided**. Here, they are multiplied by its reciprocal, which can differ by two units in the
  last place.
- mxfp4-pack-quantized, and mxfp6 of e2m3 as a bit stream: `weight_scale` u8 per 32 values, the
  exponent of a power of two plus 127. mxfp8-quantized has `weight` e4m3.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..quant import QArray
from ..types.basis import Permuted
from . import codes
from .block_floats import E8M0, FLOAT8, make_byte_weight, read_block_size
from .codes import (
    EncodedWeight,
    UnsupportedByFormat,
    entries_per_row,
    make_affine,
    most_common,
    pack,
    require_matrix,
    split_affine,
)
from .stored_tensors import FLOATS, StoredTensors, Weight, even_tiles, make_qarray, sort_by_group

_FLOATS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")
_SPARSE = ("_compressed", "_bitmask", ".compressed", ".bitmask")


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the quantized weights of a folder in the formats of compressed-tensors."""
    for suffix in _SPARSE:
        for module in source.modules(suffix):
            raise source.error(
                module + suffix,
                "is sparse, which is unsupported: vn.load(..., raw=True) loads the stored tensors",
            )
    for module in source.modules(".weight_packed"):
        yield _make_packed_weight(source, module)
    for module in source.modules(".weight_scale"):
        name = f"{module}.weight"
        if name not in source.headers:
            continue
        if source.header(f"{module}.weight_scale").dtype.name == "uint8":
            yield _make_float_weight(source, module, name)
        elif source.header(name).dtype.name in ("int8", *FLOAT8):
            zero = f"{module}.weight_zero_point"
            zero_name = zero if zero in source.headers else None
            blocks = (_read_tile_sizes(source, scheme) for scheme in _find_schemes(source, module))
            yield make_byte_weight(
                source, name, f"{module}.weight_scale", *blocks, zero_name=zero_name
            )


def _find_schemes(source: StoredTensors, module: str) -> list[Mapping[str, Any]]:
    """Return the `weights` entries of `config_groups` in `config.json` that may apply to a module.

    An entry states how a weight is quantized. Each group lists its targets: names of modules,
    regular expressions ("re:..."), or classes ("Linear"). As in compressed-tensors, a matching name
    takes precedence over an expression, and an expression over a class. Only the entry of the
    best match is returned. The class of a module is not known here, so if neither a name nor an
    expression matches, the entries of all groups are returned.
    """
    groups = source.quantization.get("config_groups")
    schemes: list[Mapping[str, Any]] = []
    by_name: list[tuple[bool, str, Mapping[str, Any]]] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        stated = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(stated, Mapping):
            continue
        schemes.append(stated)
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else ():
            is_regex = isinstance(target, str) and target.startswith("re:")
            if target == module or (is_regex and source.matches(target[3:], module)):
                by_name.append((is_regex, target, stated))
    return [min(by_name, key=lambda match: match[:2])[2]] if by_name else schemes


def _read_tile_sizes(source: StoredTensors, scheme: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many values share a scale along `[out, in]`, from a `weights` entry.

    -1 means all values of the axis. The result is None if the entry `scheme` does not state a size.

    **Raises:** `ValueError` if the stated sizes are invalid.
    """
    block, group = scheme.get("block_structure"), source.stated_size(scheme)
    strategy = scheme.get("strategy")
    if strategy is None:  # compressed-tensors infers it in the same way
        strategy = "block" if block is not None else "channel" if group == -1 else "group"
    if isinstance(block, str):  # as "128x128" in old files
        block = [int(size) if size.isdecimal() else size for size in block.split("x")]
    if strategy == "block":
        return read_block_size(source, block)
    if strategy in ("tensor", "channel"):
        return (-1 if strategy == "tensor" else 1), -1
    return None if group is None else (1, group)


def _make_packed_weight(source: StoredTensors, module: str) -> Weight:
    dtype = source.header(f"{module}.weight_packed").dtype.name
    if dtype == "int32":
        return _make_integer_weight(source, module)
    return _make_float_weight(source, module, f"{module}.weight_packed")


def _make_float_weight(source: StoredTensors, module: str, packed: str) -> Weight:
    """Return a weight of small floats, such as NVFP4. Its bytes per scale determine its format.

    `packed` is the name of the stored tensor with the codes of `module`.
    """
    scale, above = f"{module}.weight_scale", f"{module}.weight_global_scale"
    out, width = source.shape(packed, rank=2, dtypes=("uint8", "float8_e4m3fn"))
    nvidia = above in source.headers
    of_scale = ("float8_e4m3fn",) if nvidia else ("uint8", "float8_e8m0fnu")
    _, groups = source.shape(scale, rank=2, dtypes=of_scale)
    source.check(scale, (out, groups), of_scale, packed)
    kinds = ("nvfp4",) if nvidia else ("mxfp4", "mxfp6", "mxfp8")
    size = groups * (16 if nvidia else 32)
    qtype = next((kind for kind in kinds if width * 8 == size * int(kind[-1])), None)
    eight = source.header(packed).dtype.name != "uint8"
    if qtype is None or eight != (qtype == "mxfp8"):
        raise source.error(
            packed, f"has {width} columns, which do not fit codes of {' or '.join(kinds)}"
        )
    if f"{module}.weight_zero_point" in source.headers:
        raise source.error(
            f"{module}.weight_zero_point", "must not exist: small floats have no zero points"
        )
    if nvidia and source.header(above).shape not in ((), (1,)):
        raise source.error(above, "is not a single number")
    parts = (packed, scale, *([above] if nvidia else []))
    dtype = source.dense_dtype("float32")
    read = partial(_read_floats, source, parts, qtype, size, dtype)
    return Weight(f"{module}.weight", (out, size), dtype, parts, read)


def _read_floats(
    source: StoredTensors, parts: tuple[str, ...], qtype: str, size: int, dtype: str
) -> Any:
    packed, scale = source.read(parts[0]), source.read(parts[1])
    bits = int(qtype[-1])
    packed = codes.stream_to_packed(packed, bits, size)
    packing = codes.last_axis_packing(size, bits)
    if len(parts) == 2:
        return make_qarray(packed, scale.view(E8M0), qtype=qtype, packing=packing, dtype=dtype)
    one = np.float32(1) / source.read(parts[2]).astype(np.float32).reshape(1, 1)
    nested = make_qarray(scale, one, qtype="float8_e4m3fn", packing=None, dtype="float32")
    return make_qarray(packed, nested, qtype=qtype, packing=packing, dtype=dtype)


class _WordLayout(NamedTuple):
    """A layout of codes in 32-bit words.

    - `bits`: the bits of a code.
    - `has_whole_codes`: whether no code spans two words. Otherwise, codes follow each other without
      gaps.
    """

    bits: int
    has_whole_codes: bool

    def words(self, size: int) -> int:
        """Return the number of words that hold `size` codes."""
        return -(-size // (32 // self.bits)) if self.has_whole_codes else -(-size * self.bits // 32)

    def fields(self, words: np.ndarray, size: int) -> np.ndarray:
        """Return the first `size` codes of each row of words: `uint8[..., size]`."""
        if self.has_whole_codes:
            return codes.unpack_words(words, self.bits, size)
        return codes.unpack_stream(codes.as_bytes(words), self.bits, size)


def _make_integer_weight(source: StoredTensors, module: str) -> Weight:
    packed, scale, zero, g_idx, shape_name = (
        f"{module}.weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")
    )
    out, words = source.shape(packed, rank=2, dtypes=("int32",))
    source.shape(shape_name, rank=1, dtypes=("int64", "int32"))
    source.check(shape_name, (2,), ("int64", "int32"), packed)
    rows, size = map(int, source.read(shape_name))
    schemes = _find_schemes(source, module)
    layout = _find_layout(source, schemes, words, size)
    if rows != out or layout is None:
        raise source.error(
            packed, f"has shape {[out, words]}, which does not fit codes of [{rows}, {size}]"
        )
    source.shape(scale, rank=2, dtypes=FLOATS)
    groups = source.header(scale).shape[1]
    source.check(scale, (out, groups), FLOATS, packed)
    parts = [packed, scale, shape_name]
    if zero in source.headers:
        if source.header(zero).dtype.name == "int8":
            source.check(zero, (out, groups), ("int8",), scale)
        else:
            source.check(zero, (layout.words(out), groups), ("int32",), scale)
        parts.append(zero)
    if g_idx in source.headers:
        source.check(g_idx, (size,), ("int32", "int64"), packed)
        parts.append(g_idx)
    matching = [scheme for scheme in schemes if scheme.get("num_bits") in (layout.bits, None)]
    tiles = [_read_tile_sizes(source, scheme) for scheme in matching]
    stated = [None if tile is None else tile[1] for tile in tiles]
    if g_idx not in source.headers:
        source.tile(scale, size, groups, *stated)
    dtype = source.dense_dtype(source.header(scale).dtype.name)
    read = partial(_read_words, source, module, layout, (out, size), stated, dtype)
    return Weight(f"{module}.weight", (out, size), dtype, tuple(parts), read)


def _find_layout(
    source: StoredTensors, schemes: Sequence[Mapping[str, Any]], words: int, size: int
) -> _WordLayout | None:
    """Return the layout of a row of `size` codes that are stored in `words` 32-bit words.

    `schemes` are the `weights` entries that may apply, which state the number of bits. For a few
    small sizes, both layouts have the same number of words. Then the version of the format decides.
    Return None if no layout has this number of words, or if several have it.
    """
    numbers = [scheme.get("num_bits") for scheme in schemes]
    stated = {bits for bits in numbers if type(bits) is int and 1 < bits <= 8}
    layouts = [
        layout
        for bits in stated or (4, 8)
        for layout in (_WordLayout(bits, False), _WordLayout(bits, True))
        if size > 0
        and words == layout.words(size)
        and not (layout.has_whole_codes and 32 % bits == 0)
    ]
    version = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.\d+", str(source.quantization.get("version")))
    if len(layouts) > 1 and version:
        is_old = (int(version[1]), int(version[2])) < (0, 18)
        layouts = [x for x in layouts if x.has_whole_codes == is_old or 32 % x.bits == 0]
    return layouts[0] if len(layouts) == 1 else None


def _read_words(
    source: StoredTensors,
    module: str,
    layout: _WordLayout,
    shape: tuple[int, int],
    stated: Sequence[int | None],
    dtype: str,
) -> Any:
    bits, size = layout.bits, shape[1]
    words = source.read(f"{module}.weight_packed")
    if layout.has_whole_codes:
        packed = codes.pack_rows(layout.fields(words, size), bits)
    else:
        packed = codes.stream_to_packed(codes.as_bytes(words), bits, size)
    scale = source.read(f"{module}.weight_scale")
    zero = _read_zero_points(source, module, layout, scale.shape)
    tile = partial(source.tile, f"{module}.weight_scale", size, scale.shape[1], *stated)
    order = None
    if f"{module}.weight_g_idx" in source.headers:
        groups = source.read(f"{module}.weight_g_idx")
        if (groups < 0).all():  # its initial value, so it is unused
            groups = np.arange(size) // tile()
        if groups.min() < 0 or groups.max() >= scale.shape[1]:
            raise source.error(f"{module}.weight_g_idx", "names groups that do not exist")
        order, of_tile = sort_by_group(groups)
        scale, zero = scale[:, of_tile], zero[:, of_tile]
        if order is not None:
            in_order = lambda rows: pack(
                np.take(codes.unpack_rows(rows, bits, size), order, 1), bits
            )
            packed = codes.map_rows(in_order, packed, packed.shape[1])
    else:
        scale, zero = (even_tiles(x, 1, size, tile()) for x in (scale, zero))
    weight = make_affine(packed, scale, zero, bits=bits, size=size, dtype=dtype)
    return weight if order is None else Permuted(weight, order[None])


def _read_zero_points(
    source: StoredTensors, module: str, layout: _WordLayout, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the zero points of the nonnegative codes of a module, in the given shape.

    `shape` is `[out, groups]`. If no zero points are stored, the weight is symmetric, and all of
    them are `2**(bits - 1)`.
    """
    name, half = f"{module}.weight_zero_point", 2 ** (layout.bits - 1)
    if name not in source.headers:
        return np.full(shape, half, np.uint8)
    zero = source.read(name)
    if zero.dtype == np.int8:
        return (zero.astype(np.int16) + half).astype(np.uint8)
    return layout.fields(zero.T, shape[0]).T


def encode_weight(value: Any) -> EncodedWeight:
    """Return a quantized matrix in a format of compressed-tensors, chosen by its codes.

    **Raises:** `UnsupportedByFormat` if no format can hold it.
    """
    q = require_matrix(value.array if isinstance(value, Permuted) else value)
    if q.qtype in _FLOATS:
        return _encode_floats(q)
    if q is value and q.qtype in ("int8", "float8_e4m3fn") and q.zero_point is None:
        return _encode_bytes(q)
    parts = split_affine(value)
    bits = parts.bits
    tensors = {
        ".weight_packed": codes.pack_to_words(parts.fields, bits),
        ".weight_scale": parts.scale,
        ".weight_shape": np.array(parts.fields.shape, np.int64),
    }
    if not parts.is_symmetric:
        zero = np.ascontiguousarray(parts.zero.T.astype(np.uint8))
        tensors[".weight_zero_point"] = codes.pack_to_words(zero, bits).T
    if parts.group_of is not None:
        tensors[".weight_g_idx"] = parts.group_of
    is_per_channel = parts.scale.shape[1] == 1
    stated = _make_settings("pack-quantized", bits, "int", parts.is_symmetric)
    stated |= (
        {"strategy": "channel"}
        if is_per_channel
        else {"strategy": "group", "group_size": parts.tile}
    )
    stated |= {"actorder": "group"} if parts.group_of is not None else {}
    return EncodedWeight(tensors, stated)


def _encode_bytes(q: QArray) -> EncodedWeight:
    if q.minimum is not None:
        raise UnsupportedByFormat("it has a minimum per group")
    (out, size), (rows, groups) = q.shape, q.scale.shape
    layout = "int-quantized" if q.qtype == "int8" else "float-quantized"
    of_tiles: dict[str, Any]
    stated = _make_settings(layout, 8, "int" if q.qtype == "int8" else "float", True)
    if (rows, groups) == (1, 1):
        scale, of_tiles = entries_per_row(q.scale, 1, size).reshape(1), {"strategy": "tensor"}
    elif groups == 1 and rows == out:
        scale, of_tiles = entries_per_row(q.scale, out, size), {"strategy": "channel"}
    elif rows == out:
        scale = entries_per_row(q.scale, out, size)
        of_tiles = {"strategy": "group", "group_size": size // groups}
    else:
        scale = entries_per_row(q.scale, rows, size)
        of_tiles = {"strategy": "block", "block_structure": [out // rows, size // groups]}
    return EncodedWeight(
        {".weight": np.asarray(q.packed), ".weight_scale": scale}, stated | of_tiles
    )


def _encode_floats(q: QArray) -> EncodedWeight:
    tile = 16 if q.qtype == "nvfp4" else 32
    bits, packed = int(q.qtype[-1]), np.asarray(q.packed)
    if bits < 8 and (q.packing is None or q.packing.axis != -1):
        raise UnsupportedByFormat(
            "its codes are not packed along the inputs: quantize the weight with shape [out, in]"
        )
    scale: Any = q.scale
    tensors = {".weight_packed" if bits < 8 else ".weight": codes.packed_to_stream(packed, bits)}
    if q.qtype == "nvfp4":
        if not isinstance(scale, QArray) or scale.scale.size != 1:
            raise UnsupportedByFormat("its scales have no global scale")
        one = np.asarray(scale.scale, np.float32).reshape(1)
        above = np.float32(1) / one
        if not np.array_equal(np.float32(1) / above, one):
            raise UnsupportedByFormat("its global scale is not the reciprocal of a float32 number")
        tensors[".weight_global_scale"] = above
        scale = scale.packed
    if tuple(scale.shape) != (q.shape[0], q.shape[1] // tile):
        raise UnsupportedByFormat(
            f"it needs one scale per {tile} inputs: quantize it with tile_size={tile}"
        )
    scale = np.asarray(scale)
    tensors[".weight_scale"] = scale if q.qtype == "nvfp4" else scale.view(np.uint8)
    layout = f"{q.qtype}-pack-quantized" if bits < 8 else f"{q.qtype}-quantized"
    stated = _make_settings(layout, bits, "float", True)
    strategy = "tensor_group" if q.qtype == "nvfp4" else "group"
    return EncodedWeight(tensors, stated | {"strategy": strategy, "group_size": tile})


def _make_settings(layout: str, bits: int, kind: str, symmetric: bool) -> dict[str, Any]:
    return {"format": layout, "num_bits": bits, "type": kind, "symmetric": symmetric}


def make_config(settings: Mapping[str, dict[str, Any]], dense: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` entry of `config.json`.

    **Arguments:**

    - `settings`: a dict from the names of modules to `EncodedWeight.settings` of their weights.
    - `dense`: the names of the modules whose weights are dense matrices.
    """
    kinds: list[dict[str, Any]] = []
    modules: list[list[str]] = []
    for module, weights in settings.items():
        if weights not in kinds:
            kinds.append(weights)
            modules.append([])
        modules[kinds.index(weights)].append(module)
    layouts = {weights["format"] for weights in kinds}
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(kinds) == 1 else names,
            "weights": {k: v for k, v in weights.items() if k != "format"},
            **({"format": weights["format"]} if len(layouts) > 1 else {}),
        }
        for i, (weights, names) in enumerate(zip(kinds, modules, strict=True))
    }
    return {
        "quant_method": "compressed-tensors",
        "version": "0.18.0",  # the first with codes of 3, 5, 6 and 7 bits as a bit stream
        "format": most_common([*layouts]) if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*dense],
    }
