"""Quantise a checkpoint tensor by tensor: which tensors, by name, and then one after the other.

Nothing here knows of files. A checkpoint is a stream of named arrays, so a model that does not fit
in memory is quantised as one that does.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .model import Rule
from .qarray import QArray
from .tiles import dividing_tiles

# torch stores a `weight` as [out, in], and JAX libraries store a `kernel` as [..., in, out].
CONTRACTING_AXIS = {"torch": -1, "jax": -2}
_LAYOUT_OF_NAME = {"weight": "torch", "kernel": "jax"}

ANY_WEIGHT = r".*(weight|kernel)"

# Narrower floats are codes already: their scales are other tensors of the checkpoint.
_QUANTISABLE = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Selector:
    """A `Rule` as a user states it, whose contracting axis may be left to the tensor's name.

    **Arguments:**

    - `regex`: matched in full against the name.
    - `qtype`: the format, or None to leave the tensors dense.
    - `tile_size`: how many values along the contracting axis share a scale; None is all of them.
    - `tile_axis`: the contracting axis; None takes it from the name: that of torch for `...weight`,
        of JAX for `...kernel`.
    - `option`: where the user stated it, for messages.

    **Raises:** `ValueError` for a regex that does not compile, an unknown format or a tile below 1.
    """

    regex: str
    qtype: str | None
    tile_size: int | None = None
    tile_axis: int | None = None
    option: str = "the rule"

    def __post_init__(self) -> None:
        self.rule(-1)

    def __str__(self) -> str:
        return f"{self.option} {self.regex!r}"

    def rule(self, tile_axis: int) -> Rule:
        """The rule, once the contracting axis is known."""
        return Rule(self.regex, self.qtype, tile_size=self.tile_size, tile_axis=tile_axis)


def selectors_from_json(text: str, *, tile_axis: int | None = None) -> list[Selector]:
    r"""The selectors of a rules file, in order; the first that matches a name wins.

    The file is a list of `{"path": regex, "qtype": name or null, "tile_size": int or null,
    "tile_axis": int}`; the last two may be missing, and `tile_axis` stands in for the last.

    **Raises:** `ValueError` naming the rule that is wrong.

    >>> from veneer.quant.checkpoint import selectors_from_json
    >>> selectors_from_json('[{"path": ".*kernel", "qtype": "int8"}]')[0].qtype
    'int8'
    """
    try:
        rules = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the rules are not JSON: {error}") from error
    if not isinstance(rules, list):
        raise ValueError("the rules are a JSON list of objects")
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
            "a rule is an object with 'path', 'qtype' and, if wanted, 'tile_size' and 'tile_axis', "
            f"not {json.dumps(rule)}"
        )
    for key, value in rule.items():
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise ValueError(
                f"{key!r} cannot be {json.dumps(value)} in the rule {json.dumps(rule)}"
            )
    axis = rule.get("tile_axis", tile_axis)
    return Selector(rule["path"], rule["qtype"], rule.get("tile_size"), axis)


def plan(
    avals: Mapping[str, jax.ShapeDtypeStruct], selectors: Sequence[Selector]
) -> dict[str, Rule]:
    """Which tensors to quantise and how, from names, shapes and dtypes alone.

    A tensor is quantised by the first selector that matches its name, if it is floating and of rank
    2 and up. Whatever is wrong is found here, before any work is done.

    **Arguments:**

    - `avals`: shape and dtype of each tensor by name.
    - `selectors`: in order of precedence.

    **Returns:** a `Rule` for the name of each tensor to quantise.

    **Raises:** `ValueError` where a selector matches no name, or no tensor that can be quantised;
    where a tile does not divide the axis it tiles; where the contracting axis is unknown.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant.checkpoint import Selector, plan
    >>> avals = {"proj.weight": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
    >>> plan(avals, [Selector(".*weight", "nf4", tile_size=32)])["proj.weight"].tile_axis
    -1
    """
    chosen: dict[str, Rule] = {}
    claimed: set[str] = set()
    for selector in selectors:
        names = [name for name in avals if re.fullmatch(selector.regex, name)]
        if not names:
            raise ValueError(f"{selector} matches no tensor; the names are such as {_some(avals)}")
        if selector.qtype is not None:
            able = [name for name in names if _can_be_quantised(avals[name])]
            if not able:
                raise ValueError(
                    f"{selector} matches no tensor that can be quantised: {names[0]!r} is "
                    f"{_describe(avals[names[0]])}, and {', '.join(_QUANTISABLE)} of rank 2 and up "
                    "can be"
                )
            for name in able:
                if name not in claimed:
                    chosen[name] = _rule(selector, name, avals[name].shape)
        claimed.update(names)
    if not chosen:
        raise ValueError(f"no tensor is left to quantise among {_some(avals)}")
    return chosen


def _rule(selector: Selector, name: str, shape: tuple[int, ...]) -> Rule:
    axis = selector.tile_axis
    if axis is None:
        layout = next((x for end, x in _LAYOUT_OF_NAME.items() if name.endswith(end)), None)
        axis = CONTRACTING_AXIS[layout] if layout else None
    if axis is None:
        raise ValueError(
            f"the contracting axis of {name!r} {list(shape)} is unknown, as its name ends in "
            "neither 'weight' nor 'kernel': give --layout torch (the last axis) or jax (the one "
            "before), or a 'tile_axis' in its rule"
        )
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{selector} tiles axis {axis}, and {name!r} {list(shape)} has none")
    tile = selector.tile_size
    if tile is not None and shape[axis] % tile:
        fitting = ", ".join(map(str, dividing_tiles(shape[axis], tile)))
        raise ValueError(
            f"tile {tile} does not divide axis {axis} of {name!r} {list(shape)}: tiles that do are "
            f"{fitting}, or leave it dense by --exclude {_as_regex(name)} (in a rules file: by a "
            "rule before the others whose qtype is null)"
        )
    return selector.rule(axis)


class Outcome(NamedTuple):
    """What became of one tensor, and what it cost.

    `error` and `norm` are the Frobenius norms of `original - quantised` and of `original`; None
    where it was left as it was.
    """

    name: str
    format: str
    bytes_before: int
    bytes_after: int
    error: float | None = None
    norm: float | None = None


def quantize_stream(
    tensors: Iterable[tuple[str, np.ndarray | QArray]], rules: Mapping[str, Rule]
) -> Iterator[tuple[np.ndarray | QArray, Outcome]]:
    """Quantise the tensors that have a rule and pass the others through, one at a time.

    **Arguments:**

    - `tensors`: names and arrays. Values that are quantised already pass through.
    - `rules`: by name, from `plan`.

    **Returns:** an iterator of the values to store, in the same order, each with its `Outcome`.
    float64 weights are quantised in float32 unless `jax_enable_x64` is set, as all else in JAX.

    >>> import numpy as np, veneer as vn
    >>> from veneer.quant.checkpoint import quantize_stream
    >>> rules = {"w": vn.quant.Rule("w", "int8")}
    >>> [(q, outcome)] = quantize_stream([("w", np.ones((4, 8), np.float32))], rules)
    >>> outcome.bytes_before, outcome.bytes_after
    (128, 64)
    """
    for name, value in tensors:
        before = value.nbytes
        error = norm = None
        if name in rules and not isinstance(value, QArray):
            original, value = value, rules[name].quantize(jnp.asarray(value))
            error, norm = error_norms(original, value)
            del original  # not while the next one is read
        yield value, Outcome(name, describe_format(value), before, value.nbytes, error, norm)


def error_norms(original: np.ndarray | QArray, value: np.ndarray | QArray) -> tuple[float, float]:
    """The Frobenius norms of `original - value` and of `original`, arrays of one shape.

    Computed in float32, or the wider of the two dtypes.
    """
    a, b = (np.asarray(x.dequantize() if isinstance(x, QArray) else x) for x in (original, value))
    wide = np.result_type(a.dtype, b.dtype, np.float32)
    a = a.astype(wide, copy=False)
    return float(np.linalg.norm(a - b.astype(wide, copy=False))), float(np.linalg.norm(a))


class GroupSummary(NamedTuple):
    """What became of tensors whose names differ in numbers only (`layer.*.weight`)."""

    name: str
    format: str
    tensors: int
    bytes_before: int
    bytes_after: int
    relative_error: float | None


def summarise(outcomes: Iterable[Outcome]) -> list[GroupSummary]:
    """One row for each group of names and format, in order of first appearance.

    The relative error is that of the group's tensors taken as one vector; None where none was
    quantised.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = re.sub(r"\d+", "*", outcome.name), outcome.format
        groups.setdefault(key, []).append(outcome)
    return [_summary(name, format, group) for (name, format), group in groups.items()]


def _summary(name: str, format: str, group: Sequence[Outcome]) -> GroupSummary:
    before = sum(outcome.bytes_before for outcome in group)
    after = sum(outcome.bytes_after for outcome in group)
    norms = [(x.error, x.norm) for x in group if x.error is not None and x.norm is not None]
    error = relative_error(*map(math.hypot, *norms)) if norms else None
    return GroupSummary(name, format, len(group), before, after, error)


def relative_error(error: float, norm: float) -> float:
    """`error / norm`, where nothing lost of nothing is 0."""
    return error / norm if norm else error and math.inf


def describe_format(value: np.ndarray | QArray) -> str:
    """The dtype of a dense array; the format and the tiles of a QArray (`nf4, tile 64`)."""
    if not isinstance(value, QArray):
        return str(value.dtype)
    tiles = [
        size // count
        for size, count in zip(value.shape, value.scale.shape, strict=True)
        if 1 < count < size
    ]
    if tiles:
        return f"{value.qtype}, tile {'×'.join(map(str, tiles))}"
    return f"{value.qtype}, {'channelwise' if value.scale.size > 1 else 'one scale'}"


def _can_be_quantised(aval: jax.ShapeDtypeStruct) -> bool:
    return len(aval.shape) >= 2 and str(aval.dtype) in _QUANTISABLE


def _as_regex(name: str) -> str:
    return f"'{re.escape(name)}'"  # not by repr, which would double the backslashes


def _describe(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _some(names: Iterable[str]) -> str:
    first = [repr(name) for _, name in zip(range(3), names, strict=False)]
    return ", ".join(first) or "no tensors at all"
