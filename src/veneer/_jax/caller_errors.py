"""Advice on errors that JAX and optax raise for an implicit array outside `implicit`.

There, an implicit array is a pytree. `jax.grad`, `jax.vmap`, `jax.lax.scan` and
`optax.apply_updates` check its leaves, and raise an error about integers, sizes or structures
before they call any function of ours. But they flatten the array before the check, or flatten or
unflatten it for the message. At that moment `check_caller` asks the calling function's own
check for the error, adds a note with the remedy, and raises it.

JAX is not patched. If a version of it renames a function or a variable, its error has no note.
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


def refuse_update(function: str, value: Any) -> NoReturn:
    """Raise the error of a function that would replace quantized weights by a dense array."""
    raise TypeError(
        f"{function}: quantized weights cannot be updated, and {value!r} would be replaced by a "
        "dense array. Update the first tree of vn.tree.partition(model, vn.trainable(model)), or "
        "add adapters with vn.lora.init_tree and update the second tree of vn.lora.split."
    )


def holds_codes(value: Any) -> bool:
    """Return whether a value is quantized, or an array among its fields is."""
    is_quantized = lambda x: getattr(x, "dense_tangent", False)
    return any(map(is_quantized, jax.tree.leaves(value, is_leaf=is_quantized)))


def _check_dtypes(frame: FrameType, value: Any) -> None:
    names, function = frame.f_locals, frame.f_code.co_name
    if "ans" in names or "y" in names:  # results are flattened, and the arguments are checked
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
        return  # a carry or a result is flattened, whose leaves may have any size
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
    if structures[0] == structures[1]:  # they differ in arrays alone
        _call_again(frame, _CARRY, value)


def _check_update(frame: FrameType, value: Any) -> None:
    names = frame.f_locals
    if names["prefix_tree"] is value and type(names["full_tree"]) is not type(value):
        callers = {(f.f_globals.get("__name__"), f.f_code.co_name) for f in _frames(frame)}
        if ("optax._src.update", "apply_updates") in callers and holds_codes(value):
            _with_note(refuse_update, "", value)("optax.apply_updates", value)


def _call_again(frame: FrameType, note: str, value: Any) -> None:
    """Call a function again, with the arguments that it has: it raises the same error."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    call = _with_note(frame.f_globals[code.co_name], note, value)
    call(*[frame.f_locals[name] for name in names])


class _Found(BaseException):
    """The error of a calling function, which `suppress(Exception)` lets pass."""


def _with_note(check: Callable, note: str, value: Any) -> Callable[..., None]:
    """Return a function that calls a check, and adds a note to its error."""

    def call(*args: Any) -> None:
        try:
            check(*args)
        except (TypeError, ValueError) as error:
            if note:
                error.add_note(note.format(repr(value)))
            raise _Found from error

    return call


_Checks = dict[tuple[str, str], Callable[[FrameType, Any], None]]

# By module and name of the calling function: its check of an array.
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
# Functions of trees, which call each other.
_TREE_FUNCTIONS = frozenset("tree_flatten tree_unflatten tree_map map flatten unflatten".split())
_CALLERS = _TREE_FUNCTIONS.union(name for _, name in _WHEN_FLATTENED | _WHEN_UNFLATTENED)

_running = threading.local()


def check_caller(value: Any, *, flattened: bool) -> None:
    """Raise the error that the calling function is about to raise for a value, with a note.

    Call it from the function that flattens or unflattens values. Each call of a compiled function
    flattens its arguments, and this adds 0.1 to 0.6 us for each.
    """
    try:
        # The caller of a function of trees, which calls the one that flattens, which calls this.
        frame = sys._getframe(3)
    except ValueError:  # compiled functions flatten their arguments without a function of trees
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
        with suppress(Exception):  # the caller differs from what its check expects
            check(frame, value)
    except _Found as found:
        raise found.__cause__ from None  # type: ignore[misc]
    finally:
        _running.check = False


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
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
    if callers and holds_codes(parameter):
        refuse_update(_UPDATES[callers[0]], parameter)


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
