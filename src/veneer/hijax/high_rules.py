"""The rules of the primitive `high`: evaluation, types, derivatives and batching.

In a jaxpr, `high` is an equation on typed operands, printed with the name of its operation. When it
is evaluated or lowered, it runs the operation. There are two kinds of derivatives:

- *Of the rule*: if tangents have one array for each leaf, JAX differentiates the rule on the
  leaves, as in `jax.grad(vn.implicit(f))`.
- *Of the program*: if an operand or a result has a dense tangent, JAX's derivative rule of the
  primitive runs on the implicit operands, as in `vn.implicit(jax.grad(f))`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import jax

from .._core.policy import ALLOW, current_policy, policy_in_force
from .._core.rules import add_rule, clear_with_rules
from .._core.value import Value
from .._jax.hijax import (
    GradAccum,
    RefEffect,
    Zero,
    call_jvp_rule,
    call_transpose_rule,
    define_high_primitive,
    no_effects,
    set_printed_form,
    stage_constant,
)
from .._jax.tracing import is_eager, trace_context
from .mode import turned_on
from .operations import Apply, Jvp, Materialise, Transpose, Vjp, Vmap
from .types import (
    HighType,
    as_high_array,
    as_typed_operand,
    has_tangent,
    is_traced_high,
    is_typed,
    of_arrays,
    type_of,
)
from .values import (
    Operation,
    Pack,
    Tangent,
    Unpack,
    apply,
    high,
    leaves_of,
    strong_leaf,
    value_of,
    with_leaves,
)


def run(*operands: Any, operation: Operation) -> list[Any]:
    """Run the operation of an equation of the primitive `high`, which JAX evaluates or lowers."""
    # In a staged program, events were reported when the types of the results were found.
    policy = current_policy() if is_eager() else ALLOW
    with turned_on(), policy_in_force(policy):
        out = operation.run(*map(value_of, operands))
        return [as_high_array(stage_constant(_without_weak_types(x))) for x in map(value_of, out)]


def _without_weak_types(x: Any) -> Any:
    """Return a result without weak types on its leaves, as its high type requires."""
    if isinstance(x, Value | Tangent):
        return with_leaves(x, list(map(strong_leaf, leaves_of(x))))
    return x


def abstract_eval(*types: Any, operation: Operation) -> tuple[list[Any], Any]:
    """Return the types of the results of `high`, by tracing the operation on abstract leaves."""
    if isinstance(operation, Unpack):
        return list(operation.type.leaves), no_effects
    if operation.result_types is not None:
        return list(operation.result_types), frozenset()
    reports = current_policy() is not ALLOW  # then each trace must report its events
    find = _types_of_results.__wrapped__ if reports else _types_of_results
    out, effects = find(operation, types, trace_context())
    return list(out), effects


@lru_cache(maxsize=4096)
def _types_of_results(
    operation: Operation, types: Any, context: Any
) -> tuple[tuple[Any, ...], Any]:
    """Return the types of the results and JAX's effects, given the types of the operands.

    `context` is only a part of the key of the cache. Raise NotImplementedError if the operation
    uses a `jax.Ref` that is not an operand.
    """
    del context  # part of the key: types depend on x64 and on the mesh
    result_types: list[Any] = []

    def on_leaves(*leaves: list[Any]) -> list[Any]:
        operands = [of_arrays(t, arrays) for t, arrays in zip(types, leaves, strict=True)]
        out = list(map(_without_weak_types, map(value_of, operation.run(*operands))))
        result_types.extend(type_of(x) if isinstance(x, Value) else jax.typeof(x) for x in out)
        return [leaf for x in out if not is_traced_high(x) for leaf in leaves_of(x)]

    with turned_on():
        traced = jax.make_jaxpr(on_leaves)(*([*t.lo_ty()] for t in types))
    if any(isinstance(effect, RefEffect) for effect in traced.effects):
        raise NotImplementedError(
            f"{operation.name}({', '.join(map(str, types))}) uses a Box or a jax.Ref from outside, "
            "which JAX cannot see with high types. Return the value and write it in the caller, or "
            "call the function under vn.implicit."
        )
    return tuple(result_types), traced.effects


clear_with_rules(_types_of_results.cache_clear)


# Derivatives.


def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, operation: Operation
) -> tuple[list[Any], list[Any]]:
    """Return the results of an equation of `high`, and their tangents.

    A tangent is `Zero`, an array, or a `Tangent`. If `operation.jvp` returns None, JAX
    differentiates the rule that the operation runs on leaves. But if the tangent of an operand or a
    result is one dense array, as for a `QArray`, JAX's derivative rule of the primitive runs on the
    implicit operands.
    """
    if (results := operation.jvp(primals, tangents)) is not None:
        return results
    types = list(map(jax.typeof, primals))
    varies = tuple(type(t) is not Zero for t in tangents)
    if isinstance(operation, Apply) and any(map(_has_dense_tangent, types)):
        return _program_jvp(operation, primals, tangents)
    out = apply(operation, *primals)
    if any(_has_dense_tangent(jax.typeof(x)) for x in out):
        return _jvp_to_dense(operation, primals, tangents, out)
    if any(v and _has_dense_tangent(t) for t, v in zip(types, varies, strict=True)):
        return _jvp_of_dense(operation, primals, tangents, out)
    return out, _rule_jvp(operation, primals, tangents, varies, out)


def _has_dense_tangent(t: Any) -> bool:
    return isinstance(t, HighType) and t.dense_tangent


def _rule_jvp(
    operation: Operation,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    varies: tuple[bool, ...],
    out: Sequence[Any],
) -> list[Any]:
    """Return the tangents of the results `out`, by differentiating the operation on the leaves.

    `varies` says which of the tangents are not `Zero`.
    """
    wanted = tuple(has_tangent(jax.typeof(x)) for x in out)
    varying = compress(tangents, varies)
    rest = iter(apply(Jvp(operation, varies, wanted), *primals, *varying) if any(wanted) else ())
    zero = lambda x: Zero(jax.typeof(x).to_tangent_aval())
    return [next(rest) if w else zero(x) for x, w in zip(out, wanted, strict=True)]


def _program_jvp(
    operation: Apply, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the results of a JAX primitive and their tangents, by JAX's derivative rule for it.

    The derivative rule takes the implicit operands, and one dense tangent for each.
    """
    operands = [as_high_array(value_of(p)) for p in primals]
    dense = [_dense_tangent(p, t) for p, t in zip(primals, tangents, strict=True)]
    params = operation.parameters.params
    out, out_tangents = call_jvp_rule(operation.primitive, operands, dense, params)
    pairs = [_match_result(as_high_array(x), t) for x, t in zip(out, out_tangents, strict=True)]
    return [x for x, _ in pairs], [t for _, t in pairs]


def _dense_tangent(primal: Any, tangent: Any) -> Any:
    """Return the tangent of the dense array of an operand `primal`.

    `tangent` is the tangent of the operand, which can have one array for each leaf.
    """
    t = jax.typeof(primal)
    if not isinstance(t, HighType) or t.dense_tangent:
        return tangent
    if type(tangent) is Zero:
        return Zero(t.dense().to_tangent_aval())
    return apply(Jvp(Materialise(t), (True,), (True,)), primal, tangent)[0]


def _match_result(x: Any, tangent: Any) -> tuple[Any, Any]:
    """Return a result `x` and its tangent, given the tangent of its dense array.

    If `x` is an implicit array whose tangent must have an array for each leaf, the dense tangent
    does not fit. Then return the dense array in place of `x`, unless the tangent is zero.
    """
    t = jax.typeof(x)
    if not isinstance(t, HighType) or t.dense_tangent:
        return x, tangent
    if type(tangent) is Zero:
        return x, Zero(t.to_tangent_aval())
    return apply(Materialise(t), x)[0], tangent


def _jvp_to_dense(
    operation: Operation, primals: Sequence[Any], tangents: Sequence[Any], out: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the results and tangents of an operation, if a result has one dense array as tangent.

    `out` are the results of the operation, computed without a derivative.
    """
    if isinstance(operation, Apply):
        return _program_jvp(operation, primals, tangents)
    packed = operation.type if isinstance(operation, Pack) else None
    if isinstance(packed, HighType) and packed.dense_tangent:
        varies = tuple(type(t) is not Zero for t in tangents)
        of_leaves = Materialise(packed, of_leaves=True)
        return list(out), _rule_jvp(of_leaves, primals, tangents, varies, out)
    return _jvp_of_dense(operation, primals, tangents, out)


def _jvp_of_dense(
    operation: Operation, primals: Sequence[Any], tangents: Sequence[Any], out: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the results and tangents of an operation, if an operand has a dense array as tangent.

    The operation is not an `Apply`. `out` are its results, computed without a derivative.
    """
    if isinstance(operation, Vmap):
        return jvp_of_vmap(operation, primals, tangents)
    if isinstance(operation, Materialise) and not operation.of_leaves:
        return list(out), list(tangents)
    if isinstance(operation, Unpack) and operation.type.dense_tangent:
        raise NotImplementedError(
            f"{operation.name}({', '.join(str(jax.typeof(p)) for p in primals)}) cannot be "
            "differentiated here. A shard_map or a pytree in a carry needs tangents of leaves, "
            "but the tangent of this type is a dense array. Call vn.materialise on the value first."
        )
    varies = tuple(type(t) is not Zero for t in tangents)
    return list(out), _rule_jvp(operation, primals, tangents, varies, out)


def jvp_of_vmap(
    operation: Vmap, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the results and tangents of a `Vmap`, by mapping the derivative of its `of`.

    `of` is the operation that the `Vmap` maps.
    """
    varies = [type(t) is not Zero for t in tangents]
    varying = list(compress(tangents, varies))
    varying_dims = list(compress(operation.dims, varies))
    zero = lambda x: Zero(jax.typeof(x).to_tangent_aval())
    is_zero: list[bool] = []

    def derive(primals: list[Any], varying: list[Any]) -> Any:
        rest = iter(varying)
        tangents = [next(rest) if v else zero(p) for p, v in zip(primals, varies, strict=True)]
        out, out_tangents = jvp(primals, tangents, operation=operation.of)
        is_zero[:] = [type(t) is Zero for t in out_tangents]
        return out, [t for t in out_tangents if type(t) is not Zero]

    operands = [as_high_array(value_of(p)) for p in primals]
    name = {} if operation.axis_name is None else {"axis_name": operation.axis_name}
    axes = list(operation.dims), varying_dims
    mapped = jax.vmap(derive, in_axes=axes, axis_size=operation.size, **name)
    out, nonzero_tangents = mapped(operands, varying)
    rest = iter(nonzero_tangents)
    return list(out), [zero(x) if z else next(rest) for x, z in zip(out, is_zero, strict=True)]


def transpose(cotangents: Sequence[Any], *operands: Any, operation: Operation) -> None:
    """Add the cotangents of the linear operands of an equation of `high` to their accumulators.

    `cotangents` has the cotangent of each result. In `operands`, an operand in which the operation
    is linear is replaced by its accumulator, a `GradAccum`. All other operands are values.
    """
    if operation.transpose(cotangents, operands):
        return
    linear = [isinstance(x, GradAccum) for x in operands]
    types = [x.aval if isinstance(x, GradAccum) else jax.typeof(x) for x in operands]
    if isinstance(operation, Apply) and any(map(_has_dense_tangent, types)):
        arrays = [as_high_array(value_of(x)) for x in operands]
        call_transpose_rule(operation.primitive, cotangents, arrays, operation.parameters.params)
        return
    others = [x for x in operands if not isinstance(x, GradAccum)]
    wanted = tuple(type(ct) is not Zero and has_tangent(jax.typeof(ct)) for ct in cotangents)
    nonzero_cotangents = list(compress(cotangents, wanted))
    if not nonzero_cotangents:
        return
    backward = _backward_operation(operation, linear, types, wanted)
    accumulators = [x for x in operands if isinstance(x, GradAccum)]
    for x, ct in zip(accumulators, apply(backward, *others, *nonzero_cotangents), strict=True):
        x.accum(ct)


def _backward_operation(
    operation: Operation, linear: list[bool], types: list[Any], wanted: tuple[bool, ...]
) -> Operation:
    """Return the operation that computes the cotangents of the linear operands.

    It takes the operands that are not linear, then the cotangents of the results for which `wanted`
    is true. `linear` says which operands of `operation` are linear, and `types` are their types.
    """
    if isinstance(operation, Jvp):
        # The operands are primals and tangents. If exactly the tangents are linear, the transpose
        # is the `Vjp` of the differentiated operation. It needs no transpose of the derivative.
        primal_count = len(operation.varies)
        if not any(linear[:primal_count]) and all(linear[primal_count:]):
            # `wanted` has an item only for each result for which `operation.wanted` is true.
            rest = iter(wanted)
            has_cotangent = tuple(next(rest) if w else False for w in operation.wanted)
            return Vjp(operation.of, operation.varies, has_cotangent)
    linear_types = tuple(t if lin else None for t, lin in zip(types, linear, strict=True))
    return Transpose(operation, linear_types, wanted)


# Batching.


def batch(
    size: int, axis_name: Any, values: Sequence[Any], dims: Sequence[Any], *, operation: Operation
) -> tuple[list[Any], list[Any]]:
    """Return the results of an equation of `high` under `jax.vmap`, and their batch axes.

    `dims` are the batch axes of the operands `values`, of size `size`. An axis is None if the
    operand or the result has no batch axis.
    """
    if all(d is None for d in dims):
        out = apply(operation, *values)
        return out, [None] * len(out)
    if (results := operation.batch(size, axis_name, values, dims)) is not None:
        return results
    out = apply(Vmap(operation, size, axis_name, tuple(dims)), *values)
    return out, [0] * len(out)


def _under_implicit(*operands: Any, operation: Operation) -> list[Any]:
    """Run an equation of `high` in a jaxpr that is evaluated under `vn.implicit`."""
    if any(map(is_typed, operands)):  # a tracer of a high type, which rules do not accept
        return apply(operation, *map(as_typed_operand, operands))
    return operation.rerun(*operands)


define_high_primitive(
    high, run=run, abstract_eval=abstract_eval, jvp=jvp, transpose=transpose, batch=batch
)
set_printed_form(high, lambda params: (params["operation"].name, params["operation"].printed or {}))
add_rule(_under_implicit, [high], structural=True)
