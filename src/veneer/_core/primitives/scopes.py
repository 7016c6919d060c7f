"""The place in a program where a primitive is bound, and whether it computes a derivative.

JAX records the scopes (`jax.named_scope`) around an equation, but only inside the innermost
program, such as the body of a `jit`. In the context `query_scopes`, this module also keeps the
scopes and jitted functions around that program. The context is a user context of JAX, which is part
of the keys of JAX's caches. So a function that is called at two places is traced for each place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from ..._jax.derivatives import TANGENT_SCOPE, tangents_in_scope
from ..._jax.frames import current_scopes
from ..._jax.primitives import find_primitive


class Place(NamedTuple):
    """The place in a program where a primitive is bound.

    **Arguments:**

    - `names`: the scopes and jitted functions around the primitive, outermost first.
    - `is_derivative`: whether the primitive belongs to a transposed program, or to the derivative
      rule of a `custom_jvp` or `custom_vjp` function. False in a forward pass that
      `jax.checkpoint` recomputes.
    - `is_tangent`: whether the primitive computes a tangent. Always False outside `mark_tangents`.
    """

    names: tuple[str, ...] = ()
    is_derivative: bool = False
    is_tangent: bool = False

    def is_within(self, outer: "Place") -> bool:
        """Return whether this place may be inside a program that runs at the place `outer`."""
        # `>=` of two bools: if `outer` is in a derivative, this place must be in one too.
        return (
            self.names[: len(outer.names)] == outer.names
            and self.is_derivative >= outer.is_derivative
            and self.is_tangent >= outer.is_tangent
        )


@dataclass(frozen=True)
class _ScopeQuery:
    key: Any = None  # the hashable object that `scope_query` returns
    outside: Place = Place()  # noqa: RUF009  # the place of the program that is being traced
    marks_tangents: bool = False


_query: Any = jax.make_user_context(None)


def scope_query() -> Any:
    """Return the object that was passed to the innermost `query_scopes`, or None."""
    return _query.value and _query.value.key


def query_scopes(key: Any) -> AbstractContextManager[None]:
    """Return a context in which `current_place` works and `scope_query` returns `key`.

    `key` is any hashable object by which the caller recognizes its own context, or None to hide
    the object of an outer `query_scopes`.
    """
    return _query(replace(_query.value or _ScopeQuery(), key=key))


def current_place() -> Place:
    """Return the place of the primitive that is bound now.

    Call this only inside `query_scopes` or `mark_tangents`.
    """
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
    """Return a context to enter while a rule traces the program inside an equation, such as a jit.

    In this context, the result of `current_place` begins with the place of that equation, followed
    by `name`, the name of the jitted function.
    """
    if _query.value is None:
        return nullcontext()
    here = current_place()
    names = here.names if name is None else (*here.names, name)
    return _query(replace(_query.value, outside=here._replace(names=names)))


def capture_place() -> Callable[[bool], AbstractContextManager[None]]:
    """Return a function that restores the current place for code that JAX runs later.

    The returned function takes a bool, which is True if the code is a derivative rule. It returns a
    context in which to run the code. There, `current_place` begins with the captured place.
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
            return nullcontext()  # the code runs at once, in the same program
        return _query(captured)

    return restore


@contextmanager
def mark_tangents(products: Sequence[str]) -> Iterator[None]:
    """Let `is_in_derivative_part` recognize tangents in a `with` block.

    `products` are the names of the primitives that may compute tangents. JAX differentiates a
    program before `implicit` runs its equations, and an equation does not show whether its operands
    are tangents. In this block, JAX binds primitives for tangents in a scope with a reserved name.
    """
    is_on = lambda: _query.value is not None and _query.value.marks_tangents
    query = replace(_query.value or _ScopeQuery(), marks_tangents=True)
    primitives = list(map(find_primitive, products))
    with tangents_in_scope(primitives, is_on), _query(query):
        yield


def is_in_derivative_part() -> bool:
    """Return whether the primitive that is bound now computes a tangent or a cotangent.

    Always False outside `mark_tangents`, and in a forward pass that `jax.checkpoint` recomputes.
    """
    if _query.value is None or not _query.value.marks_tangents:
        return False
    place = current_place()
    return place.is_derivative or place.is_tangent


#: True while the rule of a `custom_jvp` function runs. It is a user context of JAX, which is part
#: of the keys of JAX's caches: products in such a rule quantize no operand, so JAX must trace a
#: function again for them.
IN_DERIVATIVE_RULE: Any = jax.make_user_context(False)

#: The list that the innermost `record_tangent_queries` yields.
_tangent_queries: ContextVar[list[bool] | None] = ContextVar("_tangent_queries", default=None)


def may_be_tangents() -> bool:
    """Return whether the derivative rule of a `custom_jvp` function is running.

    Operands may then be tangents, so our rules of products do not quantize or record activations.
    The primal outputs are then computed again, by the function instead of its derivative rule.
    """
    if IN_DERIVATIVE_RULE.value and (queries := _tangent_queries.get()) is not None:
        queries.append(True)
    return bool(IN_DERIVATIVE_RULE.value)


@contextmanager
def record_tangent_queries() -> Iterator[list[bool]]:
    """Yield a list that is not empty if `may_be_tangents` has returned True in a `with` block.

    At the end of the block, the list of an outer block also gets an entry if this list has any.
    """
    queries: list[bool] = []
    previous = _tangent_queries.set(queries)
    try:
        yield queries
    finally:
        _tangent_queries.reset(previous)
        if queries and (outer := _tangent_queries.get()) is not None:
            outer.append(True)
