"""Labels: types whose one leaf is the dense array itself, with metadata beside it (a unit, a tag).

The dense array of a label moves as its leaf does. So its tangents, cotangents and shardings are
those of the leaf, with the same metadata, and none of them needs the dense array.
"""

from functools import lru_cache
from typing import Any

import jax

from .jax_internals import is_zero
from .value import Value


def is_label(value: Any) -> bool:
    """Whether a value is a label: it has one leaf, and `materialise` returns that.

    A type whose `materialise` refuses, with an error, has no other dense form than its leaf, if
    that has its shape and dtype. The leaf may be abstract.
    """
    return isinstance(value, Value) and _dense_form(value) in ("leaf", "refused")


def refuses_to_be_dense(value: Any) -> bool:
    """Whether a value is a label whose `materialise` raises an error."""
    return isinstance(value, Value) and _dense_form(value) == "refused"


def may_be_labelled(x: Any, example: Value) -> bool:
    """Whether a dense array may be taken for a label as `example` is, where the two must agree.

    A zero may: it is zero in any unit. Another array may if the label has no metadata, so that
    nothing is claimed of the array, and the two could not meet at the dense form.
    """
    if is_zero(x):
        return True
    structure: Any = jax.tree.structure(example)
    return structure.node_data()[1] == () and refuses_to_be_dense(example)


def _dense_form(value: Value) -> str:
    leaves, treedef = jax.tree.flatten(value)
    if len(leaves) != 1:
        return "other"
    leaf, aval = jax.typeof(leaves[0]), value.aval()
    if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
        return "other"
    return _dense_form_of(treedef, leaf)


@lru_cache(maxsize=4096)
def _dense_form_of(treedef: Any, leaf: Any) -> str:
    form = "other"

    def dense(x: jax.Array) -> None:
        nonlocal form
        try:
            form = "leaf" if jax.tree.unflatten(treedef, [x]).materialise() is x else "other"
        except Exception:  # whatever a type raises that refuses to be dense
            form = "refused"

    jax.eval_shape(dense, leaf)
    return form
