"""The number of functions that run between the rule for a product and the call of its kernel."""

import jax
import jax.numpy as jnp
from support import call_paths
from support.arrays import normal

import veneer as vn
from veneer import kernels

RULE, KERNEL = "quant/ops/dot_general.py:_dot_general", "kernels/matmul.py:matmul"


def test_a_product_reaches_its_kernel_in_25_functions():
    w = vn.quant.quantize(normal(512, 1024), "nf4", channelwise_axes=[1], tiled_axes={0: 64})
    program = vn.implicit(lambda w, x: x @ w)
    with kernels.use("auto"):
        jax.jit(program)(w, jnp.ones((4, 512)))  # compiles the kernel
        functions = call_paths.steps(lambda: jax.jit(program)(w, jnp.ones((8, 512))))
    # Lambdas and properties count. Functions that also ran before the rule, such as `QArray.aval`,
    # do not count, because a reader has seen them.
    path = functions[functions.index(RULE) : functions.index(KERNEL) + 1]
    assert len(path) <= 25, "\n".join(path)
