"""The traces around a use of a Box, started by JAX's transformations or by `vn.jit`.

While `vn.jit` traces a function, a `JitFrame` records which Boxes the function captures, and the
new contents of Boxes whose structure it changes. `state` has the frames of the current thread.

The contents of a Box (`box_contents.Contents`) are a pytree of leaves or of references, a
`jax.Ref` for each leaf. A compiled function can capture references. A change of structure replaces
the references, and increases the `version` of the contents.
"""

from collections.abc import Iterator
from threading import local
from typing import TYPE_CHECKING, Any

import jax

from .._jax.tracing import Trace, Tracer

if TYPE_CHECKING:
    from .box import Box
    from .box_contents import Contents


def enclosing_traces(trace: Trace) -> Iterator[Trace]:
    """Yield a trace and the traces around it, innermost first."""
    around: Any = trace
    while around is not None:
        yield around
        around = getattr(around, "parent_trace", None) or getattr(around, "parent", None)


def is_staging(trace: Trace) -> bool:
    """Return whether a trace builds a jaxpr instead of computing values."""
    return hasattr(trace, "frame")


def is_checkpoint(trace: Trace) -> bool:
    """Return whether a trace belongs to `jax.checkpoint`."""
    return staged_for(trace) == "checkpoint / remat"


def staged_for(trace: Trace) -> str | None:
    """Return JAX's name of the transformation that builds a jaxpr in a trace.

    Examples are "jit" and "while_cond". Return None if the trace builds no jaxpr.
    """
    frame = getattr(trace, "frame", None)
    return getattr(getattr(frame, "debug_info", None), "traced_for", None)


def primal_in(trace: Trace, x: Any) -> Any:
    """Return the primal of `x` if a trace differentiates `x`. Otherwise return `x`.

    Unlike `stop_gradient`, this keeps the derivatives of traces further out.
    """
    return x.primal if isinstance(x, Tracer) and x._trace is trace and hasattr(x, "primal") else x


class JitFrame:
    """A context in which `vn.jit` traces a function. It records the Boxes that the function uses.

    `trace` is the trace of the function. `captured` is a dict to which the frame adds the contents
    of captured Boxes, each with its version. `arguments` has the contents of each Box among the
    arguments of the function.
    """

    def __init__(self, trace: Trace, captured: "dict[Contents, int]", arguments: "list[Contents]"):
        self.trace = trace
        self.captured = captured
        self.arguments = arguments
        # Captured contents whose structure the function changes, with the new contents. The new
        # contents replace the captured ones when the compiled function has run.
        self.replaced: dict[Contents, Contents] = {}

    def __enter__(self) -> "JitFrame":
        state.frames.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        state.frames.pop()
        if any(contents.in_jax_caches for contents in self.replaced.values()):
            clear_traced_functions()  # their references end with this trace

    def capture(self, contents: "Contents") -> None:
        """Record that the function captures a Box, given its contents.

        Raise ValueError if the Box is also an argument.
        """
        if contents in self.arguments:
            raise alias_error(contents)
        self.captured[contents] = contents.version


def alias_error(contents: "Contents") -> ValueError:
    """Return the error for a Box that a function both takes and captures.

    The function would see two separate Boxes.
    """
    return ValueError(
        f"{contents!r} is both an argument of a jitted function and captured by it, or by a "
        "function that it calls. Pass it or capture it, but not both."
    )


class _State(local):
    """The functions that `vn.jit` and `jax.jit` are tracing or calling now in one thread."""

    def __init__(self) -> None:
        self.frames: list[JitFrame] = []  # innermost last
        # The Boxes that JAX has flattened in a call of `vn.jit`, or None outside of such a call.
        self.flattened: list[Box] | None = None
        # True if the function that `jax.jit` traces now changes the structure of a Box.
        self.changes_structure = False


state = _State()


def get_latest(contents: "Contents") -> "Contents":
    """Return the contents of a Box as the function that is traced now sees them.

    They differ from `contents` if a function that `vn.jit` traces now has changed their structure.
    """
    for frame in state.frames:
        contents = frame.replaced.get(contents, contents)
    return contents


# Part of the key of JAX's caches of traced functions.
_generation = jax.make_user_context(0)


def clear_traced_functions() -> None:
    """Make JAX trace every function again at its next call.

    Traced functions hold references to captured contents. A change of structure replaces these.
    """
    _generation.set_global(_generation.get_global() + 1)
