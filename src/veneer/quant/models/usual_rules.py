"""`usual_rules`: what is usually done with the weights of a language model."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..formats import get_format
from .rules import LEAST_TILE, Rule, can_be_quantized, cut_in_tiles
from .uses import LOOK_UP, Use, telling

#: What embeddings and heads take, where the others take fewer bits.
OF_VOCABULARIES = "int8"
#: So few values are not worth quantising.
SMALL = 4096


def usual_rules(
    qtype: str, weights: Mapping[str, Any], uses: Mapping[str, Sequence[Use]]
) -> dict[str, Rule]:
    """Returns rules for the weights that are usually quantised, each for its own path.

    - A weight that products contract is in `qtype`: in tiles of 64 (QLoRA, arXiv 2305.14314), of 3
      bits and fewer in tiles of 32, and of 8 bits with a scale a channel.
    - An embedding, of which rows are looked up, has a scale a row, and 8 bits at least: `int8` for
      formats of fewer. So has a head, which has a free axis as long as an embedding.
    - What no product contracts, such as norms, and what has fewer than 4,096 values stays dense.

    Where the format is defined for a tile that does not divide what a product sums, it is `int8`;
    where no tile does, there is a scale a channel.

    **Arguments:**

    - `weights`, `uses`: by path, the leaves of a tree and what its program does with each.

    **Raises:** `ValueError` for an unknown format.
    """
    get_format(qtype)
    rules = {}
    shapes = {path: leaf.shape for path, leaf in weights.items() if can_be_quantized(leaf)}
    looked_up = {path: [use for use in uses[path] if use.primitive == LOOK_UP] for path in shapes}
    vocabularies = {
        shapes[path][axis]
        for path, found in looked_up.items()
        for use in found
        for axis in use.free
    }
    for path, shape in shapes.items():
        use = next(iter(telling(uses[path])), None)
        if use is None or math.prod(shape) < SMALL:
            continue
        of_vocabulary = looked_up[path] or any(shape[axis] in vocabularies for axis in use.free)
        rules[path] = _usual_rule(path, qtype, shape, use, of_vocabulary=bool(of_vocabulary))
    return rules


def _usual_rule(
    path: str, qtype: str, shape: Sequence[int], use: Use, *, of_vocabulary: bool
) -> Rule:
    regex, format = re.escape(path), get_format(qtype)
    summed = [shape[axis] for axis in sorted(use.contracted)]
    if of_vocabulary and format.bits < 8:
        return Rule(regex, OF_VOCABULARIES).along(use.contracted, shape)
    if format.tile_size is not None:
        fits = any(size % format.tile_size == 0 for size in summed)
        return Rule(regex, qtype if fits else OF_VOCABULARIES).along(use.contracted, shape)
    tile = None if format.bits >= 8 else 64 if format.bits >= 4 else 32
    if tile is not None and math.prod(cut_in_tiles(summed, tile)) < LEAST_TILE:
        tile = None
    return Rule(regex, qtype, tile_size=tile).along(use.contracted, shape)
