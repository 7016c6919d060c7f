"""References (`jax.Ref`) that rules close over, as operands of what contains the program.

A rule may write to a `Box`. Where it does so in a loop, the body that is staged for the rule closes
over references, and JAX takes those for no constants of a loop, a branch or a jit.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..._jax.primitives import close_jaxpr, jaxpr_as_fun, open_jaxpr


def references(*jaxprs: Any) -> list[Any]:
    """The references among the constants of closed jaxprs, each once."""
    found = {id(x): x for jaxpr in jaxprs for x in jaxpr.consts if _is_reference(x)}
    return list(found.values())


def taking(jaxpr: Any, refs: Sequence[Any]) -> Any:
    """A closed jaxpr that takes these references first, of which some were its constants."""
    if not refs:
        return jaxpr
    opened, constants = open_jaxpr(jaxpr)
    numbers = {id(ref): i for i, ref in enumerate(refs)}

    def program(*args: Any) -> list[Any]:
        own = [args[numbers[id(x)]] if id(x) in numbers else x for x in constants]
        return jaxpr_as_fun(close_jaxpr(opened))(*own, *args[len(refs) :])

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in jaxpr.in_avals]
    return jax.make_jaxpr(program)(*refs, *avals)


def _is_reference(x: Any) -> bool:
    return isinstance(x, jax.Ref)
