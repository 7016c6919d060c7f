"""The model that a caller passes: its parameters, its program, and its batches.

A program is a function of the parameters and of the other arguments of the model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype

from ..._core.surface.arguments import check_parameters
from ..._jax.sharding import replicated_sharding


def parameters_and_program(model: Any, params: Any, call: str) -> tuple[Any, Callable]:
    """Return the parameters of a model, and its program.

    `model` is a function of `params` and other arguments, or a module if `params` is None. `call`
    shows the right call in error messages.

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


def parts_and_program(model: Any, params: Any, call: str) -> tuple[Sequence[Any], Callable]:
    """Return the trees of parameters of a model, and its program, a function of their list.

    Arrays among the arguments of a `functools.partial` are parameters, too. The arguments and
    errors are the same as for `parameters_and_program`.
    """
    if params is not None or not isinstance(model, functools.partial):
        params, program = parameters_and_program(model, params, call)
        return [params], lambda parts, /, *args, **kwargs: program(parts[0], *args, **kwargs)
    first = None if _is_leaf(model.func) else model.func
    split = 1 + len(model.args)

    def call_partial(parts: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        function = model.func if first is None else parts[0]
        keywords = dict(zip(model.keywords, parts[split:], strict=True))
        return function(*parts[1:split], *args, **{**keywords, **kwargs})

    return [first, *model.args, *model.keywords.values()], call_partial


def program_for(params: Any, model: Callable | None, args: Any, kwargs: Any) -> Callable | None:
    """Return the program that `model`, `args` and `kwargs` describe, or None if none is set.

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
    """Return the arguments of the model in a batch: the entries of a tuple, or the batch itself."""
    return batch if type(batch) is tuple else (batch,)


def abstract_arrays(function: Callable, *trees: Any) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Turn a function of trees into a function of the list of their arrays, for tracing.

    **Returns:** the function, and the abstract arrays. Leaves that are not arrays stay constants.
    """
    leaves, treedef = jax.tree.flatten(trees)
    at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def call(arrays: Sequence[Any]) -> Any:
        full = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            full[i] = array
        return function(*jax.tree.unflatten(treedef, full))

    return call, [_abstract_array(leaves[i]) for i in at]


def _abstract_array(array: Any) -> jax.ShapeDtypeStruct:
    # JAX 0.12 warns of dtypes that it does not support, such as int64 of a NumPy array.
    dtype = canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    is_sharded = isinstance(array, jax.Array) and replicated_sharding(array) is not None
    sharding = jax.typeof(array).sharding if is_sharded else None
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
