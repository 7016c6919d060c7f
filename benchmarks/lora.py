"""One array type, `w + a @ b` with a rule for `dot_general`, written for three libraries.

`dispatch.py` measures one of them. Each library is imported only if it is asked for, because Quax
and eformer need different versions of plum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import measure  # noqa: F401  # makes `support` importable
from support import transformer


@dataclass(frozen=True)
class Library:
    """A library: its transformation, and a constructor of an array `w + a @ b` written with it."""

    implicit: Callable[[Callable], Callable]
    lora: Callable[[Any, Any, Any], Any]
    has_operators: bool = False  # whether `x @ lora` works outside the transformation


def veneer() -> Library:
    """Return the type as a subclass of `vn.ImplicitArray`."""
    import veneer as vn

    class Lora(vn.ImplicitArray):
        w: jax.Array  # [in, out]
        a: jax.Array  # [in, rank]
        b: jax.Array  # [rank, out]

        def materialise(self) -> jax.Array:
            return self.w + self.a @ self.b

    @vn.register("dot_general")
    def _(x: vn.ArrayLike, w: Lora, **params):
        return transformer.dot_general(x, w, **params)

    return Library(vn.implicit, Lora, has_operators=True)


def quax() -> Library:
    """Return the type as a subclass of `quax.ArrayValue`."""
    import quax
    from jaxtyping import ArrayLike

    class Lora(quax.ArrayValue):
        w: jax.Array
        a: jax.Array
        b: jax.Array

        def materialise(self) -> jax.Array:
            return self.w + self.a @ self.b

        def aval(self) -> jax.core.ShapedArray:
            return jax.core.ShapedArray(self.w.shape, self.w.dtype)

    @quax.register(jax.lax.dot_general_p)
    def _(x: ArrayLike, w: Lora, **params):
        return transformer.dot_general(x, w, **params)

    return Library(quax.quaxify, Lora)


def eformer() -> Library:
    """Return the type as a subclass of `eformer.jaximus.ImplicitArray`."""
    from eformer.jaximus import ImplicitArray, implicit, register

    @dataclass
    class Lora(ImplicitArray):
        w: jax.Array
        a: jax.Array
        b: jax.Array

        def materialize(self) -> jax.Array:
            return self.w + self.a @ self.b

    @register("dot_general")
    def _(x: jax.Array, w: Lora, **params):
        return transformer.dot_general(x, w, **params)

    return Library(implicit, Lora)


#: The constructor of each library, and the module to import.
LIBRARIES: dict[str, tuple[Callable[[], Library], str]] = {
    "veneer": (veneer, "veneer"),
    "quax": (quax, "quax"),
    "eformer": (eformer, "eformer.jaximus"),
}
