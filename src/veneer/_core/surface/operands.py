"""Values as operands of JAX's functions where nobody has wrapped them.

`implicit` wraps the values that it sees: those among the arguments of a function, and those that
it captures. A function may come to others: one that it builds (by a constructor, `vn.tree.combine`,
`nnx.merge`), or that lies in a container of its module. Such a value is a tree of leaves, as
anywhere, until a function of JAX's takes it for an array. There it is an operand:

- directly under `implicit`, as if it had been an argument;
- in what another transformation runs there (`jax.grad`, `vmap`, `jit`, a loop), by the primitive
  `pack`, of which the rule makes a value of the leaves once `implicit` meets it.

Anywhere else it is refused by name, and is never made dense unasked.
"""

from typing import Any

from ..._jax.tracing import current_trace
from ..value import Value, describe
from .mistakes import OutsideImplicitError
from .nesting import as_tracer, enclosing_implicit
from .parts import refuse_part


def as_operand(value: Value) -> Any:
    """Return the tracer for a value that is an operand of a JAX function.

    **Raises:** `OutsideImplicitError` outside `implicit`. `TypeError` for a part of a value.
    """
    refuse_part(value)
    if enclosing_implicit(current_trace()) is None:
        raise outside_implicit_error(value)
    return as_tracer(value)


def outside_implicit_error(value: Value) -> OutsideImplicitError:
    """Return the error for a value that is an operand of a JAX function outside `implicit`."""
    (name,) = describe([value])
    return OutsideImplicitError(
        f"JAX functions cannot take {name} outside vn.implicit. Wrap the function that uses it, "
        "as in vn.implicit(f)(x), vn.implicit(module)(x) or vn.implicit(module.apply)(variables, "
        "x), or call vn.materialise on the array. If the function is already wrapped, pass the "
        "array as an argument, or write jax.jit(vn.implicit(f))."
    )


def type_of(value: Value) -> Any:
    """What `jax.typeof` gives, where an operand is asked for."""
    refuse_part(value)
    if enclosing_implicit(current_trace()) is None:
        raise outside_implicit_error(value)
    return value.aval()
