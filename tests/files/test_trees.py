"""`vn.save` and `vn.load(path, like=tree)`: trees of any class are restored."""

import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.every_type import EVERY_TYPE, value

import veneer as vn
from veneer.files import new_folder
from veneer.files.folder import TensorFolder
from veneer.files.new_folder import write_aside

NUMBERS = np.arange(8.0)
X = arrays.array(NUMBERS)
W = arrays.normal(64, 8)
NF4 = arrays.quantized("nf4", 64, 8, tile=32)


def assert_same(found, tree, *, numpy=True):
    """The same classes, metadata, and leaves to the bit, NumPy's as such."""
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        if not isinstance(y, jax.Array | np.ndarray | np.generic):
            assert x is y or (x == y and type(x) is type(y))
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert type(x) is type(y) or not numpy
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def loaded(tree, folder, **how):
    vn.save(folder / "saved", tree)
    return vn.load(folder / "saved", **how)


# Those whose metadata are no numbers or strings, but objects of the program's or of a library's.
NEED_LIKE = {
    "Lazy": r"\.function is sin, which files do not",
    "Quantity": r"\.unit is Unit\(\"m\"\)",
}


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_every_array_type(name, tmp_path):
    tree = {"w": value(name), "batch": [value(name, (2,))]}
    assert_same(loaded(tree, tmp_path, like=tree), tree)
    if name in NEED_LIKE:
        with pytest.raises(ValueError, match=NEED_LIKE[name] + r".*vn\.load\(path, like=tree\)"):
            vn.load(tmp_path / "saved")
    else:
        assert_same(vn.load(tmp_path / "saved"), tree, numpy=False)


class Scaled(vn.ImplicitArray):
    x: jax.Array
    by: float = vn.static(default=1.0)

    def materialise(self):
        return self.x * self.by


class ScaledModule(eqx.Module, vn.ImplicitArray):
    x: jax.Array
    by: float = eqx.field(static=True)

    def materialise(self):
        return self.x * self.by


@struct.dataclass
class ScaledStruct(vn.ImplicitArray):
    x: jax.Array
    by: float = struct.field(pytree_node=False)

    def materialise(self):
        return self.x * self.by


@pytest.mark.parametrize("cls", [Scaled, ScaledModule, ScaledStruct])
def test_a_type_of_a_user_s(cls, tmp_path):
    tree = [cls(X, 2.0), cls(NF4, 3.0)]
    assert_same(loaded(tree, tmp_path), tree)
    assert_same(vn.load(tmp_path / "saved", like=tree), tree)
    assert (vn.load(tmp_path / "saved")[0] + 1).tolist() == (2 * X + 1).tolist()


def test_a_class_name_with_several_classes_needs_like(tmp_path):
    make = lambda: type("Local", (Scaled,), {"__qualname__": "Local"})
    first, _second = make(), make()
    with pytest.raises(ValueError, match=r"has the type .*Local, the name of 2 imported classes"):
        loaded([first(X)], tmp_path)
    assert_same(vn.load(tmp_path / "saved", like=[first(X)]), [first(X)])


LORA = vn.types.LoraArray(NF4, arrays.ones((64, 2)), arrays.zeros((2, 8)), scale=0.5)
PARAMS = {"kernel": LORA, "bias": X}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def quantized_state():
    state = nnx.state(Net(nnx.Rngs(0)))
    return vn.quant.quantize_tree(state, [vn.quant.Rule(".*kernel.*", "nf4", tile_size=32)])


def quantized_module():
    module = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    return vn.quant.quantize_tree(module, [vn.quant.Rule(".*weight", "int8", tile_axis=-1)])


Pair = collections.namedtuple("Pair", ["x", "y"])
ADAPTERS, REST = vn.tree.partition(PARAMS, vn.trainable(PARAMS))

TREES = arrays.OnDemand(
    {
        "nnx state": lambda: quantized_state(),
        "nnx module": lambda: Net(nnx.Rngs(0)),
        "equinox module": lambda: quantized_module(),
        "equinox module, in part": lambda: eqx.filter(quantized_module(), eqx.is_array),
        "adam": lambda: optax.adam(1e-3).init(X),
        "adam of adapters": lambda: optax.adam(1e-3).init(ADAPTERS),
        "masked": lambda: optax.masked(optax.adam(1e-3), vn.trainable(PARAMS)).init(PARAMS),
        "chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)).init(ADAPTERS),
        "adapters": lambda: ADAPTERS,
        "the rest": lambda: REST,
        "while training": lambda: vn.quant.quantize_tree(
            {"w": W}, [vn.quant.Rule(".*", "int4", act_qtype="int8", grad_qtype="int8")], train=True
        ),
        "namedtuple": lambda: {"a": [Pair(X, Pair(None, 2 * X))]},
        "ordered dict": lambda: collections.OrderedDict(b=X, a=2 * X),
        "plain values": lambda: {
            "steps": 3,
            "rate": 0.1,
            "name": "bert",
            "done": False,
            "none": None,
        },
        "keys": lambda: [arrays.key(0), jax.random.split(jax.random.key(1, impl="rbg"), 3)],
        "functions": lambda: (jax.nn.relu, jnp.tanh, np.dtype("float32"), jnp.bfloat16),
        "nothing in it": lambda: (optax.EmptyState(), optax.MaskedNode(), {}, [], ()),
        "numpy": lambda: {"x": np.arange(3.0), "n": np.float32(2)},
    }
)


@pytest.mark.parametrize("name", TREES)
def test_a_tree_survives_a_round_trip(name, tmp_path):
    assert_same(loaded(TREES[name], tmp_path, like=TREES[name], verify=True), TREES[name])


def test_training_continues_from_a_loaded_state(tmp_path):
    optimizer = optax.adam(1e-2)
    loss = lambda adapters: jnp.sum((W.T @ vn.tree.combine(adapters, REST)["kernel"] - 1) ** 2)

    def step(adapters, state):
        updates, state = optimizer.update(jax.grad(loss)(adapters), state, adapters)
        return optax.apply_updates(adapters, updates), state

    first = step(ADAPTERS, optimizer.init(ADAPTERS))
    again = loaded(first, tmp_path, like=first)
    assert_same(step(*again), step(*first))


def test_like_can_be_an_abstract_tree(tmp_path):
    optimizer = optax.adam(1e-3)
    state = optimizer.init(ADAPTERS)
    assert_same(loaded(state, tmp_path, like=jax.eval_shape(optimizer.init, ADAPTERS)), state)


@pytest.mark.parametrize("abstract", [False, True])
def test_a_dense_model_is_like_its_quantized_one(abstract, tmp_path):
    make = lambda: eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    like = eqx.filter_eval_shape(make) if abstract else make()
    model = quantized_module()
    found = loaded(model, tmp_path, like=like)
    assert_same(found, model)
    assert vn.implicit(found)(X).tolist() == vn.implicit(model)(X).tolist()


def test_a_state_goes_into_the_model(tmp_path):
    model = Net(nnx.Rngs(0))
    state = quantized_state()
    nnx.update(model, loaded(state, tmp_path, like=nnx.state(Net(nnx.Rngs(1)))))
    assert_same(nnx.state(model), state)


def test_without_like_other_nodes_become_dicts(tmp_path):
    found = loaded(quantized_state(), tmp_path)
    assert list(found) == ["dropout", "linear", "norm"]
    assert found["linear"]["kernel"]["value"].qtype == "nf4"
    found = vn.load(tmp_path / "saved")["linear"]["bias"]
    assert_same(found, {"value": jnp.zeros(8)})


def test_without_like_a_list_of_modules_is_a_dict(tmp_path):
    class Layers(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])

    found = loaded(Layers(), tmp_path)
    kernel = found["layers"]["1"]["kernel"]["value"]
    np.testing.assert_array_equal(kernel, Layers().layers[1].kernel[...])


def test_the_names_of_tensors_are_the_paths(tmp_path):
    vn.save(tmp_path / "saved", optax.adam(1e-3).init(ADAPTERS))
    with TensorFolder(tmp_path / "saved") as folder:
        assert list(folder)[:3] == ["0.count", "0.mu.bias", "0.mu.kernel.a"]


def test_packed_stays_packed(tmp_path):
    vn.save(tmp_path / "saved", PARAMS)
    stored = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert stored < sum(x.nbytes for x in jax.tree.leaves(PARAMS)) + 1500


scaled = partial(vn.types.LoraArray, NF4, arrays.ones((64, 2)), arrays.zeros((2, 8)))

# The saved tree, the tree `like`, and the error message.
DIFFERENT = {
    "metadata": (
        {"w": scaled(scale=0.5)},
        {"w": scaled(scale=1.0)},
        r"tree\['w'\]\['scale'\] was saved as 0\.5, but is 1\.0",
    ),
    "a function": (
        [vn.types.Lazy(jnp.sin, X)],
        [vn.types.Lazy(jnp.cos, X)],
        r"tree\[0\]\['function'\] was saved as sin, but is cos",
    ),
    "a unit": (
        [vn.types.Quantity(X, "m")],
        [vn.types.Quantity(X, "km")],
        r"tree\[0\]\['unit'\] was saved as Unit\(\"m\"\), but is Unit\(\"km\"\)",
    ),
    "a type": (
        [vn.types.Diagonal(X)],
        [vn.types.Circulant(X)],
        r"tree\[0\] was saved as Diagonal, but is Circulant float32\[8, 8\]",
    ),
    "a format": (
        [NF4],
        [arrays.quantized("int8", 64, 8)],
        r"tree\[0\] was saved as QArray float32\[64, 8\], but is QArray",
    ),
    "a dense array for a type": ([X], [vn.freeze(X)], r"saved as float32\[8\], but is Frozen"),
    "a type for another shape": ([NF4], [X], r"QArray float32\[64, 8\], but is float32\[8\]"),
    "a shape": (
        {"x": X},
        {"x": arrays.array(NUMBERS[1:])},
        r"saved as float32\[8\], but is float32\[7\]",
    ),
    "a dtype": ({"x": X}, {"x": arrays.arange(8)}, r"saved as float32\[8\], but is int32\[8\]"),
    "a name": ({"x": X}, {"y": X}, r"tree\['x'\] is saved but not in like"),
    "one more": ({"x": X}, {"x": X, "y": X}, r"tree\['y'\] is in like but not saved"),
    "fewer": ([X, X], [X], r"tree\[1\] is saved but not in like"),
    "none": ([None], [X], r"tree\[0\] was saved as None, but is float32\[8\]"),
    "some": ([X], [None], r"tree\[0\] was saved as float32\[8\], but is None"),
    "a container": ([[X]], [X], r"tree\[0\] was saved as a list, but is float32\[8\]"),
    "another function": ([jnp.sin], [jnp.cos], r"was saved as sin, but is"),
    "a number": ([3], [3.0], r"tree\[0\] was saved as 3, but is 3\.0"),
    "keys": (
        [arrays.key(0)],
        [jax.random.wrap_key_data(arrays.zeros(4, np.uint32), impl="rbg")],
        r"tree\[0\] was saved as a keys, but is key<rbg>",
    ),
}


@pytest.mark.parametrize(("tree", "like", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_tree_that_differs_from_like_raises_with_the_path(tree, like, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        loaded(tree, tmp_path, like=like)
    assert str(tmp_path / "saved") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_function_is_the_program_s(tmp_path):
    with pytest.raises(ValueError, match=r"tree\[0\] is relu, which files do not store.*like=tree"):
        loaded([jax.nn.relu], tmp_path)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("dense", [False, True])
def test_arrays_get_the_shardings_of_like(dense, tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "x"))
    of_dense = jax.ShapeDtypeStruct(NF4.shape, NF4.dtype, sharding=sharding)
    like = of_dense if dense else jax.device_put(NF4, sharding)
    found = loaded([NF4], tmp_path, like=[like])
    assert_same(found, [NF4])
    assert found[0].packed.sharding.spec == found[0].scale.sharding.spec == P(None, "x")


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_arrays_of_a_tree_go_to_their_devices_one_at_a_time(tmp_path, monkeypatch):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    tree = {"z": [LORA, {"step": 3, "w": np.ones((4, 8), np.float32)}], "bias": X, "none": None}
    vn.save(tmp_path / "saved", tree)
    events = []
    read, put = TensorFolder.read, vn.files.load_save.put
    placed = lambda names, *others: events.extend(names) or put(names, *others)
    monkeypatch.setattr(TensorFolder, "read", lambda self, n: events.append(n) or read(self, n))
    monkeypatch.setattr("veneer.files.load_save.put", placed)
    rules = [(r"z\.0|z\.1\.w", on(None, "x")), (r"bias", on())]
    found = vn.load(tmp_path / "saved", shardings=rules)
    names = ["z.0.w", "z.0.a", "z.0.b", "z.0", "z.1.w", "z.1.w", "bias", "bias"]
    assert events == names
    assert_same(found, tree, numpy=False)
    assert list(found) == [*tree]
    kernel, w = found["z"][0], found["z"][1]["w"]
    specs = [x.sharding.spec for x in (kernel.w.packed, kernel.w.scale, kernel.b, w)]
    assert specs == [P(None, "x")] * 4
    assert found["bias"].sharding == on()
    by_prefix = vn.load(tmp_path / "saved", shardings={"z": on(), "bias": None, "none": None})
    assert len(by_prefix["z"][0].w.packed.sharding.device_set) == 4
    with pytest.raises(ValueError, match=r"bias has shape \(8,\), and"):
        vn.load(tmp_path / "saved", shardings=on(None, "x"))


def test_a_tree_of_layout_version_2_is_still_read(tmp_path):
    tree = {"w": vn.quant.ActivationQuantized(NF4, qtype="int8")}
    vn.save(tmp_path / "saved", tree)
    file = tmp_path / "saved" / "veneer.json"
    content = json.loads(file.read_text("utf-8"))
    parts = {"array": {"tensor": "w.array"}, "scale": {"none": True}, "zero_point": {"none": True}}
    how = {"qtype": "int8", "calibration_method": None, "contracting": [-2]}
    node = {"activation_quantized": parts | how}
    content |= {"layout_version": 2, "tree": {"dict": [["w", node]]}}
    file.write_text(json.dumps(content), "utf-8")
    assert_same(vn.load(tmp_path / "saved"), tree)
    assert_same(vn.load(tmp_path / "saved", like=tree), tree)


DAMAGES = {
    "a field less": lambda node: node["fields"].pop(),
    "metadata less": lambda node: node["static"].pop("scale"),
    "a field more": lambda node: node["fields"].append(["c", {"none": True}]),
    "no type": lambda node: node.update(array="os.system"),
    "no metadata": lambda node: node.update(static=3),
    "another kind": lambda node: node.update({"fields": [["w", {"what": 1}]]}),
    "no node": lambda node: node.update({"fields": [["w", {}]]}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("how", [{}, {"like": [LORA]}], ids=["by itself", "like"])
def test_a_damaged_tree_is_refused_in_one_line(damage, how, tmp_path):
    vn.save(tmp_path / "saved", [LORA])
    file = tmp_path / "saved" / "veneer.json"
    content = json.loads(file.read_text("utf-8"))
    damage(content["tree"]["list"][0])
    file.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ValueError, match=str(tmp_path / "saved")) as error:
        vn.load(tmp_path / "saved", **how)
    assert "\n" not in str(error.value)


def edited(path, tree, old, new):
    """Save a tree, with something else in its veneer.json."""
    vn.save(path, tree)
    file = path / "veneer.json"
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new), "utf-8")
    return path


SAVED = {"w": NF4, "b": X, "more": [LORA]}
BAD_FILES = {
    "a key twice": ('["b", ', '["w", ', "the key 'w' occurs twice"),
    "a field twice": ('["a", {"tensor"', '["w", {"tensor"', "the key 'w' occurs twice"),
    "a tensor twice": (' "b": {"storage"', ' "w": {"storage"', "the key 'w' occurs twice"),
    "a part twice": ('"checksums":', '"tree":', "the key 'tree' occurs twice"),
    "a shape twice": ('"shape": [8]', '"shape": [9], "shape": [8]', "the key 'shape' occurs"),
    "half a surrogate": ('["b", ', r'["\ud800", ', "is neither a string nor an integer"),
    "half a surrogate in a name": (' "b": {', r' "\ud800": {', "is not valid Unicode text"),
    "a key that is a list": ('["b", ', "[[1], ", "is neither a string nor an integer"),
    "a key that is true": ('["b", ', "[true, ", "is neither a string nor an integer"),
    "keys of two kinds": ('["b", ', "[1, ", "has both string and integer keys"),
    **{
        f"the dtype {dtype}": ('"dtype": "float32"', f'"dtype": {dtype}', "'[a-z.]*': .*dtype is")
        for dtype in ('"float99"', '"object"', '"datetime64[s]"', '"str"', '"int4"', "null", "[]")
    },
    **{
        f"the scale {scale}": ('"scale": 0.5', f'"scale": {scale}', "scale is .*not of type float")
        for scale in ('"x"', "[1]", "null", "true", '{"tuple": [1.0]}')
    },
    "dropout": ('"dropout": 0.0', '"dropout": 1.5', r"LoraArray: dropout must be in \[0, 1\)"),
    "an axis": ('"dropped": "in"', '"dropped": "up"', "not a valid LoraArray: .*dropped='up'"),
    "axes": ('"in_ndim": 1', '"in_ndim": 7', "not a valid LoraArray"),
    "a fraction of an axis": ('"in_ndim": 1', '"in_ndim": 1.5', "in_ndim is 1.5, not of type int"),
}


@pytest.mark.parametrize(("old", "new", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_content_of_a_saved_folder_gets_one_clear_error(tmp_path, old, new, message):
    path = edited(tmp_path / "saved", SAVED, old, new)
    with pytest.raises(ValueError, match=message) as error:
        vn.load(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value).splitlines()) == 1


def test_metadata_is_checked_where_leaves_are_missing(tmp_path):
    adapters, _ = vn.tree.partition([LORA], vn.trainable([LORA]))
    assert adapters[0].w.packed is None
    vn.save(tmp_path / "good", adapters)
    assert_same(vn.load(tmp_path / "good"), adapters)
    path = edited(tmp_path / "saved", adapters, '"scale": 0.5', '"scale": "x"')
    with pytest.raises(ValueError, match="scale is 'x', not of type float"):
        vn.load(path)


def test_a_state_with_leaves_of_other_shapes_is_loaded(tmp_path):
    """A state of Adafactor has the structure of an array, but other leaves."""
    norms = [jax.tree.map(jnp.linalg.norm, vn.types.LoraArray(W, LORA.a, LORA.b, scale=2.0))]
    vn.save(tmp_path / "saved", norms)
    assert_same(vn.load(tmp_path / "saved"), norms)


@pytest.mark.parametrize("format", [None, "gptq", "gguf"])
def test_a_name_that_is_no_text_is_not_saved(tmp_path, format):
    with pytest.raises(
        ValueError, match=r"'\\ud800.*is not valid Unicode text|which is not valid Unicode text"
    ):
        vn.save(tmp_path / "saved", {"\ud800.weight": X}, format=format)
    assert not names_in(tmp_path)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_saved_folder_is_overwritten(tmp_path):
    vn.save(tmp_path / "saved", {"x": X, "more": [W]})
    vn.save(tmp_path / "saved", {"x": 2 * X}, overwrite=True)
    assert_same(vn.load(tmp_path / "saved", verify=True), {"x": 2 * X})
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    vn.save(tmp_path / "new", X, overwrite=True)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_overwrite_keeps_the_old_files(tmp_path, error, monkeypatch):
    vn.save(tmp_path / "saved", {"x": X})
    before = contents(tmp_path / "saved")

    def fail(*_):
        raise error

    monkeypatch.setattr("veneer.files.folder.FolderWriter.finish", fail)
    with pytest.raises(error):
        vn.save(tmp_path / "saved", {"x": 2 * X}, overwrite=True)
    assert contents(tmp_path / "saved") == before
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def names_in(folder):
    return [file.name for file in folder.iterdir()]


class NoLocks:
    """The module `fcntl` on a file system without locks."""

    LOCK_EX, LOCK_NB = 2, 4

    @staticmethod
    def flock(*_):
        raise OSError(38, "Function not implemented")


@pytest.fixture(params=["exchange", "renames", "no locks", "no fcntl"])
def system(request, monkeypatch):
    """Systems that exchange folders at once, that rename them twice, and that have no locks."""
    if request.param != "exchange":
        monkeypatch.setattr(new_folder, "_exchange", lambda one, other: False)
    if request.param.startswith("no"):
        monkeypatch.setattr(new_folder, "fcntl", NoLocks if "locks" in request.param else None)
    return request.param


STEPS = {os: ("rename", "replace", "mkdir", "unlink", "rmdir", "open"), shutil: ("rmtree",)}


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stopped_save_leaves_one_whole_version(tmp_path, system, error, when, monkeypatch):
    """Stop each step that changes the file system, in turn."""
    path, left = tmp_path / "saved", []

    def stopped(function):
        def step(*args, **kwargs):
            is_last = bool(left) and left.pop() == "last"
            if is_last and when == "before":
                raise error
            result = function(*args, **kwargs)
            if is_last:
                raise error
            return result

        return step

    for module, names in (*STEPS.items(), (new_folder, ("_exchange",))):
        for name in names:
            monkeypatch.setattr(module, name, stopped(getattr(module, name)))
    vn.save(path, {"x": np.ones(3)})
    for i in range(100):
        old, new = i + 1, i + 2
        left[:] = ["last", *[""] * i]
        with contextlib.suppress(type(error)):
            vn.save(path, {"x": np.full(3, new)}, overwrite=True)
        is_complete = bool(left)
        left.clear()
        (found,) = {*vn.load(path, verify=True)["x"].tolist()}
        assert found in (old, new)
        vn.save(path, {"x": np.full(3, new)}, overwrite=True)
        assert names_in(tmp_path) == ["saved"] or system.startswith("no")
        if is_complete:
            break
    assert is_complete
    assert found == new
    assert i > 5


def test_a_version_that_a_killed_save_set_aside_is_put_back(tmp_path):
    hidden = tmp_path / ".saved.partial"
    vn.save(tmp_path / "saved", {"x": X})
    hidden.mkdir()
    (hidden / "lock").touch()
    (tmp_path / "saved").rename(hidden / "old")
    (hidden / "new").mkdir()
    with pytest.raises(FileExistsError, match="saved already exists"):
        vn.save(tmp_path / "saved", {"x": 2 * X})
    assert_same(vn.load(tmp_path / "saved", verify=True), {"x": X})
    assert names_in(tmp_path) == ["saved"]


@pytest.mark.parametrize("left", ["new", "old"])
def test_a_save_removes_what_killed_ones_left(tmp_path, left):
    vn.save(tmp_path / "saved", {"x": X})
    (tmp_path / ".saved.partial" / left).mkdir(parents=True)
    (tmp_path / ".saved.partial" / left / "model.safetensors").write_text("half")
    vn.save(tmp_path / "saved", {"x": 2 * X}, overwrite=True)
    assert_same(vn.load(tmp_path / "saved", verify=True), {"x": 2 * X})
    assert names_in(tmp_path) == ["saved"]


@pytest.mark.parametrize("format", [None, "gguf"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_second_writer_gets_one_clear_error(tmp_path, format, overwrite):
    tree, path = {"x": X}, tmp_path / "saved"
    with write_aside(path) as folder:
        with pytest.raises(
            BlockingIOError, match=r"another process or thread is saving .*saved"
        ) as e:
            vn.save(path, tree, overwrite=overwrite, format=format)
        assert "partial" not in str(e.value)
        vn.save(tmp_path / "other", tree, format=format)
        (folder / "a").touch()
    assert sorted(names_in(tmp_path)) == ["other", "saved"]
    assert names_in(path) == ["a"]


def test_threads_that_save_at_once_leave_one_whole_version(tmp_path):
    path, errors = tmp_path / "saved", []
    barrier = threading.Barrier(4)

    def save(i):
        barrier.wait()
        for j in range(5):
            try:
                vn.save(path, {"x": np.full(3, 10 * i + j)}, overwrite=True)
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(isinstance(error, BlockingIOError) for error in errors)
    assert len({int(x) for x in vn.load(path, verify=True)["x"]}) == 1
    assert names_in(tmp_path) == ["saved"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no flock")
def test_a_killed_process_does_not_keep_its_lock(tmp_path):
    hidden = tmp_path / ".saved.partial"
    hidden.mkdir()
    program = (
        f"import fcntl; file = open({str(hidden / 'lock')!r}, 'w'); "
        "fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        with pytest.raises(BlockingIOError, match="another process or thread is saving"):
            vn.save(tmp_path / "saved", {"x": X})
        process.kill()
    vn.save(tmp_path / "saved", {"x": X})
    assert names_in(tmp_path) == ["saved"]


THEIRS = {
    "a file": (lambda path: path.write_text("mine"), "it"),
    "a folder": (lambda path: path.mkdir(), "it"),
    "a folder with a file": (lambda path: (path.mkdir(), (path / "a").write_text("mine")), "a"),
    "a file beside ours": (
        lambda path: (vn.save(path, X), (path / "notes.txt").write_text("mine")),
        "notes.txt",
    ),
    "a link": (lambda path: path.symlink_to(path.parent / "nowhere"), "it"),
}


@pytest.mark.parametrize(("make", "what"), THEIRS.values(), ids=THEIRS)
def test_files_of_others_are_not_overwritten(make, what, tmp_path):
    make(tmp_path / "out")
    before = sorted(file.name for file in tmp_path.rglob("*"))
    with pytest.raises(
        FileExistsError, match=f"out was not overwritten, because {what} was not saved"
    ):
        vn.save(tmp_path / "out", X, overwrite=True)
    assert sorted(file.name for file in tmp_path.rglob("*")) == before
