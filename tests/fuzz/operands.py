"""Source texts of random operands: dense arrays, and arrays of every type and format.

Each is an expression in the number `i`. Its values for different `i` have one structure, so that
they can be stacked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import veneer as vn
from veneer.hijax.types import is_typed, unpack

from .by_numpy import by_numpy

SIZES = (1, 2, 3, 4, 6)


def normal(seed: Any, *shape: int, dtype: str = "float32") -> jax.Array:
    """Return normal numbers with standard deviation 1/2."""
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape).astype(jnp.dtype(dtype)))


def permuted(seed: Any, n: int) -> jax.Array:
    """Return the numbers below n in random order."""
    return jnp.asarray(np.random.default_rng(seed).permutation(n), jnp.int32)


def stacked(make: Callable[[int], Any], count: int = 3) -> Any:
    """Return a stack of arrays with the same structure."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(make, range(count)))


def undressed(x: Any) -> Any:
    """Return the dense array of a result. Remove labels and masks."""
    if is_typed(x) and x.aval.cls in (vn.types.Masked, vn.types.Named, vn.types.Quantity):
        x = unpack(x)
    while isinstance(x, vn.Value):
        if isinstance(x, vn.types.Masked):
            x = x.filled(jnp.nan)
        elif isinstance(x, (vn.types.Named, vn.types.Quantity)):
            (x,) = jax.tree.leaves(x, is_leaf=lambda part, x=x: part is not x)
        else:
            x = x.materialise()
    return x


def without_leaves(x: Any) -> Any:
    """Materialize a value of a high type, whose tangent would be a tree. Return others as is."""
    return undressed(unpack(x)) if is_typed(x) else x


def by_leaves(loss: Callable, x: Any) -> jax.Array:
    """Return the derivatives of a scalar by all floating leaves, concatenated."""
    leaves = jax.tree.leaves(jax.grad(loss, allow_int=True)(x))
    flat = [jnp.ravel(g).astype("float32") for g in leaves if g.dtype != jax.dtypes.float0]
    return jnp.concatenate([*flat, jnp.zeros(1)])


def with_dense_parts(x: Any) -> Any:
    """Return a tree in which each value with a dense tangent is materialized."""
    has_one = lambda x: isinstance(x, vn.Value) and x.dense_tangent
    return jax.tree.map(lambda x: undressed(x) if has_one(x) else x, x, is_leaf=has_one)


_builds_dense: ContextVar[bool] = ContextVar("builds_dense", default=False)


def built(x: Any) -> Any:
    """Return an array that a program builds; where a reference is computed, the dense array."""
    return undressed(x) if _builds_dense.get() else x


@contextmanager
def building_dense() -> Iterator[None]:
    """Make `built` materialize, for reference runs."""
    token = _builds_dense.set(True)
    try:
        yield
    finally:
        _builds_dense.reset(token)


def drift(x: Any, qtype: str, write: Callable[[Any, Any], Any]) -> Any:
    """Return 0 for each entry of a cache that survives two rewrites unchanged, and NaN for others.

    Store `x` in a cache. Then read the cache and write the result back, twice. `write` takes the
    cache and the values that were read, and returns the new cache. Reference runs return zeros.
    16-bit values are cached as f32: some formats change them once if they are moved.
    """
    if _builds_dense.get():
        return jnp.zeros_like(x)
    dtype = x.dtype
    x = lax.stop_gradient(jnp.nan_to_num(jnp.asarray(undressed(without_leaves(x)))))
    x = x.astype(jnp.promote_types(dtype, "float32"))
    axes = tuple(range(x.ndim - 1))

    def stored(x: Any) -> tuple[Any, Any]:
        cache = vn.quant.zeros(x.shape, qtype, channelwise_axes=axes, dtype=x.dtype)
        cache = once = lax.dynamic_update_slice(cache, x, (0,) * x.ndim)
        for _ in range(2):
            cache = write(cache, vn.materialise(cache))
        return vn.materialise(once), vn.materialise(cache)

    once, again = vn.implicit(stored)(x)
    return jnp.where(once == again, 0, jnp.nan).astype(dtype)


def with_jvp(f: Callable) -> Callable:
    """Return a function with a `custom_jvp`, which is its own derivative."""
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def with_vjp(f: Callable) -> Callable:
    """Return a function with a `custom_vjp`, which is its own derivative."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, cotangent: jax.vjp(f, x)[1](cotangent))
    return g


def without_jit(f: Callable) -> Callable:
    """Return a function that runs without jit."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return f(*args)

    return run


def exported(f: Callable) -> Callable:
    """Return a function of a stack, exported for stacks of any size."""

    def run(xs: Any) -> Any:
        (b,) = jax.export.symbolic_shape("b")
        like = lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype)
        program = jax.export.export(jax.jit(f))(jax.tree.map(like, xs))
        return program.call(xs)

    return run


def on_a_mesh(f: Callable) -> Callable:
    """Return a function that runs under a mesh whose axis is part of the types."""

    def run(*args: Any) -> Any:
        mesh = jax.make_mesh((2,), ("i",), (AxisType.Explicit,), devices=jax.devices()[:2])
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return f(*jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), args))

    return run


def with_numpy_leaves(x: Any) -> Any:
    """Return an array with NumPy leaves."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), x)


def over_devices(f: Callable, x: Any, axis: int) -> Any:
    """Apply `f` on two devices, each with half of `x` along `axis`. Results must be equal."""
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": P(*[None] * axis, "i"), "out_specs": P()}
    return jax.shard_map(f, mesh=mesh, check_vma=False, **specs)(x)


class _Texts:
    """Texts of random arrays. No two are alike."""

    def __init__(self, random: Random, dtype: str):
        self._random, self.dtype, self._count = random, dtype, 0

    def one_of(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def size(self) -> int:
        return self.one_of(*SIZES)

    def shape(self, least: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.one_of(*sizes) for _ in range(self.one_of(*range(least, 4))))

    def seed(self) -> str:
        self._count += 1
        return f"(i, {self._count})"

    def dense(self, *shape: int) -> str:
        dtype = [] if self.dtype == "float32" else [f"dtype={self.dtype!r}"]
        return f"normal({', '.join([self.seed(), *map(str, shape), *dtype])})"


def dense(t: _Texts) -> str:
    return t.dense(*t.shape(0, (*SIZES, 0)))


def quantized(t: _Texts, format: str, shape: tuple[int, ...] | None = None) -> str:
    """Return the text of an array in a format, with scales per channel and tile."""
    if shape is None:
        shape = t.shape(1, (*SIZES, 32))
    described = vn.quant.FORMATS[format]
    axis = t.one_of(*range(len(shape)))
    channels = [a for a in range(len(shape)) if a != axis and t.one_of(True, False)]
    tiles = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
    if described.tile_size is not None:  # a format with a fixed tile
        tile, channels = described.tile_size, [a for a in range(len(shape)) if a != axis]
        shape = (*shape[:axis], 2 * tile, *shape[axis + 1 :])
    else:
        tile = t.one_of(None, *tiles)
    tiled = "" if tile is None else f", tiled_axes={{{axis}: {tile}}}"
    return f"vn.quant.quantize({t.dense(*shape)}, {format!r}, channelwise_axes={channels}{tiled})"


def _lora(t: _Texts) -> str:
    m, n = t.size(), t.size()
    w = t.one_of(t.dense(m, n), quantized(t, t.one_of("int8", "nf4", "int4"), (m, n)))
    return f"vn.types.LoraArray({w}, {t.dense(m, 2)}, {t.dense(2, n)}, scale=0.5)"


def _square(t: _Texts) -> str:
    n = t.size()
    return t.dense(n, n)


#: The array types, beside the formats of QArray.
TYPES: dict[str, Callable[[_Texts], str]] = {
    "Banded": lambda t: (
        lambda n, lower, upper: (
            f"vn.types.Banded({t.dense(lower + upper + 1, n)}, {lower}, {upper})"
        )
    )(t.one_of(3, 4, 6), t.one_of(0, 1, 2), t.one_of(0, 1)),
    "BlockDiagonal": lambda t: f"vn.types.BlockDiagonal({t.dense(t.size(), t.size(), t.size())})",
    "Circulant": lambda t: f"vn.types.Circulant({t.dense(t.size())})",
    "Constant": lambda t: f"vn.types.Constant({t.dense(*t.one_of((), (3,)))}, ({t.size()}, 2))",
    "Diagonal": lambda t: f"vn.types.Diagonal({t.dense(t.size())})",
    "Frozen": lambda t: f"vn.freeze({t.dense(t.size(), t.size())})",
    "Identity": lambda t: f"vn.types.Identity({t.size()}, {t.dtype!r})",
    "Kronecker": lambda t: f"vn.types.Kronecker({t.dense(2, t.size())}, {t.dense(t.size(), 2)})",
    "Lazy": lambda t: f"vn.types.Lazy(jnp.tanh, {t.dense(t.size(), t.size())})",
    "Lazy reversed": lambda t: f"vn.types.Lazy(jnp.flipud, {t.dense(t.size(), t.size())})",
    "LoraArray": _lora,
    "LowRank": lambda t: f"vn.types.LowRank({t.dense(t.size(), 2)}, {t.dense(2, t.size())})",
    "Masked": lambda t: (
        lambda shape: f"vn.types.Masked({t.dense(*shape)}, jnp.ones({shape}, bool))"
    )((t.size(), t.size())),
    "Named": lambda t: f"vn.types.Named({t.dense(t.size(), t.size())}, ('a', 'b'))",
    "NMSparse": lambda t: (
        f"vn.types.NMSparse.prune({t.dense(4, t.one_of(4, 8))}, 2, 4, {t.one_of(-1, -2)})"
    ),
    "Permuted": lambda t: (
        lambda m, n: f"vn.types.Permuted({t.dense(m, n)}, permuted({t.seed()}, {n})[None])"
    )(t.size(), t.size()),
    "Rotated": lambda t: f"vn.types.Rotated({t.dense(t.size(), t.size())}, ({t.one_of(-1, -2)},))",
    "Scaled": lambda t: (
        lambda m, n: (
            f"vn.types.Scaled({t.dense(m, n)}, {t.dense(*t.one_of((m, 1), (1, n), (1, 1)))})"
        )
    )(t.size(), t.size()),
    "Permutation": lambda t: f"vn.types.Permutation(permuted({t.seed()}, {t.size()}), {t.dtype!r})",
    "PRNGKey": lambda t: "vn.types.PRNGKey(jax.random.key(i + 1))",
    "Product": lambda t: (
        lambda n: (
            f"vn.types.Product(vn.types.Diagonal({t.dense(n)}), "
            f"vn.types.Permutation(permuted({t.seed()}, {n}), {t.dtype!r}))"
        )
    )(t.size()),
    "Quantity": lambda t: f"vn.types.Quantity({t.dense(t.size(), t.size())}, 'm')",
    "SparseArray": lambda t: (
        lambda m, n: (
            f"vn.types.SparseArray({t.dense(2)}, jnp.array([[0, {n - 1}], [{m - 1}, 0]]), "
            f"({m}, {n}))"
        )
    )(t.size(), t.size()),
    "Symmetric": lambda t: f"vn.types.Symmetric.from_dense({_square(t)})",
    "Toeplitz": lambda t: f"vn.types.Toeplitz({t.dense(t.size())}, {t.dense(t.size())})",
    "Triangular": lambda t: (
        f"vn.types.Triangular({_square(t)}, {t.one_of(True, False)}, {t.one_of(True, False)})"
    ),
    "Tridiagonal": lambda t: (
        lambda n: f"vn.types.Tridiagonal({t.dense(n - 1)}, {t.dense(n)}, {t.dense(n - 1)})"
    )(t.one_of(2, 3, 4)),
}


#: Formats of caches for rows of any size.
CACHE_FORMATS = tuple(
    name
    for name, format in vn.quant.FORMATS.items()
    if format.tile_size is None and format.scale_tile is None
)


def operand(random: Random, kind: str, dtype: str = "float32") -> str:
    """Return the source text of an operand: of a type, of a format, or dense.

    Each kind has only 12 texts for each dtype, because making an operand takes longer to compile
    than using it.
    """
    texts = _Texts(Random(f"{kind} {random.randrange(12)}"), dtype)
    if kind in vn.quant.FORMATS:
        return quantized(texts, kind)
    return TYPES[kind](texts) if kind in TYPES else dense(texts)


KINDS = (*TYPES, *vn.quant.FORMATS)
ENVIRONMENT = {"jax": jax, "jnp": jnp, "lax": lax, "vn": vn, "i": 0, "built": built}
ENVIRONMENT |= {f.__name__: f for f in (normal, permuted, stacked, undressed, without_leaves)}
ENVIRONMENT |= {f.__name__: f for f in (by_leaves, over_devices, with_jvp, with_vjp)}
ENVIRONMENT |= {f.__name__: f for f in (drift, without_jit, exported, on_a_mesh, with_numpy_leaves)}


@lru_cache(maxsize=4096)
def made(text: str, is_stacked: bool, x64: bool) -> tuple[Any, Any]:
    """Evaluate a text. Return its value, or a stack of values, and the dense array of it."""
    with jax.enable_x64(x64):
        one = lambda i: eval(text, ENVIRONMENT | {"i": i})
        x = by_numpy(lambda: stacked(one) if is_stacked else one(0))
        return x, by_numpy(undressed, x)


def shape_of(text: str) -> tuple[int, ...]:
    """Return the shape of an array that a text makes."""
    return made(text, False, False)[1].shape
