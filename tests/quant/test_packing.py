import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.quant.packing import Packing, pack, packed_size, unpack

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


@st.composite
def codes_and_axis(draw):
    dtype, low, high = draw(st.sampled_from([(np.int8, -8, 7), (np.uint8, 0, 15)]))
    codes = draw(hnp.arrays(dtype, SHAPES, elements=st.integers(low, high)))
    return codes, draw(st.integers(-codes.ndim, codes.ndim - 1))


def pack_compiled(codes, axis):
    """`pack` compiled as one: each example has a shape of its own, and would compile each step."""
    packings = []

    @jax.jit
    def run(codes):
        packed, packing = pack(codes, axis)
        packings.append(packing)
        return packed, unpack(packed, packing, signed=codes.dtype == jnp.int8)

    packed, unpacked = map(np.asarray, run(codes))
    return packed, packings[0], unpacked


@given(codes_and_axis())
def test_unpack_undoes_pack(case):
    codes, axis = case
    _, _, unpacked = pack_compiled(codes, axis)
    assert unpacked.dtype == codes.dtype
    np.testing.assert_array_equal(unpacked, codes)


@given(codes_and_axis())
def test_two_codes_take_one_byte_the_first_in_the_low_nibble(case):
    codes, axis = case
    packed, packing, _ = pack_compiled(codes, axis)
    codes, packed = np.moveaxis(codes, axis, -1), np.moveaxis(packed, axis, -1)
    size = codes.shape[-1]
    assert packing == Packing(axis % codes.ndim - codes.ndim, size)
    assert (packed.dtype, packed.shape[-1]) == (np.uint8, packed_size(size))
    nibbles = codes.astype(np.uint8) & 0xF
    np.testing.assert_array_equal(packed & 0xF, nibbles[..., 0::2])
    np.testing.assert_array_equal((packed >> 4)[..., : size // 2], nibbles[..., 1::2])


@pytest.mark.parametrize("size", [1, 3, 5])
def test_an_odd_axis_is_padded_with_a_zero_nibble(size):
    packed, _ = pack(np.full(size, -1, np.int8))
    assert packed[-1] == 0x0F


def test_without_packing_a_byte_holds_one_code():
    codes = jnp.array([0x0F, 0x01], jnp.uint8)
    assert unpack(codes, None, signed=True).tolist() == [-1, 1]
    assert unpack(codes, None, signed=False).tolist() == [15, 1]


def test_the_packed_axis_keeps_its_name_when_leading_axes_come():
    codes = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) % 16
    packed, packing = pack(codes[0], axis=0)
    stacked = jax.vmap(lambda codes: pack(codes, axis=0)[0])(codes)
    assert packing == Packing(axis=-2, size=3)
    np.testing.assert_array_equal(stacked[0], packed)
    np.testing.assert_array_equal(unpack(stacked, packing, signed=False), codes)
