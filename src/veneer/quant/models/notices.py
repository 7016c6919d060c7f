"""The warnings of `quantize_tree`. Each warning lists paths, and gives a reason and a remedy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.surface import some_of
from ..._core.value import is_part, is_value
from ..._jax.frames import warn_user
from ...types.lora import LoraArray
from ..activation_quantized import ActivationQuantized
from ..arrays import QArray
from ..formats import get_format
from ..training import FakeQuantized
from .arguments import can_be_quantized, find_rule
from .rules import Rule
from .uses import SMALL, VOCABULARY_QTYPE, Use

#: If at most this number of values share a scale, the tile is probably a mistake.
_FEW_VALUES = 8
#: `warn_of_hardly_smaller` ignores arrays with fewer values than this.
_NEGLIGIBLE_SIZE = 1024


def _describe_bits(array: Any) -> str:
    # jax.ShapeDtypeStruct has no `nbytes`.
    nbytes = getattr(array, "nbytes", array.size * array.dtype.itemsize)
    return f"{8 * nbytes / max(array.size, 1):.3g} bits per value"


def warn_of_unused(weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]) -> None:
    """Warn of weights that stay dense, because the program uses them in no product or not at all.

    There is no warning for weights that the program uses and that have fewer than 4,096 values,
    and none for biases and norm scales. A weight counts as a bias or norm scale if the result of
    one of its uses keeps at most one axis of the weight.

    **Arguments:**

    - `weights`: a dict from paths to the weights that no product or look-up uses.
    - `uses`: a dict from paths to the uses of each weight in the program.
    """
    described = [
        f"{path} at {_describe_bits(x)} ({next(iter(uses[path]), 'unused')})"
        for path, x in weights.items()
        if not uses[path]
        or (math.prod(x.shape) >= SMALL and all(len(use.free_axes) >= 2 for use in uses[path]))
    ]
    if described:
        warn_user(
            f"left dense, because the program uses them in no product: {some_of(described)}. To "
            "quantize them anyway, add a rule for them with a tile_axis"
        )


def warn_of_conflicting_uses(path: str, uses: Sequence[Use]) -> None:
    """Warn if two uses of the weight at `path` contract different axes of the weight."""
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
    """Warn if all weights are so small that the default rules leave them dense.

    `weights` and `selected` are dicts by path: all weights, and the default rules of the weights
    to quantize. `qtype` is the name of the format that the caller passed instead of rules.
    """
    if weights and not selected:
        warn_user(
            f"no weight is quantized, because all have fewer than {SMALL:,} values: "
            f"{some_of(list(weights))}. To quantize them anyway, pass the rules "
            f"[vn.quant.Rule('.*', {qtype!r})]"
        )


def warn_of_mostly_dense(weights: Mapping[str, Any], selected: Mapping[str, Rule]) -> None:
    """Warn if most values are in weights that no rule matches.

    `weights` and `selected` are dicts by path: all weights, and the rules of the matched ones.
    """
    sizes = {path: math.prod(x.shape) for path, x in weights.items()}
    unmatched = [path for path, n in sizes.items() if path not in selected and n >= SMALL]
    num_dense = sum(sizes[path] for path in unmatched)
    num_quantized = sum(sizes[path] for path, rule in selected.items() if rule.has_format)
    if num_dense > num_quantized > 0:
        some = some_of([f"{path} at {_describe_bits(weights[path])}" for path in unmatched])
        warn_user(
            f"most values stay dense, because no rule matches them: {some}. Add a rule "
            "for them, or end the list with Rule('.*', None) if they should stay dense"
        )


def describe_changed_tiles(
    rules: Mapping[str, Rule], fitted: Mapping[str, Rule], weights: Mapping[str, Any]
) -> list[str]:
    """Return a text for each weight whose format or tile in `fitted` differs from `rules`.

    All arguments are dicts by path. `rules` has the rules before `quantize_tree` fitted them to the
    weights, and `fitted` has them afterwards: their tiles divide the contracted axes.
    """
    texts = []
    for path, new in fitted.items():
        old, x = rules[path], weights[path]
        if new.qtype != old.qtype:
            change = f"is in {new.qtype}, not {old.qtype}"
        elif isinstance(old.tile_size, int | np.integer) and (
            (tile := _values_per_tile(new, x)) != old.tile_size
        ):
            change = f"has tiles of {tile}, not {old.tile_size}"
        else:
            continue
        bits = _describe_bits(jax.eval_shape(new.quantize, x))
        texts.append(f"{path} {list(x.shape)} {change}, at {bits}")
    return texts


def _values_per_tile(rule: Rule, array: Any) -> Any:
    if rule.tile_size is None:
        return math.prod(array.shape[axis] for axis in rule.contracting(array.ndim))
    if isinstance(rule.tile_size, tuple):  # a dict {axis: size} became a tuple of pairs
        return math.prod(size for _, size in rule.tile_size)
    return rule.tile_size


def warn_of_not_rotated(paths: Sequence[str], uses: Mapping[str, Sequence[Use]]) -> None:
    """Warn of the weights at `paths`, which are not rotated although their rule sets `rotate`.

    The first use of each of them in the program would undo the rotation.
    """
    if paths:
        some = some_of([f"{path} ({uses[path][0]})" for path in paths])
        warn_user(
            f"not rotated, because these uses would undo the rotation: {some}. Add a "
            "rule for these weights without rotate"
        )


def warn_of_unchanged(
    paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule] | str
) -> None:
    """Warn of implicit arrays that stay unchanged, although a rule matches them.

    These arrays are quantized in another format, or wrap a dense weight, as a `LoraArray` does.
    `rules` is a list of rules or the name of a format.
    """
    quantized, nested = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        rule = Rule(".*", rules) if isinstance(rules, str) else find_rule(path, rules)
        if not is_value(leaf) or rule is None or not rule.has_format:
            continue
        if isinstance(leaf, QArray):
            # With the name of a format, the default rules use another format for vocabularies.
            is_vocabulary = isinstance(rules, str) and leaf.qtype == VOCABULARY_QTYPE
            has_other_format = rule.qtype is not None and leaf.qtype != get_format(rule.qtype).name
            if has_other_format and not is_vocabulary:
                quantized.append(f"{path} ({leaf.qtype})")
        elif not isinstance(leaf, FakeQuantized | ActivationQuantized):
            fields = jax.tree.leaves(leaf, is_leaf=is_part(leaf))
            if any(can_be_quantized(x) and x.shape == leaf.shape for x in fields):
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
    """Warn of quantized weights that take at least as many bytes as the dense weights.

    `quantized` has the new leaf of each path. If the rule of a weight has no tile size and
    `has_program` is False, also warn if few values share a scale. Without a program, the axis in
    `tile_axis` may be the wrong one.
    """
    large, large_with_correction = [], []
    for path, x in zip(paths, quantized, strict=True):
        q = x.array if isinstance(x, ActivationQuantized) else x
        if path not in rules or not isinstance(q, QArray | LoraArray) or q.size < _NEGLIGIBLE_SIZE:
            continue
        description = f"{path} {list(q.shape)} takes {_describe_bits(q)}"
        is_large = q.nbytes >= q.size * q.dtype.itemsize
        if isinstance(q, LoraArray):
            if is_large:
                large_with_correction.append(description)
            continue
        num_scales = sum(leaf.size for leaf in jax.tree.leaves(q.scale))
        has_tile_size = rules[path].tile_size is not None or q.format.tile_size is not None
        may_have_wrong_axis = not has_program and not has_tile_size
        if is_large or (may_have_wrong_axis and q.size <= _FEW_VALUES * num_scales):
            large.append(description)
    if large_with_correction:
        warn_user(
            "hardly smaller, because of their low-rank corrections: "
            f"{some_of(large_with_correction)}. Set a smaller correction_rank"
        )
    if large:
        remedy = (
            "Leave them dense with a rule with qtype=None"
            if has_program
            else "Set tile_axis to the axes that products contract, or pass the program as model= "
            "and args="
        )
        warn_user(f"hardly smaller, because few values share a scale: {some_of(large)}. {remedy}")
