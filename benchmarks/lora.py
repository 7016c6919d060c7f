"""A low-rank update as an implicit array: what the benchmarks of dispatch run."""

import jax
import transformer
from dispatch import Library

import veneer as vn


class Lora(vn.ImplicitArray):
    """`w + a @ b`."""

    w: jax.Array  # [in, out]
    a: jax.Array  # [in, rank]
    b: jax.Array  # [rank, out]

    def materialise(self) -> jax.Array:
        """The dense weight."""
        return self.w + self.a @ self.b


@vn.register("dot_general")
def _(x: vn.ArrayLike, w: Lora, **params):
    return transformer.dot_general(x, w, **params)


VENEER = Library(vn.implicit, Lora)
