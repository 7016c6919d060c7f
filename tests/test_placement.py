"""`vn.device_put` places the leaves of a tree by the shardings of the dense arrays."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.array_types import assert_close
from support.every_type import EVERY_TYPE, plain, value

import veneer as vn

if jax.device_count() < 4:
    pytest.skip("needs 4 devices", allow_module_level=True)

MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KEY = arrays.key(0)


def on(*spec):
    return NamedSharding(MESH, P(*spec))


def weight(qtype="nf4", shape=(64, 32)):
    return arrays.quantized(qtype, *shape, tile=16)


def specs(tree):
    return [x.sharding.spec for x in jax.tree.leaves(tree)]


def test_scales_are_sharded_like_their_values():
    q = vn.quant.quantize(jax.random.normal(KEY, (64, 32)), "int8", channelwise_axes=[1])
    with pytest.raises(ValueError, match="dimension size is 1"):
        jax.device_put(q, on("model"))
    for spec, of_scale in ((("model",), (None, None)), ((None, "model"), (None, "model"))):
        placed = vn.device_put(q, on(*spec))
        assert [tuple(s) for s in specs(placed)][1] == of_scale
        assert placed.packed.addressable_shards[0].data.nbytes == q.packed.nbytes // 2
        assert_close(placed, q.dequantize())


@pytest.mark.parametrize("name", [name for name in EVERY_TYPE if name != "PRNGKey"])
@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P("data", "model")], ids=str)
def test_device_put_shards_each_type_as_implicit_does(name, spec):
    w, sharding = value(name), NamedSharding(MESH, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        placed = vn.device_put({"w": w}, sharding)["w"]
    assert jax.tree.structure(placed) == jax.tree.structure(w)
    expected = vn.implicit(lambda w: jax.device_put(w, sharding))(w)
    assert specs(placed) == specs(expected)
    np.testing.assert_array_equal(plain(placed), plain(w))


PARAMS = {
    "layers": [{"up": weight(), "down": weight(shape=(32, 64)), "bias": arrays.zeros(64)}] * 2,
    "head": arrays.ones((64, 8)),
    "name": "model",
}


def test_rules_place_the_matching_leaves():
    rules = [
        (r".*up", on(None, "model")),
        (r".*down", on("model")),
        (r"layers.*", on()),
    ]
    placed = vn.device_put(PARAMS, rules)
    layer = placed["layers"][1]
    assert specs(layer["up"]) == [P(None, "model")] * 2
    assert specs(layer["down"]) == [P("model", None)] * 2
    assert layer["bias"].sharding == on()
    assert placed["head"] is PARAMS["head"]
    assert placed["name"] == "model"


def test_a_tree_of_shardings_places_each_leaf():
    shardings = {"layers": on(), "head": on("model"), "name": None}
    placed = vn.device_put(PARAMS, shardings)
    assert set(specs(placed["layers"])) == {P()} | {P(None, None)}
    assert placed["head"].sharding == on("model")
    each = {"up": on(None, "model"), "down": None, "bias": on()}
    placed = vn.device_put(PARAMS["layers"], [each, None])
    assert specs(placed[0]["up"]) == [P(None, "model")] * 2
    assert placed[0]["down"] is PARAMS["layers"][0]["down"]
    assert placed[1]["bias"] is PARAMS["layers"][1]["bias"]


def test_one_sharding_places_every_leaf():
    device = jax.devices()[1]
    placed = vn.device_put(PARAMS["layers"], device)
    assert {next(iter(x.devices())) for x in jax.tree.leaves(placed)} == {device}
    assert vn.device_put(weight(), on()).packed.sharding.is_fully_replicated
    assert vn.device_put(jnp.ones(4), on("model")).sharding == on("model")


def test_modules_can_be_placed():
    module = eqx.nn.MLP(32, 32, 64, 1, key=KEY)
    module = vn.quant.quantize_tree(module, [vn.quant.Rule(".*weight", "int8", tile_axis=-1)])
    placed = vn.device_put(module, [(r".*weight", on("model"))])
    assert specs(placed.layers[0].weight) == [P("model", None)] * 2
    assert_close(vn.implicit(placed)(jnp.ones(32)), vn.implicit(module)(jnp.ones(32)))
    state = nnx.state(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    state = vn.quant.quantize_tree(state, [vn.quant.Rule("kernel.*", "nf4", tile_size=16)])
    placed = vn.device_put(state, [(r"kernel\.value", on(None, "model")), (".*", on())])
    assert specs(placed["kernel"].get_value()) == [P(None, "model")] * 2


def test_a_model_runs_on_placed_parameters():
    def model(params, x):
        for layer in params["layers"]:
            x = jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x

    x = jax.random.normal(KEY, (8, 64))
    rules = [(".*up", on(None, "model")), (".*down", on("model"))]
    params = vn.device_put({"layers": PARAMS["layers"]}, rules)
    run = jax.jit(vn.implicit(model))
    out = run(params, jax.device_put(x, on("data")))
    assert_close(out, run({"layers": PARAMS["layers"]}, x), tol=1e-3)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(vn.implicit(f)), vn.implicit])
def test_device_put_works_in_compiled_programs(wrap):
    placed = wrap(lambda tree: vn.device_put(tree, [("w", on(None, "model"))]))({"w": weight()})
    assert_close(placed["w"], weight().dequantize())
    if wrap is vn.implicit:  # within jit, the compiler has its way, as with jax.device_put
        assert specs(placed) == [P(None, "model")] * 2


def test_indivisible_weights_are_replicated_with_a_warning():
    w = weight("nf4", (64, 2))  # a byte has both columns
    message = r"^up is replicated on each device, .*blocks of shape \[64, 1\].*'model'.* QArray\("
    with pytest.warns(UserWarning, match=message):
        placed = vn.device_put({"up": w}, on(None, "model"))["up"]
    assert placed.packed.sharding.is_fully_replicated
    assert_close(placed, w.dequantize())


def test_a_rule_without_matches_gives_a_warning():
    with pytest.warns(
        UserWarning, match=r"'kernel' matches no array. .* such as head, layers\.0\.bias"
    ):
        vn.device_put(PARAMS, [("kernel", on())])


REFUSED = {
    "uneven": (on(None, "model"), ValueError, r"^w has shape \(64, 3\): .*dimension size is 3"),
    "too many axes": (on(None, None, "model"), ValueError, r"\(64, 3\), and P.* has more axes"),
    "a spec": (P("model"), TypeError, r"NamedSharding\(mesh, PartitionSpec\(\.\.\.\)\), .*not P"),
    "a spec in a rule": ([("w", P())], TypeError, r"the sharding for 'w' must be .*, not P\(\)"),
    "no regex": ([("(", on())], ValueError, r"'\(' is not a regex"),
    "no pair": ([("w", on()), on()], TypeError, r"a rule must be a pair of a regex and a sharding"),
    "no prefix": ({"v": on()}, ValueError, "must be a prefix of the tree"),
    "nothing": (None, None, ""),
}


@pytest.mark.parametrize(("shardings", "error", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("make", [lambda w: w, vn.freeze], ids=["dense", "implicit"])
def test_wrong_shardings_raise_with_the_path(make, shardings, error, message):
    tree = {"w": make(jnp.ones((64, 3)))}
    if error is None:
        assert vn.device_put(tree, shardings)["w"] is tree["w"]
        return
    with pytest.raises(error, match=message):
        vn.device_put(tree, shardings)
