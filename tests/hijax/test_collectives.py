"""Collectives combine implicit arrays as dense arrays, and derivatives leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays

import veneer as vn

T = vn.types
KEY = arrays.key(1)
SWAP = [(0, 1), (1, 0)]

COMBINE = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: x - lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i", axis=1),
    "all_gather, tiled": lambda x: lax.all_gather(x, "i", tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "i", SWAP),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True),
}


def normal(*shape):
    return jax.random.normal(KEY, shape)


def low_rank(lead=()):
    return T.LowRank(normal(*lead, 4, 2), normal(*lead, 2, 4))


def quantized(qtype):
    return vn.quant.quantize(normal(2, 2, 64), qtype, channelwise_axes=(0, 2))


VALUES = {
    "int8": lambda: quantized("int8"),
    "nf4": lambda: quantized("nf4"),
    "NMSparse": lambda: T.NMSparse.prune(normal(2, 2, 4), 2, 4, -1),
    "LoraArray of int8": lambda: T.LoraArray(
        quantized("int8"), normal(2, 2, 3), jax.random.normal(KEY, (2, 3, 64))
    ),
}


def agree(out, expected):
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VALUES)
def test_collectives_agree_with_dense_arrays(name):
    value = VALUES[name]()
    run = jax.vmap(lambda x: {name: f(x) for name, f in COMBINE.items()}, axis_name="i")
    for function in (run, jax.jit(run)):
        agree(vn.materialise(function(value)), run(vn.materialise(value)))


def over_devices(f, **options):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(f, mesh=mesh, **({"in_specs": P("i"), "out_specs": P("i")} | options))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_collectives_send_the_packed_arrays(jit):
    value = vn.quant.quantize(normal(8, 64), "int4", channelwise_axes=(0,), tiled_axes={1: 8})
    body = lambda x: (
        lax.all_gather(x, "i", tiled=True),
        lax.ppermute(x, "i", SWAP),
        lax.all_to_all(x, "i", 1, 0, tiled=True),
        x + 1,
    )
    run = over_devices(body)
    actual = (jax.jit(run) if jit else run)(value)
    assert [type(x) for x in actual[:3]] == [vn.quant.QArray] * 3
    agree(vn.materialise(actual), run(vn.materialise(value)))


def test_psum_of_replicated_and_computed_values_agrees():
    value = quantized("int8")
    run = over_devices(
        lambda x: lax.psum(x * 2, "i") + lax.psum(x, "i"), in_specs=P(), out_specs=P()
    )
    agree(run(value), 6 * value.dequantize())


def loss(w):
    return jnp.sum(jnp.sin(w))


DERIVATIVES = {
    "grad": lambda w: jax.grad(loss)(w),
    "value_and_grad": lambda w: jax.value_and_grad(loss)(w)[1],
    "grad, two arguments": lambda w: jax.grad(lambda w, x: loss(w) * x, (0, 1))(w, 2.0),
    "grad, argument in a dict": lambda w: jax.grad(lambda ws: loss(ws["w"]))({"w": w})["w"],
    "vjp": lambda w: jax.vjp(loss, w)[1](1.0),
    "jvp": lambda w: jax.jvp(jnp.transpose, (w,), (w,))[1],
    "linearize": lambda w: jax.linearize(jnp.transpose, w)[1](w),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_collectives_combine_the_leaves_of_derivatives(name, jit):
    weights = low_rank((2,))
    derivatives = DERIVATIVES[name]
    combine = lambda w: (lax.pmean(derivatives(w), "i"), lax.all_gather(derivatives(w), "i"))
    run = jax.vmap(combine, axis_name="i", out_axes=None)
    mean, gathered = (jax.jit(run) if jit else run)(weights)
    each = jax.vmap(derivatives)(weights)
    assert jax.tree.structure(mean) == jax.tree.structure(each) == jax.tree.structure(gathered)
    agree(mean, jax.tree.map(lambda x: x.mean(0), each))
    agree(gathered, each)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_data_parallel_gradient_is_combined_by_leaves(check_vma):
    """With `check_vma`, JAX sums the gradients over devices, and `pmean` keeps that sum."""
    w, x = low_rank(), normal(6, 4)
    step = lambda w, x: lax.pmean(jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w), "i")
    run = over_devices(
        lambda w, x: jax.tree.leaves(step(w, x)),
        in_specs=(P(), P("i")),
        out_specs=P(),
        check_vma=check_vma,
    )
    expected = jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
    agree(jax.jit(run)(w, x), jax.tree.map(lambda leaf: leaf * (1 + check_vma), expected))


def test_psum_of_an_implicit_gradient_reduces_its_dense_array():
    """The gradient of a quantized array is dense, even if it is stored as a `LowRank`."""
    factor = low_rank()
    q = vn.quant.quantize(normal(4, 4), "int8")
    gradient = lambda x: jax.grad(lambda w: jnp.sum(w * factor))(q) * x
    combined = jax.vmap(lambda x: lax.psum(gradient(x), "i"), axis_name="i", out_axes=None)
    actual = combined(jnp.arange(3.0))
    agree(actual, 3 * vn.materialise(factor))


AMBIGUOUS = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
    "ppermute": lambda x: lax.ppermute(x, "i", SWAP),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_collectives_raise_and_name_alternatives(name):
    combine, weights = AMBIGUOUS[name], T.LowRank(normal(2, 2, 2), normal(2, 2, 2))
    map_over = lambda f: jax.vmap(f, axis_name="i")
    primitive = name.replace("pmean", "psum")
    message = (
        rf"{primitive}\(lowrank\[2,2\]\).*vn.implicit.*lax.{primitive}"
        r".*vn.materialise.*jax.tree.map"
    )
    with pytest.raises(TypeError, match=message):
        map_over(combine)(weights)
    dense = map_over(combine)(vn.materialise(weights))
    agree(map_over(lambda x: combine(vn.materialise(x)))(weights), dense)
    agree(vn.materialise(map_over(lambda x: vn.implicit(combine)(x))(weights)), dense)
    by_leaves = map_over(lambda x: jax.tree.leaves(jax.tree.map(combine, x)))(weights)
    agree(by_leaves, [map_over(combine)(x) for x in jax.tree.leaves(weights)])


def test_psum_of_typed_values_reduces_the_dense_array():
    """A result of a primitive is a typed value, not a tree of derivatives."""
    weights = low_rank((2,))
    run = jax.vmap(lambda w: lax.psum(jnp.transpose(w), "i"), axis_name="i", out_axes=None)
    agree(jax.jit(run)(weights), vn.materialise(weights).sum(0).T)
    agree(run(quantized("int8")), quantized("int8").dequantize().sum(0).T)


def test_psum_of_a_masked_array_raises():
    a = normal(2, 4)
    with pytest.raises(TypeError, match="has no dense form"):
        jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(T.Masked(a, a > 0))


def test_collectives_of_a_quantity_keep_its_unit():
    x = T.Quantity(normal(2, 4), "m")
    run = lambda f: jax.vmap(f, axis_name="i")(x)
    for combine in (COMBINE["psum"], COMBINE["pmean"], COMBINE["ppermute"], COMBINE["all_gather"]):
        f = combine if combine is not COMBINE["all_gather"] else lambda x: lax.all_gather(x, "i")
        out = run(f)
        assert out.unit == x.unit
        agree(out.value, jax.vmap(f, axis_name="i")(x.value))
