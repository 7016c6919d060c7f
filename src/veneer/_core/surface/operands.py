"""Implicit values that JAX functions get as operands although `implicit` has not wrapped them.

`implicit` wraps the implicit arrays that a function takes or captures. A program may use other
values: it builds them (by a constructor, `vn.tree.combine`, `nnx.merge`), or finds them in a
container of its module. Such a value is a plain pytree until a JAX function takes it as an array:

- Directly under `implicit`, the value is wrapped like an argument.
- In another transformation under `implicit` (`jax.grad`, `vmap`, `jit`, a loop), the primitive
  `pack` is bound with its leaves. The rule of `pack` builds the value in the trace of `implicit`.
  Until then, the program can be traced, differentiated and mapped by vmap, but not run. The
  derivative of `pack` is the derivative of the dense array with respect to the leaves.
- Everywhere else, `OutsideImplicitError` is raised. The value is never materialized silently.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..._jax.frames import is_read_by_operator
from ..._jax.tracing import abstract_array, current_trace, is_eager
from ..errors import CHECK_BUGS, reject_derivatives, reject_refs_and_float0
from ..nesting import as_tracer, compose_value, enclosing_implicit, outside_implicit_error, pack
from ..policy import report_materialised
from ..primitives.custom_functions import dense_function_of
from ..primitives.leaves import can_stack_leaves, dense_shape_of, is_label, run_checks
from ..rules import add_rule
from ..trace import ImplicitTrace
from ..value import (
    Value,
    describe_operands,
    has_all_leaves,
    is_part,
    is_value,
    make_dense,
)


class OperandConversion:
    """The conversion to a tracer, for an implicit array that a JAX function gets as an operand.

    This class converts under `implicit` only. While `vn.hijax` is enabled, it sets an instance of
    another class as `conversion`.
    """

    def convert(self, value: Value) -> Any:
        """Return a tracer for an implicit array that is an operand of a JAX function.

        Raise `OutsideImplicitError` outside `implicit`. Raise `TypeError` if leaves are missing or
        hold derivatives, so that `value` does not represent an array.
        """
        _check_operand(value)
        return as_tracer(value)

    def type_of(self, value: Value) -> Any:
        """Return `jax.typeof` of an implicit array. Raise the same errors as `convert`."""
        _check_operand(value)
        return value.aval()

    def jax_array(self, value: Value) -> Callable[[], Any]:
        """Return the attribute `__jax_array__` of an implicit array, or raise `AttributeError`."""
        if is_read_by_operator():
            # Without the attribute, an operator of `jax.Array` returns NotImplemented. Then Python
            # calls the reflected operator of the value.
            raise AttributeError("__jax_array__")
        return partial(self.convert, value)


#: The conversion in use.
conversion = OperandConversion()


def _check_operand(value: Value) -> None:
    check_is_array(value)
    if enclosing_implicit(current_trace()) is None:
        raise outside_implicit_error(value)


def check_is_array(value: Value) -> None:
    """Raise an error if an implicit array does not represent an array.

    That is, if leaves are missing, are derivatives, or do not fit together.
    """
    reject_derivatives(value)
    if not has_all_leaves(value):
        raise TypeError(
            f"{value!r} has None instead of some arrays. If it is one part of a partitioned tree, "
            "combine the parts with vn.tree.combine before you compute with it."
        )
    if not is_eager():
        _check_leaves_fit_together(value)


def _check_leaves_fit_together(value: Value) -> None:
    """Run the checks of the class (`__post_init__`) on a copy with abstract leaves.

    A transformation such as `jax.vmap` may have changed each leaf. Use a copy, because a check may
    assign fields.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=is_part(value))
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") and not is_value(x) for x in leaves):
        return
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    with suppress(TypeError):  # The cache cannot hash some metadata.
        if dense_shape_of(tree, avals) is not None:  # The checks have passed, now or before.
            return
    try:  # Run the checks again, to raise their error.
        with suppress(*CHECK_BUGS):
            jax.eval_shape(partial(run_checks, tree), *avals)
    except Exception as error:
        reject_refs_and_float0([value], error)
        error.add_note(
            f"This {type(value).__name__} may have been mapped leaf by leaf. To map the array, "
            "call the function that takes it as an argument under vn.implicit."
        )
        raise


# The rules of `pack`, which builds a value from its leaves.


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
    """Return the result of `pack` for batched leaves, and the batch axis of the result, 0.

    This is the batching rule of `pack`, which builds an implicit array from its leaves. `dims` has
    the batch axis of each leaf. If leaves with a batch axis represent no batch of arrays, the
    result is a stack of dense arrays.
    """
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


_build = lambda *leaves, structure: compose_value(
    jax.tree.unflatten(structure, leaves), ImplicitTrace.run
)
add_rule(_build, [pack], structural=True)
ad.primitive_jvps[pack] = _jvp
batching.primitive_batchers[pack] = _batch


@partial(mlir.register_lowering, pack)
def _lower(ctx: Any, *leaves: Any, structure: Any) -> Any:
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_in]
    _raise_outside_implicit(*abstract, structure=structure)
