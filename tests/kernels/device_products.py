"""Products for the kernels of GPUs and TPUs, compared with dense ones."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kernels.cpu.driver import columns_contracted, rows_contracted, stored

from veneer.kernels import Codes, MatmulOperands, MatmulProblem
from veneer.kernels.common.problem import BITS

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = (*map(float, range(8)), *map(float, range(-8, 0)))
#: The values of codes of four bits. Those of "lookup4" are random.
FOUR_BITS = {"int4": INT4, "uint4": tuple(map(float, range(16))), "e2m1": E2M1, "lookup4": None}


def example(kind, shape, tile, x, scale="float32", seed=0):
    """Return a stored matrix `[B, R, C]` in f64, its codes, and the operands of a product."""
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


def assert_is_dense(
    module, product, kind, m, shape, tile, contracting, dtype="float32", scale="float32"
):
    """Check a product by a kernel against the dense one."""
    k = shape[1 if contracting == "rows" else 2]
    x = jnp.asarray(np.random.default_rng(2).normal(size=(shape[0], m, k)), dtype)
    w, codes, operands = example(kind, shape, tile, x, scale)
    problem = MatmulProblem(codes, shape[2], contracting, dtype, 0, print)
    assert module.can_compute(codes, problem.shape(operands))
    actual = product(operands, problem)
    assert actual.dtype == dtype
    contracted = rows_contracted if contracting == "rows" else columns_contracted
    expected, size = contracted(np.asarray(x, np.float64), w)
    # 16 bits round the result, and a number times the scale of its tile.
    rtol = 1e-5 if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps)
    assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= rtol * size)
