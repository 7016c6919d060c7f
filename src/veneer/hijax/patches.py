"""What the mode of high types changes in JAX, Equinox and Flax: all of it, in the list at the end.

Each function makes what takes the place of one of JAX's, which it is given; those for results,
loops and `shard_map` are in their modules. `mode` sets what is listed, and restores it.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import jax

from .._core.primitives.labels import is_label
from .._core.surface.array import ImplicitArray
from .._core.value import Value, is_value
from .._jax.hijax import (
    FlatTree,
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
    tree_util,
)
from .._jax.primitives import Primitive, find_primitive, jaxpr_as_fun
from .._jax.tracing import is_eager, is_read_by_operator, set_current_trace
from .collectives import Trees
from .control_flow import (
    check_branches,
    check_carry,
    trace_branch,
    trace_loop,
    unify_branches,
    unify_carry,
)
from .custom_derivatives import (
    CarryToCheckpoint,
    carry_to_call,
    conform_cotangents,
    conform_results,
    conform_tangents,
    keep_operands,
    leave_out_operands,
)
from .frameworks import partition_by_tangents, with_values_as_arrays, with_way_out
from .high import apply
from .jit import catch_structure_changes, run_jitted
from .mapping import (
    axes_of_arrays,
    broadcast_values,
    by_leaves,
    from_mapped,
    is_mapped_whole,
    made_dense,
    move_axes,
    refuse_derivatives,
    refuse_no_batches,
    refuse_no_stacks,
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
    is_complete,
    is_typed,
    no_array,
    opened,
    operand_of,
    type_of,
    with_dense_tangents,
)
from .values import (
    HighArray,
    Tangent,
    carry_to_jit,
    exposed,
    find_no_fast_path,
    flatten_value,
    mark_mapped,
    marked_cotangents,
    marked_linear,
    marked_tangents,
    value_of,
)

# Values as operands.


def _jax_array(without: property) -> property:
    """The method `__jax_array__` of implicit arrays, by which `jax.numpy` asks for an array."""

    def asked(value: Any) -> Any:
        if is_enabled():
            return partial(canonical, value)
        if is_read_by_operator():
            raise AttributeError("__jax_array__")
        return without.fget(value)  # type: ignore[misc]

    return property(asked)


def _asarray(asarray: Callable) -> Callable:
    """JAX's functions of `jax.lax` that ask for an array, of an operand, do it so."""
    return lambda x: asarray(canonical(x) if isinstance(x, Value) and is_enabled() else x)


def _bind(bind: Any) -> Callable:
    """As little as can be: every primitive is bound so, of programs without high types too."""

    def met(self: Any, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            args = brought_in(trace, args)
        if self is custom_lin:  # is high where it is lowered alone, and raises an error there
            return trace.process_primitive(self, args, params)
        if self.name in _OF_REFERENCES and HighType in map(type, avals):
            raise _no_reference(self.name, *avals)
        if self.name in _TAKE_HIGH_TYPES:
            return bind(self, trace, args, avals, params)
        if TangentType in map(type, avals):
            raise no_array(self.name, *avals)
        with set_current_trace(trace):
            out = apply(Apply(self, Parameters(params)), *args)
            if is_eager():  # the value itself, to who computes at top level
                out = list(map(value_of, out))
            return out if self.multiple_results else out[0]

    def around(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:
            if type(aval) is HighType or type(aval) is TangentType:
                return met(self, trace, args, avals, params)
        return bind(self, trace, args, avals, params)

    def in_place(self: Any, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        for aval in avals:
            if type(aval) is HighType or type(aval) is TangentType:
                return met(self, trace, args, avals, params)
        if self.is_high(*avals, **params) and trace.requires_low:
            with set_current_trace(trace):
                return self.to_lojax(*args, **params)
        return trace.process_primitive(self, args, params)

    # JAX's own is these last lines (0.10.2 to 0.12.0), and calling it costs what the check does.
    return in_place if bind.__code__.co_names == _CALLED_BY_BIND else around


_CALLED_BY_BIND = ("is_high", "requires_low", "set_current_trace", "to_lojax", "process_primitive")


#: Our own primitive, and those of JAX's that take operands of high types themselves.
_TAKE_HIGH_TYPES = frozenset(
    "high jit scan while cond checkpoint remat2 custom_jvp_call custom_vjp_call "
    "remat_opt core_call "
    "closed_call call_hi_primitive call_hi_primitive_linearized program_order run_state ref "
    "new_ref empty_ref get swap freeze accum_grad_in_ref addupdate".split()
)


#: Those of a `jax.Ref`, which holds the tangents of values, and no values.
_OF_REFERENCES = frozenset("new_ref ref swap run_state".split())


def _no_reference(name: str, *types: Any) -> TypeError:
    return TypeError(
        f"{name}({', '.join(map(str, types))}): a jax.Ref cannot hold an implicit "
        "array. Use vn.hijax.Box, a jax.Ref for each leaf, or a jax.Ref of vn.materialise(x)."
    )


def _refuse_empty(is_high: Callable) -> Callable:
    def of_type(*, ty: Any, **params: Any) -> bool:
        if type(ty) is HighType:
            raise _no_reference("empty_ref", ty)
        return is_high(ty=ty, **params)

    return of_type


# Arguments of derivatives.


def _typed_arguments(argnums_partial2: Callable) -> Callable:
    def typed(*args: Any) -> Any:
        function, dynamic = argnums_partial2(*args)
        return function, with_dense_tangents(dynamic)

    return typed


class _Flattening:
    """JAX's functions of flat trees, as `jax.vjp`, `jvp` and `linearize` use them."""

    def __init__(self, flat_trees: Any):
        self._flat_trees = flat_trees

    def flatten(self, tree: Any, *args: Any, **kwargs: Any) -> Any:
        return self._flat_trees.flatten(with_dense_tangents(tree), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat_trees, name)


# Jacobians.

#: Names what is made dense for one; it is never bound.
_JACOBIAN = Primitive("jacobian")


def _pull_to_leaves(vjp: Callable) -> Callable:
    """JAX's `vjp` as `jax.grad` and `jax.jacrev` use it."""

    def vjp_of_leaves(function: Callable, *primals: Any, has_aux: bool = False, **kw: Any) -> Any:
        out = vjp(_to_leaves(function, has_aux), *primals, has_aux=has_aux, **kw)
        if not (has_aux and is_enabled()):
            return out
        # What a function gives besides is the user's: trees of leaves, where it is traced too.
        *out, aux = out
        return (*out, jax.tree.map(lambda x: opened(exposed(x)), aux))

    return vjp_of_leaves


def _map_by_leaves(vmap: Callable) -> Callable:
    """JAX's `vmap` as its Jacobians use it, with tangents for arguments and results."""

    def vmap_of_any(function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, partial) and function.func is api._jvp:
            of, *primals = function.args
            of = _to_leaves(of, function.keywords["has_aux"])
            function = partial(function.func, of, *primals, **function.keywords)
        elif not isinstance(function, api.VJP):
            return vmap(function, *args, **kwargs)

        def one(*tangents: Any) -> Any:
            with by_leaves(False):
                return function(*tangents)

        mapped = vmap(one, *args, **kwargs)

        def of_leaves(*tangents: Any) -> Any:
            with by_leaves(True):
                return mapped(*tangents)

        return of_leaves

    return vmap_of_any


def _to_leaves(function: Callable, has_aux: bool) -> Callable:
    """A function whose Jacobian is taken: its results are arrays, each with an axis for itself."""

    def arrays_of(*args: Any) -> Any:
        out = function(*args)
        if not is_enabled():
            return out
        if has_aux:
            return jax.tree.map(_for_jacobian, out[0], is_leaf=is_value), *out[1:]
        return jax.tree.map(_for_jacobian, out, is_leaf=is_value)

    return arrays_of


def _for_jacobian(x: Any) -> Any:
    x = exposed(x)
    if not is_typed(x) and not (isinstance(x, Value) and is_complete(x)):
        return x
    if (x.aval.cls if is_typed(x) else x).dense_tangent:
        return made_dense(_JACOBIAN, x)
    if not x.shape and not is_label(opened(x)):  # of grad, too
        return made_dense(_JACOBIAN, x)
    leaves, treedef = flatten_value(opened(x))
    return jax.tree.unflatten(treedef, list(map(_for_jacobian, leaves)))


# Results.


_STANDING_FOR_VALUES = {HighArray, Tangent}


def _unflatten_values(unflatten: Callable) -> Callable:
    def unflatten_values(self: Any) -> Any:
        stand_for_values = not _STANDING_FOR_VALUES.isdisjoint(map(type, self.vals))
        return unflatten(self.map(exposed) if stand_for_values else self)

    return unflatten_values


def _unflatten_with(shown: Callable[[Any], Any]) -> Callable:
    return lambda unflatten: lambda treedef, leaves: unflatten(treedef, map(shown, leaves))


def _exposed_results(function: Callable) -> Callable:
    return lambda *args, **kwargs: jax.tree.map(exposed, function(*args, **kwargs))


# Loops, branches and checkpoints.


def _scan_length(infer: Callable) -> Callable:
    dense = lambda aval: aval.dense() if type(aval) is HighType else aval
    return lambda xs, avals, length: infer(xs, list(map(dense, avals)), length)


class _Tracing:
    """JAX's functions that trace, as its loops and branches use them."""

    def __init__(self, tracing: Any, by: Callable):
        self._tracing = tracing
        self.trace_to_jaxpr = partial(by, tracing.trace_to_jaxpr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracing, name)


def _run_called(*args: Any, call_jaxpr: Any) -> list[Any]:
    """A call lowered. A scan within a checkpoint is one, of what is the same in each step."""
    return jaxpr_as_fun(call_jaxpr)(*args)


def _run_checkpoint(*args: Any, jaxpr: Any, **params: Any) -> list[Any]:
    """A checkpoint lowered. JAX's own (0.10.2 to 0.12.0) returns the leaves of high results."""
    closed: Any = pe.close_jaxpr(jaxpr) if hasattr(pe, "close_jaxpr") else jaxpr  # JAX < 0.12
    lowered: Any = pe.lower_jaxpr2(closed)
    pairs = zip(jaxpr.invars, args, strict=True)
    leaves = [leaf for v, x in pairs for leaf in v.aval.lower_val(x)]
    opened = getattr(lowered, "jaxpr", lowered)
    out = iter(
        find_primitive("remat").bind(
            *lowered.consts, *leaves, jaxpr=pe.convert_constvars_jaxpr(opened), **params
        )
    )
    avals = [v.aval for v in jaxpr.outvars]
    return [aval.raise_val(*islice(out, len(aval.lo_ty()))) for aval in avals]


def _has_high_types(*avals: Any, **params: Any) -> bool:
    del params
    return any(aval.is_high for aval in avals)


# The list.

# Values have types, and are operands.
for _cls in (HighArray, Tangent):
    jax_patches.item(core.pytype_aval_mappings, _cls, lambda x: x.aval)
jax_patches.item(core.pytype_aval_mappings, ImplicitArray, type_of)
jax_patches.canonical(ImplicitArray, operand_of)
jax_patches.canonical(HighArray, canonical)
jax_patches.canonical(Tangent, lambda x: x)
jax_patches.attribute(ImplicitArray, "__jax_array__", _jax_array)
jax_patches.attribute(lax, "asarray", _asarray)
jax_patches.attribute(core.Primitive, "bind_with_trace", _bind)
# Derivatives: a value with a dense tangent is one leaf of the arguments.
jax_patches.attribute(api, "argnums_partial2", _typed_arguments)
_trees = "FlatTree" if hasattr(api, "FlatTree") else "ft"  # JAX < 0.12, or not
jax_patches.attribute(api, _trees, _Flattening)
# Jacobians are of leaves, and so is what rules of users are given and give.
jax_patches.attribute(api, "vjp", _pull_to_leaves)
jax_patches.attribute(api, "vmap", _map_by_leaves)
jax_patches.attribute(custom_derivatives, "_flatten_fun_nokwargs", conform_results)
jax_patches.attribute(custom_derivatives, "_flatten_fwd", keep_operands)
jax_patches.attribute(custom_derivatives, "_flatten_bwd", conform_cotangents)
if hasattr(custom_derivatives, "_FlatBwdWithAccums"):  # JAX >= 0.12
    jax_patches.attribute(custom_derivatives, "_FlatBwdWithAccums", leave_out_operands)
jax_patches.attribute(custom_derivatives, "_flatten_jvp", conform_tangents)
# Results that JAX hands to users hold values, and not what stands for them inside.
jax_patches.attribute(FlatTree, "unflatten", _unflatten_values)
jax_patches.attribute(ad_checkpoint, "tree_unflatten", _unflatten_with(value_of))
for _module in (custom_derivatives, api):
    jax_patches.attribute(_module, "tree_unflatten", _unflatten_with(exposed))
for _name in ("_jvp", "_lift_linearized"):
    jax_patches.attribute(api, _name, _exposed_results)
# Derivatives by leaves are known as such, and within rules of users whatever they are given to.
jax_patches.attribute(api.VJP, "__call__", marked_cotangents)
jax_patches.attribute(api, "_jvp", marked_tangents)
jax_patches.attribute(api, "_lift_linearized", marked_linear)
for _module in (tree_util, jax.tree_util):
    jax_patches.attribute(_module, "tree_map", mark_mapped)
jax_patches.attribute(pjit, "_infer_params", carry_to_jit)
jax_patches.attribute(pjit, "_infer_params", catch_structure_changes)
jax_patches.attribute(pjit, "_get_fastpath_data", find_no_fast_path)
jax_patches.attribute(ad_checkpoint, "tracing_registry", CarryToCheckpoint)
for _custom in (jax.custom_jvp, jax.custom_vjp):
    jax_patches.attribute(_custom, "__call__", carry_to_call)
# An update that is none of leaves is refused with the way out.
jax_patches.attribute(tree_util, "_prefix_error", with_way_out)
# Jitted functions give leaves, called or compiled ahead of time.
jax_patches.attribute(pjit, "_run_python_pjit", run_jit)
jax_patches.attribute(pjit, "_run_python_pjit", run_jitted)
jax_patches.attribute(pjit, "pjit_check_aval_sharding", check_shardings)
for _name in ("lojax", "out_info"):
    jax_patches.attribute(stages.Traced, _name, of_leaves)
# vmap, and what else goes over an axis: the values, and their axes, are those of arrays.
jax_patches.attribute(batching, "is_vmappable", is_mapped_whole)
jax_patches.attribute(batching, "to_elt", to_mapped)
jax_patches.attribute(batching, "from_elt", from_mapped)
jax_patches.attribute(batching, "broadcast", broadcast_values)
jax_patches.attribute(batching, "moveaxis", move_axes)
for _name in ("_bcast_select", "_bcast_select_n"):
    jax_patches.attribute(conditionals, _name, select_leaves)
jax_patches.attribute(api, "flatten_axes", axes_of_arrays)
jax_patches.attribute(jax_pmap, "_get_in_axes_flat", refuse_no_batches)
jax_patches.attribute(jax_pmap, "broadcast_prefix", refuse_no_stacks)
jax_patches.attribute(parallel, "tree_util", Trees)
jax_patches.boundary(loops.scan, unify_carry)
jax_patches.boundary(loops.while_loop, unify_carry)
jax_patches.boundary(loops.scan, scan_slices)
jax_patches.boundary(loops.map, scan_slices)
jax_patches.boundary(loops.associative_scan, scan_arrays)
for _loop in (loops.scan, loops.while_loop, loops.map, loops.associative_scan):
    jax_patches.boundary(_loop, refuse_derivatives)
for _branches in (conditionals.cond, conditionals.switch):
    jax_patches.boundary(_branches, refuse_derivatives)
# Loops and branches. JAX infers no length of a scan over high types.
jax_patches.attribute(loops, "_infer_scan_length", _scan_length)
jax_patches.attribute(loops, "pe", lambda tracing: _Tracing(tracing, trace_loop))
jax_patches.attribute(conditionals, "pe", lambda tracing: _Tracing(tracing, trace_branch))
jax_patches.attribute(loops, "_check_carry_type", check_carry)
jax_patches.boundary(conditionals.cond, unify_branches)
jax_patches.boundary(conditionals.switch, unify_branches)
jax_patches.attribute(conditionals, "_switch_internal", unify_branches)
jax_patches.attribute(conditionals, "_check_branch_outputs", check_branches)
jax_patches.attribute(jax_shard_map, "_shard_map", take_dense_specs)
jax_patches.attribute(jax_shard_map, "broadcast_prefix", refuse_by_leaf)
jax_patches.attribute(type(find_primitive("shard_map")), "bind_with_trace", bind_leaves)
jax_patches.attribute(find_primitive("remat"), "to_lojax", lambda _: _run_checkpoint)
jax_patches.attribute(find_primitive("closed_call"), "to_lojax", lambda _: _run_called)
# A custom_vjp that is differentiated forwards, on values: the error that JAX has for arrays.
jax_patches.attribute(custom_lin, "is_high", lambda _: _has_high_types)
jax_patches.attribute(custom_lin, "to_lojax", lambda _: custom_lin.impl)
jax_patches.attribute(find_primitive("empty_ref"), "is_high", _refuse_empty)
# Derivatives of Equinox are by each floating leaf, and Flax linen takes a parameter for an array.
jax_patches.attribute_if_imported("equinox._ad", None, "partition", partition_by_tangents)
jax_patches.attribute_if_imported("flax.core.scope", "Scope", "get_variable", with_values_as_arrays)
