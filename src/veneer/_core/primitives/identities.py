"""Rules for primitives that give back what they are given: leaf by leaf, for every type.

They tell something to the compiler, to a transformation or to a checkpoint policy, and compute
nothing; so they act on leaves of any dtype and shape. A rule that names a type wins over these.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..._jax.primitives import find_primitive
from ..rules import add_rule
from ..value import MATERIALISE, Value, materialise_one


def _leaf_by_leaf(name: str) -> None:
    primitive = find_primitive(name)

    def rule(x: Value, **params: Any) -> Value:
        return jax.tree.map(lambda leaf: primitive.bind(leaf, **params), x)

    add_rule(rule, [primitive])


for _primitive in ("copy", "stop_gradient", "xla_metadata_value"):
    _leaf_by_leaf(_primitive)


def _name(x: Value, *, name: str) -> Any:
    if name == MATERIALISE:  # vn.materialise of a traced value: asked for, so not reported
        return materialise_one(x)
    primitive = find_primitive("name")
    return jax.tree.map(lambda leaf: primitive.bind(leaf, name=name), x)


def _layout_constraint(x: Value, **params: Any) -> Value:
    del params  # how the dense array is to lie in memory says nothing of its leaves
    return x


def _reduce_precision(x: Value, *, exponent_bits: int, mantissa_bits: int) -> Any:
    # To the precision that x has anyway: so does jax.checkpoint mark what a policy saves.
    own = jnp.finfo(x.aval().dtype)
    if exponent_bits < own.nexp or mantissa_bits < own.nmant:
        return NotImplemented
    return jax.tree.map(_in_own_precision, x)


def _in_own_precision(leaf: Any) -> Any:
    dtype = jax.typeof(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return leaf
    return jax.lax.reduce_precision(leaf, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def _dce_sink(x: Value, **params: Any) -> list[Any]:
    for leaf in jax.tree.leaves(x):  # none of which is then dead code
        find_primitive("dce_sink").bind(leaf, **params)
    return []


def _optimization_barrier(*operands: Any) -> list[Any]:
    return jax.lax.optimization_barrier(list(operands))


add_rule(_name, [find_primitive("name")])
add_rule(_layout_constraint, [find_primitive("layout_constraint")])
add_rule(_reduce_precision, [find_primitive("reduce_precision")])
add_rule(_dce_sink, [find_primitive("dce_sink")])
add_rule(_optimization_barrier, [find_primitive("optimization_barrier")])
