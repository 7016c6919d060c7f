"""Packing of codes along any axis, without gaps."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stored_values import unpacked

from veneer.quant import FORMATS, quantize
from veneer.quant.formats.packing import UNITS, Packing, pack, packed_size, unpack

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


@functools.cache
def pack_compiled(bits, axis):
    """Return `pack` and `unpack` as one compiled function, because each example has a new shape."""

    @jax.jit
    def run(fields):
        packed, packing = pack(fields, bits, axis)
        return packed, unpack(packed, packing, bits)

    return run


@st.composite
def fields_and_axis(draw, bits):
    largest = 2 if bits == 1.6 else 2**bits - 1
    shape = draw(SHAPES)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    longer = draw(st.integers(0, 17))
    shape = tuple(longer if i == axis % len(shape) else size for i, size in enumerate(shape))
    return draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, largest))), axis


@pytest.mark.parametrize("bits", UNITS)
@given(data=st.data())
def test_unpack_undoes_pack_and_no_byte_is_wasted(bits, data):
    fields, axis = data.draw(fields_and_axis(bits))
    packed, again = map(np.asarray, pack_compiled(bits, axis)(fields))
    assert packed.dtype == again.dtype == np.uint8
    size = fields.shape[axis]
    assert packed.shape[axis] == packed_size(size, bits)
    np.testing.assert_array_equal(again, fields)
    # The NumPy reference follows the description in `veneer.json`.
    np.testing.assert_array_equal(unpacked(packed, bits, axis, size), fields)


@pytest.mark.parametrize("bits", UNITS)
def test_a_unit_takes_as_many_bits_as_its_codes(bits):
    codes, bytes_ = UNITS[bits]
    assert codes * bits == 8 * bytes_
    assert [packed_size(size, bits) for size in (0, 1, codes, codes + 1)] == [
        *(0, bytes_, bytes_, 2 * bytes_)
    ]


@pytest.mark.parametrize(
    ("bits", "fields", "packed"),
    [
        (1, [1, 0, 0, 1, 0, 0, 0, 0, 1], [0b00001001, 0b00000001]),
        (1.6, [1, 2, 0, 0, 2, 1], [1 + 2 * 3 + 2 * 81, 1]),
        (2, [1, 2, 3, 0, 3], [0b00111001, 0b00000011]),
        (4, [1, 2, 15], [0x21, 0x0F]),
        (3, [5, 0, 1], [0b101, 0b000, 0b001]),
        (6, [33, 2], [0b01, 0b10, 0, 0, 0, 0b01]),
    ],
)
def test_the_first_code_is_in_the_lowest_place(bits, fields, packed):
    assert pack(np.array(fields, np.uint8), bits)[0].tolist() == packed


def test_without_packing_a_byte_holds_one_code():
    codes = jnp.array([0x0F, 0x01], jnp.uint8)
    assert unpack(codes, None, 4).tolist() == [15, 1]
    assert unpack(codes, None, 2).tolist() == [3, 1]
    assert unpack(codes, None, 1.6).tolist() == [0, 1]


@pytest.mark.parametrize("bits", [1.6, 3, 4])
def test_the_packed_axis_stays_when_leading_axes_are_added(bits):
    fields = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) % 3
    packed, packing = pack(fields[0], bits, axis=0)
    stacked = jax.vmap(lambda fields: pack(fields, bits, axis=0)[0])(fields)
    assert packing == Packing(axis=-2, size=3)
    np.testing.assert_array_equal(stacked[0], packed)
    np.testing.assert_array_equal(unpack(stacked, packing, bits), fields)


def bytes_by_formula(format, rows, columns):
    """Return the bytes of a matrix with tiles of 32 (or a fixed tile size) along its rows."""
    codes = rows * int(-(-columns * format.bits // 8))
    scales = rows * columns // (format.tile_size or 32)
    if format.scale_tile is not None:  # 8-bit scales, and their f32 scales
        return codes + scales + 4 * -(-scales // (format.scale_tile or scales))
    zero_points = 0 if format.signed or not format.is_integer else scales
    return codes + scales * (1 if format.scale_dtype else 4) + zero_points


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_stored_bytes_match_the_formula(format):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(16, 320)), jnp.float32)
    q = quantize(w, format.name, channelwise_axes=[0], tiled_axes={1: format.tile_size or 32})
    assert q.nbytes == bytes_by_formula(format, 16, 320)
    assert q.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(q))
