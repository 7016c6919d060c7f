"""Arrays are written to GGUF exactly, or rejected."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import arrays
from support.annotations import unless_checked
from support.gguf_files import assert_same_tensor, blocks_of, in_nvfp4, read_all

import veneer as vn
from veneer.files.gguf import GgufFile, write_gguf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_a_file_appears_whole_or_not_at_all(path):
    lookups = []

    class Broken(dict):
        def __getitem__(self, name):
            lookups.append(name)
            if len(lookups) == 4:
                assert len(list(path.parent.iterdir())) == 1
                raise KeyboardInterrupt
            return super().__getitem__(name)

    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, Broken(a=np.ones(2), b=np.ones((2, 2), np.float32)))
    assert list(path.parent.iterdir()) == []
    write_gguf(path, {"w": np.ones(2, np.float32)})
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"model\.gguf already exists"):
        write_gguf(path, {})
    with pytest.raises(ValueError, match="tensor 'b' is bool, but GGUF has only float32, float16"):
        write_gguf(path, {"a": np.ones(3), "b": np.ones(3, bool)}, overwrite=True)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]


def test_a_disk_that_is_full(path, monkeypatch):
    def full(self, order):
        yield np.zeros((1, 1), np.uint8)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("veneer.files.gguf_tensors.Encoded.parts", full)
    with pytest.raises(OSError, match=r"model\.gguf cannot be written: No space left"):
        write_gguf(path, {"q": blocks_of("Q8_0", 1, 32)})
    assert list(path.parent.iterdir()) == []


# With one scale for the array, and with one per row.
NF4, INT4 = (
    vn.quant.QArray.from_packed(
        arrays.zeros((2, 16), np.uint8),
        arrays.full(scales, 0.1),
        qtype=qtype,
        packing=vn.quant.Packing(axis=-1, size=32),
    )
    for qtype, scales in (("nf4", (1, 1)), ("int4", (2, 1)))
)


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({"x" * 64: np.ones(2)}, ValueError, "names in GGUF have at most 63 bytes"),
        ({"": np.ones(2)}, ValueError, "names in GGUF have at most 63 bytes"),
        ({"w": np.ones((1,) * 5)}, ValueError, "'w' has .*, but GGUF has at most 4 axes"),
        ({"w": [1.0]}, TypeError, "'w' is a list"),
        ({"w": arrays.key(0)}, TypeError, "'w' is a .*, but GGUF can hold only"),
        (
            {
                "w": vn.types.LoraArray(
                    arrays.ones((2, 2)), arrays.ones((2, 1)), arrays.ones((1, 2))
                )
            },
            TypeError,
            "'w' is a LoraArray, .*: convert it, for example with vn.materialise",
        ),
        (
            {"w": NF4},
            ValueError,
            r"'w', a QArray of nf4 \[2, 32\] in tiles of \[2, 32\]: .* has no type with codes of "
            r"nf4\. Quantize it accordingly .* or save vn\.materialise of it",
        ),
        (
            {"w": INT4},
            ValueError,
            r"its scale must be exact in float16.*vn\.quant\.Rule has tile_size, tile_axis",
        ),
    ],
)
def test_values_that_gguf_cannot_hold_raise_and_write_nothing(path, tensors, error, match):
    with pytest.raises(error, match=match):
        write_gguf(path, tensors)
    assert not path.exists()


@pytest.mark.parametrize("value", [None, 2**64, 1j, np.ones((2, 2)), ["a", 1], b"bytes"])
def test_metadata_that_gguf_does_not_have(path, value):
    with pytest.raises(TypeError, match=r"metadata 'key': (a )?GGUF"):
        write_gguf(path, {}, {"key": value})
    assert not path.exists()


def test_lists_of_numbers_are_arrays_of_one_type(path):
    write_gguf(path, {}, {"mixed": [1, -1], "floats": (0.5, 1.5), "bools": [True, False]})
    metadata = GgufFile(path).metadata
    assert metadata["mixed"].tolist() == [1, -1]
    assert metadata["floats"].dtype == np.float32
    assert metadata["bools"].dtype == bool


def test_arrays_of_jax_are_written(path):
    tensors = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.arange(4, dtype=jnp.int32)}
    write_gguf(path, tensors)
    back = read_all(path)
    assert back["a"].dtype == ml_dtypes.bfloat16
    assert back["b"].tolist() == [0, 1, 2, 3]


def test_numbers_in_another_byte_order_are_written(path):
    write_gguf(path, {"a": np.arange(3, dtype=">f4"), "b": np.float32(2)})
    back = read_all(path)
    assert (back["a"].tolist(), back["b"].tolist()) == ([0, 1, 2], 2)


@unless_checked
def test_keys_of_metadata_are_strings(path):
    with pytest.raises(TypeError, match="keys of metadata must be strings, not 1"):
        write_gguf(path, {}, {1: "a"})


@pytest.mark.parametrize("shape", [(3, 128), (2, 3, 64)])
def test_the_outer_scale_of_nvfp4_belongs_to_the_weight(path, shape):
    q = in_nvfp4(*shape)
    write_gguf(path, {"w.weight": q, "v.weight": q.replace(scale=np.asarray(q.scale.packed))})
    back = read_all(path)
    assert list(back) == ["w.weight", "v.weight"]
    assert_same_tensor(back["w.weight"], q)
    import gguf

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert list(tensors) == ["w.weight", "w.scale", "v.weight"]
    np.testing.assert_array_equal(tensors["w.scale"], np.ravel(q.scale.scale))


def test_the_scale_of_an_expert_in_nvfp4(path):
    q = in_nvfp4(2, 3, 64)
    write_gguf(path, {"blk.0.ffn_up_exps.weight": q}, {"general.architecture": "qwen3moe"})
    for i, expert in enumerate(read_all(path, names="huggingface").values()):
        np.testing.assert_array_equal(vn.materialise(expert), vn.materialise(q)[i])


def test_an_invalid_outer_scale_of_nvfp4_raises(path):
    q = in_nvfp4(3, 64)
    plain = q.replace(scale=np.asarray(q.scale.packed))
    write_gguf(path, {"w.weight": plain, "w.scale": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"'w\.weight': its scale is float32 \(3,\), not one"):
        read_all(path)
    with pytest.raises(
        ValueError, match=r"'w', a QArray of nvfp4 .* its scale must be exact in float8_e4m3fn"
    ):
        write_gguf(path, {"w": q}, overwrite=True)
