"""Which tensors of a checkpoint take which format: `Selector`s, and the `plan` made of them.

Names, shapes and dtypes are all that is looked at, so whatever is wrong is found before any work is
done.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from ..arrays.qarray import QUANTIZABLE
from ..formats import get_format
from ..formats.tiles import dividing_tiles
from .notices import changed_tiles
from .rules import Rule, can_be_quantized
from .usual_rules import default_tile, fit_usual

# torch stores a `weight` as [out, in], and JAX libraries store a `kernel` as [..., in, out].
CONTRACTING_AXIS = {"torch": -1, "jax": -2}
_LAYOUT_OF_NAME = {"weight": "torch", "kernel": "jax"}

ANY_WEIGHT = r".*(weight|kernel)"


class UnknownAxisError(ValueError):
    """Neither its selector nor its name says which axis of a tensor is contracted."""


class TileError(ValueError):
    """A tile does not divide the axis of a tensor, named `tensor`, that it tiles."""

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


@dataclass(frozen=True)
class Selector:
    """A `Rule` as a user states it, whose contracting axis may be left to the tensor's name.

    **Arguments:**

    - `regex`: matched in full against the name.
    - `qtype`: the format, or None to leave the tensors dense.
    - `tile_size`: how many values along the contracting axis share a scale; None is as many as the
      format is defined for (32 for mxfp4), or all of them where that is any. "default" is the tile
      that `quantize_tree` takes for the name of a format: a smaller tile, or int8 for a format with
      a fixed tile, if it does not divide the axis.
    - `tile_axis`: the contracting axis; None takes it from the name: that of torch for `...weight`,
      of JAX for `...kernel`.
    - `stated`: where the user stated it, for messages.

    **Raises:** `ValueError` for a regex that does not compile, an unknown format, a tile below 1 or
    one that is not the format's.
    """

    regex: str
    qtype: str | None
    tile_size: int | Literal["default"] | None = None
    tile_axis: int | None = None
    stated: str = "the rule"

    def __post_init__(self) -> None:
        self.rule(-1)

    def __str__(self) -> str:
        return f"{self.stated} {self.regex!r}"

    def rule(self, tile_axis: int) -> Rule:
        """Returns the rule, once the contracting axis is known."""
        tile = self.tile_size
        if self.qtype is not None and tile == "default":
            tile = default_tile(self.qtype)
        elif self.qtype is not None and tile is None:
            tile = get_format(self.qtype).tile_size
        elif tile == "default":
            tile = None
        return Rule(self.regex, self.qtype, tile_size=tile, tile_axis=tile_axis)


def selectors_from_json(text: str, *, tile_axis: int | None = None) -> list[Selector]:
    """Reads the selectors of a rules file, in order; the first that matches a name wins.

    **Arguments:**

    - `text`: a list of `{"path": regex, "qtype": name or null, "tile_size": int or null,
      "tile_axis": int}`, of which the last two may be missing.
    - `tile_axis`: stands in for the last.

    **Raises:** `ValueError` naming the rule that is wrong.

    >>> from veneer.quant.models.selection import selectors_from_json
    >>> selectors_from_json('[{"path": ".*kernel", "qtype": "int8"}]')[0].qtype
    'int8'
    """
    try:
        rules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the rules are not JSON: {error}") from error
    if not isinstance(rules, list):
        raise ValueError("the rules must be a JSON list of objects")
    return [_selector(rule, tile_axis) for rule in rules]


def _selector(rule: Any, tile_axis: int | None) -> Selector:
    types: dict[str, type | tuple[type, ...]] = {
        "path": str,
        "qtype": (str, type(None)),
        "tile_size": (int, type(None)),
        "tile_axis": int,
    }
    if not isinstance(rule, dict) or not {"path", "qtype"} <= rule.keys() <= types.keys():
        raise ValueError(
            "a rule must be an object with 'path', 'qtype' and optionally 'tile_size' and "
            f"'tile_axis', not {json.dumps(rule)}"
        )
    expected = {
        "path": "a string",
        "qtype": "a string or null",
        "tile_size": "an integer or null",
        "tile_axis": "an integer",
    }
    for key, value in rule.items():
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise ValueError(
                f"{key!r} must be {expected[key]}, not {json.dumps(value)}, in the rule "
                f"{json.dumps(rule)}"
            )
    axis = rule.get("tile_axis", tile_axis)
    return Selector(rule["path"], rule["qtype"], rule.get("tile_size"), axis)


def plan(
    avals: Mapping[str, jax.ShapeDtypeStruct], selectors: Sequence[Selector]
) -> dict[str, Rule]:
    """Decides which tensors to quantise and how, from names, shapes and dtypes alone.

    A tensor is quantised by the first selector that matches its name, if it is floating and of rank
    2 and up.

    **Arguments:**

    - `avals`: shape and dtype of each tensor by name.
    - `selectors`: in order of precedence.

    **Returns:** a `Rule` for the name of each tensor to quantise.

    **Raises:** `ValueError` where a selector matches no name, or no tensor that can be quantised.
    Of its subclasses, `TileError` where a tile does not divide the axis that it tiles, and
    `UnknownAxisError` where the contracting axis is unknown.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant.models.selection import Selector, plan
    >>> avals = {"proj.weight": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
    >>> plan(avals, [Selector(".*weight", "nf4", tile_size=32)])["proj.weight"].tile_axis
    -1
    """
    chosen: dict[str, Rule] = {}
    claimed: set[str] = set()
    for selector in selectors:
        names = [name for name in avals if re.fullmatch(selector.regex, name)]
        if not names:
            raise ValueError(
                f"{selector} matches no tensor. It must match a whole name, such as {_some(avals)}"
            )
        if selector.qtype is not None:
            able = [name for name in names if can_be_quantized(avals[name])]
            if not able:
                allowed = ", ".join(dtype.name for dtype in QUANTIZABLE)
                raise ValueError(
                    f"{selector} matches no tensor that can be quantized: {names[0]!r} is "
                    f"{_describe(avals[names[0]])}, and only {allowed} of rank 2 or more can be"
                )
            for name in able:
                if name not in claimed:
                    chosen[name] = _rule(selector, name, avals[name].shape)
        claimed.update(names)
    if not chosen:
        raise ValueError(f"no tensor is left to quantize among {_some(avals)}")
    return chosen


def unselected(
    avals: Mapping[str, jax.ShapeDtypeStruct], selectors: Sequence[Selector]
) -> list[str]:
    """Return the names of the tensors that can be quantized and that no selector matches."""
    return [
        name
        for name, aval in avals.items()
        if can_be_quantized(aval)
        and not any(re.fullmatch(selector.regex, name) for selector in selectors)
    ]


def without_default_tile(
    avals: Mapping[str, jax.ShapeDtypeStruct], rules: Mapping[str, Rule], qtype: str
) -> list[str]:
    """Describe the tensors whose axis the default tile of a format does not divide."""
    asked = Rule(".*", qtype, tile_size=default_tile(qtype))
    return changed_tiles(dict.fromkeys(rules, asked), rules, avals)


def _rule(selector: Selector, name: str, shape: tuple[int, ...]) -> Rule:
    axis = selector.tile_axis
    if axis is None:
        layout = next((x for end, x in _LAYOUT_OF_NAME.items() if name.endswith(end)), None)
        axis = CONTRACTING_AXIS[layout] if layout else None
    if axis is None:
        raise UnknownAxisError(
            f"the contracted axis of {name!r} {list(shape)} is unknown, because its name ends in "
            "neither 'weight' nor 'kernel'. Set tile_axis"
        )
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{selector} tiles axis {axis}, which {name!r} {list(shape)} does not have"
        )
    rule = selector.rule(axis)
    if selector.tile_size == "default":
        return fit_usual(rule, {axis % len(shape) - len(shape)}, shape)
    tile = rule.axes(shape)[1].get(axis % len(shape))
    if tile is not None and shape[axis] % tile:
        fitting = ", ".join(map(str, dividing_tiles(shape[axis], tile)))
        remedy = f"Tiles that do are {fitting}"
        if selector.qtype is not None and get_format(selector.qtype).tile_size is not None:
            remedy = f"{selector.qtype} has no other tile, so choose another format"
        raise TileError(
            f"tile {tile} does not divide axis {axis} of {name!r} {list(shape)}. {remedy}, or "
            "leave it dense",
            name,
        )
    return rule


def _describe(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _some(names: Iterable[str]) -> str:
    first = [repr(name) for _, name in zip(range(3), names, strict=False)]
    return ", ".join(first) or "no tensors at all"
