"""Compare the CUDA kernel for few rows, run in an emulator, with dense products."""

import dataclasses
import itertools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.device_products import assert_is_dense, example
from kernels.gpu.emulated import call_library, emulate

import veneer as vn
from veneer.kernels import Codes, MatmulProblem
from veneer.kernels.common.problem import MatmulShape
from veneer.kernels.gpu import cuda_program, matmul

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(autouse=True)
def emulated(monkeypatch, libraries):
    with emulate(monkeypatch, libraries):
        yield


def check(kind, m, shape, tile, contracting, dtype="bfloat16", scale="float32"):
    assert_is_dense(
        matmul, matmul.separate_product, kind, m, shape, tile, contracting, dtype, scale
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("contracting", ["rows", "columns"])
@pytest.mark.parametrize("kind", ["int4", "lookup4", "int8", "float8_e4m3fn"])
def test_each_layout_and_dtype_matches_the_dense_product(kind, contracting, dtype):
    tile = (64, 1) if contracting == "rows" else (1, 64)
    check(kind, 3, (1, 128, 128), tile, contracting, dtype)


@pytest.mark.parametrize(
    ("kind", "contracting"), [("uint4", "rows"), ("uint8", "columns"), ("float8_e5m2", "rows")]
)
def test_other_kinds_of_codes_match_the_dense_product(kind, contracting):
    check(kind, 2, (1, 128, 128), (128, 1) if contracting == "rows" else (1, 128), contracting)


@pytest.mark.parametrize(
    ("kind", "contracting", "m", "shape", "tile", "scale"),
    [
        # Sizes that the kernel's tiles do not divide, and a batch.
        ("int4", "rows", 11, (2, 208, 96), (16, 1), "bfloat16"),
        ("int4", "columns", 11, (2, 40, 224), (1, 32), "float16"),
        ("int8", "rows", 17, (1, 400, 48), (400, 48), "float32"),  # one scale
        ("int8", "columns", 33, (1, 24, 336), (1, 336), "bfloat16"),
        ("e2m1", "rows", 1, (1, 160, 64), (32, 1), "float8_e8m0fnu"),
        ("e2m1", "columns", 1, (1, 17, 160), (1, 32), "float8_e8m0fnu"),
        ("int4", "rows", 1, (1, 2176, 32), (128, 1), "float32"),  # many warps split K
        ("int4", "columns", 2, (2, 24, 544), (1, 32), "bfloat16"),
        ("uint8", "rows", 2, (1, 96, 80), (96, 1), "float16"),
    ],
)
def test_odd_sizes_and_tiles_match_the_dense_product(kind, contracting, m, shape, tile, scale):
    check(kind, m, shape, tile, contracting, scale=scale)


@pytest.mark.parametrize("contracting", ["rows", "columns"])
@pytest.mark.parametrize("m", [2, 3])  # integers, and bf16
@pytest.mark.parametrize(
    ("kind", "offset", "dtype"),
    [("int4", 0, "int8"), ("uint4", 8, "uint8"), ("int8", 0, "int8"), ("uint8", 128, "uint8")],
)
def test_zero_points_of_any_byte_are_subtracted(contracting, m, kind, offset, dtype):
    # Most of these zero points are outside the range of 4-bit codes. With three rows, odd zero
    # points of int4 above 120 are rounded, because the kernel subtracts 136 more in bf16.
    most = 120 if (kind, m) == ("int4", 3) else 127 if dtype == "int8" else 255

    least = -128 if dtype == "int8" else 0
    zero_points = lambda shape: np.random.default_rng(0).integers(least, most + 1, shape, dtype)
    check_differences(contracting, m, kind, offset, zero_points)


@pytest.mark.parametrize("contracting", ["rows", "columns"])
@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("offset", [-120, -8, 0, 3, 120])
def test_values_of_codes_far_from_zero_are_exact(contracting, m, dtype, offset):
    check_differences(contracting, m, "uint4", offset, dtype=dtype)
    if offset != -120:  # zero points of codes beyond int8 are left to XLA
        zero_points = lambda shape: np.random.default_rng(0).integers(0, 256, shape, "uint8")
        check_differences(contracting, m, "uint4", offset, zero_points, dtype)


def check_differences(contracting, m, kind, offset, zero_points=None, dtype=jnp.bfloat16):
    """Compare with the dense product of weights (code - offset - zero point + offset) * scale."""
    shape, tile = ((1, 128, 64), (32, 1)) if contracting == "rows" else ((1, 64, 128), (1, 32))
    x = jax.nn.one_hot(jnp.array([[5, 70, 127]])[:, :m], 128, dtype=dtype)
    w, codes, operands = example(kind, shape, tile, x)
    values = np.asarray(w.codes, np.float64)
    if codes.bits == 4 or zero_points is None:  # with an offset, codes are centered around 0
        codes = type(codes)(codes.bits, values=tuple(value - offset for value in codes.values))
    else:
        offset = 0
    values = values - offset
    each = lambda tiles: np.asarray(tiles, np.float64).repeat(tile[0], 1).repeat(tile[1], 2)
    if zero_points is not None:
        zero_point = zero_points(w.scale.shape)
        operands = operands._replace(zero_point=jnp.asarray(zero_point))
        values = values - (each(zero_point) - offset)
    problem = MatmulProblem(codes, shape[2], contracting, "float32", offset, print)
    if zero_points is None:
        problem = dataclasses.replace(problem, offset=0)
    assert matmul.can_compute(codes, problem.shape(operands))
    assert zero_points is None or matmul.takes_zero_points(operands, problem)
    dense = values * each(w.scale)
    if contracting == "columns":
        dense = dense.mT
    # Each row of the product is a row of the weight. A difference of one code would be 1/255.
    expected = np.asarray(x, np.float64) @ dense
    np.testing.assert_allclose(matmul.separate_product(operands, problem), expected, rtol=1e-6)


def test_different_kernels_have_different_names():
    sizes = matmul.ProductSizes(
        Codes(8, "int8"), True, 1, 4096, (4096,), 128, False, "bfloat16", "float32", "bfloat16"
    )
    others = {"tile": 256, "scale_dtype": "bfloat16", "out_dtype": "float32", "zero_dtype": "int8"}
    others["ns"] = 4096, 512
    changed = [sizes._replace(**{name: value}) for name, value in others.items()]
    names = [
        cuda_program.name_of(each, cuda_program.config_for(each)) for each in (sizes, *changed)
    ]
    assert len(set(names)) == len(names)
    assert all(name.replace("_", "").isalnum() for name in names)


def test_sizes_beyond_32_bit_offsets_are_rejected():
    shape = MatmulShape("columns", "bfloat16", m=1, k=2**26, n=16, tile=2**26)
    assert not matmul.can_compute(Codes(8, "int8"), shape)
    assert matmul.can_compute(Codes(8, "int8"), dataclasses.replace(shape, k=2**25, tile=2**25))


def test_ptx_claims_the_version_that_older_drivers_read():
    assert cuda_program.set_version("//\n.version 9.9\n.target sm_90\n") == (
        "//\n.version 8.1\n.target sm_90\n"
    )
    with pytest.raises(cuda_program.CompileError, match="PTX without a version"):
        cuda_program.set_version(".target sm_90")


@pytest.mark.parametrize("contracting", ["rows", "columns"])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_digits_hold_activations_of_any_size(contracting, size):
    shape, tile = ((1, 256, 64), (128, 1)) if contracting == "rows" else ((1, 64, 256), (1, 128))
    x = size * np.random.default_rng(3).normal(size=(1, 2, 256))
    x[0, 1, 5] *= 1000.0  # an outlier among its neighbors
    w, codes, operands = example("int4", shape, tile, jnp.asarray(x, jnp.bfloat16))
    problem = MatmulProblem(codes, shape[2], contracting, "float32", 0, print)
    actual = np.asarray(matmul.separate_product(operands, problem), np.float64)
    dense = w.codes * w.scale.repeat(tile[0], 1).repeat(tile[1], 2)
    exact = np.asarray(operands.x, np.float64) @ (dense if contracting == "rows" else dense.mT)
    assert np.linalg.norm(actual - exact) <= 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("contracting", ["rows", "columns"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("name", "m"), [("x", 2), ("x", 3), ("scale", 3)])
def test_nan_and_infinity_stay_in_their_row_and_column(contracting, value, name, m):
    shape, tile = ((1, 128, 64), (64, 1)) if contracting == "rows" else ((1, 64, 128), (1, 64))
    x = np.random.default_rng(2).normal(size=(1, m, 128))
    _, codes, operands = example("int8", shape, tile, jnp.asarray(x, jnp.bfloat16))
    arrays = {"x": np.array(operands.x), "scale": np.array(operands.scale)}
    # Put the value into one row of activations or into the scale of one channel.
    at = (0, 1, 5) if name == "x" else (0, 1, 7) if contracting == "rows" else (0, 7, 1)
    arrays[name][at] = value
    operands = operands._replace(**{name: jnp.asarray(array) for name, array in arrays.items()})
    problem = MatmulProblem(codes, shape[2], contracting, "bfloat16", 0, print)
    is_finite = np.isfinite(np.asarray(matmul.separate_product(operands, problem), np.float32))
    expected = np.ones((1, m, 64), bool)
    if name == "x":
        expected[:, 1] = False
    else:
        expected[:, :, 7] = False
    np.testing.assert_array_equal(is_finite, expected)


@pytest.mark.parametrize(
    ("kind", "m", "ns", "zero_dtype", "contracting"),
    [
        ("int4", 1, (64, 32, 128), None, "columns"),
        ("int4", 3, (96, 32, 160, 64), None, "rows"),
        ("int8", 2, (48, 16), None, "rows"),
        ("int8", 11, (16, 80, 32), "int8", "columns"),
    ],
)
def test_one_launch_computes_products_of_the_same_x(kind, m, ns, zero_dtype, contracting):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, m, 128)), jnp.bfloat16)
    operands, problems, expected = [], [], []
    for seed, n in enumerate(ns):
        shape, tile = ((2, 128, n), (64, 1)) if contracting == "rows" else ((2, n, 128), (1, 64))
        w, codes, each = example(kind, shape, tile, x, seed=seed)
        values = np.asarray(w.codes, np.float64)
        if zero_dtype is not None:
            zero_point = np.random.default_rng(seed).integers(0, 9, w.scale.shape, zero_dtype)
            each = each._replace(zero_point=jnp.asarray(zero_point))
            values = values - zero_point.repeat(tile[0], 1).repeat(tile[1], 2)
        dense = values * w.scale.repeat(tile[0], 1).repeat(tile[1], 2)
        expected.append(np.asarray(x, np.float64) @ (dense if contracting == "rows" else dense.mT))
        operands.append(each)
        problems.append(MatmulProblem(codes, shape[2], contracting, "float32", 0, print))
    layouts = [matmul.layout_of(*single) for single in zip(operands, problems, strict=True)]
    (layout,) = {layout._replace(ns=ns) for layout in layouts}
    config = matmul._call_config(layout, cuda_program.config_for(layout), batch=2)
    results = [jax.ShapeDtypeStruct((2, m, n), jnp.float32) for n in ns]
    call = call_library(
        matmul._TARGET, results, legacy_backend_config=config, custom_call_api_version=2
    )
    stored = (matmul._stored_arrays(each, layout) for each in operands)
    for out, exact in zip(call(x, *itertools.chain(*stored)), expected, strict=True):
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def launches(function, *args):
    """Return the number of products of each launch in a program that is lowered for a GPU."""
    lowered = jax.jit(vn.implicit(function)).trace(*args).lower(lowering_platforms=("cuda",))
    pattern = r"%\w+(?::(\d+))? = stablehlo.custom_call @__gpu\$xla.gpu.ptx"
    return [int(count or 1) for count in re.findall(pattern, lowered.as_text())]


def test_products_of_the_same_x_share_a_launch(monkeypatch):
    monkeypatch.setattr(cuda_program, "compile_ptx", lambda source, options: "PTX")

    def stored(n, qtype="int4", k=1024):
        w = jax.random.normal(jax.random.key(n), (n, k), jnp.bfloat16)
        return vn.quant.quantize(w, qtype, channelwise_axes=[0], tiled_axes={1: 128})

    x = jnp.ones((1, 1024), jnp.bfloat16)
    wide, narrow, other, integer = stored(512), stored(256), stored(320), stored(256, "int8")
    each = lambda x, *weights: [jnp.sin(x @ w.T) for w in weights]
    assert launches(each, x, wide, narrow, other) == [3]
    assert launches(each, x, wide, integer) == [1, 1]
    assert launches(each, x, *[stored(256 + 64 * i) for i in range(5)]) == [4, 1]
    assert launches(lambda x, w: (x @ w.T, jnp.cos(x @ w.T)), x, narrow) == [1]
    assert launches(lambda x, a, b: (x @ a.T, (x + 1) @ b.T), x, wide, narrow) == [1, 1]
    assert launches(lambda x, a, b: (x @ a.T) @ b.T, x, stored(1024), narrow) == [1, 1]
