"""Checkpoints with groups of any size are loaded exactly, by the configured size."""

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import quantized_folders as folders
from support.stored_values import stored_values

import veneer as vn
from veneer.files.checkpoint import open_checkpoint
from veneer.types import Permuted

E4M3 = ml_dtypes.float8_e4m3fn


def values_of(weight):
    """Return the f32 values of a weight by NumPy, which compiles nothing."""
    if isinstance(weight, Permuted):
        value = np.empty(weight.shape, np.float32)
        value[:, np.asarray(weight.order).reshape(-1)] = values_of(weight.array)
        return value
    return stored_values(weight.replace(dense_dtype="float32"))


def read(path, name="m.weight"):
    with open_checkpoint(path) as checkpoint:
        return checkpoint.read(name)


def write(path, tensors, stated):
    return folders.write(path, tensors, torch_dtype="float32", quantization_config=stated)


def ct_config(*groups, **others):
    """Return a configuration of compressed-tensors from targets and arguments of groups."""
    listed = {
        f"group_{i}": {"targets": targets, "weights": weights}
        for i, (targets, weights) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": listed, **others}


def in_groups(bits, tile):
    return {"num_bits": bits, "strategy": "group", "group_size": tile}


# Functions that return a random weight: its tensors, its values and its configuration.


def random_size(rng):
    """Return a number of values along an axis, and a group size that need not divide it."""
    tile = int(rng.integers(2, 150))
    return int(rng.integers(1, 4 * tile)), tile


def random_gptq(rng):
    size, tile = random_size(rng)
    bits = int(rng.choice([2, 3, 4, 8]))
    order = [None, "sorted", "desc_act"][rng.integers(3)]
    shape = {"size": -(-size // 32) * 32, "tile": tile, "out": 32}
    stated = {"quant_method": "gptq", "bits": bits, "group_size": tile, "sym": False}
    return *folders.gptq(rng, bits=bits, order=order, **shape), stated


def random_awq(rng):
    size, tile = random_size(rng)
    stated = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": tile}
    return *folders.awq(rng, out=8, size=size, tile=tile), stated


def random_pack_quantized(rng):
    size, tile = random_size(rng)
    bits, out = int(rng.integers(2, 9)), int(rng.integers(1, 12))
    options = {"sym": rng.random() < 0.5, "whole": rng.random() < 0.5}
    stated = ct_config((["Linear"], in_groups(bits, tile)))
    stated["version"] = "0.17.1" if options["whole"] else "0.18.0"
    return *folders.pack_quantized(rng, bits=bits, out=out, size=size, tile=tile, **options), stated


def random_bytes(rng):
    size, tile = random_size(rng)
    dtype = [np.int8, E4M3][rng.integers(2)]
    made = folders.scaled_bytes(rng, dtype=dtype, shape=(5, size), tile=(1, tile))
    return *made, ct_config((["Linear"], in_groups(8, tile)))


def random_blocks(rng):
    (rows, tall), (columns, wide) = random_size(rng), random_size(rng)
    block, shape = (tall, wide), (rows, columns)
    if rng.random() < 0.5:
        stated = {"quant_method": "fp8", "weight_block_size": block}
        name = "m.weight_scale_inv"
    else:
        weights = {"num_bits": 8, "strategy": "block", "block_structure": block}
        stated, name = ct_config((["Linear"], weights)), "m.weight_scale"
    return *folders.scaled_bytes(rng, dtype=E4M3, shape=shape, tile=block, name=name), stated


def random_bitsandbytes(rng):
    tile = int(2 ** rng.integers(5, 9))
    storage = [np.uint8, ml_dtypes.bfloat16, np.float16, np.float32][rng.integers(4)]
    shape = (8 * int(rng.integers(1, 9)), int(rng.integers(1, 99)))
    options = {"nested": rng.random() < 0.5, "storage": storage}
    made = folders.bitsandbytes(rng, shape=shape, tile=tile, **options)
    return *made, {"quant_method": "bitsandbytes"}


FAMILIES = {
    "gptq": random_gptq,
    "awq": random_awq,
    "pack_quantized": random_pack_quantized,
    "bytes": random_bytes,
    "blocks": random_blocks,
    "bitsandbytes": random_bitsandbytes,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_group_sizes_are_read_exactly(tmp_path, family, mutations):
    rng = np.random.default_rng(0)
    for _ in range(mutations // 4):
        tensors, value, stated = FAMILIES[family](rng)
        weight = read(write(tmp_path / "model", tensors, stated))
        assert weight.shape == value.shape
        np.testing.assert_array_equal(values_of(weight), value.astype(np.float32), str(stated))


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_random_group_sizes_are_written_and_read_again(tmp_path, format, mutations):
    rng = np.random.default_rng(1)
    make = {"gptq": random_gptq, "awq": random_awq, "compressed-tensors": random_pack_quantized}
    for i in range(mutations // 50):
        tensors, value, stated = make[format](rng)
        weight = read(write(tmp_path / "model", tensors, stated))
        vn.save(tmp_path / f"{i}", {"m.weight": weight}, format=format)
        np.testing.assert_array_equal(values_of(read(tmp_path / f"{i}")), value.astype(np.float32))


@pytest.mark.parametrize("tile", [80, 96, 100, 112, 120])
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "int4"])
def test_a_tile_of_80_to_120_is_saved_and_loaded(tmp_path, qtype, tile):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2 * tile)), jnp.float32)
    weight = vn.quant.quantize(w, qtype, channelwise_axes=[0], tiled_axes={1: tile})
    vn.save(tmp_path / "out", {"m.weight": weight}, format="compressed-tensors")
    again = read(tmp_path / "out")
    assert again.tile_shape == weight.tile_shape
    np.testing.assert_array_equal(values_of(again), values_of(weight))


def three_layers(make):
    """Return tensors and values of layers `a.q`, `a.k` and `b`, in groups of 64, 96 and 128."""
    rng, tensors, values = np.random.default_rng(0), {}, {}
    for name, tile in (("a.q", 64), ("a.k", 96), ("b", 128)):
        parts, values[name] = make(rng, tile)
        tensors |= {key.replace("m.", f"{name}.", 1): x for key, x in parts.items()}
    return tensors, values


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("targets", ["names", "patterns", "mixed"])
def test_each_weight_has_the_group_size_of_its_config_group(tmp_path, bits, targets):
    """With 192 columns, two groups of 96 and two groups of 128 have the same shapes."""
    named = {
        "names": (["a.q"], ["a.k"], ["b"]),
        "patterns": (["re:.*q$"], ["re:a[.]k"], ["re:b"]),
        "mixed": (["re:a.*", "a.q"], ["a.k"], ["Linear"]),
    }[targets]

    def make(rng, tile):
        if bits == 4:
            return folders.pack_quantized(rng, size=192, tile=tile)
        return folders.scaled_bytes(rng, dtype=np.int8, shape=(4, 192), tile=(1, tile))

    tensors, values = three_layers(make)
    if targets == "mixed":  # a module that only a class can target may belong to any group
        tensors = {key: x for key, x in tensors.items() if not key.startswith("b.")}
    groups = [(of, in_groups(bits, n)) for of, n in zip(named, (64, 96, 128), strict=True)]
    path = write(tmp_path / "model", tensors, ct_config(*groups))
    for name in ("a.q", "a.k", "b")[: 2 if targets == "mixed" else 3]:
        weight = read(path, f"{name}.weight")
        np.testing.assert_array_equal(values_of(weight), values[name].astype(np.float32))


def test_a_block_size_comes_from_the_config_group(tmp_path):
    blocks = {"a.q": [64, 64], "a.k": [96, 96], "b": [128, 128]}

    def make(rng, tile):
        return folders.scaled_bytes(rng, dtype=E4M3, shape=(192, 192), tile=(tile, tile))

    tensors, values = three_layers(make)
    stated = [
        ([name], {"num_bits": 8, "strategy": "block", "block_structure": block})
        for name, block in blocks.items()
    ]
    path = write(tmp_path / "model", tensors, ct_config(*stated))
    for name in blocks:
        weight = read(path, f"{name}.weight")
        np.testing.assert_array_equal(values_of(weight), values[name].astype(np.float32))


def test_gptq_layers_have_the_group_size_of_the_first_override(tmp_path):
    make = lambda rng, tile: folders.gptq(rng, size=192, tile=tile, order=None)
    tensors, values = three_layers(make)
    dynamic = {
        "-:c": {},
        "+:^a[.]q": {"group_size": 64},
        r"a\.": {"group_size": 96},
        "+:.*": {"bits": 4},
    }
    stated = {"quant_method": "gptq", "group_size": 128, "sym": False, "dynamic": dynamic}
    path = write(tmp_path / "model", tensors, stated)
    for name, value in values.items():
        weight = read(path, f"{name}.weight")
        np.testing.assert_array_equal(values_of(weight), value.astype(np.float32))


def test_a_layer_that_two_config_groups_fit_is_rejected(tmp_path):
    tensors, _ = folders.pack_quantized(np.random.default_rng(0), size=192, tile=96)
    groups = [(["Linear"], in_groups(4, 96)), (["Embedding"], in_groups(4, 128))]
    path = write(tmp_path / "model", tensors, ct_config(*groups))
    with pytest.raises(ValueError, match=r"2 groups for 192 .* states groups of 128 or groups of"):
        read(path)
    tensors, _ = folders.scaled_bytes(
        np.random.default_rng(0), dtype=np.int8, shape=(4, 192), tile=(1, 96)
    )
    groups = [(["Linear"], in_groups(8, 96)), (["Embedding"], in_groups(8, 128))]
    path = write(tmp_path / "model", tensors, ct_config(*groups))
    with pytest.raises(ValueError, match=r"\[4, 2\] fits in several ways \[4, 192\] in blocks of"):
        read(path)


GROUPS_OF_96 = {
    "gptq": (lambda rng: folders.gptq(rng, size=192, tile=96, order=None), "quant_method"),
    "awq": (lambda rng: folders.awq(rng, size=192, tile=96), "quant_method"),
    "pack": (lambda rng: folders.pack_quantized(rng, size=192, tile=96), "compressed-tensors"),
    "bytes": (
        lambda rng: folders.scaled_bytes(rng, dtype=np.int8, shape=(4, 192), tile=(1, 96)),
        "compressed-tensors",
    ),
}


def stated_size(family, size):
    if GROUPS_OF_96[family][1] == "compressed-tensors":
        weights = {"num_bits": 8 if family == "bytes" else 4, "group_size": size}
        return ct_config((["Linear"], weights))
    return {"quant_method": family, "group_size": size}


@pytest.mark.parametrize("family", GROUPS_OF_96)
@pytest.mark.parametrize("size", [32, 64, 192, 200, -1])
def test_a_weight_that_does_not_fit_the_stated_size_is_rejected(tmp_path, family, size):
    tensors, _ = GROUPS_OF_96[family][0](np.random.default_rng(0))
    path = write(tmp_path / "model", tensors, stated_size(family, size))
    message = r"scale[s]?'.*(groups? of|one group|in blocks of).*correct the .*quantization_config"
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("family", GROUPS_OF_96)
@pytest.mark.parametrize("size", [None, 0, -2, 1.5, "96", True, [96]])
def test_a_size_is_not_guessed_where_none_is_stated(tmp_path, family, size):
    tensors, _ = GROUPS_OF_96[family][0](np.random.default_rng(0))
    path = write(tmp_path / "model", tensors, stated_size(family, size))
    message = r"not state the group size|unspecified size|'group_size' of its configuration is"
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_pattern_that_is_no_regular_expression_is_rejected(tmp_path):
    tensors, _ = folders.pack_quantized(np.random.default_rng(0))
    path = write(tmp_path / "model", tensors, ct_config((["re:(["], in_groups(4, 32))))
    with pytest.raises(ValueError, match=re.escape("'([' of its configuration is not a regular")):
        read(path)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [ml_dtypes.bfloat16, np.float16, np.float32, np.int8])
def test_codes_of_bitsandbytes_are_read_from_any_storage(tmp_path, kind, storage):
    tensors, value = folders.bitsandbytes(np.random.default_rng(0), kind=kind, storage=storage)
    path = write(tmp_path / "model", tensors, {"quant_method": "bitsandbytes"})
    weight = vn.load(path)["m.weight"]
    assert weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(values_of(weight), value.astype(np.float32))
    short = tensors | {"m.weight": tensors["m.weight"][:-1]}
    path = write(tmp_path / "short", short, {"quant_method": "bitsandbytes"})
    with pytest.raises(ValueError, match=r"'m.weight' is .* requires"):
        vn.load(path)


def test_a_group_size_of_torchao_is_the_stated_one(tmp_path):
    rng = np.random.default_rng(0)
    tensors, _ = folders.torchao(rng, kind="Int4Tensor", bits=4, shape=(6, 192), tile=96)
    metadata = folders.torchao_metadata("Int4Tensor", 4, tile=128)
    path = folders.write(tmp_path / "model", tensors, metadata=metadata)
    with pytest.raises(ValueError, match=r"groups of 128, which do not divide 192 inputs"):
        read(path)
    said = json.loads(metadata["m.weight"])
    said["_data"]["block_size"] = [1, 64]
    path = folders.write(tmp_path / "other", tensors, metadata={"m.weight": json.dumps(said)})
    with pytest.raises(ValueError, match=r"2 groups for 192 inputs"):
        read(path)
