"""Programs run by the references of their primitives, in NumPy alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .front.graph import Graph, Variable, graph_of, traced
from .front.keys import data
from .registry import SHOWN, perform


def performed(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function `f` of JAX, run primitive by primitive in NumPy, as `perform` has them."""

    def run(*args: Any) -> Any:
        graph, _, out_tree = traced(f, args)
        leaves = [np.asarray(data(x)) for x in jax.tree.leaves(args)]
        typed = [x.astype(v.aval.dtype) for x, v in zip(leaves, graph.inputs, strict=True)]
        return jax.tree.unflatten(out_tree, evaluate(graph, typed))

    return run


def evaluate_jaxpr(jaxpr: Any, *operands: Any) -> list[Any]:
    """Runs a jaxpr, as references of primitives that hold one do."""
    return evaluate(graph_of(jaxpr), operands)


def evaluate(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """Runs a graph on NumPy arrays."""
    values: dict[Variable, Any] = dict(zip(graph.inputs, operands, strict=True))

    def value_of(variable: Variable) -> Any:
        if variable not in values:
            values[variable] = np.asarray(variable.value, variable.aval.dtype)
        return values[variable]

    for equation in graph.equations:
        if equation.primitive in SHOWN:
            continue
        if equation.gives_no_entries:
            values |= {v: np.empty(v.aval.shape, v.aval.dtype) for v in equation.outputs}
            continue
        if equation.primitive not in perform:
            raise perform.missing(equation.primitive, equation.line)
        inputs = [value_of(v) for v in equation.inputs]
        with np.errstate(all="ignore"):
            results = perform[equation.primitive](*inputs, **equation.params)
        results = results if isinstance(results, list | tuple) else [results]
        for variable, result in zip(equation.outputs, results, strict=True):
            array, aval = np.asarray(result), variable.aval
            if (array.shape, array.dtype) != (aval.shape, aval.dtype):
                raise TypeError(
                    f"The rule of vn.numba.perform for {equation.primitive!r} returns "
                    f"{array.dtype}{[*array.shape]}, but JAX has {aval}."
                )
            values[variable] = array
    return [value_of(v) for v in graph.outputs]
