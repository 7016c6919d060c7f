import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.arrays import normal
from support.policies import only_by_rules

import veneer as vn
from veneer.quant import ActivationQuantized, QArray, dequantize, quantize, quantize_tree
from veneer.quant.product_weights import ProductWeight
from veneer.types import LoraArray

# Formats of weights and of activations.
PAIRS = [
    ("int8", "int8"),
    ("int4", "int8"),
    ("int4", "int4"),
    ("int8", "uint8"),
    ("nf4", "int8"),
    (None, "int8"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("mxfp4", "mxfp8"),
    ("nvfp4", "nvfp4"),
    (None, "nf4"),
]


def weight(qtype, *shape, tile_size=None, seed=1, **kwargs):
    """Return a weight that quantizes activations, contracted along its second-last axis."""
    rule = vn.quant.Rule("", qtype, tile_size=tile_size, **kwargs)
    return quantize_tree(normal(*shape, seed=seed), [rule])


def rows(x, qtype, axis=-1, **kwargs):
    """Return activations, quantized with a scale per row."""
    axis %= x.ndim
    tile = vn.quant.get_format(qtype).tile_size
    return quantize(
        x,
        qtype,
        channelwise_axes=[i for i in range(x.ndim) if i != axis],
        tiled_axes=None if tile is None else {axis: tile},
        **kwargs,
    ).dequantize()


def exact(equation, *operands):
    return np.einsum(equation, *(np.asarray(x, np.float64) for x in operands))


def assert_near(actual, expected, tolerance=1e-5):
    """Compare up to the rounding of f32 sums, relative to the largest value."""
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


def matmul(x, w):
    return x @ w


def with_gradient(function, x):
    """Return the result of a function and the gradient of its sum, compiled as one program."""

    @jax.jit
    def run(x):
        y, pull = jax.vjp(function, x)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

    return run(x)


@pytest.mark.parametrize("tile_size", [None, 32])
@pytest.mark.parametrize(("qtype", "act_qtype"), PAIRS)
def test_products_equal_products_of_dequantized_operands(qtype, act_qtype, tile_size):
    if qtype is None or qtype == "nvfp4":
        tile_size = None
    x, w = normal(3, 64), weight(qtype, 64, 6, tile_size=tile_size, act_qtype=act_qtype)
    expected = exact("mk,kn->mn", rows(x, act_qtype), vn.materialise(w))
    assert_near(jax.jit(vn.implicit(matmul))(x, w), expected)
    assert np.abs(expected - exact("mk,kn->mn", x, vn.materialise(w))).max() > 1e-4


def test_two_integer_formats_use_integer_arithmetic():
    program = jax.make_jaxpr(vn.implicit(matmul))
    text = str(program(normal(3, 64), weight("int4", 64, 6, act_qtype="int8")))
    assert "preferred_element_type=int32" in text
    assert "preferred_element_type=int32" not in str(program(normal(3, 64), weight("int4", 64, 6)))


def test_the_calibration_method_is_used():
    x = normal(3, 64)
    w = weight("int8", 64, 6, act_qtype="int8", act_calibration_method="minmax")
    expected = rows(x, "int8", calibration_method="minmax")
    assert_near(x @ w, exact("mk,kn->mn", expected, vn.materialise(w)))


@pytest.mark.parametrize("tile", [16, 0.5])
@pytest.mark.parametrize("tile_size", [None, 16, {-2: 16, -1: 2}])
def test_each_tile_of_a_row_has_its_own_scale(tile, tile_size):
    x = normal(3, 64).at[1, 40].multiply(1e3)
    w = weight("int8", 64, 6, tile_size=tile_size, act_qtype="int8", act_tile_size=tile)
    size = 16 if tile == 16 else 32
    tiles = quantize(x, "int8", channelwise_axes=[0], tiled_axes={1: size}).dequantize()
    expected = exact("mk,kn->mn", tiles, vn.materialise(w))
    y, gradient = with_gradient(lambda x: vn.implicit(matmul)(x, w), x)
    assert_near(y, expected)
    cotangent = np.cos(np.arange(y.size)).reshape(y.shape)
    assert_near(gradient, exact("mn,kn->mk", cotangent, vn.materialise(w)))
    turned = vn.implicit(lambda x, w: jnp.einsum("nk,mk->mn", w.T, x))(x, w)
    assert_near(turned, expected)


def test_an_activation_tile_that_does_not_divide_raises():
    with pytest.raises(ValueError, match="w: activations in int8 have tiles of 5"):
        quantize_tree(
            {"w": normal(64, 6)}, [vn.quant.Rule("w", "int8", act_qtype="int8", act_tile_size=5)]
        )


def test_each_row_has_its_own_scale():
    w = weight("int8", 16, 6, act_qtype="int8")
    x = normal(2, 3, 16)
    y = x @ w
    big = x.at[1, 2].multiply(1e4).at[0, 1, 0].set(jnp.nan)
    again = np.array(big @ w)
    assert np.isnan(again[0, 1]).all()
    again[0, 1], again[1, 2] = y[0, 1], y[1, 2]
    np.testing.assert_array_equal(again, y)


# Programs of activations and a weight, and the same program of two dense arrays.
X = normal(2, 5, 16)
PROGRAMS = {
    "matmul": (lambda x, w: x @ w, (16, 6), {}),
    "swapped": (lambda x, w: w.T @ x.swapaxes(1, 2), (16, 6), {}),
    "transposed": (lambda x, w: x @ w.T, (6, 16), {"tile_axis": -1}),
    "einsum": (lambda x, w: jnp.einsum("btk,nk->ntb", x, w), (6, 16), {"tile_axis": 1}),
    "two axes": (
        lambda x, w: jnp.einsum("bthd,hdn->btn", x.reshape(2, 5, 4, 4), w),
        (4, 4, 6),
        {"tile_axis": (0, 1)},
    ),
    "heads": (lambda x, w: jnp.einsum("btk,khd->bthd", x, w), (16, 3, 4), {"tile_axis": 0}),
    "reshaped": (lambda x, w: x @ w.reshape(16, 12), (16, 3, 4), {"tile_axis": 0}),
    "transposed between reshapes": (
        lambda x, w: x @ w.T.reshape(3, 32).T.T.reshape(6, 16).T,
        (16, 6),
        {},
    ),
    "merged": (lambda x, w: x @ w.reshape(16, 6), (4, 4, 6), {"tile_axis": (0, 1)}),
    "joined after reshapes": (
        lambda x, w: (
            x @ jnp.concatenate([w.T.reshape(-1, 32), w.T.reshape(-1, 32)]).reshape(12, 16).T
        ),
        (16, 6),
        {},
    ),
    "sliced": (lambda x, w: x @ w[:, 2:5], (16, 6), {}),
    "split": (lambda x, w: x @ jnp.split(w, 2, 1)[1], (16, 6), {}),
    "joined": (lambda x, w: x @ jnp.concatenate([w, w, w], 1)[:, 12:], (16, 6), {}),
    "one of a stack": (lambda x, w: x @ w[1], (3, 16, 6), {}),
    "taken": (lambda x, w: x @ jnp.take(w, 2, 0, mode="clip"), (3, 16, 6), {}),
    "indexed": (
        lambda x, w: lax.fori_loop(0, 3, lambda i, y: y + x @ w[i], jnp.zeros((2, 5, 6))),
        (3, 16, 6),
        {},
    ),
    "stacked": (lambda x, w: x[0] @ jnp.stack([w, w])[1], (16, 6), {}),
    "batched": (lambda x, w: x @ w, (2, 16, 6), {}),
    "vmap of rows": (
        lambda x, w: jax.vmap(jax.vmap(matmul, (0, None)), (0, None))(x, w),
        (16, 6),
        {},
    ),
    "vmap of both": (lambda x, w: jax.vmap(matmul)(x, w), (2, 16, 6), {}),
    "scan": (
        lambda x, w: lax.scan(lambda y, w: (y + x @ w, None), jnp.zeros((2, 5, 6)), w)[0],
        (3, 16, 6),
        {},
    ),
    "checkpoint": (lambda x, w: jax.checkpoint(matmul)(x, w), (16, 6), {}),
    "cast": (lambda x, w: x @ w.astype(jnp.float32), (16, 6), {}),
    "cond": (
        lambda x, w: lax.cond(x[0, 0, 0] < 9, matmul, lambda x, w: -(x @ w), x, w),
        (16, 6),
        {},
    ),
}


@pytest.fixture(params=PROGRAMS)
def case(request):
    program, shape, kwargs = PROGRAMS[request.param]
    rule = vn.quant.Rule("", "int8", act_qtype="int8", **kwargs)
    return program, quantize_tree(normal(*shape, seed=1), [rule])


def test_moved_weights_still_quantize_activations(case):
    program, w = case
    dense = vn.materialise(w)

    strict = vn.implicit(program, on_materialise=only_by_rules)
    y, grad = with_gradient(lambda x: strict(x, w), X)
    # The program is linear in each operand, so the gradient does not depend on the activations.
    y_, grad_ = with_gradient(lambda x: program(x, dense), rows(X, "int8"))
    assert_near(y, np.asarray(y_))
    assert_near(grad, np.asarray(grad_))
    assert np.abs(y - program(X, dense)).max() > 1e-3


@pytest.mark.parametrize("act_qtype", ["int4", "float8_e4m3fn"])
@pytest.mark.parametrize("static", [False, True])
def test_gradients_equal_fake_quantization(act_qtype, static):
    """The gradients are with respect to the input and the dense weights of a network, in f64."""
    with jax.enable_x64(True):
        scale = jnp.full((1, 1), 0.3) if static else None
        arrays = [normal(16, 8, seed=i, dtype=np.float64) for i in (1, 2)]
        weights = [ActivationQuantized(w, scale, qtype=act_qtype) for w in arrays]
        x = normal(4, 16, dtype=np.float64)

        def network(product, ws, x):
            first, second = ws
            # Values are positive. A negative largest value would be a tie in int4.
            between = jnp.square(jnp.tanh(product(x, first))) @ jnp.ones((8, 16))
            return jnp.sum(jnp.sin(product(between, second)))

        def fake(x, w):
            if static:
                q = vn.quant.quantize_with_scale(x, act_qtype, scale)
            else:
                q = quantize(x, act_qtype, channelwise_axes=[0])
            return (x + lax.stop_gradient(q.dequantize() - x)) @ w

        run = vn.implicit(lambda ws, x: network(matmul, ws, x))
        value, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(weights, x)
        reference = jax.value_and_grad(lambda ws, x: network(fake, ws, x), (0, 1))
        value_, grads_ = jax.jit(reference)(arrays, x)
        np.testing.assert_allclose(value, value_, rtol=1e-12)
        pairs = [(w.array, dense) for w, dense in zip(grads[0], grads_[0], strict=True)]
        for grad, grad_ in [*pairs, (grads[1], grads_[1])]:
            np.testing.assert_allclose(grad, grad_, rtol=1e-9, atol=1e-12)
            assert np.abs(grad).max() > 1e-3


def test_cotangents_are_not_quantized():
    w = weight("int8", 16, 6, act_qtype="int4")
    x, seen = normal(4, 16), jnp.linspace(0.0, 1.0, 6)
    program = lambda x, w: (jnp.square(x @ w) * seen).sum()
    grad = jax.jit(vn.implicit(jax.grad(program)))(x, w)
    dense = vn.materialise(w)
    y = exact("mk,kn->mn", rows(x, "int4"), dense)
    assert_near(grad, exact("mn,kn->mk", 2 * y * np.asarray(seen), dense))


def sin_of(product, how=lambda f: f):
    """Return `sin(x @ w)` with a custom JVP rule."""

    @jax.custom_jvp
    def f(x, w):
        return jnp.sin(product(x, w))

    @f.defjvp
    def _(primals, tangents):
        x, w = primals
        return f(x, w), jnp.cos(how(product)(x, w)) * how(product)(tangents[0], w)

    return f


PRODUCTS_IN_RULES = {
    "at once": lambda w: (sin_of(jnp.matmul), (w,)),
    "in a jit": lambda w: (sin_of(jnp.matmul, jax.jit), (w,)),
    "in a jit around it": lambda w: (jax.jit(sin_of(jnp.matmul)), (w,)),
    "in a loop": lambda w: (sin_of(lambda x, w: lax.map(lambda row: row @ w, x)), (w,)),
    "of a weight that it closes over": lambda w: (
        lambda x, w: sin_of(lambda x, _: x @ w)(x, jnp.zeros(())),
        (w,),
    ),
}

WEIGHTS_IN_RULES = {
    "int8": lambda w: vn.quant.ActivationQuantized(w, qtype="int8"),
    "in a static range": lambda w: vn.quant.ActivationQuantized(
        w, jnp.full((1, 1), 0.02), qtype="int8"
    ),
    "in training": lambda w: vn.quant.FakeQuantized(
        w, qtype="int8", act_qtype="int8", tile_axis=-2
    ),
    "in training on codes": lambda w: vn.quant.FakeQuantized(
        w, qtype="int8", act_qtype="int8", tile_axis=-2, grad_qtype="int8"
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS_IN_RULES)
@pytest.mark.parametrize("name", PRODUCTS_IN_RULES)
def test_tangents_of_a_custom_jvp_rule_are_not_quantized(name, kind):
    """The outputs use quantized activations. The tangents use the weight alone."""
    x, t = normal(3, 8), 0.3 * normal(3, 8, seed=2)
    w = WEIGHTS_IN_RULES[kind](normal(8, 4, seed=1))
    f, more = PRODUCTS_IN_RULES[name](w)
    run = lambda x: vn.implicit(f)(x, *more)
    stands_for = np.asarray(vn.materialise(w), np.float64)
    x64, t64 = np.asarray(x, np.float64), np.asarray(t, np.float64)
    slope = np.cos(x64 @ stands_for)
    expected = run(x)
    for goes in (lambda f: f, jax.jit):
        out, moved = goes(lambda x: jax.jvp(run, (x,), (t,)))(x)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(moved, slope * (t64 @ stands_for), rtol=1e-4, atol=1e-5)
        value, grad = goes(jax.value_and_grad(lambda x: run(x).sum()))(x)
        np.testing.assert_allclose(value, expected.sum(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grad, slope @ stands_for.T, rtol=1e-4, atol=1e-5)


def test_a_product_of_two_weights_quantizes_neither():
    one, other = (
        weight("int8", 8, 8, act_qtype="int4"),
        weight("int8", 8, 8, act_qtype="int4", seed=2),
    )
    expected = exact("mk,kn->mn", vn.materialise(one), vn.materialise(other))
    assert_near(one @ other, expected)


def test_quantized_and_integer_operands_do_not_change():
    w = weight("int8", 16, 6, act_qtype="int2")
    for x in (quantize(normal(3, 16), "int8"), jnp.arange(48).reshape(3, 16)):
        assert_near(x @ w, exact("mk,kn->mn", vn.materialise(x), vn.materialise(w)))


def test_other_primitives_act_on_the_weight():
    w = weight("int8", 16, 6, act_qtype="int2")
    dense = vn.materialise(w)
    assert_near(w + 1.0, np.asarray(dense + 1))
    assert_near(
        vn.implicit(lambda w: w[jnp.array([[1, 3], [0, 0]])])(w), dense[jnp.array([[1, 3], [0, 0]])]
    )
    assert isinstance(vn.implicit(lambda w: w.astype(int))(w), jax.Array)


def test_lora_updates_a_weight_with_activations():
    w = weight("int8", 16, 6, act_qtype="int8")
    a, b, x = normal(16, 2, seed=2), normal(2, 6, seed=3), normal(3, 16)
    y = x @ LoraArray(w, a, b)
    expected = exact("mk,kn->mn", rows(x, "int8"), vn.materialise(w)) + exact(
        "mk,kr,rn->mn", x, a, b
    )
    assert_near(y, expected)


def test_only_the_array_can_be_trained():
    static = ActivationQuantized(normal(4, 4), jnp.ones((1, 1)), qtype="int8")
    mask = vn.trainable(static)
    assert (mask.array, mask.scale) == (True, False)


# Convolutions and ragged products.

IMAGE = normal(2, 8, 8, 4)
CONVOLUTIONS = {
    "plain": ((3, 3, 4, 6), {}),
    "strided": ((3, 3, 4, 6), {"window_strides": (2, 2)}),
    "grouped": ((3, 3, 2, 6), {"feature_group_count": 2}),
    "depthwise": ((3, 3, 1, 4), {"feature_group_count": 4}),
}


def convolve(x, w, window_strides=(1, 1), **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, window_strides, "SAME", dimension_numbers=numbers, **kwargs
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("act_qtype", ["int8", "uint8"])
def test_convolutions_quantize_each_batch_entry(name, act_qtype):
    shape, kwargs = CONVOLUTIONS[name]
    w = weight("int8", *shape, act_qtype=act_qtype, tile_axis=(0, 1, 2))
    q = quantize(IMAGE, act_qtype, channelwise_axes=[0]).dequantize()
    program = lambda x, w: convolve(x, w, **kwargs)
    y, grad = with_gradient(lambda x: vn.implicit(program)(x, w), IMAGE)
    y_, grad_ = with_gradient(lambda x: program(x, vn.materialise(w)), q)
    assert_near(y, np.asarray(y_))
    assert_near(grad, np.asarray(grad_))


GROUPS = arrays.array([2, 3])
ELSEWHERE = {
    "dot": (lambda x, w: x @ w.T, (5, 4), (8, 4), -2),
    "dot, the weight first": (lambda x, w: w @ x.T, (5, 4), (8, 4), -2),
    "ragged_dot": (lambda x, w: lax.ragged_dot(x, w, GROUPS), (5, 8), (2, 8, 4), -1),
    "convolution": (convolve, IMAGE.shape, (3, 3, IMAGE.shape[3], 6), -1),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_contracting_another_axis_is_reported(name):
    program, shape, of_weight, tile_axis = ELSEWHERE[name]
    x, w = normal(*shape), weight("int8", *of_weight, act_qtype="int8", tile_axis=tile_axis)
    assert_near(vn.implicit(program)(x, w), program(x, vn.materialise(w)))
    said = "activations not quantized to int8: the product does not contract axis -"
    assert sum(said in event.how for event in vn.explain(program)(x, w).events) == 1


def test_contracting_its_own_axis_is_not_reported():
    w = weight("int8", 8, 4, act_qtype="int8")
    events = vn.explain(matmul)(normal(5, 8), w).events
    assert not any("activations not" in event.how for event in events)


@pytest.mark.parametrize("static", [False, True])
def test_convolutions_use_a_stack_of_kernels(static):
    w = weight("int8", 2, 3, 3, 4, 6, act_qtype="int8", tile_axis=(-4, -3, -2))
    scales = jnp.array([0.02, 0.05]).reshape(2, 1, 1, 1, 1)
    if static:
        w = w.changed(scale=scales)
    fake = lambda x, i: (
        vn.quant.quantize_with_scale(x, "int8", scales[i]).dequantize()
        if static
        else quantize(x, "int8", channelwise_axes=[0]).dequantize()
    )
    dense = vn.materialise(w)
    expected = lambda of: np.stack([convolve(fake(IMAGE, i), dense[n]) for n, i in enumerate(of)])
    outside = jax.vmap(vn.implicit(convolve), (None, 0))(IMAGE, w)
    assert_near(outside, expected([0, 1]))
    inside = vn.implicit(jax.vmap(convolve, (None, 0)))(IMAGE, w)
    # Concatenated kernels share the widest of their ranges.
    assert_near(inside, expected([1, 1]))


def test_cotangents_of_convolutions_are_not_quantized():
    w = weight("int8", 3, 3, 4, 6, act_qtype="int2", tile_axis=(0, 1, 2))
    program = lambda x, w: jnp.sum(convolve(x, w) * jnp.cos(jnp.arange(6.0)))
    grad = vn.implicit(jax.grad(program))(IMAGE, w)
    assert_near(grad, np.asarray(jax.grad(program)(IMAGE, vn.materialise(w))))


def test_ragged_products_quantize_rows():
    w = weight("int8", 3, 16, 6, act_qtype="int8")
    x, sizes = normal(10, 16), jnp.array([3, 0, 7])
    y, grad = with_gradient(lambda x: vn.implicit(lax.ragged_dot)(x, w, sizes), x)
    dense = vn.materialise(w)
    y_, grad_ = with_gradient(lambda x: lax.ragged_dot(x, dense, sizes), rows(x, "int8"))
    assert_near(y, np.asarray(y_))
    assert_near(grad, np.asarray(grad_))


# Static ranges.


def with_scale(x, qtype, scale, zero_point=None):
    return np.asarray(vn.quant.quantize_with_scale(x, qtype, scale, zero_point).dequantize())


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "nf4"])
@pytest.mark.parametrize("w_qtype", ["int8", None])
def test_a_static_scale_applies_to_all_rows_and_clips(qtype, w_qtype):
    x, w = normal(3, 16).at[0, 0].set(1e4), weight(w_qtype, 16, 6)
    q = ActivationQuantized(w, jnp.full((1, 1), 0.03), qtype=qtype)
    expected = with_scale(x, qtype, 0.03)
    assert np.abs(expected).max() < 100
    assert_near(x @ q, exact("mk,kn->mn", expected, vn.materialise(w)))


def test_a_static_zero_point_applies_to_all_rows():
    x, w = normal(3, 16) + 2, weight("int4", 16, 6)
    scale, zero_point = vn.quant.scale_of_range("uint8", 5.0, -1.0)
    part = lambda leaf: jnp.reshape(leaf, (1, 1))
    q = ActivationQuantized(w, part(scale), part(zero_point), qtype="uint8")
    expected = with_scale(x, "uint8", float(scale), int(zero_point))
    assert_near(jax.jit(vn.implicit(matmul))(x, q), exact("mk,kn->mn", expected, vn.materialise(w)))


def test_nan_stays_in_its_row_with_a_static_scale():
    q = ActivationQuantized(weight("int8", 16, 6), jnp.full((1, 1), 0.03), qtype="int8")
    y = normal(3, 16).at[1, 0].set(jnp.nan) @ q
    assert np.isnan(y).all(1).tolist() == [False, True, False]
    assert not np.isnan(np.delete(y, 1, 0)).any()


SCALES = arrays.array(np.array([0.01, 0.05, 0.2]).reshape(3, 1, 1))
STACKS = {
    "scan": lambda x, w: lax.scan(lambda _, w: (0, x @ w), 0, w)[1],
    "vmap": lambda x, w: jax.vmap(matmul, (None, 0))(x, w),
    "batched": lambda x, w: jnp.stack([x, x, x]) @ w,
    "batched, the weight first": lambda x, w: (
        w.swapaxes(1, 2) @ jnp.stack([x.T, x.T, x.T])
    ).swapaxes(1, 2),
    "one by one": lambda x, w: jnp.stack([x @ w[i] for i in range(3)]),
    "by an index": lambda x, w: lax.map(lambda i: x @ w[i], jnp.arange(3)),
    "turned over": lambda x, w: lax.scan(lambda _, w: (0, x @ w), 0, w[::-1])[1][::-1],
    "of the same activations": lambda x, w: jnp.einsum("mk,kln->lmn", x, w.swapaxes(0, 1)),
    "with a batch": lambda x, w: jnp.einsum("bmk,bkln->blmn", x[None], w.swapaxes(0, 1)[None])[0],
    "the weight first": lambda x, w: jnp.einsum("lkn,mk->lmn", w, x),
    "in two": lambda x, w: jnp.concatenate([jnp.stack([x]) @ w[:1], jnp.stack([x, x]) @ w[1:]]),
    "regrouped": lambda x, w: (jnp.stack([x[None]] * 3) @ w.reshape(3, 1, 16, 6))[:, 0],
}


@pytest.mark.parametrize("name", STACKS)
def test_each_weight_of_a_stack_has_its_own_range(name):
    x, w = normal(4, 16), weight("int8", 3, 16, 6)
    q = ActivationQuantized(w, SCALES, qtype="int8")
    actual = jax.jit(vn.implicit(STACKS[name], on_materialise=only_by_rules))(x, q)
    fake = np.stack([with_scale(x, "int8", scale) for scale in SCALES.ravel()])
    expected = exact("lmk,lkn->lmn", fake, vn.materialise(w))
    assert_near(actual, expected)
    if name == "scan":
        product = vn.implicit(matmul)
        assert_near(lax.scan(lambda _, w: (0, product(x, w)), 0, q)[1], expected)
        assert_near(jax.vmap(product, (None, 0))(x, q), expected)


def test_concatenated_weights_share_the_widest_range():
    x, w = 8 * normal(4, 16), weight("int8", 16, 6)
    parts = [
        ActivationQuantized(w, jnp.full((1, 1), scale), qtype="int8") for scale in (0.01, 0.3, 0.1)
    ]
    y = vn.implicit(lambda x, ws: x @ jnp.concatenate(ws, 1))(x, parts)
    expected = exact("mk,kn->mn", with_scale(x, "int8", 0.3), vn.materialise(w))
    assert_near(y, np.tile(expected, 3))


def test_concatenated_weights_share_the_widest_asymmetric_range():
    x, w = normal(4, 16), weight("int8", 16, 6)
    ranges = [(2.0, -0.5), (0.5, -3.0)]
    parts = []
    for high, low in ranges:
        scale, zero_point = (
            jnp.reshape(p, (1, 1)) for p in vn.quant.scale_of_range("uint8", high, low)
        )
        parts.append(ActivationQuantized(w, scale, zero_point, qtype="uint8"))
    y = vn.implicit(lambda x, ws: x @ jnp.concatenate(ws, 1))(x, parts)
    scale, zero_point = vn.quant.scale_of_range("uint8", 2.0, -3.0)
    expected = exact(
        "mk,kn->mn", with_scale(x, "uint8", float(scale), int(zero_point)), vn.materialise(w)
    )
    assert_near(
        y, np.tile(expected, 2), 0.02
    )  # the ends are codes, so they are off by up to a step


def test_companions_are_sliced_with_the_weight():
    P = jax.sharding.PartitionSpec
    w = ActivationQuantized(normal(4, 16, 6), jnp.ones((4, 1, 1)), qtype="int8")
    cut = w.partition(P("x", None, "y"), (2, 16, 3))
    assert (cut.array, cut.scale) == (P("x", None, "y"), P("x", None, None))
    q = ActivationQuantized(weight("int8", 16, 6), qtype="int8")
    assert q.partition(P(None, "y"), (16, 3)).array.packed == P(None, "y")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qtype": "int9"}, "unknown format 'int9'"),
        ({"calibration_method": "middle"}, "unknown calibration_method 'middle'"),
        ({"scale": arrays.ones(1)}, r"scale has shape \(1,\). For a weight of shape \(4, 4\)"),
        ({"scale": arrays.ones((2, 1))}, r"scale has shape \(2, 1\)"),
        ({"zero_point": arrays.ones((1, 1), jnp.int8)}, "needs a scale"),
        ({"scale": arrays.ones((1, 1)), "qtype": "mxfp8"}, "mxfp8 have a scale per tile"),
        ({"contracting": (0,)}, "must be negative axes"),
        ({"contracting": (-3,)}, "must be negative axes"),
    ],
)
def test_invalid_arguments_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        ActivationQuantized(jnp.ones((4, 4)), **{"qtype": "int8"} | changes)


def test_a_tile_that_does_not_divide_raises_with_the_weight():
    w = ActivationQuantized(jnp.ones((48, 4)), qtype="mxfp8")
    with pytest.raises(ValueError, match="tile of 32 does not divide") as info:
        jnp.ones((2, 48)) @ w
    assert any("activations of shape (2, 48)" in note for note in info.value.__notes__)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_empty_products_are_supported(shape):
    w = ActivationQuantized(weight("int8", shape[1], 6), qtype="int8")
    np.testing.assert_array_equal(jnp.ones(shape) @ w, np.zeros((shape[0], 6)))


def test_it_is_a_product_weight_with_a_quantized_array():
    w = weight("int8", 16, 6, act_qtype="int8")
    assert isinstance(w, ProductWeight)
    assert isinstance(w.array, QArray)
    assert w.nbytes == 16 * 6 + 6 * 4
    np.testing.assert_array_equal(vn.materialise(w), dequantize(w.array))
