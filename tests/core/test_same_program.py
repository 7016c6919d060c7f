"""Programs under `implicit` are the same as programs that a person writes by hand.

The jaxprs are compared equation by equation, and the optimized HLO instruction by instruction.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays, transformer
from support.array_types import Diagonal, quantized

import veneer as vn

KEY = arrays.key(0)


class Lora(vn.ImplicitArray):
    """The weight `w + a @ b`."""

    w: jax.Array
    a: jax.Array
    b: jax.Array

    def materialise(self):
        return self.w + self.a @ self.b


@vn.register("dot_general")
def _(x: vn.ArrayLike, w: Lora, **params):
    return transformer.dot_general(x, w, **params)


@arrays.once
def dense_parameters():
    return transformer.init(KEY, layers=2, d=8, hidden=12)


IDS = arrays.array(np.arange(8).reshape(2, 4))
UPDATED = {
    "LoRA weights everywhere": {},
    "one LoRA weight": {"layers": 1, "matrices": ("up",)},
    "none": {"layers": 0},
}
each_program = pytest.mark.parametrize("updated", UPDATED.values(), ids=UPDATED.keys())


def implicit_parameters(updated: dict[str, Any]) -> Any:
    return transformer.with_low_rank(dense_parameters(), Lora, **updated)


def parameters_by_hand(updated: dict[str, Any]) -> Any:
    return transformer.with_low_rank(dense_parameters(), **updated)


implicit = vn.implicit(transformer.forward)
by_hand = partial(transformer.forward, matmul=transformer.by_hand)


def equations(function: Callable, *args: Any) -> str:
    """The jaxpr of a function, as JAX prints it: with names given in order, and no addresses."""
    text = str(jax.make_jaxpr(function)(*args))
    assert "0x" not in text
    return text


@each_program
def test_a_transformer_has_the_handwritten_equations(updated):
    ours = equations(implicit, implicit_parameters(updated), IDS)
    assert ours == equations(by_hand, parameters_by_hand(updated), IDS)


@each_program
def test_a_batched_transformer_has_the_handwritten_equations(updated):
    over_ids = lambda function: jax.vmap(function, in_axes=(None, 0))
    ours = equations(over_ids(implicit), implicit_parameters(updated), IDS[:, None])
    theirs = equations(over_ids(by_hand), parameters_by_hand(updated), IDS[:, None])
    assert ours == theirs


@each_program
def test_the_gradient_has_the_handwritten_equations(updated):
    # Cotangents may be added in another order, so the equations are counted.
    gradient = lambda f: jax.make_jaxpr(jax.grad(lambda params: jnp.sum(f(params, IDS) ** 2)))
    ours = gradient(implicit)(implicit_parameters(updated))
    theirs = gradient(by_hand)(parameters_by_hand(updated))
    assert Counter(every_equation(ours)) == Counter(every_equation(theirs))


def every_equation(jaxpr: Any) -> Iterator[tuple[str, ...]]:
    """The primitives of a jaxpr, and of those inside, with the types that they take and give."""
    is_jaxpr = lambda x: hasattr(x, "eqns")
    for equation in jaxpr.eqns:
        variables = (*equation.invars, *equation.outvars)
        yield equation.primitive.name, *(str(v.aval) for v in variables)
        for param in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(param):
                yield from every_equation(param)


# Compiled code.


def by_channel(x: jax.Array, q: vn.quant.QArray) -> jax.Array:
    """The scale of a column is taken out of its sum, of codes in a range that sums stay in."""
    return (x @ (q.packed.astype(x.dtype) / 64)) * (q.scale * 64)


def by_tile(x: jax.Array, q: vn.quant.QArray) -> jax.Array:
    """A scale varies along the sum, so codes are multiplied by it before."""
    (m, n), tiles = q.shape, q.scale.shape[0]
    w = q.packed.astype(x.dtype).reshape(tiles, m // tiles, n) * q.scale[:, None]
    return x @ w.reshape(m, n)


def of_nibbles(x: jax.Array, q: vn.quant.QArray) -> jax.Array:
    """Two codes a byte, the first in the low nibble, with the sign in its highest bit."""
    (m, n), tiles = q.shape, q.scale.shape[0]
    nibbles = jnp.stack([q.packed & 0xF, q.packed >> 4], axis=-1).reshape(m, n)
    codes = (nibbles.astype(jnp.int8) ^ 8) - 8
    w = codes.astype(x.dtype).reshape(tiles, m // tiles, n) * q.scale[:, None]
    return x @ w.reshape(m, n)


COMPILED = arrays.OnDemand(
    {
        "LoRA": lambda: (
            Lora(*transformer.low_rank(KEY, arrays.ones((6, 8)))),
            transformer.by_hand,
        ),
        "int8 channelwise": lambda: (quantized("int8", None)(KEY, (6, 8)), by_channel),
        "int8 tiled": lambda: (quantized("int8", 3)(KEY, (6, 8)), by_tile),
        "int4 tiled": lambda: (quantized("int4", 3)(KEY, (6, 8)), of_nibbles),
        "Diagonal": lambda: (Diagonal(arrays.arange(6.0)), lambda x, w: x * w.diagonal),
    }
)


def instructions(function: Callable, *args: Any) -> str:
    """The HLO that XLA compiles a function to, without names and places in the source."""
    text = jax.jit(function).lower(*args).compile().as_text()
    text = text[re.search(r"^(%|ENTRY)", text, re.MULTILINE).start() :]  # after tables of places
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"[\w.-]+: ", "", text)  # the names of parameters
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text)


def layer(matmul: Callable) -> Callable:
    return lambda x, w: jnp.tanh(matmul(x, w) + 1)


X = arrays.ones((4, 6))


@pytest.mark.parametrize("name", COMPILED)
def test_a_layer_compiles_to_the_handwritten_code(name):
    w, matmul = COMPILED[name]
    ours = instructions(vn.implicit(layer(operator.matmul)), X, w)
    assert ours == instructions(layer(matmul), X, w)


@pytest.mark.parametrize("name", ["LoRA", "int8 channelwise", "Diagonal"])
def test_a_layer_does_not_compile_to_the_dense_code(name):
    w, _ = COMPILED[name]
    ours = instructions(vn.implicit(layer(operator.matmul)), X, w)
    assert ours != instructions(layer(lambda x, w: x @ vn.materialise(w)), X, w)
