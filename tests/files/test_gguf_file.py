"""The contents of GGUF files, in one part or several."""

import jax
import numpy as np
import pytest
from support.gguf_files import DENSE, METADATA, assert_same_tensor, blocks_of, read_all

import veneer as vn
from veneer.files.gguf import GgufFile, write_gguf
from veneer.files.gguf_blocks import BLOCK_TYPES


def same(a, b):
    if isinstance(a, list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_metadata_of_every_type_survives_a_round_trip(path):
    write_gguf(path, {}, METADATA)
    with GgufFile(path) as file:
        assert file.metadata.keys() == METADATA.keys()
        assert [k for k, v in METADATA.items() if not same(v, file.metadata[k])] == []
        assert len(file) == 0


def test_the_gguf_package_reads_our_metadata(path):
    import gguf

    flat = {k: v for k, v in METADATA.items() if k not in ("arrays", "no UTF-8")}
    write_gguf(path, {}, flat)
    fields = gguf.GGUFReader(path).fields
    for key, value in flat.items():
        content = fields[key].contents()
        assert content == (value.tolist() if isinstance(value, np.ndarray) else value), key
        name = key.split()[0].upper()
        if name in gguf.GGUFValueType.__members__:
            assert fields[key].types == [gguf.GGUFValueType[name]]


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_read_one_by_one_with_names_and_types(path, version):
    tensors = {"q": blocks_of("Q4_K", 3, 512), **DENSE, "scalar": np.array(2.5, np.float32)}
    write_gguf(path, tensors, {"general.alignment": 64})
    content = bytearray(path.read_bytes())
    content[4] = version
    path.write_bytes(content)
    with GgufFile(path) as file:
        assert list(file) == list(tensors)
        assert len(file) == 10
        assert "q" in file
        assert "p" not in file
        assert file.types()["q"] == "Q4_K"
        assert file.types()["bfloat16"] == "BF16"
        assert file.shapes()["q"] == (3, 512)
        for name, value in tensors.items():
            assert_same_tensor(file.read(name), value)
        assert type(file.read("float32")) is np.ndarray
        with pytest.raises(KeyError):
            file.read("p")


def test_loaded_tensors_outlive_the_file(path):
    write_gguf(path, {"w": np.ones((2, 2), np.float32), "q": blocks_of("Q8_0", 1, 32)})
    tensors = read_all(path)
    path.write_bytes(b"")
    assert tensors["w"].tolist() == [[1, 1], [1, 1]]
    assert np.isfinite(vn.materialise(tensors["q"])).all()


def test_the_gguf_package_reads_our_tensors(path):
    import gguf

    quantized = {row.name: blocks_of(row.name, 2, 3, 512) for row in BLOCK_TYPES.values()}
    write_gguf(path, quantized | DENSE, {"general.architecture": "llama"})
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == [*quantized, *DENSE]
    for tensor in reader.tensors:
        if tensor.name in quantized:
            assert tensor.tensor_type.name == tensor.name
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            expected = vn.materialise(quantized[tensor.name])
            np.testing.assert_array_equal(values.reshape(expected.shape), expected)
        elif tensor.name == "bfloat16":
            assert tensor.data.tobytes() == DENSE["bfloat16"].tobytes()
        else:
            np.testing.assert_array_equal(tensor.data, DENSE[tensor.name])


def test_files_of_the_gguf_package_can_be_loaded(path):
    import gguf

    x = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_uint32("llama.block_count", 7)
    writer.add_array("tokens", ["a", "b"])
    types = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "BF16")
    expected = {}
    for name in types:
        type = gguf.GGMLQuantizationType[name]
        data = gguf.quants.quantize(x, type)
        writer.add_tensor(name, data, raw_dtype=type)
        expected[name] = gguf.quants.dequantize(data, type)
    writer.add_tensor("F32", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        assert file.metadata["general.alignment"] == 128
        assert file.metadata["tokens"] == ["a", "b"]
        for name, values in (expected | {"F32": x}).items():
            got = np.asarray(vn.materialise(file.read(name))).astype(np.float32)
            np.testing.assert_array_equal(got, values)


def test_dense_avals_lists_dense_tensors(path):
    write_gguf(path, {"q": blocks_of("Q8_0", 2, 32), "w": np.ones((2, 3), np.float16)})
    with GgufFile(path) as file:
        assert file.dense_avals() == {"w": jax.ShapeDtypeStruct((2, 3), np.float16)}


def split(tmp_path, tensors, *, parts=None, stated=None):
    """Write each tensor into a separate part."""
    count = len(tensors)
    for i, (name, value) in enumerate(tensors.items()):
        path = tmp_path / f"m-{i + 1:05}-of-{count:05}.gguf"
        # `write_gguf` leaves out the entries of parts, so these have names of the same length.
        metadata = {"split_no": np.uint16((parts or range(count))[i]), "number": i}
        metadata |= {"split_count": np.uint16(count), "split_tensors.count": stated or count}
        write_gguf(path, {name: value}, metadata)
        path.write_bytes(path.read_bytes().replace(b"split_", b"split."))
    return tmp_path / f"m-00001-of-{count:05}.gguf"


PARTS = {f"t{i}": np.full((2, 2), i, np.float32) for i in range(3)}


def test_a_file_in_parts_is_read_by_the_name_of_any(tmp_path):
    first = split(tmp_path, PARTS)
    for path in (first, tmp_path / "m-00003-of-00003.gguf"):
        with GgufFile(path) as file:
            assert list(file) == ["t0", "t1", "t2"]
            assert file.metadata["number"] == 0
            for name, value in PARTS.items():
                assert_same_tensor(file.read(name), value)
    write_gguf(tmp_path / "whole.gguf", read_all(first), file.metadata)
    assert_same_tensor(read_all(tmp_path / "whole.gguf"), read_all(first))


def test_parts_that_are_not_all_there(tmp_path):
    first = split(tmp_path, PARTS)
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(FileNotFoundError, match=r"m-00002-of-00003\.gguf does not exist"):
        GgufFile(first)
    with pytest.raises(
        ValueError, match="one of 3 parts, but its name does not end in -00001-of-00003"
    ):
        GgufFile(tmp_path / "elsewhere.gguf")
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(ValueError, match="is not part 2 of 3, as its name says"):
        GgufFile(first)


def test_parts_with_other_tensors_than_stated(tmp_path):
    with pytest.raises(ValueError, match="its parts have 3 of 7 tensors"):
        GgufFile(split(tmp_path, PARTS, stated=7))
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(path.read_bytes().replace(b"t1", b"t0"))
    with pytest.raises(ValueError, match=r"tensor 't0' is in .* and in another part"):
        GgufFile(path)


@pytest.mark.parametrize("write", [split, lambda to, x: write_gguf(to / "model.gguf", x)])
def test_a_folder_with_one_file_is_opened_by_its_name(tmp_path, write):
    write(tmp_path, PARTS)
    (tmp_path / "config.json").write_text("{}")
    loaded = vn.load(tmp_path)
    assert sorted(loaded) == sorted(PARTS)
    for name, value in PARTS.items():
        assert_same_tensor(np.asarray(loaded[name]), value)


def test_a_folder_with_several_files_has_one_named(tmp_path):
    split(tmp_path, PARTS)
    write_gguf(tmp_path / "other.gguf", PARTS)
    with pytest.raises(ValueError, match=r"give one of m-00001-of-00003\.gguf, other\.gguf"):
        vn.load(tmp_path)


def test_nothing_is_verified_where_there_are_no_checksums(path):
    write_gguf(path, PARTS)
    with pytest.raises(ValueError, match=r"model\.gguf has no checksums to verify"):
        vn.load(path, verify=True)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1"])
def test_a_file_called_gguf_is_refused_as_one(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf(: it is not a GGUF file| is empty)"):
        vn.load(path)


def test_the_earlier_name_of_the_module_works():
    from veneer.files import gguf
    from veneer.interop.checkpoints.gguf import GgufFile as earlier

    assert earlier is gguf.GgufFile
