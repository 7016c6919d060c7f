"""Damaged GGUF files raise an error of one line, and no large array is allocated."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
from support.gguf_files import (
    HEADS,
    METADATA,
    blocks_of,
    read_all,
)

from veneer.files.gguf import GgufFile, write_gguf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def small_file(path):
    tensors = {
        "a": blocks_of("Q4_1", 2, 64),
        "b.weight": np.ones((3, 5), np.float32),
        "blk.0.attn_k.weight": blocks_of("Q4_K", 16, 256),
        "c": blocks_of("TQ1_0", 2, 256),
        "d": np.arange(7, dtype=np.int16),
    }
    write_gguf(path, tensors, METADATA | HEADS)
    return path.read_bytes()


def header(*, version=3, tensors=0, pairs=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def info(name=b"w", shape=(32,), type=0, offset=0):
    name = struct.pack("<Q", len(name)) + name
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return name + axes + struct.pack("<IQ", type, offset)


def pair(type, content, key=b"k"):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type) + content


def string(content):
    return struct.pack("<Q", len(content)) + content


ALIGNMENT = b"general.alignment"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"GG", "it ends within the 4 bytes"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file: it does not start with 'GGUF'"),
        (header(version=1), "its GGUF version 1 is not supported"),
        (header(version=3 << 24), "it is big-endian: convert it with gguf-convert-endian"),
        (header(tensors=2**62), f"it ends within the {2**62} entries"),
        (header(pairs=2**64 - 1), f"it ends within the {2**64 - 1} entries"),
        (header(pairs=1) + pair(8, struct.pack("<Q", 2**63)), "it ends within the"),
        (header(pairs=1) + pair(9, struct.pack("<IQ", 4, 2**61)), "it ends within the"),
        (header(pairs=1) + pair(9, struct.pack("<IQ", 8, 2**61)), "it ends within the"),
        (header(pairs=1) + pair(13, bytes(9)), "value type 13 at byte 33 is unknown"),
        (
            header(pairs=1) + pair(9, struct.pack("<IQ", 9, 1) * 9 + bytes(99)),
            "value type 9 at byte 81 is unknown",
        ),
        (header(pairs=2) + pair(0, b"1") * 2 + bytes(9), "'k' occurs twice"),
        (header(pairs=1) + pair(0, b"1", key=b"\xff"), "can't decode byte 0xff"),
        (
            header(pairs=1) + pair(4, struct.pack("<I", 33), ALIGNMENT),
            "alignment must be a power of two up to",
        ),
        (
            header(pairs=1) + pair(8, string(b"32"), ALIGNMENT),
            "alignment must be a power .*, not '32'",
        ),
        (header(tensors=1) + info(shape=(1,) * 5), "tensor 'w' has 5 axes"),
        (header(tensors=1) + info(shape=(2**32, 2**32)), "has more values than the file has bits"),
        (header(tensors=1) + info(shape=(0, 2**60)), "has more values than the file has bits"),
        (header(tensors=1) + info(type=99), "tensor 'w': tensor type 99 is unknown"),
        (header(tensors=1) + info(shape=(33,), type=2), "not a multiple of 32, the block of Q4_0"),
        (header(tensors=1) + info(offset=32), "tensor 'w': it starts at 32, but the previous one"),
        (header(tensors=1) + info() + bytes(99), "'w': it takes 128 bytes, but the file ends"),
        (header(tensors=2) + info(shape=()) * 2 + bytes(999), "tensor 'w' occurs twice"),
    ],
)
def test_bad_files_raise_one_line_with_the_path(path, content, match):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as raised:
        GgufFile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_types_that_are_not_read_are_named(path):
    path.write_bytes(header(tensors=1) + info(shape=(256,), type=16) + bytes(999))
    with GgufFile(path) as file:
        assert file.types() == {"w": "IQ2_XXS"}
        with pytest.raises(ValueError, match=r"gguf: tensor 'w': its type is IQ2_XXS; supported"):
            file.read("w")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist or is not a file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        GgufFile(tmp_path)


def mutated(content, rng):
    """Return a file with changed bytes, a changed length, or a missing end."""
    content = bytearray(content)
    kind = rng.integers(4)
    at = int(rng.integers(0, min(len(content), 1800)))  # mostly the part before the tensors
    if kind == 0:
        for _ in range(rng.integers(1, 4)):
            content[int(rng.integers(0, 1800))] = int(rng.integers(256))
    elif kind == 1:
        size = int(rng.choice([4, 8]))
        number = int(rng.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1, rng.integers(2**16)]))
        content[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == 2:
        del content[int(rng.integers(len(content))) :]
    else:
        del content[at : at + int(rng.integers(1, 9))]
    return bytes(content)


def test_mutations_are_read_or_refused(tmp_path, mutations):
    good = small_file(tmp_path / "good.gguf")
    dense = read_all(tmp_path / "good.gguf")["b.weight"]
    rng = np.random.default_rng(0)
    path = tmp_path / "bad.gguf"
    outcomes = {"refused": 0, "read": 0}
    tracemalloc.start()
    try:
        for i in range(mutations):
            path.write_bytes(mutated(good, rng))
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            names = "huggingface" if i % 2 else None
            try:
                with GgufFile(path, names=names) as file:
                    shapes, types = file.shapes(), file.types()
                    values = {name: file.read(name) for name in file}
                assert {name: value.shape for name, value in values.items()} == shapes
                assert types.keys() == values.keys()
                outcomes["read"] += 1
                with contextlib.suppress(KeyError):
                    assert values["b.weight"].size == dense.size
            except ValueError as error:
                message = str(error)
                assert message.startswith(str(path))
                assert "\n" not in message
                outcomes["refused"] += 1
            # Python objects, but no array with a size that only the header states.
            assert tracemalloc.get_traced_memory()[1] - before < 2**20
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > mutations // 10
