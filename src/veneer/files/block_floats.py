"""FP8 with scales per block, row or tensor, as DeepSeek has it, and MXFP4 of gpt-oss.

FP8: `weight` e4m3 or e5m2 `[..., out, in]`, multiplied by one of these scales. Leading axes,
such as one of experts, are batch axes.

- `weight_scale_inv`, or `scale` in DeepSeek's own files: `[ceil(out / 128), ceil(in / 128)]`, for
  blocks of `weight_block_size`.
- `weight_scale`: `[]`, `[1]` or `[out, 1]`.

MXFP4: `<name>_blocks` u8 `[..., out, groups, 16]`, the first of two values in the low half of a
byte, and `<name>_scales` u8 `[..., out, groups]`, the exponent of a power of two plus 127. The
dense checkpoint has the transposed weight `[..., in, out]` as `<name>`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..quant import Packing
from .stored_tensors import (
    FLOATS,
    StoredTensors,
    Weight,
    describe,
    even_tiles,
    find_tile,
    make_qarray,
)

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def find_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the FP8 weights of a folder, each with the tensor of its scales.

    **Raises:** `ValueError` for an FP8 tensor without a scale, which would be loaded with wrong
    values.
    """
    block = read_block_size(source, source.quantization.get("weight_block_size"))
    scale_of = dict(pair_scales(source))
    for name, header in source.headers.items():
        if header.dtype.name in FLOAT8 and len(header.shape) > 1 and name not in scale_of:
            raise source.error(
                name,
                f"({describe(header)}) has no scale ({name}_scale_inv or {name}_scale): "
                "vn.load(..., raw=True) loads the stored tensors",
            )
    for name, scale_name in scale_of.items():
        shape, counts = (source.header(x).shape[-2:] for x in (name, scale_name))
        has_default = len(counts) == 2 and counts == tuple(-(-size // 128) for size in shape)
        default = (128, 128) if has_default else None  # of `weight_block_size`
        yield make_byte_weight(source, name, scale_name, block or default)


def pair_scales(source: StoredTensors) -> Iterator[tuple[str, str]]:
    """Yield pairs of the name of an FP8 tensor and the name of the tensor with its scales.

    FP8 tensors without scales are skipped.
    """
    for name, header in source.headers.items():
        if header.dtype.name in FLOAT8:
            candidates = (
                f"{name}_scale_inv",
                f"{name}_scale",
                f"{name.removesuffix('weight')}scale",
            )
            scale_name = next((x for x in candidates if x in source.headers), None)
            if scale_name is not None:
                yield name, scale_name


def read_block_size(source: StoredTensors, stated: Any) -> tuple[int, int] | None:
    """Check a block size that `config.json` states, and return it as a pair `(out, in)`.

    Return None if `stated` is None: the configuration has no such entry.

    **Raises:** `ValueError` if `stated` is not a list of two positive integers.
    """
    if stated is None:
        return None
    if not (isinstance(stated, list) and [type(x) is int and x > 0 for x in stated] == [True] * 2):
        raise ValueError(f"{source.folder.path}: {stated!r:.40} is not a valid block size")
    return stated[0], stated[1]


def make_byte_weight(
    source: StoredTensors,
    name: str,
    scale_name: str,
    *blocks: Sequence[int] | None,
    zero_name: str | None = None,
    dtype: str | None = None,
) -> Weight:
    """Return a weight with one byte per code, and scales per block, row, group or tensor.

    **Arguments:**

    - `name`, `scale_name`, `zero_name`: the names of the stored codes, scales and zero points.
    - `blocks`: candidates for the block size `[out, in]` that shares a scale, one per entry of
      `config.json` that may apply. -1 means a whole axis, and None an entry without a size.
    - `dtype`: the dtype of the dense weight. By default, the dtype of the checkpoint.

    **Raises:** `ValueError` if no block size fits the shapes, or if several fit and give different
    tiles.
    """
    shape = tuple(source.header(name).shape)
    counts = tuple(source.header(scale_name).shape)
    if source.header(scale_name).dtype.name not in (*FLOATS, "float8_e8m0fnu"):
        raise source.error(
            scale_name, "is not a scale: its dtype is not a float of 16 or 32 bits or e8m0"
        )
    fitting = {_find_tiles(shape, counts, block) for block in blocks or (None,)} - {None}
    if len(fitting) != 1:
        stated = sorted(f"{list(block)}" for block in blocks if block is not None)
        what = f"in blocks of {' or '.join(stated) or 'an unspecified size'}"
        fits = "fits in several ways" if fitting else "does not fit"
        raise source.error(
            scale_name,
            f"with shape {list(counts)} {fits} {list(shape)} {what}: correct the "
            "quantization_config of config.json",
        )
    (tiles,) = fitting
    assert tiles is not None
    if zero_name is not None:
        source.check(zero_name, counts, ("int8", "uint8", "int32", "int64", *FLOATS), scale_name)
    dtype = dtype or source.dense_dtype(source.header(scale_name).dtype.name)
    parts = (name, scale_name, *([] if zero_name is None else [zero_name]))
    read = partial(_read, source, parts, tiles, dtype)
    return Weight(name, shape, dtype, parts, read)


def _find_tiles(
    shape: tuple[int, ...], counts: tuple[int, ...], block: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Return the tile shape: how many values share a scale along each axis of a weight.

    Return None if the number of scales fits neither the weight nor the stated block size.

    **Arguments:**

    - `shape`: the shape of the weight.
    - `counts`: the shape of its scales. A single scale always fits.
    - `block`: the stated block size along the last axes, or None if it is not stated.
    """
    if counts in ((), (1,)):
        return shape
    if len(counts) == 1 and len(shape) == 2:
        counts = (*counts, 1)
    if len(counts) != len(shape):
        return None
    stated: Sequence[int | None] = [None] * len(shape)
    if block is not None:
        stated = (*[1] * (len(shape) - len(block)), *block)[-len(shape) :]
    tiles: list[int] = []
    for size, count, of in zip(shape, counts, stated, strict=True):
        tile = find_tile(size, count, of)
        if tile is None:
            return None
        tiles.append(min(tile, size))
    return tuple(tiles)


def _read(source: StoredTensors, parts: tuple[str, ...], tiles: tuple[int, ...], dtype: str) -> Any:
    packed, *others = (source.read(name) for name in parts)
    ones = [1] * packed.ndim
    spread = []
    for entries in others:
        entries = entries.reshape(
            [*entries.shape, *ones][: packed.ndim] if entries.size > 1 else ones
        )
        for axis, tile in enumerate(tiles):
            if entries.shape[axis] > 1:
                entries = even_tiles(entries, axis, packed.shape[axis], tile)
        spread.append(entries)
    scale, zero = spread[0], spread[1] if len(spread) > 1 else None
    if zero is not None:
        if not np.count_nonzero(zero):  # `any` would warn of a signaling NaN
            zero = None
        elif not np.issubdtype(zero.dtype, np.integer):
            raise source.error(
                parts[2], f"is {zero.dtype.name}, but a zero point must be an integer"
            )
    return make_qarray(packed, scale, zero, qtype=packed.dtype.name, packing=None, dtype=dtype)


E8M0 = np.dtype(jnp.float8_e8m0fnu)


def find_mxfp4_weights(source: StoredTensors) -> Iterator[Weight]:
    """Yield the MXFP4 weights of a folder of gpt-oss."""
    for name in source.modules("_blocks"):
        yield _make_mxfp4_weight(source, name)


def _make_mxfp4_weight(source: StoredTensors, name: str) -> Weight:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    header = source.header(blocks)
    *lead, out, groups, width = source.shape(
        blocks, rank=max(len(header.shape), 3), dtypes=("uint8",)
    )
    if width != 16:
        raise source.error(blocks, f"has blocks of {width} bytes, not of 16")
    source.check(scales, header.shape[:-1], ("uint8", "float8_e8m0fnu"), blocks)
    dtype = source.dense_dtype("float8_e8m0fnu")
    read = partial(_read_mxfp4, source, name, dtype)
    return Weight(name, (*lead, groups * 32, out), dtype, (blocks, scales), read)


def _read_mxfp4(source: StoredTensors, name: str, dtype: str) -> Any:
    blocks = source.read(f"{name}_blocks")
    packed = blocks.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)
    scale = source.read(f"{name}_scales").view(E8M0).swapaxes(-1, -2)
    packing = Packing(-2, 2 * packed.shape[-2])
    return make_qarray(packed, scale, qtype="mxfp4", packing=packing, dtype=dtype)
