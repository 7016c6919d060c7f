"""The expansion of a custom primitive, as an operation.

Its operands and results are trees, and those of an operation are flat. With high types on, an
implicit array is one of them, and otherwise each of its leaves is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import jax

from ..._core.rules import clear_with_rules
from ..._core.value import Value, is_value
from ..._jax.tracing import trace_context
from ..high import Operation
from ..mode import in_force
from ..operations import Parameters
from ..types import is_typed, of_arrays, opened, type_of
from ..values import Tangent, exposed, value_of
from .mapped import map_operation


@dataclass(frozen=True)
class Structure:
    """A tree, and the structure of what is in it: of an implicit array or of one leaf."""

    tree: Any
    forms: tuple[Any, ...]

    def group(self, flat: Iterable[Any]) -> list[list[Any]]:
        """What is flat, by what it belongs to in the tree."""
        rest = iter(flat)
        return [list(islice(rest, form.num_leaves)) for form in self.forms]

    def unflatten(self, flat: Iterable[Any]) -> Any:
        """The tree."""
        pairs = zip(self.forms, self.group(flat), strict=True)
        return jax.tree.unflatten(self.tree, [jax.tree.unflatten(f, group) for f, group in pairs])

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """What is flat, of a tree that has something else where this has what is flat."""
        pairs = zip(self.forms, self.tree.flatten_up_to(tree), strict=True)
        return [x for form, one in pairs for x in form.flatten_up_to(one)]


ONE_LEAF = jax.tree.structure(0)


def flattened(tree: Any, typed: bool) -> tuple[list[Any], Structure]:
    """A tree as what is flat, and its structure."""
    units, treedef = jax.tree.flatten(tree, is_leaf=is_value)
    parts = [([x], ONE_LEAF) if typed or not is_value(x) else jax.tree.flatten(x) for x in units]
    flat = [x for group, _ in parts for x in group]
    return flat, Structure(treedef, tuple(form for _, form in parts))


def type_of_one(x: Any) -> Any:
    """The type of an operand or a result, which is not weak."""
    x = value_of(x)
    if isinstance(x, Value):
        return type_of(x)
    return x.aval if isinstance(x, Tangent) else jax.typeof(x).strip_weak_type()


def listed(types: Iterable[Any]) -> str:
    """Types, for a message."""
    return f"({', '.join(t.str_short(short_dtypes=True) for t in types)})"


@dataclass(frozen=True)
class Expansion(Operation):
    """The expansion of a primitive, with the operands that it takes and its parameters.

    The primitive's other functions are run as this is, and override `evaluate`.
    """

    primitive: Any
    structure: Structure
    parameters: Parameters
    typed: bool

    suffix = ""

    @property
    def name(self) -> str:
        return self.primitive.name + self.suffix

    @property
    def printed(self) -> dict[str, Any]:
        return self.parameters.params

    def run(self, *values: Any) -> list[Any]:
        """The results, flat."""
        return self.evaluate(*values)[0]

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        """The results, and what there is to be known of them besides."""
        return self.flattened(self.call("expand", *self.structure.unflatten(map(exposed, values))))

    def call(self, rule: Any, *args: Any) -> Any:
        """One of the primitive's functions, with the parameters."""
        return self.primitive.rules[rule](*args, **self.parameters.params)

    def flattened(self, tree: Any) -> tuple[list[Any], Structure]:
        """Results, of which none is a tracer of a high type where there are no such."""
        return flattened(jax.tree.map(self._opened, tree, is_leaf=is_value), self.typed)

    def _opened(self, x: Any) -> Any:
        if not is_typed(x) or (self.typed and x.aval.dense_tangent):
            return value_of(x)
        value = opened(x)
        return value if self.typed else jax.tree.map(self._opened, value)

    def known(self, types: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """What there is to be known of the results, and their types, by those of the operands."""
        return _known(self, types, trace_context())

    @classmethod
    def of(cls, other: "Expansion", *more: Any) -> Any:
        """An operation of the same primitive, on such operands."""
        return cls(other.primitive, other.structure, other.parameters, other.typed, *more)

    def refuse(self, what: str) -> TypeError:
        """An error about one of the primitive's functions."""
        return TypeError(f"{self.primitive.name}: {what}")

    def refuse_tangent(self, rule: str, tangent: Any, wanted: str) -> TypeError:
        """An error about what one of them gives for a tangent."""
        is_tree = isinstance(tangent, Value | Tangent)
        shown = repr(exposed(tangent)) if is_tree else listed([jax.typeof(tangent)])[1:-1]
        hint = (
            "" if self.typed else " (outside vn.hijax.enabled(), a tangent has one array per leaf)"
        )
        return self.refuse(f"{rule} returns {shown} as the tangent of {wanted}{hint}")

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        """The results and their axes."""
        return map_operation(self, size, name, values, dims)


@lru_cache(maxsize=4096)
def _known(
    operation: Expansion, types: tuple[Any, ...], context: Any
) -> tuple[Any, tuple[Any, ...]]:
    del context  # part of the key: types depend on x64 and on the mesh
    known_and_types: list[Any] = []

    def on_leaves(*leaves: list[Any]) -> None:
        pairs = zip(types, leaves, strict=True)
        flat, known = operation.evaluate(*(of_arrays(t, arrays) for t, arrays in pairs))
        known_and_types[:] = known, tuple(map(type_of_one, flat))

    with in_force():
        jax.make_jaxpr(on_leaves)(*([*t.lo_ty()] for t in types))
    known, result_types = known_and_types
    return known, result_types


clear_with_rules(_known.cache_clear)
