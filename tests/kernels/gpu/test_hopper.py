"""Check the arguments and the configuration of the Hopper kernel.

A dense product replaces the kernel, because these tests run on a CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.device_products import example

from veneer.kernels import MatmulProblem
from veneer.kernels.gpu import hopper
from veneer.kernels.gpu.hopper import CONFIGS, FALLBACKS, Sizes, config_for, fits


def multiply_dense(sizes, kind, is_rows, out_dtype, config):
    """Return a function that replaces the kernel by a dense product and checks its arguments."""
    assert sizes.m % config.tile_m == 0
    assert fits(sizes, config)

    def multiply(x, codes, scale):
        assert (x.shape, x.dtype) == ((sizes.m, sizes.k), jnp.bfloat16)
        assert (scale.shape, scale.dtype) == ((sizes.k // sizes.tile, sizes.n), jnp.float32)
        assert codes.dtype == kind
        w = codes.astype(jnp.float32)
        w = (w if is_rows else w.T) * jnp.repeat(scale, sizes.tile, 0)
        return jnp.matmul(x.astype(jnp.float32), w, precision="highest").astype(out_dtype)

    return multiply


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
@pytest.mark.parametrize("contracting", ["rows", "columns"])
@pytest.mark.parametrize(
    ("kind", "tile", "scale", "has_one_scale"),
    [
        ("int4", 128, "bfloat16", False),
        ("int8", 512, "float32", False),
        ("int8", 512, "float32", True),
        ("float8_e4m3fn", 256, "float16", False),
    ],
)
def test_operands_have_the_layout_that_the_kernel_expects(
    contracting, kind, tile, scale, has_one_scale, monkeypatch
):
    from veneer.kernels.gpu import hopper_kernel

    monkeypatch.setattr(hopper_kernel, "kernel_for", multiply_dense)
    m, k, n = 100, 512, 256
    tiles = (tile, n if has_one_scale else 1)
    shape = (1, k, n)
    if contracting == "columns":
        shape, tiles = (1, n, k), tiles[::-1]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, m, k)), jnp.bfloat16)
    w, codes, operands = example(kind, shape, tiles, x, scale)
    problem = MatmulProblem(codes, shape[2], contracting, "float32", 0, print)
    assert hopper.can_compute(codes, problem.shape(operands))
    actual = hopper.product(operands, problem)
    dense = w.dense if contracting == "rows" else w.dense.mT
    np.testing.assert_allclose(actual, np.asarray(x, np.float64) @ dense, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("m", "n", "tile", "config"),
    [
        (33, 4096, 4096, CONFIGS[64]),
        (128, 4096, 128, CONFIGS[128]),
        (129, 4096, 128, CONFIGS[1 << 31]),
        (1024, 4096 + 128, 128, FALLBACKS[0]),  # the first config needs a multiple of 256 channels
        (1024, 4096 + 64, 128, None),
        (1024, 4096, 96, None),
    ],
)
def test_the_fastest_config_that_fits_is_chosen(m, n, tile, config):
    assert config_for(Sizes(m, 4096, n, 4, tile)) == config


def test_a_product_that_does_not_fit_is_rejected():
    x = jnp.zeros((1, 128, 96), jnp.bfloat16)
    _, codes, operands = example("int8", (1, 96, 64), (96, 1), x)
    problem = MatmulProblem(codes, 64, "rows", "bfloat16", 0, print)
    assert not hopper.can_compute(codes, problem.shape(operands))
