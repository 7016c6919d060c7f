"""`vn.quant.einsum` and `dot`: jax.numpy's semantics, quantised arithmetic."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.array_types import Lora

import veneer as vn
from veneer.quant import quantize


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def events(f, *args):
    return [(event.primitive, event.how) for event in vn.explain(f)(*args).events]


def assert_close(actual, expected):
    assert isinstance(actual, jax.Array)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


X = quantize(normal(2, 3, 32, seed=1), "int8", channelwise_axes=[0, 1])
W = quantize(normal(32, 4, seed=2), "uint4", channelwise_axes=[1])
STACKED = quantize(normal(2, 32, 4, seed=3), "int4", channelwise_axes=[0, 2])
V = normal(4, 5, seed=4)
INTEGER, OUTSIDE = "integer product, scaled outside", "rhs scaled outside"

EINSUMS = {
    "matrix product": ("abk,kn->abn", X, W),
    "ellipsis": ("...k,kn->...n", X, W),
    "implicit output": ("abk,kn", X, W),
    "transposed output": ("abk,kn->nba", X, W),
    "batch": ("abk,akn->abn", X, STACKED),
    "outer": ("ab,cd->abcd", V, V),
    "sum over two": ("abk,akn->n", X, STACKED),
    "three operands": ("abk,kn,nm->abm", X, W, V),
    "transposed": ("kn->nk", W),
    "sum of one": ("kn->n", W),
}


@pytest.mark.parametrize("args", EINSUMS.values(), ids=EINSUMS)
def test_einsum_agrees_with_dense_arrays(args):
    subscripts, *operands = args
    run = jax.jit(
        lambda operands: (
            vn.quant.einsum(subscripts, *operands),
            jnp.einsum(subscripts, *vn.materialise(operands)),
        )
    )
    assert_close(*run(operands))


@pytest.mark.parametrize("name", ["matrix product", "ellipsis", "transposed output", "batch"])
def test_einsum_multiplies_codes(name):
    subscripts, *operands = EINSUMS[name]
    ways = events(lambda *operands: vn.quant.einsum(subscripts, *operands), *operands)
    assert ("dot_general", INTEGER) in ways
    assert all(primitive in ("dot_general", "transpose") for primitive, _ in ways)


def test_einsum_takes_axes_and_options():
    expected = jnp.einsum(X.dequantize(), [0, 1, 2], W.dequantize(), [2, 3], [3, 0, 1])
    options = {"precision": "highest", "preferred_element_type": jnp.float32, "optimize": True}
    assert_close(vn.quant.einsum(X, [0, 1, 2], W, [2, 3], [3, 0, 1], **options), expected)


@pytest.mark.parametrize("function", [vn.quant.dot, vn.quant.einsum])
def test_other_implicit_operands_are_materialised(function):
    lora = Lora(normal(4, 32), normal(4, 2), normal(2, 32))
    args = ("ij,jk->ik",) if function is vn.quant.einsum else ()
    assert_close(function(*args, lora, W), lora.materialise() @ W.dequantize())


def test_dot_takes_what_numpys_takes():
    parameters = list(inspect.signature(vn.quant.dot).parameters)
    assert parameters == ["a", "b", "precision", "preferred_element_type", "out_sharding"]
    row = quantize(normal(32), "int8")
    for a, b in [(X, W), (V.T, V), (row, W), (X, row), (X, STACKED), (2.0, row), (row, row)]:
        assert_close(vn.quant.dot(a, b), jnp.dot(*vn.materialise((a, b))))
    half = vn.quant.dot(X, W, "highest", jnp.bfloat16)
    assert half.dtype == jnp.bfloat16


def test_dot_multiplies_codes():
    assert events(vn.quant.dot, X, W) == [("dot_general", INTEGER)]
    assert events(vn.quant.dot, normal(2, 32), W) == [("dot_general", OUTSIDE)]


# Programs that know nothing of quantised arrays.


PROGRAMS = {
    "matmul of batches": (jnp.matmul, X, STACKED),
    "tensordot": (lambda x, w: jnp.tensordot(x, w, ((2,), (0,))), X, W),
    "inner": (lambda x, w: jnp.inner(x, w.T), X, W),
    "lax.dot": (lambda x, w: lax.dot(x[0], w), X, W),
    "batch_matmul": (lax.batch_matmul, X, STACKED),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_reach_integer_products(program):
    f, *args = PROGRAMS[program]
    assert_close(vn.materialise(vn.implicit(f)(*args)), f(*vn.materialise(args)))
    assert ("dot_general", INTEGER) in events(f, *args)
    assert not vn.explain(f)(*args).materialised


def test_a_public_function_within_implicit_meets_the_rule_once():
    run = lambda x, w: vn.quant.dot_general(x, w, (([2], [0]), ([], [])))
    assert events(run, X, W) == [("dot_general", INTEGER)]
    assert_close(vn.implicit(run)(X, W), X.dequantize() @ W.dequantize())
