"""Quantising a model: rules that say which of its parameters take which format."""

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.value import is_value
from ..activations import ActivationQuantized, check_activation_format, products_named
from ..conversion.calibration import check_calibration
from ..conversion.quantize import quantize, tile_in
from ..conversion.scale_axes import scale_axes_of
from ..formats import get_format
from ..formats.tiles import Shape
from ..observation.statistics import ActivationStatistics, static_range
from ..qarray import QUANTIZABLE

RANGES = ("dynamic", "mean", "exponential", "widest")


@dataclasses.dataclass(frozen=True, repr=False)
class Rule:
    """What to do with the parameters whose path matches.

    **Arguments:**

    - `path_regex`: matched in full against the keys of a leaf joined with dots, as in
      `layers.0.attention.query.kernel`.
    - `qtype`: the format, or None to leave the parameter dense.
    - `tile_size`: how many values along `tile_axis` share a scale; a float is the share of the axis
      that they take, so that 0.25 is four tiles. None is all of them, or the tile that the format
      is defined for.
    - `tile_axis`: the contracting axis: -2 for a JAX kernel `[..., in, out]`, -1 for a torch weight
      `[out, in]` or an embedding table `[rows, features]`. Every other axis is channelwise. Where a
      product contracts several, which then share a scale, all of them, the one that is tiled last:
      `(-4, -3, -2)` for the kernel `[height, width, in, out]` of a convolution.
    - `calibration_method`: of the weights; None is the format's own.
    - `act_qtype`: the format that activations are quantised to, as they meet the weight in a
      product; None leaves them as they are.
    - `act_calibration_method`: of the activations; None is that of `act_qtype`.
    - `act_range`: where the scale of activations comes from. `"dynamic"`: from themselves, a scale
      a row. Or static, one scale for all, from statistics that `observe` has recorded: of the range
      of values in a batch the `"mean"` over the batches, their `"exponential"` moving average, or
      the `"widest"` of them.
    - `grad_qtype`: for training, the format that gradients are quantised to in the products of the
      backward pass; None leaves them as they are.
    - `op_names`: the primitives in whose products activations are quantised: of `"dot_general"`,
      `"ragged_dot_general"` and `"conv_general_dilated"`. None named is all of them. `x @ w` and
      any `einsum` are `dot_general` to a program.

    **Raises:** `ValueError` for a regex that does not compile, an unknown format, method or range,
    a tile below 1, a share above 1, one that is not the format's, and a field that says how to do
    what the rule does not do; `TypeError` for a tile that is no number, or an axis no integer.

    >>> import veneer as vn
    >>> vn.quant.Rule(r"layers\\.\\d+\\.kernel", "nf4", tile_size=64)
    Rule('layers\\\\.\\\\d+\\\\.kernel', 'nf4', tile_size=64)
    """

    path_regex: str
    qtype: str | None
    _: dataclasses.KW_ONLY
    tile_size: int | np.integer | float | None = None
    tile_axis: int | np.integer | Sequence[int | np.integer] = -2
    calibration_method: str | None = None
    act_qtype: str | None = None
    act_calibration_method: str | None = None
    act_range: str = "dynamic"
    grad_qtype: str | None = None
    op_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        try:
            re.compile(self.path_regex)
        except re.error as error:
            raise ValueError(f"path_regex {self.path_regex!r} is not a regex: {error}") from None
        self._check_tiles()
        self._check_methods()
        object.__setattr__(self, "op_names", products_named(self.op_names))
        if self.grad_qtype is not None:
            get_format(self.grad_qtype)

    def _check_tiles(self) -> None:
        axes = self.tile_axis
        if isinstance(axes, Sequence) and not isinstance(axes, str):
            object.__setattr__(self, "tile_axis", tuple(axes))  # hashable; the dataclass is frozen
            if not axes:
                raise ValueError("tile_axis names no axis, and a product contracts one at least")
        for axis in self._tile_axes():
            if not isinstance(axis, int | np.integer):
                raise TypeError(f"tile_axis is an axis, or a sequence of them, not {axes!r}")
        if self.tile_size is not None:
            if not isinstance(self.tile_size, int | np.integer | float):
                raise TypeError(
                    "tile_size is a whole number of values, or as a float the share of the axis, "
                    f"not {self.tile_size!r}"
                )
            if isinstance(self.tile_size, float) and not 0 < self.tile_size <= 1:
                raise ValueError(f"tile_size is a share of the axis up to 1, not {self.tile_size}")
            if not isinstance(self.tile_size, float) and self.tile_size < 1:
                raise ValueError(f"tile_size is a number of values, not {self.tile_size}")
        size = None if self.qtype is None else get_format(self.qtype).tile_size
        if size is not None and self.tile_size not in (None, size):
            raise ValueError(
                f"{self.qtype} is defined for tiles of {size}, not {self.tile_size}: leave out "
                "tile_size, or take a format without a tile of its own"
            )

    def _check_methods(self) -> None:
        if self.act_range not in RANGES:
            raise ValueError(
                f"unknown act_range {self.act_range!r}; the ranges are {', '.join(RANGES)}"
            )
        if self.calibration_method is not None:
            if self.qtype is None:
                raise ValueError("calibration_method is of weights, which qtype=None leaves dense")
            check_calibration(self.calibration_method, get_format(self.qtype))
        if self.act_qtype is not None:
            format = get_format(self.act_qtype)
            is_static = self.act_range != "dynamic"
            check_activation_format(format, self.act_calibration_method, is_static=is_static)
        elif self.act_calibration_method is not None or self.act_range != "dynamic":
            raise ValueError(
                "act_calibration_method and act_range say how activations are quantised, which "
                "act_qtype=None leaves as they are"
            )

    def __repr__(self) -> str:
        """Returns the call that makes the rule."""
        first, second, *others = (f for f in dataclasses.fields(self) if f.init)
        parts = [repr(getattr(self, field.name)) for field in (first, second)]
        values = ((field, getattr(self, field.name)) for field in others)
        parts += [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"Rule({', '.join(parts)})"

    def matches(self, path: str) -> bool:
        """Returns whether the whole of `path` matches."""
        return re.fullmatch(self.path_regex, path) is not None

    def is_for(self, op: str) -> bool:
        """Returns whether the rule is for products by a primitive."""
        return not self.op_names or op in self.op_names

    def _tile_axes(self) -> tuple[Any, ...]:
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

    def tile(self, shape: Shape) -> int | None:
        """Returns how many values of an array of this shape share a scale along `tile_axis`.

        **Returns:** None where it is all of them, or the tile that the format is defined for.
        """
        if self.tile_size is None:
            return None
        return tile_in(shape, self.contracting(len(shape))[-1], self.tile_size)

    def axes(self, shape: Shape) -> tuple[tuple[int, ...], dict[int, int]]:
        """Returns the `channelwise_axes` and the `tiled_axes` for an array of a shape.

        **Raises:** `ValueError` for a tile axis that is out of range or named twice.
        """
        ndim = len(shape)
        contracting = [axis + ndim for axis in self.contracting(ndim)]
        format = None if self.qtype is None else get_format(self.qtype)
        axes = scale_axes_of(ndim, contracting, format, self.tile(shape))
        return axes.channelwise, dict(axes.tiled)

    def quantize(self, array: Any) -> Any:
        """Quantises a floating array of rank 2 and up; leaves it as it is if `qtype` is None."""
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
        contracting = self.contracting(weight.ndim)
        format = get_format(self.act_qtype)
        size = weight.shape[contracting[-1]]
        if format.tile_size is not None and size % format.tile_size:
            raise ValueError(
                f"activations in {format.name} have tiles of {format.tile_size}, which do not "
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
            contracting=contracting,
            op_names=self.op_names,
        )


def quantize_tree(
    params: Any,
    rules: Sequence[Rule],
    *,
    train: bool = False,
    statistics: Mapping[str, ActivationStatistics] | None = None,
) -> Any:
    """Quantises the parameters of a model, whichever library made them.

    **Arguments:**

    - `params`: any pytree of arrays.
    - `rules`: the first that matches the path of a leaf is the one that counts.
    - `train`: whether weights are to be trained: then each is kept, as `vn.quant.FakeQuantized`,
      and quantised as it is used.
    - `statistics`: of activations by the path of their weight, as `vn.quant.observe` gives them;
      for rules with an `act_range` that is static.

    **Returns:** the tree with a `QArray` in place of each floating array of rank 2 and up that a
    rule with a format matches; in an `ActivationQuantized` where the rule has an `act_qtype`, which
    may do without a format for weights. Biases, norms and integers stay dense if they match, and so
    does what no rule matches; arrays that are implicit already stay as they are.

    **Raises:** `ValueError`, naming the path, where a tile does not divide its axis, or where
    statistics are asked for and missing; for a `grad_qtype` without `train`, and `op_names` with
    it. Warns with `UserWarning` of a rule that matches no path, and of statistics that no rule asks
    for.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(8)}}
    >>> vn.quant.quantize_tree(params, [vn.quant.Rule("dense.*", "int8")])["dense"]["kernel"].nbytes
    544
    """
    for rule in rules:
        if rule.grad_qtype is not None and not train:
            raise ValueError(
                f"grad_qtype is for training, by quantize_tree(..., train=True): {rule}"
            )
        if rule.act_range != "dynamic" and train:
            raise ValueError(
                f"train=True quantises activations dynamically, and act_range is "
                f"{rule.act_range!r}: {rule}"
            )
        if rule.op_names and train:
            raise ValueError(f"train=True quantises activations in every product: {rule}")
    if statistics is not None and all(rule.act_range == "dynamic" for rule in rules):
        message = "no rule takes the statistics: its act_range says so, as 'mean'"
        warnings.warn(message, UserWarning, stacklevel=2)
    paths, leaves, treedef = flatten_with_paths(params)
    warn_of_unmatched(rules, paths, stacklevel=3)
    quantized = [
        _quantize_leaf(path, leaf, rules, train, statistics)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, quantized)


def _quantize_leaf(
    path: str,
    leaf: Any,
    rules: Sequence[Rule],
    train: bool,
    statistics: Mapping[str, ActivationStatistics] | None,
) -> Any:
    rule = rule_for(path, leaf, rules)
    if rule is None:
        return leaf
    try:
        if train:
            from ..training import FakeQuantized

            wanted = rule.qtype or rule.act_qtype or rule.grad_qtype
            return FakeQuantized.from_rule(leaf, rule) if wanted else leaf
        of_leaf = None if statistics is None else statistics.get(path)
        if statistics is not None and of_leaf is None and rule.act_range != "dynamic":
            raise ValueError(
                f"there are no statistics of it, and {rule} asks for them; they are of "
                f"{_some(list(statistics))}. Give it a rule of its own, before this one"
            )
        return rule.with_activations(rule.quantize(leaf), of_leaf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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


def warn_of_unmatched(rules: Sequence[Rule], paths: Sequence[str], *, stacklevel: int) -> None:
    """Warns of each rule that matches none of the paths."""
    for rule in rules:
        if not any(map(rule.matches, paths)):
            message = (
                f"the rule {rule.path_regex!r} matches no parameter; it is matched in full against "
                f"paths such as {_some(paths)}"
            )
            warnings.warn(message, UserWarning, stacklevel=stacklevel)


def _some(paths: Sequence[str], shown: int = 4) -> str:
    some = ", ".join(paths[:shown]) + (", ..." if len(paths) > shown else "")
    return some or "(the tree is empty)"
