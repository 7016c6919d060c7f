"""What a type of ours is as a result: the tree of its leaves, each with a sharding that fits."""

from collections.abc import Sequence
from typing import Any

import jax

from .._core.primitives.sharding import places
from .types import HighType, TangentType, abstract, is_inexact


def is_ours(aval: Any) -> bool:
    """Whether a type is one of an implicit array, or of a tangent with a part for each leaf."""
    if isinstance(aval, TangentType):
        return all(map(is_inexact, aval.of.leaves))
    return isinstance(aval, HighType)


def tree(aval: Any) -> Any:
    """The structure of the values of a type."""
    if isinstance(aval, TangentType):
        return aval.of.treedef
    return jax.tree.structure(abstract(aval.treedef, aval.leaves))


def placed(aval: Any, sharding: Any) -> Sequence[Any]:
    """The shardings of the leaves of a value, for that of the dense array."""
    of = aval.of if isinstance(aval, TangentType) else aval
    found: list[Any] = []
    at_leaves = lambda *leaves: found.extend(places(of.of_arrays(leaves), sharding))
    jax.make_jaxpr(at_leaves)(*of.lo_ty())  # for what a type's `partition` asks of its leaves
    return found
