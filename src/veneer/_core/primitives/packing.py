"""The rules of `pack`, the primitive that builds a value from leaves inside a program.

Outside `implicit`, a program that contains `pack` can be traced, differentiated and mapped by vmap,
but not run. The derivative of `pack` is the derivative of the dense array with respect to the
leaves.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..._jax.tracing import abstract_array
from ..nesting import compose_value, outside_implicit_error, pack
from ..policy import report_materialised
from ..rules import add_rule
from ..trace import ImplicitTrace
from ..value import describe_operands, make_dense
from .custom_functions import dense_function_of
from .leaves import can_stack_leaves, is_label


def _rule(*leaves: Any, structure: Any) -> Any:
    return compose_value(jax.tree.unflatten(structure, leaves), ImplicitTrace.run)


@pack.def_abstract_eval
def _abstract_eval(*avals: Any, structure: Any) -> Any:
    return jax.tree.unflatten(structure, map(abstract_array, avals)).aval()


def _jvp(leaves: Sequence[Any], tangents: Sequence[Any], *, structure: Any) -> Any:
    out = pack.bind(*leaves, structure=structure)
    is_nonzero = [type(t) is not ad.Zero for t in tangents]
    value = jax.tree.unflatten(structure, leaves)
    if not is_label(value):  # the dense array of a label is its leaf, so nothing is materialized
        why = "its derivative is that of the dense array"
        report_materialised(pack.name, lambda: describe_operands([value]), why)
    dense, primals = dense_function_of(value, is_nonzero)
    nonzero_tangents = [t for t in tangents if type(t) is not ad.Zero]
    _, out_tangent = jax.jvp(dense, primals, nonzero_tangents)
    return out, out_tangent


def _batch(leaves: Sequence[Any], dims: Sequence[Any], *, structure: Any) -> Any:
    """Pack leaves with a batch axis. If they cannot be stacked, vmap the dense array instead."""
    size = next(x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None)

    def slice_of(x: Any, d: int | None) -> Any:
        shape = x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def move_batch_axis_to_front(x: Any, d: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

    if can_stack_leaves(jax.tree.unflatten(structure, map(slice_of, leaves, dims))):
        return pack.bind(*map(move_batch_axis_to_front, leaves, dims), structure=structure), 0
    materialize = lambda *leaves: make_dense(pack, [jax.tree.unflatten(structure, leaves)])[0]
    return jax.vmap(materialize, in_axes=tuple(dims))(*leaves), 0


@pack.def_impl
def _raise_outside_implicit(*leaves: Any, structure: Any) -> Any:
    raise outside_implicit_error(jax.tree.unflatten(structure, leaves))


def _lower(ctx: Any, *leaves: Any, structure: Any) -> Any:
    del leaves
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_in]
    _raise_outside_implicit(*abstract, structure=structure)


add_rule(_rule, [pack], structural=True)
ad.primitive_jvps[pack] = _jvp
batching.primitive_batchers[pack] = _batch
mlir.register_lowering(pack, _lower)
