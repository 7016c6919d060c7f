"""Implicit array types for the tests, makers of random values, and `assert_close`."""

import jax
import jax.numpy as jnp
import numpy as np

import veneer as vn


class Lora(vn.ImplicitArray):
    """A dense or implicit weight with a low-rank update."""

    w: jax.Array | vn.ImplicitArray  # [..., in, out]
    a: jax.Array  # [..., in, rank]
    b: jax.Array  # [..., rank, out]
    scale: float = vn.static(default=1.0)

    def materialise(self) -> jax.Array:
        return vn.materialise(self.w) + self.scale * self.a @ self.b


@vn.register("dot_general")
def _(x: vn.ArrayLike, w: Lora, *, dimension_numbers, **params):
    (contract, w_contract), batch = dimension_numbers
    if w_contract != (0,) or batch != ((), ()):
        return NotImplemented
    dot = vn.implicit(lambda x, w, dims: jax.lax.dot_general(x, w, (dims, batch), **params))
    first = (contract, w_contract)
    low = dot(x, w.a, first)
    return dot(x, w.w, first) + w.scale * dot(low, w.b, ((low.ndim - 1,), (0,)))


class Diagonal(vn.ImplicitArray):
    """A diagonal matrix."""

    diagonal: jax.Array  # [..., n]

    def materialise(self) -> jax.Array:
        return self.diagonal[..., None] * jnp.eye(self.diagonal.shape[-1])


@vn.register("dot_general")
def _(x: vn.ArrayLike, w: Diagonal, *, dimension_numbers, **params):
    if w.ndim > 2 or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    return x * w.diagonal


class Normed(vn.ImplicitArray):
    """An array of norm 1. Each entry depends on all others, so it cannot be batched by leaf."""

    x: jax.Array  # [...]
    batch_transparent = False

    def materialise(self) -> jax.Array:
        return self.x / jnp.linalg.norm(self.x)


class Tagged(vn.ImplicitArray):
    """A dense array with a label. It cannot be materialized, because that would lose the label."""

    x: jax.Array  # [...]
    label: str = vn.static(default="")

    def aval(self) -> jax.core.ShapedArray:
        return jax.typeof(self.x)

    def materialise(self):
        raise RuntimeError(f"Tagged refuses to lose its label {self.label!r}")


class OneHot(vn.ImplicitArray):
    """A vector with one nonzero entry. It cannot be materialized."""

    value: jax.Array  # []
    index: int = vn.static()
    n: int = vn.static()

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray((self.n,), self.value.dtype)

    def materialise(self):
        raise RuntimeError("OneHot refuses to be dense")


@vn.register("dot_general")
def _(x: vn.ArrayLike | vn.ImplicitArray, y: OneHot, *, dimension_numbers, **params):
    (contract, _), batch = dimension_numbers
    if contract != (x.ndim - 1,) or batch != ((), ()):
        return NotImplemented
    return x[..., y.index] * y.value


class Metres(vn.ImplicitArray):
    """A power of a length. Its dense array has no unit."""

    x: jax.Array  # [...]
    power: int = vn.static(default=1)

    def materialise(self) -> jax.Array:
        return self.x


@vn.register("mul")
def _(x: Metres, y: Metres, **params):
    return Metres(x.x * y.x, x.power + y.power)


@vn.register("add")
def _(x: Metres, y: Metres, **params):
    assert x.power == y.power
    return Metres(x.x + y.x, x.power)


def _elementwise(primitive) -> None:
    @vn.register(primitive)
    def _(x: Tagged, **params):
        return Tagged(primitive.bind(x.x, **params), x.label)


for _primitive in (jax.lax.sin_p, jax.lax.neg_p, jax.lax.tanh_p):
    _elementwise(_primitive)


@vn.register("mul")
def _(x: Tagged | vn.ArrayLike, y: Tagged | vn.ArrayLike, **params):
    tagged = x if isinstance(x, Tagged) else y
    factors = [v.x if isinstance(v, Tagged) else v for v in (x, y)]
    return Tagged(jax.lax.mul(*factors), tagged.label)


def lora(key: jax.Array, shape: tuple[int, ...] = (6, 6), rank: int = 2) -> Lora:
    """Return a random `Lora`. The leading axes of `shape` are batch axes."""
    *batch, m, n = shape
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # compiles nothing
    normal = lambda *shape: random.standard_normal(shape, np.float32)
    parts = normal(*shape) / 2, normal(*batch, m, rank), normal(*batch, rank, n)
    return Lora(*jax.device_put(parts), scale=0.5)


def by_numpy(w: Lora) -> np.ndarray:
    """Return the dense array of a `Lora` with a dense weight, computed by NumPy."""
    return np.asarray(w.w) + w.scale * np.asarray(w.a) @ np.asarray(w.b)


def quantized(qtype: str, tile: int | None):
    """Return a maker of random quantized matrices, tiled along the contracted axis."""

    def make(key: jax.Array, shape: tuple[int, ...] = (6, 6)) -> vn.quant.QArray:
        contracting = len(shape) - 2
        others = tuple(i for i in range(len(shape)) if i != contracting)
        w = jax.random.normal(key, shape) / 2
        tiled = None if tile is None else {contracting: tile}
        return vn.quant.quantize(w, qtype, channelwise_axes=others, tiled_axes=tiled)

    return make


def lora_of_int8(key: jax.Array, shape: tuple[int, ...] = (6, 6)) -> Lora:
    """Return a quantized weight with a low-rank update, as in QLoRA."""
    update = lora(key, shape)
    return Lora(quantized("int8", None)(key, shape), update.a, update.b, scale=0.5)


# Functions that make a random [..., m, n] array from a key and a shape.
MAKERS = {
    "lora": lora,
    "int8": quantized("int8", None),
    "int4": quantized("int4", 3),
    "nf4": quantized("nf4", 2),
    "lora of int8": lora_of_int8,
}


def assert_close(actual, expected, tol: float = 1e-5) -> None:
    """Check that two trees have the same structure, shapes and dtypes, and close dense arrays."""
    actual, expected = vn.materialise(actual), vn.materialise(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(one) == jnp.shape(other)
        assert jnp.result_type(one) == jnp.result_type(other)
        assert jnp.allclose(one, other, rtol=tol, atol=tol, equal_nan=True), (one, other)
