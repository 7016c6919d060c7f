"""The weights that an implicit value comes from, which reports and policies name.

A *weight* is an implicit array that the program is given: an argument, a captured variable, or an
array that the program finds in a container or builds from parts. Slices, transposes and results of
the same shape (`2 * w`) still count as the weight, also inside loops, branches and functions. All
other implicit arrays are intermediates: embedding rows, products, quantized activations.

The source of a value is an attribute that tree functions drop. So code that takes values apart and
rebuilds them calls `keep_sources`. The leaves of a value that the program builds also tell its
source: the largest leaf is a leaf of an argument, or a concrete array in a program that is being
traced. Sources are tracked only while a policy or a report needs them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np

from .._jax.tracing import ConcreteArray, is_staged, primal_of
from .event import FOUND, Source, join_sources
from .policy import ALLOW, current_policy
from .value import Value, is_opaque_leaf, is_part, is_value, source_of

T = TypeVar("T")
S = TypeVar("S", bound=Sequence)

_leaf_sources: ContextVar[Mapping[int, Source]] = ContextVar(
    "leaf_sources", default=MappingProxyType({})
)


@contextmanager
def leaf_sources(items: Iterable[tuple[Any, Source]]) -> Iterator[None]:
    """Register the leaves of some trees by identity. The caller must keep the trees alive."""
    known = {id(leaf): source for tree, source in items for leaf in jax.tree.leaves(tree)}
    token = _leaf_sources.set(known)
    try:
        yield
    finally:
        _leaf_sources.reset(token)


def find_source(x: Any) -> Source:
    """Return the source of a value or a leaf. Empty if no policy needs sources."""
    if (source := source_of(x)) or current_policy() is ALLOW:
        return source
    if isinstance(x, Value):
        return find_source(max(jax.tree.leaves(x), key=np.size, default=None))
    known = _leaf_sources.get().get(id(array := primal_of(x)), ())
    return known or ((FOUND,) if isinstance(array, ConcreteArray) and is_staged() else ())


def with_source(value: Any, source: Source) -> Any:
    """Give a new value, and the values in its fields, a source. Return the value."""
    if source and isinstance(value, Value):
        object.__setattr__(value, "_source", source)
        for part in jax.tree.leaves(value, is_leaf=is_part(value)):
            with_source(part, source)
    return value


def tag_sources(tree: T) -> T:
    """Give the implicit arrays of a tree their sources, if a policy needs them."""

    def tag(x: Any) -> Any:
        if not isinstance(x, Value) or source_of(x) or not (source := find_source(x)):
            return x
        return with_source(jax.tree.map(lambda leaf: leaf, x), source)  # a copy of the object

    return tree if current_policy() is ALLOW else jax.tree.map(tag, tree, is_leaf=is_opaque_leaf)


def keep_sources(before: Sequence[Any], after: S) -> S:
    """Give rebuilt values the sources of the values that they were built from."""
    for old, new in zip(before, after, strict=True):
        if new is not old:
            with_source(new, source_of(old))
    return after


def restore_sources(sources: Sequence[Source], values: S) -> S:
    """Give rebuilt values these sources.

    A function that JAX keeps in a program closes over the sources instead of the values, because
    the tracers of the values would outlive their trace.
    """
    for source, value in zip(sources, values, strict=True):
        with_source(value, source)
    return values


def propagate_sources(
    primitive: str, values: Sequence[Any], params: Mapping[str, Any], out: Any
) -> None:
    """Give the results of a primitive that are still weights the sources of its operands."""
    results = out if isinstance(out, (list, tuple)) else [out]
    for i, x in enumerate(results):
        if isinstance(x, Value) and not any(x is v for v in values):
            operands = [values[i]] if len(results) == len(values) else values
            weights = (v for v in operands if is_value(v) and _is_still(primitive, v, x, params))
            with_source(x, join_sources(map(source_of, weights)))


#: Primitives that move elements into another shape.
_MOVES = frozenset(
    "all_gather all_to_all broadcast_in_dim concatenate expand_dims pad reshape select_n split "
    "squeeze stack transpose unstack".split()
)
_PRODUCTS = frozenset(("dot_general", "ragged_dot_general", "conv_general_dilated"))


def _is_still(primitive: str, weight: Value, result: Value, params: Mapping[str, Any]) -> bool:
    old, new = weight.aval().shape, result.aval().shape
    if primitive in ("gather", "dynamic_slice", "slice"):
        # A matrix of a stack is a weight. The rows of a matrix are not, as of an embedding.
        return _is_matrix(params.get("slice_sizes", new)) or not _is_matrix(old)
    return primitive in _MOVES or (primitive not in _PRODUCTS and new == old)


def _is_matrix(shape: Sequence[int]) -> bool:
    return sum(n not in (0, 1) for n in shape) > 1
