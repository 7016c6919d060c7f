"""`LoraArray` and `loraify`, as in `quax.examples.lora`."""

# Equinox lets `__init__` assign the fields of a frozen module.
# mypy: disable-error-code="misc"

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from .... import types
from ..core import Delegating, RefusesToMaterialise, delegate

__all__ = ["LoraArray", "loraify"]


class _StrictLora(RefusesToMaterialise, types.LoraArray):
    name_in_quax = "LoraArray"

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)


class LoraArray(Delegating):
    """A weight and a low-rank update, `w + a @ b`. Its products use `veneer.types.LoraArray`.

    >>> import jax, jax.numpy as jnp, veneer.interop.quax as quax
    >>> w = quax.lora.LoraArray(jnp.ones((3, 4)), rank=2, key=jax.random.key(0))
    >>> w.a.shape, w.b.shape
    ((3, 2), (2, 4))
    >>> quax.quaxify(jnp.matmul)(w, jnp.ones(4)).tolist()
    [4.0, 4.0, 4.0]
    """

    _w: Any  # [*batch, x, y]
    a: Array  # [*batch, x, rank]
    b: Array  # [*batch, rank, y]
    stop_gradient: bool = eqx.field(static=True)
    allow_materialise: bool = eqx.field(static=True)

    def __init__(
        self,
        weight: Any,
        *,
        rank: int,
        scale: float = 0.01,
        allow_materialise: bool = False,
        stop_gradient: bool = True,
        key: Array,
    ):
        """**Arguments:**

        - `weight`: `[*batch, x, y]`, the weight to update.
        - `rank`: the size of the axis that `a` and `b` share.
        - `scale`: the standard deviation of the entries of `a` at first. `b` is zero.
        - `allow_materialise`: whether operations other than products materialize the array.
          Otherwise they raise a `RuntimeError`.
        - `stop_gradient`: whether derivatives treat the weight as a constant.
        - `key`: a PRNG key for `a`.
        """
        *batch, x, y = weight.shape
        self._w = weight
        self.a = scale * jax.random.normal(key, (*batch, x, rank), weight.dtype)
        self.b = jnp.zeros((*batch, rank, y), weight.dtype)
        self.stop_gradient = stop_gradient
        self.allow_materialise = allow_materialise

    @property
    def w(self) -> Any:
        """The weight. With `stop_gradient`, derivatives treat it as a constant."""
        return lax.stop_gradient(self._w) if self.stop_gradient else self._w

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype."""
        return jax.core.ShapedArray(self._w.shape, self._w.dtype)

    def to_veneer(self) -> types.LoraArray:
        """Return the array as a type of Veneer."""
        cls = types.LoraArray if self.allow_materialise else _StrictLora
        return cls(self.w, self.a, self.b)

    def from_veneer(self, ours: Any) -> Any:
        """Return `ours` unchanged: the result of a product is not a `LoraArray`."""
        return ours


delegate(LoraArray, ["dot_general"])


def loraify(
    model: Any,
    *,
    rank: int,
    scale: float = 0.01,
    allow_materialise: bool = False,
    stop_gradient: bool = True,
    key: Array,
) -> Any:
    """Return a model whose `equinox.nn.Linear` layers have `LoraArray`s as weights.

    The arguments are the same as for `LoraArray`. Each layer gets its own key.

    >>> import equinox as eqx, jax, jax.numpy as jnp, veneer.interop.quax as quax
    >>> mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
    >>> mlp = quax.lora.loraify(mlp, rank=3, key=jax.random.key(1))
    >>> type(mlp.layers[0].weight).__name__, quax.quaxify(mlp)(jnp.ones(2)).shape
    ('LoraArray', (2,))
    """
    is_linear = lambda x: isinstance(x, eqx.nn.Linear)
    nodes, structure = jax.tree.flatten(model, is_leaf=is_linear)
    for i, node in enumerate(nodes):
        if not is_linear(node):
            continue
        key, own = jax.random.split(key)
        weight = LoraArray(
            node.weight,
            rank=rank,
            scale=scale,
            allow_materialise=allow_materialise,
            stop_gradient=stop_gradient,
            key=own,
        )
        nodes[i] = eqx.tree_at(lambda layer: layer.weight, node, weight)
    return jax.tree.unflatten(structure, nodes)
