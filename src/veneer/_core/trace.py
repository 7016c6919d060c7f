"""The trace of `implicit`, which wraps only implicit values, so dense code costs nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._jax.primitives import Primitive
from .._jax.tracing import Trace, Tracer, current_trace, is_in_derivative
from .dispatch import dispatch
from .errors import reject_derivatives, reject_leaves, warn_of_scales_without_codes
from .nesting import (
    as_tracer,
    builds_values,
    enclosing_implicit,
    enter,
    entered,
    leave,
    mixes_with_outer,
)
from .rules import CONTAINS_PROGRAMS, structural_rule
from .value import Value


class ImplicitTracer(Tracer):
    """The tracer of an implicit value in a program under `implicit`."""

    __slots__ = ("value",)

    def __init__(self, trace: "ImplicitTrace", value: Value):
        reject_derivatives(value)
        try:
            aval = value.aval()
        except Exception as error:
            reject_leaves([value], error)
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

    `tag` identifies the values of one call of `implicit`, also in functions that run later in
    another trace. `outer` is the trace of the enclosing call of `implicit` (see `nesting.py`).
    """

    __slots__ = ("holds_values", "no_filter", "outer", "parent", "tag")

    def __init__(self, parent: Trace, tag: object, no_filter: bool = True):
        super().__init__()
        self.parent: Any = parent
        self.outer, self.holds_values = enclosing_implicit(parent), False
        self.tag, self.no_filter = tag, no_filter
        self.requires_low = parent.requires_low

    def wrap(self, x: Any) -> Any:
        """Return a tracer for an implicit value, and anything else unchanged."""
        return ImplicitTracer(self, x) if isinstance(x, Value) else x

    def unwrap(self, x: Any) -> Any:
        """The inverse of `wrap`."""
        return x.value if type(x) is ImplicitTracer and x._trace.tag is self.tag else x

    @classmethod
    def run(cls, program: Callable, values: Sequence[Any]) -> list[Any]:
        """Run a program in a new trace, because it may build implicit values from dense ones."""
        trace = cls(current_trace(), object())
        wrapped = list(map(trace.wrap, values))
        with entered(trace, trace):
            out = program(*wrapped)
        return list(map(trace.unwrap, out))

    def process_primitive(
        self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        tag, parent = self.tag, self.parent
        for x in tracers:
            if type(x) is ImplicitTracer and x._trace.tag is tag:
                run = dispatch
                break
        else:
            if primitive not in CONTAINS_PROGRAMS or not builds_values(primitive, params):
                return parent.process_primitive(primitive, tracers, params)
            run = lambda primitive, values, params: structural_rule(primitive)(*values, **params)
        if mixes_with_outer(self, tracers):
            return parent.process_primitive(primitive, self._packed(tracers), params)
        values = list(map(self.unwrap, tracers))
        state = enter(parent, self.outer)
        try:
            out = run(primitive, values, params)
            # Inside `enter`, because aval() of a type may compute.
            return list(map(self.wrap, out)) if primitive.multiple_results else self.wrap(out)
        except Exception as error:
            reject_leaves(values, error)
            raise
        finally:
            leave(state)

    def _packed(self, tracers: Sequence[Any]) -> list[Any]:
        """Return the operands as arrays of the parent trace."""
        with entered(self.parent, self.outer):
            return [as_tracer(x) if isinstance(x, Value) else x for x in map(self.unwrap, tracers)]

    # JAX passes these primitives, which have functions as parameters, to methods of their own.
    # Their rules take the functions and this trace as parameters.

    def process_custom_jvp_call(
        self,
        primitive: Primitive,
        fun: Any,
        jvp: Any,
        tracers: Sequence[Any],
        /,
        *,
        symbolic_zeros: bool,
    ) -> Any:
        if self.requires_low:  # no derivative is taken outside, so JAX drops the rule too
            return self._inline(fun, tracers)
        functions = {"fun": fun, "jvp": jvp, "symbolic_zeros": symbolic_zeros}
        with entered(self.parent, self.outer):
            return list(map(self.wrap, self._by_rule(primitive, tracers, functions)))

    def process_custom_vjp_call(
        self,
        primitive: Primitive,
        fun: Any,
        fwd: Any,
        bwd: Any,
        tracers: Sequence[Any],
        /,
        *,
        out_trees: Callable,
        symbolic_zeros: bool,
    ) -> Any:
        if self.requires_low:
            return self._inline(fun, tracers)
        functions = {"fun": fun, "fwd": fwd, "bwd": bwd, "out_trees": out_trees}
        functions["symbolic_zeros"] = symbolic_zeros
        with entered(self.parent, self.outer):
            return list(map(self.wrap, self._by_rule(primitive, tracers, functions)))

    def process_shard_map(
        self, primitive: Primitive, f: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        with entered(self.parent, self.outer):
            return self._by_rule(primitive, tracers, {"f": f, **params}).map(self.wrap)

    def _by_rule(self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]) -> Any:
        if mixes_with_outer(self, tracers):
            tracers = self._packed(tracers)  # the functions may still capture values of this trace
        return structural_rule(primitive)(*map(self.unwrap, tracers), trace=self, **params)

    def stage_value(self, val: Any) -> Any:
        return val if self.unwrap(val) is not val else self.parent.stage_value(val)

    def process_call(  # JAX < 0.12
        self, primitive: Primitive, f: Any, tracers: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        del primitive, params
        return self._inline(f, tracers)

    def _inline(self, fun: Any, tracers: Sequence[Any]) -> Any:
        with entered(self, self):
            return fun.call_wrapped(*tracers)
