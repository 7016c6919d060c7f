"""What a Box holds, and how programs read and write it.

Contents are *at home* in the trace in which they were made: outside of all transformations, or
inside of a function that is being traced. There they are a tree of values, and may change as they
like. So they may where a function is differentiated or mapped but not staged, for it runs as it is
called. A function that is staged (by jit, by a loop) has its own trace, and meets one `jax.Ref` for
each leaf: JAX knows how to thread those through the program, with a type that stays.

Contents that are at home outside of all transformations are differentiated by none, and store the
primal of what is written. JAX has a kind of reference for that, which a checkpoint writes once.
Those made inside of a function may be differentiated with it or not, which is only known as the
derivative is taken; `_carried` tells by the tangent of what was there before.
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

from ..._core.trace import ImplicitTrace, ImplicitTracer
from ..._core.value import is_value
from ..._jax.tracing import Trace, Tracer, current_trace, is_eager, set_current_trace
from ..mode import is_enabled
from ..types import is_typed, opened
from ..values import exposed
from .frames import Frame, forget_programs, frames, state
from .traces import (
    CHECKPOINT,
    CONDITION,
    delete,
    enclosing,
    is_deleted,
    is_mapping,
    is_staging,
    primal_in,
    staged_for,
)

# Threads that trace with a Box at once are to find the same references, of what was written last.
_lock = RLock()


def _unlock_child() -> None:
    """In the child of a fork, nobody is left to unlock what another thread had locked."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_child)


class BoxStructureError(TypeError):
    """A Box cannot change its structure in the innermost `jax.jit` that traces.

    With high types on, `vn.jit` then does the call of that jitted function, also if the function
    catches the error.
    """


class Contents:
    """A tree of arrays at home in the trace in which it is made.

    **Arguments:**

    - `leaves`, `treedef`: of the tree, as `flat` gives them.
    - `keeps_primals`: whether what is written is not differentiated. None has that follow from
      where they are at home.
    """

    fixed = False  # whether the references are another's, so that the structure must stay

    def __init__(self, leaves: Sequence[Any], treedef: Any, keeps_primals: bool | None = None):
        self.home: Trace = home_of(current_trace())
        with set_current_trace(self.home):
            self.outermost = is_eager()
        self.keeps_primals = self.outermost if keeps_primals is None else keeps_primals
        self.treedef = treedef
        self.refs: list[Any] | None = None
        self.version = 0  # counts the references that have been given up
        self.held = False  # whether a function that JAX keeps may hold the references
        self.written = False
        self._leaves: Any = leaves

    def __repr__(self) -> str:
        leaves = self._leaves if self.refs is None else self.refs[: self.treedef.num_leaves]
        types = [_type_name(x) for x in leaves]
        return f"Box({jax.tree.unflatten(self.treedef, types)})"

    # Reading.

    def tree(self) -> Any:
        """The contents as a program sees them here."""
        tree = jax.tree.unflatten(self.treedef, self.read())
        trace = current_trace()
        if type(trace) is not ImplicitTrace:
            return tree
        return jax.tree.map(trace.wrap, tree, is_leaf=is_value)

    def read(self) -> list[Any]:
        """The leaves as a program sees them here."""
        traces = self._traces_within()
        if not any(map(is_staging, traces)):
            return self._read_at_home()
        self._refuse_condition(traces)
        if not self.keeps_primals and any(map(is_checkpoint, traces)):
            # What is computed anew in the backward pass must not read what was written later.
            with set_current_trace(self.home):
                return self._read_at_home()
        self._note(traces)
        return [ref[...] for ref in self.references()[: self.treedef.num_leaves]]

    def _refuse_condition(self, traces: Sequence[Trace]) -> None:
        if any(staged_for(trace) == CONDITION for trace in traces):
            raise NotImplementedError(
                f"{self!r} is used in the condition of a while_loop. JAX's references do not show "
                "it the writes of the body. Carry the value in the loop instead."
            )

    def _read_at_home(self) -> list[Any]:
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
        """Whether JAX has deleted what the references are to."""
        refs = self.refs if self.outermost else None
        return any(map(is_deleted, refs or ()))

    def _traces_within(self) -> list[Trace]:
        """The traces from here up to the one in which this is at home."""
        traces = []
        for trace in enclosing(current_trace()):
            if trace is self.home:
                break
            traces.append(trace)
        return traces

    # Writing.

    def set(self, value: Any) -> None:
        """Writes other contents, from where the program is."""
        leaves, treedef = flat(value)
        traces = self._traces_within()
        if any(map(is_staging, traces)):
            self._write(leaves, treedef, traces)
        else:
            self._replace(*self._descended(leaves, treedef, traces))
        self.written = True

    def _replace(self, leaves: Sequence[Any], treedef: Any) -> None:
        """Writes at home, where the structure may change."""
        with _lock:
            if self.refs is not None and self._is_alike(leaves, treedef) and not self._is_lost():
                for ref, leaf in zip(self.refs, leaves, strict=False):
                    ref[...] = leaf
            else:
                self.give_up_references()
                self._leaves, self.treedef = leaves, treedef

    def _descended(
        self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]
    ) -> tuple[list[Any], Any]:
        """Values as they are at home: the primals of what is differentiated on the way."""
        for trace in traces:
            leaves = [primal_in(trace, leaf) for leaf in leaves]
            tree = jax.tree.map(_shown, jax.tree.unflatten(treedef, leaves))
            leaves, treedef = jax.tree.flatten(tree)
        with set_current_trace(self.home):
            leaves = list(map(_array, leaves))
            if self.keeps_primals and not self.outermost:
                leaves = list(map(lax.stop_gradient, leaves))
        for leaf in leaves:
            if isinstance(leaf, Tracer) and (self.outermost or leaf._trace in traces):
                raise ValueError(_foreign(self, leaf))
        return list(leaves), treedef

    def _write(self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]) -> None:
        """Writes in a function that is staged, to references."""
        leaves, treedef = open_leaves(leaves, treedef, primal=self.keeps_primals)
        self._refuse_condition(traces)
        if not self._is_alike(leaves, treedef):
            self._write_otherwise(leaves, treedef, traces)
            return
        if not self.keeps_primals and any(map(is_checkpoint, traces)):
            raise NotImplementedError(
                f"{self!r} was made inside a traced function and is written inside a "
                "jax.checkpoint of it, which would lose the derivative. Make the Box outside the "
                "function or inside the checkpoint, or return the value from the checkpoint."
            )
        self._note(traces)
        for ref, leaf in zip(self.references(), leaves, strict=False):
            self._write_one(ref, leaf)

    def _write_one(self, ref: Any, leaf: Any) -> None:
        if not self.keeps_primals and jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = _carried(ref[...], leaf)
        try:
            ref[...] = leaf
        except Exception as error:  # JAX's own class is Exception
            if "vmapped value" in str(error):
                raise ValueError(_foreign(self, leaf)) from None
            raise

    def _write_otherwise(
        self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]
    ) -> None:
        """Writes contents of another structure or type: `vn.jit` sees to that, if it is there."""
        frame = self._frame(traces)
        if frame is None:
            raise self._structure_error(leaves, treedef, traces)
        if self in frame.arguments:
            frame.note(self)
        if self.held:
            forget_programs()
        with set_current_trace(frame.trace):
            contents = Contents((), jax.tree.structure(None), self.keeps_primals)
        frame.replaced[self] = contents
        contents.set(jax.tree.unflatten(treedef, leaves))

    def _frame(self, traces: Sequence[Trace]) -> Frame | None:
        """The trace of `vn.jit` that stages what is running, with nothing staged in between."""
        if self.fixed or not frames():
            return None
        innermost = next(filter(is_staging, traces))
        return frames()[-1] if frames()[-1].trace is innermost else None

    def _structure_error(
        self, leaves: Sequence[Any], treedef: Any, traces: Sequence[Trace]
    ) -> TypeError:
        """Return the error for contents of another structure, for the innermost of the traces.

        With high types on, the error makes the call of a jitted function that is being traced
        start again: see `BoxStructureError`.
        """
        staged = next((s for s in map(staged_for, traces) if s), None)
        change = f"{self!r} cannot become {Contents(leaves, treedef)!r} here"
        keeps = "keeps the structure and the types of a Box"
        if staged == "jit":
            if is_enabled():
                state.changes_structure = True
                return BoxStructureError(
                    f"{change}: a function that is only traced (`lower`, `trace`, `eval_shape`, "
                    f"`make_jaxpr`) {keeps}. Call the function."
                )
            return TypeError(
                f"{change}: jax.jit {keeps}, and so does vn.jit if a function is only traced "
                "(`lower`, `trace`, `eval_shape`, `make_jaxpr`). Replace each jax.jit around this "
                "line by vn.jit, or turn high types on (vn.hijax.enabled), and call the function."
            )
        if staged is None and any(map(is_mapping, traces)):
            return TypeError(
                f"{change}: jax.vmap {keeps} that is passed to the mapped function. Set "
                "contents of the new structure before, or capture the Box."
            )
        where = f"the body of {staged}" if staged else "a function that JAX traces"
        return TypeError(
            f"{change}: {where} {keeps}, like the carry of a loop. Set contents of the new "
            "structure before."
        )

    def _is_alike(self, leaves: Sequence[Any], treedef: Any) -> bool:
        if self.refs is None:
            current, structure = open_leaves(self._leaves, self.treedef)
        else:
            current, structure = self.refs, self.treedef
        return treedef == structure and all(
            (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(current, leaves, strict=False)
        )

    # References.

    def shares(self, other: "Contents") -> bool:
        """Whether both are of the same references."""
        return bool(self.refs and other.refs and self.refs[0] is other.refs[0])

    def may_differ(self) -> bool:
        """Whether anything may have been written since they were made."""
        return self.written or self.refs is not None

    def open(self) -> None:
        """Has what is of a high type be a tree of its leaves, as it is outside of a program."""
        if self.refs is None:
            with set_current_trace(self.home):
                self._leaves, self.treedef = open_leaves(
                    self._leaves, self.treedef, self.keeps_primals
                )

    def references(self) -> list[Any]:
        """One for each leaf, at home where the contents are; one for contents without any."""
        with _lock:
            if self.refs is None:
                kind = "no_grad_no_remat" if self.keeps_primals else None
                self.open()
                with set_current_trace(self.home):
                    leaves = self._leaves or [jnp.zeros((), bool)]  # by which JAX knows the Box
                    self.refs = [jax.new_ref(leaf, kind=kind) for leaf in leaves]
                self._leaves = None
            return self.refs

    def give_up_references(self) -> None:
        """Before the structure changes: what was traced with them is traced anew.

        What was compiled ahead of time is not, and fails when it is called.
        """
        if self.refs is not None:
            if self.held and self.outermost:
                for ref in self.refs:
                    delete(ref)
            self.refs = None
            self.version += 1
            if self.held:
                forget_programs()
            self.held = False

    def _note(self, traces: Sequence[Trace]) -> None:
        for frame in frames():
            if frame.trace in traces:
                frame.note(self)
        innermost = next(filter(is_staging, traces))
        self.held |= not (frames() and frames()[-1].trace is innermost)

    def note_use(self) -> None:
        """Notes that the references are used where the program is."""
        traces = self._traces_within()
        if any(map(is_staging, traces)):
            self._note(traces)


def home_of(trace: Trace) -> Trace:
    """The trace that contents made in it are at home in: those of `implicit` are none of theirs."""
    return next(t for t in enclosing(trace) if type(t) is not ImplicitTrace)


def flat(value: Any) -> tuple[list[Any], Any]:
    """The leaves of contents as arrays, of which none is weakly typed, and their structure."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(_shown, value))
    return list(map(_array, leaves)), treedef


def open_leaves(leaves: Sequence[Any], treedef: Any, primal: bool = False) -> tuple[list[Any], Any]:
    """The same with what is of a high type as a tree of its leaves."""
    if not any(map(is_typed, leaves)):
        return list(leaves), treedef
    kept = list(map(lax.stop_gradient, leaves)) if primal else leaves
    return flat(jax.tree.map(opened, jax.tree.unflatten(treedef, kept)))


def _shown(x: Any) -> Any:
    """What a user sees of a value that stands for an implicit array somewhere."""
    if type(x) is ImplicitTracer:
        return jax.tree.map(_shown, x.value)
    return exposed(x)


def _array(leaf: Any) -> Any:
    if not hasattr(leaf, "aval"):
        try:
            leaf = jnp.asarray(leaf)
        except TypeError as error:
            raise TypeError(
                f"A Box must hold a pytree of arrays, not a {type(leaf).__name__}."
            ) from error
    aval = jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)
    return lax.convert_element_type(leaf, aval.dtype) if weak else leaf


def is_checkpoint(trace: Trace) -> bool:
    """Whether a trace is of the function of a `jax.checkpoint`."""
    return staged_for(trace) == CHECKPOINT


def _foreign(contents: Contents, leaf: Any) -> str:
    return (
        f"{_type_name(leaf)}, which is mapped (as by jax.vmap) or traced elsewhere, cannot be "
        f"written to {contents!r} from outside. Pass the Box to the mapped function, with a mapped "
        "axis on each leaf, or make it inside the function."
    )


def _type_name(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return str(x)
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


@jax.custom_jvp
def _carried(before: jax.Array, after: jax.Array) -> jax.Array:
    """`after`: with its tangent, if what was there before has one, and else without."""
    del before
    return after


@partial(_carried.defjvp, symbolic_zeros=True)
def _carried_jvp(primals: Any, tangents: Any) -> Any:
    out = _carried(*primals)
    before, after = tangents
    if isinstance(before, SymbolicZero):
        after = SymbolicZero(jax.typeof(out).to_tangent_aval())
    return out, after
