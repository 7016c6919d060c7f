"""Quantize a checkpoint: a stream of named tensors that may not fit in memory.

`plan` chooses the rule of each tensor from names, shapes and dtypes, so that errors come before any
tensor is read. `quantize_stream` then quantizes one tensor after the other. `summarize` returns
the rows of a table of sizes and errors. Nothing here depends on a file format.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.surface import some_of
from ..arrays import QUANTIZABLE, QArray
from ..formats import get_format
from ..formats.tiles import dividing_tiles
from .arguments import can_be_quantized
from .notices import describe_changed_tiles
from .rules import Rule
from .uses import default_tile, fit_default_rule

#: The axis that products contract. torch stores a `weight` as [out, in], and JAX libraries store a
#: `kernel` as [..., in, out].
CONTRACTING_AXIS = {"torch": -1, "jax": -2}

ANY_WEIGHT = r".*(weight|kernel)"


class UnknownAxisError(ValueError):
    """The error for a tensor whose contracted axis is unknown.

    The name ends in neither "weight" nor "kernel", and the selector sets no `tile_axis`.
    """


class TileError(ValueError):
    """The error for a tile size that does not divide the contracted axis of a tensor.

    The attribute `tensor` is the name of the tensor.
    """

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


@dataclass(frozen=True)
class Selector:
    """A rule of the command line: the format of the tensors whose names match a regex.

    **Arguments:**

    - `regex`: a regex that matches the whole name of a tensor.
    - `qtype`: the format. None leaves the tensors dense.
    - `tile_size`: the number of values along the contracted axis that share a scale. None means the
      tile size of the format if it has one (32 for mxfp4), and otherwise the whole axis. "default"
      means the default tile size of the format, or a smaller one that divides the axis. If a fixed
      tile size does not divide the axis, the format becomes int8.
    - `tile_axis`: the contracted axis. None means -1 for names that end in "weight", as in torch,
      and -2 for names that end in "kernel", as in JAX.
    - `stated`: the name of the selector in messages, such as a command-line option.
    - `scale_dtype`: the dtype of the scales. None is the dtype that the format chooses.

    **Raises:** `ValueError` if the regex or the format is invalid, or a tile size is below 1 or
    differs from the fixed one of the format, or the dtype of scales is not floating.
    """

    regex: str
    qtype: str | None
    tile_size: int | Literal["default"] | None = None
    tile_axis: int | None = None
    stated: str = "the rule"
    scale_dtype: str | None = None

    def __post_init__(self) -> None:
        try:
            self.rule(-1)  # checks the arguments
        except TypeError as error:  # a dtype that is not floating, or none at all
            raise ValueError(str(error)) from error

    def __str__(self) -> str:
        return f"{self.stated} {self.regex!r}"

    def rule(self, tile_axis: int) -> Rule:
        """Return this selector as a `Rule`, for tensors whose contracted axis is `tile_axis`.

        The tile size "default" becomes the default tile size of the format.
        """
        tile: Any = self.tile_size
        if tile == "default":
            tile = None if self.qtype is None else default_tile(self.qtype)
        elif tile is None and self.qtype is not None:
            tile = get_format(self.qtype).tile_size
        scale_dtype = None if self.qtype is None else self.scale_dtype
        return Rule(
            self.regex, self.qtype, tile_size=tile, tile_axis=tile_axis, scale_dtype=scale_dtype
        )


#: For each key of a rule in a rules file: the allowed types, and a text with these types.
_RULE_KEYS: dict[str, tuple[Any, str]] = {
    "path": (str, "a string"),
    "qtype": (str | None, "a string or null"),
    "tile_size": (int | None, "an integer or null"),
    "tile_axis": (int, "an integer"),
    "scale_dtype": (str | None, "a string or null"),
}


def selectors_from_json(text: str, *, tile_axis: int | None = None) -> list[Selector]:
    """Read a rules file, and return a selector per rule, in the same order.

    **Arguments:**

    - `text`: a JSON list of `{"path": regex, "qtype": name or null, "tile_size": int or null,
      "tile_axis": int, "scale_dtype": dtype or null}`. Only "path" and "qtype" are required.
    - `tile_axis`: the axis for rules without "tile_axis".

    **Raises:** `ValueError` if the text is not such a list. The message has the invalid rule.

    >>> from veneer.quant.models.checkpoint import selectors_from_json
    >>> selectors_from_json('[{"path": ".*kernel", "qtype": "int8"}]')[0].qtype
    'int8'
    """
    try:
        rules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the rules are not JSON: {error}") from error
    if not isinstance(rules, list):
        raise ValueError("the rules must be a JSON list of objects")
    selectors = []
    for rule in rules:
        if not isinstance(rule, dict) or not {"path", "qtype"} <= rule.keys() <= _RULE_KEYS.keys():
            raise ValueError(
                "a rule must be an object with 'path', 'qtype' and optionally 'tile_size', "
                f"'tile_axis' and 'scale_dtype', not {json.dumps(rule)}"
            )
        for key, value in rule.items():
            types, expected = _RULE_KEYS[key]
            if not isinstance(value, types) or isinstance(value, bool):  # a bool is an int
                raise ValueError(
                    f"{key!r} must be {expected}, not {json.dumps(value)}, in the rule "
                    f"{json.dumps(rule)}"
                )
        axis = rule.get("tile_axis", tile_axis)
        selectors.append(
            Selector(
                rule["path"],
                rule["qtype"],
                rule.get("tile_size"),
                axis,
                scale_dtype=rule.get("scale_dtype"),
            )
        )
    return selectors


def plan(
    avals: Mapping[str, jax.ShapeDtypeStruct], selectors: Sequence[Selector]
) -> dict[str, Rule]:
    """Return the rules of the tensors to quantize, as a dict from names to rules.

    The first selector that matches the name of a tensor applies. Only floating tensors of rank 2 or
    more are quantized.

    **Arguments:**

    - `avals`: a dict from the name of each tensor to its shape and dtype.
    - `selectors`: the selectors, in order of precedence.

    **Raises:**

    - `ValueError` if a selector matches no name, or no tensor that can be quantized.
    - `TileError` if a tile does not divide its axis.
    - `UnknownAxisError` if the contracted axis is unknown.

    >>> import jax, jax.numpy as jnp
    >>> from veneer.quant.models.checkpoint import Selector, plan
    >>> avals = {"proj.weight": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
    >>> plan(avals, [Selector(".*weight", "nf4", tile_size=32)])["proj.weight"].tile_axis
    -1
    """
    chosen: dict[str, Rule] = {}
    matched: set[str] = set()  # by any earlier selector, also one without a format
    for selector in selectors:
        names = [name for name in avals if re.fullmatch(selector.regex, name)]
        if not names:
            raise ValueError(
                f"{selector} matches no tensor. It must match a whole name, such as "
                f"{some_of(list(map(repr, avals)))}"
            )
        if selector.qtype is not None:
            quantizable = [name for name in names if can_be_quantized(avals[name])]
            if not quantizable:
                allowed = ", ".join(dtype.name for dtype in QUANTIZABLE)
                aval = avals[names[0]]
                raise ValueError(
                    f"{selector} matches no tensor that can be quantized: {names[0]!r} is "
                    f"{aval.dtype}{list(aval.shape)}, and only {allowed} of rank 2 or more can be"
                )
            for name in quantizable:
                if name not in matched:
                    chosen[name] = _rule_for(selector, name, avals[name].shape)
        matched.update(names)
    if not chosen:
        raise ValueError(f"no tensor is left to quantize among {some_of(list(map(repr, avals)))}")
    return chosen


def find_unselected(
    avals: Mapping[str, jax.ShapeDtypeStruct], selectors: Sequence[Selector]
) -> list[str]:
    """Return the names of tensors that can be quantized, but match no selector.

    `avals` maps names to shapes and dtypes. Floating tensors of rank 2 or more can be quantized.
    """
    return [
        name
        for name, aval in avals.items()
        if can_be_quantized(aval)
        and not any(re.fullmatch(selector.regex, name) for selector in selectors)
    ]


def describe_adapted(
    avals: Mapping[str, jax.ShapeDtypeStruct], rules: Mapping[str, Rule], qtype: str
) -> list[str]:
    """Describe the tensors whose rule from `plan` differs from the default of the format `qtype`.

    The default tile size does not divide the contracted axis of these tensors. Their rules have a
    smaller tile size, or the format int8. Return a list with a text for each of them.
    """
    default = Rule(".*", qtype, tile_size=default_tile(qtype))
    return describe_changed_tiles(dict.fromkeys(rules, default), rules, avals)


def _rule_for(selector: Selector, name: str, shape: tuple[int, ...]) -> Rule:
    """Return the `Rule` by which a selector quantizes the tensor `name`.

    **Raises:** the errors of `plan`. Their messages name the tensor.
    """
    axis = selector.tile_axis
    if axis is None and name.endswith("weight"):
        axis = CONTRACTING_AXIS["torch"]
    elif axis is None and name.endswith("kernel"):
        axis = CONTRACTING_AXIS["jax"]
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
    from_front = axis % len(shape)
    if selector.tile_size == "default":
        return fit_default_rule(rule, {from_front - len(shape)}, shape)  # from the end
    _, tiled_axes = rule.axes(shape)
    tile = tiled_axes.get(from_front)
    if tile is not None and shape[axis] % tile:
        divisors = ", ".join(map(str, dividing_tiles(shape[axis], tile)))
        remedy = f"Tiles that do are {divisors}"
        if selector.qtype is not None and get_format(selector.qtype).tile_size is not None:
            remedy = f"{selector.qtype} has no other tile, so choose another format"
        raise TileError(
            f"tile {tile} does not divide axis {axis} of {name!r} {list(shape)}. {remedy}, or "
            "leave it dense",
            name,
        )
    return rule


class Outcome(NamedTuple):
    """The format and the sizes of one tensor of a checkpoint.

    `error` and `norm` are the Frobenius norms of `original - quantized` and of `original`. They are
    None if the tensor was not quantized.
    """

    name: str
    format: str
    bytes_before: int
    bytes_after: int
    error: float | None = None
    norm: float | None = None


def quantize_stream(
    tensors: Iterable[tuple[str, np.ndarray | QArray]],
    rules: Mapping[str, Rule],
    calibrated: Mapping[str, QArray] = MappingProxyType({}),
) -> Iterator[tuple[np.ndarray | QArray, Outcome]]:
    """Quantize the tensors that have a rule, one at a time.

    float64 weights are quantized in float32 unless `jax_enable_x64` is set.

    **Arguments:**

    - `tensors`: `(name, array)` pairs.
    - `rules`: a dict from names to rules, the result of `plan`.
    - `calibrated`: a dict from names to arrays that `vn.quant.calibrate` has already quantized.

    **Returns:** an iterator of `(value, outcome)` pairs in the same order. `value` is the array to
    store. An array without a rule, or a `QArray`, is unchanged.

    >>> import numpy as np, veneer as vn
    >>> from veneer.quant.models.checkpoint import quantize_stream
    >>> rules = {"w": vn.quant.Rule("w", "int8")}
    >>> [(q, outcome)] = quantize_stream([("w", np.ones((4, 8), np.float32))], rules)
    >>> outcome.bytes_before, outcome.bytes_after
    (128, 64)
    """
    for name, value in tensors:
        nbytes = value.nbytes
        error = norm = None
        if name in rules and not isinstance(value, QArray):
            original = value
            if name in calibrated:
                value = calibrated[name]
            else:
                value = rules[name].quantize(jnp.asarray(original))
            error, norm = error_norms(original, value)
            del original  # so that only one original is in memory
        yield value, Outcome(name, describe_format(value), nbytes, value.nbytes, error, norm)


def error_norms(original: np.ndarray | QArray, value: np.ndarray | QArray) -> tuple[float, float]:
    """Return the Frobenius norms of `original - value` and of `original`, as a pair.

    The norms are computed in float32, or in the dtype of an argument if it is wider.
    """
    a, b = (np.asarray(x.dequantize() if isinstance(x, QArray) else x) for x in (original, value))
    wide = np.result_type(a.dtype, b.dtype, np.float32)
    a = a.astype(wide, copy=False)
    return float(np.linalg.norm(a - b.astype(wide, copy=False))), float(np.linalg.norm(a))


class GroupSummary(NamedTuple):
    """The totals of tensors whose names differ only in numbers, such as `layer.*.weight`.

    All tensors of a group have the same format. `relative_error` treats the quantized tensors as
    one vector. It is None if no tensor was quantized.
    """

    name: str
    format: str
    tensors: int  # the number of tensors
    bytes_before: int
    bytes_after: int
    relative_error: float | None


def summarize(outcomes: Iterable[Outcome]) -> list[GroupSummary]:
    """Return the totals of each group of tensors, in the order of the first tensor of each.

    Tensors are in one group if they have the same format, and their names differ only in numbers.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = re.sub(r"\d+", "*", outcome.name), outcome.format
        groups.setdefault(key, []).append(outcome)
    rows = []
    for (name, format), group in groups.items():
        errors = [x.error for x in group if x.error is not None]
        norms = [x.norm for x in group if x.norm is not None]
        error = relative_error(math.hypot(*errors), math.hypot(*norms)) if errors else None
        before = sum(outcome.bytes_before for outcome in group)
        after = sum(outcome.bytes_after for outcome in group)
        rows.append(GroupSummary(name, format, len(group), before, after, error))
    return rows


def relative_error(error: float, norm: float) -> float:
    """Return `error / norm`: 0 if both are 0, and infinity if only `norm` is 0."""
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return error / norm


def describe_format(value: np.ndarray | QArray) -> str:
    """Return the dtype of a dense array, or the format of a `QArray`, such as "nf4, tile 64"."""
    return f"{value.qtype}, {value.storage_name}" if isinstance(value, QArray) else str(value.dtype)
