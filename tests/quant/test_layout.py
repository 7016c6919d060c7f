import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from support import arrays
from support.stored_values import entry_of_each_value, stored_values

import veneer as vn
from veneer._core.primitives.axes import reshape_leaf_shape
from veneer.quant import Packing, QArray
from veneer.quant.formats.packing import pack

IDS = arrays.array([[3, 0], [1, -1]])
OUT_OF_BOUNDS = arrays.array([7, 2, -9])

# Programs of a weight, and the shape of the weight.
PROGRAMS = {
    "transpose": (lambda x: x.T, (4, 5, 6)),
    "transpose of some axes": (lambda x: x.transpose(1, 0, 2), (4, 5, 6)),
    "swapaxes": (lambda x: x.swapaxes(-1, -2), (4, 5, 6)),
    "squeeze": (lambda x: x.squeeze((0, 2)), (1, 5, 1)),
    "new axes": (lambda x: x[None, :, None], (4, 5)),
    "broadcast to leading axes": (lambda x: jnp.broadcast_to(x, (2, 3, *x.shape)), (4, 5)),
    "broadcast of size one": (lambda x: jnp.broadcast_to(x, (2, 4, 3, 5)), (4, 1, 5)),
    "split the last axis": (lambda x: x.reshape(4, 2, 6), (4, 12)),
    "split the first axis": (lambda x: x.reshape(3, 4, 5), (12, 5)),
    "split in three": (lambda x: x.reshape(2, 3, 2, 5), (12, 5)),
    "split an odd axis": (lambda x: x.reshape(3, 5, 4), (15, 4)),
    "merge": (lambda x: x.reshape(12, 5), (3, 4, 5)),
    "merge the last axes": (lambda x: x.reshape(3, 20), (3, 4, 5)),
    "merge and split": (lambda x: x.reshape(6, 4), (4, 6)),
    "ravel": (lambda x: x.ravel(), (3, 4, 2)),
    "reshape by ones": (lambda x: x.reshape(4, 1, 5, 1), (1, 4, 5)),
    "reshape of one value": (lambda x: x.reshape(()), (1, 1)),
    "reshape of none": (lambda x: x.reshape(5, 0), (0, 4)),
    "slice the first axis": (lambda x: x[2:6], (8, 5)),
    "slice the last axis": (lambda x: x[..., 4:], (3, 9)),
    "slice within a tile": (lambda x: x[1:4, 1:4], (6, 6)),
    "slice with strides": (lambda x: x[::2, 1::3], (6, 7)),
    "slice of none": (lambda x: x[2:2], (6, 5)),
    "reversed by indices": (lambda x: x[jnp.arange(5, -1, -1)], (6, 5)),
    "row": (lambda x: x[3], (6, 5)),
    "column": (lambda x: x[:, 3], (6, 5)),
    "dynamic row": (lambda x: lax.dynamic_index_in_dim(x, jnp.int32(9), 0), (6, 5)),
    "column within a tile": (lambda x: x[:, 3], (6, 6)),
    "entry within tiles": (lambda x: x[3, 4], (6, 6)),
    "dynamic entry": (lambda x: lax.dynamic_slice(x, OUT_OF_BOUNDS[:2], (1, 1)), (6, 6)),
    "rows within a tile": (lambda x: x[1:3], (8, 6)),
    "row of each": (lambda x: jax.vmap(lambda x, i: x[i])(x, IDS[0]), (2, 6, 4)),
    "dynamic columns": (lambda x: lax.dynamic_slice(x, (0, jnp.int32(1)), (6, 2)), (6, 5)),
    "rows": (lambda x: x[IDS], (6, 5)),
    "columns": (lambda x: x[:, IDS], (5, 6)),
    "elements": (lambda x: x[IDS, IDS[::-1]], (5, 6)),
    "rows of small indices": (lambda x: x[IDS.astype(jnp.uint8)], (300, 2)),
    "take": (lambda x: jnp.take(x, IDS, axis=1), (3, 6, 4)),
    "take out of bounds": (lambda x: jnp.take(x, OUT_OF_BOUNDS, axis=0), (6, 5)),
    "take filled": (lambda x: x.at[OUT_OF_BOUNDS].get(mode="fill", fill_value=2), (6, 5)),
    "take clipped": (lambda x: jnp.take(x, OUT_OF_BOUNDS, axis=0, mode="clip"), (6, 5)),
    "take wrapped": (lambda x: jnp.take(x, OUT_OF_BOUNDS, axis=1, mode="wrap"), (4, 6)),
    "take_along_axis": (lambda x: jnp.take_along_axis(x, IDS, axis=0), (6, 2)),
    "windows": (
        lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (2, 5)))(OUT_OF_BOUNDS),
        (6, 5),
    ),
    "concatenate": (lambda x: jnp.concatenate([x, x]), (4, 5)),
    "concatenate columns": (lambda x: jnp.concatenate([x, x, x], axis=1), (4, 6)),
    "stack": (lambda x: jnp.stack([x, x]), (4, 5)),
    "stack columns": (lambda x: jnp.stack([x, x, x], axis=-1), (4, 5)),
    "split": (lambda x: jnp.split(x, 2)[1], (4, 5)),
    "split columns": (lambda x: jnp.split(x, [2, 4], axis=1)[0], (4, 6)),
    "copy": (lambda x: lax.stop_gradient(jnp.copy(x)), (4, 5)),
    "astype": (lambda x: x.astype(jnp.bfloat16), (4, 5)),
    "astype int": (lambda x: x.astype(jnp.int32), (4, 5)),
    "vmap of transpose": (jax.vmap(jnp.transpose), (2, 3, 4)),
    "vmap of rows": (lambda x: jax.vmap(lambda w, i: w[i])(x, IDS), (2, 4, 5)),
}


def qarray(shape, qtype="int4", *, counts, packed_axis=None, zero_point=False):
    """Return random codes with a scale of shape `counts`, packed along any axis."""
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.uniform(0.5, 2, counts), jnp.float32)
    zero = jnp.asarray(rng.integers(-4, 4, counts), jnp.int8) if zero_point else None
    if qtype == "int8":
        return QArray(jnp.asarray(rng.integers(-128, 128, shape), jnp.int8), scale, zero)
    codes, packing = rng.integers(0, 16, shape).astype(np.uint8), None
    if packed_axis is not None:
        codes, packing = pack(codes, 4, packed_axis)
    return QArray.from_packed(jnp.asarray(codes), scale, zero, qtype=qtype, packing=packing)


def tilings(shape):
    """Yield shapes of scales: shared, channelwise, and tiled along each axis with a divisor."""
    yield (1,) * len(shape)
    yield shape
    for axis, size in enumerate(shape):
        tile = next((tile for tile in (2, 3) if size and size % tile == 0), None)
        if tile is not None:
            yield (*shape[:axis], size // tile, *shape[axis + 1 :])
            yield tuple(size // tile if i == axis else 1 for i in range(len(shape)))


def every_layout(shape):
    """Yield QArrays with each tiling, packed along each axis or not packed."""
    for counts, axis in itertools.product(tilings(shape), range(len(shape))):
        yield qarray(shape, "int4", counts=counts, packed_axis=axis, zero_point=axis == 0)
    yield qarray(shape, "nf4", counts=shape, packed_axis=-1)
    yield qarray(shape, "nf4", counts=shape)
    yield qarray(shape, "int8", counts=shape, zero_point=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_layout_gives_the_values_of_the_dense_array(program):
    run, shape = PROGRAMS[program]
    layouts = list(every_layout(shape))
    outputs = jax.jit(lambda layouts: [vn.implicit(run)(q) for q in layouts])(layouts)
    run_dense = jax.jit(run)
    for q, output in zip(layouts, outputs, strict=True):
        expected = run_dense(stored_values(q))
        assert (output.shape, output.dtype) == (expected.shape, expected.dtype), q
        np.testing.assert_array_equal(
            stored_values(output).astype(np.float32),
            np.asarray(expected, np.float32),
            err_msg=str(q),
        )


# Programs that keep a layout quantized, with the shape of the scale and the packed axis, before and
# after.
KEPT = [
    ("transpose", (1, 5, 3), -1, (3, 5, 1), Packing(-3, 6)),
    ("transpose of some axes", (4, 1, 3), -3, (1, 4, 3), Packing(-2, 4)),
    ("squeeze", (1, 5, 1), -2, (5,), Packing(-1, 5)),
    ("squeeze", (1, 5, 1), -1, (5,), None),
    ("new axes", (2, 5), -1, (1, 2, 1, 5), Packing(-1, 5)),
    ("broadcast to leading axes", (2, 5), -1, (2, 3, 2, 5), Packing(-1, 5)),
    ("broadcast of size one", (4, 1, 5), -1, (2, 4, 1, 5), Packing(-1, 5)),
    ("split the last axis", (4, 4), -1, (4, 2, 2), Packing(-1, 6)),
    ("split the last axis", (4, 2), -1, (4, 2, 1), Packing(-1, 6)),
    ("split the last axis", (4, 1), -2, (4, 1, 1), Packing(-3, 4)),
    ("split the first axis", (6, 5), -1, (3, 2, 5), Packing(-1, 5)),
    ("merge", (3, 2, 5), -1, (6, 5), Packing(-1, 5)),
    ("merge", (3, 1, 1), -2, (3, 1), Packing(-2, 12)),
    ("merge the last axes", (1, 4, 5), -3, (1, 20), Packing(-2, 3)),
    ("reshape by ones", (1, 2, 5), -1, (2, 1, 5, 1), Packing(-2, 5)),
    ("slice the first axis", (4, 5), -1, (2, 5), Packing(-1, 5)),
    ("slice the first axis", (1, 5), -2, (1, 5), Packing(-2, 4)),
    ("slice the last axis", (3, 9), -1, (3, 5), Packing(-1, 5)),
    ("slice with strides", (6, 1), None, (3, 1), None),
    ("row", (6, 5), -1, (5,), Packing(-1, 5)),
    ("dynamic row", (6, 1), -1, (1, 1), Packing(-1, 5)),
    ("dynamic columns", (3, 5), -2, (3, 2), Packing(-2, 6)),
    ("dynamic row", (3, 1), -1, (1, 1), Packing(-1, 5)),
    ("dynamic row", (6, 1), -2, (1, 1), None),
    ("column", (6, 5), -1, (6,), None),
    ("column within a tile", (2, 2), -2, (2,), Packing(-1, 6)),
    ("entry within tiles", (3, 2), -1, (), None),
    ("dynamic entry", (2, 3), -2, (1, 1), None),
    ("rows within a tile", (2, 6), -1, (1, 6), Packing(-1, 6)),
    ("row of each", (2, 3, 1), -1, (2, 1), Packing(-1, 4)),
    ("rows", (6, 1), -2, (2, 2, 1), None),
    ("rows", (6, 1), -1, (2, 2, 1), Packing(-1, 5)),
    ("rows", (2, 5), -1, (2, 2, 5), Packing(-1, 5)),
    ("columns", (5, 3), -2, (5, 2, 2), Packing(-3, 5)),
    ("rows of small indices", (1, 2), -1, (2, 2, 2), Packing(-1, 2)),
    ("take", (3, 6, 2), -1, (3, 2, 2, 2), Packing(-1, 4)),
    ("take out of bounds", (1, 1), -1, (3, 1), Packing(-1, 5)),
    ("take clipped", (3, 5), -1, (3, 5), Packing(-1, 5)),
    ("windows", (6, 5), -1, (3, 2, 5), Packing(-1, 5)),
    ("concatenate", (2, 5), -2, (4, 5), Packing(-2, 8)),
    ("concatenate columns", (1, 6), -1, (1, 18), Packing(-1, 18)),
    ("stack", (2, 5), -2, (2, 2, 5), Packing(-2, 4)),
    ("stack columns", (4, 1), -1, (4, 1, 3), Packing(-2, 5)),
    ("split", (2, 5), -1, (1, 5), Packing(-1, 5)),
    ("split columns", (1, 3), -1, (1, 1), Packing(-1, 2)),
    ("copy", (2, 1), -2, (2, 1), Packing(-2, 4)),
    ("astype", (2, 5), -1, (2, 5), Packing(-1, 5)),
    ("vmap of transpose", (2, 1, 4), -1, (2, 4, 1), Packing(-2, 4)),
    ("vmap of rows", (2, 1, 5), -1, (2, 2, 5), Packing(-1, 5)),
]


@pytest.mark.parametrize(("program", "counts", "axis", "new_counts", "new_packing"), KEPT)
def test_codes_stay_packed_if_no_tile_or_byte_is_split(
    program, counts, axis, new_counts, new_packing
):
    run, shape = PROGRAMS[program]
    q = qarray(shape, counts=counts, packed_axis=axis)
    out = jax.eval_shape(vn.implicit(run, on_materialise="error"), q)
    assert isinstance(out, QArray)
    assert (out.scale.shape, out.packing) == (new_counts, new_packing)


# Programs that would split a tile, or a byte with two codes.
CUT = [
    ("split the last axis", (4, 3), -2),  # tiles of 4 in rows of 6
    ("split an odd axis", (1, 1), -2),
    ("merge", (1, 4, 1), -1),  # scales that repeat in the next row
    ("merge the last axes", (1, 1, 1), -2),
    ("merge and split", (4, 1), -1),
    ("slice within a tile", (3, 1), -1),
    ("slice within a tile", (1, 1), -1),
    ("slice with strides", (3, 1), None),
    ("slice within a tile", (2, 1), None),  # parts of two tiles
    ("take filled", (6, 1), -1),  # the fill value may not be a multiple of the scale
    ("windows", (3, 5), -1),
    ("astype int", (4, 5), -1),
]


@pytest.mark.parametrize(("program", "counts", "axis"), CUT)
def test_splitting_a_tile_or_byte_materializes(program, counts, axis):
    run, shape = PROGRAMS[program]
    q = qarray(shape, counts=counts, packed_axis=axis)
    with pytest.raises(vn.MaterialiseError):
        jax.eval_shape(vn.implicit(run, on_materialise="error"), q)


def test_rows_out_of_bounds_are_nan_in_every_format():
    for qtype in vn.quant.FORMATS:
        table = vn.quant.quantize(jnp.ones((4, 32)), qtype, channelwise_axes=[0])
        rows = vn.implicit(lambda x: jnp.take(x, jnp.array([1, 4]), axis=0))(table)
        assert isinstance(rows, QArray)
        assert np.isnan(rows.dequantize()).tolist() == [[False] * 32, [True] * 32]


def test_different_formats_are_not_concatenated():
    q, p = (qarray((4, 6), qtype, counts=(4, 1), packed_axis=-1) for qtype in ("int4", "nf4"))
    out = vn.implicit(lambda q, p: jnp.concatenate([q, p]))(q, p)
    np.testing.assert_array_equal(out, jnp.concatenate([q.dequantize(), p.dequantize()]))


def test_a_bf16_cast_keeps_the_scale():
    q = vn.quant.quantize(jnp.linspace(-1, 1, 8), "int8")
    out = vn.implicit(lambda x: x.astype(jnp.bfloat16))(q)
    assert out.scale.dtype == jnp.float32
    np.testing.assert_array_equal(out.dequantize(), q.dequantize().astype(jnp.bfloat16))


@st.composite
def reshapes(draw):
    """Draw a shape, a reshaped one, and the shape of a leaf."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), max_size=6))

    def draw_shape():
        cuts = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        groups = [[]]
        for factor, cut in zip(factors, cuts, strict=True):
            groups = [*groups, [factor]] if cut else [*groups[:-1], [*groups[-1], factor]]
        return tuple(map(math.prod, groups))

    old, new = draw_shape(), draw_shape()
    return old, new, tuple(draw(st.sampled_from(divisors(size))) for size in old)


def divisors(size):
    return [tile for tile in range(1, size + 1) if size % tile == 0]


def numbered(counts, shape):
    """Return the index of the leaf entry that covers each value."""
    return entry_of_each_value(np.arange(math.prod(counts)).reshape(counts), shape)


@given(reshapes())
def test_reshaped_leaves_cover_the_same_values(case):
    old, new, counts = case
    new_counts = reshape_leaf_shape(counts, old, new)
    possible = [
        grid
        for grid in itertools.product(*map(divisors, new))
        if math.prod(grid) == math.prod(counts)
        and (numbered(grid, new).ravel() == numbered(counts, old).ravel()).all()
    ]
    assert possible == ([] if new_counts is None else [new_counts])


# Programs that move empty arrays, and arrays with a short last axis, which is not packed.
SHORT = {
    "transposed": lambda w: w.T,
    "a slice": lambda w: w[:, 1:],
    "a slice of the last": lambda w: w[..., :2],
    "reversed": lambda w: jnp.flip(w, 1),
    "joined": lambda w: jnp.concatenate([w, w], -1),
    "swapped": lambda w: jnp.swapaxes(w, 0, -1),
}


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (0, 8, 3), (6, 0, 3), (4, 7, 1)], ids=str)
@pytest.mark.parametrize("qtype", ["int4", "int3", "ternary"])
def test_arrays_with_short_or_empty_axes_can_be_moved(qtype, shape):
    w = vn.quant.quantize(jax.random.normal(jax.random.key(0), shape), qtype, channelwise_axes=[0])
    for name, program in SHORT.items():
        found, expected = vn.materialise(vn.implicit(program)(w)), program(w.dequantize())
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
