"""`quantize` and `dequantize`: from dense arrays to QArrays and back."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..._core.value import materialise_one
from ..._jax.source_lines import warn_user
from ..formats import FORMATS, Format, get_format
from ..formats.rounding import encode_stochastically
from ..formats.tiles import Leaf, Shape, divides, over_tiles, split_tiles, tile_counts
from ..qarray import QUANTIZABLE, QArray, pack_codes
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
    """Quantises an array, rounding each value to the nearest that the format has.

    No derivative passes it, not by the scales either: that of rounding is 0.
    `vn.quant.fake_quantize` and `vn.ste(vn.quant.quantize)` have one that is of use.

    **Arguments:**

    - `array`: f16, bf16, f32 or f64, of any shape. An implicit array is materialised.
    - `qtype`: the format, by its name in `vn.quant.FORMATS`.
    - `channelwise_axes`: axes with one scale an index.
    - `tiled_axes`: axes with one scale a tile, `{axis: tile size}`; a size that is a float is the
      share of the axis that a tile takes. Axes in neither share a scale, and may count from the
      end. A format with a tile of its own (mxfp4) tiles the last axis that is not channelwise if
      None, with all others channelwise.
    - `calibration_method`: how the values of a tile give the range that its codes cover; None is
      the format's own.
        - "absmax": up to its largest magnitude; "absmax,0.9" to nine tenths of that.
        - "oas": up to its largest magnitude, or half a step less if the power of two is then
          smaller (Outlier Aware Scaling, arXiv 2603.08713). For mxfp8, mxfp8_16 and mxfp4.
        - "minmax": from its least value to its largest, and 0, with a zero point (integers only);
          "minmax,0.9" as above.
        - "rms,7": up to seven times the root of its mean square.
        - "absmean": its mean magnitude is a step, as in BitNet.
        - "fixed,6": from -6 to 6; "fixed,-1,3" from -1 to 3, with a zero point.
        - "percentile,99.9": up to what 99.9 % of magnitudes do not exceed; "percentile,0.1,99.9" is
          between two such values, and 0, with a zero point.
        - "mse": the part of the full range whose squared error is least, of 40 parts that are
          tried; "mse,100" tries so many; "mse,40,2.4" takes errors to the power 2.4 instead.
        - "hqq": the range that leaves few errors rather than small ones, least in the sum of their
          power 0.7, by half-quadratic splitting; "hqq,0.5" takes another power, up to 1. It clips
          more than is good for formats of 4 bits and more. Not for formats whose scales are powers
          of two.
    - `scale_dtype`: the dtype of the scale; that of the format, or else of `array`, if None. Codes
      are found from the scale as stored, whatever its precision.
    - `key`: of `jax.random`, to round up or down at random, so that the expected value of the
      result is the value itself, where it is not clipped.

    **Returns:** a `QArray` that stands for an array of the shape and dtype of `array`. A tile of
    zeros has scale 1, or 0 where the format has no code for 0 (int1). One with a NaN or an infinity
    in it is NaN, the others are not touched by it. Values next to the largest of the dtype do not
    become infinite: they are clipped, or their tile is NaN if its range or scale cannot be computed
    with.

    **Raises:** `TypeError` if `array` or the scale is not floating. `ValueError` for an unknown
    format or method, a method that needs a zero point and a format that has none, an axis out of
    range or named twice, and a tile that does not divide its axis (with sizes that would) or is not
    that of the format.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    >>> q = vn.quant.quantize(w, "int4", channelwise_axes=[-1], tiled_axes={0: 2})
    >>> q.scale.shape, q.nbytes, w.nbytes
    ((2, 2), 20, 32)
    >>> float(abs(q.dequantize() - w).max()) < 0.07
    True
    """
    if key is not None:
        _check_key(key)
    dense = floating(array)
    params = quantize_params(
        dense, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    q = quantize_by(dense, params, key)
    is_static = all(isinstance(n, int) for n in dense.shape)  # or symbolic, for export
    has_scale_per_value = is_static and params.counts == dense.shape and dense.size > 1
    if has_scale_per_value and q.nbytes >= dense.nbytes:
        warn_user(
            f"each value of {dense.dtype.name}{[*dense.shape]} has a scale of its own, so {qtype} "
            "takes more memory than the dense array: give fewer channelwise_axes, or larger tiles"
        )
    return q


def _check_key(key: Any) -> None:
    is_key = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw_key = getattr(key, "dtype", None) == np.uint32 and np.ndim(key) == 1
    if not is_key and not is_raw_key:
        raise TypeError(f"key must be a JAX PRNG key, such as jax.random.key(0), not {key!r}")


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

    **Raises:** `TypeError` if `array` is a list or tuple, or if its dtype cannot be quantized.
    """
    if isinstance(array, list | tuple):
        raise TypeError(
            f"quantize takes an array, not a {type(array).__name__}: call jnp.asarray first, or "
            "quantize_tree for a tree of arrays"
        )
    dense = materialise_one(array)
    dtype = jnp.result_type(dense)
    if dtype not in QUANTIZABLE:
        raise TypeError(f"array is {dtype.name}; quantize takes {_names(QUANTIZABLE)}")
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
            f"axis {axis} of shape {shape} has a tile of {tile}: a tile is a whole number of "
            "values, or, as a float, the share of the axis that it takes"
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
            raise ValueError(f"{format.name} tiles an axis by {size}, and {shape} has none left")
        return [axis for axis in axes if axis != free[-1]], {free[-1]: size}
    if [*tiled.values()] != [size]:
        raise ValueError(
            f"{format.name} is defined for tiles of {size} along one axis, not {dict(tiled)}"
        )
    return channelwise, tiled


def scale_dtype_in(format: Format, dtype: DTypeLike, wanted: DTypeLike | None) -> str:
    """Returns the dtype of scales: what the format says, or what is wanted, or that of the array.

    **Raises:** `ValueError` for another than the format's, `TypeError` for one that is no float.
    """
    if format.scale_dtype is not None:
        if wanted is not None and jnp.dtype(wanted).name != format.scale_dtype:
            raise ValueError(
                f"{format.name} is defined with scales of {format.scale_dtype}, "
                f"not {jnp.dtype(wanted).name}"
            )
        return format.scale_dtype
    if wanted is None and format.bits > 8 and jnp.dtype(dtype) == jnp.float16:
        return "float32"  # a step of 2**-15 of the largest value is subnormal in float16
    name = jnp.dtype(dtype if wanted is None else wanted).name
    if jnp.dtype(name) not in (*QUANTIZABLE, jnp.float8_e8m0fnu):
        raise TypeError(f"scale_dtype is {name}; quantize takes {_names(QUANTIZABLE)}")
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
    """Quantises an array with a scale that is known: of a static range, or one that was learned.

    Values beyond the range of the codes are clipped. `vn.quant.scale_of_range` gives the scale and
    the zero point for a range. No derivative passes, as for `vn.quant.quantize`.

    **Arguments:**

    - `array`, `qtype`, `key`: as for `vn.quant.quantize`.
    - `scale`: positive, floating; of the rank of `array`, with axes that divide its own, or one
      number for all. It is stored in its own dtype (a Python number in that of `array`), or as the
      format is defined: as powers of two for mxfp4. One too small to divide by becomes 1
      (0 in int1, which has no code for 0).
    - `zero_point`: the code that stands for 0, with the same rule for its shape. Integer formats
      only.

    **Returns:** a `QArray`. A tile with a NaN or an infinity in it, or with such a scale, is NaN.

    **Raises:** `TypeError` if `array` or the scale is not floating. `ValueError` for an unknown
    format, a shape that does not tile that of `array`, and a zero point where the format has none.

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
        raise ValueError(f"{format.name} has no zero_point, and one is given")
    zero_point = _with_rank(jnp.asarray(zero_point), array)
    _check_tiles("zero_point", zero_point.shape, array.shape)
    return scale, zero_point


def _dtype_of(part: Leaf | float) -> np.dtype | None:
    return getattr(part, "dtype", None)


def _with_rank(part: jax.Array, array: jax.Array) -> jax.Array:
    return part if part.ndim else part.reshape((1,) * array.ndim)


def _check_tiles(name: str, counts: Shape, shape: Shape) -> None:
    if not divides(counts, shape):
        raise ValueError(
            f"{name} has shape {counts}, which does not tile an array of shape {shape}: it needs "
            "the same rank, and axes that divide those of the array"
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
    """Returns the dense array that `q` stands for.

    It is computed in the precision of the scale or of `q.dtype`, whichever is the wider, f32 at
    least, and then rounded to `q.dtype`: the same bits eagerly and within a compiled program. XLA
    for GPUs may skip the last rounding if the program goes on in f32.

    **Raises:** `TypeError` if `q` is not a QArray.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.dequantize(vn.quant.quantize(jnp.array([0.0, -2.0]), "nf4")).tolist()
    [0.0, -2.0]
    """
    if not isinstance(q, QArray):
        raise TypeError(
            f"dequantize takes a QArray, not {type(q).__name__}; veneer.materialise takes any array"
        )
    return q.dequantize()
