import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import veneer as vn
from veneer.quant import ActivationQuantized, QArray, Rule, observe, quantize, quantize_tree


class Layer(NamedTuple):
    kernel: object
    bias: object


def params():
    return {
        "embedding": np.ones((6, 4), np.float32),
        "layers": [Layer(jnp.ones((4, 8)), jnp.ones(8)), Layer(jnp.ones((4, 8)), jnp.ones(8))],
        "positions": jnp.arange(6).reshape(2, 3),
        "name": "model",
    }


def formats(tree):
    """Return the format of each quantized leaf by path."""
    layers = {f"layers.{i}": layer for i, layer in enumerate(tree["layers"])}
    leaves = {"embedding": tree["embedding"], "positions": tree["positions"]}
    leaves |= {f"{path}.{name}": x for path, t in layers.items() for name, x in t._asdict().items()}
    return {path: x.qtype for path, x in leaves.items() if isinstance(x, QArray)}


def test_the_first_rule_that_matches_wins():
    rules = [
        Rule(r"layers\.0\.kernel", None),
        Rule(r"layers.*", "int4"),
        Rule(r".*", "int8"),
    ]
    assert formats(quantize_tree(params(), rules)) == {
        "embedding": "int8",
        "layers.1.kernel": "int4",
    }


ABSTRACT = {
    "by path alone": (Rule("w", "int4"), {}),
    "nvfp4": (Rule("w", "nvfp4", tile_axis=-2), {}),
    "the program": (Rule("w", "nf4", tile_size=16), {}),
    "rotated": (Rule("w", "int4", rotate=True, act_qtype="int8"), {}),
    "corrected": (Rule("w", "int4", correction_rank=2, correction_steps=2), {}),
    "activations": (Rule("w", None, act_qtype="int8"), {}),
    "training": (Rule("w", "int8", act_qtype="int8", sparsity=(2, 4)), {"train": True}),
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_an_abstract_tree_is_quantized_abstractly(name):
    rule, how = ABSTRACT[name]
    tree = {"w": jnp.ones((64, 32)), "norm": jnp.ones(32), "ids": jnp.arange(3)}
    if name != "by path alone":
        how = {"model": lambda p, x: x @ p["w"] * p["norm"], "args": (jnp.ones((2, 64)),), **how}
    abstract = jax.eval_shape(lambda: tree)
    small = quantize_tree(abstract, [rule], **how)
    expected = jax.eval_shape(lambda: quantize_tree(tree, [rule], **how))
    assert jax.tree.structure(small) == jax.tree.structure(expected)
    assert jax.tree.leaves(small) == jax.tree.leaves(expected)
    concrete = quantize_tree(tree, [rule], **how)
    assert vn.tree.structure(small) == vn.tree.structure(concrete)


def test_warnings_for_an_abstract_tree_name_its_bits():
    abstract = jax.eval_shape(lambda: {"a": jnp.ones((128, 128)), "b": jnp.ones((256, 256))})
    with pytest.warns(UserWarning, match="most values stay dense.*b at 32 bits per value"):
        small = quantize_tree(abstract, [Rule("a", "int8")])
    assert small["b"] is abstract["b"]


def test_float64_arrays_of_numpy_can_be_arguments():
    tree = {"table": np.ones((50, 64)), "w": np.ones((64, 32))}
    model = lambda params, ids: params["table"][ids] @ params["w"]
    small = quantize_tree(tree, [Rule(".*", "int8")], model=model, args=(np.arange(3),))
    assert small["table"].scale.shape == (50, 1)
    assert small["w"].scale.shape == (1, 32)


def test_a_regex_must_match_the_whole_path():
    tree = quantize_tree(
        params(), [Rule(r"layers\.\d+\.kernel", "nf4"), Rule(r".*bedding", "int8")]
    )
    assert formats(tree) == {
        "embedding": "int8",
        "layers.0.kernel": "nf4",
        "layers.1.kernel": "nf4",
    }
    with pytest.warns(UserWarning, match="matches no parameter"):
        assert formats(quantize_tree(params(), [Rule("kernel", "nf4")])) == {}


def test_biases_integers_and_other_objects_are_unchanged():
    before = params()
    after = quantize_tree(before, [Rule(".*", "int8")])
    assert after["layers"][0].bias is before["layers"][0].bias
    assert after["positions"] is before["positions"]
    assert after["name"] == "model"


def test_float8_leaves_are_unchanged():
    codes = jnp.ones((4, 4), jnp.float8_e4m3fn)
    assert quantize_tree({"w": codes}, [Rule("w", "int8")])["w"] is codes


def test_quantized_leaves_are_unchanged():
    q = quantize(jnp.ones((4, 4)), "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tree = quantize_tree({"w": q}, [Rule("w", "int4"), Rule("w.packed", "int4")])
    assert tree["w"] is q


@pytest.mark.parametrize(
    ("tile_size", "tile_axis", "scale_shape"),
    [
        (None, -2, (3, 1, 4)),
        (None, -1, (3, 8, 1)),
        (4, -2, (3, 2, 4)),
        (2, -1, (3, 8, 2)),
        (3, 0, (1, 8, 4)),
        (0.25, -2, (3, 4, 4)),
        (1.0, -1, (3, 8, 1)),
        ({-2: 4, -1: 2}, -2, (3, 2, 2)),
        ({1: 0.25, -1: 1.0}, -2, (3, 4, 1)),
        ({-1: 2}, -2, (3, 1, 2)),
        ({0: 3}, -2, (1, 1, 4)),
        ({-3: 3, -2: 2}, (-3, -2), (1, 4, 4)),
        ({-2: 2}, (-3, -2), (1, 4, 4)),
        ({}, -2, (3, 1, 4)),
    ],
)
def test_scales_are_channelwise_except_along_the_tile_axis(tile_size, tile_axis, scale_shape):
    rule = Rule("", "int8", tile_size=tile_size, tile_axis=tile_axis)
    q = quantize_tree(jnp.ones((3, 8, 4)), [rule])
    assert q.scale.shape == scale_shape
    trained = quantize_tree(jnp.ones((3, 8, 4)), [rule], train=True)
    assert trained.quantize().scale.shape == scale_shape
    turned = vn.implicit(lambda w: w.transpose(0, 2, 1))(trained)
    order = scale_shape[0], scale_shape[2], scale_shape[1]
    assert turned.quantize().scale.shape == order
    assert trained.quantize().tile_shape == q.tile_shape


def test_a_rule_that_matches_nothing_warns_with_paths():
    with pytest.warns(
        UserWarning, match=r"'kernel' matches no .*embedding, layers\.0\.kernel, .*\.\.\."
    ):
        quantize_tree(params(), [Rule("kernel", "int8")])


def test_a_rule_overridden_by_an_earlier_rule_does_not_warn():
    quantize_tree(params(), [Rule(".*", "int8"), Rule("embedding", "nf4")])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule(".*kernel", "int4", tile_size=3),
            r"layers\.0\.kernel: a tile of 3 .* sizes that do: 1, 2, 4",
        ),
        (Rule(".*kernel", "int4", tile_size={-2: 4, 1: 3}), r"kernel: a tile of 3 .* sizes that"),
        (Rule(".*kernel", "int4", tile_size={-3: 4}), r"kernel: .*-3.*\(4, 8\)"),
        (Rule(".*kernel", "int4", tile_size={-2: 4, 0: 4}), r"kernel: .*\(4, 8\).* twice"),
        (Rule(".*kernel", "int4", tile_axis=-3), r"layers\.0\.kernel: tile_axis -3 .* \(4, 8\)"),
    ],
)
def test_a_tile_that_does_not_fit_raises_with_the_path(rule, message):
    with pytest.raises(ValueError, match=message):
        quantize_tree(params(), [rule])


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("(", "int8"), {}, r"path_regex='\(' is not a regex"),
        ((".*", "int9"), {}, "unknown format 'int9'"),
        ((".*", "int8"), {"tile_size": 0}, "tile_size must be at least 1, not 0"),
        ((".*", "int8"), {"tile_size": 1.5}, "tile_size is a fraction of the axis, .* not 1.5"),
        ((".*", "int8"), {"tile_size": 0.0}, "tile_size is a fraction of the axis, .* not 0.0"),
        ((".*", "int8"), {"tile_size": {-1: 0}}, "tile_size must be at least 1, not 0"),
        ((".*", "int8"), {"tile_size": {-1: 2.0}}, "tile_size is a fraction of the axis"),
        ((".*", "mxfp4"), {"tile_size": {-2: 32, -1: 2}}, "mxfp4 needs tiles of 32"),
        ((".*", "mxfp4"), {"tile_size": 0.5}, "mxfp4 needs tiles of 32, not 0.5"),
        ((".*", "mxfp4"), {"tile_size": 64}, "mxfp4 needs tiles of 32, not 64"),
        ((".*", "int8"), {"tile_axis": ()}, "tile_axis is empty"),
        ((".*", "int8"), {"calibration_method": "middle"}, "unknown calibration_method"),
        ((".*", None), {"calibration_method": "absmax"}, "qtype=None leaves the weight dense"),
        ((".*", "nf4"), {"calibration_method": "minmax"}, "nf4 has no zero_point"),
        ((".*", None), {"scale_dtype": "float16"}, "scale_dtype needs a qtype"),
        ((".*", "mxfp4"), {"scale_dtype": "float16"}, "mxfp4 needs scale_dtype float8_e8"),
        ((".*", "int8"), {"act_qtype": "int9"}, "unknown format 'int9'"),
        ((".*", "int8"), {"grad_qtype": "int9"}, "unknown format 'int9'"),
        ((".*", "int8"), {"act_calibration_method": "absmax"}, "need an act_qtype"),
        ((".*", "int8"), {"act_range": "mean"}, "need an act_qtype"),
        ((".*", "int8"), {"act_tile_size": 4}, "need an act_qtype"),
        ((".*", "int8"), {"act_qtype": "int8", "act_tile_size": 0}, "must be at least 1, not 0"),
        ((".*", "int8"), {"act_qtype": "mxfp8", "act_tile_size": 8}, "mxfp8 needs tiles"),
        (
            (".*", "int8"),
            {"act_qtype": "int8", "act_tile_size": 8, "act_range": "mean"},
            "a static range has one scale",
        ),
        (
            (".*", "int8"),
            {"act_qtype": "int8", "act_range": "static"},
            "unknown act_range 'static'",
        ),
        ((".*", "int8"), {"act_qtype": "mxfp8", "act_range": "mean"}, "Use act_range='dynamic'"),
        (
            (".*", "int8"),
            {"act_qtype": "nf4", "act_calibration_method": "minmax"},
            "nf4 has no zero_point",
        ),
    ],
)
def test_an_invalid_rule_raises_when_it_is_created(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        Rule(*args, **kwargs)


@pytest.mark.parametrize("dtype", [jnp.int8, np.int8, jnp.dtype("int8")])
def test_a_dtype_can_replace_the_name_of_a_format(dtype):
    rule = Rule(".*", dtype, act_qtype=dtype, grad_qtype=dtype)
    assert rule == Rule(".*", "int8", act_qtype="int8", grad_qtype="int8")
    assert repr(Rule(".*", dtype)) == "Rule('.*', 'int8')"
    tree, x = {"w": jnp.ones((64, 64))}, jnp.ones((1, 64))
    model = lambda tree, x: x @ tree["w"]
    q = quantize_tree(tree, dtype, model=model, args=(x,))["w"]
    assert q.qtype == vn.quant.quantize(tree["w"], dtype).qtype == "int8"
    assert vn.quant.calibrate(model, dtype, params=tree, method="nearest")([x])["w"].qtype == "int8"


WRONG_RULES = {
    "a rule": (Rule(".*", "int8"), r"rules must be a list: \[Rule\('\.\*', 'int8'\)\]"),
    "formats": (["nf4"], r"rules\[0\] must be a Rule, such as .*, not 'nf4'"),
    "pairs": ([(".*", "nf4")], r"rules\[0\] must be a Rule, such as .*, not \('\.\*', 'nf4'\)"),
    "a dict": ({".*": "nf4"}, r"such as \[vn\.quant\.Rule\('\.\*', 'nf4'\)\], not \{"),
    "nothing": (None, "rules must be a list of Rule, such as .*, not None"),
}


@pytest.mark.parametrize(("rules", "message"), WRONG_RULES.values(), ids=WRONG_RULES)
@pytest.mark.parametrize(
    "take",
    [
        lambda rules: quantize_tree(params(), rules),
        lambda rules: observe(lambda params, x: x, rules, params=params()),
    ],
    ids=["quantize_tree", "observe"],
)
def test_other_objects_than_rules_raise_type_error(take, rules, message):
    with pytest.raises((TypeError, TypeCheckError), match=f"{message}|rules"):
        take(rules)
    if jaxtyping.config.jaxtyping_disable:
        with pytest.raises(TypeError, match=message):
            take(rules)


@pytest.mark.skipif(not jaxtyping.config.jaxtyping_disable, reason="it is no Sequence")
def test_rules_can_be_an_iterator():
    rules = (Rule(path, "int8") for path in ("layers.*", "embedding"))
    assert len(formats(quantize_tree(params(), rules))) == 3


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tile_size": "4"},
        {"tile_size": {"a": 4}},
        {"tile_axis": 0.5},
        {"tile_axis": (0, "1")},
        {"scale_dtype": "int8"},
    ],
)
def test_an_argument_of_another_type_raises_type_error(kwargs):
    (name,) = kwargs
    with pytest.raises(TypeError, match=name):
        Rule(".*", "int8", **kwargs)


def test_integers_of_numpy_are_valid_tile_sizes():
    rule = Rule(".*", "int8", tile_size=np.int64(2), tile_axis=np.int32(-1))
    assert rule.quantize(jnp.ones((4, 8))).scale.shape == (4, 4)


def test_the_repr_of_a_rule_is_its_call():
    rule = Rule("w", "int8", tile_axis=[-3, -2], act_qtype="int8")
    assert repr(rule) == "Rule('w', 'int8', tile_axis=(-3, -2), act_qtype='int8')"
    assert eval(repr(rule)) == rule
    assert hash(rule) == hash(eval(repr(rule)))
    rule = Rule("w", "nf4", scale_dtype=jnp.bfloat16)
    assert repr(rule) == "Rule('w', 'nf4', scale_dtype='bfloat16')"
    rule = Rule("w", "int8", tile_size={-2: 128, -1: 64})
    assert repr(rule) == "Rule('w', 'int8', tile_size={-2: 128, -1: 64})"
    assert eval(repr(rule)) == rule == dataclasses.replace(rule)
    assert hash(rule) == hash(eval(repr(rule)))


@pytest.mark.parametrize(
    ("qtype", "tile_size", "tile_axis", "scale_shape"),
    [
        ("int8", None, (-4, -3, -2), (1, 1, 1, 6)),
        ("int8", None, (1, 2, 3), (3, 1, 1, 1)),
        ("int8", 16, (0, 1, 2), (1, 1, 2, 6)),
        ("mxfp4", None, (0, 1, 2), (3, 3, 1, 6)),
        ("mxfp4", 32, -2, (3, 3, 1, 6)),
    ],
)
def test_several_contracted_axes_share_a_scale(qtype, tile_size, tile_axis, scale_shape):
    rule = Rule("", qtype, tile_size=tile_size, tile_axis=tile_axis)
    assert quantize_tree(jnp.ones((3, 3, 32, 6)), [rule]).scale.shape == scale_shape


@pytest.mark.parametrize("tile_axis", [(-2, 0), (0, 2)])
def test_axes_that_do_not_fit_raise_with_the_path(tile_axis):
    with pytest.raises(ValueError, match=r"^w: tile_axis .*\(4, 8\)"):
        quantize_tree({"w": jnp.ones((4, 8))}, [Rule("w", "int8", tile_axis=tile_axis)])


def test_weights_use_the_calibration_method_of_the_rule():
    w = jnp.linspace(-1.0, 3.0, 12).reshape(4, 3)
    q = quantize_tree(w, [Rule("", "int8", calibration_method="minmax")])
    assert q.zero_point is not None
    expected = quantize(w, "int8", channelwise_axes=[1], calibration_method="minmax")
    np.testing.assert_array_equal(q.dequantize(), expected.dequantize())


@pytest.mark.parametrize("train", [False, True])
def test_scales_have_the_scale_dtype_of_the_rule(train):
    w = jnp.linspace(-1.0, 1.3, 64 * 6).reshape(64, 6)
    x = jnp.linspace(-0.5, 2.0, 3 * 64).reshape(3, 64)
    rule = Rule("w", "int4", tile_size=32, scale_dtype=jnp.float16, act_qtype="int8")
    tree = quantize_tree({"w": w}, [rule], model=lambda p, x: x @ p["w"], args=(x,), train=train)
    asked = quantize(w, "int4", channelwise_axes=[1], tiled_axes={0: 32}, scale_dtype="float16")
    stored = tree["w"].quantize() if train else tree["w"].array
    np.testing.assert_array_equal(stored.scale, asked.scale)
    assert stored.scale.dtype == jnp.float16
    assert 8 * stored.nbytes == 4.5 * w.size
    rows = vn.materialise(quantize(x, "int8", channelwise_axes=[0]))
    y = vn.implicit(jnp.matmul)(x, tree["w"])
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, rows @ vn.materialise(asked), rtol=1e-5, atol=1e-5)
    observed = observe(lambda p, x: x @ p["w"], [rule], params={"w": w})([x])
    np.testing.assert_allclose(max(map(np.max, observed["w"].highs.values())), x.max())


def test_activations_are_quantized_for_dense_weights_too():
    rules = [
        Rule("embedding", None),
        Rule(r"layers\.0.*", "int4", act_qtype="int8", act_calibration_method="rms,3"),
        Rule(r"layers\.1.*", None, act_qtype="fp8", tile_axis=0),
    ]
    tree = quantize_tree(params(), rules)
    first, second = (layer.kernel for layer in tree["layers"])
    assert isinstance(first, ActivationQuantized)
    assert isinstance(first.array, QArray)
    assert (first.qtype, first.calibration_method, first.contracting) == ("int8", "rms,3", (-2,))
    assert (second.qtype, second.contracting) == ("float8_e4m3fn", (-2,))
    assert not isinstance(second.array, QArray)
    assert not isinstance(tree["layers"][0].bias, ActivationQuantized)


@pytest.mark.parametrize("qtype", ["int4", "int8"])
def test_a_quantized_weight_can_get_quantized_activations(qtype):
    kernel = quantize(jnp.ones((64, 8)), qtype, channelwise_axes=[1], tiled_axes={0: 32})
    turned = quantize(jnp.ones((8, 64)), qtype, channelwise_axes=[0])
    whole = quantize(jnp.ones((8, 64)), qtype)
    tree = {"kernel": kernel, "turned": turned, "whole": whole}
    rules = [
        Rule("whole", None, act_qtype="int8", tile_axis=-1),
        Rule(".*", None, act_qtype="int8"),
    ]
    small = quantize_tree(tree, rules)
    assert {k: (w.array is tree[k], w.contracting) for k, w in small.items()} == {
        "kernel": (True, (-2,)),
        "turned": (True, (-1,)),
        "whole": (True, (-1,)),
    }
    with pytest.raises(ValueError, match=r"whole: .* from its scales of shape \[1, 1\]"):
        quantize_tree(tree, rules[1:])
    model = lambda p, x: [x @ p["kernel"], x @ p["turned"].T, x @ p["whole"].T]
    located = quantize_tree(tree, rules[1:], model=model, args=(jnp.ones((2, 64)),))
    assert [located[k].contracting for k in tree] == [(-2,), (-1,), (-1,)]
    x = jax.random.normal(jax.random.key(0), (2, 64))
    rows = quantize(x, "int8", channelwise_axes=[0]).dequantize()
    dense = jax.tree.map(vn.materialise, tree, is_leaf=lambda w: isinstance(w, QArray))
    for actual, expected in zip(vn.implicit(model)(located, x), model(dense, rows), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert quantize_tree(small, rules)["kernel"] is small["kernel"]


def test_an_activation_tile_that_does_not_fit_raises_with_path():
    with pytest.raises(ValueError, match=r"w: .*mxfp8 have tiles of 32.*axis -2 \(size 48\)"):
        quantize_tree({"w": jnp.ones((48, 4))}, [Rule("w", "int8", act_qtype="mxfp8")])


def test_gradients_are_quantized_only_in_training():
    with pytest.raises(ValueError, match="grad_qtype is for training"):
        quantize_tree(params(), [Rule(".*", "int8", grad_qtype="int8")])


STATIC = Rule("w", "int8", act_qtype="int8", act_range="mean")


def test_a_static_range_needs_statistics_of_the_weight():
    tree = {"w": jnp.ones((4, 8))}
    with pytest.raises(ValueError, match=r"w: act_range 'mean' needs recorded statistics"):
        quantize_tree(tree, [STATIC])
    with pytest.raises(ValueError, match=r"w: .* needs statistics .* has none"):
        quantize_tree(tree, [STATIC], statistics={})
    with pytest.raises(ValueError, match="train=True needs act_range='dynamic'"):
        quantize_tree(tree, [STATIC], train=True)
    with pytest.warns(UserWarning, match="statistics= has no effect"):
        quantize_tree(tree, [Rule("w", "int8")], statistics={})


def test_a_weight_quantized_in_another_format_warns():
    tree = {"w": quantize(jnp.ones((64, 8)), "int8")}
    with pytest.warns(UserWarning, match=r"already quantized, and left unchanged: w \(int8\)"):
        assert vn.quant.quantize_tree(tree, [Rule("w", "nf4")])["w"] is tree["w"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vn.quant.quantize_tree(tree, [Rule("w", "int8")])
        vn.quant.quantize_tree(tree, [Rule("w", None)])


def test_default_rules_that_match_no_weight_warn():
    small = {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32)}
    model = lambda params, x: x @ params["kernel"] + params["bias"]
    given = {"model": model, "args": (jnp.ones((2, 16)),)}
    message = r"no weight is quantized, .* fewer than 4,096 values: .*kernel.*Rule\('\.\*', 'nf4'\)"
    with pytest.warns(UserWarning, match=message) as caught:
        assert quantize_tree(small, "nf4", **given) == small
    assert caught[0].filename == __file__
    assert isinstance(quantize_tree(small, [Rule(".*", "nf4")], **given)["kernel"], QArray)


def test_errors_of_a_program_show_how_it_is_called():
    with pytest.raises(TypeError, match="missing 1 required") as error:
        quantize_tree(params(), "nf4", model=lambda params, x, *, train: x, args=(jnp.ones(2),))
    assert "model(params, *args, **kwargs)" in "".join(error.value.__notes__)
