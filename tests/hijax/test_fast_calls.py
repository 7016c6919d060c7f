"""Calls of jitted functions with implicit arrays stay in C++.

The test runs in a new process, because JAX's cache of calls drops new entries when it holds 8192.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("mode_off")

PROGRAM = """
import jax, jax.numpy as jnp, veneer as vn

vn.hijax.install()
x, w = jnp.ones((3, 4)), jnp.ones((4, 6))
weights = [
    vn.types.LoraArray(w, jnp.ones((4, 2)), jnp.ones((2, 6))),
    vn.quant.quantize(w, "int8", channelwise_axes=[1]),
]
functions = [
    lambda x, w: x @ jnp.transpose(jnp.transpose(w)),
    lambda x, w: {"turned": jnp.transpose(w), "product": x @ w},
]
for weight in weights:
    for function in functions:
        run = jax.jit(lambda x, w: function(x, w))
        run(x, weight)
        with jax.no_tracing():
            run(x, weight)
        assert run._cache_size() == 1, (weight, function)
"""


def test_a_second_call_runs_no_python():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
