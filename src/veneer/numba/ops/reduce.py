"""Reductions by any function of numbers, of one array or of several at once."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import storage
from ..builder import Builder, require_fused
from ..reference import evaluate_jaxpr
from ..registry import funcify, perform
from ..values import Value, number


@funcify.register("reduce")
def _(b: Builder, *operands: Value, jaxpr: Any, dimensions: Sequence[int], **_: Any) -> list[Value]:
    if not dimensions:
        return [*operands[: len(operands) // 2]]
    require_fused(jaxpr)
    arrays, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    shape, dtypes = arrays[0].shape, [x.dtype for x in arrays]
    kept = [axis for axis in range(len(shape)) if axis not in dimensions]
    # Totals are kept in what they are computed in.
    outs = [b.buffer(dtype=storage.computed_dtype(dtype)) for dtype in dtypes]
    with b.kernel() as k, k.loops([shape[axis] for axis in kept]) as own:
        totals = [k.here(k.read(start, ()), "total") for start in starts]
        with k.loops([shape[axis] for axis in dimensions]) as inner:
            places = dict(zip([*kept, *dimensions], [*own, *inner], strict=True))
            index = [places[axis] for axis in range(len(shape))]
            now = [k.here(total) for total in totals]  # of which nothing moves out of the loop
            texts = [*now, *(k.read(x, index) for x in arrays)]
            results = b.inline_in(k, jaxpr, *map(number, texts, dtypes * 2))
            for total, text in zip(totals, results, strict=True):
                k.line(f"{total} = {text}")
        for out, total in zip(outs, totals, strict=True):
            k.store(out, own, total)
    return [b.converted(out, dtype) for out, dtype in zip(outs, dtypes, strict=True)]


@perform.register("reduce")
def _(*operands: Any, jaxpr: Any, dimensions: Sequence[int], **_: Any) -> list[Any]:
    arrays, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    if not dimensions:
        return [*arrays]
    shape = arrays[0].shape
    kept = [n for axis, n in enumerate(shape) if axis not in dimensions]
    n, ends = math.prod(shape[axis] for axis in dimensions), range(-len(dimensions), 0)
    rows = [np.moveaxis(x, dimensions, ends).reshape(math.prod(kept), n) for x in arrays]
    outs = [np.empty(math.prod(kept), x.dtype) for x in arrays]
    for place in range(math.prod(kept)):
        totals = [np.asarray(start) for start in starts]
        for entries in zip(*(row[place] for row in rows), strict=True):
            totals = evaluate_jaxpr(jaxpr, *totals, *map(np.asarray, entries))
        for out, total in zip(outs, totals, strict=True):
            out[place] = total
    return [out.reshape(kept) for out in outs]
