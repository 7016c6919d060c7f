"""Private names of JAX for high types, and helper functions that use them.

A high type is a type of values in jaxprs that JAX replaces by arrays before lowering. Only programs
with high types import this module.
"""

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
    """Return the `jax.jit` options of a jitted function, as `jit_with_options` takes them."""
    return jitted._jit_info


def get_options_key(options: Any) -> tuple[Any, ...]:
    """Return a hashable key of `jax.jit` options, equal for equal options of two functions.

    JAX compares the options by identity.
    """
    compiler_options = repr(options.compiler_options_kvs)  # their values may be unhashable
    return tuple(
        options._replace(
            fun_sourceinfo="", fun_signature=None, compiler_options_kvs=compiler_options
        )
    )


def has_result_placement(options: Any) -> bool:
    """Return whether options of `jax.jit` set shardings or layouts of the results."""
    sets_shardings = any(not isinstance(x, Unspecified) for x in options.out_shardings_leaves)
    return sets_shardings or any(x is not None for x in options.out_layouts_leaves)


def extend_options_to_pair(options: Any) -> Any:
    """Adapt options of `jax.jit` to a function that returns `(result, extra)` instead of `result`.

    `out_shardings` and the layouts of results still apply to `result`. JAX chooses the shardings
    and layouts of `extra`.
    """

    def extend(name: str) -> dict[str, Any]:
        treedef, leaves = getattr(options, f"{name}_treedef"), getattr(options, f"{name}_leaves")
        pair = treedef.unflatten(leaves), None
        leaves, treedef = jax.tree.flatten(pair, is_leaf=lambda x: x is None)
        return {f"{name}_treedef": treedef, f"{name}_leaves": tuple(leaves)}

    return options._replace(**extend("out_shardings"), **extend("out_layouts"))


def copy_shaped_array(aval: Any, model: jax.core.ShapedArray) -> None:
    """Set every attribute of `aval`, an instance of a subclass of ShapedArray, as in `model`."""
    for name in jax.core.ShapedArray.__slots__:
        if name != "__weakref__":
            object.__setattr__(aval, name, getattr(model, name))


def make_high_primitive(name: str) -> Primitive:
    """Return a new primitive without rules, which takes high types and returns a list."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    # JAX replaces a primitive for which `is_high` returns True before it lowers a program.
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
    """Set the rules of a primitive that `make_high_primitive` returned.

    The rules take and return the same as JAX's rules. The exceptions are:

    - `run`: called instead of the primitive before JAX lowers a program.
    - `batch`: called with `(axis_size, axis_name, values, dims, **params)`.
    """
    vars(primitive)["to_lojax"] = run
    primitive.def_effectful_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.fancy_transposes[primitive] = transpose

    def batcher(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
        name = None if axis.name is core.no_axis_name else axis.name
        return batch(axis.size, name, values, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batcher


def set_printed_form(
    primitive: Primitive, get_form: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    """Print equations of a primitive in jaxprs under another name and with other parameters.

    `get_form` takes the parameters of an equation, and returns the name and the parameters to
    print.
    """

    def print_equation(eqn: Any, context: Any, settings: Any) -> Any:
        name, params = get_form(eqn.params)
        eqn = eqn.replace(primitive=Primitive(name), params=params)
        return core._pp_eqn(eqn, context, settings)

    core.pp_eqn_rules[primitive] = print_equation


def call_jvp_rule(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Call JAX's derivative rule of a primitive. Return lists of results and of their tangents."""
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
    """Call JAX's transpose rule of a primitive, and accumulate the cotangents of linear operands.

    `cotangents` are the cotangents of the results. In `operands`, each linear operand is replaced
    by an accumulator (`GradAccum`), to which the rule adds the cotangent of the operand.
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
    return any(isinstance(x, Tracer) for x in leaves)


def stage_constant(x: Any) -> Any:
    """Return a concrete array as a tracer, if a jaxpr is being traced. Otherwise return `x`.

    While a jaxpr is traced, JAX < 0.12 rejects a rule that returns a concrete array.
    """
    trace = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and hasattr(x, "dtype") and isinstance(x, jax.Array):
        return trace.to_jaxpr_tracer(x, source_info_util.current())
    return x
