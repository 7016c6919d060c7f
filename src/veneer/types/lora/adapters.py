"""Functions that merge, split and join the `LoraArray`s of a tree, and set their dropout."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.surface import check_key
from ..._core.value import describe, is_value, materialise_one
from ..._jax.frames import warn_user
from .array import LoraArray


def _map(function: Callable[[LoraArray], Any], tree: Any) -> Any:
    """Apply a function to each `LoraArray` of a tree. All other leaves stay the same."""
    apply = lambda x: function(x) if isinstance(x, LoraArray) else x
    return jax.tree.map(apply, tree, is_leaf=is_value)


def merge(tree: Any) -> Any:
    """Merge each LoRA adapter of a model into its weight.

    Dropout keys are ignored. A quantized weight with an adapter is dequantized. To quantize the
    merged model again, call `vn.quant.quantize_tree`.

    **Arguments:**

    - `tree`: any pytree. A `LoraArray` inside another implicit array, such as `Frozen`, is not
      merged.

    **Returns:** the tree, with a dense array in place of each `LoraArray`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), scale=2.0)
    >>> vn.lora.merge({"kernel": w})["kernel"].tolist()
    [[3.0, 2.0], [2.0, 3.0]]
    """
    return _map(lambda lora: materialise_one(lora.changed(dropout_key=None)), tree)


def split(tree: Any) -> tuple[Any, Any]:
    """Split a model into its weights and its LoRA adapters.

    Use it to train or save only the adapters. `vn.lora.join` is the inverse.

    **Arguments:**

    - `tree`: any pytree. A `LoraArray` inside another implicit array, such as `Frozen`, is not
      split.

    **Returns:** a pair of trees `(base, adapters)`. `base` has the weight of each `LoraArray`, and
    all other leaves. `adapters` has each `LoraArray` with `w=None`, and None in place of all other
    leaves.

    **Warns** (`UserWarning`) if no `LoraArray` is found, because training `adapters` would then do
    nothing.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray.init(jnp.eye(4), 1, key=jax.random.key(0))
    >>> base, adapters = vn.lora.split({"kernel": w, "bias": jnp.zeros(4)})
    >>> jax.tree.map(jnp.shape, base)
    {'bias': (4,), 'kernel': (4, 4)}
    >>> adapters
    {'bias': None, 'kernel': LoraArray(w=None, a=f32[4,1], b=f32[1,4], scale=1.0)}
    """
    if not any(isinstance(x, LoraArray) for x in jax.tree.leaves(tree, is_leaf=is_value)):
        warn_user(
            "vn.lora.split found no LoraArray, so there is nothing to train. Add adapters with "
            "vn.lora.init_tree, and unfreeze them with vn.unfreeze if they are frozen"
        )
    alone = lambda x: x.changed(w=None) if isinstance(x, LoraArray) else None
    return _map(lambda lora: lora.w, tree), jax.tree.map(alone, tree, is_leaf=is_value)


def join(base: Any, adapters: Any) -> Any:
    """Join the weights and the LoRA adapters of a model, the inverse of `vn.lora.split`.

    **Arguments:**

    - `base`: a pytree of weights, such as the first result of `vn.lora.split`. You can change or
      quantize its weights before the call.
    - `adapters`: the second result of `vn.lora.split`. It has a `LoraArray` with `w=None` in place
      of each weight with an adapter, and None in place of all other leaves.

    **Returns:** `base`, with a `LoraArray` in place of each weight that has an adapter.

    **Raises:**

    - `ValueError` if the structures of the trees differ, or the shapes of `a` and `b` in an adapter
      do not fit its weight.
    - `TypeError` if a weight with an adapter is not a floating array, or `adapters` contains
      anything other than `LoraArray` and None.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray.init(jnp.eye(4), 1, key=jax.random.key(0))
    >>> base, adapters = vn.lora.split({"kernel": w, "bias": jnp.zeros(4)})
    >>> vn.lora.join(base, adapters)["kernel"]
    LoraArray(w=f32[4,4], a=f32[4,1], b=f32[1,4], scale=1.0)
    """

    def updated(adapter: LoraArray | None, w: Any) -> Any:
        if adapter is None:
            return w
        if not isinstance(adapter, LoraArray):
            raise TypeError(
                "adapters must hold LoraArrays and None, as the second tree of vn.lora.split does, "
                f"not {describe([adapter])[0]}"
            )
        return replace(adapter, w=w)

    return jax.tree.map(updated, adapters, base, is_leaf=lambda x: x is None or is_value(x))


def with_dropout(tree: Any, key: jax.Array) -> Any:
    """Turn on dropout in the LoRA adapters of a model, for one training step.

    Call it with a new key in each step. Adapters whose rate (`LoraArray.dropout`) is 0 do not
    change. If the model uses a weight twice in a step, both uses drop the same entries. With
    `jax.vmap(vn.implicit(f))`, all examples of a batch drop the same entries. With
    `vn.implicit(jax.vmap(f))`, they drop different ones.

    **Arguments:**

    - `tree`: any pytree. A `LoraArray` inside another implicit array, such as `Frozen`, gets no
      key.
    - `key`: a PRNG key, typed or raw.

    **Returns:** the tree, with a different dropout key in each adapter. The adapters cannot be
    materialized until `vn.lora.without_dropout` removes the keys.

    **Raises:** `TypeError` if `key` is not a PRNG key.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), dropout=0.5)
    >>> params = vn.lora.with_dropout({"kernel": w}, jax.random.key(0))
    >>> params["kernel"].drops
    True
    """
    check_key(key)
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
    """Turn off dropout in the LoRA adapters of a model, for evaluation.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:** the tree, without dropout keys. The dropout rates are kept for the next call of
    `vn.lora.with_dropout`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.types.LoraArray(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), dropout=0.5)
    >>> params = vn.lora.with_dropout({"kernel": w}, jax.random.key(0))
    >>> vn.lora.without_dropout(params)["kernel"].drops
    False
    """
    return _map(lambda lora: lora.changed(dropout_key=None), tree)
