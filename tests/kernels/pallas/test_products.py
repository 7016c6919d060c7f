"""Products by Pallas kernels, which JAX runs here in the place of a device, against dense ones."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.cpu.driver import columns_contracted, rows_contracted, stored

from veneer.kernels import Codes, MatmulOperands, MatmulProblem
from veneer.kernels.cpu.kinds import BITS
from veneer.kernels.pallas import call

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = (*map(float, range(8)), *map(float, range(-8, 0)))
#: What four bits are worth, by what kernels do about it: those of no rule are looked up.
FOUR_BITS = {"int4": INT4, "uint4": tuple(map(float, range(16))), "e2m1": E2M1, "lookup4": None}
OTHERS = ("lookup1", "lookup2", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")

PLATFORMS = tuple(call.MODULES)


def example(kind, shape, tile, x, scale="float32", seed=0):
    """A stored matrix `[B, R, C]` in f64, with the operands of a product with it."""
    w = stored("lookup4" if kind in FOUR_BITS else kind, shape, tile, seed)
    if FOUR_BITS.get(kind):
        w = w._replace(kind="lookup4", table=np.asarray(FOUR_BITS[kind], np.float32))
    if scale == "float8_e8m0fnu":
        w = w._replace(scale=2.0 ** np.random.default_rng(1).integers(-3, 3, w.scale.shape))
    w = w._replace(scale=w.scale.astype(jnp.dtype(scale)))
    bits = BITS[w.kind]
    codes = Codes(8, kind) if bits == 8 else Codes(bits, values=tuple(w.table[: 2**bits].tolist()))
    packed = w.packed if bits < 8 else w.packed.view(getattr(ml_dtypes, w.kind, w.kind))
    return w, codes, MatmulOperands(x, jnp.asarray(packed), jnp.asarray(w.scale))


def assert_is_dense(platform, kind, m, shape, tile, contracting, dtype="float32", scale="float32"):
    k = shape[1 if contracting == "rows" else 2]
    x = jnp.asarray(np.random.default_rng(2).normal(size=(shape[0], m, k)), dtype)
    w, codes, operands = example(kind, shape, tile, x, scale)
    problem = MatmulProblem(codes, shape[2], contracting, dtype, 0, print)
    assert call.has_kernel(platform, codes, problem.shape(operands))
    actual = call.product(platform, operands, problem, interpret=True)
    assert actual.dtype == dtype
    contracted = rows_contracted if contracting == "rows" else columns_contracted
    expected, size = contracted(np.asarray(x, np.float64), w)
    # Of 16 bits the result is rounded, and so is a number times the scale of its tile.
    rtol = 1e-5 if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps)
    assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= rtol * size)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("kind", [*FOUR_BITS, *OTHERS])
@pytest.mark.parametrize("contracting", ["rows", "columns"])
def test_codes_of_every_kind(platform, kind, contracting):
    tile = (64, 1) if contracting == "rows" else (1, 64)
    assert_is_dense(platform, kind, 3, (1, 128, 192), tile, contracting)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("m", "shape", "tile"),
    [
        (1, (1, 256, 130), (256, 1)),  # channelwise, and a tail of n
        (5, (2, 96, 70), (32, 1)),  # smaller tiles than a block, and a batch
        (17, (1, 320, 33), (16, 33)),  # a byte with one code alone
        (3, (1, 288, 50), (96, 1)),  # a tile that is no power of two
        (70, (1, 300, 64), (300, 64)),  # one scale; tails of m and k
        (2, (1, 256, 256), (128, 128)),  # tiles along both sides
        (2, (1, 130, 64), (1, 32)),  # as a derivative has it: a scale for each term of the sum
        (130, (1, 1024, 20), (128, 1)),
        (1, (1, 4096, 40), (128, 1)),  # the sum in parts
    ],
)
@pytest.mark.parametrize("contracting", ["rows", "columns"])
def test_shapes_and_tiles(platform, m, shape, tile, contracting):
    batch, rows, columns = shape
    if contracting == "columns":
        shape, tile = (batch, columns, rows), tile[::-1]
    assert_is_dense(platform, "int4", m, shape, tile, contracting)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", [128, 32])
def test_activations_of_16_bits(platform, dtype, tile):
    assert_is_dense(platform, "int4", 4, (1, 256, 64), (tile, 1), "rows", dtype)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("scale", ["bfloat16", "float16", "float8_e8m0fnu"])
def test_scales_as_they_are_stored(platform, scale):
    assert_is_dense(platform, "e2m1", 4, (1, 64, 128), (1, 32), "columns", scale=scale)
