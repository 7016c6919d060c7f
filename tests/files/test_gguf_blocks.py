"""GGUF blocks of each type are loaded packed, and agree to the bit with the `gguf` package."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest

import veneer as vn
from veneer.files.codes import pack, unpack
from veneer.files.gguf_blocks import BLOCK_TYPES, LARGEST_SCALES
from veneer.files.gguf_tensors import decode, encode
from veneer.quant.formats import packing as reference

TYPES = [pytest.param(row, id=row.name) for row in BLOCK_TYPES.values()]

# Every f16, including infinities and NaN: one block each.
ALL_F16 = np.arange(2**16, dtype=np.uint16)


def random_blocks(row, *shape, seed=0):
    """Return random blocks `[..., bytes]` whose 8-bit scales are not NaN."""
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape, row.nbytes), dtype=np.uint8)
    for place in (row.scale, row.minimum):
        if place is not None and place.dtype in LARGEST_SCALES:
            scales = blocks[..., place.start : place.start + place.count]
            scales %= LARGEST_SCALES[place.dtype] + 1
    return blocks


def read(row, blocks):
    """Return the QArray of blocks `[..., blocks, bytes]`."""
    *leading, count, nbytes = blocks.shape
    rows = blocks.reshape(int(np.prod(leading)), count * nbytes)
    return decode(rows, row, (*leading, count * row.values))


def written(q):
    encoded = encode(q)
    return encoded.type, np.concatenate([*encoded.parts()])


def oracle(row, blocks):
    import gguf.quants as quants

    *leading, count, nbytes = blocks.shape
    rows = blocks.reshape(-1, count * nbytes)
    with np.errstate(all="ignore"):
        values = quants.dequantize(rows, quants.GGMLQuantizationType(row.number))
    return values.reshape(*leading, count * row.values)


def assert_equal(row, q, expected):
    values = np.asarray(vn.materialise(q))
    assert values.dtype == np.float32
    if row.name == "MXFP4":
        # XLA for CPUs computes 0 instead of a subnormal number.
        expected = np.where(abs(expected) < 2.0**-126, 0, expected)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 1)])
def test_random_blocks_agree_with_the_reference(row, shape):
    blocks = random_blocks(row, *shape)
    q = read(row, blocks)
    assert q.shape == (*shape[:-1], shape[-1] * row.values)
    assert q.nbytes <= 1.02 * blocks.nbytes
    assert_equal(row, q, oracle(row, blocks))


@pytest.mark.parametrize("row", TYPES)
def test_products_are_by_kernels_and_nothing_is_dense(row):
    n, k = 192, 512
    blocks = random_blocks(row, n, k // row.values)
    for place in (row.scale, row.minimum):
        if place is not None and place.dtype == np.float16:
            scales = np.random.default_rng(1).uniform(0.5, 1, (*blocks.shape[:-1], 1))
            bytes_ = scales.astype(np.float16).view(np.uint8)
            blocks[..., place.start : place.start + 2] = bytes_
        elif place is not None and place.dtype in LARGEST_SCALES:
            scales = blocks[..., place.start : place.start + place.count]
            scales[:] = LARGEST_SCALES[place.dtype] // 2 + scales % 2  # about 1
    w = read(row, blocks)
    product = vn.implicit(lambda x, w: x @ w.T)
    for m in (1, 8):
        x = np.random.default_rng(2).normal(size=(m, k)).astype(np.float32)
        said = [e.how for e in vn.explain(product)(x, w).events if e.primitive == "dot_general"]
        assert len(said) == 1
        assert said[0].startswith("CPU kernel")
        compiled = jax.jit(product).lower(x, w).compile()
        assert not re.search(rf"(f32|bf16|f16)\[(1,)?({n},{k}|{k},{n})\]", compiled.as_text())
        exact = x.astype(np.float64) @ np.asarray(vn.materialise(w), np.float64).T
        error = np.linalg.norm(compiled(x, w) - exact) / np.linalg.norm(exact)
        assert error < 1e-5


F16_TYPES = [p for p in TYPES if p.values[0].scale.dtype == np.float16]


@pytest.mark.parametrize("row", F16_TYPES)
def test_every_scale_of_16_bits_is_read(row):
    # All of them for small blocks. For large blocks every eighth, and the infinities.
    patterns = (
        ALL_F16 if row.values == 32 else np.append(ALL_F16[::8], ALL_F16[[0x7C00, 0xFC00, 0x7C01]])
    )
    blocks = random_blocks(row, len(patterns), 1)
    for place in (row.scale, row.minimum):
        if place is not None:
            blocks[..., place.start : place.start + 2] = patterns[:, None, None].view(np.uint8)
            patterns = np.roll(patterns, 1000)
    assert_equal(row, read(row, blocks), oracle(row, blocks))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_of_8_bits_is_read_and_others_are_refused(name):
    row = next(row for row in BLOCK_TYPES.values() if row.name == name)
    largest = LARGEST_SCALES[row.scale.dtype]
    blocks = random_blocks(row, largest + 1, 1)
    blocks[..., : row.scale.count] = np.arange(largest + 1)[:, None, None]
    assert_equal(row, read(row, blocks), oracle(row, blocks))
    blocks[3, 0, 0] = largest + 1
    with pytest.raises(ValueError, match="scales that are negative or NaN"):
        read(row, blocks)


def test_mxfp4_clips_large_values_like_the_reference():
    import gguf.quants as quants

    mxfp4 = quants.GGMLQuantizationType.MXFP4
    x = np.random.default_rng(0).uniform(-3.4e38, 3.4e38, (20, 32)).astype(np.float32)
    x[:, 0] = 3e38
    with np.errstate(over="ignore"):
        expected = quants.dequantize(quants.quantize(x, mxfp4), mxfp4)
    np.testing.assert_array_equal(vn.quant.quantize(x, "mxfp4").dequantize(), expected)
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("row", TYPES)
def test_blocks_survive_reading_and_writing(row):
    blocks = random_blocks(row, 3, 5)
    q = read(row, blocks)
    type, again = written(q)
    assert type is row
    if row.name == "TQ1_0":  # several bytes represent the same five digits
        blocks = again.reshape(blocks.shape)
    np.testing.assert_array_equal(again, blocks.reshape(3, -1))
    for one, other in zip(jax.tree.leaves(q), jax.tree.leaves(read(row, blocks)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("row", TYPES)
def test_parts_of_the_rows_are_read_apart(row, monkeypatch):
    blocks = random_blocks(row, 5, 2)
    whole = jax.tree.leaves(read(row, blocks))
    monkeypatch.setattr("veneer.files.gguf_tensors._VALUES_AT_ONCE", 2 * 2 * row.values)
    q = read(row, blocks)
    for one, other in zip(whole, jax.tree.leaves(q), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view("u1"))
    np.testing.assert_array_equal(
        written(q)[1], written(read(row, blocks.copy()))[1]
    )  # and written


@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 3, 1)])
def test_tensors_without_values(row, shape):
    q = read(row, np.zeros((*shape, row.nbytes), np.uint8))
    assert q.shape == (*shape[:-1], shape[-1] * row.values)
    assert vn.materialise(q).shape == q.shape
    assert written(q)[1].size == 0


@pytest.mark.parametrize("row", TYPES)
def test_reordering_rows_keeps_their_bytes(row):
    blocks = random_blocks(row, 6, 2)
    order = np.array([3, 1, 5, 0, 2, 4])
    q = decode(blocks.reshape(6, -1), row, (6, 2 * row.values), order)
    for one, other in zip(
        jax.tree.leaves(q), jax.tree.leaves(read(row, blocks[order])), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_block_by_hand():
    row = next(row for row in BLOCK_TYPES.values() if row.name == "Q4_1")
    block = np.zeros(20, np.uint8)
    block[:4] = np.array([0.5, -1], np.float16).view(np.uint8)
    block[4:] = np.arange(16) | (15 - np.arange(16)) << 4
    q = read(row, block[None])
    expected = [*(0.5 * j - 1 for j in range(16)), *(0.5 * (15 - j) - 1 for j in range(16))]
    assert vn.materialise(q).tolist() == expected
    assert q.scale.dtype == q.minimum.dtype == np.float16


@pytest.mark.parametrize("bits", [1, 1.6, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("size", [0, 1, 8, 37, 256])
def test_codes_are_packed_as_a_qarray_packs_them(bits, size):
    high = 3 if bits == 1.6 else 2 ** int(bits)
    fields = np.random.default_rng(0).integers(0, high, (3, size), dtype=np.uint8)
    packed = pack(fields, bits)
    np.testing.assert_array_equal(packed, reference.pack(fields, bits)[0])
    np.testing.assert_array_equal(unpack(packed, bits, size), fields)


def quantized(qtype, tile, *, shape=(4, 256), dtype="float16", **options):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    axes = {"channelwise_axes": [*range(len(shape) - 1)], "tiled_axes": {len(shape) - 1: tile}}
    return vn.quant.quantize(x, qtype, scale_dtype=dtype, **axes | options)


@pytest.mark.parametrize(
    ("qtype", "tile", "expected"),
    [
        ("int8", 32, "Q8_0"),
        ("int8", 64, "Q8_0"),
        ("int8", 256, "Q8_0"),
        ("int4", 32, "Q4_0"),
        ("int4", 128, "Q4_0"),
        ("int5", 32, "Q5_0"),
        ("int6", 32, "Q8_0"),
        ("int3", 32, "Q4_0"),
        ("int2", 256, "TQ2_0"),
        ("int2", 32, "Q4_0"),
        ("ternary", 256, "TQ1_0"),
        ("ternary", 64, "Q4_0"),
        ("int1", 256, "TQ1_0"),
        ("iq4_nl", 32, "IQ4_NL"),
        ("mxfp4", 32, "MXFP4"),
    ],
)
def test_arrays_are_written_in_the_smallest_exact_type(qtype, tile, expected):
    q = quantized(qtype, tile, dtype=None if qtype == "mxfp4" else "float16")
    row, again = written(q)
    assert row.name == expected
    back = decode(again, row, q.shape)
    wide = q.replace(dense_dtype="float32")
    np.testing.assert_array_equal(vn.materialise(back), vn.materialise(wide))


def test_zero_points_are_taken_into_the_codes():
    q = quantized("uint4", 32, calibration_method="minmax")
    assert q.zero_point is not None
    row, again = written(q)
    assert row.name == "Q5_0"
    wide = vn.materialise(q.replace(dense_dtype="float32"))
    np.testing.assert_array_equal(vn.materialise(decode(again, row, q.shape)), wide)


def test_other_packings_are_written_as_the_same_blocks():
    q = quantized("int4", 32)
    bytes_ = np.asarray(q.format.to_fields(q.codes()))
    for other in (
        q.replace(packed=bytes_, packing=None),
        q.replace(packed=reference.pack(bytes_, 4, 0)[0], packing=vn.quant.Packing(-2, 4)),
    ):
        np.testing.assert_array_equal(written(other)[1], written(q)[1])


def test_f32_scales_are_written_if_they_are_exact_in_f16():
    q = quantized("int8", 32)
    wide = q.replace(scale=q.scale.astype(np.float32))
    np.testing.assert_array_equal(written(wide)[1], written(q)[1])
    with pytest.raises(ValueError, match="Q8_0: its scale must be exact in float16"):
        encode(quantized("int8", 32, dtype="float32"))


@pytest.mark.parametrize(
    ("q", "match"),
    [
        (lambda: quantized("nf4", 32), "GGUF has no type with codes of nf4"),
        (lambda: quantized("float8_e4m3fn", 32), "no type with codes of float8_e4m3fn"),
        (lambda: quantized("int8", 16), "its scale must have 8 entries along axis 1, not 16"),
        (
            lambda: quantized("int8", 24, shape=(4, 48)),
            r"the last axis of \(4, 48\) is not a multiple of 32",
        ),
        (
            lambda: vn.quant.quantize(np.float16(3), "int8"),
            "it is a scalar, but blocks of GGUF have at least 32 values",
        ),
        (
            lambda: quantized("int8", 32).replace(
                qtype="uint8", packed=np.ones((4, 256), np.uint8), minimum=np.ones((4, 8))
            ),
            "no type with codes of uint8",
        ),
        (
            lambda: vn.quant.QArray(
                np.ones((4, 32), np.uint8),
                np.ones((4, 1), np.float16),
                qtype="uint4",
                minimum=np.full((4, 1), 1 / 3, np.float32),
            ),
            "Q4_1: its minimum must be exact in float16",
        ),
    ],
)
def test_arrays_that_gguf_cannot_hold_raise(q, match):
    with pytest.raises(ValueError, match=match):
        encode(q())


def test_scales_in_e4m3_with_a_sign_are_refused():
    row = next(row for row in BLOCK_TYPES.values() if row.name == "NVFP4")
    q = read(row, random_blocks(row, 2, 1))
    q = q.replace(scale=-np.asarray(q.scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
    with pytest.raises(ValueError, match="nonnegative and not NaN"):
        encode(q)
