"""Rules for jitted functions of JAX, which are recognized by the program in the jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn


class Diagonal(vn.ImplicitArray):
    diagonal: jax.Array  # [..., n]

    def materialise(self):
        return self.diagonal[..., None] * jnp.eye(self.diagonal.shape[-1])


@vn.register(jnp.linalg.det)
def _(x: Diagonal):
    return x.diagonal.prod(-1)


@vn.register(jnp.linalg.slogdet)
def _(x: Diagonal):
    return jnp.sign(x.diagonal).prod(-1), jnp.log(abs(x.diagonal)).sum(-1)


@vn.register(jnp.linalg.inv)
def _(x: Diagonal):
    return Diagonal(1 / x.diagonal)


@vn.register(functools.partial(jnp.diagonal, offset=0))
def _(x: Diagonal):
    return x.diagonal


@vn.register(jnp.linalg.cond)
def _(x: Diagonal):
    return NotImplemented


one = Diagonal(arrays.arange(1.0, 6.0))
ROWS = np.arange(1.0, 16.0).reshape(3, 5)
several = Diagonal(arrays.array(ROWS))


def run(x):
    det, (sign, logdet), inverse = jnp.linalg.det(x), jnp.linalg.slogdet(x), jnp.linalg.inv(x)
    return det, sign, logdet, inverse


strict = functools.partial(vn.implicit, on_materialise="error")


def check_results(out, dense):
    assert isinstance(out[3], Diagonal)
    for x, y in zip(vn.materialise(out), dense, strict=True):
        assert jnp.allclose(x, y, rtol=1e-4)


@pytest.mark.parametrize(
    ("transformed", "x"),
    [
        (strict(run), one),
        (strict(run), several),  # the functions take stacks themselves
        (jax.jit(strict(run)), one),
        (strict(jax.jit(run)), one),
        (jax.vmap(strict(run)), several),
        (strict(jax.vmap(run)), several),
        (strict(jax.vmap(jax.vmap(run))), Diagonal(arrays.array(ROWS[None]))),
        (strict(lambda x: jax.lax.map(run, x)), several),
    ],
)
def test_a_rule_for_a_function_runs_on_each_call(transformed, x):
    dense = vn.materialise(x)
    for _ in range(2):  # without and with the cache
        check_results(transformed(x), run(dense))


def test_the_rule_of_a_function_applies_to_a_partial():
    diagonal = strict(functools.partial(jnp.diagonal, offset=0))
    assert diagonal(one) is one.diagonal or jnp.array_equal(diagonal(one), one.diagonal)
    with pytest.raises(vn.MaterialiseError):
        strict(functools.partial(jnp.diagonal, offset=1))(one)


def test_functions_with_rules_have_derivatives():
    by_leaves = jax.grad(vn.implicit(jnp.linalg.det))(one)
    by_the_dense = vn.implicit(jax.grad(jnp.linalg.det))(one)
    dense = jax.grad(jnp.linalg.det)(vn.materialise(one))
    assert jnp.allclose(by_leaves.diagonal, jnp.diagonal(dense), rtol=1e-4)
    assert jnp.allclose(by_the_dense, dense, rtol=1e-4)


def test_another_function_with_the_same_name_has_no_rule():
    @jax.jit
    def det(x):
        return x.sum()

    assert vn.implicit(det)(one) == 15.0
    assert vn.implicit(jax.vmap(det))(several).shape == (3,)


def test_a_rule_for_a_function_can_decline():
    found = vn.implicit(jnp.linalg.cond)(one)
    assert jnp.allclose(found, jnp.linalg.cond(vn.materialise(one)), rtol=1e-4)


def test_the_report_names_the_function():
    report = vn.explain(run)(one)
    assert "slogdet" in str(report)
    assert any("test_functions.py" in event.rule for event in report.events)


def test_a_result_of_another_shape_raises():
    class Odd(Diagonal):
        pass

    @vn.register(jnp.linalg.det)
    def _(x: Odd):
        return x.diagonal

    with pytest.raises(TypeError, match=r"for det\(Odd:f32\[5,5\]\) returns f32\[5\], where det"):
        vn.implicit(jnp.linalg.det)(Odd(one.diagonal))
