"""Products with a scale per term of the sum, as in attention to values with scales per token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.kernels.gpu import hopper
from veneer.kernels.gpu import matmul as gpu_matmul

H, M, S, D = 2, 3, 512, 64
P = arrays.normal(H, M, S)
V = arrays.normal(H, S, D, seed=1)
TURNED, MATRIX = arrays.normal(H, D, S, seed=1), arrays.normal(S, D, seed=1)

PROGRAMS = {  # the weights of tokens, and the contracted axis of `V`
    "values": (lambda p, v: p @ v, V, (0, 1)),
    "one scale for all heads": (lambda p, v: p @ v, V, (1,)),
    "by the other side": (lambda p, v: jnp.einsum("hmk,hdk->hmd", p, v), TURNED, (0, 2)),
    "swapped": (lambda p, v: p @ v.swapaxes(1, 2), TURNED, (0, 2)),
    "on the left": (lambda p, v: jnp.einsum("hkd,hmk->hdm", v, p), V, (0, 1)),
    "a matrix": (lambda p, v: p[0] @ v, MATRIX, (0,)),
    "two axes": (lambda p, v: jnp.tensordot(p[:2].swapaxes(0, 1), v, 2), V, (0, 1)),
}


@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4", "fp8", "uint4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_scale_is_multiplied_into_the_other_operand(name, qtype):
    program, v, axes = PROGRAMS[name]
    q = vn.quant.quantize(v, qtype, channelwise_axes=axes)
    assert (q.zero_point is not None) == (qtype == "uint4")
    (event,) = (e for e in vn.explain(program)(P, q).events if e.primitive == "dot_general")
    assert event.how.startswith("CPU kernel")
    has_row_of_zero_points = (name, qtype) == ("by the other side", "uint4")
    assert ("multiplied into" in event.how) != has_row_of_zero_points
    found = jax.jit(vn.implicit(program, on_materialise="error"))(P, q)
    np.testing.assert_allclose(found, program(P, q.dequantize()), rtol=1e-4, atol=1e-3)


def test_tiles_and_scales_per_channel_are_not_folded():
    for how in (
        {"channelwise_axes": (0,), "tiled_axes": {1: 2}},
        {"channelwise_axes": (0, 1, 2)},
        {"channelwise_axes": (0, 2)},
    ):
        q = vn.quant.quantize(V, "int8", **how)
        (event,) = vn.explain(jnp.matmul)(P, q).events
        assert "multiplied into" not in event.how


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_rounded_once(dtype):
    p, v = P.astype(dtype), V.astype(dtype)
    q = vn.quant.quantize(v, "int8", channelwise_axes=(0, 1))
    found = jax.jit(vn.implicit(jnp.matmul))(p, q)
    exact = p.astype(jnp.float32) @ q.replace(dense_dtype="float32").dequantize()
    assert found.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=eps, atol=1e-3)


def test_derivatives_agree_with_the_dense_array():
    q = vn.quant.quantize(V, "int8", channelwise_axes=(0, 1))
    g = jax.random.normal(jax.random.key(2), (H, M, D))
    by = lambda scale, p: (g * vn.implicit(jnp.matmul)(p, q.replace(scale=scale))).sum()
    dense = lambda scale, p: (g * (p @ q.replace(scale=scale).dequantize())).sum()
    found, expected = (jax.grad(f, (0, 1))(q.scale, P) for f in (by, dense))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-2)


def test_sums_overflow_only_if_the_dense_sum_does():
    large = 1e-3 * jnp.ones_like(V)
    q = vn.quant.quantize(large, "int8", channelwise_axes=(0, 1))
    found = vn.implicit(jnp.matmul)(jnp.full_like(P, 1e36), q)
    np.testing.assert_allclose(found, 1e33 * S, rtol=0.01)


def test_infinity_and_nan_propagate_as_for_dense_operands():
    p = P.at[0, 0, 3].set(jnp.inf).at[0, 1, 4].set(-jnp.inf).at[1, 2, 5].set(jnp.nan)
    q = vn.quant.quantize(
        V.at[0, 3].set(0).at[1, 7, 0].set(jnp.inf), "int8", channelwise_axes=(0, 1)
    )
    found = vn.implicit(jnp.matmul)(p, q)
    np.testing.assert_allclose(found, p @ q.dequantize(), rtol=1e-4, atol=1e-3)


@pytest.fixture
def on_hopper(monkeypatch):
    """Choose plans as in a process with a Hopper GPU. No kernel is compiled."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_matmul, "compute_capability", lambda: 90)
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    for module in (gpu_matmul, hopper):
        monkeypatch.setattr(module, "compile", lambda *args: None)


BATCH = (
    arrays.normal(8, 3, 512, seed=3),
    arrays.normal(8, 512, 128, seed=4),
)


def how_of(p, q):
    (event,) = vn.explain(jnp.matmul)(p, q).events
    return event.how


@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8"])
def test_a_gpu_multiplies_by_the_scale_in_bf16(qtype, on_hopper):
    p, v = (x.astype(jnp.bfloat16) for x in BATCH)
    q = vn.quant.quantize(v, qtype, channelwise_axes=(0, 1))
    how = how_of(p, q)
    assert "GPU kernel" in how
    assert "scale of rhs multiplied into lhs" in how
    assert how.count("GPU kernel") == 1  # the fallback is another plan
    actual = jax.jit(vn.implicit(jnp.matmul))(p, q)
    exact = p.astype(jnp.float32) @ q.replace(dense_dtype="float32").dequantize()
    size = jnp.abs(p.astype(jnp.float32)) @ jnp.abs(q.replace(dense_dtype="float32").dequantize())
    assert actual.dtype == jnp.bfloat16
    assert (jnp.abs(actual - exact) <= 2**-8 * size).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gpu_folds_no_scales_of_other_dtypes(dtype, on_hopper):
    p, v = (x.astype(dtype) for x in BATCH)
    q = vn.quant.quantize(v, "int8", channelwise_axes=(0, 1))
    assert "multiplied into" not in how_of(p, q)


def test_terms_in_f16_that_cancel_stay_finite_on_a_gpu(on_hopper):
    # 3000 times the scale, which is 157, overflows f16.
    p = jnp.zeros((8, 3, 512), jnp.float16)
    p = p.at[..., 0].set(3000.0).at[..., 1].set(-3000.0)
    v = jnp.zeros((8, 512, 128), jnp.float16).at[:, :2].set(20000.0)
    q = vn.quant.quantize(v, "int8", channelwise_axes=(0, 1))
    product = vn.implicit(jnp.matmul)(p, q)
    assert jnp.isfinite(product).all()


def test_a_gpu_keeps_a_kernel_that_reads_the_scales(on_hopper):
    p, v = (x.astype(jnp.bfloat16) for x in BATCH)
    how = how_of(p, vn.quant.quantize(v, "int8", channelwise_axes=(0, 2)))
    assert "GPU kernel" in how
    assert "multiplied into" not in how
