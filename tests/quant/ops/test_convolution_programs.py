"""Unmodified programs with convolutions under `implicit`, with a QArray as the kernel."""

import functools

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays
from support.arrays import normal
from support.policies import only_by_rules

import veneer as vn
from veneer.quant import QArray, quantize

NHWC = ("NHWC", "HWIO", "NHWC")


conv = functools.partial(
    lax.conv_general_dilated, window_strides=(1, 2), padding="SAME", dimension_numbers=NHWC
)
loss = lambda x, w: jnp.sum(jnp.sin(conv(x, w)))

# Functions of images [2, 6, 6, 4] and a kernel [3, 3, 4, 4].
PROGRAMS = {
    "conv": conv,
    "jit": jax.jit(conv),
    "lax.conv": lambda x, w: lax.conv(
        x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), "VALID"
    ),
    "general padding": lambda x, w: lax.conv_with_general_padding(
        x.transpose(0, 3, 1, 2),
        w.transpose(3, 2, 0, 1),
        (1, 1),
        [(1, 2), (0, 3)],
        (2, 1),
        (1, 2),
    ),
    "transposed": lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC),
    "transposed kernel": lambda x, w: lax.conv_transpose(
        x, w, (2, 1), "VALID", dimension_numbers=NHWC, transpose_kernel=True
    ),
    "kernel on the left": lambda x, w: conv(w, x.transpose(1, 2, 3, 0)[:2, :2]),
    "vmap over images": lambda x, w: jax.vmap(lambda x: conv(x[None], w)[0])(x),
    "vmap over features": lambda x, w: jax.vmap(
        lambda w: conv(x, w[..., None]), in_axes=3, out_axes=4
    )(w),
    "vmap over input features": lambda x, w: jax.vmap(
        lambda x, w: conv(x[..., None], w[:, :, None]), in_axes=(3, 2)
    )(x, w),
    "scan": lambda x, w: lax.scan(lambda c, x: (c, conv(x[None], w)), 0.0, x)[1],
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(conv(x, w))),
    "grad of x": jax.grad(loss),
    "grad of w": jax.grad(loss, argnums=1),
    "grad of both in groups": jax.grad(
        lambda x, w: jnp.sum(conv(x, w[:, :, :2], feature_group_count=2) ** 2), argnums=(0, 1)
    ),
    "second derivative": lambda x, w: jax.jvp(jax.grad(loss), (x, w), (x, jnp.ones(w.shape)))[1],
}
KERNELS = arrays.OnDemand(
    {
        "int8": lambda: quantize(normal(3, 3, 4, 4, seed=1), "int8", channelwise_axes=[3]),
        "nf4 tiled": lambda: quantize(
            normal(3, 3, 4, 4, seed=1), "nf4", channelwise_axes=[3], tiled_axes={2: 2}
        ),
        "uint4 by place": lambda: quantize(
            normal(3, 3, 4, 4, seed=1), "uint4", channelwise_axes=[0, 1, 3]
        ),
    }
)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_agree_with_the_dense_kernel(program, kernel):
    x, w, run = normal(2, 6, 6, 4), KERNELS[kernel], PROGRAMS[program]
    actual = vn.materialise(jax.jit(vn.implicit(run))(x, w))
    expected = jax.jit(run)(x, w.dequantize())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("qtype", "separate"), [("int8", [0]), ("uint8", [1, 2])])
def test_both_operands_can_be_quantized(kernel, qtype, separate):
    x, w = quantize(normal(2, 6, 6, 4), qtype, channelwise_axes=separate), KERNELS[kernel]
    names = ("conv", "general padding", "vmap over images", "grad of x")
    run = lambda x, w: [PROGRAMS[name](x, w) for name in names]
    actual = vn.materialise(jax.jit(vn.implicit(run))(x, w))
    expected = jax.jit(run)(x.dequantize(), w.dequantize())
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# Derivatives.


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_by_images_and_scale_agree(kernel):
    x, w = normal(2, 6, 6, 4), KERNELS[kernel]
    ours = lambda x, scale: vn.implicit(loss)(x, w.replace(scale=scale))
    by_hand = lambda x, scale: loss(x, w.replace(scale=scale).dequantize())
    assert_same_gradients(ours, by_hand, x, w.scale)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_by_both_scales_agree(kernel):
    x, w = quantize(normal(2, 6, 6, 4), "int8", channelwise_axes=[0]), KERNELS[kernel]
    filled = lambda a, b: (x.replace(scale=a), w.replace(scale=b))
    ours = lambda *scales: vn.implicit(loss)(*filled(*scales))
    by_hand = lambda *scales: loss(*vn.materialise(filled(*scales)))
    assert_same_gradients(ours, by_hand, x.scale, w.scale)


def assert_same_gradients(ours, by_hand, *args):
    actual, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(*args) for f in (ours, by_hand))
    for a, b in zip(actual, expected, strict=True):
        assert float(jnp.abs(b).max()) > 0.1
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_dense_kernel_is_kept_for_the_backward_pass(kernel):
    x, w = normal(2, 6, 6, 4), KERNELS[kernel]
    _, pullback = jax.vjp(lambda x: vn.implicit(loss)(x, w), x)
    kept = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.dtype == jnp.float32]
    assert (3, 3, 4, 4) not in kept


# Batches of kernels, with both orders of the transformations.


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("quantized", ["kernels", "images", "both"])
def test_vmap_over_stacked_kernels_agrees(quantized, inside):
    xs, ws = normal(3, 2, 5, 5, 4), normal(3, 2, 2, 4, 6, seed=1)
    if quantized != "kernels":
        xs = quantize(xs, "int8", channelwise_axes=[0, 1])
    if quantized != "images":
        ws = quantize(ws, "int4", channelwise_axes=[0, 4])
    run = vn.implicit(jax.vmap(conv)) if inside else jax.vmap(vn.implicit(conv))
    expected = jax.vmap(conv)(*vn.materialise((xs, ws)))
    np.testing.assert_allclose(jax.jit(run)(xs, ws), expected, rtol=1e-4, atol=1e-4)


def test_a_scan_over_stacked_kernels_keeps_them_packed():
    x, w = normal(2, 6, 6, 4), quantize(normal(3, 3, 3, 4, 4), "int4", channelwise_axes=[0, 4])
    layer = lambda x, w: (jnp.tanh(conv(x, w, window_strides=(1, 1))), None)
    run = lambda x, w: lax.scan(layer, x, w)[0]
    actual = vn.implicit(run, on_materialise=only_by_rules)(x, w)
    np.testing.assert_allclose(actual, run(x, w.dequantize()), rtol=1e-4, atol=1e-4)


# Reports.


@pytest.mark.parametrize(
    ("x", "w", "how"),
    [
        (None, ("int8", {"channelwise_axes": [3]}), "dequantize rhs"),
        (
            ("int8", {"channelwise_axes": [0]}),
            ("int4", {"channelwise_axes": [3]}),
            "convolve integer codes",
        ),
        (("int8", {}), ("fp8", {"channelwise_axes": [3]}), "convolve codes as floats"),
        (("int8", {}), ("int8", {"tiled_axes": {2: 2}}), "scales vary along the contracted axes"),
        (
            ("int8", {"channelwise_axes": [2]}),
            ("int8", {}),
            "scales vary along the contracted axes",
        ),
    ],
)
def test_explain_reports_the_strategy(x, w, how):
    images = normal(2, 6, 6, 4) if x is None else quantize(normal(2, 6, 6, 4), x[0], **x[1])
    kernel = quantize(normal(3, 3, 4, 4), w[0], **w[1])
    [event] = vn.explain(conv)(images, kernel).events
    assert event.rule is not None
    assert how in event.how


# Sharding.


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(("both", "groups"), [(False, 1), (True, 1), (True, 4)])
def test_sharded_samples_and_features_agree(both, groups):
    mesh = jax.make_mesh((2, 2), ("n", "o"), axis_types=(AxisType.Auto,) * 2)
    x, w = normal(4, 4, 4, 8), normal(3, 3, 8 // groups, 8, seed=1)
    w = quantize(w, "int8", channelwise_axes=[3])
    x = quantize(x, "int8", channelwise_axes=[0]) if both else x
    run = functools.partial(conv, feature_group_count=groups)
    specs = P("n"), P(None, None, None, "o")
    if groups > 1:
        specs = P("n", None, None, "o"), P(None, None, None, "o")
    local = functools.partial(conv, feature_group_count=max(groups // 2, 1))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("n", None, None, "o"))
    expected = run(*vn.materialise((x, w)))
    np.testing.assert_allclose(jax.jit(vn.implicit(mapped))(x, w), expected, rtol=1e-4, atol=1e-4)


# Unmodified layers of other libraries.

IMAGE = normal(2, 8, 8, 4)


def test_flax_linen_layers_agree():
    module = flax.linen.Conv(6, (3, 3), strides=2, feature_group_count=2)
    params = module.init(jax.random.key(0), IMAGE)
    kernel = quantize(params["params"]["kernel"], "int8", channelwise_axes=[3])
    quantized = {"params": params["params"] | {"kernel": kernel}}
    actual = jax.jit(vn.implicit(module.apply, on_materialise=only_by_rules))(quantized, IMAGE)
    expected = module.apply(vn.materialise(quantized), IMAGE)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_flax_nnx_layers_agree():
    graph, params = nnx.split(nnx.Conv(4, 6, (3, 3), kernel_dilation=2, rngs=nnx.Rngs(0)))
    is_kernel = lambda leaf: leaf.ndim == 4
    quantized = jax.tree.map(
        lambda leaf: quantize(leaf, "int8", channelwise_axes=[3]) if is_kernel(leaf) else leaf,
        params,
    )
    run = lambda params, x: nnx.merge(graph, params)(x)
    actual = jax.jit(vn.implicit(run, on_materialise=only_by_rules))(quantized, IMAGE)
    expected = run(vn.materialise(quantized), IMAGE)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_equinox_layers_agree():
    module = eqx.nn.Conv2d(4, 6, 3, padding="SAME", key=jax.random.key(0))
    weight = quantize(module.weight, "int4", channelwise_axes=[0])
    quantized = eqx.tree_at(lambda module: module.weight, module, weight)
    assert isinstance(quantized.weight, QArray)
    run = lambda module, x: jax.vmap(module)(x.transpose(0, 3, 1, 2))
    actual = jax.jit(vn.implicit(run, on_materialise=only_by_rules))(quantized, IMAGE)
    np.testing.assert_allclose(actual, run(vn.materialise(quantized), IMAGE), rtol=1e-4, atol=1e-4)
