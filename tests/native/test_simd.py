"""Vector operations give the expected values with every ISA of this CPU."""

import ctypes
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from kernels.cpu.driver import fields_of_planes
from numba import njit

from veneer.kernels.common.problem import BITS, LOOKUP_BITS, PLANE_BITS, SIX_BIT_FLOATS
from veneer.kernels.cpu.decoding import build_decoder, load_table
from veneer.native.functions import prevent_inlining
from veneer.native.simd import ISA, ISAS, LANES, select_isa
from veneer.native.simd.floats import deinterleave, load, store

TABLE = np.linspace(-1, 1, 16).astype(np.float32)


def fields(packed, bits):
    return np.stack([packed >> i & 2**bits - 1 for i in range(0, 8, bits)], -1).ravel()


@pytest.mark.parametrize("count", [1, 2, 8])
def test_deinterleave_splits_a_row(count):
    numbers = np.arange(count * LANES, dtype=np.float32)
    out = np.empty_like(numbers)

    @njit(error_model="numpy")
    def run(numbers, out):
        store(out, deinterleave(load(numbers, count)))

    run(numbers.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out.reshape(count, LANES), numbers.reshape(LANES, count).T)


def decode(kind, packed, table, count):
    """Decode packed codes of a kind to f32 with the vector instructions of the kernels."""
    decode_row, restore_order = build_decoder(kind)
    step = 2 * LANES  # for every kind, two vectors start at a byte boundary
    bits = BITS[kind]
    out = np.empty(count, np.float32)

    @njit(error_model="numpy")
    def run(table, packed, out):
        prevent_inlining()
        for i in range(0, count, step):
            codes = decode_row(load_table(table), packed + i * bits // 8, 2)
            store(out + 4 * i, restore_order(codes))

    run(table.ctypes.data, packed.ctypes.data, out.ctypes.data)
    return out


@pytest.mark.parametrize("kind", LOOKUP_BITS)
def test_narrow_codes_are_decoded_in_order(kind):
    bits = BITS[kind]
    packed = np.random.default_rng(1).integers(0, 256, 64 * bits, np.uint8)
    table = np.resize(TABLE[: 2**bits], 16)
    expected = table[fields(packed, bits)]
    np.testing.assert_array_equal(decode(kind, packed, table, expected.size), expected)


@pytest.mark.parametrize("kind", [kind for kind in PLANE_BITS if kind not in SIX_BIT_FLOATS])
def test_bit_planes_are_decoded_in_order(kind):
    bits, half = PLANE_BITS[kind], 2 ** (PLANE_BITS[kind] - 1)
    packed = np.random.default_rng(1).integers(0, 256, 32 * bits, np.uint8)
    fields = fields_of_planes(packed, bits)
    for flipped, less in ((0, 0), (half, half), (0, half)):
        table = np.array([flipped, less, *[0] * 14], np.float32)
        actual = decode(kind, packed, table, fields.size)
        np.testing.assert_array_equal(actual, (fields ^ flipped) - less)


@pytest.mark.parametrize("kind", SIX_BIT_FLOATS)
def test_each_6_bit_float_has_the_value_of_its_dtype(kind):
    packed = np.random.default_rng(1).integers(0, 256, 6 * 256, np.uint8)
    table = np.array([32, 32, *[0] * 14], np.float32)
    codes = fields_of_planes(packed, 6).astype(np.uint8)
    expected = codes.view(getattr(ml_dtypes, kind)).astype(np.float32)
    np.testing.assert_array_equal(decode(kind, packed, table, codes.size), expected)


def check_codes_of_8_bits(kind):
    packed = np.arange(256, dtype=np.uint8)
    expected = packed.view(getattr(ml_dtypes, kind, kind)).astype(np.float32)
    np.testing.assert_array_equal(decode(kind, packed, TABLE, 256), expected)


@pytest.mark.parametrize("kind", [kind for kind in BITS if BITS[kind] == 8])
def test_each_8_bit_code_has_the_value_of_its_dtype(kind):
    check_codes_of_8_bits(kind)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_small_float8_is_not_flushed_to_zero(kind):
    """XLA sets its threads to flush denormals to zero. The setting applies to one thread."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("sets the control register of x86-64 by its name in glibc")
    environment = (ctypes.c_uint32 * 8)()
    libm = ctypes.CDLL("libm.so.6")
    libm.fegetenv(environment)
    normal = environment[7]
    try:
        environment[7] = normal | 0x8040  # flush to zero, denormals are zero
        libm.fesetenv(environment)
        check_codes_of_8_bits(kind)
    finally:
        environment[7] = normal
        libm.fesetenv(environment)


OTHERS = [isa for isa in ISAS if isa not in (ISA, "avx512")]


@pytest.mark.parametrize("isa", OTHERS)
def test_all_isas_decode_to_the_same_values(isa):
    if "VENEER_KERNELS_ISA" in os.environ:
        pytest.skip("VENEER_KERNELS_ISA already selects an ISA")
    try:
        select_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--all", __file__]
    environment = os.environ | {"VENEER_KERNELS_ISA": isa}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_an_unknown_isa_raises():
    with pytest.raises(ValueError, match=r"'sse9' is unknown; this CPU has .*portable"):
        select_isa("sse9")
