"""Products of mx formats by `jax.nn.scaled_matmul`, on GPUs that multiply block scales.

No test runs it on a GPU. They lower programs for CUDA, and compute with the definition of
scaled_matmul in its place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.arrays import normal

import veneer as vn
from veneer.quant import quantize
from veneer.quant.ops import by_xla
from veneer.quant.ops.product import QuantizedProduct

HOW = "jax.nn.scaled_matmul of codes and scales"


def defined(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type=jnp.float32):
    """Compute `jax.nn.scaled_matmul` from its definition. JAX 0.10.2 has none on CPUs."""
    widen = lambda x, scales: (
        x.astype(jnp.float32)
        * jnp.repeat(scales.astype(jnp.float32), x.shape[-1] // scales.shape[-1], axis=-1)
    )
    assert lhs.dtype.itemsize == lhs_scales.dtype.itemsize == 1
    product = jnp.einsum("bmk,bnk->bmn", widen(lhs, lhs_scales), widen(rhs, rhs_scales))
    return product.astype(preferred_element_type)


@pytest.fixture
def by_definition(monkeypatch):
    monkeypatch.setattr(jax.nn, "scaled_matmul", defined)
    yield
    jax.clear_caches()  # JAX keeps what it traced


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(by_xla, "has_block_scaled_matmul", lambda: True)


def operand(*shape, axis, qtype="mxfp8", seed=0):
    channelwise = [i for i in range(len(shape)) if i != axis]
    return quantize(
        normal(*shape, seed=seed), qtype, channelwise_axes=channelwise, tiled_axes={axis: 32}
    )


def how(f, *args):
    return [event.how for event in vn.explain(f)(*args).events]


# Shapes, and the contracted and batch axes of each operand.
PRODUCTS = {
    "matrices": ((5, 64), (64, 7), (1, 0), ((), ())),
    "transposed": ((64, 3), (7, 64), (0, 1), ((), ())),
    "vectors": ((32,), (32,), (0, 0), ((), ())),
    "batch": ((2, 5, 32), (32, 2, 3), (2, 0), ((0,), (1,))),
    "two batches": ((5, 2, 96, 3), (3, 4, 96, 2), (2, 2), ((1, 3), (3, 0))),
    "many rows": ((2, 3, 5, 32), (32, 2, 2), (3, 0), ((), ())),
}


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_agree_with_the_dense_arrays(name):
    qtypes = ("mxfp8_e5m2", "mxfp8") if name == "transposed" else ("mxfp8", "mxfp8")
    *shapes, contracted, batch = PRODUCTS[name]
    lhs, rhs = (
        operand(*shape, axis=axis, qtype=qtype, seed=seed)
        for seed, (shape, axis, qtype) in enumerate(zip(shapes, contracted, qtypes, strict=True))
    )
    numbers = (tuple((axis,) for axis in contracted), batch)
    product = lambda lhs, rhs: by_xla.multiply_block_scaled(
        QuantizedProduct.create(lhs, rhs, numbers)
    )
    actual = jax.jit(product)(lhs, rhs)
    expected = lax.dot_general(lhs.dequantize(), rhs.dequantize(), numbers)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("in_axes", [(0, None), (None, 2), (0, 2)], ids=str)
def test_vmap_folds_the_mapped_axis_into_the_batch(in_axes):
    lhs = operand(*(3, 5, 64)[in_axes[0] is None :], axis=2 - (in_axes[0] is None))
    rhs = operand(*(64, 7, 3)[: 2 + (in_axes[1] is not None)], axis=0, seed=1)
    numbers = (((1,), (0,)), ((), ()))
    product = lambda lhs, rhs: by_xla.multiply_block_scaled(
        QuantizedProduct.create(lhs, rhs, numbers)
    )
    # Outside `implicit`, `vmap` maps each leaf along the same axis number.
    actual = jax.jit(jax.vmap(product, in_axes))(lhs, rhs)
    expected = jax.vmap(jnp.matmul, in_axes)(lhs.dequantize(), rhs.dequantize())
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("blackwell")
def test_only_cuda_programs_call_scaled_matmul():
    x, w = operand(5, 64, axis=1), operand(64, 7, axis=0, seed=1)
    stacked = operand(3, 5, 64, axis=2)
    assert how(vn.quant.dot, x, w) == [HOW]
    for f, args in (
        (vn.quant.dot, (x, w)),
        (jax.vmap(vn.quant.dot, in_axes=(0, None)), (stacked, w)),
        (vn.implicit(lambda x, w: x @ w), (x, w)),
    ):
        traced = jax.jit(f).trace(*args)
        lowered = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu")}
        assert "block_scaled_dot" in lowered["cuda"]
        assert "block_scaled_dot" not in lowered["cpu"]
        assert "custom_call" not in lowered["cpu"]
    np.testing.assert_allclose(
        vn.quant.dot(x, w), x.dequantize() @ w.dequantize(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("blackwell")
def test_derivatives_agree_with_the_other_strategies():
    x, w = normal(5, 64), operand(64, 7, axis=0, seed=1)
    rules = [vn.quant.Rule(".*", "mxfp8", act_qtype="mxfp8", tile_axis=0)]
    model = lambda w, x: (x @ w) ** 2
    small = vn.quant.quantize_tree(normal(64, 7, seed=1), rules, model=model, args=(x,))
    loss = lambda x: vn.implicit(model)(small, x).sum()
    assert HOW in how(model, small, x)
    with_it = jax.value_and_grad(loss)(x)
    by_xla.has_block_scaled_matmul = lambda: False
    without = jax.value_and_grad(loss)(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), with_it, without)
    # Derivatives by the scale, which is a leaf.
    y = lambda scale: vn.quant.dot(operand(5, 64, axis=1), w.replace(scale=scale)).sum()
    assert jnp.isfinite(jax.grad(y)(w.scales())).all()


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (lambda: normal(5, 64), lambda: operand(64, 7, axis=0)),
        (lambda: operand(5, 64, axis=1), lambda: normal(64, 7)),
        (lambda: operand(5, 64, axis=1), lambda: operand(64, 32, axis=1)),  # tiled free axis
        (lambda: operand(0, 64, axis=1), lambda: operand(64, 7, axis=0)),
        (lambda: operand(5, 64, axis=1, qtype="mxfp4"), lambda: operand(64, 7, axis=0)),
        (lambda: operand(5, 64, axis=1, qtype="mxfp6"), lambda: operand(64, 7, axis=0)),
        (lambda: quantize(normal(5, 64), "mxfp8_16"), lambda: operand(64, 7, axis=0)),
        (lambda: operand(5, 64, axis=1), lambda: operand(64, 7, axis=0, qtype="int8")),
    ],
)
def test_other_operands_use_other_strategies(lhs, rhs):
    x, w = lhs(), rhs()
    assert HOW not in how(vn.quant.dot, x, w)
    expected = jnp.dot(*map(vn.materialise, (x, w)))
    np.testing.assert_allclose(vn.quant.dot(x, w), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "expected"), [("10.0", True), ("9.0", False), ("gfx942", False), (None, False)]
)
def test_only_blackwell_gpus_multiply_block_scales(capability, expected, monkeypatch):
    assert not by_xla.has_block_scaled_matmul()  # tests run on CPUs
    device = type("Device", (), {} if capability is None else {"compute_capability": capability})
    monkeypatch.setattr(by_xla, "runs_on_gpu", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda: [device()])
    assert by_xla.has_block_scaled_matmul() is expected


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX has it on GPUs alone")
def test_scaled_matmul_agrees_with_the_dense_product():
    x, w = operand(5, 64, axis=1), operand(64, 7, axis=0, seed=1)
    actual = by_xla.multiply_block_scaled(QuantizedProduct.create(x, w, (((1,), (0,)), ((), ()))))
    np.testing.assert_allclose(actual, x.dequantize() @ w.dequantize(), rtol=1e-5, atol=1e-5)
