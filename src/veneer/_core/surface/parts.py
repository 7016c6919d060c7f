"""Values that stand for no array: parts, derivatives, and those of which a leaf is no number.

And those of which a part is differentiated by, though nobody chose it.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax

from ..._jax.tracing import is_differentiated, is_eager
from ..value import (
    DEFECTS,
    Value,
    check_structure,
    is_value,
    is_whole,
    stands_for,
)
from .mistakes import calling_frame, frame_of, refuse_derivatives


def refuse_part(value: Value) -> None:
    """Refuses a value that lacks leaves, or holds derivatives, where an array is asked for."""
    refuse_derivatives(value)
    if not is_whole(value):
        raise TypeError(
            f"{value!r} has None instead of some arrays. If it is one part of a partitioned tree, "
            "combine the parts with vn.tree.combine before you compute with it."
        )
    if not is_eager():
        _check_mapped_leaves(value)


def _check_mapped_leaves(value: Value) -> None:
    """Run the checks of a class on a copy without data: they may need data, or assign fields."""
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda x: x is not value and is_value(x))
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") and not is_value(x) for x in leaves):
        return
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    with suppress(TypeError):  # metadata that cannot be hashed is refused elsewhere
        if stands_for(tree, avals) is not None:
            return
    try:
        with suppress(*DEFECTS):
            jax.eval_shape(partial(check_structure, tree), *avals)
    except Exception as error:  # whatever a class raises
        refuse_leaves([value], error)
        error.add_note(
            f"This {type(value).__name__} may have been mapped leaf by leaf. To map the array, "
            "call the function that takes it as an argument under vn.implicit."
        )
        raise


def refuse_leaves(values: Sequence[Any], error: Exception | None = None) -> None:
    """Refuses values of which a leaf, or its type, is of no numbers."""
    for value in filter(is_value, values):
        what, leaves = "", jax.tree.leaves(value)
        if any(isinstance(x, jax.Ref | jax.ref.AbstractRef) for x in leaves):
            what = "a jax.Ref for each leaf"
        elif jax.dtypes.float0 in [getattr(x, "dtype", None) for x in leaves]:
            what = "derivatives of its leaves (float0 for integers)"
        if what:
            raise TypeError(
                f"This {type(value).__name__} holds {what}, so it does not represent an array. "
                "Compute on its leaves with jax.tree.map."
            ) from error


def warn_of_leaves_by_dtype(value: Value) -> None:
    """Warn if `equinox.filter_grad` differentiates with respect to scales without their codes.

    The warning is at the call of `filter_grad`, so that Python shows it once.
    """
    for part in filter(is_value, jax.tree.leaves(value, is_leaf=_has_dense_tangent)):
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


def _has_dense_tangent(x: Any) -> bool:
    return isinstance(x, Value) and x.dense_tangent
