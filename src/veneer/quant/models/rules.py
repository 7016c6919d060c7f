"""`Rule`, the formats of parameters whose paths match a regex, and the rounding methods."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from ..._core.surface import check_regex, path_matches
from ...types.basis import InBasis
from ...types.lora import LoraArray
from ...types.rotated import Rotated
from ..activation_quantized import ActivationQuantized, check_activation_format, check_op_names
from ..conversion.calibration import check_calibration
from ..conversion.quantize import choose_scale_dtype, quantize
from ..formats import get_format, is_format
from ..formats.tiles import (
    Shape,
    check_tile_size,
    choose_scale_axes,
    resolve_tile_size,
    resolve_tile_sizes,
)
from ..statistics import ActivationStatistics, static_range
from ..training import BackwardProduct
from ..training.options import Sparsity, check_sparsity, describe_call

ACT_RANGES = ("dynamic", "mean", "exponential", "widest")
TRAINING_OPTIONS = ("grad_qtype", "grad_input", "grad_weight", "sparsity")


class RoundingMethod(NamedTuple):
    """A method by which `calibrate` rounds a weight: an entry of `ROUNDING_METHODS`."""

    factors: str | None = None  # the method that chooses factors per channel before rounding
    compensates: bool = False  # whether each code compensates the errors of earlier codes (GPTQ)


ROUNDING_METHODS = {
    "nearest": RoundingMethod(),
    "gptq": RoundingMethod(compensates=True),
    "awq": RoundingMethod("awq"),
    "awq+gptq": RoundingMethod("awq", compensates=True),
    "smoothquant": RoundingMethod("smoothquant"),
    "smoothquant+gptq": RoundingMethod("smoothquant", compensates=True),
}


def get_method(name: str) -> RoundingMethod:
    """Return an entry of `ROUNDING_METHODS`, or raise `ValueError` if it has no such name."""
    if name not in ROUNDING_METHODS:
        known = ", ".join(ROUNDING_METHODS)
        raise ValueError(f"unknown method {name!r}; it must be one of {known}")
    return ROUNDING_METHODS[name]


@dataclasses.dataclass(frozen=True, repr=False)
class Rule:
    """A rule that assigns formats to the parameters whose path matches a regex.

    In a list of rules, the first rule that matches a path applies. `docs/formats.md` explains each
    argument.

    **Arguments:**

    | group | arguments |
    |---|---|
    | which weights | `path_regex` |
    | format | `qtype`, `tile_size`, `tile_axis`, `calibration_method`, `scale_dtype` |
    | fidelity | `rotate`, `method`, `correction_rank`, `correction_steps` |
    | activations | `act_qtype`, `act_calibration_method`, `act_tile_size`, `act_range` |
    | products | `op_names` |
    | training | `grad_qtype`, `grad_input`, `grad_weight`, `sparsity` |

    - `path_regex`: a regex that matches the whole path of a parameter. Keys are joined with dots:
      `layers.0.query.kernel`. A final `.value`, as in flax.nnx, is optional.
    - `qtype`: the format of the weight, such as "int8". None leaves the weight dense.
    - `tile_size`: the number of values along `tile_axis` that share a scale (the group size). A
      float is a fraction of the axis. `{axis: size}` tiles several axes. None means the tile size
      of the format if it has one, and otherwise the whole axis.
    - `tile_axis`: the axis of the weight that products contract: -2 for kernels `[in, out]`, -1 for
      `[out, in]`. Or a list of axes; only the last one has tiles. If None, the axes are taken
      from the traced program, or -2 if there is no program.
    - `calibration_method`: the method that chooses scales, as in `vn.quant.quantize`. None selects
      the default method of the format.
    - `scale_dtype`: the dtype of the scales, as in `vn.quant.quantize`.
    - `rotate`: if True, rotate the weight to spread its outliers. The weight becomes a
      `vn.types.Rotated`.
    - `method`: the `method` of `vn.quant.calibrate` for the weight.
    - `correction_rank`: the rank of a low-rank correction of the rounding error. The weight becomes
      a `vn.types.LoraArray`.
    - `correction_steps`: how often `quantize_tree` alternates rounding and correction (LoftQ, arXiv
      2310.08659).
    - `act_qtype`: the format of the activations that multiply the weight. None leaves them dense.
    - `act_calibration_method`, `act_tile_size`: like `calibration_method` and `tile_size`, for the
      activations.
    - `act_range`: "dynamic" computes a scale per row in each product. The others use one static
      scale, from the ranges of batches that `vn.quant.observe` records: their "mean", their
      "exponential" moving average, or the "widest" range, of all batches.
    - `op_names`: a list of the primitives in which activations are quantized: "dot_general",
      "ragged_dot_general" or "conv_general_dilated". An empty list means all.
    - `grad_qtype`: the format of gradients in the backward pass. None leaves them dense.
    - `grad_input`, `grad_weight`: a `BackwardProduct` for the gradient of the input or of the
      weight, instead of `grad_qtype`.
    - `sparsity`: `(n, m)` keeps the n largest magnitudes of every m neighbors along `tile_axis`.
      `(n, m, block)` keeps n of every m blocks of `block` neighbors.

    **Raises:**

    - `ValueError` if an argument does not have one of the values above: if the regex is invalid, a
      format, method or range is unknown, or a tile size is below 1.
    - `ValueError` if an option is set without its format, such as `act_tile_size` without
      `act_qtype`.
    - `TypeError` if an argument has the wrong type, or `scale_dtype` is not floating.

    >>> import veneer as vn
    >>> vn.quant.Rule(r"layers\\.\\d+\\.kernel", "nf4", tile_size=64)
    Rule('layers\\\\.\\\\d+\\\\.kernel', 'nf4', tile_size=64)
    """

    path_regex: str
    qtype: DTypeLike | None
    _: dataclasses.KW_ONLY
    tile_size: int | np.integer | float | Mapping[int, int | float] | tuple[Any, ...] | None = None
    tile_axis: int | np.integer | Sequence[int | np.integer] | None = None
    calibration_method: str | None = None
    scale_dtype: Any = None
    rotate: bool = False
    method: str | None = None
    correction_rank: int | None = None
    correction_steps: int = 1
    act_qtype: DTypeLike | None = None
    act_calibration_method: str | None = None
    act_tile_size: int | np.integer | float | None = None
    act_range: str = "dynamic"
    grad_qtype: DTypeLike | None = None
    grad_input: BackwardProduct | None = None
    grad_weight: BackwardProduct | None = None
    sparsity: Sparsity | None = None
    op_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_regex(self.path_regex, "path_regex")
        if is_format(self.path_regex) and isinstance(self.qtype, str) and not is_format(self.qtype):
            raise ValueError(
                f"the arguments of Rule are swapped: write Rule({self.qtype!r}, "
                f"{self.path_regex!r}), with the regex first"
            )
        for name in ("qtype", "act_qtype", "grad_qtype"):
            qtype = getattr(self, name)
            if qtype is not None and not isinstance(qtype, str):  # a dtype
                self._set(name, get_format(qtype).name)
        self._check_tiles()
        self._check_options_of_weights()
        self._check_activations()
        if self.grad_qtype is not None:
            get_format(self.grad_qtype)  # raises ValueError if the format is unknown
        if self.sparsity is not None:
            self._set("sparsity", check_sparsity(self.sparsity, self.qtype))

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen

    def _check_tiles(self) -> None:
        axes = self.tile_axis
        if isinstance(axes, Sequence) and not isinstance(axes, str):
            self._set("tile_axis", tuple(axes))  # hashable
            if not axes:
                raise ValueError("tile_axis is empty; it must name at least one contracted axis")
        for axis in self._tile_axes():
            if not isinstance(axis, int | np.integer):
                raise TypeError(f"tile_axis must be an integer or a sequence of them, not {axes!r}")
        format = None if self.qtype is None else get_format(self.qtype)
        check_tile_size(self.tile_size, format, by_axis=True)
        if isinstance(self.tile_size, Mapping):
            self._set("tile_size", tuple(sorted(self.tile_size.items())))  # hashable

    def _check_options_of_weights(self) -> None:
        format = None if self.qtype is None else get_format(self.qtype)
        for name in ("calibration_method", "scale_dtype", "method", "correction_rank"):
            if getattr(self, name) is not None and format is None:
                raise ValueError(
                    f"{name} needs a qtype, because qtype=None leaves the weight dense"
                )
        if self.calibration_method is not None and format is not None:
            check_calibration(self.calibration_method, format)
        if self.scale_dtype is not None and format is not None:
            # The name of a dtype is hashable, and short in the repr.
            self._set("scale_dtype", choose_scale_dtype(format, np.float32, self.scale_dtype))
        factor_method = None if self.method is None else get_method(self.method).factors
        if factor_method and self.rotate:
            raise ValueError(
                f"rotate=True spreads outliers over all channels, and method {self.method!r} "
                "scales the channels with outliers. Choose one of them"
            )
        if factor_method == "smoothquant" and self.act_qtype is None:
            raise ValueError(
                f"method {self.method!r} is for quantized activations, and act_qtype is None. Set "
                "act_qtype, or use method='awq'"
            )
        for name in ("correction_rank", "correction_steps"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | np.integer) and value >= 1):
                raise ValueError(f"{name} must be an integer of 1 or more, not {value!r}")
        if self.correction_rank is None and self.correction_steps != 1:
            raise ValueError("correction_steps needs a correction_rank")

    def _check_activations(self) -> None:
        self._set("op_names", check_op_names(self.op_names))
        is_static = self.act_range != "dynamic"
        if self.act_range not in ACT_RANGES:
            raise ValueError(
                f"unknown act_range {self.act_range!r}; it must be one of {', '.join(ACT_RANGES)}"
            )
        if self.rotate and is_static:
            raise ValueError(
                f"act_range {self.act_range!r} does not work with rotate=True, because statistics "
                "are of activations before the rotation. Use act_range='dynamic'"
            )
        method, tile_size = self.act_calibration_method, self.act_tile_size
        if self.act_qtype is not None:
            format = get_format(self.act_qtype)
            check_activation_format(format, method, tile_size, is_static=is_static)
        elif method is not None or tile_size is not None or is_static:
            raise ValueError(
                "act_calibration_method, act_tile_size and act_range need an act_qtype, the "
                "format of activations"
            )

    def __repr__(self) -> str:
        """Return the call that creates the rule."""
        return describe_call(self)

    def matches(self, path: str) -> bool:
        """Return whether the rule matches a path. A final `.value` of the path is optional."""
        return path_matches(self.path_regex, path)

    @property
    def has_format(self) -> bool:
        """True if the rule quantizes weights, activations or gradients, or prunes weights."""
        return any(
            getattr(self, name) is not None for name in ("qtype", "act_qtype", *TRAINING_OPTIONS)
        )

    def is_for(self, op: str) -> bool:
        """Return whether the rule applies to the primitive `op`, such as "dot_general"."""
        return not self.op_names or op in self.op_names

    def _tile_axes(self) -> tuple[Any, ...]:
        if self.tile_axis is None:
            return (-2,)
        return self.tile_axis if isinstance(self.tile_axis, tuple) else (self.tile_axis,)

    def contracting(self, ndim: int) -> tuple[int, ...]:
        """Return `tile_axis` as a tuple of axes counted from the end, for an array of rank `ndim`.

        If `tile_axis` is None, return `(-2,)`.

        **Raises:** `ValueError` if an axis is out of range or named twice.
        """
        axes = tuple(map(int, self._tile_axes()))
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(f"tile_axis {axis} is out of range for {ndim} axes")
        from_end = tuple(axis % ndim - ndim for axis in axes)
        if len(set(from_end)) < len(from_end):
            raise ValueError(f"tile_axis {self.tile_axis} names an axis twice for {ndim} axes")
        return from_end

    def along(self, axes: Collection[int], shape: Sequence[int]) -> "Rule":
        """Return a copy whose `tile_axis` and `tile_size` fit one weight.

        The `tile_axis` of the copy is the list of contracted axes. An integer `tile_size` becomes a
        dict with a size per axis. The sizes multiply to the old size, or to less if no such tile
        divides the axes. If the contracted axes have at most as many values as a tile, the new
        `tile_size` is None: all values share a scale.

        **Arguments:**

        - `axes`: the axes of the weight that products contract, counted from the end.
        - `shape`: the shape of the weight.

        **Raises:** `ValueError` if only tile sizes below 8 divide the axes.
        """
        ordered = sorted(axes)
        fixed_tile = None if self.qtype is None else get_format(self.qtype).tile_size
        tile = self.tile_size or fixed_tile
        if tile is None or isinstance(tile, Mapping | tuple):
            return dataclasses.replace(self, tile_axis=ordered)
        sizes = [shape[axis] for axis in ordered]
        # A float is a fraction of all values along the contracted axes.
        tile = resolve_tile_size((math.prod(sizes),), 0, tile)
        if fixed_tile is not None:
            # Only the last axis has tiles, so put an axis that the tile divides last.
            ordered.sort(key=lambda axis: shape[axis] % tile == 0)
            return dataclasses.replace(self, tile_axis=ordered)
        if math.prod(sizes) <= tile:
            return dataclasses.replace(self, tile_axis=ordered, tile_size=None)
        tile_sizes = split_tile(sizes, tile)
        if math.prod(tile_sizes) < min(tile, SMALLEST_TILE):
            raise ValueError(
                f"no tile of about {tile} divides the contracted axes {ordered} of shape {shape}. "
                "Choose another tile_size, None, or another tile_axis"
            )
        by_axis = dict(zip(ordered, tile_sizes, strict=True))
        return dataclasses.replace(self, tile_axis=ordered, tile_size=by_axis)

    def axes(self, shape: Shape) -> tuple[tuple[int, ...], dict[int, int]]:
        """Return the pair `(channelwise_axes, tiled_axes)`, arguments of `vn.quant.quantize`.

        They say along which axes of a weight of shape `shape` the scales of this rule differ.

        **Raises:** `ValueError` if an axis is out of range or named twice.
        """
        ndim = len(shape)
        contracting = self.contracting(ndim)
        format = None if self.qtype is None else get_format(self.qtype)
        tile_size = resolve_tile_sizes(shape, contracting, self.tile_size)
        axes = choose_scale_axes(ndim, [axis + ndim for axis in contracting], format, tile_size)
        return axes.channelwise, dict(axes.tiled)

    def in_basis(self, array: Any) -> Any:
        """Return the array as a `vn.types.Rotated` if `rotate` is True, or else unchanged."""
        return Rotated.from_dense(array, self.contracting(array.ndim)) if self.rotate else array

    def quantize(self, array: Any) -> Any:
        """Quantize a floating array of rank 2 or more.

        **Returns:** a `QArray`, or the dense array if `qtype` is None. If `rotate` is True, a
        `vn.types.Rotated` wraps the result. `correction_rank` has no effect here: only
        `quantize_tree` and `calibrate` use it.
        """
        array = self.in_basis(array)
        if isinstance(array, InBasis):
            return array.with_array(self._quantize_array(array.array))
        return self._quantize_array(array)

    def _quantize_array(self, array: Any) -> Any:
        if self.qtype is None:
            return array
        try:
            channelwise, tiled = self.axes(array.shape)
        except ValueError as error:
            raise ValueError(f"{error}: the shape is {array.shape}") from None
        return quantize(
            array,
            self.qtype,
            channelwise_axes=channelwise,
            tiled_axes=dict(tiled.items()),  # a dict with the key type that mypy expects
            calibration_method=self.calibration_method,
            scale_dtype=self.scale_dtype,
        )

    def with_activations(self, weight: Any, statistics: ActivationStatistics | None = None) -> Any:
        """Wrap a weight in an `ActivationQuantized`. Without `act_qtype`, return it unchanged.

        **Arguments:**

        - `weight`: a dense or implicit array.
        - `statistics`: statistics of the activations that multiply the weight. Only a static
          `act_range` needs them.

        **Raises:**

        - `ValueError` if `act_range` is static and `statistics` is None, or belongs to a weight of
          another shape, or has a range that is 0 or not finite.
        - `ValueError` if `act_range` is static and `act_calibration_method` needs the activations
          themselves, as "mse" does.
        - `ValueError` if a tile of the activations does not divide the last contracted axis.
        """
        if self.act_qtype is None:
            return weight
        if isinstance(weight, LoraArray):  # the low-rank correction takes dense activations
            return weight.changed(w=self.with_activations(weight.w, statistics))
        if isinstance(weight, InBasis):  # activations are quantized after their rotation
            return weight.with_array(self.with_activations(weight.array, statistics))
        contracting = self.contracting(weight.ndim)
        format = get_format(self.act_qtype)
        size = weight.shape[contracting[-1]]
        tile = format.tile_size or resolve_tile_sizes(weight.shape, contracting, self.act_tile_size)
        if isinstance(tile, int) and size % max(tile, 1):
            raise ValueError(
                f"activations in {format.name} have tiles of {tile}, which do not divide axis "
                f"{contracting[-1]} (size {size}) of the weight of shape {weight.shape}. Choose "
                "another act_tile_size or act_qtype"
            )
        scale = zero_point = None
        if self.act_range != "dynamic":
            if statistics is None:
                raise ValueError(
                    f"act_range {self.act_range!r} needs recorded statistics: pass the result of "
                    "vn.quant.observe as statistics="
                )
            scale, zero_point = static_range(
                statistics,
                self.act_qtype,
                weight.shape,
                average=self.act_range,
                calibration_method=self.act_calibration_method,
            )
        return ActivationQuantized(
            weight,
            scale,
            zero_point,
            qtype=self.act_qtype,
            calibration_method=self.act_calibration_method,
            tile_size=self.act_tile_size,
            contracting=contracting,
            op_names=self.op_names,
        )


#: The least number of values in a tile. The scales of smaller tiles take too many bits.
SMALLEST_TILE = 8


def split_tile(shape: Sequence[int], tile: int) -> list[int]:
    """Return a shape of about `tile` values, in which each size divides the same axis of `shape`.

    The result is the shape of a tile, the values that share a scale. It never has more than `tile`
    values. It extends along one axis, and has size 1 along the others. But if a tile along several
    of the last axes has more values, that tile is returned.

    >>> from veneer.quant.models.rules import split_tile
    >>> split_tile((8, 64), 32), split_tile((8, 64), 128), split_tile((64, 3, 3), 32)
    ([1, 32], [2, 64], [32, 1, 1])
    >>> split_tile((96,), 64), split_tile((1000,), 64), split_tile((300,), 64)
    ([48], [40], [60])
    """
    along_last_axes: list[int] = []
    remaining = tile
    for size in reversed(shape):
        along_last_axes.insert(0, math.gcd(size, remaining))
        # Only a tile that covers this axis can extend along the next axis.
        remaining = remaining // size if along_last_axes[0] == size else 1
    along_one_axis = []
    for axis, size in reversed([*enumerate(shape)]):
        divisors = [n for n in range(1, min(size, tile) + 1) if size % n == 0]
        # Prefer multiples of 8, if they are at least half of the tile.
        aligned = [n for n in divisors if n % 8 == 0 and 2 * n >= tile]
        divisor = max(aligned or divisors, default=1)
        along_one_axis.append([divisor if i == axis else 1 for i in range(len(shape))])
    # `max` returns the first of several tiles of equal size: along one axis, if possible the last.
    return max([*along_one_axis, along_last_axes], key=math.prod)
