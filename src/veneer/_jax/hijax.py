"""Private names and helpers of JAX for high types. Only programs with high types import them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# Redundant aliases mark the names that veneer.hijax imports from here.
from jax._src import ad_checkpoint as ad_checkpoint
from jax._src import api as api
from jax._src import core as core
from jax._src import custom_derivatives as custom_derivatives
from jax._src import dtypes as dtypes
from jax._src import hijax as jax_hijax
from jax._src import pjit as pjit
from jax._src import pmap as jax_pmap  # noqa: F401
from jax._src import shard_map as jax_shard_map  # noqa: F401
from jax._src import source_info_util
from jax._src import stages as stages
from jax._src import tree_util as tree_util
from jax._src.ad_util import Zero as Zero
from jax._src.hijax import HiType as HiType
from jax._src.hijax import MappingSpec as MappingSpec
from jax._src.hijax import register_hitype as register_hitype
from jax._src.interpreters import ad
from jax._src.interpreters import batching as batching
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax as lax
from jax._src.lax import parallel as parallel
from jax._src.lax.control_flow import conditionals as conditionals
from jax._src.lax.control_flow import loops as loops
from jax._src.linear_util import StoreException as StoreException
from jax._src.sharding_impls import UnspecifiedValue as Unspecified
from jax._src.state.types import RefEffect as RefEffect
from jax._src.tree_util import tracing_registry as tracing_registry
from jax._src.util import weakref_lru_cache as weakref_lru_cache

from .primitives import Primitive
from .tracing import Tracer

try:
    from jax._src.flattree import FlatTree as FlatTree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree as FlatTree

GradAccum = ad.GradAccum
ValAccum = ad.ValAccum
instantiate_zeros = ad.instantiate_zeros
custom_lin = ad.custom_lin_p
aval_property = core.aval_property
no_effects = core.no_effects
jit_with_options = pjit._cpp_pjit
# JAX 0.12 renamed VJPHiPrimitive.
HiPrim: Any = getattr(jax_hijax, "HiPrim", None) or jax_hijax.VJPHiPrimitive


def get_jit_options(jitted: Any) -> Any:
    """Return the options of a jitted function, as `jit_with_options` takes them."""
    return jitted._jit_info


def get_options_key(options: Any) -> tuple[Any, ...]:
    """Return a key that is equal for equal options of `jax.jit`, which JAX compares by identity."""
    compiler_options = repr(options.compiler_options_kvs)  # their values may be unhashable
    return tuple(
        options._replace(
            fun_sourceinfo="", fun_signature=None, compiler_options_kvs=compiler_options
        )
    )


def has_result_placement(options: Any) -> bool:
    """Return whether options of `jax.jit` set shardings or layouts of the results."""
    shardings, layouts = options.out_shardings_leaves, options.out_layouts_leaves
    is_given = any(not isinstance(x, Unspecified) for x in shardings)
    return is_given or any(x is not None for x in layouts)


def extend_options_to_pair(options: Any) -> Any:
    """Return options of `jax.jit` for a function that returns its former results and a second tree.

    `out_shardings` apply to the former results. JAX chooses the shardings of the second tree.
    """

    def pair(name: str) -> dict[str, Any]:
        treedef, leaves = getattr(options, f"{name}_treedef"), getattr(options, f"{name}_leaves")
        tree = treedef.unflatten(leaves), None
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
        return {f"{name}_treedef": treedef, f"{name}_leaves": tuple(leaves)}

    return options._replace(**pair("out_shardings"), **pair("out_layouts"))


def copy_shaped_array(aval: Any, model: jax.core.ShapedArray) -> None:
    """Copy the attributes of `model` to an instance of a subclass of ShapedArray."""
    for name in jax.core.ShapedArray.__slots__:
        if name != "__weakref__":
            object.__setattr__(aval, name, getattr(model, name))


def make_high_primitive(name: str) -> Primitive:
    """Return a primitive with several results that JAX replaces before it lowers a program."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    vars(primitive)["is_high"] = lambda *avals, **params: True
    return primitive


def define_high_primitive(
    primitive: Primitive,
    *,
    run: Callable[..., list[Any]],
    abstract_eval: Callable[..., tuple[list[Any], Any]],
    jvp: Callable[..., tuple[list[Any], list[Any]]],
    transpose: Callable[..., None],
    batch: Callable[..., tuple[list[Any], list[Any]]],
) -> None:
    """Set the rules of a high primitive. JAX replaces the primitive by `run` before lowering."""
    vars(primitive)["to_lojax"] = run
    primitive.def_effectful_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.fancy_transposes[primitive] = transpose

    def batcher(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
        named = axis.name is not None and axis.name is not core.no_axis_name
        return batch(axis.size, axis.name if named else None, values, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batcher


def set_printed_form(
    primitive: Primitive, get_form: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    """Set a function from the parameters of a primitive to the name and parameters to print."""

    def rule(eqn: Any, context: Any, settings: Any) -> Any:
        name, params = get_form(eqn.params)
        eqn = eqn.replace(primitive=Primitive(name), params=params)
        return core._pp_eqn(eqn, context, settings)

    core.pp_eqn_rules[primitive] = rule


def call_jvp_rule(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Call JAX's derivative rule of a primitive. Return the results and their tangents."""
    rule = ad.primitive_jvps.get(primitive)
    if rule is None:
        raise NotImplementedError(f"JAX has no derivative rule for {primitive.name}")
    out, out_tangents = rule(primals, tangents, **params)
    if primitive.multiple_results:
        return list(out), list(out_tangents)
    return [out], [out_tangents]


def call_transpose_rule(
    primitive: Primitive, cotangents: Sequence[Any], operands: Sequence[Any], params: dict[str, Any]
) -> None:
    """Call JAX's transpose rule of a primitive.

    Linear operands are accumulators (`GradAccum`), and the rule adds their cotangents to them.
    """
    cts: Any = list(cotangents) if primitive.multiple_results else cotangents[0]
    if primitive in ad.fancy_transposes:
        ad.fancy_transposes[primitive](cts, *operands, **params)
        return
    rule = ad.get_primitive_transpose(primitive)
    undefined = [ad.UndefinedPrimal(x.aval) if isinstance(x, GradAccum) else x for x in operands]
    for x, ct in zip(operands, rule(cts, *undefined, **params), strict=True):
        if isinstance(x, GradAccum):
            x.accum(ct)


def holds_tracers(leaves: Sequence[Any]) -> bool:
    """Return whether any of the leaves is a tracer."""
    return any(isinstance(x, Tracer) for x in leaves)


def stage_constant(x: Any) -> Any:
    """Return a result as a tracer of the current jaxpr. JAX < 0.12 needs this for constants too."""
    trace = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and hasattr(x, "dtype") and isinstance(x, jax.Array):
        return trace.to_jaxpr_tracer(x, source_info_util.current())
    return x
