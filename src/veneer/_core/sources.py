"""The sources of an implicit value: the paths of the weights that the value comes from.

A *weight* is an implicit array that the program is given: an argument, a captured variable, or an
array that the program finds in a container or builds from parts. Slices, transposes and results of
the same shape (`2 * w`) still count as the weight, also inside loops, branches and functions. All
other implicit arrays are intermediates: embedding rows, products, quantized activations.

An attribute of the value holds its sources as one tuple, a `Source`, while a policy or a report
needs them. Tree functions drop the attribute, so code that flattens values and rebuilds them calls
`keep_sources`. A value that the program builds gets the sources of its largest leaf: the weight of
which the leaf is a part, or `FOUND`, a weight without a name, if a traced program closes over it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np

from .._jax.tracing import ConcreteArray, is_staged, primal_of
from .policy import ALLOW, FOUND, Source, current_policy, join_sources, set_variable
from .value import Value, is_opaque_leaf, is_part, is_value, source_of

T = TypeVar("T")
S = TypeVar("S", bound=Sequence)

#: Primitives that move elements and may change the shape.
_MOVES = frozenset(
    "all_gather all_to_all broadcast_in_dim concatenate expand_dims pad reshape select_n split "
    "squeeze stack transpose unstack".split()
)
_PRODUCTS = frozenset(("dot_general", "ragged_dot_general", "conv_general_dilated"))
_leaf_sources: ContextVar[Mapping[int, Source]] = ContextVar(
    "leaf_sources", default=MappingProxyType({})
)


def leaf_sources(items: Iterable[tuple[Any, Source]]) -> AbstractContextManager[None]:
    """Return a context in which `find_source` knows the weights from which some leaves come.

    `items` are pairs of a tree of leaves and the paths of the weights. The caller must keep the
    trees alive, because leaves are found by their `id`.
    """
    sources = {id(leaf): source for tree, source in items for leaf in jax.tree.leaves(tree)}
    return set_variable(_leaf_sources, sources)


def find_source(x: Any) -> Source:
    """Return the paths of the weights from which an implicit array or a leaf comes.

    Return an empty tuple if it comes from no weight, or if no report needs the paths.
    """
    if (source := source_of(x)) or current_policy() is ALLOW:
        return source
    if isinstance(x, Value):
        return find_source(max(jax.tree.leaves(x), key=np.size, default=None))
    array = primal_of(x)
    if source := _leaf_sources.get().get(id(array), ()):
        return source
    # A concrete array in a traced program belongs to a weight that is not an argument.
    is_found_weight = isinstance(array, ConcreteArray) and is_staged()
    return (FOUND,) if is_found_weight else ()


def with_source(value: Any, source: Source) -> Any:
    """Record the paths of the weights from which an implicit array comes, and return the array.

    Also record the paths for the implicit arrays in its fields. Do nothing if `source` is empty or
    `value` is a dense array.
    """
    if source and isinstance(value, Value):
        object.__setattr__(value, "_source", source)
        for part in jax.tree.leaves(value, is_leaf=is_part(value)):
            with_source(part, source)
    return value


def tag_sources(tree: T) -> T:
    """Return a tree whose implicit arrays record the paths of the weights from which they come."""

    def tag(x: Any) -> Any:
        if not isinstance(x, Value) or source_of(x) or not (source := find_source(x)):
            return x
        copy = jax.tree.map(lambda leaf: leaf, x)  # do not change the caller's object
        return with_source(copy, source)

    return tree if current_policy() is ALLOW else jax.tree.map(tag, tree, is_leaf=is_opaque_leaf)


def keep_sources(before: Sequence[Any], after: S) -> S:
    """Copy the recorded paths of weights from each array `before[i]` to `after[i]`.

    These paths name the weights from which an array comes. Return `after`.
    """
    return restore_sources(map(source_of, before), after)


def restore_sources(sources: Iterable[Source], values: S) -> S:
    """Record `sources[i]`, paths of weights, in the array `values[i]`, and return `values`.

    These paths name the weights from which an array comes. A function that JAX calls later holds
    the paths instead of the arrays, because tracers must not outlive their trace.
    """
    for source, value in zip(sources, values, strict=True):
        with_source(value, source)
    return values


def propagate_sources(
    primitive: str, values: Sequence[Any], params: Mapping[str, Any], out: Any
) -> None:
    """Record the weight paths of operands in results that count as the same weight, like `w.T`.

    `values` are the operands of a primitive, and `out` is its result or the list of its results. If
    there are as many results as operands, each result comes from the operand at its index.
    Otherwise, each result may come from all operands.
    """
    is_same_weight = lambda x, v: is_value(v) and _counts_as_weight(x, v, primitive, params)
    results = out if isinstance(out, (list, tuple)) else [out]
    for i, x in enumerate(results):
        if isinstance(x, Value) and not any(x is v for v in values):
            operands = [values[i]] if len(results) == len(values) else values
            with_source(x, join_sources(source_of(v) for v in operands if is_same_weight(x, v)))


def _counts_as_weight(
    result: Value, operand: Value, primitive: str, params: Mapping[str, Any]
) -> bool:
    """Return whether a result of a primitive counts as the same weight as an operand."""
    old, new = operand.aval().shape, result.aval().shape
    if primitive in ("gather", "dynamic_slice", "slice"):
        # A part of a weight is a weight, unless it is a row of a matrix, as of an embedding.
        is_row_of_matrix = _is_matrix(old) and not _is_matrix(params.get("slice_sizes", new))
        return not is_row_of_matrix
    return primitive in _MOVES or (primitive not in _PRODUCTS and new == old)


def _is_matrix(shape: Sequence[int]) -> bool:
    """Return whether an array of this shape has two or more axes longer than 1."""
    return sum(n not in (0, 1) for n in shape) > 1
