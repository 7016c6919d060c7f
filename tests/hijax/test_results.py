"""Typed results of jitted functions, which callers receive as implicit arrays."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def program(x, w):
    return {"transposed": jnp.transpose(w), "product": jnp.dot(x, w)}


def check(out, x, weight, agree):
    assert type(out["transposed"]) is type(weight.value)
    agree(out, program(x, weight.dense))


@pytest.fixture
def run():
    """Jit the program in a new function, so that no two tests share a cache entry."""
    return jax.jit(lambda x, w: program(x, w))


def test_compiled_functions_return_typed_results(run, x, weight, agree):
    compiled = run.lower(x, weight.value).compile()
    check(compiled(x, weight.value), x, weight, agree)
    assert compiled.out_tree == jax.tree.structure(run(x, weight.value))


def test_abstract_results_have_the_shapes_of_leaves(run, x, weight):
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shapes = lambda tree: (jax.tree.structure(tree), list(map(shape, jax.tree.leaves(tree))))
    expected = shapes(run(x, weight.value))
    assert shapes(jax.eval_shape(program, x, weight.value)) == expected
    assert shapes(run.trace(x, weight.value).out_info) == expected


def test_exported_functions_return_typed_results(run, x, weight, agree):
    exported = jax.export.export(run)(x, weight.value)
    loaded = jax.export.deserialize(exported.serialize())
    check(loaded.call(x, weight.value), x, weight, agree)


def test_out_shardings_apply_to_the_leaves_of_a_result(x, weight, agree):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated, columns = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "d"))
    sharded = jax.jit(program, out_shardings={"transposed": columns, "product": replicated})
    for _ in range(2):
        out = sharded(x, weight.value)
        check(out, x, weight, agree)
    stored = out["transposed"].w if hasattr(out["transposed"], "w") else out["transposed"].packed
    assert stored.sharding.spec == P(None, "d")


def test_a_result_within_an_outer_jit_stays_typed(run, x, weight, agree):
    outer = jax.jit(lambda x, w: jnp.dot(x, run(x, w)["transposed"].T))
    agree(outer(x, weight.value), x @ weight.dense)
    name = "q8" if weight.dense_tangent else "lora"
    jaxpr = str(jax.make_jaxpr(outer)(x, weight.value))
    assert f"{name}[6,4] = jit[" in re.sub(r" \w+:f32\[3,6\]", "", jaxpr)


def test_gradients_through_a_jitted_result_agree(run, x, weight, agree_by_leaves):
    loss = lambda convert: lambda w: jnp.sum(jnp.sin(jnp.dot(x, convert(w))))
    run(x, weight.value)  # returns leaves; under grad, the cached call returns typed values
    loss_of_result = loss(lambda w: jnp.transpose(run(x, w)["transposed"]))
    expected = weight.reference(jax.grad, loss(lambda w: w))
    agree_by_leaves(jax.grad(loss_of_result)(weight.value), expected)


def test_a_jitted_function_returns_a_tangent(x, weight, agree):
    t = weight.dense if weight.dense_tangent else weight.value
    push_forward = jax.jit(lambda w: jax.jvp(jnp.transpose, (w,), (t,)))
    push_forward(weight.value)
    out, tangent = push_forward(weight.value)
    assert type(out) is type(weight.value)
    assert tangent.shape == (6, 4)
    agree(push_forward.lower(weight.value).compile()(weight.value)[0], weight.dense.T)


def test_a_layout_for_a_typed_result_raises(weight):
    from jax.experimental.layout import Format, Layout

    sharding = NamedSharding(jax.make_mesh((1,), ("d",)), P())
    laid_out = Format(Layout((0, 1)), sharding)
    with pytest.raises(NotImplementedError, match=r"for a result of type \w+\[6,4\]"):
        jax.jit(jnp.transpose, out_shardings=laid_out)(weight.value)
