"""The patches of JAX, Equinox and Flax that high types need. The list is at the end.

Each patch is a function that takes an attribute of another package and returns its replacement.
Most of them are in the other modules. `mode` sets the patches and restores the attributes.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import jax

from .._core.surface import operands
from .._core.surface.array import ImplicitArray
from .._core.surface.operands import OperandConversion
from .._core.value import Value, is_value
from .._jax.frames import is_in_converted_function
from .._jax.hijax import (
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
from .results import check_shardings, lower_results, run_lowered
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
    as_typed_operand,
    is_complete,
    tangent_operand_error,
    to_operand,
    type_of,
    with_dense_tangents,
)
from .values import apply, expose, value_of

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

    JAX calls the method for each operation of each program, so it must be fast without them.
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
    """Lower the primitive of `jax.checkpoint`. Implicit arrays among the results stay whole.

    It replaces the rule of JAX 0.10.2 to 0.12.0, which returns the leaves of such results.
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


# Frameworks.


def _get_typed_variable(get_variable: Callable) -> Callable:
    """Wrap `Scope.get_variable` of Flax linen, to return an implicit array as one typed operand.

    Flax compares the shape of each leaf of a variable with the shape that the initializer returns.
    A typed operand is one leaf with the shape of the dense array.
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
jax_patches.attribute(pjit, "_run_python_pjit", run_lowered, run_jitted)
jax_patches.attribute(stages.Traced, "lojax", lower_results)
jax_patches.attribute(stages.Traced, "out_info", lower_results)
if _is_jax_012:
    jax_patches.attribute(pjit, "pjit_check_aval_sharding", check_shardings)
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
