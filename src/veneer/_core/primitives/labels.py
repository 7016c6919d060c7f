"""Labels: types whose only leaf is the dense array, with metadata such as a unit or a tag.

A label has the tangent, cotangent and sharding of its leaf, with the same metadata. So derivatives
and shardings do not materialize a label.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax

from ..._jax.known_values import is_zero
from ..._jax.primitives import Primitive
from ..errors import CHECK_BUGS
from ..tree import has_metadata
from ..value import Value, make_dense


def is_label(value: Any) -> bool:
    """Return whether a value is a label: it has one leaf, which is the dense array.

    The leaf may be abstract. It must have the shape and dtype of the value, and `materialise` must
    return the leaf or raise an error. The class attribute `is_label` overrides the check of
    `materialise`.
    """
    return isinstance(value, Value) and _label_kind(value) != "other"


def has_no_dense_form(value: Any) -> bool:
    """Return whether a value is a label (see `is_label`) that cannot be materialized."""
    return isinstance(value, Value) and _label_kind(value) == "raises"


def can_become_label(x: Any, label: Value) -> bool:
    """Return whether a dense array can be converted to a label of the same type as `label`.

    An array of zeros can, because it is zero in any unit. Any array can if the label has no
    metadata and cannot be materialized.
    """
    return is_zero(x) or (not has_metadata(label) and has_no_dense_form(label))


def dense_unless(
    keep: Callable[[Any], bool], primitive: Primitive, values: Sequence[Any]
) -> list[Any]:
    """Return all values, but materialize and report those for which `keep` returns False."""
    dense = iter(make_dense(primitive, [v for v in values if not keep(v)]))
    return [v if keep(v) else next(dense) for v in values]


def _label_kind(value: Value) -> str:
    """Return what `materialise` of a label does: "returns leaf" or "raises". Else "other"."""
    leaves, treedef = jax.tree.flatten(value)
    if len(leaves) != 1 or type(value).is_label is False:
        return "other"
    leaf, aval = jax.typeof(leaves[0]), value.aval()
    if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
        return "other"
    kind = _find_label_kind(treedef, leaf)
    return "returns leaf" if kind == "other" and type(value).is_label else kind


@lru_cache(maxsize=4096)
def _find_label_kind(treedef: Any, leaf: Any) -> str:
    """Trace `materialise` of a value with one leaf. Return the same as `_label_kind`."""
    kind = "other"

    def trace_materialise(x: jax.Array) -> None:
        nonlocal kind
        try:
            if jax.tree.unflatten(treedef, [x]).materialise() is x:
                kind = "returns leaf"
        except CHECK_BUGS:
            pass
        except Exception:  # a type that cannot be materialized may raise anything
            kind = "raises"

    jax.eval_shape(trace_materialise, leaf)
    return kind
