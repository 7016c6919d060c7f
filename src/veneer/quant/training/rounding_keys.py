"""Keys for the stochastic rounding of gradients, as leaves of the weights that they are of."""

from typing import Any

import jax
import jax.numpy as jnp

from ..._core.surface.mistakes import check_key
from .fake_quantized import FakeQuantized


def with_stochastic_rounding(params: Any, key: jax.Array) -> Any:
    """Put a PRNG key into each `FakeQuantized` that quantizes gradients.

    With a key, products of the backward pass round gradients up or down at random, so that the mean
    is preserved. Without a key they round to nearest, which loses values below half a step.

    Pass a new key to each training step, and call this inside the loss: the key is a leaf of the
    weight, so it must be an argument of the compiled step. Each weight, and each layer of a stack
    that `scan` runs over, has its own key. If a weight is used more than once, the bits of each
    gradient are folded into the key.

    **Arguments:**

    - `params`: any pytree.
    - `key`: a single PRNG key, typed or raw.

    **Returns:** the tree. Differentiate the loss by the weights `w` only, because keys have no
    gradient.

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
    count = 0

    def keyed(x: Any) -> Any:
        nonlocal count
        if not isinstance(x, FakeQuantized) or x.backward is None:
            return x
        key_of_weight = jax.random.fold_in(key, count)
        count += 1
        lead = x.w.shape[: x.lead]
        return x.changed(key=jax.random.split(key_of_weight, lead) if lead else key_of_weight)

    return jax.tree.map(keyed, params, is_leaf=lambda x: isinstance(x, FakeQuantized))
