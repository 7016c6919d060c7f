"""`implicit`, the transformation that users call, with filters, policies and captured arrays."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.tree_util import treedef_is_leaf

from ..policy import (
    ALLOW,
    OnMaterialise,
    Policy,
    current_policy,
    nested_policy,
    policy_of,
    set_variable,
)
from ..sources import leaf_sources, tag_sources, with_source
from ..transform import Program, run
from ..value import Value, has_all_leaves, is_opaque_leaf, source_of
from .captures import Closure, close, may_capture, open_closure, reject_assignments

P = ParamSpec("P")
R = TypeVar("R")
FilterSpec = Any  # bool | Callable[[Value], bool] | a pytree of them


def _missing() -> None:
    """The default of `fn`. With this default, `implicit` returns a decorator."""


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
    fn: Callable = _missing,
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
    if fn is _missing:
        return partial(implicit, filter_spec=filter_spec, on_materialise=on_materialise)
    if filter_spec is not True or not callable(fn):
        _check_arguments(fn, filter_spec)
    if not treedef_is_leaf(jax.tree.structure(fn)):
        return Implicit(fn, filter_spec, policy)

    has_captures = may_capture(fn)

    @wraps(fn, updated=())
    def implicit_fn(*args: Any, **kwargs: Any) -> Any:
        return _run(open_closure(fn) if has_captures else fn, filter_spec, policy, args, kwargs)

    return implicit_fn


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class Implicit:
    """The result of `implicit` for a callable pytree, such as a module."""

    fn: Any
    filter_spec: FilterSpec = field(metadata={"static": True})
    policy: Policy = field(metadata={"static": True})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.fn, self.filter_spec, self.policy, args, kwargs)

    def __repr__(self) -> str:
        return f"implicit({self.fn!r})"


def _run(fn: Any, filter_spec: FilterSpec, policy: Policy, args: Any, kwargs: Any) -> Any:
    """Call `fn` with the rules of the implicit arrays that `filter_spec` selects."""
    program = fn, args, kwargs
    select = None if filter_spec is True else partial(_select_leaves, filter_spec)
    with nested_policy(policy):
        if current_policy() is ALLOW or filter_spec is False:  # no report needs names of weights
            out = run(_call_closure, program, select)
        else:
            out = _run_with_paths(program, select)
    reject_assignments(fn)
    return out


def _call_closure(program: Program) -> Any:
    """Call the function of a program, which may be a `Closure`."""
    fn, args, kwargs = program
    return close(fn)(*args, **kwargs)


def _select_leaves(filter_spec: FilterSpec, program: Program) -> list[bool]:
    """Return, for each leaf of a program, whether `filter_spec` selects the leaf."""

    def select(spec: Any, subtree: Any) -> Any:
        choose = spec if callable(spec) else lambda _: bool(spec)
        is_selected = lambda x: isinstance(x, Value) and has_all_leaves(x) and bool(choose(x))
        return jax.tree.map(is_selected, subtree, is_leaf=is_opaque_leaf)

    is_spec = lambda x: isinstance(x, bool) or callable(x)
    try:
        return jax.tree.leaves(jax.tree.map(select, filter_spec, program, is_leaf=is_spec))
    except ValueError as error:
        raise ValueError(
            "filter_spec must be a bool, a predicate, or a pytree of them that is a prefix of "
            f"(fn, args, kwargs): {error}"
        ) from None


_has_paths: ContextVar[bool] = ContextVar("has_paths", default=False)


def _run_with_paths(program: Program, select: Any) -> Any:
    """Run a program, and let reports name each implicit array by its path, such as `layer.kernel`.

    In a nested call of `implicit`, keep the names that the outer call has set.
    """
    if _has_paths.get():
        return run(_call_closure, tag_sources(program), select)
    fn, args, _ = program
    names = _argument_names(fn.function if isinstance(fn, Closure) else fn, len(args))

    def name_weight(path: Any, x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        copy = jax.tree.map(lambda leaf: leaf, x)  # do not change the caller's object
        return with_source(copy, (_path_string(*path, names=names),))

    named = jax.tree.map_with_path(name_weight, program, is_leaf=is_opaque_leaf)
    leaves = jax.tree.leaves(named, is_leaf=is_opaque_leaf)
    pairs = [(x, source_of(x)) for x in leaves]
    with set_variable(_has_paths, True), leaf_sources(pairs):
        return run(_call_closure, named, select)


def _path_string(element: Any, *keys: Any, names: Sequence[str]) -> str:
    """Return the path of a leaf of `(fn, args, kwargs)`, such as `params.layer.kernel`.

    `element` is the key of `fn`, `args` or `kwargs`, and `keys` are the keys below. `names` are the
    names of the positional arguments.
    """
    name = ""  # the name of the argument; empty for a leaf in `fn`
    if element.idx == 1:  # args
        name, keys = names[keys[0].idx], keys[1:]
    elif element.idx == 2:  # kwargs
        name, keys = keys[0].key, keys[1:]
    path = jax.tree_util.keystr(keys, simple=True, separator=".")
    return ".".join(filter(None, (name, path)))


def _argument_names(fn: Any, count: int) -> list[str]:
    """Return the names of `count` positional arguments of a function: `x`, `args.0`, ..."""
    names: list[str] = []
    with suppress(TypeError, ValueError):  # a function without a signature
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"{name}.{i}" for i in range(count - len(names))]
    return names + [f"args.{i}" for i in range(len(names), count)]


def _check_arguments(fn: Any, filter_spec: FilterSpec) -> None:
    """Raise `TypeError` if `fn` is not callable or `filter_spec` holds arrays other than bools."""
    if not callable(fn):
        shown = type(fn).__name__
        leaves = jax.tree.leaves(fn, is_leaf=is_opaque_leaf)
        is_container = bool(leaves) and leaves[0] is not fn
        if is_container:
            kinds = {"Array" if isinstance(x, jax.Array) else type(x).__name__ for x in leaves}
            shown += f" (leaves: {', '.join(sorted(kinds))})"
        raise TypeError(
            f"vn.implicit takes a function, not an object of type {shown}. Call "
            "vn.implicit(model)(params, x), where model is the function. To get dense arrays, call "
            "vn.materialise(params)."
        )
    if isinstance(filter_spec, bool) or callable(filter_spec):
        return
    if any(hasattr(x, "dtype") and x.dtype != "bool" for x in jax.tree.leaves(filter_spec)):
        raise TypeError(
            "filter_spec holds arrays, but it must be a bool, a predicate, or a pytree of them. "
            "Pass arguments of the function to the result: vn.implicit(f)(params, x)."
        )
