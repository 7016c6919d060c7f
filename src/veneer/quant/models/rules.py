"""Quantising a model: rules that say which of its parameters take which format."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from ..._core.surface.weights import path_matches
from ..._core.value import is_value
from ..._jax.source_lines import warn_user
from ...types.basis import InBasis, Rotated
from ...types.lora import LoraArray
from ..activations import ActivationQuantized, check_activation_format, products_named
from ..conversion.calibration import check_calibration
from ..conversion.quantize import quantize, scale_dtype_in, tile_in
from ..conversion.scale_axes import check_tile_size, scale_axes_of, tile_size_in
from ..formats import get_format
from ..formats.tiles import Shape
from ..observation.statistics import ActivationStatistics, static_range
from ..ptq.methods import check_method
from ..qarray import QUANTIZABLE
from ..training import BackwardProduct
from ..training.sparsity import Sparsity, check_sparsity

RANGES = ("dynamic", "mean", "exponential", "widest")
TRAINING = ("grad_qtype", "grad_input", "grad_weight", "sparsity")  # what is for training alone


@dataclasses.dataclass(frozen=True, repr=False)
class Rule:
    """What to do with the parameters whose path matches.

    **Arguments:**

    - `path_regex`: matched in full against the keys of a leaf joined with dots, as in
      `layers.0.attention.query.kernel`. The `.value` at the end of a path of flax.nnx may be left
      out.
    - `qtype`: the format, or None to leave the parameter dense.
    - `tile_size`: how many values along `tile_axis` share a scale; a float is the share of the axis
      that they take, so that 0.25 is four tiles. None is all of them, or the tile that the format
      is defined for. `{axis: size}` has a tile along each axis that it names, contracting or not:
      `{-2: 128, -1: 128}` is a scale for each block of 128 by 128.
    - `tile_axis`: the contracting axis: -2 for a JAX kernel `[..., in, out]`, -1 for a torch weight
      `[out, in]` or an embedding table `[rows, features]`. Every other axis is channelwise. Where a
      product contracts several, which then share a scale, all of them, the one that is tiled last:
      `(-4, -3, -2)` for the kernel `[height, width, in, out]` of a convolution. None is what the
      program says that `quantize_tree` is given, and -2 without one.
    - `calibration_method`: of the weights; None is the format's own.
    - `scale_dtype`: of the weights' scales; None is the format's own, or else that of the weight.
      `"float16"` and `"bfloat16"` halve what they take: tiles of 32 in int4 have 4.5 bits a value,
      and 5 with scales in f32. The files of other libraries have scales of 16 bits.
      Those of f16 go from 6e-8 to 65504: a tile that needs a smaller one is zeros, and one that
      needs a larger one is NaN; bfloat16 reaches as far as f32.
    - `rotate`: whether the weight is stored rotated along the axes that products contract, as a
      `vn.types.Rotated`, and activations are rotated as they meet it: what stands out in either is
      spread, so that few bits lose less. It costs an activation some `2 * sqrt(K)` products.
    - `method`: how `vn.quant.calibrate` rounds the weight; None is as it rounds the others.
    - `correction_rank`: of the correction of what rounding lost, with which the weight is a
      `vn.types.LoraArray`: the nearest matrix of that rank, by the sum of squares, or in
      `calibrate` by the outputs on its activations. It takes `rank * (in + out)` values more, in
      the dtype of the weight. None is no correction.
    - `correction_steps`: how many times the weight, without its correction so far, is rounded and
      corrected anew, of which the best is kept. More than one, five say, are for a LoRA that is to
      be trained in a format of few bits: it then begins closer to the weight (LoftQ). For a model
      that is only run, `calibrate` with one step loses less.
    - `act_qtype`: the format that activations are quantised to, as they meet the weight in a
      product; None leaves them as they are.
    - `act_calibration_method`: of the activations; None is that of `act_qtype`.
    - `act_tile_size`: how many activations, along the last axis that a product contracts, share a
      scale; a float is the share of the axis. None is all of them, or the tile of `act_qtype`.
    - `act_range`: where the scale of activations comes from. `"dynamic"`: from themselves, a scale
      a row. Or static, one scale for all, from statistics that `observe` has recorded: of the range
      of values in a batch the `"mean"` over the batches, their `"exponential"` moving average, or
      the `"widest"` of them.
    - `grad_qtype`: for training, the format that gradients are quantised to in the products of the
      backward pass; None leaves them as they are.
    - `grad_input`, `grad_weight`: for training, how the product is quantised that gives the
      gradient of the activations, and the one that gives that of the weight; None is
      `BackwardProduct(grad_qtype)`.
    - `sparsity`: for training, `(n, m)`: of each m neighbours along the last contracting axis the
      n largest are kept, and the others are 0; None keeps all. `(n, m, block)` keeps n of each m
      blocks of so many neighbours, by the sums of their magnitudes.
    - `op_names`: the primitives in whose products activations are quantised: of `"dot_general"`,
      `"ragged_dot_general"` and `"conv_general_dilated"`. None named is all of them. `x @ w` and
      any `einsum` are `dot_general` to a program.

    **Raises:** `ValueError` for a regex that does not compile, an unknown format, method or range,
    a tile below 1, a share above 1, one that is not the format's, as of scales, and a field that
    says how to do what the rule does not do; `TypeError` for a tile that is no number, an axis no
    integer, and scales of no floating dtype.

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
        try:
            re.compile(self.path_regex)
        except re.error as error:
            raise ValueError(f"path_regex {self.path_regex!r} is not a regex: {error}") from None
        for name in ("qtype", "act_qtype", "grad_qtype"):
            qtype = getattr(self, name)
            if qtype is not None and not isinstance(qtype, str):  # a dtype; shown by its name
                object.__setattr__(self, name, get_format(qtype).name)
        self._check_tiles()
        self._check_methods()
        self._check_correction()
        object.__setattr__(self, "op_names", products_named(self.op_names))
        if self.grad_qtype is not None:
            get_format(self.grad_qtype)
        if self.sparsity is not None:
            pattern = check_sparsity(self.sparsity, self.qtype)
            object.__setattr__(self, "sparsity", pattern)

    def _check_tiles(self) -> None:
        axes = self.tile_axis
        if isinstance(axes, Sequence) and not isinstance(axes, str):
            object.__setattr__(self, "tile_axis", tuple(axes))  # hashable; the dataclass is frozen
            if not axes:
                raise ValueError("tile_axis names no axis, and a product contracts one at least")
        for axis in self._tile_axes():
            if not isinstance(axis, int | np.integer):
                raise TypeError(f"tile_axis is an axis, or a sequence of them, not {axes!r}")
        format = None if self.qtype is None else get_format(self.qtype)
        check_tile_size(self.tile_size, format, by_axis=True)
        if isinstance(self.tile_size, Mapping):
            pairs = tuple(sorted(self.tile_size.items()))
            object.__setattr__(self, "tile_size", pairs)  # hashable, as above

    def _check_methods(self) -> None:
        if self.act_range not in RANGES:
            raise ValueError(
                f"unknown act_range {self.act_range!r}; the ranges are {', '.join(RANGES)}"
            )
        if self.calibration_method is not None:
            if self.qtype is None:
                raise ValueError("calibration_method is of weights, which qtype=None leaves dense")
            check_calibration(self.calibration_method, get_format(self.qtype))
        if self.scale_dtype is not None:
            if self.qtype is None:
                raise ValueError("scale_dtype is of weights, which qtype=None leaves dense")
            name = scale_dtype_in(get_format(self.qtype), np.float32, self.scale_dtype)
            object.__setattr__(self, "scale_dtype", name)  # hashable, and shown as it is written
        if self.method is not None:
            if self.qtype is None:
                raise ValueError("method is of weights, which qtype=None leaves dense")
            check_method(self.method, rotate=self.rotate, act_qtype=self.act_qtype)
        if self.rotate and self.act_range != "dynamic":
            raise ValueError(
                f"act_range {self.act_range!r} is of activations as they are, and rotate=True "
                "rotates them: leave act_range 'dynamic'"
            )
        if self.act_qtype is not None:
            check_activation_format(
                get_format(self.act_qtype),
                self.act_calibration_method,
                self.act_tile_size,
                is_static=self.act_range != "dynamic",
            )
            return
        how = self.act_calibration_method, self.act_tile_size
        if how != (None, None) or self.act_range != "dynamic":
            raise ValueError(
                "act_calibration_method, act_tile_size and act_range say how activations are "
                "quantised, which act_qtype=None leaves as they are"
            )

    def _check_correction(self) -> None:
        rank, steps = self.correction_rank, self.correction_steps
        for name, count in (("correction_rank", rank), ("correction_steps", steps)):
            if count is not None and not (isinstance(count, int | np.integer) and count >= 1):
                raise ValueError(f"{name} is an integer of 1 or more, not {count!r}")
        if rank is not None and self.qtype is None:
            raise ValueError("correction_rank is of weights, which qtype=None leaves dense")
        if rank is None and steps != 1:
            raise ValueError("correction_steps says how to find a correction: give its rank")

    def __repr__(self) -> str:
        """Returns the call that makes the rule."""
        first, second, *others = (f for f in dataclasses.fields(self) if f.init)
        parts = [repr(getattr(self, field.name)) for field in (first, second)]
        values = [(field, getattr(self, field.name)) for field in others]
        if isinstance(self.tile_size, tuple):
            values = [(f, dict(v) if f.name == "tile_size" else v) for f, v in values]
        parts += [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"Rule({', '.join(parts)})"

    def matches(self, path: str) -> bool:
        """Return whether the whole of `path` matches, with or without a final `.value`."""
        return path_matches(self.path_regex, path)

    @property
    def has_format(self) -> bool:
        """Whether the rule has anything quantised: weights, activations, gradients."""
        return any(getattr(self, name) is not None for name in ("qtype", "act_qtype", *TRAINING))

    def is_for(self, op: str) -> bool:
        """Returns whether the rule is for products by a primitive."""
        return not self.op_names or op in self.op_names

    def _tile_axes(self) -> tuple[Any, ...]:
        if self.tile_axis is None:
            return (-2,)
        return self.tile_axis if isinstance(self.tile_axis, tuple) else (self.tile_axis,)

    def contracting(self, ndim: int) -> tuple[int, ...]:
        """Returns the contracting axes of an array of `ndim` axes, counted from the end, in order.

        **Raises:** `ValueError` for one that is out of range or named twice.
        """
        axes = tuple(map(int, self._tile_axes()))
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(f"tile_axis {axis} is out of range for {ndim} axes")
        from_end = tuple(axis % ndim - ndim for axis in axes)
        if len(set(from_end)) < len(from_end):
            raise ValueError(f"tile_axis {self.tile_axis} names an axis twice, of {ndim} axes")
        return from_end

    def along(self, axes: Collection[int], shape: Sequence[int]) -> "Rule":
        """Returns the rule for an array whose products contract these axes, counted from the end.

        A tile is of so many of the values that a product sums, which may lie along several axes; of
        as many up to that as divide them. Where there are no more of them, they share one scale.

        **Raises:** `ValueError` where none divides them.
        """
        ordered = sorted(axes)
        format = None if self.qtype is None else get_format(self.qtype)
        tile = self.tile_size if format is None else self.tile_size or format.tile_size
        if tile is None or isinstance(tile, Mapping | tuple):
            return dataclasses.replace(self, tile_axis=ordered)
        sizes = [shape[axis] for axis in ordered]
        tile = tile_in((math.prod(sizes),), 0, tile)
        if format and format.tile_size is not None:
            ordered.sort(key=lambda axis: shape[axis] % tile == 0)  # the last is the one with tiles
            return dataclasses.replace(self, tile_axis=ordered)
        if math.prod(sizes) <= tile:
            return dataclasses.replace(self, tile_axis=ordered, tile_size=None)
        cut = cut_in_tiles(sizes, tile)
        if math.prod(cut) < min(tile, LEAST_TILE):
            raise ValueError(
                f"no tile of {tile} or near it divides the axes {ordered} of shape {shape}, which "
                "products contract: state another tile_size, or None, or by tile_axis other axes"
            )
        tiles = dict(zip(ordered, cut, strict=True))
        return dataclasses.replace(self, tile_axis=ordered, tile_size=tiles)

    def axes(self, shape: Shape) -> tuple[tuple[int, ...], dict[int, int]]:
        """Returns the `channelwise_axes` and the `tiled_axes` for an array of a shape.

        **Raises:** `ValueError` for an axis that is out of range or named twice.
        """
        ndim = len(shape)
        contracting = self.contracting(ndim)
        format = None if self.qtype is None else get_format(self.qtype)
        tile_size = tile_size_in(shape, contracting, self.tile_size)
        axes = scale_axes_of(ndim, [axis + ndim for axis in contracting], format, tile_size)
        return axes.channelwise, dict(axes.tiled)

    def in_basis(self, array: Any) -> Any:
        """Returns a floating array of rank 2 and up as it is to be stored: rotated, or as it is."""
        return Rotated.of(array, self.contracting(array.ndim)) if self.rotate else array

    def quantize(self, array: Any) -> Any:
        """Quantises a floating array of rank 2 and up; `qtype` None leaves its values as they are.

        **Returns:** a `QArray`, in a `vn.types.Rotated` if the rule has it rotated. A correction
        takes more than a rule knows: `quantize_corrected` adds it.
        """
        array = self.in_basis(array)
        if isinstance(array, InBasis):
            return array.with_array(self._quantized(array.array))
        return self._quantized(array)

    def _quantized(self, array: Any) -> Any:
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
            tiled_axes=dict(tiled.items()),
            calibration_method=self.calibration_method,
            scale_dtype=self.scale_dtype,
        )

    def with_activations(self, weight: Any, statistics: ActivationStatistics | None = None) -> Any:
        """Returns a weight that quantises activations, if `act_qtype` says so, else as it is.

        **Arguments:**

        - `weight`: dense or implicit.
        - `statistics`: of its activations, for an `act_range` that is static.

        **Raises:** `ValueError` where the statistics are missing or do not fit, or a tile of the
        format of activations does not divide the contracting axis.
        """
        if self.act_qtype is None:
            return weight
        if isinstance(weight, LoraArray):  # a correction meets them as they are
            return weight.changed(w=self.with_activations(weight.w, statistics))
        if isinstance(weight, InBasis):  # they are quantised as they meet what it stores
            return weight.with_array(self.with_activations(weight.array, statistics))
        contracting = self.contracting(weight.ndim)
        format = get_format(self.act_qtype)
        size = weight.shape[contracting[-1]]
        tile = format.tile_size or tile_size_in(weight.shape, contracting, self.act_tile_size)
        if isinstance(tile, int) and size % max(tile, 1):
            raise ValueError(
                f"activations in {format.name} have tiles of {tile}, which do not "
                f"divide axis {contracting[-1]} (size {size}) of the weight of shape {weight.shape}"
            )
        scale = zero_point = None
        if self.act_range != "dynamic":
            if statistics is None:
                raise ValueError(
                    f"act_range {self.act_range!r} takes recorded statistics; pass those of "
                    "vn.quant.observe, as statistics="
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


#: What is still a tile. Of fewer values a scale takes too much.
LEAST_TILE = 8


def cut_in_tiles(shape: Sequence[int], tile: int) -> list[int]:
    """Returns how many values along each of several axes are a tile of so many, or nearly.

    Those along one axis; or along the last ones, where there are too few along each.

    >>> from veneer.quant.models.rules import cut_in_tiles
    >>> cut_in_tiles((8, 64), 32), cut_in_tiles((8, 64), 128), cut_in_tiles((64, 3, 3), 32)
    ([1, 32], [2, 64], [32, 1, 1])
    >>> cut_in_tiles((96,), 64), cut_in_tiles((1000,), 64), cut_in_tiles((300,), 64)
    ([48], [40], [60])
    """
    along_last: list[int] = []
    left = tile
    for size in reversed(shape):
        along_last.insert(0, math.gcd(size, left))
        left = left // size if along_last[0] == size else 1
    along_one = [
        [_part(size, tile) if i == axis else 1 for i in range(len(shape))]
        for axis, size in reversed([*enumerate(shape)])
    ]
    return max([*along_one, along_last], key=math.prod)


def _part(size: int, tile: int) -> int:
    """The largest tile up to one of so many that divides an axis; of whole bytes, if half is."""
    parts = [n for n in range(1, min(size, tile) + 1) if size % n == 0]
    return max([n for n in parts if n % 8 == 0 and 2 * n >= tile] or parts)


def rules_or_format(rules: Any) -> tuple[Rule, ...] | str:
    """Return the rules of a sequence, or the name of a format that is given by its name or dtype.

    **Raises:** `TypeError` for anything else. The message shows the list that was probably meant.
    """
    if isinstance(rules, str):
        return rules
    if isinstance(rules, type | np.dtype):
        return get_format(rules).name
    return rules_in(rules)


def rules_in(rules: Any) -> tuple[Rule, ...]:
    """Returns the rules of a sequence; refuses anything else with what was meant."""
    if isinstance(rules, Rule):
        raise TypeError(f"rules must be a list: [{rules}]")
    if not isinstance(rules, Iterable) or isinstance(rules, str | Mapping):
        meant = f"[Rule('.*', {rules!r})]" if isinstance(rules, str) else "[Rule('.*', 'int8')]"
        raise TypeError(f"rules must be a list of Rule, such as {meant}, not {rules!r}")
    rules = tuple(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            raise TypeError(f"rules[{i}] must be a Rule, such as Rule('.*', 'int8'), not {rule!r}")
    return rules


def flatten_with_paths(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Returns the paths that rules are matched with, the leaves and the structure of a tree."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_value)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return paths, [leaf for _, leaf in leaves], treedef


def rule_for(path: str, leaf: Any, rules: Sequence[Rule]) -> Rule | None:
    """Returns the first rule that matches, of a leaf that rules apply to."""
    rule = next((rule for rule in rules if rule.matches(path)), None)
    return rule if can_be_quantized(leaf) else None


def can_be_quantized(leaf: Any) -> bool:
    """Returns whether rules apply to a leaf (or its aval): it is floating, and of rank 2 and up."""
    return not is_value(leaf) and getattr(leaf, "ndim", 0) >= 2 and leaf.dtype in QUANTIZABLE


def warn_of_unmatched(rules: Sequence[Any], paths: Sequence[str]) -> None:
    """Warns of each rule that matches none of the paths."""
    for rule in rules:
        if not any(map(rule.matches, paths)):
            warn_user(
                f"the rule {rule.path_regex!r} matches no parameter; it is matched in full against "
                f"paths such as {some_of(paths)}"
            )


def some_of(paths: Sequence[str], shown: int = 4) -> str:
    """Returns a few of the paths, for messages."""
    some = ", ".join(paths[:shown]) + (", ..." if len(paths) > shown else "")
    return some or "(the tree is empty)"
