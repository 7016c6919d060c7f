"""Quantises a checkpoint, one tensor after the other, and says what became of each.

Nothing here knows of files. A checkpoint is a stream of named arrays, so a model that does not fit
in memory is quantised as one that does.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..arrays.qarray import QArray
from .rules import Rule


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
    tensors: Iterable[tuple[str, np.ndarray | QArray]],
    rules: Mapping[str, Rule],
    calibrated: Mapping[str, QArray] = MappingProxyType({}),
) -> Iterator[tuple[np.ndarray | QArray, Outcome]]:
    """Quantises the tensors that have a rule and passes the others through, one at a time.

    **Arguments:**

    - `tensors`: names and arrays. Values that are quantised already pass through.
    - `rules`: by name, as `selection.plan` makes them.
    - `calibrated`: what is quantised by now, and taken instead.

    **Returns:** an iterator of the values to store, in the same order, each with its `Outcome`.
    float64 weights are quantised in float32 unless `jax_enable_x64` is set, as all else in JAX.

    >>> import numpy as np, veneer as vn
    >>> from veneer.quant.models.checkpoint import quantize_stream
    >>> rules = {"w": vn.quant.Rule("w", "int8")}
    >>> [(q, outcome)] = quantize_stream([("w", np.ones((4, 8), np.float32))], rules)
    >>> outcome.bytes_before, outcome.bytes_after
    (128, 64)
    """
    for name, value in tensors:
        before = value.nbytes
        error = norm = None
        if name in rules and not isinstance(value, QArray):
            original = value
            if name in calibrated:
                value = calibrated[name]
            else:
                value = rules[name].quantize(jnp.asarray(original))
            error, norm = error_norms(original, value)
            del original  # not while the next one is read
        yield value, Outcome(name, describe_format(value), before, value.nbytes, error, norm)


def error_norms(original: np.ndarray | QArray, value: np.ndarray | QArray) -> tuple[float, float]:
    """Returns the Frobenius norms of `original - value` and of `original`, arrays of one shape.

    They are computed in float32, or the wider of the two dtypes.
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
    """Gives one row to each group of names and format, in order of first appearance.

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
    """Returns `error / norm`, where nothing lost of nothing is 0."""
    return error / norm if norm else error and math.inf


def describe_format(value: np.ndarray | QArray) -> str:
    """Names the dtype of a dense array; the format and the tiles of a QArray (`nf4, tile 64`)."""
    return f"{value.qtype}, {value.storage_name}" if isinstance(value, QArray) else str(value.dtype)
