"""Labels: types whose one leaf is the dense array itself, with metadata beside it (a unit, a tag).

The dense array of a label moves as its leaf does. So its tangents, cotangents and shardings are
those of the leaf, with the same metadata, and none of them needs the dense array.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax

from ..._jax.known_values import is_zero
from ..._jax.primitives import Primitive
from ..tree import has_metadata
from ..value import CHECK_BUGS, Value, make_dense


def is_label(value: Any) -> bool:
    """Whether a value is a label, by what its type says or by what `materialise` does.

    It is if it has one leaf, of its own shape and dtype, and `materialise` returns that. A type
    whose `materialise` refuses, with an error, has no other dense form than its leaf; one whose
    leaf is something else says so, by `is_label = False`; one whose `materialise` copies its leaf
    may say True. The leaf may be abstract.
    """
    return isinstance(value, Value) and _kind(value) != "other"


def refuses_to_be_dense(value: Any) -> bool:
    """Whether a value is a label whose `materialise` raises an error."""
    return isinstance(value, Value) and _kind(value) == "refuses"


def may_be_labelled(x: Any, example: Value) -> bool:
    """Whether a dense array may be taken for a label as `example` is, where the two must agree.

    A zero may: it is zero in any unit. Another array may if the label has no metadata, so that
    nothing is claimed of the array, and the two could not meet at the dense form.
    """
    if is_zero(x):
        return True
    return not has_metadata(example) and refuses_to_be_dense(example)


def dense_unless(
    keep: Callable[[Any], bool], primitive: Primitive, values: Sequence[Any]
) -> list[Any]:
    """The values, with those made dense, visibly, for which `keep` does not hold."""
    dense = iter(make_dense(primitive, [v for v in values if not keep(v)]))
    return [v if keep(v) else next(dense) for v in values]


def _kind(value: Value) -> str:
    leaves, treedef = jax.tree.flatten(value)
    if len(leaves) != 1 or type(value).is_label is False:
        return "other"
    leaf, aval = jax.typeof(leaves[0]), value.aval()
    if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
        return "other"
    kind = _kind_of(treedef, leaf)
    return "holds" if kind == "other" and type(value).is_label else kind


@lru_cache(maxsize=4096)
def _kind_of(treedef: Any, leaf: Any) -> str:
    kind = "other"

    def dense(x: jax.Array) -> None:
        nonlocal kind
        try:
            kind = "holds" if jax.tree.unflatten(treedef, [x]).materialise() is x else "other"
        except CHECK_BUGS:
            kind = "other"
        except Exception:  # whatever a type raises that refuses to be dense
            kind = "refuses"

    jax.eval_shape(dense, leaf)
    return kind
