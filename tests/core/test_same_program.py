"""`implicit` leaves nothing of itself behind: its programs are those that a person writes by hand.

Before compilation they are compared equation for equation, as jaxprs; after it, instruction for
instruction, as optimised HLO.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from array_types import Lora, lora, quantized

import veneer as vn

KEY = jax.random.key(0)
D, HEADS, HIDDEN = 8, 2, 12
MATRICES = dict.fromkeys("qkvo", (D, D)) | {"up": (D, HIDDEN), "down": (HIDDEN, D)}

# A transformer, which is not told what its weights are. By hand, another `matmul` is passed in.


def transformer(params: Any, ids: jax.Array, matmul: Callable = operator.matmul) -> jax.Array:
    x = params["embedding"][ids]
    for layer in params["layers"]:
        x = x + attention(layer, norm(x), matmul)
        x = x + matmul(jax.nn.gelu(matmul(norm(x), layer["up"])), layer["down"])
    return matmul(x, params["out"])


def attention(layer: Any, x: jax.Array, matmul: Callable) -> jax.Array:
    batch, time, d = x.shape
    q, k, v = (matmul(x, layer[n]).reshape(batch, time, HEADS, d // HEADS) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return matmul(mixed.reshape(batch, time, d), layer["o"])


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


class LowRank(NamedTuple):
    """What a `Lora` stores, for a program that is written for it."""

    w: jax.Array
    a: jax.Array
    b: jax.Array


def product(x: jax.Array, w: jax.Array | LowRank) -> jax.Array:
    if not isinstance(w, LowRank):
        return x @ w
    low = x @ w.a
    return x @ w.w + 0.5 * (low @ w.b)


def by_hand(params: Any, ids: jax.Array) -> jax.Array:
    return transformer(params, ids, product)


IDS = jnp.arange(8).reshape(2, 4)


def parameters(make: Callable, updated: tuple[tuple[int, str], ...]) -> Any:
    """Those of two layers, with `make(w, a, b)` for the matrices of the layers listed."""
    keys = iter(jax.random.split(KEY, 50))
    normal = lambda *shape: jax.random.normal(next(keys), shape)

    def matrix(i: int, name: str) -> Any:
        m, n = MATRICES[name]
        parts = normal(m, n), normal(m, 2), normal(2, n)
        return make(*parts) if (i, name) in updated else parts[0]

    layers = [{name: matrix(i, name) for name in MATRICES} for i in range(2)]
    return {"embedding": normal(10, D), "layers": layers, "out": normal(D, 10)}


UPDATED = {
    "LoRA weights everywhere": tuple((i, name) for i in range(2) for name in MATRICES),
    "one LoRA weight": ((0, "up"),),
    "none": (),
}
each_program = pytest.mark.parametrize("updated", UPDATED.values(), ids=UPDATED.keys())


def implicit_parameters(updated: tuple[tuple[int, str], ...]) -> Any:
    return parameters(lambda *parts: Lora(*parts, scale=0.5), updated)


def equations(function: Callable, *args: Any) -> str:
    """The jaxpr of a function, as JAX prints it: with names given in order, and no addresses."""
    text = str(jax.make_jaxpr(function)(*args))
    assert "0x" not in text
    return text


@each_program
def test_a_transformer_traces_to_the_equations_written_by_hand(updated):
    ours = equations(vn.implicit(transformer), implicit_parameters(updated), IDS)
    assert ours == equations(by_hand, parameters(LowRank, updated), IDS)


@each_program
def test_so_does_a_batch_of_programs(updated):
    over_ids = lambda function: jax.vmap(function, in_axes=(None, 0))
    ours = equations(over_ids(vn.implicit(transformer)), implicit_parameters(updated), IDS[:, None])
    theirs = equations(over_ids(by_hand), parameters(LowRank, updated), IDS[:, None])
    assert ours == theirs


@each_program
def test_its_gradient_has_the_equations_of_the_gradient_by_hand(updated):
    # Cotangents may be added in another order, so the equations are counted.
    gradient = lambda f: jax.make_jaxpr(jax.grad(lambda params: jnp.sum(f(params, IDS) ** 2)))
    ours = gradient(vn.implicit(transformer))(implicit_parameters(updated))
    theirs = gradient(by_hand)(parameters(LowRank, updated))
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


class Diagonal(vn.ImplicitArray):
    diagonal: jax.Array  # [n]

    def materialise(self):
        return jnp.diag(self.diagonal)


@vn.register("dot_general")
def _(x: vn.ArrayLike, y: Diagonal, *, dimension_numbers, **params):
    if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    return x * y.diagonal


def by_channel(x: jax.Array, q: vn.quant.QArray) -> jax.Array:
    """The scale of a column is taken out of its sum."""
    return (x @ q.packed.astype(x.dtype)) * q.scale


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


COMPILED = {
    "LoRA": (lora(KEY, (6, 8)), lambda x, w: product(x, LowRank(w.w, w.a, w.b))),
    "int8 channelwise": (quantized("int8", None)(KEY, (6, 8)), by_channel),
    "int8 tiled": (quantized("int8", 3)(KEY, (6, 8)), by_tile),
    "int4 tiled": (quantized("int4", 3)(KEY, (6, 8)), of_nibbles),
    "Diagonal": (Diagonal(jnp.arange(6.0)), lambda x, w: x * w.diagonal),
}


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


X = jnp.ones((4, 6))


@pytest.mark.parametrize(("w", "matmul"), COMPILED.values(), ids=COMPILED.keys())
def test_a_layer_compiles_to_the_code_written_by_hand(w, matmul):
    ours = instructions(vn.implicit(layer(operator.matmul)), X, w)
    assert ours == instructions(layer(matmul), X, w)


@pytest.mark.parametrize("name", ["LoRA", "int8 channelwise", "Diagonal"])
def test_and_not_to_that_of_the_dense_form(name):
    w, _ = COMPILED[name]
    ours = instructions(vn.implicit(layer(operator.matmul)), X, w)
    assert ours != instructions(layer(lambda x, w: x @ vn.materialise(w)), X, w)
