"""The patches of JAX, Equinox and Flax that high types need. The list is at the end.

Each patch is a function that takes an attribute of another package and returns its replacement.
Most of them are in the other modules. `mode` sets the patches and restores the attributes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, islice
from typing import Any

import jax

from .._core.primitives.sharding import leaf_destinations
from .._core.surface import operands
from .._core.surface.array import ImplicitArray
from .._core.surface.operands import OperandConversion
from .._core.value import Value, is_value
from .._jax.frames import is_in_converted_function
from .._jax.hijax import (
    Unspecified,
    ad_checkpoint,
    api,
    batching,
    conditionals,
    core,
    custom_derivatives,
    custom_lin,
    jax_pmap,
    jax_shard_map,
    lax,
    loops,
    parallel,
    pe,
    pjit,
    stages,
    tracing_registry,
)
from .._jax.hijax import tree_util as jax_tree_util
from .._jax.primitives import find_primitive, jaxpr_as_fun
from .._jax.tracing import is_eager, set_current_trace
from .control_flow import (
    check_branches,
    unify_branches,
    unify_carry,
)
from .custom_derivatives import CarryToCheckpoint, call_custom_jvp, call_custom_vjp
from .derivatives import (
    keep_marks_in_jit,
    keep_marks_in_tree_map,
    linearize,
    map_derivatives,
    pull_back,
    push_forward,
    split_arguments,
)
from .jit import catch_structure_changes, run_jitted
from .mapping import (
    accept_axes_of_leaves,
    add_batch_axis,
    check_pmap,
    map_whole_values,
    move_batch_axis,
    reject_marked_arguments,
    scan_whole_values,
    select_values,
    slice_argument,
    slice_dense_arrays,
    stack_result,
)
from .mode import is_enabled, jax_patches
from .operations import Apply, Parameters
from .shard_map import (
    Trees,
    accept_dense_specs,
    bind_shard_map,
    move_captured_inside,
    reject_leafwise_specs,
)
from .types import (
    HighType,
    TangentType,
    abstract,
    as_typed_operand,
    is_complete,
    tangent_operand_error,
    to_operand,
    type_of,
    with_dense_tangents,
)
from .values import apply, expose, is_inexact, value_of, within_rule

# Values as operands.


class _HighConversion:
    """The conversion of implicit arrays to operands of JAX functions, with high types.

    It replaces an `OperandConversion`, the conversion for `vn.implicit`, and has the same methods.
    """

    def __init__(self, conversion: OperandConversion):
        self._conversion = conversion

    convert = staticmethod(to_operand)

    def type_of(self, value: Value) -> Any:
        is_array = isinstance(value, ImplicitArray)
        return type_of(value) if is_array else self._conversion.type_of(value)

    def jax_array(self, value: Value) -> Callable[[], Any]:
        if is_enabled():
            return partial(as_typed_operand, value)
        return self._conversion.jax_array(value)


def _asarray(asarray: Callable) -> Callable:
    """Wrap JAX's `asarray`, by which functions of `jax.lax` convert operands to arrays.

    An implicit array becomes one operand of a high type.
    """
    return lambda x: asarray(as_typed_operand(x) if isinstance(x, Value) and is_enabled() else x)


def _bind(bind: Any) -> Callable:
    """Wrap `Primitive.bind_with_trace`, so that primitives take operands of high types.

    JAX calls the method for each operation of each program. So the wrapper must be fast for
    operations that have only dense operands.
    """

    # Used if an operand is an implicit array or a tangent of one.
    def bind_values(self: Any, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            args = move_captured_inside(trace, args)
        if self is custom_lin:
            if trace.requires_low:  # raises JAX's error: a `custom_vjp` has no forward derivative
                return self.impl(*args, **params)
            return trace.process_primitive(self, args, params)
        if self.name in _REF_PRIMITIVES and HighType in map(type, avals):
            raise _ref_error(self.name, *avals)
        if self.name in _HIGH_PRIMITIVES:
            return bind_high(self, trace, args, avals, params)
        if TangentType in map(type, avals):
            raise tangent_operand_error(self.name, *avals)
        with set_current_trace(trace):
            out = apply(Apply(self, Parameters(params)), *args)
            if is_eager():
                out = list(map(value_of, out))
            return out if self.multiple_results else out[0]

    # Used for primitives of JAX that take operands of high types themselves.
    def bind_high(self: Any, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        if self is empty_ref and type(params["ty"]) is HighType:
            raise _ref_error("empty_ref", params["ty"])
        out = bind(self, trace, args, avals, params)
        is_evaluated = self.multiple_results and type(trace) is core.EvalTrace
        return list(map(expose, out)) if is_evaluated and is_in_converted_function() else out

    # The replacement of `bind`. It must be fast if no operand has a high type.
    def bind_any(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:
            if type(aval) is HighType or type(aval) is TangentType:
                return bind_values(self, trace, args, avals, params)
        if self.is_high(*avals, **params):
            return bind_high(self, trace, args, avals, params)
        if not is_inlined:
            return bind(self, trace, args, avals, params)
        return trace.process_primitive(self, args, params)

    # In JAX 0.10.2 to 0.12.0, the last line of `bind_any` does the same as `bind`, after the test
    # of `is_high`. A call of `bind` would double the cost of `bind_any`.
    empty_ref = find_primitive("empty_ref")
    names = ("is_high", "requires_low", "set_current_trace", "to_lojax", "process_primitive")
    is_inlined = bind.__code__.co_names == names
    return bind_any


#: The primitive `high`, and the primitives of JAX that take operands of high types.
_HIGH_PRIMITIVES = frozenset(
    "high jit scan while cond checkpoint remat2 custom_jvp_call custom_vjp_call "
    "remat_opt core_call "
    "closed_call call_hi_primitive call_hi_primitive_linearized program_order run_state ref "
    "new_ref empty_ref get swap freeze accum_grad_in_ref addupdate".split()
)


#: The primitives that write to a `jax.Ref`, which can hold the tangents of values but no values.
_REF_PRIMITIVES = frozenset("new_ref ref swap run_state".split())


def _ref_error(name: str, *types: Any) -> TypeError:
    return TypeError(
        f"{name}({', '.join(map(str, types))}): a jax.Ref cannot hold an implicit "
        "array. Use vn.hijax.Box, a jax.Ref for each leaf, or a jax.Ref of vn.materialise(x)."
    )


def _lower_checkpoint(*args: Any, jaxpr: Any, **params: Any) -> list[Any]:
    """Lower the primitive of `jax.checkpoint`, and return each implicit result as one value.

    It replaces the rule of JAX 0.10.2 to 0.12.0, which returns the leaves of such a result as
    separate results.
    """
    closed: Any = pe.close_jaxpr(jaxpr) if hasattr(pe, "close_jaxpr") else jaxpr  # JAX < 0.12
    lowered: Any = pe.lower_jaxpr2(closed)
    pairs = zip(jaxpr.invars, args, strict=True)
    leaves = [leaf for v, x in pairs for leaf in v.aval.lower_val(x)]
    low_jaxpr = pe.convert_constvars_jaxpr(getattr(lowered, "jaxpr", lowered))
    remat = find_primitive("remat")
    out = iter(remat.bind(*lowered.consts, *leaves, jaxpr=low_jaxpr, **params))
    avals = [v.aval for v in jaxpr.outvars]
    results = [aval.raise_val(*islice(out, len(aval.lo_ty()))) for aval in avals]
    # In a derivative, residuals can be among the results, and must stay typed.
    is_final = is_eager() and not params["differentiated"]
    return list(map(value_of, results)) if is_final else results


# Typed results of jitted functions, converted to pytrees of leaves.
#
# JAX calls a jitted function with typed results from Python, and cannot compile it ahead of time.
# So the outermost `jit` is compiled to return the leaves of each typed result. The tree structure
# of the results has an implicit array in that place, so JAX rebuilds it from the leaves. Then JAX's
# C++ code calls the compiled function.


def _run_lowered(run: Callable) -> Callable:
    """Wrap JAX's function that runs a jitted function, so that results can be implicit arrays.

    In the jaxpr, such a result is one value of a high type. If the call is not inside a trace, the
    function is compiled to return the leaves instead, and JAX builds the implicit array from them.
    Inside a trace, the result stays one value.
    """

    def run_with_leaves(call: Any, *args: Any) -> Any:
        closed = call.params["jaxpr"]
        if within_rule.value:
            # Return None as the compiled function, so that JAX does not call it from C++, which
            # would lose the marks of derivatives.
            outs, out_flat, out_tree, args_flat, jaxpr, _, *more = run(call, *args)
            return jax.tree.map(expose, outs), out_flat, out_tree, args_flat, jaxpr, None, *more
        if not closed.is_high:
            return run(call, *args)
        if core.trace_state_clean():
            lowered = _lower_jit(call.params, call.out_tree)
            if lowered is not None:
                params, out_tree = lowered
                return run(call._replace(params=params, out_tree=out_tree), *args)
        outs, *more = run(call, *args)
        if any(aval.is_high for aval in closed.out_avals):
            outs = jax.tree.map(expose, outs)
        return outs, *more

    return run_with_leaves


def _check_shardings(check: Callable) -> Callable:
    """Wrap JAX's check of shardings, to skip high types, for which JAX >= 0.12 raises an error."""

    def check_arrays(shardings: Any, avals: Any, names: Any, *args: Any, **kwargs: Any) -> Any:
        is_checked = [not (aval.is_high and _has_array_per_leaf(aval)) for aval in avals]
        names = names and list(compress(names, is_checked))
        shardings = list(compress(shardings, is_checked))
        avals = list(compress(avals, is_checked))
        check(shardings, avals, names, *args, **kwargs)

    return check_arrays


def _lower_results(attribute: property) -> property:
    """Wrap the property `lojax` or `out_info` of `jax.stages.Traced`, from `jax.jit(f).trace(...)`.

    Without the wrapper, the property describes an implicit result of `f` as one value of a high
    type. With it, the property describes the leaves of the result.
    """
    get: Any = attribute.fget

    def get_of_leaves(traced: Any) -> Any:
        if not traced.jaxpr.is_high:
            return get(traced)
        lowered = _lower_jit(traced._params, traced.out_tree)
        if lowered is None:
            return get(traced)
        params, out_tree = lowered
        more = [traced._fun_sourceinfo] if hasattr(traced, "_fun_sourceinfo") else []  # JAX >= 0.12
        args = traced._meta_tys_flat, params, traced._in_tree, out_tree, traced._consts
        return get(type(traced)(*args, *more))

    return property(get_of_leaves)


def _lower_jit(params: dict[str, Any], out_tree: Any) -> Any:
    """Convert a jitted function to return the leaves of each result that is an implicit array.

    `params` are the parameters of the primitive `jit`, and `out_tree` is the tree structure of the
    results. Return the new parameters and the new tree structure. Return None if an operand has a
    high type, or if a leaf of a result has no array, such as an integer leaf of a tangent.
    """
    closed = params["jaxpr"]
    high = [aval for aval in closed.out_avals if aval.is_high]
    if any(aval.is_high for aval in closed.in_avals) or not all(map(_has_array_per_leaf, high)):
        return None
    params = {**params, "jaxpr": pe.lower_jaxpr2(closed)}
    if high:
        params["out_shardings"] = _per_leaf(closed, params["out_shardings"], _leaf_shardings)
        params["out_layouts"] = _per_leaf(closed, params["out_layouts"], _reject_layout)
        values = [abstract(t.treedef, t.leaves) if t.is_high else 0 for t in closed.out_avals]
        out_tree = tracing_registry.flatten(jax.tree.unflatten(out_tree, values))[1]
    return params, out_tree


def _has_array_per_leaf(aval: Any) -> bool:
    """Return whether `aval` is a high type with one array for each leaf of the implicit array.

    The type of a tangent has no array for a leaf of an integer dtype.
    """
    if isinstance(aval, TangentType):
        return all(map(is_inexact, aval.of.leaves))
    return isinstance(aval, HighType)


def _per_leaf(closed: Any, per_result: Sequence[Any], split: Callable) -> tuple[Any, ...]:
    """Expand the shardings or layouts of the results of a jaxpr to one for each leaf.

    `closed` is the jaxpr, and `per_result` has the sharding or layout that the user set for each
    result. For a result of a high type `aval` with the sharding or layout `x`, `split(aval, x)`
    returns one for each leaf.
    """
    per_leaf: list[Any] = []
    for aval, x in zip(closed.out_avals, per_result, strict=True):
        if aval.is_high and x is not None and not isinstance(x, Unspecified):
            per_leaf.extend(split(aval, x))
        else:
            per_leaf.extend([x] * len(aval.lo_ty()))
    return tuple(per_leaf)


def _leaf_shardings(aval: Any, sharding: Any) -> Sequence[Any]:
    """Return the sharding of each leaf of an implicit array of type `aval`.

    `sharding` is the sharding that the user set for the dense array.
    """
    high_type = aval.of if isinstance(aval, TangentType) else aval
    shardings: list[Any] = []

    def find_shardings(*leaves: Any) -> None:
        shardings.extend(leaf_destinations(high_type.of_arrays(leaves), sharding))

    jax.make_jaxpr(find_shardings)(*high_type.lo_ty())  # traced: `partition` may look at the leaves
    return shardings


def _reject_layout(aval: Any, layout: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"out_shardings of a jitted function set the layout {layout} for a result of type {aval}. "
        "An implicit array has no layout. Pass a sharding without a layout."
    )


# Frameworks.


def _get_typed_variable(get_variable: Callable) -> Callable:
    """Wrap `Scope.get_variable` of Flax linen, to return an implicit array as one leaf.

    Flax compares the shape of each leaf of a variable with the shape that the initializer returns.
    As one operand of a high type, an implicit array is one leaf with the shape of the dense array.
    """
    convert = lambda x: as_typed_operand(x) if is_value(x) and is_complete(x) else x

    def get(*args: Any, **kwargs: Any) -> Any:
        variable = get_variable(*args, **kwargs)
        return jax.tree.map(convert, variable, is_leaf=is_value) if is_enabled() else variable

    return get


def _partition_by_tangent(partition: Callable) -> Callable:
    """Wrap `equinox.partition`, by which `equinox.filter_grad` selects the floating leaves.

    An implicit array with a dense tangent becomes one floating leaf. Otherwise, the scales of a
    quantized array would be selected without its integer codes.
    """

    def split(tree: Any, filter_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(filter_spec, "__name__", "") == "is_inexact_array":
            tree = with_dense_tangents(tree)
        return partition(tree, filter_spec, *args, **kwargs)

    return split


# The list. tests/hijax/test_patches.py names a test for each patch that fails without it.

_is_jax_012 = hasattr(custom_derivatives, "_FlatBwdWithAccums")

# Operands.
jax_patches.attribute(operands, "conversion", _HighConversion)
jax_patches.attribute(core.Primitive, "bind_with_trace", _bind)
jax_patches.attribute(lax, "asarray", _asarray)
# Derivatives.
jax_patches.attribute(api, "argnums_partial2", split_arguments)
jax_patches.boundary(api.vjp, pull_back)
jax_patches.boundary(api.linearize, linearize)
jax_patches.attribute(api, "_jvp", push_forward)
jax_patches.attribute(api, "vmap", map_derivatives)
# The rules of users, and marks of derivatives within them.
jax_patches.attribute(jax.custom_jvp, "__call__", call_custom_jvp)
jax_patches.attribute(jax.custom_vjp, "__call__", call_custom_vjp)
jax_patches.attribute(jax_tree_util, "tree_flatten", keep_marks_in_tree_map)
jax_patches.attribute(ad_checkpoint, "tracing_registry", CarryToCheckpoint)
# Jitted functions and checkpoints.
jax_patches.attribute(pjit, "_infer_params", keep_marks_in_jit, catch_structure_changes)
jax_patches.attribute(pjit, "_run_python_pjit", _run_lowered, run_jitted)
jax_patches.attribute(stages.Traced, "lojax", _lower_results)
jax_patches.attribute(stages.Traced, "out_info", _lower_results)
if _is_jax_012:
    jax_patches.attribute(pjit, "pjit_check_aval_sharding", _check_shardings)
else:
    # Differentiating a scan under `jax.checkpoint` puts the forward pass of the scan into a
    # `closed_call`. JAX < 0.12 cannot lower this primitive if its jaxpr has high types.
    lower_call = lambda *args, call_jaxpr: jaxpr_as_fun(call_jaxpr)(*args)
    jax_patches.attribute(find_primitive("closed_call"), "to_lojax", lambda _: lower_call)
jax_patches.attribute(find_primitive("remat"), "to_lojax", lambda _: _lower_checkpoint)
# Mapped functions.
jax_patches.attribute(batching, "is_vmappable", map_whole_values)
jax_patches.attribute(batching, "to_elt", slice_argument)
jax_patches.attribute(batching, "from_elt", stack_result)
jax_patches.attribute(batching, "broadcast", add_batch_axis)
jax_patches.attribute(batching, "moveaxis", move_batch_axis)
jax_patches.attribute(conditionals, "_bcast_select", select_values)
jax_patches.attribute(conditionals, "_bcast_select_n", select_values)
jax_patches.attribute(api, "flatten_axes", accept_axes_of_leaves)
jax_patches.attribute(jax_pmap, "_cached_shard_map", check_pmap)
# Loops and branches.
jax_patches.boundary(loops.scan, unify_carry, slice_dense_arrays, reject_marked_arguments)
jax_patches.boundary(loops.while_loop, unify_carry, reject_marked_arguments)
jax_patches.boundary(loops.map, slice_dense_arrays, reject_marked_arguments)
jax_patches.boundary(loops.associative_scan, scan_whole_values, reject_marked_arguments)
jax_patches.boundary(conditionals.cond, unify_branches, reject_marked_arguments)
jax_patches.attribute(conditionals, "_switch_internal", unify_branches, reject_marked_arguments)
jax_patches.attribute(conditionals, "_check_branch_outputs", check_branches)
# Devices.
jax_patches.attribute(parallel, "tree_util", Trees)
jax_patches.attribute(jax_shard_map, "_shard_map", accept_dense_specs)
jax_patches.attribute(jax_shard_map, "broadcast_prefix", reject_leafwise_specs)
jax_patches.attribute(type(find_primitive("shard_map")), "bind_with_trace", bind_shard_map)
# Frameworks.
jax_patches.attribute_if_imported("equinox._ad", None, "partition", _partition_by_tangent)
jax_patches.attribute_if_imported("flax.core.scope", "Scope", "get_variable", _get_typed_variable)
