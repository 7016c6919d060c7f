"""Kernels for weights as checkpoints store them: small scales, minima and zero points."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import veneer as vn
from veneer.quant import QArray

# N is odd, so that rows of scales end within a vector.
N, K = 131, 320


def stored(qtype, tile, scale_dtype, minimum_dtype, *, shape=(N, K), seed=0):
    """Return a weight `[..., N, K]` with tiles along K. Integer minima become zero points."""
    rng, format = np.random.default_rng(seed), vn.quant.get_format(qtype)
    low, high = format.code_range
    codes = jnp.asarray(rng.integers(low, high + 1, shape), format.code_dtype)
    counts = (*shape[:-1], shape[-1] // tile)
    scale = jnp.asarray(rng.uniform(0.5, 2, counts), "float32").astype(scale_dtype)
    minimum = zero_point = None
    if minimum_dtype in ("uint8", "int8"):
        zero_point = jnp.asarray(rng.integers(low, high + 1, counts), minimum_dtype)
    elif minimum_dtype is not None:
        minimum = jnp.asarray(rng.normal(size=counts), minimum_dtype)
    q = QArray(codes, scale, zero_point, qtype=qtype, minimum=minimum)
    return q.replace(dense_dtype="float32")


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def how(f, *args):
    return [event.how for event in vn.explain(f)(*args).events if event.primitive == "dot_general"]


def assert_close(actual, exact, tolerance=1e-5):
    """Compare two arrays by the norm of the error."""
    exact = np.asarray(exact, np.float64)
    assert actual.shape == exact.shape
    error = np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)
    assert error <= tolerance, error


CASES = {
    "Q4_1": ("uint4", 32, "float16", "float16"),
    "MLX": ("uint4", 64, "bfloat16", "bfloat16"),
    "Q5_1": ("uint5", 32, "float16", "float16"),
    "Q6_K, but for its scales": ("int6", 16, "float32", None),
    "GPTQ of 3 bits": ("uint3", 64, "float16", None),
    "Q8_0": ("int8", 32, "float16", None),
    "MXFP4": ("float4_e2m1fn", 32, "float8_e8m0fnu", None),
    "MXFP6": ("mxfp6", 32, "float8_e8m0fnu", None),
    "MXFP6 of e3m2": ("mxfp6_e3m2", 32, "float8_e8m0fnu", None),
    "a minimum of other floats": ("int8", 16, "float32", "bfloat16"),
    "AWQ": ("uint4", 32, "float16", "uint8"),
    "GPTQ of 3 bits, not symmetric": ("uint3", 64, "bfloat16", "uint8"),
    "GPTQ of 8 bits, not symmetric": ("uint8", 64, "float32", "uint8"),
    "a zero point with a sign": ("int4", 64, "float16", "int8"),
    "zero points of short tiles": ("uint4", 8, "float32", "uint8"),
}


@pytest.mark.parametrize("name", CASES)
def test_both_sides_agree_for_any_number_of_rows(name):
    q = stored(*CASES[name])
    dense = np.asarray(q.dequantize(), np.float64)
    xs = [(normal(m, K), normal(m, N)) for m in (1, 3, 8, 33)]

    @jax.jit
    @vn.implicit
    def run(xs, q):
        return [(x @ q.T, y @ q) for x, y in xs]

    assert all(re.match(r"CPU kernel \w+ \(fallback: ", reported) for reported in how(run, xs, q))
    for (x, y), (by_columns, by_rows) in zip(xs, run(xs, q), strict=True):
        assert_close(by_columns, np.asarray(x, np.float64) @ dense.T)
        assert_close(by_rows, np.asarray(y, np.float64) @ dense)


def rounded(x, tile=None):
    tiles = {} if tile is None else {-1: tile}
    return vn.quant.quantize(x, "int8", channelwise_axes=range(x.ndim - 1), tiled_axes=tiles)


@pytest.mark.parametrize("of_tiles", [False, True])
@pytest.mark.parametrize(
    "name",
    [name for name, (qtype, *_) in CASES.items() if qtype in ("uint4", "int4", "int8", "uint8")],
)
def test_both_sides_agree_for_int8_activations(name, of_tiles):
    """Activations have scales per tile, as in llama.cpp, or per row."""
    q = stored(*CASES[name])
    dense = np.asarray(q.dequantize(), np.float64)
    tile = CASES[name][1] if of_tiles else None
    xs = [(rounded(normal(m, K), tile), rounded(normal(m, N))) for m in (1, 3, 17, 33)]

    @jax.jit
    @vn.implicit
    def run(xs, q):
        return [(x @ q.T, y @ q) for x, y in xs]

    assert all(
        re.match(r"CPU kernel integer_\w+ \(fallback: ", reported) for reported in how(run, xs, q)
    )
    for (x, y), (by_columns, by_rows) in zip(xs, run(xs, q), strict=True):
        assert_close(by_columns, np.asarray(x.dequantize(), np.float64) @ dense.T)
        assert_close(by_rows, np.asarray(y.dequantize(), np.float64) @ dense)


@pytest.mark.parametrize("zeros", [None, "int8"])
@pytest.mark.parametrize(
    "qtype", ["int3", "uint3", "int5", "uint5", "int6", "uint6", "int7", "uint7"]
)
def test_bit_planes_and_few_int8_rows_are_multiplied_as_integers(qtype, zeros):
    """Products with more rows or other tile sizes are computed in floats."""
    for tile, columns, of_tiles in ((16, 256, True), (64, 256, False), (192, 192, True)):
        q = stored(qtype, tile, "float16", zeros, shape=(N, columns))
        dense = np.asarray(q.dequantize(), np.float64)
        xs = [rounded(normal(m, columns), tile if of_tiles else None) for m in (1, 2, 7, 16, 17)]
        run = jax.jit(vn.implicit(lambda xs, q: [x @ q.T for x in xs]))
        *few, many = how(run, xs, q)
        assert all(reported.startswith("CPU kernel integer_columns_planes") for reported in few)
        assert many.startswith("CPU kernel columns_planes")
        for x, out in zip(xs, run(xs, q), strict=True):
            assert_close(out, np.asarray(x.dequantize(), np.float64) @ dense.T)


def test_rows_from_vmap_and_bit_planes_are_multiplied_as_floats():
    q, xs = stored("int6", 16, "float16", None, shape=(N, 256)), normal(40, 1, 256)
    product = lambda x, q: x @ q.T
    run = jax.jit(vn.implicit(jax.vmap(lambda x, q: product(rounded(x, 16), q), (0, None))))
    program = run.lower(xs, q).as_text()
    assert "veneer_columns_planes6_many" in program
    exact = product(rounded(xs[:, 0], 16).dequantize(), q.dequantize())
    assert_close(run(xs, q)[:, 0], exact)


def test_activations_with_minima_use_no_integer_kernel():
    codes = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (2, K)), jnp.int8)
    scale, minimum = jnp.full((2, 1), 0.01), jnp.array([[1.0], [-2.0]])
    x = QArray(codes, scale, qtype="int8", minimum=minimum).replace(dense_dtype="float32")
    for q in (stored("int8", K, "float32", None), stored("int4", 32, "float32", None)):
        actual = jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q)
        assert_close(actual, x.dequantize() @ q.dequantize().T)


@pytest.mark.parametrize("qtype", ["float6_e2m3fn", "float6_e3m2fn"])
def test_every_6_bit_float_is_decoded_exactly(qtype):
    codes = jnp.tile(jnp.arange(64, dtype=jnp.uint8)[:, None], (8, 64))
    q = QArray(codes, jnp.ones((512, 1)), qtype=qtype)
    for rows in (1, 33):  # kernels decode few and many rows differently
        x = jnp.zeros((rows, 64)).at[:, 5].set(1)
        actual = jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q)
        dtype = getattr(ml_dtypes, qtype)
        exact = np.tile(np.arange(64, dtype=np.uint8).view(dtype).astype(np.float32), 8)
        np.testing.assert_array_equal(actual, np.tile(exact, (rows, 1)))


def test_every_scale_of_16_and_8_bits_is_decoded_exactly():
    counts = {"float16": 2**16, "bfloat16": 2**16, "float8_e8m0fnu": 2**8}
    for dtype, count in counts.items():
        bits = np.arange(count, dtype=np.uint16 if count > 256 else np.uint8)
        scale = jnp.asarray(bits).view(dtype)[:, None]  # one row per scale, with codes of 1
        q = QArray(jnp.ones((count, 64), jnp.int8), scale).replace(dense_dtype="float32")
        x = jnp.zeros((1, 64)).at[0, 0].set(1)
        actual = jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q)[0]
        exact = scale[:, 0].astype(jnp.float32)
        finite = np.isfinite(exact) & (np.abs(exact) >= np.finfo(np.float32).tiny)
        np.testing.assert_array_equal(actual[finite], exact[finite])
        assert not np.isfinite(actual[~np.isfinite(exact)]).any()


@pytest.mark.parametrize("minimum", ["float16", "uint8"])
@pytest.mark.parametrize("qtype", ["uint4", "uint5"])
def test_nothing_is_widened_before_the_kernel(qtype, minimum):
    q, x = stored(qtype, 32, "float16", minimum), normal(2, K)
    compiled = jax.jit(vn.implicit(lambda x, q: x @ q.T)).lower(x, q).compile().as_text()
    assert "custom-call" in compiled
    assert " dot(" not in compiled
    for shape in (q.shape, q.scale.shape):
        for side in (shape, shape[::-1]):
            assert f"f32[{side[0]},{side[1]}]" not in compiled
            assert f"f32[1,{side[0]},{side[1]}]" not in compiled


@pytest.mark.parametrize(("qtype", "kind"), [("uint4", "lookup4"), ("uint5", "planes5")])
def test_derivatives_batches_and_loops_agree(qtype, kind):
    q, x = stored(qtype, 32, "float16", "float16"), normal(3, K)
    dense = q.dequantize()
    product = lambda x, w: x @ w.T
    gradient = jax.grad(lambda x: (vn.implicit(product)(x, q) ** 2).sum())(x)
    assert_close(gradient, jax.grad(lambda x: (product(x, dense) ** 2).sum())(x))
    mapped = jax.jit(jax.vmap(vn.implicit(lambda x, w: w @ x), (0, None)))(x, q)
    assert_close(mapped, x @ dense.T)
    layers = stored(qtype, 32, "float16", "float16", shape=(2, 256, 256))
    step = lambda x, w: (jnp.tanh(0.01 * (x @ w.T)), None)
    run = lambda x, w: jax.lax.scan(step, x, w)[0]
    x = normal(2, 256)
    assert all(
        reported.startswith(f"CPU kernel columns_{kind} (fallback: ")
        for reported in how(run, x, layers)
    )
    assert_close(jax.jit(vn.implicit(run))(x, layers), run(x, layers.dequantize()))


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("name", ["scale", "minimum"])
def test_derivatives_by_scales_and_minima_agree(name, activations):
    q, x = stored("uint4", 32, "float32", "float32"), normal(3, K)
    if activations is not None:
        x = vn.quant.quantize(x, activations, channelwise_axes=[0])

    loss = vn.implicit(lambda q: ((x @ q.T) ** 2).sum())
    by_kernel = lambda leaf: loss(q.replace(**{name: leaf}))
    values = vn.materialise(x)
    dense = lambda leaf: ((values @ q.replace(**{name: leaf}).dequantize().T) ** 2).sum()
    leaf = getattr(q, name)
    assert_close(jax.grad(by_kernel)(leaf), jax.grad(dense)(leaf))
    _, along = jax.jvp(by_kernel, (leaf,), (leaf,))
    assert_close(along, jax.jvp(dense, (leaf,), (leaf,))[1])


@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_programs_with_tiled_activations_agree(qtype, side):
    """Derivatives, batches, zero points, contracted rows and several devices."""
    w, x = normal(256, 128), normal(6, 128 if side == "columns" else 256, seed=2)
    zeros = {"calibration_method": "minmax"} if qtype == "int4" else {}
    axes = ([0], {1: 32}) if side == "columns" else ([1], {0: 32})
    q = vn.quant.quantize(
        w, "uint4" if zeros else qtype, channelwise_axes=axes[0], tiled_axes=axes[1], **zeros
    )
    a = rounded(x, 32)
    product = lambda x, w: x @ w.T if side == "columns" else x @ w
    values, dense = a.dequantize(), q.dequantize()
    assert all(reported.startswith("CPU kernel integer_") for reported in how(product, a, q))
    assert_close(jax.jit(vn.implicit(product))(a, q), product(values, dense))
    mapped = jax.jit(vn.implicit(jax.vmap(lambda x, w: product(x, w), (0, None))))
    assert_close(mapped(a, q), product(values, dense))
    by_scale = lambda scale: (vn.implicit(product)(a.replace(scale=scale), q) ** 2).sum()
    in_dense = lambda scale: (product(a.replace(scale=scale).dequantize(), dense) ** 2).sum()
    assert_close(jax.grad(by_scale)(a.scale), jax.grad(in_dense)(a.scale))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    cut = jax.device_put(a, jax.NamedSharding(mesh, jax.P("x")))
    assert_close(jax.jit(vn.implicit(product))(cut, q), product(values, dense))


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("name", ["scale", "minimum"])
@pytest.mark.parametrize("tile", [2, -1])  # -1 ends within a vector
def test_a_nan_affects_only_its_row(name, tile, activations):
    q = stored("uint4", 32, "float16", "float16")
    q = q.replace(**{name: getattr(q, name).at[5, tile].set(jnp.nan)})
    for m in (3, 33):
        x = normal(m, K)
        if activations is not None:
            x = vn.quant.quantize(x, activations, channelwise_axes=[0])
        y = jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q)
        assert np.isnan(y).all(axis=0).tolist() == [i == 5 for i in range(N)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_activations_and_minima_agree(dtype):
    q = stored("uint4", 32, "float16", "float16").replace(dense_dtype=dtype)
    x = normal(2, K).astype(dtype)
    y = jax.jit(vn.implicit(lambda x, q: x @ q.T))(x, q)
    assert y.dtype == dtype
    exact = np.asarray(x, np.float64) @ np.asarray(q.replace(dense_dtype="float32").dequantize()).T
    assert_close(y, exact, float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(("m", "n", "k"), [(0, N, K), (2, 0, K), (2, N, 0)])
def test_empty_products_with_minima_agree(m, n, k):
    q = stored("uint4", 32, "float16", "float16", shape=(n, k))
    y = jax.jit(vn.implicit(lambda x, q: x @ q.T))(normal(m, k), q)
    np.testing.assert_array_equal(y, np.zeros((m, n)))


@pytest.mark.parametrize("name", ["scale", "minimum"])
def test_an_infinity_affects_only_its_row(name):
    """The row is infinite or NaN, because the order of sums of infinities decides it."""
    q = stored("uint4", 32, "float16", "float16")
    q = q.replace(**{name: getattr(q, name).at[5, 2].set(jnp.inf)})
    for m in (3, 33):
        y = jax.jit(vn.implicit(lambda x, q: x @ q.T))(normal(m, K).at[0].set(0), q)
        assert (~np.isfinite(y)).all(axis=0).tolist() == [i == 5 for i in range(N)]
