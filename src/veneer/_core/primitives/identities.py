"""Rules of primitives that return their operand unchanged, for all types.

Such a primitive is a hint to the compiler, a transformation or a checkpoint policy. The rules bind
the primitive with each leaf. A rule that is registered for a type takes precedence.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..._jax.primitives import Primitive, find_primitive
from ..rules import register
from ..value import MATERIALISE, Value, materialise_one


def _add_leafwise_rule(primitive: Primitive) -> None:
    @register(primitive, precedence=-1)
    def _(x: Value, **params: Any) -> Value:
        return jax.tree.map(lambda leaf: primitive.bind(leaf, **params), x)


for _name in ("copy", "stop_gradient", "xla_metadata_value"):
    _add_leafwise_rule(find_primitive(_name))


@register("name", precedence=-1)
def _name_leaves(x: Value, *, name: str) -> Any:
    if name == MATERIALISE:  # `vn.materialise` names an array so, to materialize it here
        return materialise_one(x)
    return jax.tree.map(lambda leaf: find_primitive("name").bind(leaf, name=name), x)


@register("layout_constraint", precedence=-1)
def _ignore_layout(x: Value, **params: Any) -> Value:
    del params  # the layout of the dense array does not apply to the leaves
    return x


@register("reduce_precision", precedence=-1)
def _reduce_precision(x: Value, *, exponent_bits: int, mantissa_bits: int) -> Any:
    # jax.checkpoint marks saved values by a reduction to their own precision, so mark each leaf in
    # this way. This rule does not apply to a reduction to a lower precision.
    own = jnp.finfo(x.aval().dtype)
    if exponent_bits < own.nexp or mantissa_bits < own.nmant:
        return NotImplemented

    def mark(leaf: Any) -> Any:
        dtype = jax.typeof(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return leaf
        return jax.lax.reduce_precision(leaf, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)

    return jax.tree.map(mark, x)


@register("dce_sink", precedence=-1)
def _dce_sink(x: Value, **params: Any) -> list[Any]:
    for leaf in jax.tree.leaves(x):  # keep each leaf alive during dead code elimination
        find_primitive("dce_sink").bind(leaf, **params)
    return []


@register("optimization_barrier", precedence=-1)
def _optimization_barrier(*operands: Any) -> list[Any]:
    return jax.lax.optimization_barrier(list(operands))
