"""The derivatives of a custom primitive by its rules.

A rule is an operation, which runs a function of a user's, and checks what it gives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.value import Value, materialise_one
from ..._jax.hijax import GradAccum, Zero
from ..high import apply
from ..types import HighType, TangentType, of_arrays
from ..values import Tangent, exposed, is_inexact, leaves_of
from .expansion import ONE_LEAF, Expansion, Structure, listed, type_of_one
from .mapped import full_zero


class Forward(Expansion):
    """The results, then the residuals, then the operands that take dense cotangents for leaves.

    Known of them are the structures of the results and of the residuals.
    """

    suffix = ".fwd"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        pair = self.call("fwd", *self.structure.unflatten(map(exposed, values)))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise self.refuse("fwd must return a pair: results and residuals")
        (flat, out), (residuals, kept) = map(self.flattened, pair)
        out_types = tuple(map(type_of_one, flat))
        known, types = Expansion.of(self).known(tuple(map(type_of_one, values)))
        if (out, out_types) != (known, types):
            raise self.refuse(
                f"fwd returns {listed(out_types)}, but the function itself {listed(types)}. "
                "Structures and types must be the same."
            )
        operands = [x for x, d in zip(values, dense_leaves(self.structure), strict=True) if d]
        return [*flat, *residuals, *operands], (out, kept)


def dense_leaves(structure: Structure) -> list[bool]:
    """Of flat operands, which are leaves of a value that may have a dense cotangent."""
    dense = [f != ONE_LEAF and f.node_data()[0].dense_tangent for f in structure.forms]
    groups = zip(structure.group(range(10**9)), dense, strict=True)
    return [d for group, d in groups for _ in group]


@dataclass(frozen=True)
class Backward(Expansion):
    """The cotangents of the operands that have some, of residuals and cotangents of the results.

    Known of them is which operands have one.
    """

    types: tuple[Any, ...]  # of the operands
    out: Structure
    out_types: tuple[Any, ...]
    residuals: Structure

    suffix = ".bwd"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        groups = self.residuals.group(values)
        count = sum(map(len, groups))
        residuals = self.residuals.unflatten(map(exposed, values[:count]))
        rest = iter(values[count:])
        is_kept = dense_leaves(self.structure)
        kept = [next(rest) if k else None for k in is_kept]
        cotangents = self.out.unflatten(with_float0(self.out_types, rest))
        cts = self.call("bwd", residuals, cotangents)
        args = jax.tree_util.treedef_children(self.structure.tree)
        if not isinstance(cts, tuple | list) or len(cts) != len(args):
            raise self.refuse(
                f"bwd must return a tuple of {len(args)}, a cotangent or None for each operand "
                f"of types {listed(self.types)}, not {cts}."
            )
        flat = self._flat(cts, args, kept)
        return [x for x in flat if x is not None], [x is not None for x in flat]

    def _flat(self, cts: Sequence[Any], args: Sequence[Any], kept: list[Any]) -> list[Any]:
        by_unit = [x for tree, ct in zip(args, cts, strict=True) for x in up_to(self, tree, ct)]
        group = self.structure.group
        each = zip(by_unit, self.structure.forms, group(self.types), group(kept), strict=True)
        return [x for one in each for x in as_parts(self, "bwd", *one)]


def up_to(operation: Expansion, tree: Any, result: Any) -> list[Any]:
    """What a rule gives for each leaf of a tree; None for all of it is None for each."""
    if result is None:
        return [None] * tree.num_leaves
    if tree.num_leaves == 1 and tree.num_nodes == 1:
        return [result]
    try:
        return tree.flatten_up_to(result)
    except ValueError as error:
        raise operation.refuse(f"a rule returns a tree of another structure: {error}") from None


def with_float0(types: Sequence[Any], tangents: Iterable[Any]) -> list[Any]:
    """Tangents of values of some types, as a user is given them."""
    rest = iter(tangents)
    zero = lambda t: np.zeros(t.shape, jax.dtypes.float0)
    return [exposed(next(rest)) if has_tangent(t) else zero(t) for t in types]


def has_tangent(t: Any) -> bool:
    """Whether values of a type have a tangent that is not trivial."""
    tangent = t.to_tangent_aval()
    return bool(tangent.leaves) if isinstance(tangent, TangentType) else is_inexact(tangent)


def as_parts(
    operation: Expansion, rule: str, tangent: Any, form: Any, types: Sequence[Any], leaves: Any
) -> list[Any]:
    """A tangent that a rule gives, for what is flat: None where there is none."""
    if tangent is None or not any(map(has_tangent, types)):
        return [None] * len(types)
    if form == ONE_LEAF:
        return [_as_part(operation, rule, tangent, types[0])]
    cls = form.node_data()[0]
    if not isinstance(tangent, Value) and cls.dense_tangent and None not in leaves:
        tangent = _to_leaves(form, leaves, tangent)
    elif type(tangent) is not cls:
        raise operation.refuse_tangent(rule, tangent, f"a {cls.__name__}")
    else:
        tangent = form.flatten_up_to(tangent)
    pairs = zip(tangent, types, strict=True)
    return [_as_part(operation, rule, x, t) if has_tangent(t) else None for x, t in pairs]


def _as_part(operation: Expansion, rule: str, tangent: Any, t: Any) -> Any:
    aval = t.to_tangent_aval()
    if isinstance(aval, TangentType):
        if type(tangent) is t.cls:
            leaves = zip(up_to(operation, t.treedef, tangent), t.leaves, strict=True)
            return Tangent(
                aval, [_as_part(operation, rule, x, a) for x, a in leaves if is_inexact(a)]
            )
    elif not isinstance(tangent, Value | Tangent):
        tangent = jnp.asarray(tangent)
        if (tangent.shape, tangent.dtype) == (aval.shape, aval.dtype):
            return tangent
    is_tree = isinstance(aval, TangentType)
    wanted = f"a {t.cls.__name__} of tangents" if is_tree else listed([aval])[1:-1]
    raise operation.refuse_tangent(rule, tangent, f"{listed([t])[1:-1]}; expected {wanted}")


def _to_leaves(form: Any, leaves: Sequence[Any], cotangent: Any) -> list[Any]:
    """Cotangents of a value's leaves, from that of the dense array."""
    floating = [is_inexact(jax.typeof(x)) for x in leaves]

    def dense(variables: list[Any]) -> Any:
        rest = iter(variables)
        full = [next(rest) if f else x for x, f in zip(leaves, floating, strict=True)]
        return jnp.asarray(materialise_one(jax.tree.unflatten(form, full)))

    _, pull = jax.vjp(dense, [x for x, f in zip(leaves, floating, strict=True) if f])
    rest = iter(pull(cotangent)[0])
    return [next(rest) if f else None for f in floating]


@dataclass(frozen=True)
class Tangents(Expansion):
    """The tangents of the results that have some, by the rule; of operands and their tangents."""

    types: tuple[Any, ...]
    out: Structure
    out_types: tuple[Any, ...]

    suffix = ".jvp"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        count = len(self.types)
        args = self.structure.unflatten(map(exposed, values[:count]))
        tangents = self.structure.unflatten(with_float0(self.types, values[count:]))
        pair = self.call("jvp", args, tangents)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise self.refuse("the rule of defjvp must return a pair: results and tangents")
        group = self.out.group(self.out_types)
        by_unit = up_to(self, self.out.tree, pair[1])
        if len(by_unit) != len(group):
            raise self.refuse(
                f"the rule of defjvp must return a tangent for each of {listed(self.out_types)}"
            )
        each = zip(by_unit, self.out.forms, group, strict=True)
        flat = [
            x for g, f, t in each for x in as_parts(self, "the rule of defjvp", g, f, t, [None])
        ]
        pairs = zip(flat, self.out_types, strict=True)
        if any(x is None and has_tangent(t) for x, t in pairs):
            raise self.refuse("the rule of defjvp returns None for a tangent; return zeros instead")
        return [x for x in flat if x is not None], None


@dataclass(frozen=True)
class Transposed(Expansion):
    """The cotangent of an operand in which the primitive is linear, by the rule.

    The operands are the others, and then the cotangents of the results.
    """

    position: int  # among flat operands
    argnum: int
    type: Any  # of the cotangent
    out: Structure

    suffix = ".transpose"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        count = sum(map(len, self.structure.group(range(10**9)))) - 1
        others = list(map(exposed, values[:count]))
        others.insert(self.position, None)
        cotangents = self.out.unflatten(map(exposed, values[count:]))
        ct = self.call(("transpose", self.argnum), cotangents, *self.structure.unflatten(others))
        return [_as_part(self, "deftranspose's rule", ct, self.type)], None


def jvp_by_rule(
    expansion: Expansion, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Results and their tangents by the rule for derivatives, if there is one."""
    types = tuple(map(type_of_one, primals))
    if "jvp" in expansion.primitive.rules:
        return _by_jvp_rule(expansion, types, primals, tangents)
    if "fwd" in expansion.primitive.rules:
        return _by_vjp_rule(expansion, types, primals, tangents)
    return _as_linear(expansion, types, primals, tangents)


def _by_jvp_rule(
    expansion: Expansion, types: tuple[Any, ...], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    rule = Tangents.of(expansion, types, *expansion.known(types))
    pairs = zip(tangents, types, strict=True)
    out_tangents = apply(rule, *primals, *(full_zero(x) for x, t in pairs if has_tangent(t)))
    out = apply(expansion, *primals)
    return out, _with_zeros(out, out_tangents)


def _by_vjp_rule(
    expansion: Expansion, types: tuple[Any, ...], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    out_structure, out_types = expansion.known(types)
    forward = Forward.of(expansion)
    results = apply(forward, *primals)
    out, residuals = results[: len(out_types)], results[len(out_types) :]
    (_, structure), _ = forward.known(types)
    backward = Backward.of(expansion, types, out_structure, out_types, structure)
    pairs = zip(tangents, types, strict=True)
    varies = tuple(type(x) is not Zero and has_tangent(t) for x, t in pairs)
    varying = [x for x, v in zip(tangents, varies, strict=True) if v]
    if not any(varies) or not any(map(has_tangent, out_types)):
        return out, _with_zeros(out, None)
    linear = Linear.of(expansion, backward, len(residuals), varies)
    return out, _with_zeros(out, apply(linear, *residuals, *varying))


def _with_zeros(out: Sequence[Any], tangents: Sequence[Any] | None) -> list[Any]:
    """A tangent for each result: zero, or one of those of the results that can have one."""
    rest = iter(tangents or ())
    zero = lambda t: Zero(t.to_tangent_aval())
    types = [jax.typeof(x) for x in out]
    return [next(rest) if tangents and has_tangent(t) else zero(t) for t in types]


@dataclass(frozen=True)
class Linear(Expansion):
    """The tangents of the results, of residuals and tangents of operands: `Backward` transposed."""

    backward: Backward
    count: int  # of residuals
    varies: tuple[bool, ...]  # which operands' tangents are given

    suffix = ".jvp"

    @property
    def result_types(self) -> list[Any]:
        """Known without a look at what is run: a rule may not be linear, though it should be."""
        return [t.to_tangent_aval() for t in self.backward.out_types if has_tangent(t)]

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        backward, residuals, outs = self.backward, values[: self.count], self.result_types
        tangents = [leaf for x in values[self.count :] for leaf in leaves_of(x)]

        def pull(flat: list[Any]) -> list[Any]:
            rest = iter(flat)
            cts = [of_arrays(t, list(islice(rest, len(t.lo_ty())))) for t in outs]
            flat, has_one = backward.evaluate(*residuals, *cts)
            chosen = self._chosen(flat, has_one)
            pairs = zip(chosen, values[self.count :], strict=True)
            zeros = lambda like: list(map(jnp.zeros_like, leaves_of(like)))
            return [x for ct, t in pairs for x in (zeros(t) if ct is None else leaves_of(ct))]

        leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for t in outs for a in t.lo_ty()]
        (flat,) = jax.linear_transpose(pull, leaves)(tangents)
        rest = iter(flat)
        return [of_arrays(t, list(islice(rest, len(t.lo_ty())))) for t in outs], None

    def _chosen(self, flat: Sequence[Any], has_one: Sequence[bool]) -> list[Any]:
        rest = iter(flat)
        every = [next(rest) if h else None for h in has_one]
        return [ct for ct, v in zip(every, self.varies, strict=True) if v]

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        residuals, accumulators = operands[: self.count], operands[self.count :]
        if any(isinstance(x, GradAccum) for x in residuals):
            return False
        if any(type(ct) is not Zero for ct in cotangents):
            inputs = [*residuals, *map(full_zero, cotangents)]
            has_one, _ = self.backward.known(tuple(map(type_of_one, inputs)))
            chosen = self._chosen(apply(self.backward, *inputs), has_one)
            for x, ct in zip(accumulators, chosen, strict=True):
                if isinstance(x, GradAccum) and ct is not None:
                    x.accum(ct)
        return True


def _as_linear(
    expansion: Expansion, types: Sequence[Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """The derivative by operands in which a primitive is linear: itself, of the tangent."""
    varying = [i for i, t in enumerate(tangents) if type(t) is not Zero]
    if any(_argnum(expansion, i) is None or _is_tree(types[i]) for i in varying):
        return None
    out = apply(expansion, *primals)
    if any(isinstance(jax.typeof(x), HighType) or not has_tangent(jax.typeof(x)) for x in out):
        return None
    in_place = lambda i: [tangents[i] if i == j else p for j, p in enumerate(primals)]
    first, *rest = (apply(expansion, *in_place(i)) for i in varying)
    for more in rest:
        first = [x + y for x, y in zip(first, more, strict=True)]
    return out, first


def _is_tree(t: Any) -> bool:
    return isinstance(t.to_tangent_aval(), TangentType)


def _argnum(expansion: Expansion, position: int) -> int | None:
    """The number of an operand that is one when flat, and in which the primitive is linear."""
    arguments: Any = jax.tree_util.treedef_children(expansion.structure.tree)
    counts = [tree.num_leaves for tree in arguments]
    forms = iter(expansion.structure.forms)
    start = 0
    for number, (tree, count) in enumerate(zip(arguments, counts, strict=True)):
        of_argument = list(islice(forms, count))
        size = sum(form.num_leaves for form in of_argument)
        if start <= position < start + size:
            is_one = tree.num_nodes == 1 and of_argument == [ONE_LEAF]
            return number if is_one and ("transpose", number) in expansion.primitive.rules else None
        start += size
    return None


def transpose_by_rule(
    expansion: Expansion, cotangents: Sequence[Any], operands: Sequence[Any]
) -> bool:
    """Whether the rule for the one operand that is linear has added to its accumulator."""
    linear = [i for i, x in enumerate(operands) if isinstance(x, GradAccum)]
    if len(linear) != 1 or (argnum := _argnum(expansion, linear[0])) is None:
        return False
    (position,) = linear
    accumulator = operands[position]
    others = [x for x in operands if x is not accumulator]
    types = tuple(x.aval if x is accumulator else type_of_one(x) for x in operands)
    out, _ = expansion.known(types)
    rule = Transposed.of(expansion, position, argnum, accumulator.aval, out)
    accumulator.accum(apply(rule, *others, *map(full_zero, cotangents))[0])
    return True
