"""Implicit values that JAX functions get as operands although `implicit` has not wrapped them.

`implicit` wraps the implicit arrays that a function takes or captures. A program may use other
values: it builds them (by a constructor, `vn.tree.combine`, `nnx.merge`), or finds them in a
container of its module. Such a value is a plain pytree until a JAX function takes it as an array:

- Directly under `implicit`, the value is wrapped like an argument.
- In another transformation under `implicit` (`jax.grad`, `vmap`, `jit`, a loop), the primitive
  `pack` is bound with its leaves. The rule of `pack` builds the value in the trace of `implicit`.
- Everywhere else, `OutsideImplicitError` is raised. The value is never materialized silently.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax

from ..._jax.tracing import current_trace, is_eager, is_read_by_operator
from ..errors import CHECK_BUGS, reject_derivatives, reject_refs_and_float0
from ..nesting import as_tracer, enclosing_implicit, outside_implicit_error
from ..primitives.leaves import dense_shape_of, run_checks
from ..value import Value, has_all_leaves, is_part, is_value


class OperandConversion:
    """How JAX functions take an implicit array as an operand, with `implicit` around them.

    With high types on, `vn.hijax` sets another conversion.
    """

    def convert(self, value: Value) -> Any:
        """Return the tracer for a value that is an operand of a JAX function.

        Raise `OutsideImplicitError` outside `implicit`, and `TypeError` if the value is no array.
        """
        _check_operand(value)
        return as_tracer(value)

    def type_of(self, value: Value) -> Any:
        """Return the result of `jax.typeof` for a value that is an operand of a JAX function."""
        _check_operand(value)
        return value.aval()

    def jax_array(self, value: Value) -> Callable[[], Any]:
        """Return the attribute `__jax_array__` of a value, or raise `AttributeError`."""
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
    """Raise an error if leaves of a value are missing, are derivatives, or do not fit together."""
    reject_derivatives(value)
    if not has_all_leaves(value):
        raise TypeError(
            f"{value!r} has None instead of some arrays. If it is one part of a partitioned tree, "
            "combine the parts with vn.tree.combine before you compute with it."
        )
    if not is_eager():
        _check_leaves_fit_together(value)


def _check_leaves_fit_together(value: Value) -> None:
    """Run the checks of the class on a copy with abstract leaves, and raise their errors.

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
