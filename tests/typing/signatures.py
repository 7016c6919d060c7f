"""Assert the types that type checkers infer for programs. `make lint` runs two checkers on it.

>>> programs()
"""

from collections.abc import Callable
from typing import assert_type

import jax
import jax.numpy as jnp

import veneer as vn

Params = dict[str, jax.Array]


def model(params: Params, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x @ params["w"] * scale


@vn.implicit
def doubled(x: jax.Array) -> tuple[jax.Array, int]:
    return x + x, 2


@vn.implicit(on_materialise="warn_weights")
def tripled(x: jax.Array) -> jax.Array:
    return x + x + x


class Scaled(vn.ImplicitArray):
    array: jax.Array
    by: float = vn.static()

    def materialise(self) -> jax.Array:
        return self.array * self.by


@vn.register("neg")
def negative(x: Scaled) -> Scaled:
    return Scaled(-x.array, by=x.by)


def programs() -> None:
    params: Params = {"w": jnp.ones((64, 64))}
    x = jnp.ones((2, 64))

    # A function keeps its signature under all forms of `implicit`.
    assert_type(vn.implicit(model)(params, x, scale=2.0), jax.Array)
    assert_type(vn.implicit(model, on_materialise="error")(params, x), jax.Array)
    assert_type(vn.implicit(model, False)(params, x), jax.Array)
    assert_type(doubled(x), tuple[jax.Array, int])
    assert_type(tripled(x), jax.Array)
    assert_type(vn.explain(model)(params, x), vn.Report)

    # Functions of trees keep the type of the tree.
    small = vn.quant.quantize_tree(params, "nf4", model=model, args=(x,))
    assert_type(small, Params)
    tuned = vn.lora.init_tree(
        small, [vn.lora.Rule(".*", rank=2)], key=jax.random.key(0), model=model, args=(x,)
    )
    assert_type(tuned, Params)
    assert_type(vn.materialise(small), Params)
    assert_type(vn.materialise(vn.quant.quantize(x, "int8")), jax.Array)
    assert_type(vn.quant.quantize(x, "int8"), vn.quant.QArray)

    # The decorators of rules and types keep the declared signatures.
    scaled = Scaled(x, by=2.0)
    assert_type(scaled, Scaled)
    assert_type(scaled.by, float)
    takes: Callable[[Scaled], Scaled] = negative
    assert takes is negative
