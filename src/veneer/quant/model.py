"""Quantising a model: rules that say which of its parameters take which format."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._core.value import is_value
from .conversion import quantize
from .formats import get_format
from .qarray import QUANTISABLE


@dataclasses.dataclass(frozen=True)
class Rule:
    """What to do with the parameters whose path matches.

    **Arguments:**

    - `path_regex`: matched in full against the keys of a leaf joined with dots, as in
      `layers.0.attention.query.kernel`.
    - `qtype`: the format, or None to leave the parameter dense.
    - `tile_size`: how many values along `tile_axis` share a scale; None is all of them.
    - `tile_axis`: the contracting axis: -2 for a JAX kernel `[..., in, out]`, -1 for a torch weight
      `[out, in]` or an embedding table `[rows, features]`. Every other axis is channelwise.
    - `calibration_method`: of the weights; None is the format's own.
    - `act_qtype`: the format that activations are quantised to, as they meet the weight in a
      product; None leaves them as they are.
    - `act_calibration_method`: of the activations; None is that of `act_qtype`.
    - `grad_qtype`: for training, the format that gradients are quantised to in the products of the
      backward pass; None leaves them as they are.

    **Raises:** `ValueError` for a regex that does not compile, an unknown format or method, or a
    tile below 1; `TypeError` for a tile that is not an integer.

    >>> import veneer as vn
    >>> vn.quant.Rule(r".*\\.kernel", "nf4", tile_size=64)
    Rule(path_regex='.*\\\\.kernel', qtype='nf4', tile_size=64, tile_axis=-2, ...)
    """

    path_regex: str
    qtype: str | None
    _: dataclasses.KW_ONLY
    tile_size: int | np.integer | None = None
    tile_axis: int | np.integer = -2
    calibration_method: str | None = None
    act_qtype: str | None = None
    act_calibration_method: str | None = None
    grad_qtype: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.path_regex)
        except re.error as error:
            raise ValueError(f"path_regex {self.path_regex!r} is not a regex: {error}") from None
        if self.qtype is not None:
            get_format(self.qtype)
        if self.tile_size is not None:
            if not isinstance(self.tile_size, int | np.integer):
                raise TypeError(f"tile_size is a whole number of values, not {self.tile_size!r}")
            if self.tile_size < 1:
                raise ValueError(f"tile_size is a number of values, not {self.tile_size}")

    def matches(self, path: str) -> bool:
        """Returns whether the whole of `path` matches."""
        return re.fullmatch(self.path_regex, path) is not None

    def quantize(self, array: Any) -> Any:
        """Quantises a floating array of rank 2 and up; leaves it as it is if `qtype` is None."""
        if self.qtype is None:
            return array
        axes = range(array.ndim)
        if self.tile_axis not in (*axes, *(axis - array.ndim for axis in axes)):
            raise ValueError(f"tile_axis {self.tile_axis} is out of range for shape {array.shape}")
        tile_axis = int(self.tile_axis) % array.ndim
        return quantize(
            array,
            self.qtype,
            channelwise_axes=[axis for axis in axes if axis != tile_axis],
            tiled_axes={} if self.tile_size is None else {tile_axis: int(self.tile_size)},
        )


def quantize_tree(params: Any, rules: Sequence[Rule]) -> Any:
    """Quantises the parameters of a model, whichever library made them.

    **Arguments:**

    - `params`: any pytree of arrays.
    - `rules`: the first that matches the path of a leaf is the one that counts.

    **Returns:** the tree with a `QArray` in place of each floating array of rank 2 and up that a
    rule with a format matches. Biases, norms and integers stay dense if they match, and so does
    what no rule matches; arrays that are implicit already stay as they are.

    **Raises:** `ValueError`, naming the path, where a tile does not divide its axis. Warns with
    `UserWarning` of a rule that matches no path.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(8)}}
    >>> vn.quant.quantize_tree(params, [vn.quant.Rule("dense.*", "int8")])["dense"]["kernel"].nbytes
    544
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_value)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    for rule in rules:
        if not any(map(rule.matches, paths)):
            warnings.warn(_matches_nothing(rule, paths), UserWarning, stacklevel=2)
    quantised = [
        _quantize_leaf(path, leaf, rules) for path, (_, leaf) in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, quantised)


def _quantize_leaf(path: str, leaf: Any, rules: Sequence[Rule]) -> Any:
    rule = next((rule for rule in rules if rule.matches(path)), None)
    if rule is None or not can_be_quantised(leaf):
        return leaf
    try:
        return rule.quantize(leaf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def can_be_quantised(leaf: Any) -> bool:
    """Returns whether rules apply to a leaf (or its aval): it is floating, and of rank 2 and up."""
    return not is_value(leaf) and getattr(leaf, "ndim", 0) >= 2 and leaf.dtype in QUANTISABLE


def _matches_nothing(rule: Rule, paths: Sequence[str], shown: int = 4) -> str:
    some = ", ".join(paths[:shown]) + (", ..." if len(paths) > shown else "")
    return (
        f"the rule {rule.path_regex!r} matches no parameter; it is matched in full against paths "
        f"such as {some or '(the tree is empty)'}"
    )
