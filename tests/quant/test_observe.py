import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax._src.interpreters import ad
from support import arrays
from support.arrays import normal
from support.policies import only_by_rules

import veneer as vn
from veneer.quant import Rule, observe, quantize_tree

ANY = [Rule(".*", "int8")]


def assert_of(found, *xs, gram=True):
    """Check that statistics describe the activations `xs`, which may have any leading axes."""
    shape = found.minimum.shape
    x = np.concatenate([np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in xs])
    for name, value in {
        "count": np.full(x.shape[1], len(x)),
        "minimum": x.min(0),
        "maximum": x.max(0),
        "mean": x.mean(0),
        "absmean": np.abs(x).mean(0),
        "mean_square": np.square(x).mean(0),
    }.items():
        np.testing.assert_allclose(getattr(found, name), value.reshape(shape), rtol=1e-4, atol=1e-6)
    if gram:
        np.testing.assert_allclose(found.gram.squeeze(), x.T @ x / len(x), rtol=1e-4, atol=1e-4)


X = [normal(2, 3, 8), normal(5, 3, 8, seed=1)]
W = normal(8, 6, seed=2)
TRANSPOSED, HEADS = (arrays.array(w) for w in (np.asarray(W).T, np.asarray(W).reshape(8, 2, 3)))
TWO = arrays.array(np.stack([W, W]))

# A program of a weight and of activations, the weight, and the axis that the program contracts.
PROGRAMS = {
    "matmul": (lambda w, x: x @ w, W, -2),
    "jit": (jax.jit(lambda w, x: x @ w), W, -2),
    "transposed": (lambda w, x: x @ w.T, TRANSPOSED, -1),
    "the weight first": (lambda w, x: jnp.einsum("kn,btk->nbt", w, x), W, -2),
    "heads": (lambda w, x: jnp.einsum("btk,khd->bthd", x, w), HEADS, 0),
    "reshaped": (lambda w, x: x @ w.reshape(8, 6), HEADS, 0),
    "flat and back": (lambda w, x: x @ w.ravel().reshape(8, 6), W, -2),
    "another shape and back": (lambda w, x: x @ w.T.reshape(3, 16).T.T.reshape(6, 8).T, W, -2),
    "vmap": (lambda w, x: jax.vmap(jax.vmap(lambda x: x @ w))(x), W, -2),
    "checkpoint": (lambda w, x: jax.checkpoint(jnp.matmul)(x, w), W, -2),
    "cast": (lambda w, x: x.astype(jnp.float16) @ w.astype(jnp.float16), W, -2),
    "cond": (lambda w, x: lax.cond(True, jnp.matmul, lambda x, w: -(x @ w), x, w), W, -2),
    "in pieces": (lambda w, x: x[..., :3] @ w[:3] + x[..., 3:] @ w[3:], W, -2),
    "ragged": (
        lambda w, x: lax.ragged_dot(x.reshape(-1, 8), w, jnp.array([2, x.size // 8 - 2])),
        TWO,
        -2,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_activations_of_a_weight_are_recorded(name):
    program, w, tile_axis = PROGRAMS[name]
    rule = Rule("", "int8", tile_axis=tile_axis)
    found = observe(program, [rule], params=w, gram=True)(X)[""]
    shape = [1] * w.ndim
    shape[tile_axis] = 8
    assert found.minimum.shape == tuple(shape)
    assert_of(
        found,
        *[x.astype(np.float16) for x in X] if name == "cast" else X,
        gram=name not in ("in pieces", "cast"),
    )
    ends = [x.max() for x in X]
    expected = {"mean": np.mean(ends), "exponential": 0.9 * ends[0] + 0.1 * ends[1]}
    for average, end in expected.items():
        tolerance = 1e-3 if name == "cast" else 1e-5
        np.testing.assert_allclose(found.highs[average].ravel(), [end], rtol=tolerance)


LAYERS = arrays.array(np.asarray(normal(3, 8, 8, seed=3)) / 3)


def layers(ws, x):
    """Return the input of each layer, and the output of the last."""
    inputs = []
    for w in ws:
        inputs.append(x)
        x = jnp.tanh(x @ w)
    return inputs, x


STACKS = {
    "scan": lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0],
    "scan of checkpoints": lambda ws, x: lax.scan(
        jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, ws
    )[0],
    "an index": lambda ws, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ ws[i]), x),
    "a list": lambda ws, x: layers(ws, x)[1],
    "torch": lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, ws.mT)[0],
    "two loops": lambda ws, x: lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), jnp.tanh(x @ ws[0]), ws[1:]
    )[0],
}


@pytest.mark.parametrize("name", STACKS)
def test_stacked_layers_have_separate_statistics(name):
    program = jax.jit(STACKS[name])
    found = observe(lambda p, x: program(p["w"], x), ANY, params={"w": LAYERS}, gram=True)(X)["w"]
    inputs = [layers(LAYERS, x)[0] for x in X]
    assert found.minimum.shape == (3, 8, 1)
    assert found.highs["mean"].shape == (3, 1, 1)
    for i in range(3):
        assert_of(jax.tree.map(lambda leaf, i=i: leaf[i], found), *(x[i] for x in inputs))
        highs = [x[i].max() for x in inputs]
        np.testing.assert_allclose(found.highs["mean"][i], [[np.mean(highs)]], rtol=1e-5)


def test_experts_of_a_batched_product_have_separate_statistics():
    xs, ws = normal(3, 5, 8), normal(3, 8, 6)
    for program in (jnp.matmul, jax.vmap(jnp.matmul)):
        found = observe(lambda w, x, program=program: program(x, w), ANY, params=ws)([xs])[""]
        for i in range(3):
            assert_of(jax.tree.map(lambda leaf, i=i: leaf[i], found), xs[i], gram=False)


def test_vmap_around_implicit_counts_each_row_once():
    x = normal(4, 3, 8)
    program = jax.vmap(lambda w, x: vn.implicit(jnp.matmul)(x, w), (None, 0))
    assert_of(observe(program, ANY, params=W)([x])[""], x, gram=False)


def test_a_weight_used_twice_has_statistics_of_both_uses():
    square = normal(8, 8)
    found = observe(lambda w, x: jnp.tanh(x @ w) @ w, ANY, params=square, gram=True)(X)[""]
    assert_of(found, *X, *(jnp.tanh(x @ square) for x in X))


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_of_a_convolution_are_features(groups):
    image, kernel = normal(2, 6, 6, 4), normal(3, 3, 4 // groups, 8)
    numbers = ("NHWC", "HWIO", "NHWC")
    program = lambda w, x: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )
    rules = [Rule("", "int8", tile_axis=(0, 1, 2))]
    found = observe(program, rules, params=kernel, gram=True)([image])[""]
    assert found.minimum.shape == (1, 1, 4 // groups, 1)
    assert found.gram is None
    assert_of(found, image.reshape(2, 6, 6, groups, -1), gram=False)


def test_gradients_inside_a_model_are_not_recorded():
    # jax.checkpoint recomputes activations, which are counted twice. The means stay the same.
    w, v = normal(8, 8), normal(8, 1)

    def energy(params, x):
        return (jax.checkpoint(lambda x: jnp.tanh(x @ params["w"]))(x) @ params["v"]).sum()

    forces = jax.jit(lambda params, x: jax.grad(energy, 1)(params, x))
    found = observe(forces, ANY, params={"w": w, "v": v})(X)
    once = observe(lambda params, x: energy(params, x), ANY, params={"w": w, "v": v})(X)
    for path in ("w", "v"):
        for name in ("minimum", "maximum", "mean", "absmean", "mean_square"):
            np.testing.assert_allclose(
                getattr(found[path], name), getattr(once[path], name), rtol=1e-5, atol=1e-6
            )


def test_tangents_in_a_custom_jvp_rule_are_not_recorded():
    @jax.custom_jvp
    def layer(w, x):
        return jnp.tanh(x @ w)

    @layer.defjvp
    def _(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        out = layer(w, x)
        return out, (1 - out**2) * (dx @ w + x @ dw)

    def model(w, x):
        return jax.grad(lambda x: layer(w, x).sum())(x)

    for run in (model, jax.jit(model)):
        found = observe(run, ANY, params=W)(X)
        assert_of(found[""], *X, gram=False)


@jax.custom_jvp
def smooth(w, x):
    return jnp.tanh(x @ w)


@smooth.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    out = smooth(w, x)
    return out, (1 - out**2) * (dx @ w + x @ dw)


def tanh_layer(w, x):
    return jnp.tanh(x @ w)


def scanned_layer(w, x):
    return lax.scan(lambda c, _: (tanh_layer(w, c) @ w.T, None), x, length=1)[0]


FAR = arrays.array(
    1000 * np.asarray(normal(3, 8, seed=7))
)  # a tangent that is larger than all activations
DERIVATIVES = {
    "jvp": lambda w, x: jax.jvp(lambda x: tanh_layer(w, x), (x,), (FAR,)),
    "jvp of jit": lambda w, x: jax.jvp(jax.jit(lambda x: tanh_layer(w, x)), (x,), (FAR,)),
    "jvp by the weight": lambda w, x: jax.jvp(tanh_layer, (w, x), (w, FAR)),
    "jvp of scan": lambda w, x: jax.jvp(lambda x: scanned_layer(w, x), (x,), (FAR,)),
    "jvp of checkpoint": lambda w, x: jax.jvp(
        jax.checkpoint(lambda x: tanh_layer(w, x)), (x,), (FAR,)
    ),
    "jvp of a custom_jvp": lambda w, x: jax.jvp(lambda x: smooth(w, x), (x,), (FAR,)),
    "vmap of jvp": lambda w, x: jax.vmap(
        lambda x, t: jax.jvp(lambda x: tanh_layer(w, x), (x,), (t,))
    )(x, FAR),
    "linearize": lambda w, x: jax.linearize(lambda x: tanh_layer(w, x), x)[1](FAR),
    "linearize of a custom_jvp": lambda w, x: jax.linearize(lambda x: smooth(w, x), x)[1](FAR),
    "jacfwd": lambda w, x: jax.jacfwd(lambda x: tanh_layer(w, x))(x),
    "hessian": lambda w, x: jax.hessian(lambda x: tanh_layer(w, x).sum())(x),
    "forward over reverse": lambda w, x: jax.jvp(
        jax.grad(lambda x: tanh_layer(w, x).sum()), (x,), (FAR,)
    ),
    "reverse over forward": lambda w, x: jax.grad(
        lambda x: jax.jvp(lambda x: tanh_layer(w, x), (x,), (FAR,))[1].sum()
    )(x),
    "grad of a tied weight": lambda w, x: jax.grad(lambda x: (1000 * tanh_layer(w, x) @ w.T).sum())(
        x
    ),
}


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_tangents_are_not_recorded(name, is_jitted):
    model = jax.jit(DERIVATIVES[name]) if is_jitted else DERIVATIVES[name]
    x = X[0][0]
    expected = model(W, x)  # fills the caches of JAX
    outputs = []

    def program(w, x):
        outputs.append(model(w, x))

    assert_of(observe(program, ANY, params=W, gram=True)([x])[""], x)
    for y, z in zip(*map(jax.tree.leaves, (outputs[-1], expected)), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-4)


OTHER_PRODUCTS = {
    "ragged_dot": (lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 2])), TWO, -2),
    "convolution": (
        lambda w, x: lax.conv_general_dilated(
            x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        normal(3, 8, 4),
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", OTHER_PRODUCTS)
def test_tangents_of_other_products_are_not_recorded(name):
    layer, w, axis = OTHER_PRODUCTS[name]
    rules = [Rule("", "int8", tile_axis=axis)]
    program = lambda w, x: jax.jvp(lambda x: layer(w, x), (x,), (FAR,))
    found, plain = (observe(f, rules, params=w)([X[0][0]])[""] for f in (program, layer))
    jax.tree.map(np.testing.assert_array_equal, found, plain)


def test_a_box_records_no_tangents():
    program = lambda w, x: jax.jvp(lambda x: tanh_layer(w, x), (x,), (FAR,))[1]
    observed = observe(program, ANY, params=W, box=vn.hijax.Box)
    observed(W, X[0][0])
    assert_of(observed.statistics()[""], X[0][0], gram=False)


def test_the_rules_of_jax_are_restored_after_observing():
    rules = dict(ad.primitive_jvps)
    process = ad.JVPTrace.process_custom_jvp_call

    def model(w, x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        observe(model, ANY, params=W)(X)
    assert ad.primitive_jvps == rules
    assert ad.JVPTrace.process_custom_jvp_call is process


def test_outputs_equal_the_outputs_of_the_model():
    outputs = []

    def model(params, x):
        y = jnp.tanh(x @ params)
        jax.debug.callback(lambda y: outputs.append(np.array(y)), y)
        return y

    observe(jax.jit(model), ANY, params=W)(X)
    for y, x in zip(outputs, X, strict=True):
        np.testing.assert_array_equal(y, jax.jit(lambda x: jnp.tanh(x @ W))(x))


# Models and parameters.


def test_a_callable_module_can_be_observed():
    model = eqx.nn.MLP(8, 2, 4, 1, key=jax.random.key(0))
    rules = [Rule(r"layers\.\d\.weight", "int8", tile_axis=-1)]
    found = observe(model, rules)([x[0, 0] for x in X])
    assert list(found) == ["layers.0.weight", "layers.1.weight"]
    assert_of(found["layers.0.weight"], *(x[0, :1] for x in X), gram=False)
    compiled = eqx.filter_jit(lambda model, x: jax.vmap(jax.vmap(model))(x))
    found = observe(compiled, rules, params=model)(X)
    assert_of(found["layers.0.weight"], *X, gram=False)


def test_a_linen_module_can_be_observed():
    model = nn.Dense(4)
    variables = model.init(jax.random.key(0), X[0])
    found = observe(jax.jit(model.apply), ANY, params=variables)(X)
    assert_of(found["params.kernel"], *X, gram=False)


@pytest.mark.parametrize("partial", [functools.partial, jax.tree_util.Partial])
def test_the_arguments_of_a_partial_are_parameters(partial):
    program = jax.jit(lambda params, x, *, scale: x @ params["w"] * scale["s"])
    model = partial(program, {"w": W}, scale={"s": jnp.ones(6)})
    found = observe(model, ANY)(X)
    assert list(found) == ["w"]
    assert_of(found["w"], *X, gram=False)


def test_two_arguments_of_a_partial_with_the_same_path_raise():
    model = functools.partial(lambda a, b, x: x @ a["w"] @ b["w"], {"w": W}, {"w": W.T})
    with pytest.raises(ValueError, match="two arguments of the partial have a parameter at 'w'"):
        observe(model, ANY)(X)


def test_a_tuple_holds_the_arguments_of_the_model():
    found = observe(lambda w, x, y: (x + y) @ w, ANY, params=W)((x, x) for x in X)
    assert_of(found[""], *(2 * x for x in X), gram=False)


def test_a_model_without_parameters_raises():
    with pytest.raises(TypeError, match=r"holds no parameters. Call observe.*params=params"):
        observe(lambda x: x @ W, ANY)


def test_invalid_batches_and_decay_raise():
    run = observe(lambda w, x: x @ w, ANY, params=W)
    with pytest.raises(TypeError, match="list of batches"):
        run(X[0])
    with pytest.raises(ValueError, match="no batches"):
        run([])
    with pytest.raises(ValueError, match="decay"):
        observe(lambda w, x: x @ w, ANY, params=W, decay=1.0)


def test_weights_without_activations_warn():
    params = {"table": normal(5, 8), "w": W, "bias": jnp.ones(6)}
    model = lambda p, ids: p["table"][ids] @ p["w"] + p["bias"]
    with pytest.warns(UserWarning, match=r"recorded for table \(no product used it; "):
        found = observe(model, ANY, params=params)([jnp.arange(3)])
    assert list(found) == ["w"]
    with pytest.warns(UserWarning, match="'kernel' matches no parameter"):
        observe(model, [Rule("kernel", "int8"), Rule("w", "int8")], params=params)([jnp.arange(3)])


def test_a_rule_with_the_wrong_tile_axis_raises():
    with pytest.raises(ValueError, match=r"contract axis -2; set tile_axis"):
        observe(lambda w, x: x @ w, [Rule("", "int8", tile_axis=-1)], params=W)(X)


def test_a_rule_without_a_format_observes_nothing():
    with pytest.raises(ValueError, match="no rule has a format"):
        observe(lambda w, x: x @ w, [Rule(".*", None)], params=W)(X)


# Models that are quantized with the statistics.


@pytest.mark.parametrize("act_range", ["mean", "exponential", "widest"])
def test_layers_in_a_scan_get_separate_static_ranges(act_range):
    program = jax.jit(STACKS["scan"])
    rules = [Rule(".*", "int8", act_qtype="int8", act_range=act_range)]
    statistics = observe(program, rules, params=LAYERS)(X)
    quantized = quantize_tree(LAYERS, rules, statistics=statistics)
    assert quantized.scale.shape == (3, 1, 1)
    inputs = [layers(LAYERS, x)[0] for x in X]
    largest = np.array([[np.abs(x[i]).max() for i in range(3)] for x in inputs])
    ends = {
        "mean": largest.mean(0),
        "exponential": 0.9 * largest[0] + 0.1 * largest[1],
        "widest": largest.max(0),
    }
    # The scale follows from the averages of both ends, which are at most the average magnitude.
    scale = quantized.scale.ravel() * 127.5
    assert (scale <= ends[act_range] * (1 + 1e-5)).all()
    if act_range == "widest":
        np.testing.assert_allclose(scale, ends["widest"], rtol=1e-5)
    y = vn.implicit(program)(quantized, X[0])
    expected = X[0]
    for i, w in enumerate(LAYERS):
        fake = vn.quant.quantize_with_scale(expected, "int8", quantized.scale[i : i + 1])
        dense = vn.quant.quantize(w, "int8", channelwise_axes=[1]).dequantize()
        expected = jnp.tanh(fake.dequantize() @ dense)
    np.testing.assert_allclose(y, expected, atol=1e-4)
    assert np.abs(y - program(LAYERS, X[0])).max() < 0.1


def test_static_ranges_keep_sentence_embeddings_similar(sentence_encoder):
    encode, params, batches = sentence_encoder
    rules = [
        Rule(r"embeddings.*", None),
        Rule(r".*weight", "int8", tile_axis=-1, act_qtype="int8", act_range="mean"),
    ]
    statistics = observe(encode, rules, params=params)(batches)
    assert len(statistics) == 6
    quantized = quantize_tree(params, rules, statistics=statistics)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = vn.implicit(encode, on_materialise=only_by_rules)(quantized, *batches[0])
    expected = encode(params, *batches[0])
    similarity = (y * expected).sum(-1)
    assert (similarity > 0.995).all()
    assert (similarity < 1).any()


@pytest.fixture
def sentence_encoder():
    """Return the encoder of the demo with one layer and random parameters."""
    from veneer.demo.fetch import program

    module = program("sentence_encoder")

    hidden, wide, vocabulary = 32, 64, 20
    shapes = {
        "embeddings.word_embeddings": (vocabulary, hidden),
        "embeddings.position_embeddings": (16, hidden),
        "embeddings.token_type_embeddings": (2, hidden),
        "encoder.layer.0.attention.self.query": (hidden, hidden),
        "encoder.layer.0.attention.self.key": (hidden, hidden),
        "encoder.layer.0.attention.self.value": (hidden, hidden),
        "encoder.layer.0.attention.output.dense": (hidden, hidden),
        "encoder.layer.0.intermediate.dense": (wide, hidden),
        "encoder.layer.0.output.dense": (hidden, wide),
    }
    norms = ["embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output"]
    params = {
        f"{name}.weight": normal(*shape, seed=i) / 4
        for i, (name, shape) in enumerate(shapes.items())
    }
    params |= {f"{name}.bias": jnp.zeros(shape[0]) for name, shape in shapes.items()}
    params |= {f"{name}.LayerNorm.weight": jnp.ones(hidden) for name in norms}
    params |= {f"{name}.LayerNorm.bias": jnp.zeros(hidden) for name in norms}
    config = module.Config(num_layers=1, num_heads=4, layer_norm_eps=1e-12)
    encode = jax.jit(lambda params, ids, mask: module.encode(params, config, ids, mask))
    ids = [np.random.default_rng(i).integers(vocabulary, size=(3, 7)) for i in range(2)]
    return encode, params, [(jnp.asarray(i), jnp.ones(i.shape, bool)) for i in ids]
