"""The arguments that a caller passes: a model, its parameters, batches, and rules.

The model is separated into its parameters and its *program*: a function of the parameters and of
the other arguments of the model. Rules are matched with the paths of the parameters.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype

from ..._core.primitives.sharding import replicated_sharding
from ..._core.surface import check_parameters, some_of
from ..._core.value import is_value
from ..._jax.frames import warn_user
from ..arrays import QUANTIZABLE
from ..formats import get_format
from .rules import Rule


def parameters_and_program(model: Any, params: Any, call: str) -> tuple[Any, Callable]:
    """Return `(parameters, program)`, where `program(parameters, *args)` calls the model.

    `model` is a function of `params` and other arguments. If `params` is None, `model` is a
    callable module, which is also the tree of parameters. `call` is a text that error messages
    suggest: the correct call of the public function, such as "observe(model, rules, params=...)".

    **Raises:** `TypeError` if the model is not callable, or `params` is missing. `ValueError` if
    the parameters hold no arrays.
    """
    name = type(model).__name__
    if not callable(model):
        raise TypeError(f"the model must be a function or a module, not a {name}. Call {call}")
    if params is None and _is_leaf(model):
        raise TypeError(
            f"the model, a {name}, holds no parameters. Call {call}, where the model is called as "
            "model(params, batch)"
        )
    check_parameters(model if params is None else params, call)
    return (model, _call_module) if params is None else (params, model)


def parameter_trees_and_program(
    model: Any, params: Any, call: str
) -> tuple[Sequence[Any], Callable]:
    """Return `(trees, program)`, where `program(trees, *args)` calls the model.

    `trees` is the list `[params]`, or `[model]` if `params` is None. If `model` is a
    `functools.partial` and `params` is None, `trees` holds the function of the partial (None if it
    is not a module) and its bound arguments. `call` is as in `parameters_and_program`.
    """
    if params is not None or not isinstance(model, functools.partial):
        params, program = parameters_and_program(model, params, call)
        return [params], lambda trees, /, *args, **kwargs: program(trees[0], *args, **kwargs)
    module = None if _is_leaf(model.func) else model.func
    num_positional = len(model.args)

    def call_partial(trees: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        # `trees` has the order of the list that is returned below.
        new_module, *bound = trees
        function = model.func if module is None else new_module
        bound_kwargs = dict(zip(model.keywords, bound[num_positional:], strict=True))
        return function(*bound[:num_positional], *args, **{**bound_kwargs, **kwargs})

    return [module, *model.args, *model.keywords.values()], call_partial


def program_for(params: Any, model: Callable | None, args: Any, kwargs: Any) -> Callable | None:
    """Return the program to trace, which is called as `program(params, *args, **kwargs)`.

    The program is `model`. If `model` is None, `params` is a callable module, and the program calls
    it. If `args` and `kwargs` are None, too, nothing is to be traced, and the result is None.

    **Raises:** `TypeError` if the program cannot be called, or `args` is not a sequence.
    """
    if isinstance(args, str) or not isinstance(args, Sequence | None):
        raise TypeError(
            "args must be a tuple of the arguments after the parameters, such as (x,), not "
            f"{type(args).__name__}"
        )
    if model is not None:
        if not callable(model):
            raise TypeError(
                f"model must be a function of params and args, not a {type(model).__name__}"
            )
        return model
    if args is None and kwargs is None:
        return None
    if not callable(params):
        raise TypeError(
            f"args needs model=, because a {type(params).__name__} cannot be called. Pass the "
            "function that is called as model(params, *args)"
        )
    return _call_module


def _call_module(module: Callable, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _is_leaf(x: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def check_batches(batches: Any) -> None:
    """Raise `TypeError` if `batches` is a single batch instead of an iterable of batches."""
    if isinstance(batches, Mapping | jax.Array | np.ndarray):
        raise TypeError(
            f"batches must be an iterable, such as a list of batches, not a single "
            f"{type(batches).__name__}"
        )


def first_arguments(batches: Any, purpose: str) -> tuple[tuple[Any, ...], Iterator[Any]]:
    """Return a pair: the first batch as a tuple of arguments, and an iterator over all batches.

    The iterator also yields the first batch.

    **Raises:** `TypeError` if `batches` is a single batch. `ValueError` if `batches` is empty, with
    the text `purpose`, such as "to observe", in the message.
    """
    check_batches(batches)
    iterator = iter(batches)
    for first in iterator:
        return arguments_of(first), itertools.chain([first], iterator)
    raise ValueError(f"there are no batches {purpose}. Pass at least one")


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Return a batch as a tuple of arguments. A batch that is not a tuple is the only argument."""
    return batch if type(batch) is tuple else (batch,)


def abstract_arrays(function: Callable, *trees: Any) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Return `(call, arrays)`, so that tracing `call(arrays)` traces `function(*trees)`.

    `arrays` is the list of all arrays in the trees, each as a `ShapeDtypeStruct`. The other leaves
    of the trees are constants of `call`.
    """
    leaves, treedef = jax.tree.flatten(trees)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: Sequence[Any]) -> Any:
        remaining = iter(arrays)
        new = [next(remaining) if a else x for a, x in zip(is_array, leaves, strict=True)]
        return function(*jax.tree.unflatten(treedef, new))

    arrays = [_abstract_array(x) for a, x in zip(is_array, leaves, strict=True) if a]
    return call, arrays


def _abstract_array(array: Any) -> jax.ShapeDtypeStruct:
    # JAX 0.12 warns of dtypes that it does not support, such as int64 of a NumPy array.
    dtype = canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    # Only a mesh with explicit axes makes the sharding a part of the type.
    has_sharding = isinstance(array, jax.Array) and replicated_sharding(array) is not None
    sharding = jax.typeof(array).sharding if has_sharding else None
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)


def as_rules_or_format(rules: Any) -> tuple[Rule, ...] | str:
    """Return a tuple of rules, or the name of a format if `rules` is a format or a dtype.

    **Raises:** `TypeError` if `rules` is neither an iterable of rules nor a format.
    """
    if isinstance(rules, str | type | np.dtype):
        return get_format(rules).name
    return as_rules(rules)


def as_rules(rules: Any) -> tuple[Rule, ...]:
    """Return an iterable of rules as a tuple.

    **Raises:** `TypeError` if `rules` is not an iterable of `Rule`. The message suggests a list.
    """
    if isinstance(rules, Rule):
        raise TypeError(f"rules must be a list: [{rules}]")
    if not isinstance(rules, Iterable) or isinstance(rules, str | Mapping):
        # If the argument is a format, or a dict from paths to formats, suggest it as a list.
        formats: dict[str, str | None] = {".*": rules if isinstance(rules, str) else "int8"}
        if isinstance(rules, Mapping) and all(isinstance(path, str) for path in rules):
            formats = {path: x for path, x in rules.items() if isinstance(x, str | None)} or formats
        suggestion = ", ".join(f"vn.quant.Rule({path!r}, {x!r})" for path, x in formats.items())
        raise TypeError(
            f"rules must be a list of Rule, such as [{suggestion}], not {describe_value(rules)}. "
            "The rules are the second argument, after the parameters or the model"
        )
    rules = tuple(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules[{i}] must be a Rule, such as Rule('.*', 'int8'), not {describe_value(rule)}"
            )
    return rules


def describe_value(x: Any) -> str:
    """Describe a value in an error message: by its repr, or by its type if it holds arrays."""
    holds_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
    return f"a {type(x).__name__}" if holds_arrays else repr(x)


def flatten_with_paths(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the paths, the leaves and the treedef of a tree.

    A path is a text such as "layers.0.kernel", which rules match. An implicit array is one leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_value)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return paths, [leaf for _, leaf in leaves], treedef


def find_rule(path: str, rules: Sequence[Rule]) -> Rule | None:
    """Return the first rule that matches the path of a parameter, or None."""
    return next((rule for rule in rules if rule.matches(path)), None)


def can_be_quantized(leaf: Any) -> bool:
    """Return whether a leaf is a floating array of rank 2 or more.

    The leaf can also be a `jax.ShapeDtypeStruct`.
    """
    return not is_value(leaf) and getattr(leaf, "ndim", 0) >= 2 and leaf.dtype in QUANTIZABLE


def warn_of_unmatched(rules: Sequence[Any], paths: Sequence[str]) -> None:
    """Warn of each rule that matches none of the paths of the parameters."""
    for rule in rules:
        if not any(map(rule.matches, paths)):
            warn_user(
                f"the rule {rule.path_regex!r} matches no parameter. Change its path_regex, which "
                f"must match a whole path, such as {some_of(paths)}"
            )
