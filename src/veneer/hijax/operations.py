"""Operations on values: a primitive of JAX's by its rule, and what follows from one.

The derivatives and the batched form of an operation are operations again, so that the set is closed
under all of JAX's transformations; each runs the rule of its innermost primitive, differentiated or
batched by JAX itself on the leaves, and only once it is evaluated or lowered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from .._core.dispatch import dispatch
from .._core.policy import ALLOW, current_policy
from .._core.sources import with_source
from .._core.value import Value, is_value, make_dense, materialise_one, source_of
from .._jax.hijax import Zero
from .._jax.primitives import Primitive
from .high import Operation, apply
from .types import (
    HighType,
    StructuredType,
    TangentType,
    as_high_array,
    is_typed,
    of_arrays,
    opened,
    takes_axis,
    type_of,
    type_of_leaf,
)
from .values import Tangent, is_inexact, leaves_of, value_of, with_leaves

#: Names what is made dense because `vmap` cannot go over its leaves; it is never bound.
VMAP = Primitive("vmap")


class Parameters:
    """The parameters of a primitive, as a key: compared by value, where that can be hashed."""

    def __init__(self, params: dict[str, Any]):
        self.params = params
        try:
            self._hash = hash(tuple(sorted((k, hash(v)) for k, v in params.items())))
        except TypeError:
            self._hash = id(params)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Parameters) or self._hash != other._hash:
            return False
        return self.params is other.params or bool(self.params == other.params)


@dataclass(frozen=True)
class Apply(Operation):
    """A primitive, by its rule for the types of its operands."""

    primitive: Primitive
    parameters: Parameters

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def printed(self) -> dict[str, Any]:
        return self.parameters.params

    def run(self, *values: Any) -> list[Any]:
        params = self.parameters.params
        if current_policy() is not ALLOW:
            for value in filter(is_value, values):  # from where, a typed value does not tell
                with_source(value, source_of(value) or (str(type_of(value)),))
        if any(map(is_value, values)):
            out = dispatch(self.primitive, values, params)
        else:  # what was implicit has been made dense meanwhile
            out = self.primitive.bind(*values, **self.primitive.get_bind_params(params))
        return list(map(_result, out if self.primitive.multiple_results else [out]))


@dataclass(frozen=True)
class Materialise(Operation):
    """A value, or the leaves of one, into the dense array."""

    type: HighType
    of_leaves: bool = False
    name = "materialise"

    def run(self, *operands: Any) -> list[Any]:
        value = self.type.of_arrays(operands) if self.of_leaves else operands[0]
        return [jnp.asarray(materialise_one(value_of(value)))]


@dataclass(frozen=True)
class Jvp(Operation):
    """The tangents of some results, in the direction of tangents of some operands.

    The operands are those of the operation, and then the tangents of those that vary.
    """

    of: Any
    varies: tuple[bool, ...]
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.jvp"

    def run(self, *operands: Any) -> list[Any]:
        primals, tangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _of_variables(self.of, primals, self.varies, self.wanted)
        flat = [leaf for t in tangents for leaf in variables_of(t)]
        _, flat_out = jax.jvp(function, (variables,), (flat,))
        return _regroup(flat_out, function.tangent_types)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Vjp(Operation):
    """The cotangents of the operands that vary, of those of some results.

    The operands are those of the operation, and then the cotangents.
    """

    of: Any
    varies: tuple[bool, ...]
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.vjp"

    def run(self, *operands: Any) -> list[Any]:
        primals, cotangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _of_variables(self.of, primals, self.varies, self.wanted)
        _, pull = jax.vjp(function, variables)
        (flat,) = pull([leaf for ct in cotangents for leaf in variables_of(ct)])
        types = [_tangent_type(p) for p, v in zip(primals, self.varies, strict=True) if v]
        return _regroup(flat, types)


@dataclass(frozen=True)
class Transpose(Operation):
    """The cotangents of the operands in which an operation is linear.

    The operands are the others, and then the cotangents of some results.
    """

    of: Any
    linear: tuple[Any, ...]  # the type of each linear operand, and None for the others
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.transpose"

    def run(self, *operands: Any) -> list[Any]:
        others = iter(operands)
        primals = [next(others) if t is None else _zeros_of(t) for t in self.linear]
        varies = tuple(t is not None for t in self.linear)
        return Vjp(self.of, varies, self.wanted).run(*primals, *others)


@dataclass(frozen=True)
class Vmap(Operation):
    """An operation mapped over the given axes of its operands; those of the results come first."""

    of: Any
    size: int
    axis_name: Any
    dims: tuple[int | None, ...]

    @property
    def name(self) -> str:
        return f"vmap({self.of.name})"

    def run(self, *operands: Any) -> list[Any]:
        treedefs: list[Any] = []

        def one(*flats: Any) -> list[Any]:
            pairs = zip(operands, flats, strict=True)
            out = self.of.run(*(with_leaves(x, flat) for x, flat in pairs))
            out = list(map(_stackable, out))
            treedefs.extend(out)
            return [leaves_of(x) for x in out]

        name = {} if self.axis_name is None else {"axis_name": self.axis_name}
        mapped = jax.vmap(one, in_axes=self.dims, axis_size=self.size, **name)
        flats = mapped(*map(leaves_of, operands))
        return [_stacked(x, flat) for x, flat in zip(treedefs, flats, strict=True)]


@dataclass(frozen=True)
class Stack(Operation):
    """A value or a tangent that is the same along a new first axis of each leaf."""

    size: int
    name = "stack"

    def run(self, x: Any) -> list[Any]:
        return [_stacked(value_of(x), [stacked(leaf, self.size) for leaf in leaves_of(x)])]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        (out,), (tangent,) = apply(self, *primals), tangents
        if type(tangent) is Zero:
            return [out], [Zero(jax.typeof(out).to_tangent_aval())]
        return [out], [stacked(tangent, self.size)]


@dataclass(frozen=True)
class MoveAxis(Operation):
    """A stack of tangents of which an axis of each leaf comes to another place."""

    source: int
    destination: int
    name = "moveaxis"

    def run(self, x: Any) -> list[Any]:
        size = x.shape[self.source]
        moved = x.aval.dec_rank(size, self.source).inc_rank(size, self.destination)
        to = (self.source, self.destination)
        return [Tangent(moved, [jnp.moveaxis(leaf, *to) for leaf in x.leaves])]


@dataclass(frozen=True)
class Select(Operation):
    """One of some stacks of a type, for each entry of the first axis of each leaf.

    `select` is the function that does it for arrays, and takes what decides first.
    """

    select: Callable
    name = "select"

    def run(self, which: Any, *cases: Any) -> list[Any]:
        return [self._selected(which, *map(value_of, cases))]

    def _selected(self, which: Any, *cases: Any) -> Any:
        if not isinstance(cases[0], Value | Tangent):
            return self.select(which, *cases)
        parts = zip(*map(leaves_of, cases), strict=True)
        return with_leaves(cases[0], [self.run(which, *each)[0] for each in parts])


def stacked(x: Any, size: int) -> Any:
    """An array, a value or a tangent repeated along a new first axis."""
    x = as_high_array(x)
    if isinstance(jax.typeof(x), StructuredType):
        return apply(Stack(size), x)[0]
    return jnp.broadcast_to(x, (size, *jnp.shape(x)))


def _result(x: Any) -> Any:
    """A result that is a tracer of a high type as a value, with tracers for leaves.

    So a rule gives it that calls plain functions of JAX on an operand, and is itself traced.
    """
    return opened(x) if is_typed(x) and not x.aval.dense_tangent else value_of(x)


# Results that are stacked, and the leaves of operands that have tangents.


def _stackable(x: Any) -> Any:
    """A result of one application: dense, if a stack of its leaves is none of it."""
    x = value_of(x)
    return make_dense(VMAP, [x])[0] if isinstance(x, Value) and not takes_axis(type_of(x)) else x


def _stacked(x: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(x, Tangent):
        return Tangent(x.aval.inc_rank(leaves[0].shape[0], 0), list(leaves))
    return with_leaves(x, leaves)


def variables_of(x: Any) -> list[Any]:
    """The leaves of a value that have tangents; a value with a dense tangent itself."""
    return [leaf for leaf in _parts(x) if is_inexact(type_of_leaf(leaf))]


def _parts(x: Any) -> list[Any]:
    return [x] if isinstance(x, Value) and x.dense_tangent else leaves_of(x)


def _with_variables(x: Any, variables: Sequence[Any]) -> Any:
    rest = iter(variables)
    leaves = _parts(x)
    new = [next(rest) if is_inexact(type_of_leaf(leaf)) else leaf for leaf in leaves]
    return new[0] if leaves[0] is x else with_leaves(x, new)


def _tangent_type(x: Any) -> Any:
    """None of what has a dense tangent; of a value the type of its tangent."""
    x = value_of(x)
    if isinstance(x, Value):
        return None if x.dense_tangent else TangentType(type_of(x))
    return x.aval if isinstance(x, Tangent) else None


def _regroup(flat: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    rest = iter(flat)
    pick = lambda t: next(rest) if t is None else Tangent(t, list(islice(rest, len(t.leaves))))
    return [pick(t) for t in types]


def _zeros_of(type: Any) -> Any:
    """A value of a type, all of whose leaves are zero."""
    return of_arrays(type, [jnp.zeros(a.shape, a.dtype) for a in type.lo_ty()])


def _of_variables(
    operation: Any, primals: Sequence[Any], varies: Sequence[bool], wanted: Sequence[bool]
) -> tuple[Callable, list[Any]]:
    """An operation as a function of the floating leaves that vary, to those of wanted results."""
    counts = [len(variables_of(p)) if v else 0 for p, v in zip(primals, varies, strict=True)]
    varying = [p for p, v in zip(primals, varies, strict=True) if v]
    variables = [leaf for p in varying for leaf in variables_of(p)]

    def function(flat: list[Any]) -> list[Any]:
        rest = iter(flat)
        pairs = zip(primals, varies, counts, strict=True)
        operands = [_with_variables(p, list(islice(rest, n))) if v else p for p, v, n in pairs]
        out = operation.run(*operands)
        chosen = [x for x, w in zip(out, wanted, strict=True) if w]
        function.tangent_types = [_tangent_type(x) for x in chosen]  # type: ignore[attr-defined]
        return [_one_leaf(leaf) for x in chosen for leaf in variables_of(x)]

    return function, list(map(_one_leaf, variables))


def _one_leaf(x: Any) -> Any:
    return as_high_array(x) if isinstance(x, Value) else jnp.asarray(x)
