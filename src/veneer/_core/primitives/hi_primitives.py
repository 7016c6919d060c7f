"""Rules for the primitives that JAX defines as high ones, all bound as `call_hi_primitive`.

From JAX 0.12 on, custom_root is one, and so are some functions of `jax.numpy` (`searchsorted`,
`nonzero`, `ldexp`, `frexp`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax.derivatives import CustomRoot, RootLinearMap
from ..._jax.primitives import find_primitive
from ..._jax.tracing import current_trace
from ..rules import add_rule
from ..transform import redispatch
from ..value import is_value, make_dense

_primitive = find_primitive("call_hi_primitive")


def _call_hi_primitive(*values: Any, **params: Any) -> Any:
    (high,) = params.values()
    operands = jax.tree.unflatten(high.in_tree, values)
    if isinstance(high, CustomRoot):
        return jax.tree.leaves(_custom_root(high, *operands))
    if isinstance(high, RootLinearMap):
        return jax.tree.leaves(_root_linear_map(high, *operands))
    if current_trace().requires_low or not any(map(_is_inexact, high.out_avals_flat)):
        # No derivative of it will be taken: it may be replaced by the program that it stands for.
        return jax.tree.leaves(redispatch(high.expand, *operands), is_leaf=is_value)
    return NotImplemented


add_rule(_call_hi_primitive, [_primitive], structural=True)


def _custom_root(high: Any, solve_consts: Any, guess: Any, f_consts: Any, tangent: Any) -> Any:
    """With the rules inside of its functions, on what they close over. A root is dense.

    The operands are those of JAX's CustomRoot: constants of its solver, the guess, and constants of
    its function and of the tangent solver.
    """
    operands = (solve_consts, _dense(guess), f_consts, tangent)
    avals = jax.tree.map(jax.typeof, operands)
    f, solve, tangent_solve = map(_to_dense, (high.f, high.solve, high.tangent_solve))
    traced = jax.jit(solve).trace(*avals[:2])
    return CustomRoot(f, solve, tangent_solve, traced, avals, high.has_aux)(*operands)


def _root_linear_map(high: Any, consts: Any, x: Any, v: Any) -> Any:
    """The derivative of a custom_root's function at `x`, applied to `v`; or its transpose."""
    operands = (consts, _dense(x), _dense(v))
    avals = jax.tree.map(jax.typeof, operands)
    f = _to_dense(high.f)
    return RootLinearMap(f, avals, high.out_aval, high.effects, high.transposed)(*operands)


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _to_dense(function: Callable) -> Callable:
    return lambda *operands: _dense(redispatch(function, *operands))


def _dense(tree: Any) -> Any:
    return jax.tree.map(lambda x: make_dense(_primitive, [x])[0], tree, is_leaf=is_value)
