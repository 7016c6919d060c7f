"""Programs under `jax.disable_jit` and `jax.check_tracer_leaks`."""

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn

W, X = arrays.normal(64, 32), arrays.normal(4, 64, seed=1)
FORMATS = ("int8", "int4", "uint4", "nf4", "float8_e4m3fn", "mxfp4")


def quantized(format):
    tiles = {} if format == "mxfp4" else {"tiled_axes": {0: 32}, "channelwise_axes": [1]}
    return vn.quant.quantize(W, format, **tiles)


def model(params, x):
    return jnp.tanh(x @ params["w"])


def scanned(x, w):
    step = lambda c, _: (c, jax.nn.relu(c @ w))
    return jax.lax.scan(step, x, None, length=2)[1]


@jax.custom_vjp
def doubled(x, w):
    return 2 * (x @ w)


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda r, g: (2 * g @ r[1].T, 2 * r[0].T @ g))


# Functions of `x` and an implicit `w`.
PROGRAMS = {
    "product": lambda x, w: vn.implicit(jnp.matmul)(x, w),
    "operator": lambda x, w: x @ w,
    "custom_jvp": lambda x, w: vn.implicit(lambda x, w: x @ jax.nn.relu(w))(x, w),
    "custom_vjp": lambda x, w: vn.implicit(doubled)(x, w),
    "checkpoint": lambda x, w: vn.implicit(jax.checkpoint(lambda x, w: x @ jax.nn.relu(w)))(x, w),
    "scan": lambda x, w: vn.implicit(scanned)(x, w),
    "cond": lambda x, w: vn.implicit(
        lambda x, w: jax.lax.cond(x[0, 0] > 9, lambda: x @ w, lambda: x @ jax.nn.relu(w))
    )(x, w),
    "gradient": lambda x, w: jax.grad(lambda x: (jnp.sin(vn.implicit(doubled)(x, w))).sum())(x),
    "implicit gradient": lambda x, w: vn.implicit(jax.grad(lambda x, w: jax.nn.relu(x @ w).sum()))(
        x, w
    ),
    "vn.jit": lambda x, w: vn.jit(scanned)(x, w),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("format", FORMATS)
def test_programs_run_without_jit(name, format):
    expected = PROGRAMS[name](X, quantized(format))
    with jax.disable_jit():
        w = quantized(format)
        assert_close(PROGRAMS[name](X, w), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_high_types_run_without_jit(name):
    w = quantized("int8")
    expected = PROGRAMS[name](X, w)
    with jax.disable_jit(), vn.hijax.enabled():
        assert_close(PROGRAMS[name](X, w), expected)


def test_a_model_is_quantized_and_calibrated_without_jit():
    rules, dense = [vn.quant.Rule(".*", "int4", tile_size=32)], {"w": arrays.normal(64, 64)}
    expected = vn.quant.calibrate(model, rules, params=dense)([(X,)])
    with jax.disable_jit():
        params = vn.quant.quantize_tree(dense, "int8", model=model, args=(X,))
        assert_close(vn.implicit(model)(params, X), model(vn.materialise(params), X))
        calibrated = vn.quant.calibrate(model, rules, params=dense)([(X,)])
    assert_close(calibrated["w"].dequantize(), expected["w"].dequantize())


def test_a_cache_is_written_without_jit():
    with jax.disable_jit():
        cache = vn.quant.zeros((2, 8, 64), "int8", channelwise_axes=[0, 1])
        write = lambda c, x: jax.lax.dynamic_update_slice(c, x, (0, 3, 0))
        cache = vn.implicit(write)(cache, jnp.ones((2, 1, 64)))
    assert_close(cache.dequantize()[:, 3], jnp.ones((2, 64)), tol=0.01)
    assert not cache.dequantize()[:, 4].any()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", ["int8", "low rank"])
def test_programs_leak_no_tracers(name, kind):
    a, b = arrays.normal(64, 2), arrays.normal(2, 32)
    w = quantized("int8") if kind == "int8" else vn.types.LowRank(a, b)
    with jax.check_tracer_leaks():
        jax.jit(PROGRAMS[name])(X, w)
        PROGRAMS[name](X, w)
        jax.jit(jax.grad(lambda x, w: vn.materialise(PROGRAMS[name](x, w)).sum()))(X, w)
