"""Which implicit arrays of a program are weights, where a policy or a report asks.

A *weight* is an implicit array that the program is given: an argument, a variable that it captures,
or one that it finds (`found`). So is what primitives make of one that move its entries (slices,
transposes, a matrix that an index looks up of a stack), or that compute an array of its shape of it
(`2 * w`), and what goes of it into loops, branches and functions. All else that is implicit is so
*in passing*: rows that are looked up by an index, products, quantised activations.

A weight bears its source, which tree functions do not keep: whoever takes values apart and puts
them together again says which they were, by `keep_sources`.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

from ..value import Value, is_kept, is_value, source_of
from .captures import Closure
from .event import Source, joined
from .found import found, leaves_from, with_source

T = TypeVar("T", bound=Sequence)

#: Primitives that move entries, and whose results have another shape.
_MOVES = frozenset(
    "all_gather all_to_all broadcast_in_dim concatenate expand_dims pad reshape select_n split "
    "squeeze stack transpose unstack".split()
)
_PRODUCTS = frozenset(("dot_general", "ragged_dot_general", "conv_general_dilated"))


def keep_sources(before: Sequence[Any], after: T) -> T:
    """Values that were taken apart and put together again, with the sources that they had."""
    for old, new in zip(before, after, strict=True):
        if new is not old:
            with_source(new, source_of(old))
    return after


def restore_sources(sources: Sequence[Source], values: T) -> T:
    """Give values that were rebuilt from leaves the sources that they had before.

    A function that JAX keeps in a program takes the sources, and not the values: their tracers
    would outlive the trace.
    """
    for source, value in zip(sources, values, strict=True):
        with_source(value, source)
    return values


def pass_on(primitive: str, values: Sequence[Any], params: Mapping[str, Any], out: Any) -> None:
    """Has the results of a primitive that are weights still bear the sources of its operands."""
    results = out if isinstance(out, (list, tuple)) else [out]
    for i, x in enumerate(results):
        if isinstance(x, Value) and not any(x is v for v in values):
            operands = [values[i]] if len(results) == len(values) else values
            kept = (v for v in operands if is_value(v) and _is_still(primitive, v, x, params))
            with_source(x, joined([source_of(v) for v in kept]))


def _is_still(primitive: str, weight: Value, result: Value, params: Mapping[str, Any]) -> bool:
    whole, shape = weight.aval().shape, result.aval().shape
    if primitive in ("gather", "dynamic_slice", "slice"):
        looked_up = params.get("slice_sizes", shape)
        return _is_matrix(looked_up) or not _is_matrix(whole)  # else rows, as of an embedding
    return primitive in _MOVES or (primitive not in _PRODUCTS and shape == whole)


def _is_matrix(shape: Sequence[int]) -> bool:
    return sum(n not in (0, 1) for n in shape) > 1


_is_named: ContextVar[bool] = ContextVar("is_named", default=False)


def name_weights(fn: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
    """`run(fn, args, kwargs)`, in which implicit arrays bear their paths, if they have none.

    Within, no more are named: what a program makes of arrays and gives to a function is no weight.
    """
    program = fn, args, kwargs
    if _is_named.get():
        return run(*found(program))
    leaves, treedef = jax.tree.flatten_with_path(program, is_leaf=is_kept)
    names = _argument_names(fn.function if isinstance(fn, Closure) else fn, len(args))
    named = [_named(x, path, names) for path, x in leaves]
    token = _is_named.set(True)
    try:
        with leaves_from((x, source_of(x)) for x in named):
            return run(*jax.tree.unflatten(treedef, named))
    finally:
        _is_named.reset(token)


def _named(x: Any, path: Sequence[Any], names: Sequence[str]) -> Any:
    if not isinstance(x, Value):
        return x
    leaves, treedef = jax.tree.flatten(x)
    copy = jax.tree.unflatten(treedef, leaves)  # not the caller's object
    return with_source(copy, (_path_string(*path, names=names),))


def _path_string(which: Any, *keys: Any, names: Sequence[str]) -> str:
    if which.idx == 1:
        first, keys = names[keys[0].idx], keys[1:]
    elif which.idx == 2:
        first, keys = keys[0].key, keys[1:]
    else:  # of what the function captures, or of a module
        first = ""
    rest = jax.tree_util.keystr(keys, simple=True, separator=".")
    return ".".join(filter(None, (first, rest)))


def _argument_names(fn: Any, count: int) -> list[str]:
    names: list[str] = []
    with suppress(TypeError, ValueError):  # of a function that has no signature
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"{name}.{i}" for i in range(count - len(names))]
    return names + [f"args.{i}" for i in range(len(names), count)]


def check_regex(regex: Any, name: str, kinds: str = "a string that is a regex") -> None:
    """Check a regex for paths, the argument `name`, which can be one of `kinds`.

    **Raises:** `TypeError` if it is not a string. `ValueError` if it is not a valid regex.
    """
    if not isinstance(regex, str | re.Pattern):
        raise TypeError(f"{name} must be {kinds}, not {regex!r}")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(f"{name}={regex!r} is not a regex: {error}") from None


def path_matches(regex: str | re.Pattern, path: str) -> bool:
    """Return whether a regex matches the whole of a path, with or without a final `.value`.

    The path of a variable of `flax.nnx` ends in `.value`, though the model has no such name.

    >>> from veneer._core.surface.weights import path_matches
    >>> path_matches(".*kernel", "layer.kernel.value")
    True
    """
    return any(re.fullmatch(regex, part) for part in (path, path.removesuffix(".value")))
