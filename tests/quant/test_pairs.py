"""The programs for GPUs, which compute neighbors in pairs, give the same bits as those for CPUs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import veneer as vn
from veneer import kernels
from veneer.quant import arrays as qarray
from veneer.quant.arrays import pairs
from veneer.quant.ops import operands

FORMATS = ("int4", "uint4", "nf4", "mxfp4", "nvfp4", "int2", "int1", "ternary", "int3", "int8")
# Shapes, channelwise axes, and tiled axes.
SHAPES = (
    ((64, 96), [1], {0: 32}),
    ((96, 64), [0], {1: 32}),
    ((32, 33), [1], {0: 32}),
    ((2, 32, 65), [0, 2], {1: 32}),
)


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


@pytest.fixture
def on_gpu(monkeypatch):
    """Compute arrays on this device as on a GPU, within this context."""

    @contextlib.contextmanager
    def use_gpu_programs():
        with monkeypatch.context() as patch:
            for module in (pairs, qarray, operands):
                patch.setattr(module, "runs_on_gpu", lambda: True)
            yield

    return use_gpu_programs


def dequantize(q):
    return jax.jit(lambda q: q.dequantize())(q)


@pytest.fixture
def assert_same(on_gpu):
    def check(q):
        expected = dequantize(q)
        with on_gpu():
            actual = dequantize(q)
        assert actual.dtype == q.dtype
        np.testing.assert_array_equal(bits(actual), bits(expected))

    return check


def quantized(qtype, shape, channelwise, tiled, dtype):
    size = vn.quant.get_format(qtype).tile_size
    tiled = {axis: size or tile for axis, tile in tiled.items()}
    x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    return vn.quant.quantize(x, qtype, channelwise_axes=channelwise, tiled_axes=tiled)


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_gpu_gives_the_same_bits(qtype, assert_same):
    dtypes = ("bfloat16", "float16", "float32", "bfloat16")
    for (shape, channelwise, tiled), dtype in zip(SHAPES, dtypes, strict=True):
        q = quantized(qtype, shape, channelwise, tiled, dtype)
        assert_same(q)
        if q.packing is not None:
            assert_same(jax.jit(vn.implicit(lambda q: q.mT))(q))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("qtype", ["int4", "nf4"])
def test_other_dtypes_give_the_same_bits(qtype, dtype, assert_same):
    for shape, channelwise, tiled in SHAPES[1:3]:
        assert_same(quantized(qtype, shape, channelwise, tiled, dtype))


@pytest.mark.parametrize(("shape", "tile"), [((4, 90), 3), ((4, 91), 7), ((3, 1), 1)])
def test_odd_tiles_along_the_packed_axis_give_the_same_bits(shape, tile, assert_same):
    q = quantized("uint4", shape, [0], {1: tile}, "bfloat16")
    assert q.zero_point is not None
    assert_same(q)


def test_minima_and_nonfinite_scales_give_the_same_bits(assert_same):
    q = quantized("int4", (64, 33), [1], {0: 32}, "bfloat16")
    scale = jnp.asarray(q.scale)
    scale = scale.at[0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf], scale.dtype))
    q = q.replace(scale=scale, minimum=jnp.linspace(-1, 1, scale.size).reshape(scale.shape))
    assert_same(q)


def test_empty_arrays_and_vectors_give_the_same_bits(assert_same):
    for shape in ((0, 64), (64, 0), (7,)):
        assert_same(vn.quant.quantize(jnp.ones(shape, jnp.bfloat16), "int4"))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_values_are_written_as_32_bit_words(dtype, transpose, on_gpu):
    q = quantized("int4", (64, 96), [1], {0: 32}, dtype)
    if transpose:
        q = vn.implicit(lambda q: q.mT)(q)
    program = lambda: jax.jit(lambda q: q.dequantize()).lower(q).as_text()
    word = "tensor<64x48xui32>"
    assert word not in program()
    with on_gpu():
        assert word in program()


@pytest.mark.parametrize(
    ("qtype", "dtype", "expected"),
    [
        ("int4", "bfloat16", True),
        ("nf4", "float16", True),
        ("int2", "bfloat16", True),
        ("int4", "float32", False),
        ("int3", "bfloat16", False),
        ("ternary", "bfloat16", False),
        ("int8", "bfloat16", False),
    ],
)
def test_pairs_need_16_bits_and_whole_bytes(qtype, dtype, expected):
    q = quantized(qtype, (64, 96), [1], {0: 32}, "bfloat16")
    assert pairs.can_compute_pairs(q, dtype) == expected


@pytest.mark.parametrize("shape", [(64, 96), (32, 33)])
def test_the_derivative_by_the_scale_is_the_same(shape, on_gpu):
    q = quantized("int4", shape, [1], {0: 32}, "bfloat16")
    weights = jax.random.normal(jax.random.key(1), shape)

    def gradient():
        loss = lambda scale: (q.replace(scale=scale).dequantize() * weights).sum()
        return np.asarray(jax.grad(loss)(jnp.asarray(q.scale)), np.float32)

    expected = gradient()
    with on_gpu():
        np.testing.assert_allclose(gradient(), expected, rtol=2e-2, atol=0.1)


def test_vmap_gives_the_same_bits(on_gpu):
    q = quantized("nf4", (3, 64, 33), [0, 2], {1: 32}, "bfloat16")
    expected = q.dequantize()
    with on_gpu():
        mapped = jax.vmap(lambda q: q.dequantize())(q)
    np.testing.assert_array_equal(bits(mapped), bits(expected))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("qtype", ["int4", "uint4", "mxfp4", "nf4"])
def test_products_by_xla_are_the_same(qtype, transpose, on_gpu):
    q = quantized(qtype, (64, 33), [1], {0: 32}, "bfloat16")
    if transpose:
        q = vn.implicit(lambda q: q.mT)(q)
    x = jax.random.normal(jax.random.key(1), (5, q.shape[0]), jnp.bfloat16)
    y = vn.quant.quantize(x, "int8", channelwise_axes=[0])

    def results():
        unscaled = operands.unscaled(q, jnp.bfloat16)
        codes = operands.int8_codes(q)[0] if q.format.is_integer else unscaled[1]
        with kernels.use("xla"):
            products = [vn.implicit(jnp.matmul)(left, q) for left in (x, y)]
        return jax.tree.map(bits, [*unscaled, codes, *products])

    expected = results()
    with on_gpu():
        assert jax.tree.all(jax.tree.map(np.array_equal, results(), expected))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("qtype", ["int4", "int2", "uint4"])
def test_sharded_arrays_are_computed_in_pairs(qtype, kind, on_gpu):
    kinds = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    q = quantized(qtype, (64, 96), [1], {0: 16}, "bfloat16")
    expected = bits(dequantize(q))
    for spec in (("a", "b"), (None, "b"), ("a", None)):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        sharded = jax.tree.map(lambda leaf, s=sharding: jax.device_put(leaf, s), q)
        with on_gpu(), jax.set_mesh(mesh):
            assert pairs.can_compute_pairs(sharded, q.dtype)
            x = dequantize(sharded)
            y = jax.jit(vn.implicit(lambda q: q.mT))(sharded)
            y = dequantize(y)
        np.testing.assert_array_equal(bits(x), expected)
        np.testing.assert_array_equal(bits(y), expected.T)
        assert x.sharding.is_equivalent_to(sharding, 2)


def test_only_gpus_compute_pairs(monkeypatch):
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert pairs.runs_on_gpu() == (platform == "gpu")
