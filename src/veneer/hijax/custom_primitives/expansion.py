"""The functions of a user's primitive as operations, which `jax.vmap` can map.

The functions of the user take and return pytrees. An operation takes and returns flat lists of
operands and results. With high types on, an implicit array in the pytree is one operand. Otherwise
each leaf is an operand.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.rules import clear_with_rules
from ..._core.value import is_value
from ..._jax.hijax import GradAccum, ValAccum, Zero, instantiate_zeros
from ..._jax.tracing import trace_context
from ..high_rules import jvp_of_vmap, transpose
from ..mode import turned_on
from ..operations import Parameters, Vmap
from ..types import TangentType, as_high_array, is_typed, of_arrays, strong_type_of, unpack
from ..values import Operation, Pack, Unpack, apply, expose, value_of


@dataclass(frozen=True)
class Structure:
    """The structure of a pytree of operands or results of a user's primitive.

    The pytree has values, each an array or an implicit array. `tree` is the tree structure in which
    each value is a leaf. `values` has the tree structure of each value, down to its operands:
    `ONE_LEAF` if the value is one operand.
    """

    tree: Any
    values: tuple[Any, ...]

    @property
    def size(self) -> int:
        """The number of operands in all values."""
        return sum(value.num_leaves for value in self.values)

    def group(self, flat: Iterable[Any]) -> list[list[Any]]:
        """Split a list with an item for each operand into a list for each value."""
        rest = iter(flat)
        return [list(islice(rest, value.num_leaves)) for value in self.values]

    def unflatten(self, flat: Iterable[Any]) -> Any:
        """Build the pytree whose operands are the next `size` items of `flat`."""
        pairs = zip(self.values, self.group(flat), strict=True)
        return jax.tree.unflatten(self.tree, [jax.tree.unflatten(v, group) for v, group in pairs])

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Return the subtree of `tree` at the position of each operand, as a list."""
        pairs = zip(self.values, self.tree.flatten_up_to(tree), strict=True)
        return [x for value, subtree in pairs for x in value.flatten_up_to(subtree)]


ONE_LEAF = jax.tree.structure(0)


def flatten_values(tree: Any, typed: bool) -> tuple[list[Any], Structure]:
    """Return the operands in a pytree of arrays and implicit arrays, and its structure.

    An implicit array is one operand if `typed` is true. Otherwise each leaf is an operand.
    """
    values, treedef = jax.tree.flatten(tree, is_leaf=is_value)
    pairs = [([x], ONE_LEAF) if typed or not is_value(x) else jax.tree.flatten(x) for x in values]
    flat = [x for group, _ in pairs for x in group]
    return flat, Structure(treedef, tuple(structure for _, structure in pairs))


def show_types(types: Iterable[Any]) -> str:
    """Return types as text for a message, such as `f32[3], lora[4,6]`."""
    return ", ".join(t.str_short(short_dtypes=True) for t in types)


def map_operation(
    operation: Operation, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Map an operation under `jax.vmap`. Return the results, and their batch axes, which are 0.

    `size` and `name` are the size and the name of the mapped axis. `dims` are the batch axes of the
    operands `values`, with None for an operand that is not mapped.
    """
    out = apply(MappedExpansion(operation, size, name, tuple(dims)), *values)
    return out, [0] * len(out)


@dataclass(frozen=True)
class Expansion(Operation):
    """The function that defines a user's primitive, as an `Operation` on flat lists of operands.

    An `Operation` is the computation of one equation in a jaxpr. A subclass overrides `evaluate` to
    call another function of the user, such as a derivative rule. `evaluate` also returns static
    data about the results, which `infer` finds by tracing `evaluate` on abstract operands.
    """

    primitive: Any  # the `HighPrimitive`
    structure: Structure  # of the operands
    parameters: Parameters
    typed: bool  # whether an implicit array is one operand

    suffix = ""
    batch = map_operation

    @property
    def name(self) -> str:
        return self.primitive.name + self.suffix

    @property
    def printed(self) -> dict[str, Any]:
        return self.parameters.params

    def run(self, *values: Any) -> list[Any]:
        return self.evaluate(*values)[0]

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        """Return the results as a flat list, and static data about them: here their structure."""
        out = self.call("expand", *self.structure.unflatten(map(expose, values)))
        return self.flatten_results(out)

    def call(self, rule: Any, *args: Any) -> Any:
        """Call a function of the user with `args` and the static parameters of the primitive.

        `rule` is the key of the function in `HighPrimitive.rules`.
        """
        return self.primitive.rules[rule](*args, **self.parameters.params)

    def call_for_pair(self, rule: Any, message: str, *args: Any) -> Any:
        """Return the pair that `call(rule, *args)` returns.

        Raise TypeError with the text `message` if it returns something else.
        """
        pair = self.call(rule, *args)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise self.error(message)
        return pair

    def flatten_results(self, tree: Any) -> tuple[list[Any], Structure]:
        """Return the results in the pytree `tree` as a flat list, and their structure.

        An implicit array is one result if `self.typed` is true. Otherwise each leaf is a result.
        """
        return flatten_values(jax.tree.map(self._unpack, tree, is_leaf=is_value), self.typed)

    def _unpack(self, x: Any) -> Any:
        """Return the implicit array of a tracer, with traced leaves, or of a `HighArray`.

        If `self.typed` is true, a tracer of an implicit array whose tangent is one dense array
        stays a tracer. Return other objects unchanged.
        """
        if not is_typed(x) or (self.typed and x.aval.dense_tangent):
            return value_of(x)
        value = unpack(x)
        return value if self.typed else jax.tree.map(self._unpack, value)

    def flatten_up_to(self, tree: Any, prefix: Any) -> list[Any]:
        """Return the part of the pytree `prefix` at each leaf of the tree structure `tree`.

        If `prefix` is None, each part is None. Raise TypeError if the structures do not fit.
        """
        if prefix is None:
            return [None] * tree.num_leaves
        if tree == ONE_LEAF:
            return [prefix]
        try:
            return tree.flatten_up_to(prefix)
        except ValueError as error:
            raise self.error(f"a rule returns a tree of another structure: {error}") from None

    def infer(self, types: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return the static data of `evaluate` and the result types, given the operand types."""
        return _infer(self, types, trace_context())

    @classmethod
    def like(cls, other: "Expansion", *fields: Any) -> Any:
        """Return an operation of this class for the same primitive, operands and parameters.

        `fields` are the values of the fields that the class has and `Expansion` does not have.
        """
        return cls(other.primitive, other.structure, other.parameters, other.typed, *fields)

    def error(self, message: str) -> TypeError:
        return TypeError(f"{self.primitive.name}: {message}")


@lru_cache(maxsize=4096)
def _infer(
    operation: Expansion, types: tuple[Any, ...], context: Any
) -> tuple[Any, tuple[Any, ...]]:
    del context  # part of the key: types depend on x64 and on the mesh
    inferred: list[Any] = []

    def run_on_leaves(*leaves: list[Any]) -> None:
        pairs = zip(types, leaves, strict=True)
        flat, data = operation.evaluate(*(of_arrays(t, arrays) for t, arrays in pairs))
        inferred[:] = data, tuple(map(strong_type_of, flat))

    with turned_on():
        jax.make_jaxpr(run_on_leaves)(*([*t.lo_ty()] for t in types))
    data, result_types = inferred
    return data, result_types


clear_with_rules(_infer.cache_clear)


class MappedExpansion(Vmap):
    """An `Expansion` under `jax.vmap`: the function of a user's primitive, or one of its rules.

    Its derivatives are the derivatives of the `Expansion`, mapped over the same axes.
    """

    jvp = jvp_of_vmap
    batch = map_operation

    @property
    def result_types(self) -> list[Any] | None:
        types = self.of.result_types
        return types and [
            t.inc_rank(self.size, 0)
            if isinstance(t, TangentType)
            else t.update(shape=(self.size, *t.shape))
            for t in types
        ]

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        if all(type(ct) is Zero for ct in cotangents):
            return True
        is_linear = [isinstance(x, GradAccum) for x in operands]
        pairs = list(zip(operands, self.dims, strict=True))
        linear = [pair for pair in pairs if isinstance(pair[0], GradAccum)]
        types = [x.aval if d is None else x.aval.dec_rank(self.size, d) for x, d in linear]
        others = [(as_high_array(value_of(x)), d) for x, d in pairs if not isinstance(x, GradAccum)]

        # Transpose the operation for one index of the mapped axis. Return the cotangents of the
        # linear operands.
        def transpose_slice(others: list[Any], cts: list[Any]) -> list[Any]:
            accumulators = [ValAccum(t) for t in types]
            rest, rest_linear = iter(others), iter(accumulators)
            operands = [next(rest_linear if lin else rest) for lin in is_linear]
            transpose(cts, *operands, operation=self.of)
            return [instantiate_zeros(x.freeze()) for x in accumulators]

        mapped = jax.vmap(
            transpose_slice,
            ([d for _, d in others], 0),
            [d or 0 for _, d in linear],  # an operand that is not mapped: summed below
            axis_size=self.size,
            **({} if self.axis_name is None else {"axis_name": self.axis_name}),
        )
        out = mapped([x for x, _ in others], list(map(instantiate_zeros, cotangents)))
        for (x, d), ct in zip(linear, out, strict=True):
            x.accum(_sum_first_axis(x.aval, ct) if d is None else ct)
        return True


def _sum_first_axis(type: Any, ct: Any) -> Any:
    """Return the sum of the cotangents that `ct` stacks along its first axis.

    `type` is the type of one cotangent, an array type or a `TangentType`.
    """
    if not isinstance(type, TangentType):
        return jnp.sum(ct, axis=0)
    leaves = apply(Unpack(jax.typeof(ct)), ct)
    return apply(Pack(type), *(jnp.sum(leaf, axis=0) for leaf in leaves))[0]
