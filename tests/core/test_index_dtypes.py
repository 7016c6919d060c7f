"""Starts and indices of every integer dtype, in and out of bounds, agree with dense arrays."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.every_type import EVERY_TYPE, plain, value

import veneer as vn
from veneer._jax.primitives import find_primitive, start_in_bounds
from veneer.kernels.cpu import build

T = vn.types
K = 160  # wide enough for products by kernels
N = 320  # more rows than an index of 8 bits counts
DTYPES = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]


def indices(dtype, size):
    """Numbers of a dtype on both sides of the ends of an axis, as far as the dtype has them."""
    ends = jnp.iinfo(dtype)
    numbers = {
        -2 * size - 1,
        -size - 1,
        -size,
        -1,
        0,
        1,
        43,
        44,
        100,
        250,
        size - 1,
        size,
        2 * size,
    }
    inside = {n for n in numbers if ends.min <= n <= ends.max} | {int(ends.min), int(ends.max)}
    return np.array(sorted(inside), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "length"), [(1, 1), (N, 1), (N, 7), (70_000, 1), (2**31 + 9, 2)])
def test_starts_are_clamped_in_any_dtype(dtype, size, length):
    with jax.enable_x64(True):
        numbers = indices(dtype, size)
        starts = [start_in_bounds(number, size, length) for number in numbers]
        expected = [min(max(int(number), 0), size - length) for number in numbers]
        assert [int(start) for start in starts] == expected
        assert {start.dtype.name for start in starts} == {"int32" if size < 2**31 else dtype}


def along(i, axis, ndim):
    return [i if axis == a else jnp.zeros_like(i) for a in range(ndim)]


def read(w, i, axis=0, length=1):
    """A slice by the primitive, which counts no start from the end."""
    sizes = [length if axis == a else n for a, n in enumerate(w.shape)]
    slice_ = partial(find_primitive("dynamic_slice").bind, slice_sizes=tuple(sizes))
    return slice_(w, *along(i, axis, w.ndim)) + 0


def layer(w, i):
    """Slice every axis by `dynamic_slice`, and one axis by a public function."""
    sizes = [1, *(max(1, n - 1) for n in w.shape[1:])]
    return lax.dynamic_slice(w, [i] * w.ndim, sizes) + 0, lax.dynamic_index_in_dim(w, i) + 0


def look_up(w, i):
    """Gather rows by `gather`, and by `vmap` of a slice. Indexing itself rejects int8 here."""
    axes = tuple(range(1, w.ndim))
    numbers, rows = lax.GatherDimensionNumbers(axes, (0,), (0,)), jnp.stack([i, i])
    taken = [
        lax.gather(w, rows[:, None], numbers, (1, *w.shape[1:]), mode=mode) + 0
        for mode in ("clip", "fill")
    ]
    return [*taken, jax.vmap(lambda i: read(w, i))(rows)]


def quantized(qtype, **how):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(N, 8)), jnp.float32)
    return vn.quant.quantize(w, qtype, **how)


TILED = {"channelwise_axes": (1,), "tiled_axes": {0: 16}}
VALUES = {
    "int8, a scale for each row": lambda: quantized("int8", channelwise_axes=(0,)),
    "int8, one scale for all rows": lambda: quantized("int8", channelwise_axes=(1,)),
    "int8, a scale for some rows": lambda: quantized("int8", **TILED),
    "int3, planes of bits along rows": lambda: (
        vn.quant.quantize(
            quantized("int3", channelwise_axes=(0,)).dequantize().T, "int3", channelwise_axes=(1,)
        ).T
    ),
    "nf4 with quantized scales": lambda: quantized("nf4_dq", **TILED),
    "a constant for each row": lambda: T.Constant(jnp.arange(N, dtype="float32"), (8,)),
    "sparse": lambda: T.SparseArray.from_dense(jnp.eye(N, 8), nse=8),
    "sparse rows": lambda: T.SparseArray.from_dense(jnp.eye(N, 8) + 1, n_batch=1),
    "Lora": lambda: T.LoraArray(jnp.eye(N, 8), jnp.ones((N, 2)), jnp.ones((2, 8))),
}


def compare(program, w, dtype, mode=nullcontext, wrap=vn.implicit, least=None, atol=1e-6):
    """Compare a program of an implicit array and an index with the dense program."""
    over = lambda w, numbers: lax.map(lambda i: program(w, i), numbers)
    with jax.enable_x64(dtype.endswith("64")), mode():
        numbers = indices(dtype, w.shape[0])
        numbers = jnp.asarray(numbers if least is None else numbers[numbers >= least])
        out = jax.tree.map(plain, jax.jit(wrap(over))(w, numbers), is_leaf=is_value)
        expected = jax.jit(over)(plain(w), numbers)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=atol), out, expected)


def is_value(x):
    return isinstance(x, vn.Value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VALUES)
def test_indices_of_slices_can_have_any_dtype(name, dtype):
    compare(lambda w, i: [read(w, i), read(w, i, length=16), layer(w, i)], VALUES[name](), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VALUES)
def test_indices_of_lookups_can_have_any_dtype(name, dtype):
    # A dense gather in JAX 0.10 to 0.12 looks at the low half of an int64: -(2**63) is row 0.
    compare(look_up, VALUES[name](), dtype, least=None if dtype[0] == "u" else -(2**31))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("name", VALUES)
def test_high_types_are_sliced_at_any_dtype(name, dtype):
    program = lambda w, i: [read(w, i), layer(w, i)]
    compare(program, VALUES[name](), dtype, vn.hijax.enabled, lambda program: program)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("name", VALUES)
def test_eager_slices_agree_at_any_dtype(name, dtype):
    w = VALUES[name]()
    for i in indices(dtype, N)[[0, 1, -3, -1]]:
        out, expected = (vn.implicit(read)(v, jnp.asarray(i)) for v in (w, plain(w)))
        np.testing.assert_allclose(plain(out), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_a_cache_are_written_at_any_dtype(dtype):
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(3, N, 8)), jnp.float32)
    how = {"channelwise_axes": (0, 2), "tiled_axes": {1: 4}}
    whole = vn.quant.quantize(tokens, "int8", **how).dequantize()
    empty = vn.quant.zeros((3, N, 8), "int8", block_axis=1, **how)
    assert isinstance(empty, vn.quant.BlockCache)
    update = find_primitive("dynamic_update_slice").bind

    def write(cache, i):
        zero = jnp.zeros_like(i)
        full = lax.dynamic_update_slice(cache, whole, (0, 0, 0))
        # The first and the last axis are written whole, wherever they are said to begin.
        return update(full, jnp.ones((3, 5, 8), "float32"), i, i, zero - 1) + 0

    over = lambda cache, numbers: lax.map(lambda i: write(cache, i), numbers)
    with jax.enable_x64(dtype.endswith("64")):
        numbers = jnp.asarray(indices(dtype, N))
        out = jax.jit(vn.implicit(over))(empty, numbers)
        expected = jax.jit(over)(jnp.zeros((3, N, 8), "float32"), numbers)
    # A block with changed tokens is rounded again, and the last block is not.
    np.testing.assert_allclose(out, expected, atol=0.04)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_cache_are_written_at_any_dtype(dtype):
    empty = vn.quant.zeros((N, 8), "float8_e4m3fn", channelwise_axes=(0,))
    update = find_primitive("dynamic_update_slice").bind

    def write(cache, i):
        row, numbers = jnp.ones((1, 8), "float32"), lax.ScatterDimensionNumbers((1,), (0,), (0,))
        place = partial(lax.scatter, dimension_numbers=numbers)
        placed = [place(cache, i[None, None], row, mode=mode) + 0 for mode in ("clip", "drop")]
        return [update(cache, row, i, i) + 0, *placed]

    compare(write, empty, dtype, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_of_a_stack_is_read_at_any_dtype(dtype, nested):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(N, K, K)), jnp.float32)
    q = vn.quant.quantize(w, "int8", channelwise_axes=(0, 2))
    x = jnp.asarray(rng.normal(size=(1, K)), jnp.float32)

    def run(x, w, numbers):
        w = w.reshape(2, N // 2, K, K) if nested else w

        def step(c, i):
            layer = lambda w, i: lax.dynamic_index_in_dim(w, i, keepdims=False)
            one = layer(layer(w, jnp.ones_like(i)), i) if nested else layer(w, i)
            return c, x @ one

        return lax.scan(step, None, numbers)[1]

    with jax.enable_x64(dtype.endswith("64")):
        numbers = jnp.asarray(indices(dtype, N))
        program = jax.jit(vn.implicit(run)).lower(x, q, numbers).compile()
        out, expected = program(x, q, numbers), jax.jit(run)(x, q.dequantize(), numbers)
        if build.unavailable_reason() is None:
            assert 'custom_call_target="veneer_' in program.as_text()
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow  # a program of each type and dtype
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_every_type_is_indexed_at_any_dtype(name, dtype):
    w = value(name, (N,))
    if isinstance(w, T.Masked | T.Named | T.Quantity | T.PRNGKey):
        pytest.skip("it has no dense form")
    compare(lambda w, i: [read(w, i), layer(w, i), look_up(w, i)], w, dtype)
