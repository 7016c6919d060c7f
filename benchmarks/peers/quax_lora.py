"""Quax: the same array type, written as its documentation says."""

import jax
import program
import quax
import transformer
from dispatch import Library
from jaxtyping import ArrayLike


class Lora(quax.ArrayValue):
    """`w + a @ b`."""

    w: jax.Array
    a: jax.Array
    b: jax.Array

    def materialise(self) -> jax.Array:
        """The dense weight."""
        return self.w + self.a @ self.b

    def aval(self) -> jax.core.ShapedArray:
        """What it looks like."""
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)


@quax.register(jax.lax.dot_general_p)
def _(x: ArrayLike, w: Lora, **params):
    return transformer.dot_general(x, w, **params)


if __name__ == "__main__":
    program.run("quax", Library(quax.quaxify, Lora, has_operators=False))
