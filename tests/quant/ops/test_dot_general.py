import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.array_types import Lora
from support.arrays import normal
from support.policies import only_by_rules

import veneer as vn
from veneer import kernels
from veneer.quant import FORMATS, QArray, quantize
from veneer.quant.ops import operands

MATMUL = (([1], [0]), ([], []))


@pytest.fixture(autouse=True)
def by_xla():
    """Use the strategies by XLA. For kernels, see test_by_kernel.py."""
    with kernels.use("xla"):
        yield


# Shapes of lhs and rhs, and the dimension numbers.
CONTRACTIONS = {
    "matmul": ((3, 8), (8, 5), (([1], [0]), ([], []))),
    "transposed": ((8, 3), (5, 8), (([0], [1]), ([], []))),
    "batch": ((2, 3, 8), (2, 8, 5), (([2], [1]), ([0], [0]))),
    "batch axes out of order": ((3, 2, 8, 4), (8, 4, 5, 2), (([2], [0]), ([3, 1], [1, 3]))),
    "two contracting axes": ((3, 8, 2), (2, 5, 8), (([1, 2], [2, 0]), ([], []))),
    "several free axes": ((3, 8, 2), (5, 8, 4, 3), (([1], [1]), ([], []))),
    "vectors": ((8,), (8,), (([0], [0]), ([], []))),
    "matrix times vector": ((3, 8), (8,), (([1], [0]), ([], []))),
    "outer product": ((3,), (5,), (([], []), ([], []))),
    "empty sum": ((3, 0), (0, 5), (([1], [0]), ([], []))),
    "empty free axis": ((0, 8), (8, 5), (([1], [0]), ([], []))),
}


def tiled(x, qtype, contracting, tiling):
    """Quantize `x` with scales that vary as `tiling` says."""
    free = [axis for axis in range(x.ndim) if axis not in contracting]
    if tiling == "channelwise":
        return quantize(x, qtype, channelwise_axes=free)
    if tiling == "tiled free axes":
        return quantize(x, qtype, tiled_axes={i: 2 for i in free if x.shape[i] % 2 == 0})
    return quantize(x, qtype, channelwise_axes=free, tiled_axes=dict.fromkeys(contracting, 2))


def dots(function, *args):
    """Return the operand and output dtypes of the dot_general equations of a function."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return [
        tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))
        for eqn in eqns
        if eqn.primitive.name == "dot_general"
    ]


def matmul(lhs, rhs):
    return vn.quant.dot_general(lhs, rhs, (([1], [0]), ([], [])))


def assert_agrees(actual, expected, operand_dtype=np.float32):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    # Tens of products of order 1 are summed in another order, and rounded once to the dtype. The
    # dense operands are rounded before that.
    eps = float(max(jnp.finfo(expected.dtype).eps, jnp.finfo(operand_dtype).eps))
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=4 * eps, atol=40 * eps)


@pytest.mark.parametrize("tiling", ["channelwise", "tiled free axes", "tiled sum"])
@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_qarrays_on_either_or_both_sides_agree_with_dense_arrays(contraction, tiling):
    lhs_shape, rhs_shape, dimension_numbers = CONTRACTIONS[contraction]
    lhs, rhs = normal(*lhs_shape, seed=1), normal(*rhs_shape, seed=2)
    lhs_quantized = tiled(lhs, "int8", dimension_numbers[0][0], tiling)
    rhs_quantized = tiled(rhs, "int4", dimension_numbers[0][1], tiling)
    operands = [(lhs_quantized, rhs), (lhs, rhs_quantized), (lhs_quantized, rhs_quantized)]

    @jax.jit
    def run(operands):
        actual = [vn.quant.dot_general(*pair, dimension_numbers) for pair in operands]
        expected = [lax.dot_general(*pair, dimension_numbers) for pair in vn.materialise(operands)]
        return actual, expected

    for actual, expected in zip(*run(operands), strict=True):
        assert_agrees(actual, expected)


def by_channel(x, qtype, axis):
    """Quantize `x` with as few scales along the contracted axis as the format allows."""
    free = [i for i in range(x.ndim) if i != axis]
    tile = FORMATS[qtype].tile_size
    return quantize(x, qtype, channelwise_axes=free, tiled_axes={axis: tile} if tile else None)


@pytest.mark.parametrize("qtype", FORMATS)
def test_every_format_multiplies_every_kind(qtype):
    x, w = normal(3, 32, seed=1), normal(32, 5, seed=2)
    q = by_channel(w, qtype, 0)
    # Integers without and with zero points, a float and a codebook.
    lhs = [x, *(by_channel(x, kind, 1) for kind in ("int8", "uint4", "float8_e5m2", "nf4"))]

    @jax.jit
    def run(lhs, q):
        return [matmul(x, q) for x in lhs], vn.materialise((lhs, q))

    products, (lhs, q) = run(lhs, q)
    for actual, x in zip(products, lhs, strict=True):
        np.testing.assert_allclose(actual, np.matmul(x, q, dtype=np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preferred", [None, jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("both", [False, True])
def test_the_dtype_is_the_same_as_for_dense_arrays(dtype, preferred, both):
    lhs, rhs = normal(3, 8, dtype=dtype), quantize(normal(8, 5, dtype=dtype), "int8")
    if both:
        lhs = quantize(lhs, "int8", channelwise_axes=[0])
    args = (([1], [0]), ([], [])), None, preferred
    expected = lax.dot_general(*vn.materialise((lhs, rhs)), *args)
    assert_agrees(vn.quant.dot_general(lhs, rhs, *args), expected, dtype)


@pytest.mark.parametrize(
    ("lhs_dtype", "dense_dtype"), [(jnp.float32, jnp.bfloat16), (jnp.int32, jnp.float32)]
)
def test_operands_of_different_dtypes_agree_with_lax(lhs_dtype, dense_dtype):
    lhs = jnp.arange(24).reshape(3, 8).astype(lhs_dtype)
    rhs = quantize(normal(8, 5, dtype=dense_dtype), "int8")
    dimension_numbers = (([1], [0]), ([], []))
    expected = lax.dot_general(lhs, rhs.dequantize(), dimension_numbers)
    assert_agrees(vn.quant.dot_general(lhs, rhs, dimension_numbers), expected)


def test_f16_sums_of_codes_do_not_overflow():
    x = jnp.full((1, 64), 100, jnp.float16)
    w = quantize(jnp.ones((64, 1), jnp.float16), "int8")
    y = vn.quant.dot_general(x, w, (([1], [0]), ([], [])))
    np.testing.assert_allclose(np.asarray(y, np.float32), 6400, rtol=1e-2)


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_nan_scale_affects_only_its_channel(qtype):
    w = by_channel(normal(32, 3).at[2, 1].set(jnp.nan), qtype, 0)
    x = jnp.ones((2, 32))
    for lhs in (x, by_channel(x, "int8", 1)):
        y = matmul(lhs, w)
        assert np.isnan(y).all(axis=0).tolist() == [False, True, False]
        assert np.isfinite(y[:, ::2]).all()


@pytest.mark.parametrize("side", [0, 1])
def test_other_implicit_operands_are_materialized(side):
    low_rank = Lora(normal(8, 8), normal(8, 2), normal(2, 8))
    operands = [quantize(normal(8, 8), "int8", channelwise_axes=[1 - side])] * 2
    operands[side] = low_rank
    dimension_numbers = (([1], [0]), ([], []))
    run = lambda *operands: vn.quant.dot_general(*operands, dimension_numbers)
    expected = lax.dot_general(*vn.materialise(operands), dimension_numbers)
    assert_agrees(run(*operands), expected)
    assert_agrees(jax.jit(run)(*operands), expected)


# The jaxpr.


def how(lhs, rhs, dimension_numbers=MATMUL, *args):
    """Return the strategy of a product, as `explain` reports it."""
    report = vn.explain(lambda l, r: lax.dot_general(l, r, dimension_numbers, *args))(lhs, rhs)
    return report.events[0].how


def test_a_channelwise_weight_is_never_scaled():
    w = quantize(normal(8, 5, dtype=jnp.bfloat16), "int4", channelwise_axes=[1])
    x = normal(3, 8, dtype=jnp.bfloat16)
    assert how(x, w) == "convert codes of rhs to float, scale the output"
    assert dots(matmul, x, w) == [("bfloat16", "bfloat16", "float32")]
    of_scale = jax.make_jaxpr(lambda s: matmul(x, w.replace(scale=s)))(w.scale).eqns
    shapes = [e.outvars[0].aval.shape for e in of_scale if e.primitive.name == "mul"]
    assert shapes[-1] == (3, 5)
    assert jax.eval_shape(w.scales).shape in shapes[:-1]


def test_integer_codes_are_multiplied_as_integers():
    x = quantize(normal(3, 8), "int8", channelwise_axes=[0])
    for qtype in ("int4", "uint8"):
        w = quantize(normal(8, 5), qtype, channelwise_axes=[1])
        assert how(x, w) == "multiply integer codes, scale the output"
        assert dots(matmul, x, w) == [("int8", "int8", "int32")]


def test_float8_codes_are_multiplied_directly():
    x = quantize(normal(3, 8), "fp8_e5m2", channelwise_axes=[0])
    w = quantize(normal(8, 5), "fp8_e4m3fn", channelwise_axes=[1])
    assert how(x, w) == "multiply float8 codes, scale the output"
    assert dots(matmul, x, w) == [("float8_e5m2", "float8_e4m3fn", "float32")]


def test_sums_beyond_int32_are_computed_in_floats(monkeypatch):
    x = quantize(normal(3, 8), "int8", channelwise_axes=[0])
    w = quantize(normal(8, 5), "int8", channelwise_axes=[1])
    exact = matmul(x, w)
    monkeypatch.setattr(operands, "INT32_MAX", 8 * 2**14 - 1)
    assert dots(matmul, x, w) == [("float32", "float32", "float32")]
    assert_agrees(matmul(x, w), exact)


@pytest.mark.parametrize(("terms", "zero_point"), [(2**17 - 1, None), (33_025, -128)])
def test_the_longest_sum_of_the_largest_codes_fits_int32(terms, zero_point):
    code, zero = (-128, None) if zero_point is None else (127, jnp.full(1, zero_point, jnp.int8))
    largest = QArray(jnp.full(terms, code, jnp.int8), jnp.ones(1), zero)
    assert (
        how(largest, largest, (([0], [0]), ([], []))) == "multiply integer codes, scale the output"
    )
    y = vn.quant.dot_general(largest, largest, (([0], [0]), ([], [])))
    assert y == np.float32(terms * (code - (zero_point or 0)) ** 2)
    longer = largest.replace(packed=jnp.full(terms + 1, code, jnp.int8))
    assert "integer" not in how(longer, longer, (([0], [0]), ([], [])))


@pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, "highest"])
@pytest.mark.parametrize("both", [False, True])
def test_precision_is_passed_on(precision, both):
    x = quantize(normal(3, 8), "int8") if both else normal(3, 8)
    w = quantize(normal(8, 5), "int8")
    run = lambda x, w: vn.quant.dot_general(x, w, (([1], [0]), ([], [])), precision)
    [eqn] = [e for e in jax.make_jaxpr(run)(x, w).eqns if e.primitive.name == "dot_general"]
    assert eqn.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def test_a_dot_algorithm_dequantizes_the_operands():
    x, w = normal(3, 8), quantize(normal(8, 5), "int8")
    for algorithm in (lax.DotAlgorithmPreset.BF16_BF16_F32, "BF16_BF16_F32"):
        reported = how(x, w, MATMUL, algorithm, jnp.float32)
        assert reported == "dequantize rhs, precision fixes the dtypes"


# Tiles along contracted axes.


def tiles_of(x, axis, tile, qtype="int8"):
    free = [i for i in range(x.ndim) if i != axis]
    return quantize(x, qtype, channelwise_axes=free, tiled_axes={axis: tile} if tile else None)


@pytest.mark.parametrize(
    ("lhs_tile", "rhs_tile", "tiles"),
    [(64, 64, 3), (None, 32, 6), (64, None, 3), (64, 32, 6), (96, 64, 6), (192, 64, 3)],
)
@pytest.mark.parametrize("formats", [("int8", "int4"), ("uint8", "uint3")])
def test_integer_tiles_are_multiplied_one_by_one(formats, lhs_tile, rhs_tile, tiles):
    lhs = tiles_of(normal(3, 192, seed=1), 1, lhs_tile, formats[0])
    rhs = tiles_of(normal(192, 5, seed=2), 0, rhs_tile, formats[1])
    # Packed along the contracted axis.
    transposed = tiles_of(normal(192, 5, seed=2).T, 1, rhs_tile, formats[1])
    expected = f"multiply integer codes in {tiles} tiles, scale and add the results"
    assert how(lhs, rhs) == how(lhs, transposed, (([1], [1]), ([], []))) == expected

    @jax.jit
    def run(lhs, rhs, transposed):
        actual = [matmul(lhs, rhs), vn.quant.dot_general(lhs, transposed, (([1], [1]), ([], [])))]
        return actual, vn.materialise(lhs), vn.materialise(rhs)

    products, x, w = run(lhs, rhs, transposed)
    for actual in products:
        np.testing.assert_allclose(actual, np.matmul(x, w, dtype=np.float64), rtol=1e-5, atol=1e-5)


def test_tiles_of_a_large_product_are_larger():
    rhs = tiles_of(normal(256, 32), 0, 64)
    few, many = tiles_of(normal(2, 256), 1, 64), tiles_of(normal(32, 256), 1, 64)
    assert "in 4 tiles" in how(few, rhs)
    assert how(many, rhs) == (
        "dequantize lhs, tiled by 64 along the contracted axis; "
        "dequantize rhs, tiled by 64 along the contracted axis"
    )
    assert "in 2 tiles" in how(tiles_of(normal(32, 256), 1, 128), tiles_of(normal(256, 32), 0, 128))


def test_one_tile_of_the_output_is_in_memory_at_a_time():
    lhs, rhs = tiles_of(normal(32, 1024), 1, 128), tiles_of(normal(1024, 32), 0, 128)
    run = jax.grad(lambda scale: matmul(lhs, rhs.replace(scale=scale)).sum())
    assert "[8,32,32]" not in str(jax.make_jaxpr(run)(rhs.scale))


def test_axes_of_either_side_can_be_tiled():
    lhs = quantize(
        normal(3, 32, 2, 16, seed=1), "int8", channelwise_axes=[2], tiled_axes={1: 16, 3: 4, 0: 1}
    )
    rhs = quantize(normal(16, 2, 32, 5, seed=2), "int8", tiled_axes={0: 8, 2: 32, 1: 1, 3: 5})
    dimension_numbers = (((1, 3), (2, 0)), ((2,), (1,)))
    assert "in 8 tiles" in how(lhs, rhs, dimension_numbers)
    actual = vn.quant.dot_general(lhs, rhs, dimension_numbers)
    expected = lax.dot_general(lhs.dequantize(), rhs.dequantize(), dimension_numbers)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)  # sums of 512 terms


# Extreme values.


def test_sums_overflow_only_if_dense_sums_do():
    """Codes of 127 times 1e36 are beyond the range of f32, but the values are not."""
    x, w = jnp.full((1, 64), 1e36), jnp.full((64, 3), 1e-3)
    for qtype in ("int8", "uint8", "float8_e5m2", "nf4"):
        q = by_channel(w, qtype, 0)
        for lhs in (x, by_channel(x, "int8", 1), x.astype(jnp.bfloat16)):
            rhs = q.replace(dense_dtype=lhs.dtype)
            np.testing.assert_allclose(np.asarray(matmul(lhs, rhs), np.float32), 6.4e34, rtol=0.02)


def test_sums_underflow_only_if_dense_sums_do():
    x, w = jnp.full((1, 64), 1e-30), jnp.full((64, 3), 1e-6)
    y = matmul(by_channel(x, "int8", 1), by_channel(w, "int8", 0))
    np.testing.assert_allclose(y, 6.4e-35, rtol=0.02)


@pytest.mark.parametrize("qtype", ["int8", "int4", "uint8", "nf4", "float8_e4m3fn"])
def test_infinity_and_nan_propagate_as_for_dense_operands(qtype):
    x = normal(4, 32).at[0, 3].set(jnp.inf).at[1, 4].set(-jnp.inf).at[2, 5].set(jnp.nan)
    q = by_channel(normal(32, 5, seed=2).at[3, :2].set(0), qtype, 0)
    np.testing.assert_allclose(matmul(x, q), x @ q.dequantize(), rtol=1e-5, atol=1e-5)


def test_mismatched_shapes_raise_the_errors_of_lax():
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        vn.quant.dot_general(
            jnp.ones((3, 7)), quantize(jnp.ones((8, 5)), "int8"), (([1], [0]), ([], []))
        )


# The rule under `implicit`.

PROGRAMS = {
    "matmul": lambda x, w: x @ w,
    "on the left": lambda x, w: w.T @ x.T,
    "einsum": lambda x, w: jnp.einsum("bk,kn->nb", x, w),
    "with itself": lambda x, w: x @ (w @ w.T),
    "jit": jax.jit(lambda x, w: x @ w),
    "vmap": lambda x, w: jax.vmap(lambda x: x @ w)(x),
    "vmap over columns": lambda x, w: jax.vmap(lambda column: x @ column, in_axes=1, out_axes=1)(w),
    "scan": lambda x, w: lax.scan(lambda c, x: (c, x @ w), 0.0, x)[1],
    "scan over rows": lambda x, w: lax.scan(lambda c, row: (c + row, None), jnp.zeros(6), w)[0],
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(x @ w)),
    "grad of x": jax.grad(lambda x, w: jnp.sum((x @ w) ** 2)),
    "grad of w": jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=1),
}


@pytest.mark.parametrize(
    ("qtype", "how"),
    [("int4", {"channelwise_axes": [1]}), ("nf4", {"tiled_axes": {0: 4, 1: 2}})],
    ids=["int4 channelwise", "nf4 tiled"],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_under_implicit_agree_with_the_dense_weight(program, qtype, how):
    x, w, run = normal(3, 8), quantize(normal(8, 6), qtype, **how), PROGRAMS[program]
    np.testing.assert_allclose(
        vn.materialise(vn.implicit(run)(x, w)), run(x, w.dequantize()), rtol=1e-5, atol=1e-5
    )


def test_gradients_by_the_scale_agree():
    x, w = normal(3, 8), quantize(normal(8, 5), "int8", channelwise_axes=[1])
    loss = lambda x, w: jnp.sum((x @ w) ** 2)
    grad = jax.grad(vn.implicit(loss), argnums=1, allow_int=True)(x, w)
    by_hand = lambda scale: loss(x, w.codes() * scale)
    np.testing.assert_allclose(grad.scale, jax.grad(by_hand)(w.scale), rtol=1e-5)


def test_a_scan_over_stacked_weights_keeps_them_packed():
    x, w = normal(3, 8), quantize(normal(4, 8, 8), "int4", channelwise_axes=[0, 2])
    run = lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    actual = vn.implicit(run, on_materialise=only_by_rules)(x, w)
    np.testing.assert_allclose(actual, run(x, w.dequantize()), rtol=1e-5, atol=1e-5)
