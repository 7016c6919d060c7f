"""`vn.save` and `vn.load` are exact, atomic, and readable without veneer."""

import functools
import json
import os
import weakref
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import arrays

import veneer as vn
from veneer.files.folder import FolderWriter, TensorFolder
from veneer.files.new_folder import write_aside
from veneer.files.tensor_file import DTYPES
from veneer.quant import Packing, QArray


class Point(vn.ImplicitArray):
    x: jax.Array

    def materialise(self):
        return self.x


def bits(array):
    return np.asarray(array).tobytes()


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape, bits(x)) == (y.dtype, y.shape, bits(y))


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def all_bit_patterns(dtype):
    """Return every 16-bit pattern, including NaN payloads, infinities and subnormals."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


EXOTIC_F32 = np.array([0x7F800001, 0xFFC12345, 0x00000001, 0x80000000, 0xFF800000], np.uint32)

ARRAYS = {
    "float16": all_bit_patterns(np.float16),
    "bfloat16": all_bit_patterns(ml_dtypes.bfloat16),
    "float32": EXOTIC_F32.view(np.float32),
    "float64": np.array([0x7FF0000000000001, 1, 2**63], np.uint64).view(np.float64),
    "int64": np.array([2**53 + 1, -(2**63)]),
    "uint8": np.arange(256, dtype=np.uint8).reshape(2, 128),
    "bool": np.array([[True], [False]]),
    "complex64": np.array([1 + 2j], np.complex64),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "transposed": normal(3, 5).T,
    "reversed": normal(3, 5)[::-1],
    "numpy_scalar": np.float32(1.5),
    "jax": arrays.array(np.arange(6.0).reshape(2, 3)),
    "jax_bfloat16": arrays.arange(4, dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_a_dense_array_comes_back_to_the_bit(tmp_path, array):
    vn.save(tmp_path / "out", {"x": array})
    assert_same(vn.load(tmp_path / "out"), {"x": array})


def test_another_byte_order_comes_back_as_the_same_numbers(tmp_path):
    vn.save(tmp_path / "out", np.arange(3, dtype=">f4"))
    assert vn.load(tmp_path / "out").tolist() == [0, 1, 2]


def test_leaves_are_jax_arrays_where_jax_holds_the_bits(tmp_path):
    vn.save(tmp_path / "out", [np.ones(2, np.float32), np.ones(2, np.float64)])
    narrow, wide = vn.load(tmp_path / "out")
    assert isinstance(narrow, jax.Array)
    assert isinstance(wide, np.ndarray)  # JAX would make it float32


W = normal(6, 8)

QARRAYS = arrays.OnDemand(
    {
        "int8": lambda: vn.quant.quantize(W, "int8", channelwise_axes=[0]),
        "int4": lambda: vn.quant.quantize(W, "int4", channelwise_axes=[0], tiled_axes={1: 4}),
        "nf4": lambda: vn.quant.quantize(W, "nf4", tiled_axes={0: 3, 1: 2}),
        "odd": lambda: vn.quant.quantize(W[:, :5], "int4", channelwise_axes=[1]),
        "bfloat16": lambda: vn.quant.quantize(
            jnp.asarray(W, jnp.bfloat16), "nf4", channelwise_axes=[0]
        ),
        "float32_scale": lambda: vn.quant.quantize(
            jnp.asarray(W, jnp.float16), "int8", scale_dtype=jnp.float32
        ),
        "nan_scale": lambda: vn.quant.quantize(W * np.array(np.nan, np.float32), "int8"),
        "zero_point": lambda: QArray(
            arrays.array(np.arange(-4, 4, dtype=jnp.int8).reshape(2, 4)),
            arrays.ones((2, 1)),
            arrays.array([[1], [2]], jnp.int8),
        ),
        "zero_points_of_4_bits": lambda: QArray(
            arrays.array(np.arange(16, dtype=jnp.uint4).reshape(2, 8)),
            arrays.ones((2, 4)),
            QArray(arrays.array(np.arange(8, dtype=jnp.uint4).reshape(2, 4)), arrays.ones((1, 1))),
        ),
        "packed_first_axis": lambda: QArray.from_packed(
            np.array([[0x1F, 0x28], [0x0A, 0x0B]], np.uint8),
            np.array([[1.0, 2.0]], np.float32),
            qtype="int4",
            packing=Packing(axis=-2, size=3),
        ),
        "unpacked": lambda: QArray.from_packed(
            np.array([[0x01, 0x0F]], np.uint8), np.ones((1, 2), np.float32), qtype="int4"
        ),
        "scalar": lambda: vn.quant.quantize(np.float32(-2.5), "nf4"),
        "empty": lambda: vn.quant.quantize(
            np.zeros((0, 4), np.float32), "int4", channelwise_axes=[0]
        ),
        "empty_nested": lambda: vn.quant.quantize(np.zeros((0, 32), np.float32), "nvfp4"),
        "powers_of_two": lambda: vn.quant.quantize(W, "int8", scale_dtype="float8_e8m0fnu"),
        "packed_first_axis_of_bit_planes": lambda: QArray.from_packed(
            *(np.arange(14, dtype=np.uint8).reshape(7, 2), np.ones((1, 2), np.float32)),
            qtype="int7",
            packing=Packing(axis=-2, size=5),
        ),
        "unpacked_ternary": lambda: QArray.from_packed(
            np.array([[0, 1, 2]], np.uint8), np.ones((1, 1), np.float32), qtype="ternary"
        ),
        "unpacked_bit_planes": lambda: QArray.from_packed(
            np.array([[0, 0x43, 0xFF]], np.uint8), np.ones((1, 1), np.float32), qtype="int7"
        ),
        "scales_of_4_bits": lambda: QArray(
            np.ones((4, 6), np.int8), vn.quant.quantize(np.abs(W[:4, :3]), "int4"), qtype="int8"
        ),
    }
)


@functools.cache
def qarray(name):
    """Return an array of `QARRAYS`, or one of any format: "every int4"."""
    if name in QARRAYS:
        return QARRAYS[name]
    qtype = name.removeprefix("every ")
    tile = vn.quant.get_format(qtype).tile_size or 64
    return vn.quant.quantize(normal(3, 64), qtype, channelwise_axes=[0], tiled_axes={1: tile})


NAMES = [*QARRAYS, *(f"every {qtype}" for qtype in vn.quant.FORMATS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_qarray_comes_back_to_the_bit(tmp_path, name):
    q = qarray(name)
    vn.save(tmp_path / "out", {"w": q})
    loaded = vn.load(tmp_path / "out")
    assert_same(loaded, {"w": q})
    assert bits(loaded["w"].dequantize()) == bits(q.dequantize())


def decode_without_veneer(folder, name):
    """Decode an array by the description in `veneer.json`, with NumPy."""
    layout = json.loads((folder / "veneer.json").read_text())
    stored = load_file(folder / "model.safetensors")
    entry = layout["tensors"][name]
    if entry["storage"] == "dense":
        return stored[entry["tensor"]]
    return decode_quantized(entry, stored, layout["formats"])


def decode_quantized(entry, stored, formats):
    format = formats[entry["format"]]
    code, bits, codebook = format["code"], format["bits"], format["codebook"]
    codes = decode_fields(stored[entry["packed"]], entry["packing"], format)
    if code.startswith("float8"):
        codes = codes.view(code).astype(np.float32)
    else:
        codes = codes.astype(np.int32)
    if code == "two's complement":
        codes = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    elif code == "field - 1":
        codes = codes - 1
    elif code == "2 * field - 1":
        codes = 2 * codes - 1
    values = codes if codebook is None else np.array(codebook, np.float32)[codes]

    def spread(tiles):
        for axis, size in enumerate(entry["shape"]):
            tiles = np.repeat(tiles, size // max(tiles.shape[axis], 1), axis)
        return tiles.astype(np.float32)

    if isinstance(entry["scale"], dict):
        scale = decode_quantized(entry["scale"], stored, formats)
    else:
        scale = stored[entry["scale"]]
    if entry["scale_dtype"] == "float8_e8m0fnu":
        scale = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
    elif entry["scale_dtype"] is not None:
        scale = scale.view(entry["scale_dtype"])
    if entry["zero_point"] is not None:
        zero_point = entry["zero_point"]
        packed = isinstance(zero_point, dict)
        of = decode_quantized(zero_point, stored, formats) if packed else stored[zero_point]
        values = values - spread(of)
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(entry["dtype"], entry["dtype"])
    return (values.astype(np.float32) * spread(scale)).astype(dtype)


def decode_fields(packed, packing, format):
    bits, bytes_, count = format["bits"], format["unit_bytes"], format["unit_fields"]
    if bits >= 8:
        return packed.view(f"u{bytes_}")
    if packing is None:
        return packed % 3 if bits == 1.6 else packed & (2**bits - 1)
    rows = np.moveaxis(packed, packing["axis"], -1)
    *leading, size = rows.shape
    units = rows.reshape(*leading, size // bytes_, bytes_)
    if format["unit_layout"] == "bits":
        fields = [(units[..., 0] >> (bits * i)) & (2**bits - 1) for i in range(count)]
    elif format["unit_layout"] == "base 3":
        fields = [units[..., 0] // 3**i % 3 for i in range(count)]
    else:
        assert format["unit_layout"] == "bit planes"
        fields = [sum((units[..., p] >> i & 1) << p for p in range(bytes_)) for i in range(count)]
    fields = np.stack(fields, -1).reshape(*leading, size // bytes_ * count)
    return np.moveaxis(fields[..., : packing["size"]], -1, packing["axis"])


@pytest.mark.parametrize("name", NAMES)
def test_the_json_is_enough_to_read_a_tensor_without_veneer(tmp_path, name):
    q = qarray(name)
    vn.save(tmp_path / "out", {"w": q, "bias": np.ones(3)})
    assert bits(decode_without_veneer(tmp_path / "out", "w")) == bits(q.dequantize())
    assert bits(decode_without_veneer(tmp_path / "out", "bias")) == bits(np.ones(3))


def test_the_json_has_the_layout_and_the_version(tmp_path):
    vn.save(tmp_path / "out", {"w": QARRAYS["nf4"]})
    layout = json.loads((tmp_path / "out" / "veneer.json").read_text())
    assert layout["layout_version"] == 4
    assert layout["how_to_read"]
    assert layout["tensors"]["w"]["tile_shape"] == [3, 2]
    assert layout["tensors"]["w"]["packing"] == {"axis": -1, "size": 8}


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("nf4", ["float32", "uint8"]),
        ("every int3", ["float32", "uint8"]),
        ("every mxfp8", ["uint8", "uint8"]),
        ("every nvfp4", ["float32", "uint8", "uint8"]),
    ],
)
def test_files_take_the_bytes_of_the_arrays(tmp_path, name, dtypes):
    vn.save(tmp_path / "out", qarray(name))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(array.nbytes for array in stored.values()) == qarray(name).nbytes
    assert sorted(str(array.dtype) for array in stored.values()) == dtypes


def write_version_1(folder, q):
    """Write the file format that veneer had when it only supported 4 and 8 bits."""
    vn.save(folder, {"w": q})
    content = json.loads((folder / "veneer.json").read_text())
    del content["tensors"]["w"]["scale_dtype"]
    described = vn.quant.get_format(q.qtype)
    row = {"bits": described.bits, "signed": described.signed, "codebook": described.codebook}
    changes = {"layout_version": 1, "formats": {q.qtype: row}, "how_to_read": ["otherwise"]}
    (folder / "veneer.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "zero_point", "packed_first_axis"])
def test_a_folder_of_layout_version_1_is_still_read(tmp_path, name):
    write_version_1(tmp_path / "old", QARRAYS[name])
    assert_same(vn.load(tmp_path / "old"), {"w": QARRAYS[name]})


# A file of version 1, to the byte.
VERSION_1 = """{
"layout_version": 1,
"how_to_read": ["..."],
"formats": {"int4": {"bits": 4, "signed": true, "codebook": null}},
"tensors": {
 "w": {"storage": "quantised", "format": "int4", "shape": [2, 3], "dtype": "float32", "packed":
 "w.packed", "packing": {"axis": -1, "size": 3}, "scale": "w.scale", "tile_shape": [1, 3],
 "zero_point": null}
},
"tree": {"dict": [["w", {"tensor": "w"}]]}
}"""


def test_the_values_of_a_file_of_layout_version_1(tmp_path):
    (tmp_path / "veneer.json").write_text(VERSION_1)
    packed = np.array([[0x21, 0x0F], [0x87, 0x03]], np.uint8)
    scale = np.array([[1.0], [0.5]], np.float32)
    save_file({"w.packed": packed, "w.scale": scale}, tmp_path / "model.safetensors")
    assert vn.load(tmp_path)["w"].dequantize().tolist() == [[1, 2, -1], [3.5, -4, 1.5]]


X = np.ones(2, np.float32)

TREES = arrays.OnDemand(
    {
        "leaf": lambda: X,
        "nothing": lambda: None,
        "empty": lambda: {"a": {}, "b": [], "c": (), "d": None},
        "nested": lambda: {"layers": [{"w": QARRAYS["int4"], "b": X}, (X, None, [X])]},
        "integer_keys": lambda: {0: X, 1: {10: X}},
        "integer_and_string_key": lambda: [{1: X}, {"1": X}],
        "dots_and_slashes": lambda: {
            "a.b": X,
            "a": {"b": 2 * X},
            "c/d": 3 * X,
            "": 4 * X,
            "ü\n": 5 * X,
        },
        "reserved": lambda: {"__metadata__": X},
        "names_of_parts": lambda: {
            "w": QARRAYS["int8"],
            "w.scale": X,
            "w.packed": 2 * X,
            "w.scale_": 3 * X,
        },
        "dynamic_activations": lambda: [
            vn.quant.ActivationQuantized(QARRAYS["int4"], qtype="int8", tile_size=tile)
            for tile in (None, 2, 0.5)
        ],
        "static_activations": lambda: {
            "w": vn.quant.ActivationQuantized(
                jnp.asarray(W),
                arrays.full((1, 1), 0.5),
                arrays.full((1, 1), 3, jnp.uint8),
                qtype="uint8",
                calibration_method="percentile,1,99",
                contracting=(-1, -2),
                op_names=("dot_general",),
            )
        },
        "names_of_nested_parts": lambda: {
            "w": qarray("every nvfp4"),
            "w.scale.packed": X,
            "w.scale": X,
        },
    }
)


@pytest.mark.parametrize("name", TREES)
def test_the_structure_comes_back(tmp_path, name):
    tree = TREES[name]
    vn.save(tmp_path / "out", tree)
    assert_same(vn.load(tmp_path / "out"), tree)


def test_dict_order_comes_back(tmp_path):
    vn.save(tmp_path / "out", {"b": X, "a": X})
    assert list(vn.load(tmp_path / "out")) == ["b", "a"]


REFUSED = {
    "tuple_key": ({(1, 2): X}, r"tree has the key \(1, 2\)"),
    "int4": ([arrays.ones(2, jnp.int4)], r"tree\[0\] has dtype int4.*QArray"),
    "float4": ([np.ones(2, ml_dtypes.float4_e2m1fn)], r"tree\[0\] has dtype float4_e2m1fn"),
    "object": ([np.array([None])], r"tree\[0\] has dtype object"),
    "masked": ([np.ma.masked_array([1.0], [True])], r"tree\[0\] is a numpy.ma"),
    "no_array": ({"x": object()}, r"tree\['x'\] is a builtins.object: .*register its class"),
    "infinite": ([float("inf")], r"tree\[0\] is a builtins.float.*numpy.asarray"),
    "abstract": (
        jax.eval_shape(lambda: arrays.quantized("int8", 6, 8)),
        r"tree\['packed'\] is a jax",
    ),
}


@pytest.mark.parametrize(("tree", "message"), REFUSED.values(), ids=REFUSED)
def test_values_that_cannot_be_restored_raise_before_writing(tmp_path, tree, message):
    with pytest.raises(TypeError, match=message):
        vn.save(tmp_path / "out", tree)
    assert not list(tmp_path.iterdir())


def test_a_traced_array_is_refused(tmp_path):
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: vn.save(tmp_path / "out", [x]))(X)


@pytest.mark.parametrize("existing", ["file", "folder", "dangling_link"])
def test_save_never_replaces_what_exists(tmp_path, existing):
    path = tmp_path / "out"
    {
        "file": lambda: path.write_text("mine"),
        "folder": path.mkdir,
        "dangling_link": lambda: path.symlink_to(tmp_path / "nowhere"),
    }[existing]()
    with pytest.raises(FileExistsError, match="already exists"):
        vn.save(path, {"x": X})
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_save_removes_its_temporary_files(tmp_path, error):
    def fail(folder):
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(error), write_aside(tmp_path / "out") as folder:
        fail(folder)
    assert not list(tmp_path.iterdir())


ASIDE = {
    "no permission": lambda folder: os.open(folder / "file", os.O_RDONLY),  # raises
    "a full disk": lambda folder: (_ for _ in ()).throw(OSError(f"{folder}/file: I/O error")),
}


@pytest.mark.parametrize("fail", ASIDE.values(), ids=ASIDE)
def test_an_error_names_the_path_that_was_asked_for(tmp_path, fail):
    with (
        pytest.raises(OSError, match=f"{tmp_path}/out.* cannot be written: ") as error,
        write_aside(tmp_path / "out") as folder,
    ):
        fail(folder)
    assert "partial" not in str(error.value)


def test_no_permission_names_the_path_that_was_asked_for(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", lambda self, **_: None if _ else forbidden(self))
    with pytest.raises(PermissionError) as error:
        vn.save(tmp_path / "out", [X])
    assert str(error.value) == f"{tmp_path / 'out'} cannot be written: Permission denied"


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    def meanwhile(folder):
        (folder / "theirs").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(OSError, match="out"), write_aside(tmp_path / "out") as folder:
        meanwhile(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
    assert (tmp_path / "out" / "theirs").read_text() == "theirs"


def test_saved_files_have_the_modes_that_the_umask_gives(tmp_path):
    before = os.umask(0o022)
    try:
        vn.save(tmp_path / "out", [X])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def test_shards_have_the_given_size_and_an_index(tmp_path):
    tensors = {f"x{i}": normal(4, 8, seed=i) for i in range(5)}  # 128 bytes each
    with write_aside(tmp_path / "out") as folder:
        writer = FolderWriter(folder, tensors, shard_bytes=300)
        for name, array in tensors.items():
            writer.add(name, array)
        writer.finish()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == files
    assert index["metadata"]["total_size"] == 5 * 128
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert_same(vn.load(tmp_path / "out"), tensors)


# Files of other libraries.

MODEL = {"encoder.weight": normal(4, 8), "encoder.bias": normal(4), "ids": np.arange(3)}


def write_sharded(folder):
    folder.mkdir()
    names = sorted(MODEL)
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(names)}
    for name, file in weight_map.items():
        save_file({name: MODEL[name]}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_single(folder):
    folder.mkdir()
    save_file(MODEL, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same, pickled")
    return folder


def write_shards_without_index(folder):
    folder.mkdir()
    for i, name in enumerate(MODEL):
        save_file({name: MODEL[name]}, folder / f"model-{i + 1:05}-of-00003.safetensors")
    return folder


SOURCES = {
    "file": lambda folder: write_single(folder) / "model.safetensors",
    "folder": write_single,
    "sharded_folder": write_sharded,
    "shards_without_index": write_shards_without_index,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_an_ordinary_model_loads_as_a_flat_dict(tmp_path, source):
    loaded = vn.load(source(tmp_path / "model"))
    assert_same(loaded, MODEL)


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def saved(folder):
    vn.save(folder, {"w": QARRAYS["nf4"], "b": X})
    return folder


def edit_entry(folder, name, **changes):
    tensors = json.loads((folder / "veneer.json").read_text())["tensors"]
    tensors[name] |= changes
    edit_json(folder / "veneer.json", tensors=tensors)


def nested(opening, closing, levels):
    return json.loads(opening * levels + "0" + closing * levels)


DAMAGES = {
    "truncated": lambda f: damage(f / "model.safetensors", lambda data: data[:-5]),
    "truncated_header": lambda f: damage(f / "model.safetensors", lambda data: data[:20]),
    "emptied": lambda f: damage(f / "model.safetensors", lambda data: b""),
    "alien": lambda f: damage(f / "model.safetensors", lambda data: b"GGUF" * 100),
    "json_truncated": lambda f: damage(f / "veneer.json", lambda data: data[:100]),
    "json_binary": lambda f: damage(f / "veneer.json", lambda data: b"\xff\xfe"),
    "json_alien": lambda f: damage(f / "veneer.json", lambda data: b"[1, 2]"),
    "newer": lambda f: edit_json(f / "veneer.json", layout_version=5),
    "version_text": lambda f: edit_json(f / "veneer.json", layout_version="1"),
    "no_tensors": lambda f: edit_json(f / "veneer.json", tensors=None),
    "tensor_gone": lambda f: edit_entry(f, "b", tensor="c"),
    "storage": lambda f: edit_entry(f, "b", storage="sparse"),
    "extra_key": lambda f: edit_entry(f, "b", rotated=True),
    "dtype": lambda f: edit_entry(f, "b", dtype="int32"),
    "no_dtype": lambda f: edit_entry(f, "b", dtype="float31"),
    "shape": lambda f: edit_entry(f, "w", shape=[8, 6]),
    "shape_number": lambda f: edit_entry(f, "b", shape=2),
    "format": lambda f: edit_entry(f, "w", format="nf3"),
    "packing": lambda f: edit_entry(f, "w", packing={"axis": -1, "size": 80}),
    "packing_keys": lambda f: edit_entry(f, "w", packing={"axis": -1}),
    "packing_list": lambda f: edit_entry(f, "w", packing=[-1, 8]),
    "scale": lambda f: edit_entry(f, "w", scale="b"),
    "scale_number": lambda f: edit_entry(f, "w", scale=1),
    "scale_entry": lambda f: edit_entry(f, "w", scale={"format": "int8"}),
    "scale_dtype": lambda f: edit_entry(f, "w", scale_dtype="float9"),
    "scale_bytes": lambda f: edit_entry(f, "w", scale_dtype="float8_e8m0fnu"),
    "tree": lambda f: edit_json(f / "veneer.json", tree={"tensor": "gone"}),
    "tree_kind": lambda f: edit_json(f / "veneer.json", tree={"set": []}),
    "tree_list": lambda f: edit_json(f / "veneer.json", tree=["w"]),
    "deep": lambda f: (f / "veneer.json").write_text("[" * 200_000 + "]" * 200_000),
    "deep_tree": lambda f: edit_json(f / "veneer.json", tree=nested('{"list": [', "]}", 400)),
    "deep_scale": lambda f: edit_entry(f, "w", scale=nested('{"scale": ', "}", 900)),
}


@pytest.mark.parametrize("damages", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line_that_names_it(tmp_path, damages):
    folder = saved(tmp_path / "out")
    damages(folder)
    with pytest.raises(ValueError, match=str(folder)) as error:
        vn.load(folder)
    assert "\n" not in str(error.value)


def test_a_tree_comes_back_from_as_many_levels_as_are_taken(tmp_path):
    tree = X
    for level in range(100):
        tree = {"k": tree} if level % 2 else [tree]
    vn.save(tmp_path / "out", tree)
    assert_same(vn.load(tmp_path / "out", verify=True), tree)
    with pytest.raises(ValueError, match=r"more than 100 levels, at tree\[0\]\['k'\]\[0\]"):
        vn.save(tmp_path / "deeper", [tree])
    assert not (tmp_path / "deeper").exists()


# Checksums.


def test_no_flipped_bit_is_loaded_when_verified(tmp_path):
    tree = {"w": qarray("every nvfp4"), "b": [X]}
    folder = tmp_path / "out"
    vn.save(folder, tree)
    assert_same(vn.load(folder, verify=True), tree)
    for file in folder.iterdir():
        data = file.read_bytes()
        for i in range(0, len(data), max(1, len(data) // 400)):
            flipped = bytearray(data)
            flipped[i] ^= 1 << i % 8
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=str(folder)) as error:
                vn.load(folder, verify=True)
            assert "\n" not in str(error.value)
        file.write_bytes(data)


def test_a_flipped_bit_raises_with_the_tensor_name(tmp_path):
    vn.save(tmp_path / "out", {"w": X})
    damage(tmp_path / "out" / "model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    vn.load(tmp_path / "out")
    with pytest.raises(ValueError, match=r"out: tensor 'w' is damaged: the checksum of 'w' is"):
        vn.load(tmp_path / "out", verify=True)


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_a_checksum_is_of_the_bytes_in_the_file(tmp_path, array):
    vn.save(tmp_path / "out", {"x": array, "swapped": np.arange(3, dtype=">f4")})
    layout = json.loads((tmp_path / "out" / "veneer.json").read_text())
    for name, stored in load_file(tmp_path / "out" / "model.safetensors").items():
        assert layout["checksums"][name] == f"{zlib.crc32(stored.tobytes()):08x}"
    assert_same(vn.load(tmp_path / "out", verify=True), vn.load(tmp_path / "out"))


def without_checksums(folder):
    content = json.loads((folder / "veneer.json").read_text())
    del content["checksum"], content["checksums"]
    (folder / "veneer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("spoil", [without_checksums, lambda f: (f / "veneer.json").unlink()])
def test_a_file_without_checksums_loads_and_is_not_verified(tmp_path, spoil):
    vn.save(tmp_path / "out", {"w": X})
    spoil(tmp_path / "out")
    assert_same(vn.load(tmp_path / "out"), {"w": vn.load(tmp_path / "out")["w"]})
    with pytest.raises(ValueError, match=r"out.* has no checksums to verify"):
        vn.load(tmp_path / "out", verify=True)


def test_a_newer_layout_says_so(tmp_path):
    folder = saved(tmp_path / "out")
    DAMAGES["newer"](folder)
    with pytest.raises(ValueError, match=r"layout version 5.*up to 4.*update veneer"):
        vn.load(folder)


def several(folder):
    save_file(MODEL, folder / "a.safetensors")
    save_file(MODEL, folder / "b.safetensors")


def index_of(weight_map):
    def write(folder):
        save_file(MODEL, folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))

    return write


def write_tensors(path, headers, data=b""):
    header = json.dumps(headers).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def shards(*numbers):
    def write(folder):
        for i in numbers:
            save_file({"x": normal(2)}, folder / f"m-{i:05}-of-00003.safetensors")

    return write


def in_a_folder(folder):
    (folder / "unet").mkdir()
    save_file(MODEL, folder / "unet" / "model.safetensors")


def narrow(dtype, shape, nbytes):
    def write(folder):
        stored = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}
        write_tensors(folder / "model.safetensors", stored, bytes(nbytes))

    return write


IN_A = dict.fromkeys(MODEL, "a.safetensors")

NOT_MODELS = {
    "empty_folder": (lambda f: None, FileNotFoundError, "no safetensors"),
    "pickled": (lambda f: (f / "pytorch_model.bin").touch(), ValueError, "convert it to safetens"),
    "several": (several, ValueError, "a.safetensors, b.safetensors"),
    "index_alien": (index_of([1]), ValueError, "no 'weight_map'"),
    "index_outside": (index_of({"weight_map": {"x": "../a"}}), ValueError, "'../a' is not the na"),
    "shard_gone": (index_of({"weight_map": {"x": "b"}}), FileNotFoundError, "b does not exist"),
    "unindexed": (
        index_of({"weight_map": {"ids": "a.safetensors"}}),
        ValueError,
        "disagree about tensor 'encoder.bias'",
    ),
    "absent_from_shard": (
        index_of({"weight_map": IN_A | {"x": "a.safetensors"}}),
        ValueError,
        "disagree about tensor 'x'",
    ),
    "shard_of_no_index_gone": (
        shards(1, 3),
        ValueError,
        "an index is missing: give one of m-00001",
    ),
    "twice": (
        shards(1, 2, 3),
        ValueError,
        "tensor 'x' is in .*m-00002-of-00003.* and in another shard",
    ),
    "in_a_folder": (in_a_folder, FileNotFoundError, "no safetensors file: give one .* unet"),
    "pointer": (
        lambda f: (f / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        ValueError,
        "a.safetensors is a Git LFS pointer",
    ),
    "float4_unpaired": (narrow("F4", [2, 3], 3), ValueError, "'x' of F4.* needs an even last axis"),
    "float4_short": (narrow("F4", [2, 4], 3), ValueError, "'x' of F4.* takes 4 bytes"),
    "float6": (narrow("F6_E2M3", [4], 3), ValueError, "'x' is F6_E2M3, .* store it as F8_E4M3"),
    "unknown": (narrow("F3", [8], 3), ValueError, "'x' has dtype F3; supported are"),
}


def with_header(header):
    """Return a file with this text as its header, and one number."""
    text = header.replace("T", '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}').encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4)
    return lambda folder: (folder / "a.safetensors").write_bytes(content)


def with_index(folder):
    write_sharded(folder / "m")
    index = folder / "m" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    pairs = [*weight_map.items(), ("ids", "model-9.safetensors")]
    text = ", ".join(f"{json.dumps(name)}: {json.dumps(file)}" for name, file in pairs)
    index.write_text(f'{{"weight_map": {{{text}}}}}')
    [file.rename(folder / file.name) for file in list((folder / "m").iterdir())]
    (folder / "m").rmdir()


NOT_MODELS |= {
    "key_twice": (with_header('{"a": T, "a": T}'), ValueError, "the key 'a' occurs twice"),
    "field_twice": (
        with_header('{"a": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 4]}}'),
        ValueError,
        "the key 'dtype' occurs twice",
    ),
    "index_twice": (with_index, ValueError, "index.json is not JSON.*'ids' occurs twice"),
    "half_a_surrogate": (
        with_header(r'{"a\ud800": T}'),
        ValueError,
        r"the key 'a\\ud800' is not valid Unicode text",
    ),
    "dtype_in_lines": (
        with_header(r'{"a": {"dtype": "F\n3", "shape": [1], "data_offsets": [0, 4]}}'),
        ValueError,
        "'a' has dtype F 3; supported are",
    ),
    "dtype_list": (
        with_header('{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}'),
        ValueError,
        "supported are",
    ),
}


@pytest.mark.parametrize(("write", "error", "message"), NOT_MODELS.values(), ids=NOT_MODELS)
def test_a_folder_that_is_no_model_is_refused(tmp_path, write, error, message):
    write(tmp_path)
    with pytest.raises(error, match=message) as raised:
        vn.load(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        vn.load(tmp_path / "nowhere")


def test_a_pickled_file_is_not_opened(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"anything")
    with pytest.raises(ValueError, match="pickled"):
        vn.load(tmp_path / "model.pt")


def test_every_dtype_of_the_table_can_be_read_and_written(tmp_path):
    tree = {name: np.zeros(2, np.dtype(name)) for name in DTYPES.values()}
    vn.save(tmp_path / "out", tree)
    assert_same(vn.load(tmp_path / "out"), tree)


@pytest.mark.parametrize("name", [k for k in DTYPES if k.startswith("F8")])
def test_a_file_of_8_bit_floats_is_dense_to_the_bit(tmp_path, name):
    stored = {"x": {"dtype": name, "shape": [2, 128], "data_offsets": [0, 256]}}
    write_tensors(tmp_path / "model.safetensors", stored, bytes(range(256)))
    x = vn.load(tmp_path / "model.safetensors")["x"]
    assert isinstance(x, jax.Array)
    assert (x.dtype.name, x.shape, bits(x)) == (DTYPES[name], (2, 128), bytes(range(256)))


def test_a_file_of_4_bit_floats_is_packed_to_the_bit(tmp_path):
    data = np.arange(256, dtype=np.uint8)
    stored = {"x": {"dtype": "F4", "shape": [4, 128], "data_offsets": [0, 256]}}
    write_tensors(tmp_path / "model.safetensors", stored, data.tobytes())
    x = vn.load(tmp_path / "model.safetensors")["x"]
    pairs = np.stack([data & 15, data >> 4], -1).reshape(4, 128)
    dense = pairs.view(jnp.float4_e2m1fn).astype(np.float32)
    assert x.nbytes == 256 + 4
    assert bits(vn.materialise(x)) == bits(dense)


HEADERS = {
    "offsets_swapped": [("shape", [4], [16, 0])],
    "too_few_bytes": [("x", [4], [0, 12])],
    "beyond_the_file": [("x", [2**40], [0, 2**42])],
    "more_than_the_file": [("x", [2], [0, 8])],
    "overlapping": [("x", [4], [0, 16]), ("y", [2], [8, 16])],
    "with_a_hole": [("x", [2], [8, 16])],
    "negative": [("x", [-4], [0, -16])],
    "not_whole": [("x", [4.0], [0, 16])],
    "huge": [("x", [2**61, 2**61, 0], [0, 0]), ("y", [4], [0, 16])],
    "product_wraps": [("x", [2**32, 2**32], [0, 0]), ("y", [4], [0, 16])],
}


@pytest.mark.parametrize("tensors", HEADERS.values(), ids=HEADERS)
def test_a_header_that_says_other_than_the_file_holds_is_refused(tmp_path, tensors):
    stored = {n: {"dtype": "F32", "shape": s, "data_offsets": o} for n, s, o in tensors}
    path = tmp_path / "model.safetensors"
    write_tensors(path, stored, bytes(16))
    with pytest.raises(ValueError, match=str(path)) as error:
        vn.load(path)
    assert "\n" not in str(error.value)


def test_reading_one_tensor_reads_no_other(tmp_path, monkeypatch):
    with TensorFolder(saved(tmp_path / "out")) as folder:
        read = []
        monkeypatch.setattr(folder, "_read_stored", lambda name: read.append(name) or X)
        folder.read("b")
    assert read == ["b"]


@pytest.mark.parametrize("shardings", [None, jax.devices()[0]])
def test_loaded_file_contents_are_released(tmp_path, monkeypatch, shardings):
    """JAX may keep some contents until one of its threads has run, but not a whole model."""
    save_file({f"t{i:02}": normal(512, 513) for i in range(20)}, tmp_path / "m.safetensors")
    seen, held = [], []

    def read(folder, name):
        held.append(sum(memory() is not None for memory in seen))
        array = stored(folder, name)
        seen.append(weakref.ref(array.base))
        return array

    stored = TensorFolder.read
    monkeypatch.setattr(TensorFolder, "read", read)
    assert len(vn.load(tmp_path / "m.safetensors", shardings=shardings)) == 20
    assert max(held) < 10


@pytest.mark.parametrize("qtype", ["nf4", "nf4_dq", "float8_e4m3fn"])
def test_packed_tensors_without_veneer_json_are_refused(tmp_path, qtype):
    w = vn.quant.quantize(jnp.ones((64, 128)), qtype, tiled_axes={0: 64})
    vn.save(tmp_path / "w", {"w": w, "b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"w\.packed.*Load the folder, which has a veneer.json"):
        vn.load(tmp_path / "w" / "model.safetensors")
    (tmp_path / "w" / "veneer.json").unlink()
    for path in (tmp_path / "w", tmp_path / "w" / "model.safetensors"):
        with pytest.raises(
            ValueError, match=r"w\.packed.*Restore the veneer.json that vn.save wrote"
        ):
            vn.load(path)
    raw = vn.load(tmp_path / "w", raw=True)
    assert raw["w.packed"].nbytes == w.packed.nbytes


def test_dense_tensors_without_veneer_json_are_loaded(tmp_path):
    parts = {"packed": jnp.zeros(2), "scale": jnp.ones(1)}
    vn.save(tmp_path / "w", {**parts, "w": parts})
    (tmp_path / "w" / "veneer.json").unlink()
    assert sorted(vn.load(tmp_path / "w")) == ["packed", "scale", "w.packed", "w.scale"]
