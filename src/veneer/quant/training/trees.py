"""Functions on trees of `FakeQuantized` weights: conversion, masks and keys."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.surface import check_key, check_parameters
from ..activation_quantized import ActivationQuantized
from .fake_quantized import FakeQuantized


def _is_fake_quantized(x: Any) -> bool:
    return isinstance(x, FakeQuantized)


def convert(params: Any) -> Any:
    """Quantize the weights of a trained model.

    Each `FakeQuantized` becomes a `QArray`. If it has an `act_qtype`, an `ActivationQuantized`
    wraps the `QArray`. The model gives the same results as in training, up to rounding. The
    full-precision weights are dropped.

    **Arguments:**

    - `params`: any pytree.

    **Returns:** a tree like `params`. A `FakeQuantized` without a `qtype` becomes a dense array.
    Leaves of other types are unchanged.

    **Raises:** `ValueError` if `params` holds no arrays, if `act_tile_size` of a weight is a dict,
    which only training supports, or if a weight was sliced along its `tile_axis`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> params = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
    >>> rules = [vn.quant.Rule("kernel", "int4")]
    >>> trained = vn.quant.quantize_tree(params, rules, train=True)
    >>> vn.quant.convert(trained)["kernel"].nbytes, trained["kernel"].nbytes
    (32, 128)
    """
    check_parameters(params, "convert(params)")

    def quantize_weight(w: Any) -> Any:
        if not _is_fake_quantized(w):
            return w
        if isinstance(w.act_tile_size, tuple) and w.act_qtype is not None:
            raise ValueError(
                f"act_tile_size={dict(w.act_tile_size)} makes blocks of activations, which only "
                "training supports. Replace it with a number before convert"
            )
        if w.act_qtype is None:
            return w.quantize()
        return ActivationQuantized(
            w.quantize(),
            qtype=w.act_qtype,
            calibration_method=w.act_calibration_method,
            tile_size=w.act_tile_size,
            contracting=tuple(axis - w.ndim for axis in w.tile_axes),
        )

    return jax.tree.map(quantize_weight, params, is_leaf=_is_fake_quantized)


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

    def compute_mask(x: Any) -> Any:
        is_sparse = _is_fake_quantized(x) and x.sparsity is not None
        return x.changed(mask=None).current_mask if is_sparse else None

    return jax.tree.map(compute_mask, params, is_leaf=_is_fake_quantized)


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

    def set_mask(x: Any, mask: Any) -> Any:
        if mask is None:
            return x
        if not _is_fake_quantized(x):
            raise ValueError(
                f"masks has a mask of shape {mask.shape} where params has a {type(x).__name__}. "
                "Pass the tree of vn.quant.sparsity_masks(params)"
            )
        return x.with_mask(mask)

    return jax.tree.map(set_mask, params, masks, is_leaf=_is_fake_quantized)


def with_stochastic_rounding(params: Any, key: jax.Array) -> Any:
    """Set the PRNG key of each `FakeQuantized` weight that quantizes gradients.

    With a key, the backward pass rounds gradients up or down at random, so that the expected value
    is exact. Without a key it rounds to nearest, so gradients near 0 become 0.

    Call this inside the loss, because keys have no gradient. Pass a new key in each training step,
    as an argument of the compiled step. Each weight, and each layer of a stack that `scan` runs
    over, gets its own key. Several uses of one weight round differently.

    **Arguments:**

    - `params`: any pytree.
    - `key`: a single PRNG key, typed or raw.

    **Returns:** a tree like `params`, with keys in the weights that have `grad_qtype`, `grad_input`
    or `grad_weight`.

    **Raises:**

    - `TypeError` if `key` is not a PRNG key.
    - `ValueError` if `key` is an array of typed keys.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> rule = vn.quant.Rule(".*", "int8", act_qtype="int8", grad_qtype="int4")
    >>> params = {"kernel": vn.quant.FakeQuantized.from_rule(jnp.eye(4), rule)}
    >>> def loss(params, key, x):
    ...     params = vn.quant.with_stochastic_rounding(params, key)
    ...     return vn.implicit(lambda p, x: jnp.sin(x @ p["kernel"]).sum())(params, x)
    >>> step = jax.jit(jax.grad(loss))
    >>> step(params, jax.random.key(0), jnp.ones((3, 4)))["kernel"].w.shape
    (4, 4)
    """
    check_key(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    weight_numbers = itertools.count()

    def set_key(x: Any) -> Any:
        if not _is_fake_quantized(x) or x.backward is None:
            return x
        weight_key = jax.random.fold_in(key, next(weight_numbers))
        stack_shape = x.w.shape[: x.lead]
        keys = jax.random.split(weight_key, stack_shape) if stack_shape else weight_key
        return x.changed(key=keys)

    return jax.tree.map(set_key, params, is_leaf=_is_fake_quantized)
