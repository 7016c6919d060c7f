"""`zeros`, which creates an array of type QCache or BlockCache."""

import dataclasses
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..arrays.qarray import QUANTIZABLE
from ..conversion.compute import QuantizeParams, quantize_with_params
from ..conversion.quantize import Axes, TiledAxes, quantize_params
from ..formats import get_format
from ..formats.tiles import Shape, normalize_axis, tile_shape
from .block_cache import BlockCache
from .qcache import QCache, repack


def zeros(
    shape: Sequence[int],
    qtype: DTypeLike,
    *,
    dtype: DTypeLike = jnp.float32,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    block_axis: int | None = None,
) -> QCache | BlockCache:
    """Return a quantized array of zeros that programs write into, such as a KV cache.

    `jax.lax.dynamic_update_slice`, `.at[...].set` and `jnp.concatenate` quantize only the values
    that they write. If a program writes one token at a time, name the token axis in
    `channelwise_axes`, so that each token has its own scale.

    **Arguments:**

    - `shape`: the shape of the array. To start with an empty cache, give the token axis size 0 and
      name it in `channelwise_axes`. Each token that is concatenated then gets its own scale.
    - `qtype`, `channelwise_axes`, `tiled_axes`, `scale_dtype`: as for `vn.quant.quantize`.
    - `dtype`: the dtype of the dense array.
    - `calibration_method`: None for the default method of the format, or "minmax" for scales with a
      zero point (integer formats only).
    - `block_axis`: the token axis, if blocks of tokens share scales, as in KIVI (arXiv 2402.02750).
      The axis must be one of `tiled_axes`, and its tile size is the block size. The newest block is
      also stored in full precision.

    **Returns:** a `QCache`, or a `BlockCache` if `block_axis` is given. Codes of fewer than 8 bits
    are packed along the last axis on which values share a scale. Each write then changes whole
    bytes.

    **Raises:**

    - `TypeError` if `dtype` is not floating.
    - `ValueError` if `vn.quant.quantize` would reject the arguments, if a size is negative, or if
      `block_axis` is not in `tiled_axes`.
    - `ValueError` if `calibration_method` is another method, or the format has quantized scales
      (nvfp4, nf4_dq).

    >>> import jax.numpy as jnp, veneer as vn
    >>> keys = vn.quant.zeros((8, 128, 64), "int8", channelwise_axes=[0, 1])
    >>> write = vn.implicit(lambda keys, key, at: keys.at[:, at].set(key))
    >>> keys = write(keys, jnp.ones((8, 64)), 3)
    >>> keys, keys.dequantize()[0, 2:5, 0].round(1).tolist()
    (QArray(q8[8,128,64] channelwise, 8.5 bits), [0.0, 1.0, 0.0])
    """
    format, shape = get_format(qtype), tuple(map(operator.index, shape))
    if any(size < 0 for size in shape):
        raise ValueError(f"shape must not have negative sizes, but is {shape}")
    if format.scale_tile is not None:
        raise ValueError(
            f"{format.name} has quantized scales, so a part of an array cannot be quantized alone: "
            "use another format for a cache"
        )
    if calibration_method not in (None, format.calibration, "minmax"):
        raise ValueError(
            f"calibration_method of a cache in {format.name} must be {format.calibration!r} or "
            f"'minmax', not {calibration_method!r}"
        )
    like = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if like.dtype not in QUANTIZABLE:
        raise TypeError(f"dtype must be floating, not {like.dtype.name}")
    params = quantize_params(
        like, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    if block_axis is not None:
        axis = normalize_axis(operator.index(block_axis), shape)
        if axis not in [int(i) % len(shape) for i in tiled_axes or ()]:
            raise ValueError(
                f"block_axis {block_axis} must be one of tiled_axes, which are "
                f"{[*(tiled_axes or ())]}"
            )
        return _zeros_in_blocks(shape, dtype, params, axis)
    # Bytes are packed along one axis. Quantize one row along this axis, and repeat its codes and
    # scales along all other axes.
    tile = tile_shape(shape, params.scale_shape)
    packed_axis = max((i for i, size in enumerate(tile) if size > 1), default=len(shape) - 1)
    row_shape, row_scale_shape = (
        tuple(size if i == packed_axis else 1 for i, size in enumerate(sizes))
        for sizes in (shape, params.scale_shape)
    )
    row_params = dataclasses.replace(params, scale_shape=row_scale_shape)
    row = quantize_with_params(jnp.zeros(row_shape, dtype), row_params)
    row = repack(row, packed_axis - len(shape))
    packed_shape = [row.packed.shape[i] if i == packed_axis else n for i, n in enumerate(shape)]
    repeat = lambda leaf: leaf if leaf is None else jnp.broadcast_to(leaf, params.scale_shape)
    return QCache.from_packed(
        jnp.broadcast_to(row.packed, packed_shape),
        repeat(row.scale),
        repeat(row.zero_point),
        qtype=qtype,
        packing=row.packing,
        dense_dtype=dtype,
    )


def _zeros_in_blocks(
    shape: Shape, dtype: DTypeLike, params: QuantizeParams, axis: int
) -> BlockCache:
    """Return a `BlockCache` of zeros with blocks along `axis`. `params` are for all blocks."""
    num_blocks = params.scale_shape[axis]
    with_size = lambda sizes, size: (*sizes[:axis], size, *sizes[axis + 1 :])  # along `axis`
    newest = jnp.zeros(with_size(shape, shape[axis] // max(num_blocks, 1)), dtype)
    block_params = dataclasses.replace(params, scale_shape=with_size(params.scale_shape, 1))
    block = quantize_with_params(newest, block_params)
    blocks = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_blocks, *leaf.shape)), block)
    return BlockCache(QCache.from_qarray(blocks), newest, jnp.int32(0), axis - len(shape))
