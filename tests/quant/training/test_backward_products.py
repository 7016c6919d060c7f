"""Formats, tiles and residuals of each product of the backward pass."""

import jax
import jax.numpy as jnp
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import BackwardProduct, FakeQuantized, Rule, quantize, quantize_tree

KEYS = [arrays.key(seed) for seed in range(4)]
X = arrays.normal(32, 64)
W = arrays.normal(64, 48, seed=1)
G = arrays.normal(32, 48, seed=2)
INT8 = {"qtype": "int8", "act_qtype": "int8", "grad_qtype": "int8"}

CASES = {
    "other formats": {
        "grad_input": BackwardProduct("float8_e5m2", residual_qtype="float8_e4m3fn"),
        "grad_weight": BackwardProduct("int4"),
    },
    "tiles of the rows": {"grad_weight": BackwardProduct("int8", tile_size=8)},
    "tiles of both": {
        "grad_input": BackwardProduct("int8", tile_size=16),
        "grad_weight": BackwardProduct("int8", tile_size=0.25),
    },
    "one product": {"grad_qtype": None, "grad_weight": BackwardProduct("int8")},
    "calibrated": {
        "grad_input": BackwardProduct("int4", calibration_method="rms,2"),
        "grad_weight": BackwardProduct("int8", calibration_method="absmax,0.5"),
    },
    "dense residuals": {
        "grad_input": BackwardProduct("int8", residual_qtype=None),
        "grad_weight": BackwardProduct("int8", residual_qtype=None),
    },
    "residuals quantized again": {
        "grad_input": BackwardProduct("int8", residual_qtype="int8"),
        "grad_weight": BackwardProduct("int8", residual_qtype="int4", tile_size=16),
    },
    "only dense residuals": {
        "grad_qtype": None,
        "grad_input": BackwardProduct(None, residual_qtype=None),
        "grad_weight": BackwardProduct(None, residual_qtype=None),
    },
    "no formats": {
        "grad_qtype": None,
        "grad_input": BackwardProduct(None),
    },
    "blocks of weights": {"tile_size": {0: 16, 1: 16}},
    "blocks and tiles": {
        "tile_size": {0: 16, 1: 16},
        "grad_input": BackwardProduct("int8", tile_size=16),
    },
    "tiles of weights": {"tile_size": 16, "grad_input": BackwardProduct("int8", tile_size=16)},
    "tiles of weights, no format": {
        "tile_size": 16,
        "grad_input": BackwardProduct(None),
    },
    "tiles of activations": {
        "act_tile_size": 16,
        "grad_weight": BackwardProduct("int8", tile_size=8),
    },
    "fp8 training": {
        "qtype": "float8_e4m3fn",
        "act_qtype": "float8_e4m3fn",
        "act_tile_size": 16,
        "tile_size": {0: 16, 1: 16},
        "grad_input": BackwardProduct("float8_e4m3fn", tile_size=16),
        "grad_weight": BackwardProduct("float8_e4m3fn", tile_size=16),
    },
    "a format with tiles": {"grad_weight": BackwardProduct("mxfp8")},
}


def dense(x, qtype, axis, tile=None, method=None):
    """Quantize and dequantize a matrix for a product that contracts an axis."""
    if qtype is None:
        return x
    tile = 32 if qtype == "mxfp8" else tile
    tile = round(tile * x.shape[axis]) if isinstance(tile, float) else tile
    channels = {"channelwise_axes": [1 - axis]}
    tiles = {"tiled_axes": None if tile is None else {axis: tile}}
    return quantize(x, qtype, calibration_method=method, **channels, **tiles).dequantize()


def by_hand(
    x, w, g, *, qtype, act_qtype, grad_qtype, tile_size=None, act_tile_size=None, **products
):
    """Return the product `x @ w` and both gradients, in floating point."""
    blocks = isinstance(tile_size, dict)
    if blocks:
        q = quantize(w, qtype, tiled_axes=tile_size)
    else:
        tiles = None if tile_size is None else {0: tile_size}
        q = quantize(w, qtype, channelwise_axes=[1], tiled_axes=tiles)
    tiles = None if act_tile_size is None else {1: act_tile_size}
    rows = quantize(x, act_qtype, channelwise_axes=[0], tiled_axes=tiles)

    def gradient(name, contracted, residual, scale, original):
        """Return the operands. `contracted` is an axis of g; the other operand has it first."""
        of = products.get(name) or BackwardProduct(grad_qtype)
        quantize_g = lambda g: dense(g, of.qtype, contracted, of.tile_size, of.calibration_method)
        if of.residual_qtype != "forward":
            y = dense(original, of.residual_qtype, 0, of.tile_size)
            return quantize_g(g), y
        if of.qtype is None or (blocks and name == "grad_input"):
            return quantize_g(g), residual
        if scale is None:
            return quantize_g(g), dense(original, qtype, 0, of.tile_size)
        by_scale = scale if contracted == 1 else scale.T
        return quantize_g(g * by_scale), residual / scale.T

    scale = None if tile_size is not None else q.scales()
    gx, y = gradient("grad_input", 1, q.dequantize().T, scale, w.T)
    by_x = gx @ y
    scale = None if act_tile_size is not None else rows.scales().T
    gw, y = gradient("grad_weight", 0, rows.dequantize(), scale, x)
    return rows.dequantize() @ q.dequantize(), by_x, y.T @ gw


@pytest.mark.parametrize("of", CASES.values(), ids=CASES)
def test_gradients_equal_products_of_quantized_operands(of):
    of = INT8 | of

    @jax.jit
    def ours(x, w, g):
        dot = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **of))
        out, pull = jax.vjp(dot, x, w)
        return out, *pull(g)

    found, wanted = ours(X, W, G), jax.jit(lambda *args: by_hand(*args, **of))(X, W, G)
    assert_close(found, wanted, 1e-4)


QWIX = {
    "tiles of the rows": (
        {"drhs_tile_size": 8},
        {"grad_weight": BackwardProduct("int8", tile_size=8)},
    ),
    "a tile as a share": (
        {"dlhs_tile_size": 0.25},
        {"grad_input": BackwardProduct("int8", tile_size=0.25)},
    ),
    "another format for each": (
        {"dlhs_grad_qtype": "float8_e5m2", "drhs_grad_qtype": None},
        {"grad_input": BackwardProduct("float8_e5m2"), "grad_weight": BackwardProduct(None)},
    ),
    "calibrated": (
        {"dlhs_grad_calibration_method": "rms,3", "drhs_grad_calibration_method": "absmax,0.5"},
        {
            "grad_input": BackwardProduct("int8", calibration_method="rms,3"),
            "grad_weight": BackwardProduct("int8", calibration_method="absmax,0.5"),
        },
    ),
    "dense residuals": (
        {"use_original_residuals": True},
        dict.fromkeys(("grad_input", "grad_weight"), BackwardProduct("int8", residual_qtype=None)),
    ),
    "dense residuals and gradients": (
        {"use_original_residuals": True, "dlhs_grad_qtype": None, "drhs_grad_qtype": None},
        dict.fromkeys(("grad_input", "grad_weight"), BackwardProduct(None, residual_qtype=None)),
    ),
    "tiles of both operands": (
        {"tile_size": 16, "dlhs_tile_size": 8},
        {
            "tile_size": 16,
            "act_tile_size": 16,
            "grad_input": BackwardProduct("int8", tile_size=8, residual_qtype=None),
            "grad_weight": BackwardProduct("int8", residual_qtype=None),
        },
    ),
    "tiles as shares": (
        {"tile_size": 0.5},
        {
            "tile_size": 0.5,
            "act_tile_size": 0.5,
            "grad_input": BackwardProduct("int8", residual_qtype=None),
            "grad_weight": BackwardProduct("int8", residual_qtype=None),
        },
    ),
    "blocks of weights": (
        {"lhs_qtype": None, "tile_size": {0: 16, 1: 16}},
        {
            "act_qtype": None,
            "tile_size": {0: 16, 1: 16},
            "grad_input": BackwardProduct("int8", residual_qtype=None),
        },
    ),
    "blocks of both operands, and of gradients": (
        {f"{of}tile_size": {0: 8, 1: 16} for of in ("", "dlhs_", "drhs_")},
        {
            "tile_size": {0: 8, 1: 16},
            "act_tile_size": {0: 8, 1: 16},
            "grad_input": BackwardProduct("int8", tile_size={0: 8, 1: 16}, residual_qtype=None),
            "grad_weight": BackwardProduct("int8", tile_size={0: 8, 1: 16}, residual_qtype=None),
        },
    ),
    "residuals quantized again": (
        {
            "use_original_residuals": True,
            "dlhs_residual_qtype": "int8",
            "drhs_residual_qtype": "int8",
            "drhs_tile_size": 16,
        },
        {
            "grad_input": BackwardProduct("int8", residual_qtype="int8"),
            "grad_weight": BackwardProduct("int8", residual_qtype="int8", tile_size=16),
        },
    ),
}


@pytest.mark.parametrize("case", QWIX.values(), ids=QWIX)
def test_values_and_gradients_equal_qwix(case):
    import qwix._src.core.dot_general_qt as core

    theirs, of = case
    names = "lhs_qtype rhs_qtype dlhs_grad_qtype drhs_grad_qtype".split()
    config = core.DotGeneralQtConfig(**dict.fromkeys(names, "int8") | theirs)
    numbers = (((1,), (0,)), ((), ()))

    def run(x, w, g):
        ours = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **INT8 | of))
        of_qwix = lambda x, w: core.dot_general_qt(x, w, numbers, config)
        pairs = [jax.vjp(f, x, w) for f in (ours, of_qwix)]
        return [(out, *pull(g)) for out, pull in pairs]

    found, wanted = jax.jit(run)(X, W, G)
    assert_close(found, wanted, 1e-5)


def residuals_of(of):
    """Return the dtypes of the arrays that the forward pass saves for the backward pass."""
    dot = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **INT8 | of))
    leaves = jax.tree.leaves(jax.vjp(dot, X, W)[1])
    return sorted({x.dtype.name for x in leaves if x.size > max(*X.shape, *W.shape)})


def test_residuals_have_the_requested_dtypes():
    kept = BackwardProduct("int8", residual_qtype=None)
    assert residuals_of({}) == ["int8"]
    assert residuals_of({"tile_size": {0: 16, 1: 16}}) == ["int8"]
    assert residuals_of({"grad_input": kept}) == ["float32", "int8"]
    assert residuals_of({"grad_input": kept, "grad_weight": kept}) == ["float32"]


def test_grad_qtype_applies_to_both_products():
    both = FakeQuantized(W, qtype="int8", grad_qtype="int8")
    assert both.backward == (BackwardProduct("int8"), BackwardProduct("int8"))
    one = FakeQuantized(W, qtype="int8", grad_qtype="int8", grad_weight=BackwardProduct("int4"))
    assert one.backward == (BackwardProduct("int8"), BackwardProduct("int4"))
    assert FakeQuantized(W, qtype="int8").backward is None
    blocks = BackwardProduct("int8", tile_size={-2: 8, -1: 0.5})
    assert eval(repr(blocks), vars(vn.quant)) == blocks
    assert hash(FakeQuantized(W, act_qtype="int8", act_tile_size={0: 8}).act_tile_size)


def test_the_weight_can_be_the_first_operand():
    of = INT8 | {
        "grad_input": BackwardProduct("int8", tile_size=16),
        "grad_weight": BackwardProduct("int4", tile_size=8),
    }
    swapped = lambda x, w: vn.implicit(lambda w, x: w @ x)(
        FakeQuantized(w.T, tile_axis=-1, **of), x.T
    )
    plain = lambda x, w: vn.implicit(jnp.matmul)(x, FakeQuantized(w, **of))

    @jax.jit
    def both(x, w, g):
        return jax.vjp(plain, x, w)[1](g), jax.vjp(swapped, x, w)[1](g.T)

    found, wanted = both(X, W, G)
    assert_close(found, wanted, 1e-5)


OF_LAYERS = INT8 | {
    "grad_input": BackwardProduct("int8", tile_size=8),
    "grad_weight": BackwardProduct("int4", tile_size=8, residual_qtype="int8"),
}


def test_scan_vmap_and_checkpoint_are_supported():
    layers = jax.random.normal(KEYS[3], (2, 16, 16)) / 4
    x = X[:8, :16]

    def loss(layers, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, layers)[0].sum()

    def unrolled(layers, x):
        for w in layers:
            x = jnp.tanh(vn.implicit(jnp.matmul)(x, FakeQuantized(w, **OF_LAYERS)))
        return x.sum()

    ours = lambda layers, x: vn.implicit(loss)(FakeQuantized(layers, **OF_LAYERS), x)
    xs = jnp.stack([x, 2 * x])
    both = lambda *args: [jax.vmap(jax.grad(f, (0, 1)), (None, 0))(*args) for f in (ours, unrolled)]
    found, wanted = jax.jit(both)(layers, xs)
    assert_close(found, wanted, 1e-5)


CONVOLUTIONS = {
    "plain": {},
    "in groups": {"feature_group_count": 2},
}


@pytest.mark.parametrize("more", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_use_the_options_of_each_product(more):
    count = more.get("feature_group_count", 1)
    images = jax.random.normal(KEYS[0], (4, 5, 6, 4))
    kernel = jax.random.normal(KEYS[1], (3, 2, 4 // count, 8))

    def conv(x, w):
        layout = ("NHWC", "HWIO", "NHWC")
        numbers = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": layout}
        return jax.lax.conv_general_dilated(x, w, **numbers, **more)

    g = jax.random.normal(KEYS[2], (4, 5, 6, 8))
    of = {"qtype": "int8", "act_qtype": "int8", "tile_axis": (-4, -3, -2)}
    of |= {
        "grad_input": BackwardProduct("int8", tile_size=4, residual_qtype=None),
        "grad_weight": BackwardProduct("int4", tile_size=2, residual_qtype=None),
    }

    @jax.jit
    def both(x, w, g):
        ours = lambda x, w: vn.implicit(conv)(x, FakeQuantized(w, **of))
        found = jax.vjp(ours, x, w)[1](g)
        per_image = quantize(g, "int8", channelwise_axes=[0], tiled_axes={3: 4}).dequantize()
        per_channel = quantize(g, "int4", channelwise_axes=[3], tiled_axes={0: 2}).dequantize()
        pull = jax.vjp(conv, x, w)[1]
        return found, (pull(per_image)[0], pull(per_channel)[1])

    found, wanted = both(images, kernel, g)
    assert_close(found, wanted, 1e-4)


def test_ragged_dot_uses_the_options_of_each_product():
    sizes = jnp.array([12, 20])
    w = jax.random.normal(KEYS[1], (2, 64, 48))
    dot = lambda x, w: jax.lax.ragged_dot(x, w, sizes)
    of = INT8 | {
        "grad_input": BackwardProduct("int8", tile_size=16),
        "grad_weight": BackwardProduct("int4", residual_qtype="float8_e4m3fn"),
    }

    @jax.jit
    def both(x, w, g):
        ours = lambda x, w: vn.implicit(dot)(x, FakeQuantized(w, **of))
        out, pull = jax.vjp(ours, x, w)
        quantized = quantize(w, "int8", channelwise_axes=[0, 2]).dequantize()
        rows = dense(x, "int8", 1)
        by_x = jax.vjp(dot, x, quantized)[1](dense(g, "int8", 1, 16))[0]
        by_w = jax.vjp(dot, dense(x, "float8_e4m3fn", 0), w)[1](dense(g, "int4", 0))[1]
        return (out, *pull(g)), (dot(rows, quantized), by_x, by_w)

    found, wanted = both(X, w, G)
    assert_close(found, wanted, 1e-4)


def test_blocks_of_activations_cannot_be_converted():
    w = FakeQuantized(W, qtype="int8", act_qtype="int8", act_tile_size={0: 8, 1: 8})
    with pytest.raises(ValueError, match="which only training supports"):
        vn.quant.convert({"w": w})


def test_a_rule_sets_backward_products():
    rule = Rule("w", "int8", grad_weight=BackwardProduct("int4", tile_size=8))
    trained = quantize_tree({"w": W}, [rule], train=True)["w"]
    assert trained.backward == (BackwardProduct(None), BackwardProduct("int4", tile_size=8))
    assert "grad_weight=BackwardProduct('int4', tile_size=8)" in repr(trained)
    assert eval(repr(rule), vars(vn.quant)) == rule
    with pytest.raises(ValueError, match="grad_weight is for training"):
        quantize_tree({"w": W}, [rule])


@pytest.mark.parametrize(
    ("error", "says", "args"),
    [
        (ValueError, "unknown format", {"qtype": "int9"}),
        (ValueError, "unknown format", {"qtype": "int8", "residual_qtype": "int9"}),
        (ValueError, "unknown calibration_method", {"qtype": "int8", "calibration_method": "no"}),
        (ValueError, "leaves the gradient dense", {"qtype": None, "calibration_method": "absmax"}),
        (ValueError, "must be at least 1", {"qtype": "int8", "tile_size": 0}),
        (ValueError, "fraction of the axis", {"qtype": "int8", "tile_size": 1.5}),
        (TypeError, r"whole number|tile_size", {"qtype": "int8", "tile_size": "8"}),
        (ValueError, "needs tiles", {"qtype": "mxfp8", "tile_size": 8}),
    ],
)
def test_wrong_options_raise(error, says, args):
    with pytest.raises(error, match=says):
        BackwardProduct(**args)


def test_a_tile_that_does_not_divide_names_the_product():
    w = FakeQuantized(W, grad_weight=BackwardProduct("int8", tile_size=5))
    with pytest.raises(ValueError, match="does not divide") as caught:
        jax.grad(vn.implicit(lambda w: (X @ w).sum()))(w)
    assert "BackwardProduct('int8', tile_size=5)" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", ["dot", "conv"])
def test_dense_gradients_keep_the_precision(kind):
    options = {"qtype": "int8", "grad_input": BackwardProduct(None, residual_qtype=None)}
    if kind == "dot":
        x, w = X, FakeQuantized(W, **options, grad_weight=options["grad_input"], tile_axis=0)
        product = lambda x, w: jnp.dot(x, w, precision="highest")
    else:
        x = arrays.normal(1, 2, 6)
        w = FakeQuantized(arrays.normal(3, 2, 3), **options, grad_weight=options["grad_input"])
        conv = jax.lax.conv_general_dilated
        product = lambda x, w: conv(x, w, (1,), "SAME", precision="highest")
    gradient = jax.grad(vn.implicit(lambda x, w: product(x, w).sum()), argnums=(0, 1))
    text = str(jax.make_jaxpr(gradient)(x, w))
    # The forward product and both gradients.
    assert text.count("precision=") == 3
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 3
