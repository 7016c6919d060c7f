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

import jax

from ..._jax.primitives import Primitive
from ..._jax.tracing import (
    current_trace,
    set_current_trace,
    traces_around,
)
from ..trace import PACK, ImplicitTrace
from ..value import Value, describe
from .found import found
from .mistakes import UnseenError
from .parts import refuse_part

#: Leaves into the value of a tree structure; its rules are in `primitives`.
pack = Primitive(PACK)


def as_operand(value: Value) -> Any:
    """What a function of JAX's is given for a value that it is called with.

    **Raises:** `UnseenError` where no `implicit` is in force, `TypeError` for a part of a value.
    """
    refuse_part(value)
    trace = current_trace()
    if isinstance(trace, ImplicitTrace) and trace.takes_any:
        with set_current_trace(trace.parent):  # for a type's aval() may compute
            return trace.wrap(found(jax.tree.map(trace.unwrap, value)))
    if _implicit_trace() is None:
        raise unseen(value)
    leaves, structure = jax.tree.flatten(value)
    return pack.bind(*leaves, structure=structure)


def _implicit_trace() -> ImplicitTrace | None:
    """The innermost call of `implicit` within which the current trace runs, if it has no filter."""
    traces = (t for t in traces_around(current_trace()) if isinstance(t, ImplicitTrace))
    found = next(traces, None)
    return found if found is not None and found.takes_any else None


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
    if _implicit_trace() is None:
        raise unseen(value)
    return value.aval()
