"""Rules of primitives that call a program once: jit, `jax.checkpoint`, closed calls.

The program is staged: traced again as a program on the leaves of implicit operands, with the rules
in force. The primitive is then bound with the leaves and the staged program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
from jax.tree_util import treedef_is_leaf

from ..._jax.primitives import contained_jaxpr, find_primitive, is_inlined, open_jaxpr
from ..._jax.sharding import UNSPECIFIED
from ..dispatch import apply_rules
from ..event import MaterialiseError
from ..jitted_functions import JittedFunction, functions_named
from ..policy import current_policy, must_replay_events
from ..rules import add_rule, clear_with_rules, structural
from ..value import Value
from .leaves import has_batch_axes
from .scopes import IN_DERIVATIVE_RULE, enter_program
from .staging import lift_references, stage

# The compiled functions of `_jit_eagerly`, by jaxpr. JAX keeps the jaxpr of a user's function as
# long as the function.
_compiled_functions: WeakKeyDictionary[Any, Callable] = WeakKeyDictionary()
clear_with_rules(_compiled_functions.clear)


def _jit_eagerly(values: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a jitted program on concrete implicit values as one compiled function.

    The function is compiled once per jaxpr. Return NotImplemented in the cases that need `_jit`:
    events must be reported, a derivative rule is running, the call has options such as shardings,
    or the policy is to raise an error for a materialization.
    """
    reports_events = must_replay_events(current_policy())  # a compiled function reports nothing
    if reports_events or IN_DERIVATIVE_RULE.value or not has_default_options(params):
        return NotImplemented
    jaxpr = params["jaxpr"]
    function = _compiled_functions.get(jaxpr)
    if function is None:
        function = _compiled_functions.setdefault(jaxpr, _compile(ref(jaxpr), params["name"]))
    try:
        with enter_program(_name_of(params)):
            return function(*values)
    except MaterialiseError:  # `_jit` raises it again, with the paths of the weights
        return NotImplemented


def _name_of(params: dict[str, Any]) -> str | None:
    """Return the name of a jitted function. None for a lambda, or if JAX may inline the `jit`."""
    name = params["name"]
    return None if name == "<lambda>" or is_inlined(params) else name


def _compile(jaxpr: ref, name: str) -> Callable[..., list[Any]]:
    """Return a compiled function of values that runs the jaxpr that `jaxpr` refers to.

    `jaxpr` is a weak reference, because a value of `_compiled_functions` must not keep its key.
    """

    def function(*values: Any) -> list[Any]:
        out = _apply_rules_of_function(name, jaxpr(), values)
        return stage("jit", jaxpr(), values)(*values) if out is NotImplemented else out

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


class _NoRuleError(Exception):
    """The error for a jitted function that has no rule for its operands."""


def _apply_rules_of_function(name: str, jaxpr: Any, values: Sequence[Any]) -> Any:
    """Run the rule of the function, such as `jnp.linalg.det`, that a jaxpr was traced from.

    Return NotImplemented if the function has no rule for these values.
    """

    def apply(function: JittedFunction, *values: Any) -> Any:
        out = apply_rules(function, values, {})
        if out is NotImplemented:
            raise _NoRuleError  # because jax.vmap cannot return NotImplemented
        return out

    for function, vmap_count in _find_functions(name, jaxpr):
        if not all(has_batch_axes(v, vmap_count) for v in values if isinstance(v, Value)):
            continue
        run: Callable = functools.partial(apply, function)
        for _ in range(vmap_count):
            run = jax.vmap(run)
        try:
            return run(*values)
        except _NoRuleError:
            pass
    return NotImplemented


_functions_of_jaxprs: WeakKeyDictionary[Any, list[tuple[JittedFunction, int]]] = WeakKeyDictionary()
clear_with_rules(_functions_of_jaxprs.clear)


def _find_functions(name: str, jaxpr: Any) -> Sequence[tuple[JittedFunction, int]]:
    """Return the functions with rules that a jaxpr may have been traced from.

    There can be several: if `f` has the default `k=1`, `f` and `partial(f, k=1)` have equal jaxprs.

    **Returns:** pairs of a function and the number of calls of `jax.vmap` around it, from 0 to 2.
    """
    functions = functions_named(name)
    if not functions:
        return ()
    if jaxpr not in _functions_of_jaxprs:
        pairs = [(function, vmap_count) for vmap_count in range(3) for function in functions]
        _functions_of_jaxprs[jaxpr] = [pair for pair in pairs if _is_jaxpr_of(jaxpr, *pair)]
    return _functions_of_jaxprs[jaxpr]


def _is_jaxpr_of(jaxpr: Any, function: JittedFunction, vmap_count: int) -> bool:
    """Return whether `vmap_count` calls of `jax.vmap` of a function have this jaxpr."""
    try:
        program = function.jaxpr(jaxpr.in_avals, vmap_count)
    except Exception:  # the function may raise anything for operands that it does not take
        return False
    if program is jaxpr:
        return True
    # JAX may have traced the function twice: then compare the texts, which omit constants.
    return not (program.consts or jaxpr.consts) and str(program) == str(jaxpr)


def _jit(*values: Any, jaxpr: Any, **params: Any) -> Any:
    out = _apply_rules_of_function(params["name"], jaxpr, values)
    if out is not NotImplemented:
        return out
    staged = stage("jit", jaxpr, values, name=_name_of(params))
    refs, (program,) = lift_references(staged.jaxpr)  # `refs` become the first operands
    in_trees: list[Any] = [jax.tree.structure(v) for v in values]
    # A sharding or a layout of the dense array does not apply to the leaves of an implicit array.
    for name, trees, default, ref_count in (
        ("in_shardings", in_trees, UNSPECIFIED, len(refs)),
        ("out_shardings", staged.out_trees, UNSPECIFIED, 0),
        ("in_layouts", in_trees, None, len(refs)),
        ("out_layouts", staged.out_trees, None, 0),
    ):
        pairs = zip(params[name], trees, strict=True)
        options = [option if treedef_is_leaf(tree) else default for option, tree in pairs]
        params[name] = (*[default] * ref_count, *_repeat_per_leaf(options, trees))
    donated = _repeat_per_leaf(params["donated_invars"], in_trees)
    params["donated_invars"] = (*[False] * len(refs), *donated)
    operands = [*refs, *jax.tree.leaves(values)]
    return staged.unflatten(find_primitive("jit").bind(*operands, jaxpr=program, **params))


add_rule(_jit, [find_primitive("jit")], structural=True, eager=_jit_eagerly)


def has_default_options(params: dict[str, Any]) -> bool:
    """Return whether a jit sets no shardings, layouts, donated operands or compiler options."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    other_names = "donated_invars", "in_layouts", "out_layouts", "compiler_options_kvs"
    return shardings.count(UNSPECIFIED) == len(shardings) and not any(
        any(params[name]) for name in other_names
    )


def _repeat_per_leaf(options: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    """Return one option per leaf: the option of each value, repeated for each leaf of its tree."""
    return [x for x, tree in zip(options, trees, strict=True) for _ in range(tree.num_leaves)]


@structural("remat")
def _checkpoint(*values: Any, jaxpr: Any, **params: Any) -> list[Any]:
    staged = stage("remat", jaxpr, values)
    program, constants = open_jaxpr(staged.jaxpr)
    if isinstance(params["prevent_cse"], tuple):  # a bool for each operand
        by_leaf = _repeat_per_leaf(params["prevent_cse"], list(map(jax.tree.structure, values)))
        params["prevent_cse"] = (*[False] * len(constants), *by_leaf)
    leaves = jax.tree.leaves(values)
    out = find_primitive("remat").bind(*constants, *leaves, jaxpr=program, **params)
    return staged.unflatten(out)


def _add_inlining_rule(name: str) -> None:
    """Add a rule for a call primitive that runs the equations of the called program directly.

    The other parameters of the call are dropped, because they are about the dense operands. For
    example, a backend expects a fixed number of operands for the name of a composite.
    """

    @structural(name)
    def _(*values: Any, **params: Any) -> list[Any]:
        jaxpr = params["fwd_jaxpr"] if name == "remat_opt" else contained_jaxpr(params)
        return stage(name, jaxpr, values)(*values)


# In JAX 0.12, closed_call and eval_jaxpr are one primitive.
for _name in ("closed_call", "composite", "eval_jaxpr", "remat_opt"):
    _add_inlining_rule(_name)
