"""The operations of `high`: JAX primitives on typed values, their derivatives and batched forms.

The derivative and the batched form of an operation are operations too. When one is evaluated or
lowered, it runs the rule of the primitive, and JAX differentiates or batches the rule itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
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
    strong_type_of,
    type_of,
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
    """The operation of a JAX primitive: run the rule that is registered for the operands."""

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
        # A rule that calls JAX can return a typed tracer.
        is_tree = lambda x: is_typed(x) and not x.aval.dense_tangent
        out = out if self.primitive.multiple_results else [out]
        return [unpack(x) if is_tree(x) else value_of(x) for x in out]


@dataclass(frozen=True)
class Materialise(Operation):
    """Materialize an implicit array of the high type `type`.

    The operand is the implicit array. With `of_leaves`, the operands are its leaves.
    """

    type: HighType
    of_leaves: bool = False
    name = "materialise"

    def run(self, *operands: Any) -> list[Any]:
        value = self.type.of_arrays(operands) if self.of_leaves else operands[0]
        return [jnp.asarray(materialise_one(value_of(value)))]


@dataclass(frozen=True)
class Jvp(Operation):
    """Compute the tangents of some results of the operation `of`.

    The operands are the operands of `of`, then the tangents of the operands that vary.
    """

    of: Any
    varies: tuple[bool, ...]  # whether each operand of `of` has a tangent that is not zero
    wanted: tuple[bool, ...]  # whether to return the tangent of each result

    @property
    def name(self) -> str:
        return f"{self.of.name}.jvp"

    def run(self, *operands: Any) -> list[Any]:
        primals, tangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _flat_function(self.of, primals, self.varies, self.wanted)
        flat = [leaf for t in tangents for leaf in differentiable_leaves(t)]
        _, flat_out = jax.jvp(function, (variables,), (flat,))
        return _group_tangents(flat_out, function.tangent_types)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Vjp(Operation):
    """Compute the cotangents of some operands of the operation `of`.

    The operands are the operands of `of`, then the cotangents of the wanted results.
    """

    of: Any
    varies: tuple[bool, ...]  # whether to return the cotangent of each operand of `of`
    wanted: tuple[bool, ...]  # whether each result has a cotangent that is not zero

    @property
    def name(self) -> str:
        return f"{self.of.name}.vjp"

    def run(self, *operands: Any) -> list[Any]:
        primals, cotangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _flat_function(self.of, primals, self.varies, self.wanted)
        _, pull = jax.vjp(function, variables)
        (flat,) = pull([leaf for ct in cotangents for leaf in differentiable_leaves(ct)])
        types = [_tangent_type(p) for p, v in zip(primals, self.varies, strict=True) if v]
        return _group_tangents(flat, types)


@dataclass(frozen=True)
class Transpose(Operation):
    """Compute the cotangents of the operands in which the operation `of` is linear.

    The operands are the operands of `of` that are not linear, then the cotangents of the wanted
    results.
    """

    of: Any
    linear: tuple[Any, ...]  # the type of each linear operand, and None for each of the others
    wanted: tuple[bool, ...]  # whether each result has a cotangent that is not zero

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
    """Map the operation `of` over an axis of its operands.

    In the results, the mapped axis is the first axis.
    """

    of: Any
    size: int  # of the mapped axis
    axis_name: Any
    dims: tuple[int | None, ...]  # the mapped axis of each operand, or None

    @property
    def name(self) -> str:
        return f"vmap({self.of.name})"

    def run(self, *operands: Any) -> list[Any]:
        slices: list[Any] = []
        must_be_dense = lambda x: isinstance(x, Value) and not can_be_stacked(type_of(x))

        def run_slice(*operand_leaves: Any) -> list[Any]:
            pairs = zip(operands, operand_leaves, strict=True)
            out = map(value_of, self.of.run(*(with_leaves(x, leaves) for x, leaves in pairs)))
            slices[:] = [make_dense(VMAP, [x])[0] if must_be_dense(x) else x for x in out]
            return [leaves_of(x) for x in slices]

        name = {} if self.axis_name is None else {"axis_name": self.axis_name}
        mapped = jax.vmap(run_slice, in_axes=self.dims, axis_size=self.size, **name)
        stacks = mapped(*map(leaves_of, operands))
        return [_with_stacked_leaves(x, leaves) for x, leaves in zip(slices, stacks, strict=True)]


@dataclass(frozen=True)
class Stack(Operation):
    """Repeat an implicit array or a tangent `size` times along a new first axis of each leaf."""

    size: int
    name = "stack"

    def run(self, x: Any) -> list[Any]:
        leaves = [stacked(leaf, self.size) for leaf in leaves_of(x)]
        return [_with_stacked_leaves(value_of(x), leaves)]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        (out,), (tangent,) = apply(self, *primals), tangents
        if type(tangent) is Zero:
            return [out], [Zero(jax.typeof(out).to_tangent_aval())]
        return [out], [stacked(tangent, self.size)]


@dataclass(frozen=True)
class MoveAxis(Operation):
    """Move the axis of a stack of tangents from `source` to `destination`, in each leaf."""

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
    """Select, for each index of the first axis, a slice of one of several implicit arrays.

    The operands are an array `which`, then the implicit arrays `cases`, all of one type. `which`
    has one axis: for each index, the number of the implicit array from which to take the slice.
    """

    select: Callable  # JAX's function that does the same for arrays
    name = "select"

    def run(self, which: Any, *cases: Any) -> list[Any]:
        if not isinstance(value_of(cases[0]), Value | Tangent):
            return [self.select(which, *cases)]
        leaves = zip(*map(leaves_of, cases), strict=True)
        return [with_leaves(cases[0], [self.run(which, *each)[0] for each in leaves])]


def stacked(x: Any, size: int) -> Any:
    """Repeat an array or a tangent, dense or implicit, `size` times along a new first axis."""
    x = as_high_array(x)
    if isinstance(jax.typeof(x), StructuredType):
        return apply(Stack(size), x)[0]
    return jnp.broadcast_to(x, (size, *jnp.shape(x)))


# Stacks, and leaves that have tangents.


def _with_stacked_leaves(x: Any, leaves: Sequence[Any]) -> Any:
    """Return a stack of implicit arrays or tangents like `x`, given the stacks of their leaves."""
    if isinstance(x, Tangent):
        return Tangent(x.aval.inc_rank(leaves[0].shape[0], 0), list(leaves))
    return with_leaves(x, leaves)


def differentiable_leaves(x: Any) -> list[Any]:
    """Return the leaves of an implicit array that have tangents.

    An implicit array whose tangent is one dense array, as for a `QArray`, is one leaf.
    """
    return [leaf for leaf in _leaves_for_tangents(x) if is_inexact(strong_type_of(leaf))]


def _leaves_for_tangents(x: Any) -> list[Any]:
    return [x] if isinstance(x, Value) and x.dense_tangent else leaves_of(x)


def _with_differentiable_leaves(x: Any, new_leaves: Sequence[Any]) -> Any:
    """Return a copy of an implicit array with new values of the leaves that have tangents."""
    rest = iter(new_leaves)
    leaves = _leaves_for_tangents(x)
    new = [next(rest) if is_inexact(strong_type_of(leaf)) else leaf for leaf in leaves]
    return new[0] if leaves[0] is x else with_leaves(x, new)


def _tangent_type(x: Any) -> Any:
    """Return the `TangentType` of the tangents of `x`, or None if they are dense arrays."""
    x = value_of(x)
    if isinstance(x, Value):
        return None if x.dense_tangent else TangentType(type_of(x))
    return x.aval if isinstance(x, Tangent) else None


def _group_tangents(flat: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Return tangents of the given types, from a flat list of their leaves.

    The type of a dense tangent is None.
    """
    rest = iter(flat)
    pick = lambda t: next(rest) if t is None else Tangent(t, list(islice(rest, len(t.leaves))))
    return [pick(t) for t in types]


def _flat_function(
    operation: Any, primals: Sequence[Any], varies: Sequence[bool], wanted: Sequence[bool]
) -> tuple[Callable, list[Any]]:
    """Return an operation as a function that JAX can differentiate, and the argument for a call.

    The argument is a list: the leaves that have tangents, from the operands that vary. The function
    returns a list: the leaves that have tangents, from the wanted results. After a call, its
    attribute `tangent_types` has the types of the tangents of these results, for `_group_tangents`.
    """
    groups = [differentiable_leaves(p) if v else [] for p, v in zip(primals, varies, strict=True)]

    def function(variables: list[Any]) -> list[Any]:
        rest = iter(variables)
        operands = [
            _with_differentiable_leaves(p, list(islice(rest, len(leaves)))) if v else p
            for p, v, leaves in zip(primals, varies, groups, strict=True)
        ]
        results = list(compress(operation.run(*operands), wanted))
        function.tangent_types = list(map(_tangent_type, results))  # type: ignore[attr-defined]
        return [as_array(leaf) for x in results for leaf in differentiable_leaves(x)]

    as_array = lambda x: as_high_array(x) if isinstance(x, Value) else jnp.asarray(x)
    return function, [as_array(leaf) for leaves in groups for leaf in leaves]
