"""Rules that place a model: by the names of its axes, and fully sharded."""

import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.array_types import assert_close

import veneer as vn

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LINE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
KEY = arrays.key(0)
RULES = (("mlp", "model"), ("embed", "data"), ("heads", "model"))
KERNELS = [vn.quant.Rule(r".*kernel.*", "int4", tile_size=16)]


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


def specs(tree):
    return [x.sharding.spec for x in jax.tree.leaves(tree)]


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        up = linen.with_logical_partitioning(init, ("embed", "mlp"))
        down = linen.with_partitioning(init, ("mlp", "embed"))
        x = jax.nn.relu(linen.Dense(128, kernel_init=up, name="up")(x))
        return linen.Dense(64, kernel_init=down, name="down")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        named = lambda *names: nnx.with_metadata(init, out_sharding=names)
        self.up = nnx.Linear(64, 128, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(128, 64, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def test_metadata_of_linen_places_kernels():
    model, x = Linen(), jax.random.normal(KEY, (8, 64))
    rules = vn.logical_shardings(jax.eval_shape(model.init, KEY, x), MESH, RULES)
    for variables in (model.init(KEY, x), linen.meta.unbox(model.init(KEY, x))):
        small = vn.quant.quantize_tree(variables, KERNELS)
        placed = vn.device_put(small, rules)
        kernels = linen.meta.unbox(placed)["params"]
        assert specs(kernels["up"]["kernel"]) == [P("data", "model")] * 2
        assert specs(kernels["down"]["kernel"]) == [P("model", "data")] * 2
        run = jax.jit(vn.implicit(model.apply))
        assert_close(run(placed, x), run(small, x), tol=1e-3)


@pytest.fixture
def without_eager_sharding():
    flax.config.update("flax_always_shard_variable", False)
    yield
    flax.config.update("flax_always_shard_variable", True)


@pytest.mark.usefixtures("without_eager_sharding")
def test_metadata_of_nnx_places_kernels():
    x = jax.random.normal(KEY, (8, 64))
    small = vn.quant.quantize_tree(Nnx(nnx.Rngs(0)), KERNELS)
    state = nnx.state(small)
    for named in (nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))), small, state):
        rules = vn.logical_shardings(named, MESH, RULES)
        for tree in (small, state):
            placed = vn.device_put(tree, rules)
            kernels = [x for x in vn.tree.leaves(placed) if isinstance(x, vn.quant.QArray)]
            assert specs(kernels) == [P("model", "data")] * 2 + [P("data", "model")] * 2
    run = nnx.jit(vn.implicit(lambda m, x: m(x)))
    assert_close(run(vn.device_put(small, rules), x), run(small, x), tol=1e-3)


AXES = {"up": {"kernel": P("embed", "mlp")}, "experts": P("expert", "embed", None), "norm": P(None)}


def params():
    up = jax.random.normal(KEY, (64, 32))
    up = vn.quant.quantize(up, "uint4", channelwise_axes=[1], tiled_axes={0: 16})
    experts = jax.random.normal(KEY, (8, 64, 32))
    experts = vn.quant.quantize(experts, "mxfp4", tiled_axes={1: 32}, channelwise_axes=(0, 2))
    up = vn.types.LoraArray(up.replace(zero_point=jnp.ones_like(up.scale, jnp.uint8)), *lora())
    return {"up": {"kernel": up}, "experts": experts, "norm": jnp.ones(64)}


def lora():
    return jnp.ones((64, 4)), jnp.ones((4, 32))


@pytest.mark.parametrize(
    ("rules", "of_up", "of_experts"),
    [
        # Tensor parallelism, with experts over the other axis: codes, scales, zero points, a, b.
        (
            {"embed": None, "mlp": "model", "expert": "data"},
            [*[P(None, "model")] * 3, P(), P(None, "model")],
            [P("data")] * 2,
        ),
        # The first rule for a name counts whose axis of the mesh is free: experts take "data".
        (
            [("expert", "data"), ("embed", "data"), ("embed", None), ("mlp", "model")],
            [*[P("data", "model")] * 3, P("data"), P(None, "model")],
            [P("data")] * 2,
        ),
        # Several axes of a mesh for one of an array.
        (
            {"embed": None, "mlp": None, "expert": ("data", "model")},
            [P()] * 5,
            [P(("data", "model"))] * 2,
        ),
    ],
)
def test_every_leaf_of_a_weight_is_placed(rules, of_up, of_experts):
    tree = params()
    placed = vn.device_put(tree, vn.logical_shardings(AXES, MESH, rules))
    short = lambda x: [P(*trimmed(spec)) for spec in specs(x)]
    assert short(placed["up"]) == of_up
    assert short(placed["experts"]) == of_experts
    assert placed["norm"].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, placed, tree)


def trimmed(spec):
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return entries


def test_names_of_mesh_axes_need_no_rule():
    ((_, sharding),) = vn.logical_shardings({"w": P("model", None)}, MESH)
    assert sharding == on("model", None)


def test_a_checkpoint_is_loaded_with_logical_shardings(tmp_path):
    vn.save(tmp_path / "model", params())
    rules = vn.logical_shardings(AXES, MESH, {"embed": None, "mlp": "model", "expert": "data"})
    found = vn.load(tmp_path / "model", shardings=rules)
    placed = vn.device_put(params(), rules)
    assert specs(found) == specs(placed)
    each = vn.load(tmp_path / "model", shardings=[(".*", vn.fully_sharded(LINE, "data"))])
    assert found["experts"].packed.addressable_shards[0].data.shape[0] == 4
    assert (
        each["experts"].packed.addressable_shards[0].data.nbytes * 8
        == found["experts"].packed.nbytes
    )


def test_fully_sharded_gives_each_device_an_eighth():
    tree = {
        "w": vn.quant.quantize(
            jnp.ones((256, 64)), "nf4", channelwise_axes=[1], tiled_axes={0: 32}
        ),
        "tall": vn.quant.quantize(
            jnp.ones((256, 64)), "nf4", channelwise_axes=[1], tiled_axes={0: 64}
        ),
        "norm": jnp.ones(64),
        "odd": jnp.ones((3, 5)),
        "step": jnp.zeros((), jnp.int32),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = vn.device_put(tree, [(".*", vn.fully_sharded(LINE, "data"))])
    assert specs(placed["w"]) == [P("data", None)] * 2
    assert specs(placed["tall"]) == [P(None, "data")] * 2  # four tiles are for four devices
    assert placed["norm"].sharding.spec == P("data")
    assert placed["odd"].sharding.is_fully_replicated
    assert placed["step"].sharding.is_fully_replicated


def test_fully_sharded_names_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match="axis_name 'pipe' is not an axis of Mesh"):
        vn.fully_sharded(MESH, ("data", "pipe"))


def test_fully_sharded_combines_with_a_sharded_axis():
    w = {"w": vn.quant.quantize(jnp.ones((64, 128)), "int8", channelwise_axes=[1])}
    placed = vn.device_put(w, [("w", vn.fully_sharded(MESH, "data", P(None, "model")))])["w"]
    assert placed.packed.sharding.spec == P("data", "model")
    assert placed.scale.sharding.spec == P(None, "model")
    with pytest.raises(ValueError, match=r"w has shape \(64, 128\), and .* has more axes"):
        vn.device_put(w, [("w", vn.fully_sharded(MESH, "data", P(None, None, "model")))])


def test_indivisible_axes_get_sizes_that_would_fit():
    w = vn.quant.quantize(jnp.ones((64, 8)), "int8", channelwise_axes=[1], tiled_axes={0: 32})
    f = jax.shard_map(lambda w: 2 * w, mesh=LINE, in_specs=P("data"), out_specs=P("data"))
    would = r"would have 8 values, but 32 are stored together \(tiles of 8 or 2 devices would fit"
    with pytest.raises(vn.MaterialiseError, match=would):
        vn.implicit(f, on_materialise="error")(w)
    narrow = {"up": vn.quant.quantize(jnp.ones((64, 8)), "nf4", channelwise_axes=[1])}
    would = r"^up is replicated.* have 1 values, but 2 are stored together \(4 devices would fit\)"
    with pytest.warns(UserWarning, match=would):
        vn.device_put(narrow, [("up", on(None, "data", mesh=LINE))])


REFUSED = {
    "a name": (
        (AXES, MESH, {"embed": None, "expert": None}),
        r"axis 'mlp' of up\.kernel \('embed', 'mlp'\) has no rule; there are rules for "
        r"embed, expert, data, model\. Add a rule, such as \('mlp', None\)",
    ),
    "an axis": (
        (AXES, MESH, {"embed": "pipe"}),
        r"'embed' names 'pipe', not an axis of",
    ),
    "no names": (({"w": arrays.ones(3)}, MESH), "no array of the tree has axis names"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_logical_rules_raise(args, message):
    with pytest.raises(ValueError, match=message):
        vn.logical_shardings(*args)
