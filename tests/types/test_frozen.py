"""`Frozen`: an array that gets no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import arrays
from support.array_types import Diagonal, Lora, assert_close, lora_of_int8
from support.claims import Claim, claims
from support.policies import without_rule

import veneer as vn
from veneer.types.frozen import Frozen


def int8(draw):
    w = draw(draw.n, draw.n)
    return vn.quant.quantize(w, "int8", channelwise_axes=[i for i in range(w.ndim) if i != -2])


def square(draw):
    return draw(draw.n, draw.n)


def frozen(make):
    return lambda draw: Frozen(make(draw))


CLAIMS = {
    "matmul": Claim(jnp.matmul, [square, frozen(square)]),
    "matmul of a quantized one": Claim(jnp.matmul, [square, frozen(int8)]),
    "transpose of a quantized one": Claim(lambda w: w.mT, [frozen(int8)], kept=vn.quant.QArray),
    "two frozen ones": Claim(lambda x, y: x * y - y, [frozen(square), frozen(square)]),
    "a custom derivative": Claim(jax.nn.silu, [frozen(square)], made_dense=True),
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)

X = arrays.ones((3, 6))
KEY = arrays.key(0)


def test_rules_of_the_wrapped_type_run():
    report = vn.explain(jnp.matmul)(X, Frozen(lora_of_int8(KEY)))
    assert not without_rule(report)
    met = [event.operands[1].partition(":")[0] for event in report.events]
    assert met == ["QArray", "Lora", "Frozen"]


def test_only_the_frozen_array_gets_no_gradient():
    w = lora_of_int8(KEY)
    loss = lambda x, w: jnp.sin(x @ w).sum()
    past, by_leaves = jax.grad(loss, (0, 1), allow_int=True)(X, Frozen(w))
    assert_close(past, jax.grad(loss)(X, w))
    for leaf in jax.tree.leaves(by_leaves):
        assert leaf.dtype == jax.dtypes.float0 or not leaf.any()


def test_grad_inside_implicit_sees_a_dense_array():
    loss = lambda w: jnp.sin(X @ w).sum()
    w = jax.random.normal(KEY, (6, 6))
    assert_close(vn.implicit(jax.grad(loss))(Frozen(w)), jax.grad(loss)(w))


def test_base_of_a_lora_array_can_be_frozen():
    w = lora_of_int8(KEY)
    inside = lambda base: jax.grad(
        lambda a: jnp.sin(X @ Lora(base, a, w.b, scale=w.scale)).sum(),
    )(w.a)
    assert_close(inside(Frozen(w.w)), inside(w.w))


def test_materialise_keeps_an_implicit_array_implicit():
    w = lora_of_int8(KEY)
    assert type(Frozen(w).materialise()) is Lora
    assert (vn.materialise(Frozen(w)) == vn.materialise(w)).all()


@pytest.mark.parametrize(
    "x", [arrays.ones((2, 3)), np.ones((2, 3), np.float16), arrays.quantized("int8", 6, 6)]
)
def test_shape_dtype_and_bytes_equal_the_wrapped_array(x):
    value = Frozen(x)
    assert (value.shape, value.dtype, value.nbytes) == (x.shape, x.dtype, x.nbytes)


def test_the_repr_shows_the_wrapped_value():
    assert repr(Frozen(jnp.ones(3))) == "Frozen(x=f32[3])"
    assert repr(Frozen(Diagonal(jnp.ones(3)))) == "Frozen(x=Diagonal(diagonal=f32[3]))"


def test_partition_follows_the_wrapped_array():
    assert Frozen(X).partition(P("x", None), X.shape).x == P("x", None)
    w = vn.quant.quantize(X, "int8", channelwise_axes=[1])
    assert Frozen(w).partition(P("x", "y"), X.shape).x.packed == P("x", "y")
    assert Frozen(Diagonal(jnp.ones(3))).partition(P("x", None), (3, 3)) is None


@pytest.mark.parametrize("x", [3, [arrays.ones(2)], "w"])
def test_invalid_values_raise(x):
    with pytest.raises(TypeError, match=r"Frozen takes an array for x|Expected type"):
        Frozen(x)


def test_default_runs_before_the_default_of_another_type():
    quantize = vn.ste(lambda x: vn.quant.quantize(x, "int8"))
    x, w = jnp.arange(4.0), vn.freeze(jnp.ones(4))
    loss = lambda x, w: (quantize(x) * w).sum()
    assert jnp.allclose(jax.grad(vn.implicit(loss))(x, w), jnp.ones(4))
