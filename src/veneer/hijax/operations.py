"""Operations: what the one high primitive does on values, and what its derivatives do.

An operation is a description that can be hashed, and a function `run` of values: implicit arrays,
dense arrays and tangents. The derivatives and the batched form of an operation are operations
again, so that the set is closed under all of JAX's transformations; each runs the rule of its
innermost primitive, differentiated or batched by JAX itself on the leaves, and only once it is
evaluated or lowered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from .._core.dispatch import dispatch
from .._core.value import Value, is_value, materialise_one
from .._jax.primitives import Primitive
from .high_array import HighArray, value_of
from .types import (
    HighType,
    Tangent,
    TangentType,
    is_inexact,
    normal,
    parted,
    takes_axis,
    type_of,
    type_of_leaf,
)


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
class Apply:
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
        if any(map(is_value, values)):
            out = dispatch(self.primitive, values, params)
        else:  # what was implicit has been made dense meanwhile
            out = self.primitive.bind(*values, **self.primitive.get_bind_params(params))
        return list(map(opened, out if self.primitive.multiple_results else [out]))


@dataclass(frozen=True)
class Pack:
    """Leaves into a value or a tangent."""

    type: HighType | TangentType
    name = "pack"
    printed: Any = None

    def run(self, *leaves: Any) -> list[Any]:
        return [self.type.whole(leaves)]


@dataclass(frozen=True)
class Unpack:
    """A value into its leaves."""

    type: HighType
    name = "unpack"
    printed: Any = None

    def run(self, value: Any) -> list[Any]:
        return list(map(normal, all_leaves(value)))


@dataclass(frozen=True)
class Materialise:
    """A value, or the leaves of one, into the dense array."""

    type: HighType
    of_leaves: bool = False
    name = "materialise"
    printed: Any = None

    def run(self, *operands: Any) -> list[Any]:
        value = self.type.of_arrays(operands) if self.of_leaves else operands[0]
        return [jnp.asarray(materialise_one(value_of(value)))]


@dataclass(frozen=True)
class Zeros:
    """The tangent that is zero."""

    type: TangentType
    name = "zeros"
    printed: Any = None

    def run(self) -> list[Any]:
        return [zeros_of(self.type)]


@dataclass(frozen=True)
class Add:
    """The sum of two tangents, leaf by leaf."""

    type: TangentType
    name = "add_any"
    printed: Any = None

    def run(self, x: Any, y: Any) -> list[Any]:
        return [Tangent(self.type, [a + b for a, b in zip(x.leaves, y.leaves, strict=True)])]


@dataclass(frozen=True)
class Jvp:
    """The tangents of some results, in the direction of tangents of some operands.

    The operands are those of the operation, and then the tangents of those that vary.
    """

    of: Any
    varies: tuple[bool, ...]
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.jvp"

    printed: Any = None

    def run(self, *operands: Any) -> list[Any]:
        primals, tangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _of_variables(self.of, primals, self.varies, self.wanted)
        flat = [leaf for t in tangents for leaf in parts(t)]
        _, flat_out = jax.jvp(function, (variables,), (flat,))
        return _regroup(flat_out, function.tangent_types)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Vjp:
    """The cotangents of the operands that vary, of those of some results.

    The operands are those of the operation, and then the cotangents.
    """

    of: Any
    varies: tuple[bool, ...]
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.vjp"

    printed: Any = None

    def run(self, *operands: Any) -> list[Any]:
        primals, cotangents = operands[: len(self.varies)], operands[len(self.varies) :]
        function, variables = _of_variables(self.of, primals, self.varies, self.wanted)
        _, pull = jax.vjp(function, variables)
        (flat,) = pull([leaf for ct in cotangents for leaf in parts(ct)])
        types = [_tangent_type(p) for p, v in zip(primals, self.varies, strict=True) if v]
        return _regroup(flat, types)


@dataclass(frozen=True)
class Transpose:
    """The cotangents of the operands in which an operation is linear.

    The operands are the others, and then the cotangents of some results.
    """

    of: Any
    linear: tuple[Any, ...]  # the type of each linear operand, and None for the others
    wanted: tuple[bool, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}.transpose"

    printed: Any = None

    def run(self, *operands: Any) -> list[Any]:
        others = iter(operands)
        primals = [next(others) if t is None else zeros_of(t) for t in self.linear]
        varies = tuple(t is not None for t in self.linear)
        return Vjp(self.of, varies, self.wanted).run(*primals, *others)


@dataclass(frozen=True)
class Vmap:
    """An operation mapped over the given axes of its operands; those of the results come first."""

    of: Any
    size: int
    axis_name: Any
    dims: tuple[int | None, ...]

    @property
    def name(self) -> str:
        return f"vmap({self.of.name})"

    printed: Any = None

    def run(self, *operands: Any) -> list[Any]:
        treedefs: list[Any] = []

        def one(*flats: Any) -> list[Any]:
            pairs = zip(operands, flats, strict=True)
            out = self.of.run(*(with_all_leaves(x, flat) for x, flat in pairs))
            out = list(map(_stackable, out))
            treedefs.extend(out)
            return [all_leaves(x) for x in out]

        name = {} if self.axis_name is None else {"axis_name": self.axis_name}
        mapped = jax.vmap(one, in_axes=self.dims, axis_size=self.size, **name)
        flats = mapped(*map(all_leaves, operands))
        return [_stacked(x, flat) for x, flat in zip(treedefs, flats, strict=True)]


class Ruled:
    """An operation that may have rules, which are asked before anything is derived from `run`."""

    result_types: Any = None  # if they are known without a look at what it runs

    def run(self, *values: Any) -> list[Any]:
        """The results."""
        raise NotImplementedError

    def again(self, *values: Any) -> list[Any]:
        """The results where the operation is met once more, in the trace outside of `implicit`."""
        return self.run(*values)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """The results and their tangents, or None."""

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        """Whether it has added to the accumulators among the operands."""
        del cotangents, operands
        return False

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        """The results and their axes."""
        raise NotImplementedError


Operation = Apply | Pack | Unpack | Materialise | Zeros | Add | Jvp | Vjp | Transpose | Vmap | Ruled


def opened(x: Any) -> Any:
    """A result that is a tracer of a high type as a value, with tracers for leaves.

    So a rule gives it that calls plain functions of JAX on an operand, and is itself traced.
    """
    aval = getattr(x, "aval", None)
    if not isinstance(aval, HighType) or aval.dense_tangent:
        return value_of(x)
    from .lifted import apply

    return jax.tree.unflatten(aval.treedef, apply(Unpack(aval), x))


# Values taken apart: all of their leaves, or those that have tangents.


def all_leaves(x: Any) -> list[Any]:
    """The leaves of a value or a tangent; a dense array alone."""
    x = value_of(x)
    if isinstance(x, Value):
        return parted(x)[0]
    return list(x.leaves) if isinstance(x, Tangent) else [x]


def with_all_leaves(x: Any, leaves: Sequence[Any]) -> Any:
    """A value like `x` with other leaves."""
    x = value_of(x)
    if isinstance(x, Value):
        return jax.tree.unflatten(parted(x)[1], leaves)
    return Tangent(x.type, list(leaves)) if isinstance(x, Tangent) else leaves[0]


def _stackable(x: Any) -> Any:
    """A result of one application: dense, if a stack of its leaves is none of it."""
    x = value_of(x)
    return materialise_one(x) if isinstance(x, Value) and not takes_axis(type_of(x)) else x


def _stacked(x: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(x, Tangent):
        return Tangent(x.type.inc_rank(leaves[0].shape[0], 0), list(leaves))
    return with_all_leaves(x, leaves)


def parts(x: Any) -> list[Any]:
    """The leaves of a value that have tangents; a value with a dense tangent itself."""
    return [x for x in _variables(x) if is_inexact(type_of_leaf(x))]


def _variables(x: Any) -> list[Any]:
    return [x] if isinstance(x, Value) and x.dense_tangent else all_leaves(x)


def _with_parts(x: Any, own: Sequence[Any]) -> Any:
    given = iter(own)
    leaves = _variables(x)
    new = [next(given) if is_inexact(type_of_leaf(leaf)) else leaf for leaf in leaves]
    return new[0] if leaves[0] is x else with_all_leaves(x, new)


def _tangent_type(x: Any) -> Any:
    """None of what has a dense tangent; of a value the type of its tangent."""
    x = value_of(x)
    if isinstance(x, Value):
        return None if x.dense_tangent else TangentType(type_of(x))
    return x.type if isinstance(x, Tangent) else None


def _regroup(flat: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    given = iter(flat)
    pick = lambda t: next(given) if t is None else Tangent(t, list(islice(given, len(t.leaves))))
    return [pick(t) for t in types]


def zeros_of(type: Any) -> Any:
    """A value of a type, all of whose leaves are zero."""
    if isinstance(type, HighType | TangentType):
        return type.of_arrays([jnp.zeros(a.shape, a.dtype) for a in type.lo_ty()])
    return jnp.zeros(type.shape, type.dtype)


def _of_variables(
    operation: Any, primals: Sequence[Any], varies: Sequence[bool], wanted: Sequence[bool]
) -> tuple[Callable, list[Any]]:
    """An operation as a function of the floating leaves that vary, to those of wanted results."""
    counts = [len(parts(p)) if v else 0 for p, v in zip(primals, varies, strict=True)]
    variables = [leaf for p, v in zip(primals, varies, strict=True) if v for leaf in parts(p)]

    def function(flat: list[Any]) -> list[Any]:
        given = iter(flat)
        pairs = zip(primals, varies, counts, strict=True)
        operands = [_with_parts(p, list(islice(given, n))) if v else p for p, v, n in pairs]
        out = operation.run(*operands)
        chosen = [x for x, w in zip(out, wanted, strict=True) if w]
        function.tangent_types = [_tangent_type(x) for x in chosen]  # type: ignore[attr-defined]
        return [_one_leaf(leaf) for x in chosen for leaf in parts(x)]

    return function, list(map(_one_leaf, variables))


def _one_leaf(x: Any) -> Any:
    return HighArray(x) if isinstance(x, Value) else jnp.asarray(x)
