"""AWQ in the order "gemm": codes and zero points of 4 bits in words along the output.

AutoAWQ writes `qweight` i32 `[in, out / 8]`, `qzeros` i32 `[groups, out / 8]` and `scales`
`[groups, out]`. The value is `(q - z) * s`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..quant.formats.packing import packed_size
from . import codes
from .codes import EncodedWeight, UnsupportedByFormat, make_affine, most_common, pack, split_affine
from .stored_tensors import FLOATS, StoredTensors, Weight, even_tiles

# The outputs in a word, from the lowest bits up, and the place of each output.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLACES = tuple(map(ORDER.index, range(8)))

_WORDS = ("int32", "uint32")


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the quantized weights of a folder in AWQ format."""
    version = source.quantization.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ValueError(
            f"{source.folder.path} holds AWQ weights of version {version!r:.20}, but only gemm is "
            "supported; vn.load(..., raw=True) loads the stored tensors"
        )
    for module in source.modules(".qweight"):
        yield _make_weight(source, module)


def has_layout(source: StoredTensors, module: str) -> bool:
    """Return whether the codes of a module are packed along its outputs, as in AWQ.

    In GPTQ, whose tensors have the same names, they are packed along the inputs.
    """
    headers = source.headers
    qweight, scales = headers.get(f"{module}.qweight"), headers.get(f"{module}.scales")
    if qweight is None or scales is None or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return False
    return qweight.shape[1] * 8 == scales.shape[1]


def _make_weight(source: StoredTensors, module: str) -> Weight:
    qweight, qzeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    size, words = source.shape(qweight, rank=2, dtypes=_WORDS)
    groups, _ = source.shape(scales, rank=2, dtypes=FLOATS)
    source.check(scales, (groups, words * 8), FLOATS, qweight)
    source.check(qzeros, (groups, words), _WORDS, scales)
    tile = source.tile(scales, size, groups, source.stated_size(source.quantization))
    dtype = source.dense_dtype(source.header(scales).dtype.name)
    read = partial(_read, source, module, size, tile, dtype)
    return Weight(f"{module}.weight", (words * 8, size), dtype, (qweight, qzeros, scales), read)


def _read(source: StoredTensors, module: str, size: int, tile: int, dtype: str) -> Any:
    words, width = source.read(f"{module}.qweight").T, packed_size(size, 4)
    pack_outputs = lambda rows: pack(_unpack_outputs(rows), 4).reshape(-1, 8 * width)
    packed = codes.map_rows(pack_outputs, words, 8 * width).reshape(-1, width)
    del words
    zero = _unpack_outputs(source.read(f"{module}.qzeros").T)
    scale = source.read(f"{module}.scales").T
    scale, zero = (even_tiles(x, 1, size, tile) for x in (scale, zero))
    return make_affine(packed, scale, zero, bits=4, size=size, dtype=dtype)


def _unpack_outputs(words: np.ndarray) -> np.ndarray:
    """Unpack 32-bit words `[out / 8, n]` of eight 4-bit codes each: `uint8[out, n]`.

    AWQ interleaves the eight outputs of a word. The result is in the order of the outputs.
    """
    eight = [(words >> 4 * place).astype(np.uint8) & np.uint8(15) for place in PLACES]
    return np.stack(eight, 1).reshape(-1, words.shape[1])


def encode_weight(value: Any) -> EncodedWeight:
    """Return a quantized matrix in AWQ format.

    **Raises:** `UnsupportedByFormat` if AWQ cannot hold the matrix.
    """
    parts = split_affine(value)
    out, size = parts.fields.shape
    if parts.bits != 4 or parts.group_of is not None:
        raise UnsupportedByFormat(
            f"it has {parts.bits} bits, not 4" if parts.bits != 4 else "it is permuted"
        )
    if out % 8:
        raise UnsupportedByFormat(f"its {out} outputs are not a multiple of 8, the codes per word")
    tensors = {
        ".qweight": _pack_outputs(parts.fields.T),
        ".qzeros": _pack_outputs(parts.zero.T.astype(np.uint8)),
        ".scales": parts.scale.T,
    }
    return EncodedWeight(tensors, {"group_size": parts.tile, "inputs": size})


def _pack_outputs(fields: np.ndarray) -> np.ndarray:
    placed = fields.reshape(len(fields), -1, 8)[..., ORDER].reshape(fields.shape)
    return codes.pack_to_stream(np.ascontiguousarray(placed), 4).view(np.int32)


def make_config(settings: Mapping[str, dict[str, Any]], dense: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` entry of `config.json`.

    **Arguments:**

    - `settings`: a dict from the names of modules to `EncodedWeight.settings` of their weights.
    - `dense`: the names of the modules whose weights are dense matrices.

    **Raises:** `UnsupportedByFormat` if group sizes differ, because AWQ states one for all modules.
    """
    sizes = {module: x["group_size"] for module, x in settings.items()}
    is_whole = {module: x["group_size"] == x["inputs"] for module, x in settings.items()}
    if all(is_whole.values()):
        usual = -1
    else:
        usual = most_common([size for module, size in sizes.items() if not is_whole[module]])
        for module, size in sizes.items():
            if size != usual:
                raise UnsupportedByFormat(
                    f"{module!r} has groups of {size}, but others have groups of {usual}"
                )
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": usual,
        "zero_point": True,
        "modules_to_not_convert": [*dense],
    }
