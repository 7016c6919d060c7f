"""Compare the primitive of products with stored matrices with its reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veneer.kernels import Codes, MatmulOperands, MatmulProblem, matmul
from veneer.kernels.common.problem import row_bytes

INT4 = Codes(4, values=(*map(float, range(8)), *map(float, range(-8, 0))))
INT8 = Codes(8, "int8")
R, C = 96, 182  # rows end within a vector


def dense(operands, product):
    """Return the dense matrix `[B, R, C]`."""
    codes = operands.packed
    if product.codes.bits == 4:
        fields = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)
        codes = jnp.asarray(product.codes.values)[fields[..., : product.columns]]
    codes = codes.astype(jnp.float32)
    spread = lambda x: x.repeat(R // x.shape[1], 1).repeat(C // x.shape[2], 2)
    if operands.zero_point is not None:
        codes -= spread(operands.zero_point.astype(jnp.float32) - product.offset)
    return codes * spread(operands.scale)


def reference(operands, product):
    spec = "bmr,brc->bmc" if product.contracting == "rows" else "bmc,brc->bmr"
    out = jnp.einsum(spec, operands.x.astype(jnp.float32), dense(operands, product))
    if operands.x_scale is not None:
        out *= operands.x_scale[..., None]
    return out.astype(product.out_dtype)


def example(codes, contracting="rows", batch=1, rows=3, tile=(32, 1), integer=False, zero=None):
    rng = np.random.default_rng(0)
    k = R if contracting == "rows" else C
    packed = rng.integers(0, 256, (batch, R, row_bytes(C, codes.bits)), np.uint8)
    x = rng.normal(size=(batch, rows, k))
    operands = MatmulOperands(
        jnp.asarray(
            rng.integers(-128, 128, x.shape) if integer else x, "int8" if integer else "f4"
        ),
        jnp.asarray(packed if codes.bits < 8 else packed.view(np.int8)),
        jnp.asarray(rng.uniform(0.5, 1, (batch, R // tile[0], C // tile[1])) / 64, jnp.float32),
        None if zero is None else jnp.asarray(rng.integers(-8, 8, (batch, *zero)), jnp.int8),
        jnp.asarray(rng.uniform(0.5, 1, (batch, rows)) / 8, jnp.float32) if integer else None,
    )
    return operands, MatmulProblem(codes, C, contracting, "float32", 0, reference)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Sums in another order, some of them of sines of such.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max(initial=1))


of_each_case = pytest.mark.parametrize(
    ("codes", "contracting", "options"),
    [
        (INT4, "rows", {}),
        (INT4, "columns", {"tile": (1, 26)}),
        (INT8, "rows", {"batch": 2}),
        (INT4, "rows", {"zero": (1, C)}),
        (INT4, "columns", {"zero": (3, C // 26), "tile": (96, 26)}),
        (INT4, "columns", {"integer": True, "zero": (R, 1), "tile": (1, 91)}),
        (INT8, "rows", {"integer": True, "batch": 2, "tile": (1, 1)}),
    ],
)


@of_each_case
def test_products_equal_the_reference(codes, contracting, options):
    operands, product = example(codes, contracting, **options)
    actual = jax.jit(lambda operands: matmul(operands, product))(operands)
    assert_close(actual, reference(operands, product))
    assert_close(matmul(operands, product), actual)  # computed at once


def floats(operands):
    return {
        name: leaf
        for name, leaf in operands._asdict().items()
        if leaf is not None and leaf.dtype == jnp.float32
    }


@of_each_case
def test_derivatives_equal_the_reference(codes, contracting, options):
    operands, product = example(codes, contracting, **options)

    def derivatives(f, variables):
        loss = lambda variables: jnp.sum(jnp.sin(f(operands._replace(**variables), product)))
        tangents = jax.tree.map(jnp.cos, variables)
        return jax.grad(loss)(variables), jax.jvp(jax.grad(loss), (variables,), (tangents,))

    run = jax.jit(lambda variables: [derivatives(f, variables) for f in (matmul, reference)])
    assert_close(*run(floats(operands)))


#: The operands that are mapped, and their mapped axes.
MAPPED = {
    "activations": {"x": 0},
    "activations, by their last axis": {"x": 3},
    "the matrix": {"packed": 1, "scale": 0},
    "all": {"x": 2, "packed": 0, "scale": 3},
    "scales alone": {"scale": 1},
}


@pytest.mark.parametrize("axes", MAPPED.values(), ids=MAPPED)
def test_vmap_equals_vmap_of_the_reference(axes):
    operands, product = example(INT4, batch=2)
    for name, axis in axes.items():
        leaf = getattr(operands, name)
        several = jnp.stack([leaf, jnp.flip(leaf), leaf], axis)
        operands = operands._replace(**{name: several})
    in_axes = MatmulOperands(**{name: axes.get(name) for name in MatmulOperands._fields})
    run = lambda f: jax.vmap(lambda *xs: f(MatmulOperands(*xs), product), in_axes=tuple(in_axes))
    actual, expected = jax.jit(lambda xs: [run(f)(*xs) for f in (matmul, reference)])(operands)
    assert_close(actual, expected)


def test_vmap_maps_int8_activations_with_their_scales():
    operands, product = example(INT8, integer=True)
    x, x_scale = (jnp.stack([leaf, 2 * leaf]) for leaf in (operands.x // 2, operands.x_scale))
    run = lambda x, x_scale: matmul(operands._replace(x=x, x_scale=x_scale), product)
    actual = jax.jit(jax.vmap(run))(x, x_scale)
    for i in range(2):
        assert_close(actual[i], reference(operands._replace(x=x[i], x_scale=x_scale[i]), product))
    one_scale = jax.jit(jax.vmap(run, in_axes=(0, None)))(x, x_scale[1])
    assert_close(one_scale[1], actual[1])


def test_mapped_activations_become_rows_and_not_a_batch():
    operands, product = example(INT4)
    x = jnp.stack([operands.x] * 5)
    text = jax.jit(jax.vmap(lambda x: matmul(operands._replace(x=x), product))).lower(x).as_text()
    assert "tensor<1x15x96xf32>" in text
    assert "tensor<5x96x91xui8>" not in text


@pytest.mark.parametrize("shape", [(1, 0, R), (0, 3, R)])
def test_products_and_gradients_can_be_empty(shape):
    operands, product = example(INT4)
    operands = MatmulOperands(jnp.zeros(shape), *(leaf[: shape[0]] for leaf in operands[1:3]))
    run = jax.value_and_grad(lambda x: matmul(operands._replace(x=x), product).sum())
    assert [y.shape for y in jax.jit(run)(operands.x)] == [(), shape]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_activations_equal_the_reference(dtype):
    operands, product = example(INT4)
    operands = operands._replace(x=operands.x.astype(dtype))
    for out_dtype in ("float32", dtype):
        told = dataclasses.replace(product, out_dtype=out_dtype)
        actual = jax.jit(lambda operands, told=told: matmul(operands, told))(operands)
        assert actual.dtype == out_dtype
        rtol = 2 * float(jnp.finfo(out_dtype).eps) + 1e-5
        np.testing.assert_allclose(
            actual.astype("f4"), reference(operands, product), rtol=rtol, atol=1e-4
        )
        grad = jax.jit(jax.grad(lambda x, told=told: matmul(operands._replace(x=x), told).sum()))
        assert grad(operands.x).dtype == dtype


def test_equal_products_are_computed_once():
    operands, product = example(INT8)
    again = MatmulProblem(*(getattr(product, field.name) for field in dataclasses.fields(product)))
    twice = jax.jit(lambda operands: matmul(operands, product) + matmul(operands, again))
    assert twice.lower(operands).as_text().count("stablehlo.custom_call @veneer_") == 1
