"""The trace of `implicit`, and functions that call a function in this trace.

Implicit values are tracers of this trace, so that primitives with such an operand run by rules. All
other primitives run in the trace outside of `implicit`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from .._jax.frames import warn_of_scales_without_codes
from .._jax.primitives import Primitive
from .._jax.tracing import ConcreteArray, Trace, Tracer, current_trace, is_eager, is_in_derivative
from .dispatch import dispatch
from .errors import reject_derivatives, reject_refs_and_float0
from .nesting import as_tracer, builds_values, enclosing_implicit, mixes_with_outer, use_trace
from .rules import CONTAINS_PROGRAMS, structural_rule
from .value import OpaqueNode, Value, has_all_leaves, is_opaque_leaf, is_value


class ImplicitTracer(Tracer):
    """The tracer of an implicit value in a program under `implicit`."""

    __slots__ = ("value",)

    def __init__(self, trace: "ImplicitTrace", value: Value):
        reject_derivatives(value)
        try:
            aval = value.aval()
        except Exception as error:
            reject_refs_and_float0([value], error)
            raise
        if not isinstance(aval, jax.core.ShapedArray):
            raise TypeError(
                f"{type(value).__name__}.aval() must return a jax.core.ShapedArray, as "
                f"jax.typeof(array) does, not {aval!r}."
            )
        if is_in_derivative(trace.parent):
            warn_of_scales_without_codes(value)
        super().__init__(trace, aval)
        self.value = value
        trace.holds_values = True

    def __repr__(self) -> str:
        return f"Implicit<{self.value!r}>"


class ImplicitTrace(Trace):
    """A trace that runs rules for primitives with an implicit operand of this trace.

    All other primitives go to `parent`, the trace that was current when `implicit` was called.
    `tag` identifies the call of `implicit`: if JAX runs a derivative rule of the program later, the
    rule has another trace with the same tag. `no_filter` is False if the call of `implicit` has a
    `filter_spec`.
    """

    __slots__ = ("holds_values", "no_filter", "outer", "parent", "tag")

    def __init__(self, parent: Trace, tag: object, no_filter: bool = True):
        super().__init__()
        self.parent: Any = parent
        self.tag, self.no_filter = tag, no_filter
        self.outer: Any = enclosing_implicit(parent)  # the trace of the enclosing call, or None
        self.holds_values = False  # whether a tracer of this trace was made
        self.requires_low = parent.requires_low  # of JAX: the trace takes no hijax types

    def wrap(self, x: Any) -> Any:
        """Return a tracer of this trace for an implicit value. Return anything else unchanged."""
        return ImplicitTracer(self, x) if isinstance(x, Value) else x

    def unwrap(self, x: Any) -> Any:
        """Return the implicit value in a tracer of this call. Return anything else unchanged."""
        return x.value if type(x) is ImplicitTracer and x._trace.tag is self.tag else x

    @classmethod
    def run(cls, program: Callable, values: Sequence[Any]) -> list[Any]:
        """Return the list `program(*values)`, in which implicit values use their rules.

        Unlike `redispatch`, use a trace even if all `values` are dense, because the program may
        build implicit values from them.
        """
        trace = cls(current_trace(), object())
        wrapped = list(map(trace.wrap, values))
        with use_trace(trace, trace):
            out = program(*wrapped)
        return list(map(trace.unwrap, out))

    def process_primitive(
        self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        """Run a primitive by `dispatch` if an operand is implicit, else in the parent trace.

        If no operand is implicit, but a jaxpr in `params` builds implicit values, run the rule of
        the primitive for all types, such as the rule of `scan`.
        """
        tag, parent = self.tag, self.parent
        for x in tracers:  # faster than any()
            if type(x) is ImplicitTracer and x._trace.tag is tag:
                run = dispatch
                break
        else:  # no operand is implicit
            if primitive not in CONTAINS_PROGRAMS or not builds_values(primitive, params):
                return parent.process_primitive(primitive, tracers, params)
            run = lambda primitive, values, params: structural_rule(primitive)(*values, **params)
        if mixes_with_outer(self, tracers):
            return parent.process_primitive(primitive, self._pack_operands(tracers), params)
        values = list(map(self.unwrap, tracers))
        with use_trace(parent, self.outer):
            try:
                out = run(primitive, values, params)
                # Wrap in the parent trace, because aval() of a type may run primitives.
                return list(map(self.wrap, out)) if primitive.multiple_results else self.wrap(out)
            except Exception as error:
                reject_refs_and_float0(values, error)
                raise

    def _pack_operands(self, tracers: Sequence[Any]) -> list[Any]:
        """Return the operands, with a tracer of the parent trace for each implicit value."""
        with use_trace(self.parent, self.outer):
            return [as_tracer(x) if isinstance(x, Value) else x for x in map(self.unwrap, tracers)]

    # JAX passes these primitives, which have functions as parameters, to methods of their own.
    # Their rules get this trace, too, because the functions may capture its tracers.

    def process_custom_jvp_call(
        self, primitive: Primitive, fun: Any, jvp: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        return self._call_custom(primitive, tracers, {**params, "fun": fun, "jvp": jvp})

    def process_custom_vjp_call(
        self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        params |= {"fun": fun, "fwd": fwd, "bwd": bwd}
        return self._call_custom(primitive, tracers, params)

    def _call_custom(
        self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]
    ) -> Sequence[Any]:
        """Run a `custom_jvp` or `custom_vjp` function by its rule for implicit operands."""
        if self.requires_low:  # No outer trace takes derivatives. JAX drops custom rules, too.
            return self._inline(params["fun"], tracers)
        with use_trace(self.parent, self.outer):
            return list(map(self.wrap, self._apply_structural_rule(primitive, tracers, params)))

    def process_shard_map(
        self, primitive: Primitive, f: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        with use_trace(self.parent, self.outer):
            out = self._apply_structural_rule(primitive, tracers, {"f": f, **params})
            return out.map(self.wrap)

    def _apply_structural_rule(
        self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Call the structural rule (see `rules.structural`) of a primitive on its operands."""
        if mixes_with_outer(self, tracers):
            tracers = self._pack_operands(tracers)
        return structural_rule(primitive)(*map(self.unwrap, tracers), trace=self, **params)

    def stage_value(self, val: Any) -> Any:
        return val if self.unwrap(val) is not val else self.parent.stage_value(val)

    def process_call(  # JAX < 0.12
        self, primitive: Primitive, f: Any, tracers: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        return self._inline(f, tracers)

    def _inline(self, fun: Any, tracers: Sequence[Any]) -> Any:
        """Call a `WrappedFun` of JAX, so that its primitives are processed by this trace."""
        with use_trace(self, self):
            return fun.call_wrapped(*tracers)


# Run functions.


Program = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function, its arguments and keywords


def call_program(program: Program) -> Any:
    fn, args, kwargs = program
    return fn(*args, **kwargs)


def redispatch(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`, in which implicit arguments use their rules.

    `function` must not capture implicit arrays. A user's function may capture some, so call such a
    function with `vn.implicit` instead.
    """
    return run(call_program, (function, args, kwargs))


def redispatch_isolated(function: Callable, /, *args: Any) -> Any:
    """Call `function(*args)` like `redispatch`, but treat implicit arrays of outer calls as dense.

    `redispatch` instead leaves a primitive with such an operand to the outer call of `implicit`.
    """
    return run(call_program, (function, args, {}), defers_to_outer=False)


def run(
    call: Callable[[Program], Any],
    program: Program,
    select: Callable[[Program], Sequence[bool]] | None = None,
    defers_to_outer: bool = True,
) -> Any:
    """Return `call(program)`, with implicit arrays replaced by tracers that run their rules.

    **Arguments:**

    - `call`: a function that calls a program, such as `call_program`.
    - `program`: a function, its arguments and its keywords.
    - `select`: a function that returns, for each leaf of `program`, whether the leaf is replaced.
      None replaces all implicit arrays.
    - `defers_to_outer`: whether a primitive with an implicit array of an outer call of `implicit`
      runs in the trace of that call. If False, the array counts as dense.
    """
    leaves, treedef = tree_flatten(program, is_opaque_leaf)
    selected = select(program) if select else [is_value(x) and has_all_leaves(x) for x in leaves]
    if True not in selected:
        # Without a filter, a program that is traced may build implicit values from dense ones.
        is_dense = is_eager() and not any(map(is_value, leaves))
        if select is not None or is_dense:
            return call(program)
    trace = ImplicitTrace(current_trace(), object(), no_filter=select is None)
    if not defers_to_outer:
        trace.outer = None
    wrapped = [ImplicitTracer(trace, x) if s else x for s, x in zip(selected, leaves, strict=True)]
    with use_trace(trace, trace):
        # Unflatten inside the trace: modules of flax.nnx remember the trace that they are made in.
        out = call(tree_unflatten(treedef, wrapped))
    if type(out) is not ConcreteArray:  # faster for most results
        out = jax.tree.map(trace.unwrap, out, is_leaf=lambda x: isinstance(x, OpaqueNode))
    trace.invalidate()
    return out
