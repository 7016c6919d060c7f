"""Measure one operation outside `jit`, compared with the same operation on dense arrays.

x is `[4, 64]` and the weights are `[64, 64]`, so small that dispatch takes most of the time. Calls
are timed in batches. A batch ends when its last result is ready.
"""

import jax
import jax.numpy as jnp
from dispatch import eager
from lora import VENEER
from measure import Claim, Side, measure, parser, results_table

import veneer as vn


def quantized() -> list[Claim]:
    x, w = jnp.ones((4, 64)), jax.random.normal(jax.random.key(0), (64, 64))
    q = vn.quant.quantize(w, "int8", channelwise_axes=[1])
    return [Claim(Side("`x @ q`, int8", lambda: x @ q), Side("`x @ w`", lambda: x @ w), target=3)]


def compiled_calls() -> list[Claim]:
    """Return a claim about a call of a compiled function, which flattens its arguments."""
    w = jnp.ones((64, 64))
    arrays = [vn.quant.quantize(w, "int8", channelwise_axes=[1]) for _ in range(100)]
    tuples = [(q.packed, q.scale) for q in arrays]
    first = jax.jit(lambda tree: jax.tree.leaves(tree)[0])
    ours = Side("a compiled function of 100 arrays in int8", lambda: first(arrays))
    return [Claim(ours, Side("of tuples of their leaves", lambda: first(tuples)), target=4)]


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    claims = eager(VENEER) + quantized() + compiled_calls()
    print(results_table(measure(claims, rounds=arguments.rounds, batches=20, calls=50), "µs"))
