"""Count the dense weights that a program computes from packed weights, and how many are alive.

For users who check the memory of a training step, independently of `vn.explain`. This file is not a
script: `lora_finetune.py` uses it. The count uses a jaxpr, whose equations run in order. A value is
alive from the equation that computes it to the last equation that uses it.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

LOOPS = frozenset(["scan", "while", "cond", "shard_map", "pallas_call"])


@dataclass(frozen=True)
class DenseWeights:
    """The floating arrays with the size of a whole weight that a program computes.

    **Arguments:**

    - `dequantized`: how many are computed only from weights, by primitive.
    - `alive`: the largest number of them that are alive at the same time.
    - `nbytes`: the bytes of the arrays that are alive then.
    - `others`: how many have the shape of a weight but also depend on other values, by primitive:
      gradients, for example.
    """

    dequantized: Counter[str]
    alive: int
    nbytes: int
    others: Counter[str]


class _Made:
    """The result of an equation, compared by identity."""

    def __init__(self, aval: Any):
        self.aval = aval


@dataclass(frozen=True)
class _Equation:
    primitive: str
    taken: list[_Made]
    made: list[_Made]


def dense_weights(
    program: jax.extend.core.ClosedJaxpr, is_weight: Sequence[bool], shapes: Iterable[Any]
) -> DenseWeights:
    """Count the dense weights that a program computes.

    **Arguments:**

    - `program`: from `jax.make_jaxpr`.
    - `is_weight`: for each flat argument, whether it is a part of a weight.
    - `shapes`: the shapes of the dense weights.

    **Raises:** `NotImplementedError` for a program with a loop.
    """
    inputs = [_Made(v.aval) for v in program.jaxpr.invars]
    weights = {value for value, chosen in zip(inputs, is_weight, strict=True) if chosen}
    equations = list(_equations(program.jaxpr, inputs, weights))
    shapes = {tuple(shape) for shape in shapes}
    shapes |= {shape[::-1] for shape in shapes}
    sizes = {jnp.zeros(shape).size for shape in shapes}

    dequantized: Counter[str] = Counter()
    others: Counter[str] = Counter()
    last = {value: i for i, equation in enumerate(equations) for value in equation.taken}
    alive: set[_Made] = set()
    most, most_nbytes = 0, 0
    for i, equation in enumerate(equations):
        if weights.issuperset(equation.taken):
            weights.update(equation.made)
        for value in equation.made:
            if not jnp.issubdtype(value.aval.dtype, jnp.floating):
                continue
            if value in weights and value.aval.size in sizes:
                dequantized[equation.primitive] += 1
                alive.add(value)
            elif value not in weights and value.aval.shape in shapes:
                others[equation.primitive] += 1
        alive = {value for value in alive if last.get(value, -1) > i}
        most = max(most, len(alive))
        most_nbytes = max(most_nbytes, sum(v.aval.size * v.aval.dtype.itemsize for v in alive))
    return DenseWeights(dequantized, most, most_nbytes, others)


def _equations(
    jaxpr: Any, inputs: Sequence[_Made | None], weights: set[_Made]
) -> Generator[_Equation, None, list[_Made | None]]:
    """Yield the equations of a jaxpr. Equations of called functions replace the calls."""
    names = dict(zip(jaxpr.invars, inputs, strict=True))
    for v in jaxpr.constvars:
        names[v] = _Made(v.aval)
        weights.add(names[v])  # for example a codebook
    read = lambda v: None if isinstance(v, Literal) else names[v]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in LOOPS:
            raise NotImplementedError(f"{eqn.primitive.name} is not looked into")
        taken = [read(v) for v in eqn.invars]
        called = _called(eqn)
        if called is None:
            made: list[Any] = [_Made(v.aval) for v in eqn.outvars]
            yield _Equation(eqn.primitive.name, [v for v in taken if v is not None], made)
        else:
            made = yield from _equations(called, taken, weights)
        names.update(zip(eqn.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _called(eqn: Any) -> Any:
    """Return the jaxpr that an equation calls (`jit`, `checkpoint`), or None."""
    for param in eqn.params.values():
        jaxpr = getattr(param, "jaxpr", param)
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr
    return None
