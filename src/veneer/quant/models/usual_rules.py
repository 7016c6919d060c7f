"""`usual_rules`: what is usually done with the weights of a language model."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..formats import get_format
from .rules import LEAST_TILE, Rule, can_be_quantized, cut_in_tiles
from .uses import LOOK_UP, Use, telling

#: What embeddings and heads take, where the others take fewer bits.
OF_VOCABULARIES = "int8"
#: So few values are not worth quantising.
SMALL = 4096


def default_tile(qtype: str) -> int | None:
    """Return the tile of a format that is given by its name alone, without a rule.

    None is one scale per channel, or the tile of a format that has its own.

    >>> from veneer.quant.models.usual_rules import default_tile
    >>> [default_tile(name) for name in ("int8", "nf4", "int3", "mxfp4")]
    [None, 64, 32, None]
    """
    format = get_format(qtype)
    if format.bits >= 8 or format.tile_size is not None:
        return None
    return 64 if format.bits >= 4 else 32


def usual_rules(
    qtype: str, weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]
) -> dict[str, Rule]:
    """Returns rules for the weights that are usually quantised, each for its own path.

    - A weight that products contract is in `qtype`: in tiles of 64 (QLoRA, arXiv 2305.14314), of 3
      bits and fewer in tiles of 32, and of 8 bits with a scale a channel.
    - An embedding, of which rows are looked up, has a scale a row, and 8 bits at least: `int8` for
      formats of fewer. So has a head, of which a product gives as many values as an embedding has
      rows. Where other products sum so many, it is a width of the model, and says nothing.
    - What no product contracts, such as norms, and what has fewer than 4,096 values stays dense.

    The axes are still to be found, by `fit_usual`.

    **Arguments:**

    - `weights`, `uses`: by path, the leaves of a tree and what its program does with each.

    **Raises:** `ValueError` for an unknown format.
    """
    bits, tile = get_format(qtype).bits, default_tile(qtype)
    shapes = {path: leaf.shape for path, leaf in weights.items() if can_be_quantized(leaf)}
    first = {path: found[0] for path in shapes if (found := telling(uses[path]))}
    count = lambda path, axes: math.prod(shapes[path][axis] for axis in axes)
    looked_up = {path: use for path in shapes for use in uses[path] if use.primitive == LOOK_UP}
    vocabularies = {count(path, use.free) for path, use in looked_up.items()} - {
        count(path, use.contracted) for path, use in first.items() if use.is_product
    }
    rules = {}
    for path, shape in shapes.items():
        if math.prod(shape) < SMALL:
            continue
        rule = Rule(re.escape(path), qtype, tile_size=tile)
        is_head = path in first and count(path, first[path].free) in vocabularies
        if bits < 8 and (path in looked_up or is_head):
            rule = Rule(rule.path_regex, OF_VOCABULARIES)
        rules[path] = rule
    return rules


def fit_usual(rule: Rule, contracted: Collection[int], shape: Sequence[int]) -> Rule:
    """Returns a usual rule along the axes that products contract, counted from the end.

    Where the format is defined for a tile that does not divide what they sum, it is `int8`; where
    no tile does, there is a scale a channel.
    """
    block = get_format(rule.qtype or OF_VOCABULARIES).tile_size
    summed = [shape[axis] for axis in sorted(contracted)]
    if block is not None and not any(size % block == 0 for size in summed):
        rule = dataclasses.replace(rule, qtype=OF_VOCABULARIES)
    tile = rule.tile_size
    if isinstance(tile, int) and math.prod(cut_in_tiles(summed, tile)) < LEAST_TILE:
        rule = dataclasses.replace(rule, tile_size=None)
    return rule.along(contracted, shape)
