"""`implicit`: runs a JAX function with the rules in force."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.tree_util import tree_flatten, tree_unflatten, treedef_is_leaf

from .._jax.tracing import ConcreteArray, current_trace, is_eager
from .policy import (
    ALLOW,
    OnMaterialise,
    Policy,
    current_policy,
    overridden_by,
    policy_of,
)
from .surface.captures import close, may_capture, open_closure, refuse_assignments
from .surface.mistakes import check_arguments
from .surface.nesting import enter, leave
from .surface.weights import name_weights
from .trace import ImplicitTrace, ImplicitTracer
from .value import Kept, Value, is_kept, is_whole

P = ParamSpec("P")
R = TypeVar("R")
FilterSpec = Any  # bool | Callable[[Value], bool] | a pytree of them


def _left_out() -> None:
    """The default of `fn`, for `implicit` as a decorator with arguments."""


@overload
def implicit(
    fn: Callable[P, R],
    filter_spec: FilterSpec = True,
    *,
    on_materialise: OnMaterialise = "allow",
) -> Callable[P, R]: ...


@overload
def implicit(
    *, filter_spec: FilterSpec = True, on_materialise: OnMaterialise = "allow"
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def implicit(
    fn: Callable = _left_out,
    filter_spec: FilterSpec = True,
    *,
    on_materialise: OnMaterialise = "allow",
) -> Callable:
    """Transform a function so that it takes implicit arrays and runs the rules of their types.

    This is a JAX transformation like `jax.vmap`, and composes with the others.
    `jax.grad(implicit(f))` differentiates with respect to the leaves of an implicit array, such
    as LoRA's `a` and `b`. `implicit(jax.grad(f))` differentiates with respect to the dense array
    and returns dense gradients. A primitive that no rule fits runs on materialized operands.

    **Arguments:**

    - `fn`: a function of pytrees, or a callable pytree such as a module. Implicit arrays that it
      captures are treated like arguments. Without `fn`, `implicit` returns a decorator.
    - `filter_spec`: which implicit arrays use their rules: a bool, a function from an implicit
      array to a bool, or a pytree of these that is a prefix of `(fn, args, kwargs)`. `fn` gets the
      other implicit arrays unchanged, and can pass them to a nested call of `implicit`.
    - `on_materialise`: what happens if an operand is materialized. A nested call of `implicit`
      with `"allow"`, the default, uses the setting of the outer call.

      | value | effect |
      |---|---|
      | `"allow"` | nothing |
      | `"warn"` | a `vn.MaterialiseWarning` is emitted |
      | `"error"` | a `vn.MaterialiseError` is raised |
      | `"warn_weights"`, `"error_weights"` | the same, only for weights (see `vn.Event`) |
      | a callable | it is called with the `vn.Event` |

    **Returns:** a function of the same arguments, which may return implicit arrays. If `fn` is a
    pytree, the result is a callable pytree with the same leaves.

    **Raises:** `TypeError` if `fn` is not callable or `filter_spec` holds arrays. `ValueError` if
    `on_materialise` is not in the table, or if `filter_spec` does not match `(fn, args, kwargs)`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> vn.implicit(lambda x, w: x @ w)(jnp.ones((1, 2)), w).tolist()
    [[1.0, 1.0]]
    >>> vn.implicit(jnp.sin, on_materialise="error")(w)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    veneer.MaterialiseError: sin(QArray:f32[2,2]) at ...
    """
    policy = policy_of(on_materialise)
    if fn is _left_out:
        return partial(implicit, filter_spec=filter_spec, on_materialise=on_materialise)
    if filter_spec is not True or not callable(fn):
        check_arguments(fn, filter_spec, is_kept)
    if not treedef_is_leaf(jax.tree.structure(fn)):
        return Implicit(fn, filter_spec, policy)

    captures = may_capture(fn)

    @wraps(fn, updated=())
    def implicit_fn(*args: Any, **kwargs: Any) -> Any:
        opened = open_closure(fn) if captures else fn
        if policy is ALLOW and current_policy() is ALLOW:
            return _run(opened, filter_spec, args, kwargs)
        return _run_under(policy, opened, filter_spec, args, kwargs)

    return implicit_fn


def redispatch(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call `implicit(function)` for a function of ours, which captures no implicit array."""
    return _run(function, True, args, kwargs)


def run_around(function: Callable, /, *args: Any) -> Any:
    """Call `redispatch`, with the implicit arrays of an outer call left as dense operands."""
    return _run(function, True, args, {}, joins_outer=False)


@jax.tree_util.register_pytree_node_class
class Implicit:
    """`implicit` of a function that is a pytree, such as a module: one with the same leaves."""

    def __init__(self, fn: Any, filter_spec: FilterSpec, policy: Policy):
        self.fn, self.filter_spec, self.policy = fn, filter_spec, policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run_under(self.policy, self.fn, self.filter_spec, args, kwargs)

    def __repr__(self) -> str:
        return f"implicit({self.fn!r})"

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.fn,), (self.filter_spec, self.policy)

    @classmethod
    def tree_unflatten(cls, settings: Any, children: tuple[Any]) -> "Implicit":
        return cls(*children, *settings)


def _run_under(policy: Policy, fn: Any, filter_spec: FilterSpec, args: Any, kwargs: Any) -> Any:
    run = lambda fn, args, kwargs: _run(fn, filter_spec, args, kwargs)
    with overridden_by(policy):
        named = current_policy() is not ALLOW and filter_spec is not False
        return name_weights(fn, args, kwargs, run) if named else run(fn, args, kwargs)


def _run(fn: Any, filter_spec: FilterSpec, args: Any, kwargs: Any, joins_outer: bool = True) -> Any:
    program = fn, args, kwargs
    leaves, treedef = tree_flatten(program, is_kept)
    if filter_spec is True:
        chosen = [isinstance(x, Value) and is_whole(x) for x in leaves]
    else:
        chosen = jax.tree.leaves(_broadcast(filter_spec, program))
    if True not in chosen and (filter_spec is not True or _computes_at_once(leaves)):
        return close(fn)(*args, **kwargs)
    trace = ImplicitTrace(current_trace(), object(), filter_spec is True)
    trace.outer = trace.outer if joins_outer else None
    wrapped = [ImplicitTracer(trace, x) if c else x for c, x in zip(chosen, leaves, strict=True)]
    state = enter(trace, trace)
    try:
        # Within the trace, of which modules of flax.nnx take note as they are made.
        inner_fn, args, kwargs = tree_unflatten(treedef, wrapped)
        out = close(inner_fn)(*args, **kwargs)
    finally:
        leave(state)
    refuse_assignments(fn)
    if type(out) is not ConcreteArray:  # as most results are
        out = jax.tree.map(trace.unwrap, out, is_leaf=lambda x: isinstance(x, Kept))
    trace.invalidate()
    return out


def _computes_at_once(leaves: Sequence[Any]) -> bool:
    """Return whether a call is eager and all arguments are dense. A trace would be slower."""
    return is_eager() and not any(isinstance(x, Value) for x in leaves)


def _broadcast(spec: FilterSpec, tree: Any) -> Any:
    def mark(spec: Any, subtree: Any) -> Any:
        choose = spec if callable(spec) else lambda _: bool(spec)
        decide = lambda x: isinstance(x, Value) and is_whole(x) and bool(choose(x))
        return jax.tree.map(decide, subtree, is_leaf=is_kept)

    is_spec = lambda x: isinstance(x, bool) or callable(x)
    try:
        return jax.tree.map(mark, spec, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            "filter_spec must be a bool, a predicate, or a pytree of them that is a prefix of "
            f"(fn, args, kwargs): {error}"
        ) from None
