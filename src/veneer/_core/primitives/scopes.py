"""Where in a program a primitive is bound: the scopes and functions that it is in.

JAX keeps the names of the scopes around an equation (`jax.named_scope`), and starts anew in each
program that another contains. Here they are kept from there on, with the names of jitted functions,
while somebody asks: what is staged then is staged for a place, by a user context.
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
    """Where a primitive is bound.

    **Arguments:**

    - `names`: of the scopes and jitted functions around it, the outermost first.
    - `is_derivative`: whether it is bound as a program is transposed, and is no part of the forward
      pass that is computed again; or in what a user wrote for the derivative of a function.
    - `is_tangent`: whether it computes a tangent. Known only within `telling_tangents`.
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


@dataclass(frozen=True)
class _Asked:
    what: Any  # whatever the one who asks wants to find again; hashable
    outside: Place  # of the program that is being staged
    tells_tangents: bool = False


#: What somebody asks for, if anybody does. A user context, for JAX to trace anew where it changes.
ASKED: Any = jax.make_user_context(None)

# What JAX names what a `jax.checkpoint` computes again.
_COMPUTED_AGAIN = "rematted_computation"


def asked() -> Any:
    """What somebody who asks for places has put in force, or None."""
    return None if ASKED.value is None else ASKED.value.what


def asking(what: Any) -> AbstractContextManager[None]:
    """Puts something in force, to be found at any place within; None hides what there is."""
    return ASKED(replace(_now_asked(), what=what))


def _now_asked() -> _Asked:
    return _Asked(None, Place()) if ASKED.value is None else ASKED.value


def place() -> Place:
    """Where a primitive that is bound now is, for who asks."""
    names, is_derivative, is_tangent = ASKED.value.outside
    names = list(names)
    for kind, name in current_scopes():
        if kind == "transform":
            is_derivative = is_derivative or name == "transpose"
        elif name == _COMPUTED_AGAIN:
            is_derivative = False
        elif name == TANGENT_SCOPE:
            is_tangent = True
        else:
            names.append(name)
    return Place(tuple(names), is_derivative, is_tangent)


@contextmanager
def inside(name: str | None = None) -> Iterator[None]:
    """Has what JAX traces within, as a program of its own, know where it is; for who asks.

    **Arguments:**

    - `name`: of the function that is traced, where it has one.
    """
    here = place()
    if name is not None:
        here = here._replace(names=(*here.names, name))
    with ASKED(replace(_now_asked(), outside=here)):
        yield


def returning() -> Callable[[bool], AbstractContextManager[None]]:
    """Returns what is entered where a function runs later, for it to be where the program is now.

    The context is told whether the function is the derivative of another.
    """
    if ASKED.value is None:
        return lambda is_derivative: nullcontext()
    here = place()
    then = replace(ASKED.value, outside=here)

    def enter(is_derivative: bool) -> AbstractContextManager[None]:
        if is_derivative:
            return ASKED(replace(then, outside=here._replace(is_derivative=True)))
        is_asked = ASKED.value is not None and asked() is then.what
        if is_asked and place().is_within(here):
            return nullcontext()  # it runs at once, in the same program
        return ASKED(then)

    return enter


@contextmanager
def telling_tangents(products: Sequence[str]) -> Iterator[None]:
    """Let `is_in_derivative_part` tell tangents of these primitives from primal values.

    JAX differentiates a program before a trace of `implicit` runs it, so an equation does not show
    whether its operands are tangents. Here JAX puts those that are in a scope of their own.
    """
    asks = replace(_now_asked(), tells_tangents=True)
    primitives = list(map(find_primitive, products))
    with tangents_in_scope(primitives, lambda: _now_asked().tells_tangents), ASKED(asks):
        yield


def is_in_derivative_part() -> bool:
    """Return whether the current primitive belongs to a derivative inside the program.

    Always False outside `telling_tangents`, and for what `jax.checkpoint` recomputes.
    """
    if ASKED.value is None or not ASKED.value.tells_tangents:
        return False
    at = place()
    return at.is_derivative or at.is_tangent


# Products that quantise or record activations, and leave tangents alone.

#: Whether what runs is what a user wrote for the tangents of a function. A user context, for JAX to
#: trace anew where it changes.
OF_TANGENTS: Any = jax.make_user_context(False)

#: What `may_be_tangents` notes of being asked, while somebody wants to know.
_ANSWERS: ContextVar[list[bool] | None] = ContextVar("_ANSWERS", default=None)


def may_be_tangents() -> bool:
    """Whether an operand may be a tangent, in what a user wrote for the derivative of a function.

    There the outputs are not those of the function, which is run beside it for who asks.
    """
    if OF_TANGENTS.value and (answers := _ANSWERS.get()) is not None:
        answers.append(True)
    return bool(OF_TANGENTS.value)


@contextmanager
def answers_noted() -> Iterator[list[bool]]:
    """Gives a list with an entry for each time that `may_be_tangents` says so within."""
    answers: list[bool] = []
    token = _ANSWERS.set(answers)
    try:
        yield answers
    finally:
        _ANSWERS.reset(token)
        if answers and (outer := _ANSWERS.get()) is not None:
            outer.append(True)
