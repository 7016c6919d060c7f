"""Rules for primitives that call another program once: jit, remat (`jax.checkpoint`).

Each is bound again, with the jaxpr it contains staged anew for implicit operands: the rules run
inside it, on the leaves.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
from jax.tree_util import treedef_is_leaf

from ..._jax.primitives import find_primitive, is_inlined, open_jaxpr
from ..._jax.sharding import UNSPECIFIED
from ..dispatch import apply_rules
from ..event import MaterialiseError
from ..jitted_functions import JittedFunction, functions_named
from ..policy import current_policy, must_replay_events
from ..rules import add_rule, clear_with_rules, structural
from ..value import Value
from .batch_axes import has_batch_axes
from .scopes import ASKED, OF_TANGENTS, inside
from .staging import references, stage, taking

# An eager jit is one call of a compiled function of values. It is found by its jaxpr, which JAX
# keeps as long as the function.

_functions: WeakKeyDictionary[Any, Callable] = WeakKeyDictionary()
clear_with_rules(_functions.clear)


def _jit_eagerly(values: Sequence[Any], params: dict[str, Any]) -> Any:
    # A function that is compiled tells nobody what it does.
    if not is_plain(params) or must_replay_events(current_policy()) or OF_TANGENTS.value:
        return NotImplemented
    jaxpr = params["jaxpr"]
    function = _functions.get(jaxpr)
    if function is None:
        function = _functions.setdefault(jaxpr, _compiled(ref(jaxpr), params["name"]))
    try:
        if ASKED.value is None:
            return function(*values)
        with inside(_name_of(params)):
            return function(*values)
    except MaterialiseError:  # raised again where it is known which weights the operands are
        return NotImplemented


def _name_of(params: dict[str, Any]) -> str | None:
    """The name of a function, if it has one; not of one that JAX inlines in some programs."""
    name = params["name"]
    return None if name == "<lambda>" or is_inlined(params) else name


def _compiled(jaxpr: ref, name: str) -> Callable[..., list[Any]]:
    # By a weak reference, or the function would keep the key alive under which it is found.
    def function(*values: Any) -> list[Any]:
        out = _by_a_rule(name, jaxpr(), values)
        return stage("jit", jaxpr(), values)(*values) if out is NotImplemented else out

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


# A jit may be of a function that has rules.


@dataclass(frozen=True)
class _Call:
    """What a jit is found to be: a function, under so many calls of `jax.vmap`."""

    function: JittedFunction
    vmaps: int


def _recognise(name: str, jaxpr: Any) -> tuple[_Call, ...]:
    """The calls of functions that have rules of which this is the program.

    Several, if a function is registered with keywords that say what its defaults say.
    """
    functions = functions_named(name)
    if not functions:
        return ()
    if jaxpr not in _recognised:
        calls = (_Call(f, vmaps) for vmaps in range(3) for f in functions)
        _recognised[jaxpr] = tuple(call for call in calls if _is_program_of(jaxpr, call))
    return _recognised[jaxpr]


def _is_program_of(jaxpr: Any, call: _Call) -> bool:
    try:
        program = call.function.jaxpr(jaxpr.in_avals, call.vmaps)
    except Exception:  # whatever the function raises for operands that are not its own
        return False
    # Mostly the same object. If JAX has traced it twice, it prints the same; but of a constant only
    # its type is printed.
    return program is jaxpr or (not (program.consts or jaxpr.consts) and str(program) == str(jaxpr))


_recognised: WeakKeyDictionary[Any, tuple[_Call, ...]] = WeakKeyDictionary()
clear_with_rules(_recognised.clear)


class _NoRuleError(Exception):
    """A function that is called has no rule for its operands, and is to be opened."""


def _by_a_rule(name: str, jaxpr: Any, values: Sequence[Any]) -> Any:
    """What the rules of a function give, if it is a program that JAX has for that function."""
    for call in _recognise(name, jaxpr):
        if all(has_batch_axes(v, call.vmaps) for v in values if isinstance(v, Value)):
            with contextlib.suppress(_NoRuleError):
                return _apply(call, values)
    return NotImplemented


def _apply(call: _Call, values: Sequence[Any]) -> Any:
    def apply(*values: Any) -> Any:
        out = apply_rules(call.function, values, {})
        if out is NotImplemented:
            raise _NoRuleError
        return out

    return functools.reduce(lambda f, _: jax.vmap(f), range(call.vmaps), apply)(*values)


def _jit(*values: Any, jaxpr: Any, **params: Any) -> Any:
    out = _by_a_rule(params["name"], jaxpr, values)
    if out is not NotImplemented:
        return out
    staged = stage("jit", jaxpr, values, name=_name_of(params))
    refs = references(staged.jaxpr)
    in_trees: list[Any] = [jax.tree.structure(v) for v in values]
    out_trees = staged.out_trees
    # A sharding or layout given for the dense array says nothing of its leaves: they keep theirs.
    params["in_shardings"] = _by_leaf(params["in_shardings"], in_trees, UNSPECIFIED)
    params["out_shardings"] = _by_leaf(params["out_shardings"], out_trees, UNSPECIFIED)
    params["in_layouts"] = _by_leaf(params["in_layouts"], in_trees, None)
    params["out_layouts"] = _by_leaf(params["out_layouts"], out_trees, None)
    params["donated_invars"] = _repeat(params["donated_invars"], in_trees)
    for name, unset in (("in_shardings", UNSPECIFIED), ("in_layouts", None)):
        params[name] = (unset,) * len(refs) + params[name]
    params["donated_invars"] = (False,) * len(refs) + params["donated_invars"]
    params["jaxpr"] = taking(staged.jaxpr, refs)
    return staged.unflatten(find_primitive("jit").bind(*refs, *jax.tree.leaves(values), **params))


add_rule(_jit, [find_primitive("jit")], structural=True, eager=_jit_eagerly)


def is_plain(params: dict[str, Any]) -> bool:
    """Whether a jit asks for nothing but to compile its program."""
    ins, outs = params["in_shardings"], params["out_shardings"]
    return (
        ins.count(UNSPECIFIED) == len(ins)
        and outs.count(UNSPECIFIED) == len(outs)
        and not any(params["donated_invars"])
        and not any(params["in_layouts"])
        and not any(params["out_layouts"])
        and not params["compiler_options_kvs"]
    )


def _repeat(choices: Sequence[Any], trees: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(c for c, tree in zip(choices, trees, strict=True) for _ in range(tree.num_leaves))


def _by_leaf(choices: Sequence[Any], trees: Sequence[Any], unset: Any) -> tuple[Any, ...]:
    return tuple(
        choice if treedef_is_leaf(tree) else unset
        for choice, tree in zip(choices, trees, strict=True)
        for _ in range(tree.num_leaves)
    )


@structural("remat")
def _checkpoint(*values: Any, jaxpr: Any, **params: Any) -> list[Any]:
    staged = stage("remat", jaxpr, values)
    opened, constants = open_jaxpr(staged.jaxpr)
    leaves = jax.tree.leaves(values)
    if isinstance(params["prevent_cse"], tuple):  # a choice an operand
        trees = [jax.tree.structure(v) for v in values]
        of_leaves = _repeat(params["prevent_cse"], trees)
        params["prevent_cse"] = (False,) * len(constants) + of_leaves
    return staged.unflatten(
        find_primitive("remat").bind(*constants, *leaves, jaxpr=opened, **params)
    )
