"""The private JAX names of high types: only a program that has those imports them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import (
    ad_checkpoint,
    ad_util,
    api,
    core,
    custom_derivatives,
    dtypes,
    pjit,
    source_info_util,
    stages,
    tree_util,
)
from jax._src import hijax as jax_hijax
from jax._src import pmap as jax_pmap
from jax._src import shard_map as jax_shard_map
from jax._src.hijax import HiType, MappingSpec, register_hitype
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax, parallel
from jax._src.lax.control_flow import conditionals, loops
from jax._src.linear_util import StoreException
from jax._src.sharding_impls import UnspecifiedValue as Unspecified
from jax._src.state.types import RefEffect
from jax._src.tree_util import tracing_registry
from jax._src.util import weakref_lru_cache

from .primitives import Primitive
from .tracing import Tracer

try:
    from jax._src.flattree import FlatTree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

__all__ = [
    "FlatTree",
    "GradAccum",
    "HiPrim",
    "HiType",
    "MappingSpec",
    "RefEffect",
    "StoreException",
    "Unspecified",
    "ValAccum",
    "Zero",
    "ad_checkpoint",
    "api",
    "aval_property",
    "batching",
    "call_jvp_rule",
    "call_transpose_rule",
    "conditionals",
    "copy_shaped_array",
    "core",
    "custom_derivatives",
    "custom_lin",
    "define_high_primitive",
    "dtypes",
    "high_primitive",
    "holds_tracers",
    "instantiate_zeros",
    "jax_pmap",
    "jax_shard_map",
    "jit_with_options",
    "key_of",
    "lax",
    "loops",
    "no_effects",
    "options_of",
    "parallel",
    "pe",
    "pjit",
    "places_results",
    "print_as",
    "register_hitype",
    "stages",
    "to_staged",
    "tracing_registry",
    "tree_util",
    "weakref_lru_cache",
    "with_further_result",
]

GradAccum = ad.GradAccum
ValAccum = ad.ValAccum
Zero = ad_util.Zero
instantiate_zeros = ad.instantiate_zeros
# JAX 0.12 renamed VJPHiPrimitive.
HiPrim: Any = getattr(jax_hijax, "HiPrim", None) or jax_hijax.VJPHiPrimitive
custom_lin = ad.custom_lin_p
aval_property = core.aval_property
jit_with_options = pjit._cpp_pjit
no_effects = core.no_effects


def options_of(jitted: Any) -> Any:
    """Return the options of a function that `jax.jit` made, as `jit_with_options` takes them."""
    return jitted._jit_info


def key_of(options: Any) -> tuple[Any, ...]:
    """Return a key that is equal for equal options of `jax.jit`, which JAX compares by identity."""
    compiler_options = repr(options.compiler_options_kvs)  # their values may be unhashable
    return tuple(
        options._replace(
            fun_sourceinfo="", fun_signature=None, compiler_options_kvs=compiler_options
        )
    )


def places_results(options: Any) -> bool:
    """Return whether options of `jax.jit` have shardings or layouts for the results."""
    shardings, layouts = options.out_shardings_leaves, options.out_layouts_leaves
    is_given = any(not isinstance(x, Unspecified) for x in shardings)
    return is_given or any(x is not None for x in layouts)


def with_further_result(options: Any) -> Any:
    """Return options of `jax.jit` for a function that returns a pair: the results, and a tree.

    `out_shardings` apply to the results. JAX chooses the shardings of the tree.
    """

    def pair(name: str) -> dict[str, Any]:
        treedef, leaves = getattr(options, f"{name}_treedef"), getattr(options, f"{name}_leaves")
        tree = treedef.unflatten(leaves), None
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
        return {f"{name}_treedef": treedef, f"{name}_leaves": tuple(leaves)}

    return options._replace(**pair("out_shardings"), **pair("out_layouts"))


def copy_shaped_array(aval: Any, model: jax.core.ShapedArray) -> None:
    """Gives an abstract value that is a ShapedArray by inheritance the attributes of one."""
    for name in jax.core.ShapedArray.__slots__:
        if name != "__weakref__":
            object.__setattr__(aval, name, getattr(model, name))


def high_primitive(name: str) -> Primitive:
    """A primitive of several results that lives above lowering."""
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
    """Sets what JAX asks of such a primitive. Where it is lowered, `run` is in its place."""
    vars(primitive)["to_lojax"] = run
    primitive.def_effectful_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.fancy_transposes[primitive] = transpose

    def batcher(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
        named = axis.name is not None and axis.name is not core.no_axis_name
        return batch(axis.size, axis.name if named else None, values, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batcher


def print_as(
    primitive: Primitive, named: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    """Has jaxprs show a primitive under the name and with the parameters that `named` gives."""

    def rule(eqn: Any, context: Any, settings: Any) -> Any:
        name, params = named(eqn.params)
        eqn = eqn.replace(primitive=Primitive(name), params=params)
        return core._pp_eqn(eqn, context, settings)

    core.pp_eqn_rules[primitive] = rule


def call_jvp_rule(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """What JAX's own derivative rule of a primitive gives: results and their tangents."""
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
    """Runs JAX's own transpose rule of a primitive: linear operands are accumulators."""
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
    """Whether any of the leaves is traced."""
    return any(isinstance(x, Tracer) for x in leaves)


def to_staged(x: Any) -> Any:
    """A result as a tracer where it is lowered, which JAX < 0.12 wants of a constant too."""
    trace = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and hasattr(x, "dtype") and isinstance(x, jax.Array):
        return trace.to_jaxpr_tracer(x, source_info_util.current())
    return x
