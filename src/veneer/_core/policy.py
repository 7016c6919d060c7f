"""Events, and policies: what happens when a call of `implicit` materializes an implicit array.

An `Event` is a record of a primitive that ran on implicit operands. The current policy decides
whether an event is collected, and whether it emits a warning or raises an error.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import jax

from .._jax.frames import user_line, user_place

#: The paths of the weights that a value comes from. A program that is traced once may be called
#: with other weights. So in its events, an integer `i` means the source of operand `i` of the call.
Source = tuple[str | int, ...]

#: The path of a weight that is neither in an argument nor a captured variable, so it has no name.
FOUND = "an array that the program found"

#: The value of `Event.how` for an eager operation that ran before the reported program.
BEFORE_CALL = "before the call"


class MaterialiseError(TypeError):
    """The error for a primitive that would materialize an operand.

    `vn.implicit` raises it with `on_materialise="error"` or `"error_weights"`, if a primitive has
    no rule or its rule materializes an operand. The message names the primitive, its operands, the
    line of the program and the number of bytes.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> try:
    ...     vn.implicit(jnp.sin, on_materialise="error")(w)
    ... except vn.MaterialiseError as error:
    ...     print(str(error)[:19])
    sin(QArray:f32[2,2]
    """


class MaterialiseWarning(UserWarning):
    """The warning that a primitive materialized an operand.

    `vn.implicit` emits it with `on_materialise="warn"` or `"warn_weights"`, if a primitive has no
    rule or its rule materializes an operand. The message names the primitive, its operands, the
    line of the program and the number of bytes.

    >>> import warnings
    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     y = vn.implicit(jnp.sin, on_materialise="warn")(w)
    >>> caught[0].category.__name__
    'MaterialiseWarning'
    """


class Operands(NamedTuple):
    """A description of the operands of a primitive, for an `Event`.

    Each field has one entry per operand.
    """

    shown: tuple[str, ...]  # the display text, such as "QArray:f32[2,2]"
    sources: tuple[Source, ...]  # the paths of the weights that the operand comes from
    dense: tuple[int, ...]  # the bytes of the dense array; 0 for an operand that is not implicit
    caches: tuple[bool, ...]  # whether the operand is a key-value cache


@dataclass(frozen=True, slots=True)
class Event:
    """A record of a primitive that ran on an implicit operand.

    `vn.explain` collects events in a `vn.Report`. If the argument `on_materialise` of `vn.implicit`
    is a function, `vn.implicit` calls it with each event that materializes an operand.

    | attribute | content |
    |---|---|
    | `primitive` | the name of the primitive |
    | `operands` | the types of the operands, such as `"QArray:f32[2,2]"` |
    | `rule` | file and line of the rule that ran; None if no rule fitted |
    | `how` | how the rule computed the result, or why no rule fitted; `""` if unknown |
    | `nbytes` | the number of bytes that were materialized |
    | `line` | file and line of the user's program |
    | `dense` | for each operand, the number of bytes that were materialized |
    | `caches` | for each operand, whether it is a key-value cache |
    | `sources` | for each operand, the paths of the weights that it comes from |
    | `weights` | the paths of all weights in `sources` |
    | `no_kernel` | a text that names the operand that is too small for a kernel; else `""` |

    A weight is an implicit array that is an argument or a captured variable of the program. A slice
    or a transpose of a weight counts as the weight. Other implicit arrays are intermediates.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> event = vn.explain(lambda w: jnp.sin(w))(w).events[0]
    >>> event.primitive, event.operands, event.rule, event.nbytes, event.weights
    ('sin', ('QArray:f32[2,2]',), None, 16, ('w',))
    """

    primitive: str
    operands: tuple[str, ...]
    rule: str | None
    nbytes: int
    line: str
    how: str = ""
    sources: tuple[Source, ...] = ()
    dense: tuple[int, ...] = ()
    caches: tuple[bool, ...] = ()
    no_kernel: str = ""

    @property
    def made_dense(self) -> bool:
        """True if an operand was materialized."""
        return self.rule is None or self.nbytes > 0

    @property
    def weights(self) -> tuple[str, ...]:
        """The paths of all weights in `sources`, without repetition."""
        return paths_of(join_sources(self.sources))

    @property
    def weight_nbytes(self) -> int:
        """The number of bytes that were materialized from weights, including key-value caches."""
        return sum(n for n, source in zip(self.dense, self.sources, strict=True) if source)

    @property
    def cache_nbytes(self) -> int:
        """The number of bytes that were materialized from key-value caches."""
        operands = zip(self.dense, self.sources, self.caches, strict=True) if self.caches else ()
        return sum(n for n, source, is_cache in operands if source and is_cache)

    @property
    def how_and_why(self) -> str:
        """The texts `how` and `no_kernel`, joined with a comma."""
        return ", ".join(filter(None, (self.how, self.no_kernel)))

    def for_call(self, sources: Sequence[Source], line: str) -> "Event":
        """Return a copy of this event of a traced program for one call of the program.

        `sources[i]` are the paths of the weights that operand `i` of the call comes from. `line` is
        the file and line of the call.
        """
        own_sources = tuple(resolve_source(source, sources) for source in self.sources)
        return replace(self, line=line, sources=own_sources)

    def __str__(self) -> str:
        weights = f", of {', '.join(self.weights)}" if self.weights else ""
        call = f"{self.primitive}({', '.join(self.operands)}) at {self.line}{weights}"
        if self.rule is not None:
            cost = f"{self.nbytes:,} bytes are materialized" if self.nbytes else ""
            texts = (f"rule {self.rule}", self.how_and_why, cost)
            return f"{call}: {', '.join(filter(None, texts))}"
        why = f": {self.how}" if self.how else ""
        return f"{call}: no rule fits{why}, so {self.nbytes:,} bytes are materialized"


def paths_of(source: Source) -> tuple[str, ...]:
    """Return the paths of weights in a `Source`, without its integers.

    A `Source` describes from which weights an array comes. It is a tuple of the paths of weights
    and, in a traced program, the numbers of operands.
    """
    return tuple(x for x in source if isinstance(x, str))


def resolve_source(source: Source, operands: Sequence[Source]) -> Source:
    """Replace each integer `i` in a `Source` by `operands[i]`, the source of operand `i`.

    A source is a tuple of paths of weights and, in a traced program, numbers of operands. Keep
    `FOUND`, the path of weights without a name. Drop the other paths: they name the weights of the
    call that was traced, and `operands` has the paths of this call.
    """
    sources = [operands[i] for i in source if isinstance(i, int)]
    return join_sources([*sources, (FOUND,)] if FOUND in source else sources)


def join_sources(sources: Iterable[Source]) -> Source:
    """Return the union of `sources`, tuples of paths of weights, in order, without repetition."""
    return tuple(dict.fromkeys(x for source in sources for x in source))


# Policies.

T = TypeVar("T")
OnMaterialise = (
    Literal["allow", "warn", "error", "warn_weights", "error_weights"] | Callable[[Event], None]
)


@dataclass(frozen=True, eq=False)
class Policy:
    """The reaction to the events of a call of `implicit`, set by `on_materialise`.

    Policies are compared by identity.
    """

    on_materialise: OnMaterialise = "allow"
    events: list[Event] | None = None  # a list to which each event is added
    weights_only: bool = False  # whether `on_materialise` ignores arrays that are not weights


ALLOW = Policy()
ERROR = Policy("error")
RECORD = Policy()  # adds events to the list of `recorded_events`, to emit them in each call later
_NAMED = {
    "allow": ALLOW,
    "warn": Policy("warn"),
    "error": ERROR,
    "warn_weights": Policy("warn", weights_only=True),
    "error_weights": Policy("error", weights_only=True),
}

# A user context, because JAX traces a jitted function again when a user context changes, but not
# when a context variable does. So a jitted function reports under each policy.
_policy = jax.make_user_context(ALLOW)
_recorded: ContextVar[list[Event]] = ContextVar("recorded")  # the list of `recorded_events`
# The arguments of `note_how` in the running rule.
_how: ContextVar[tuple[str, Sequence[int], str]] = ContextVar("how", default=("", (), ""))


def current_policy() -> Policy:
    return _policy.value


def policy_in_force(policy: Policy) -> AbstractContextManager[None]:
    """Return a context in which `policy` is the current policy, the reaction to materialization.

    A derivative rule that JAX runs later gets the policy under which its function was traced. If
    that was `RECORD`, the policy in `recorded_events`, and no such block is running, the context
    keeps the current policy.
    """
    has_ended = policy is RECORD and _recorded.get(None) is None
    return nullcontext() if has_ended or policy is _policy.value else _policy(policy)


def policy_of(choice: OnMaterialise) -> Policy:
    """Return the policy for an argument `on_materialise`. Raise `ValueError` if it is invalid."""
    if isinstance(choice, str) and choice in _NAMED:
        return _NAMED[choice]
    if not callable(choice):
        raise ValueError(
            f"on_materialise must be {', '.join(map(repr, _NAMED))} or a callable, not {choice!r}."
        )
    return Policy(choice)


def nested_policy(policy: Policy) -> AbstractContextManager[None]:
    """Return a context in which `policy`, of a nested call of `implicit`, is the current policy.

    If `policy` is `ALLOW`, the policy of the outer call stays. If the outer policy collects events
    in a list, the events of the nested call are added to that list, too.
    """
    if policy is ALLOW:
        return nullcontext()
    events = _policy.value.events
    return policy_in_force(policy if events is None else replace(policy, events=events))


@contextmanager
def set_variable(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Return a context in which a context variable has the given value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """Yield a list that collects the events of a `with` block, without warnings and errors.

    The caller traces a program in the block. Each later call of the traced program then emits the
    events in the list.
    """
    events: list[Event] = []
    with set_variable(_recorded, events), policy_in_force(RECORD):
        yield events


def must_replay_events(policy: Policy) -> bool:
    """Return whether each call of a traced program must emit the events of its trace again.

    This is not necessary under the policy `ALLOW`, where events have no effect, and under `ERROR`,
    where tracing has raised the error already.
    """
    return policy not in (ALLOW, ERROR)


def emit_events(events: Iterable[Event]) -> None:
    """React to each event according to the current policy.

    The reaction is to add the event to a list, to warn, to raise an error, or to call the user's
    function. Events that materialized nothing are only added to lists.
    """
    policy = _policy.value
    for event in events:
        if policy is RECORD:
            _recorded.get().append(event)
        if policy.events is not None:
            policy.events.append(event)
        is_relevant = event.weight_nbytes > 0 if policy.weights_only else event.made_dense
        if not is_relevant:
            continue
        if policy.on_materialise == "warn":
            file, line = user_place()
            warnings.warn_explicit(str(event), MaterialiseWarning, file, line)
        elif policy.on_materialise == "error":
            remedy = "Allow it" if event.rule else "Register a rule for these types, or allow it"
            raise MaterialiseError(f"{event}. {remedy} with on_materialise='allow'.")
        elif callable(policy.on_materialise):
            policy.on_materialise(event)


def note_how(how: str, dense: Sequence[int] = (), no_kernel: str = "") -> None:
    """Set `how`, `dense` and `no_kernel` in the event of the running rule, before it returns.

    `how` is a text about the computation. `dense` is the number of materialized bytes of each
    operand; missing entries are 0. `no_kernel` names the operand that is too small for a kernel.
    """
    if _policy.value is not ALLOW:
        _how.set((how, dense, no_kernel))


def report_rule(primitive: str, operands: Callable[[], Operands], rule: str) -> None:
    """Emit the event of a rule that ran, if it materialized an operand or events are collected.

    `rule` is the file and line of the rule. `operands` is called for a description of the operands
    only if the event is emitted.
    """
    policy, (how, dense, no_kernel) = _policy.value, _how.get()
    _how.set(("", (), ""))
    if any(dense) or policy is RECORD or policy.events is not None:
        shown, sources, _, caches = operands()
        dense = (*dense, *[0] * (len(shown) - len(dense)))  # zeros for the missing entries
        fields = shown, rule, sum(dense), user_line(), how, sources, dense, caches, no_kernel
        emit_events([Event(primitive, *fields)])


def report_materialised(primitive: str, operands: Callable[[], Operands], why: str = "") -> None:
    """Emit the event of a primitive that runs on materialized operands, for the reason `why`.

    `operands` is called for a description of the operands only if the policy is not `ALLOW`.
    """
    if _policy.value is not ALLOW:
        shown, sources, dense, caches = operands()
        event = Event(primitive, shown, None, sum(dense), user_line(), why, sources, dense, caches)
        emit_events([event])
