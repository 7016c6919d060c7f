"""Products on codes, forward and backward, with formats for weights, activations and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import FakeQuantized, quantize

KEYS = [arrays.key(seed) for seed in range(4)]
X = arrays.normal(6, 16)
W = arrays.normal(16, 8, seed=1)

FORMATS = {
    "int8": {"qtype": "int8", "act_qtype": "int8", "grad_qtype": "int8"},
    "fp8": {"qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "grad_qtype": "float8_e5m2"},
    "int4 and int8": {"qtype": "int4", "act_qtype": "int8", "grad_qtype": "int8"},
    "weights alone": {"qtype": "int8", "grad_qtype": "int8"},
    "activations alone": {"qtype": None, "act_qtype": "int8", "grad_qtype": "int8"},
    "gradients alone": {"qtype": None, "grad_qtype": "int8"},
    "tiles": {"qtype": "int8", "tile_size": 4, "act_qtype": "int8", "grad_qtype": "int8"},
    "zero points": {"qtype": "uint8", "act_qtype": "uint8", "grad_qtype": "int8"},
    "a codebook": {"qtype": "nf4", "act_qtype": "int8", "grad_qtype": "int8"},
}


def q(x, qtype, axes, method=None):
    """Quantize and dequantize an array, with one scale per index of some axes."""
    if qtype is None:
        return x
    return quantize(x, qtype, channelwise_axes=axes, calibration_method=method).dequantize()


def by_hand(x, w, g, of):
    """Return the product `x @ w` and both gradients, in floating point."""
    weights, rows, grads = of["qtype"], of.get("act_qtype"), of["grad_qtype"]
    tiles = {0: of["tile_size"]} if "tile_size" in of else None
    dense = w
    if weights is not None:
        dense = quantize(w, weights, channelwise_axes=[1], tiled_axes=tiles).dequantize()
    qx = q(x, rows, [0])
    # The scale of a symmetric per-channel operand multiplies the gradient. Other operands are
    # quantized again for the other product.
    moves = lambda qtype: qtype is not None and qtype[0] in "if"
    if moves(weights) and tiles is None:
        scale = quantize(w, weights, channelwise_axes=[1]).scales()
        by_x = q(g * scale, grads, [0]) @ (dense / scale).T
    else:
        by_x = q(g, grads, [0]) @ q(w, weights, [0]).T
    if moves(rows):
        scale = quantize(x, rows, channelwise_axes=[0]).scales()
        by_w = (qx / scale).T @ q(g * scale, grads, [1])
    else:
        by_w = q(x, rows, [1]).T @ q(g, grads, [1])
    return qx @ dense, by_x, by_w


@pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)
def test_gradients_equal_products_of_quantized_operands(of):
    g = jax.random.normal(KEYS[2], (6, 8))

    @jax.jit
    def ours(x, w):
        dot = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **of))
        out, pull = jax.vjp(dot, x, w)
        return out, *pull(g)

    assert_close(ours(X, W), by_hand(X, W, g, of), 1e-4)


def test_all_products_of_a_step_use_integers():
    loss = lambda w, x: (x @ w).sum()
    w = FakeQuantized(W, **FORMATS["int8"])
    jaxpr = jax.make_jaxpr(jax.grad(vn.implicit(loss), (0, 1)))(w, X)
    assert len(_products(jaxpr.jaxpr)) == 3
    assert set(_products(jaxpr.jaxpr)) == {("int8", "int8")}


def _products(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(tuple(v.aval.dtype.name for v in eqn.invars))
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found += _products(inner)
    return found


DIMENSIONS = {
    "two contracted, in another order": ((3, 4, 5), (5, 4, 2), (((1, 2), (1, 0)), ((), ()))),
    "batched": ((3, 2, 4), (2, 4, 5), (((2,), (1,)), ((1,), (0,)))),
    "a vector": ((4,), (4, 5), (((0,), (0,)), ((), ()))),
    "the weight contracted last": ((3, 4), (5, 4), (((1,), (1,)), ((), ()))),
    "nothing to sum over in the batch": ((0, 4), (4, 5), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("case", DIMENSIONS.values(), ids=DIMENSIONS)
@pytest.mark.parametrize("swapped", [False, True], ids=["x first", "w first"])
def test_dimension_numbers_can_be_arbitrary(case, swapped):
    x_shape, w_shape, numbers = case
    if swapped:
        numbers = tuple(pair[::-1] for pair in numbers)
    axes = tuple(numbers[0][0 if swapped else 1])
    x, w = (jax.random.normal(*of) for of in zip(KEYS, (x_shape, w_shape), strict=False))

    def loss(x, w):
        pair = (w, x) if swapped else (x, w)
        return jnp.sin(jax.lax.dot_general(*pair, numbers)).sum()

    def ours(x, w):
        return vn.implicit(loss)(x, FakeQuantized(w, tile_axis=axes, **FORMATS["int8"]))

    both = lambda *args: [jax.grad(f, (0, 1))(*args) for f in (ours, loss)]
    found, dense = jax.jit(both)(x, w)
    assert_close(found, dense, 0.15)  # values of a few units, in 255 steps
    assert [a.shape for a in found] == [x.shape, w.shape]


QWIX_SHAPES = {
    "matrices": ((6, 16), (16, 8), (((1,), (0,)), ((), ()))),
    "batched": ((2, 3, 16), (2, 16, 8), (((2,), (1,)), ((0,), (0,)))),
}


def value_and_gradients(f, x, w, g):
    """Use one gradient `g` of the result, so that rounding cannot change its codes."""
    out, pull = jax.vjp(f, x, w)
    return out, *pull(g)


@pytest.mark.parametrize("case", QWIX_SHAPES.values(), ids=QWIX_SHAPES)
def test_values_and_gradients_equal_qwix(case):
    import qwix._src.core.dot_general_qt as core

    names = "lhs_qtype rhs_qtype dlhs_grad_qtype drhs_grad_qtype".split()
    config = core.DotGeneralQtConfig(**dict.fromkeys(names, jnp.int8))
    *shapes, numbers = case
    x, w = (jax.random.normal(*of) for of in zip(KEYS, shapes, strict=False))
    dot = lambda x, w: jax.lax.dot_general(x, w, numbers)
    ours = lambda x, w: vn.implicit(dot)(x, FakeQuantized(w, **FORMATS["int8"]))
    theirs = lambda x, w: core.dot_general_qt(x, w, numbers, config)
    g = jax.random.normal(KEYS[2], dot(x, w).shape)
    both = lambda *args: [value_and_gradients(f, *args) for f in (ours, theirs)]
    found, wanted = jax.jit(both)(x, w, g)
    assert_close(found, wanted, 1e-5)


CONVOLUTIONS = {
    "SAME": {},
    "strided and padded": {"window_strides": (2, 1), "padding": ((1, 0), (2, 1))},
    "dilated": {"lhs_dilation": (1, 2), "rhs_dilation": (2, 1), "padding": ((0, 3), (1, 0))},
}


def convolve(conv, images, kernel, more):
    given = {"window_strides": (1, 1), "padding": "SAME"} | more
    return conv(images, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **given)


def images_and_kernel(groups=1):
    shapes = (2, 7, 6, 4), (3, 2, 4 // groups, 6)
    return [jax.random.normal(key, shape) for key, shape in zip(KEYS, shapes, strict=False)]


@pytest.mark.parametrize("more", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_equal_qwix(more):
    import qwix._src.core.conv_general_qt as core

    names = "lhs_qtype rhs_qtype dlhs_grad_qtype drhs_grad_qtype".split()
    config = core.ConvGeneralQtConfig(**dict.fromkeys(names, jnp.int8))
    theirs = lambda x, w, **numbers: core.conv_general_qt(x, w, config, **numbers)
    axes = (-4, -3, -2)

    def run(x, w):
        dense = jax.lax.conv_general_dilated
        ours = lambda w: FakeQuantized(w, tile_axis=axes, **FORMATS["int8"])
        programs = [
            lambda x, w: vn.implicit(lambda x, w: convolve(dense, x, w, more))(x, ours(w)),
            lambda x, w: convolve(theirs, x, w, more),
        ]
        g = jax.random.normal(KEYS[2], jax.eval_shape(programs[1], x, w).shape)
        return [value_and_gradients(f, x, w, g) for f in programs]

    found, wanted = jax.jit(run)(*images_and_kernel())
    assert_close(found, wanted, 1e-5)


OTHER_CONVOLUTIONS = {
    "a scale for each place of the kernel": ({"tile_axis": -2}, {}),
    "weights alone": ({"tile_axis": (-4, -3, -2), "act_qtype": None}, {}),
    "grouped": ({"tile_axis": (-4, -3, -2)}, {"feature_group_count": 2}),
    "a batch in groups": ({"tile_axis": (-4, -3, -2)}, {"batch_group_count": 2}),
}


@pytest.mark.parametrize("case", OTHER_CONVOLUTIONS.values(), ids=OTHER_CONVOLUTIONS)
def test_other_convolutions_are_close_to_dense_ones(case):
    of, more = case
    conv = jax.lax.conv_general_dilated
    loss = lambda x, w: jnp.sin(convolve(conv, x, w, more)).sum()

    def both(x, w):
        ours = lambda x, w: vn.implicit(loss)(x, FakeQuantized(w, **FORMATS["int8"] | of))
        return [jax.grad(f, (0, 1))(x, w) for f in (ours, loss)]

    found, dense = jax.jit(both)(*images_and_kernel(more.get("feature_group_count", 1)))
    for one, other in zip(found, dense, strict=True):
        assert 0 < jnp.linalg.norm(one - other) < 0.06 * jnp.linalg.norm(other)


def test_ragged_dot_quantizes_the_gradient():
    sizes = jnp.array([2, 4])
    w = jax.random.normal(KEYS[2], (2, 16, 8))
    loss = lambda w, x: jnp.sin(jax.lax.ragged_dot(x, w, sizes)).sum()
    found = {}
    for grad_qtype in (None, "int8", "int2"):
        of = {"qtype": "int8", "act_qtype": "int8", "grad_qtype": grad_qtype}
        found[grad_qtype] = jax.grad(vn.implicit(loss))(FakeQuantized(w, **of), X).w
    error = lambda g: jnp.linalg.norm(g - found[None]) / jnp.linalg.norm(found[None])
    assert 0 < error(found["int8"]) < 0.02 < error(found["int2"])


def test_clipped_values_have_no_gradient():
    w = jnp.array([[0.1], [5.0], [0.2], [-0.3]])
    x = jnp.array([[0.5, 0.1, -3.0, 0.2]])
    of = {"calibration_method": "fixed,1", "act_calibration_method": "fixed,1"}
    loss = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **FORMATS["int8"] | of)).sum()
    by_x, by_w = jax.grad(loss, (0, 1))(x, w)
    assert (by_w[:, 0] != 0).tolist() == [True, False, True, True]
    assert (by_x[0] != 0).tolist() == [True, True, False, True]


@pytest.mark.parametrize("of", ["int8", "weights alone"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_activations_can_be_integers(of, dtype):
    x = (jnp.arange(96).reshape(6, 16) % 7 % 3).astype(dtype)
    loss = lambda w, x: jnp.sin(x @ w).sum()
    found = jax.grad(vn.implicit(loss))(FakeQuantized(W, **FORMATS[of]), x).w
    wanted = jax.grad(vn.implicit(loss))(FakeQuantized(W, qtype="int8"), x).w
    assert_close(found, wanted, 0.02)


def test_gradients_have_the_dtypes_of_their_operands():
    w = FakeQuantized(W, dense_dtype="bfloat16", **FORMATS["int8"])
    loss = lambda w, x: (x @ w).astype(jnp.float32).sum()
    by_w, by_x = jax.grad(vn.implicit(loss), (0, 1))(w, X.astype(jnp.bfloat16))
    assert (by_w.w.dtype, by_x.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(by_w.w, jax.grad(loss)(W, X), 0.1)


def test_scan_vmap_and_checkpoint_are_supported():
    layers = jnp.stack([W @ W.T, -W @ W.T]) / 4

    def loss(layers, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, layers)[0].sum()

    def unrolled(layers, x):
        for w in layers:
            x = jnp.tanh(vn.implicit(jnp.matmul)(x, FakeQuantized(w, **FORMATS["int8"])))
        return x.sum()

    def ours(layers, x):
        return vn.implicit(loss)(FakeQuantized(layers, **FORMATS["int8"]), x)

    xs = jnp.stack([X, 2 * X])
    both = lambda *args: [jax.vmap(jax.grad(f, (0, 1)), (None, 0))(*args) for f in (ours, unrolled)]
    found, wanted = jax.jit(both)(layers, xs)
    assert_close(found, wanted, 1e-5)


def test_nan_does_not_spread():
    x = X.at[2, 3].set(jnp.nan)
    dot = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **FORMATS["int8"]))
    out, pull = jax.vjp(dot, x, W)
    by_x, _ = pull(jnp.ones(out.shape).at[1, 0].set(jnp.inf))
    assert np.isnan(out).any(1).tolist() == [False, False, True, False, False, False]
    assert np.isnan(by_x).any(1).tolist() == [False, True, False, False, False, False]


def test_forward_mode_raises():
    dot = lambda x: vn.implicit(jnp.matmul)(x, FakeQuantized(W, **FORMATS["int8"]))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(dot, (X,), (X,))


def test_explain_names_the_strategy():
    (event,) = vn.explain(lambda w: X @ w)(FakeQuantized(W, **FORMATS["int8"])).events
    assert event.how == "on codes, forward and backward"
    (event,) = vn.explain(lambda w: X @ w)(FakeQuantized(W, qtype="int8")).events
    assert event.how == "quantized weight, in floating point"
