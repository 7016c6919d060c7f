"""Products of arrays of `jax.experimental.sparse`, which have primitives of their own.

Each is a program of gathers, products and scatters, as JAX evaluates it.
"""

from typing import Any

import numpy as np

from ...._jax.primitives import get_sparse_implementation
from ...codegen.arrays import ArrayExpr
from ...codegen.builder import Builder
from ...registry import funcify, perform


def _register(name: str) -> None:
    @funcify.register(name)
    def _(b: Builder, *operands: ArrayExpr, **params: Any) -> ArrayExpr:
        program = get_sparse_implementation(name)
        return b.traced(lambda *xs: [program(*xs, **params)], *operands)[0]


for _name in ("bcoo_dot_general", "bcoo_todense"):
    _register(_name)


@perform.register("bcoo_todense")
def _todense(data: Any, indices: Any, *, spinfo: Any) -> Any:
    batch = indices.ndim - 2
    out = np.zeros(spinfo.shape, data.dtype)
    sizes = spinfo.shape[batch : batch + indices.shape[-1]]
    data = np.broadcast_to(data, (*spinfo.shape[:batch], *data.shape[batch:]))
    indices = np.broadcast_to(indices, (*spinfo.shape[:batch], *indices.shape[batch:]))
    for member in np.ndindex(*spinfo.shape[:batch]):
        entries, places = data[member], indices[member]
        stored = (places < np.asarray(sizes, places.dtype)).all(-1)  # the others pad
        np.add.at(out[member], tuple(places[stored].T), entries[stored])
    return out


@perform.register("bcoo_dot_general")
def _(data: Any, indices: Any, rhs: Any, *, lhs_spinfo: Any, **params: Any) -> Any:
    dense = _todense(data, indices, spinfo=lhs_spinfo)
    return perform["dot_general"](dense, rhs, **params)
