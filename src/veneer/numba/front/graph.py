"""A jaxpr as a flat list of equations: what it calls is in the place of the calls."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..._core.surface.implicit import implicit
from ..._jax.frames import UNKNOWN_LINE, equation_line
from ..._jax.primitives import open_jaxpr
from .keys import data, known_aval, known_params, like, numbers

#: Primitives that do nothing but call a jaxpr, and where it is among their parameters.
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

#: Primitives of Equinox's, and so of Diffrax's, that are what their definitions in JAX do.
_DEFINED = set(
    "unvmap_any unvmap_all unvmap_max maybe_set select_if_vmap nontraceable nonbatchable "
    "nondifferentiable_backward".split()
)


@dataclass(eq=False, slots=True)
class Variable:
    """An array of a program; `value` is what it is, where that is known."""

    aval: Any
    value: Any = None

    def __post_init__(self) -> None:
        self.aval, self.value = known_aval(self.aval), numbers(self.value)


@dataclass(eq=False, slots=True)
class Equation:
    """A primitive, the arrays that it takes and those that it gives."""

    primitive: str
    inputs: list[Variable]
    outputs: list[Variable]
    params: dict[str, Any]
    origin: Any = field(repr=False)  # the equation of the jaxpr
    callers: tuple[Any, ...] = field(repr=False, default=())  # those that it was in, inside first

    @property
    def line(self) -> str:
        """The line of the user's program that it comes from."""
        lines = [equation_line(e.source_info) for e in (self.origin, *self.callers)]
        return next((line for line in lines if line != UNKNOWN_LINE), UNKNOWN_LINE)

    @property
    def gives_no_entries(self) -> bool:
        """Whether there is nothing in its results, so that no rule needs to know of such shapes."""
        shapes = [getattr(v.aval, "shape", (1,)) for v in self.outputs]
        return bool(shapes) and not self.origin.effects and all(0 in shape for shape in shapes)


@dataclass(eq=False)
class Graph:
    """A program: what it takes, its equations in their order, and what it returns."""

    inputs: list[Variable]
    outputs: list[Variable]
    equations: list[Equation]


def traced(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Graph, Any, Any]:
    """A function as a graph, with the trees of its arguments and of its results."""
    examples, in_tree = jax.tree.flatten(args)
    _require_static(examples)
    out_trees = []

    def flat(*leaves: Any) -> Any:
        typed = [like(x, example) for x, example in zip(leaves, examples, strict=True)]
        results, tree = jax.tree.flatten(implicit(f)(*jax.tree.unflatten(in_tree, typed)))
        out_trees.append(tree)
        return [data(x) for x in results]

    jaxpr = jax.make_jaxpr(flat)(*(data(x) for x in examples))
    return graph_of(jaxpr), in_tree, out_trees[-1]


def _require_static(examples: Sequence[Any]) -> None:
    for number, example in enumerate(examples):
        shape = getattr(example, "shape", ())
        if not all(isinstance(n, int) for n in shape):
            raise NotImplementedError(
                f"Argument {number} has the shape {shape}, but vn.numba needs static shapes. "
                "Compile once for each shape."
            )


def graph_of(jaxpr: Any) -> Graph:
    """The program of a jaxpr, with or without constants; those are variables of known value."""
    opened, constants = open_jaxpr(jaxpr) if hasattr(jaxpr, "consts") else (jaxpr, [])
    variables = [Variable(v.aval) for v in opened.invars]
    for variable, constant in zip(variables, constants, strict=False):
        variable.value = numbers(constant)
    equations: list[Equation] = []
    outputs = _inlined(opened, variables, equations)
    graph = Graph(variables[len(constants) :], outputs, equations)
    graph.equations = _used(graph)
    return graph


def _inlined(
    jaxpr: Any,
    arguments: Sequence[Variable],
    into: list[Equation],
    callers: tuple[Any, ...] = (),
) -> list[Variable]:
    """Appends the equations of a jaxpr, and returns what it returns."""
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Variable:
        if hasattr(atom, "val"):
            return Variable(atom.aval, np.asarray(atom.val, atom.aval.dtype))
        return known[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        called = _called(equation)
        if called is not None:
            body, constants = open_jaxpr(called) if hasattr(called, "consts") else (called, [])
            constant_inputs = [
                Variable(v.aval, c) for v, c in zip(body.invars, constants, strict=False)
            ]
            outputs = _inlined(body, [*constant_inputs, *inputs], into, (equation, *callers))
        else:
            outputs = [Variable(v.aval) for v in equation.outvars]
            params = {key: _plain(value) for key, value in known_params(equation).items()}
            into.append(Equation(name, inputs, outputs, params, equation, callers))
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The jaxpr that an equation stands for, if it does."""
    name = equation.primitive.name
    if name in _CALLS:
        return equation.params[_CALLS[name]]
    if name == "call_hi_primitive":
        function = _expanded(*equation.params.values())
    elif name in _DEFINED:
        function = functools.partial(equation.primitive.impl, **equation.params)
    else:
        return None
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    return jax.make_jaxpr(function)(*avals)


def _expanded(high: Any) -> Callable[..., Any]:
    """What a high primitive stands for, as JAX >= 0.12 has searchsorted and custom_root."""

    def function(*operands: Any) -> Any:
        return jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, operands)))

    return function


def _plain(parameter: Any) -> Any:
    """A parameter with Python's numbers for NumPy's, which those of batched equations may be."""
    if isinstance(parameter, np.integer):
        return int(parameter)
    return tuple(map(_plain, parameter)) if type(parameter) is tuple else parameter


def _used(graph: Graph) -> list[Equation]:
    """The equations that results depend on, and those that do more than to give results."""
    needed = set(graph.outputs)
    kept = []
    for equation in reversed(graph.equations):
        if equation.origin.effects or not needed.isdisjoint(equation.outputs):
            needed.update(equation.inputs)
            kept.append(equation)
    return kept[::-1]


def readers(graph: Graph, fused: Iterable[str]) -> dict[Variable, int]:
    """By how many loops the entries of each array are read, if fused primitives make none.

    A primitive that is not fused makes one, and so does a result of the program.
    """
    loops: dict[Variable, set[int]] = {}
    for variable in graph.outputs:
        loops.setdefault(variable, set()).add(id(variable))
    for equation in reversed(graph.equations):
        users = {id(equation)}
        if equation.primitive in fused:
            users = set().union(*(loops.get(v, ()) for v in equation.outputs))
            if len(equation.outputs) > 1 or len(users) > 1:  # more than one: it is computed once
                users = {id(equation)}
        for variable in equation.inputs:
            loops.setdefault(variable, set()).update(users)
    return {variable: len(users) for variable, users in loops.items()}
