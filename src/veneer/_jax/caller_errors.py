"""Advice on errors that JAX and optax raise for an implicit array outside `implicit`.

There, an implicit array is a pytree. `jax.grad`, `jax.vmap`, `jax.lax.scan` and
`optax.apply_updates` check its leaves, and raise an error about integers, sizes or structures
before they call any function of ours. But they flatten the array before the check, or unflatten it
for the message. At that moment `raise_error_of_caller` runs the check of the calling function, and
adds a note with the remedy to its error. Nothing happens if the check passes.

JAX is not patched. If a version of it renames a function, its error comes without the note.
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import jax

_GRADIENT = (
    "{} has integer leaves, such as codes of quantized weights. Differentiate with respect to the "
    "dense array, vn.implicit(jax.grad(f)), or train adapters: vn.lora.split(params)."
)
_MAP = (
    "{} was mapped leaf by leaf. Move the transformation inside vn.implicit, which maps the array: "
    "vn.implicit(lambda x: jax.vmap(f)(x))(x)."
)
_CARRY = (
    "The carry is {}, and the body returns another type. Move the loop inside vn.implicit: "
    "vn.implicit(lambda x: jax.lax.scan(f, x, xs))(x)."
)


def refuse_update(function: str, value: Any) -> NoReturn:
    """Raise the error of a function that would replace quantized weights by a dense array."""
    raise TypeError(
        f"{function}: quantized weights cannot be updated, and {value!r} would be replaced by a "
        "dense array. Update the first tree of vn.tree.partition(model, vn.trainable(model)), or "
        "train adapters: vn.lora.split(model)."
    )


def _check_dtypes(frame: FrameType, value: Any) -> None:
    names, function = frame.f_locals, frame.f_code.co_name
    if "ans" in names or "y" in names:  # results are flattened, and the arguments are checked
        return
    reverse = "allow_int" in names
    mode = "grad" if function == "value_and_grad_f" else "jacrev" if reverse else "jacfwd"
    check = frame.f_globals[f"_check_input_dtype_{mode}"]
    options = ["holomorphic", "allow_int"] if reverse else ["holomorphic"]
    for leaf in jax.tree.leaves(value):
        check(*[names[option] for option in options], leaf)


def _check_scanned_sizes(frame: FrameType, value: Any) -> None:
    names = frame.f_locals
    if "xs_flat" in names or (frame.f_code.co_name == "scan" and "init_flat" not in names):
        return  # a carry or a result is flattened, whose leaves may have any size
    leaves = jax.tree.leaves(value)
    frame.f_globals["_infer_scan_length"](leaves, list(map(jax.typeof, leaves)), names["length"])


def _check_carry(frame: FrameType, value: Any) -> None:
    if frame.f_locals.get("out_carry_unflat") is not None:  # JAX catches errors before that
        _call_again(frame, value)


def _call_again(frame: FrameType, value: Any) -> None:
    """Call a function again, with the arguments that it has: it raises the same error."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    frame.f_globals[code.co_name](*[frame.f_locals[name] for name in names])


def _check_update(frame: FrameType, value: Any) -> None:
    params, updates = frame.f_locals["params"], frame.f_locals["updates"]
    tree: Any
    arrays, tree = jax.tree.flatten(params, is_leaf=lambda x: type(x) is type(value))
    try:
        pairs = list(zip(arrays, tree.flatten_up_to(updates), strict=True))
    except ValueError:  # the trees differ elsewhere, too
        return
    for array, update in pairs:
        structure: Any
        leaves, structure = jax.tree.flatten(update)
        floats0 = [x for x in leaves if x.dtype == jax.dtypes.float0]
        if array is value and (floats0 or structure != jax.tree.flatten(value)[1]):
            refuse_update("optax.apply_updates", value)


_Checks = dict[tuple[str, str], tuple[Callable[[FrameType, Any], None], str]]

# By module and name of the calling function: its check of an array, and the note on its error.
_LOOPS = "jax._src.lax.control_flow.loops"
_WHEN_FLATTENED: _Checks = {
    ("jax._src.api", "value_and_grad_f"): (_check_dtypes, _GRADIENT),
    ("jax._src.api", "jacfun"): (_check_dtypes, _GRADIENT),
    (_LOOPS, "scan"): (_check_scanned_sizes, _MAP.replace("vmap(f)(x)", "lax.scan(f, c, x)")),
    (_LOOPS, "scan_nocarry"): (_check_scanned_sizes, _MAP.replace("vmap(f)(x)", "lax.map(f, x)")),
    ("optax._src.update", "apply_updates"): (_check_update, ""),
}
_WHEN_UNFLATTENED: _Checks = {
    ("jax._src.api", "_mapped_axis_size"): (_call_again, _MAP),
    (_LOOPS, "_check_carry_type"): (_check_carry, _CARRY),
}
# Functions of trees, which call each other.
_TREE_FUNCTIONS = frozenset("tree_flatten tree_unflatten tree_map map flatten unflatten".split())
_CALLERS = _TREE_FUNCTIONS.union(name for _, name in _WHEN_FLATTENED | _WHEN_UNFLATTENED)

_running = threading.local()


def may_raise() -> bool:
    """Return whether the function that has a value flattened may raise an error, by its name.

    Each call of a compiled function flattens its arguments, and this adds 0.1 to 0.6 us for each.
    """
    try:
        # The caller of a function of trees, which calls the one that flattens, which calls this.
        return sys._getframe(3).f_code.co_name in _CALLERS
    except ValueError:  # compiled functions flatten their arguments without a function of trees
        return False


def raise_error_of_caller(value: Any, *, flattened: bool) -> None:
    """Raise the error that the calling function is about to raise for a value, with a note."""
    if getattr(_running, "check", False):
        return
    frame = sys._getframe(3)
    while frame.f_code.co_name in _TREE_FUNCTIONS and frame.f_back is not None:
        frame = frame.f_back
    key = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    check, note = (_WHEN_FLATTENED if flattened else _WHEN_UNFLATTENED).get(key, (None, ""))
    if check is None:
        return
    _running.check = True
    try:
        check(frame, value)
    except (TypeError, ValueError) as error:
        if note:
            error.add_note(note.format(repr(value)))
        raise
    finally:
        _running.check = False
