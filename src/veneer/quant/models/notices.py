"""Warnings of `quantize_tree`. Each lists paths, with the reason and a remedy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.value import is_part, is_value
from ..._jax.source_lines import warn_user
from ...types.lora import LoraArray
from ..arrays.qarray import QArray
from ..formats import get_format
from ..training import FakeQuantized
from ..weights.activations import ActivationQuantized
from .default_rules import SMALL, VOCABULARY_QTYPE
from .matching import can_be_quantized, find_rule, some_of
from .rules import Rule
from .uses import Use

#: A scale that fewer values share is probably a mistake.
_FEW_VALUES = 8
#: Arrays with fewer values than this may be as large as before.
_NEGLIGIBLE_SIZE = 1024


def _describe_bits(array: Any) -> str:
    nbytes = getattr(array, "nbytes", array.size * array.dtype.itemsize)  # abstract arrays lack it
    return f"{8 * nbytes / max(array.size, 1):.3g} bits per value"


def warn_of_unused(weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]) -> None:
    """Warn of weights that stay dense because no product uses them."""
    # Biases, and norm scales that are stacked to a matrix, are expected to stay dense.
    unexpected = [
        (path, x)
        for path, x in weights.items()
        if not uses[path]
        or (math.prod(x.shape) >= SMALL and all(len(use.free) >= 2 for use in uses[path]))
    ]
    described = [
        f"{path} at {_describe_bits(x)} ({next(iter(uses[path]), 'unused')})"
        for path, x in unexpected
    ]
    if described:
        warn_user(
            f"left dense, because the program uses them in no product: {some_of(described)}. To "
            "quantize them anyway, add a rule for them with a tile_axis"
        )


def warn_of_conflicting_uses(path: str, uses: Sequence[Use]) -> None:
    """Warn if two uses of a weight contract different axes."""
    first = uses[0]
    other = next((use for use in uses if use.contracted != first.contracted), None)
    if other is not None:
        warn_user(
            f"{path} is used in two ways, and the first decides its scales: {first}, and "
            f"{other}. To choose, add a rule for it with a tile_axis"
        )


def warn_of_only_small(
    weights: Mapping[str, Any], selected: Mapping[str, Rule], qtype: str
) -> None:
    """Warn if all weights are so small that the default rules leave them dense."""
    if weights and not selected:
        warn_user(
            f"no weight is quantized, because all have fewer than {SMALL:,} values: "
            f"{some_of(list(weights))}. To quantize them anyway, pass the rules "
            f"[vn.quant.Rule('.*', {qtype!r})]"
        )


def warn_of_mostly_dense(weights: Mapping[str, Any], selected: Mapping[str, Rule]) -> None:
    """Warn if no rule matches most of the values."""
    missed = {
        path: x
        for path, x in weights.items()
        if path not in selected and math.prod(x.shape) >= SMALL
    }
    count = lambda paths: sum(math.prod(weights[path].shape) for path in paths)
    if count(missed) > count(path for path, rule in selected.items() if rule.has_format) > 0:
        some = some_of([f"{path} at {_describe_bits(x)}" for path, x in missed.items()])
        warn_user(
            f"most values stay dense, because no rule matches them: {some}. Add a rule "
            "for them, or end the list with Rule('.*', None) if they should stay dense"
        )


def describe_changed_tiles(
    rules: Mapping[str, Rule], fitted: Mapping[str, Rule], weights: Mapping[str, Any]
) -> list[str]:
    """Describe each weight whose tile or format differs from the rule."""
    changed = []
    for path, rule in fitted.items():
        asked, x = rules[path], weights[path]
        if rule.qtype != asked.qtype:
            change = f"is in {rule.qtype}, not {asked.qtype}"
        elif isinstance(asked.tile_size, int | np.integer) and (
            (size := _values_per_tile(rule, x)) != asked.tile_size
        ):
            change = f"has tiles of {size}, not {asked.tile_size}"
        else:
            continue
        bits = _describe_bits(jax.eval_shape(rule.quantize, x))
        changed.append(f"{path} {list(x.shape)} {change}, at {bits}")
    return changed


def _values_per_tile(rule: Rule, array: Any) -> Any:
    if rule.tile_size is None:
        return math.prod(array.shape[axis] for axis in rule.contracting(array.ndim))
    if isinstance(rule.tile_size, tuple):  # (axis, size) pairs
        return math.prod(dict(rule.tile_size).values())
    return rule.tile_size


def warn_of_not_rotated(paths: Sequence[str], uses: Mapping[str, Sequence[Use]]) -> None:
    """Warn of weights that are not rotated, because a use would undo the rotation."""
    if paths:
        some = some_of([f"{path} ({uses[path][0]})" for path in paths])
        warn_user(
            f"not rotated, because these uses would undo the rotation: {some}. Add a "
            "rule for these weights without rotate"
        )


def warn_of_unchanged(
    paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule] | str
) -> None:
    """Warn of implicit arrays that match a rule and stay unchanged.

    They are quantized in another format, or hold the weight, as a `LoraArray` does.
    """
    quantized, nested = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        rule = Rule(".*", rules) if isinstance(rules, str) else find_rule(path, rules)
        if not is_value(leaf) or rule is None or not rule.has_format:
            continue
        if isinstance(leaf, QArray):
            is_vocabulary = isinstance(rules, str) and leaf.qtype == VOCABULARY_QTYPE
            if rule.qtype is not None and leaf.qtype != get_format(rule.qtype).name:
                quantized += [] if is_vocabulary else [f"{path} ({leaf.qtype})"]
        elif not isinstance(leaf, FakeQuantized | ActivationQuantized):
            parts = jax.tree.leaves(leaf, is_leaf=is_part(leaf))
            if any(can_be_quantized(x) and x.shape == leaf.shape for x in parts):
                nested.append(f"{path} ({type(leaf).__name__})")
    if nested:
        warn_user(
            f"not quantized, because the weight is inside an array of another type: "
            f"{some_of(nested)}. Quantize first, then create these arrays from quantized weights"
        )
    if quantized:
        warn_user(
            f"already quantized, and left unchanged: {some_of(quantized)}. Quantize the original "
            "dense weights, or vn.materialise(params), which rounds twice"
        )


def warn_of_hardly_smaller(
    paths: Sequence[str], quantized: Sequence[Any], rules: Mapping[str, Rule], *, has_program: bool
) -> None:
    """Warn of results that are hardly smaller than the dense weights, or have too many scales."""
    large, corrected = [], []
    for path, x in zip(paths, quantized, strict=True):
        q = x.array if isinstance(x, ActivationQuantized) else x
        if path not in rules or not isinstance(q, QArray | LoraArray) or q.size < _NEGLIGIBLE_SIZE:
            continue
        is_large = q.nbytes >= q.size * q.dtype.itemsize
        description = f"{path} {list(q.shape)} takes {_describe_bits(q)}"
        if isinstance(q, LoraArray):
            corrected += [description] if is_large else []
            continue
        scales = sum(leaf.size for leaf in jax.tree.leaves(q.scale))
        sets_tile = rules[path].tile_size is not None or q.format.tile_size is not None
        has_few = not has_program and not sets_tile and q.size <= _FEW_VALUES * scales
        large += [description] if is_large or has_few else []
    if corrected:
        warn_user(
            f"hardly smaller, because of their low-rank corrections: {some_of(corrected)}. Set a "
            "smaller correction_rank"
        )
    if large:
        remedy = (
            "Leave them dense with a rule with qtype=None"
            if has_program
            else "Set tile_axis to the axes that products contract, or pass the program as model= "
            "and args="
        )
        warn_user(f"hardly smaller, because few values share a scale: {some_of(large)}. {remedy}")
