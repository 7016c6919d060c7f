"""`explain`: what happens to the implicit arrays that a function is given."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import jax
import numpy as np

from .._core.event import Event
from .._core.policy import Policy, policy_in_force
from .._core.surface.implicit import implicit
from .._core.surface.operators import materialised_before
from .report import Report

P = ParamSpec("P")


def explain(fn: Callable[P, Any]) -> Callable[P, Report]:
    """Return a function that reports what each primitive of `fn` does with implicit operands.

    The returned function traces `fn` under `vn.implicit`, but does not run the computation.

    **Arguments:**

    - `fn`: a function of pytrees. It may already be wrapped by `vn.implicit` or `jax.jit`.

    **Returns:** a function of the arguments of `fn` that returns a `vn.Report`. The report has a
    `vn.Event` for each primitive with an implicit operand: the rule that runs, if any, and the
    number of bytes that are materialized on the default backend of JAX. Weights are named by their
    paths in the arguments. If an operator such as `w + 1` materialized a weight before the call,
    and `fn` takes or captures the result, the report has an event for the operator too.

    **Raises:** The returned function raises `TypeError` if `fn` is not callable, and any error that
    `fn` raises while it is traced.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> report = vn.explain(lambda x, w: jnp.sin(x @ w) + w)(jnp.ones(2), w)
    >>> [(e.primitive, e.rule is not None, e.nbytes) for e in report.events]
    [('dot_general', True, 16), ('add', False, 16)]
    >>> [e.weights for e in report.events], report.weight_nbytes
    ([('w',), ('w',)], 32)
    """

    @wraps(fn, updated=())
    def traced(*args: Any, **kwargs: Any) -> Report:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

        def of_arrays(arrays: list[Any]) -> Any:
            rest = iter(arrays)
            filled = [next(rest) if a else x for a, x in zip(is_array, leaves, strict=True)]
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return implicit(fn)(*args, **kwargs)

        events: list[Event] = []
        arrays = [x for a, x in zip(is_array, leaves, strict=True) if a]
        with policy_in_force(Policy(events=events)):
            program = jax.make_jaxpr(of_arrays)(arrays)
        return Report((*materialised_before([*arrays, *program.consts]), *events))

    return traced
