"""Weights that no argument holds when a program starts: those that it finds, or puts together.

A program may come to an implicit array in a container, or in an object that it calls; and it may
put one together of parts (`vn.tree.combine`, `equinox.combine`). Such a value may have been through
functions of trees, as all are that `jax.jit` is called with, so its leaves tell, the largest for
all: it is that of an argument, or an array that is known while all that is computed is traced.
Where a program computes at once a known array tells nothing, and the value is one in passing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np

from ..._jax.tracing import ConcreteArray, is_staged, primal_of
from ..policy import ALLOW, current_policy
from ..value import Value, is_kept, is_part, source_of
from .event import FOUND, Source

T = TypeVar("T")

_leaf_sources: ContextVar[Mapping[int, Source]] = ContextVar(
    "leaf_sources", default=MappingProxyType({})
)


@contextmanager
def leaves_from(items: Iterable[tuple[Any, Source]]) -> Iterator[None]:
    """Within, an array is known for one of these trees', which the caller keeps alive."""
    known = {id(leaf): source for tree, source in items for leaf in jax.tree.leaves(tree)}
    token = _leaf_sources.set(known)
    try:
        yield
    finally:
        _leaf_sources.reset(token)


def origin_of(x: Any) -> Source:
    """The weights that a value, or a leaf, is or is made of; nothing where nobody asks."""
    if (source := source_of(x)) or current_policy() is ALLOW:
        return source
    if isinstance(x, Value):
        return origin_of(max(jax.tree.leaves(x), key=np.size, default=None))
    known = _leaf_sources.get().get(id(array := primal_of(x)), ())
    return known or ((FOUND,) if isinstance(array, ConcreteArray) and is_staged() else ())


def with_source(value: Any, source: Source) -> Any:
    """The value, which was just made and now bears a source, as do the values that it holds."""
    if source and isinstance(value, Value):
        object.__setattr__(value, "_source", source)
        for part in jax.tree.leaves(value, is_leaf=is_part(value)):
            with_source(part, source)
    return value


def found(tree: T) -> T:
    """The tree, in which the implicit arrays bear their sources."""
    return tree if current_policy() is ALLOW else jax.tree.map(_found, tree, is_leaf=is_kept)


def _found(x: Any) -> Any:
    if not isinstance(x, Value) or source_of(x) or not (source := origin_of(x)):
        return x
    return with_source(jax.tree.map(lambda leaf: leaf, x), source)  # not the caller's object
