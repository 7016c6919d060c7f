"""Multiply activations by a packed weight on a TPU.

The kernel is in `kernel.py`. It is imported on use, because importing Pallas is slow.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from .layout import blocks_of, layout_of


def can_compute(codes: Codes, shape: MatmulShape) -> bool:
    """Return whether the kernel supports the sizes and codes of a product.

    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> from veneer.kernels.tpu.matmul import can_compute
    >>> can_compute(Codes(8, "int8"), MatmulShape("rows", "float", m=1, k=256, n=64, tile=32))
    True
    """
    if not isinstance(shape.m, int) or shape.m == 0:  # m is symbolic in programs for export
        return False
    layout = layout_of(codes, shape)
    return layout is not None and blocks_of(layout) is not None


def compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Lower the kernel for one product, to check that this JAX version can.

    **Raises:** any error of Pallas.
    """
    avals = (None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    _compile(MatmulOperands(*avals), problem)


@functools.cache
def _compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    compute = jax.jit(functools.partial(product, problem=problem))
    compute.trace(operands).lower(lowering_platforms=("tpu",))


def product(
    operands: MatmulOperands, problem: MatmulProblem, *, interpret: bool = False
) -> jax.Array:
    """Multiply activations by a packed weight, without the terms of zero points and minima.

    **Arguments:**

    - `interpret`: run the kernel in Pallas's interpreter, on any device.

    **Returns:** `[B, M, N]`. The dtype is f32 if the caller must still add zero points or minima.
    """
    from . import kernel

    x, packed, scale, zero_point, _, minimum, *_ = operands
    layout = layout_of(problem.codes, problem.shape(operands))
    assert layout is not None
    is_complete = zero_point is None and minimum is None
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    return kernel.multiply(
        x,
        lax.bitcast_convert_type(packed, jnp.uint8),
        scale,
        problem.codes,
        layout,
        jnp.dtype(problem.out_dtype if is_complete else "float32"),
        interpret=interpret,
    )


def takes_zero_points(operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return False: the caller must subtract the zero points."""
    return False
