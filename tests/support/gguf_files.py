"""Make random blocks for GGUF files, and read GGUF files."""

import jax
import numpy as np

import veneer as vn
from veneer.files.gguf import GgufFile
from veneer.files.gguf_blocks import BLOCK_TYPES, DENSE_TYPES
from veneer.files.gguf_tensors import decode

METADATA = {
    "general.architecture": "llama",
    "uint8": np.uint8(200),
    "int8": np.int8(-3),
    "uint16": np.uint16(60000),
    "int16": np.int16(5),
    "uint32": 4000000000,
    "int32": -7,
    "int32 above 0": np.int32(7),
    "float32": 0.5,
    "float64": np.float64(0.1),
    "bool": True,
    "uint64": np.uint64(3),
    "uint64 of all bits": 2**64 - 1,
    "int64": -(2**40),
    "string": "Üñí",
    "no string": "",
    "no UTF-8": "\udcff",
    "strings": ["a", "", "Ġthe"],
    "no strings": [],
    "numbers": np.arange(5, dtype=np.int32),
    "no numbers": np.zeros(0, np.float32),
    "bools": np.array([True, False]),
    "arrays": [np.arange(2, dtype=np.uint8), np.zeros(0, np.uint8)],
}

# The numbers of heads of queries and keys.
HEADS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}

DENSE = {dtype.name: np.arange(6).astype(dtype).reshape(2, 3) for _, dtype in DENSE_TYPES.values()}


def blocks_of(name, *shape, seed=0):
    """Return a QArray of a shape, made of random blocks of a GGUF type."""
    row = next(row for row in BLOCK_TYPES.values() if row.name == name)
    rows = int(np.prod(shape[:-1]))
    blocks = np.random.default_rng(seed).integers(
        3, 60, (rows, shape[-1] // row.values * row.nbytes), dtype=np.uint8
    )
    return decode(blocks, row, shape)


def in_nvfp4(*shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    axes = [*range(len(shape) - 1)]
    return vn.quant.quantize(x, "nvfp4", channelwise_axes=axes, tiled_axes={len(axes): 16})


def assert_same_tensor(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def read_all(path, **options):
    with GgufFile(path, **options) as file:
        return {name: file.read(name) for name in file}
