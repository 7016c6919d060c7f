"""Trees of parameters that hold `LoraArray`s: merged, taken apart, and with dropout."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.value import is_value, materialise_one
from .array import LoraArray


def _map(function: Callable[[LoraArray], Any], tree: Any) -> Any:
    of = lambda x: function(x) if isinstance(x, LoraArray) else x
    return jax.tree.map(of, tree, is_leaf=is_value)


def merge(tree: Any) -> Any:
    """The tree with each `LoraArray` as the dense array it stands for, without dropout.

    A weight that was quantised is not so any more: `vn.quant.quantize_tree` of the result makes it
    so again, and rounds anew.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), scale=2.0)
    >>> vn.types.lora.merge({"kernel": w})["kernel"].tolist()
    [[3.0, 2.0], [2.0, 3.0]]
    """
    return _map(lambda lora: materialise_one(lora.changed(dropout_key=None)), tree)


def split(tree: Any) -> tuple[Any, Any]:
    """The tree with each `LoraArray` as its weight alone, and what those weights are updated by.

    **Returns:** the tree of weights, and one of the same shape to be saved or sent alone: it holds
    `LoraArray`s without a weight, and None elsewhere. `join` makes the tree again.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray.init(jnp.eye(4), 1, key=jax.random.key(0))
    >>> base, adapters = vn.types.lora.split({"kernel": w, "bias": jnp.zeros(4)})
    >>> jax.tree.map(jnp.shape, base)
    {'bias': (4,), 'kernel': (4, 4)}
    >>> adapters
    {'bias': None, 'kernel': LoraArray(w=None, a=f32[4,1], b=f32[1,4], scale=1.0)}
    >>> vn.types.lora.join(base, adapters)["kernel"]
    LoraArray(w=f32[4,4], a=f32[4,1], b=f32[1,4], scale=1.0)
    """
    alone = lambda x: x.changed(w=None) if isinstance(x, LoraArray) else None
    return _map(lambda lora: lora.w, tree), jax.tree.map(alone, tree, is_leaf=is_value)


def join(base: Any, adapters: Any) -> Any:
    """The tree of which `split` made the two; `base` may have got other weights since.

    **Raises:** `ValueError` where the trees, or the shapes, do not fit.
    """

    def updated(adapter: LoraArray | None, w: Any) -> Any:
        return w if adapter is None else replace(adapter, w=w)

    return jax.tree.map(updated, adapters, base, is_leaf=lambda x: x is None or is_value(x))


def with_dropout(tree: Any, key: jax.Array) -> Any:
    """The tree with a key in each `LoraArray` that has a rate of dropout: another in each.

    For each step of training, with a key of its own. The rate is `LoraArray.dropout`. A weight that
    a program uses twice drops the same twice, and so do all the members of a batch if `jax.vmap` is
    around `vn.implicit`; inside of it they do not.

    **Arguments:**

    - `tree`: any pytree.
    - `key`: a PRNG key, typed or raw.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), dropout=0.5)
    >>> params = vn.types.lora.with_dropout({"kernel": w}, jax.random.key(0))
    >>> params["kernel"].drops
    True
    """
    count = 0

    def keyed(lora: LoraArray) -> LoraArray:
        nonlocal count
        if lora.dropout == 0:
            return lora
        own = jax.random.fold_in(key, count)
        count += 1
        lead = lora.shape[: len(lora.lead)]
        if lead:
            keys = jax.random.split(own, math.prod(lead))
            own = keys.reshape(*lead, *jnp.shape(own))
        return lora.changed(dropout_key=own)

    return _map(keyed, tree)


def without_dropout(tree: Any) -> Any:
    """The tree with no key in any `LoraArray`: they stand for arrays again."""
    return _map(lambda lora: lora.changed(dropout_key=None), tree)
