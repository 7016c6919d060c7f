"""Labels: types whose only leaf is the dense array, with metadata such as a unit or a tag.

The tangent, cotangent and sharding of a label are the same as for its leaf, with the same metadata.
So none of them materializes the label.
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
    """Return whether a value has one leaf, and the leaf is the dense array. It may be abstract.

    The leaf must have the shape and dtype of the value, and `materialise` must return the leaf or
    raise an error. The class attribute `is_label` overrides the check of `materialise`.
    """
    return isinstance(value, Value) and _kind(value) != "other"


def has_no_dense_form(value: Any) -> bool:
    """Return whether a value is a label whose `materialise` raises an error."""
    return isinstance(value, Value) and _kind(value) == "raises"


def can_become_label(x: Any, label: Value) -> bool:
    """Return whether a dense array can be converted to a label of the same type as `label`.

    An array of zeros can, because it is zero in any unit. Any array can if the label has no
    metadata and cannot be materialized.
    """
    return is_zero(x) or (not has_metadata(label) and has_no_dense_form(label))


def dense_unless(
    keep: Callable[[Any], bool], primitive: Primitive, values: Sequence[Any]
) -> list[Any]:
    """Return the values. Those for which `keep` returns False are materialized and reported."""
    dense = iter(make_dense(primitive, [v for v in values if not keep(v)]))
    return [v if keep(v) else next(dense) for v in values]


def _kind(value: Value) -> str:
    """Return "returns leaf" or "raises" for a label, by its `materialise`. Otherwise "other"."""
    leaves, treedef = jax.tree.flatten(value)
    if len(leaves) != 1 or type(value).is_label is False:
        return "other"
    leaf, aval = jax.typeof(leaves[0]), value.aval()
    if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
        return "other"
    kind = _kind_by_materialise(treedef, leaf)
    return "returns leaf" if kind == "other" and type(value).is_label else kind


@lru_cache(maxsize=4096)
def _kind_by_materialise(treedef: Any, leaf: Any) -> str:
    """Trace `materialise` for a value with one leaf, and return the kind of the value."""
    kind = "other"

    def find_kind(x: jax.Array) -> None:
        nonlocal kind
        try:
            if jax.tree.unflatten(treedef, [x]).materialise() is x:
                kind = "returns leaf"
        except CHECK_BUGS:
            pass
        except Exception:  # a type that cannot be materialized may raise anything
            kind = "raises"

    jax.eval_shape(find_kind, leaf)
    return kind
