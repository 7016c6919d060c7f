"""Compare the TPU kernel, run in the interpreter of Pallas, with dense products."""

import functools

import pytest
from kernels.device_products import FOUR_BITS, assert_is_dense

from veneer.kernels import tpu

OTHERS = ("lookup1", "lookup2", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")

product = functools.partial(tpu.product, interpret=True)


@pytest.mark.parametrize("kind", [*FOUR_BITS, *OTHERS])
@pytest.mark.parametrize("contracting", ["rows", "columns"])
def test_each_kind_of_codes_matches_the_dense_product(kind, contracting):
    tile = (64, 1) if contracting == "rows" else (1, 64)
    assert_is_dense(tpu, product, kind, 3, (1, 128, 192), tile, contracting)


@pytest.mark.parametrize(
    ("m", "shape", "tile"),
    [
        (1, (1, 256, 130), (256, 1)),  # per channel, and a tail of n
        (5, (2, 96, 70), (32, 1)),  # smaller tiles than a block, and a batch
        (17, (1, 320, 33), (16, 33)),  # a byte with a single code
        (3, (1, 288, 50), (96, 1)),  # a tile that is no power of two
        (70, (1, 300, 64), (300, 64)),  # one scale, and tails of m and k
        (2, (1, 256, 256), (128, 128)),  # tiles along both sides
        (2, (1, 130, 64), (1, 32)),  # a scale per contracted entry, as in a derivative
        (130, (1, 1024, 20), (128, 1)),
        (1, (1, 4096, 40), (128, 1)),  # many blocks along k
    ],
)
@pytest.mark.parametrize("contracting", ["rows", "columns"])
def test_odd_shapes_and_tiles_match_the_dense_product(m, shape, tile, contracting):
    batch, rows, columns = shape
    if contracting == "columns":
        shape, tile = (batch, columns, rows), tile[::-1]
    assert_is_dense(tpu, product, "int4", m, shape, tile, contracting)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", [128, 32])
def test_16_bit_activations_match_the_dense_product(dtype, tile):
    assert_is_dense(tpu, product, "int4", 4, (1, 256, 64), (tile, 1), "rows", dtype)


@pytest.mark.parametrize("scale", ["bfloat16", "float16", "float8_e8m0fnu"])
def test_narrow_float_scales_match_the_dense_product(scale):
    assert_is_dense(tpu, product, "e2m1", 4, (1, 64, 128), (1, 32), "columns", scale=scale)
