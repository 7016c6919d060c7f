"""Keys for the stochastic rounding of gradients, as leaves of the weights that they are of."""

from typing import Any

import jax
import jax.numpy as jnp

from .fake_quantized import FakeQuantized


def with_stochastic_rounding(params: Any, key: jax.Array) -> Any:
    """The tree with a key in each `FakeQuantized` that quantises gradients: another in each.

    With it, products of the backward pass round gradients up or down at random, to the format's
    neighbours, so that the mean of what is rounded is what it was. Without, they round to nearest,
    and what is below half a step is lost in each.

    The key is a leaf of the weight, so it is an argument of whatever the weight is an argument of:
    pass one to the step of training that you compile, a new one in each, and call this in the loss.
    Layers of a stack that `scan` goes through have keys of their own. Where a weight is used more
    than once, uses are told apart by the bits of their gradients, which are folded into the key.

    **Arguments:**

    - `params`: any pytree.
    - `key`: a PRNG key, typed or raw.

    **Returns:** the tree, with which the loss is to be differentiated by the weights `w` alone;
    keys have no gradient.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> rule = vn.quant.Rule(".*", "int8", act_qtype="int8", grad_qtype="int4")
    >>> params = {"kernel": vn.quant.FakeQuantized.from_rule(jnp.eye(4), rule)}
    >>> @jax.jit
    ... def gradient(params, key, x):
    ...     def loss(params):
    ...         params = vn.quant.with_stochastic_rounding(params, key)
    ...         return vn.implicit(lambda p, x: jnp.sin(x @ p["kernel"]).sum())(params, x)
    ...     return jax.grad(loss)(params)
    >>> x = jnp.linspace(-1, 1, 12).reshape(3, 4)
    >>> one, other = (gradient(params, jax.random.key(i), x)["kernel"].w for i in (0, 1))
    >>> bool((one != other).any())
    True
    """
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
