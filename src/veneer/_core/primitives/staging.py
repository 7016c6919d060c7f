"""Staging: trace the program inside a primitive again, on leaves and with the rules in force."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import jax

from ..._jax.primitives import Primitive, close_jaxpr, find_primitive, jaxpr_as_fun, open_jaxpr
from ..._jax.source_lines import user_line
from ..._jax.tracing import current_trace, trace_context
from ..errors import check_fields
from ..event import FOUND, Event, Source, paths_of, resolve_source
from ..nesting import mark_staging_trace, use_trace
from ..policy import (
    ALLOW,
    RECORD,
    current_policy,
    emit_events,
    must_replay_events,
    policy_in_force,
    recorded_events,
)
from ..rules import clear_with_rules
from ..sources import find_source, leaf_sources, with_source
from ..trace import ImplicitTrace
from ..tree import split_list
from ..value import Value, is_value, make_dense, source_of
from .labels import can_become_label, is_label
from .scopes import (
    IN_DERIVATIVE_RULE,
    capture_place,
    enter_program,
    may_be_tangents,
    record_tangent_queries,
)

ValueType = tuple[Any, Sequence[Any]]  # the structure of a value, and its abstract leaves

#: The form that outputs must be converted to, by index: `DENSE`, or the structure of a label.
Forms = Mapping[int, Any]

DENSE = object()


@dataclass(frozen=True)
class StagedProgram:
    """A jaxpr on leaves that computes the same as a jaxpr on implicit values."""

    jaxpr: Any  # closed
    out_trees: tuple[Any, ...]  # the structure of each output
    out_avals: tuple[tuple[Any, ...], ...]  # the abstract leaves of each output
    events: tuple[Event, ...]  # to emit in each call, if a policy needs them
    line: str  # of the call that was traced
    out_sources: tuple[Source, ...]  # of each output, if a policy needs them
    queries_tangents: bool  # whether it differs because operands may be tangents

    def resolve(self, operands: Sequence[Any]) -> "StagedProgram":
        """Return this program with the events and sources of the current call.

        Events at the line of the traced call get the current line. JAX traces its own functions,
        such as that of `x @ w`, only once.
        """
        if not (self.events or any(self.out_sources)):
            return self
        sources, here = list(map(find_source, operands)), user_line()
        line_of = lambda event: here if event.line == self.line else event.line
        return replace(
            self,
            events=tuple(event.met_by(sources, line_of(event)) for event in self.events),
            out_sources=tuple(resolve_source(source, sources) for source in self.out_sources),
        )

    def output_type(self, i: int) -> ValueType:
        return self.out_trees[i], self.out_avals[i]

    def abstract_outputs(self) -> list[Any]:
        """Return the outputs with abstract leaves."""
        return list(map(abstract_value, self.out_trees, self.out_avals))

    def unflatten(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the outputs, given all of their leaves."""
        pieces = split_list(leaves, *(tree.num_leaves for tree in self.out_trees))
        outputs = list(map(jax.tree.unflatten, self.out_trees, pieces))
        for output, source in zip(outputs, self.out_sources, strict=True):
            with_source(output, source)
        return outputs

    def __call__(self, *values: Any) -> list[Any]:
        return self.unflatten(jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(values)))


def abstract_value(tree: Any, avals: Sequence[Any]) -> Any:
    """Return a value of this structure with abstract leaves."""
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])


def value_type(value: Any) -> ValueType:
    """Return the structure of a value, and its abstract leaves. They may be abstract already."""
    leaves, treedef = jax.tree.flatten(value)
    try:
        return treedef, tuple(map(jax.typeof, leaves))
    except TypeError:
        for part in jax.tree.leaves(value, is_leaf=is_value):
            check_fields(part)
        raise


_staged: WeakKeyDictionary[Any, dict[Any, StagedProgram]] = WeakKeyDictionary()
clear_with_rules(_staged.clear)


def stage(
    primitive: str, jaxpr: Any, values: Sequence[Any], *, name: str | None = None
) -> StagedProgram:
    """Stage a jaxpr for the types of some values, and emit its events.

    `name` is the name of the jitted function that the jaxpr is from.
    """
    staged = stage_without_events(primitive, jaxpr, values, name=name)
    emit_events(staged.events)
    return staged


def stage_to_labels(
    primitive: str, jaxpr: Any, values: Sequence[Any], count: int | None = None
) -> StagedProgram:
    """Stage a jaxpr. Its first `count` outputs, or all, are materialized unless they are labels."""
    outputs = stage_without_events(primitive, jaxpr, values).abstract_outputs()[:count]
    others = [i for i, x in enumerate(outputs) if is_value(x) and not is_label(x)]
    staged = stage_without_events(primitive, jaxpr, values, dict.fromkeys(others, DENSE))
    emit_events(staged.events)
    return staged


def stage_without_events(
    primitive: str,
    jaxpr: Any,
    values: Sequence[Any],
    forms: Forms = MappingProxyType({}),
    name: str | None = None,
) -> StagedProgram:
    """Stage a jaxpr, with some outputs in other forms. To use the program, emit its events."""
    treedef, avals = value_type(list(values))
    with enter_program(name):
        # All policies that record events share one program.
        policy = current_policy()
        with policy_in_force(RECORD) if must_replay_events(policy) else nullcontext():
            key = treedef, avals, frozenset(forms.items()), current_policy(), trace_context()
        known = _staged.setdefault(jaxpr, {})
        if key not in known:
            closed = close_jaxpr(jaxpr)
            sources = tuple(map(find_source, values)) if policy is not ALLOW else ()
            known[key] = _stage(find_primitive(primitive), closed, treedef, avals, forms, sources)
    if known[key].queries_tangents:
        may_be_tangents()  # for `record_tangent_queries` of the program around this one
    return known[key].resolve(values)


def _stage(
    primitive: Primitive,
    jaxpr: Any,
    treedef: Any,
    avals: Sequence[Any],
    forms: Forms,
    sources: Sequence[Source],
) -> StagedProgram:
    out_trees: list[Any] = []
    out_sources: list[Source] = []

    def on_leaves(*leaves: Any) -> list[Any]:
        values = jax.tree.unflatten(treedef, leaves)
        # Numbers of operands are resolved in each call. The paths are for errors in this one.
        names = [[x for x in paths_of(source) if x != FOUND] for source in sources]
        numbered: list[Source] = [(i, *paths) for i, paths in enumerate(names)]
        for value, source in zip(values, numbered, strict=False):  # no source if none is needed
            with_source(value, source)
        known = leaf_sources(zip(values, numbered, strict=True)) if sources else nullcontext()
        with known, mark_staging_trace():
            outputs = ImplicitTrace.run(jaxpr_as_fun(jaxpr), values)
        for i, form in forms.items():
            outputs[i] = _in_form(primitive, outputs[i], form)
        out_sources.extend(map(source_of, outputs))
        flat = [jax.tree.flatten(out) for out in outputs]
        out_trees.extend(tree for _, tree in flat)
        return [leaf for leaves, _ in flat for leaf in leaves]

    events: list[Event] = []
    replays = must_replay_events(current_policy())
    recorded: Any = recorded_events() if replays else nullcontext(events)
    queries: Any = record_tangent_queries() if IN_DERIVATIVE_RULE.value else nullcontext(())
    try:
        with queries as tangent_queries, recorded as events:
            staged = jax.make_jaxpr(on_leaves)(*avals)
    except BaseException:
        emit_events(events)
        raise
    *out_avals, _ = split_list(staged.out_avals, *(tree.num_leaves for tree in out_trees))
    return StagedProgram(
        staged,
        tuple(out_trees),
        tuple(map(tuple, out_avals)),
        tuple(events),
        user_line() if events else "",
        tuple(out_sources),
        bool(tangent_queries),
    )


def _in_form(primitive: Primitive, output: Any, form: Any) -> Any:
    if form is DENSE:
        return make_dense(primitive, [output])[0]
    if isinstance(output, Value):
        return output
    label = jax.tree.unflatten(form, [output])
    return label if can_become_label(output, label) else output


def lift_references(*jaxprs: Any) -> tuple[list[Any], list[Any]]:
    """Make the references (`jax.Ref`) that closed jaxprs capture their leading operands.

    A rule may write to a `Box` that it captures. In a loop, a branch or a jit, JAX rejects a
    reference that is a constant of the program.

    **Returns:** the references, and the jaxprs that take all of them.
    """
    refs = {id(x): x for jaxpr in jaxprs for x in jaxpr.consts if isinstance(x, jax.Ref)}
    if not refs:
        return [], list(jaxprs)

    def lift(jaxpr: Any) -> Any:
        program, constants = open_jaxpr(jaxpr)

        def take_references(*args: Any) -> list[Any]:
            given = dict(zip(refs, args, strict=False))
            own = [given.get(id(x), x) for x in constants]
            return jaxpr_as_fun(close_jaxpr(program))(*own, *args[len(refs) :])

        avals = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in jaxpr.in_avals
        ]
        return jax.make_jaxpr(take_references)(*refs.values(), *avals)

    return list(refs.values()), list(map(lift, jaxprs))


def capture_context(trace: ImplicitTrace) -> Callable[..., Callable[..., list[Any]]]:
    """Return a wrapper for functions of tracers that JAX runs later, under another trace.

    The wrapped function takes and returns values. It runs with the rules, the policy and the place
    of now, and knows the values of `trace` that it captures. `is_derivative=True` says that it is a
    derivative rule.
    """
    tag, policy, restore_place = trace.tag, current_policy(), capture_place()

    def run_later(function: Callable, *, is_derivative: bool = False) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            inner = ImplicitTrace(current_trace(), tag)
            with policy_in_force(policy), restore_place(is_derivative):
                wrapped = list(map(inner.wrap, args))
                with use_trace(inner, inner):
                    out = function(*wrapped)
                return list(map(inner.unwrap, out))

        return run

    return run_later
