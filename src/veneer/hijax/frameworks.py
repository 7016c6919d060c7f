"""Where frameworks take trees apart: Equinox's derivatives, Flax linen, and optimizers."""

from collections.abc import Callable
from typing import Any

import jax

from .._core.value import is_value
from .mode import is_enabled
from .types import canonical, is_complete, with_dense_tangents


def with_values_as_arrays(get_variable: Callable) -> Callable:
    """`Scope.get_variable` of linen, which compares the shapes of the leaves of a parameter."""

    def get(*args: Any, **kwargs: Any) -> Any:
        variable = get_variable(*args, **kwargs)
        return jax.tree.map(_as_array, variable, is_leaf=is_value) if is_enabled() else variable

    return get


def partition_by_tangents(partition: Callable) -> Callable:
    """`equinox.partition`, as `equinox.filter_grad` uses it to choose the floating leaves.

    A value with a dense tangent is one of them. Its scales alone would be trained without the
    codes.
    """

    def split(tree: Any, filter_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(filter_spec, "__name__", "") == "is_inexact_array":
            tree = with_dense_tangents(tree)
        return partition(tree, filter_spec, *args, **kwargs)

    return split


def _as_array(x: Any) -> Any:
    return canonical(x) if is_value(x) and is_complete(x) else x
