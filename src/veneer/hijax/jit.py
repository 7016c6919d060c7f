"""`vn.jit`: `jax.jit` for functions of implicit arrays and of Boxes.

Implicit arrays are pytrees, as arguments and as results, so that C++ calls what is compiled: a call
costs what it costs with their leaves. JAX asks a Box in the arguments for its leaves, and gets the
contents. What the function writes is among its results, and so are contents of another structure
that it writes to a Box that it closes over. So it is traced once, and its Boxes are written after.

Of contents that a function closes over it holds references. Once those have been given up for
others, since the structure has changed, the function is traced anew.
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet

import jax

from .._core.surface.implicit import implicit
from .._jax.hijax import (
    extend_options_to_pair,
    get_jit_options,
    get_options_key,
    has_result_placement,
    jit_with_options,
    weakref_lru_cache,
)
from .._jax.tracing import Tracer, current_trace, is_eager, jax_caller
from .box.box import Box, is_box
from .box.contents import Contents
from .box.frames import Frame, passed_and_held, resolved, state
from .box.traces import held_by
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
    """A function under `vn.jit`: one program of JAX's for each state of what it closes over.

    **Arguments:**

    - `function`: the function.
    - `options`: the options of `jax.jit`, parsed.
    """

    def __init__(self, function: Callable, options: Any):
        self._new_program = partial(Specialisation, function, options)
        self._programs = [self._new_program()]
        self._function = function
        self._plain: Any = jit_with_options(_wrapped(function, partial(_run, function)), options)
        update_wrapper(self, function, updated=())
        # A callable object may have attributes with the names of these.
        self.__dict__ = {**getattr(function, "__dict__", {}), **self.__dict__}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program = self._programs[-1]
        if program.captured and not program.fits():
            program = self._fitting()
        if program.held:
            program.refuse_held(args, kwargs)
        if program.donates:  # for what a Box held would be gone
            program.refuse_aliases(args, kwargs)
        boxes: list[Box] = []
        before, state.flattened = state.flattened, boxes
        try:
            out = program.compiled(*args, **kwargs)
        finally:
            state.flattened = before
        if program.captured and not is_eager():
            # Where it was traced before, those around it have not seen what it holds.
            for contents in list(program.captured):
                contents.note_use()
        if boxes and not program.donates:
            program.refuse_aliases(args, kwargs)
        if type(out) is tuple and out and type(out[-1]) is WrittenContents:
            out, written = out
            written.finish(boxes)
        return out

    def _fitting(self) -> "Specialisation":
        for program in self._programs:
            if program.fits():
                break
        else:
            program = self._new_program()
            self._programs = [p for p in self._programs if p.may_fit()] + [program]
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


#: Functions that `vn.jit` has wrapped. `let_boxes_change` must not wrap them again.
_wrappers: WeakSet = WeakSet()


class Specialisation:
    """What JAX has traced of a function, with the contents that it holds references to."""

    def __init__(self, function: Callable, options: Any):
        self.captured: Any = WeakKeyDictionary()  # with their versions
        self.replaced: Any = WeakSet()  # from outside, of which it changes the structure
        self.held: list[Any] = []  # references: of the captured, and of functions traced before
        # What a Box holds is gone with the arguments that are donated, and is to come back.
        self.donates = bool(options.donate_argnums or options.donate_argnames)
        # Shardings and layouts apply to the results, not to the contents of Boxes.
        self.splits = has_result_placement(options)
        wrapped = _wrapped(function, partial(self._traced, function))
        _wrappers.add(wrapped)
        options = extend_options_to_pair(options) if self.splits else options
        self.compiled: Any = jit_with_options(wrapped, options)

    def fits(self) -> bool:
        """Whether what it holds is still what a function would find."""
        return self.may_fit() and all(resolved(c) is c for c in self.captured)

    def may_fit(self) -> bool:
        """Whether it holds nothing that has been given up."""
        return all(c.version == version for c, version in self.captured.items())

    def refuse_held(self, *trees: Any) -> None:
        """Refuses arguments with a Box that the program holds."""
        _refuse_held([resolved(box._contents) for box in _boxes(*trees)], self.held)

    def refuse_aliases(self, *trees: Any) -> None:
        """Refuses arguments with one Box twice, or with one that the function closes over."""
        contents = [resolved(box._contents) for box in _boxes(*trees)]
        for i, one in enumerate(contents):
            if any(one is other or one.shares(other) for other in contents[:i]):
                raise ValueError(
                    f"{one!r} is passed twice to a jitted function, which would see two separate "
                    "Boxes. Pass it once."
                )
        for one in contents:
            if one in self.captured or one in self.replaced:
                raise ValueError(passed_and_held(one))

    def _traced(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        flattened, state.flattened = state.flattened, None
        assert flattened is not None
        try:
            trace = current_trace()
            # Those that JAX has taken apart: none, under jax.disable_jit.
            met = len(flattened)
            boxes = [b for b in _boxes(args, kwargs) if met and b._contents.home is trace]
            contents = [resolved(box._contents) for box in flattened[: len(boxes)]]
            with Frame(trace, self.captured, contents) as frame:
                out = _run(function, *args, **kwargs)
            held = [x for x in held_by(trace) if isinstance(x, jax.Ref)]
            _refuse_held(contents, held)
            self.held += [ref for ref in held if not isinstance(ref, Tracer)]
            self.replaced.update(frame.replaced)
            written = _collect_written(frame, boxes, returns_all=self.donates)
            return (out, written) if written.trees or self.splits else out
        finally:
            state.flattened = flattened


def _wrapped(function: Callable, by: Callable) -> Callable:
    """A function of another's signature and name, which `jax.jit` asks for."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return by(*args, **kwargs)

    return update_wrapper(wrapper, function)


def _run(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return (function if is_enabled() else implicit(function))(*args, **kwargs)


def _boxes(*trees: Any) -> list[Box]:
    return [x for x in jax.tree.leaves(trees, is_leaf=is_box) if is_box(x)]


Target = int | ReferenceType[Contents]


@jax.tree_util.register_pytree_node_class
class WrittenContents:
    """The new contents of the Boxes that a function has written, returned beside its results.

    **Arguments:**

    - `trees`: contents.
    - `targets`: of each, the number of the Box among the arguments, or what it takes the place of:
      by a weak reference, for JAX keeps this for as long as what is compiled.
    """

    def __init__(self, trees: Sequence[Any], targets: tuple[Target, ...]):
        self.trees, self.targets = trees, targets

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """The contents."""
        return (self.trees,), self.targets

    @classmethod
    def tree_unflatten(cls, targets: Any, children: Any) -> "WrittenContents":
        """The inverse."""
        (trees,) = children
        return cls(trees, targets)

    def finish(self, boxes: Sequence[Box]) -> None:
        """Write the contents to their Boxes, of which `boxes` are the arguments."""
        for target, tree in zip(self.targets, self.trees, strict=True):
            contents = boxes[target]._contents if isinstance(target, int) else target()
            if contents is not None:  # whose Box is gone
                resolved(contents).set(tree)


def _collect_written(frame: Frame, boxes: Sequence[Box], *, returns_all: bool) -> WrittenContents:
    pairs: list[tuple[Target, Contents]] = [
        (i, box._contents)
        for i, box in enumerate(boxes)
        if returns_all or box._contents.may_differ()
    ]
    pairs += [(ReferenceType(c), contents) for c, contents in frame.replaced.items()]
    trees = []
    for _, contents in pairs:
        contents.open()
        trees.append(jax.tree.unflatten(contents.treedef, contents.read()))
    return WrittenContents(trees, tuple(target for target, _ in pairs))


def _refuse_held(passed: Sequence[Contents], held: Sequence[Any]) -> None:
    for contents in passed:
        if any(ref is other for ref in contents.refs or () for other in held):
            raise ValueError(passed_and_held(contents))


# With high types on, `jax.jit` calls a function that changes the structure of a Box in this way.


@weakref_lru_cache  # JAX clears it with its own caches, and does not keep the function
def _cell_of(function: Callable, key: tuple[Any, ...]) -> list[Jitted]:
    """Return a list for the `vn.jit` of a function under `jax.jit` with these options."""
    return []


def let_boxes_change(infer: Callable) -> Callable:
    """Wrap JAX's function that traces a jitted function.

    It returns a `Jitted` instead of JAX's parameters if the function is called and changes
    the structure of a Box.
    """

    def infer_or_change(function: Any, options: Any, args: Any, kwargs: Any) -> Any:
        if not is_enabled() or function in _wrappers or jax_caller() != "cache_miss":
            return infer(function, options, args, kwargs)
        cell = _cell_of(function, get_options_key(options))
        if not cell:
            before, state.changes_structure = state.changes_structure, False
            try:
                parameters = infer(function, options, args, kwargs)
            except Exception:
                if not state.changes_structure:
                    raise
            finally:
                changes, state.changes_structure = state.changes_structure, before
            if not changes:
                return parameters
            cell.append(_make_jitted(function, options))
        return cell[0], []

    return infer_or_change


def call_changing(run: Callable) -> Callable:
    """Wrap JAX's function that runs a jitted function, to call a `Jitted` instead of parameters."""

    def run_or_call(parameters: Any, flat: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if type(parameters) is not Jitted:
            return run(parameters, flat, function, args, kwargs)
        out = parameters(*args, **kwargs)
        return out, [], None, [], SimpleNamespace(effects=(), consts=()), None, None, []

    return run_or_call


def _make_jitted(function: Callable, options: Any) -> Jitted:
    """Return `vn.jit` of a function, with the options that `jax.jit` has parsed."""
    reference = ReferenceType(function)  # since the cache must not keep the function

    def call(*args: Any, **kwargs: Any) -> Any:
        return reference()(*args, **kwargs)  # type: ignore[misc]

    update_wrapper(call, function)
    del call.__wrapped__  # type: ignore[attr-defined]
    return Jitted(call, options)
