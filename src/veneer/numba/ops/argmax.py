"""Where the greatest and the smallest entries along an axis are."""

from typing import Any

import numpy as np

from .. import storage
from ..builder import Builder
from ..index import Index
from ..registry import Unsupported, funcify, perform
from ..values import Value


@funcify.register("argmax", "argmin")
def _(b: Builder, x: Value, *, axes: Any, index_dtype: Any) -> Value:
    """The first of them; a NaN is taken for the greatest, and for the smallest."""
    if len(axes) != 1:
        raise Unsupported("axes", f"{axes} are not one axis.")
    if x.dtype.kind == "c":
        raise Unsupported("dtype", f"{x.dtype} has no order.")
    (axis,), dtype = axes, np.dtype(index_dtype)
    symbol = ">" if b.primitive == "argmax" else "<"
    x, out = b.cheap(x), b.buffer()
    with b.kernel() as k, k.loops(out.shape) as own:
        place = lambda i: (*own[:axis], i, *own[axis:])
        best = k.here(k.read(x, place(Index())), "best")
        where = k.here(storage.literal(0, dtype), "where")
        with k.loops([x.shape[axis]]) as (i,):
            new = k.read(x, place(i))
            better = f"{new} {symbol} {best}"
            if x.dtype.kind in "fV":
                better = f"({better} or {new} != {new}) and {best} == {best}"
            with k.under(f"if {better}:"):
                k.line(f"{best} = {new}")
                k.line(f"{where} = {storage.type_name(dtype)}({i})")
        k.store(out, own, where)
    return out


def _perform(function: Any) -> Any:
    return lambda x, *, axes, index_dtype: function(x, axes[0]).astype(index_dtype)


perform.register("argmax")(_perform(np.argmax))
perform.register("argmin")(_perform(np.argmin))
