"""`vn.hijax.primitive`: functions that jaxprs show as one equation, with the user's own rules.

The modules. Each imports only modules above it:

    expansion       the user's functions as operations, and their mapped forms
    derivatives     derivatives and transposes, by the rules that a user sets
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.rules import Dense, operand_types
from ..._core.trace import ImplicitTrace
from ..._core.value import Value, is_value
from ..._jax.tracing import current_trace, set_current_trace
from ..high_rules import abstract_eval
from ..mode import is_enabled
from ..operations import Parameters, Vmap
from ..types import as_typed_operand, is_typed, strong_type_of
from ..values import HighArray, apply, expose, strong_leaf, value_of
from .derivatives import jvp_by_rule, transpose_by_rule
from .expansion import ONE_LEAF, Expansion, flatten_values, show_types


def primitive(expand: Callable) -> "HighPrimitive":
    """Turn a function into a JAX primitive, which jaxprs show as one equation.

    JAX runs the function when the equation is evaluated or lowered. By default, derivatives and
    batching are derived from the function. To define the derivative instead, call the method
    `defvjp`, `defjvp` or `deftranspose` of the result. To define batching, call `defvmap`.

    With high types on (`vn.hijax.enabled`), an implicit array is one operand or result of the
    equation. Otherwise, and under `vn.implicit`, each leaf is an operand with its own tangent.

    **Arguments:**

    - `expand`: a JAX function. It takes arrays, implicit arrays or trees of them by position, and
      static parameters by keyword. Annotations restrict the operand types, as in `vn.register`.

    **Returns:** a callable with the arguments of `expand`. Jaxprs show the name of `expand`.

    **Raises:** `TypeError` if `expand` is not a function. A call raises `TypeError` if an operand
    does not match its annotation, a parameter is not hashable, or the result of a derivative or
    batching rule has a wrong structure, shape or dtype.

    Quantize and dequantize with a straight-through gradient:

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> @vn.hijax.primitive
    ... def quantize(x: jax.Array, *, qtype):
    ...     return vn.quant.quantize(x, qtype)
    >>> @vn.hijax.primitive
    ... def dequantize(q: vn.quant.QArray):
    ...     return q.qvalue * q.scale
    >>> quantize.defvjp(lambda x, **params: (quantize(x, **params), None),
    ...                 lambda residuals, ct, **params: (ct,))
    >>> dequantize.defvjp(lambda q: (dequantize(q), None), lambda residuals, ct: (ct,))
    >>> loss = lambda x: jnp.sum(3 * dequantize(quantize(x, qtype="int8")))
    >>> with vn.hijax.enabled():
    ...     print(jax.make_jaxpr(loss)(jnp.ones((2, 3))))
    ...     jax.jit(jax.grad(loss))(jnp.ones((2, 3))).tolist()
    { lambda ; a:f32[2,3]. let
        b:q8[2,3] = quantize[qtype=int8] a
        c:f32[2,3] = dequantize b
        d:f32[2,3] = mul 3.0:f32[] c
        e:f32[] = reduce_sum[axes=(0, 1) out_sharding=None] d
      in (e,) }
    [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """
    return HighPrimitive(expand)


class HighPrimitive:
    """A function that jaxprs show as one equation, returned by `vn.hijax.primitive`."""

    def __init__(self, expand: Callable):
        if not inspect.isfunction(expand):
            raise TypeError(f"vn.hijax.primitive takes a function, not {expand!r}.")
        update_wrapper(self, expand)
        self.name = expand.__name__
        self.rules: dict[Any, Callable] = {"expand": expand}
        self._signature = inspect.signature(expand)
        self._operands, self._more = operand_types(expand)

    def __repr__(self) -> str:
        return f"<high primitive {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        self._check(bound.args, bound.kwargs)
        return self.bind(bound.args, Parameters(bound.kwargs))

    def bind(self, args: Any, params: Parameters) -> Any:
        """Run or trace the primitive for the operands `args`, and return its results.

        `params` are its static parameters.
        """
        trace = current_trace()
        if isinstance(trace, ImplicitTrace):
            with set_current_trace(trace.parent):
                out = self.bind(jax.tree.map(trace.unwrap, args), params)
                return jax.tree.map(trace.wrap, out, is_leaf=is_value)
        flat, structure = flatten_values(args, is_enabled())
        call = PrimitiveCall(self, structure, params, is_enabled())
        is_implicit = lambda x: isinstance(x, Value | HighArray)
        operands = [as_typed_operand(x) if is_implicit(x) else strong_leaf(x) for x in flat]
        out, _ = call.infer(tuple(map(strong_type_of, operands)))
        return out.unflatten(map(expose, apply(call, *operands)))

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Set the reverse-mode derivative, as `jax.custom_vjp` does.

        The cotangent of an implicit array is an instance of its class whose leaves are cotangents.
        If the class sets `dense_tangent = True`, the cotangent is a dense array.

        **Arguments:**

        - `fwd`: a function of the arguments of the primitive. It returns the results and the
          residuals, which may be any pytree.
        - `bwd`: a function of the residuals, the cotangents of the results, and the parameters by
          keyword. It returns a tuple with a cotangent, or None for zero, for each operand.
        """
        self._set("fwd", fwd)
        self.rules["bwd"] = bwd

    def defjvp(self, rule: Callable) -> Callable:
        """Set the forward-mode derivative, as `jax.custom_jvp` does.

        **Arguments:**

        - `rule`: a function of a tuple of operands, a tuple of their tangents, and the parameters
          by keyword. It returns the results and their tangents.
        """
        return self._set("jvp", rule)

    def deftranspose(self, argnum: int) -> Callable[[Callable], Callable]:
        """Declare that the primitive is linear in an operand, and set its transpose.

        The derivative with respect to this operand is then the primitive itself, applied to a dense
        tangent. Derivatives with respect to other operands are derived from the function.

        **Arguments:**

        - `argnum`: the position of the operand.

        **Returns:** a decorator for the rule, a function of the cotangents of the results, the
        operands (None for this one), and the parameters by keyword. It returns the cotangent of the
        operand.
        """
        return lambda rule: self._set(("transpose", argnum), rule)

    def defvmap(self, rule: Callable) -> Callable:
        """Set the batching rule for `jax.vmap`, as `jax.custom_batching.custom_vmap` does.

        **Arguments:**

        - `rule`: a function of the size of the mapped axis, a tuple of bools that say which
          operands are mapped, the operands, and the parameters by keyword. The mapped axis is the
          first axis of each leaf. It returns the results and whether they are mapped: a bool, or a
          pytree of bools.
        """
        return self._set("vmap", rule)

    def _set(self, kind: Any, rule: Callable) -> Callable:
        """Store a rule under the key `kind`, such as "jvp" or "vmap", and return the rule.

        Raise ValueError if there is a rule for the key, or if another method has already set a
        derivative.
        """
        names = {"fwd": "defvjp", "jvp": "defjvp", "vmap": "defvmap"}
        name = lambda k: names.get(k, "deftranspose")  # the method that sets a rule
        others = [k for k in self.rules if k not in ("expand", "bwd", "vmap")]
        if kind in self.rules or (kind != "vmap" and any(name(k) != name(kind) for k in others)):
            raise ValueError(
                f"{self.name} already has a rule, set by "
                f"{', '.join(sorted(set(map(name, others))) or ['defvmap'])}. Call only one of "
                "defvjp, defjvp and deftranspose, and each of them once."
            )
        self.rules[kind] = rule
        return rule

    def _check(self, args: Sequence[Any], params: dict[str, Any]) -> None:
        """Raise TypeError if a parameter is not hashable, or if an operand has the wrong class.

        `args` are the operands of a call, whose classes must match the annotations. `params` are
        the static parameters.
        """
        for name, x in params.items():
            try:
                hash(x)
            except TypeError:
                raise TypeError(
                    f"{self.name}: the parameter {name} has the type {type(x).__name__}, which "
                    "cannot be hashed. Pass arrays by position."
                ) from None
        for i, x in enumerate(args):
            allowed = self._operands[i] if i < len(self._operands) else self._more
            if allowed is None or any(issubclass(_class_of(x), cls) for cls in allowed):
                continue
            names = sorted("a dense array" if c is Dense else c.__name__ for c in allowed)
            is_tree = _class_of(x) is object
            raise TypeError(
                f"{self.name}: operand {i} must be {' or '.join(names)}, as annotated, not "
                f"{'a tree' if is_tree else show_types([strong_type_of(x)])}."
            )


def _class_of(x: Any) -> type:
    """Return the class of an implicit array, `Dense` for other arrays, or `object` for a pytree."""
    x = value_of(x)
    if isinstance(x, Value):
        return type(x)
    if is_typed(x):
        return x.aval.cls
    treedef: Any = jax.tree.structure(x)
    return Dense if treedef == ONE_LEAF else object


class PrimitiveCall(Expansion):
    """A call of a primitive that the user made with `vn.hijax.primitive`, as an `Operation`.

    Derivatives and batching use the rules that the user has set with `defvjp`, `defjvp`,
    `deftranspose` and `defvmap`. Without such a rule, they are derived from the function of the
    primitive.
    """

    def infer(self, types: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return Expansion.like(self).infer(types)  # uses the cache entry of the `Expansion`

    def rerun(self, *values: Any) -> list[Any]:
        # Operands that were dense when this was traced may be implicit arrays now.
        types = tuple(x.aval() if is_value(x) else strong_type_of(x) for x in values)
        out = self.primitive.bind(self.structure.unflatten(map(expose, values)), self.parameters)
        return self.infer(types)[0].flatten_up_to(out)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jvp_by_rule(self, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        return transpose_by_rule(self, cotangents, operands)

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        if "vmap" not in self.primitive.rules:
            return super().batch(size, name, values, dims)
        rule = BatchingRule.like(self, size, tuple(dims))
        is_mapped, _ = rule.infer(tuple(map(strong_type_of, values)))
        return apply(rule, *values), [0 if m else None for m in is_mapped]


@dataclass(frozen=True)
class BatchingRule(Expansion):
    """The rule that the user has set with `defvmap`, as an `Operation` on flat lists of operands.

    `size` is the size of the mapped axis. `dims` has the mapped axis of each operand, or None.
    """

    size: int
    dims: tuple[int | None, ...]

    suffix = ".vmap"

    def evaluate(self, *values: Any) -> tuple[list[Any], Any]:
        """Call the rule. Return the results, and a list of bools: whether each is mapped."""
        groups = zip(self.structure.group(values), self.structure.group(self.dims), strict=True)
        args, args_mapped = [], []
        for group, dims in groups:
            is_mapped = any(d is not None for d in dims)
            args_mapped.append(is_mapped)
            args += self._move_axis(group, dims) if is_mapped else group
        out, out_mapped = self.call_for_pair(
            "vmap",
            "the rule of defvmap must return a pair: results, and which of them are mapped",
            self.size,
            jax.tree.unflatten(self.structure.tree, args_mapped),
            *self.structure.unflatten(map(expose, args)),
        )
        flat, structure = self.flatten_results(out)
        if isinstance(out_mapped, bool):
            out_mapped = [out_mapped] * structure.tree.num_leaves
        else:
            out_mapped = self.flatten_up_to(structure.tree, out_mapped)
        pairs = zip(out_mapped, structure.group(flat), strict=True)
        results_mapped = [bool(m) for m, group in pairs for _ in group]
        self._check(values, flat, results_mapped)
        return flat, results_mapped

    def _move_axis(self, operands: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
        """Return the operands with the mapped axis as the first axis of each leaf.

        `dims` has the mapped axis of each operand. If it is None, the operand is repeated along a
        new first axis.
        """

        def move(leaf: Any, d: int | None) -> Any:
            if d is None:
                return jnp.broadcast_to(leaf, (self.size, *jnp.shape(leaf)))
            return jnp.moveaxis(leaf, d, 0)

        pairs = zip(map(value_of, operands), dims, strict=True)
        return [jax.tree.map(lambda leaf, d=d: move(leaf, d), x) for x, d in pairs]

    def _check(self, values: Sequence[Any], flat: Sequence[Any], is_mapped: Sequence[bool]) -> None:
        """Raise TypeError if the results `flat` of the `defvmap` rule have wrong shapes or dtypes.

        They must be the same as if `jax.vmap` mapped the function of the primitive over `values`. A
        result for which `is_mapped` is False has no mapped axis.
        """
        types = map(strong_type_of, values)
        default = Vmap(Expansion.like(self), self.size, None, self.dims)
        expected, _ = abstract_eval(*types, operation=default)
        returned = [strong_type_of(x) for x in flat]
        pairs = zip(expected, is_mapped, strict=True)
        shapes = [(t.shape if m else t.shape[1:], t.dtype) for t, m in pairs]
        if [(t.shape, t.dtype) for t in returned] != shapes:
            raise self.error(
                f"the rule of defvmap returns ({show_types(returned)}) (mapped: "
                f"{list(is_mapped)}), but the function itself, mapped over {self.size}, returns "
                f"({show_types(expected)})"
            )
