"""`vn.jit`: `jax.jit` for functions of implicit arrays and of Boxes.

Implicit arrays are pytrees, as arguments and as results, so JAX's C++ code calls the compiled
function: a call costs the same as a call with the leaves.

The compiled function takes the contents of each Box among the arguments as values. Besides the
results of the function, it returns the new contents of these Boxes, and of captured Boxes whose
structure the function changes. `Jitted` then writes the contents to the Boxes. So one trace is
enough, although the structure is known only after the trace.

Other captured Boxes are passed as references, a `jax.Ref` for each leaf. If the structure of such a
Box changes later, its references are replaced, and `Jitted` traces the function again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet

import jax

from .._core.surface.implicit import implicit
from .._jax.frames import jax_caller
from .._jax.hijax import (
    extend_options_to_pair,
    get_jit_options,
    get_options_key,
    has_result_placement,
    jit_with_options,
    weakref_lru_cache,
)
from .._jax.tracing import Tracer, current_trace, is_eager
from .box import Box, boxes_in
from .box_contents import Contents
from .box_traces import JitFrame, alias_error, get_latest, state
from .mode import is_enabled


def jit(function: Callable | None = None, /, **options: Any) -> Any:
    """Compile a function like `jax.jit`. The function can take implicit arrays and write Boxes.

    Without high types (`vn.hijax.enabled`), this compiles `vn.implicit(function)`. With high types
    on, it compiles the function itself.

    The function may change the structure, shapes and dtypes of the contents of a `vn.hijax.Box`
    that is an argument or a captured variable. If tracing raises an error, the contents stay
    unchanged. If the compiled program raises an error, captured Boxes that it writes lose their
    contents, and you must call `set` again. A Box among the results is a new Box with the same
    contents.

    **Arguments:**

    - `function`: the function. Without it, `vn.jit` returns a decorator.
    - `options`: the keywords of `jax.jit`, such as `static_argnums` and `donate_argnums`.

    **Returns:** a function of the same arguments, with the methods `trace`, `lower`, `eval_shape`
    and `clear_cache` of `jax.jit`. In `trace`, `lower` and `eval_shape`, the contents of a Box must
    keep their structure, shapes and dtypes.

    **Raises:** The returned function raises `ValueError` if a Box is passed to it twice, or is both
    an argument and a captured variable.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> vn.jit(lambda x, w: x @ w)(jnp.ones((1, 2)), w).tolist()
    [[1.0, 1.0]]
    >>> @vn.jit
    ... def collect(seen, x):
    ...     seen.set([*(seen.get() or []), x.sum()])
    >>> seen = vn.hijax.Box()
    >>> collect(seen, jnp.ones(3))
    >>> collect(seen, jnp.ones(4))
    >>> [x.item() for x in seen.get()]
    [3.0, 4.0]
    """
    if function is None:
        return partial(jit, **options)
    return Jitted(function, get_jit_options(jax.jit(function, **options)))


class Jitted:
    """The function that `vn.jit` returns.

    It has a `TracedFunction` for each structure of the Boxes that the function captures. `options`
    are the options of `jax.jit`, as `get_jit_options` returns them.
    """

    def __init__(self, function: Callable, options: Any):
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (function if is_enabled() else implicit(function))(*args, **kwargs)

        self._new_program = partial(TracedFunction, run, options)
        self._programs = [self._new_program()]
        self._function = function
        self._plain: Any = jit_with_options(run, options)
        update_wrapper(self, function, updated=())
        # A callable object may have attributes of the same names. Those of `Jitted` come first.
        self.__dict__ = {**getattr(function, "__dict__", {}), **self.__dict__}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program = self._programs[-1]
        if program.captured and not program.is_current():
            program = self._current_program()
        # Check before a call that writes to references or deletes donated contents. Other calls are
        # checked afterwards, and only if the arguments contain Boxes, so that calls without Boxes
        # are fast.
        if check_first := bool(program.held_refs or program.donates):
            program.reject_aliases((args, kwargs))
        # While JAX flattens the arguments, `Box.tree_flatten` adds each Box to `state.flattened`,
        # and returns values instead of references.
        boxes: list[Box] = []
        before, state.flattened = state.flattened, boxes
        try:
            out = program.compiled(*args, **kwargs)
        finally:
            state.flattened = before
        if program.captured and not is_eager():
            # If JAX did not trace the program again, the enclosing traces have recorded no use.
            for contents in list(program.captured):
                contents.record_use()
        if boxes and not check_first:
            program.reject_aliases((args, kwargs))
        if type(out) is tuple and out and type(out[-1]) is WrittenContents:
            out, written = out
            written.write_to_boxes(boxes)
        return out

    def _current_program(self) -> "TracedFunction":
        """Return the `TracedFunction` for the present contents of captured Boxes, or a new one."""
        program = next((p for p in self._programs if p.is_current()), None)
        if program is None:
            program = self._new_program()
            self._programs = [p for p in self._programs if p.has_references()] + [program]
        return program

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"vn.jit({self._function!r})"

    def clear_cache(self) -> None:
        """Clear the traced and compiled programs."""
        self._programs = [self._new_program()]
        self._plain.clear_cache()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the function, as `jax.jit(function).trace` does."""
        return self._plain.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the function, as `jax.jit(function).lower` does."""
        return self._plain.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shapes and dtypes of the results, as `jax.jit(function).eval_shape` does."""
        return self._plain.eval_shape(*args, **kwargs)


#: The functions that `vn.jit` itself passes to `jax.jit`. `catch_structure_changes` skips them.
_traced_by_jitted: WeakSet = WeakSet()


class TracedFunction:
    """A function that `vn.jit` compiles by `jax.jit`, with the Boxes that it captures.

    **Arguments:**

    - `function`, `options`: the function, and the options of `jax.jit`.
    """

    def __init__(self, function: Callable, options: Any):
        # From the contents of a captured Box to their version when the function was traced.
        self.captured: Any = WeakKeyDictionary()
        self.replaced: Any = WeakSet()  # contents of captured Boxes whose structure changes
        # All references in the compiled programs. An inner function that JAX has traced before can
        # add references without adding contents to `captured`.
        self.held_refs: list[Any] = []
        self.donates = bool(options.donate_argnums or options.donate_argnames)
        # If `options` set shardings or layouts of results, always return a pair of the results and
        # the contents of Boxes. So the options apply only to the results.
        self.returns_pair = has_result_placement(options)

        @wraps(function)
        def trace(*args: Any, **kwargs: Any) -> Any:
            return self._trace(function, *args, **kwargs)

        _traced_by_jitted.add(trace)
        options = extend_options_to_pair(options) if self.returns_pair else options
        self.compiled: Any = jit_with_options(trace, options)

    def is_current(self) -> bool:
        """Return whether the compiled programs hold the present references of captured Boxes.

        If not, the function must be traced again.
        """
        return self.has_references() and all(get_latest(c) is c for c in self.captured)

    def has_references(self) -> bool:
        """Return whether all captured Boxes still have the references they had when traced."""
        return all(c.version == version for c, version in self.captured.items())

    def reject_aliases(self, arguments: Any) -> None:
        """Raise ValueError if the arguments contain a Box twice or a captured Box."""
        passed = [get_latest(box._contents) for box in boxes_in(arguments)]
        # Boxes that JAX has rebuilt from the same references have the same contents.
        keys = [id(c.refs[0] if c.refs else c) for c in passed]
        for i, contents in enumerate(passed):
            if keys[i] in keys[:i]:
                raise ValueError(
                    f"{contents!r} is passed twice to a jitted function, which would see two "
                    "separate Boxes. Pass it once."
                )
            if contents in self.captured or contents in self.replaced:
                raise alias_error(contents)
        _reject_held(passed, self.held_refs)

    def _trace(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the function in a new `JitFrame`, while JAX traces it, and return its results.

        Return a pair of the results and `WrittenContents` if there are new contents to write to
        Boxes, or if `returns_pair` is true, so that every call returns a pair.
        """
        flattened, state.flattened = state.flattened, None
        assert flattened is not None
        try:
            trace = current_trace()
            # Under jax.jit, JAX has rebuilt the Boxes among the arguments in this trace, in the
            # order of `flattened`. Under jax.disable_jit, the arguments contain the original Boxes.
            candidates = boxes_in((args, kwargs)) if flattened else []
            boxes = [box for box in candidates if box._contents.creation_trace is trace]
            arguments = [get_latest(box._contents) for box in flattened[: len(boxes)]]
            with JitFrame(trace, self.captured, arguments) as frame:
                out = function(*args, **kwargs)
            jaxpr: Any = getattr(trace, "frame", None)  # None under jax.disable_jit
            constants = jaxpr.constvar_to_val.values() if jaxpr else ()
            refs = [x for x in constants if isinstance(x, jax.Ref)]
            _reject_held(arguments, refs)
            self.held_refs += [ref for ref in refs if not isinstance(ref, Tracer)]
            self.replaced.update(frame.replaced)
            written = _collect_written(frame, boxes, returns_all=self.donates)
            return (out, written) if written.trees or self.returns_pair else out
        finally:
            state.flattened = flattened


def _reject_held(passed: Sequence[Contents], held_refs: Sequence[Any]) -> None:
    """Raise ValueError if a Box is both an argument of a function and captured by it.

    `passed` has the contents of each Box among the arguments. `held_refs` has all references that
    the function captures.
    """
    for contents in passed:
        if any(ref is held for ref in contents.refs or () for held in held_refs):
            raise alias_error(contents)


@partial(jax.tree_util.register_dataclass, data_fields=["trees"], meta_fields=["targets"])
@dataclass
class WrittenContents:
    """The new contents of Boxes, which a compiled function returns besides its results."""

    trees: list[Any]  # pytrees of arrays
    # For each tree, the index of a Box among the arguments, or the old contents of a captured Box.
    # The reference is weak because JAX keeps it as long as the compiled function.
    targets: tuple[int | ReferenceType[Contents], ...]

    def write_to_boxes(self, boxes: Sequence[Box]) -> None:
        """Write the new contents, which the compiled function returned, to the Boxes.

        `boxes` are the Boxes among the arguments of this call, in order.
        """
        for target, tree in zip(self.targets, self.trees, strict=True):
            contents = boxes[target]._contents if isinstance(target, int) else target()
            if contents is not None:  # None if the Box was deleted
                get_latest(contents).set(tree)


def _collect_written(
    frame: JitFrame, boxes: Sequence[Box], *, returns_all: bool
) -> WrittenContents:
    """Return the contents that the traced function leaves in Boxes, for `vn.jit` to write back.

    These are the contents of captured Boxes whose structure changes, and of those `boxes`, the
    Boxes among the arguments, that the function may have written. With `returns_all`, return the
    contents of all `boxes`, because their old contents are donated.
    """
    # A Box with references may have been written by an inner function that JAX traced, such as the
    # body of a loop. Such a write is not seen as `is_written` here.
    pairs: list[tuple[int | ReferenceType[Contents], Contents]] = [
        (i, box._contents)
        for i, box in enumerate(boxes)
        if returns_all or box._contents.is_written or box._contents.refs is not None
    ]
    pairs += [(ReferenceType(c), contents) for c, contents in frame.replaced.items()]
    trees = []
    for _, contents in pairs:
        contents.unpack()  # a compiled function returns leaves, not typed values
        trees.append(jax.tree.unflatten(contents.treedef, contents.read()))
    return WrittenContents(trees, tuple(target for target, _ in pairs))


# With high types on, `jax.jit` calls a function that changes the structure of a Box by `vn.jit`.


@weakref_lru_cache  # JAX clears it together with its own caches
def _jitted_cell(function: Callable, key: tuple[Any, ...]) -> list[Jitted]:
    """Return the list in which `catch_structure_changes` keeps the `Jitted` for a function.

    The list is the same in each call with the same arguments, and empty at first. `key` identifies
    the options of the `jax.jit`.
    """
    return []


def catch_structure_changes(infer_params: Callable) -> Callable:
    """Wrap JAX's function that traces a jitted function for the primitive `jit`.

    It returns the parameters of the primitive. But if a call of the jitted function changes the
    structure of a Box, the wrapper returns a `Jitted` in their place, which `run_jitted` calls. A
    trace without a call (`lower`, `make_jaxpr`) raises TypeError.
    """

    def infer_or_make_jitted(function: Any, options: Any, args: Any, kwargs: Any) -> Any:
        applies = is_enabled() and function not in _traced_by_jitted
        if not applies or jax_caller() != "cache_miss":  # JAX's function for a call
            return infer_params(function, options, args, kwargs)
        cell = _jitted_cell(function, get_options_key(options))
        if not cell:
            before, state.changes_structure = state.changes_structure, False
            try:
                parameters = infer_params(function, options, args, kwargs)
            except Exception:  # writing contents of another structure raises and sets the flag
                if not state.changes_structure:
                    raise
            finally:
                changes, state.changes_structure = state.changes_structure, before
            if not changes:
                return parameters
            reference = ReferenceType(function)  # the cell must not keep the function alive

            def call(*args: Any, **kwargs: Any) -> Any:
                return reference()(*args, **kwargs)  # type: ignore[misc]

            update_wrapper(call, function)
            del call.__wrapped__  # type: ignore[attr-defined]
            cell.append(Jitted(call, options))
        return cell[0], []

    return infer_or_make_jitted


def run_jitted(run: Callable) -> Callable:
    """Wrap JAX's function that runs a jitted function with the parameters of the primitive `jit`.

    If `catch_structure_changes` has returned a `Jitted` in place of the parameters, the wrapper
    calls it with the original arguments.
    """

    def run_or_call(parameters: Any, flat: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if type(parameters) is not Jitted:
            return run(parameters, flat, function, args, kwargs)
        out = parameters(*args, **kwargs)
        # With None for the compiled program, JAX calls this function again from Python next time.
        return out, [], None, [], SimpleNamespace(effects=(), consts=()), None, None, []

    return run_or_call
