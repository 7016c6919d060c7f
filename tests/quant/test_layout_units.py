"""Moving values about in every format: units of one and of several bytes, and nested scales.

`test_layout` has every tiling of the formats of 4 and 8 bits, and the odd programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.stored_values import stored_values

import veneer as vn
from veneer.quant import FORMATS, Packing, QArray
from veneer.quant.formats.packing import UNITS, pack

ROWS = arrays.array([2, 0, 5, -1])

BYTES = "bytes"  # with one code each

# Programs on values [6, w·u + rest], packed along the last axis in units of u codes, with one scale
# per row: the program, w, rest, and whether the result is packed in the same units or in BYTES.
ALONG = {
    "transpose": (lambda x, u: x.T, 2, 1, True),
    "swap and swap back": (lambda x, u: x.T[None].T, 1, 1, True),
    "new axes": (lambda x, u: x[:, None, :, None], 1, 1, True),
    "squeeze": (lambda x, u: jnp.squeeze(x[:1]), 1, 1, True),
    "broadcast": (lambda x, u: jnp.broadcast_to(x, (2, *x.shape)), 1, 1, True),
    "rows": (lambda x, u: x[ROWS], 1, 1, True),
    "rows, the packed axis first": (lambda x, u: x.T[:, ROWS], 1, 1, True),
    "dynamic row": (lambda x, u: lax.dynamic_index_in_dim(x, jnp.int32(9), 0), 1, 1, True),
    "slice of rows": (lambda x, u: x[1:4], 1, 1, True),
    "slice of units": (lambda x, u: x[:, u : 2 * u], 3, 0, True),
    "slice to a partial unit": (lambda x, u: x[:, u:], 2, 1, True),
    "slice across units": (lambda x, u: x[:, 1 : u + 1], 2, 0, False),
    "slice from within a unit": (lambda x, u: x[:, 1:], 2, 0, False),
    "slice with strides": (lambda x, u: x[:, ::2], 2, 0, False),
    "column": (lambda x, u: x[:, 1], 1, 1, BYTES),
    "last column": (lambda x, u: x[:, -1:], 1, 1, BYTES),
    "dynamic column": (lambda x, u: lax.dynamic_slice(x, (1, jnp.int32(9)), (3, 1)), 1, 1, BYTES),
    "columns": (lambda x, u: x[:, ROWS % 2], 1, 0, BYTES),
    "split between units": (lambda x, u: jnp.split(x, [u], 1)[1], 3, 1, True),
    "split within a unit": (lambda x, u: jnp.split(x, [1], 1)[1], 2, 0, False),
    "reshape to units": (lambda x, u: x.reshape(6, 3, u), 3, 0, True),
    "reshape to pairs of units": (lambda x, u: x.reshape(6, 2, 2 * u), 4, 0, True),
    "reshape within units": (lambda x, u: x.reshape(6, u, 3), 3, 0, False),
    "reshape of rows": (lambda x, u: x.reshape(2, 3, x.shape[1]), 1, 1, True),
    "reshape by ones": (lambda x, u: x.reshape(6, 1, x.shape[1], 1), 1, 1, True),
    "merge partial units": (lambda x, u: x.reshape(6 * (u + 1)), 1, 1, False),
    "merge one partial unit each": (lambda x, u: x.reshape(6 * (u - 1)), 1, -1, None),
    "concatenate rows": (lambda x, u: jnp.concatenate([x, x]), 1, 1, True),
    "concatenate units": (lambda x, u: jnp.concatenate([x, x], 1), 2, 0, True),
    "concatenate partial units": (lambda x, u: jnp.concatenate([x, x], 1), 1, 1, False),
    "stack": (lambda x, u: jnp.stack([x, x], 1), 1, 1, True),
    "stack at the end": (lambda x, u: jnp.stack([x, x], -1), 1, 1, True),
    "vmap of rows": (lambda x, u: jax.vmap(lambda row: row * 1)(x[ROWS]), 1, 1, None),
    "scan over rows": (lambda x, u: lax.scan(lambda c, row: (c, row + 0), 0, x)[1], 1, 1, None),
}

# One scale for all values, so that only units can be split.
MERGED = {
    "merge": (lambda x, u: x.reshape(6 * 2 * u), 2, 0, True),
    "merge and split": (lambda x, u: x.reshape(3, 4 * u), 2, 0, True),
    "merge and split in units": (lambda x, u: x.reshape(4, 3, u), 2, 0, True),
}

# A scale for each value.
FINE = {
    "concatenate, the last partial": (lambda x, u: jnp.concatenate([x[:, :u], x], 1), 1, 1, True)
}

BY_UNIT = ["int1", "ternary", "int2", "uint3", "int4", "int5", "mxfp6", "uint7"]


def random_codes(format, shape):
    """Return random codes of the whole range, one per byte."""
    low, high = format.code_range
    codes = np.random.default_rng(0).integers(low, high + 1, shape)
    if format.name == "int1":
        codes = np.where(codes < 0, -1, 1)
    return jnp.asarray(codes.astype(np.int8 if format.signed else np.uint8))


def packed_array(qtype, shape, axis, counts):
    """Return random codes packed along an axis, with a scale of shape `counts` and a zero point."""
    format = FORMATS[qtype]
    packed, packing = pack(format.to_fields(random_codes(format, shape)), format.bits, axis)
    scale = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, counts), jnp.float32)
    zero_point = jnp.full(counts, 2, jnp.uint8) if qtype.startswith("uint") else None
    return QArray.from_packed(packed, scale, zero_point, qtype=qtype, packing=packing)


def run_all(programs, arrays):
    """Run each program on its QArray and on the dense array, compiled as one."""

    @jax.jit
    def run(arrays):
        return [
            (vn.implicit(program)(q), program(q.dequantize()))
            for program, q in zip(programs, arrays, strict=True)
        ]

    return run(arrays)


def assert_same_values(output, expected, name):
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype), name
    np.testing.assert_array_equal(stored_values(output), expected, err_msg=name)


@pytest.mark.parametrize("qtype", BY_UNIT)
def test_whole_units_stay_packed(qtype):
    codes, _ = UNITS[FORMATS[qtype].bits]
    programs, arrays, kept = [], [], {}
    for table, counts in ((ALONG, (6, 1)), (MERGED, (1, 1)), (FINE, (6, None))):
        for name, (run, w, rest, is_kept) in table.items():
            size = w * codes + rest
            programs.append(lambda x, run=run: run(x, codes))
            arrays.append(packed_array(qtype, (6, size), -1, [n or size for n in counts]))
            kept[name] = is_kept
    for name, (output, expected) in zip(kept, run_all(programs, arrays), strict=True):
        assert_same_values(output, expected, name)
        if kept[name] is not None:
            assert isinstance(output, QArray) == bool(kept[name]), name
            if kept[name]:
                assert (output.packing is None) == (kept[name] == BYTES), name


# The same along the first axis: values [w·u + rest, 4].
FIRST = {
    "transpose": (lambda x, u: x.T, 1, 1, Packing(-1, 1)),
    "columns": (lambda x, u: x[:, ROWS % 4], 1, 1, Packing(-2, 1)),
    "slice of units": (lambda x, u: x[u:], 2, 1, Packing(-2, 1)),
    "row": (lambda x, u: x[1], 1, 0, BYTES),
    "split": (lambda x, u: x.reshape(2, u, 4), 2, 0, Packing(-2, 0)),
    "split to the last": (lambda x, u: x.reshape(u, 2, 4), 2, 0, None),
    "concatenate": (lambda x, u: jnp.concatenate([x[:u], x[u:]]), 2, 0, Packing(-2, 1)),
    "stack": (lambda x, u: jnp.stack([x, x], 1), 1, 1, Packing(-3, 1)),
}


@pytest.mark.parametrize("qtype", ["ternary", "uint3"])
def test_units_can_be_along_another_axis(qtype):
    codes, _ = UNITS[FORMATS[qtype].bits]
    arrays = [
        packed_array(qtype, (w * codes + rest, 4), 0, (1, 4)) for _, w, rest, _ in FIRST.values()
    ]
    programs = [lambda x, run=run: run(x, codes) for run, _, _, _ in FIRST.values()]
    outputs = run_all(programs, arrays)
    for (name, (*_, packing)), (output, expected) in zip(FIRST.items(), outputs, strict=True):
        assert_same_values(output, expected, name)
        assert isinstance(output, QArray) == (packing is not None), name
        if packing == BYTES:
            assert output.packing is None, name
        elif packing is not None:
            assert output.packing == Packing(packing.axis, expected.shape[packing.axis]), name


@pytest.mark.parametrize("qtype", ["ternary", "uint3", "int4"])
def test_a_packed_axis_of_size_one_needs_no_packing(qtype):
    q = packed_array(qtype, (3, 1, 4), 1, (3, 1, 4))
    programs = [
        lambda x: x.squeeze(1),
        lambda x: x.reshape(12),
        lambda x: jnp.concatenate([x, x], 1),
    ]
    for output, expected in run_all(programs, [q] * len(programs)):
        assert_same_values(output, expected, qtype)
        assert isinstance(output, QArray)
        assert output.packing is None


def test_a_unit_does_not_span_two_axes():
    q = packed_array("int2", (3, 4), -1, (1, 1))
    run = vn.implicit(lambda x: x.reshape(3, 2, 2), on_materialise="error")
    with pytest.raises(vn.MaterialiseError):
        jax.eval_shape(run, q)


# Formats with their own scale formats, on values [4, 6, 64], quantized along the last axis.
NESTED = {
    "transpose": lambda x: x.transpose(2, 0, 1),
    "one of the stack": lambda x: x[1],
    "rows": lambda x: x[:, ROWS],
    "some of the stack, filled": lambda x: jnp.take(x, jnp.array([3, 9]), axis=0),
    "slice of rows": lambda x: x[:, 1:3],
    "slice of tiles": lambda x: x[..., 32:],
    "split the last axis": lambda x: x.reshape(4, 6, 2, 32),
    "merge the first axes": lambda x: x.reshape(24, 64),
    "concatenate the stack": lambda x: jnp.concatenate([x, x[:1]]),
    "concatenate rows": lambda x: jnp.concatenate([x, x], 1),
    "concatenate tiles": lambda x: jnp.concatenate([x, x[..., :32]], 2),
    "stack": lambda x: jnp.stack([x, x], 2),
    "broadcast": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
    "column": lambda x: x[..., 5],
    "dynamic column": lambda x: lax.dynamic_index_in_dim(x, jnp.int32(40), 2),
    "columns": lambda x: x[..., ROWS + 1],
    "within a tile": lambda x: x[..., 8:16],
    "dynamic rows": lambda x: lax.dynamic_slice(x, (0, jnp.int32(3), 0), (4, 2, 64)),
    "astype": lambda x: x.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("qtype", ["nvfp4", "nf4_dq", "mxfp6", "mxfp8"])
def test_quantized_and_power_of_two_scales_move_with_codes(qtype):
    x = jax.random.normal(jax.random.key(0), (4, 6, 64)) * jnp.arange(1, 5).reshape(4, 1, 1)
    tiles = {2: FORMATS[qtype].tile_size or 16}
    q = vn.quant.quantize(x, qtype, channelwise_axes=[0, 1], tiled_axes=tiles)
    outputs = run_all([*NESTED.values()], [q] * len(NESTED))
    for name, (output, expected) in zip(NESTED, outputs, strict=True):
        assert isinstance(output, QArray), name
        assert_same_values(output, expected, name)


def test_scales_are_dequantized_if_their_tiles_are_split():
    q = vn.quant.quantize(jnp.arange(256.0).reshape(8, 32), "nf4_dq", channelwise_axes=[0, 1])
    assert q.scale.scale.shape == (1, 1)
    tiled = q.replace(scale=q.scale.replace(scale=jnp.array([[1.0], [2.0]])))
    for scales, kept in ((q.scale.scale, True), (tiled.scale.scale, False)):
        given = q.replace(scale=q.scale.replace(scale=scales))
        output = vn.implicit(lambda x: x[1:3], on_materialise="error")(given)
        assert isinstance(output.scale, QArray) == kept
        np.testing.assert_array_equal(output.dequantize(), given.dequantize()[1:3])


@pytest.mark.parametrize("qtype", ["nvfp4", "mxfp6", "ternary", "int3"])
def test_vmap_and_scan_slice_a_stack(qtype):
    x = jax.random.normal(jax.random.key(0), (3, 4, 32))
    q = vn.quant.quantize(x, qtype, channelwise_axes=[0, 1])
    dense = q.dequantize()
    mapped = jax.vmap(lambda w: w.dequantize())(q)
    scanned = lax.scan(lambda c, w: (c, w.dequantize()), 0, q)[1]
    inside = vn.implicit(lambda x: lax.scan(lambda c, w: (c, w.T), 0, x)[1], on_materialise="error")
    np.testing.assert_array_equal(mapped, dense)
    np.testing.assert_array_equal(scanned, dense)
    np.testing.assert_array_equal(stored_values(inside(q)), dense.mT)


def test_scales_of_different_dtypes_are_not_concatenated():
    q = packed_array("int4", (4, 6), -1, (4, 1))
    p = q.replace(scale=q.scale.astype(jnp.bfloat16))
    out = vn.implicit(lambda q, p: jnp.concatenate([q, p]))(q, p)
    np.testing.assert_array_equal(out, jnp.concatenate([q.dequantize(), p.dequantize()]))


def test_a_cast_to_eight_bits_rounds():
    q = vn.quant.quantize(jnp.linspace(-1, 1, 8), "int8")
    out = vn.implicit(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32))(q)
    np.testing.assert_array_equal(out, q.dequantize().astype("float8_e4m3fn").astype("float32"))
