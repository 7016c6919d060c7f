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
from .mistakes import UnseenError
from .nesting import as_tracer, enclosing_implicit
from .parts import refuse_part


def as_operand(value: Value) -> Any:
    """What a function of JAX's is given for a value that it is called with.

    **Raises:** `UnseenError` where no `implicit` is in force, `TypeError` for a part of a value.
    """
    refuse_part(value)
    if enclosing_implicit(current_trace()) is None:
        raise unseen(value)
    return as_tracer(value)


def unseen(value: Value) -> UnseenError:
    """The refusal of a value that is met with no `implicit` around it."""
    (name,) = describe([value])
    return UnseenError(
        f"{name} is no array to JAX: call the function under vn.implicit, which computes on what "
        "is stored, or with vn.hijax.enabled(); vn.materialise gives the dense array. Operators "
        "and methods take it as it is. A function under vn.implicit that is given dense arrays "
        "alone, and computes at once, does not see it: pass what holds it as an argument, or "
        "compile the call by jax.jit."
    )


def type_of(value: Value) -> Any:
    """What `jax.typeof` gives, where an operand is asked for."""
    refuse_part(value)
    if enclosing_implicit(current_trace()) is None:
        raise unseen(value)
    return value.aval()
