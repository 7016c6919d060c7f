"""Derivatives and transposes of a primitive that the user made with `vn.hijax.primitive`.

The user sets rules with the methods `defvjp`, `defjvp` and `deftranspose` of the primitive. Here,
each rule is an `Operation`. Its method `evaluate` takes and returns flat lists. It calls the
function of the user on pytrees, and checks the results. It also returns static data about the
results, as in `Expansion`, or None.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.primitives.custom_functions import leaf_cotangents
from ..._core.value import Value
from ..._jax.hijax import GradAccum, Zero, instantiate_zeros
from ..types import HighType, TangentType, has_tangent, of_arrays, strong_type_of
from ..values import Tangent, apply, expose, high, is_inexact, leaves_of
from .expansion import ONE_LEAF, Expansion, Structure, show_types


def unflatten_tangents(structure: Structure, types: Sequence[Any], tangents: Any) -> Any:
    """Build the pytree of tangents or cotangents that a derivative rule takes as its argument.

    `structure` and `types` describe the operands or results. `tangents` is an iterator, from which
    this takes one item for each type that has a floating leaf. For the others, such as integers,
    the pytree has an array of zeros of dtype `float0`.
    """
    zero = lambda t: np.zeros(t.shape, jax.dtypes.float0)
    return structure.unflatten(expose(next(tangents)) if has_tangent(t) else zero(t) for t in types)


class ForwardRule(Expansion):
    """The function `fwd` that the user passed to `defvjp`, as an `Operation` on flat lists.

    The operation takes the operands of the primitive. It returns one list: the results, the
    residuals, and the operands that are leaves of an implicit array whose cotangent may be dense.
    `BackwardRule` needs these leaves, to convert a dense cotangent to cotangents of leaves.
    """

    suffix = ".fwd"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        """Call `fwd`. Return its results, its residuals and some of the operands, as one list.

        The operands are those for which a rule may return a dense cotangent. Also return a pair:
        the structure of the results and the structure of the residuals.
        """
        args = self.structure.unflatten(map(expose, values))
        pair = self.call_for_pair("fwd", "fwd must return a pair: results and residuals", *args)
        (flat, out), (residuals, residual_structure) = map(self.flatten_results, pair)
        out_types = tuple(map(strong_type_of, flat))
        types = tuple(map(strong_type_of, values))
        expected, expected_types = Expansion.like(self).infer(types)
        if (out, out_types) != (expected, expected_types):
            raise self.error(
                f"fwd returns ({show_types(out_types)}), but the function itself "
                f"({show_types(expected_types)}). Structures and types must be the same."
            )
        primals = compress(values, _dense_cotangent_flags(self.structure))
        return [*flat, *residuals, *primals], (out, residual_structure)


def _dense_cotangent_flags(structure: Structure) -> list[bool]:
    """Return for each operand whether a rule may return a dense cotangent in its place.

    This holds for the leaves of an implicit array whose class sets `dense_tangent`.
    """
    is_dense = lambda v: v != ONE_LEAF and v.node_data()[0].dense_tangent
    return [is_dense(v) for v in structure.values for _ in range(v.num_leaves)]


@dataclass(frozen=True)
class DerivativeRule(Expansion):
    """A rule of the user that returns tangents or cotangents, as an `Operation` on flat lists.

    `types` are the types of the operands of the primitive. `out` and `out_types` are the structure
    and the types of its results.
    """

    types: tuple[Any, ...]
    out: Structure
    out_types: tuple[Any, ...]

    rule = ""  # the name in messages

    def flatten_tangents(
        self, tangents: Any, structure: Structure, types: Sequence[Any], primals: Sequence[Any]
    ) -> list[Any]:
        """Check the tangents or cotangents that a rule returns, and return them as a flat list.

        The list has an item for each operand in `structure`: None if the rule returns None, or if
        the operand has no floating leaf.

        **Arguments:**

        - `tangents`: the tangent, or None, that the rule returns for each array or implicit array.
        - `structure`, `types`: the structure and the types of the operands or results.
        - `primals`: the value of each operand that is a leaf of an implicit array with a dense
          tangent, and None for all others. It converts a dense cotangent to cotangents of leaves.
          If such a value is None, a dense cotangent raises TypeError.
        """
        groups = structure.group(types), structure.group(primals)
        args = zip(tangents, structure.values, *groups, strict=True)
        return [x for value_args in args for x in self._flatten_tangent(*value_args)]

    def _flatten_tangent(
        self, tangent: Any, treedef: Any, types: Sequence[Any], primals: Sequence[Any]
    ) -> list[Any]:
        """Return the result of `flatten_tangents` for one array, dense or implicit.

        `treedef` is its tree structure, `ONE_LEAF` if it is one operand. `types` and `primals` have
        an item for each operand in it.
        """
        if tangent is None or not any(map(has_tangent, types)):
            return [None] * len(types)
        if treedef == ONE_LEAF:
            return [self.check_tangent(tangent, types[0])]
        cls = treedef.node_data()[0]
        if not isinstance(tangent, Value) and cls.dense_tangent and None not in primals:
            tangents = leaf_cotangents(high, jax.tree.unflatten(treedef, primals), tangent)
        elif type(tangent) is not cls:
            raise self._tangent_error(tangent, f"a {cls.__name__}")
        else:
            tangents = treedef.flatten_up_to(tangent)
        pairs = zip(tangents, types, strict=True)
        return [self.check_tangent(x, t) if has_tangent(t) else None for x, t in pairs]

    def check_tangent(self, tangent: Any, t: Any) -> Any:
        """Return the tangent of an operand or a result of type `t`, as an array or a `Tangent`.

        Raise TypeError if the tangent has another class, structure, shape or dtype.
        """
        aval = t.to_tangent_aval()
        if isinstance(aval, TangentType):
            if type(tangent) is t.cls:
                leaves = zip(self.flatten_up_to(t.treedef, tangent), t.leaves, strict=True)
                return Tangent(aval, [self.check_tangent(x, a) for x, a in leaves if is_inexact(a)])
            expected = f"a {t.cls.__name__} of tangents"
        else:
            if not isinstance(tangent, Value | Tangent):
                tangent = jnp.asarray(tangent)
                if (tangent.shape, tangent.dtype) == (aval.shape, aval.dtype):
                    return tangent
            expected = show_types([aval])
        raise self._tangent_error(tangent, f"{show_types([t])}; expected {expected}")

    def _tangent_error(self, tangent: Any, wanted: str) -> TypeError:
        is_tree = isinstance(tangent, Value | Tangent)
        shown = repr(expose(tangent)) if is_tree else show_types([jax.typeof(tangent)])
        message = f"{self.rule} returns {shown} as the tangent of {wanted}"
        if not self.typed:
            message += " (outside vn.hijax.enabled(), a tangent has one array per leaf)"
        return self.error(message)


@dataclass(frozen=True)
class BackwardRule(DerivativeRule):
    """The function `bwd` that the user passed to `defvjp`, as an `Operation` on flat lists.

    The operation takes the residuals, the leaves that `ForwardRule` returns after them, and the
    cotangents of the results. It returns the cotangents of the operands, except where `bwd` returns
    None. The field `residuals` is the structure of the residuals.
    """

    residuals: Structure

    suffix = ".bwd"
    rule = "bwd"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        """Call `bwd`. Return the cotangents, and a bool for each operand: whether it has one."""
        rest = iter(values)
        residuals = self.residuals.unflatten(map(expose, rest))
        primals = [next(rest) if d else None for d in _dense_cotangent_flags(self.structure)]
        cotangents = unflatten_tangents(self.out, self.out_types, rest)
        cts = self.call("bwd", residuals, cotangents)
        args = jax.tree_util.treedef_children(self.structure.tree)
        if not isinstance(cts, tuple | list) or len(cts) != len(args):
            raise self.error(
                f"bwd must return a tuple of {len(args)}, a cotangent or None for each operand "
                f"of types ({show_types(self.types)}), not {cts}."
            )
        by_value = [
            x for tree, ct in zip(args, cts, strict=True) for x in self.flatten_up_to(tree, ct)
        ]
        flat = self.flatten_tangents(by_value, self.structure, self.types, primals)
        return [x for x in flat if x is not None], [x is not None for x in flat]


@dataclass(frozen=True)
class LinearizedRule(Expansion):
    """The forward derivative of a primitive that has a `bwd` rule, computed as its transpose.

    The field `backward` is the rule. The operation takes the operands of `backward` except the
    cotangents, then the tangents of the operands of the primitive for which `varies` is true. It
    returns the tangents of the results. In reverse mode, JAX transposes this operation, and the
    transpose calls `backward` itself.
    """

    backward: BackwardRule
    varies: tuple[bool, ...]

    suffix = ".jvp"

    @property
    def result_types(self) -> list[Any]:
        # Known without a trace. A rule need not be linear if it is only used in reverse mode.
        return [t.to_tangent_aval() for t in self.backward.out_types if has_tangent(t)]

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        residuals, tangents = self._split(values)
        leaf_types = [t.lo_ty() for t in self.result_types]

        # Return tangents or cotangents of the results, given the flat list of their arrays.
        def unflatten(leaves: Iterable[Any]) -> list[Any]:
            rest = iter(leaves)
            pairs = zip(self.result_types, leaf_types, strict=True)
            return [of_arrays(t, list(islice(rest, len(types)))) for t, types in pairs]

        # Return arrays of the cotangents of varying operands, given arrays of result cotangents.
        def pull(leaves: list[Any]) -> list[Any]:
            cts = self._select(*self.backward.evaluate(*residuals, *unflatten(leaves)))
            zeros = lambda like: list(map(jnp.zeros_like, leaves_of(like)))
            pairs = zip(cts, tangents, strict=True)
            return [x for ct, t in pairs for x in (zeros(t) if ct is None else leaves_of(ct))]

        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for types in leaf_types for a in types]
        push = jax.linear_transpose(pull, shapes)
        (flat,) = push([leaf for x in tangents for leaf in leaves_of(x)])
        return unflatten(flat), None

    def _split(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Split the operands of this operation into operands of `backward`, and tangents."""
        count = len(values) - sum(self.varies)
        return values[:count], values[count:]

    def _select(self, flat: Sequence[Any], has_cotangent: Sequence[bool]) -> list[Any]:
        """Return the cotangent, or None, of each operand that varies.

        The arguments are the list of cotangents and the list of bools that `backward` returns.
        """
        rest = iter(flat)
        cotangents = [next(rest) if h else None for h in has_cotangent]
        return list(compress(cotangents, self.varies))

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        residuals, accumulators = self._split(operands)
        if any(isinstance(x, GradAccum) for x in residuals):
            return False
        if any(type(ct) is not Zero for ct in cotangents):
            inputs = [*residuals, *map(instantiate_zeros, cotangents)]
            has_cotangent, _ = self.backward.infer(tuple(map(strong_type_of, inputs)))
            selected = self._select(apply(self.backward, *inputs), has_cotangent)
            for x, ct in zip(accumulators, selected, strict=True):
                if isinstance(x, GradAccum) and ct is not None:
                    x.accum(ct)
        return True


class ForwardModeRule(DerivativeRule):
    """The rule that the user has set with `defjvp`, as an `Operation` on flat lists.

    The operation takes the operands, then the tangents of the operands with a floating leaf. It
    returns the tangents of the results with a floating leaf.
    """

    suffix = ".jvp"
    rule = "the rule of defjvp"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        rest = iter(values)
        args = self.structure.unflatten(map(expose, rest))
        tangents = unflatten_tangents(self.structure, self.types, rest)
        message = f"{self.rule} must return a pair: results and tangents"
        _, out_tangents = self.call_for_pair("jvp", message, args, tangents)
        by_value = self.flatten_up_to(self.out.tree, out_tangents)
        primals = [None] * len(self.out_types)
        flat = self.flatten_tangents(by_value, self.out, self.out_types, primals)
        if any(x is None for x in compress(flat, map(has_tangent, self.out_types))):
            raise self.error(f"{self.rule} returns None for a tangent; return zeros instead")
        return [x for x in flat if x is not None], None


@dataclass(frozen=True)
class TransposeRule(DerivativeRule):
    """A rule that the user has set with `deftranspose`, as an `Operation` on flat lists.

    The rule returns the cotangent of one operand, in which the primitive is linear. This operand is
    the argument `argnum` of the primitive, and has the index `position` in the flat list. The
    operation takes the other operands, then the cotangents of the results.
    """

    position: int
    argnum: int

    suffix = ".transpose"
    rule = "deftranspose's rule"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        rest = map(expose, values)
        others = list(islice(rest, self.structure.size - 1))
        others.insert(self.position, None)
        cotangents = self.out.unflatten(rest)
        ct = self.call(("transpose", self.argnum), cotangents, *self.structure.unflatten(others))
        return [self.check_tangent(ct, self.types[self.position])], None


def jvp_by_rule(
    expansion: Expansion, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Return the results of a user's primitive and their tangents, by the rule that the user set.

    `expansion` is the call of the primitive. The rule is from `defjvp`, `defvjp` or `deftranspose`.
    Return None if there is no rule, or if the `deftranspose` rules do not apply. Then JAX
    differentiates the function of the primitive.
    """
    types = tuple(map(strong_type_of, primals))
    rules = expansion.primitive.rules
    if "jvp" not in rules and "fwd" not in rules:
        return _jvp_of_linear(expansion, types, primals, tangents)
    out_structure, out_types = expansion.infer(types)
    pairs = list(zip(tangents, types, strict=True))
    if "jvp" in rules:
        rule = ForwardModeRule.like(expansion, types, out_structure, out_types)
        floating = [instantiate_zeros(x) for x, t in pairs if has_tangent(t)]
        return _fill_zero_tangents(apply(expansion, *primals), apply(rule, *primals, *floating))
    forward = ForwardRule.like(expansion)
    results = apply(forward, *primals)
    out, residuals = results[: len(out_types)], results[len(out_types) :]
    (_, residual_structure), _ = forward.infer(types)
    varies = tuple(type(x) is not Zero and has_tangent(t) for x, t in pairs)
    if not any(varies) or not any(map(has_tangent, out_types)):
        return _fill_zero_tangents(out, ())
    backward = BackwardRule.like(expansion, types, out_structure, out_types, residual_structure)
    linear = LinearizedRule.like(expansion, backward, varies)
    return _fill_zero_tangents(out, apply(linear, *residuals, *compress(tangents, varies)))


def _fill_zero_tangents(out: list[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the results `out`, and a list with the tangent of each result.

    `tangents` has the tangent of each result with a floating leaf, in order. The other results get
    a `Zero`. If `tangents` is empty, all results do.
    """
    rest = iter(tangents)
    zero = lambda t: Zero(t.to_tangent_aval())
    types = [jax.typeof(x) for x in out]
    return out, [next(rest) if tangents and has_tangent(t) else zero(t) for t in types]


def _jvp_of_linear(
    expansion: Expansion, types: Sequence[Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Return the results and tangents of a primitive that is linear in each operand with a tangent.

    `deftranspose` declares that the primitive is linear in an operand. The tangent of the results
    is then the sum of the primitive, applied to each tangent in place of its operand. Return None
    if an operand with a tangent has no such rule or needs a tangent for each leaf, or if a result
    is an implicit array or has no tangent.
    """
    varying = [i for i, t in enumerate(tangents) if type(t) is not Zero]
    is_tree = lambda t: isinstance(t.to_tangent_aval(), TangentType)
    if any(_linear_argnum(expansion, i) is None or is_tree(types[i]) for i in varying):
        return None
    out = apply(expansion, *primals)
    if any(isinstance(jax.typeof(x), HighType) or not has_tangent(jax.typeof(x)) for x in out):
        return None
    replace = lambda i: [tangents[i] if i == j else p for j, p in enumerate(primals)]
    terms = [apply(expansion, *replace(i)) for i in varying]
    return out, [sum(xs[1:], start=xs[0]) for xs in zip(*terms, strict=True)]


def _linear_argnum(expansion: Expansion, position: int) -> int | None:
    """Return which argument of the primitive is the operand with the index `position`.

    `expansion` is the call of the primitive. Return None if the operand is only a part of an
    argument, or if the argument has no `deftranspose` rule.
    """
    args = expansion.structure.unflatten(range(expansion.structure.size))
    for argnum, arg in enumerate(args):
        if type(arg) is int and arg == position:
            return argnum if ("transpose", argnum) in expansion.primitive.rules else None
    return None


def transpose_by_rule(
    expansion: Expansion, cotangents: Sequence[Any], operands: Sequence[Any]
) -> bool:
    """Call the `deftranspose` rule of a primitive, and accumulate the cotangent that it returns.

    `expansion` is the call of the primitive. `operands` has JAX's accumulator, a `GradAccum`, in
    place of each operand that needs a cotangent. Return True. Return False, and accumulate nothing,
    if there is not exactly one such operand, or if it has no rule.
    """
    linear = [i for i, x in enumerate(operands) if isinstance(x, GradAccum)]
    if len(linear) != 1 or (argnum := _linear_argnum(expansion, linear[0])) is None:
        return False
    (position,) = linear
    accumulator = operands[position]
    others = [x for x in operands if x is not accumulator]
    types = tuple(x.aval if x is accumulator else strong_type_of(x) for x in operands)
    rule = TransposeRule.like(expansion, types, *expansion.infer(types), position, argnum)
    accumulator.accum(apply(rule, *others, *map(instantiate_zeros, cotangents))[0])
    return True
