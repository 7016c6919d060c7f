"""What the primitives of `jax.experimental.sparse` compute, as programs of other primitives."""

from collections.abc import Callable
from typing import Any


def sparse_program(name: str) -> Callable[..., Any]:
    """The function, of operands and parameters, that a primitive of this name is lowered to."""
    from jax.experimental.sparse import bcoo

    function: Callable[..., Any] = getattr(bcoo, f"_{name}_impl")
    return function
