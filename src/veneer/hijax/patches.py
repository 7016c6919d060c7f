"""What the mode of high types changes in JAX, Equinox and Flax: all of it, in the list at the end.

Each function makes what takes the place of one of JAX's, which it is given; those for results,
loops and `shard_map` are in their modules. `mode` sets what is listed, and restores it.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import jax

from .._core.surface import operands
from .._core.surface.array import ImplicitArray
from .._core.surface.operands import OperandConversion
from .._core.value import Value
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
from .collectives import Trees
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
from .frameworks import partition_by_tangents, with_values_as_arrays
from .high import apply
from .jit import catch_structure_changes, run_jitted
from .mapping import (
    axes_of_arrays,
    broadcast_values,
    check_pmap,
    from_mapped,
    is_mapped_whole,
    move_axes,
    refuse_derivatives,
    scan_arrays,
    scan_slices,
    select_leaves,
    to_mapped,
)
from .mode import is_enabled, jax_patches
from .operations import Apply, Parameters
from .results import check_shardings, of_leaves, run_jit
from .shard_map import bind_leaves, brought_in, refuse_by_leaf, take_dense_specs
from .types import (
    HighType,
    TangentType,
    canonical,
    no_array,
    operand_of,
    type_of,
)
from .values import (
    value_of,
)

# Values as operands.


class _HighConversion:
    """How JAX functions take an implicit array as an operand, in place of `OperandConversion`."""

    def __init__(self, conversion: OperandConversion):
        self._conversion = conversion

    convert = staticmethod(operand_of)

    def type_of(self, value: Value) -> Any:
        is_array = isinstance(value, ImplicitArray)
        return type_of(value) if is_array else self._conversion.type_of(value)

    def jax_array(self, value: Value) -> Callable[[], Any]:
        return partial(canonical, value) if is_enabled() else self._conversion.jax_array(value)


def _asarray(asarray: Callable) -> Callable:
    """JAX's functions of `jax.lax` that ask for an array, of an operand, do it so."""
    return lambda x: asarray(canonical(x) if isinstance(x, Value) and is_enabled() else x)


def _bind(bind: Any) -> Callable:
    """Wrap `Primitive.bind_with_trace`, which JAX calls for each operation of each program."""

    def bind_values(self: Any, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            args = brought_in(trace, args)
        if self is custom_lin:
            if trace.requires_low:  # JAX evaluates it only in order to raise an error
                return self.impl(*args, **params)
            return trace.process_primitive(self, args, params)
        if self.name in _REF_PRIMITIVES and HighType in map(type, avals):
            raise _ref_error(self.name, *avals)
        if self.name in _HIGH_PRIMITIVES:
            return bind_high(self, trace, args, avals, params)
        if TangentType in map(type, avals):
            raise no_array(self.name, *avals)
        with set_current_trace(trace):
            out = apply(Apply(self, Parameters(params)), *args)
            if is_eager():
                out = list(map(value_of, out))
            return out if self.multiple_results else out[0]

    def bind_high(self: Any, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        if self is empty_ref and type(params["ty"]) is HighType:
            raise _ref_error("empty_ref", params["ty"])
        return bind(self, trace, args, avals, params)

    def bind_any(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:
            if type(aval) is HighType or type(aval) is TangentType:
                return bind_values(self, trace, args, avals, params)
        if self.is_high(*avals, **params):
            return bind_high(self, trace, args, avals, params)
        if not is_inlined:
            return bind(self, trace, args, avals, params)
        return trace.process_primitive(self, args, params)

    # In JAX 0.10.2 to 0.12.0, `bind` does no more than the last lines of `bind_any`. A call of
    # `bind` would double the cost of `bind_any`.
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


def _lower_call(*args: Any, call_jaxpr: Any) -> list[Any]:
    """Lower the call in which a checkpoint evaluates what all steps of a scan have in common."""
    return jaxpr_as_fun(call_jaxpr)(*args)


def _lower_checkpoint(*args: Any, jaxpr: Any, **params: Any) -> list[Any]:
    """Lower a checkpoint. JAX 0.10.2 to 0.12.0 returns the leaves of high results."""
    closed: Any = pe.close_jaxpr(jaxpr) if hasattr(pe, "close_jaxpr") else jaxpr  # JAX < 0.12
    lowered: Any = pe.lower_jaxpr2(closed)
    pairs = zip(jaxpr.invars, args, strict=True)
    leaves = [leaf for v, x in pairs for leaf in v.aval.lower_val(x)]
    low_jaxpr = pe.convert_constvars_jaxpr(getattr(lowered, "jaxpr", lowered))
    remat = find_primitive("remat")
    out = iter(remat.bind(*lowered.consts, *leaves, jaxpr=low_jaxpr, **params))
    avals = [v.aval for v in jaxpr.outvars]
    results = [aval.raise_val(*islice(out, len(aval.lo_ty()))) for aval in avals]
    is_result = is_eager() and not params["differentiated"]  # else residuals can be among them
    return list(map(value_of, results)) if is_result else results


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
jax_patches.attribute(pjit, "_run_python_pjit", run_jit, run_jitted)
jax_patches.attribute(stages.Traced, "lojax", of_leaves)
jax_patches.attribute(stages.Traced, "out_info", of_leaves)
if _is_jax_012:
    jax_patches.attribute(pjit, "pjit_check_aval_sharding", check_shardings)
else:
    jax_patches.attribute(find_primitive("closed_call"), "to_lojax", lambda _: _lower_call)
jax_patches.attribute(find_primitive("remat"), "to_lojax", lambda _: _lower_checkpoint)
# Mapped functions.
jax_patches.attribute(batching, "is_vmappable", is_mapped_whole)
jax_patches.attribute(batching, "to_elt", to_mapped)
jax_patches.attribute(batching, "from_elt", from_mapped)
jax_patches.attribute(batching, "broadcast", broadcast_values)
jax_patches.attribute(batching, "moveaxis", move_axes)
jax_patches.attribute(conditionals, "_bcast_select", select_leaves)
jax_patches.attribute(conditionals, "_bcast_select_n", select_leaves)
jax_patches.attribute(api, "flatten_axes", axes_of_arrays)
jax_patches.attribute(jax_pmap, "_cached_shard_map", check_pmap)
# Loops and branches.
jax_patches.boundary(loops.scan, unify_carry, scan_slices, refuse_derivatives)
jax_patches.boundary(loops.while_loop, unify_carry, refuse_derivatives)
jax_patches.boundary(loops.map, scan_slices, refuse_derivatives)
jax_patches.boundary(loops.associative_scan, scan_arrays, refuse_derivatives)
jax_patches.boundary(conditionals.cond, unify_branches, refuse_derivatives)
jax_patches.attribute(conditionals, "_switch_internal", unify_branches, refuse_derivatives)
jax_patches.attribute(conditionals, "_check_branch_outputs", check_branches)
# Devices.
jax_patches.attribute(parallel, "tree_util", Trees)
jax_patches.attribute(jax_shard_map, "_shard_map", take_dense_specs)
jax_patches.attribute(jax_shard_map, "broadcast_prefix", refuse_by_leaf)
jax_patches.attribute(type(find_primitive("shard_map")), "bind_with_trace", bind_leaves)
# Frameworks.
jax_patches.attribute_if_imported("equinox._ad", None, "partition", partition_by_tangents)
jax_patches.attribute_if_imported("flax.core.scope", "Scope", "get_variable", with_values_as_arrays)
