"""shard_map and plain calls, whose functions are not traced yet when they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives
from jax.sharding import AxisType, PartitionSpec
from support import arrays
from support.array_types import MAKERS, assert_close

import veneer as vn

X = arrays.array(np.linspace(-1.0, 1.0, 36).reshape(6, 6))
MESH = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def by_rows(f):
    """`f` of each row, and the mean over all rows."""
    spec = PartitionSpec("rows")
    both = lambda x: (f(x), jax.lax.pmean(f(x), "rows"))
    return jax.shard_map(both, mesh=MESH, in_specs=spec, out_specs=(spec, PartitionSpec()))


def call(f):
    """`f` as the call of its jaxpr."""

    def called(x):
        params = primitives.closed_call_p.get_bind_params({"call_jaxpr": jax.make_jaxpr(f)(x)})
        return primitives.closed_call_p.bind(x, **params)

    return called


CALLS = {"shard_map": by_rows, "call": call}
WRAPS = {
    "eager": vn.implicit,
    "jit outside": lambda f: jax.jit(vn.implicit(f)),
    "jit inside": lambda f: vn.implicit(jax.jit(f)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("called", [c(jnp.tanh) for c in CALLS.values()], ids=CALLS)
class TestCalls:
    def test_dense_operands_next_to_an_implicit_one(self, called, wrap):
        w = MAKERS["lora"](jax.random.key(6))
        f = lambda x, w: (called(x), called(x @ w))
        assert_close(wrap(f)(X, w), f(X, vn.materialise(w)))

    @pytest.mark.parametrize("name", MAKERS)
    def test_calls_with_implicit_operands_agree_with_dense(self, called, wrap, name):
        w = MAKERS[name](jax.random.key(7))
        assert_close(wrap(called)(w), called(vn.materialise(w)))
