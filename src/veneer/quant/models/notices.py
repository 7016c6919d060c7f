"""What `quantize_tree` tells of: weights that are not as someone who asked for a format thinks.

Each warning names paths, with what they take, why, and the way out.
"""

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
from .rules import Rule, can_be_quantized, some_of
from .uses import Use
from .usual_rules import SMALL


def bits_of(array: Any) -> str:
    """Returns how many bits a value an array takes, to be shown."""
    nbytes = getattr(array, "nbytes", array.size * array.dtype.itemsize)  # no abstract array has it
    return f"{8 * nbytes / max(array.size, 1):.3g} bits per value"


def tell_of_unused(weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]) -> None:
    """Warns of weights, meant to be quantised, that stay dense as no product has them."""
    # A vector of a stack is a norm, and what is small a bias: those are expected to.
    large = [
        (path, x)
        for path, x in weights.items()
        if not uses[path]
        or (math.prod(x.shape) >= SMALL and all(len(use.free) >= 2 for use in uses[path]))
    ]
    left = [f"{path} at {bits_of(x)} ({next(iter(uses[path]), 'unused')})" for path, x in large]
    if left:
        warn_user(
            f"left dense, because the program uses them in no product: {some_of(left)}. To "
            "quantize them anyway, add a rule for them with a tile_axis"
        )


def tell_of_small(weights: Mapping[str, Any], chosen: Mapping[str, Rule], qtype: str) -> None:
    """Warns where all weights are so small that the usual rules leave them dense."""
    if weights and not chosen:
        warn_user(
            f"no weight is quantized, because all have fewer than {SMALL:,} values: "
            f"{some_of(list(weights))}. To quantize them anyway, pass the rules "
            f"[vn.quant.Rule('.*', {qtype!r})]"
        )


def tell_of_unmatched(weights: Mapping[str, Any], chosen: Mapping[str, Rule]) -> None:
    """Warns where rules leave out more values than they quantise."""
    missed = {
        path: x for path, x in weights.items() if path not in chosen and math.prod(x.shape) >= SMALL
    }
    count = lambda paths: sum(math.prod(weights[path].shape) for path in paths)
    if count(missed) > count(path for path, rule in chosen.items() if rule.has_format) > 0:
        left = [f"{path} at {bits_of(x)}" for path, x in missed.items()]
        warn_user(
            f"most values stay dense, because no rule matches them: {some_of(left)}. Add a rule "
            "for them, or end the list with Rule('.*', None) if they should stay dense"
        )


def tell_of_tiles(
    asked: Mapping[str, Rule], chosen: Mapping[str, Rule], weights: Mapping[str, Any]
) -> None:
    """Warns of weights whose tiles or formats are others than those that are asked for."""
    if unlike := changed_tiles(asked, chosen, weights):
        warn_user(
            f"the tile of the rule does not divide the contracted axes: {some_of(unlike)}. To "
            "choose, add a rule for these weights with another tile_size or qtype"
        )


def changed_tiles(
    asked: Mapping[str, Rule], chosen: Mapping[str, Rule], weights: Mapping[str, Any]
) -> list[str]:
    """Describe each weight whose tile or format differs from the rule."""
    unlike = []
    for path, rule in chosen.items():
        wanted, x = asked[path], weights[path]
        if rule.qtype != wanted.qtype:
            form = f"is in {rule.qtype}, not {wanted.qtype}"
        elif isinstance(wanted.tile_size, int | np.integer) and _tile(rule, x) != wanted.tile_size:
            form = f"has tiles of {_tile(rule, x)}, not {wanted.tile_size}"
        else:
            continue
        takes = bits_of(jax.eval_shape(rule.quantize, x))
        unlike.append(f"{path} {list(x.shape)} {form}, at {takes}")
    return unlike


def tell_of_unrotated(paths: Sequence[str], uses: Mapping[str, Sequence[Use]]) -> None:
    """Warns of weights that are not rotated, as something takes them that would undo it."""
    if paths:
        left = [f"{path} ({uses[path][0]})" for path in paths]
        warn_user(
            f"not rotated, because these uses would undo the rotation: {some_of(left)}. Add a "
            "rule for these weights without rotate"
        )


def _tile(rule: Rule, array: Any) -> Any:
    """How many values share a scale, by a rule that says so of each axis."""
    sizes = rule.tile_size
    if sizes is None:
        return math.prod(array.shape[axis] for axis in rule.contracting(array.ndim))
    return math.prod(dict(sizes).values()) if isinstance(sizes, tuple) else sizes


def tell_of_held(paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule] | str) -> None:
    """Warns of weights that are meant, and within arrays of other types, as that of a LoRA is."""
    held = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_value(leaf) or isinstance(leaf, QArray | FakeQuantized | ActivationQuantized):
            continue
        within = jax.tree.leaves(leaf, is_leaf=is_part(leaf))
        if any(can_be_quantized(x) and x.shape == leaf.shape for x in within):
            of_leaf = [] if isinstance(rules, str) else [r for r in rules if r.matches(path)][:1]
            if isinstance(rules, str) or any(rule.has_format for rule in of_leaf):
                held.append(f"{path} ({type(leaf).__name__})")
    if held:
        warn_user(
            f"not quantized, because the weight is inside an array of another type: "
            f"{some_of(held)}. Quantize first, then create these arrays from quantized weights"
        )


def tell_of_quantised(
    paths: Sequence[str], leaves: Sequence[Any], rules: Sequence[Rule] | str
) -> None:
    """Warns of weights in another format than is asked for, which stay as they are."""
    kept = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, QArray):
            asked: list[Any] = [rules, "int8"]  # as tables and heads are
            if not isinstance(rules, str):
                asked = [rule.qtype for rule in rules if rule.matches(path)][:1]
            if asked and None not in asked and leaf.qtype not in map(_name_of, asked):
                kept.append(f"{path} ({leaf.qtype})")
    if kept:
        warn_user(
            f"already quantized, and left unchanged: {some_of(kept)}. Quantize the original dense "
            "weights, or vn.materialise(params), which rounds twice"
        )


def _name_of(qtype: Any) -> str:
    return get_format(qtype).name


def tell_of_large(
    paths: Sequence[str], quantized: Sequence[Any], chosen: Mapping[str, Rule], *, located: bool
) -> None:
    """Warns of what is not smaller, or of which few values share a scale that nobody asked for."""
    large, corrected = [], []
    for path, x in zip(paths, quantized, strict=True):
        q = x.array if isinstance(x, ActivationQuantized) else x
        if path in chosen and isinstance(q, LoraArray) and _is_large(q):
            corrected.append(f"{path} {list(q.shape)} takes {bits_of(q)}")
        if path not in chosen or not isinstance(q, QArray) or q.size < _MATTERS:
            continue
        scales = sum(leaf.size for leaf in jax.tree.leaves(q.scale))
        asked = located or chosen[path].tile_size is not None or q.format.tile_size is not None
        if _is_large(q) or (not asked and q.size <= _FEW * scales):
            large.append(f"{path} {list(q.shape)} takes {bits_of(q)}")
    if corrected:
        warn_user(
            f"hardly smaller, because of their low-rank corrections: {some_of(corrected)}. Set a "
            "smaller correction_rank"
        )
    if large:
        remedy = (
            "Leave them dense with a rule with qtype=None"
            if located
            else "Set tile_axis to the axes that products contract, or pass the program as model= "
            "and args="
        )
        warn_user(f"hardly smaller, because few values share a scale: {some_of(large)}. {remedy}")


def _is_large(x: Any) -> bool:
    return x.size >= _MATTERS and x.nbytes >= x.size * x.dtype.itemsize


#: So few values that share a scale are a mistake.
_FEW = 8
#: What is smaller than this may be as large as it likes.
_MATTERS = 1024
