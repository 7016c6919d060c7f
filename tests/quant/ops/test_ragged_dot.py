import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import veneer as vn
from veneer.kernels import use
from veneer.quant import QArray, quantize
from veneer.quant.ops import ragged_dot as function

module = __import__("sys").modules["veneer.quant.ops.ragged_dot"]  # the function hides the module

M, G, K, N = 12, 4, 32, 6
SIZES = np.array([3, 0, 7, 1])  # an empty group, and one row without a group


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def groups_of_rows(group_sizes, rows):
    """Return the group of each row, or -1 for rows without a group."""
    groups = np.repeat(np.arange(len(group_sizes)), group_sizes)[:rows]
    return np.concatenate([groups, np.full(rows - len(groups), -1)])


def reference(lhs, rhs, group_sizes):
    """Return the product in float64, row by row, and the product of magnitudes."""
    lhs, rhs = (np.asarray(x, np.float64) for x in vn.materialise((lhs, rhs)))
    rhs = np.concatenate([rhs, np.zeros_like(rhs[:1])])
    groups = groups_of_rows(np.asarray(group_sizes), len(lhs))
    return tuple(
        np.einsum("mk,mkn->mn", x, w[groups]) for x, w in ((lhs, rhs), map(abs, (lhs, rhs)))
    )


def assert_agrees(actual, operands, group_sizes, dtype=np.float32):
    expected, magnitude = reference(*operands, group_sizes)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    # K products are rounded, and the operands are rounded to f32 or a narrower dtype.
    wide = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    bound = (4 + operands[0].shape[-1]) * wide * magnitude
    bound += float(jnp.finfo(dtype).eps) * np.abs(expected)
    assert (np.abs(np.asarray(actual, np.float64) - expected) <= bound).all()
    none = groups_of_rows(np.asarray(group_sizes), len(actual)) < 0
    assert not np.asarray(actual, np.float32)[none].any()


def experts(qtype, tiling="channelwise", dtype=np.float32):
    """Return quantized experts `[G, K, N]`."""
    w = normal(G, K, N, dtype=dtype, seed=1) + 0.5  # so that zero points are not 0
    tile = vn.quant.get_format(qtype).tile_size
    if tile is not None:
        return quantize(w, qtype, channelwise_axes=[0, 2], tiled_axes={1: tile})
    tilings = {
        "channelwise": {"channelwise_axes": [0, 2]},
        "tiled": {"channelwise_axes": [0, 2], "tiled_axes": {1: 16}},
        "tiled otherwise": {"tiled_axes": {0: 2, 1: 4, 2: 3}},
        "shared": {},
    }
    return quantize(w, qtype, **tilings[tiling])


def rows(qtype, tiling="channelwise"):
    """Return quantized rows `[M, K]`."""
    tilings = {
        "channelwise": {"channelwise_axes": [0]},
        "tiled": {"channelwise_axes": [0], "tiled_axes": {1: 16}},
        "tiled otherwise": {"tiled_axes": {0: 3, 1: 8}},
        "shared": {},
    }
    return quantize(normal(M, K) + 0.5, qtype, **tilings[tiling])


ALL = [
    *[(qtype, "channelwise") for qtype in ("int8", "int4", "ternary", "uint4")],
    *[(qtype, "tiled") for qtype in ("uint8", "nf4", "fp8", "nf4_dq", "nvfp4", "mxfp6")],
    ("int3", "tiled otherwise"),
    ("int8", "shared"),
]


@pytest.mark.parametrize(("qtype", "tiling"), ALL)
def test_dense_and_quantized_rows_agree_with_float64(qtype, tiling):
    w = experts(qtype, tiling)
    lhs = [normal(M, K), rows("int8", tiling)]
    if qtype == "int4":
        lhs += [rows("uint8", tiling), rows("nf4", tiling)]
    run = jax.jit(lambda lhs, w: [function(x, w, SIZES) for x in lhs])
    for actual, x in zip(run(lhs, w), lhs, strict=True):
        assert_agrees(actual, (x, w), SIZES)


@functools.cache
def compiled():
    q = experts("uint4"), rows("int8")

    @jax.jit
    def run(x, group_sizes):
        return function(x, q[0], group_sizes), function(q[1], q[0], group_sizes)

    return q, run


@given(st.lists(st.integers(0, M), min_size=G, max_size=G))
def test_groups_can_have_any_sizes(group_sizes):
    (w, q), run = compiled()
    x = normal(M, K)
    group_sizes = np.array(group_sizes)
    for actual, lhs in zip(run(x, group_sizes), (x, q), strict=True):
        assert_agrees(actual, (lhs, w), group_sizes)


@pytest.mark.parametrize(
    ("shape", "group_sizes"),
    [((1, 3), [0, 1, 0]), ((3, 8), [1, 0, 0, 1, 0, 0, 1, 0]), ((40, 2), [38, 2]), ((9, 1), [9])],
)
def test_products_with_few_tiles_agree(shape, group_sizes):
    x = normal(shape[0], 16)
    w = quantize(normal(shape[1], 16, 5), "int8", channelwise_axes=[0, 2])
    assert_agrees(function(x, w, jnp.array(group_sizes)), (x, w), group_sizes)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_group_sizes_can_have_any_integer_dtype(dtype):
    x, w = normal(400, 4), quantize(normal(3, 4, 2), "int8", channelwise_axes=[0, 2])
    group_sizes = np.array([100, 100, 90], dtype)  # whose sum overflows int8
    assert_agrees(function(x, w, group_sizes), (x, w), group_sizes)


@pytest.mark.parametrize("preferred", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_is_the_same_as_for_dense_arrays(dtype, preferred):
    x, w = normal(M, K, dtype=dtype), experts("nf4", dtype=dtype)
    q = quantize(x, "int8", channelwise_axes=[0])
    run = jax.jit(lambda *lhs: [function(x, w, SIZES, None, preferred) for x in lhs])
    for actual, lhs in zip(run(x, q), (x, q), strict=True):
        # Values are multiplied, not values rounded to 16 bits.
        exact = [a.replace(dense_dtype="float32") for a in (lhs, w) if isinstance(a, QArray)]
        operands = [lhs, *exact][-2:]
        assert_agrees(actual, operands, SIZES, jnp.dtype(preferred or dtype))


def test_float64_is_not_rounded():
    with jax.enable_x64(True):
        x, w = normal(M, K, dtype=np.float64), experts("int8", dtype=np.float64)
        q = quantize(x, "int8", channelwise_axes=[0])
        run = jax.jit(lambda *lhs: [function(x, w, SIZES) for x in lhs])
        for actual, lhs in zip(run(x, q), (x, q), strict=True):
            assert_agrees(actual, (lhs, w), SIZES, np.float64)


def test_integers_are_summed_exactly():
    codes = np.random.default_rng(0).integers(-127, 128, (2, 3, 4096))
    codes[0, 0] = codes[1, 0] = 127  # a sum beyond 2**24
    x = QArray(jnp.asarray(codes[0], jnp.int8), jnp.ones((3, 1)))
    w = QArray(jnp.asarray(codes[1].T[None], jnp.int8), jnp.ones((1, 1, 3)))
    actual = function(x, w, jnp.array([3]))
    np.testing.assert_array_equal(actual, (codes[0] @ codes[1].T).astype(np.float32))


def test_precision_fixes_the_dtypes_that_are_multiplied():
    x, w = normal(M, K), experts("int8")
    y = function(x, w, SIZES, lax.DotAlgorithmPreset.F32_F32_F32, jnp.float32)
    assert_agrees(y, (x, w), SIZES)


# Axes in other places, and other modes.

RAGGED = {
    "batch": ((2, 9, 8), (2, 3, 8, 5), (2, 3), (([2], [2]), ([0], [0])), [1], [1]),
    "batch, sizes shared": ((2, 9, 8), (2, 3, 8, 5), (3,), (([2], [2]), ([0], [0])), [1], [1]),
    "two batch axes": (
        (8, 2, 9, 4),
        (3, 4, 8, 2, 5),
        (4, 2, 3),
        (([0], [2]), ([3, 1], [1, 3])),
        [2],
        [0],
    ),
    "an axis before rows": ((2, 9, 8), (3, 8, 5), (2, 3), (([2], [1]), ([], [])), [1], [0]),
    "before, sizes shared": ((2, 9, 8), (3, 8, 5), (3,), (([2], [1]), ([], [])), [1], [0]),
    "an axis after rows": ((9, 2, 8), (3, 8, 5), (3,), (([2], [1]), ([], [])), [0], [0]),
    "rows last": ((8, 9), (5, 8, 3), (3,), (([0], [1]), ([], [])), [1], [2]),
    "two contracting axes": ((8, 9, 4), (4, 3, 8), (3,), (([0, 2], [2, 0]), ([], [])), [1], [1]),
    "ragged sum": ((9, 8), (8, 5), (3,), (([1], [0]), ([], [])), [1], []),
    "ragged sum, batch": ((2, 9, 8), (2, 8, 5), (2, 3), (([2], [1]), ([0], [0])), [2], []),
    "ragged batch": ((4, 9, 8), (4, 8, 5), (3,), (([2], [1]), ([0], [0])), [0], []),
}


@pytest.mark.parametrize("case", RAGGED)
def test_any_axes_agree_with_the_dense_arrays(case):
    lhs_shape, rhs_shape, sizes_shape, numbers, ragged, group = RAGGED[case]
    numbers = lax.RaggedDotDimensionNumbers(numbers, ragged, group)
    lhs, rhs = normal(*lhs_shape, seed=1), normal(*rhs_shape, seed=2)
    (lhs_contracting, rhs_contracting), _ = numbers.dot_dimension_numbers
    free = [[a for a in range(x.ndim) if a not in c] for x, c in
            ((lhs, lhs_contracting), (rhs, rhs_contracting))]  # fmt: skip
    group_sizes = jnp.asarray(np.random.default_rng(0).integers(0, 4, sizes_shape))
    channelwise = quantize(rhs, "int4", channelwise_axes=free[1])
    tiled = quantize(rhs, "nf4", tiled_axes={a: 2 for a in range(rhs.ndim) if not rhs.shape[a] % 2})
    q = quantize(lhs, "int8", channelwise_axes=free[0])
    operands = [(lhs, tiled), (q, channelwise), (q, rhs)]

    @jax.jit
    def run(operands):
        actual = [vn.quant.ragged_dot_general(*pair, group_sizes, numbers) for pair in operands]
        dense = vn.materialise(operands)
        return actual, [lax.ragged_dot_general(*pair, group_sizes, numbers) for pair in dense]

    for actual, expected in zip(*run(operands), strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("m", "g", "k", "n"), [(0, 2, 4, 3), (5, 0, 4, 3), (5, 2, 0, 3), (5, 2, 4, 0)]
)
def test_empty_axes_agree(m, g, k, n):
    w = quantize(jnp.ones((g, k, n)), "int8", channelwise_axes=[0, 2])
    y = function(jnp.ones((m, k)), w, jnp.ones(g, jnp.int32))
    assert y.shape == (m, n)
    np.testing.assert_array_equal(y, np.where(np.arange(m) < g, 1.0 * k, 0)[:, None] * np.ones(n))


def test_errors_are_the_same_as_in_jax():
    x, w = normal(M, K), experts("int8")
    with pytest.raises(TypeError, match="rhs group dimension size to be 3, got 4"):
        function(x, w, SIZES[:3])
    with pytest.raises(TypeError, match=r"group_sizes\.dtype"):
        function(x, w, SIZES * 1.0)
    with pytest.raises(NotImplementedError, match="group_offset"):
        function(x, w, SIZES, group_offset=1)


# NaN and infinity.


@pytest.mark.parametrize("qtype", ["int8", "uint4", "nf4", "fp8"])
def test_a_nan_affects_only_its_group_or_row(qtype):
    w = experts(qtype).dequantize().at[2, 1, 4].set(jnp.nan)
    q = quantize(w, qtype, channelwise_axes=[0, 2])
    x = normal(M, K).at[1].set(jnp.nan).at[11].set(jnp.nan)  # the last has no group
    bad = quantize(x, "int8", channelwise_axes=[0])

    @jax.jit
    def run(x, bad, q):
        loss = lambda x: jnp.nansum(function(x, q, SIZES))
        return function(x, q, SIZES), function(bad, q, SIZES), jax.grad(loss)(x)

    dense, quantized, gradient = run(x, bad, q)
    expected = np.zeros((M, N), bool)
    expected[1], expected[3:10, 4] = True, True
    np.testing.assert_array_equal(np.isnan(dense), expected)
    np.testing.assert_array_equal(np.isnan(quantized), expected)
    for of_no_group in (dense[11], quantized[11], gradient[11]):
        np.testing.assert_array_equal(of_no_group, 0)
    nan = np.isnan(gradient).any(axis=1)
    assert not nan[[0, 2, 10]].any()


def test_a_nan_in_the_last_group_does_not_affect_later_rows():
    w = experts("int8").dequantize().at[3].set(jnp.nan)
    q = quantize(w, "int8", channelwise_axes=[0, 2])
    for x in (normal(M, K), rows("uint8")):
        y = function(x, q, jnp.array([3, 0, 0, 5]))
        assert np.isnan(y).all(axis=1).tolist() == [False] * 3 + [True] * 5 + [False] * 4
        np.testing.assert_array_equal(y[8:], 0)


def test_infinities_and_large_numbers_stay_in_their_rows():
    x = jnp.ones((3, 4)).at[0, 0].set(jnp.inf).at[1].set(1e37)
    w = quantize(jnp.ones((2, 4, 2)), "int8", channelwise_axes=[0, 2])
    y = function(x, w, jnp.array([1, 2]))
    np.testing.assert_allclose(y, np.array([np.inf, 4e37, 4])[:, None] * np.ones(2), rtol=1e-2)


# The program.


def test_experts_and_derivatives_are_never_fully_dense():
    x = normal(8, 128)
    w = quantize(normal(16, 128, 128), "int4", channelwise_axes=[0, 2])
    group_sizes = jnp.array([1, 0] * 8)
    loss = lambda x, scale, w: (function(x, w.replace(scale=scale), group_sizes) ** 2).sum()
    for run in (loss, jax.grad(loss, argnums=(0, 1))):
        memory = jax.jit(run).lower(x, w.scale, w).compile().memory_analysis()
        assert memory.temp_size_in_bytes < w.size  # less than one byte per value


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_other_platforms_agree_with_cpus(qtype, monkeypatch):
    x, w = normal(M, K), experts(qtype)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    params = {"dimension_numbers": module._MATRICES, "precision": None}
    y = module._multiply_groups.__wrapped__(x, w, jnp.array(SIZES), **params, out_dtype=x.dtype)
    assert_agrees(y, (x, w), SIZES)


def test_a_product_can_be_lowered_for_a_gpu():
    x, w = normal(M, K), experts("int8")
    run = jax.jit(lambda x: function(x, w, SIZES))
    assert "while" not in jax.export.export(run, platforms=["cuda"])(x).mlir_module()
    assert "while" in jax.export.export(run, platforms=["cpu"])(x).mlir_module()


@pytest.mark.parametrize(
    ("kernels", "rows", "expected"),
    [("auto", 4, 1), ("auto", 30, 4), ("xla", 4, 4), ("xla", 30, 8)],
)
def test_tiles_for_kernels_have_the_rows_of_an_average_group(kernels, rows, expected, monkeypatch):
    w = quantize(normal(8, 256, 256, seed=1), "int4", channelwise_axes=[0, 2], tiled_axes={1: 64})
    x, sizes = normal(rows, 256), jnp.full(8, rows // 8).at[2].add(rows % 8)
    tiles, multiply = [], module.dot_general

    def noted(lhs, *others):
        tiles.append(lhs.shape)
        return multiply(lhs, *others)

    monkeypatch.setattr(module, "dot_general", noted)
    with use(kernels):
        assert_agrees(function(x, w, sizes), (x, w), sizes)
    assert set(tiles) == {(expected, 256)}
