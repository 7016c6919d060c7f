"""Weights that a program reads from a container or combines are reported like arguments."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import arrays

import veneer as vn

QUANTIZED = arrays.quantized("int8", 8, 8)
LORA = vn.types.LoraArray(QUANTIZED, arrays.ones((8, 2)), arrays.ones((2, 8)))
OTHER = arrays.quantized("int8", 8, 8, seed=1)
X = arrays.normal(2, 8, seed=2)
CONTAINER = {"w": QUANTIZED}
FOUND = "an array that the program found"


class Model:  # no pytree
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return x @ jnp.sin(self.w)

    def apply(self, x):
        return x @ jnp.sin(self.w)


def in_jit(x):
    return jax.jit(lambda x: x @ jnp.sin(CONTAINER["w"]))(x)


# Programs that materialize a weight that is not one of their arguments.
PROGRAMS = {
    "in a container of the module": lambda x: x @ jnp.sin(CONTAINER["w"]),
    "by a function of lax": lambda x: x @ lax.sin(CONTAINER["w"]),
    "by an operator": lambda x: x @ CONTAINER["w"] ** 2,
    "by a method": lambda x: x @ CONTAINER["w"].cumsum(0),
    "by an item": lambda x: x @ jnp.sin(CONTAINER["w"].at[0].set(1.0)),
    "in an object that is called": Model(QUANTIZED),
    "in an object of a method": Model(QUANTIZED).apply,
    "in jit": in_jit,
    "in a function that was compiled": jax.jit(lambda x: x @ jnp.sin(CONTAINER["w"])),
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda _, x: x @ jnp.sin(CONTAINER["w"]), x),
    "in vmap": lambda x: jax.vmap(lambda x: x @ jnp.sin(CONTAINER["w"]))(x),
    "in grad": lambda x: jax.grad(lambda x: (x @ jnp.sin(CONTAINER["w"])).sum())(x),
    "in an inner implicit": lambda x: x @ vn.implicit(jnp.sin)(CONTAINER["w"]),
    "transposed": lambda x: x @ jnp.sin(jnp.transpose(CONTAINER["w"])),
}
COMPUTED = {
    "quantized there": lambda x: jnp.sin(vn.quant.quantize(x, "int8")),
    "and by an operator": lambda x: vn.quant.quantize(x, "int8") ** 2,
    "and in jit": lambda x: jax.jit(jnp.sin)(vn.quant.quantize(x, "int8")),
    "by scales that are known": lambda x: jnp.sin(
        vn.quant.quantize_with_scale(x, "int8", jnp.ones((1, 1)))
    ),
    "put together of what is": lambda x: jnp.sin(vn.types.LoraArray(x @ x.T, x[:, :1], x[:, :1].T)),
}


def error_message(run, *args):
    with pytest.raises(vn.MaterialiseError) as error:
        run(*args)
    return str(error.value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_weight_in_a_container_is_reported(name):
    program = PROGRAMS[name]
    run = vn.implicit(program, on_materialise="error_weights")
    assert f", of {FOUND}" in error_message(jax.jit(run), X)
    report = vn.explain(program)(X)
    assert {event.weights for event in report.materialised} == {(FOUND,)}
    assert report.weight_nbytes > 0


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_weight_used_inside_jit_is_reported(wrap):
    program = lambda x, w: in_jit(x) + x @ w
    assert FOUND in error_message(
        wrap(vn.implicit(program, on_materialise="error_weights")), X, OTHER
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_weight_in_a_captured_dict_has_its_path(wrap):
    params = {"w": QUANTIZED}
    run = vn.implicit(lambda x: x @ jnp.sin(params["w"]), on_materialise="error_weights")
    assert "of params.w" in error_message(wrap(run), X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("within", [lambda f: f, jax.jit], ids=["at once", "in jit"])
@pytest.mark.parametrize("name", ["veneer", "equinox"])
def test_a_weight_combined_from_partitions_is_reported(name, within, wrap):
    params = {"w": LORA}
    mask = vn.trainable(params)
    split, combine = {
        "veneer": (vn.tree.partition, vn.tree.combine),
        "equinox": (eqx.partition, eqx.combine),
    }[name]
    trained, rest = split(params, mask)
    program = within(lambda trained, rest: X @ jnp.sin(combine(trained, rest)["w"]))
    run = vn.implicit(program, on_materialise="error_weights")
    assert "of rest.w" in error_message(wrap(run), trained, rest)
    captured = vn.implicit(lambda t: program(t, rest), on_materialise="error_weights")
    assert "of rest.w" in error_message(wrap(captured), trained)
    of_grad = vn.implicit(
        lambda t: jax.grad(lambda t: program(t, rest).sum())(t), on_materialise="error_weights"
    )
    assert "of rest.w" in error_message(wrap(of_grad), trained)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_array_is_not_a_weight(name, wrap):
    program = lambda x, w: (COMPUTED[name](x), w)
    wrap(vn.implicit(program, on_materialise="error_weights"))(X, OTHER)
    error_message(wrap(vn.implicit(program, on_materialise="error")), X, OTHER)
    report = vn.explain(program)(X, OTHER)
    assert report.materialised
    assert report.weight_nbytes == 0


def test_a_product_with_a_container_weight_names_it():
    (event,) = vn.explain(lambda x: x @ CONTAINER["w"])(X).events
    assert (event.primitive, event.weights) == ("dot_general", (FOUND,))


def test_one_trace_distinguishes_weights_from_intermediates():
    square = jax.jit(lambda w: jnp.sin(w))
    x = jnp.ones((8, 8))
    program = lambda x, w: (
        square(vn.quant.quantize(x, "int8", channelwise_axes=(1,))).sum()
        + square(CONTAINER["w"]).sum()
        + square(w).sum()
    )
    paths = [event.weights for event in vn.explain(program)(x, OTHER).materialised]
    assert paths == [(), (FOUND,), ("w",)]


def test_reporting_does_not_change_the_weight():
    before = set(vars(QUANTIZED))
    vn.explain(PROGRAMS["by an operator"])(X)
    vn.explain(PROGRAMS["by a function of lax"])(X)
    assert set(vars(QUANTIZED)) - {"_aval"} == before - {"_aval"}
