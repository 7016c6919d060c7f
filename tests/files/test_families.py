"""Checkpoints of each family are loaded packed, with dense names, and exactly as by NumPy."""

import inspect
import json
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import quantized_folders as folders

import veneer as vn
from veneer.quant import QArray
from veneer.types import Permuted

GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}
GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
E4M3 = ml_dtypes.float8_e4m3fn


def ct(bits=4, group_size=32, **others):
    weights = {"num_bits": bits, "group_size": group_size, **others}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


def bnb(**others):
    return {"quant_method": "bitsandbytes", **others}


CASES = {
    **{f"gptq_{bits}": (partial(folders.gptq, bits=bits), GPTQ) for bits in (2, 3, 4, 8)},
    **{
        f"gptq_{bits}_symmetric": (partial(folders.gptq, bits=bits, sym=True), GPTQ | {"sym": True})
        for bits in (2, 3, 4, 8)
    },
    "gptq_v2": (partial(folders.gptq, plus_one=False), GPTQ_V2),
    "gptq_one_group": (partial(folders.gptq, groups=1, tile=96), GPTQ),
    **{
        f"gptq_{bits}_desc_act": (partial(folders.gptq, bits=bits, order="desc_act"), GPTQ)
        for bits in (2, 3, 4, 8)
    },
    "awq": (folders.awq, AWQ),
    "awq_symmetric": (partial(folders.awq, sym=True, groups=5), AWQ),
    **{
        f"pack_quantized_{bits}": (partial(folders.pack_quantized, bits=bits), ct(bits))
        for bits in range(2, 9)
    },
    **{
        f"pack_quantized_{bits}_whole": (
            partial(folders.pack_quantized, bits=bits, whole=True),
            ct(bits),
        )
        for bits in (3, 5, 6, 7)
    },
    "pack_quantized_symmetric": (partial(folders.pack_quantized, sym=True), ct()),
    "pack_quantized_odd": (partial(folders.pack_quantized, out=5, size=39, tile=13), ct(4, 13)),
    "pack_quantized_last_group_small": (partial(folders.pack_quantized, size=80), ct()),
    "pack_quantized_desc_act": (partial(folders.pack_quantized, desc_act=True), ct()),
    "int_quantized": (
        partial(folders.scaled_bytes, dtype=np.int8, tile=(1, 40), scale=(24, 1)),
        ct(8, None, strategy="channel"),
    ),
    "int_quantized_groups": (partial(folders.scaled_bytes, dtype=np.int8, tile=(1, 8)), ct(8, 8)),
    "float_quantized": (
        partial(folders.scaled_bytes, dtype=E4M3, tile=(24, 40), scale=(1,)),
        ct(8, None, strategy="tensor"),
    ),
    "float_quantized_rows": (
        partial(folders.scaled_bytes, dtype=E4M3, tile=(1, 40)),
        ct(8, -1),
    ),
    "float_quantized_blocks": (
        partial(folders.scaled_bytes, dtype=E4M3, tile=(16, 16)),
        ct(8, None, strategy="block", block_structure=[16, 16]),
    ),
    "nvfp4": (folders.nvfp4, ct(4, 16)),
    **{
        f"mxfp{bits}_packed": (partial(folders.microscaling, bits=bits), ct(bits))
        for bits in (4, 6, 8)
    },
    "fp8": (
        partial(
            folders.scaled_bytes,
            dtype=E4M3,
            shape=(48, 64),
            tile=(16, 16),
            name="m.weight_scale_inv",
        ),
        FP8,
    ),
    "fp8_last_block_small": (
        partial(folders.scaled_bytes, dtype=E4M3, tile=(16, 16), name="m.weight_scale_inv"),
        FP8,
    ),
    "fp8_last_block_odd": (
        partial(
            folders.scaled_bytes,
            dtype=ml_dtypes.float8_e5m2,
            shape=(19, 33),
            tile=(16, 16),
            name="m.weight_scale_inv",
        ),
        FP8,
    ),
    "fp8_of_deepseek_itself": (
        partial(folders.scaled_bytes, dtype=E4M3, tile=(16, 16), name="m.scale"),
        FP8,
    ),
    "fp8_whole": (
        partial(folders.scaled_bytes, dtype=E4M3, tile=(24, 40), scale=()),
        {"quant_method": "fp8"},
    ),
    **{
        f"bitsandbytes_{kind}{'_nested' * nested}": (
            partial(folders.bitsandbytes, kind=kind, nested=nested),
            bnb(),
        )
        for kind in ("nf4", "fp4")
        for nested in (False, True)
    },
    "bitsandbytes_odd": (partial(folders.bitsandbytes, shape=(5, 33)), bnb()),
    "bitsandbytes_rows_share": (partial(folders.bitsandbytes, shape=(12, 16), nested=True), bnb()),
    "bitsandbytes_int8": (folders.int8_rows, bnb()),
    "mxfp4": (folders.mxfp4_experts, {"quant_method": "mxfp4"}),
}
MLX_CASES = {
    **{
        f"mlx_{bits}": (partial(folders.mlx, bits=bits), {"bits": bits, "group_size": 64})
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "mlx_layer": (
        partial(folders.mlx, bits=6, tile=32),
        {"bits": 4, "group_size": 64, "m": {"bits": 6, "group_size": 32}},
    ),
    "mlx_mxfp4": (
        partial(folders.mlx_float, mode="mxfp4"),
        {"mode": "mxfp4", "bits": 4, "group_size": 32},
    ),
    "mlx_nvfp4": (
        partial(folders.mlx_float, mode="nvfp4"),
        {"mode": "nvfp4", "bits": 4, "group_size": 16},
    ),
}
TORCHAO_CASES = {
    "torchao_int4": {"kind": "Int4Tensor", "bits": 4},
    "torchao_int8": {"kind": "Int8Tensor"},
    "torchao_int8_zero": {"kind": "Int8Tensor", "zero": True},
    "torchao_float8": {"kind": "Float8Tensor"},
    **{
        f"torchao_intx_{bits}": {"kind": "IntxUnpackedToInt8Tensor", "bits": bits, "zero": True}
        for bits in (2, 3, 5, 8)
    },
}
CONFIGS = {
    **{name: (make, {"quantization_config": stated}) for name, (make, stated) in CASES.items()},
    **{name: (make, {"quantization": stated}) for name, (make, stated) in MLX_CASES.items()},
    **{
        name: (
            partial(folders.torchao, **case),
            {"metadata": folders.torchao_metadata(case["kind"], case.get("bits", 8))},
        )
        for name, case in TORCHAO_CASES.items()
    },
}
BY_NAME = ["gptq_4", "awq", "pack_quantized_4", "fp8", "bitsandbytes_nf4", "mxfp4", "mlx_4"]


def rng():
    return np.random.default_rng(0)


def f32(w):
    """Return the dense values of an array before they are rounded to the dense dtype."""
    if isinstance(w, Permuted):
        return np.asarray(vn.materialise(Permuted(f32(w.array), w.order, w.axis)))
    return np.asarray(w.replace(dense_dtype="float32").dequantize())


@pytest.mark.parametrize(("make", "config"), CONFIGS.values(), ids=CONFIGS)
def test_a_weight_is_one_packed_array_of_the_dense_shape(tmp_path, make, config):
    tensors, value = make(rng())
    tensors["other.weight"] = np.ones((2, 3), np.float16)
    loaded = vn.load(folders.write(tmp_path / "model", tensors, torch_dtype="bfloat16", **config))
    assert set(loaded) == {"m.weight", "other.weight"} | ({"m.bias"} & set(tensors))
    w = loaded["m.weight"]
    assert isinstance(w, vn.ImplicitArray)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(w))
    assert (w.shape, w.dtype) == (value.shape, jnp.bfloat16)
    np.testing.assert_array_equal(f32(w), value.astype(np.float32))
    assert loaded["other.weight"].dtype == jnp.float16


@pytest.mark.parametrize(("make", "config"), CONFIGS.values(), ids=CONFIGS)
def test_a_program_for_the_dense_checkpoint_runs(tmp_path, make, config):
    tensors, value = make(rng())
    loaded = vn.load(folders.write(tmp_path / "model", tensors, torch_dtype="float32", **config))
    w = loaded["m.weight"]
    w = w.replace(dense_dtype="float32") if isinstance(w, QArray) else w
    x = jax.random.normal(jax.random.key(0), (3, w.shape[-1]))
    program = jax.jit(vn.implicit(lambda w, x: x @ jnp.swapaxes(w, -1, -2)))
    y, dense = program(w, x), x @ jnp.swapaxes(jnp.asarray(value, jnp.float32), -1, -2)
    np.testing.assert_allclose(y, dense, rtol=1e-4, atol=1e-4 * np.abs(dense).max())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_family_is_known_by_the_names_of_its_tensors(tmp_path, name):
    make = CONFIGS[name][0]
    tensors, value = make(rng())
    if name == "fp8":  # blocks are 128 by 128 by default
        tensors, value = folders.scaled_bytes(
            rng(), dtype=E4M3, shape=(136, 130), tile=(128, 128), name="m.weight_scale_inv"
        )
    folder = folders.write(tmp_path / "model", tensors)
    (folder / "config.json").unlink()
    w = vn.load(folder / "model.safetensors")["m.weight"]
    np.testing.assert_array_equal(f32(w), value.astype(np.float32))


def test_dense_tensors_are_loaded_unchanged(tmp_path):
    tensors, _ = folders.gptq(rng())
    dense = {"head.weight": np.ones((4, 2), E4M3), "ids": np.arange(3, dtype=np.int32)}
    loaded = vn.load(folders.write(tmp_path / "model", tensors | dense, quantization_config=GPTQ))
    for name, value in dense.items():
        assert isinstance(loaded[name], jax.Array)
        assert (loaded[name].dtype, loaded[name].tolist()) == (value.dtype, value.tolist())


def test_raw_loads_the_stored_tensors(tmp_path):
    tensors, _ = folders.gptq(rng())
    loaded = vn.load(folders.write(tmp_path / "m", tensors, quantization_config=GPTQ), raw=True)
    assert set(loaded) == set(tensors)
    np.testing.assert_array_equal(loaded["m.qweight"], tensors["m.qweight"])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("plus_one", [True, False])
def test_zero_points_of_a_symmetric_folder_win_over_its_label(tmp_path, bits, plus_one):
    tensors, value = folders.gptq(rng(), bits=bits, sym=True, plus_one=plus_one)
    wrong = GPTQ_V2 if plus_one else GPTQ
    path = folders.write(tmp_path / "model", tensors, quantization_config=wrong | {"sym": True})
    with pytest.warns(UserWarning, match=r"'checkpoint_format'.* it is loaded as version [12]"):
        w = vn.load(path)["m.weight"]
    assert w.zero_point is None
    np.testing.assert_array_equal(f32(w), value.astype(np.float32))


def without(name):
    return lambda tensors: tensors.pop(name)


def cut(name, *shape):
    return lambda tensors: tensors.update({name: tensors[name][tuple(map(slice, shape))]})


REFUSED = {
    "scales_gone": (without("m.scales"), r"'m.scales' is missing"),
    "zeros_short": (cut("m.qzeros", 2, 4), r"'m.qzeros' is int32\[2, 4\], but 'm.scales' requires"),
    "groups_alien": (
        lambda tensors: tensors.update({"m.g_idx": tensors["m.g_idx"] + 1}),
        r"'m.g_idx' names groups that are not in 0 to 2",
    ),
    "twice": (
        lambda tensors: tensors.update({"m.weight": np.ones((32, 96), np.float16)}),
        r"'m.weight' is stored twice",
    ),
    "of_no_family": (
        lambda tensors: tensors.update({"n.weight_packed": np.ones((2, 2), np.int32)}),
        r"'n.weight_packed' \(int32\[2, 2\]\) looks like a part of a packed.*raw=True",
    ),
    "of_no_module": (
        lambda tensors: tensors.update({"qweight": np.ones((2, 2), np.int32)}),
        r"'qweight' \(int32\[2, 2\]\) looks like a part of a packed.*raw=True",
    ),
    "codes_of_no_module": (
        lambda tensors: tensors.update({"weight": np.ones((2, 2), np.uint8)}),
        r"'weight' \(uint8\[2, 2\]\) looks like a part of a packed",
    ),
    "codes_as_weight": (
        lambda tensors: tensors.update({"n.weight": np.ones((2, 2), np.int8)}),
        r"'n.weight' \(int8\[2, 2\]\) looks like a part of a packed",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_do_not_fit_raise_with_their_names(tmp_path, change, message):
    tensors, _ = folders.gptq(rng())
    change(tensors)
    path = folders.write(tmp_path / "model", tensors, quantization_config=GPTQ)
    with pytest.raises(ValueError, match=message) as error:
        vn.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_float_of_8_bits_without_its_scale_is_refused(tmp_path):
    tensors, _ = CASES["fp8"][0](rng())
    tensors["n.weight"] = np.ones((2, 3), E4M3)
    path = folders.write(tmp_path / "m", tensors, quantization_config=FP8)
    message = r"'n.weight' \(float8_e4m3fn\[2, 3\]\) has no scale .*raw=True"
    with pytest.raises(ValueError, match=message):
        vn.load(path)


def test_a_method_that_is_not_known_is_refused(tmp_path):
    stated = {"quant_method": "quark"}
    path = folders.write(tmp_path / "m", {"w": np.ones(2, np.int8)}, quantization_config=stated)
    with pytest.raises(ValueError, match=r"is quantized with quark, .*gptq, awq.*raw=True"):
        vn.load(path)
    assert vn.load(path, raw=True)["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "stated", [GPTQ | {"checkpoint_format": "marlin"}, AWQ | {"version": "gemv"}]
)
def test_a_layout_that_is_for_one_kind_of_device_is_refused(tmp_path, stated):
    make = folders.gptq if stated["quant_method"] == "gptq" else folders.awq
    path = folders.write(tmp_path / "model", make(rng())[0], quantization_config=stated)
    with pytest.raises(ValueError, match=r"'(marlin|gemv)'.* supported.*raw=True"):
        vn.load(path)


def test_bits_that_the_configuration_leaves_open_are_not_guessed(tmp_path):
    """A word holds four codes, of 7 bits or of 8."""
    tensors, _ = folders.pack_quantized(rng(), bits=7, whole=True)
    groups = ct(7)["config_groups"] | {"group_1": ct(8)["config_groups"]["group_0"]}
    path = folders.write(
        tmp_path / "m", tensors, quantization_config=ct() | {"config_groups": groups}
    )
    with pytest.raises(
        ValueError, match=r"'m.weight_packed' has shape .* does not fit codes of \[12, 96\]"
    ):
        vn.load(path)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("whole", [True, False])
def test_the_version_determines_an_ambiguous_layout(tmp_path, bits, whole):
    make = partial(folders.pack_quantized, bits=bits, size=16, out=16, tile=16, whole=whole)
    tensors, value = make(rng())
    stated = ct(bits, 16) | {"version": "0.17.1" if whole else "0.18.0"}
    path = folders.write(tmp_path / "said", tensors, quantization_config=stated)
    np.testing.assert_array_equal(f32(vn.load(path)["m.weight"]), value.astype(np.float32))
    if len({make(rng(), whole=x)[0]["m.weight_packed"].shape for x in (True, False)}) == 1:
        path = folders.write(tmp_path / "unsaid", tensors, quantization_config=ct(bits, 16))
        with pytest.raises(
            ValueError, match=r"'m.weight_packed' has shape .* does not fit codes of \[16, 16\]"
        ):
            vn.load(path)


def test_small_floats_with_zero_points_are_refused(tmp_path):
    tensors, _ = folders.nvfp4(rng())
    tensors["m.weight_zero_point"] = tensors["m.weight_scale"]
    path = folders.write(tmp_path / "model", tensors, quantization_config=ct())
    with pytest.raises(ValueError, match=r"'m.weight_zero_point' must not exist: small floats"):
        vn.load(path)


def test_tensors_go_to_their_devices_one_at_a_time(tmp_path, monkeypatch):
    """Rules place the dense tensors. No device with a part ever holds a whole tensor."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    on = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    tensors, value = folders.gptq(rng(), order="desc_act")
    path = folders.write(tmp_path / "model", tensors, quantization_config=GPTQ)
    rules = [(r".*weight", on("model", None)), (r".*", on())]
    loaded = vn.load(path, shardings=rules)
    w = loaded["m.weight"]
    assert w.array.packed.sharding.spec == w.array.scale.sharding.spec == on("model", None).spec
    assert loaded["m.bias"].sharding == on()
    np.testing.assert_array_equal(f32(w), value.astype(np.float32))
    one = vn.load(path, shardings=on())
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(one))
    with pytest.raises(ValueError, match=r"m\.bias has shape \(32,\), and"):
        vn.load(path, shardings=on("model", None))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("mode", "bits", "tile"),
    [
        *(("affine", bits, tile) for bits in (2, 3, 4, 5, 6, 8) for tile in (32, 128)),
        *(("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)),
    ],
)
def test_a_file_of_mlx_is_worth_what_mlx_says(tmp_path, mode, bits, tile, dtype):
    import mlx.core as mx

    w = mx.array(rng().normal(size=(5, 256)).astype(np.float32)).astype(getattr(mx, dtype))
    parts = mx.quantize(w, group_size=tile, bits=bits, mode=mode)
    # In f32, where MLX rounds nothing in between.
    wide = [x.astype(mx.float32) if mode == "affine" else x for x in parts[1:]]
    value = mx.dequantize(parts[0], *wide, group_size=tile, bits=bits, mode=mode)
    (tmp_path / "model").mkdir()
    names = ("m.weight", "m.scales", "m.biases")[: len(parts)]
    file = str(tmp_path / "model" / "model.safetensors")
    mx.save_safetensors(file, dict(zip(names, parts, strict=True)), metadata={"format": "mlx"})
    stated = {"group_size": tile, "bits": bits, "mode": mode}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"quantization": stated}))
    read = vn.load(tmp_path / "model")["m.weight"]
    assert read.nbytes <= 1.02 * sum(x.nbytes for x in parts)
    np.testing.assert_array_equal(f32(read), np.array(value.astype(mx.float32)))


def test_a_configuration_of_before_config_json_had_it_counts(tmp_path):
    tensors, value = folders.gptq(rng(), plus_one=False)
    path = folders.write(tmp_path / "model", tensors)
    (path / "quantize_config.json").write_text(json.dumps({"checkpoint_format": "gptq_v2"}))
    np.testing.assert_array_equal(f32(vn.load(path)["m.weight"]), value.astype(np.float32))


def test_invalid_json_raises_only_for_packed_weights(tmp_path):
    path = folders.write(tmp_path / "model", {"w": np.ones(2, np.float32)})
    (path / "config.json").write_text("{")
    assert vn.load(path)["w"].tolist() == [1, 1]
    folders.write(path, folders.gptq(rng())[0])
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        vn.load(path)


@pytest.mark.parametrize("name", ["gptq_4_desc_act", "bitsandbytes_nf4_nested", "mlx_5", "mxfp4"])
def test_a_loaded_checkpoint_can_be_saved_and_loaded(tmp_path, name):
    make, config = CONFIGS[name]
    tree = vn.load(folders.write(tmp_path / "model", make(rng())[0], **config))
    vn.save(tmp_path / "saved", tree)
    again = vn.load(tmp_path / "saved")
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    np.testing.assert_array_equal(f32(again["m.weight"]), f32(tree["m.weight"]))


def test_shards_of_a_folder_hold_the_parts_of_one_weight(tmp_path):
    tensors, value = folders.gptq(rng())
    tmp_path.joinpath("model").mkdir()
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in weight_map.items():
        folders.write(tmp_path / "one", {name: tensors[name]}, quantization_config=GPTQ)
        (tmp_path / "one" / "model.safetensors").rename(tmp_path / "model" / file)
    (tmp_path / "one" / "config.json").rename(tmp_path / "model" / "config.json")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    w = vn.load(tmp_path / "model")["m.weight"]
    np.testing.assert_array_equal(f32(w), value.astype(np.float32))


def test_memory_holds_the_result_and_one_tensor(tmp_path):
    tensors = {}
    for i in range(8):
        parts, _ = folders.gptq(rng(), bits=3, out=512, groups=8, tile=64, order="desc_act")
        tensors |= {name.replace("m.", f"m{i}."): x for name, x in parts.items()}
    path = folders.write(tmp_path / "model", tensors, quantization_config=GPTQ)
    vn.load(path)  # imports and compilation do not count
    tracemalloc.start()
    try:
        loaded = vn.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    dense = loaded["m0.weight"].size  # one byte per code while they are sorted
    assert peak < sum(x.nbytes for x in loaded.values()) + 8 * dense + 2**21


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("name", ["gptq_4", "gptq_3_desc_act", "mlx_4", "fp8", "bitsandbytes_nf4"])
def test_each_device_has_its_part_of_a_packed_weight(tmp_path, name):
    make, config = CONFIGS[name]
    shape = {"shape": (48, 128)} if "out" not in inspect.signature(make).parameters else {}
    tensors, value = make(rng(), **shape) if name != "fp8" else make(rng(), shape=(128, 64))
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model", None))
    path = folders.write(tmp_path / "model", tensors, torch_dtype="float32", **config)
    w = vn.load(path, shardings=[(r"m\.weight", rows)])["m.weight"]
    stored = w.array if isinstance(w, Permuted) else w
    packed = stored.packed
    assert {s.data.shape[0] for s in packed.addressable_shards} == {packed.shape[0] // 8}
    np.testing.assert_array_equal(f32(w), value.astype(np.float32))
    x = jax.random.normal(jax.random.key(0), (3, w.shape[-1]))
    w = w.replace(dense_dtype="float32") if isinstance(w, QArray) else w
    y = jax.jit(vn.implicit(lambda w, x: x @ w.T))(w, x)
    dense = x @ value.T.astype(np.float32)
    np.testing.assert_allclose(y, dense, rtol=1e-4, atol=1e-4 * np.abs(dense).max())
