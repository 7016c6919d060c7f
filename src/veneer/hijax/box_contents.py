"""The contents of a Box, and how programs read and write them.

Contents have a creation trace: the trace that was current when they were made. If no transformation
was active, this is JAX's evaluation trace, and the contents are concrete. How a program accesses
contents depends on the traces that were started since then and are still active:

- *No trace stages the program* (`jax.grad` and `jax.vmap` alone do not): the contents are a pytree
  of values, which may change its structure.
- *A trace stages the program* (`jax.jit`, loops, branches): the program reads and writes a
  `jax.Ref` for each leaf. JAX adds the references to the inputs of the jaxpr. Their types are
  fixed.

Concrete contents are not differentiated. They store primals, in JAX's references of the kind
"no_grad_no_remat", which `jax.checkpoint` writes only once. Contents made inside a function may
be differentiated together with the function. `_match_tangent` finds out when JAX computes the
derivative.
"""

import os
from collections.abc import Sequence
from functools import partial
from threading import RLock
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._core.trace import ImplicitTrace, ImplicitTracer
from .._core.value import is_value
from .._jax.tracing import Trace, Tracer, current_trace, is_eager, set_current_trace
from .box_traces import (
    JitFrame,
    clear_traced_functions,
    enclosing_traces,
    is_checkpoint,
    is_staging,
    primal_in,
    staged_for,
    state,
)
from .mode import is_enabled
from .types import is_typed, unpack
from .values import expose

# Held while references are made or replaced, so that all threads get the same references.
_lock = RLock()


if hasattr(os, "register_at_fork"):
    # A forked process has no thread that could release the lock.
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Contents:
    """The contents of a `Box`: a pytree of arrays, or of a `jax.Ref` for each array.

    It remembers the trace in which it was made, which decides how programs can access it.

    **Arguments:**

    - `leaves`, `treedef`: the pytree, as `flatten_contents` returns it.
    - `stops_gradients`: whether values are stored without derivatives. By default, this holds for
      concrete contents.
    """

    def __init__(self, leaves: Sequence[Any], treedef: Any, stops_gradients: bool | None = None):
        # `vn.implicit` only wraps values, so its traces do not count.
        traces = enclosing_traces(current_trace())
        self.creation_trace = next(t for t in traces if type(t) is not ImplicitTrace)
        with set_current_trace(self.creation_trace):
            self.is_concrete = is_eager()
        self.stops_gradients = self.is_concrete if stops_gradients is None else stops_gradients
        self.treedef = treedef
        self.refs: list[Any] | None = None
        self.version = 0  # the number of times that references were dropped
        self.in_jax_caches = False  # whether functions in JAX's caches may hold the references
        self.is_written = False
        self._leaves: Any = leaves

    def __repr__(self) -> str:
        leaves = self._leaves if self.refs is None else self.refs[: self.treedef.num_leaves]
        types = [_format_type(x) for x in leaves]
        return f"Box({jax.tree.unflatten(self.treedef, types)})"

    # Reading.

    def tree(self) -> Any:
        """Read the contents in the current trace, as a pytree of arrays and implicit arrays."""
        tree = jax.tree.unflatten(self.treedef, self.read())
        trace = current_trace()
        if type(trace) is not ImplicitTrace:
            return tree
        return jax.tree.map(trace.wrap, tree, is_leaf=is_value)

    def read(self) -> list[Any]:
        """Read the contents in the current trace, as a flat list of leaves."""
        traces = self._traces_inside()
        if not any(map(is_staging, traces)):
            return self._read_values()
        self._reject_condition(traces)
        if not self.stops_gradients and any(map(is_checkpoint, traces)):
            # The recomputation in the backward pass must not read values that are written later.
            with set_current_trace(self.creation_trace):
                return self._read_values()
        self.record_use()
        return [ref[...] for ref in self.references()[: self.treedef.num_leaves]]

    def _reject_condition(self, traces: Sequence[Trace]) -> None:
        """Raise an error if one of the traces builds the jaxpr of a condition of a `while_loop`."""
        if any(staged_for(trace) == "while_cond" for trace in traces):
            raise NotImplementedError(
                f"{self!r} is used in the condition of a while_loop. JAX's references do not show "
                "it the writes of the body. Carry the value in the loop instead."
            )

    def _read_values(self) -> list[Any]:
        with _lock:
            if self.refs is None:
                return list(self._leaves)
            if self._is_lost():
                raise RuntimeError(
                    f"The contents of {self!r} are lost, because a compiled function raised an "
                    "error or they were donated. Call set again."
                )
            return [ref[...] for ref in self.refs[: self.treedef.num_leaves]]

    def _is_lost(self) -> bool:
        """Return whether JAX has deleted the buffer of a reference to the contents."""
        return self.is_concrete and any(ref._refs._buf.is_deleted() for ref in self.refs or ())

    def _traces_inside(self) -> list[Trace]:
        """Return the traces that were started since the contents were made, innermost first.

        The first is the current trace. The trace in which the contents were made is excluded.
        """
        traces = []
        for trace in enclosing_traces(current_trace()):
            if trace is self.creation_trace:
                break
            traces.append(trace)
        return traces

    # Writing.

    def set(self, value: Any) -> None:
        """Replace the contents with a pytree of arrays and implicit arrays of the current trace."""
        leaves, treedef = flatten_contents(value)
        traces = self._traces_inside()
        if any(map(is_staging, traces)):
            self._write_staged(leaves, treedef, traces)
        else:
            self._write_values(*self._move_to_creation_trace(leaves, treedef, traces))
        self.is_written = True

    def _write_values(self, leaves: Sequence[Any], treedef: Any) -> None:
        """Replace the contents with a pytree whose leaves are values in the creation trace.

        The creation trace is the trace in which the contents were made. The structure may be new.
        """
        with _lock:
            if self.refs is not None and self._has_types(leaves, treedef) and not self._is_lost():
                for ref, leaf in zip(self.refs, leaves, strict=False):
                    ref[...] = leaf
            else:
                self._drop_references()
                self._leaves, self.treedef = leaves, treedef

    def _move_to_creation_trace(
        self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]
    ) -> tuple[list[Any], Any]:
        """Convert a pytree of the current trace to the trace in which the contents were made.

        `leaves` and `treedef` are the pytree, and so are the two results. `traces` are the traces
        that were started since the contents were made. A leaf that one of them differentiates
        becomes its primal. Raise ValueError if a leaf depends on these traces in another way, for
        example because `jax.vmap` maps it.
        """
        for trace in traces:
            leaves = [primal_in(trace, leaf) for leaf in leaves]
            tree = jax.tree.map(_unwrap, jax.tree.unflatten(treedef, leaves))
            leaves, treedef = jax.tree.flatten(tree)
        with set_current_trace(self.creation_trace):
            leaves = list(map(_as_strong_array, leaves))
            if self.stops_gradients and not self.is_concrete:
                leaves = list(map(lax.stop_gradient, leaves))
        for leaf in leaves:
            if isinstance(leaf, Tracer) and (self.is_concrete or leaf._trace in traces):
                raise self._foreign_value_error(leaf)
        return list(leaves), treedef

    def _write_staged(self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]) -> None:
        """Write a pytree to the references, while JAX traces a jaxpr.

        If its structure or a type is new, the contents are replaced (see `_change_structure`).
        """
        leaves, treedef = unpack_typed(leaves, treedef, stop_gradients=self.stops_gradients)
        self._reject_condition(traces)
        if not self._has_types(leaves, treedef):
            self._change_structure(leaves, treedef, traces)
            return
        if not self.stops_gradients and any(map(is_checkpoint, traces)):
            raise NotImplementedError(
                f"{self!r} was made inside a traced function and is written inside a "
                "jax.checkpoint of it, which would lose the derivative. Make the Box outside the "
                "function or inside the checkpoint, or return the value from the checkpoint."
            )
        self.record_use()
        self._write_references(self.references(), leaves)

    def _write_references(self, refs: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Write each leaf to its `jax.Ref`, with a tangent only if the `Ref` stores tangents."""
        for ref, leaf in zip(refs, leaves, strict=False):
            if not self.stops_gradients and jnp.issubdtype(leaf.dtype, jnp.inexact):
                leaf = _match_tangent(ref[...], leaf)
            try:
                ref[...] = leaf
            except Exception as error:  # JAX raises the base class
                if "vmapped value" in str(error):
                    raise self._foreign_value_error(leaf) from None
                raise

    def _foreign_value_error(self, leaf: Any) -> ValueError:
        return ValueError(
            f"{_format_type(leaf)}, which is mapped (as by jax.vmap) or traced elsewhere, cannot "
            f"be written to {self!r} from outside. Pass the Box to the mapped function, with a "
            "mapped axis on each leaf, or make it inside the function."
        )

    def _change_structure(
        self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]
    ) -> None:
        """Set contents of another structure, for the rest of the function that `vn.jit` traces now.

        Raise TypeError if the innermost of `traces` that builds a jaxpr was not started by
        `vn.jit`. Raise ValueError if the Box is both an argument of the function and captured by
        it.
        """
        frame = _find_frame(traces)
        if frame is None:
            raise self._structure_error(leaves, treedef, traces)
        if self in frame.arguments:
            frame.capture(self)  # raises
        if self.in_jax_caches:
            clear_traced_functions()
        with set_current_trace(frame.trace):
            contents = Contents((), jax.tree.structure(None), self.stops_gradients)
        frame.replaced[self] = contents
        contents.set(jax.tree.unflatten(treedef, leaves))

    def _structure_error(
        self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]
    ) -> TypeError:
        """Return the error for a write of a pytree with another structure or other types.

        Its message names the innermost function of JAX in `traces` that keeps the structure of a
        Box.
        """
        staged = next((s for s in map(staged_for, traces) if s), None)
        change = f"{self!r} cannot become {Contents(leaves, treedef)!r} here"
        keeps = "keeps the structure and the types of a Box"
        if staged == "jit":
            if is_enabled():
                # A call of the function continues by `vn.jit`, even if the function catches the
                # error: see `catch_structure_changes`.
                state.changes_structure = True
                return TypeError(
                    f"{change}: a function that is only traced (`lower`, `trace`, `eval_shape`, "
                    f"`make_jaxpr`) {keeps}. Call the function."
                )
            return TypeError(
                f"{change}: jax.jit {keeps}, and so does vn.jit if a function is only traced "
                "(`lower`, `trace`, `eval_shape`, `make_jaxpr`). Replace each jax.jit around this "
                "line by vn.jit, or turn high types on (vn.hijax.enabled), and call the function."
            )
        if staged is None and any(hasattr(trace, "axis_data") for trace in traces):
            return TypeError(
                f"{change}: jax.vmap {keeps} that is passed to the mapped function. Set "
                "contents of the new structure before, or capture the Box."
            )
        where = f"the body of {staged}" if staged else "a function that JAX traces"
        return TypeError(
            f"{change}: {where} {keeps}, like the carry of a loop. Set contents of the new "
            "structure before."
        )

    def _has_types(self, leaves: Sequence[Any], treedef: Any) -> bool:
        """Return whether the contents have the structure, shapes and dtypes of the given pytree."""
        if self.refs is None:
            current, structure = unpack_typed(self._leaves, self.treedef)
        else:
            current, structure = self.refs, self.treedef
        return treedef == structure and all(
            (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(current, leaves, strict=False)
        )

    # References.

    def unpack(self) -> None:
        """Replace each implicit array that is one leaf of the contents by its leaves."""
        if self.refs is None:
            with set_current_trace(self.creation_trace):
                self._leaves, self.treedef = unpack_typed(
                    self._leaves, self.treedef, self.stops_gradients
                )

    def references(self) -> list[Any]:
        """Return the references to the contents: a `jax.Ref` for each leaf.

        The first call makes them, in the trace in which the contents were made. Contents without
        leaves have one reference, by which JAX still recognizes the Box.
        """
        with _lock:
            if self.refs is None:
                kind = "no_grad_no_remat" if self.stops_gradients else None
                self.unpack()
                with set_current_trace(self.creation_trace):
                    leaves = self._leaves or [jnp.zeros((), bool)]
                    self.refs = [jax.new_ref(leaf, kind=kind) for leaf in leaves]
                self._leaves = None
            return self.refs

    def _drop_references(self) -> None:
        """Discard the references to the contents, whose structure is about to change.

        JAX traces functions that captured the references again. Functions that were compiled ahead
        of time fail at their next call.
        """
        if self.refs is None:
            return
        if self.in_jax_caches:
            clear_traced_functions()
            for ref in self.refs if self.is_concrete else ():
                ref._refs._buf.delete()
        self.refs = None
        self.version += 1
        self.in_jax_caches = False

    def record_use(self) -> None:
        """Record that the function that is traced now captures the references to the contents.

        Each `JitFrame` around it, the record of a trace by `vn.jit`, gets the contents. If another
        function of JAX started the innermost trace that builds a jaxpr, set `in_jax_caches`,
        because JAX's caches can then hold the references.
        """
        traces = self._traces_inside()
        if any(map(is_staging, traces)):
            for frame in state.frames:
                if frame.trace in traces:
                    frame.capture(self)
            self.in_jax_caches |= _find_frame(traces) is None


class ReferenceContents(Contents):
    """The contents of a Box that JAX passes to a function as references. Their types are fixed."""

    def __init__(self, refs: Sequence[Any], treedef: Any, stops_gradients: bool):
        super().__init__((), treedef, stops_gradients)
        self.refs = list(refs)

    def read(self) -> list[Any]:
        self._check_traces()
        return self._read_values()

    def set(self, value: Any) -> None:
        self._check_traces()
        leaves, treedef = unpack_typed(
            *flatten_contents(value), stop_gradients=self.stops_gradients
        )
        if not self._has_types(leaves, treedef):
            traces = [*self._traces_inside(), self.creation_trace]
            raise self._structure_error(leaves, treedef, traces)
        self._write_references(self.refs or (), leaves)

    def _check_traces(self) -> None:
        self._reject_condition(self._traces_inside())
        self.record_use()
        if not self.stops_gradients and any(map(is_checkpoint, enclosing_traces(current_trace()))):
            raise NotImplementedError(
                f"{self!r} was made inside a traced function and is an argument of a "
                "jax.checkpoint in it, which would lose the derivative of its contents. Make the "
                "Box outside the function or inside the checkpoint."
            )


def _find_frame(traces: Sequence[Trace]) -> JitFrame | None:
    """Return the `JitFrame` of the innermost of `traces` that builds a jaxpr.

    Return None if `vn.jit` did not start that trace.
    """
    innermost = next(filter(is_staging, traces))
    frame = state.frames[-1] if state.frames else None
    return frame if frame and frame.trace is innermost else None


def flatten_contents(value: Any) -> tuple[list[Any], Any]:
    """Flatten the new contents of a `Box`: return the leaves as arrays, and the tree structure.

    The arrays have no weak types. Raise TypeError if a leaf is neither an array nor a number.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(_unwrap, value))
    return list(map(_as_strong_array, leaves)), treedef


def unpack_typed(
    leaves: Sequence[Any], treedef: Any, stop_gradients: bool = False
) -> tuple[list[Any], Any]:
    """Replace each implicit array that is one leaf of a pytree by its leaves.

    Return the leaves and the structure of the new pytree. If there is such a leaf and
    `stop_gradients` is true, the results have no derivatives.
    """
    if not any(map(is_typed, leaves)):
        return list(leaves), treedef
    if stop_gradients:
        leaves = list(map(lax.stop_gradient, leaves))
    return flatten_contents(jax.tree.map(unpack, jax.tree.unflatten(treedef, leaves)))


def _unwrap(x: Any) -> Any:
    """Return the implicit array in a tracer of `vn.implicit`, a `HighArray` or a `Tangent`.

    Any other `x` is returned unchanged.
    """
    return jax.tree.map(_unwrap, x.value) if type(x) is ImplicitTracer else expose(x)


def _as_strong_array(leaf: Any) -> Any:
    if not hasattr(leaf, "aval"):
        try:
            leaf = jnp.asarray(leaf)
        except TypeError as error:
            raise TypeError(
                f"A Box must hold a pytree of arrays, not a {type(leaf).__name__}."
            ) from error
    aval = jax.typeof(leaf)
    is_weak = getattr(aval, "weak_type", False)
    return lax.convert_element_type(leaf, aval.dtype) if is_weak else leaf


def _format_type(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return str(x)
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


@jax.custom_jvp
def _match_tangent(before: jax.Array, after: jax.Array) -> jax.Array:
    """Return `after`, with its tangent if `before`, the value that it replaces, has a tangent.

    Otherwise JAX's reference stores no tangents, and the result has none.
    """
    del before
    return after


@partial(_match_tangent.defjvp, symbolic_zeros=True)
def _match_tangent_jvp(primals: Any, tangents: Any) -> Any:
    out = _match_tangent(*primals)
    before, after = tangents
    if isinstance(before, SymbolicZero):
        after = SymbolicZero(jax.typeof(out).to_tangent_aval())
    return out, after
