"""Separate a model into its parameters and its program.

A program is a function of the parameters and of the other arguments of the model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype

from ..._core.primitives.sharding import replicated_sharding
from ..._core.surface import check_parameters


def parameters_and_program(model: Any, params: Any, call: str) -> tuple[Any, Callable]:
    """Return `(parameters, program)`, where `program(parameters, *args)` calls the model.

    `model` is a function of `params` and other arguments. If `params` is None, `model` is a
    callable module, which is also the tree of parameters. Error messages suggest the text `call`.

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

    `trees` is the list `[params]`, or `[model]` if `params` is None. For a `functools.partial`,
    `trees` holds its function (None if the function is not a module) and its arguments. Error
    messages suggest the text `call`.
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
    """Return the program that is called as `program(params, *args, **kwargs)`.

    The program is `model`. Without `model`, the program calls `params`. If `args` and `kwargs` are
    None too, there is no program, and the result is None.

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
