"""Inspect the Python frames of the running program: the user's line, and functions that call us.

The frames of JAX and veneer are skipped to find the user's line.

Other frames show which function of JAX or optax is handling an implicit array outside `implicit`,
where the array is a pytree. `jax.grad`, `jax.vmap`, `jax.lax.scan` and `optax.apply_updates` check
its leaves, and raise an error about integers, sizes or structures. But first, they flatten or
unflatten the array, for the check or for the message. Our flatten and unflatten functions call
`check_caller`. It looks at the frame of the calling function, runs the check of that function
early, adds a note with the remedy to the error, and raises it. JAX is not patched. If a version of
JAX renames a function or a variable, the error has no note.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import source_info_util, traceback_util

from .tracing import Tracer, is_differentiated

#: The result of `equation_line` for an equation without a user's source line.
UNKNOWN_LINE = "unknown"


def hide_frames_of(package: Path) -> None:
    """Exclude a package's frames from the source lines and tracebacks that JAX records."""
    source_info_util.register_exclusion(str(package))
    traceback_util.register_exclusion(str(package))


def equation_line(source_info: Any) -> str:
    """Return the user's source line of an equation of a jaxpr, as `file:line (function)`.

    `source_info` is the attribute of this name of the equation.
    """
    frame = source_info_util.user_frame(source_info.traceback)
    if frame is None:
        return UNKNOWN_LINE
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def user_line() -> str:
    """Return the user's source line that is being traced, as `file:line (function)`.

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


def is_read_by_operator() -> bool:
    """Return whether an operator of `jax.Array`, such as `+`, is reading `__jax_array__`.

    Then `__jax_array__` of the operand raises AttributeError, so that the operator returns
    NotImplemented, and Python calls the operator of the operand.
    """
    return jax_caller().startswith("_operator_")


def jax_caller() -> str:
    """Return the name of the innermost running function of JAX, or "" if none is running."""
    # The frames of an equinox.Module's __getattribute__ or an annotation checker may come first.
    frames = frames_from(sys._getframe(1))
    names = (f.f_code.co_name for f in frames if f.f_globals.get("__name__", "").startswith("jax."))
    return next(names, "")


def is_in_converted_function() -> bool:
    """Return whether a function that `jax.closure_convert` returned is evaluating an equation."""
    # JAX and our patches put at most six frames between.
    names = [frame.f_code.co_name for frame in islice(frames_from(sys._getframe(1)), 6)]
    return ("eval_jaxpr", "converted_fun") in pairwise(names)


# Errors of calling functions.

_GRADIENT_NOTE = (
    "{} has integer or boolean leaves, such as codes of quantized weights. Differentiate with "
    "respect to the dense array, vn.implicit(jax.grad(f)), or add adapters with "
    "vn.lora.init_tree and train the second tree of vn.lora.split."
)
_MAP_NOTE = (
    "{} was mapped leaf by leaf, and its leaves differ in size. Move the transformation inside "
    "vn.implicit, as in vn.implicit(lambda x: jax.vmap(f)(x))(x), to map the array itself."
)
_CARRY_NOTE = (
    "An implicit array, {}, is in only one of them. Move the loop inside vn.implicit, as in "
    "vn.implicit(lambda x: jax.lax.fori_loop(0, 3, f, x))(x), to carry arrays of any type."
)


def _raise_update_error(function: str, value: Any) -> NoReturn:
    raise TypeError(
        f"{function}: quantized weights cannot be updated, and {value!r} would be replaced by a "
        "dense array. Update the first tree of vn.tree.partition(model, vn.trainable(model)), or "
        "add adapters with vn.lora.init_tree and update the second tree of vn.lora.split."
    )


def _has_quantized_array(value: Any) -> bool:
    # The types of quantized arrays set the class attribute `dense_tangent`.
    is_quantized = lambda x: getattr(x, "dense_tangent", False)
    return any(map(is_quantized, jax.tree.leaves(value, is_leaf=is_quantized)))


def _check_dtypes(frame: FrameType, value: Any) -> None:
    """Raise the error of `jax.grad`, `jax.jacrev` or `jax.jacfwd` if a leaf of `value` is integer.

    `frame` is the frame of the JAX function that flattens the implicit array `value`.
    """
    variables, function = frame.f_locals, frame.f_code.co_name
    if "ans" in variables or "y" in variables:  # JAX is flattening the results, not the arguments
        return
    is_reverse = "allow_int" in variables
    mode = "grad" if function == "value_and_grad_f" else "jacrev" if is_reverse else "jacfwd"
    options = ["holomorphic", "allow_int"] if is_reverse else ["holomorphic"]
    check = _with_note(frame.f_globals[f"_check_input_dtype_{mode}"], _GRADIENT_NOTE, value)
    for leaf in jax.tree.leaves(value):
        if np.dtype(leaf.dtype).kind in "biu":
            check(*[variables[option] for option in options], leaf)


def _check_scanned_sizes(frame: FrameType, value: Any) -> None:
    """Raise the error of `jax.lax.scan` if leaves of the scanned `value` differ in length.

    `frame` is the frame of the JAX function that flattens the implicit array `value`.
    """
    variables, leaves = frame.f_locals, jax.tree.leaves(value)
    if "xs_flat" in variables or (frame.f_code.co_name == "scan" and "init_flat" not in variables):
        return  # JAX is flattening a carry or a result, whose leaves may have any size
    if len({np.shape(leaf)[:1] for leaf in leaves}) > 1:
        check = _with_note(frame.f_globals["_infer_scan_length"], _MAP_NOTE, value)
        check(leaves, list(map(jax.typeof, leaves)), variables["length"])


def _check_mapped_sizes(frame: FrameType, value: Any) -> None:
    """Raise the error of `jax.vmap` if leaves of `value` differ in size along the mapped axes.

    `frame` is the frame of the JAX function that unflattens the implicit array `value`.
    """
    leaves = {id(leaf) for leaf in jax.tree.leaves(value)}
    mapped = zip(frame.f_locals["vals"], frame.f_locals["dims"], strict=True)
    sizes = {np.shape(x)[axis] for x, axis in mapped if id(x) in leaves and axis is not None}
    if len(sizes) > 1:
        _call_again(frame, _MAP_NOTE, value)


def _check_carry(frame: FrameType, value: Any) -> None:
    """Raise the error of a loop if its carry changes between a dense and an implicit array.

    `frame` is the frame of the JAX function that unflattens the implicit array `value`.
    """
    is_leaf = lambda x: type(x) is type(value)
    structure_of: Any = lambda carry: jax.tree.structure(carry, is_leaf=is_leaf)
    before = structure_of(frame.f_locals["in_carry"].unflatten())
    after = structure_of(frame.f_locals["out_carry_unflat"])
    if before == after:  # the carries differ only in their arrays
        _call_again(frame, _CARRY_NOTE, value)


def _check_update(frame: FrameType, value: Any) -> None:
    """Raise an error if `optax.apply_updates` would replace quantized weights by a dense array.

    `frame` is the frame of the JAX function that compares the tree of `value` with its update.
    """
    variables = frame.f_locals
    if variables["prefix_tree"] is value and type(variables["full_tree"]) is not type(value):
        callers = {(f.f_globals.get("__name__"), f.f_code.co_name) for f in frames_from(frame)}
        if ("optax._src.update", "apply_updates") in callers and _has_quantized_array(value):
            raise_error = _with_note(_raise_update_error, "", value)  # the message is complete
            raise_error("optax.apply_updates", value)


def _call_again(frame: FrameType, note: str, value: Any) -> None:
    """Call the JAX function of a frame again with its arguments, to raise its error with a note.

    `value` is the implicit array that the note names.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    call = _with_note(frame.f_globals[code.co_name], note, value)
    call(*[frame.f_locals[name] for name in names])


class _CallerError(BaseException):
    """A wrapper of an error of JAX that must leave `suppress(Exception)` in `_run_check`."""


def _with_note(check: Callable, note: str, value: Any) -> Callable[..., None]:
    """Return a function that calls `check` and raises its error as a `_CallerError`.

    If `note` is not empty, it is added to the error, with the text of `value` in place of `{}`.
    """

    def call(*args: Any) -> None:
        try:
            check(*args)
        except (TypeError, ValueError) as error:
            if note:
                error.add_note(note.format(repr(value)))
            raise _CallerError from error

    return call


_Checks = dict[tuple[str, str], Callable[[FrameType, Any], None]]

# Our check for each calling function. The keys are pairs of a module and a function name.
_LOOPS = "jax._src.lax.control_flow.loops"
_WHEN_FLATTENED: _Checks = {
    ("jax._src.api", "value_and_grad_f"): _check_dtypes,
    ("jax._src.api", "jacfun"): _check_dtypes,
    (_LOOPS, "scan"): _check_scanned_sizes,
    (_LOOPS, "scan_nocarry"): _check_scanned_sizes,
    ("jax._src.tree_util", "_prefix_error"): _check_update,
}
_WHEN_UNFLATTENED: _Checks = {
    ("jax._src.api", "_mapped_axis_size"): _check_mapped_sizes,
    (_LOOPS, "_check_carry_type"): _check_carry,
}
# The functions of JAX between a calling function and our flatten or unflatten functions.
_TREE_FUNCTIONS = frozenset("tree_flatten tree_unflatten tree_map map flatten unflatten".split())
_CALLERS = _TREE_FUNCTIONS.union(name for _, name in _WHEN_FLATTENED | _WHEN_UNFLATTENED)

_running = threading.local()


def check_caller(value: Any, *, flattened: bool) -> None:
    """Raise the error that a calling function of JAX is about to raise for `value`, with a note.

    Do nothing if the calling function would raise no error. The functions that flatten
    (`flattened=True`) and unflatten the implicit array `value` call this function. It adds 0.1 to
    0.6 us per implicit array to each call of a compiled function.
    """
    try:
        # Skip this function, our flatten or unflatten function, and the tree function of JAX.
        frame = sys._getframe(3)
    except ValueError:  # JAX calls us from C++, without a tree function in Python
        return
    if frame.f_code.co_name in _CALLERS and not getattr(_running, "check", False):
        _run_check(frame, value, _WHEN_FLATTENED if flattened else _WHEN_UNFLATTENED)


def _run_check(frame: FrameType, value: Any, checks: _Checks) -> None:
    """Run the check in `checks` for the JAX function that flattens or unflattens `value`, if any.

    Search this function from `frame` outward.
    """
    frame = next(f for f in frames_from(frame) if f.f_code.co_name not in _TREE_FUNCTIONS)
    check = checks.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    if check is None:
        return
    _running.check = True  # because the check also flattens values
    try:
        with suppress(Exception):  # this version of JAX has other functions or variables
            check(frame, value)
    except _CallerError as wrapper:
        raise wrapper.__cause__ from None  # type: ignore[misc]
    finally:
        _running.check = False


_UPDATE_FUNCTIONS = {  # modules with a function that adds an update to each parameter
    "equinox._update": "equinox.apply_updates",
    "optax._src.update": "optax.apply_updates",
}


def reject_dense_update(parameter: Any, primitive: str = "") -> None:
    """Raise an error if `apply_updates` of Equinox or optax adds to a quantized weight.

    The sum would be dense and would replace the weight.

    **Arguments:**

    - `parameter`: the left operand of the sum.
    - `primitive`: the name of the primitive that is about to materialize the operand. "" if the
      caller is the operator `+`.
    """
    if primitive:
        names = _UPDATE_FUNCTIONS if primitive == "add" else ()
        modules = [name for name in names if name in sys.modules and frame_of(name)]
    else:
        frame = calling_frame(sys._getframe(1), ("veneer", "jaxtyping", "beartype"))
        modules = [name for name in _UPDATE_FUNCTIONS if name == frame.f_globals.get("__name__")]
    if modules and _has_quantized_array(parameter):
        _raise_update_error(_UPDATE_FUNCTIONS[modules[0]], parameter)


def calling_frame(frame: FrameType, packages: tuple[str, ...]) -> FrameType:
    """Return the first frame, from `frame` outward, whose module is in none of the `packages`."""
    is_inside = lambda f: f.f_globals.get("__name__", "").startswith(packages)
    return next((f for f in frames_from(frame) if not is_inside(f)), frame)


def frame_of(module: str) -> FrameType | None:
    """Return the innermost frame of a function of a module, or None if none is running."""
    is_of_module = lambda f: f.f_globals.get("__name__") == module
    return next(filter(is_of_module, frames_from(sys._getframe(1))), None)


def warn_of_scales_without_codes(value: Any) -> None:
    """Warn if `equinox.filter_grad` differentiates with respect to the scales of a quantized array.

    `filter_grad` selects floating leaves, so the integer codes get no gradient. The warning has the
    line of the call of `filter_grad`, so that Python shows it once per call site.
    """
    # A tracer of a `vn.hijax` type has the attribute too, but its tangent includes the codes.
    is_quantized = lambda x: getattr(x, "dense_tangent", False) and not isinstance(x, Tracer)
    for part in filter(is_quantized, jax.tree.leaves(value, is_leaf=is_quantized)):
        if not any(map(is_differentiated, jax.tree.leaves(part))):
            continue
        if frame := frame_of("equinox._ad"):
            frame = calling_frame(frame, ("equinox", "jax"))
            warnings.warn_explicit(
                "equinox.filter_grad differentiates with respect to every floating leaf, so the "
                f"scales of a {type(part).__name__} would be trained without its codes. "
                "Differentiate with respect to the first tree of "
                "vn.tree.partition(model, vn.trainable(model)).",
                UserWarning,
                frame.f_code.co_filename,
                frame.f_lineno,
            )
