"""Masks of sparse weights that are kept from step to step, so that one says when they change."""

from typing import Any

import jax

from .fake_quantized import FakeQuantized


def sparsity_masks(params: Any) -> Any:
    """Compute the masks of all `FakeQuantized` weights with a `sparsity`, from their values.

    A weight without a mask computes one each time it is used. To change masks only at steps that
    you choose, keep the result of this function in the training state, and pass it to
    `vn.quant.with_masks` in each step.

    **Arguments:**

    - `params`: any pytree.

    **Returns:** a tree like `params`. For each weight with a `sparsity`, it has a bool array of the
    shape of the weight, True for the values to keep. All other leaves become None.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.array([[1.0], [-4.0], [3.0], [2.0]])
    >>> params = {"kernel": vn.quant.FakeQuantized(w, sparsity=(2, 4)), "bias": jnp.zeros(1)}
    >>> vn.quant.sparsity_masks(params)["kernel"][:, 0].tolist()
    [False, True, True, False]
    """

    def mask(x: Any) -> Any:
        if not isinstance(x, FakeQuantized) or x.sparsity is None:
            return None
        return x.changed(mask=None).kept

    return jax.tree.map(mask, params, is_leaf=lambda x: isinstance(x, FakeQuantized))


def with_masks(params: Any, masks: Any) -> Any:
    """Set the masks of the `FakeQuantized` weights of a tree.

    Call this inside the loss, because masks have no gradient. Pruned values still get gradients, so
    later masks can keep them.

    **Arguments:**

    - `params`: any pytree.
    - `masks`: the tree from `vn.quant.sparsity_masks`. A mask with only True values prunes nothing.

    **Returns:** a tree like `params`, in which each weight with a mask in `masks` uses that mask.

    **Raises:** `ValueError` if the structures of the two trees differ, or if a mask does not have
    the shape of its weight and dtype bool.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.FakeQuantized(jnp.array([[1.0], [4.0]]), sparsity=(1, 2))
    >>> masks = vn.quant.sparsity_masks(w)
    >>> loss = lambda w: vn.implicit(jnp.sum)(vn.quant.with_masks(w, masks))
    >>> value, gradient = jax.value_and_grad(loss)(w)
    >>> float(value), gradient.w[:, 0].tolist()
    (4.0, [1.0, 1.0])
    """

    def masked(x: Any, mask: Any) -> Any:
        if mask is None:
            return x
        if not isinstance(x, FakeQuantized):
            raise ValueError(
                f"masks has a mask of shape {mask.shape} where params has a {type(x).__name__}. "
                "Pass the tree of vn.quant.sparsity_masks(params)"
            )
        return x.with_mask(mask)

    return jax.tree.map(masked, params, masks, is_leaf=lambda x: isinstance(x, FakeQuantized))
