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
#: The default rules leave arrays with fewer values than this dense.
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
    """Return the default rules of the weights to quantize, as a dict from paths to rules.

    `weights` and `uses` are dicts from paths: to the weight, and to its uses in the program.

    | weight | format |
    |---|---|
    | contracted by products | `qtype`, with `default_tile` (64 as in QLoRA, arXiv 2305.14314) |
    | embeddings and heads | `qtype`, or int8 with a scale per row if `qtype` has fewer bits |
    | fewer than 4,096 values, or not in a product | dense |

    A head is a weight whose products have as many outputs as an embedding has rows: the size of
    the vocabulary. If a product contracts as many values, this size is only a width of the model.

    The rules have no `tile_axis`. `fit_default_rule` sets it later.

    **Raises:** `ValueError` if the format is unknown.
    """
    bits, tile = get_format(qtype).bits, default_tile(qtype)
    shapes = {path: leaf.shape for path, leaf in weights.items() if can_be_quantized(leaf)}
    size_along = lambda path, axes: math.prod(shapes[path][axis] for axis in axes)
    look_ups = {path: use for path in shapes for use in uses[path] if use.primitive == LOOK_UP}
    first_uses = {path: relevant[0] for path in shapes if (relevant := uses_with_axes(uses[path]))}
    products = {path: use for path, use in first_uses.items() if use.is_product}
    widths = {size_along(path, use.contracted) for path, use in products.items()}
    # The free axes of a look-up are the indexed axes, so their size is the number of rows.
    vocabulary_sizes = {size_along(path, use.free_axes) for path, use in look_ups.items()} - widths
    rules = {}
    for path, shape in shapes.items():
        if math.prod(shape) < SMALL:
            continue
        use = first_uses.get(path)
        is_head = use is not None and size_along(path, use.free_axes) in vocabulary_sizes
        if bits < 8 and (path in look_ups or is_head):
            rules[path] = Rule(re.escape(path), VOCABULARY_QTYPE)
        else:
            rules[path] = Rule(re.escape(path), qtype, tile_size=tile)
    return rules


def fit_default_rule(rule: Rule, contracted: Collection[int], shape: Sequence[int]) -> Rule:
    """Fit a default rule to the shape of a weight, and set `tile_axis` to the contracted axes.

    If no contracted axis is a multiple of the fixed tile size of a format, the format becomes int8.
    If no tile of 8 or more values divides these axes, the weight gets one scale per channel.
    """
    fixed_tile = get_format(rule.qtype or VOCABULARY_QTYPE).tile_size
    sizes = [shape[axis] for axis in sorted(contracted)]
    if fixed_tile is not None and not any(size % fixed_tile == 0 for size in sizes):
        rule = dataclasses.replace(rule, qtype=VOCABULARY_QTYPE)
    tile = rule.tile_size
    if isinstance(tile, int) and math.prod(split_tile(sizes, tile)) < SMALLEST_TILE:
        rule = dataclasses.replace(rule, tile_size=None)
    return rule.along(contracted, shape)
