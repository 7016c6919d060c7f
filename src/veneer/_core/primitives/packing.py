"""The rules of `pack`, by which a value that a function builds is an operand of its program.

Its derivative is that of the dense array by the leaves; mapped, it makes a batch of values.
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
from .batch_axes import takes_batch_axis
from .custom_derivatives import materialise_along
from .labels import is_label


def _pack(*leaves: Any, structure: Any) -> Any:
    return compose_value(jax.tree.unflatten(structure, leaves), ImplicitTrace.run)


add_rule(_pack, [pack], structural=True)


def _aval(*avals: Any, structure: Any) -> Any:
    return jax.tree.unflatten(structure, map(abstract_array, avals)).aval()


def _abstract(structure: Any, arrays: Sequence[Any]) -> Any:
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return jax.tree.unflatten(structure, abstract)


def _jvp(leaves: Sequence[Any], tangents: Sequence[Any], *, structure: Any) -> Any:
    out = pack.bind(*leaves, structure=structure)
    moving = [type(t) is not ad.Zero for t in tangents]
    value = jax.tree.unflatten(structure, leaves)
    if not is_label(value):
        why = "its derivative is that of the dense array"
        report_materialised(pack.name, lambda: describe_operands([value]), why)
    dense, primals = materialise_along(value, moving)
    moves = [t for t, m in zip(tangents, moving, strict=True) if m]
    return out, jax.jvp(dense, primals, moves)[1]


def _batch(leaves: Sequence[Any], dims: Sequence[Any], *, structure: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None)
    one = [x if d is None else _without(x, d) for x, d in zip(leaves, dims, strict=True)]
    if not takes_batch_axis(_abstract(structure, one)):
        dense = lambda *leaves: make_dense(pack, [jax.tree.unflatten(structure, leaves)])[0]
        return jax.vmap(dense, in_axes=tuple(dims))(*leaves), 0
    stack = lambda x, d: (
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
    )
    return pack.bind(*map(stack, leaves, dims), structure=structure), 0


def _without(x: Any, axis: int) -> Any:
    return jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)


def _refuse(*leaves: Any, structure: Any) -> Any:
    raise outside_implicit_error(jax.tree.unflatten(structure, leaves))


def _refuse_lowering(ctx: Any, *leaves: Any, structure: Any) -> Any:
    del leaves
    raise outside_implicit_error(_abstract(structure, ctx.avals_in))


pack.def_abstract_eval(_aval)
pack.def_impl(_refuse)
ad.primitive_jvps[pack] = _jvp
batching.primitive_batchers[pack] = _batch
mlir.register_lowering(pack, _refuse_lowering)
