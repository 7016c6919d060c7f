"""Weights are written in the formats of other libraries exactly, or rejected."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import quantized_folders as folders

import veneer as vn
from veneer.types import Permuted

from .test_families import CONFIGS, f32

GPTQ = [name for name in CONFIGS if name.startswith("gptq")]
OF_FORMAT = {
    "gptq": [*GPTQ, "awq", "awq_symmetric", "pack_quantized_4", "pack_quantized_desc_act"],
    "awq": ["awq", "awq_symmetric", "gptq_4", "gptq_4_symmetric"],
    "compressed-tensors": [
        *(name for name in CONFIGS if name.startswith(("pack_", "int_", "float_"))),
        *("nvfp4", "mxfp4_packed", "mxfp6_packed", "mxfp8_packed", "awq", "gptq_3_desc_act"),
    ],
    "mlx": [*(name for name in CONFIGS if name.startswith("mlx")), "gptq_8_symmetric"],
}
PAIRS = [(format, name) for format, names in OF_FORMAT.items() for name in names]
# Twelve outputs do not fill a word.
PAIRS = [pair for pair in PAIRS if pair not in {("gptq", "pack_quantized_4")}]
PAIRS = [pair for pair in PAIRS if pair != ("gptq", "pack_quantized_desc_act")]


def load(path, name):
    make, config = CONFIGS[name]
    tensors, _ = make(np.random.default_rng(0))
    tensors["head.weight"] = np.ones((3, 2), np.float16)
    return vn.load(folders.write(path, tensors, torch_dtype="bfloat16", **config))


def assert_same(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("format", "name"), PAIRS)
def test_written_folders_are_loaded_exactly(tmp_path, format, name):
    tree = load(tmp_path / "in", name)
    vn.save(tmp_path / "out", tree, format=format, config={"torch_dtype": "bfloat16", "layers": 3})
    assert not (tmp_path / "out" / "veneer.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layers"] == 3
    again = vn.load(tmp_path / "out")
    assert again.keys() == tree.keys()
    assert_same(again["head.weight"], tree["head.weight"])
    x, y = again["m.weight"], tree["m.weight"]
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    np.testing.assert_array_equal(f32(x), f32(y))
    if format in ("gptq", "awq") and name.startswith(format):
        assert_same(x, y)


@pytest.mark.parametrize("format", OF_FORMAT)
def test_layers_can_have_different_formats(tmp_path, format):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(32, 128)), jnp.float16)
    tile = lambda qtype, n: vn.quant.quantize(w, qtype, channelwise_axes=[0], tiled_axes={1: n})
    tree = {"a": {"weight": tile("int4", 32)}, "layers": [{"weight": tile("int4", 32)}] * 3}
    if format != "awq":
        tree["b"] = {"weight": tile("int8", 64)}
    vn.save(tmp_path / "out", tree, format=format)
    again = vn.load(tmp_path / "out")
    assert set(again) == {"a.weight", *(f"layers.{i}.weight" for i in range(3))} | (
        {"b.weight"} if format != "awq" else set()
    )
    for name, x in again.items():
        y = tree["b" if name.startswith("b") else "a"]["weight"]
        assert x.dtype == jnp.float16
        np.testing.assert_array_equal(f32(x), f32(y))


def quantized(qtype, shape=(32, 64), **others):
    w = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    return vn.quant.quantize(w, qtype, **others)


ROWS = {"channelwise_axes": [0]}
REFUSED = {
    "gptq_float": (
        "gptq",
        "a.weight",
        lambda: quantized("nf4", **ROWS),
        "its codes are nf4, not integers",
    ),
    "gptq_5_bits": ("gptq", "a.weight", lambda: quantized("int5", **ROWS), "it has 5 bits"),
    "gptq_words": (
        "gptq",
        "a.weight",
        lambda: quantized("int4", (33, 64), **ROWS),
        r"\[33, 64\] do not fill",
    ),
    "gptq_name": (
        "gptq",
        "a.kernel",
        lambda: quantized("int4", **ROWS),
        "'a.kernel': names of quantized",
    ),
    "awq_8_bits": ("awq", "a.weight", lambda: quantized("int8", **ROWS), "it has 8 bits, not 4"),
    "ct_stack": (
        "compressed-tensors",
        "a.weight",
        lambda: quantized("int4", (2, 4, 8), **ROWS),
        r"its shape is \[2, 4, 8\], but it must be a matrix",
    ),
    "ct_codebook": (
        "compressed-tensors",
        "a.weight",
        lambda: quantized("nf4", **ROWS),
        "its codes are nf4",
    ),
    "mlx_groups": (
        "mlx",
        "a.weight",
        lambda: quantized("int4", (4, 48), **ROWS),
        "in groups of 48",
    ),
    "type": (
        "mlx",
        "a.weight",
        lambda: vn.types.Diagonal(jnp.ones(4)),
        "is a Diagonal, not a QArray",
    ),
    "dense": (
        "mlx",
        "a.weight",
        lambda: jnp.ones((4, 4)),
        "needs a quantized tensor, but all are dense",
    ),
    "format": (
        "onnx",
        "a.weight",
        lambda: jnp.ones((4, 4)),
        "format must be one of gptq, awq, .* and gguf",
    ),
}


@pytest.mark.parametrize(("format", "name", "make", "message"), REFUSED.values(), ids=REFUSED)
def test_weights_that_a_format_cannot_hold_raise(tmp_path, format, name, make, message):
    with pytest.raises(ValueError, match=message) as error:
        vn.save(tmp_path / "out", {name: make()}, format=format)
    assert name in str(error.value) or message.startswith(("format must", "needs a"))
    assert not list(tmp_path.iterdir())


def test_a_name_that_safetensors_has_taken_is_refused(tmp_path):
    tree = {"m.weight": quantized("int4", **ROWS), "__metadata__": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match="with the name '__metadata__'"):
        vn.save(tmp_path / "out", tree, format="gptq")
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_is_no_json_is_refused(tmp_path):
    tree = {"m.weight": quantized("int4", **ROWS)}
    with pytest.raises(TypeError, match=r"config cannot be written as JSON: .*float32"):
        vn.save(tmp_path / "out", tree, format="gptq", config={"a": np.float32(1)})
    assert not list(tmp_path.iterdir())


def test_zero_points_of_0_are_written_in_the_second_version(tmp_path):
    zero = np.zeros((32, 1), np.uint8)
    codes = np.random.default_rng(0).integers(0, 16, (32, 64), np.uint8)
    w = vn.quant.QArray(codes, np.ones((32, 1), np.float16), zero, qtype="uint4")
    vn.save(tmp_path / "out", {"m.weight": w}, format="gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    np.testing.assert_array_equal(f32(vn.load(tmp_path / "out")["m.weight"]), codes)


def test_permuted_columns_are_written_as_g_idx(tmp_path):
    order = np.random.default_rng(0).permutation(64).astype(np.int32)[None]
    inner = quantized("int4", channelwise_axes=[0], tiled_axes={1: 16}, scale_dtype="float16")
    w = Permuted(inner, order)
    vn.save(tmp_path / "out", {"m.weight": w}, format="gptq")
    again = vn.load(tmp_path / "out")["m.weight"]
    assert isinstance(again, Permuted)
    np.testing.assert_array_equal(f32(again), f32(w))


@pytest.mark.parametrize("name", [n for n in OF_FORMAT["mlx"] if n.startswith("mlx")])
def test_mlx_reads_our_folders(tmp_path, name):
    import mlx.core as mx

    w = load(tmp_path / "in", name)["m.weight"]
    vn.save(tmp_path / "out", {"m.weight": w}, format="mlx")
    stored = mx.load(str(tmp_path / "out" / "model.safetensors"))
    parts = [
        stored[f"m.{part}"] for part in ("weight", "scales", "biases") if f"m.{part}" in stored
    ]
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    if said["mode"] == "affine":
        parts[1:] = [x.astype(mx.float32) for x in parts[1:]]
    value = mx.dequantize(*parts, **said)
    np.testing.assert_array_equal(f32(w), np.array(value.astype(mx.float32)))


def _tree(value):
    w = jnp.full((8, 64), value, jnp.float32)
    tiles = {"channelwise_axes": [0], "tiled_axes": {1: 32}}
    return {"m.weight": vn.quant.quantize(w, "int4", scale_dtype="float16", **tiles)}


@pytest.mark.parametrize("format", ["gptq", "gguf"])
def test_overwrite_replaces_only_our_folders(tmp_path, format):
    path, other = tmp_path / "out", tmp_path / "other"
    vn.save(path, _tree(1), format=format)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        vn.save(path, _tree(2), format=format)
    vn.save(path, _tree(2), format=format, overwrite=True)
    np.testing.assert_array_equal(f32(vn.load(path)["m.weight"]), f32(_tree(2)["m.weight"]))
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    other.mkdir()
    (other / "mine.txt").write_text("")
    with pytest.raises(FileExistsError, match="was not overwritten"):
        vn.save(other, _tree(1), format=format, overwrite=True)


@pytest.mark.parametrize("added", ["notes.txt", "config.json.bak", "sub/config.json"])
def test_a_folder_with_something_of_the_users_is_not_replaced(tmp_path, added):
    path = tmp_path / "out"
    vn.save(path, _tree(1), format="gptq")
    (path / added).parent.mkdir(exist_ok=True)
    (path / added).write_text("mine")
    with pytest.raises(FileExistsError, match=f"because {added.split('/')[0]} was not saved"):
        vn.save(path, _tree(1), format="gptq", overwrite=True)
    assert (path / added).read_text() == "mine"


def test_a_folder_that_another_library_wrote_is_not_replaced(tmp_path):
    tensors = {"m.weight": np.ones(3, np.float32)}
    path = folders.write(tmp_path / "theirs", tensors, torch_dtype="bfloat16")
    with pytest.raises(FileExistsError, match="was not saved by veneer"):
        vn.save(path, _tree(1), format="gptq", overwrite=True)
    assert (path / "model.safetensors").exists()
