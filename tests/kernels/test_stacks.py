"""The lowering of loops changes with the first product, and tracing needs no other lock."""

import subprocess
import sys

PROGRAM = """
import threading
import jax, jax.numpy as jnp
import veneer as vn

w = vn.quant.quantize(jnp.ones((256, 256)), "int8", channelwise_axes=[1])
x, is_tracing = jnp.ones((4, 256)), threading.Event()

@jax.jit
def multiply(x):
    is_tracing.set()
    threading.Event().wait(1)
    return vn.implicit(lambda x, w: x @ w)(x, w)

def compile():
    is_tracing.wait()
    vn.numba.compile(multiply, x, fallback="jax")  # waits for the trace of the other thread

threads = [
    threading.Thread(target=compile, daemon=True),
    threading.Thread(target=lambda: jax.make_jaxpr(vn.implicit(multiply))(x), daemon=True),
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(100)
assert not any(thread.is_alive() for thread in threads)
"""


def test_a_product_is_traced_while_another_thread_compiles():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=200)
