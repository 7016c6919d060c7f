"""Find the user's source line, without the frames of JAX and veneer."""

import sys
import warnings
from collections.abc import Iterator
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

    JAX records this line for most equations. If JAX replays a cached jaxpr, no line is recorded,
    and the result is the innermost user's line that is running, or `UNKNOWN_LINE`.
    """
    recorded = equation_line(source_info_util.current())
    frame = _user_frame() if recorded == UNKNOWN_LINE else None
    if frame is None:
        return recorded
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def user_place() -> tuple[str, int]:
    """Return the file and line number that the innermost function of the user is running."""
    frame = _user_frame()
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("<unknown>", 0)


def warn_user(message: str) -> None:
    """Emit a `UserWarning` at the line of the user's call that is running."""
    warnings.warn_explicit(message, UserWarning, *user_place())


def _user_frame() -> FrameType | None:
    is_user_frame = lambda f: source_info_util.is_user_filename(f.f_code.co_filename)
    return next(filter(is_user_frame, frames_from(sys._getframe())), None)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, the caller of the caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def current_scopes() -> list[tuple[str, str]]:
    """Return the named scopes and transformations that are active now, outermost first.

    Each is a pair ("scope", name) or ("transform", name). JAX starts an empty list when it traces
    the body of an equation, such as a `jit` or a loop.
    """
    stack = source_info_util.current_name_stack().stack
    return [(type(entry).__name__.lower(), entry.name) for entry in stack]
