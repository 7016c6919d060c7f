"""Quantization with a derivative for training: `fake_quantize`, and the weight `FakeQuantized`.

Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (2013); Jacob et al.,
Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference (2018).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray, is_default
from ..._core.surface.straight_through import ste
from ..._core.tree import static
from ..._core.value import describe
from ..activation_quantized import check_activation_format
from ..arrays import QUANTIZABLE, QArray
from ..conversion.compute import QuantizeParams, quantize_tiles
from ..conversion.quantize import (
    Axes,
    TiledAxes,
    as_dense_floats,
    quantize,
    quantize_params,
    quantize_with_scale,
)
from ..formats import FORMATS, Format, get_format
from ..formats.tiles import (
    Leaf,
    ScaleAxes,
    Shape,
    TileSize,
    choose_scale_axes,
    normalize_tile_axes,
    over_tiles,
    resolve_tile_sizes,
)
from .options import (
    BackwardProduct,
    Sparsity,
    check_groups,
    check_sparsity,
    group_size,
    sparsity_mask,
)

# The smallest and the largest value that is not clipped, with one entry per tile.
Ends = tuple[jax.Array, jax.Array]


def fake_quantize(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Quantize and dequantize an array, with a derivative for training (QAT).

    The derivative is the straight-through estimator (Bengio et al., arXiv 1308.3432): 1 if a value
    is in the range of its tile, and 0 if the value is clipped. These calibration methods clip
    values: "fixed", "rms", "percentile", "mse", "hqq", and with a factor below 1 also "absmax" and
    "minmax". The scale has no derivative, and second derivatives are 0.

    **Arguments:**

    - `array`, `qtype`, `channelwise_axes`, `tiled_axes`, `calibration_method`, `scale_dtype`,
      `key`: as for `vn.quant.quantize`.

    **Returns:** a dense array with the shape and dtype of `array`.

    **Raises:** the errors of `vn.quant.quantize`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> fake = lambda x: vn.quant.fake_quantize(x, "int4", calibration_method="fixed,1.5").sum()
    >>> jax.grad(fake)(jnp.array([0.5, 1.0, 9.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    dense = as_dense_floats(array)
    params = quantize_params(
        dense, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    value, ends = _quantize_and_dequantize(dense, key, params)
    return _straight_through(value, dense, ends if params.calibration.clips else None)


@functools.partial(jax.jit, static_argnames="params")
def _quantize_and_dequantize(
    array: jax.Array, key: jax.Array | None, params: QuantizeParams
) -> tuple[jax.Array, Ends]:
    """Return the dequantized values, and the ends of the range in which no value is clipped."""
    q, ranges = quantize_tiles(array, key, params)
    assert ranges is not None  # Only stable scales have no ranges.
    low, high = ranges
    format = FORMATS[params.qtype]
    if low is None and format.scale_dtype is not None:
        # A scale that is rounded up, such as a power of two, extends the range.
        high = jnp.maximum(high, q.scales().astype(high.dtype) * format.bound)
    return q.dequantize(), (-high if low is None else low, high)


def fake_quantize_with_scale(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    scale: Leaf | QArray | float,
    zero_point: Leaf | int | None = None,
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """Quantize an array with scales that are already known, and dequantize the result.

    The derivative is 1 if a value is in the range of the codes, and 0 if the value is clipped. The
    scale and the zero point have no derivative.

    **Arguments:**

    - `array`, `qtype`, `scale`, `zero_point`, `key`: as for `vn.quant.quantize_with_scale`.

    **Returns:** a dense array with the shape and dtype of `array`.

    **Raises:** the errors of `vn.quant.quantize_with_scale`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> fake = lambda x: vn.quant.fake_quantize_with_scale(x, "int4", 0.2).sum()
    >>> jax.grad(fake)(jnp.array([0.5, 1.4, -2.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    dense = as_dense_floats(array)
    q = quantize_with_scale(dense, qtype, scale, zero_point, key=key)
    format, scales = q.format, q.scales()
    if q.zero_point is None:
        low = -format.bound if format.signed or not format.is_integer else 0
        ends = low * scales, format.bound * scales
    else:
        zero = jnp.asarray(q.zero_point).astype(scales.dtype)
        least, largest = format.code_range
        ends = (least - zero) * scales, (largest - zero) * scales
    return _straight_through(q.dequantize(), dense, ends)


def _straight_through(value: jax.Array, array: jax.Array, ends: Ends | None) -> jax.Array:
    """Return `value` with the derivative of a straight-through estimator.

    The derivative with respect to `array` is 1, or 0 for clipped entries of `array`. These are the
    entries outside of the range of their tile. `ends` is the pair of both ends of the ranges, with
    one entry per tile. If it is None, no entry is clipped.
    """
    value = jax.lax.stop_gradient(value)
    if ends is not None:
        low, high = (end.astype(jnp.promote_types(end.dtype, array.dtype)) for end in ends)
        detached = jax.lax.stop_gradient(array)
        is_clipped = over_tiles(jnp.less, detached, low) | over_tiles(jnp.greater, detached, high)
        array = jnp.where(is_clipped, detached, array)
    # `ste(f)(x)` has the value of `f(x)` and the derivative of `x`.
    return ste(lambda _: value)(array)


class FakeQuantized(ImplicitArray):
    """A weight in training: stored in full precision, and quantized wherever a program uses it.

    Its dense array is `dequantize(quantize(w))`. The derivative with respect to `w` is 1, and 0 for
    values that are clipped (straight-through estimator). `vn.quant.quantize_tree(params, rules,
    train=True)` creates it. After training, `vn.quant.convert` turns it into a `QArray`.

    | argument | effect |
    |---|---|
    | `act_qtype` | products that contract `tile_axis` also quantize the activations |
    | `grad_qtype`, `grad_input`, `grad_weight` | the backward pass also quantizes gradients |
    | `sparsity` | `w` is pruned before it is quantized; pruned values still get gradients |

    If one of the `grad_` arguments is set, products with this weight do not support `jax.jvp`.

    **Arguments:**

    - `w`: the weight, `[..., in, out]`, floating.
    - `key`: typed PRNG keys for stochastic rounding of gradients, one per stacked layer. Their
      shape consists of the sizes of all axes of `w` that precede the first axis in `tile_axis`.
      `vn.quant.with_stochastic_rounding` sets them.
    - `mask`: a bool array of the shape of `w`, True for the values to keep. If it is None, each use
      computes the mask from `sparsity`. `vn.quant.with_masks` sets it.
    - `qtype`, `tile_size`, `tile_axis`, `calibration_method`, `scale_dtype`, `act_qtype`,
      `act_calibration_method`, `act_tile_size`, `grad_qtype`, `grad_input`, `grad_weight`,
      `sparsity`: as in `vn.quant.Rule`. With `qtype=None` the weight is not quantized.
      `act_tile_size` can also be a dict `{axis: size}`, with axes of the activations.
    - `dense_dtype`: the dtype of the dense array. None is the dtype of `w`.

    **Raises:**

    - `TypeError` if `w` is not a floating array.
    - `ValueError` if a format or a method is unknown, or if an axis in `tile_axis` or `tile_size`
      is out of range for `w`.
    - `ValueError` if a tile or a group of `sparsity` does not divide its axis.
    - `ValueError` if `key` or `mask` does not have the shape that is described above.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.FakeQuantized(jnp.array([[0.3, -1.0], [1.5, 0.1]]), qtype="int2")
    >>> vn.materialise(w).tolist()
    [[0.0, -1.33...], [1.0, 0.0]]
    >>> jax.grad(lambda w: (jnp.ones(2) @ w).sum())(w).w.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("w",)
    # The leaf `w` has the shape and dtype of the dense array, but other values.
    is_label: ClassVar[bool | None] = False

    w: Leaf
    key: Any = None
    mask: Any = None
    qtype: str | None = static(default=None, kw_only=True)
    tile_size: TileSize = static(default=None, kw_only=True)
    tile_axis: int | Sequence[int] = static(default=-2, kw_only=True)
    calibration_method: str | None = static(default=None, kw_only=True)
    scale_dtype: str | None = static(default=None, kw_only=True)
    act_qtype: str | None = static(default=None, kw_only=True)
    act_calibration_method: str | None = static(default=None, kw_only=True)
    act_tile_size: TileSize | float = static(default=None, kw_only=True)
    grad_qtype: str | None = static(default=None, kw_only=True)
    grad_input: BackwardProduct | None = static(default=None, kw_only=True)
    grad_weight: BackwardProduct | None = static(default=None, kw_only=True)
    sparsity: Sparsity | None = static(default=None, kw_only=True)
    dense_dtype: str | None = static(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.w, Leaf) or self.w.dtype not in QUANTIZABLE:
            described = f"an array of {self.w.dtype}" if hasattr(self.w, "dtype") else repr(self.w)
            raise TypeError(f"w must be a floating array, not {described}")
        axes = normalize_tile_axes(self.tile_axis, self.w.shape)
        formats = {name: getattr(self, name) for name in ("qtype", "act_qtype", "grad_qtype")}
        self.__dict__.update(
            dense_dtype=jnp.dtype(self.dense_dtype or self.w.dtype).name,
            tile_axis=axes,
            tile_size=resolve_tile_sizes(self.w.shape, axes, self.tile_size),
            scale_dtype=self.scale_dtype and jnp.dtype(self.scale_dtype).name,
            **{name: qtype and get_format(qtype).name for name, qtype in formats.items()},
        )
        if self.act_qtype is not None:
            method, tile_size = self.act_calibration_method, self.act_tile_size
            check_activation_format(
                get_format(self.act_qtype), method, tile_size, is_static=False, by_axis=True
            )
            if isinstance(tile_size, Mapping):  # Static fields must be hashable.
                self.__dict__["act_tile_size"] = tuple(sorted(tile_size.items()))
        if self.sparsity is not None:
            self.__dict__["sparsity"] = check_sparsity(self.sparsity, self.qtype)
            check_groups(self.sparsity, self.w.shape, self.tile_axes[-1])
        # Raise the errors of `key`, `mask`, tiles and methods now, not on first use.
        self.aval()
        jax.eval_shape(self.quantize)

    @classmethod
    def from_rule(cls, array: Leaf, rule: Any) -> "FakeQuantized":
        """Create a `FakeQuantized` from a dense weight and a `vn.quant.Rule`.

        **Raises:** the errors of `FakeQuantized`.

        >>> import jax.numpy as jnp, veneer as vn
        >>> rule = vn.quant.Rule(".*", "int4", act_qtype="int8")
        >>> vn.quant.FakeQuantized.from_rule(jnp.ones((4, 2)), rule)
        FakeQuantized(w=f32[4,2], qtype='int4', act_qtype='int8')
        """
        # These fields have the same names in a rule.
        names = ["qtype", "tile_size", "calibration_method", "scale_dtype", "act_qtype"]
        names += ["act_calibration_method", "act_tile_size", "grad_qtype", "grad_input"]
        names += ["grad_weight", "sparsity"]
        options = {name: getattr(rule, name) for name in names}
        return cls(array, tile_axis=rule.contracting(array.ndim), **options)

    @property
    def format(self) -> Format | None:
        """The entry of `vn.quant.FORMATS` for `qtype`. None if `qtype` is None."""
        return None if self.qtype is None else get_format(self.qtype)

    @property
    def has_quantized_scales(self) -> bool:
        """True if the scales of the format are quantized, too, as in nvfp4.

        The scales of a whole matrix are quantized together, so a part of it cannot be quantized.
        """
        return self.format is not None and self.format.scale_tile is not None

    @property
    def tile_axes(self) -> tuple[int, ...]:
        """The axes in `tile_axis`, counted from the front."""
        axes: Any = self.tile_axis
        return tuple(axis % self.w.ndim for axis in axes)

    @property
    def grid(self) -> ScaleAxes:
        """The axes of `w` along which scales differ.

        The field `channelwise` lists the axes with one scale per index. The field `tiled` lists
        pairs `(axis, tile size)` for the axes with one scale per tile.
        """
        return choose_scale_axes(self.w.ndim, self.tile_axes, self.format, self.tile_size)

    @property
    def backward(self) -> tuple[BackwardProduct, BackwardProduct] | None:
        """The options of the two products of the backward pass, `(grad_input, grad_weight)`.

        If only one of these fields is None, `BackwardProduct(grad_qtype)` replaces it. If both and
        `grad_qtype` are None, this property is None, and gradients are not quantized.
        """
        products = self.grad_input, self.grad_weight
        if self.grad_qtype is None and products == (None, None):
            return None
        default = BackwardProduct(self.grad_qtype)
        return products[0] or default, products[1] or default

    @property
    def lead(self) -> int:
        """The number of axes of `w` before the first axis in `tile_axis`. `key` has this rank."""
        return min(self.tile_axes)

    def changed(self, **changes: Any) -> "FakeQuantized":
        """Return a copy with new values for the fields in `changes`, without checking them."""
        new = object.__new__(type(self))
        new.__dict__.update({k: v for k, v in self.__dict__.items() if not k.startswith("_")})
        new.__dict__.update(changes)
        return new

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the dense array.

        **Raises:** `ValueError` if `w` does not have all axes in `tile_axis` and `tile_size`, or if
        `key` or `mask` has a wrong shape.
        """
        aval = jax.typeof(self.w)
        axes: Any = self.tile_axis
        if isinstance(self.tile_size, tuple):
            axes = (*axes, *(axis for axis, _ in self.tile_size))
        # The axes are counted from the end. Quantized scales need a matrix.
        min_ndim = max(2 if self.has_quantized_scales else 1, -min(axes))
        if aval.ndim < min_ndim:
            raise ValueError(
                f"w of shape {aval.shape} has no axis {min(axes)}, which its tiles need"
            )
        if self.mask is not None and (self.mask.shape, self.mask.dtype) != (aval.shape, bool):
            raise ValueError(
                f"mask must be bool of shape {aval.shape}, as w, not {self.mask.dtype} of shape "
                f"{self.mask.shape}"
            )
        if self.key is not None and self.key.shape != aval.shape[: self.lead]:
            raise ValueError(
                f"key must have shape {aval.shape[: self.lead]} for w of shape {aval.shape} with "
                f"tile_axis {self.tile_axis}, not {self.key.shape}"
            )
        dtype = jax.dtypes.canonicalize_dtype(self.dense_dtype)
        return aval.update(dtype=dtype, weak_type=False)

    def with_mask(self, mask: Leaf) -> "FakeQuantized":
        """Return a copy with another mask, which is True for the values to keep.

        **Raises:** `ValueError` if the mask does not have the shape of `w` and dtype bool.
        """
        new = self.changed(mask=mask)
        new.aval()
        return new

    @property
    def storage_name(self) -> str | None:
        """The text that `vn.summary` shows for the format after `convert`: "as nf4, tile 64"."""
        texts = []
        if self.qtype is not None:
            texts.append(f"as {self.qtype}")
            # A slice of a stack cannot be quantized if the stack has tiles along the sliced axis.
            with contextlib.suppress(ValueError):
                texts.append(jax.eval_shape(FakeQuantized.quantize, self).storage_name)
        if self.sparsity is not None:
            n, m, *block = self.sparsity
            texts.append(f"{n} of {m} {f'blocks of {block[0]} ' if block else ''}kept")
        return ", ".join(texts) or None

    @property
    def current_mask(self) -> Leaf | None:
        """The mask of `w`, True for the values to keep. None if `mask` and `sparsity` are None.

        If only `sparsity` is set, the mask is computed from the values of `w`.
        """
        if self.mask is not None or self.sparsity is None:
            return self.mask
        w = jax.lax.stop_gradient(jnp.asarray(self.w))
        return sparsity_mask(w, self.sparsity, self.tile_axes[-1])

    @property
    def pruned(self) -> jax.Array:
        """The array `w`, with pruned values set to 0. These values still get gradients."""
        w, mask = jnp.asarray(self.w), self.current_mask
        return w if mask is None else ste(lambda w: jnp.where(mask, w, jnp.zeros_like(w)))(w)

    def quantize(self) -> jax.Array | QArray:
        """Return the weight as a `QArray`, which has no derivatives.

        If `qtype` is None, return the pruned dense array, which has derivatives.

        **Raises:** `ValueError` if slicing removed an axis of `w` that is in `tile_axis` or
        `tile_size`.
        """
        self.aval()
        if self.qtype is None:
            return self.pruned.astype(self.dtype)
        q = quantize(self.pruned, self.qtype, **self._options)
        return q.replace(dense_dtype=self.dense_dtype)

    def materialise(self) -> jax.Array:
        """Return the quantized and dequantized weight, with straight-through derivatives."""
        if self.qtype is None:
            return self.pruned.astype(self.dtype)
        return fake_quantize(self.pruned, self.qtype, **self._options).astype(self.dtype)

    @property
    def _options(self) -> dict[str, Any]:
        options = {"calibration_method": self.calibration_method, "scale_dtype": self.scale_dtype}
        return options | self.grid.arguments

    def partition(self, spec: PartitionSpec, shape: Shape) -> "FakeQuantized | None":
        """Return a copy whose `w`, `key` and `mask` are `PartitionSpec`s.

        **Arguments:**

        - `spec`, `shape`: as for `vn.Value.partition`.

        **Returns:** the copy. None if the sharding would split a tile or a group of `sparsity`
        between devices.
        """
        if shape != self.shape:
            for axis in range(self.ndim):
                tile = self.grid.size(axis)  # None if the whole axis is one tile
                splits_tile = tile is None or shape[axis] % tile or self.has_quantized_scales
                if spec[axis] is not None and splits_tile:
                    return None
        axis = self.tile_axes[-1]
        group = 1 if self.sparsity is None else group_size(self.sparsity)
        if shape[axis] != self.shape[axis] and shape[axis] % group:
            return None
        key = None if self.key is None else PartitionSpec(*spec[: self.lead])
        return self.changed(w=spec, key=key, mask=None if self.mask is None else spec)

    def __repr__(self) -> str:
        """Return the class and the fields that differ from their defaults."""
        # `__post_init__` replaces these two defaults. Transformations of JAX may replace `w` by an
        # object without a dtype.
        defaults = {"tile_axis": (-2,), "dense_dtype": str(getattr(self.w, "dtype", None))}
        arguments = []
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name, None)
            if is_default(value, defaults.get(name)):
                continue
            if name in ("tile_size", "act_tile_size") and isinstance(value, tuple):
                value = dict(value)
            text = describe([value])[0] if name in ("w", "key", "mask") else repr(value)
            arguments.append(f"{name}={text}")
        return f"FakeQuantized({', '.join(arguments)})"
