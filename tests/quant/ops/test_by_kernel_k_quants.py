"""Kernels for weights whose scales and minima are quantized, as in the K-quants of GGUF."""

import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from quant.ops.test_by_kernel_checkpoints import assert_close, how, normal, rounded

import veneer as vn
from veneer.quant import QArray

# Formats of codes and scales, tile size, tiles per outer scale, and whether there are minima.
CASES = {
    "Q4_K": ("uint4", "uint6", 32, 8, True),
    "Q5_K": ("uint5", "uint6", 32, 8, True),
    "Q6_K": ("int6", "int8", 16, 16, False),
    "of 4 bits, by scales in 8": ("int4", "int8", 32, 4, False),
    "of 8 bits, by scales in 6": ("int8", "uint6", 16, 24, True),
    "one outer scale": ("uint4", "uint6", 32, 24, True),
    "an outer scale each": ("uint4", "int8", 32, 1, True),
}
N, K = 70, 768
of_each_case = pytest.mark.parametrize("name", CASES)


def stored(name, shape=(N, K), outer_dtype="float16", seed=0, *, zeros=False):
    """Return a weight `[..., N, K]` with tiles along K. With `zeros`, it has no minima."""
    qtype, scale_qtype, tile, each, has_minima = CASES[name]
    rng = np.random.default_rng(seed)

    def codes(qtype, shape):
        format = vn.quant.get_format(qtype)
        low, high = format.code_range
        return jnp.asarray(rng.integers(low, high + 1, shape), format.code_dtype)

    def numbers(sign):
        tiles = (*shape[:-1], shape[-1] // tile)
        outer = rng.uniform(0.5, 2, (*tiles[:-1], tiles[-1] // each)) * sign
        leaf = QArray(codes(scale_qtype, tiles), jnp.asarray(outer, outer_dtype), qtype=scale_qtype)
        return leaf.replace(dense_dtype="float32")

    minimum = numbers(-1) if has_minima and not zeros else None
    zero_point = codes(qtype, (*shape[:-1], shape[-1] // tile)) if zeros else None
    q = QArray(codes(qtype, shape), numbers(1), zero_point, qtype=qtype, minimum=minimum)
    return q.replace(dense_dtype="float32")


@of_each_case
@pytest.mark.parametrize("of_int8", [False, True])
def test_both_sides_agree_for_any_number_of_rows(name, of_int8):
    q = stored(name)
    dense = np.asarray(q.dequantize(), np.float64)
    xs = [(normal(m, K), normal(m, N)) for m in (1, 3, 8, 33)]
    if of_int8:
        xs = [(rounded(x, CASES[name][2]), rounded(y)) for x, y in xs]

    @jax.jit
    @vn.implicit
    def run(xs, q):
        return [(x @ q.T, y @ q) for x, y in xs]

    assert all(reported.startswith("CPU kernel ") for reported in how(run, xs, q))
    for (x, y), (by_columns, by_rows) in zip(xs, run(xs, q), strict=True):
        x, y = (np.asarray(vn.materialise(values), np.float64) for values in (x, y))
        assert_close(by_columns, x @ dense.T)
        assert_close(by_rows, y @ dense)


@of_each_case
def test_activations_with_longer_tiles_agree(name):
    """A file in Q4_K_M also has matrices in Q6_K, whose tiles are shorter."""
    q, x = stored(name), rounded(normal(3, K), 64)
    product = lambda x, q: x @ q.T
    assert how(product, x, q)[0].startswith("CPU kernel integer_")
    assert_close(jax.jit(vn.implicit(product))(x, q), x.dequantize() @ q.dequantize().T)


@of_each_case
def test_zero_points_with_quantized_scales_agree(name):
    q = stored(name, zeros=True)
    for x in (normal(3, K), normal(33, K), rounded(normal(3, K), CASES[name][2])):
        actual = jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q)
        assert_close(actual, vn.materialise(x) @ q.dequantize().T)


@of_each_case
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_activations_agree(name, dtype):
    q = stored(name).replace(dense_dtype=dtype)
    for rows in (1, 33):
        x = (1e-3 * normal(rows, K)).astype(dtype)  # the largest f16 is 65504
        exact = x.astype("float32") @ q.replace(dense_dtype="float32").dequantize().T
        assert_close(jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q), exact, 1e-2)


@of_each_case
@pytest.mark.parametrize("outer_dtype", ["float32", "bfloat16"])
def test_outer_scales_of_other_dtypes_agree(name, outer_dtype):
    q, x = stored(name, outer_dtype=outer_dtype), normal(2, K)
    assert_close(jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q), x @ q.dequantize().T)


def wide_scales(program, q):
    """Return the f32 arrays of a program that have the sizes of the scales or outer scales."""
    shapes = (tuple(map(int, x.split(","))) for x in re.findall(r"f32\[([\d,]+)\]", program))
    counts = {math.prod(leaf.shape[-2:]) for leaf in (q, q.scale, q.scale.scale)}
    return [shape for shape in shapes if len(shape) > 1 and math.prod(shape[-2:]) in counts]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_nothing_is_widened_before_the_kernel(name):
    q, x = stored(name), normal(2, K)
    compiled = jax.jit(vn.implicit(lambda x, q: x @ q.T)).lower(x, q).compile().as_text()
    assert "custom-call" in compiled
    assert " dot(" not in compiled
    assert not wide_scales(compiled, q)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_derivatives_agree(name, side):
    q, x = stored(name), normal(3, N if side == "rows" else K)
    product = lambda x, w: x @ w if side == "rows" else x @ w.T
    loss = lambda x, w: (product(x, w) ** 2).sum()
    dense = q.dequantize()
    actual = jax.jit(jax.grad(vn.implicit(loss)))(x, q)
    assert_close(actual, jax.grad(loss)(x, dense))
    with_outer = lambda outer: q.replace(scale=q.scale.replace(scale=outer))
    outer = q.scale.scale.astype(jnp.float32)
    by_kernel = lambda outer: vn.implicit(loss)(x, with_outer(outer))
    in_dense = lambda outer: loss(x, with_outer(outer).dequantize())
    assert_close(jax.grad(by_kernel)(outer), jax.grad(in_dense)(outer))
    moved = jax.jvp(by_kernel, (outer,), (outer,))[1]
    assert_close(moved, jax.jvp(in_dense, (outer,), (outer,))[1])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("of_tiles", [False, True])
def test_derivatives_by_scales_of_activations_agree(name, of_tiles):
    q, x = stored(name), rounded(normal(3, K), CASES[name][2] if of_tiles else None)
    loss = lambda x, w: ((x @ w.T) ** 2).sum()
    by_kernel = lambda scale: vn.implicit(loss)(x.replace(scale=scale), q)
    in_dense = lambda scale: loss(x.replace(scale=scale).dequantize(), q.dequantize())
    assert_close(jax.jit(jax.grad(by_kernel))(x.scale), jax.grad(in_dense)(x.scale))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_batches_loops_devices_and_exports_agree(name):
    """Batches of activations and weights, layers in a loop, several devices, and export."""
    product = lambda x, w: x @ w.T
    q, x = stored(name), normal(4, K)
    dense = q.dequantize()
    mapped = jax.jit(vn.implicit(jax.vmap(product, (0, None))))(x, q)
    assert_close(mapped, product(x, dense))
    layers, xs = stored(name, (3, N, K)), normal(3, 2, K)
    of_layers = jax.vmap(product)(xs, layers.dequantize())
    assert_close(jax.jit(vn.implicit(jax.vmap(product)))(xs, layers), of_layers)
    step = lambda carry, pair: (carry, product(*pair))
    scanned = jax.jit(vn.implicit(lambda xs, ws: jax.lax.scan(step, None, (xs, ws))[1]))
    assert_close(scanned(xs, layers), of_layers)
    program = scanned.lower(xs, layers).compile().as_text()
    assert not wide_scales(program, layers)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    for spec in (jax.P("x"), jax.P(None, "x")):
        cut = jax.device_put(x, jax.NamedSharding(mesh, spec))
        assert_close(jax.jit(vn.implicit(product))(cut, q), product(x, dense))
    exported = jax.export.export(jax.jit(vn.implicit(product)))(x, q)
    assert_close(exported.call(x, q), product(x, dense))
    of_rows = jax.device_put(q, jax.NamedSharding(mesh, jax.P("x")))
    assert_close(jax.jit(vn.implicit(product))(x, of_rows), product(x, dense))


@pytest.mark.parametrize("tiles", [10, 12])
def test_scales_that_end_within_a_byte_are_dequantized(tiles):
    """No kernel reads such codes of scales."""
    q, x = stored("an outer scale each", (N, 32 * tiles)), normal(2, 32 * tiles)
    codes = jnp.clip(q.scale.qvalue, 1, 63).astype(vn.quant.get_format("uint6").code_dtype)
    codes = QArray(codes, q.scale.scale, qtype="uint6")
    q = q.replace(scale=codes.replace(dense_dtype="float32"), minimum=None)
    assert_close(jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q), x @ q.dequantize().T)
