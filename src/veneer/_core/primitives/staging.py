"""Staging: trace the jaxpr inside a primitive again, on the leaves of implicit operands.

In the trace, implicit values use their rules. A staged program takes and returns the leaves of
implicit values. It is cached by the jaxpr and the types of the operands. The trace records an event
for each primitive that runs on implicit operands. Each call of the cached program emits the events
again, with the sources of the operands of the call: the paths of the weights from which the
operands come.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import jax

from ..._jax.frames import user_line
from ..._jax.primitives import (
    Primitive,
    close_jaxpr,
    find_primitive,
    jaxpr_as_fun,
    open_jaxpr,
    split_list,
)
from ..._jax.tracing import current_trace, trace_context
from ..errors import check_fields
from ..nesting import mark_staging_trace, use_trace
from ..policy import (
    ALLOW,
    FOUND,
    RECORD,
    Event,
    Source,
    current_policy,
    emit_events,
    must_replay_events,
    paths_of,
    policy_in_force,
    recorded_events,
    resolve_source,
)
from ..rules import clear_with_rules
from ..sources import find_source, leaf_sources, with_source
from ..trace import ImplicitTrace
from ..value import Value, is_value, make_dense, source_of
from .leaves import can_become_label, is_label
from .scopes import (
    IN_DERIVATIVE_RULE,
    capture_place,
    enter_program,
    may_be_tangents,
    record_tangent_queries,
)

ValueType = tuple[Any, Sequence[Any]]  # the structure of a value, and its abstract leaves

#: The form of some outputs, by index: `DENSE` (to materialize), or the structure of a label.
Forms = Mapping[int, Any]

DENSE = object()


@dataclass(frozen=True)
class StagedProgram:
    """A jaxpr that was traced again, so that it takes and returns the leaves of implicit values.

    The instance is called with the implicit values instead of their leaves.
    """

    jaxpr: Any  # a closed jaxpr
    out_trees: tuple[Any, ...]  # the tree structure of each output
    out_avals: tuple[tuple[Any, ...], ...]  # the abstract leaves of each output
    events: tuple[Event, ...]  # the events to emit in each call, if a policy needs events
    line: str  # the user's line that called the program when it was traced
    out_sources: tuple[Source, ...]  # the weights of each output, if a policy needs events
    queries_tangents: bool  # whether a rule in the program has called `may_be_tangents`

    def resolve(self, operands: Sequence[Any]) -> "StagedProgram":
        """Return a copy of this program for one call, so that reports name the weights of the call.

        `events` and `out_sources` identify weights by the numbers of operands. Replace the numbers
        by the weight paths of `operands`. Also replace the line of the traced call by the line of
        this call. The lines can differ, because JAX traces its own functions, such as
        `jnp.matmul`, only once.
        """
        if not (self.events or any(self.out_sources)):
            return self
        sources, here = list(map(find_source, operands)), user_line()
        line_of = lambda event: here if event.line == self.line else event.line
        return replace(
            self,
            events=tuple(event.for_call(sources, line_of(event)) for event in self.events),
            out_sources=tuple(resolve_source(source, sources) for source in self.out_sources),
        )

    def output_type(self, i: int) -> ValueType:
        return self.out_trees[i], self.out_avals[i]

    def abstract_outputs(self) -> list[Any]:
        """Return the outputs of the program, dense or implicit, with abstract leaves."""
        return list(map(abstract_value, self.out_trees, self.out_avals))

    def unflatten(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the outputs, dense or implicit, given the list of the leaves of all outputs."""
        pieces = split_list(leaves, [tree.num_leaves for tree in self.out_trees])
        outputs = list(map(jax.tree.unflatten, self.out_trees, pieces))
        for output, source in zip(outputs, self.out_sources, strict=True):
            with_source(output, source)
        return outputs

    def __call__(self, *values: Any) -> list[Any]:
        return self.unflatten(jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(values)))


def abstract_value(tree: Any, avals: Sequence[Any]) -> Any:
    """Return an array or an implicit array with the given tree structure and abstract leaves."""
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])


def value_type(value: Any) -> ValueType:
    """Return the tree structure and the abstract leaves of an array, or of a list of arrays.

    The arrays may be dense or implicit.

    **Raises:** `TypeError` that names the field, if a leaf is not an array.
    """
    leaves, treedef = jax.tree.flatten(value)
    try:
        return treedef, tuple(map(jax.typeof, leaves))
    except TypeError:
        for part in jax.tree.leaves(value, is_leaf=is_value):
            check_fields(part)  # raises an error that names the field
        raise


_staged: WeakKeyDictionary[Any, dict[Any, StagedProgram]] = WeakKeyDictionary()
clear_with_rules(_staged.clear)


def stage(
    primitive: str, jaxpr: Any, values: Sequence[Any], *, name: str | None = None
) -> StagedProgram:
    """Trace a jaxpr again on the leaves of its operands `values`.

    In the trace, implicit values use their rules. Also emit the events of the new program: records
    of the primitives that run on implicit operands. `primitive` is the name of the primitive that
    contains the jaxpr, and `name` is the name of the jitted function that the jaxpr is from.
    """
    staged = stage_without_events(primitive, jaxpr, values, name=name)
    emit_events(staged.events)
    return staged


def stage_to_labels(
    primitive: str, jaxpr: Any, values: Sequence[Any], count: int | None = None
) -> StagedProgram:
    """Trace a jaxpr again like `stage`, to a program whose outputs are dense arrays or labels.

    A label is an implicit array whose only leaf is the dense array. Other implicit outputs are
    materialized at the end of the program. If `count` is set, only the first `count` outputs are
    materialized, and the others can be of any type.
    """
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
    """Trace a jaxpr again like `stage`, but emit no events.

    The caller must emit the `events` of a program that it runs.

    **Arguments:**

    - `primitive`: the name of the primitive that contains the jaxpr.
    - `values`: the operands.
    - `forms`: a dict from the index of an output to `DENSE`, to materialize the output, or to the
      tree structure of the label to which the output is converted.
    - `name`: the name of the jitted function that the jaxpr is from.
    """
    treedef, avals = value_type(list(values))
    with enter_program(name):
        # All policies that record events share one program.
        policy = current_policy()
        with policy_in_force(RECORD) if must_replay_events(policy) else nullcontext():
            key = treedef, avals, frozenset(forms.items()), current_policy(), trace_context()
        programs = _staged.setdefault(jaxpr, {})
        if key not in programs:
            sources = tuple(map(find_source, values)) if policy is not ALLOW else ()
            arguments = close_jaxpr(jaxpr), treedef, avals, forms, sources
            programs[key] = _stage(find_primitive(primitive), *arguments)
    if programs[key].queries_tangents:
        may_be_tangents()  # for `record_tangent_queries` of the program around this one
    return programs[key].resolve(values)


def _stage(
    primitive: Primitive,
    jaxpr: Any,
    treedef: Any,
    avals: Sequence[Any],
    forms: Forms,
    sources: Sequence[Source],
) -> StagedProgram:
    """Trace a jaxpr again on the leaves of its operands, like `stage`, but without a cache.

    `treedef` and `avals` are the tree structure and the abstract leaves of the list of operands.
    `sources` has the weight paths of each operand, or is empty. `primitive` and `forms` are the
    same as in `stage_without_events`.
    """
    out_trees: list[Any] = []
    out_sources: list[Source] = []

    def on_leaves(*leaves: Any) -> list[Any]:
        values = jax.tree.unflatten(treedef, leaves)
        # In the trace, the source of an operand is its number and its weight paths. In each call,
        # `StagedProgram.resolve` replaces the number. The paths are for errors in this call.
        paths = [[path for path in paths_of(source) if path != FOUND] for source in sources]
        numbered_sources: list[Source] = [(i, *paths_of_i) for i, paths_of_i in enumerate(paths)]
        pairs = list(zip(values, numbered_sources, strict=False))  # empty without sources
        for value, source in pairs:
            with_source(value, source)
        known = leaf_sources(pairs) if sources else nullcontext()
        with known, mark_staging_trace():
            outputs = ImplicitTrace.run(jaxpr_as_fun(jaxpr), values)
        for i, form in forms.items():
            outputs[i] = _convert_output(primitive, outputs[i], form)
        out_sources.extend(map(source_of, outputs))
        out_trees.extend(map(jax.tree.structure, outputs))
        return jax.tree.leaves(outputs)

    events: list[Event] = []
    replays = must_replay_events(current_policy())
    event_context: Any = recorded_events() if replays else nullcontext(events)
    query_context: Any = record_tangent_queries() if IN_DERIVATIVE_RULE.value else nullcontext(())
    try:
        with query_context as tangent_queries, event_context as events:
            staged = jax.make_jaxpr(on_leaves)(*avals)
    except BaseException:
        emit_events(events)
        raise
    *out_avals, _ = split_list(staged.out_avals, [tree.num_leaves for tree in out_trees])
    return StagedProgram(
        jaxpr=staged,
        out_trees=tuple(out_trees),
        out_avals=tuple(map(tuple, out_avals)),
        events=tuple(events),
        line=user_line() if events else "",
        out_sources=tuple(out_sources),
        queries_tangents=bool(tangent_queries),
    )


def _convert_output(primitive: Primitive, output: Any, form: Any) -> Any:
    """Materialize an output if `form` is `DENSE`. Otherwise convert a dense output to a label.

    `form` is then the tree structure of the label. An output that cannot be converted is returned
    unchanged.
    """
    if form is DENSE:
        return make_dense(primitive, [output])[0]
    if isinstance(output, Value):
        return output
    label = jax.tree.unflatten(form, [output])
    return label if can_become_label(output, label) else output


def lift_references(*jaxprs: Any) -> tuple[list[Any], list[Any]]:
    """Turn the references (`jax.Ref`) that closed jaxprs capture into leading operands.

    A jaxpr captures a reference if a rule in it writes to a `vn.hijax.Box`. JAX rejects the program
    of a loop, a branch or a jit if a constant of the program is a reference.

    **Returns:** the list of references, and the list of jaxprs. Each jaxpr takes all references.
    """
    refs = {id(x): x for jaxpr in jaxprs for x in jaxpr.consts if isinstance(x, jax.Ref)}
    if not refs:
        return [], list(jaxprs)

    def lift(jaxpr: Any) -> Any:
        program, constants = open_jaxpr(jaxpr)

        def take_references(*args: Any) -> list[Any]:
            ref_by_id = dict(zip(refs, args, strict=False))  # the operands follow the references
            new_constants = [ref_by_id.get(id(x), x) for x in constants]
            return jaxpr_as_fun(close_jaxpr(program))(*new_constants, *args[len(refs) :])

        avals = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in jaxpr.in_avals
        ]
        return jax.make_jaxpr(take_references)(*refs.values(), *avals)

    return list(refs.values()), list(map(lift, jaxprs))


def capture_context(trace: ImplicitTrace) -> Callable[..., Callable[..., list[Any]]]:
    """Return a decorator for functions that JAX runs later, such as derivative rules.

    The decorated function takes and returns dense and implicit arrays. It wraps each implicit array
    in a tracer, as `trace` does, and calls the original function, so that the rules of implicit
    arrays run. During the call, the reaction to materialization and the place in the program (the
    named scopes) are the same as when `capture_context` was called. The decorator takes
    `is_derivative=True` for a derivative rule.
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
