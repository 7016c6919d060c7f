"""Masks of sparse weights that are kept from step to step, so that one says when they change."""

from typing import Any

import jax

from .fake_quantized import FakeQuantized


def sparsity_masks(params: Any) -> Any:
    """Return the current masks of all weights with a `sparsity`.

    Without masks, a `FakeQuantized` computes its mask at each use. With masks from this function,
    put in by `vn.quant.with_masks`, you decide when they change. They are state of the training.

    **Arguments:**

    - `params`: any pytree.

    **Returns:** a tree with a bool array of the shape of the weight for each such weight, and None
    for all other leaves.

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
    """Put masks into the `FakeQuantized` weights of a tree, to compute the loss.

    Gradients go straight through a mask: pruned values still move, and can be kept by the next
    masks. Masks have no gradient, so call this inside the loss.

    **Arguments:**

    - `params`: any pytree.
    - `masks`: the tree from `vn.quant.sparsity_masks`. A mask of True everywhere keeps the whole
      weight.

    **Returns:** the tree, with `mask` set in each weight that has one.

    **Raises:** `ValueError` for a tree of another structure, or a mask of another shape or dtype.

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
