"""eformer: the same array type, written as the documentation of its `jaximus` says."""

from dataclasses import dataclass

import jax
import program
import transformer
from dispatch import Library
from eformer.jaximus import ImplicitArray, implicit, register


@dataclass
class Lora(ImplicitArray):
    """`w + a @ b`."""

    w: jax.Array
    a: jax.Array
    b: jax.Array

    def materialize(self) -> jax.Array:
        """The dense weight."""
        return self.w + self.a @ self.b


@register("dot_general")
def _(x: jax.Array, w: Lora, **params):
    return transformer.dot_general(x, w, **params)


if __name__ == "__main__":
    program.run("eformer.jaximus", Library(implicit, Lora, has_operators=False))
