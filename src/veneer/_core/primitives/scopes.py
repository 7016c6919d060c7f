"""The place in a program where a primitive is bound, and whether it computes a derivative.

JAX names the scopes (`jax.named_scope`) around an equation, but only those inside the innermost
program, such as the body of a `jit`. While a query is in force, this module also keeps the scopes
and jitted functions around that program. The query is a user context, which is part of the key of
JAX's caches. So a function that is called at two places is traced for each of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from ..._jax.derivatives import TANGENT_SCOPE, tangents_in_scope
from ..._jax.primitives import find_primitive
from ..._jax.source_lines import current_scopes


class Place(NamedTuple):
    """The place in a program where a primitive is bound.

    **Arguments:**

    - `names`: the scopes and jitted functions around it, outermost first.
    - `is_derivative`: whether it belongs to a transposed program, or to a derivative rule of the
      user. False in a forward pass that `jax.checkpoint` recomputes.
    - `is_tangent`: whether it computes a tangent. Always False outside `mark_tangents`.
    """

    names: tuple[str, ...] = ()
    is_derivative: bool = False
    is_tangent: bool = False

    def is_within(self, outer: "Place") -> bool:
        """Return whether this may be a place in a program that runs at another place."""
        names, *flags = outer
        return self.names[: len(names)] == names and all(
            here or not there for here, there in zip(self[1:], flags, strict=True)
        )


_TOP = Place()


@dataclass(frozen=True)
class _ScopeQuery:
    key: Any = None  # the hashable object that `scope_query` returns
    outside: Place = _TOP  # the place of the program that is being traced
    marks_tangents: bool = False


_query: Any = jax.make_user_context(None)


def scope_query() -> Any:
    """Return the object that `query_scopes` has put in force, or None."""
    return _query.value and _query.value.key


def query_scopes(key: Any) -> AbstractContextManager[None]:
    """Put a hashable object in force, which rules get from `scope_query`. None hides it."""
    return _query(replace(_query.value or _ScopeQuery(), key=key))


def current_place() -> Place:
    """Return the place of the primitive that is bound now. Call it only while a query is set."""
    names, is_derivative, is_tangent = _query.value.outside
    names = list(names)
    for kind, name in current_scopes():
        if kind == "transform":
            is_derivative = is_derivative or name == "transpose"
        elif name == "rematted_computation":  # jax.checkpoint's name for a recomputed forward pass
            is_derivative = False
        elif name == TANGENT_SCOPE:
            is_tangent = True
        else:
            names.append(name)
    return Place(tuple(names), is_derivative, is_tangent)


def enter_program(name: str | None = None) -> AbstractContextManager[None]:
    """Keep the current place while JAX traces a program inside the current one.

    `name` is the name of a jitted function. It becomes part of the place.
    """
    if _query.value is None:
        return nullcontext()
    here = current_place()
    names = here.names if name is None else (*here.names, name)
    return _query(replace(_query.value, outside=here._replace(names=names)))


def capture_place() -> Callable[[bool], AbstractContextManager[None]]:
    """Return a function that makes a context, in which a function that runs later is at this place.

    Its argument says whether the function that runs later is a derivative rule.
    """
    if _query.value is None:
        return lambda is_derivative: nullcontext()
    here = current_place()
    captured = replace(_query.value, outside=here)

    def restore(is_derivative: bool) -> AbstractContextManager[None]:
        if is_derivative:
            return _query(replace(captured, outside=here._replace(is_derivative=True)))
        is_same_query = _query.value is not None and scope_query() is captured.key
        if is_same_query and current_place().is_within(here):
            return nullcontext()  # the function runs at once, in the same program
        return _query(captured)

    return restore


@contextmanager
def mark_tangents(products: Sequence[str]) -> Iterator[None]:
    """Let `is_in_derivative_part` tell tangents of these primitives from primal values.

    JAX differentiates a program before a trace of `implicit` runs it, so an equation does not show
    whether its operands are tangents. Here JAX binds tangents in a scope with a reserved name.
    """
    marks_tangents = lambda: _query.value is not None and _query.value.marks_tangents
    query = replace(_query.value or _ScopeQuery(), marks_tangents=True)
    primitives = list(map(find_primitive, products))
    with tangents_in_scope(primitives, marks_tangents), _query(query):
        yield


def is_in_derivative_part() -> bool:
    """Return whether the current primitive belongs to a derivative inside the program.

    Always False outside `mark_tangents`, and in what `jax.checkpoint` recomputes.
    """
    if _query.value is None or not _query.value.marks_tangents:
        return False
    place = current_place()
    return place.is_derivative or place.is_tangent


#: Whether a derivative rule of the user (of a `custom_jvp` function) is running. A user context,
#: because products in it quantize no operand, so JAX must trace a function again for it.
IN_DERIVATIVE_RULE: Any = jax.make_user_context(False)

#: The list of `record_tangent_queries`.
_tangent_queries: ContextVar[list[bool] | None] = ContextVar("_tangent_queries", default=None)


def may_be_tangents() -> bool:
    """Return whether operands may be tangents, because a derivative rule of the user is running.

    Rules that quantize or record activations call this, and leave tangents alone. The primal
    outputs of the derivative rule are then computed separately (see `custom_derivatives.py`).
    """
    if IN_DERIVATIVE_RULE.value and (queries := _tangent_queries.get()) is not None:
        queries.append(True)
    return bool(IN_DERIVATIVE_RULE.value)


@contextmanager
def record_tangent_queries() -> Iterator[list[bool]]:
    """Yield a list that gets an entry whenever `may_be_tangents` returns True in this block."""
    queries: list[bool] = []
    token = _tangent_queries.set(queries)
    try:
        yield queries
    finally:
        _tangent_queries.reset(token)
        if queries and (outer := _tangent_queries.get()) is not None:
            outer.append(True)
