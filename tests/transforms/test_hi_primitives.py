"""Functions that JAX 0.12 defines as high primitives run the rules, too."""

import jax
import jax.numpy as jnp
import pytest
from support.array_types import MAKERS, assert_close

import veneer as vn

FUNCTIONS = {
    "searchsorted": lambda x: jnp.searchsorted(jnp.arange(-2.0, 2.0), x[0]),
    "nonzero": lambda x: jnp.nonzero(x > 0, size=3, fill_value=-1),
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "frexp": jnp.frexp,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_results_agree_with_the_dense_program(kind, name):
    f, x = FUNCTIONS[name], MAKERS[kind](jax.random.key(0))
    expected = f(vn.materialise(x))
    assert_close(vn.implicit(f)(x), expected)
    assert_close(jax.jit(vn.implicit(f))(x), expected)


def test_derivatives_agree_with_jax():
    x = jnp.array([1.0, 2.0])
    q = vn.quant.quantize(x, "int8")
    f = lambda x: jnp.sum(jnp.ldexp(x, 2))
    assert_close(vn.implicit(jax.grad(f))(q), jax.grad(f)(x))
    of_scale = jax.grad(lambda s: vn.implicit(f)(q.replace(scale=s)))(q.scale)
    assert_close(of_scale, jax.grad(lambda s: f(q.replace(scale=s).materialise()))(q.scale))
