import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays

import veneer as vn
from veneer.quant import Rule, calibrate, quantize_tree
from veneer.quant.ptq.gptq import Moments, gptq
from veneer.quant.ptq.report import CalibrationReport, WeightLoss, percent

INT4 = [Rule(".*", "int4", tile_size=16)]


def numbers(*shape, scale=None, seed=0):
    values = np.random.default_rng([seed, *shape]).normal(size=shape)
    return (values * (scale or shape[0] ** -0.5)).astype(np.float32)


def array(*shape, **how):
    return arrays.array(numbers(*shape, **how))


MIX = numbers(64, 64, seed=1)
BATCHES = [arrays.array(numbers(96, 64, scale=1, seed=i) @ MIX) for i in range(3)]
HELD = arrays.array(numbers(200, 64, scale=1) @ MIX)


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


MLP = {"up": array(64, 96), "down": array(96, 48)}


def error(model, small, params, x=HELD):
    expected = model(params, x)
    return float(jnp.linalg.norm(vn.implicit(model)(small, x) - expected))


def test_codes_equal_direct_gptq():
    small = calibrate(mlp, INT4, params=MLP)(BATCHES)
    x = np.concatenate(BATCHES)
    met = {"up": x, "down": np.maximum(x @ np.asarray(MLP["up"]), 0)}
    for path, q in small.items():
        scale = np.repeat(np.asarray(q.scale), 16, axis=0)
        moments = Moments(met[path].T @ met[path] / len(x))
        codes = gptq(np.asarray(MLP[path]), moments, scale, None, "int4")
        assert (codes == np.asarray(q.qvalue)).mean() > 0.98  # the order of sums differs


@pytest.mark.parametrize("how", [{}, {"sequential": True, "propagation": 0.5}], ids=str)
def test_derivatives_in_a_model_do_not_change_its_codes(how):
    far = 1000 * HELD[:96]
    moving = lambda params, x: jax.jvp(lambda x: mlp(params, x), (x,), (far,))
    small, plain = (calibrate(f, INT4, params=MLP, **how)(BATCHES[:1]) for f in (moving, mlp))
    jax.tree.map(np.testing.assert_array_equal, small, plain)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("qtype", ["int4", "uint3", "nf4", "mxfp4", "int8"])
def test_calibration_beats_rounding_to_nearest(qtype, sequential):
    rules = [Rule(".*", qtype, tile_size=None if qtype == "mxfp4" else 16)]
    calibration = calibrate(jax.jit(mlp), rules, params=MLP, sequential=sequential)
    small = calibration(BATCHES)
    nearest = quantize_tree(MLP, rules, model=mlp, args=(HELD,))
    assert error(mlp, small, MLP) < 0.85 * error(mlp, nearest, MLP)
    assert vn.tree.structure(small) == vn.tree.structure(nearest)
    for loss in calibration.report.rows:
        x = np.concatenate(BATCHES)
        if loss.path == "down":
            up = vn.materialise(small["up"]) if sequential else MLP["up"]
            x = np.maximum(x @ np.asarray(up), 0)
        w, q = (np.asarray(vn.materialise(p[loss.path])) for p in (MLP, small))
        expected = np.linalg.norm(x @ (q - w)) / np.linalg.norm(x @ w)
        np.testing.assert_allclose(loss.after, expected, rtol=1e-3)
        assert (loss.method, loss.shape, loss.qtype) == ("gptq", w.shape, qtype)
        assert loss.after < loss.before


def test_sequential_calibration_follows_the_program():
    passes = []

    class Batches(list):
        def __iter__(self):
            passes.append(self)
            return super().__iter__()

    attention = {name: array(64, 64, seed=ord(name)) for name in "qkvo"}

    def model(params, x):
        q, k, v = (x @ params[name] for name in "qkv")
        return jax.nn.softmax(q @ k.T) @ v @ params["o"]

    small = calibrate(model, INT4, params=attention, sequential=True)(Batches(BATCHES))
    assert len(passes) == 4  # the first batch, all of them, q with k and v, and o
    once = calibrate(model, INT4, params=attention)(BATCHES)
    assert not (small["o"].codes() == once["o"].codes()).all()
    for name in "qkv":
        np.testing.assert_array_equal(small[name].codes(), once[name].codes())


def test_tied_embeddings_are_quantized():
    params = {"table": array(50, 32, scale=1), "w": array(32, 32), "norm": jnp.ones(32)}

    def model(params, ids):
        x = params["table"][ids] * params["norm"]
        return (x + x @ params["w"]) @ params["table"].T

    batches = [jnp.asarray(np.random.default_rng(i).integers(0, 50, 64)) for i in range(2)]
    small = calibrate(model, INT4, params=params, sequential=True)(batches)
    assert small["table"].scale.shape == (50, 2)
    assert small["w"].scale.shape == (2, 32)
    nearest = quantize_tree(params, INT4, model=model, args=(batches[0],))
    assert error(model, small, params, batches[1]) < error(model, nearest, params, batches[1])


def deep(params, x):
    for name in "abc":
        x = x + jnp.tanh(x @ params[name])
    return x


DEEP = {name: array(64, 64, scale=0.2, seed=ord(name)) for name in "abc"}
INT2 = [Rule(".*", "int2", tile_size=16)]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_propagation_compensates_earlier_errors(share):
    run = lambda **how: calibrate(deep, INT2, params=DEEP, sequential=True, **how)(BATCHES)
    small = run(propagation=share)
    x = dense = np.concatenate(BATCHES).astype(float)
    for name in "abc":  # the rounded target is a least-squares fit of both models' activations
        w = np.asarray(DEEP[name], float)
        gram, cross = x.T @ x / len(x), x.T @ dense / len(x)
        damped = gram + 0.01 * np.diagonal(gram).mean() * np.eye(64)
        target = w + share * np.linalg.solve(damped, (cross - gram) @ w)
        scaled = vn.quant.quantize(
            jnp.asarray(target, jnp.float32),
            "int2",
            channelwise_axes=[1],
            tiled_axes={0: 16},
            calibration_method="mse,40,2.4",
        )
        scale = np.repeat(np.asarray(scaled.scale), 16, axis=0)
        codes = gptq(target, Moments(gram), scale, None, "int2")
        assert (codes == np.asarray(small[name].qvalue)).mean() > 0.98  # the order of sums differs
        x = x + np.tanh(x @ np.asarray(vn.materialise(small[name])))
        dense = dense + np.tanh(dense @ w)
    assert error(deep, small, DEEP) < 0.96 * error(deep, run(), DEEP)


@pytest.mark.parametrize("options", [{"rotate": True}, {"correction_rank": 4}, {"method": "awq"}])
def test_propagation_supports_other_options(options):
    rules = [Rule(".*", "int2", tile_size=16, **options)]
    run = lambda **how: calibrate(deep, rules, params=DEEP, sequential=True, **how)(BATCHES)
    assert error(deep, run(propagation=0.5), DEEP) < 0.96 * error(deep, run(), DEEP)


def test_propagation_skips_weights_used_twice():
    def model(params, x):  # each weight is used twice
        return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["a"]) @ params["b"] + x @ params["b"]

    run = lambda **how: calibrate(model, INT2, params=two, sequential=True, **how)(BATCHES)
    two = {name: DEEP[name] for name in "ab"}
    jax.tree.map(np.testing.assert_array_equal, run(propagation=0.5), run())


@pytest.mark.parametrize(
    "how", [{}, {"sequential": True}, {"sequential": True, "propagation": 0.5}], ids=str
)
def test_a_scan_gives_the_codes_of_the_unrolled_model(how):
    ups, downs = array(2, 64, 32, scale=0.2), array(2, 32, 64, scale=0.2)

    @jax.jit  # compile once for all batches
    def scanned(params, x):
        step = lambda x, layer: (x + jnp.tanh(x @ layer[0]) @ layer[1], None)
        return lax.scan(step, x, (params["up"], params["down"]))[0]

    def unrolled(params, x):
        for i in range(2):
            x = x + jnp.tanh(x @ params[f"up{i}"]) @ params[f"down{i}"]
        return x

    apart = {f"{name}{i}": w[i] for name, w in (("up", ups), ("down", downs)) for i in range(2)}
    stacked = {"up": ups, "down": downs}
    small = calibrate(scanned, INT4, params=stacked, **how)(BATCHES)
    each = calibrate(unrolled, INT4, params=apart, **how)(BATCHES)
    for name, q in small.items():
        codes = np.stack([each[f"{name}{i}"].codes() for i in range(2)])
        assert (codes == np.asarray(q.codes())).mean() > 0.97  # the order of sums differs
    assert error(scanned, small, stacked) < 0.9 * error(
        scanned, quantize_tree(stacked, INT4, model=scanned, args=(HELD,)), stacked
    )


def test_heads_and_an_unused_expert_are_quantized():
    params = {"q": array(64, 4, 16), "o": array(4, 16, 64), "experts": array(3, 64, 32)}

    def model(params, x):
        heads = jnp.einsum("td,dhk->thk", x, params["q"])
        x = x + jnp.einsum("thk,hkd->td", heads, params["o"])
        return x @ params["experts"][0] - x @ params["experts"][2]

    small = calibrate(model, INT4, params=params)(BATCHES)
    nearest = quantize_tree(params, INT4, model=model, args=(HELD,))
    for name, q in small.items():
        assert q.scale.shape == nearest[name].scale.shape
    assert error(model, small, params) < 0.9 * error(model, nearest, params)
    unmet = vn.quant.quantize(
        params["experts"][1],
        "int4",
        channelwise_axes=[1],
        tiled_axes={0: 16},
        calibration_method="mse,40,2.4",
    )
    # Codes of ties can differ, so compare the distances.
    far = lambda x: np.abs(np.asarray(x) - np.asarray(params["experts"][1]))
    np.testing.assert_allclose(
        far(vn.materialise(small["experts"])[1]), far(unmet.dequantize()), atol=1e-6
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: jax.Array
    kernel: jax.Array

    def __call__(self, x, gain):
        image = (x @ self.weight.T).reshape(-1, 8, 8, 1)
        dims = ("NHWC", "HWIO", "NHWC")
        return gain * lax.conv_general_dilated(image, self.kernel, (1, 1), "SAME", None, None, dims)


def test_a_module_with_a_convolution_is_quantized():
    layer = Layer(array(64, 64), array(3, 3, 1, 8))
    calibration = calibrate(layer, [Rule(".*", "int8")])
    small = calibration((x, jnp.ones(8)) for x in BATCHES)
    assert isinstance(small, Layer)
    assert [type(x).__name__ for x in (small.weight, small.kernel)] == ["QArray"] * 2
    assert [loss.path for loss in calibration.report.rows] == ["weight"]


def test_static_ranges_come_from_the_same_batches():
    rules = [Rule(".*", "int8", act_qtype="int8", act_range="mean")]
    small = calibrate(mlp, rules, params=MLP)(BATCHES)
    statistics = vn.quant.observe(mlp, rules, params=MLP)(BATCHES)
    other = quantize_tree(MLP, rules, statistics=statistics)
    for name in MLP:
        np.testing.assert_allclose(small[name].scale, other[name].scale, rtol=1e-6)
    only = [Rule(".*", None, act_qtype="int8")]
    assert jax.tree.leaves(calibrate(mlp, only, params=MLP)(BATCHES)["up"])[0] is MLP["up"]


def test_a_format_name_selects_the_default_rules():
    params = {"w": array(64, 128), "norm": jnp.ones(64)}
    model = lambda params, x: (x * params["norm"]) @ params["w"]
    small = calibrate(model, "nf4", params=params)(BATCHES)
    assert small["w"].qtype == "nf4"
    assert small["norm"] is params["norm"]


def test_a_useless_method_warns_and_rounds_to_nearest():
    rules = [Rule(".*", "int4", calibration_method="absmax")]
    params = {"w": MLP["up"]}
    calibration = calibrate(lambda params, x: x @ params["w"], rules, params=params)
    with pytest.warns(UserWarning, match="no better than rounding to nearest for w"):
        small = calibration([jnp.eye(64)])  # uncorrelated channels
    [loss] = calibration.report.rows
    assert loss.method == "nearest"
    assert loss.after == loss.before
    nearest = quantize_tree(params, rules)
    np.testing.assert_array_equal(small["w"].codes(), nearest["w"].codes())


def test_the_report_is_a_table():
    calibration = calibrate(mlp, INT4, params=MLP)
    calibration(BATCHES)
    table = str(calibration.report)
    for loss in calibration.report.rows:
        assert percent(loss.before) in table
        assert percent(loss.after) in table
    assert "mean" in table
    assert "<table" in calibration.report._repr_html_()


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match="unknown method 'gptp'; it must be one of nearest, gptq"):
        calibrate(mlp, INT4, params=MLP, method="gptp")
    with pytest.raises(ValueError, match="damping must be 0 or more"):
        calibrate(mlp, INT4, params=MLP, damping=-1.0)
    with pytest.raises(ValueError, match="propagation must be between"):
        calibrate(mlp, INT4, params=MLP, sequential=True, propagation=2.0)
    with pytest.raises(ValueError, match="needs sequential=True"):
        calibrate(mlp, INT4, params=MLP, propagation=0.5)
    with pytest.raises(TypeError, match=r"holds no parameters.*params=params"):
        calibrate(lambda x: mlp(MLP, x), INT4)
    with pytest.raises(TypeError, match="rules"):
        calibrate(mlp, 4, params=MLP)
    calibration = calibrate(mlp, INT4, params=MLP)
    with pytest.raises(ValueError, match="no batches to calibrate with"):
        calibration([])
    with pytest.raises(TypeError, match="an iterable, such as a list of batches"):
        calibration(HELD)
    with pytest.raises(TypeError, match="several times"):
        calibrate(mlp, INT4, params=MLP, sequential=True)(iter(BATCHES))
    with pytest.raises(ValueError, match=r"(up|down): .*activations are not finite"):
        calibration([HELD.at[3, 5].set(jnp.nan)])


VANISHING = {"all are 0": 0.0, "its square underflows": 1e-25}


@pytest.mark.parametrize("why", VANISHING)
@pytest.mark.parametrize("how", [{}, {"sequential": True}, {"method": "awq"}], ids=str)
def test_vanishing_activations_raise_or_warn(why, how):
    small = [VANISHING[why] * x for x in BATCHES[:1]]
    calibration = calibrate(mlp, INT4, params=MLP, **how)
    with pytest.raises(ValueError, match=f"the activations of .*{why}"):
        calibration(small)

    def model(params, x):
        return mlp(params, x) + (x * VANISHING[why]) @ params["other"]

    params = {**MLP, "other": array(64, 48, seed=3)}
    with pytest.warns(UserWarning, match=f"the activations of other .*{why}"):
        calibrate(model, INT4, params=params, **how)(BATCHES[:1])


def test_a_static_range_of_zeros_is_rejected():
    rules = [Rule(".*", "int8", act_qtype="int8", act_range="mean")]
    statistics = vn.quant.observe(mlp, rules, params=MLP)([jnp.zeros((4, 64))])
    with pytest.raises(ValueError, match=r"(up|down): .*range of a layer is 0"):
        quantize_tree(MLP, rules, statistics=statistics)


def raised_by(error, call):
    """Return the message of an error. Warnings before it would be errors, too."""
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


LOOKED_UP = lambda params, ids: params["table"][ids] + (params["w"] @ jnp.ones(8))[:1]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([Rule("un.*", "int4")], "a format for unused (unused)"),
        ([Rule("table", "int4")], "a format for table (rows along axis"),
        ([Rule("table", "int4", tile_axis=-1)], "a format for table (rows along axis"),
        ([Rule("ww", "int4")], "a format for no weight"),
        ([Rule("w", None)], "a format for no weight"),
    ],
    ids=["unused", "looked up", "as its rule says", "no path", "no format"],
)
def test_rules_without_a_product_raise(rules, said):
    params = {"table": array(50, 32), "w": array(16, 8), "unused": array(8, 8)}
    calibration = calibrate(LOOKED_UP, rules, params=params)
    message = raised_by(ValueError, lambda: calibration([jnp.arange(3)]))
    assert said in message
    assert "products use w. Add a rule" in message


@pytest.mark.parametrize("how", [{}, {"memory": 1}, {"sequential": True}], ids=str)
def test_batches_that_use_no_product_raise(how):
    def model(params, x):
        return lax.cond(x[0, 0] > 1e9, lambda: mlp(params, x), lambda: x[:, :48])

    calibration = calibrate(model, INT4, params=MLP, **how)
    message = raised_by(ValueError, lambda: calibration(BATCHES))
    for path in MLP:
        assert f"{path} (no product used it; pass batches that use it" in message
    calibration = calibrate(mlp, [Rule(".*", "int4", tile_axis=-1)], params=MLP, **how)
    message = raised_by(ValueError, lambda: calibration(BATCHES))
    for path in MLP:
        assert f"{path} (products contract axis -2; set tile_axis" in message


@pytest.mark.parametrize("how", [{}, {"memory": 1}, {"sequential": True}], ids=str)
def test_unused_products_warn_once(how):
    params = {"first": array(64, 64), **MLP, "last": array(48, 48)}

    def model(params, x):
        x = lax.cond(x[0, 0] > 1e9, lambda: x @ params["first"], lambda: x)
        y = mlp(params, x)
        return lax.cond(x[0, 0] > 1e9, lambda: y @ params["last"], lambda: y)

    with pytest.warns(UserWarning, match="no activations were recorded for") as told:
        small = calibrate(model, INT4, params=params, **how)(BATCHES)
    [warning] = told
    assert "first (no product used it" in str(warning.message)
    assert "last (no product used it" in str(warning.message)
    nearest = quantize_tree(params, INT4, model=model, args=(HELD,))
    assert vn.tree.structure(small) == vn.tree.structure(nearest)


@jax.jit  # compile once for all batches
def layers(params, x):
    step = lambda x, layer: (x + jnp.tanh(x @ layer[0]) @ layer[1], None)
    return lax.scan(step, x, (params["up"], params["down"]))[0] @ params["head"]


LAYERS = {
    "up": array(2, 64, 32, scale=0.2),
    "down": array(2, 32, 64, scale=0.2),
    "head": array(64, 24),
}


class Stopped(list):
    """Batches that raise an error in pass number `passes`."""

    def __init__(self, batches, passes):
        super().__init__(batches)
        self.passes = passes

    def __iter__(self):
        self.passes -= 1
        if self.passes == 0:
            raise KeyboardInterrupt
        return super().__iter__()


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "awq+gptq"}, {"rotate": True}, {"correction_rank": 4}, {"act_range": "mean"}],
    ids=str,
)
@pytest.mark.parametrize(
    "how", [{"sequential": True}, {"sequential": True, "propagation": 0.5}, {"memory": 1}], ids=str
)
def test_an_interrupted_calibration_resumes(how, options, tmp_path):
    activations = {"act_qtype": "int8"} if "act_range" in options else {}
    rules = [Rule(".*", "int4", tile_size=16, **options, **activations)]
    run = lambda batches, **more: calibrate(layers, rules, params=LAYERS, **how, **more)(batches)
    with pytest.raises(KeyboardInterrupt):
        run(Stopped(BATCHES, 5 if "sequential" in how else 4), resume=tmp_path)
    kept = len(list(tmp_path.glob("*.npz")))
    assert 0 < kept < (5 if "sequential" in how else 3)
    passes = Stopped(BATCHES, 100)
    small = run(passes, resume=tmp_path)
    whole = Stopped(BATCHES, 100)
    jax.tree.map(np.testing.assert_array_equal, small, run(whole))
    assert passes.passes - whole.passes == kept - 1  # one more pass compares the batches
    assert not list(tmp_path.glob("*.begun"))


def test_a_folder_of_another_calibration_raises(tmp_path):
    first = calibrate(mlp, INT4, params=MLP, resume=tmp_path / "new" / "kept")
    small = first(BATCHES)
    again = calibrate(mlp, INT4, params=MLP, resume=tmp_path / "new" / "kept")
    jax.tree.map(np.testing.assert_array_equal, small, again(BATCHES))
    assert again.report.rows == first.report.rows
    scaled = 2 * MIX[0, 0]
    for model, params, rules, batches, other in (
        (mlp, MLP, [Rule(".*", "int8")], BATCHES, "rules or options"),
        (mlp, MLP | {"up": 2 * MLP["up"]}, INT4, BATCHES, "parameters"),
        (mlp, MLP, INT4, BATCHES[1:], "batches"),
        (mlp, MLP, INT4, BATCHES[:2], "batches"),
        (mlp, MLP, INT4, [*BATCHES[:2], 2 * BATCHES[2]], "batches"),
        (lambda params, x: jnp.tanh(mlp(params, x)), MLP, INT4, BATCHES, "model"),
        (
            lambda params, x: mlp(params, x) + scaled * jnp.asarray(MIX)[:1, :48],
            MLP,
            INT4,
            BATCHES,
            "model",
        ),
    ):
        with pytest.raises(ValueError, match=f"a calibration with other {other}"):
            calibrate(model, rules, params=params, resume=tmp_path / "new" / "kept")(batches)
    with pytest.raises(TypeError, match="resume reads the batches several times"):
        calibrate(mlp, INT4, params=MLP, resume=tmp_path / "other")(iter(BATCHES))
    with pytest.raises(ValueError, match="has no calibration to resume"):
        calibrate(mlp, INT4, params=MLP, resume=tmp_path)(BATCHES)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        calibrate(mlp, INT4, params=MLP, resume=tmp_path / "file")(BATCHES)


def test_other_constants_make_another_calibration(tmp_path):
    model = lambda offset: jax.jit(lambda params, x: mlp(params, x + offset))
    calibrate(model(jnp.ones(64)), INT4, params=MLP, resume=tmp_path)(BATCHES[:1])
    calibrate(model(jnp.ones(64)), INT4, params=MLP, resume=tmp_path)(BATCHES[:1])
    with pytest.raises(ValueError, match="with other model"):
        calibrate(model(2 * jnp.ones(64)), INT4, params=MLP, resume=tmp_path)(BATCHES[:1])


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut"], ids=repr)
def test_a_damaged_file_is_calibrated_again(content, tmp_path):
    run = lambda: calibrate(mlp, INT4, params=MLP, resume=tmp_path)(BATCHES)
    small = run()
    damaged, _ = sorted(tmp_path.glob("*.npz"))
    damaged.write_bytes(content)
    with pytest.warns(UserWarning, match=r"(up|down) is calibrated again, .*empty, damaged"):
        jax.tree.map(np.testing.assert_array_equal, small, run())
    jax.tree.map(np.testing.assert_array_equal, small, run())
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="is calibrated again"):
        run()


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_damaged_identity_is_rejected(content, tmp_path):
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(ValueError, match=r"calibration.json is empty or damaged.* Delete"):
        calibrate(mlp, INT4, params=MLP, resume=tmp_path)(BATCHES)
    # An interruption while the file is written leaves this name.
    (tmp_path / "calibration.json").rename(tmp_path / "calibration.begun")
    calibrate(mlp, INT4, params=MLP, resume=tmp_path)(BATCHES)


def test_a_memory_limit_divides_the_weights():
    batches = Stopped(BATCHES, 100)
    small = calibrate(mlp, INT4, params=MLP, memory=8 * 96**2)(batches)
    assert batches.passes == 100 - 1 - 2  # the first batch, up, and down
    jax.tree.map(np.testing.assert_array_equal, small, calibrate(mlp, INT4, params=MLP)(BATCHES))
    with pytest.raises(TypeError, match=r"memory=1 reads the batches several times"):
        calibrate(mlp, INT4, params=MLP, memory=1)(iter(BATCHES))
    with pytest.raises(ValueError, match="memory must be a number of bytes above 0, not 0"):
        calibrate(mlp, INT4, params=MLP, memory=0)
    unmet = {**MLP, "other": array(64, 8)}
    model = lambda params, x: mlp(params, x) + 0 * jnp.sum(params["other"].T @ jnp.ones((64, 0)))
    with pytest.warns(UserWarning, match="no activations were recorded for other"):
        calibrate(model, INT4, params=unmet, memory=1)(BATCHES)


def test_progress_shows_a_bar(capsys):
    calibrate(mlp, INT4, params=MLP, progress=True)(BATCHES)
    assert "100%" in capsys.readouterr().err


def test_progress_without_rich_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match="progress=True needs rich: pip install rich"):
        calibrate(mlp, INT4, params=MLP, progress=True)(BATCHES)


LARGE = np.isin(np.arange(64), [3, 20, 41])  # channels with large activations
PEAKS = arrays.array(np.where(LARGE, 30.0, 1.0))
PEAKED = [arrays.array(np.asarray(x) * np.asarray(PEAKS)) for x in BATCHES]


@pytest.mark.parametrize("rule", [{}, {"rotate": True}, {"act_qtype": "int8", "rotate": True}])
@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq", "nearest"])
def test_methods_handle_channels_with_outliers(method, rule):
    params = {"w": array(64, 48), "heads": array(64, 4, 8), "out": array(4, 8, 32)}

    def model(params, x):
        y = jnp.tanh(jnp.einsum("td,dhk->thk", x, params["heads"]) / 30)
        return x @ params["w"], jnp.einsum("thk,hkd->td", y, params["out"])

    def lost(small, x=HELD * PEAKS):
        outs = zip(model(params, x), vn.implicit(model)(small, x), strict=True)
        return [float(jnp.linalg.norm(y - z) / jnp.linalg.norm(y)) for y, z in outs]

    rules = [Rule(".*", "int3", tile_size=16, **rule)]
    small = calibrate(model, rules, params=params, method=method)(PEAKED)
    plain = {k: v for k, v in rule.items() if k != "rotate"}
    nearest = quantize_tree(
        params, [Rule(".*", "int3", tile_size=16, **plain)], model=model, args=(HELD,)
    )
    dense = [
        name for event in vn.explain(model)(small, HELD).materialised for name in event.operands
    ]
    assert not [name for name in dense if name.startswith(("Rotated", "Scaled"))]
    bound = 0.8 if rule or method != "nearest" else 0.97
    assert lost(small)[0] < bound * lost(nearest)[0]
    assert lost(small)[1] < 1.02 * lost(nearest)[1]


def test_stacked_layers_have_separate_factors():
    ws = array(3, 64, 64, scale=0.1)

    def scanned(params, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w / 9) * PEAKS, None), x, params["w"])[0]

    rules = [Rule("w", "int3", tile_size=32, method="awq+gptq")]
    nearest = quantize_tree(
        {"w": ws}, [Rule("w", "int3", tile_size=32)], model=scanned, args=(HELD,)
    )
    for sequential in (False, True):
        calibration = calibrate(scanned, rules, params={"w": ws}, sequential=sequential)
        small = calibration(PEAKED)
        assert small["w"].factor.shape == (3, 64, 1)
        assert calibration.report.rows[0].method == "awq+gptq"
        lost = lambda small: error(scanned, small, {"w": ws}, HELD * PEAKS)
        assert lost(small) < 0.8 * lost(nearest)


def test_smoothquant_moves_outliers_to_the_weight():
    params, model = {"w": array(64, 48)}, lambda params, x: x @ params["w"]
    rules = [Rule("w", "int8", act_qtype="int8")]
    nearest = quantize_tree(params, rules, model=model, args=(HELD,))
    small = calibrate(model, rules, params=params, method="smoothquant")(PEAKED)
    x, w = np.concatenate(PEAKED), np.asarray(params["w"])
    factors = (np.abs(x).max(0) / np.abs(w).max(1)) ** 0.5
    np.testing.assert_allclose(small["w"].factor[:, 0], 1 / factors, 1e-5)
    lost = lambda small: error(model, small, params, HELD * PEAKS)
    assert lost(small) < 0.5 * lost(nearest)


def test_methods_that_contradict_a_rule_raise():
    with pytest.raises(ValueError, match="method 'gptq' needs activations"):
        quantize_tree(MLP, [Rule(".*", "int4", method="gptq")])
    with pytest.raises(ValueError, match="unknown method 'gpt'"):
        Rule(".*", "int4", method="gpt")
    with pytest.raises(ValueError, match="Choose one of them"):
        Rule(".*", "int4", method="awq", rotate=True)
    with pytest.raises(ValueError, match="act_qtype is None"):
        Rule(".*", "int4", method="smoothquant")
    with pytest.raises(ValueError, match="no rule has an act_qtype"):
        calibrate(mlp, INT4, params=MLP, method="smoothquant")
    with pytest.raises(ValueError, match="qtype=None leaves the weight dense"):
        Rule(".*", None, method="gptq")
    with pytest.raises(ValueError, match="Use act_range='dynamic'"):
        Rule(".*", "int4", rotate=True, act_qtype="int8", act_range="mean")
    with pytest.raises(ValueError, match="rotate=True"):
        quantize_tree(MLP, [Rule(".*", "int4", rotate=True)], train=True)


def test_kernels_of_convolutions_are_not_rotated():
    params = {"kernel": array(3, 3, 4, 8), "w": array(8, 16)}

    def model(params, x):
        y = lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y @ params["w"]

    x = array(2, 6, 6, 4, scale=1)
    with pytest.warns(UserWarning, match=r"not rotated, because .*: kernel \(conv_general"):
        small = quantize_tree(params, [Rule(".*", "int8", rotate=True)], model=model, args=(x,))
    assert [type(small[path]).__name__ for path in ("kernel", "w")] == ["QArray", "Rotated"]
    np.testing.assert_allclose(vn.implicit(model)(small, x), model(params, x), atol=0.2)


def test_the_report_can_be_plotted():
    import matplotlib.pyplot as plt

    rows = [
        WeightLoss("a", (2, 3), "int4", 0.2, 0.1, "gptq"),
        WeightLoss("b", (2, 3), "int4", 0, 0, "nearest"),
    ]
    _, given = plt.subplots()
    axes = CalibrationReport(tuple(rows)).plot(given)
    assert axes is given
    assert [bar.get_width() for bar in axes.patches] == [20, 0, 10, 0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    plt.close("all")
