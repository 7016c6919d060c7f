"""Every private JAX name that veneer uses, and every difference between JAX versions.

No other module imports `jax._src`. What is public in some place is taken from there; a shim
names the version it is for, so that it can be deleted.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.extend as jex
from jax._src import core, source_info_util, traceback_util
from jax._src import linear_util as lu
from jax._src.ad_util import SymbolicZero, Zero
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
from jax._src.sharding_impls import UNSPECIFIED
from jax.extend.core import Primitive, jaxpr_as_fun, primitives

__all__ = [
    "UNSPECIFIED",
    "Primitive",
    "Trace",
    "Tracer",
    "call_bwd",
    "close_jaxpr",
    "current_trace",
    "find_primitive",
    "hide_frames_of",
    "jaxpr_as_fun",
    "open_jaxpr",
    "primitives",
    "reset_stores",
    "scan_counts",
    "set_current_trace",
    "transform_flat_function",
    "user_line",
    "user_place",
]

Trace = core.Trace
Tracer = core.Tracer
set_current_trace = core.set_current_trace


def current_trace() -> Trace:
    """The trace that a primitive bound here would be processed by."""
    with core.take_current_trace() as trace:
        return trace


# Primitives by name.


@cache
def _primitives_by_name() -> dict[str, Primitive]:
    found: dict[str, Primitive] = {}
    for module in (jax.lax, primitives):
        for attribute, value in vars(module).items():
            if isinstance(value, Primitive):
                found.setdefault(value.name, value)
                found.setdefault(attribute.removesuffix("_p"), value)
    return found


def find_primitive(name: str) -> Primitive:
    """The JAX primitive of this name: as jaxprs print it, or as `jax.lax.<name>_p`."""
    known = _primitives_by_name()
    try:
        return known[name]
    except KeyError:
        close = " or ".join(map(repr, difflib.get_close_matches(name, known)))
        raise ValueError(
            f"no primitive named {name!r} is known"
            + (f"; did you mean {close}? " if close else ". ")
            + "One that JAX does not list in jax.lax or jax.extend.core.primitives can be passed "
            "as an object."
        ) from None


# Jaxprs. Up to JAX 0.11 a jaxpr with its constants is a ClosedJaxpr; from 0.12 it is a Jaxpr.


def close_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without constants, as `jaxpr_as_fun` takes it."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.core.ClosedJaxpr(jaxpr, ())


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr as one that takes its constants first, and those constants."""
    return convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a `scan`."""
    if "num_consts" in params:  # JAX < 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# Functions with custom derivatives reach a trace as `WrappedFun`s: flat functions, with stores
# that their caller reads once they have run.


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
                "custom_vjp functions that log (defvjp_with_logs) cannot take implicit arrays yet; "
                "call vn.materialise on the operands first."
            )
    return [None if isinstance(ct, Zero | SymbolicZero) else ct for ct in out]


# The user's place in the program.


def hide_frames_of(package: Path) -> None:
    """Leaves a package's frames out of the source lines that JAX records for the user's code."""
    source_info_util.register_exclusion(str(package))
    traceback_util.register_exclusion(str(package))


def user_line() -> str:
    """`file:line (function)` of the user's code that is being traced.

    The line that JAX recorded, if it did; within a function that JAX has traced before it did
    not, and the line is that of the call.
    """
    recorded = source_info_util.summarize(source_info_util.current())
    if recorded not in ("", "unknown"):
        return recorded
    frame = _user_frame()
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def user_place() -> tuple[str, int]:
    """File and line of the user's call that is running."""
    frame = _user_frame()
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("<unknown>", 0)


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
