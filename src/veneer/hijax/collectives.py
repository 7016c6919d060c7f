"""What devices combine: arrays, and derivatives by the leaves of one.

JAX's collectives take trees, and combine leaf by leaf, as is right for the derivatives of a value
that has one for each leaf, which are known by their mark. Any other value is one array.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from .._core.primitives.labels import is_label
from .._core.value import Value
from .._jax.primitives import find_primitive
from .mapping import made_dense
from .mode import is_enabled
from .types import canonical, is_complete, is_typed, opened, opened_derivatives, type_of
from .values import flatten_value, is_derivative, is_inexact, mark_derivatives


class Trees:
    """JAX's functions of trees, as its collectives use them."""

    def __init__(self, trees: Any):
        self._trees = trees

    def tree_map(self, function: Any, tree: Any, *rest: Any, **kwargs: Any) -> Any:
        name = _name_of(function)
        if rest or not is_enabled() or name == "pcast":
            return self._trees.tree_map(function, tree, *rest, **kwargs)
        one = partial(_combined, name, function)
        return self._trees.tree_map(one, tree, is_leaf=_is_array, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trees, name)


def _name_of(function: Any) -> str:
    """The public name of the collective that has a function mapped."""
    return function.__qualname__.split(".")[0].strip("_").removesuffix("_is_async")


def _is_array(x: Any) -> bool:
    return isinstance(x, Value) and is_complete(x)


#: Those of which a value whose one leaf is the dense array, with a label, is a tree like others.
_REDUCE = re.compile("psum|pmean|pmax|pmin")


def _combined(name: str, function: Callable, x: Any) -> Any:
    x = opened_derivatives(x)
    if not isinstance(x, Value):
        return function(_as_operand(name, x) if is_typed(x) else x)
    if is_derivative(x):
        return mark_derivatives(jax.tree.map(function, x))
    if is_label(x):
        return jax.tree.map(function, x) if _REDUCE.search(name) else function(canonical(x))
    if _may_be_derivative(x):
        raise TypeError(
            f"{name}({type_of(x)}): is this an array, or the derivatives of its leaves? "
            f"For an array, call vn.implicit(lambda x: lax.{name}(x, ...)) or pass "
            "vn.materialise(x). For derivatives, "
            f"call jax.tree.map(lambda leaf: lax.{name}(leaf, ...), x)."
        )
    return function(_as_operand(name, x))


def _as_operand(name: str, x: Any) -> Any:
    """A value as one operand, dense if the result is: JAX knows that all devices have that one."""
    if name in ("psum", "pmax", "pmin") and not is_label(opened(x)):
        return made_dense(find_primitive(name), x)
    return x if is_typed(x) else canonical(x)


def _may_be_derivative(x: Value) -> bool:
    parts = flatten_value(x)[0]
    floating = (not isinstance(p, Value) and is_inexact(jax.typeof(p)) for p in parts)
    return not x.dense_tangent and all(floating)
