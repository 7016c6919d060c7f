"""Functions with derivatives, solvers or batching rules of their own, as JAX hands them to a trace.

Flat functions, `WrappedFun`s, with stores that their caller reads once they have run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import custom_batching
from jax._src import linear_util as lu
from jax._src.ad_util import SymbolicZero, Zero
from jax._src.lax.control_flow import solves


def transform_flat_function(
    function: lu.WrappedFun, transform: Callable[[Callable], Callable]
) -> lu.WrappedFun:
    """`transform` applied to a flat function that has yet to be called."""

    def transformed(inner: Callable, *args: Any) -> Any:
        return transform(inner)(*args)

    return lu.transformation2(transformed)(function)


def reset_stores(function: lu.WrappedFun) -> None:
    """Lets a flat function run once more: a store may be filled only once."""
    for store in function.stores:
        if store is not None:
            store.reset()


def call_bwd(bwd: lu.WrappedFun, residuals: Sequence, cotangents: Sequence) -> list[Any]:
    """Runs the backward function of a `custom_vjp`: a cotangent, or None for zero, an operand."""
    out = bwd.call_wrapped(*residuals, *cotangents)
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], list):  # JAX >= 0.12
        out, logs = out
        if logs:
            raise NotImplementedError(
                "custom_vjp functions that log (defvjp_with_logs) cannot take implicit arrays. "
                "Call vn.materialise on the operands first."
            )
    return [None if isinstance(ct, Zero | SymbolicZero) else ct for ct in out]


class _Absent:
    """A class of a later JAX."""


# The high primitives of custom_root, which before JAX 0.12 is a function with a custom_jvp.
CustomRoot: Any = getattr(solves, "CustomRoot", _Absent)
RootLinearMap: Any = getattr(solves, "_RootLinearMap", _Absent)


def structure_of_operands(tree: Any) -> Any:
    """The structure of a tree as a `custom_vmap` holds it, in a registry apart from JAX 0.12 on."""
    registry = getattr(custom_batching, "tracing_registry", None)
    return registry.flatten(tree)[1] if registry else jax.tree.structure(tree)
