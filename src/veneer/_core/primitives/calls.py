"""Rules of primitives that call a program once: jit, `jax.checkpoint`, closed calls.

Each is bound again with a program that is staged for implicit operands: the rules run inside it,
on the leaves.
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
from .leaf_movement import has_batch_axes
from .scopes import IN_DERIVATIVE_RULE, enter_program
from .staging import lift_references, stage

# An eager jit is one call of a compiled function of values. JAX keeps the jaxpr, which is the key,
# as long as the user's function.
_functions: WeakKeyDictionary[Any, Callable] = WeakKeyDictionary()
clear_with_rules(_functions.clear)


def _jit_eagerly(values: Sequence[Any], params: dict[str, Any]) -> Any:
    # A compiled function reports nothing.
    replays = must_replay_events(current_policy())
    if not is_plain(params) or replays or IN_DERIVATIVE_RULE.value:
        return NotImplemented
    jaxpr = params["jaxpr"]
    function = _functions.get(jaxpr)
    if function is None:
        function = _functions.setdefault(jaxpr, _compile(ref(jaxpr), params["name"]))
    try:
        with enter_program(_name_of(params)):
            return function(*values)
    except MaterialiseError:  # `_jit` raises it again, with the paths of the weights
        return NotImplemented


def _name_of(params: dict[str, Any]) -> str | None:
    """Return the name of a jitted function, or None for lambdas and if JAX may inline it."""
    name = params["name"]
    return None if name == "<lambda>" or is_inlined(params) else name


def _compile(jaxpr: ref, name: str) -> Callable[..., list[Any]]:
    # With a strong reference, the function would keep its own key in the dictionary alive.
    def function(*values: Any) -> list[Any]:
        out = _apply_rules_of_function(name, jaxpr(), values)
        return stage("jit", jaxpr(), values)(*values) if out is NotImplemented else out

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


class _NoRuleError(Exception):
    """The error for a jitted function that has no rule for its operands."""


def _apply_rules_of_function(name: str, jaxpr: Any, values: Sequence[Any]) -> Any:
    """Run the rule of the function, such as `jnp.linalg.det`, that a jaxpr was traced from."""
    for function, vmaps in _recognize(name, jaxpr):
        if not all(has_batch_axes(v, vmaps) for v in values if isinstance(v, Value)):
            continue

        def apply(*values: Any, function: JittedFunction = function) -> Any:
            out = apply_rules(function, values, {})
            if out is NotImplemented:
                raise _NoRuleError
            return out

        try:
            return functools.reduce(lambda f, _: jax.vmap(f), range(vmaps), apply)(*values)
        except _NoRuleError:
            pass
    return NotImplemented


_recognized: WeakKeyDictionary[Any, list[tuple[JittedFunction, int]]] = WeakKeyDictionary()
clear_with_rules(_recognized.clear)


def _recognize(name: str, jaxpr: Any) -> Sequence[tuple[JittedFunction, int]]:
    """Return the functions with rules whose jaxpr this is, under 0 to 2 calls of `jax.vmap`.

    There can be several, because a function may be registered with and without its defaults.
    """
    functions = functions_named(name)
    if not functions:
        return ()
    if jaxpr not in _recognized:
        calls = [(function, vmaps) for vmaps in range(3) for function in functions]
        _recognized[jaxpr] = [call for call in calls if _is_jaxpr_of(jaxpr, *call)]
    return _recognized[jaxpr]


def _is_jaxpr_of(jaxpr: Any, function: JittedFunction, vmaps: int) -> bool:
    try:
        program = function.jaxpr(jaxpr.in_avals, vmaps)
    except Exception:  # the function may raise anything for operands that it does not take
        return False
    # JAX may have traced the function twice. Constants are printed without their values.
    return program is jaxpr or (not (program.consts or jaxpr.consts) and str(program) == str(jaxpr))


def _jit(*values: Any, jaxpr: Any, **params: Any) -> Any:
    out = _apply_rules_of_function(params["name"], jaxpr, values)
    if out is not NotImplemented:
        return out
    staged = stage("jit", jaxpr, values, name=_name_of(params))
    refs, (program,) = lift_references(staged.jaxpr)
    in_trees: list[Any] = [jax.tree.structure(v) for v in values]
    # Leaves ignore a sharding or a layout that is given for their dense array.
    for name, trees, unset in (
        ("in_shardings", in_trees, UNSPECIFIED),
        ("out_shardings", staged.out_trees, UNSPECIFIED),
        ("in_layouts", in_trees, None),
        ("out_layouts", staged.out_trees, None),
    ):
        pairs = zip(params[name], trees, strict=True)
        choices = [choice if treedef_is_leaf(tree) else unset for choice, tree in pairs]
        lifted = [unset] * len(refs) if trees is in_trees else []
        params[name] = (*lifted, *_repeat(choices, trees))
    params["donated_invars"] = (*[False] * len(refs), *_repeat(params["donated_invars"], in_trees))
    operands = [*refs, *jax.tree.leaves(values)]
    return staged.unflatten(find_primitive("jit").bind(*operands, jaxpr=program, **params))


add_rule(_jit, [find_primitive("jit")], structural=True, eager=_jit_eagerly)


def is_plain(params: dict[str, Any]) -> bool:
    """Return whether the parameters of a jit set no sharding, layout, donation or option."""
    ins, outs = params["in_shardings"], params["out_shardings"]
    return (
        ins.count(UNSPECIFIED) == len(ins)
        and outs.count(UNSPECIFIED) == len(outs)
        and not any(params["donated_invars"])
        and not any(params["in_layouts"])
        and not any(params["out_layouts"])
        and not params["compiler_options_kvs"]
    )


def _repeat(choices: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    """Return the choice for each value once for each of its leaves."""
    return [c for c, tree in zip(choices, trees, strict=True) for _ in range(tree.num_leaves)]


@structural("remat")
def _checkpoint(*values: Any, jaxpr: Any, **params: Any) -> list[Any]:
    staged = stage("remat", jaxpr, values)
    program, constants = open_jaxpr(staged.jaxpr)
    if isinstance(params["prevent_cse"], tuple):  # a bool for each operand
        trees = [jax.tree.structure(v) for v in values]
        by_leaf = _repeat(params["prevent_cse"], trees)
        params["prevent_cse"] = (*[False] * len(constants), *by_leaf)
    leaves = jax.tree.leaves(values)
    out = find_primitive("remat").bind(*constants, *leaves, jaxpr=program, **params)
    return staged.unflatten(out)


def _inline_call(name: str) -> None:
    """Add a rule that replaces a call by the program that it contains.

    The other parameters are about the dense operands. For example, the name of a composite promises
    a backend their number.
    """

    @structural(name)
    def _(*values: Any, **params: Any) -> list[Any]:
        jaxpr = params["fwd_jaxpr"] if name == "remat_opt" else contained_jaxpr(params)
        return stage(name, jaxpr, values)(*values)


# In JAX 0.12, closed_call and eval_jaxpr are one primitive.
for _name in ("closed_call", "composite", "eval_jaxpr", "remat_opt"):
    _inline_call(_name)
