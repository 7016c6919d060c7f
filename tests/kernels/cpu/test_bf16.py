"""Kernels of bf16 activations equal the product with a dense bf16 matrix, with sums in f32."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.cpu.driver import KINDS, guarded, run, stored

import veneer as vn
from veneer.kernels import Codes, select
from veneer.kernels.common.problem import MatmulShape
from veneer.kernels.cpu import build

pytestmark = pytest.mark.skipif(not build.has_bf16(), reason="this CPU cannot multiply bf16")

BF16 = ml_dtypes.bfloat16
#: B, M, K, N, and a tile K x N: incomplete panels, blocks and groups, and tiles of all shapes.
SHAPES = [
    (1, 16, 64, 128, 64, 1),
    (1, 17, 300, 131, 60, 131),
    (2, 20, 98, 257, 49, 1),
    (1, 23, 2, 40, 1, 40),
    (1, 16, 130, 70, 10, 7),
    (2, 300, 256, 129, 32, 3),
]


def activations(*shape):
    return np.random.default_rng(2).normal(size=shape).astype(BF16)


def product(side, x, w, threads=1, guard=guarded):
    """Run a kernel on arrays next to inaccessible memory."""
    n = w.packed.shape[1] if side == "columns" else w.columns
    out = guard(np.full((*x.shape[:2], n), np.nan, np.float32))
    w = w._replace(packed=guard(w.packed), scale=guard(w.scale))
    run(f"veneer_bf16_{side}_{w.kind}", guard(x), w, out, threads=threads)
    return out


def dense_bf16(side, w):
    """Return the matrix `[B, K, N]`, rounded to bf16, as f64."""
    tr, tc = (w.codes.shape[i] // w.scale.shape[i] for i in (1, 2))
    scale = w.scale.repeat(tr, 1).repeat(tc, 2)
    dense = (w.codes.astype(np.float32) * scale).astype(BF16).astype(np.float64)
    return dense if side == "rows" else dense.swapaxes(1, 2)


def check(side, kind, shape, **options):
    batch, m, k, n, *tile = shape
    order = (k, n), tile
    if side == "columns":
        order = (n, k), tile[::-1]
    x, w = activations(batch, m, k), stored(kind, (batch, *order[0]), order[1])
    wide, dense = x.astype(np.float64), dense_bf16(side, w)
    size = np.abs(wide) @ np.abs(dense)
    assert np.all(np.abs(product(side, x, w, **options) - wide @ dense) <= 1e-6 * size)


@pytest.mark.parametrize("side", ["rows", "columns"])
class TestProduct:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_products_equal_the_dense_product(self, side, kind, shape):
        check(side, kind, shape)

    @pytest.mark.parametrize("offset", [1, 3])
    def test_needs_no_alignment(self, side, offset):
        guard = lambda array: guarded(array, at_end=False, offset=2 * offset)
        check(side, "lookup4", SHAPES[1], guard=guard)

    @pytest.mark.parametrize("threads", [2, 8])
    def test_does_not_depend_on_threads(self, side, threads):
        order = (512, 300) if side == "rows" else (300, 512)
        x = activations(1, 20, 512)
        w = stored("lookup4", (1, *order), (32, 1) if side == "rows" else (1, 32))
        np.testing.assert_array_equal(product(side, x, w), product(side, x, w, threads=threads))

    @pytest.mark.parametrize("number", [np.inf, np.nan])
    def test_keeps_non_finite_numbers_in_their_row(self, side, number):
        order = (128, 130) if side == "rows" else (130, 128)
        x, w = activations(1, 20, 128), stored("int8", (1, *order), (1, 1))
        x[0, 3, 7] = number
        out = product(side, x, w)
        others = np.delete(out, 3, 1)
        assert not np.isfinite(out[0, 3]).any()
        assert np.isfinite(others).all()


def shape_of(**changes):
    sizes = {"contracting": "rows", "activations": "bfloat16", "m": 16, "k": 256, "n": 256}
    return MatmulShape(**{**sizes, "tile": 256, **changes})


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, "bf16_rows_int8"),
        ({"contracting": "columns"}, "bf16_columns_int8"),
        ({"m": 15}, "rows_int8"),
        ({"k": 257, "tile": 257}, "rows_int8"),
        ({"activations": "float"}, "rows_int8"),
    ],
)
def test_bf16_kernels_are_selected_for_many_rows(changes, target):
    kernel = select.find_kernel("cpu", Codes(8, "int8"), shape_of(**changes))
    assert f"{kernel.name}_int8" == target


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_bf16_program_equals_that_with_dense_weights(qtype):
    x = jnp.asarray(activations(32, 256))
    w = jnp.asarray(activations(256, 192))
    q = vn.quant.quantize(w, qtype, channelwise_axes=[1], tiled_axes={0: 64})
    found = jax.jit(vn.implicit(jnp.matmul))(x, q)
    assert found.dtype == jnp.bfloat16
    assert "bf16_rows" in vn.explain(jnp.matmul)(x, q).events[0].how
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert np.max(error / np.abs(expected).max()) < 2**-8
