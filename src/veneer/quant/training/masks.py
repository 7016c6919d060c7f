"""Masks of sparse weights that are kept from step to step, so that one says when they change."""

from typing import Any

import jax

from .fake_quantized import FakeQuantized


def sparsity_masks(params: Any) -> Any:
    """Returns the masks of all weights with a `sparsity`, as their values are now.

    Without masks, those of a `FakeQuantized` are found wherever it is used, at each step. With
    these, which `vn.quant.with_masks` puts in, they are found when you say: they are a tree of
    arrays, and state of the training.

    **Arguments:**

    - `params`: any pytree.

    **Returns:** the tree with a mask in the place of each such weight, bool of its shape, and None
    in that of all else.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> rules = [vn.quant.Rule("kernel", "int8", sparsity=(2, 4))]
    >>> params = {"kernel": jnp.array([[1.0], [-4.0], [3.0], [2.0]]), "bias": jnp.zeros(1)}
    >>> params = vn.quant.quantize_tree(params, rules, train=True)
    >>> vn.quant.sparsity_masks(params)["kernel"][:, 0].tolist()
    [False, True, True, False]

    Found anew at each hundredth step, within a program:

    >>> def masks_at(step, masks, params):
    ...     find = lambda: vn.quant.sparsity_masks(params)
    ...     return jax.lax.cond(step % 100 == 0, find, lambda: masks)
    """

    def mask(x: Any) -> Any:
        if not isinstance(x, FakeQuantized) or x.sparsity is None:
            return None
        return x.changed(mask=None).kept

    return jax.tree.map(mask, params, is_leaf=lambda x: isinstance(x, FakeQuantized))


def with_masks(params: Any, masks: Any) -> Any:
    """The tree with a mask in each `FakeQuantized` that has one, for the loss to be computed with.

    Gradients go straight through a mask: what is not kept moves as if it were, and may be kept when
    masks are found the next time. They have no gradient, so put them in within the loss, as
    `vn.quant.with_stochastic_rounding` does keys.

    **Arguments:**

    - `params`: any pytree.
    - `masks`: the tree that `vn.quant.sparsity_masks` gives of it; those that are True everywhere
      keep a weight as it is.

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
            raise ValueError(f"masks has one of {mask.shape} where params has a {type(x).__name__}")
        return x.with_mask(mask)

    return jax.tree.map(masked, params, masks, is_leaf=lambda x: isinstance(x, FakeQuantized))
