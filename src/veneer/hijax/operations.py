"""The operations of `high`: JAX primitives on typed values, their derivatives and batched forms.

The derivative and the batched form of an operation are operations too. When one is evaluated or
lowered, it runs the rule of the primitive, and JAX differentiates or batches the rule itself.
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
from .types import (
    HighType,
    StructuredType,
    TangentType,
    as_high_array,
    can_be_stacked,
    is_typed,
    of_arrays,
    type_of,
    type_of_leaf,
    unpack,
)
from .values import Operation, Tangent, apply, is_inexact, leaves_of, value_of, with_leaves

#: Names `vmap` in reports of values that are materialized. It is never bound.
VMAP = Primitive("vmap")


class Parameters:
    """The parameters of a primitive, hashable and compared by value."""

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
    """Run the rule of a primitive for the types of its operands."""

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
            for value in filter(is_value, values):  # reports name the source of a value
                with_source(value, source_of(value) or (str(type_of(value)),))
        if any(map(is_value, values)):
            out = dispatch(self.primitive, values, params)
        else:  # the implicit operands have been materialized
            out = self.primitive.bind(*values, **self.primitive.get_bind_params(params))
        return list(map(_unpack_result, out if self.primitive.multiple_results else [out]))


@dataclass(frozen=True)
class Materialise(Operation):
    """Materialize an implicit array. With `of_leaves`, the operands are its flat arrays."""

    type: HighType
    of_leaves: bool = False
    name = "materialise"

    def run(self, *operands: Any) -> list[Any]:
        value = self.type.of_arrays(operands) if self.of_leaves else operands[0]
        return [jnp.asarray(materialise_one(value_of(value)))]


@dataclass(frozen=True)
class Jvp(Operation):
    """Compute the tangents of the wanted results of an operation.

    The operands are the operands of the operation, then the tangents of the operands that vary.
    """

    of: Any
    varies: tuple[bool, ...]
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.jvp"

    def run(self, *operands: Any) -> list[Any]:
        primals, tangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _flat_function(self.of, primals, self.varies, self.wanted)
        flat = [leaf for t in tangents for leaf in differentiable_leaves(t)]
        _, flat_out = jax.jvp(function, (variables,), (flat,))
        return _regroup(flat_out, function.tangent_types)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Vjp(Operation):
    """Compute the cotangents of the operands that vary, given cotangents of the wanted results.

    The operands are the operands of the operation, then the cotangents.
    """

    of: Any
    varies: tuple[bool, ...]
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.vjp"

    def run(self, *operands: Any) -> list[Any]:
        primals, cotangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _flat_function(self.of, primals, self.varies, self.wanted)
        _, pull = jax.vjp(function, variables)
        (flat,) = pull([leaf for ct in cotangents for leaf in differentiable_leaves(ct)])
        types = [_tangent_type(p) for p, v in zip(primals, self.varies, strict=True) if v]
        return _regroup(flat, types)


@dataclass(frozen=True)
class Transpose(Operation):
    """Compute the cotangents of the operands in which an operation is linear.

    The operands are the other operands, then the cotangents of the wanted results.
    """

    of: Any
    linear: tuple[Any, ...]  # the type of each linear operand, and None for the others
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.transpose"

    def run(self, *operands: Any) -> list[Any]:
        others = iter(operands)
        zeros = lambda t: of_arrays(t, [jnp.zeros(a.shape, a.dtype) for a in t.lo_ty()])
        primals = [next(others) if t is None else zeros(t) for t in self.linear]
        varies = tuple(t is not None for t in self.linear)
        return Vjp(self.of, varies, self.wanted).run(*primals, *others)


@dataclass(frozen=True)
class Vmap(Operation):
    """Map an operation over axes of its operands. The batch axis of each result is the first."""

    of: Any
    size: int
    axis_name: Any
    dims: tuple[int | None, ...]

    @property
    def name(self) -> str:
        return f"vmap({self.of.name})"

    def run(self, *operands: Any) -> list[Any]:
        treedefs: list[Any] = []

        def run_slice(*flats: Any) -> list[Any]:
            pairs = zip(operands, flats, strict=True)
            out = self.of.run(*(with_leaves(x, flat) for x, flat in pairs))
            out = list(map(_stackable, out))
            treedefs.extend(out)
            return [leaves_of(x) for x in out]

        name = {} if self.axis_name is None else {"axis_name": self.axis_name}
        mapped = jax.vmap(run_slice, in_axes=self.dims, axis_size=self.size, **name)
        flats = mapped(*map(leaves_of, operands))
        return [_stacked(x, flat) for x, flat in zip(treedefs, flats, strict=True)]


@dataclass(frozen=True)
class Stack(Operation):
    """Repeat a value or a tangent along a new first axis of each leaf."""

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
    """Move an axis of each leaf of a stack of tangents."""

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
    """Select one of several stacks of a type, for each index of the first axis.

    `select` does the same for arrays. Its first argument is the index of the case.
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
    """Repeat an array, a value or a tangent along a new first axis."""
    x = as_high_array(x)
    if isinstance(jax.typeof(x), StructuredType):
        return apply(Stack(size), x)[0]
    return jnp.broadcast_to(x, (size, *jnp.shape(x)))


def _unpack_result(x: Any) -> Any:
    """Return a result as an implicit array. A rule that calls JAX can return a typed tracer."""
    return unpack(x) if is_typed(x) and not x.aval.dense_tangent else value_of(x)


# Stacks, and leaves that have tangents.


def _stackable(x: Any) -> Any:
    """Materialize a result of a mapped operation if its leaves cannot be stacked."""
    x = value_of(x)
    return (
        make_dense(VMAP, [x])[0] if isinstance(x, Value) and not can_be_stacked(type_of(x)) else x
    )


def _stacked(x: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(x, Tangent):
        return Tangent(x.aval.inc_rank(leaves[0].shape[0], 0), list(leaves))
    return with_leaves(x, leaves)


def differentiable_leaves(x: Any) -> list[Any]:
    """Return the leaves of a value that have tangents. A dense tangent makes the value one leaf."""
    return [leaf for leaf in _parts(x) if is_inexact(type_of_leaf(leaf))]


def _parts(x: Any) -> list[Any]:
    return [x] if isinstance(x, Value) and x.dense_tangent else leaves_of(x)


def _with_variables(x: Any, variables: Sequence[Any]) -> Any:
    rest = iter(variables)
    leaves = _parts(x)
    new = [next(rest) if is_inexact(type_of_leaf(leaf)) else leaf for leaf in leaves]
    return new[0] if leaves[0] is x else with_leaves(x, new)


def _tangent_type(x: Any) -> Any:
    """Return the type of the tangent of a value, or None if its tangent is dense."""
    x = value_of(x)
    if isinstance(x, Value):
        return None if x.dense_tangent else TangentType(type_of(x))
    return x.aval if isinstance(x, Tangent) else None


def _regroup(flat: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    rest = iter(flat)
    pick = lambda t: next(rest) if t is None else Tangent(t, list(islice(rest, len(t.leaves))))
    return [pick(t) for t in types]


def _flat_function(
    operation: Any, primals: Sequence[Any], varies: Sequence[bool], wanted: Sequence[bool]
) -> tuple[Callable, list[Any]]:
    """Return an operation as a function of varying leaves, and the leaves.

    The function returns the leaves of the wanted results that have tangents.
    """
    counts = [
        len(differentiable_leaves(p)) if v else 0 for p, v in zip(primals, varies, strict=True)
    ]
    varying = [p for p, v in zip(primals, varies, strict=True) if v]
    variables = [leaf for p in varying for leaf in differentiable_leaves(p)]

    def function(flat: list[Any]) -> list[Any]:
        rest = iter(flat)
        pairs = zip(primals, varies, counts, strict=True)
        operands = [_with_variables(p, list(islice(rest, n))) if v else p for p, v, n in pairs]
        out = operation.run(*operands)
        chosen = [x for x, w in zip(out, wanted, strict=True) if w]
        function.tangent_types = [_tangent_type(x) for x in chosen]  # type: ignore[attr-defined]
        return [_one_leaf(leaf) for x in chosen for leaf in differentiable_leaves(x)]

    return function, list(map(_one_leaf, variables))


def _one_leaf(x: Any) -> Any:
    return as_high_array(x) if isinstance(x, Value) else jnp.asarray(x)
