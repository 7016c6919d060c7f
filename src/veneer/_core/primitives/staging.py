"""Staging: the program inside a primitive, traced anew with the rules in force, on leaves."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import jax

from ..._jax.primitives import close_jaxpr, find_primitive, jaxpr_as_fun, open_jaxpr
from ..._jax.source_lines import user_line
from ..._jax.tracing import trace_context
from ..errors import check_fields
from ..event import FOUND, Event, Source, paths_of, resolve_source
from ..nesting import staging_trace
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
from .labels import is_label, may_be_labelled
from .scopes import ASKED, OF_TANGENTS, answers_noted, inside, may_be_tangents

Typed = tuple[Any, Sequence[Any]]  # a value's structure and its abstract leaves


@dataclass(frozen=True)
class Staged:
    """A jaxpr of leaves that does what another did on implicit values."""

    jaxpr: Any  # closed
    out_trees: tuple[Any, ...]  # the structure of each output
    out_avals: tuple[tuple[Any, ...], ...]  # the abstract leaves of each output
    events: tuple[Event, ...]  # what to emit_events each time, if anyone asks
    line: str  # of the call for which it was staged
    out_sources: tuple[Source, ...]  # the weights of which each output is made, if anyone asks
    differs: bool  # for what may be tangents

    def met_by(self, values: Sequence[Any]) -> "Staged":
        """This, as it is met here, with operands that may be weights.

        Events that have no line but that of the call have the present one. So they are in functions
        of JAX's own, which it traces once (`x @ w`).
        """
        if not (self.events or any(self.out_sources)):
            return self
        sources, here = list(map(find_source, values)), user_line()
        at = lambda line: here if line == self.line else line
        return replace(
            self,
            events=tuple(event.met_by(sources, at(event.line)) for event in self.events),
            out_sources=tuple(resolve_source(source, sources) for source in self.out_sources),
        )

    def output(self, i: int) -> tuple[Any, tuple[Any, ...]]:
        """What must agree for two outputs to be of one type."""
        return self.out_trees[i], self.out_avals[i]

    def examples(self) -> list[Any]:
        """The outputs, with abstract leaves."""
        return list(map(example, self.out_trees, self.out_avals))

    def unflatten(self, leaves: Sequence[Any]) -> list[Any]:
        """The outputs, from all of their leaves."""
        pieces = split_list(leaves, *(tree.num_leaves for tree in self.out_trees))
        outputs = [
            jax.tree.unflatten(tree, piece)
            for tree, piece in zip(self.out_trees, pieces, strict=False)
        ]
        if any(self.out_sources):
            for output, source in zip(outputs, self.out_sources, strict=True):
                with_source(output, source)
        return outputs

    def __call__(self, *values: Any) -> list[Any]:
        return self.unflatten(jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(values)))


_staged: WeakKeyDictionary[Any, dict[Any, Staged]] = WeakKeyDictionary()
clear_with_rules(_staged.clear)


def example(tree: Any, avals: Sequence[Any]) -> Any:
    """A value of a type, with abstract leaves."""
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])


def typed(value: Any) -> Typed:
    """A value's structure and its abstract leaves. Leaves may be abstract already."""
    leaves, treedef = jax.tree.flatten(value)
    try:
        return treedef, tuple(map(jax.typeof, leaves))
    except TypeError:
        for one in jax.tree.leaves(value, is_leaf=is_value):
            check_fields(one)
        raise


# Structures that some outputs must have, by their numbers: `DENSE`, or that of a label.
Forms = Mapping[int, Any]

NO_FORMS: Forms = MappingProxyType({})

DENSE = object()


def stage(
    primitive: str,
    jaxpr: Any,
    values: Sequence[Any],
    forms: Forms = NO_FORMS,
    name: str | None = None,
) -> Staged:
    """`jaxpr` staged for the types of `values`, with some outputs brought into other forms.

    `name` is that of a function whose program it is.
    """
    staged = find_staged(primitive, jaxpr, values, forms, name)
    emit_events(staged.events)
    return staged


def find_staged(
    primitive: str,
    jaxpr: Any,
    values: Sequence[Any],
    forms: Forms = NO_FORMS,
    name: str | None = None,
) -> Staged:
    """`stage`, telling nobody yet of what happened: for an attempt that may be dropped."""
    treedef, avals = typed(list(values))
    policy = current_policy()
    with inside(name) if ASKED.value else nullcontext():
        # Policies under which events are recorded, and told each time, stage alike.
        with policy_in_force(RECORD) if must_replay_events(policy) else nullcontext():
            key = treedef, avals, frozenset(forms.items()), current_policy(), trace_context()
        known = _staged.setdefault(jaxpr, {})
        if key not in known:
            closed = close_jaxpr(jaxpr)
            sources = tuple(map(find_source, values)) if current_policy() is not ALLOW else ()
            known[key] = _stage(find_primitive(primitive), closed, treedef, avals, forms, sources)
    if known[key].differs:
        may_be_tangents()
    return known[key].met_by(values)


def stage_to_labels(
    primitive: str, jaxpr: Any, values: Sequence[Any], count: int | None = None
) -> Staged:
    """`stage`, with the first `count` outputs, or all, made dense unless they are labels."""
    staged = find_staged(primitive, jaxpr, values)
    outputs = staged.examples()[:count]
    others = [i for i, x in enumerate(outputs) if is_value(x) and not is_label(x)]
    return stage(primitive, jaxpr, values, dict.fromkeys(others, DENSE))


def _stage(
    primitive: Any,
    jaxpr: Any,
    treedef: Any,
    avals: Sequence[Any],
    forms: Forms,
    sources: Sequence[Source],
) -> Staged:
    out_trees: list[Any] = []
    out_sources: list[Source] = []

    def on_leaves(*leaves: Any) -> list[Any]:
        values = jax.tree.unflatten(treedef, leaves)
        # By number, for the next time; and by name, if an error is raised here.
        names = [[x for x in paths_of(source) if x != FOUND] for source in sources]
        numbered: list[Source] = [(i, *paths) for i, paths in enumerate(names)]
        for value, source in zip(values, numbered, strict=False):  # none, where nobody asks
            with_source(value, source)
        known = leaf_sources(zip(values, numbered, strict=True)) if sources else nullcontext()
        with known, staging_trace():
            outputs = ImplicitTrace.run(jaxpr_as_fun(jaxpr), values)
        for i, form in forms.items():
            outputs[i] = _in_form(primitive, outputs[i], form)
        out_sources.extend(map(source_of, outputs))
        flat = [jax.tree.flatten(out) for out in outputs]
        out_trees.extend(tree for _, tree in flat)
        return [leaf for leaves, _ in flat for leaf in leaves]

    events: list[Event] = []
    noted: Any = answers_noted() if OF_TANGENTS.value else nullcontext([])
    recorded: Any = (
        recorded_events() if must_replay_events(current_policy()) else nullcontext(events)
    )
    try:
        with noted as differs, recorded as events:
            staged = jax.make_jaxpr(on_leaves)(*avals)
    except BaseException:
        emit_events(events)
        raise
    counts: list[int] = [tree.num_leaves for tree in out_trees]
    out_avals = [tuple(piece) for piece in split_list(staged.out_avals, *counts)][:-1]
    line = user_line() if events else ""
    return Staged(
        staged,
        tuple(out_trees),
        tuple(out_avals),
        tuple(events),
        line,
        tuple(out_sources),
        bool(differs),
    )


def _in_form(primitive: Any, output: Any, form: Any) -> Any:
    if form is DENSE:
        return make_dense(primitive, [output])[0]
    if not isinstance(output, Value):
        label = jax.tree.unflatten(form, [output])
        return label if may_be_labelled(output, label) else output
    return output


# A rule may write to a `Box`. Where it does so in a loop, the body that is staged for the rule
# closes over references (`jax.Ref`), which JAX takes for no constants of a loop, a branch or a jit:
# they are operands of what contains the program.


def references(*jaxprs: Any) -> list[Any]:
    """The references among the constants of closed jaxprs, each once."""
    found = {id(x): x for jaxpr in jaxprs for x in jaxpr.consts if _is_reference(x)}
    return list(found.values())


def taking(jaxpr: Any, refs: Sequence[Any]) -> Any:
    """A closed jaxpr that takes these references first, of which some were its constants."""
    if not refs:
        return jaxpr
    opened, constants = open_jaxpr(jaxpr)
    numbers = {id(ref): i for i, ref in enumerate(refs)}

    def program(*args: Any) -> list[Any]:
        own = [args[numbers[id(x)]] if id(x) in numbers else x for x in constants]
        return jaxpr_as_fun(close_jaxpr(opened))(*own, *args[len(refs) :])

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in jaxpr.in_avals]
    return jax.make_jaxpr(program)(*refs, *avals)


def _is_reference(x: Any) -> bool:
    return isinstance(x, jax.Ref)
