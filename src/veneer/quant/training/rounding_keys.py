"""Keys for the stochastic rounding of gradients, as leaves of the weights that they are of."""

from typing import Any

import jax
import jax.numpy as jnp

from ..._core.surface.arguments import check_key
from .fake_quantized import FakeQuantized


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
