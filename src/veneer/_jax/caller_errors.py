"""Add notes to errors that JAX and optax raise for implicit arrays outside `implicit`.

Outside `implicit`, an implicit array is a pytree. `jax.grad`, `jax.vmap`, `jax.lax.scan` and
`optax.apply_updates` check its leaves, and raise an error about integers, sizes or structures. But
first, they flatten or unflatten the array, for the check or for the message. Our flatten and
unflatten functions call `check_caller`. It looks at the frame of the calling function, runs the
check of that function early, adds a note with the remedy to its error, and raises the error.

JAX is not patched. If a version of JAX renames a function or a variable, the error has no note.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np

_GRADIENT = (
    "{} has integer or boolean leaves, such as codes of quantized weights. Differentiate with "
    "respect to the dense array, vn.implicit(jax.grad(f)), or add adapters with "
    "vn.lora.init_tree and train the second tree of vn.lora.split."
)
_MAP = (
    "{} was mapped leaf by leaf, and its leaves differ in size. Move the transformation inside "
    "vn.implicit, as in vn.implicit(lambda x: jax.vmap(f)(x))(x), to map the array itself."
)
_CARRY = (
    "An implicit array, {}, is in only one of them. Move the loop inside vn.implicit, as in "
    "vn.implicit(lambda x: jax.lax.fori_loop(0, 3, f, x))(x), to carry arrays of any type."
)


def raise_update_error(function: str, value: Any) -> NoReturn:
    """Raise the error for a function that would replace quantized weights by a dense array."""
    raise TypeError(
        f"{function}: quantized weights cannot be updated, and {value!r} would be replaced by a "
        "dense array. Update the first tree of vn.tree.partition(model, vn.trainable(model)), or "
        "add adapters with vn.lora.init_tree and update the second tree of vn.lora.split."
    )


def has_quantized_array(value: Any) -> bool:
    """Return whether a value, or an array in its fields, is quantized."""
    is_quantized = lambda x: getattr(x, "dense_tangent", False)
    return any(map(is_quantized, jax.tree.leaves(value, is_leaf=is_quantized)))


def _check_dtypes(frame: FrameType, value: Any) -> None:
    names, function = frame.f_locals, frame.f_code.co_name
    if "ans" in names or "y" in names:  # JAX has checked the arguments and flattens the results
        return
    reverse = "allow_int" in names
    mode = "grad" if function == "value_and_grad_f" else "jacrev" if reverse else "jacfwd"
    options = ["holomorphic", "allow_int"] if reverse else ["holomorphic"]
    check = _with_note(frame.f_globals[f"_check_input_dtype_{mode}"], _GRADIENT, value)
    for leaf in jax.tree.leaves(value):
        if np.dtype(leaf.dtype).kind in "biu":
            check(*[names[option] for option in options], leaf)


def _check_scanned_sizes(frame: FrameType, value: Any) -> None:
    names, leaves = frame.f_locals, jax.tree.leaves(value)
    if "xs_flat" in names or (frame.f_code.co_name == "scan" and "init_flat" not in names):
        return  # JAX flattens a carry or a result, and their leaves may have any size
    if len({np.shape(leaf)[:1] for leaf in leaves}) > 1:
        check = _with_note(frame.f_globals["_infer_scan_length"], _MAP, value)
        check(leaves, list(map(jax.typeof, leaves)), names["length"])


def _check_mapped_sizes(frame: FrameType, value: Any) -> None:
    leaves = {id(leaf) for leaf in jax.tree.leaves(value)}
    mapped = zip(frame.f_locals["vals"], frame.f_locals["dims"], strict=True)
    sizes = {np.shape(x)[axis] for x, axis in mapped if id(x) in leaves and axis is not None}
    if len(sizes) > 1:
        _call_again(frame, _MAP, value)


def _check_carry(frame: FrameType, value: Any) -> None:
    carries = frame.f_locals["in_carry"].unflatten(), frame.f_locals["out_carry_unflat"]
    structures: list[Any] = [
        jax.tree.structure(x, is_leaf=lambda x: type(x) is type(value)) for x in carries
    ]
    if structures[0] == structures[1]:  # the carries differ only in their arrays
        _call_again(frame, _CARRY, value)


def _check_update(frame: FrameType, value: Any) -> None:
    names = frame.f_locals
    if names["prefix_tree"] is value and type(names["full_tree"]) is not type(value):
        callers = {(f.f_globals.get("__name__"), f.f_code.co_name) for f in _frames(frame)}
        if ("optax._src.update", "apply_updates") in callers and has_quantized_array(value):
            _with_note(raise_update_error, "", value)("optax.apply_updates", value)


def _call_again(frame: FrameType, note: str, value: Any) -> None:
    """Call the function of a frame again with its current arguments, for the same error."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    call = _with_note(frame.f_globals[code.co_name], note, value)
    call(*[frame.f_locals[name] for name in names])


class _CallerError(BaseException):
    """A carrier of the error of a calling function. `suppress(Exception)` does not stop it."""


def _with_note(check: Callable, note: str, value: Any) -> Callable[..., None]:
    """Return a function that calls a check and adds a note, unless it is "", to its error."""

    def call(*args: Any) -> None:
        try:
            check(*args)
        except (TypeError, ValueError) as error:
            if note:
                error.add_note(note.format(repr(value)))
            raise _CallerError from error

    return call


_Checks = dict[tuple[str, str], Callable[[FrameType, Any], None]]

# Our check for each calling function, by its module and name.
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
    """Raise the error that a calling function is about to raise for a value, with a note.

    The functions that flatten and unflatten values call this. It adds 0.1 to 0.6 us per implicit
    array to each call of a compiled function, which flattens its arguments.
    """
    try:
        # Skip this function, our flatten or unflatten function, and the tree function of JAX.
        frame = sys._getframe(3)
    except ValueError:  # JAX calls us from C++, without a tree function in Python
        return
    if frame.f_code.co_name in _CALLERS and not getattr(_running, "check", False):
        _raise_error(frame, value, _WHEN_FLATTENED if flattened else _WHEN_UNFLATTENED)


def _raise_error(frame: FrameType, value: Any, checks: _Checks) -> None:
    frame = next(f for f in _frames(frame) if f.f_code.co_name not in _TREE_FUNCTIONS)
    check = checks.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    if check is None:
        return
    _running.check = True
    try:
        with suppress(Exception):  # this version of JAX has other functions or variables
            check(frame, value)
    except _CallerError as carrier:
        raise carrier.__cause__ from None  # type: ignore[misc]
    finally:
        _running.check = False


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_UPDATES = {"equinox._update": "equinox.apply_updates", "optax._src.update": "optax.apply_updates"}


def reject_dense_update(parameter: Any, primitive: str = "") -> None:
    """Reject an update of quantized weights by a dense array, which would replace them.

    The functions of `_UPDATES` add an update to a parameter. Call this with the left operand of a
    sum, from its operator, or with the name of the primitive that materializes its operands.
    """
    if primitive:
        callers = [m for m in _UPDATES if primitive == "add" and m in sys.modules and frame_of(m)]
    else:
        frame = calling_frame(sys._getframe(1), ("veneer", "jaxtyping", "beartype"))
        callers = [m for m in _UPDATES if m == frame.f_globals.get("__name__")]
    if callers and has_quantized_array(parameter):
        raise_update_error(_UPDATES[callers[0]], parameter)


def calling_frame(frame: FrameType, packages: tuple[str, ...]) -> FrameType:
    """Return the innermost frame, from this one on, of a function outside of some packages."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(packages):
        frame = frame.f_back
    return frame


def frame_of(module: str) -> FrameType | None:
    """Return the innermost frame of a function of a module, or None if none is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame
