"""Typed results of jitted functions, which leave those as trees, however they are compiled."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def program(x, w):
    return {"turned": jnp.transpose(w), "product": jnp.dot(x, w)}


def check(out, x, weight, agree):
    assert type(out["turned"]) is type(weight.value)
    agree(out, program(x, weight.dense))


@pytest.fixture
def run():
    """The program jitted; as a function of its own, lest the tests should share a cache."""
    return jax.jit(lambda x, w: program(x, w))


def test_ahead_of_time(run, x, weight, agree):
    compiled = run.lower(x, weight.value).compile()
    check(compiled(x, weight.value), x, weight, agree)
    assert compiled.out_tree == jax.tree.structure(run(x, weight.value))


def test_shapes_are_those_of_leaves(run, x, weight):
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shapes = lambda tree: (jax.tree.structure(tree), list(map(shape, jax.tree.leaves(tree))))
    expected = shapes(run(x, weight.value))
    assert shapes(jax.eval_shape(program, x, weight.value)) == expected
    assert shapes(run.trace(x, weight.value).out_info) == expected


def test_exported(run, x, weight, agree):
    exported = jax.export.export(run)(x, weight.value)
    loaded = jax.export.deserialize(exported.serialize())
    check(loaded.call(x, weight.value), x, weight, agree)


def test_a_sharding_of_results_is_that_of_leaves(x, weight, agree):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, columns = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "d"))
    placed = jax.jit(program, out_shardings={"turned": columns, "product": whole})
    for _ in range(2):
        out = placed(x, weight.value)
        check(out, x, weight, agree)
    held = out["turned"].w if hasattr(out["turned"], "w") else out["turned"].packed
    assert held.sharding.spec == P(None, "d")


def test_what_is_within_another_jit_stays_typed(run, x, weight, agree):
    outer = jax.jit(lambda x, w: jnp.dot(x, run(x, w)["turned"].T))
    agree(outer(x, weight.value), x @ weight.dense)
    name = "q8" if weight.dense_tangent else "lora"
    assert f"{name}[6,4] = jit[" in re.sub(r" \w+:f32\[3,6\]", "", _text(outer, x, weight))


def _text(function, x, weight):
    return str(jax.make_jaxpr(function)(x, weight.value))


def test_a_derivative_by_what_the_outermost_jit_gave(run, x, weight, agree_by_leaves):
    loss = lambda see: lambda w: jnp.sum(jnp.sin(jnp.dot(x, see(w))))
    run(x, weight.value)  # its results are leaves, and those of a call under grad are typed
    of_run = loss(lambda w: jnp.transpose(run(x, w)["turned"]))
    expected = weight.reference(jax.grad, loss(lambda w: w))
    agree_by_leaves(jax.grad(of_run)(weight.value), expected)


def test_a_tangent_as_a_result(x, weight, agree):
    t = weight.dense if weight.dense_tangent else weight.value
    pushed = jax.jit(lambda w: jax.jvp(jnp.transpose, (w,), (t,)))
    pushed(weight.value)
    out, tangent = pushed(weight.value)
    assert type(out) is type(weight.value)
    assert tangent.shape == (6, 4)
    agree(pushed.lower(weight.value).compile()(weight.value)[0], weight.dense.T)


def test_a_layout_is_refused(weight):
    from jax.experimental.layout import Format, Layout

    sharding = NamedSharding(jax.make_mesh((1,), ("d",)), P())
    laid_out = Format(Layout((0, 1)), sharding)
    with pytest.raises(NotImplementedError, match=r"for a result of type \w+\[6,4\]"):
        jax.jit(jnp.transpose, out_shardings=laid_out)(weight.value)
