"""`Zero`, as in `quax.examples.zero`: zeros that are known when a program is traced."""

# Equinox lets `__init__` assign the fields of a frozen module.
# mypy: disable-error-code="misc"

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ...._core.trace import redispatch
from ...._core.value import Value
from ...._jax.primitives import Primitive, find_primitive
from ....types.elementwise import LINEAR, NONLINEAR
from ..core import ArrayValue, register, with_operands

__all__ = ["Zero"]


class Zero(ArrayValue):
    """An array of zeros that stores nothing. `x + zero` is `x`, and `x * zero` is a `Zero`.

    The value is known while JAX traces, so operations with a `Zero` are omitted. The value of a
    `veneer.types.Constant` is known only when the program runs. The product of a `Zero` with inf or
    NaN is zero too.

    **Arguments:**

    - `shape`: the shape, a tuple of sizes.
    - `dtype`: the dtype.

    >>> import jax.numpy as jnp, veneer.interop.quax as quax
    >>> zero = quax.zero.Zero((3,), jnp.float32)
    >>> quax.quaxify(jnp.add)(zero, jnp.arange(3.0)).tolist()
    [0.0, 1.0, 2.0]
    >>> type(quax.quaxify(jnp.dot)(zero, jnp.arange(3.0))).__name__
    'Zero'
    """

    _shape: tuple[int, ...] = eqx.field(static=True)
    _dtype: Any = eqx.field(static=True)

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self._shape = shape
        self._dtype = jnp.dtype(dtype)

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        return jax.core.ShapedArray(self._shape, self._dtype)

    def materialise(self) -> Any:
        """Return the dense array of zeros."""
        return jnp.zeros(self._shape, self._dtype)


_Other = ArrayLike | ArrayValue


def _result_struct(primitive: Primitive, operands: Any, params: dict[str, Any]) -> Any:
    """Return the shape and dtype of the result of a primitive, as a `ShapeDtypeStruct`.

    JAX raises an error if the operands or the parameters do not fit.
    """
    abstract = lambda x: x.aval() if isinstance(x, Value) else jax.typeof(x)
    avals = [abstract(x) for x in operands]
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return jax.eval_shape(partial(primitive.bind, **params), *structs)


def _register_zero_result(name: str, *kinds: Any) -> None:
    """Register a rule of the primitive `name`, for operands of the types `kinds`.

    The result is always a `Zero`.
    """
    primitive = find_primitive(name)

    def rule(*operands: Any, **params: Any) -> Zero:
        out = _result_struct(primitive, operands, params)
        return Zero(out.shape, out.dtype)

    register(primitive, precedence=1)(with_operands(rule, kinds))  # before a tie with any type


for _name in (*LINEAR, *NONLINEAR, "convert_element_type"):
    _register_zero_result(_name, Zero)
for _name in ("broadcast_in_dim", "reduce_sum", "reshape", "slice", "squeeze", "transpose"):
    _register_zero_result(_name, Zero)
for _name in ("mul", "dot_general"):
    for _kinds in ((Zero, _Other), (_Other, Zero), (Zero, Zero)):
        _register_zero_result(_name, *_kinds)
for _name in ("add", "sub"):
    _register_zero_result(_name, Zero, Zero)


def _match_result(primitive: Primitive, x: Any, operands: Any, params: dict[str, Any]) -> Any:
    """Broadcast and cast `x` to the shape and dtype of the result of a primitive.

    `x` is the operand that is not a `Zero`. `operands` and `params` are all operands and the
    parameters of the primitive.
    """
    out = _result_struct(primitive, operands, params)
    return redispatch(lambda x: jnp.broadcast_to(x, out.shape).astype(out.dtype), x)


@register(lax.add_p, precedence=1)
def _(x: _Other, y: Zero, **params: Any) -> Any:
    return _match_result(lax.add_p, x, (x, y), params)


@register(lax.add_p, precedence=1)
def _(x: Zero, y: _Other, **params: Any) -> Any:
    return _match_result(lax.add_p, y, (x, y), params)


@register(lax.sub_p, precedence=1)
def _(x: _Other, y: Zero, **params: Any) -> Any:
    return _match_result(lax.sub_p, x, (x, y), params)


@register(lax.dynamic_slice_p)
def _(x: Zero, *starts: _Other, slice_sizes: Any) -> Zero:
    del starts
    return Zero(tuple(slice_sizes), x.dtype)


@register(lax.dynamic_update_slice_p)
def _(x: Zero, update: Zero, *starts: _Other) -> Zero:
    del update, starts
    return x


@register(lax.integer_pow_p)
def _(x: Zero, *, y: int) -> Any:
    return x if y > 0 else NotImplemented  # 0 ** 0 is 1, and 0 ** -1 infinite
