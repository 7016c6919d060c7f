"""The values and gradients of weights in training, under every transformation."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import FakeQuantized, Rule, fake_quantize, quantize_tree

KEYS = [arrays.key(seed) for seed in range(3)]
X = arrays.normal(5, 16)
W = arrays.normal(2, 16, 16, seed=1)

RULES = {
    "int4": Rule(".*", "int4"),
    "int4 in tiles": Rule(".*", "int4", tile_size=8),
    "nf4, scales of 16 bits": Rule(".*", "nf4", scale_dtype="bfloat16"),
    "int2, clipped": Rule(".*", "int2", calibration_method="rms,1.5"),
    "int4 and int8": Rule(".*", "int4", act_qtype="int8"),
    "activations, clipped": Rule(".*", None, act_qtype="int4", act_calibration_method="rms,1"),
}


def model(params, x):
    """Use stacked layers in a scan, a transposed weight, and a weight outside of a product."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return (x @ params["out"].T + params["out"].mean()).sum()


def fake(w, rule, axis):
    """Fake-quantize a weight with the options of a rule."""
    if rule.qtype is None:
        return w
    return fake_quantize(
        w,
        rule.qtype,
        channelwise_axes=[i for i in range(w.ndim) if i != axis % w.ndim],
        tiled_axes=None if rule.tile_size is None else {axis: rule.tile_size},
        calibration_method=rule.calibration_method,
        scale_dtype=rule.scale_dtype,
    )


def fake_rows(x, rule):
    if rule.act_qtype is None:
        return x
    method = rule.act_calibration_method
    return fake_quantize(x, rule.act_qtype, channelwise_axes=[0], calibration_method=method)


# Products contract the last axis of `out`, so its rule has tile_axis=-1.
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients_equal_fake_quantization(rule):
    out = W[0] * W[1]

    def fake_quantized(layers, out):
        layers = FakeQuantized.from_rule(layers, rule)
        rule_of_out = dataclasses.replace(rule, tile_axis=-1)
        return {"layers": layers, "out": FakeQuantized.from_rule(out, rule_of_out)}

    def ours(layers, out, x):
        return vn.implicit(model)(fake_quantized(layers, out), x)

    def theirs(layers, out, x):
        for w in layers:
            x = jnp.tanh(fake_rows(x, rule) @ fake(w, rule, -2))
        last = fake(out, rule, -1)
        return (fake_rows(x, rule) @ last.T + last.mean()).sum()

    def both(layers, out, x):
        programs = (ours, jax.checkpoint(ours), theirs)
        return [jax.value_and_grad(f, (0, 1, 2))(layers, out, x) for f in programs]

    plain, checkpointed, expected = jax.jit(both)(W, out, X)
    assert_close(plain, expected, 1e-4)
    assert_close(checkpointed, expected, 1e-4)
    many = lambda f: jax.vmap(jax.grad(lambda *args: f(*args), (0, 1, 2)), (0, None, 0))
    batch = jnp.stack([W, -W]), out, jnp.stack([X, 2 * X])
    one, other = jax.jit(lambda *args: [many(f)(*args) for f in (ours, theirs)])(*batch)
    assert_close(one, other, 1e-4)


def test_clipped_values_have_no_gradient():
    w = jnp.array([[0.1], [5.0], [0.2], [-0.3]])
    q = FakeQuantized(w, qtype="int4", calibration_method="fixed,1")
    gradient = jax.grad(lambda q: (jnp.ones(4) @ q).sum())(q)
    assert gradient.w[:, 0].tolist() == [1, 0, 1, 1]


def test_implicit_grad_differentiates_the_dense_weight():
    loss = lambda w, x: jnp.sin(x @ w).sum()
    w = FakeQuantized(W[0], qtype="int4")
    found = vn.implicit(jax.grad(loss))(w, X)
    assert_close(found, jax.grad(loss)(vn.materialise(w), X), 1e-5)
    assert_close(jax.grad(vn.implicit(loss))(w, X).w, found, 1e-5)  # nothing is clipped


def test_implicit_grad_does_not_quantize_gradients():
    loss = lambda w, x: jnp.sin(x @ w).sum()
    w = FakeQuantized(W[0], qtype="int4", act_qtype="int2")
    dense, rows = vn.materialise(w), fake_quantize(X, "int2", channelwise_axes=[0])
    by_x = vn.implicit(jax.grad(loss, 1))(w, X)
    assert_close(by_x, jnp.cos(rows @ dense) @ dense.T, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_keep_narrow_float_dtypes(dtype):
    w, x = W[0].astype(dtype), X.astype(dtype)
    q = FakeQuantized(w, qtype="int4", act_qtype="int8")
    loss = lambda w, x: jnp.sin((x @ w).astype(jnp.float32)).sum()
    by_w, by_x = jax.grad(vn.implicit(loss), (0, 1))(q, x)
    rows, dense = fake_quantize(x, "int8", channelwise_axes=[0]), vn.materialise(q)
    expected = jax.grad(loss, (0, 1))(dense, rows)
    assert (by_w.w.dtype, by_x.dtype) == (dtype, dtype)
    assert_close((by_w.w, by_x), expected, 0.02)


def test_a_cast_weight_is_quantized_from_the_master():
    q = FakeQuantized(W[0], qtype="int4")
    cast = vn.implicit(lambda w: w.astype(jnp.bfloat16))(q)
    assert (cast.w.dtype, cast.dtype) == (jnp.float32, jnp.bfloat16)
    assert (vn.materialise(cast) == vn.materialise(q).astype(jnp.bfloat16)).all()
    loss = lambda w: jnp.sin(X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).sum()
    assert jax.grad(vn.implicit(loss))(q).w.dtype == jnp.float32


CONVOLUTIONS = {
    "plain": {},
    "strided": {"window_strides": (2, 1), "padding": ((1, 0), (0, 2))},
    "grouped": {"feature_group_count": 2},
}


@pytest.mark.parametrize("more", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_equal_fake_quantized_ones(more):
    count = more.get("feature_group_count", 1)
    images = jax.random.normal(KEYS[0], (2, 6, 5, 4))
    kernel = jax.random.normal(KEYS[1], (3, 2, 4 // count, 6))
    numbers = {"window_strides": (1, 1), "padding": "SAME", **more}

    def loss(kernel, images):
        layout = ("NHWC", "HWIO", "NHWC")
        conv = jax.lax.conv_general_dilated
        return jnp.sin(conv(images, kernel, dimension_numbers=layout, **numbers)).sum()

    def expected(kernel, images):
        images = fake_quantize(images, "int8", channelwise_axes=[0])
        return loss(fake_quantize(kernel, "int4", channelwise_axes=[3]), images)

    def ours(kernel, images):
        axes = (-4, -3, -2)
        q = FakeQuantized(kernel, qtype="int4", act_qtype="int8", tile_axis=axes)
        return vn.implicit(loss)(q, images)

    both = lambda *args: [jax.value_and_grad(f, (0, 1))(*args) for f in (ours, expected)]
    found, wanted = jax.jit(both)(kernel, images)
    assert_close(found, wanted, 1e-4)


def test_ragged_dot_equals_a_fake_quantized_one():
    sizes = jnp.array([2, 3])
    loss = lambda w, x: jnp.sin(jax.lax.ragged_dot(x, w, sizes)).sum()

    def expected(w, x):
        rows = fake_quantize(x, "int8", channelwise_axes=[0])
        return loss(fake_quantize(w, "int4", channelwise_axes=[0, 2]), rows)

    def ours(w, x):
        return vn.implicit(loss)(FakeQuantized(w, qtype="int4", act_qtype="int8"), x)

    both = lambda *args: [jax.value_and_grad(f, (0, 1))(*args) for f in (ours, expected)]
    found, wanted = jax.jit(both)(W, X)
    assert_close(found, wanted, 1e-4)


def test_the_weight_can_be_the_first_operand():
    loss = lambda w, x: jnp.sin(w @ x).sum()
    q = FakeQuantized(W[0], qtype="int4", act_qtype="int8", tile_axis=-1)
    columns = fake_quantize(X.T, "int8", channelwise_axes=[1])
    assert_close(vn.implicit(loss)(q, X.T), loss(vn.materialise(q), columns), 1e-5)


def test_adam_trains_the_master_weights():
    rules = [Rule("a|b", "int4", act_qtype="int8")]
    params = {"a": W[0] / 4, "b": W[1] / 4, "bias": jnp.zeros(16)}
    target = jnp.sin(3 * X)
    loss = lambda p, x: ((jnp.tanh(x @ p["a"]) @ p["b"] + p["bias"] - target) ** 2).mean()
    params = quantize_tree(params, rules, train=True)
    tx = optax.adam(0.02)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(vn.implicit(loss))(params, X)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, first = tx.init(params), None
    for _ in range(40):
        params, state, value = step(params, state)
        first = value if first is None else first
    assert value < first / 4
    assert isinstance(params["a"], FakeQuantized)
    mask = vn.trainable(params)
    assert (mask["a"].w, mask["bias"]) == (True, True)


def test_an_equinox_model_is_trained():
    layer = quantize_tree(
        eqx.nn.MLP(16, 4, 8, 1, key=KEYS[2]),
        [Rule(r".*\.weight", "int4", tile_axis=-1, act_qtype="int8")],
        train=True,
    )
    assert isinstance(layer.layers[0].weight, FakeQuantized)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer):
        return vn.implicit(lambda layer: jnp.sin(jax.vmap(layer)(X)).sum())(layer)

    found = gradient(layer)
    rows = lambda x: fake_quantize(x, "int8", channelwise_axes=[0])

    def expected(weights, biases):
        dense = [fake_quantize(w, "int4", channelwise_axes=[0]) for w in weights]
        x = jax.nn.relu(rows(X) @ dense[0].T + biases[0])
        return jnp.sin(rows(x) @ dense[1].T + biases[1]).sum()

    biases = [part.bias for part in layer.layers]
    wanted = jax.grad(expected)([part.weight.w for part in layer.layers], biases)
    assert_close([part.weight.w for part in found.layers], wanted, 1e-4)


def test_an_nnx_model_is_trained():
    layer = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    kernel = layer.kernel[...]
    layer.kernel = nnx.Param(FakeQuantized(kernel, qtype="int4"))
    graph, variables = nnx.split(layer)

    @jax.jit
    @jax.grad
    def gradient(variables):
        return vn.implicit(lambda v: jnp.sin(nnx.merge(graph, v)(X)).sum())(variables)

    dense = lambda w: jnp.sin(X @ fake_quantize(w, "int4", channelwise_axes=[1])).sum()
    assert_close(gradient(variables)["kernel"].get_value().w, jax.grad(dense)(kernel), 1e-4)


def test_a_slice_along_a_tile_is_fake_quantized():
    q = FakeQuantized(W[0], qtype="int4")
    dense = vn.materialise(q)
    assert (vn.implicit(lambda w: w[3:5])(q) == dense[3:5]).all()
    rows = vn.implicit(lambda w: jax.lax.map(lambda row: row * 2, w))(q)
    assert (rows == 2 * dense).all()
    layer = vn.implicit(lambda w: w[1])(FakeQuantized(W, qtype="int4"))
    assert isinstance(layer, FakeQuantized)
    assert (vn.materialise(layer) == vn.materialise(FakeQuantized(W[1], qtype="int4"))).all()


def test_tiles_along_a_stack_need_the_whole_stack():
    w = jax.random.normal(KEYS[0], (4, 16, 8))
    q = FakeQuantized(w, qtype="int8", tile_size={0: 2, -1: 4})
    assert repr(q) == "FakeQuantized(w=f32[4,16,8], qtype='int8', tile_size={-3: 2, -1: 4})"
    loss = lambda w, x: jnp.sin(jax.vmap(lambda w: x @ w)(w)).sum()
    dense = lambda w: fake_quantize(w, "int8", tiled_axes={0: 2, 2: 4})
    found = jax.value_and_grad(vn.implicit(loss))(q, X)
    wanted = jax.value_and_grad(lambda w: loss(dense(w), X))(w)
    assert_close((found[0], found[1].w), wanted, 1e-5)
    assert_close(vn.implicit(lambda w: w[1])(q), dense(w)[1], 0)
    for use in (vn.materialise, vn.quant.convert, lambda q: q + 1):
        with pytest.raises(ValueError, match="axis -3"):
            jax.vmap(use)(q)


@pytest.mark.parametrize("qtype", ["nvfp4", "nf4_dq", "mxfp4"])
def test_a_transpose_represents_the_transposed_weight(qtype):
    w = jax.random.normal(KEYS[0], (2, 32, 64))
    q = FakeQuantized(w, qtype=qtype, act_qtype="int8")
    for order in [(0, 2, 1), (1, 0, 2), (2, 1, 0)]:
        turned = vn.implicit(lambda w, order=order: w.transpose(order))(q)
        assert_close(vn.materialise(turned), vn.materialise(q).transpose(order), 0)


def test_sharding_does_not_split_tiles():
    P = jax.sharding.PartitionSpec
    q = FakeQuantized(W, qtype="int4", tile_size=8)
    assert q.partition(P("x", None, None), (1, 16, 16)).w == P("x", None, None)
    assert q.partition(P(None, "x", None), (2, 8, 16)).w == P(None, "x", None)
    assert q.partition(P(None, "x", None), (2, 4, 16)) is None
    assert FakeQuantized(W, qtype="int4").partition(P(None, "x", None), (2, 8, 16)) is None
    blocks = FakeQuantized(W, qtype="int4", tile_size={-2: 8, -1: 4})
    assert blocks.partition(P(None, None, "x"), (2, 16, 8)).w == P(None, None, "x")
    assert blocks.partition(P(None, None, "x"), (2, 16, 2)) is None


TWO_KEYS = jax.random.wrap_key_data(arrays.zeros((2, 2), np.uint32))


@pytest.mark.parametrize(
    ("error", "says", "fields"),
    [
        (ValueError, "unknown format", {"qtype": "int9"}),
        (ValueError, "does not divide", {"qtype": "int4", "tile_size": 5}),
        (ValueError, "out of range", {"qtype": "int4", "tile_axis": 2}),
        (ValueError, "twice", {"qtype": "int4", "tile_axis": (0, -2)}),
        (ValueError, "unknown calibration_method", {"qtype": "int4", "calibration_method": "no"}),
        (ValueError, "key must have shape", {"qtype": "int4", "key": TWO_KEYS}),
    ],
)
def test_wrong_fields_raise(error, says, fields):
    with pytest.raises(error, match=says):
        FakeQuantized(W[0], **fields)


def test_integer_weights_raise():
    with pytest.raises(TypeError, match="floating"):
        FakeQuantized(np.arange(4).reshape(2, 2), qtype="int4")
