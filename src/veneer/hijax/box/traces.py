"""What a Box asks of JAX's traces: in which others one runs, and what it stages."""

from collections.abc import Iterator
from typing import Any

from ..._jax.tracing import Trace, Tracer

#: What JAX calls the things for which it stages a function.
CHECKPOINT, CONDITION = "checkpoint / remat", "while_cond"


def enclosing(trace: Trace) -> Iterator[Trace]:
    """A trace and those that it runs in, from the inside out.

    JAX loses the thread for the forward pass of a `custom_vjp` that it stages.
    """
    around: Any = trace
    while around is not None:
        yield around
        around = getattr(around, "parent_trace", None) or getattr(around, "parent", None)


def is_staging(trace: Trace) -> bool:
    """Whether a trace writes a program down, and runs nothing."""
    return hasattr(trace, "frame")


def is_mapping(trace: Trace) -> bool:
    """Return whether a trace is that of `jax.vmap`."""
    return hasattr(trace, "axis_data")


def staged_for(trace: Trace) -> str | None:
    """What a trace writes a program down for, in JAX's words."""
    frame = getattr(trace, "frame", None)
    return getattr(getattr(frame, "debug_info", None), "traced_for", None)


def held_by(trace: Trace) -> list[Any]:
    """What the program that a trace writes down has from outside, beside its arguments."""
    frame: Any = getattr(trace, "frame", None)
    return [] if frame is None else list(frame.constvar_to_val.values())


def is_deleted(ref: Any) -> bool:
    """Whether the memory of a reference outside of all traces was donated, and not put back."""
    return bool(ref._refs._buf.is_deleted())


def delete(ref: Any) -> None:
    """Has every program that holds a reference outside of all traces fail."""
    ref._refs._buf.delete()


def primal_in(trace: Trace, x: Any) -> Any:
    """A value as it is outside of a trace that differentiates it; another as it is.

    Not by `stop_gradient`, which would keep it from being differentiated in traces around, too.
    """
    return x.primal if isinstance(x, Tracer) and x._trace is trace and hasattr(x, "primal") else x
