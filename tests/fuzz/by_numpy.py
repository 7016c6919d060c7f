"""Run small programs with NumPy, because compiling them takes most of their time.

A program is traced and lowered from high types, as for XLA. Then the reference implementations of
`vn.numba` evaluate its primitives. Programs with other primitives are compiled.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from veneer._jax.hijax import pe
from veneer.hijax.types import is_typed, unpack
from veneer.numba.codegen.graph import key_data
from veneer.numba.codegen.registry import evaluate_jaxpr


def by_numpy(f: Callable[..., Any], *args: Any) -> Any:
    """Return `f(*args)`, evaluated with NumPy if possible. Errors of tracing are raised."""
    leaves, tree = jax.tree.flatten(args)
    trees = []

    def of_leaves(*leaves: Any) -> list[Any]:
        result = f(*jax.tree.unflatten(tree, leaves))
        while any(map(is_typed, jax.tree.leaves(result))):  # it may contain other equations
            result = jax.tree.map(unpack, result)
        out, out_tree = jax.tree.flatten(result)
        trees.append(out_tree)
        return out

    closed = jax.jit(of_leaves).trace(*leaves).jaxpr
    try:
        lowered = pe.lower_jaxpr2(closed) if closed.is_high else closed
        out = evaluate_jaxpr(lowered, *[np.asarray(key_data(x)) for x in leaves])
        out = [_array(x, aval) for x, aval in zip(out, lowered.out_avals, strict=True)]
    except Exception:  # for example a collective
        return jax.jit(f)(*args)
    return jax.tree.unflatten(trees[-1], out)


def _array(x: Any, aval: Any) -> jax.Array:
    """Convert a computed value to a JAX array. Integers become keys if `aval` is a key."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(aval))
    return jax.device_put(x)
