"""Rules of a QArray for what its leaf axes do not say: another dtype, and rows out of bounds."""

from typing import Any

import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core.primitives.movement import gather
from ..._core.rules import register
from ..qarray import QUANTIZABLE, QArray


@register("convert_element_type")
def _convert_element_type(q: QArray, *, new_dtype, weak_type, sharding) -> Any:
    # To fewer bits, it is meant to round.
    if weak_type or sharding is not None or new_dtype not in QUANTIZABLE:
        return NotImplemented
    return q.replace(dense_dtype=new_dtype)


@register("gather")
def _gather(q: QArray, indices: ArrayLike, *, mode, fill_value, **params) -> Any:
    modes = lax.GatherScatterMode
    if mode == modes.ONE_HOT:
        return NotImplemented
    if mode == modes.FILL_OR_DROP and fill_value is not None and not np.isnan(fill_value):
        return NotImplemented
    # What a scale of NaN multiplies does not matter.
    fills = (0, np.nan, 0) if mode == modes.FILL_OR_DROP else None
    params |= {"mode": mode, "fill_value": None, "fills": fills, "rule": _gather}
    return gather(q, indices, **params)
