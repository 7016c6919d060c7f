"""Tracing: a JAX function as a flat list of equations, with the equations of calls inlined.

Typed random keys are uint64 numbers in these graphs, with the first word of the key data in the
high bits, so that rules that move entries also move keys. Outside, keys are their data, two uint32.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..._core.surface.implicit import implicit
from ..._jax.frames import UNKNOWN_LINE, equation_line
from ..._jax.primitives import open_jaxpr

#: Primitives that only call a jaxpr, and the parameter that holds the jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "composite": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
}

#: Primitives of Equinox, which Diffrax also uses. Each is traced through its implementation in JAX.
_EQUINOX_PRIMITIVES = set(
    "unvmap_any unvmap_all unvmap_max maybe_set select_if_vmap nontraceable nonbatchable "
    "nondifferentiable_backward".split()
)


@dataclass(eq=False, slots=True)
class Variable:
    """An array of a graph: its aval, and its value if it is a constant."""

    aval: Any
    value: Any = None

    def __post_init__(self) -> None:
        if str(getattr(self.aval, "dtype", "")) == _THREEFRY:
            self.aval = jax.ShapeDtypeStruct(self.aval.shape, np.dtype(np.uint64))
        self.value = _keys_as_uint64(self.value)


@dataclass(eq=False, slots=True)
class Equation:
    """A primitive with its parameters, its operands and its results.

    `origin` is the equation of the jaxpr, and `callers` are the equations of the calls that
    contained `origin`, from the innermost one on.
    """

    primitive: str
    inputs: list[Variable]
    outputs: list[Variable]
    params: dict[str, Any]
    origin: Any = field(repr=False)
    callers: tuple[Any, ...] = field(repr=False, default=())

    @property
    def line(self) -> str:
        """The file and line of the user's program that the equation comes from."""
        lines = [equation_line(e.source_info) for e in (self.origin, *self.callers)]
        return next((line for line in lines if line != UNKNOWN_LINE), UNKNOWN_LINE)

    @property
    def has_empty_results(self) -> bool:
        """True if all results have size 0. No rule is called for such an equation."""
        shapes = [getattr(v.aval, "shape", (1,)) for v in self.outputs]
        return bool(shapes) and not self.origin.effects and all(0 in shape for shape in shapes)


@dataclass(eq=False)
class Graph:
    """The equations of a program in the order of execution, with its arguments and results."""

    inputs: list[Variable]
    outputs: list[Variable]
    equations: list[Equation]


def trace(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Graph, Any, Any]:
    """Trace a JAX function for the arguments `args`.

    Return its graph, and the tree structures of its arguments and results.
    """
    examples, in_tree = jax.tree.flatten(args)
    for number, example in enumerate(examples):
        shape = getattr(example, "shape", ())
        if not all(isinstance(n, int) for n in shape):
            raise NotImplementedError(
                f"Argument {number} has the shape {shape}, but vn.numba needs static shapes. "
                "Compile once for each shape."
            )
    out_trees = []

    def flat(*leaves: Any) -> Any:
        typed = [_wrap_keys(x, example) for x, example in zip(leaves, examples, strict=True)]
        results, tree = jax.tree.flatten(implicit(f)(*jax.tree.unflatten(in_tree, typed)))
        out_trees.append(tree)
        return [key_data(x) for x in results]

    jaxpr = jax.make_jaxpr(flat)(*(key_data(x) for x in examples))
    return graph_of(jaxpr), in_tree, out_trees[-1]


def graph_of(jaxpr: Any) -> Graph:
    """Return the graph of a jaxpr, closed or open. Calls are inlined, unused equations removed."""
    opened, constants = open_jaxpr(jaxpr) if hasattr(jaxpr, "consts") else (jaxpr, [])
    variables = [Variable(v.aval) for v in opened.invars]
    for variable, constant in zip(variables, constants, strict=False):
        variable.value = _keys_as_uint64(constant)
    equations: list[Equation] = []
    outputs = _inline(opened, variables, equations)
    needed = set(outputs)
    used = []
    for equation in reversed(equations):
        if equation.origin.effects or not needed.isdisjoint(equation.outputs):
            needed.update(equation.inputs)
            used.append(equation)
    return Graph(variables[len(constants) :], outputs, used[::-1])


def _inline(
    jaxpr: Any,
    arguments: Sequence[Variable],
    equations: list[Equation],
    callers: tuple[Any, ...] = (),
) -> list[Variable]:
    """Append the equations of an open jaxpr to `equations`. Return the variables of its results.

    `arguments` are the variables of its inputs. `callers` are the equations of the calls around it,
    from the innermost one on.
    """
    variables = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Variable:
        if hasattr(atom, "val"):
            return Variable(atom.aval, np.asarray(atom.val, atom.aval.dtype))
        return variables[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        called = _called_jaxpr(equation)
        if called is not None:
            body, constants = open_jaxpr(called) if hasattr(called, "consts") else (called, [])
            constant_inputs = [
                Variable(v.aval, c) for v, c in zip(body.invars, constants, strict=False)
            ]
            outputs = _inline(body, [*constant_inputs, *inputs], equations, (equation, *callers))
        else:
            outputs = [Variable(v.aval) for v in equation.outvars]
            name, params = equation.primitive.name, _python_params(equation)
            equations.append(Equation(name, inputs, outputs, params, equation, callers))
        variables.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called_jaxpr(equation: Any) -> Any:
    """Return the jaxpr that an equation calls, or None if the equation is not a call.

    The equations of the jaxpr replace the call.
    """
    name = equation.primitive.name
    if name in _CALLS:
        return equation.params[_CALLS[name]]
    if name == "call_hi_primitive":  # JAX >= 0.12 has searchsorted and custom_root like this
        (high,) = equation.params.values()

        def function(*operands: Any) -> Any:
            return jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, operands)))

    elif name in _EQUINOX_PRIMITIVES:
        function = functools.partial(equation.primitive.impl, **equation.params)
    else:
        return None
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    return jax.make_jaxpr(function)(*avals)


def _python_params(equation: Any) -> dict[str, Any]:
    """Return the parameters of an equation, with Python integers in place of NumPy integers.

    If the results are random keys, a fill value becomes a uint64, too.
    """

    def convert(parameter: Any) -> Any:
        if isinstance(parameter, np.integer):  # from batching
            return int(parameter)
        return tuple(map(convert, parameter)) if type(parameter) is tuple else parameter

    params = {key: convert(value) for key, value in equation.params.items()}
    if params.get("fill_value") is not None and _is_key(equation.outvars[0].aval):
        word = int(params["fill_value"])
        params["fill_value"] = word << 32 | word
    return params


def count_readers(graph: Graph, fused: Iterable[str]) -> dict[Variable, int]:
    """Return the number of loops of the generated program that read each array.

    The primitives named in `fused` are computed within the loops that read their results. An
    equation of another primitive counts as one loop, and so does a result of the program.
    """
    loops: dict[Variable, set[int]] = {}
    for variable in graph.outputs:
        loops.setdefault(variable, set()).add(id(variable))
    for equation in reversed(graph.equations):
        users = {id(equation)}
        if equation.primitive in fused:
            users = set().union(*(loops.get(v, ()) for v in equation.outputs))
            if len(equation.outputs) > 1 or len(users) > 1:  # then it is computed once
                users = {id(equation)}
        for variable in equation.inputs:
            loops.setdefault(variable, set()).update(users)
    return {variable: len(users) for variable, users in loops.items()}


# Typed random keys.

#: The dtype of threefry2x32 keys. Keys of other algorithms are not supported.
_THREEFRY = "key<fry>"


def _is_key(x: Any) -> bool:
    """Return whether the dtype of `x`, such as an array or a tracer, is a typed random key."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def _keys_as_uint64(x: Any) -> Any:
    """Convert an array of keys to uint64. Return other values unchanged."""
    if not _is_key(x):
        return x
    data = np.asarray(jax.random.key_data(x)).astype(np.uint64)
    return data[..., 0] << np.uint64(32) | data[..., 1]


def key_data(x: Any) -> Any:
    """Convert an array of keys, or its `ShapeDtypeStruct`, to its data, `uint32[..., 2]`.

    Other values are returned unchanged.
    """
    if not _is_key(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, x)
    return jax.random.key_data(x)


def _wrap_keys(leaf: Any, example: Any) -> Any:
    """Convert key data to keys of the type of `example`, if `example` is an array of keys."""
    if not _is_key(example):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(example))
