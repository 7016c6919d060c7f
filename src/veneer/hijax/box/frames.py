"""What traces of `vn.jit` are open in this thread, and which call flattens its arguments.

Beside those, what makes JAX trace its functions anew: they hold the references of a Box that they
close over, and these are others once the structure of its contents has changed.
"""

from threading import local
from typing import TYPE_CHECKING, Any

import jax

from ..._jax.tracing import Trace

if TYPE_CHECKING:
    from .box import Box
    from .contents import Contents

# A part of the key of all of JAX's caches of traced functions.
_generation = jax.make_user_context(0)


def forget_programs() -> None:
    """Has JAX trace each function anew when it is called next."""
    _generation.set_global(_generation.get_global() + 1)


class Frame:
    """One trace of a function by `vn.jit`, and what becomes of Boxes in it.

    **Arguments:**

    - `trace`: that of the function.
    - `captured`: noted in it are the contents that the program holds references to, with their
      version.
    - `arguments`: the contents that have been passed in.
    """

    def __init__(self, trace: Trace, captured: "dict[Contents, int]", arguments: "list[Contents]"):
        self.trace = trace
        self.captured = captured
        self.arguments = arguments
        self.replaced: dict[Contents, Contents] = {}  # those of another structure, until the end

    def __enter__(self) -> "Frame":
        frames().append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        frames().pop()
        if any(contents.held for contents in self.replaced.values()):
            forget_programs()  # which would hold what is gone with the trace

    def note(self, contents: "Contents") -> None:
        """Notes that the program uses contents from outside, which are no argument."""
        if contents in self.arguments:
            raise ValueError(passed_and_held(contents))
        self.captured[contents] = contents.version


def passed_and_held(contents: "Contents") -> str:
    """Says so: what a function has both as an argument and by itself would be two Boxes."""
    return (
        f"{contents!r} is both an argument of a jitted function and captured by it, or by a "
        "function that it calls. Pass it or capture it, but not both."
    )


class _State(local):
    """Of this thread: the open frames; and the Boxes that JAX has met in what it takes apart now,
    where that are the arguments or the results of a function of `vn.jit`."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.flattened: list[Box] | None = None
        self.changes_structure = False  # whether a `BoxStructureError` was raised


state = _State()


def frames() -> list[Frame]:
    """The frames that are open, the innermost last."""
    return state.frames


def resolved(contents: "Contents") -> "Contents":
    """What contents are in the open frames, in which their structure may have changed."""
    for frame in state.frames:
        contents = frame.replaced.get(contents, contents)
    return contents
