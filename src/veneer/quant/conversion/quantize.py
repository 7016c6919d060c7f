"""`quantize` and `dequantize`: from dense arrays to QArrays and back."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import treedef_is_leaf
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..._core.surface.mistakes import check_key
from ..._core.value import materialise_one
from ..._jax.source_lines import warn_user
from ..arrays.qarray import QUANTIZABLE, QArray, pack_codes
from ..formats import FORMATS, Format, get_format, is_format
from ..formats.rounding import encode_stochastically
from ..formats.tiles import Leaf, Shape, can_tile, over_tiles, split_tiles, tile_counts
from .calibration import (
    Calibration,
    Range,
    check_calibration,
    find_range,
    has_zero_point,
    range_to_scale,
    stable_scale,
)
from .chunks import Chunks, chunks_of, in_chunks
from .cpu_kernel import has_kernel, quantize_by_kernel
from .scales import bounded_scale, store_scale, usable

Axes = Sequence[SupportsIndex]
TiledAxes = Mapping[SupportsIndex, SupportsIndex | float]


def quantize(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    key: jax.Array | None = None,
) -> QArray:
    """Quantize an array: round each value to the nearest value of a format.

    All values share one scale by default (per-tensor quantization). `channelwise_axes` gives a
    scale to each channel (per-channel), and `tiled_axes` to each group of neighbors (the group size
    of GPTQ and AWQ). The derivative is 0; for training use `vn.quant.fake_quantize` or `vn.ste`.

    **Arguments:**

    - `array`: float16, bfloat16, float32 or float64, of any shape. An implicit array is
      materialized.
    - `qtype`: the format: a name in `vn.quant.FORMATS`, such as "int8", or a dtype.
    - `channelwise_axes`: the axes with one scale per index.
    - `tiled_axes`: `{axis: tile size}`, the axes with one scale per tile. A float is a fraction of
      the axis. None means no tiles, except in formats with a fixed tile size, such as mxfp4. They
      have tiles along the last axis that is not in `channelwise_axes`, and one scale per index
      along all other axes.
    - `calibration_method`: how to choose the range that the codes of a tile cover (see the table).
      None selects the default method of the format. "mse" and "hqq" without numbers use the numbers
      in the table.
    - `scale_dtype`: the dtype of the scales. None means the scale dtype of the format if it has
      one, and otherwise the dtype of `array` (float32 for a float16 array in int16).
    - `key`: a key of `jax.random`, for stochastic rounding. The expected value of a result is then
      the exact value, unless it is clipped.

    | `calibration_method` | range of a tile |
    |---|---|
    | "absmax" | symmetric, up to the largest magnitude; "absmax,0.9": up to 0.9 times that |
    | "minmax" | from the smallest to the largest value, including 0; has a zero point |
    | "minmax,0.9" | 0.9 times the range of "minmax" |
    | "rms,7" | symmetric, up to 7 times the root mean square |
    | "absmean" | the scale is the mean magnitude (BitNet, arXiv 2402.17764) |
    | "fixed,6" | -6 to 6 |
    | "fixed,-1,3" | -1 to 3; has a zero point |
    | "percentile,99.9" | symmetric, up to the 99.9th percentile of the magnitudes |
    | "percentile,1,99" | from the 1st to the 99th percentile, including 0; has a zero point |
    | "mse,40,2" | the fraction n/40 of the full range with the least mean of `abs(error)**2` |
    | "hqq,0.7" | the range with the least sum of `abs(error)**0.7`, as in HQQ |
    | "oas" | Outlier Aware Scaling (arXiv 2603.08713), for mxfp8, mxfp8_16, mxfp4 |

    **Returns:** a `QArray` with the shape and dtype of `array`. A tile with a NaN or infinity
    becomes NaN.

    **Raises:**

    - `TypeError` if `array` or `scale_dtype` is not floating, `key` is not a key, or an argument
      has the wrong type.
    - `ValueError` for an unknown format or method, a method that the format does not support, an
      axis that is out of range or named twice, or a tile size that does not divide its axis.

    **Warns:** `UserWarning` if each value has its own scale and the result is not smaller.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    >>> q = vn.quant.quantize(w, "int4", channelwise_axes=[-1], tiled_axes={0: 2})
    >>> q.scale.shape, q.nbytes, w.nbytes
    ((2, 2), 20, 32)
    """
    if key is not None:
        check_key(key)
    dense = floating(array)
    params = quantize_params(
        dense, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    q = quantize_by(dense, params, key)
    is_static = all(isinstance(n, int) for n in dense.shape)  # or symbolic, for export
    has_scale_per_value = is_static and params.counts == dense.shape and dense.size > 1
    if has_scale_per_value and q.nbytes >= dense.nbytes:
        warn_user(
            f"{dense.dtype.name}{[*dense.shape]} gets one scale per value, so {qtype} takes "
            f"{8 * q.nbytes / dense.size:.3g} bits per value, more than the dense array: name "
            "fewer channelwise_axes, or use larger tiles"
        )
    return q


@dataclasses.dataclass(frozen=True)
class QuantizeParams:
    """The checked arguments of `quantize`, hashable for `jax.jit`, and the dtype for stable scales.

    With stable scales, dequantizing and quantizing again does not change values. Caches and
    collectives need this. Weights use `absmax / (qmax + 1/2)`, which makes the largest value
    smaller each time. `stable_in` is the dtype in which the values are read and written, or None
    for the scales of weights. It can be narrower than the array: collectives compute in f32.
    """

    format: str
    counts: Shape
    calibration: Calibration
    scale_dtype: str
    stable_in: str | None = None


def quantize_params(
    array: jax.Array | jax.ShapeDtypeStruct,
    qtype: DTypeLike,
    channelwise_axes: Axes,
    tiled_axes: TiledAxes | None,
    calibration_method: str | None,
    scale_dtype: DTypeLike | None,
) -> QuantizeParams:
    """Returns the arguments of `quantize`, checked."""
    format = get_format(qtype)
    calibration = check_calibration(calibration_method or format.calibration, format)
    shape = array.shape
    sizes = None
    if not isinstance(channelwise_axes, Iterable):
        raise TypeError(
            "channelwise_axes must be a list of axes, such as "
            f"[{0 if channelwise_axes is None else channelwise_axes}], not {channelwise_axes!r}"
        )
    if not isinstance(tiled_axes, Mapping | None):
        raise TypeError(
            f"tiled_axes must be {{axis: tile size}}, such as {{0: 64}}, not {tiled_axes!r}"
        )
    if tiled_axes is not None:
        sizes = {int(axis): tile_in(shape, int(axis), tile) for axis, tile in tiled_axes.items()}
    channelwise, tiled = _tiles_of(format, shape, [int(axis) for axis in channelwise_axes], sizes)
    return QuantizeParams(
        format.name,
        tile_counts(shape, channelwise, tiled),
        calibration,
        scale_dtype_in(format, array.dtype, scale_dtype),
    )


def quantize_by(array: jax.Array, params: QuantizeParams, key: jax.Array | None = None) -> QArray:
    """Does what `quantize` does, once its arguments are checked."""
    chunks = chunks_of(array, params.counts, format=FORMATS[params.format])
    return _quantize(array, key, params, chunks)


def quantize_as(array: jax.Array, q: QArray, counts: Shape) -> QArray:
    """Quantises an array with scales of its own, of shape `counts`, into the format of `q`."""
    method = q.format.calibration if q.zero_point is None else "minmax"
    calibration = check_calibration(method, q.format)
    scale_dtype = q.scale.dtype.name
    params = QuantizeParams(q.qtype, counts, calibration, scale_dtype, array.dtype.name)
    return quantize_by(array, params)


def floating(array: ArrayLike | ImplicitArray) -> jax.Array:
    """Return the dense array to quantize.

    **Raises:** `TypeError` if `array` is a format or a tree, or if its dtype cannot be quantized.
    """
    if isinstance(array, str | type | np.dtype):
        raise TypeError(
            f"the first argument of quantize is {array!r}. Pass the array first, then the format: "
            f"quantize(array, {array if is_format(array) else 'int8'!r})"
        )
    is_array = isinstance(array, ImplicitArray) or hasattr(array, "dtype")
    if not is_array and not treedef_is_leaf(jax.tree.structure(array)):
        raise TypeError(
            f"quantize takes one array, not a {type(array).__name__}. Call jnp.asarray for a list "
            "of numbers, or quantize_tree for a tree of arrays"
        )
    dense = materialise_one(array)
    dtype = jnp.result_type(dense)
    if dtype not in QUANTIZABLE:
        raise TypeError(f"array has dtype {dtype.name}, but quantize takes {_names(QUANTIZABLE)}")
    return jnp.asarray(dense)


def _names(dtypes: Sequence) -> str:
    return ", ".join(jnp.dtype(dtype).name for dtype in dtypes)


def tile_in(shape: Shape, axis: int, tile: SupportsIndex | float) -> int:
    """Returns how many values a tile has, which may be given as its share of an axis.

    **Raises:** `ValueError` for a share that is not above 0 and up to 1.
    """
    if not isinstance(tile, float):
        return operator.index(tile)
    if not 0 < tile <= 1:
        raise ValueError(
            f"the tile size of axis {axis} of shape {shape} is {tile}: it must be an integer, or a "
            "float from above 0 to 1, which is a fraction of the axis"
        )
    # That there is no such axis is said where all are checked.
    return round(shape[axis] * tile) if -len(shape) <= axis < len(shape) else 1


def _tiles_of(
    format: Format, shape: Shape, channelwise: Sequence[int], tiled: Mapping[int, int] | None
) -> tuple[Sequence[int], Mapping[int, int]]:
    size = format.tile_size
    if size is None:
        return channelwise, tiled or {}
    axes = range(len(shape))
    if tiled is None:
        free = [axis for axis in axes if axis not in {c % len(shape) for c in channelwise}]
        if not free:
            raise ValueError(
                f"{format.name} needs an axis with tiles of {size}, but channelwise_axes names "
                f"all axes of shape {shape}"
            )
        return [axis for axis in axes if axis != free[-1]], {free[-1]: size}
    if [*tiled.values()] != [size]:
        raise ValueError(
            f"{format.name} needs tiles of {size} along one axis, not tiled_axes={dict(tiled)}"
        )
    return channelwise, tiled


def scale_dtype_in(format: Format, dtype: DTypeLike, wanted: DTypeLike | None) -> str:
    """Returns the dtype of scales: what the format says, or what is wanted, or that of the array.

    **Raises:** `ValueError` for another than the format's, `TypeError` for one that is no float.
    """
    if format.scale_dtype is not None:
        if wanted is not None and jnp.dtype(wanted).name != format.scale_dtype:
            raise ValueError(
                f"{format.name} needs scale_dtype {format.scale_dtype}, not "
                f"{jnp.dtype(wanted).name}"
            )
        return format.scale_dtype
    if wanted is None and format.bits > 8 and jnp.dtype(dtype) == jnp.float16:
        return "float32"  # a step of 2**-15 of the largest value is subnormal in float16
    name = jnp.dtype(dtype if wanted is None else wanted).name
    if jnp.dtype(name) not in (*QUANTIZABLE, jnp.float8_e8m0fnu):
        raise TypeError(f"scale_dtype is {name}, but must be one of {_names(QUANTIZABLE)}")
    return name


# Compiled as one, for no temporary of it then has the size of the array in f32.
@functools.partial(jax.jit, static_argnames=("params", "chunks"))
def _quantize(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks | None
) -> QArray:
    if key is None and has_kernel(array, params):
        return quantize_by_kernel(
            jax.lax.stop_gradient(array), params, _QuantizedByXla(params, chunks)
        )
    return _quantize_by_xla(array, key, params, chunks)


@dataclasses.dataclass(frozen=True)
class _QuantizedByXla:
    """XLA's way to what a kernel computes."""

    params: QuantizeParams
    chunks: Chunks | None

    def __call__(self, array: jax.Array, counts: Shape) -> tuple[jax.Array, jax.Array]:
        """Returns codes and scales."""
        params = dataclasses.replace(self.params, counts=counts)
        chunks = self.chunks if counts == self.params.counts else None  # if not, it was mapped
        packed, scale = jax.tree.leaves(_quantize_by_xla(array, None, params, chunks))
        return packed, scale


def _quantize_by_xla(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams, chunks: Chunks | None
) -> QArray:
    def whole(array: jax.Array, key: jax.Array | None, counts: Shape = params.counts) -> QArray:
        of_counts = dataclasses.replace(params, counts=counts)
        if params.stable_in is not None:
            return _quantize_stably(array, key, of_counts)
        return quantize_tiles(array, key, of_counts)[0]

    if chunks is None:
        return whole(array, key)

    def cut(array: jax.Array, key: jax.Array | None) -> QArray:
        leaves = in_chunks(whole, array, key, params.counts, chunks)
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(whole, array, key)), leaves)

    return jax.lax.platform_dependent(jax.lax.stop_gradient(array), key, cpu=cut, default=whole)


def quantize_tiles(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams
) -> tuple[QArray, Range]:
    """Returns the quantised array, and the ranges that its tiles were found to have."""
    format = FORMATS[params.format]
    array, tiles, axes, store = _prepare(array, params)
    ends = find_range(params.calibration, tiles, axes, format, lambda scale: store(scale)[1])
    scale, zero_point = range_to_scale(ends, format)
    scale = bounded_scale(scale, zero_point, format, array.dtype, params.scale_dtype)
    stored, worth = store(scale)
    return _round(array, format, stored, worth, zero_point, key), ends


def _quantize_stably(array: jax.Array, key: jax.Array | None, params: QuantizeParams) -> QArray:
    format = FORMATS[params.format]
    array, tiles, axes, store = _prepare(array, params)
    worth_of = lambda scale: store(scale)[1]
    dtypes = params.scale_dtype, params.stable_in or array.dtype.name
    scale, zero_point = stable_scale(params.calibration, tiles, axes, format, worth_of, *dtypes)
    scale = bounded_scale(scale, zero_point, format, array.dtype, params.scale_dtype)
    stored, worth = store(scale)
    return _round(array, format, stored, worth, zero_point, key)


def _prepare(
    array: jax.Array, params: QuantizeParams
) -> tuple[jax.Array, jax.Array, tuple[int, ...], Callable]:
    """Return the array, its tiles and their axes, and a function that stores scales."""
    format = FORMATS[params.format]
    array = jax.lax.stop_gradient(array)
    tiles = split_tiles(array.astype(jnp.promote_types(array.dtype, jnp.float32)), params.counts)

    def store(scale: jax.Array) -> tuple[jax.Array | QArray, jax.Array]:
        return store_scale(scale, params.scale_dtype, format.scale_tile, has_zero=format.has_zero)

    return array, tiles, tuple(range(1, tiles.ndim, 2)), store


def _round(
    array: jax.Array,
    format: Format,
    stored: jax.Array | QArray,
    worth: jax.Array,
    zero_point: jax.Array | None,
    key: jax.Array | None,
) -> QArray:
    """Quantises with scales that are known, as stored and what they are worth: f32 or f64."""
    scaled = over_tiles(jnp.divide, array.astype(worth.dtype), worth)
    if zero_point is not None:
        scaled = over_tiles(jnp.add, scaled, zero_point.astype(worth.dtype))
        zero_point = zero_point.astype(format.byte_dtype)
    codes = format.encode(scaled) if key is None else encode_stochastically(scaled, format, key)
    packed, packing = pack_codes(codes, format)
    return QArray.from_packed(
        packed, stored, zero_point, qtype=format.name, packing=packing, dense_dtype=array.dtype
    )


def quantize_with_scale(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    scale: Leaf | QArray | float,
    zero_point: Leaf | int | None = None,
    *,
    key: jax.Array | None = None,
) -> QArray:
    """Quantize an array with given scales, such as static or learned ones.

    Values beyond the range of the codes are clipped. `vn.quant.scale_of_range` computes the scale
    and the zero point of a range. The derivative is 0, as for `vn.quant.quantize`.

    **Arguments:**

    - `array`, `qtype`, `key`: as for `vn.quant.quantize`.
    - `scale`: one positive number, or a floating array with the rank of `array` and one entry per
      tile. An array keeps its dtype, and a Python number gets the dtype of `array`, unless the
      format prescribes the dtype of scales. A scale of 0, or too small to divide by, becomes 1 (in
      int1, 0).
    - `zero_point`: the code that represents 0. Its shape follows the rule for `scale`. Only integer
      formats have zero points.

    **Returns:** a `QArray`. If the values or the scale of a tile contain NaN or infinity, the tile
    becomes NaN.

    **Raises:**

    - `TypeError` if `array` or `scale` is not floating.
    - `ValueError` for an unknown format, or a zero point for a format that has none.
    - `ValueError` if an axis size of `scale` or `zero_point` does not divide the axis of `array`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.quantize_with_scale(jnp.array([1.0, 2.4, 9.0]), "int4", 0.5).dequantize().tolist()
    [1.0, 2.5, 3.5]
    """
    dense = floating(array)
    scale, zero_point = check_scale(dense, get_format(qtype), scale, zero_point)
    return _quantize_with_scale(dense, scale, zero_point, key, get_format(qtype).name)


def check_scale(
    array: jax.Array,
    format: Format,
    scale: Leaf | QArray | float,
    zero_point: Leaf | int | None,
) -> tuple[jax.Array | QArray, jax.Array | None]:
    """Returns the scale and the zero point of `quantize_with_scale`, checked, of one rank."""
    if not isinstance(scale, QArray):
        scale = _with_rank(jnp.asarray(scale, _dtype_of(scale) or array.dtype), array)
        scale_dtype_in(format, scale.dtype, None)
    _check_tiles("scale", scale.shape, array.shape)
    if zero_point is None:
        return scale, None
    if not has_zero_point(format):
        raise ValueError(f"{format.name} has no zero_point: leave it out")
    zero_point = _with_rank(jnp.asarray(zero_point), array)
    _check_tiles("zero_point", zero_point.shape, array.shape)
    return scale, zero_point


def _dtype_of(part: Leaf | float) -> np.dtype | None:
    return getattr(part, "dtype", None)


def _with_rank(part: jax.Array, array: jax.Array) -> jax.Array:
    return part if part.ndim else part.reshape((1,) * array.ndim)


def _check_tiles(name: str, counts: Shape, shape: Shape) -> None:
    if not can_tile(counts, shape):
        raise ValueError(
            f"{name} of shape {counts} does not tile an array of shape {shape}: it needs the same "
            "rank, and the size of each axis must divide the size of the array's axis"
        )


@functools.partial(jax.jit, static_argnames="qtype")
def _quantize_with_scale(
    array: jax.Array,
    scale: jax.Array | QArray,
    zero_point: jax.Array | None,
    key: jax.Array | None,
    qtype: str,
) -> QArray:
    format = FORMATS[qtype]
    array, scale = jax.lax.stop_gradient((array, scale))
    finite = jnp.isfinite(split_tiles(array, scale.shape)).all(range(1, 2 * array.ndim, 2))
    dtype = jnp.promote_types(array.dtype, jnp.float32)
    if isinstance(scale, QArray):
        scale = scale.replace(packed=jnp.where(finite, scale.packed, jnp.nan))
        worth = usable(scale.dequantize().astype(dtype))
        return _round(array, format, scale, worth, zero_point, key)
    if scale.dtype in QUANTIZABLE:
        dtype = jnp.promote_types(dtype, scale.dtype)
    wide = jnp.where(finite, scale.astype(dtype), jnp.nan)
    stored_in = format.scale_dtype or scale.dtype.name
    stored, worth = store_scale(wide, stored_in, format.scale_tile, has_zero=format.has_zero)
    return _round(array, format, stored, worth, zero_point, key)


def dequantize(q: QArray) -> jax.Array:
    """Return the dense array of a quantized array.

    Codes are multiplied by their scales in f32, or in f64 if the scale or `q` has this dtype. The
    result is then rounded to the dtype of `q`. Results are the same with and without `jax.jit`,
    except that XLA for GPUs may omit the rounding if the program continues in f32.

    **Arguments:**

    - `q`: a `QArray`.

    **Returns:** an array with the shape and dtype of `q`.

    **Raises:** `TypeError` if `q` is not a QArray.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.dequantize(vn.quant.quantize(jnp.array([0.0, -2.0]), "nf4")).tolist()
    [0.0, -2.0]
    """
    if not isinstance(q, QArray):
        raise TypeError(
            f"dequantize takes a QArray, not {type(q).__name__}: for any array, call vn.materialise"
        )
    return q.dequantize()
