"""Make a value of every array type, in any floating dtype and with any leading axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import veneer as vn

T = vn.types
Lead = tuple[int, ...]


class Arrays:
    """A source of random arrays `[*lead, ...]` of a dtype, with entries in [0.5, 1.5)."""

    def __init__(self, lead: Lead, dtype: Any):
        self.lead, self.dtype = lead, jnp.dtype(dtype)
        self._key, self._count = jax.random.key(7), 0

    @property
    def key(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)

    def __call__(self, *shape: int) -> jax.Array:
        entries = jax.random.uniform(self.key, (*self.lead, *shape), minval=0.5, maxval=1.5)
        return entries.astype(self.dtype)

    def order(self, n: int) -> jax.Array:
        return jnp.argsort(jax.random.uniform(self.key, (*self.lead, n)), -1)

    def some(self, *shape: int) -> jax.Array:
        return self(*shape) * (jax.random.uniform(self.key, (*self.lead, *shape)) < 0.5)


def _quantized(qtype: str, **how: Any) -> Callable[[Arrays], Any]:
    return lambda a: vn.quant.quantize(a(4, 4), qtype, **how)


#: A function that makes a value `[*lead, 4, 4]` of each type. A PRNGKey has the shape `[*lead]`.
EVERY_TYPE: dict[str, Callable[[Arrays], Any]] = {
    "Banded": lambda a: T.Banded(a(3, 4), 2, 0),
    "BlockDiagonal": lambda a: T.BlockDiagonal(a(2, 2, 2)),
    "Circulant": lambda a: T.Circulant(a(4)),
    "Constant": lambda a: T.Constant(a(), (4, 4)),
    "Constant, a fill for each row": lambda a: T.Constant(a(4), (4,)),
    "Diagonal": lambda a: T.Diagonal(a(4)),
    "Frozen": lambda a: T.Frozen(a(4, 4)),
    "Frozen, of NMSparse": lambda a: T.Frozen(T.NMSparse.prune(a(4, 4), 2, 4, -1)),
    "Identity": lambda a: T.Identity(4, a.dtype, leading=a.lead),
    "Kronecker": lambda a: T.Kronecker(a(2, 2), T.Diagonal(a(2))),
    "Lazy": lambda a: T.Lazy(jnp.sin, a(4, 4)),
    "LoraArray": lambda a: T.LoraArray(a(4, 4), a(4, 2), a(2, 4), scale=0.5),
    "LoraArray, DoRA": lambda a: T.LoraArray(a(4, 4), a(4, 2), a(2, 4), a(1, 4)),
    "LoraArray, of NMSparse": lambda a: T.LoraArray(
        T.NMSparse.prune(a(4, 4), 2, 4, -1), a(4, 2), a(2, 4)
    ),
    "LowRank": lambda a: T.LowRank(a(4, 2), a(2, 4)),
    "Masked": lambda a: T.Masked(a(4, 4), a.some(4, 4) > 0),
    "NMSparse, along -2": lambda a: T.NMSparse.prune(a(4, 4), 2, 4, -2),
    "NMSparse, along -1": lambda a: T.NMSparse.prune(a(4, 4), 2, 4, -1),
    "Named": lambda a: T.Named(a(4, 4), (*"abc"[: len(a.lead)], "m", "n")),
    "PRNGKey": lambda a: T.PRNGKey(jax.random.split(a.key, a.lead)),
    "Permutation": lambda a: T.Permutation(a.order(4), a.dtype),
    "Permuted": lambda a: T.Permuted(a(4, 4), a.order(4)[..., None, :]),
    "Product": lambda a: T.Product(T.Diagonal(a(4)), T.Circulant(a(4))),
    "QArray, int8": _quantized("int8", channelwise_axes=[-1]),
    "QArray, nf4 in tiles": _quantized("nf4", tiled_axes={-2: 2}, channelwise_axes=[-1]),
    "Quantity": lambda a: T.Quantity(a(4, 4), "m"),
    "Rotated": lambda a: T.Rotated(a(4, 4)),
    "Scaled": lambda a: T.Scaled(a(4, 4), a(4, 1)),
    "SparseArray": lambda a: T.SparseArray.from_dense(a.some(4, 4), n_batch=len(a.lead)),
    "Symmetric": lambda a: T.Symmetric(a(10)),
    "Symmetric, positive definite": lambda a: T.Symmetric.from_dense(
        a(4, 4) + 8 * jnp.eye(4, dtype=a.dtype), positive_definite=True
    ),
    "Toeplitz": lambda a: T.Toeplitz(a(4), a(4)),
    "Triangular": lambda a: T.Triangular(a(4, 4)),
    "Triangular, unit": lambda a: T.Triangular(a(4, 4), lower=False, unit_diagonal=True),
    "Tridiagonal": lambda a: T.Tridiagonal(a(3), a(4), a(3)),
}


def value(name: str, lead: Lead = (), dtype: Any = "float32") -> Any:
    """Return a value of a type, the same at each call."""
    return EVERY_TYPE[name](Arrays(lead, dtype))


def plain(tree: Any) -> Any:
    """Materialize a tree. Types that cannot be materialized give the array inside."""

    def dense(x: Any) -> Any:
        if isinstance(x, T.Masked):
            return x.filled()
        if isinstance(x, T.Named | T.Quantity):
            (x,) = jax.tree.leaves(x)
        return vn.materialise(x)

    return jax.tree.map(dense, tree, is_leaf=lambda x: isinstance(x, vn.Value))
