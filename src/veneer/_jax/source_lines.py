"""Find the user's source line, without the frames of JAX and veneer."""

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from jax._src import source_info_util, traceback_util

#: The result of `equation_line` for an equation without a user's source line.
UNKNOWN_LINE = "unknown"


def hide_frames_of(package: Path) -> None:
    """Exclude a package's frames from the source lines and tracebacks that JAX records."""
    source_info_util.register_exclusion(str(package))
    traceback_util.register_exclusion(str(package))


def equation_line(source_info: Any) -> str:
    """Return the user's `file:line (function)` that an equation of a jaxpr was traced from."""
    frame = source_info_util.user_frame(source_info.traceback)
    if frame is None:
        return UNKNOWN_LINE
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def user_line() -> str:
    """Return the user's `file:line (function)` that is being traced.

    It is the line that JAX recorded. In a function that was traced before, JAX records none, and
    the result is the line of the running call.
    """
    recorded = equation_line(source_info_util.current())
    frame = _user_frame() if recorded == UNKNOWN_LINE else None
    if frame is None:
        return recorded
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def user_place() -> tuple[str, int]:
    """Return the file and line of the user's call that is running."""
    frame = _user_frame()
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("<unknown>", 0)


def warn_user(message: str) -> None:
    """Emit a `UserWarning` at the line of the user's call that is running."""
    warnings.warn_explicit(message, UserWarning, *user_place())


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def current_scopes() -> list[tuple[str, str]]:
    """Return the named scopes and transformations around the current position, outermost first.

    Each is ("scope", name) or ("transform", name). In a jaxpr that an equation contains, the list
    starts anew.
    """
    stack = source_info_util.current_name_stack().stack
    return [(type(entry).__name__.lower(), entry.name) for entry in stack]
