"""What devices combine: arrays, and derivatives by the leaves of one."""

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


def quantised(qtype):
    return vn.quant.quantize(normal(2, 2, 64), qtype, channelwise_axes=(0, 2))


VALUES = {
    "int8": lambda: quantised("int8"),
    "nf4": lambda: quantised("nf4"),
    "NMSparse": lambda: T.NMSparse.prune(normal(2, 2, 4), 2, 4, -1),
    "LoraArray of int8": lambda: T.LoraArray(
        quantised("int8"), normal(2, 2, 3), jax.random.normal(KEY, (2, 3, 64))
    ),
}


def agree(out, expected):
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VALUES)
def test_collectives_of_values_are_those_of_arrays(name):
    value = VALUES[name]()
    run = jax.vmap(lambda x: {name: f(x) for name, f in COMBINE.items()}, axis_name="i")
    for goes in (run, jax.jit(run)):
        agree(vn.materialise(goes(value)), run(vn.materialise(value)))


def over_devices(f, **options):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(f, mesh=mesh, **({"in_specs": P("i"), "out_specs": P("i")} | options))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_values_are_sent_as_stored(jit):
    value = vn.quant.quantize(normal(8, 64), "int4", channelwise_axes=(0,), tiled_axes={1: 8})
    body = lambda x: (
        lax.all_gather(x, "i", tiled=True),
        lax.ppermute(x, "i", SWAP),
        lax.all_to_all(x, "i", 1, 0, tiled=True),
        x + 1,
    )
    run = over_devices(body)
    found = (jax.jit(run) if jit else run)(value)
    assert [type(x) for x in found[:3]] == [vn.quant.QArray] * 3
    agree(vn.materialise(found), run(vn.materialise(value)))


def test_a_value_that_a_device_has_and_one_that_all_have():
    value = quantised("int8")
    run = over_devices(
        lambda x: lax.psum(x * 2, "i") + lax.psum(x, "i"), in_specs=P(), out_specs=P()
    )
    agree(run(value), 6 * value.dequantize())


def loss(w):
    return jnp.sum(jnp.sin(w))


DERIVATIVES = {
    "grad": lambda w: jax.grad(loss)(w),
    "value_and_grad": lambda w: jax.value_and_grad(loss)(w)[1],
    "grad, of two": lambda w: jax.grad(lambda w, x: loss(w) * x, (0, 1))(w, 2.0),
    "grad, of a part": lambda w: jax.grad(lambda ws: loss(ws["w"]))({"w": w})["w"],
    "vjp": lambda w: jax.vjp(loss, w)[1](1.0),
    "jvp": lambda w: jax.jvp(jnp.transpose, (w,), (w,))[1],
    "linearize": lambda w: jax.linearize(jnp.transpose, w)[1](w),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_combined_by_leaves(name, jit):
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
def test_a_step_of_which_devices_have_parts(check_vma):
    """What JAX checks is added up before, by JAX itself, and its mean is the sum."""
    w, x = low_rank(), normal(6, 4)
    step = lambda w, x: lax.pmean(jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w), "i")
    run = over_devices(
        lambda w, x: jax.tree.leaves(step(w, x)),
        in_specs=(P(), P("i")),
        out_specs=P(),
        check_vma=check_vma,
    )
    whole = jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
    agree(jax.jit(run)(w, x), jax.tree.map(lambda leaf: leaf * (1 + check_vma), whole))


def test_a_dense_derivative_that_is_a_value_is_an_array():
    """By a quantised array it stands for the dense one, whatever its type."""
    factor = low_rank()
    q = vn.quant.quantize(normal(4, 4), "int8")
    by = lambda x: jax.grad(lambda w: jnp.sum(w * factor))(q) * x
    found = jax.vmap(lambda x: lax.psum(by(x), "i"), axis_name="i", out_axes=None)(jnp.arange(3.0))
    agree(found, 3 * vn.materialise(factor))


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
def test_what_may_be_either_is_refused_with_both_ways_out(name):
    combine, weights = AMBIGUOUS[name], T.LowRank(normal(2, 2, 2), normal(2, 2, 2))
    map_over = lambda f: jax.vmap(f, axis_name="i")
    said = name.replace("pmean", "psum")
    said = rf"{said}\(lowrank\[2,2\]\).*vn.implicit.*lax.{said}.*vn.materialise.*jax.tree.map"
    with pytest.raises(TypeError, match=said):
        map_over(combine)(weights)
    dense = map_over(combine)(vn.materialise(weights))
    agree(map_over(lambda x: combine(vn.materialise(x)))(weights), dense)
    agree(vn.materialise(map_over(lambda x: vn.implicit(combine)(x))(weights)), dense)
    by_leaves = map_over(lambda x: jax.tree.leaves(jax.tree.map(combine, x)))(weights)
    agree(by_leaves, [map_over(combine)(x) for x in jax.tree.leaves(weights)])


def test_what_has_a_type_is_an_array():
    """A value that primitives made is no tree, and holds no derivatives."""
    weights = low_rank((2,))
    run = jax.vmap(lambda w: lax.psum(jnp.transpose(w), "i"), axis_name="i", out_axes=None)
    agree(jax.jit(run)(weights), vn.materialise(weights).sum(0).T)
    agree(run(quantised("int8")), quantised("int8").dequantize().sum(0).T)


def test_what_has_no_dense_form_is_no_tree_either():
    a = normal(2, 4)
    with pytest.raises(TypeError, match="has no dense form"):
        jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(T.Masked(a, a > 0))


def test_labels_are_reduced_and_sent_as_what_they_label():
    x = T.Quantity(normal(2, 4), "m")
    run = lambda f: jax.vmap(f, axis_name="i")(x)
    for combine in (COMBINE["psum"], COMBINE["pmean"], COMBINE["ppermute"], COMBINE["all_gather"]):
        f = combine if combine is not COMBINE["all_gather"] else lambda x: lax.all_gather(x, "i")
        out = run(f)
        assert out.unit == x.unit
        agree(out.value, jax.vmap(f, axis_name="i")(x.value))
