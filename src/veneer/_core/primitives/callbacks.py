"""Rules for the primitives that call a function of the host: callbacks and debug prints.

A host function expects arrays, so an implicit operand is made dense before it is called, visibly.
Not on the host, lazily: there `materialise` would run JAX inside of a callback, which JAX 0.10
does not survive on a CPU, where callbacks and what they compute wait for the same few threads
(jax-ml/jax#24255). To send leaves over instead, register a rule for a type that does so.

A label that refuses to be dense reaches the host function as it is, for its metadata must not be
lost. `jax.debug.print` prints leaves, and makes nothing dense.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from ..._jax.primitives import Primitive, find_primitive
from ..rules import add_rule
from ..value import Value
from .labels import dense_unless, refuses_to_be_dense


@dataclass(frozen=True)
class _OnValues:
    """A host function of values as one of their leaves, which equals another of the same parts."""

    function: Callable
    treedef: Any

    def __call__(self, *leaves: Any) -> Any:
        return self.function(*jax.tree.unflatten(self.treedef, leaves))


def _calls_back(primitive: Primitive) -> None:
    def rule(*operands: Any, callback: Callable, **params: Any) -> Any:
        values = dense_unless(refuses_to_be_dense, primitive, operands)
        leaves, treedef = jax.tree.flatten(values)
        return primitive.bind(*leaves, callback=_OnValues(callback, treedef), **params)

    add_rule(rule, [primitive], structural=True)


for _primitive in ("pure_callback", "io_callback", "debug_callback"):
    _calls_back(find_primitive(_primitive))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Printed:
    """An implicit array as a format prints it: its type and fields, with the values of leaves."""

    value: Any

    def __format__(self, spec: str) -> str:
        return _show(self.value, spec)

    def __str__(self) -> str:
        return _show(self.value, "")


def _show(x: Any, spec: str) -> str:
    if isinstance(x, Value):
        shown = (f"{f.name}={_show(getattr(x, f.name), spec)}" for f in fields(x))  # type: ignore[arg-type]
        return f"{type(x).__name__}({', '.join(shown)})"
    if not hasattr(x, "shape"):
        return repr(x)
    array = np.asarray(x)
    return format(array[()], spec) if array.ndim == 0 else str(array)


@dataclass(frozen=True)
class _Untraced:
    """An argument of a format that is no array."""

    value: Any


def _debug_print(*operands: Any, in_tree: Any, static_args: Any, **params: Any) -> Any:
    untraced, rest = dict(static_args), iter(operands)
    arguments = [
        _Untraced(untraced[i]) if i in untraced else _printed(next(rest))
        for i in range(in_tree.num_leaves)
    ]
    leaves, in_tree = jax.tree.flatten(jax.tree.unflatten(in_tree, arguments))
    static_args = tuple((i, x.value) for i, x in enumerate(leaves) if isinstance(x, _Untraced))
    traced = [x for x in leaves if not isinstance(x, _Untraced)]
    return find_primitive("debug_print").bind(
        *traced, in_tree=in_tree, static_args=static_args, **params
    )


def _printed(x: Any) -> Any:
    return _Printed(x) if isinstance(x, Value) else x


add_rule(_debug_print, [find_primitive("debug_print")], structural=True)
