"""High primitives of one's own: functions that jaxprs show as one equation, on typed operands."""

import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import jax

from ..._core.annotations import Alternatives, Dense, operand_types
from ..._core.trace import ImplicitTrace
from ..._core.value import Value, is_value
from ..._jax.tracing import current_trace, set_current_trace
from ..high import apply
from ..mode import is_enabled
from ..operations import Parameters
from ..types import HighType, canonical
from ..values import HighArray, exposed, strong_leaf, value_of
from .derivatives import jvp_by_rule, transpose_by_rule
from .expansion import ONE_LEAF, Expansion, flattened, listed, type_of_one
from .vmap_rule import batch_by_rule


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
        return self.called(bound.args, Parameters(bound.kwargs))

    def called(self, args: Any, params: Parameters) -> Any:
        """Return the results for operands in the current trace."""
        trace = current_trace()
        if isinstance(trace, ImplicitTrace):
            with set_current_trace(trace.parent):
                out = self.called(jax.tree.map(trace.unwrap, args), params)
                return jax.tree.map(trace.wrap, out, is_leaf=is_value)
        flat, structure = flattened(args, is_enabled())
        call = PrimitiveCall(self, structure, params, is_enabled())
        is_implicit = lambda x: isinstance(x, Value | HighArray)
        operands = [canonical(x) if is_implicit(x) else strong_leaf(x) for x in flat]
        out, _ = call.known(tuple(map(type_of_one, operands)))
        return out.unflatten(map(exposed, apply(call, *operands)))

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Set the reverse-mode derivative, as `jax.custom_vjp` does.

        The cotangent of an implicit array is an instance of its class whose leaves are cotangents.
        If the class sets `dense_tangent = True`, the cotangent is a dense array.

        **Arguments:**

        - `fwd`: a function of the same arguments that returns the results and the residuals, which
          may be any pytree.
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
        names = {"fwd": "defvjp", "jvp": "defjvp", "vmap": "defvmap"}
        name = lambda k: names.get(k, "deftranspose")
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
        for name, x in params.items():
            try:
                hash(x)
            except TypeError:
                raise TypeError(
                    f"{self.name}: the parameter {name} has the type {type(x).__name__}, which "
                    "cannot be hashed. Pass arrays by position."
                ) from None
        for i, x in enumerate(args):
            wanted = self._operands[i] if i < len(self._operands) else self._more
            if wanted is not None and not any(issubclass(_class_of(x), w) for w in wanted):
                raise TypeError(
                    f"{self.name}: operand {i} must be {_named(wanted)}, as annotated, not "
                    f"{_described(x)}."
                )


class PrimitiveCall(Expansion):
    """A call of a primitive: its expansion, differentiated and mapped by the rules there are."""

    def known(self, types: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return Expansion.of(self).known(types)

    def rerun(self, *values: Any) -> list[Any]:
        """The same with values for operands that were dense where this was traced."""
        types = tuple(x.aval() if is_value(x) else type_of_one(x) for x in values)
        out = self.primitive.called(self.structure.unflatten(map(exposed, values)), self.parameters)
        return self.known(types)[0].flatten_up_to(out)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jvp_by_rule(self, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        return transpose_by_rule(self, cotangents, operands)

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        if "vmap" in self.primitive.rules:
            return batch_by_rule(self, size, values, dims)
        return super().batch(size, name, values, dims)


def _class_of(x: Any) -> type:
    x = value_of(x)
    aval = getattr(x, "aval", None)
    if isinstance(x, Value):
        return type(x)
    if isinstance(aval, HighType):
        return aval.cls
    treedef: Any = jax.tree.structure(x)
    return Dense if treedef == ONE_LEAF else object


def _named(wanted: Alternatives) -> str:
    return " or ".join(sorted("a dense array" if c is Dense else c.__name__ for c in wanted))


def _described(x: Any) -> str:
    return "a tree" if _class_of(x) is object else listed([type_of_one(x)])[1:-1]
