"""The default rules for language models, for a format that is given by its name alone."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..formats import get_format
from .matching import can_be_quantized
from .rules import SMALLEST_TILE, Rule, split_tile
from .uses import LOOK_UP, Use, uses_with_axes

#: The format of embeddings and heads, if other weights have fewer than 8 bits.
VOCABULARY_QTYPE = "int8"
#: Arrays with fewer values than this stay dense.
SMALL = 4096


def default_tile(qtype: str) -> int | None:
    """Return the default tile size of a format.

    None means one scale per channel, or the tile of a format with a fixed tile size.

    >>> from veneer.quant.models.default_rules import default_tile
    >>> [default_tile(name) for name in ("int8", "nf4", "int3", "mxfp4")]
    [None, 64, 32, None]
    """
    format = get_format(qtype)
    if format.bits >= 8 or format.tile_size is not None:
        return None
    return 64 if format.bits >= 4 else 32


def default_rules(
    qtype: str, weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]
) -> dict[str, Rule]:
    """Return a rule for each weight that is quantized by default, by path.

    | weight | format |
    |---|---|
    | contracted by products | `qtype`, with `default_tile` (64 as in QLoRA, arXiv 2305.14314) |
    | embeddings and heads | `qtype`, or int8 with a scale per row if `qtype` has fewer bits |
    | fewer than 4,096 values, or not in a product | dense |

    A head is a weight whose products have as many outputs as an embedding has rows. The exception
    is a number that a product also contracts: it is a width of the model.

    The `tile_axis` of the rules is not set yet. `fit_default_rule` sets it.

    **Raises:** `ValueError` if the format is unknown.
    """
    bits, tile = get_format(qtype).bits, default_tile(qtype)
    shapes = {path: leaf.shape for path, leaf in weights.items() if can_be_quantized(leaf)}
    first = {path: ordered[0] for path in shapes if (ordered := uses_with_axes(uses[path]))}
    count = lambda path, axes: math.prod(shapes[path][axis] for axis in axes)
    looked_up = {path: use for path in shapes for use in uses[path] if use.primitive == LOOK_UP}
    vocabularies = {count(path, use.free) for path, use in looked_up.items()} - {
        count(path, use.contracted) for path, use in first.items() if use.is_product
    }
    rules = {}
    for path, shape in shapes.items():
        if math.prod(shape) < SMALL:
            continue
        is_head = path in first and count(path, first[path].free) in vocabularies
        if bits < 8 and (path in looked_up or is_head):
            rules[path] = Rule(re.escape(path), VOCABULARY_QTYPE)
        else:
            rules[path] = Rule(re.escape(path), qtype, tile_size=tile)
    return rules


def fit_default_rule(rule: Rule, contracted: Collection[int], shape: Sequence[int]) -> Rule:
    """Return a default rule for one weight, with the axes that products contract.

    If the format has a fixed tile size that divides no contracted axis, the rule gets int8. If no
    tile divides the contracted axes, it gets one scale per channel.
    """
    block = get_format(rule.qtype or VOCABULARY_QTYPE).tile_size
    sizes = [shape[axis] for axis in sorted(contracted)]
    if block is not None and not any(size % block == 0 for size in sizes):
        rule = dataclasses.replace(rule, qtype=VOCABULARY_QTYPE)
    tile = rule.tile_size
    if isinstance(tile, int) and math.prod(split_tile(sizes, tile)) < SMALLEST_TILE:
        rule = dataclasses.replace(rule, tile_size=None)
    return rule.along(contracted, shape)
