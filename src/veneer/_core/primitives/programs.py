"""Rules of primitives that contain programs: jit, `jax.checkpoint`, branches and loops.

The program is staged: traced again as a program on the leaves of implicit operands, which use their
rules. The primitive is then bound with the leaves and the staged program.

All branches must return the same types, and a loop must return its carry with the type that it
takes. If an implicit value is on one side and a dense array on the other, the value is
materialized, and this is reported. The programs are staged again until the types agree. If metadata
would change, an error is raised, unless the type sets `metadata_is_meaning = False`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
from jax import lax
from jax.tree_util import treedef_is_leaf

from ..._jax.primitives import (
    UNSPECIFIED,
    bind_scan,
    contained_jaxpr,
    find_primitive,
    is_inlined,
    open_jaxpr,
    scan_counts,
    split_list,
)
from ..._jax.tracing import slice_type
from ..dispatch import apply_rules
from ..policy import MaterialiseError, current_policy, emit_events, join_sources, must_replay_events
from ..rules import JittedFunction, add_rule, clear_with_rules, functions_named, structural
from ..sources import keep_sources
from ..value import Value, describe, is_value, make_dense
from .leaves import (
    can_become_label,
    can_stack_leaves,
    dense_unless,
    has_batch_axes,
    has_no_dense_form,
    is_label,
)
from .scopes import IN_DERIVATIVE_RULE, enter_program
from .staging import (
    DENSE,
    StagedProgram,
    ValueType,
    abstract_value,
    lift_references,
    stage,
    stage_to_labels,
    stage_without_events,
    value_type,
)

# The compiled functions of `_jit_eagerly`, by jaxpr. JAX keeps the jaxpr of a user's function as
# long as the function.
_compiled_functions: WeakKeyDictionary[Any, Callable] = WeakKeyDictionary()
clear_with_rules(_compiled_functions.clear)


def _jit_eagerly(values: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a `jit` equation on concrete implicit arrays as one compiled function.

    The function is compiled once per jaxpr. Return NotImplemented in the cases that need the slower
    rule `_jit`: a report needs events, a derivative rule is running, the call has options such as
    shardings, or an operand would be materialized under `on_materialise="error"`.
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
    """Return the name of a jitted function, given the parameters of its `jit` equation.

    Return None for a lambda, or if JAX may inline the `jit`.
    """
    name = params["name"]
    return None if name == "<lambda>" or is_inlined(params) else name


def _compile(jaxpr: ref, name: str) -> Callable[..., list[Any]]:
    """Return a compiled function of implicit arrays that runs the jaxpr to which `jaxpr` refers.

    `jaxpr` is a weak reference, because the function is stored in a dict with the jaxpr as weak
    key. `name` is the name of the function in profiles and HLO.
    """

    def function(*values: Any) -> list[Any]:
        out = _apply_rules_of_function(name, jaxpr(), values)
        return stage("jit", jaxpr(), values)(*values) if out is NotImplemented else out

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


class _NoRuleError(Exception):
    """The internal error for a jitted function without a rule for its operands.

    It takes the place of NotImplemented, which a function inside `jax.vmap` cannot return.
    """


def _apply_rules_of_function(name: str, jaxpr: Any, values: Sequence[Any]) -> Any:
    """Run the rule of a jitted function, such as `jnp.linalg.det`, instead of its jaxpr.

    Several functions with the name `name` can have this jaxpr, for example `f` and `partial(f,
    k=1)`. The first one with a rule for the operands `values` applies. Return NotImplemented if
    there is none.
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


# In JAX 0.12, closed_call and eval_jaxpr are one primitive.
for _name in ("closed_call", "composite", "eval_jaxpr", "remat_opt"):

    @structural(_name)
    def _(*values: Any, _name: str = _name, **params: Any) -> list[Any]:
        # Run the equations of the program directly. The other parameters are dropped, because they
        # are about the dense operands, such as their number for the name of a composite.
        jaxpr = params["fwd_jaxpr"] if _name == "remat_opt" else contained_jaxpr(params)
        return stage(_name, jaxpr, values)(*values)


# Branches and loops.


@structural("cond")
def _cond(index: Any, *values: Any, branches: Sequence[Any], **params: Any) -> list[Any]:
    (index,) = make_dense(find_primitive("cond"), [index])
    forms: dict[int, Any] = {}  # by index of an output: `DENSE`, or the structure of a label
    while True:
        staged = [stage_without_events("cond", b, values, forms) for b in branches]
        first, *others = staged
        changes = {}
        for i in range(len(first.out_trees)):
            for other in others:
                types = first.output_type(i), other.output_type(i)
                form = common_form(f"output {i} of cond", *types, forms.get(i))
                if form is not None:
                    changes[i] = form
        if not changes:
            break
        forms |= changes
    for branch in staged:
        emit_events(branch.events)
    refs, jaxprs = lift_references(*(branch.jaxpr for branch in staged))
    operands = [index, *refs, *jax.tree.leaves(values)]
    out = find_primitive("cond").bind(*operands, branches=tuple(jaxprs), **params)
    # The sources (weight paths) of an output are its sources in all branches.
    sources = map(join_sources, zip(*(branch.out_sources for branch in staged), strict=True))
    return replace(first, out_sources=tuple(sources)).unflatten(out)


@structural("while")
def _while(
    *values: Any,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
    **params: Any,
) -> list[Any]:
    cond_consts, body_consts, carry = split_list(values, [cond_nconsts, body_nconsts])
    body, carry = _stage_body("while", body_jaxpr, body_consts, carry, [])
    cond = stage_to_labels("while", cond_jaxpr, [*cond_consts, *carry])
    refs, (body_program,) = lift_references(body.jaxpr)
    cond_leaves, body_leaves = jax.tree.leaves(cond_consts), [*refs, *jax.tree.leaves(body_consts)]
    out = find_primitive("while").bind(
        *cond_leaves,
        *body_leaves,
        *jax.tree.leaves(carry),
        cond_nconsts=len(cond_leaves),
        cond_jaxpr=cond.jaxpr,
        body_nconsts=len(body_leaves),
        body_jaxpr=body_program,
        **params,
    )
    return body.unflatten(out)


@structural("scan")
def _scan(*values: Any, jaxpr: Any, length: int, **params: Any) -> list[Any]:
    consts, carry, xs = split_list(values, list(scan_counts(params)))
    can_slice = lambda x: not isinstance(x, Value) or has_batch_axes(x, 1)
    xs = dense_unless(can_slice, find_primitive("scan"), xs)
    slices = keep_sources(xs, [jax.tree.map(slice_type, x) for x in xs])
    body, carry = _stage_body("scan", jaxpr, consts, carry, slices, stacks=True)
    refs, (program,) = lift_references(body.jaxpr)
    leaves = [jax.tree.leaves(part) for part in ([refs, consts], carry, xs)]
    return body.unflatten(bind_scan(*leaves, jaxpr=program, length=length, params=params))


def _stage_body(
    primitive: str,
    jaxpr: Any,
    consts: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    stacks: bool = False,
) -> tuple[StagedProgram, list[Any]]:
    """Trace the body of a loop on leaves, so that the carry has the same types before and after.

    **Arguments:**

    - `primitive`, `jaxpr`: the name of the loop primitive, and its body.
    - `consts`, `carry`, `xs`: the operands of the body. `carry` is for the first iteration.
    - `stacks`: whether the outputs after the carry are stacked, as in a scan. Outputs whose leaves
      cannot be stacked are then materialized.

    **Returns:** the staged body, and the carry for the first iteration, converted to the types of
    the body.
    """
    initial = carry
    # The carry would lose its weak types in the first iteration. Types of vn.hijax have none.
    is_weak = lambda leaf: getattr(jax.typeof(leaf), "weak_type", False)
    as_strong = lambda x: lax.convert_element_type(x, jax.typeof(x).dtype) if is_weak(x) else x
    carry = [jax.tree.map(as_strong, v) if isinstance(v, Value) else v for v in initial]
    keep_sources(initial, carry)
    forms: dict[int, Any] = {}  # by index of an output: `DENSE`, or the structure of a label
    while True:
        body = stage_without_events(primitive, jaxpr, [*consts, *carry, *xs], forms)
        changes: dict[int, Any] = {}
        for i, value in enumerate(carry):
            where, types = f"carry {i} of {primitive}", (value_type(value), body.output_type(i))
            form = common_form(where, *types, forms.get(i))
            if form is not None and form is not DENSE and not isinstance(value, Value):
                # The body returns a label, so convert the dense `value` to it, or materialize both.
                carry[i] = jax.tree.unflatten(form, [value])
                if not can_become_label(value, carry[i]):
                    form = common_form(where, *types, form)
            if form is DENSE:
                (carry[i],) = make_dense(find_primitive(primitive), [value])
            if form is not None:
                changes[i] = form
        for i, output in enumerate(body.abstract_outputs()):
            if stacks and i >= len(carry) and is_value(output) and not can_stack_leaves(output):
                changes[i] = DENSE
        if not changes:
            emit_events(body.events)
            return body, carry
        forms |= changes


def common_form(where: str, one: ValueType, other: ValueType, tried: Any = None) -> Any:
    """Return the form that two values must be converted to, so that they have the same type.

    A form is `DENSE`, or the tree structure of a label (a type whose only leaf is the dense array).
    The values are the same output of two branches, or a carry before and after the body of a loop.
    If one value is dense and the other is a label, try the label first. Otherwise use `DENSE`.

    **Arguments:**

    - `where`: the name of the values for errors.
    - `one`, `other`: the types of the values.
    - `tried`: the form to which the values were converted without success, or None.

    **Returns:** the form, or None if the types are the same.

    **Raises:** `TypeError` if metadata would be lost or a type cannot be materialized.
    """
    (tree, avals), (other_tree, other_avals) = one, other
    if tree == other_tree and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(avals, other_avals, strict=True)
    ):
        return None
    values = abstract_value(*one), abstract_value(*other)
    show = lambda v: repr(v) if isinstance(v, Value) else f"dense {describe([v])[0]}"
    sides = f"{where} is {show(values[0])} on one side and {show(values[1])} on the other"
    if tried is DENSE:
        raise TypeError(f"{sides}, also after materialization. Change the program so they agree.")
    labels = [t for t, v in zip((tree, other_tree), values, strict=True) if is_label(v)]
    if _metadata_differs(tree, other_tree) or (tree != other_tree and len(labels) == 2):
        why = "the carry changed structure: " if where.startswith("carry") else ""  # as in Quax
        raise TypeError(
            f"{sides}: {why}their metadata differs, and would be lost. Return the same type on "
            "both sides, or call vn.materialise there to drop the metadata."
        )
    if treedef_is_leaf(tree) != treedef_is_leaf(other_tree) and labels and tried is None:
        return labels[0]
    for v in filter(has_no_dense_form, values):
        raise TypeError(
            f"{sides}, and {type(v).__name__} refuses to be dense. Return the same type on "
            "both sides."
        )
    return DENSE


def _metadata_differs(one: Any, other: Any) -> bool:
    """Return whether two tree structures differ in metadata that changes the meaning of a value.

    This is all metadata of types that do not set `metadata_is_meaning = False`.
    """
    data, other_data = one.node_data(), other.node_data()
    if data is None or other_data is None:
        return False
    (cls, metadata), (other_cls, other_metadata) = data, other_data
    if cls is not other_cls:
        return False
    if issubclass(cls, Value) and cls.metadata_is_meaning and metadata != other_metadata:
        return True
    return any(map(_metadata_differs, one.children(), other.children()))
