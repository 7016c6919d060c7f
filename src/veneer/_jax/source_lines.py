"""The user's place in the program: source lines, with veneer's own frames left out."""

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from jax._src import source_info_util, traceback_util


def hide_frames_of(package: Path) -> None:
    """Leaves a package's frames out of the source lines that JAX records for the user's code."""
    source_info_util.register_exclusion(str(package))
    traceback_util.register_exclusion(str(package))


def user_line() -> str:
    """`file:line (function)` of the user's code that is being traced.

    The line that JAX recorded, if it did; within a function that JAX has traced before it did
    not, and the line is that of the call.
    """
    recorded = source_info_util.user_frame(source_info_util.current().traceback)
    if recorded is not None:
        return f"{recorded.file_name}:{recorded.start_line} ({recorded.function_name})"
    frame = _user_frame()
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


#: What `equation_line` gives where there is no line of the user's.
UNKNOWN_LINE = "unknown"


def equation_line(source_info: Any) -> str:
    """`file:line (function)` of the user's code that an equation of a jaxpr was traced from."""
    frame = source_info_util.user_frame(source_info.traceback)
    if frame is None:
        return UNKNOWN_LINE
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def user_place() -> tuple[str, int]:
    """File and line of the user's call that is running."""
    frame = _user_frame()
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("<unknown>", 0)


def warn_user(message: str) -> None:
    """Warns with `UserWarning`, at the user's call that is running."""
    warnings.warn_explicit(message, UserWarning, *user_place())


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def current_scopes() -> list[tuple[str, str]]:
    """The scopes and transformations around what is bound now, as ("scope", name) or ("transform",
    name), the outermost first; in a program that another contains, from its start on.
    """
    stack = source_info_util.current_name_stack().stack
    return [(type(entry).__name__.lower(), entry.name) for entry in stack]
